"""Plans of retention, merging and compaction for a partition: segments in, plans out. Pure.

As in Kafka, retention removes only whole segments, the oldest first, up to the first segment that
must stay. It never removes the tail. Only `delete-records` moves a log start into a segment
(`cut_by`). A plan over 100,000 segments takes a few passes over arrays.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.partition import Partition
from tidelog.storage.tables.manifest import SegmentColumns

UNLIMITED = -1

MERGE_FILES_MIN = 4
"""Least number of small neighbours in a merge that does not fill a segment. With fewer neighbours,
the same records would be rewritten again and again for little gain."""
SMALL_PART = 2
"""A segment is small if its size is at most the target divided by this number."""
MERGE_FILES_MAX = 1000
"""Largest number of inputs of a merge. Each takes one or two requests, and an action in the commit,
which all readers of the table read."""
GAIN_PART = 4
"""A merge that fills a segment adds at least this part of its largest input to it. Else it would
rewrite much for little."""
SPAN_PART = 8
"""Retention removes whole segments, so the oldest record of a segment stays until its newest record
expires. A merge adds at most this part of `retention.ms` to the time for which a record stays, and
at most this part of `retention.bytes` to the bytes that stay."""


class Cut(NamedTuple):
    """A new log start, and the configs whose limit was passed."""

    log_start_offset: int
    why: str


def retention(
    columns: SegmentColumns, partition: Partition, config: TopicConfig, now_ms: int
) -> Cut | None:
    """Return where retention would move the log start. If it would not move it, return None.

    Retention removes a segment if the segment's newest record (`SegmentColumns.newest_ms`) is older
    than `retention.ms`, or if the segments and the tail after it still hold at least
    `retention.bytes`.
    """
    if "delete" not in config.cleanup_policy:
        return None
    is_live = _is_live(columns, partition)
    ends, sizes = columns.end_offset[is_live], columns.size[is_live]
    later_bytes = int(sizes.sum()) + partition.tail_bytes - np.cumsum(sizes)
    passed: dict[str, np.ndarray] = {}
    if config.retention_ms != UNLIMITED:
        passed["retention.ms"] = columns.newest_ms(now_ms)[is_live] < now_ms - config.retention_ms
    if config.retention_bytes != UNLIMITED:
        passed["retention.bytes"] = later_bytes >= config.retention_bytes
    count = _leading(np.any([*passed.values(), np.zeros(len(ends), bool)], axis=0))
    if count == 0:
        return None
    why = " and ".join(name for name, is_passed in passed.items() if is_passed[:count].any())
    return Cut(int(ends[count - 1]), why)


def expiry_ms(
    columns: SegmentColumns, partition: Partition, config: TopicConfig, now_ms: int
) -> float:
    """Return the earliest time in ms at which `retention.ms` may remove a segment; inf: never."""
    if "delete" not in config.cleanup_policy or config.retention_ms == UNLIMITED:
        return math.inf
    is_live = _is_live(columns, partition)
    # Until a timestamp in the future has passed, the time of the commit decides instead of it.
    newest_ms = np.minimum(columns.newest_ms(now_ms), columns.timestamp_max)[is_live]
    return int(newest_ms[0]) + config.retention_ms + 1 if len(newest_ms) else math.inf


def below(columns: SegmentColumns, partition: Partition, log_start_offset: int) -> int:
    """Count the segments that lie entirely below a log start and below the sealed end."""
    end = min(log_start_offset, partition.sealed_end)
    return int(np.searchsorted(columns.end_offset, end, side="right"))


def cut_by(columns: SegmentColumns, partition: Partition, log_start_offset: int) -> int | None:
    """Return the position of the segment that begins below the log start and ends above it.

    If there is none, or if the segment ends above the sealed end, return None.
    """
    position = below(columns, partition, log_start_offset)
    if position == len(columns.path) or columns.end_offset[position] > partition.sealed_end:
        return None
    return position if columns.base_offset[position] < log_start_offset else None


def _is_live(columns: SegmentColumns, partition: Partition) -> np.ndarray:
    """Return for each segment whether it is sealed and has records from the log start on."""
    ends = columns.end_offset
    return (ends > partition.log_start_offset) & (ends <= partition.sealed_end)


def _leading(is_wanted: np.ndarray) -> int:
    """Count the True values before the first False."""
    return len(is_wanted) if is_wanted.all() else int(np.argmin(is_wanted))


class MergeBounds(NamedTuple):
    """Upper bounds of a merged segment: its size, and the time in ms between its records."""

    target_bytes: int
    span_ms: float = math.inf

    @classmethod
    def of(cls, config: TopicConfig, target_bytes: int) -> "MergeBounds":
        """Return the bounds for merges of a topic up to `target_bytes`."""
        span_ms = math.inf
        if "delete" in config.cleanup_policy:
            if config.retention_ms != UNLIMITED:
                span_ms = config.retention_ms // SPAN_PART
            if config.retention_bytes != UNLIMITED:
                target_bytes = min(target_bytes, config.retention_bytes // SPAN_PART)
        if "compact" in config.cleanup_policy and config.min_compaction_lag_ms > 0:
            span_ms = min(span_ms, config.min_compaction_lag_ms)
        return cls(target_bytes, span_ms)


def merges(
    columns: SegmentColumns,
    partition: Partition,
    merge_bounds: MergeBounds,
    clean_end: int,
    now_ms: int,
) -> Iterator[range]:
    """Yield ranges of positions of small neighbouring segments that become one segment.

    No merge crosses `clean_end`, so only segments below it lack rows that key compaction removed.
    """
    bounds = [partition.log_start_offset, min(clean_end, partition.sealed_end)]
    first, clean, last = np.searchsorted(
        columns.end_offset, [*bounds, partition.sealed_end], side="right"
    ).tolist()
    # A stamp in the future does not count, but the commit's time, which a merge sets to now.
    newest_ms = np.minimum(columns.timestamp_max, now_ms)
    ages_ms = np.minimum(columns.timestamp_min, newest_ms), newest_ms
    for start, end in ((first, max(clean, first)), (max(clean, first), last)):
        yield from _merges(columns.size, ages_ms, start, end, merge_bounds)


def _merges(
    sizes: np.ndarray,
    ages_ms: tuple[np.ndarray, np.ndarray],
    first: int,
    last: int,
    merge_bounds: MergeBounds,
) -> Iterator[range]:
    """Yield the merges of [first, last); `ages_ms` are the oldest and newest times by segment."""
    target_bytes, span_ms = merge_bounds
    oldest_ms, newest_ms = ages_ms
    group = _Group(first)
    segments = zip(
        range(first, last),
        sizes[first:last].tolist(),
        oldest_ms[first:last].tolist(),
        newest_ms[first:last].tolist(),
        strict=True,
    )
    for position, size, oldest, newest in segments:
        if size * SMALL_PART > target_bytes:
            yield from _worth(sizes, group.start, position)
            group = _Group(position + 1)
            continue
        if group.size + size > target_bytes:
            yield from group.full(position)
            group = _Group(position)
        elif (
            position - group.start >= MERGE_FILES_MAX
            or max(group.newest_ms, newest) - min(group.oldest_ms, oldest) > span_ms
        ):
            yield from _worth(sizes, group.start, position)
            group = _Group(position)
        group.add(size, oldest, newest)
    yield from _worth(sizes, group.start, last)


class _Group:
    """Neighbouring small segments from the position `start` on."""

    __slots__ = ("largest", "newest_ms", "oldest_ms", "size", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.size = self.largest = 0
        self.oldest_ms, self.newest_ms = math.inf, -math.inf

    def add(self, size: int, oldest_ms: int, newest_ms: int) -> None:
        self.size += size
        self.largest = max(self.largest, size)
        self.oldest_ms = min(self.oldest_ms, oldest_ms)
        self.newest_ms = max(self.newest_ms, newest_ms)

    def full(self, end: int) -> Iterator[range]:
        """Yield the group, because the next segment does not fit, if its merge is a gain."""
        if end - self.start > 1 and (self.size - self.largest) * GAIN_PART >= self.largest:
            yield range(self.start, end)


def _worth(sizes: np.ndarray, start: int, end: int) -> Iterator[range]:
    """Yield the longest range [x, end) at least twice as large as its largest segment, if any.

    Smaller merges would rewrite the same records after every few new records.
    """
    while end - start >= MERGE_FILES_MIN:
        largest = start + int(np.argmax(sizes[start:end]))
        if int(sizes[largest]) * 2 <= int(sizes[start:end].sum()):
            yield range(start, end)
            return
        start = largest + 1


class Cleanable(NamedTuple):
    """Positions [first, last) of the segments that key compaction may process.

    The segments from `dirty` on were never compacted.
    """

    first: int
    dirty: int
    last: int
    dirty_ratio: float

    def is_due(self, config: TopicConfig) -> bool:
        """Return if the dirty ratio is greater than `min.cleanable.dirty.ratio`, as in Kafka."""
        is_dirty = self.dirty_ratio > config.min_cleanable_dirty_ratio
        return "compact" in config.cleanup_policy and is_dirty


def cleanable(
    columns: SegmentColumns,
    partition: Partition,
    config: TopicConfig,
    clean_end: int,
    now_ms: int,
) -> Cleanable:
    """Find the segments before the first one with a record too young to be compacted.

    They begin at the log start; `min.compaction.lag.ms` is the age.
    """
    first = int(np.searchsorted(columns.end_offset, partition.log_start_offset, side="right"))
    last = int(np.searchsorted(columns.end_offset, partition.sealed_end, side="right"))
    if config.min_compaction_lag_ms > 0:
        old = columns.newest_ms(now_ms)[first:last] <= now_ms - config.min_compaction_lag_ms
        last = first + (_leading(old) if last > first else 0)
    dirty = int(np.searchsorted(columns.end_offset[first:last], clean_end, side="right")) + first
    whole = int(columns.size[first:last].sum())
    ratio = int(columns.size[dirty:last].sum()) / whole if whole else 0.0
    return Cleanable(first, dirty, last, ratio)


def groups(
    sizes: Sequence[int], rows: Sequence[int], kept_rows: Sequence[int], target_bytes: int
) -> list[tuple[range, bool]]:
    """Group neighbouring segments.

    Each group becomes one segment. The bool says whether to write this segment, because a group of
    one segment that loses no row stays as it is.

    The size of a group is an estimate: a segment that keeps half of its rows counts with half of
    its size. Segments that keep no record join the group of a neighbour, so the ranges have no hole
    between them.
    """
    ranges: list[tuple[range, bool]] = []
    start, size, count = 0, 0, 0
    for position, (own, had, stays) in enumerate(zip(sizes, rows, kept_rows, strict=True)):
        part = own * stays // max(had, 1)
        if count and stays and size + part > target_bytes:
            ranges.append((range(start, position), False))
            start, size, count = position, 0, 0
        size += part
        count += stays
    end = len(sizes)
    if start < end and count:
        ranges.append((range(start, end), False))
    elif start < end and ranges:
        ranges[-1] = (range(ranges[-1][0].start, end), False)
    return [
        (group, len(group) > 1 or kept_rows[group.start] < rows[group.start]) for group, _ in ranges
    ]
