"""Brokers' views of one WAL, each over its own faulty way to a store that they share."""

import asyncio
import itertools
from collections.abc import Callable

from storage import keys
from storage.entry import Draft
from storage.objectstore import ObjectStore
from storage.wal import Wal, WalSettings
from tests.support.clock import ManualClock
from tests.support.faults import Call, FaultyStore, Plan
from tests.support.records import creating, draft, fold, request, rows, tail_values

CLUSTER_ID = "c0ffee"
AGE_S = WalSettings().view_age_max_s
HOUR_S = 3600.0
_numbers = itertools.count(1)


def wal_on(
    inner: ObjectStore,
    plan: Plan = lambda _: None,
    *,
    latency: Callable[[Call], float] | None = None,
    settings: WalSettings | None = None,
) -> Wal:
    """A view that is not open yet; its clock is the loop's."""
    clock = ManualClock(next(_numbers), loop_time=asyncio.get_running_loop().time)
    store = FaultyStore(inner, plan, latency=latency)
    return Wal(store, clock, f"b{clock.name}", settings or WalSettings())


async def opened(
    inner: ObjectStore,
    plan: Plan = lambda _: None,
    *,
    latency: Callable[[Call], float] | None = None,
    settings: WalSettings | None = None,
) -> Wal:
    wal = wal_on(inner, plan, latency=latency, settings=settings)
    await wal.open(CLUSTER_ID)
    return wal


async def with_topic(inner: ObjectStore) -> Wal:
    """A broker that founded the cluster and made topic `t` with two partitions: entry 1."""
    wal = await opened(inner)
    await wal.commit(creating(wal.clock, partitions=2))
    return wal


def one(wal: Wal, *values: str) -> Draft:
    """A draft of one request of these values to `t`-0."""
    return draft(request(wal.clock, {0: rows(*values)}))


def store_of(wal: Wal) -> FaultyStore:
    assert isinstance(wal.store, FaultyStore)
    return wal.store


def suspend(wal: Wal, seconds: float) -> None:
    """This broker's machine was asleep; nothing else knows of it."""
    assert isinstance(wal.clock, ManualClock)
    wal.clock.advance(seconds)


async def checkpoint_and_collect(wal: Wal, inner: ObjectStore) -> None:
    """What a collector does after the retention: of the WAL only the newest entry is kept."""
    newest = await wal.checkpoint()
    await inner.delete([keys.wal(seq) for seq in range(1, newest)])


async def values_of(inner: ObjectStore) -> list[str]:
    """`t`-0 as the plainest reader finds it."""
    state, _ = await fold(inner, CLUSTER_ID)
    return [str(value, "ascii") for value in await tail_values(inner, state, "t", 0) if value]


def flip(body: bytes, at: int) -> bytes:
    """The bytes with one bit turned."""
    return body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]
