"""Reads backwards: every record once, page by page, also over the holes that compaction leaves."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.logs import COLD, MANUAL, append, closing, opened, spoil_chunk, with_topic
from tests.support.maintenance import caring
from tests.support.properties import examples
from tests.support.records import TIME_MS
from tidelog.compaction.compact import compact
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.read.backwards import FetchedBefore, fetch_before
from tidelog.storage.records import FetchResult
from tidelog.storage.store.memory import MemoryStore

COMPACTING = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}


async def before(log: Broker, end: int | None, bounds: ReadBounds) -> FetchedBefore:
    """The records before `end`, or before the end of the partition."""
    offsets = await log.records.offsets("t", 0)
    start, high = offsets.log_start_offset, offsets.high_watermark
    return await fetch_before(
        partial(log.records.fetch, "t", 0), start, high if end is None else end, high, bounds
    )


def rows_of(fetched: FetchResult) -> list[tuple[int, bytes]]:
    return [
        (row["offset"], row["value"])
        for piece in fetched.pieces
        for row in piece.batch.select(["offset", "value"]).to_pylist()
    ]


async def forwards(log: Broker) -> list[tuple[int, bytes]]:
    rows: list[tuple[int, bytes]] = []
    offset = 0
    while (fetched := await log.records.fetch("t", 0, offset, bytes_max=1 << 20)).pieces:
        rows += rows_of(fetched)
        offset = fetched.next_offset
    return rows


async def fill(log: Broker, draw: random.Random) -> None:
    """Requests of a few keys or of many, with values of very different sizes; some are sealed."""
    for _ in range(draw.randrange(1, 6)):
        count, keys = draw.choice([1, 5, 40, 300]), draw.choice([1, 3, 1000])
        stored = [b"k%d" % draw.randrange(keys) for _ in range(count)]
        values = [draw.randbytes(draw.choice([0, 1, 30, 2000])) for _ in range(count)]
        rows = Rows([TIME_MS] * count, stored, values)
        await log.records.append(log.state.topic("t"), [(0, rows)], size=100, is_json=False)
        if draw.random() < 0.6:
            await log.records.seal("t")


@given(st.randoms(use_true_random=False))
@examples(12)
async def test_backwards_shows_each_record_once_newest_first(draw: random.Random) -> None:
    inner = MemoryStore()
    inner.now_ms = TIME_MS
    async with closing(await opened(inner, draw.choice([MANUAL, COLD]))) as log:
        await log.topics.create("t", 1, COMPACTING)
        await fill(log, draw)
        if draw.random() < 0.7:
            async with caring(inner) as cluster:
                await compact(cluster, None, is_dry=False)
            table = await log._log.tables.of(log.state.topic("t"))
            await table.refresh()
            await fill(log, draw)
        everything = await forwards(log)
        remaining_records, end = list(everything), None
        while True:
            bounds = ReadBounds(draw.randrange(1, 5000), draw.choice([1, 7, 50, 100_000]))
            fetched, first = await before(log, end, bounds)
            offsets = await log.records.offsets("t", 0)
            page = rows_of(fetched)
            assert fetched.next_offset == (offsets.high_watermark if end is None else end)
            assert fetched.high_watermark == offsets.high_watermark
            assert page == remaining_records[len(remaining_records) - len(page) :]
            assert page or not remaining_records, "a page has at least one record if there is one"
            assert len(page) <= bounds.records_max
            assert fetched.weight <= bounds.bytes_max or len(page) == 1
            remaining_records = remaining_records[: len(remaining_records) - len(page)]
            assert all(offset < first for offset, _ in remaining_records)
            end = first
            if first == offsets.log_start_offset:
                break
        assert remaining_records == []


async def test_cost_of_hole_is_logarithmic(inner: MemoryStore) -> None:
    inner.now_ms = TIME_MS
    async with closing(await with_topic(inner, MANUAL, configs=COMPACTING)) as log:
        for keys in ([b"old"], [b"hot"] * 50_000, [b"new"]):
            rows = Rows([TIME_MS] * len(keys), keys, [b"v"] * len(keys))
            await log.records.append(log.state.topic("t"), [(0, rows)], size=100, is_json=False)
        await log.records.seal("t")
        async with caring(inner) as cluster:
            await compact(cluster, None, is_dry=False)
        await (await log._log.tables.of(log.state.topic("t"))).refresh()
        calls = 0

        async def fetch(offset: int, **bounds: int) -> FetchResult:
            nonlocal calls
            calls += 1
            return await log.records.fetch("t", 0, offset, **bounds)

        end = 50_002
        result = await fetch_before(fetch, 0, end, end, ReadBounds(1 << 20, 50))
        assert [offset for offset, _ in rows_of(result.fetched)] == [0, 50_000, 50_001]
        assert result.first_offset == 0
        assert calls <= 20


async def test_a_retention_during_the_read_ends_it_at_the_new_log_start() -> None:
    async with closing(await with_topic(MemoryStore(), MANUAL)) as log:
        await append(log, *(str(number) for number in range(100)))
        calls = 0

        async def fetch(offset: int, **bounds: int) -> FetchResult:
            nonlocal calls
            calls += 1
            if calls == 2:
                await log.topics.delete_records("t", 0, 30)
            return await log.records.fetch("t", 0, offset, **bounds)

        result = await fetch_before(fetch, 0, 100, 100, ReadBounds(1 << 20))
        assert [offset for offset, _ in rows_of(result.fetched)] == [*range(30, 100)]
        assert (result.first_offset, result.fetched.log_start_offset) == (30, 30)


async def test_records_after_a_damaged_one_are_found(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD)) as log:
        for value in "abc":
            await append(log, value)
        chunk = log.state.partition("t", 0).tail[1]
        await spoil_chunk(inner, chunk, chunk.size - 1)
        result = await before(log, None, ReadBounds(1 << 20))
        assert rows_of(result.fetched) == [(2, b"c")]
        assert result.first_offset == 2
        with pytest.raises(Corrupt):
            await before(log, 2, ReadBounds(1 << 20))
