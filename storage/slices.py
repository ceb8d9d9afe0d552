"""Reading what a plan names: the records of segment slices and of runs, verified, columns chosen.

Every byte that is decoded is covered by a checksum: a segment's footer and row groups by the
CRC-32Cs in its footer, a run's chunk by the one in its WAL entry. Row groups are fetched whole, for
one request of megabytes is faster than many of single columns, and decoded by columns.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import chunk as chunks
from storage import segment as segments
from storage.errors import Corrupt, NotFound, Unavailable
from storage.objectstore import ObjectStore
from storage.readonly import OpenedStore, ReadOnlyFolder
from storage.scan import EVERYTHING, SegmentSlice, Slice, Split, Wanted

FETCH_BYTES = 8 * 1024 * 1024
"""Largest single range: S3 gives one connection 50 to 100 MB/s."""
AHEAD_BYTES = 64 * 1024 * 1024
AHEAD_SLICES = 32
"""What is fetched before it is needed, per task (I10)."""


class Fetched(NamedTuple):
    """What `decode` needs of a slice. Of `body`, as long as the object, a segment's `groups` are
    there, and nothing else; of a run it is the chunk."""

    body: pa.Buffer
    groups: Sequence[segments.Group] = ()
    footer: segments.Footer | None = None


def read_split(
    opened: OpenedStore, split: Split, columns: Sequence[str], wanted: Wanted = EVERYTHING
) -> Iterator[tuple[Slice, pa.RecordBatch]]:
    """The records of a split, in order, as batches of `columns` of RECORD_SCHEMA, with their slice.

    Raises Corrupt where bytes do not verify, Unavailable where an object is gone or out of reach.
    """
    waiting: deque[tuple[Slice, Future[Fetched]]] = deque()
    left = deque(split.slices)
    try:
        while left or waiting:
            ahead = sum(one.cost for one, _ in waiting)
            while left and (
                not waiting or (len(waiting) < AHEAD_SLICES and ahead + left[0].cost <= AHEAD_BYTES)
            ):
                one = left.popleft()
                ahead += one.cost
                waiting.append((one, opened.submit(fetch(opened.store, one, wanted))))
            one, future = waiting.popleft()
            for batch in decode(one, future.result(), columns):
                yield one, batch
    finally:
        for _, future in waiting:
            future.cancel()


async def fetch(
    store: ObjectStore, one: Slice, wanted: Wanted = EVERYTHING, *, groups_max: int | None = None
) -> Fetched:
    """The bytes of a slice, less the row groups in which no record can be wanted.

    `groups_max`: only the first so many of those. Raises as `read_split` does.
    """

    if isinstance(one, SegmentSlice):
        footer = await fetch_footer(store, one)
        groups = [
            group
            for group in groups_of(one, footer)
            if wanted.overlaps(group.timestamp_min, group.timestamp_max)
        ]
        return await fetch_groups(store, one, footer, groups[:groups_max])
    with _still_there():
        body = await _get(store, one.run.object_key, one.run.position, one.run.size)
        return Fetched(pa.py_buffer(body))


async def fetch_footer(store: ObjectStore, one: SegmentSlice) -> segments.Footer:
    """For all slices of that segment. Raises as `read_split` does."""
    with _still_there():
        if isinstance(store, ReadOnlyFolder):
            return segments.read_footer(memoryview(_map(store, one)), one.size, one.key)
        want = min(one.size, segments.FOOTER_READ_BYTES)
        tail = memoryview(await _get(store, one.key, one.size - want, want))
        needed = segments.footer_length(tail, one.key)
        if want < needed <= one.size:
            tail = memoryview(await _get(store, one.key, one.size - needed, needed))
        return segments.read_footer(tail, one.size, one.key)


async def fetch_groups(
    store: ObjectStore,
    one: SegmentSlice,
    footer: segments.Footer,
    groups: Sequence[segments.Group],
) -> Fetched:
    """Some row groups of a slice. Raises as `read_split` does."""
    with _still_there():
        if isinstance(store, ReadOnlyFolder):
            return Fetched(_map(store, one), groups, footer)
        # Pages that are never touched cost nothing: Parquet sees a file, we hold its needed parts.
        sparse = np.zeros(one.size, np.uint8)
        for start, length in _ranges(groups):
            sparse[start : start + length] = np.frombuffer(
                await _get(store, one.key, start, length), np.uint8
            )
        return Fetched(pa.py_buffer(sparse), groups, footer)  # type: ignore[arg-type]


def groups_of(one: SegmentSlice, footer: segments.Footer) -> Sequence[segments.Group]:
    """The row groups of a slice."""
    within = footer.groups_between(one.start, one.end)
    first, last = (len(within) * share // one.shares for share in (one.share, one.share + 1))
    return within[first:last]


def _map(store: ReadOnlyFolder, one: SegmentSlice) -> pa.Buffer:
    body = store.map(one.key)
    if body.size != one.size:
        raise Corrupt(one.key, f"has {body.size} bytes, the manifest says {one.size}")
    return body


@contextlib.contextmanager
def _still_there() -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise Unavailable(
            f"{error}: it was collected after this read was planned; read again"
        ) from error


def _ranges(groups: Sequence[segments.Group]) -> list[tuple[int, int]]:
    """(start, length) of neighbouring groups together, up to about FETCH_BYTES."""
    found: list[tuple[int, int]] = []
    for group in groups:
        if found:
            start, length = found[-1]
            if start + length == group.start and length + group.length <= FETCH_BYTES:
                found[-1] = (start, length + group.length)
                continue
        found.append((group.start, group.length))
    return found


def decode(one: Slice, fetched: Fetched, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches of these columns of RECORD_SCHEMA, in offset order; verifies before it decodes."""
    if isinstance(one, SegmentSlice):
        yield from _decode_segment(one, fetched, columns)
        return
    run = one.run
    batch = run.decode(memoryview(fetched.body))
    batch = batch.slice(run.first_row + one.start - run.base_offset, one.end - one.start)
    if run.append_ms >= 0:
        batch = chunks.with_timestamp(batch, run.append_ms)
    yield chunks.with_offsets(batch, one.start).select(list(columns))


