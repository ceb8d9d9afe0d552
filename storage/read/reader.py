"""A broker's reads of both tiers: the tail from memory or the WAL, older records from segments.

At each offset a read finds one batch of records in the tier that has the offset. The end of the
batch gives the next offset. The state decides which records are committed (I3). The tail cache has
the newest records; some of them may be sealed. Of the other records, those below `sealed_end` come
from the table, all others from their tail chunks (I7). All bytes from the store are verified before
use. A corrupt object fails only reads that need it; the error has the object's key. A read never
lists objects.

The loaded manifest may be old: the segments that it names may have been merged, compacted or
removed by retention since. If a segment is gone, the reader loads the newest manifest once. The
segments that this manifest names must exist. The offset ranges of a partition's segments have no
hole, even if compaction removed records. So if no segment covers the wanted offset, a retention is
newer than this broker's view, or the table is in doubt (storage.tables.foreign_commits). A read
never skips the hole.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple, NoReturn

import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.batches_as_sent import KeptBatches, Records
from tidelog.storage.core.actions import KAFKA_CODEC
from tidelog.storage.core.errors import (
    Corrupt,
    DamagedRecords,
    ObjectNotFound,
    TableInDoubt,
    missing_object,
)
from tidelog.storage.core.log_settings import ReaderSettings
from tidelog.storage.core.model import Part, ReadBounds, SegmentFile
from tidelog.storage.read.cache import Cache
from tidelog.storage.read.segment_reader import (
    BATCH_OVERHEAD,
    SegmentReader,
    StoreRanges,
    between,
    first_at,
)
from tidelog.storage.read.tail_cache import CachedBatch, TailCache
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.runtime.threads import Threads
from tidelog.storage.state.partition import Partition, TailChunk
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.foreign_commits import blamed, hole
from tidelog.storage.tables.manifest import (
    SegmentIndex,
    in_no_segment,
    segments_to,
)
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.tail_objects import TailObjects

__all__ = ["FetchResult", "Reader", "ReaderSettings"]


READ_AHEAD_CHUNKS = 16
"""Tail chunks, from the read's offset on, that are fetched at once if they are not in memory."""
READ_AHEAD_PART = 2
"""They have at most this part of the bytes of the cache. It would evict more before the read comes
to it, so each chunk would be fetched again and again."""
GAP_CHUNKS_MAX = 16
"""Maximum number of tail chunks of other brokers that one `close_gap` decodes, in ~30 us each."""
REFRESH_S = 30.0
"""How long a loaded manifest may still show records that key compaction removed."""


class ReadBatch(NamedTuple):
    """Records of RECORD_SCHEMA in offset order. If `is_json`, keys and values are JSON text."""

    batch: pa.RecordBatch
    is_json: bool


class ReadResult(NamedTuple):
    """Batches within the bounds of the read, where the next read starts, and their weight.

    The weight of the records is in bytes.
    """

    pieces: list[ReadBatch]
    next_offset: int
    weight: int


class FetchResult(NamedTuple):
    """The result of a fetch.

    At the end of the partition it has no pieces. The next fetch starts at `next_offset`. `weight`
    is that of the records, in bytes (chunk.weight).
    """

    pieces: list[ReadBatch]
    next_offset: int
    log_start_offset: int
    high_watermark: int
    weight: int = 0

    @property
    def records(self) -> int:
        return sum(len(piece.batch) for piece in self.pieces)


