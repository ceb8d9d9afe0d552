"""Reads over both tiers: the tail from memory or the WAL, history from Parquet segments.

A read is a walk: at each offset one piece of records is found, wherever it lies, and the next
offset follows from it. Only what the state says is committed is looked at (I3); below `sealed_end`
the table is the log, from there on the tail (I7). Everything that comes from the store is verified
before it is used, and a bad object fails the partitions that need it, by name. Never lists.

The manifest that is loaded may be old: a segment that it names and that is gone was merged,
compacted or retained since. Then the newest manifest decides, once, and only what that one names
has to be there. Segments of a partition leave no hole between them, whatever compaction takes out
of them: where one begins above an offset, retention was faster than this broker's view.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from storage import chunk as chunks
from storage import segment as segments
from storage.cache import Cache
from storage.clock import Clock
from storage.errors import Corrupt, NotFound, OffsetOutOfRange
from storage.manifest import SegmentIndex, Table, seal_app_id
from storage.model import SegmentFile
from storage.objectstore import ObjectStore
from storage.partition import Partition, Run
from storage.state import Topic
from storage.tail import TailCache
from storage.told import ToldBodies

T = TypeVar("T")

READ_AHEAD_RUNS = 16
"""Tail runs that are not in memory are fetched this many at once."""
GAP_RUNS_MAX = 16
"""Others' runs that are decoded, ~30 us each, to keep a tail in one piece."""
REFRESH_S = 30.0
"""How long records that compaction took may still be read from the manifest as it was."""


class Piece(NamedTuple):
    """Records of RECORD_SCHEMA in offset order. `is_json`: keys and values are known JSON text."""

    batch: pa.RecordBatch
    is_json: bool


class Taken(NamedTuple):
    """Pieces up to the asked bytes, and the offset to go on from."""

    pieces: list[Piece]
    next_offset: int


class ReaderSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    chunk_cache_bytes: int = 64 * 1024 * 1024
    segment_cache_bytes: int = 256 * 1024 * 1024
    footer_cache_bytes: int = 32 * 1024 * 1024
    cold_reads_max: int = 8


