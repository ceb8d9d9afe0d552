"""What there is to read as of one moment, and its splitting into tasks. Pure.

A `Snapshot` is the log after one WAL entry: for each partition the segments that hold
[log_start_offset, sealed_end) and the tail's runs that hold [sealed_end, high_watermark) (I7).
The manifest may be newer than the entry, so what it holds from `sealed_end` on is cut off here
and read from the tail. Everything is a plain picklable value: it travels to other processes.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from storage.model import SegmentFile, TopicPartition
from storage.partition import Run

SPLIT_BYTES = 32 * 1024 * 1024
"""Stored bytes of one task: two to ten times as many in memory, a few seconds of one core."""
SPLIT_BYTES_MIN = 64 * 1024
"""About a row group: a smaller task would often find none to read."""
OPEN_BYTES = 128 * 1024
"""What the requests for one more object count as: keeps a task below ~250 of them."""

OFFSET_MAX = 2**63 - 1


class PartitionView(NamedTuple):
    """log_start_offset <= sealed_end <= high_watermark; both lists are in offset order."""

    number: int
    log_start_offset: int
    sealed_end: int
    high_watermark: int
    segments: Sequence[SegmentFile]
    runs: Sequence[Run]


class TopicView(NamedTuple):
    """One topic; `partitions[n].number == n`. `prefix` is where its segments' paths begin."""

    name: str
    topic_id: str
    prefix: str
    is_log_append_time: bool
    partitions: Sequence[PartitionView]


class Snapshot(NamedTuple):
    """Topics as of WAL entry `seq`, by name."""

    cluster_id: str
    seq: int
    topics: Mapping[str, TopicView]

    def partition(self, of: TopicPartition) -> PartitionView:
        return self.topics[of.topic].partitions[of.partition]

    def all_partitions(self) -> list[TopicPartition]:
        """In order of topic and number."""
        return [
            TopicPartition(name, view.number)
            for name in sorted(self.topics)
            for view in self.topics[name].partitions
        ]


class Range(NamedTuple):
    """Records [start, end) of one partition."""

    topic: str
    partition: int
    start: int
    end: int


class Wanted(NamedTuple):
    """A condition on records: bounds are inclusive, times ms, and None is any.

    `offset_*`, `topics` and `partitions` are exact: a plan has no other records. Times are not: a
    plan leaves out objects in which no record can match, and whoever reads filters the rest.
    """

    offset_min: int = 0
    offset_max: int = OFFSET_MAX
    timestamp_min: int | None = None
    timestamp_max: int | None = None
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None

    def overlaps(self, timestamp_min: int, timestamp_max: int) -> bool:
        """Whether a record stamped within these two can match."""
        is_late = self.timestamp_min is not None and timestamp_max < self.timestamp_min
        is_early = self.timestamp_max is not None and timestamp_min > self.timestamp_max
        return not (is_late or is_early)

    def clip(self, given: Range) -> Range | None:
        """What is left of a range, None when nothing is."""
        if self.topics is not None and given.topic not in self.topics:
            return None
        if self.partitions is not None and given.partition not in self.partitions:
            return None
        start = max(given.start, self.offset_min)
        end = min(given.end, self.offset_max + 1)
        return given._replace(start=start, end=end) if start < end else None


EVERYTHING = Wanted()