class Reader:
    """A broker's reader, owned by one event loop. It has two threads, which decode row groups."""

    def __init__(
        self,
        store: ObjectStore,
        tail: TailCache,
        tail_objects: TailObjects,
        tables: OpenTables,
        settings: ReaderSettings,
    ) -> None:
        self.store = store
        self.tail = tail
        self.tail_objects = tail_objects
        # Keys are a chunk's object, its position, and whether its batches are kept as they are.
        self.chunk_cache: Cache[tuple[str, int, bool], Records] = Cache(
            settings.chunk_cache_bytes, lambda records: records.nbytes + BATCH_OVERHEAD
        )
        self._tables = tables
        self._threads = Threads(2, "tidelog-read")
        self.segments = SegmentReader(
            StoreRanges(store),
            footer_bytes=settings.footer_cache_bytes,
            group_bytes=settings.segment_cache_bytes,
            executor=self._threads,
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, topic: Topic, number: int, offset: int, bounds: ReadBounds) -> ReadResult:
        """Return committed records from `offset` on, within the bounds, but at least one if any.

        `offset` must be within the partition's range.

        Raises Corrupt if the object with the record at `offset` does not verify; if this object is
        a chunk of the tail, the error is DamagedRecords. Raises TableInDoubt if the record is in no
        segment; perhaps a retention that is newer than this broker's view removed it. If a later
        record is damaged, return the records before the damage.
        """
        pieces: list[ReadBatch] = []
        budget, records = bounds.bytes_max, bounds.records_max
        end = min(topic.partitions[number].high_watermark, bounds.offset_end)
        try:
            async for piece in self._walk(topic, number, offset, bounds):
                least = 0 if pieces else 1
                rows, used = _rows_within(piece.batch, budget, records, at_least=least)
                if rows:
                    pieces.append(ReadBatch(piece.batch.slice(0, rows), piece.is_json))
                    offset = int(piece.batch.column(0)[rows - 1].as_py()) + 1
                    budget -= used
                    records -= rows
                if rows < piece.batch.num_rows or budget <= 0 or records <= 0:
                    break
            else:  # no record is left below `end`; key compaction may have removed some
                offset = max(offset, end)
        except Corrupt:
            if not pieces:
                raise
            # Return the records before the damage; the read from `offset` raises the error.
        return ReadResult(pieces, offset, bounds.bytes_max - budget)

    async def offset_for_timestamp(self, topic: Topic, number: int, timestamp: int) -> int | None:
        """Return the first offset whose timestamp (ms) is at or after `timestamp`, or None."""
        partition = topic.partitions[number]
        # Copy all three: during the awaits, a seal or a retention may change them.
        start, sealed_end = partition.log_start_offset, partition.sealed_end
        tail = list(partition.tail)
        if sealed_end > start:
            offset = await self._search_table(topic, number, timestamp, start, sealed_end)
            if offset is not None:
                return offset
        first = max(sealed_end, start)
        for chunk in tail:
            if chunk.newest_ms >= timestamp and chunk.end_offset > first and not chunk.is_lost:
                base = max(chunk.base_offset, first)
                batch = (await self._tail_batch(chunk)).slice(base - chunk.base_offset)
                offset = first_at(chunks.with_offsets(batch, base), timestamp)
                if offset is not None:
                    return offset
        return None

    async def read_segment(self, topic: Topic, file: SegmentFile) -> AsyncIterator[pa.RecordBatch]:
        """Yield all records of one segment of the table.

        These are also records that the WAL does not call sealed. Raises Corrupt, or ObjectNotFound
        if the object does not exist.
        """
        async for batch, _ in self._walk_segment(topic, file, file.base_offset, file.end_offset):
            yield batch

    # -- the walk

    async def _walk(
        self, topic: Topic, number: int, offset: int, bounds: ReadBounds
    ) -> AsyncIterator[ReadBatch]:
        """Yield all committed records from `offset` on.

        The caller stops at `bounds`; here they only limit the size of a batch from the cached tail.
        """
        partition = topic.partitions[number]
        end = min(partition.high_watermark, bounds.offset_end)
        while offset < end:
            # The cached tail may have sealed records that key compaction has since removed.
            is_cleaned = offset < partition.sealed_end and _is_compacted(topic)
            cached = [] if is_cleaned else self.tail.read((topic.topic_id, number), offset)
            if cached:
                for part in cached:
                    columns = await self._columns(topic, number, part)
                    while offset < min(part.end_offset, end):
                        batch = columns.slice(offset - part.base_offset)
                        rows = min(chunks.rows_bound(batch, bounds.bytes_max), bounds.records_max)
                        batch = batch.slice(0, min(rows, end - offset))
                        yield ReadBatch(chunks.with_offsets(batch, offset), part.is_json)
                        offset += batch.num_rows
            elif offset < (sealed_end := min(partition.sealed_end, end)):  # a seal may move it
                async for piece in self._walk_table(topic, number, offset, sealed_end):
                    yield piece
                    offset = int(piece.batch.column(0)[-1].as_py()) + 1
                offset = max(offset, sealed_end)
            else:
                chunk = partition.tail[partition.tail_index(offset)]
                if chunk.is_lost:
                    offset = chunk.end_offset
                    continue
                self._read_ahead(partition, offset)
                try:
                    whole = await self._tail_batch(chunk)
                except Corrupt as error:
                    raise _damaged(topic, number, chunk, error) from error
                self._keep(topic, number, chunk, whole)
                batch = whole.slice(offset - chunk.base_offset, end - offset)
                yield ReadBatch(chunks.with_offsets(batch, offset), chunk.is_json)
                offset = chunk.end_offset

    async def _columns(self, topic: Topic, number: int, part: CachedBatch) -> pa.RecordBatch:
        """Return the records of a cached piece as columns; kept batches are decoded once."""
        if not isinstance(part.records, KeptBatches):
            return part.records

        async def load() -> pa.RecordBatch:
            return part.decoded()

        key = f"{topic.topic_id}/{number}/{part.end_offset}", part.base_offset, False
        batch = await self.chunk_cache.get(key, load)
        assert not isinstance(batch, KeptBatches)
        return batch

    async def _walk_table(
        self, topic: Topic, number: int, offset: int, end: int
    ) -> AsyncIterator[ReadBatch]:
        """Yield the records of the sealed range [offset, end).

        Later records of the table are not read, because they are still in the tail.
        """
        stale = ""
        while offset < end:
            index = await self._index(topic, number, end)
            file = index.at_or_after(offset)
            if file is None or file.base_offset > offset:
                await self._raise_hole(topic, number, offset, end, index)
            try:
                async for batch, is_json in self._walk_segment(topic, file, offset, end):
                    yield ReadBatch(batch, is_json)
                    offset = int(batch.column(0)[-1].as_py()) + 1
            except ObjectNotFound as error:
                if file.path == stale:
                    raise missing_object(error.key) from error
                stale = file.path
                await (await self._tables.of(topic)).refresh()
            else:
                offset = max(offset, file.end_offset)

    async def _walk_segment(
        self, topic: Topic, file: SegmentFile, offset: int, end: int
    ) -> AsyncIterator[tuple[pa.RecordBatch, bool]]:
        """Yield the segment's records of [offset, end), a batch per row group.

        Raises ObjectNotFound.
        """
        key = f"{topic.prefix}/{file.path}"
        footer = await self.segments.footer(key, file.size)
        groups = footer.groups_between(offset, end)
        async for _, whole in self.segments.batches(key, footer, groups):
            batch = between(whole, offset, end)
            if batch.num_rows:
                yield batch, footer.is_json

    async def _search_table(
        self, topic: Topic, number: int, timestamp: int, start: int, end: int
    ) -> int | None:
        """Return the first offset of [start, end) with that timestamp (ms) or a later one."""
        stale = ""
        while True:
            index = await self._index(topic, number, end)
            if hole(index, start, end) is not None:
                await self._raise_hole(topic, number, start, end, index)
            file: SegmentFile | None = None
            try:
                for file in index.since(timestamp):
                    key = f"{topic.prefix}/{file.path}"
                    offset = await self.segments.first_at(key, file.size, timestamp, start, end)
                    if offset is not None:
                        return offset
                return None
            except ObjectNotFound as error:
                if file is None or file.path == stale:
                    raise missing_object(error.key) from error
                stale = file.path
                await (await self._tables.of(topic)).refresh()

    async def _raise_hole(
        self, topic: Topic, number: int, offset: int, end: int, index: SegmentIndex
    ) -> NoReturn:
        """Raise TableInDoubt for the first range of [offset, end) that is in no segment.

        The caller refreshes its view, because a newer retention may have removed the range.
        """
        missing_span = hole(index, offset, end)
        assert missing_span is not None
        table = await self._tables.of(topic)
        problem = f"partition {number}: {in_no_segment(*missing_span)}"
        raise TableInDoubt(topic.prefix, table.version, await blamed(table, problem))

    async def _index(self, topic: Topic, number: int, end: int) -> SegmentIndex:
        """Return the partition's segments from a manifest that reaches the sealed offset `end`."""
        age_max_s = REFRESH_S if _is_compacted(topic) else math.inf
        table = await self._tables.of(topic, age_max_s=age_max_s)
        if (await table.segments(number)).end_offset < end:
            await table.refresh()
        return await segments_to(table, number, end, topic.prefix)

    # -- the tail in the WAL

    async def kept_batches(
        self, topic: Topic, number: int, offset: int
    ) -> list[tuple[int, KeptBatches]]:
        """Return the batches from `offset` on that producers sent in Kafka's format.

        These are base offsets and batches of consecutive pieces. Return nothing if the record at
        `offset` is stored otherwise. Raises Corrupt (DamagedRecords).
        """
        partition = topic.partitions[number]
        if offset < partition.sealed_end and _is_compacted(topic):
            return []
        pieces: list[tuple[int, KeptBatches]] = []
        for piece in self.tail.read((topic.topic_id, number), offset):
            if not isinstance(piece.records, KeptBatches):
                return pieces
            pieces.append((piece.base_offset, piece.records))
        if pieces or offset < partition.sealed_end:
            return pieces
        chunk = partition.tail[partition.tail_index(offset)]
        if chunk.codec != KAFKA_CODEC:
            return []
        self._read_ahead(partition, offset)
        try:
            batches = chunk.batches_of(await self._stored_batches(chunk))
        except Corrupt as error:
            raise _damaged(topic, number, chunk, error) from error
        if batches is None:
            return []
        self._keep(topic, number, chunk, batches)
        return [(chunk.base_offset, batches)]

    def is_in_store(self, topic: Topic, number: int, offset: int) -> bool:
        """Return whether there is a record at `offset`, and not in the cached tail."""
        if not 0 <= number < len(topic.partitions):
            return False
        partition = topic.partitions[number]
        if not partition.log_start_offset <= offset < partition.high_watermark:
            return False
        is_cleaned = offset < partition.sealed_end and _is_compacted(topic)
        return is_cleaned or not self.tail.has((topic.topic_id, number), offset)

    def rows_end(self, topic: Topic, number: int, offset: int, bytes_max: int) -> int:
        """Return an offset after `offset` at which a read of rows must end.

        It is that of the first `kept_batches`, or one that a read of `bytes_max` bytes does not
        reach.
        """
        key, partition = (topic.topic_id, number), topic.partitions[number]
        kept_from = max(offset + 1, partition.sealed_end if _is_compacted(topic) else 0)
        far = max(offset, partition.sealed_end) + bytes_max // chunks.RECORD_BYTES
        for start, is_kept in _tail_starts(partition, self.tail.read_from(key, offset), offset):
            if start >= kept_from and (is_kept or start > far):
                return start
        return partition.high_watermark

    def _keep(self, topic: Topic, number: int, chunk: TailChunk, batch: Records) -> None:
        """Cache records that another broker committed.

        Later reads of the tail then get them in large batches, like the records of this broker.
        """
        key = topic.topic_id, number
        is_newest = chunk.end_offset == topic.partitions[number].high_watermark
        if self.tail.wants(key, chunk.base_offset, is_newest=is_newest):
            nbytes = chunk.raw_bytes
            self.tail.add(key, chunk.base_offset, batch, is_json=chunk.is_json, nbytes=nbytes)

    def _read_ahead(self, partition: Partition, offset: int) -> None:
        first = partition.tail_index(offset)
        bytes_left = self.chunk_cache.bytes_max // READ_AHEAD_PART
        for chunk in partition.tail[first : first + READ_AHEAD_CHUNKS]:
            bytes_left -= chunk.raw_bytes + BATCH_OVERHEAD
            if bytes_left < 0:
                return
            is_kept = chunk.codec == KAFKA_CODEC
            key = chunk.object_key, chunk.position, is_kept
            if not (chunk.is_lost or self.chunk_cache.peek(key)):
                # Ignore a failure: the read that needs the chunk will get the error.
                load = self._stored_batches if is_kept else self._tail_batch
                task = asyncio.ensure_future(load(chunk))
                task.add_done_callback(retrieve_exception)

    async def _tail_batch(self, chunk: TailChunk) -> pa.RecordBatch:
        """Return the tail chunk's records in CHUNK_SCHEMA, with the timestamps that readers get."""

        async def load() -> pa.RecordBatch:
            if chunk.codec != KAFKA_CODEC:
                return chunk.decode(await self._body(chunk))
            batches = await self._stored_batches(chunk)
            return await asyncio.get_running_loop().run_in_executor(self._threads, batches.decoded)

        batch = await self.chunk_cache.get((chunk.object_key, chunk.position, False), load)
        assert not isinstance(batch, KeptBatches)
        return chunk.records_of(batch)

    async def _stored_batches(self, chunk: TailChunk) -> KeptBatches:
        """Return all record batches of a chunk with the codec KAFKA_CODEC."""

        async def load() -> KeptBatches:
            return chunk.open(await self._body(chunk))

        batches = await self.chunk_cache.get((chunk.object_key, chunk.position, True), load)
        assert isinstance(batches, KeptBatches)
        return batches

    async def _body(self, chunk: TailChunk) -> Part:
        try:
            return await self.tail_objects.read(
                chunk.object_key, chunk.position, chunk.size, chunk.crc32c
            )
        except ObjectNotFound as error:
            raise missing_object(error.key) from error

    def close_gap(self, topic: Topic, number: int, offset: int) -> None:
        """Cache the records from the end of the cached tail to `offset`, if peers announced them.

        This broker's own records begin at `offset`. If there is a gap before them, the cache drops
        the records before the gap.
        """
        key, partition = (topic.topic_id, number), topic.partitions[number]
        end = self.tail.end(key)
        if end is None or end >= offset:
            return
        first = partition.tail_index(end)
        for chunk in partition.tail[max(first, 0) : first + GAP_CHUNKS_MAX]:
            if chunk.base_offset != end or end >= offset or chunk.is_lost:
                return
            body = self.tail_objects.peek(
                chunk.object_key, chunk.position, chunk.size, chunk.crc32c
            )
            if body is None:
                return
            records: Records | None
            try:
                if chunk.codec == KAFKA_CODEC:
                    records = chunk.batches_of(chunk.open(body))
                else:
                    records = chunk.records_of(chunk.decode(body))
            except Corrupt:  # a read of these records will get the error
                return
            if records is None:
                return
            self._keep(topic, number, chunk, records)
            end = chunk.end_offset