class Reader:
    """Owned by one event loop; decoding runs in threads of its own."""

    def __init__(
        self,
        store: ObjectStore,
        tail: TailCache,
        table_of: Callable[[Topic], Awaitable[Table]],
        settings: ReaderSettings,
    ) -> None:
        self.store = store
        self.tail = tail
        self.told = ToldBodies()
        self.cold_reads = 0
        self.chunk_cache: Cache[tuple[str, int], pa.RecordBatch] = Cache(
            settings.chunk_cache_bytes, _batch_bytes
        )
        self.group_cache: Cache[tuple[str, int], pa.RecordBatch] = Cache(
            settings.segment_cache_bytes, _batch_bytes
        )
        self.footer_cache: Cache[str, segments.Footer] = Cache(
            settings.footer_cache_bytes, lambda footer: footer.nbytes
        )
        self._table_of = table_of
        self._refreshed_s: dict[str, float] = {}  # by topic id, of the few that are compacted
        self._cold = asyncio.Semaphore(settings.cold_reads_max)
        self._threads = ThreadPoolExecutor(2, "tidelog-read")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, topic: Topic, number: int, offset: int, bytes_max: int) -> Taken:
        """Committed records from `offset` on: about `bytes_max` bytes of keys and values, and at
        least one record when there is any. `offset` is within the partition's range.

        Raises Corrupt when an object on the way does not verify, OffsetOutOfRange when retention
        took what is at `offset` before our view knew.
        """
        pieces: list[Piece] = []
        budget = bytes_max
        end = topic.partitions[number].high_watermark
        try:
            async for piece in self._walk(topic, number, offset, bytes_max):
                rows, used = _rows_within(piece.batch, budget, at_least=0 if pieces else 1)
                if rows:
                    pieces.append(Piece(piece.batch.slice(0, rows), piece.is_json))
                    offset = int(piece.batch.column(0)[rows - 1].as_py()) + 1
                    budget -= used
                if rows < piece.batch.num_rows or budget <= 0:
                    break
            else:  # nothing is left up to there, be the last offsets taken by a compaction
                offset = max(offset, end)
        except OffsetOutOfRange:
            if not pieces:
                raise
            # What was read counts; whoever goes on there hears of the new start.
        return Taken(pieces, offset)

    async def offset_for_timestamp(self, topic: Topic, number: int, timestamp: int) -> int | None:
        """The first offset whose timestamp (ms) is at or after `timestamp`; None when there is
        none."""
        partition = topic.partitions[number]
        # All three as of now: while we read, a seal may trim the tail, a retention move its start.
        start, sealed_end = partition.log_start_offset, partition.sealed_end
        tail = list(partition.tail)
        if sealed_end > start:
            found = await self._search_table(topic, number, timestamp, start, sealed_end)
            if found is not None:
                return found
        for run in tail:
            newest = run.append_ms if run.append_ms >= 0 else run.timestamp_max
            if newest >= timestamp:
                batch = await self._run_batch(run)
                first = max(sealed_end, start) - run.base_offset
                hit = _first_at(batch, timestamp, max(first, 0))
                if hit is not None:
                    return run.base_offset + hit
        return None

    # -- the walk

    async def _walk(
        self, topic: Topic, number: int, offset: int, bytes_max: int
    ) -> AsyncIterator[Piece]:
        """Everything from `offset` on. `bytes_max` is a hint: nobody will want much more."""
        partition = topic.partitions[number]
        end = partition.high_watermark
        while offset < end:
            # What lies in memory still has the records that compaction took since it was sealed.
            is_taken = offset < partition.sealed_end and _is_compacted(topic)
            held = [] if is_taken else self.tail.read((topic.topic_id, number), offset)
            if held:
                for part in held:
                    while offset < part.end_offset:
                        batch = part.batch.slice(offset - part.base_offset)
                        batch = batch.slice(0, chunks.rows_bound(batch, bytes_max))
                        yield Piece(chunks.with_offsets(batch, offset), part.is_json)
                        offset += batch.num_rows
            elif offset < (sealed_end := partition.sealed_end):  # may move on while we read
                async for piece in self._walk_table(topic, number, offset, sealed_end):
                    yield piece
                    offset = int(piece.batch.column(0)[-1].as_py()) + 1
                offset = max(offset, sealed_end)
            else:
                run = partition.tail[partition.run_at(offset)]
                self._read_ahead(partition, offset)
                whole = await self._run_batch(run)
                self._keep(topic, number, run, whole)
                batch = whole.slice(offset - run.base_offset)
                yield Piece(chunks.with_offsets(batch, offset), run.is_json)
                offset = run.end_offset

    async def _walk_table(
        self, topic: Topic, number: int, offset: int, end: int
    ) -> AsyncIterator[Piece]:
        """Of [offset, end), where `end` was sealed: what the table holds beyond it is in the tail
        still."""
        stale = ""
        while offset < end:
            index = await self._index(topic, number, end - 1)
            file = index.at_or_after(offset)
            if file is None or file.base_offset > offset:
                held = topic.partitions[number]
                at = end if file is None else min(file.base_offset, end)
                raise OffsetOutOfRange(
                    topic.name,
                    number,
                    offset,
                    log_start_offset=max(at, held.log_start_offset),
                    high_watermark=held.high_watermark,
                )
            try:
                async for batch, is_json in self._walk_segment(topic, file, offset, end):
                    yield Piece(batch, is_json)
                    offset = int(batch.column(0)[-1].as_py()) + 1
            except NotFound as error:
                if file.path == stale:
                    raise _missing(error.key) from error
                stale = file.path
                await (await self._table_of(topic)).refresh()
            else:
                offset = max(offset, file.end_offset)

    async def _walk_segment(
        self, topic: Topic, file: SegmentFile, offset: int, end: int
    ) -> AsyncIterator[tuple[pa.RecordBatch, bool]]:
        """Its records of [offset, end), group by group. Raises NotFound when it is gone."""
        key = f"{topic.prefix}/{file.path}"
        footer = await self._footer(key, file.size)
        groups = footer.groups_between(offset, end)
        for position, group in enumerate(groups):
            if position + 1 < len(groups):
                self._prefetch(key, footer, groups[position + 1].index)
            batch = _between(await self._group(key, footer, group.index), offset, end)
            if batch.num_rows:
                yield batch, footer.is_json

    async def _index(self, topic: Topic, number: int, offset: int) -> SegmentIndex:
        """The partition's segments, from a manifest that is new enough to reach `offset`."""
        table = await self._table_of(topic)
        now_s = asyncio.get_running_loop().time()
        if _is_compacted(topic) and now_s - self._refreshed_s.get(topic.topic_id, 0.0) > REFRESH_S:
            self._refreshed_s[topic.topic_id] = now_s
            await table.refresh()
        index = await table.segments(number)
        if index.end_offset <= offset:
            await table.refresh()
            index = await table.segments(number)
        if index.end_offset <= offset:
            # Retention may have taken the newest: the seal's transaction says what was there.
            reached = await table.transaction_version(seal_app_id(number)) or 0
            if reached <= offset:
                raise Corrupt(
                    f"{topic.prefix}/_delta_log",
                    f"partition {number} ends at {index.end_offset}, the WAL says offset {offset} "
                    "is sealed",
                )
        return index

    # -- segments

    async def _search_table(
        self, topic: Topic, number: int, timestamp: int, start: int, end: int
    ) -> int | None:
        """The first offset of [start, end) with that timestamp or a later one."""
        stale = ""
        while True:
            index = await self._index(topic, number, end - 1)
            file: SegmentFile | None = None
            try:
                for file in index.since(timestamp):
                    found = await self._search_segment(topic, file, timestamp, start)
                    if found is not None and found < end:
                        return found
                return None
            except NotFound as error:
                if file is None or file.path == stale:
                    raise _missing(error.key) from error
                stale = file.path
                await (await self._table_of(topic)).refresh()

    async def _search_segment(
        self, topic: Topic, file: SegmentFile, timestamp: int, start: int
    ) -> int | None:
        key = f"{topic.prefix}/{file.path}"
        footer = await self._footer(key, file.size)
        for group in footer.groups:
            if group.timestamp_max < timestamp or group.end_offset <= start:
                continue
            batch = await self._group(key, footer, group.index)
            first = int(np.searchsorted(batch.column(0).to_numpy(), start))
            hit = _first_at(batch, timestamp, first)
            if hit is not None:
                return int(batch.column(0)[hit].as_py())
        return None

    async def _footer(self, key: str, size: int) -> segments.Footer:
        async def load() -> segments.Footer:
            want = min(size, segments.FOOTER_READ_BYTES)
            tail = await self._get(key, size - want, want)
            needed = min(segments.footer_length(tail, key), size)
            if needed > len(tail):
                tail = await self._get(key, size - needed, needed)
            return segments.read_footer(tail, size, key)

        return await self.footer_cache.get(key, load)

    async def _group(self, key: str, footer: segments.Footer, index: int) -> pa.RecordBatch:
        async def load() -> pa.RecordBatch:
            group = footer.groups[index]
            async with self._cold:
                self.cold_reads += 1
                data = await self._get(key, group.start, group.length)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(
                    self._threads, footer.decode_group, index, data, key
                )

        return await self.group_cache.get((key, index), load)

    def _prefetch(self, key: str, footer: segments.Footer, index: int) -> None:
        if not self.group_cache.peek((key, index)) and not self._cold.locked():
            task = asyncio.ensure_future(self._group(key, footer, index))
            task.add_done_callback(_ignore)

    # -- the tail in the WAL

    def _keep(self, topic: Topic, number: int, run: Run, batch: pa.RecordBatch) -> None:
        """What another broker committed, once somebody reads it here: whoever follows the partition
        gets it in large pieces, as if it were our own."""
        self.tail.add_read(
            (topic.topic_id, number),
            run.base_offset,
            batch,
            is_json=run.is_json,
            nbytes=run.raw_size * run.count // run.rows,
            is_newest=run.end_offset == topic.partitions[number].high_watermark,
        )

    def _read_ahead(self, partition: Partition, offset: int) -> None:
        first = partition.run_at(offset)
        for run in partition.tail[first : first + READ_AHEAD_RUNS]:
            if not self.chunk_cache.peek((run.object_key, run.position)):
                asyncio.ensure_future(self._run_batch(run)).add_done_callback(_ignore)

    async def _run_batch(self, run: Run) -> pa.RecordBatch:
        """The run's records, CHUNK_SCHEMA, stamped as readers see them."""

        async def load() -> pa.RecordBatch:
            where = (run.object_key, run.position, run.size)
            body = self.told.get(*where, run.crc32c)
            try:
                return run.decode(body or await self._get(*where))
            except NotFound as error:
                raise _missing(error.key) from error

        return _rows_of(run, await self.chunk_cache.get((run.object_key, run.position), load))

    def close_gap(self, topic: Topic, number: int, offset: int) -> None:
        """Before our own records from `offset` on: what others committed since ours before them, if
        they told us. Else the tail that is held would end there, and begin anew."""
        key, partition = (topic.topic_id, number), topic.partitions[number]
        end = self.tail.end(key)
        if end is None or end >= offset:
            return
        first = partition.run_at(end)
        for run in partition.tail[max(first, 0) : first + GAP_RUNS_MAX]:
            if run.base_offset != end or end >= offset:
                return
            body = self.told.get(run.object_key, run.position, run.size, run.crc32c)
            if body is None:
                return
            try:
                batch = _rows_of(run, run.decode(body))
            except Corrupt:  # whoever reads it is told
                return
            self._keep(topic, number, run, batch)
            end = run.end_offset

    async def _get(self, key: str, start: int, length: int) -> bytes:
        data = await self.store.get_range(key, start, length)
        if len(data) != length:
            raise Corrupt(key, f"has {len(data)} of {length} bytes at {start}: it is cut off")
        return data


