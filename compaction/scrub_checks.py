"""Checks of a partition and of a segment, on values. Pure.

Each check yields one sentence for each violation; it yields nothing if all is correct.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.segment import RowGroup
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.state.partition import Partition
from tidelog.storage.tables.manifest import (
    SegmentColumns,
    in_no_segment,
    in_two_segments,
)


class FindingKind:
    WAL = "wal"
    CHECKPOINT = "checkpoint"
    TAIL = "tail"
    TABLE = "table"
    SEGMENT = "segment"
    MISSING = "missing"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    LOST = "lost"


class Finding(NamedTuple):
    """A violation in an object or a partition, which `where` names.

    Damage is a violation that a reader notices, now or later. Any other finding is garbage or a
    foreign file.
    """

    kind: str
    where: str
    what: str
    is_damage: bool = True
    size: int = 0


def tail(partition: Partition) -> Iterator[str]:
    """Check that the tail is [sealed_end, high_watermark) without a hole (I2)."""
    offset = partition.sealed_end
    if partition.tail:
        offset = min(offset, partition.tail[0].base_offset)
    for run in partition.tail:
        if run.base_offset != offset:
            yield f"the tail has a hole: offset {offset} is followed by {run.base_offset}"
        offset = run.end_offset
    if offset != partition.high_watermark:
        yield f"the tail ends at {offset}, the high watermark is {partition.high_watermark}"
    if not 0 <= partition.log_start_offset <= partition.high_watermark:
        yield f"log start {partition.log_start_offset} is beyond the high watermark"


def ranges(
    columns: SegmentColumns,
    partition: Partition,
    *,
    sealed_to: int,
    clean_end: int,
    lost_end: int = 0,
) -> Iterator[str]:
    """Check that the segments hold [log_start_offset, sealed_end), each offset once (I7).

    `sealed_to` is the offset up to which the table was sealed, as the table's transactions say.
    Compaction removed rows only below `clean_end`. A seal leaves out lost records, so segments that
    begin below `lost_end` may have fewer rows than offsets. A seal also leaves out damaged records
    below the log start.
    """
    start, end = columns.base_offset, columns.end_offset
    if sealed_to < partition.sealed_end:
        yield f"the WAL is sealed to {partition.sealed_end}, the table only to {sealed_to}"
    if len(start):
        for index in np.flatnonzero(start[1:] != end[:-1]):
            first, last = end[index], start[index + 1]
            yield in_no_segment(first, last) if first < last else in_two_segments(last, first)
        if end[-1] < partition.sealed_end:
            yield in_no_segment(end[-1], partition.sealed_end)
        if start[0] > partition.log_start_offset and start[0] < partition.sealed_end:
            yield in_no_segment(partition.log_start_offset, start[0])
    elif partition.log_start_offset < partition.sealed_end:
        yield in_no_segment(partition.log_start_offset, partition.sealed_end)
    least = np.where(start < lost_end, 0, end - np.maximum(start, partition.log_start_offset))
    wrong = (columns.rows > end - start) | ((columns.rows < least) & (end > clean_end))
    for index in np.flatnonzero(wrong | (columns.rows < 1)):
        yield (
            f"{columns.path[int(index)]} has {columns.rows[index]} rows of "
            f"[{start[index]}, {end[index]})"
        )


def group(row_group: RowGroup, batch: pa.RecordBatch) -> Iterator[str]:
    """Check a row group against its footer."""
    offsets = batch.column("offset").to_numpy()
    if batch.num_rows != row_group.rows or not batch.num_rows:
        yield (
            f"row group {row_group.index} has {batch.num_rows} rows, "
            f"its footer has {row_group.rows}"
        )
        return
    if (np.diff(offsets) <= 0).any():
        yield f"offsets of row group {row_group.index} do not ascend"
    statistics = (int(offsets[0]), int(offsets[-1]) + 1, *chunks.timestamp_range(batch))
    if statistics != (
        row_group.base_offset,
        row_group.end_offset,
        row_group.timestamp_min,
        row_group.timestamp_max,
    ):
        yield f"statistics of row group {row_group.index} are wrong"


def segment(file: SegmentFile, groups: Sequence[RowGroup]) -> Iterator[str]:
    """Check the footer of a segment against the manifest."""
    rows = sum(row_group.rows for row_group in groups)
    if rows != file.rows:
        yield f"has {rows} rows, the manifest has {file.rows}"
    if not groups:
        return
    for previous, next_group in itertools.pairwise(groups):
        if next_group.base_offset < previous.end_offset:
            yield f"offsets do not ascend from row group {previous.index} to {next_group.index}"
    if groups[0].base_offset < file.base_offset or groups[-1].end_offset > file.end_offset:
        first, end = groups[0].base_offset, groups[-1].end_offset
        yield f"holds [{first}, {end}), its name has [{file.base_offset}, {file.end_offset})"
    low = min(row_group.timestamp_min for row_group in groups)
    high = max(row_group.timestamp_max for row_group in groups)
    if low < file.timestamp_min or high > file.timestamp_max:
        yield (
            f"has timestamps {low} to {high}, the manifest has "
            f"{file.timestamp_min} to {file.timestamp_max}"
        )