def decode_whole(one: SegmentSlice, fetched: Fetched, columns: Sequence[str]) -> pa.RecordBatch:
    """All fetched row groups of a slice that is not cut as one batch: one call of Parquet, which
    needs the interpreter once. For a few megabytes; verifies before it decodes."""
    with _decoding(one, fetched) as file:
        indexes = [group.index for group in fetched.groups]
        table = file.read_row_groups(indexes, list(columns), use_threads=False)
        (batch,) = table.combine_chunks().to_batches()
    return batch


def _decode_segment(
    one: SegmentSlice, fetched: Fetched, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    groups = fetched.groups
    if not groups:
        return
    is_cut = groups[0].base_offset < one.start or groups[-1].end_offset > one.end
    names = [*columns, "offset"] if is_cut and "offset" not in columns else list(columns)
    with _decoding(one, fetched) as file:
        indexes = [group.index for group in groups]
        # A batch a row group, as long as those are full: anything else is one copy more.
        for batch in file.iter_batches(segments.GROUP_ROWS, indexes, names, use_threads=False):
            if is_cut:
                offsets = batch.column("offset").to_numpy()
                first, last = np.searchsorted(offsets, [one.start, one.end]).tolist()
                batch = batch.slice(first, last - first)
            if batch.num_rows:
                yield batch.select(list(columns))


@contextlib.contextmanager
def _decoding(one: SegmentSlice, fetched: Fetched) -> Iterator[pq.ParquetFile]:
    """The segment, once the fetched groups are verified."""
    for group in fetched.groups:
        if chunks.crc32c(fetched.body.slice(group.start, group.length)) != group.crc32c:  # type: ignore[arg-type]
            raise Corrupt(one.key, f"checksum of row group {group.index} differs")
    assert fetched.footer is not None, "groups were found in it"
    try:
        yield pq.ParquetFile(pa.BufferReader(fetched.body), metadata=fetched.footer.metadata)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(one.key, f"row groups do not decode: {error}") from error


async def _get(store: ObjectStore, key: str, start: int, length: int) -> bytes:
    data = await store.get_range(key, start, length)
    if len(data) != length:
        raise Corrupt(key, f"has {len(data)} of {length} bytes at {start}: it is cut off")
    return data
