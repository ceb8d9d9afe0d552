"""Maintenance crashes at each call of the store and each commit to a table (I7, I9).

It crashes before and after each of them. Readers see the same log before and after, a scrub is
clean, and the next run ends with the result of a run without a crash.

Seals die at every step in test_log_crashes, collections of every kind of garbage in test_collect.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import pytest

from tests.support.faults import Call
from tests.support.logs import COLD, closing, opened, read_table
from tests.support.maintenance import assert_clean, caring, way_of
from tests.support.records import TIME_MS
from tests.support.vloop import run
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.memory import MemoryManifest

HOUR_MS = 3_600_000
GRACE = Grace(wal_ms=HOUR_MS, table_ms=4 * HOUR_MS)
SEGMENTS = 6

Work = Callable[[MaintenanceSession], Awaitable[object]]


async def collecting(cluster: MaintenanceSession) -> None:
    await collect(cluster, await plan(cluster, GRACE))


async def all_of_it(cluster: MaintenanceSession) -> None:
    """As `tidelog maintain`."""
    await retain(cluster, None, is_dry=False)
    await compact(cluster, None, is_dry=False)
    await collecting(cluster)


WORK: dict[str, Work] = {
    "merge": lambda cluster: compact(cluster, ["m"], is_dry=False),
    "compaction": lambda cluster: compact(cluster, ["c"], is_dry=False),
    "retention": lambda cluster: retain(cluster, None, is_dry=False),
    "delete-records": lambda cluster: delete_records(cluster, "m", {0: 5, 1: 7}, is_dry=False),
    "collection": collecting,
    "all of it": all_of_it,
}

_dying: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("_dying", default=None)


@pytest.fixture(autouse=True)
def _commits_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit to a table in memory is no call of the store: here it is a step, too."""
    real = MemoryManifest.replace

    async def replace(self: MemoryManifest, *args, **named) -> None:
        step = _dying.get()
        if step is not None:
            await step()
        await real(self, *args, **named)
        if step is not None:
            await step()

    monkeypatch.setattr(MemoryManifest, "replace", replace)


async def log_to_care_for(inner: MemoryStore) -> Broker:
    """`m` to merge and to retain, `c` to compact, and garbage of an hour and of a day ago."""
    log = await opened(inner, COLD)
    inner.now_ms = TIME_MS
    await log.topics.create("m", 2, {"retention.ms": str(9 * HOUR_MS)})
    await log.topics.create("c", 1, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
    for hour in range(SEGMENTS):
        await write(log, inner.now_ms, hour)
        async with caring(inner) as cluster:
            await plan(cluster, GRACE)  # for its checkpoint
        if hour == 1:
            async with caring(inner) as cluster:
                await delete_records(cluster, "m", {0: 1, 1: 2}, is_dry=False)
        inner.now_ms += 2 * HOUR_MS
    return log


async def write(log: Broker, at_ms: int, number: int) -> None:
    await log.refresh()  # the broker learns the store's time, which bounds timestamps
    for name in ("m", "c"):
        topic = log.state.topic(name)
        for partition in range(len(topic.partitions)):
            keys: list[bytes | None] = [b"a", b"%d" % number]
            values: list[bytes | None] = [b"%d" % number, b"x"]
            rows = Rows([at_ms, at_ms], keys, values)
            await log.records.append(topic, [(partition, rows)], size=9, is_json=False)
        await log.records.seal(name)


async def contents(inner: MemoryStore) -> dict[str, list[tuple[int, bytes]]]:
    """Return the records by partition that a broker serves which starts now."""
    log = await opened(inner, COLD)
    rows_by_partition = {}
    async with closing(log):
        for name, number in (("m", 0), ("m", 1), ("c", 0)):
            start = (await log.records.offsets(name, number)).log_start_offset
            table = await read_table(log, topic=name, partition=number, offset=start)
            columns = table.select(["offset", "key"]).to_pydict().values()
            rows_by_partition[f"{name}-{number}"] = list(zip(*columns, strict=True))
    return rows_by_partition


async def die(inner: MemoryStore, work: Work, step: int) -> int:
    """Do the work and be killed at `step`; how many steps were left to it."""
    async with caring(inner) as cluster:
        way, remaining_steps = way_of(cluster), step

        def count(_: Call | None = None) -> None:
            nonlocal remaining_steps
            remaining_steps -= 1
            if remaining_steps < 0:
                way.kill()

        async def commit() -> None:
            count()
            if way.is_dead:
                await asyncio.Event().wait()

        way.plan = count

        async def dying() -> None:
            _dying.set(commit)
            await work(cluster)

        task = asyncio.create_task(dying())
        await asyncio.wait([task], timeout=60)
        if remaining_steps >= 0:
            await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return remaining_steps


@pytest.mark.parametrize("name", WORK)
def test_i7_i9_next_run_finishes_maintenance_that_crashed_at_any_step(name: str) -> None:
    work = WORK[name]

    async def living() -> tuple[dict, dict]:
        inner = MemoryStore()
        async with closing(await log_to_care_for(inner)):
            old_contents = await contents(inner)
            assert await die(inner, work, 10_000) >= 0
            await assert_clean(inner, GRACE)
            return old_contents, await contents(inner)

    old_contents, new_contents = run(living)
    assert (old_contents == new_contents) is (name in ("merge", "collection"))

    async def dying(step: int) -> bool:
        inner = MemoryStore()
        async with closing(await log_to_care_for(inner)):
            remaining_steps = await die(inner, work, step)
            rows_by_partition = await contents(inner)
            for partition, rows in rows_by_partition.items():
                assert set(new_contents[partition]) <= set(rows) <= set(old_contents[partition])
                assert name == "all of it" or rows in (
                    old_contents[partition],
                    new_contents[partition],
                )
                assert rows == sorted(rows)
            await assert_clean(inner, GRACE)
            async with caring(inner) as cluster:
                await work(cluster)
            assert await contents(inner) == new_contents
            await assert_clean(inner, GRACE)
            if name == "retention":
                async with caring(inner) as cluster:
                    assert await retain(cluster, None, is_dry=False) == []
            return remaining_steps >= 0

    step = 0
    while not run(lambda: dying(step)):  # noqa: B023
        step += 1 if name != "all of it" else 5  # whose parts are above
    assert step > 3
