"""Segments in, one segment out: the body of every merge and compaction, in process and on Spark.

A `Rewrite` is a plain picklable value that says all there is to know; `rewrite` runs it against a
store, on whatever loop the caller has: a command's own, or one that a Spark task makes for it. The
rows that stay are copied in order, offsets unchanged; the output's name says the whole range of its
inputs, so that no hole is left between segments. Memory: the encoded output, and pieces of inputs.

And if we die here? An object that nothing names, for collection.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import chunk as chunks
from storage import keys
from storage import segment as segments
from storage.errors import Corrupt
from storage.folder import FolderStore
from storage.model import SegmentFile
from storage.objectstore import Created, ObjectStore
from storage.readonly import ReadOnlyFolder
from storage.scan import SegmentSlice
from storage.slices import Fetched, decode, fetch

PIECE_BYTES = 32 * 1024 * 1024
"""Inputs are read in pieces of about so much: a segment may have 4 GiB."""
AHEAD = 2
"""Pieces that are fetched before they are needed."""
AHEAD_BYTES = 64 * 1024 * 1024
"""... as far as they fit."""
BLOCK_BYTES = 8 * 1024 * 1024
"""Decoded records that go from one thread to the other at once."""
_RETRY_S = 0.05


class Rewrite(NamedTuple):
    """Work of one task. `inputs` are neighbours in offset order; `kept` are the offsets that stay,
    ascending int64, None for all; `rows` is how many that must be. `cleaned` is the history that
    the output shall carry, None for that of its inputs."""

    prefix: str
    inputs: Sequence[SegmentFile]
    codec: str
    rows: int
    kept: np.ndarray | None = None
    cleaned: Sequence[segments.Cleaned] | None = None

    @property
    def partition(self) -> int:
        return self.inputs[0].partition

    @property
    def size(self) -> int:
        return sum(file.size for file in self.inputs)


async def rewrite(
    store: ObjectStore, task: Rewrite, unique: str, on_rows: Callable[[int], None] = lambda _: None
) -> SegmentFile:
    """Write and upload the segment under a name with `unique` in it; no table knows it yet.

    Raises Corrupt where an input does not verify or the output is not what it should be.
    """
    copy = _Copy(task)
    await pump(store, pieces(task.prefix, task.inputs), copy.decoded, copy.encode, on_rows)
    base, end = task.inputs[0].base_offset, task.inputs[-1].end_offset
    path = keys.segment(task.partition, base, end, unique)
    key = f"{task.prefix}/{path}"
    written = await asyncio.to_thread(copy.finish, key)
    if written.rows != task.rows or written.base_offset < base or written.end_offset > end:
        found = f"{written.rows} rows of [{written.base_offset}, {written.end_offset})"
        raise Corrupt(key, f"would hold {found}, not {task.rows} of [{base}, {end})")
    await upload(store, key, written.body)
    stamps = (written.timestamp_min, written.timestamp_max)
    return SegmentFile(path, task.partition, base, end, written.size, written.rows, *stamps)


async def pump(
    store: ObjectStore,
    wanted: Sequence[SegmentSlice],
    decoded: Callable[[SegmentSlice, Fetched], Iterator[pa.RecordBatch]],
    consume: Callable[[Sequence[pa.RecordBatch]], None],
    on_rows: Callable[[int], None],
) -> None:
    """All records through two threads: one decodes the next block, one consumes that before."""
    if isinstance(store, FolderStore):  # files as the kernel maps them, instead of two copies
        store = ReadOnlyFolder(Path(store.table_uri(keys.CLUSTER)).parent)
    consuming: asyncio.Task[None] | None = None
    async for piece, fetched in _fetched(store, wanted):
        batches = decoded(piece, fetched)
        while block := await asyncio.to_thread(_block, batches):
            if consuming is not None:
                await consuming
            consuming = asyncio.create_task(asyncio.to_thread(consume, block))
        on_rows(sum(group.rows for group in fetched.groups))
    if consuming is not None:
        await consuming


async def _fetched(
    store: ObjectStore, wanted: Sequence[SegmentSlice]
) -> AsyncIterator[tuple[SegmentSlice, Fetched]]:
    """In order, ahead within bounds."""
    left = deque(wanted)
    waiting: deque[tuple[SegmentSlice, asyncio.Task[Fetched]]] = deque()
    try:
        while left or waiting:
            ahead = sum(piece.cost for piece, _ in waiting)
            while left and (
                not waiting or (len(waiting) <= AHEAD and ahead + left[0].cost <= AHEAD_BYTES)
            ):
                piece = left.popleft()
                ahead += piece.cost
                waiting.append((piece, asyncio.create_task(fetch(store, piece))))
            piece, work = waiting[0]
            fetched = await work
            waiting.popleft()
            yield piece, fetched
    finally:
        for _, work in waiting:
            work.cancel()
        await asyncio.gather(*(work for _, work in waiting), return_exceptions=True)


async def upload(store: ObjectStore, key: str, body: pa.Buffer) -> None:
    """Under a name that is ours alone: EXISTS at the second try means that the first arrived."""
    pause_s = _RETRY_S
    while await store.create(key, [memoryview(body)]) is Created.UNKNOWN:
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 2.0)


def whole(prefix: str, file: SegmentFile) -> SegmentSlice:
    """All records of a segment."""
    key = f"{prefix}/{file.path}"
    span = (file.base_offset, file.end_offset)
    return SegmentSlice("", file.partition, False, key, file.size, *span, file.size)


def pieces(
    prefix: str, files: Sequence[SegmentFile], size: int = PIECE_BYTES
) -> list[SegmentSlice]:
    """All records of neighbouring segments in order, in pieces of about `size` bytes at most."""
    found: list[SegmentSlice] = []
    for file in files:
        one, shares = whole(prefix, file), max(-(-file.size // size), 1)
        cost = file.size // shares
        found += [one._replace(cost=cost, share=at, shares=shares) for at in range(shares)]
    return found


class Digest(NamedTuple):
    """What two copies of the same rows have in common; cheap, for bytes have checksums already."""

    rows: int = 0
    offsets: int = 0
    timestamps: int = 0

    def of(self, batch: pa.RecordBatch) -> "Digest":
        """With the next batch."""
        return Digest(
            self.rows + batch.num_rows,
            _extend(self.offsets, batch.column("offset").to_numpy()),
            _extend(self.timestamps, chunks.timestamps_us(batch.column("timestamp"))),
        )


def _extend(checksum: int, numbers: np.ndarray) -> int:
    return int(google_crc32c.extend(checksum, numbers.tobytes()))


class _Copy:
    """The rows that stay, on their way into the output: decoded by one thread, encoded by one."""

    def __init__(self, task: Rewrite) -> None:
        self._task = task
        self._writer = segments.SegmentWriter(task.codec)
        self._digest = Digest()
        self._is_json = True
        self._cleaned: Sequence[segments.Cleaned] = task.cleaned or ()

    def decoded(self, piece: SegmentSlice, fetched: Fetched) -> Iterator[pa.RecordBatch]:
        """Those of a piece of an input."""
        footer = fetched.footer
        assert footer is not None, "an input is a segment"
        self._is_json &= footer.is_json
        if self._task.cleaned is None and len(footer.cleaned) > len(self._cleaned):
            self._cleaned = footer.cleaned
        for batch in decode(piece, fetched, chunks.RECORD_SCHEMA.names):
            left = batch if self._task.kept is None else keep(batch, self._task.kept)
            if left.num_rows:
                self._digest = self._digest.of(left)
                yield left

    def encode(self, batches: Sequence[pa.RecordBatch]) -> None:
        for batch in batches:
            self._writer.add(batch)

    def finish(self, key: str) -> segments.Written:
        """The output, read back."""
        written = self._writer.finish(is_json=self._is_json, cleaned=self._cleaned)
        if _digest_of(written.body) != self._digest:
            raise Corrupt(key, "does not read as it was written")
        return written


def _block(batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The next few of them; empty at the end."""
    block: list[pa.RecordBatch] = []
    used = 0
    for batch in batches:
        block.append(batch)
        used += batch.nbytes
        if used >= BLOCK_BYTES:
            break
    return block


def keep(batch: pa.RecordBatch, kept: np.ndarray) -> pa.RecordBatch:
    """The rows of these offsets."""
    offsets = batch.column("offset").to_numpy()
    first, last = np.searchsorted(kept, [offsets[0], offsets[-1] + 1])
    if last - first == batch.num_rows:
        return batch
    return batch.take(np.searchsorted(offsets, kept[first:last]))


def _digest_of(body: pa.Buffer) -> Digest:
    digest = Digest()
    file = pq.ParquetFile(pa.BufferReader(body))
    for batch in file.iter_batches(columns=["offset", "timestamp"], use_threads=False):
        digest = digest.of(batch)
    return digest
