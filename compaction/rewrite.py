"""Segments in, one segment out: the body of every merge and compaction, in process and on Spark.

A `Rewrite` is a plain picklable value that says all there is to know; `rewrite` runs it against a
store, on whatever loop the caller has: a command's own, or one that a Spark task makes for it. The
rows that stay are copied in order, offsets unchanged; the output's name says the whole range of its
inputs, so that no hole is left between segments. Memory: the encoded output, and pieces of inputs.

And if we die here? An object that nothing names, for collection.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

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
from storage.slices import Fetched, decode_whole, fetch_footer, fetch_groups, groups_of

PIECE_BYTES = 32 * 1024 * 1024
"""Inputs are read in pieces of about so much: a segment may have 4 GiB."""
AHEAD = 16
"""Pieces that are fetched before they are needed: small segments are a request or two each."""
AHEAD_BYTES = 64 * 1024 * 1024
"""... as far as they fit."""
BLOCK_BYTES = 8 * 1024 * 1024
"""Of records that go from one thread to the other at once; and a record may be larger."""
DECODERS = 2
"""Blocks that are decoded at once: one thread encodes what two decode."""
BLOCKS = 6
"""Blocks between reading and encoding: nobody waits for a thread that waits for its turn."""
_RETRY_S = 0.05

T = TypeVar("T")


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
    inputs = pieces(task.prefix, task.inputs)
    await pump(store, inputs, copy.decoded, copy.encode, on_rows, copy.is_needed)
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
    decoded: Callable[[SegmentSlice, Fetched], T],
    consume: Callable[[T], None],
    on_rows: Callable[[int], None],
    is_needed: Callable[[segments.Group], bool] = lambda _: True,
) -> None:
    """All row groups that are needed through threads: some make something of the next blocks of
    them, one takes that in order."""
    if isinstance(store, FolderStore):  # files as the kernel maps them, instead of two copies
        store = ReadOnlyFolder(Path(store.table_uri(keys.CLUSTER)).parent)
    line = _Line(decoded, consume)
    try:
        async with contextlib.aclosing(_fetched(store, wanted, is_needed)) as ready:
            async for piece, fetched in ready:
                for block in _blocks(fetched):
                    await line.add(piece, block)
                assert fetched.footer is not None, "an input is a segment"
                on_rows(sum(group.rows for group in groups_of(piece, fetched.footer)))
        await line.finish()
    finally:
        await line.stop()


class _Line(Generic[T]):
    """DECODERS threads for blocks, and one that consumes in order what became of them. They hand
    on to each other; the loop only bounds what is between them."""

    def __init__(
        self, decoded: Callable[[SegmentSlice, Fetched], T], consume: Callable[[T], None]
    ) -> None:
        self._decoded = decoded
        self._consume = consume
        self._decoders = ThreadPoolExecutor(DECODERS, "tidelog-decode")
        self._consumer = ThreadPoolExecutor(1, "tidelog-encode")
        self._left: deque[asyncio.Future[None]] = deque()

    async def add(self, piece: SegmentSlice, block: Fetched) -> None:
        if len(self._left) >= BLOCKS:
            await self._first()
        found = self._decoders.submit(self._decoded, piece, block)
        loop = asyncio.get_running_loop()
        self._left.append(loop.run_in_executor(self._consumer, self._take, found))

    async def finish(self) -> None:
        while self._left:
            await self._first()

    async def stop(self) -> None:
        """Nothing of it runs any more: a thread ends what it has begun."""
        for pool in (self._decoders, self._consumer):
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._left, return_exceptions=True)
        await asyncio.to_thread(self._decoders.shutdown)

    async def _first(self) -> None:
        await self._left[0]
        del self._left[0]

    def _take(self, found: "Future[T]") -> None:
        self._consume(found.result())


def _blocks(fetched: Fetched) -> Iterator[Fetched]:
    """Row groups that are decoded at once."""
    some: list[segments.Group] = []
    used = 0
    for group in fetched.groups:
        if some and used + group.raw_bytes > BLOCK_BYTES:
            yield fetched._replace(groups=some)
            some, used = [], 0
        some.append(group)
        used += group.raw_bytes
    if some:
        yield fetched._replace(groups=some)


async def _fetched(
    store: ObjectStore,
    wanted: Sequence[SegmentSlice],
    is_needed: Callable[[segments.Group], bool],
) -> AsyncGenerator[tuple[SegmentSlice, Fetched]]:
    """In order, ahead within bounds; a footer is read once."""

    async def fetched(piece: SegmentSlice, footer: "asyncio.Task[segments.Footer]") -> Fetched:
        of = await footer
        groups = [group for group in groups_of(piece, of) if is_needed(group)]
        return await fetch_groups(store, piece, of, groups)

    left = deque(wanted)
    waiting: deque[_Waiting] = deque()
    last: _Waiting | None = None
    try:
        while left or waiting:
            ahead = sum(each.piece.cost for each in waiting)
            while left and (
                not waiting or (len(waiting) < AHEAD and ahead + left[0].cost <= AHEAD_BYTES)
            ):
                piece = left.popleft()
                ahead += piece.cost
                if last is None or last.piece.key != piece.key:
                    footer = asyncio.create_task(fetch_footer(store, piece))
                else:
                    footer = last.footer
                last = _Waiting(piece, footer, asyncio.create_task(fetched(piece, footer)))
                waiting.append(last)
            found = await waiting[0].work
            yield waiting.popleft().piece, found
    finally:
        tasks = [task for each in waiting for task in (each.work, each.footer)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Waiting(NamedTuple):
    piece: SegmentSlice
    footer: "asyncio.Task[segments.Footer]"
    work: "asyncio.Task[Fetched]"


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
    """The rows that stay, on their way into the output: decoded by threads, encoded by one."""

    def __init__(self, task: Rewrite) -> None:
        self._task = task
        self._writer = segments.SegmentWriter(task.codec)
        self._digest = Digest()
        self._is_json = True
        self._cleaned: Sequence[segments.Cleaned] = task.cleaned or ()

    def is_needed(self, group: segments.Group) -> bool:
        """Whether one of its rows stays."""
        kept = self._task.kept
        if kept is None:
            return True
        first, last = np.searchsorted(kept, [group.base_offset, group.end_offset])
        return bool(first < last)

    def decoded(self, piece: SegmentSlice, fetched: Fetched) -> "_Rows":
        """Those of a part of an input."""
        assert fetched.footer is not None, "an input is a segment"
        batch = decode_whole(piece, fetched, chunks.RECORD_SCHEMA.names)
        if self._task.kept is not None:
            batch = keep(batch, self._task.kept)
        return _Rows(fetched.footer, batch)

    def encode(self, rows: "_Rows") -> None:
        """The next ones."""
        self._is_json &= rows.footer.is_json
        if self._task.cleaned is None and len(rows.footer.cleaned) > len(self._cleaned):
            self._cleaned = rows.footer.cleaned
        self._digest = self._digest.of(rows.batch)
        self._writer.add(rows.batch)

    def finish(self, key: str) -> segments.Written:
        """The output, read back."""
        written = self._writer.finish(is_json=self._is_json, cleaned=self._cleaned)
        if _digest_of(written.body) != self._digest:
            raise Corrupt(key, "does not read as it was written")
        return written


class _Rows(NamedTuple):
    footer: segments.Footer
    batch: pa.RecordBatch


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
