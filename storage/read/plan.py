"""Read plans that split a snapshot of the log into tasks. Pure.

The manifest may be newer than the snapshot's entry. So a plan reads the offsets from `sealed_end`
on in the tail, even if the table has them too. All values can be pickled and are sent to other
processes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from tidelog.storage.core.model import OFFSET_MAX, TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot
from tidelog.storage.state.partition import TailChunk

_T = TypeVar("_T")

SPLIT_BYTES = 32 * 1024 * 1024
"""Stored bytes that one task reads. In memory, the records take two to ten times as many bytes. The
task takes a few seconds of one core."""
SPLIT_BYTES_MIN = 64 * 1024
"""About the size of a row group. Smaller tasks would often have no row group to read."""
OPEN_BYTES = 128 * 1024
"""Bytes that a plan adds to the cost of each object, for the requests to the store. This limits a
task to ~250 objects."""


class OffsetRange(NamedTuple):
    """Records [start, end) of one partition."""

    topic: str
    partition: int
    start: int
    end: int


class ReadFilter(NamedTuple):
    """A condition on records: bounds are inclusive, times are ms, None means any.

    `offset_*`, `topics` and `partitions` are exact: a plan has only records that match them. Times
    are not exact: a plan omits only objects in which no record can match, so the reader must filter
    the records.
    """

    offset_min: int = 0
    offset_max: int = OFFSET_MAX
    timestamp_min: int | None = None
    timestamp_max: int | None = None
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None

    def overlaps(self, timestamp_min: int, timestamp_max: int) -> bool:
        """Return whether a record with a timestamp between these two can match."""
        is_late = self.timestamp_min is not None and timestamp_max < self.timestamp_min
        is_early = self.timestamp_max is not None and timestamp_min > self.timestamp_max
        return not (is_late or is_early)

    def clip(self, offset_range: OffsetRange) -> OffsetRange | None:
        if self.topics is not None and offset_range.topic not in self.topics:
            return None
        if self.partitions is not None and offset_range.partition not in self.partitions:
            return None
        start = max(offset_range.start, self.offset_min)
        end = min(offset_range.end, self.offset_max + 1)
        return offset_range._replace(start=start, end=end) if start < end else None

    def may_match(self, extent: "Extent") -> bool:
        """Return whether a record of this extent may match."""
        return (
            (self.partitions is None or extent.partition in self.partitions)
            and extent.start <= self.offset_max
            and extent.end > self.offset_min
            and self.overlaps(extent.timestamp_min, extent.timestamp_max)
        )

    def both(self, other: "ReadFilter") -> "ReadFilter":
        """Return a filter that a record matches if it matches both."""
        return ReadFilter(
            max(self.offset_min, other.offset_min),
            min(self.offset_max, other.offset_max),
            _tighter(max, self.timestamp_min, other.timestamp_min),
            _tighter(min, self.timestamp_max, other.timestamp_max),
            _common(self.topics, other.topics),
            _common(self.partitions, other.partitions),
        )


def _tighter(choose: Callable[[int, int], int], left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)


def _common(left: frozenset[_T] | None, right: frozenset[_T] | None) -> frozenset[_T] | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


NO_FILTER = ReadFilter()


class Extent(NamedTuple):
    """The bounds of some records [start, end) of a partition; times are ms, inclusive.

    The records are those of an object, by the manifest or the WAL, or those of a row group.
    """

    partition: int
    start: int
    end: int
    timestamp_min: int
    timestamp_max: int

    @classmethod
    def around(cls, extents: Sequence["Extent"]) -> "Extent":
        """Return the bounds of all records of these extents of one partition."""
        return cls(
            extents[0].partition,
            min(extent.start for extent in extents),
            max(extent.end for extent in extents),
            min(extent.timestamp_min for extent in extents),
            max(extent.timestamp_max for extent in extents),
        )


class Condition(Protocol):
    """A condition on records, with the question that a plan asks about objects."""

    def may_match(self, extent: Extent) -> bool:
        """Return whether a record of this extent may match."""


class AnyOf(NamedTuple):
    """A condition that a record matches if it matches one of the filters."""

    filters: Sequence[ReadFilter]

    def may_match(self, extent: Extent) -> bool:
        return any(read_filter.may_match(extent) for read_filter in self.filters)


class SegmentRange(NamedTuple):
    """Records [start, end) of one segment, or the part `share` of `shares` equal parts of them.

    The parts divide the row groups. A task reads the footer to find the row groups, so a plan over
    20,000 segments reads no footer. `size` is the size of the object. `cost` is an estimate of the
    bytes that the task reads.
    """

    topic: str
    partition: int
    is_log_append_time: bool
    key: str
    size: int
    start: int
    end: int
    cost: int
    share: int = 0
    shares: int = 1


class TailRange(NamedTuple):
    """Records [start, end) of one tail chunk."""

    topic: str
    partition: int
    is_log_append_time: bool
    chunk: TailChunk
    start: int
    end: int
    cost: int


Slice: TypeAlias = SegmentRange | TailRange


class Split(NamedTuple):
    """The slices of one task, ordered by topic, partition and offset."""

    slices: Sequence[Slice]


def plan(
    snapshot: LogSnapshot,
    ranges: Sequence[OffsetRange],
    read_filter: ReadFilter = NO_FILTER,
    *,
    split_bytes: int = SPLIT_BYTES,
    splits_min: int = 1,
) -> list[Split]:
    """Split the records of `ranges` that may match the filter; each record is in exactly one split.

    The splits of the tail come first, because tasks may start late. Collection may delete a WAL
    object an hour after its records were sealed. It deletes a segment a day after a commit removed
    it from the table, or later. If splits would be smaller than `SPLIT_BYTES_MIN`, there are fewer
    splits than `splits_min`.
    """
    clipped = [
        clipped_range
        for offset_range in ranges
        if (clipped_range := read_filter.clip(offset_range)) is not None
    ]
    tail = [
        record_slice
        for offset_range in clipped
        for record_slice in tail_slices(snapshot, offset_range, read_filter)
    ]
    segments = [
        record_slice
        for offset_range in clipped
        for record_slice in segment_slices(snapshot, offset_range, read_filter)
    ]
    if splits_min > 1:
        total = sum(
            record_slice.cost + OPEN_BYTES
            for record_slice in itertools.chain[Slice](tail, segments)
        )
        split_bytes = min(split_bytes, total // splits_min)
    split_bytes = max(split_bytes, SPLIT_BYTES_MIN)
    shared = [share for record_slice in segments for share in shares(record_slice, split_bytes)]
    return [*packed(tail, split_bytes), *packed(shared, split_bytes)]


def segment_slices(
    snapshot: LogSnapshot, offset_range: OffsetRange, condition: Condition = NO_FILTER
) -> Iterator[SegmentRange]:
    """Yield the sealed part of a range, one slice for each segment that may match."""
    topic = snapshot.topics[offset_range.topic]
    view = topic.partitions[offset_range.partition]
    start = max(offset_range.start, view.log_start_offset)
    end = min(offset_range.end, view.sealed_end)
    for file in view.segments:
        low, high = max(start, file.base_offset), min(end, file.end_offset)
        if low < high and condition.may_match(
            Extent(view.number, low, high, file.timestamp_min, file.timestamp_max)
        ):
            yield SegmentRange(
                offset_range.topic,
                offset_range.partition,
                topic.is_log_append_time,
                f"{topic.prefix}/{file.path}",
                file.size,
                low,
                high,
                file.size * (high - low) // (file.end_offset - file.base_offset),
            )


def tail_slices(
    snapshot: LogSnapshot, offset_range: OffsetRange, condition: Condition = NO_FILTER
) -> Iterator[TailRange]:
    """Yield the unsealed part of a range, one slice for each tail chunk that may match."""
    topic = snapshot.topics[offset_range.topic]
    view = topic.partitions[offset_range.partition]
    start = max(offset_range.start, view.log_start_offset, view.sealed_end)
    end = min(offset_range.end, view.high_watermark)
    for chunk in view.tail:
        low, high = max(start, chunk.base_offset), min(end, chunk.end_offset)
        if low >= high or chunk.is_lost:
            continue
        if condition.may_match(Extent(view.number, low, high, *times_of(chunk))):
            yield TailRange(
                offset_range.topic,
                offset_range.partition,
                topic.is_log_append_time,
                chunk,
                low,
                high,
                chunk.size,
            )


def times_of(chunk: TailChunk) -> tuple[int, int]:
    """Return bounds (ms) of the timestamps that readers get."""
    if chunk.append_ms >= 0:
        return chunk.append_ms, chunk.append_ms
    return chunk.timestamp_min, chunk.timestamp_max


def shares(whole: SegmentRange, split_bytes: int) -> Iterator[SegmentRange]:
    """Yield the parts of a segment of about `split_bytes` each."""
    # Round to nearest, not up, because two tasks for 1.2 times `split_bytes` would cost more time
    # than they save.
    count = max(1, round(whole.cost / split_bytes))
    for share in range(count):
        yield whole._replace(cost=whole.cost // count, share=share, shares=count)


def packed(slices: Iterable[Slice], split_bytes: int) -> Iterator[Split]:
    """Pack adjacent slices into splits of about `split_bytes`; a split keeps their order."""
    packed: list[Slice] = []
    size = 0
    for record_slice in slices:
        cost = record_slice.cost + OPEN_BYTES
        if packed and size + cost > split_bytes + OPEN_BYTES:
            yield Split(packed)
            packed, size = [], 0
        packed.append(record_slice)
        size += cost
    if packed:
        yield Split(packed)


def limit_offsets(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], rows_max: int
) -> dict[TopicPartition, int]:
    """Return end offsets, with the keys of `end`, for at most `rows_max` offsets from `start`.

    The limit is shared in proportion to the remaining offsets, as in Spark's Kafka source. Rounding
    leaves a rest. A partition gets at most one offset of the rest, the partitions with the fewest
    offsets first. Without this, a small partition could get no offset in any batch.
    """
    available_counts = {of: max(upto - start.get(of, 0), 0) for of, upto in end.items()}
    total = sum(available_counts.values())
    if total <= rows_max:
        return {of: start.get(of, 0) + count for of, count in available_counts.items()}
    counts = {of: count * rows_max // total for of, count in available_counts.items()}
    surplus = rows_max - sum(counts.values())
    for of in sorted(available_counts, key=lambda of: (counts[of], of)):
        extra = min(surplus, 1, available_counts[of] - counts[of])
        counts[of] += extra
        surplus -= extra
    return {of: start.get(of, 0) + count for of, count in counts.items()}
