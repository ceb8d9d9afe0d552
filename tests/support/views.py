"""Brokers' views of one WAL, each over its own faulty way to a store that they share."""

import asyncio
import itertools
from collections.abc import Callable
from typing import NamedTuple

from tests.support.clock import ManualClock
from tests.support.faults import Call, FaultyStore, Plan
from tests.support.records import creating, draft, fold, request, rows, tail_values
from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalSettings

CLUSTER_ID = "c0ffee"
AGE_S = Bounds().view_age_ms / 1000
HOUR_S = 3600.0
_numbers = itertools.count(1)


class Unopened(NamedTuple):
    """A view that is not open yet: what goes wrong while it opens can be planned."""

    store: FaultyStore
    clock: ManualClock
    settings: WalSettings

    async def open(self, cluster_id: str | None = None) -> WalView:
        name = f"b{self.clock.name}"
        return await WalView.open(
            self.store, self.clock, name, self.settings, cluster_id=cluster_id
        )


def wal_on(
    inner: ObjectStore,
    plan: Plan = lambda _: None,
    *,
    latency: Callable[[Call], float] | None = None,
    settings: WalSettings | None = None,
) -> Unopened:
    """A view that is not open yet; its clock is the loop's."""
    clock = ManualClock(next(_numbers), loop_time=asyncio.get_running_loop().time)
    store = FaultyStore(inner, plan, latency=latency)
    return Unopened(store, clock, settings or WalSettings())


async def opened(
    inner: ObjectStore,
    plan: Plan = lambda _: None,
    *,
    latency: Callable[[Call], float] | None = None,
    settings: WalSettings | None = None,
) -> WalView:
    return await wal_on(inner, plan, latency=latency, settings=settings).open(CLUSTER_ID)


async def with_topic(inner: ObjectStore) -> WalView:
    """A broker that founded the cluster and made topic `t` with two partitions: entry 1."""
    wal = await opened(inner)
    await wal.commit(creating(wal.clock, partitions=2))
    return wal


def one(wal: WalView, *values: str) -> Draft:
    """A draft of one request of these values to `t`-0."""
    return draft(request(wal.clock, {0: rows(*values)}))


def store_of(wal: WalView | Unopened) -> FaultyStore:
    assert isinstance(wal.store, FaultyStore)
    return wal.store


def suspend(wal: WalView | Unopened, seconds: float) -> None:
    """Suspend this broker's machine alone."""
    assert isinstance(wal.clock, ManualClock)
    wal.clock.advance(seconds)


async def checkpoint_and_collect(wal: WalView, inner: ObjectStore) -> None:
    """Collect as after the retention: of the WAL only the newest entry is kept."""
    newest = await wal.checkpoint()
    await inner.delete([object_keys.wal(seq) for seq in range(1, newest)])


async def values_of(inner: ObjectStore) -> list[str]:
    """`t`-0 as the plainest reader finds it."""
    state, _ = await fold(inner, CLUSTER_ID)
    return [str(value, "ascii") for value in await tail_values(inner, state, "t", 0) if value]


def flip(body: bytes, position: int) -> bytes:
    """The bytes with one bit turned."""
    return body[:position] + bytes([body[position] ^ 0x10]) + body[position + 1 :]
