"""Brokers for reproductions: a store with the loop's clock, and what the log holds of the acks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.clock import ManualClock
from tests.support.faults import FaultyStore
from tests.support.logs import append
from tests.support.records import TIME_MS
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.wal_objects import WalSettings

IDLE_S = 1e6
Acked = dict[int, str]
"""Values of acknowledged records of `t`-0, by their offset."""


class NotPrepared(Exception):
    """A reproduction did not come to the point that it tests. No xfail expects this."""


def given(is_met: object, problem: str) -> None:
    if not is_met:
        raise NotPrepared(problem)


class LoopStore(MemoryStore):
    """A store in memory; the virtual time of the loop stamps its objects."""

    @property
    def now_ms(self) -> int:
        return TIME_MS + int(asyncio.get_running_loop().time() * 1000)

    @now_ms.setter
    def now_ms(self, _: int) -> None:
        """Only the loop moves it."""


def loop_clock(name: int) -> ManualClock:
    return ManualClock(name, start_ms=TIME_MS, loop_time=asyncio.get_running_loop().time)


def way(store: ObjectStore) -> ObjectStore:
    """A process' own way to a store in memory; all of them share its tables."""
    return FaultyStore(store) if isinstance(store, MemoryStore) else store


async def broker(
    store: ObjectStore, clock: Clock, name: str = "b", *, view_age_max_s: float = 600.0
) -> Broker:
    """An open broker that does nothing by itself. On a folder its tables are real ones."""
    view_age_ms = int(view_age_max_s * 1000)
    wal = WalSettings(Bounds(view_age_ms, max(4 * view_age_ms, 4000), file_grace_ms=0))
    settings = LogSettings(wal=wal, is_sealing=False, poll_interval_s=IDLE_S)
    return await Broker.open(way(store), settings, clock=clock, name=name, cluster_id="c0ffee")


async def produce(log: Broker, value: str, acked: Acked) -> None:
    """Send one record; note it if the broker acknowledges it. A refusal is a good answer too."""
    given("t" in log.state.topics, "the broker knows the topic")
    with contextlib.suppress(LogError):
        placed = await append(log, value) or []
        acked |= {placement.base_offset: value for placement in placed}


async def held(store: ObjectStore, clock: Clock) -> Acked:
    """All records of `t`-0 that a broker which starts now serves."""
    log = await broker(store, clock, "fresh")
    try:
        return await served(log)
    finally:
        await log.close()


async def served(log: Broker, partition: int = 0) -> Acked:
    """All records of a partition that this broker serves, from its log start on."""
    records: Acked = {}
    offset = log.state.partition("t", partition).log_start_offset
    while True:
        fetched = await log.records.fetch("t", partition, offset, bytes_max=1 << 20)
        if not fetched.pieces:
            return records
        for piece in fetched.pieces:
            rows = piece.batch.to_pylist()
            records |= {row["offset"]: str(row["value"], "utf-8") for row in rows}
        offset = fetched.next_offset


def assert_kept(acked: Acked, records: Acked) -> None:
    """Every acknowledged record lies where its acknowledgement says."""
    lost = {offset: value for offset, value in acked.items() if records.get(offset) != value}
    assert not lost, f"acknowledged, and not in the log: {lost}; the log: {records}"


async def collected(store: ObjectStore, clock: Clock, grace: Grace) -> int:
    """One run of collection by a process that chose this grace, unless it is refused."""
    with contextlib.suppress(LogError):
        cluster = await MaintenanceSession.open(way(store), clock)
        try:
            return await collect(cluster, await plan(cluster, grace))
        finally:
            await cluster.close()
    return 0


@contextlib.asynccontextmanager
async def ending(*logs: Broker) -> AsyncIterator[None]:
    """Close the brokers, also where their log is broken."""
    try:
        yield
    finally:
        for log in logs:
            with contextlib.suppress(LogError):
                await log.close()
