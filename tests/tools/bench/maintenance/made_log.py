"""Logs to maintain, as large as wanted, written in seconds.

Segments and table are real, and the WAL says of them what it would after 10,000 seals.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.broker import Broker
from tidelog.storage.codec import record_columns, segment
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import Append, Chunk, Sealed
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.manifest import seal_app_id

TIME_MS = 1_700_000_000_000
ROWS_MAX = 4_000_000
"""Of one crafted append."""


def make(folder: Path, configs: Mapping[str, str], segments: Iterable[pa.RecordBatch]) -> None:
    """A store in `folder` with topic `t`, one partition, each batch a segment of it."""
    asyncio.run(_make(folder, configs, segments, []))


def make_named(folder: Path, configs: Mapping[str, str], count: int, rows: int) -> None:
    """The same with segments that the table names, and that are not there."""
    asyncio.run(_make(folder, configs, [], list(_named(count, rows))))


def values(count: int, seed: int, size: int = 100) -> pa.Array:
    """JSON of about `size` bytes, of which a third is random."""
    draws = np.random.default_rng(seed)
    drawn = draws.integers(10**11, 10**12, (3, count))
    parts = [pa.array(numbers).cast(pa.string()) for numbers in drawn]
    pad = "x" * (size - 36 - 38)
    fixed = ['{"id":"', '","carrier":"', '","tail":"', f'","pad":"{pad}"}}']
    texts = [fixed[0], parts[0], fixed[1], parts[1], fixed[2], parts[2], fixed[3], ""]
    return pc.binary_join_element_wise(*texts).cast(pa.binary())


def records(
    first: int, count: int, key_numbers: np.ndarray | None, value: pa.Array
) -> pa.RecordBatch:
    """Records [first, first + count), a millisecond apart; keys of 12 bytes."""
    key = pa.nulls(count, pa.binary())
    if key_numbers is not None:
        digits = pc.utf8_lpad(pa.array(key_numbers).cast(pa.string()), 11, padding="0")
        key = pc.binary_join_element_wise("k", digits, "").cast(pa.binary())
    offsets = np.arange(first, first + count, dtype=np.int64)
    stamps = pa.array((TIME_MS + offsets) * 1000).view(record_columns.TIMESTAMP_TYPE)
    columns = [pa.array(offsets), stamps, key, value, pa.nulls(count, record_columns.HEADERS_TYPE)]
    return pa.RecordBatch.from_arrays(columns, schema=record_columns.RECORD_SCHEMA)


async def _make(
    folder: Path,
    configs: Mapping[str, str],
    segments: Iterable[pa.RecordBatch],
    named: list[SegmentFile],
) -> None:
    store = FolderStore(folder)
    log = await Broker.open(store, LogSettings(is_sealing=False), clock=SystemClock(), name="bench")
    await log.topics.create("t", 1, dict(configs))
    topic = log.state.topic("t")
    files = [await _write(store, topic, batch) for batch in segments] + named
    end = files[-1].end_offset
    table = open_table(store, topic.prefix, topic.name)
    for added_files in (files[first : first + 20_000] for first in range(0, len(files), 20_000)):
        await table.add(added_files, {seal_app_id(0): added_files[-1].end_offset})
    for first in range(0, end, ROWS_MAX):
        rows = min(ROWS_MAX, end - first)
        chunk = Chunk(topic.topic_id, 0, 0, 1, 0, rows, TIME_MS, TIME_MS, True, "", 1)
        appended = Commit(log.clock.new_id(), [Append(0, 0, rows)])
        sealed = Commit(log.clock.new_id(), [Sealed(topic.topic_id, 0, first + rows)])
        outcomes = await log._log.wal.commit(Draft([appended, sealed], [chunk], [b"x"]))
        assert [outcome.refusal for outcome in outcomes] == [None, None]
    await log.close()
    await store.close()


async def _write(store: FolderStore, topic: Topic, batch: pa.RecordBatch) -> SegmentFile:
    written = await asyncio.to_thread(segment.write, [batch], codec="zstd", is_json=True)
    path = object_keys.segment(0, written.base_offset, written.end_offset, "ab12")
    await store.create(f"{topic.prefix}/{path}", [memoryview(written.body)])
    span = (written.base_offset, written.end_offset, written.size, written.rows)
    return SegmentFile(path, 0, *span, written.timestamp_min, written.timestamp_max)


def _named(count: int, rows: int) -> Iterator[SegmentFile]:
    for first in range(0, count * rows, rows):
        end = first + rows
        path = object_keys.segment(0, first, end, "ab12")
        yield SegmentFile(path, 0, first, end, 1_000_000, rows, TIME_MS + first, TIME_MS + end)
