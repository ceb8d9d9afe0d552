"""The copy of the rows of segments into one segment.

Merges and compactions do this in process or on Spark, `delete-records` only in process.

A `Rewrite` is a plain value with everything that a task needs; the Spark engine sends it to an
executor as MessagePack. `rewrite` runs it against a store, on the caller's event loop. Kept rows
keep their order and their offsets. The output's name has the whole range of its inputs, from
`Rewrite.start` on, so no hole is left between segments. Memory: the encoded output and pieces of
inputs.

**On a crash**: an object is left that no version names; collection deletes it.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_columns
from tidelog.storage.codec import segment as segments
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.plan import SegmentRange
from tidelog.storage.read.segment_reader import (
    FetchedGroups,
    SegmentReader,
    between,
    groups_of,
    source_of,
    started_ahead,
)
from tidelog.storage.read.split_reader import gone_is_unavailable
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.runtime.threads import CpuTime
from tidelog.storage.store.object_store import ObjectStore, upload

PIECE_BYTES = 32 * 1024 * 1024
"""Size of the pieces in which inputs are read; a segment may have 4 GiB."""
AHEAD = 16
"""Upper bound of the pieces that are fetched ahead. A small segment is one piece, which takes one
or two requests."""
AHEAD_BYTES = 64 * 1024 * 1024
"""Upper bound of the size of the pieces that are fetched ahead."""
BLOCK_BYTES = 8 * 1024 * 1024
"""Size of the records that are decoded at once; a single record may be larger."""
DECODERS = 2
"""Blocks that are decoded at once: one thread encodes as fast as two decode."""
BLOCKS = 6
"""Upper bound of the blocks between reading and encoding. With this number, no thread waits for
another."""

T = TypeVar("T")


class RewriteTooLarge(LogError):
    """The output of a rewrite would be larger than its bound. Nothing was uploaded."""


class Rewrite(NamedTuple):
    """Segments that become one segment: the work of one task.

    `inputs` are neighbours in offset order. `kept` are the offsets to keep, ascending int64; None
    keeps all. `rows` is the number of kept rows. `cleaned` are the past compactions that the
    output's footer lists; if it is None, take them from the footer of an input that lists the most.
    `level` is the cluster's level. Rows below the offset `start` are left out, and the output's
    name begins there. An output of more than `bytes_max` is given up.
    """

    prefix: str
    inputs: Sequence[SegmentFile]
    codec: str
    rows: int
    kept: np.ndarray | None = None
    cleaned: Sequence[segments.Cleaned] | None = None
    level: int = format_levels.NEWEST
    start: int = 0
    bytes_max: float = math.inf

    @property
    def partition(self) -> int:
        return self.inputs[0].partition


async def rewrite(
    store: ObjectStore,
    task: Rewrite,
    unique: str,
    on_rows: Callable[[int], None] = lambda _: None,
    cpu_time: CpuTime | None = None,
) -> SegmentFile:
    """Write and upload the segment under a name that contains `unique`; no table names it yet.

    `cpu_time` counts the work on rows, in all threads, but not the requests to the store.
    Raises RewriteTooLarge; Corrupt if an input fails verification, or the output differs from what
    was planned.
    """
    copy = _KeptRows(task)
    inputs = pieces(task.prefix, task.inputs)
    timed = cpu_time or CpuTime()
    await pump(
        store,
        inputs,
        lambda block: timed.of(copy.decoded, block),
        lambda rows: timed.of(copy.encode, rows),
        on_rows,
        copy.is_needed,
    )
    base, end = max(task.inputs[0].base_offset, task.start), task.inputs[-1].end_offset
    path = object_keys.segment(task.partition, base, end, unique)
    key = f"{task.prefix}/{path}"
    written = await asyncio.to_thread(timed.of, copy.finish, key)
    if written.rows != task.rows or written.base_offset < base or written.end_offset > end:
        content = f"{written.rows} rows of [{written.base_offset}, {written.end_offset})"
        raise Corrupt(key, f"would have {content}, expected {task.rows} of [{base}, {end})")
    await upload(store, key, [memoryview(written.body)])
    stamps = (written.timestamp_min, written.timestamp_max)
    return SegmentFile(path, task.partition, base, end, written.size, written.rows, *stamps)


async def pump(
    store: ObjectStore,
    segment_ranges: Sequence[SegmentRange],
    decoded: Callable[[FetchedGroups], T],
    consume: Callable[[T], None],
    on_rows: Callable[[int], None],
    is_needed: Callable[[segments.RowGroup], bool] = lambda _: True,
) -> None:
    """Decode all needed row groups in DECODERS threads; consume the results in order in one thread.

    Raises Unavailable if a segment is gone.
    """
    reader = SegmentReader(source_of(store))

    def start(piece: SegmentRange) -> "asyncio.Task[FetchedGroups]":
        task = asyncio.create_task(reader.fetch(piece, is_needed))
        task.add_done_callback(retrieve_exception)  # after an error, nothing awaits the rest
        return task

    ahead = started_ahead(
        segment_ranges, start, attrgetter("cost"), items_max=AHEAD, bytes_max=AHEAD_BYTES
    )
    line = _RowLine(decoded, consume)
    try:
        with contextlib.closing(ahead), gone_is_unavailable():
            for piece, task in ahead:
                fetched = await task
                for block in _blocks(fetched):
                    await line.add(block)
                on_rows(sum(group.rows for group in groups_of(piece, fetched.footer)))
        await line.finish()
    finally:
        await line.stop()


class _RowLine(Generic[T]):
    """Pipeline of DECODERS threads that decode blocks and one that consumes them in order.

    Threads pass results directly; the event loop only bounds the queue.
    """

    def __init__(self, decoded: Callable[[FetchedGroups], T], consume: Callable[[T], None]) -> None:
        self._decoded = decoded
        self._consume = consume
        self._decoders = ThreadPoolExecutor(DECODERS, "tidelog-decode")
        self._consumer = ThreadPoolExecutor(1, "tidelog-encode")
        self._left: deque[asyncio.Future[None]] = deque()

    async def add(self, block: FetchedGroups) -> None:
        if len(self._left) >= BLOCKS:
            await self._first()
        future = self._decoders.submit(self._decoded, block)
        loop = asyncio.get_running_loop()
        self._left.append(loop.run_in_executor(self._consumer, self._take, future))

    async def finish(self) -> None:
        while self._left:
            await self._first()

    async def stop(self) -> None:
        """Stop all threads. Return when the threads have finished the blocks that they work on."""
        for pool in (self._decoders, self._consumer):
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._decoders.shutdown)

    async def _first(self) -> None:
        await self._left[0]
        del self._left[0]

    def _take(self, future: "Future[T]") -> None:
        self._consume(future.result())


def _blocks(fetched: FetchedGroups) -> Iterator[FetchedGroups]:
    """Split row groups into blocks that are decoded at once."""
    groups: list[segments.RowGroup] = []
    used = 0
    for group in fetched.groups:
        if groups and used + group.raw_bytes > BLOCK_BYTES:
            yield fetched._replace(groups=groups)
            groups, used = [], 0
        groups.append(group)
        used += group.raw_bytes
    if groups:
        yield fetched._replace(groups=groups)


def pieces(
    prefix: str, files: Sequence[SegmentFile], size: int = PIECE_BYTES
) -> list[SegmentRange]:
    """Split the records of neighbouring segments, in order, into pieces of about `size` bytes."""
    ranges: list[SegmentRange] = []
    for file in files:
        shares = max(-(-file.size // size), 1)
        key, span = f"{prefix}/{file.path}", (file.base_offset, file.end_offset)
        segment_range = SegmentRange(
            "", file.partition, False, key, file.size, *span, file.size // shares
        )
        ranges += [segment_range._replace(share=share, shares=shares) for share in range(shares)]
    return ranges


class Digest(NamedTuple):
    """Digest to compare two copies of the same rows.

    It leaves out keys and values, because the checksums of their bytes are verified already.
    """

    rows: int = 0
    offsets: int = 0
    timestamps: int = 0

    def of(self, batch: pa.RecordBatch) -> "Digest":
        """Return the digest extended by the next batch."""
        return Digest(
            self.rows + batch.num_rows,
            _extend(self.offsets, batch.column("offset").to_numpy()),
            _extend(self.timestamps, chunks.timestamps_us(batch.column("timestamp"))),
        )


def _extend(checksum: int, numbers: np.ndarray) -> int:
    return int(google_crc32c.extend(checksum, numbers.tobytes()))


class _KeptRows:
    """The kept rows on their way into the output. `decoded` may run in several threads at once."""

    def __init__(self, task: Rewrite) -> None:
        self._task = task
        self._writer = segments.SegmentWriter(task.codec, task.level)
        self._digest = Digest()
        self._is_json = True
        self._cleaned: Sequence[segments.Cleaned] = task.cleaned or ()

    def is_needed(self, group: segments.RowGroup) -> bool:
        """Return whether any row of the group is kept."""
        kept_offsets = self._task.kept
        if group.end_offset <= self._task.start:
            return False
        if kept_offsets is None:
            return True
        first, last = np.searchsorted(kept_offsets, [group.base_offset, group.end_offset])
        return bool(first < last)

    def decoded(self, block: FetchedGroups) -> "_Rows":
        """Decode the kept rows of a part of an input."""
        batch = block.batch(record_columns.RECORD_SCHEMA.names)
        if self._task.kept is not None:
            batch = keep(batch, self._task.kept)
        if block.groups[0].base_offset < self._task.start:
            batch = between(batch, self._task.start, block.of.end)
        return _Rows(block.footer, batch)

    def encode(self, rows: "_Rows") -> None:
        """Encode the next rows."""
        self._is_json &= rows.footer.is_json
        if self._task.cleaned is None and len(rows.footer.cleaned) > len(self._cleaned):
            self._cleaned = rows.footer.cleaned
        self._digest = self._digest.of(rows.batch)
        self._writer.add(rows.batch)
        self._check_size(self._writer.size)

    def _check_size(self, size: int) -> None:
        if size > self._task.bytes_max:
            first = f"{self._task.prefix}/{self._task.inputs[0].path}"
            limit = f"{self._task.bytes_max} bytes"
            raise RewriteTooLarge(f"the merge of {first} and the next segments exceeds {limit}")

    def finish(self, key: str) -> segments.Written:
        """Finish the output and verify it by reading it back."""
        written = self._writer.finish(is_json=self._is_json, cleaned=self._cleaned)
        self._check_size(written.size)
        if _digest_of(written.body) != self._digest:
            raise Corrupt(key, "reads back with other rows than were written")
        return written


class _Rows(NamedTuple):
    footer: segments.Footer
    batch: pa.RecordBatch


def keep(batch: pa.RecordBatch, kept_offsets: np.ndarray) -> pa.RecordBatch:
    """Return the rows of these offsets."""
    offsets = batch.column("offset").to_numpy()
    first, last = np.searchsorted(kept_offsets, [offsets[0], offsets[-1] + 1])
    if last - first == batch.num_rows:
        return batch
    return batch.take(np.searchsorted(offsets, kept_offsets[first:last]))


def _digest_of(body: pa.Buffer) -> Digest:
    digest = Digest()
    file = pq.ParquetFile(pa.BufferReader(body))
    for batch in file.iter_batches(columns=["offset", "timestamp"], use_threads=False):
        digest = digest.of(batch)
    return digest
