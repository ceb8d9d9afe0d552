"""Tails as segments: the same bytes, whether the records are in memory, in the WAL or in both."""

import asyncio
import random
import threading
from collections.abc import Sequence

import pyarrow as pa
import pytest

from tests.support.logs import COLD, closing, opened, spoil_chunk, store_of, with_topic
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import LoseRecords, MoveLogStart
from tidelog.storage.core.errors import Corrupt, DamagedRecords
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.seal import encode, tail_windows
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.store.memory import MemoryStore

PARTITIONS = 3

Sealed = dict[int, list[tuple[int, int, bytes]]]
"""By partition: base offset, end offset and bytes of each segment."""


async def fill(log: Broker, draw: random.Random, requests: int, *, is_json: bool = True) -> None:
    """Requests of few and many records, with keys, headers and nulls."""
    topic = log.state.topic("t")
    for _ in range(requests):
        count = draw.choice([1, 1, 2, 7, 300])
        values = [
            draw.choice([None, b"%d" % draw.getrandbits(60), b'"' + b"x" * 200 + b'"'])
            for _ in range(count)
        ]
        keys = [draw.choice([None, b"k%d" % draw.randrange(5)]) for _ in range(count)]
        headers = [draw.choice([None, [("h", b"1"), ("h", None)]]) for _ in range(count)]
        stamps = [TIME_MS + draw.randrange(10**6) for _ in range(count)]
        rows = Rows(stamps, keys, values, draw.choice([None, headers]))
        place = draw.randrange(PARTITIONS)
        await log.records.append(topic, [(place, rows)], size=100, is_json=is_json)


async def lose(log: Broker, partition: int, base: int, end: int) -> None:
    topic_id = log.state.topic("t").topic_id
    await log._log.submit(LoseRecords(topic_id, partition, base, end))


async def encoded(
    log: Broker, ranges: dict[int, tuple[int, int]], damage: dict[int, Corrupt] | None = None
) -> Sealed:
    """The segments that a sealer would upload."""
    tail_segments = TailSegments(log._log.reader, log.clock, lambda: log.state.level)
    segments_by_number: Sealed = {number: [] for number in ranges}
    async for segment in tail_segments.encoded(
        log.state.topic("t"), ranges, {} if damage is None else damage
    ):
        file = segment.file
        segments_by_number[file.partition].append(
            (file.base_offset, file.end_offset, bytes(segment.body))
        )
    tail_segments.close()
    return segments_by_number


async def expected(log: Broker, number: int, base: int, end: int) -> list[tuple[int, int, bytes]]:
    """The plainest way: read as a consumer does, and encode each answer."""
    topic = log.state.topic("t")
    config = topic_configs.effective(topic.configs)
    expected_segments, offset = [], base
    while offset < end:
        result = await log._log.reader.read(topic, number, offset, ReadBounds(config.segment_bytes))
        upto = min(result.next_offset, end)
        batches: list[pa.RecordBatch] = []
        for piece in result.pieces:
            offsets = piece.batch.column("offset").to_numpy()
            batches.append(piece.batch.slice(0, int((offsets < end).sum())))
        batches = [batch for batch in batches if batch.num_rows]
        if not batches:
            break
        is_json = all(piece.is_json for piece in result.pieces)
        segment = segments.write(batches, codec=config.compression_type, is_json=is_json)
        expected_segments.append((base, upto, bytes(memoryview(segment.body))))
        base = offset = upto
    return expected_segments


