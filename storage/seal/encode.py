"""Tails as Parquet segments, which a sealer uploads.

A seal encodes the tails of several partitions. The records that are in the tail cache are taken
from there; the chunks before and after them are read from the store in windows (tail_windows). The
event loop only looks up the tails and fetches the windows. A thread of the lowest priority decodes
the chunks and encodes the segments, in runs of thousands of records. Memory is bounded (I10): one
seal at a time has the chunks of one window, and for each of its partitions one run, one row group
and one segment.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_columns
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.batches_as_sent import KeptBatches, undecodable
from tidelog.storage.codec.record_batch import UNDECODABLE
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import KAFKA_CODEC
from tidelog.storage.core.errors import Corrupt, DamagedRecords
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.tail_cache import CachedBatch
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.threads import Threads, lower_priority
from tidelog.storage.seal.tail_windows import FetchedWindow, Window, fetch, windows
from tidelog.storage.state.partition import Partition, TailChunk
from tidelog.storage.state.topic import Topic

T = TypeVar("T")

log = logging.getLogger("tidelog.sealer")

TOGETHER_BYTES_MAX = 128 * 1024 * 1024
"""Stored bytes of the tails that are encoded together, in one pass over their objects. One larger
tail is encoded alone."""
LATE_FACTOR = 2
"""A tail of this many times `segment.bytes` or `segment.ms` is encoded at normal priority. This
costs producers a third of their throughput, until the broker has sealed what it has taken."""
ENCODERS_A_SLICE = 500
"""Partitions whose tails are looked up at once, in ~5 us each, before the event loop runs other
work."""
JOB_BYTES = 16 * 1024 * 1024
"""Bytes of cached records that one call in the thread encodes. Its segments are uploaded while the
next call runs."""


class EncodedSegment(NamedTuple):
    """A segment before its upload to the path of `file`.

    `lost_end` is the end offset of the last lost records below the segment's end, in this segment
    or an earlier one of the seal. If there are none, it is 0.
    """

    file: SegmentFile
    body: memoryview
    lost_end: int = 0


class TailSegments:
    """Encodes tails, in a thread of the lowest priority.

    Owned by one event loop. `level` returns the cluster's level of the format.
    """

    def __init__(self, reader: Reader, clock: Clock, level: Callable[[], int]) -> None:
        self._reader = reader
        self._clock = clock
        self._level = level
        self._idle = Threads(1, "tidelog-seal", initializer=lower_priority)
        # For tails that are overdue. A thread cannot raise its priority again.
        self._hurried = Threads(1, "tidelog-seal-now")
        self._turn = asyncio.Lock()

    def close(self) -> None:
        for threads in (self._idle, self._hurried):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encoded(
        self, topic: Topic, ranges: Mapping[int, tuple[int, int]], damage: dict[int, Corrupt]
    ) -> AsyncGenerator[EncodedSegment]:
        """Yield the records of these offset ranges [base, end), by partition, as segments.

        The segments of a partition are in offset order, those of different partitions are mixed.

        Segments have no rows for lost records, nor for damaged records below the log start. If
        other records are damaged, yield the records before them, and add the error to `damage`.
        Raises Unavailable.
        """
        config = topic.config
        target = _Target(config.compression_type, self._level(), config.segment_bytes)
        for numbers in _together(topic, ranges):
            async with self._turn:
                encoders: list[_Encoder] = []
                for number in numbers:
                    tail = self._tail(topic, number, *ranges[number])
                    log_start = topic.partitions[number].log_start_offset
                    encoders.append(_Encoder(topic, number, tail, log_start, target))
                    if not len(encoders) % ENCODERS_A_SLICE:
                        await asyncio.sleep(0)
                late_ms = _late_ms(topic, numbers, config)
                async for part in self._parts(encoders, late_ms):
                    for written_segment in part:
                        yield self._named(written_segment)
            for encoder in encoders:
                if encoder.error is not None:
                    damage[encoder.number] = encoder.error
                if encoder.undecodable:
                    log.error(
                        "%s partition %d: sealed %d records of batches that do not decode; each "
                        "has a header %s with the reason",
                        topic.prefix,
                        encoder.number,
                        encoder.undecodable,
                        UNDECODABLE,
                    )

    async def _parts(
        self, encoders: "list[_Encoder]", late_ms: float
    ) -> "AsyncGenerator[list[_Written]]":
        async def run(work: Callable[..., T], *arguments: object) -> T:
            threads = self._hurried if self._clock.now_ms() >= late_ms else self._idle
            return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

        if any(encoder.tail.stored for encoder in encoders):
            by_number = {encoder.number: encoder for encoder in encoders}
            for window in await run(_plan, encoders):
                fetched = await fetch(self._reader.store, window)
                yield await run(_take, by_number, fetched)
        job: list[_Encoder] = []
        size = 0
        for encoder in encoders:
            job.append(encoder)
            size += sum(piece.nbytes for piece in encoder.tail.cached)
            if size >= JOB_BYTES or encoder is encoders[-1]:
                yield await run(_finish, job)
                job, size = [], 0

    def _tail(self, topic: Topic, number: int, base: int, end: int) -> "_Tail":
        cached = self._reader.tail.read_from((topic.topic_id, number), base)
        return _Tail.of(topic.partitions[number], base, end, cached)

    def _named(self, written_segment: "_Written") -> EncodedSegment:
        segment = written_segment.segment
        unique = self._clock.new_id().hex()
        path = object_keys.segment(
            written_segment.number, written_segment.base_offset, written_segment.end_offset, unique
        )
        stamps = segment.timestamp_min, segment.timestamp_max
        span = written_segment.base_offset, written_segment.end_offset
        file = SegmentFile(path, written_segment.number, *span, segment.size, segment.rows, *stamps)
        return EncodedSegment(file, memoryview(segment.body), written_segment.lost_end)


def _together(topic: Topic, ranges: Iterable[int]) -> list[list[int]]:
    """Group partitions that are encoded together."""
    groups: list[list[int]] = []
    size = 0
    for number in ranges:
        nbytes = topic.partitions[number].tail_bytes
        if not groups or size + nbytes > TOGETHER_BYTES_MAX:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += nbytes
    return groups


def _late_ms(topic: Topic, numbers: Iterable[int], config: TopicConfig) -> float:
    """Return when these tails are too far beyond their limits for a thread of low priority.

    A thread of the lowest priority may not get the CPU time to seal them.
    """
    late_ms = math.inf
    for partition in (topic.partitions[number] for number in numbers):
        if partition.tail_bytes >= LATE_FACTOR * config.segment_bytes:
            return 0
        if partition.tail:
            late_ms = min(late_ms, partition.tail[0].committed_ms)
    return late_ms + LATE_FACTOR * config.segment_ms


def _plan(encoders: "Sequence[_Encoder]") -> list[Window]:
    return windows({encoder.number: encoder.stored() for encoder in encoders})


def _take(encoders: "Mapping[int, _Encoder]", fetched: FetchedWindow) -> "list[_Written]":
    for number in fetched.window.chunks:
        encoders[number].take(fetched.batches(number))
    return [
        written_segment
        for number in fetched.window.chunks
        for written_segment in encoders[number].pop_written()
    ]


def _finish(encoders: "Sequence[_Encoder]") -> "list[_Written]":
    for encoder in encoders:
        encoder.finish()
    return [written_segment for encoder in encoders for written_segment in encoder.pop_written()]


class _Target(NamedTuple):
    """How segments are encoded: codec, level of the format, maximum weight of a segment."""

    codec: str
    level: int
    weight_max: int


class _Written(NamedTuple):
    """A segment of the offsets [base_offset, end_offset) of a partition."""

    number: int
    base_offset: int
    end_offset: int
    segment: segments.Written
    lost_end: int


class _Tail(NamedTuple):
    """The tail [base, end) of a partition, as it was at one moment.

    `stored` are the chunks with records that `cached` does not have, and perhaps some others.
    """

    base: int
    end: int
    stored: Sequence[TailChunk]
    cached: Sequence[CachedBatch]

    @classmethod
    def of(
        cls, partition: Partition, base: int, end: int, cached: Sequence[CachedBatch]
    ) -> "_Tail":
        if not cached or cached[0].base_offset >= end:
            return cls(base, end, _chunks(partition, base, end), ())
        stored: list[TailChunk] = []
        if cached[0].base_offset > base:
            stored += _chunks(partition, base, cached[0].base_offset)
        if cached[-1].end_offset < end:
            stored += _chunks(partition, cached[-1].end_offset, end)
        return cls(base, end, stored, cached)


def _chunks(partition: Partition, base: int, end: int) -> list[TailChunk]:
    """Return the chunks of the tail that have offsets of [base, end)."""
    first = max(partition.tail_index(base), 0)
    return partition.tail[first : partition.tail_index(end - 1) + 1]


class _Encoder:
    """The segments of one partition's tail. Used by one thread at a time, after its creation."""

    def __init__(
        self, topic: Topic, number: int, tail: _Tail, log_start_offset: int, target: _Target
    ) -> None:
        self.number = number
        self.tail = tail
        self.error: Corrupt | None = None
        self.undecodable = 0
        self._topic = topic
        self._log_start_offset = log_start_offset
        self._target = target
        self._at = tail.base  # the records before this offset are taken
        self._lost: list[tuple[int, int]] = []
        self._run: list[pa.RecordBatch] = []  # consecutive records, not yet in the segment
        self._run_base = self._run_rows = self._run_bytes = 0
        self._is_json = True  # of the run
        self._base = tail.base  # of the segment
        self._writer: segments.SegmentWriter | None = None
        self._weight_left = target.weight_max
        self._rows = 0
        self._segment_is_json = True
        self._row_end = tail.base  # the offset after the last record in the segment
        self._written: list[_Written] = []

    def stored(self) -> list[TailChunk]:
        """Return the parts of chunks that must be read from the store."""
        parts: list[TailChunk] = []
        cached = self.tail.cached
        first, last = (cached[0].base_offset, cached[-1].end_offset) if cached else (0, 0)
        for chunk in self.tail.stored:
            base, end = max(chunk.base_offset, self.tail.base), min(chunk.end_offset, self.tail.end)
            if chunk.is_lost:
                self._lost.append((base, end))
                continue
            if base < last and first < end:  # partly in memory
                if base < first:
                    parts.append(chunk.part(base, first))
                if last < end:
                    parts.append(chunk.part(last, end))
            elif base < end:
                # Copy a chunk that reaches the tail's end, because the event loop may extend the
                # last chunk of a tail at any time.
                is_whole = base == chunk.base_offset and end < self.tail.end
                parts.append(chunk if is_whole else chunk.part(base, end))
        return parts

    def pop_written(self) -> list[_Written]:
        """Return the segments that are finished since the last call."""
        written, self._written = self._written, []
        return written

    def take(self, batches: Iterable[tuple[TailChunk, pa.RecordBatch | Corrupt]]) -> None:
        """Take the next records from the store, up to damage."""
        try:
            for chunk, batch in batches:
                if self.error is not None:
                    return
                self._advance(chunk.base_offset)
                if not isinstance(batch, Corrupt):
                    if chunk.codec == KAFKA_CODEC:
                        self.undecodable += undecodable(batch)
                    self._add(batch, is_json=chunk.is_json, nbytes=chunk.raw_bytes)
                elif chunk.end_offset <= self._log_start_offset:
                    self._skip(chunk.end_offset)  # these records are deleted
                else:
                    span = chunk.base_offset, chunk.end_offset
                    raise DamagedRecords(self._topic.name, self.number, *span, batch)
        except Corrupt as error:
            self.error = error

    def finish(self) -> None:
        """Take the rest of the tail from memory, unless there was damage before it.

        Finish the last segment.
        """
        try:
            if self.error is None:
                self._advance(self.tail.end)
        except Corrupt as error:
            self.error = error
        try:
            self._flush()
            if self._writer is not None:
                self._finish_segment(self.tail.end if self.error is None else self._row_end)
        except Corrupt as error:
            self.error = error

    def _advance(self, offset: int) -> None:
        """Take the cached records before `offset`; skip the lost ones."""
        for piece in self.tail.cached if self._at < offset else ():
            first, last = max(self._at, piece.base_offset), min(offset, piece.end_offset)
            if first < last:
                self._skip_lost(first)
                batch = piece.decoded().slice(first - piece.base_offset, last - first)
                if isinstance(piece.records, KeptBatches):
                    self.undecodable += undecodable(batch)
                nbytes = piece.nbytes * (last - first) // piece.records.num_rows
                self._add(batch, is_json=piece.is_json, nbytes=nbytes)
        self._skip_lost(offset)

    def _skip_lost(self, offset: int) -> None:
        """Skip lost records up to `offset`. Raises Corrupt if other records are missing there."""
        for first, end in self._lost if self._at < offset else ():
            if first <= self._at < end:
                self._skip(min(end, offset))
        if self._at != offset:
            partition_name = f"{self._topic.prefix} partition {self.number}"
            raise Corrupt(partition_name, f"the tail has a hole: {self._at} to {offset}")

    def _skip(self, offset: int) -> None:
        self._flush()
        self._at = offset

    def _add(self, batch: pa.RecordBatch, *, is_json: bool, nbytes: int) -> None:
        if self._run and is_json != self._is_json:
            self._flush()
        if not self._run:
            self._run_base, self._is_json = self._at, is_json
        self._run.append(batch)
        self._run_rows += batch.num_rows
        self._run_bytes += nbytes
        self._at += batch.num_rows
        if self._run_rows >= segments.GROUP_ROWS or self._run_bytes >= segments.GROUP_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        """Put the run into the segment; finish each segment that is full."""
        if not self._run:
            return
        run = chunks.with_offsets(record_columns.concat(self._run), self._run_base)
        weights = chunks.weight_before(run)
        nbytes, rows, first = self._run_bytes, run.num_rows, 0
        self._run, self._run_rows, self._run_bytes = [], 0, 0
        while first < rows:
            room = int(weights[first]) + self._weight_left
            last = int(weights.searchsorted(room, side="right")) - 1
            if self._writer is None:
                self._writer = segments.SegmentWriter(self._target.codec, self._target.level)
                last = max(last, first + 1)  # a segment has at least one record
            if last > first:
                self._writer.add(run.slice(first, last - first), nbytes * (last - first) // rows)
                self._rows += last - first
                self._weight_left -= int(weights[last] - weights[first])
                self._segment_is_json &= self._is_json
                self._row_end = self._run_base + last
            if last < rows:
                self._finish_segment(self._row_end)
            first = last

    def _finish_segment(self, end: int) -> None:
        assert self._writer is not None
        segment = self._writer.finish(is_json=self._segment_is_json)
        is_within = self._base <= segment.base_offset and segment.end_offset <= end
        if not is_within or segment.rows != self._rows:
            partition_name = f"{self._topic.prefix} partition {self.number}"
            content = f"{segment.rows} records of [{segment.base_offset}, {segment.end_offset})"
            expected = f"{self._rows} records of [{self._base}, {end})"
            raise Corrupt(partition_name, f"a segment has {content} instead of {expected}")
        lost_end = max((min(lost[1], end) for lost in self._lost if lost[0] < end), default=0)
        self._written.append(_Written(self.number, self._base, end, segment, lost_end))
        self._base, self._writer = end, None
        self._weight_left, self._rows, self._segment_is_json = self._target.weight_max, 0, True
