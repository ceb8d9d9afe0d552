"""Row groups of immutable segments, verified. Only this module fetches footers and row groups.

CRC-32Cs in the footer cover every byte that is decoded. A row group is fetched whole, because one
request of megabytes is faster than many requests for single columns. The reader uses no manifest.
If a segment is gone, the reader raises ObjectNotFound, and the caller decides what that means.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.segment import (
    FOOTER_READ_BYTES,
    GROUP_ROWS,
    Footer,
    RowGroup,
    footer_length,
    read_footer,
)
from tidelog.storage.core.errors import Corrupt, cut_off
from tidelog.storage.core.log_settings import ReaderSettings
from tidelog.storage.core.model import Part
from tidelog.storage.read.cache import Cache
from tidelog.storage.read.plan import SegmentRange
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.open import folder_of
from tidelog.storage.store.read_only import ReadOnlyFolder

Item = TypeVar("Item")
Started = TypeVar("Started", bound="Cancellable")

FETCH_BYTES = 8 * 1024 * 1024
"""Maximum size of a request that joins neighbouring row groups. S3 gives a connection 50 to 100
MB/s."""
FOOTER_CACHE_BYTES = ReaderSettings().footer_cache_bytes
"""Default size of the cache of footers (I10)."""
COLD_READS_MAX = 8
"""Maximum number of row groups that `group` fetches and decodes at the same time (I10)."""
BATCH_OVERHEAD = 512
"""Memory of an Arrow batch in addition to its data."""


class ByteSource(Protocol):
    """A source of object bytes.

    Raises ObjectNotFound, Unavailable; Corrupt if an object is cut off.
    """

    async def read(self, key: str, start: int, length: int) -> Part:
        """Return bytes [start, start + length)."""

    async def sparse(self, key: str, size: int, ranges: Iterable[tuple[int, int]]) -> pa.Buffer:
        """Return a buffer as long as the object.

        It has at least the data of these (start, length) ranges.
        """


class StoreRanges:
    """A source that reads ranges from a store. `on_read` receives the size of each range."""

    def __init__(self, store: ObjectStore, on_read: Callable[[int], None] = lambda _: None) -> None:
        self._store = store
        self._on_read = on_read

    async def read(self, key: str, start: int, length: int) -> bytes:
        data = await self._store.get_range(key, start, length)
        if len(data) != length:
            raise cut_off(key, len(data), length, start)
        self._on_read(length)
        return data

    async def sparse(self, key: str, size: int, ranges: Iterable[tuple[int, int]]) -> pa.Buffer:
        # Memory pages that are never written take no memory.
        body = np.zeros(size, np.uint8)
        for start, length in ranges:
            body[start : start + length] = np.frombuffer(
                await self.read(key, start, length), np.uint8
            )
        return pa.py_buffer(body)  # type: ignore[arg-type]


class MappedFiles:
    """A source that maps the files of a folder into memory, which saves two copies."""

    def __init__(self, folder: ReadOnlyFolder) -> None:
        self._folder = folder

    async def read(self, key: str, start: int, length: int) -> memoryview:
        return memoryview(self._map(key, start + length))[start : start + length]

    async def sparse(self, key: str, size: int, ranges: Iterable[tuple[int, int]]) -> pa.Buffer:
        return self._map(key, size)

    def _map(self, key: str, end: int) -> pa.Buffer:
        body = self._folder.map(key)
        if body.size < end:
            raise Corrupt(key, f"has {body.size} of {end} bytes: it is cut off")
        return body


def source_of(store: ObjectStore) -> ByteSource:
    """Return the fastest source for large reads. The files of a folder are mapped."""
    if isinstance(store, FolderStore) and (root := folder_of(store.url)) is not None:
        store = ReadOnlyFolder(root)
    return MappedFiles(store) if isinstance(store, ReadOnlyFolder) else StoreRanges(store)


class FetchedGroups(NamedTuple):
    """Row groups of a range, not decoded yet.

    `body` is as long as the segment and has the bytes of these row groups.
    """

    of: SegmentRange
    footer: Footer
    groups: Sequence[RowGroup]
    body: pa.Buffer

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Verify the bytes, then yield these columns of RECORD_SCHEMA in offset order.

        Omit rows outside the range.
        """
        segment_range, groups = self.of, self.groups
        if not groups:
            return
        is_cut = (
            groups[0].base_offset < segment_range.start or groups[-1].end_offset > segment_range.end
        )
        names = [*columns, "offset"] if is_cut and "offset" not in columns else list(columns)
        with self.footer.verified(self.body, groups, segment_range.key) as file:
            indexes = [group.index for group in groups]
            # A full row group is one batch. With other batch sizes, each row is copied once more.
            for batch in file.iter_batches(GROUP_ROWS, indexes, names, use_threads=False):
                if is_cut:
                    batch = between(batch, segment_range.start, segment_range.end)
                if batch.num_rows:
                    yield batch.select(list(columns))

    def batch(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Verify, then decode whole row groups into one batch of a few megabytes.

        This is one call of Parquet, which takes the GIL once.
        """
        with self.footer.verified(self.body, self.groups, self.of.key) as file:
            indexes = [group.index for group in self.groups]
            table = file.read_row_groups(indexes, list(columns), use_threads=False)
            (batch,) = table.combine_chunks().to_batches()
        return batch


class SegmentReader:
    """A reader of segments with a cache of footers, and perhaps one of decoded row groups.

    Row groups are cached if `group_bytes` is given; they are decoded in threads of `executor`, by
    default the loop's executor. Owned by one event loop.
    """

    def __init__(
        self,
        source: ByteSource,
        *,
        footer_bytes: int = FOOTER_CACHE_BYTES,
        group_bytes: int = 0,
        executor: Executor | None = None,
    ) -> None:
        self.footers: Cache[str, Footer] = Cache(footer_bytes, lambda footer: footer.nbytes)
        self.groups: Cache[tuple[str, int], pa.RecordBatch] = Cache(
            group_bytes, lambda batch: batch.nbytes + BATCH_OVERHEAD
        )
        self.cold_reads = 0  # row groups that were read from the store
        self._source = source
        self._cold = asyncio.Semaphore(COLD_READS_MAX)
        self._executor = executor

    async def footer(self, key: str, size: int) -> Footer:
        """Return the footer of a segment of `size` bytes."""

        async def load() -> Footer:
            want = min(size, FOOTER_READ_BYTES)
            tail = await self._source.read(key, size - want, want)
            needed = min(footer_length(tail, key), size)
            if needed > want:
                tail = await self._source.read(key, size - needed, needed)
            return read_footer(tail, size, key)

        return await self.footers.get(key, load)

    async def group(self, key: str, footer: Footer, group: RowGroup) -> pa.RecordBatch:
        """Return one row group with all columns (RECORD_SCHEMA)."""

        async def load() -> pa.RecordBatch:
            async with self._cold:
                self.cold_reads += 1
                data = await self._source.read(key, group.start, group.length)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(
                    self._executor, footer.decode_group, group.index, data, key
                )

        return await self.groups.get((key, group.index), load)

    async def batches(
        self, key: str, footer: Footer, groups: Sequence[RowGroup]
    ) -> AsyncIterator[tuple[RowGroup, pa.RecordBatch]]:
        """Yield row groups with their records.

        If there is a cache of row groups, fetch the next one ahead.
        """
        for position, group in enumerate(groups):
            for following in groups[position + 1 : position + 2]:
                self._prefetch(key, footer, following)
            yield group, await self.group(key, footer, group)

    def _prefetch(self, key: str, footer: Footer, group: RowGroup) -> None:
        has_room = self.groups.bytes_max > 0 and not self._cold.locked()
        if has_room and not self.groups.peek((key, group.index)):
            # Ignore a failure: the caller that needs the row group will get the error.
            task = asyncio.ensure_future(self.group(key, footer, group))
            task.add_done_callback(retrieve_exception)

    async def first_at(
        self, key: str, size: int, timestamp_ms: int, start: int, end: int
    ) -> int | None:
        """Return the first offset of [start, end) with that timestamp or a later one, or None."""
        footer = await self.footer(key, size)
        for group in footer.groups_between(start, end):
            if group.timestamp_max >= timestamp_ms:
                batch = between(await self.group(key, footer, group), start, end)
                offset = first_at(batch, timestamp_ms)
                if offset is not None:
                    return offset
        return None

    async def fetch(
        self, segment_range: SegmentRange, is_needed: Callable[[RowGroup], bool] = lambda _: True
    ) -> FetchedGroups:
        """Fetch the needed row groups of a range. The caller decodes the columns that it needs."""
        footer = await self.footer(segment_range.key, segment_range.size)
        groups = [group for group in groups_of(segment_range, footer) if is_needed(group)]
        body = await self._source.sparse(segment_range.key, segment_range.size, _ranges(groups))
        return FetchedGroups(segment_range, footer, groups, body)


def groups_of(segment_range: SegmentRange, footer: Footer) -> Sequence[RowGroup]:
    within = footer.groups_between(segment_range.start, segment_range.end)
    first, last = (
        len(within) * share // segment_range.shares
        for share in (segment_range.share, segment_range.share + 1)
    )
    return within[first:last]


def _ranges(groups: Iterable[RowGroup]) -> list[tuple[int, int]]:
    """Return (start, length) of row groups. Neighbours are joined up to FETCH_BYTES."""
    ranges: list[tuple[int, int]] = []
    for group in groups:
        if ranges:
            start, length = ranges[-1]
            if start + length == group.start and length + group.length <= FETCH_BYTES:
                ranges[-1] = (start, length + group.length)
                continue
        ranges.append((group.start, group.length))
    return ranges


def between(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """Return the records of [start, end) of a batch with the column `offset`."""
    first, last = np.searchsorted(batch.column("offset").to_numpy(), [start, end]).tolist()
    return batch.slice(first, last - first)


def first_at(batch: pa.RecordBatch, timestamp_ms: int) -> int | None:
    """Return the first offset with that timestamp or a later one, or None."""
    stamps = chunks.timestamps_us(batch.column("timestamp"))
    hits = np.flatnonzero(stamps >= timestamp_ms * record_columns.US_PER_MS)
    return int(batch.column("offset")[int(hits[0])].as_py()) if len(hits) else None


class Cancellable(Protocol):
    """A future of asyncio or of concurrent.futures."""

    def cancel(self) -> object: ...


def started_ahead(
    items: Iterable[Item],
    start: Callable[[Item], Started],
    cost: Callable[[Item], int],
    *,
    items_max: int,
    bytes_max: int,
) -> Generator[tuple[Item, Started]]:
    """Yield each item with its started work, in order, and start the work of the next items ahead.

    The started items are at most `items_max`, with a total cost of at most `bytes_max` (I10), but
    always at least one. If the caller closes the generator, work that was not yielded is cancelled.
    """
    remaining_items = deque(items)
    waiting: deque[tuple[Item, Started]] = deque()
    try:
        while remaining_items or waiting:
            ahead = sum(cost(item) for item, _ in waiting)
            while remaining_items and (
                not waiting
                or (len(waiting) < items_max and ahead + cost(remaining_items[0]) <= bytes_max)
            ):
                item = remaining_items.popleft()
                ahead += cost(item)
                waiting.append((item, start(item)))
            yield waiting.popleft()
    finally:
        for _, work in waiting:
            work.cancel()
