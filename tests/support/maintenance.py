"""Logs to care for, on a store in memory whose clock tests move."""

import asyncio
import contextlib
from collections.abc import Sequence

from tests.support.clock import ManualClock
from tests.support.faults import FaultyStore
from tests.support.logs import COLD, append, opened
from tests.support.records import TIME_MS
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore

_names = iter(range(1_000_000, 2_000_000))


async def cluster_on(inner: ObjectStore, *, report_damage: bool = True) -> MaintenanceSession:
    """One command's view, over a faulty way of its own; its clock is the loop's."""
    clock = ManualClock(next(_names), loop_time=asyncio.get_running_loop().time)
    return await MaintenanceSession.open(FaultyStore(inner), clock, report_damage=report_damage)


@contextlib.asynccontextmanager
async def caring(inner: ObjectStore, *, report_damage: bool = True):
    cluster = await cluster_on(inner, report_damage=report_damage)
    try:
        yield cluster
    finally:
        await cluster.close()


async def assert_clean(inner: ObjectStore, grace: Grace) -> None:
    """A scrub finds no damage."""
    async with caring(inner) as cluster:
        report = await scrub(cluster, None, grace)
        assert [finding for finding in report.findings if finding.is_damage] == []


def way_of(cluster: MaintenanceSession) -> FaultyStore:
    assert isinstance(cluster.store, FaultyStore)
    return cluster.store


async def log_with(
    inner: MemoryStore,
    segments: Sequence[Sequence[str]],
    *,
    partitions: int = 1,
    settings: LogSettings = COLD,
    **configs: str,
) -> Broker:
    """Topic `t`, each list of values one segment of every partition, an hour between segments.

    The hour is by the store's clock and the records' own. The clock ends where the last one was
    written.
    """
    log = await opened(inner, settings)
    named = {name.replace("_", "."): value for name, value in configs.items()}
    await log.topics.create("t", partitions, named)
    for hour, values in enumerate(segments):
        inner.now_ms = TIME_MS + hour * 3_600_000
        if hour:
            assert isinstance(log.clock, ManualClock)
            log.clock.advance(3600)
        for number in range(partitions):
            stamps = [inner.now_ms + i for i in range(len(values))]
            await append(log, *values, partition=number, timestamps=stamps)
        await log.records.seal("t")
    return log