async def read_awake(clock: Clock, nap_max_s: float, read: Callable[[], Awaitable[T]]) -> T:
    """What `read` finds: once more when it finds damage after we slept in the middle of it. What
    it went by may have been collected since, and is missed by nobody else."""
    while True:
        started_s = clock.boot_s()
        try:
            return await read()
        except Corrupt:
            if clock.boot_s() - started_s <= nap_max_s:
                raise


def _rows_of(run: Run, chunk: pa.RecordBatch) -> pa.RecordBatch:
    """The run's share of its chunk, stamped as readers see it."""
    batch = chunk.slice(run.first_row, run.count)
    return batch if run.append_ms < 0 else chunks.with_timestamp(batch, run.append_ms)


def _is_compacted(topic: Topic) -> bool:
    return "compact" in topic.configs.get("cleanup.policy", "")


def _missing(key: str) -> Corrupt:
    return Corrupt(key, "is named by the log and does not exist")


def _rows_within(batch: pa.RecordBatch, budget: int, *, at_least: int) -> tuple[int, int]:
    """How many leading rows fit the budget, and their bytes of key and value."""
    before = chunks.sizes_before(batch.slice(0, chunks.rows_bound(batch, budget)))
    rows = max(int(before.searchsorted(budget, side="right")) - 1, at_least)
    rows = min(rows, batch.num_rows)
    return rows, int(before[rows])


def _between(batch: pa.RecordBatch, offset: int, end: int) -> pa.RecordBatch:
    offsets = batch.column(0).to_numpy()
    first, last = np.searchsorted(offsets, [offset, end])
    return batch.slice(int(first), int(last - first))


def _first_at(batch: pa.RecordBatch, timestamp: int, first: int) -> int | None:
    """Index of the first row from `first` on with that timestamp (ms) or a later one."""
    stamps = chunks.timestamps_us(batch.column("timestamp"))[first:]
    hits = np.flatnonzero(stamps >= timestamp * chunks.US_PER_MS)
    return first + int(hits[0]) if len(hits) else None


def _batch_bytes(batch: pa.RecordBatch) -> int:
    return batch.nbytes + 512


def _ignore(task: "asyncio.Future[pa.RecordBatch]") -> None:
    """Reading ahead is a guess: whoever needs the data meets the error itself."""
    if not task.cancelled():
        task.exception()
