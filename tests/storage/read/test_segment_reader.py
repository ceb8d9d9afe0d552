"""The reader of segments, on a store and on mapped files: what it fetches, when, and its errors."""

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tidelog.storage.codec import segment
from tidelog.storage.codec.record_columns import HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE
from tidelog.storage.core.errors import Corrupt, ObjectNotFound
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.plan import SegmentRange
from tidelog.storage.read.segment_reader import (
    MappedFiles,
    SegmentReader,
    StoreRanges,
    source_of,
    started_ahead,
)
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.manifest import seal_app_id, segments_to
from tidelog.storage.tables.memory import MemoryManifest

KEY = "topics/t/s.parquet"
GROUPS = 140
"""So many that the footer does not fit into the first read."""


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((start, length))
        return await super().get_range(key, start, length)


@pytest.fixture(scope="module")
def body() -> bytes:
    """Groups of 10 records, a millisecond apart."""
    count = 10 * GROUPS
    offsets = np.arange(count, dtype=np.int64)
    columns = [
        pa.array(offsets),
        pa.array(offsets * 1000).view(TIMESTAMP_TYPE),
        pa.nulls(count, pa.binary()),
        pa.array([b"%d" % n for n in range(count)], pa.binary()),
        pa.nulls(count, HEADERS_TYPE),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
    rows, segment.GROUP_ROWS = segment.GROUP_ROWS, 10
    try:
        written = segment.write([batch], codec="zstd", is_json=False)
    finally:
        segment.GROUP_ROWS = rows
    assert written.groups == GROUPS
    return written.body.to_pybytes()


async def test_a_long_footer_takes_a_second_read_and_is_cached(body: bytes) -> None:
    store = Counting()
    await store.create(KEY, [body])
    reader = SegmentReader(StoreRanges(store))
    footer = await reader.footer(KEY, len(body))
    assert len(footer.groups) == GROUPS
    needed = segment.footer_length(body, KEY)
    assert needed > segment.FOOTER_READ_BYTES
    first, second = store.ranges
    assert first[1] == segment.FOOTER_READ_BYTES
    assert second == (len(body) - needed, needed)
    assert await reader.footer(KEY, len(body)) is footer
    assert len(store.ranges) == 2


@pytest.mark.parametrize("is_cached", [True, False])
async def test_next_group_is_fetched_ahead_if_cached(body: bytes, is_cached: bool) -> None:
    store = Counting()
    await store.create(KEY, [body])
    reader = SegmentReader(StoreRanges(store), group_bytes=1 << 20 if is_cached else 0)
    footer = await reader.footer(KEY, len(body))
    store.ranges.clear()
    async for group, batch in reader.batches(KEY, footer, footer.groups[:4]):
        assert batch.column("offset").to_pylist() == [*range(group.base_offset, group.end_offset)]
        await asyncio.sleep(1)
        expected = min(group.index + 2, 4) if is_cached else group.index + 1
        assert reader.cold_reads == len(store.ranges) == expected
    assert reader.groups.peek((KEY, 0)) is is_cached


async def test_a_time_is_found_by_one_row_group(body: bytes) -> None:
    store = Counting()
    await store.create(KEY, [body])
    reader = SegmentReader(StoreRanges(store))

    async def offset_at(timestamp_ms: int, start: int = 0, end: int = 10 * GROUPS) -> int | None:
        return await reader.first_at(KEY, len(body), timestamp_ms, start, end)

    assert await offset_at(345) == 345
    assert reader.cold_reads == 1
    assert await offset_at(345, start=500) == 500
    assert await offset_at(345, end=345) is None
    assert await offset_at(10 * GROUPS) is None


async def decoded(store: ObjectStore, size: int) -> list[bytes]:
    segment_range = SegmentRange("t", 0, False, KEY, size, 15, 38, size)
    fetched = await SegmentReader(source_of(store)).fetch(segment_range)
    return [
        value for batch in fetched.batches(["value"]) for value in batch.column("value").to_pylist()
    ]


async def test_ranges_and_mapped_files_give_the_same(body: bytes, tmp_path: Path) -> None:
    folder, memory = FolderStore(tmp_path), MemoryStore()
    assert isinstance(source_of(folder), MappedFiles)
    assert isinstance(source_of(memory), StoreRanges)
    for store in (folder, memory):
        with pytest.raises(ObjectNotFound):
            await decoded(store, len(body))
        await store.put(KEY, [body])
        assert await decoded(store, len(body)) == [b"%d" % n for n in range(15, 38)]
        await store.put(KEY, [body[:-1]])
        with pytest.raises(Corrupt, match="it is cut off"):
            await decoded(store, len(body))
        damaged = bytearray(body)
        damaged[segment.read_footer(body, len(body), KEY).groups[2].start] ^= 1
        await store.put(KEY, [damaged])
        with pytest.raises(Corrupt, match="row group 2 differs"):
            await decoded(store, len(body))
    await folder.close()


async def test_work_is_started_ahead_within_its_bounds() -> None:
    tasks, started = asyncio.all_tasks(), list[int]()

    def start(item: int) -> "asyncio.Task[int]":
        started.append(item)
        return asyncio.create_task(asyncio.sleep(1, item))

    ahead = started_ahead(range(10), start, lambda _: 10, items_max=3, bytes_max=1000)
    assert [(await work, len(started)) for _, work in ahead] == [
        (n, min(n + 3, 10)) for n in range(10)
    ]
    started.clear()
    costly = started_ahead(range(4), start, lambda _: 10, items_max=3, bytes_max=5)
    assert [(await work, len(started)) for _, work in costly] == [(n, n + 1) for n in range(4)]
    stopped = started_ahead(range(4), start, lambda _: 10, items_max=3, bytes_max=1000)
    _, first = next(stopped)
    stopped.close()
    await asyncio.sleep(2)
    assert asyncio.all_tasks() == tasks
    assert await first == 0


async def test_a_table_that_ends_before_the_seal_is_corrupt() -> None:
    table = MemoryManifest({}, "topics/t")
    with pytest.raises(Corrupt, match="partition 0 ends at 0, the WAL is sealed to 10"):
        await segments_to(table, 0, 10, "topics/t")
    path = f"partition=0/{0:020d}-{10:020d}-ab.parquet"
    file = SegmentFile(path, 0, 0, 10, 100, 10, 0, 0)
    await table.add([file], {seal_app_id(0): 10})
    assert list(await segments_to(table, 0, 10, "topics/t")) == [file]
    with pytest.raises(Corrupt, match="partition 0 ends at 10, the WAL is sealed to 11"):
        await segments_to(table, 0, 11, "topics/t")
    await table.replace([file], [], {"care-0": 1}, data_change=True)
    assert list(await segments_to(table, 0, 10, "topics/t")) == []  # retention removed it
