"""What retention, merging and compaction would do to a partition: segments in, plans out. Pure.

Kafka's meanings: whole segments only, oldest first, up to the first that must stay; the tail is
never touched. Plans over 100,000 segments are a few passes over arrays.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from storage.manifest import SegmentColumns
from storage.partition import Partition
from storage.topics import TopicConfig

UNLIMITED = -1

MERGE_FILES_MIN = 4
"""So many small neighbours are merged though they do not fill a segment: fewer would be written
again and again for little."""
SMALL_PART = 2
"""A segment below the target divided by this is small."""


def clean_app_id(partition: int) -> str:
    """The application id of a table's transaction whose version is the offset up to which key
    compaction has been: rows may be gone below it, and nowhere else."""
    return f"clean-{partition}"


class Cut(NamedTuple):
    """A new log start and why: the configs whose limit was passed."""

    log_start_offset: int
    why: str


def retention(
    columns: SegmentColumns, partition: Partition, config: TopicConfig, now_ms: int
) -> Cut | None:
    """Where retention would move the log start; None where it has nothing to do.

    A segment goes when its newest record is older than `retention.ms`, or when what follows it,
    the tail included, still has `retention.bytes`.
    """
    if "delete" not in config.cleanup_policy:
        return None
    is_live = (columns.end_offset > partition.log_start_offset) & (
        columns.end_offset <= partition.sealed_end
    )
    ends, sizes = columns.end_offset[is_live], columns.size[is_live]
    after = int(sizes.sum()) + partition.tail_bytes - np.cumsum(sizes)
    passed: dict[str, np.ndarray] = {}
    if config.retention_ms != UNLIMITED:
        passed["retention.ms"] = columns.timestamp_max[is_live] < now_ms - config.retention_ms
    if config.retention_bytes != UNLIMITED:
        passed["retention.bytes"] = after >= config.retention_bytes
    count = _leading(np.any([*passed.values(), np.zeros(len(ends), bool)], axis=0))
    if count == 0:
        return None
    why = " and ".join(name for name, is_passed in passed.items() if is_passed[:count].any())
    return Cut(int(ends[count - 1]), why)


def below(columns: SegmentColumns, partition: Partition, log_start_offset: int) -> int:
    """How many segments lie below a log start whole, and are known to be sealed."""
    end = min(log_start_offset, partition.sealed_end)
    return int(np.searchsorted(columns.end_offset, end, side="right"))


def _leading(is_wanted: np.ndarray) -> int:
    """How many of the first are, before one that is not."""
    return len(is_wanted) if is_wanted.all() else int(np.argmin(is_wanted))


def merges(
    columns: SegmentColumns, partition: Partition, target_bytes: int, clean_end: int
) -> Iterator[range]:
    """Positions of neighbouring small segments that become one each; none has segments of both
    sides of `clean_end`, so that rows are missing below it alone."""
    bounds = [partition.log_start_offset, min(clean_end, partition.sealed_end)]
    first, clean, last = np.searchsorted(
        columns.end_offset, [*bounds, partition.sealed_end], side="right"
    ).tolist()
    yield from _merges(columns, first, max(clean, first), target_bytes)
    yield from _merges(columns, max(clean, first), last, target_bytes)


def _merges(columns: SegmentColumns, first: int, last: int, target_bytes: int) -> Iterator[range]:
    start, size = first, 0
    for position in range(first, last):
        own = int(columns.size[position])
        if own * SMALL_PART > target_bytes:
            yield from _worth(columns.size, start, position)
            start, size = position + 1, 0
        elif size + own > target_bytes:
            if position - start > 1:
                yield range(start, position)
            start, size = position, own
        else:
            size += own
    yield from _worth(columns.size, start, last)


def _worth(sizes: np.ndarray, start: int, end: int) -> Iterator[range]:
    """What does not fill a segment: its newest part that at least doubles the largest in it, or
    each record would be written again with every few that come after it."""
    while end - start >= MERGE_FILES_MIN:
        largest = start + int(np.argmax(sizes[start:end]))
        if int(sizes[largest]) * 2 <= int(sizes[start:end].sum()):
            yield range(start, end)
            return
        start = largest + 1


class Cleanable(NamedTuple):
    """What key compaction may look at: segments [first, last) by position, of which those from
    `dirty` on were never cleaned."""

    first: int
    dirty: int
    last: int
    dirty_ratio: float


def cleanable(
    columns: SegmentColumns,
    partition: Partition,
    config: TopicConfig,
    clean_end: int,
    now_ms: int,
) -> Cleanable:
    """From the log start up to the first segment with a record younger than
    `min.compaction.lag.ms`."""
    first = int(np.searchsorted(columns.end_offset, partition.log_start_offset, side="right"))
    last = int(np.searchsorted(columns.end_offset, partition.sealed_end, side="right"))
    if config.min_compaction_lag_ms > 0:
        old = columns.timestamp_max[first:last] <= now_ms - config.min_compaction_lag_ms
        last = first + (_leading(old) if last > first else 0)
    dirty = int(np.searchsorted(columns.end_offset[first:last], clean_end, side="right")) + first
    whole = int(columns.size[first:last].sum())
    ratio = int(columns.size[dirty:last].sum()) / whole if whole else 0.0
    return Cleanable(first, dirty, last, ratio)


def groups(
    sizes: Sequence[int], rows: Sequence[int], kept: Sequence[int], target_bytes: int
) -> list[tuple[range, bool]]:
    """Neighbouring segments that become one segment each, and whether they have to be written.

    What stays of each counts by its share of rows. No group is without a record, so that the
    segments leave no hole between their ranges; one segment of which nothing goes, and that is
    large enough, stays as it is.
    """
    found: list[tuple[range, bool]] = []
    start, size, count = 0, 0, 0
    for position, (own, had, stays) in enumerate(zip(sizes, rows, kept, strict=True)):
        part = own * stays // max(had, 1)
        if count and stays and size + part > target_bytes:
            found.append((range(start, position), False))
            start, size, count = position, 0, 0
        size += part
        count += stays
    end = len(sizes)
    if start < end and count:
        found.append((range(start, end), False))
    elif start < end and found:
        found[-1] = (range(found[-1][0].start, end), False)
    return [(group, len(group) > 1 or kept[group.start] < rows[group.start]) for group, _ in found]
