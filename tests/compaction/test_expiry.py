"""Previews of what retention would delete, compared with what it deletes after the change."""

import random

import pytest

from tests.compaction.test_retention import retained, starts
from tests.support.clock import ManualClock
from tests.support.logs import append, closing
from tests.support.maintenance import log_with
from tests.support.records import TIME_MS
from tidelog.compaction.expiry import Expiry, expiries
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore

HOUR_MS = 3_600_000
SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"]]


async def expired(log: Log, **changes: str | None) -> list[Expiry]:
    topic = log.state.topic("t")
    named = {name.replace("_", "."): value for name, value in changes.items()}
    return await expiries(log, topic, topic.config_after(named))


async def log_of_three_hours(inner: MemoryStore, **configs: str) -> Log:
    """Three segments in each of two partitions, an hour between them, and a tail; it is the third
    hour now."""
    log = await log_with(inner, SEGMENTS, partitions=2, **configs)
    await append(log, "tail", partition=1, timestamps=[inner.now_ms])
    assert isinstance(log.clock, ManualClock)
    inner.now_ms = TIME_MS + 3 * HOUR_MS
    log.clock.advance((inner.now_ms - log.clock.now_ms()) / 1000)
    return log


@pytest.mark.parametrize("hours", [0.5, 1.5, 2.5, 4])
async def test_the_records_of_a_lower_retention_are_those_that_it_deletes(hours: float) -> None:
    inner = MemoryStore()
    async with closing(await log_of_three_hours(inner)) as log:
        retention_ms = str(int(hours * HOUR_MS))
        preview = await expired(log, retention_ms=retention_ms)
        assert await starts(log) == [0, 0]
        await log.alter_topic("t", {"retention.ms": retention_ms})
        await log.seal("t")
        done = {cut.partition: cut for cut in await retained(inner)}
        assert {expiry.partition for expiry in preview} == done.keys()
        for expiry in preview:
            assert (expiry.start, expiry.end) == (0, done[expiry.partition].log_start_offset)
            assert expiry.records == done[expiry.partition].rows
            assert expiry.size > 0


async def test_a_change_counts_only_what_it_adds(inner: MemoryStore) -> None:
    two_hours, one_hour = str(5 * HOUR_MS // 2), str(3 * HOUR_MS // 2)
    async with closing(await log_of_three_hours(inner, retention_ms=two_hours)) as log:
        assert [expiry[:4] for expiry in await expired(log, retention_ms=one_hour)] == [
            (0, 2, 4, 2),
            (1, 2, 4, 2),
        ]
        assert await expired(log, retention_ms=two_hours) == []
        assert await expired(log, retention_ms=str(9 * HOUR_MS)) == []
        assert await expired(log, segment_ms="60000") == []
        assert await expired(log, retention_ms="1", cleanup_policy="compact") == []
        await log.delete_records("t", 0, 3)
        assert [expiry[:4] for expiry in await expired(log, retention_ms=one_hour)] == [
            (0, 3, 4, 1),
            (1, 2, 4, 2),
        ]


async def test_records_that_only_the_policy_kept(inner: MemoryStore) -> None:
    log = await log_of_three_hours(inner, cleanup_policy="compact", retention_ms="1")
    async with closing(log):
        preview = await expired(log, cleanup_policy="compact,delete")
        assert [(expiry.partition, expiry.records) for expiry in preview] == [(0, 6), (1, 7)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_lower_size_of_a_partition(inner: MemoryStore, seed: int) -> None:
    """The tail counts as if it was sealed: its segment differs a little from its bytes in the WAL,
    so only partitions without a tail are compared exactly."""

    draw = random.Random(seed)
    async with closing(await log_of_three_hours(inner)) as log:
        table = await log.tables.of(log.state.topic("t"))
        sizes = (await table.segments(0)).columns.size
        retention_bytes = draw.randrange(1 + int(sizes.sum()))
        preview = {
            expiry.partition: expiry
            for expiry in await expired(log, retention_bytes=str(retention_bytes))
        }
        await log.alter_topic("t", {"retention.bytes": str(retention_bytes)})
        done = {cut.partition: cut for cut in await retained(inner)}
        if 0 in done:
            assert preview[0].records == done[0].rows
            assert preview[0].size == done[0].size
        else:
            assert 0 not in preview