class SegmentSlice(NamedTuple):
    """Records [start, end) of one segment; of their row groups, equal part `share` of `shares`.

    Whoever reads the footer knows the row groups; a plan over 20,000 segments reads none.
    `size` is the object's, `cost` about the bytes that are read of it.
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


class RunSlice(NamedTuple):
    """Records [start, end) of one run of the tail."""

    topic: str
    partition: int
    is_log_append_time: bool
    run: Run
    start: int
    end: int
    cost: int


Slice: TypeAlias = SegmentSlice | RunSlice


class Split(NamedTuple):
    """The work of one task: its slices in order of topic, partition and offset."""

    slices: Sequence[Slice]


def plan(
    snapshot: Snapshot,
    ranges: Sequence[Range],
    wanted: Wanted = EVERYTHING,
    *,
    split_bytes: int = SPLIT_BYTES,
    splits_min: int = 1,
) -> list[Split]:
    """The records of `ranges` that may be wanted, each in exactly one split.

    The tail comes first: its objects live an hour after they were sealed, segments at least as long
    as retention, and tasks may start late. `splits_min` is met as far as `SPLIT_BYTES_MIN` allows.
    """
    clipped = [left for given in ranges if (left := wanted.clip(given)) is not None]
    runs = [found for given in clipped for found in run_slices(snapshot, given, wanted)]
    segments = [found for given in clipped for found in segment_slices(snapshot, given, wanted)]
    if splits_min > 1:
        total = sum(one.cost + OPEN_BYTES for one in itertools.chain[Slice](runs, segments))
        split_bytes = min(split_bytes, total // splits_min)
    split_bytes = max(split_bytes, SPLIT_BYTES_MIN)
    shared = [share for one in segments for share in _shares(one, split_bytes)]
    return [*_pack(runs, split_bytes), *_pack(shared, split_bytes)]


def segment_slices(
    snapshot: Snapshot, given: Range, wanted: Wanted = EVERYTHING
) -> Iterator[SegmentSlice]:
    """The sealed part of a range, one slice a segment."""
    topic = snapshot.topics[given.topic]
    view = topic.partitions[given.partition]
    start = max(given.start, view.log_start_offset)
    end = min(given.end, view.sealed_end)
    for file in view.segments:
        low, high = max(start, file.base_offset), min(end, file.end_offset)
        if low < high and wanted.overlaps(file.timestamp_min, file.timestamp_max):
            yield SegmentSlice(
                given.topic,
                given.partition,
                topic.is_log_append_time,
                f"{topic.prefix}/{file.path}",
                file.size,
                low,
                high,
                file.size * (high - low) // (file.end_offset - file.base_offset),
            )


def run_slices(snapshot: Snapshot, given: Range, wanted: Wanted = EVERYTHING) -> Iterator[RunSlice]:
    """The unsealed part of a range, one slice a run."""
    topic = snapshot.topics[given.topic]
    view = topic.partitions[given.partition]
    start = max(given.start, view.log_start_offset, view.sealed_end)
    end = min(given.end, view.high_watermark)
    for run in view.runs:
        low, high = max(start, run.base_offset), min(end, run.end_offset)
        if low < high and wanted.overlaps(*_run_times(run)):
            yield RunSlice(
                given.topic, given.partition, topic.is_log_append_time, run, low, high, run.size
            )


def _run_times(run: Run) -> tuple[int, int]:
    if run.append_ms >= 0:
        return run.append_ms, run.append_ms
    return run.timestamp_min, run.timestamp_max


def _shares(whole: SegmentSlice, split_bytes: int) -> Iterator[SegmentSlice]:
    # Rounded, not up: two tasks for 1.2 times the bytes of one would cost more than they save.
    shares = max(1, round(whole.cost / split_bytes))
    for share in range(shares):
        yield whole._replace(cost=whole.cost // shares, share=share, shares=shares)


def _pack(slices: Sequence[Slice], split_bytes: int) -> Iterator[Split]:
    """Neighbours together up to about `split_bytes`: order is kept within a split."""
    packed: list[Slice] = []
    size = 0
    for one in slices:
        cost = one.cost + OPEN_BYTES
        if packed and size + cost > split_bytes + OPEN_BYTES:
            yield Split(packed)
            packed, size = [], 0
        packed.append(one)
        size += cost
    if packed:
        yield Split(packed)


def take(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], rows_max: int
) -> dict[TopicPartition, int]:
    """How far to go from `start` towards `end` with at most `rows_max` offsets; `end`'s keys.

    Shared in proportion to what each partition has left, as Kafka's source does; what rounding
    leaves goes to those that got least, so that a small partition is not starved by large ones.
    """
    left = {of: max(upto - start.get(of, 0), 0) for of, upto in end.items()}
    total = sum(left.values())
    if total <= rows_max:
        return {of: start.get(of, 0) + count for of, count in left.items()}
    given = {of: count * rows_max // total for of, count in left.items()}
    surplus = rows_max - sum(given.values())
    for of in sorted(left, key=lambda of: (given[of], of)):
        extra = min(surplus, 1, left[of] - given[of])
        given[of] += extra
        surplus -= extra
    return {of: start.get(of, 0) + count for of, count in given.items()}