def _damaged(topic: Topic, number: int, chunk: TailChunk, error: Corrupt) -> DamagedRecords:
    return DamagedRecords(topic.name, number, chunk.base_offset, chunk.end_offset, error)


def _tail_starts(
    partition: Partition, cached: Sequence[CachedBatch], offset: int
) -> Iterator[tuple[int, bool]]:
    """Yield where the chunks and cached pieces from `offset` on begin, and if they are kept.

    Kept are batches of producers. Chunks that are cached are not looked at.
    """
    start, end = max(offset, partition.sealed_end), partition.high_watermark
    if not cached:
        yield from _chunk_starts(partition, start, end)
        return
    yield from _chunk_starts(partition, start, cached[0].base_offset)
    for piece in cached:
        yield piece.base_offset, isinstance(piece.records, KeptBatches)
    yield from _chunk_starts(partition, max(start, cached[-1].end_offset), end)


def _chunk_starts(partition: Partition, start: int, end: int) -> Iterator[tuple[int, bool]]:
    """Yield the same of the chunks from the one with `start` on that begin before `end`."""
    if start >= end:
        return
    for index in range(partition.tail_index(start), len(partition.tail)):
        chunk = partition.tail[index]
        if chunk.base_offset >= end:
            return
        yield chunk.base_offset, chunk.codec == KAFKA_CODEC and not chunk.is_lost


def _is_compacted(topic: Topic) -> bool:
    return "compact" in topic.config.cleanup_policy


def _rows_within(
    batch: pa.RecordBatch, budget: int, rows_max: int, *, at_least: int
) -> tuple[int, int]:
    """Return how many of the first rows are within the bounds, and their weight.

    The bounds are `budget` bytes and `rows_max` rows, but not fewer rows than `at_least`.
    """
    first = batch.slice(0, min(chunks.rows_bound(batch, budget), rows_max))
    weights = chunks.weight_before(first)
    rows = max(int(weights.searchsorted(budget, side="right")) - 1, at_least)
    rows = min(rows, first.num_rows)
    return rows, int(weights[rows])
