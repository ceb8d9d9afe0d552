"""Seals on a store so slow that their first uploads become old before the last upload ends."""

import asyncio

import pytest

from tests.support.faults import Call
from tests.support.logs import (
    COLD,
    append,
    closing,
    kill_while_sealing,
    opened,
    read_values,
    spoil_chunk,
    store_of,
    with_topic,
)
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import DamagedRecords
from tidelog.storage.seal import uploads
from tidelog.storage.store.memory import MemoryStore

AGE_S = 20.0
WIDE = "v" * 700
"""Two such records are more than a segment of 1,024 bytes."""


@pytest.fixture(autouse=True)
def short_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_AGE_MAX_S", AGE_S)
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 1)


def slow_down(log: Broker, seconds: float) -> None:
    """From now on, the upload of each segment takes so long."""

    def latency(call: Call) -> float:
        is_upload = call.verb == "create" and call.key.endswith(".parquet")
        return seconds if is_upload else 0.0

    store_of(log).latency = latency


async def commits_of(log: Broker) -> list[int]:
    """The number of segments of each commit to the table, the oldest first."""
    table = await log._log.tables.of(log.state.topic("t"))
    return [len(commit.added) for commit in reversed(await table.commits(100)) if commit.added]


@pytest.mark.parametrize(
    ("seconds", "commits"), [(0.0, [6]), (3.0, [3, 3]), (4.5, [2, 2, 2]), (19.0, [1] * 6)]
)
async def test_old_uploads_begin_another_commit(seconds: float, commits: list[int]) -> None:
    async with closing(await with_topic(MemoryStore(), COLD, partitions=6)) as log:
        for number in range(6):
            await append(log, "a", "b", partition=number)
        slow_down(log, seconds)
        assert await log.records.seal("t") == 12
        assert await commits_of(log) == commits
        assert log._log.sealer.counters.segments == 6
        assert not any(partition.tail for _, _, partition in log.state.partitions())
        slow_down(log, 0.0)
        for number in range(6):
            assert await read_values(log, partition=number) == ["a", "b"]


async def test_a_long_tail_is_sealed_segment_by_segment() -> None:
    async with closing(await opened(MemoryStore(), COLD)) as log:
        await log.topics.create("t", 1, {"segment.bytes": "1024"})
        for number in range(40):
            await append(log, f"{number}{WIDE}")
        slow_down(log, AGE_S)
        assert await log.records.seal("t") == 40
        assert len(await commits_of(log)) > 10
        slow_down(log, 0.0)
        assert log.state.partition("t", 0).sealed_end == 40
        assert await read_values(log) == [f"{number}{WIDE}" for number in range(40)]


async def test_damage_that_is_found_late_costs_its_partition_alone(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD, partitions=3)) as log:
        for number in range(3):
            await append(log, "a", partition=number)
        await spoil_chunk(inner, log.state.partition("t", 1).tail[0])
        slow_down(log, 0.9 * AGE_S)
        with pytest.raises(DamagedRecords):
            await log.records.seal("t")
        ends = [log.state.partition("t", number).sealed_end for number in range(3)]
        assert ends == [1, 0, 1]


async def test_records_that_arrive_during_a_seal_are_left_to_the_next() -> None:
    async with closing(await with_topic(MemoryStore(), COLD, partitions=2)) as log:
        for number in range(2):
            await append(log, "a", partition=number)
        slow_down(log, 0.9 * AGE_S)
        seal = asyncio.create_task(log.records.seal("t"))
        for _ in range(3):
            await asyncio.sleep(AGE_S)
            await append(log, "b", partition=1)
        assert await seal == 2
        assert log.state.partition("t", 1).sealed_end == 1
        slow_down(log, 0.0)
        assert await read_values(log, partition=1) == ["a", "b", "b", "b"]


async def test_old_segments_are_replaced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = MemoryStore(now_ms=TIME_MS)
    async with closing(await with_topic(inner, COLD, configs={"segment.bytes": "1024"})) as log:
        values = [f"{number}{WIDE}" for number in range(6)]
        for value in values:
            await append(log, value)

        await kill_while_sealing(log)
        (count,) = await commits_of(log)
        assert count > 1
        await asyncio.sleep(AGE_S + 1)
        slow_down(log, AGE_S)
        await log.records.seal("t")
        assert await commits_of(log) == [count, *[1] * count]
        assert log.state.partition("t", 0).sealed_end == len(values)
        slow_down(log, 0.0)
        assert await read_values(log) == values


async def test_a_cancelled_seal_stays_cancelled() -> None:
    async with closing(await with_topic(MemoryStore(), COLD)) as log:
        await append(log, "a")
        slow_down(log, AGE_S)
        sealing = asyncio.create_task(log.records.seal("t"))
        await asyncio.sleep(1.0)
        sealing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sealing
        assert log.state.partition("t", 0).sealed_end == 0
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 1