def ends_of(log: Broker) -> dict[int, tuple[int, int]]:
    partitions = log.state.topic("t").partitions
    return {
        number: (partition.sealed_end, partition.high_watermark)
        for number, partition in enumerate(partitions)
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("segment_bytes", [1024, 40_000, 64 * 1024 * 1024])
async def test_segments_are_the_same_from_memory_and_from_the_wal(
    monkeypatch: pytest.MonkeyPatch, seed: int, segment_bytes: int
) -> None:
    draw, stamp = random.Random(seed), ("CreateTime", "LogAppendTime")[seed % 2]
    # Small windows and ranges, so that a short tail has many of them.
    monkeypatch.setattr(tail_windows, "WINDOW_BYTES", draw.choice([1000, 20_000, 1 << 25]))
    monkeypatch.setattr(tail_windows, "GAP_BYTES_MAX", draw.choice([0, 500, 1 << 18]))
    monkeypatch.setattr(tail_windows, "RANGE_BYTES_MAX", draw.choice([1, 5000, 1 << 23]))
    monkeypatch.setattr(encode, "JOB_BYTES", draw.choice([1, 1 << 24]))
    monkeypatch.setattr(encode, "TOGETHER_BYTES_MAX", draw.choice([1, 1 << 27]))
    monkeypatch.setattr(segments, "GROUP_ROWS", draw.choice([100, 10_000]))
    inner = MemoryStore()
    configs = {"segment.bytes": str(segment_bytes), "message.timestamp.type": stamp}
    warm = await with_topic(inner, partitions=PARTITIONS, configs=configs)
    cold = await opened(inner, COLD)
    partial = await opened(inner, COLD._replace(tail_cache_bytes=draw.choice([5000, 60_000])))
    async with closing(warm, cold, partial):
        await partial._log.wal.refresh()
        for _ in range(3):
            await fill(draw.choice([warm, partial]), draw, 12)
            await warm._log.wal.refresh()
            await partial._log.wal.refresh()
        number = draw.randrange(PARTITIONS)
        end = warm.state.partition("t", number).high_watermark
        base = draw.randrange(end)
        await lose(warm, number, base, draw.randrange(base, end) + 1)
        await fill(warm, draw, 6)
        for log in (cold, partial):
            await log._log.wal.refresh()
        ranges = ends_of(cold)
        want = {
            number: await expected(cold, number, base, end)
            for number, (base, end) in ranges.items()
        }
        for log in (warm, cold, partial):
            assert await encoded(log, ranges) == want
        middle = {number: (0, draw.randrange(1, end + 1)) for number, (_, end) in ranges.items()}
        segments_by_number = await encoded(partial, middle)
        for number, (_, last) in middle.items():
            assert segments_by_number[number] == await expected(cold, number, 0, last)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_a_segment_is_json_if_all_its_records_are(cache_bytes: int) -> None:
    log = await opened(MemoryStore(), COLD._replace(tail_cache_bytes=cache_bytes))
    async with closing(log):
        await log.topics.create("t", PARTITIONS, {})
        for number, kinds in enumerate(([True, True], [False, True], [True, False])):
            for is_json in kinds:
                rows = Rows([TIME_MS], [None], [b"1"])
                part = [(number, rows)]
                await log.records.append(log.state.topic("t"), part, size=9, is_json=is_json)
        for number, partition_segments in (await encoded(log, ends_of(log))).items():
            ((_, _, body),) = partition_segments
            footer = segments.read_footer(memoryview(body), len(body), "segment")
            assert footer.is_json == (number == 0)


async def test_damage_ends_its_partition_and_no_other(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD, partitions=PARTITIONS)) as log:
        for _ in range(3):
            for number in range(PARTITIONS):
                rows = Rows([TIME_MS] * 2, [None] * 2, [b"a", b"b"])
                await log.records.append(
                    log.state.topic("t"), [(number, rows)], size=9, is_json=False
                )
        await spoil_chunk(inner, log.state.partition("t", 1).tail[1])
        await inner.delete([log.state.partition("t", 2).tail[0].object_key])
        damage: dict[int, Corrupt] = {}
        segments_by_number = await encoded(log, ends_of(log), damage)
        assert [segment[:2] for segment in segments_by_number[0]] == [(0, 6)]
        assert [segment[:2] for segment in segments_by_number[1]] == [(0, 2)]
        assert segments_by_number[2] == []
        for number, span in ((1, (2, 4)), (2, (0, 2))):
            error = damage[number]
            assert isinstance(error, DamagedRecords)
            assert (error.partition, error.offset, error.end_offset) == (number, *span)
        assert "does not exist" in str(damage[2])


async def test_damaged_records_below_the_log_start_have_no_rows(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD)) as log:
        for value in (b"a", b"b", b"c"):
            rows = Rows([TIME_MS] * 2, [None] * 2, [value] * 2)
            await log.records.append(log.state.topic("t"), [(0, rows)], size=9, is_json=False)
        await spoil_chunk(inner, log.state.partition("t", 0).tail[0])
        await log._log.submit(MoveLogStart(log.state.topic("t").topic_id, 0, 2))
        damage: dict[int, Corrupt] = {}
        ((base, end, body),) = (await encoded(log, ends_of(log), damage))[0]
        footer = segments.read_footer(memoryview(body), len(body), "segment")
        assert (base, end, damage) == (0, 6, {})
        assert [(group.base_offset, group.rows) for group in footer.groups] == [(2, 4)]


async def test_whole_tails_are_read_in_few_requests() -> None:
    """64 chunks of each of three partitions, in 64 objects: each object is read once."""
    async with closing(await with_topic(MemoryStore(), COLD, partitions=PARTITIONS)) as log:
        for _ in range(64):
            rows = Rows([TIME_MS] * PARTITIONS, [None] * PARTITIONS, [b"v"] * PARTITIONS)
            places = list(range(PARTITIONS))
            await log.records.append(log.state.topic("t"), [(places, rows)], size=9, is_json=False)
        store = store_of(log)
        old_count = store.count("get_range")
        await encoded(log, ends_of(log))
        assert store.count("get_range") - old_count == 64


@pytest.mark.parametrize("late_s", [0.0, 19.0, 20.0])
async def test_overdue_tail_runs_normally(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """On a busy machine a thread of the lowest priority gets no CPU, and tails grow."""
    real, names = encode._finish, list[str]()

    def finish(encoders: Sequence[object]) -> object:
        names.append(threading.current_thread().name)
        return real(encoders)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "_finish", finish)
    async with closing(await with_topic(MemoryStore(), configs={"segment.ms": "10000"})) as log:
        rows = Rows([TIME_MS], [None], [b"v"])
        await log.records.append(log.state.topic("t"), [(0, rows)], size=9, is_json=False)
        await asyncio.sleep(late_s)
        assert await log.records.seal("t") == 1
    assert names == ["tidelog-seal_0" if late_s < 20 else "tidelog-seal-now_0"]
