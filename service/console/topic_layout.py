"""The storage layout of a topic, read-only.

It says where each partition's records are, in which segments, and what merging and compaction would
do.

The manifest in this broker's memory may be older than the last retention or compaction. If a
newer seal exists, the broker reloads the manifest. If not, it reloads it at most once in 30 s.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from pydantic import BaseModel, Field

from tidelog.compaction.plan import MergeBounds, cleanable, merges
from tidelog.service.slices import sliced
from tidelog.storage.broker import Broker
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.stored_objects import PartitionFiles

SEGMENTS_MAX = 120
"""Bound of the segments listed for a partition. If there are more, neighbours are combined."""

FRESH_PARTITIONS_MAX = 100
"""The sums of a topic with more partitions are kept for TOTALS_AGE_MS, because they cost about
0.2 ms a partition."""
TOTALS_AGE_MS = 15_000
TOTALS_MAX = 16
"""Bound of the topics whose sums are kept."""


class Segments(BaseModel):
    """One segment, or several neighbours combined."""

    base_offset: int
    end_offset: int
    files: int
    bytes: int
    records: int
    timestamp_min: int
    timestamp_max: int


class Compaction(BaseModel):
    """The work that key compaction and merging would do."""

    clean_end_offset: int = Field(description="keys are compacted below this offset")
    dirty_ratio: float = Field(
        description="fraction of the sealed bytes at or above `clean_end_offset`"
    )
    is_due: bool = Field(description="`dirty_ratio` exceeds `min.cleanable.dirty.ratio`")
    merges: int = Field(description="number of groups of small segments that a merge would join")


class PartitionLayout(BaseModel):
    """The layout of one partition.

    The table has the records of [log_start, sealed_end), and the WAL has the records of
    [sealed_end, high_watermark). Records from hot_start on are also in this broker's memory.
    """

    partition_id: int
    log_start_offset: int
    sealed_end_offset: int
    hot_start_offset: int
    high_watermark: int
    table_bytes: int
    table_records: int
    files: int
    tail_bytes: int
    tail_runs: int
    unsealed_since_ms: int | None
    segments: list[Segments]
    compaction: Compaction
    error: str | None = Field(default=None, description="why the table cannot be read")


class LayoutTotals(BaseModel):
    """Sums over all partitions of a topic, also over those that the answer does not show."""

    records: int = Field(description="in the table and in the WAL, without compacted records")
    table_bytes: int
    files: int
    tail_bytes: int
    unsealed_since_ms: int | None
    due: int = Field(description="partitions whose compaction is due")
    merges: int
    measured_ms: int = Field(
        description=f"time of the sums; for more than {FRESH_PARTITIONS_MAX} partitions, it may be "
        f"up to {TOTALS_AGE_MS} ms ago"
    )


class TopicLayouts:
    """Layouts of the topics in one broker's log."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._totals: dict[str, LayoutTotals] = {}
        """By topic id, oldest first; only of topics with many partitions."""

    async def totals(self, topic: Topic) -> LayoutTotals:
        """Return the sums over all partitions. Raises Unavailable."""
        now_ms = self._broker.clock.now_ms()
        cached_totals = self._totals.get(topic.topic_id)
        if cached_totals is not None and now_ms - cached_totals.measured_ms < TOTALS_AGE_MS:
            return cached_totals
        totals = _no_totals(now_ms)
        async for number in sliced(range(len(topic.partitions))):
            _add(totals, await self._partition(topic, number))
        if len(topic.partitions) > FRESH_PARTITIONS_MAX:
            self._totals.pop(topic.topic_id, None)
            self._totals[topic.topic_id] = totals
            while len(self._totals) > TOTALS_MAX:
                del self._totals[next(iter(self._totals))]
        return totals

    async def of(self, topic: Topic, numbers: range) -> list[PartitionLayout]:
        """Return the layouts of these partitions of the topic.

        If the table is damaged, they have no segments, and `error` has the reason. Raises
        Unavailable.
        """
        return [await self._partition(topic, number) async for number in sliced(numbers)]

    async def _partition(self, topic: Topic, number: int) -> PartitionLayout:
        config = topic.config
        files = await self._broker.stored.partition_files(topic, number)
        # No await from here on, so all fields show the same state.
        partition, live = topic.partitions[number], files.live
        return PartitionLayout(
            partition_id=number,
            log_start_offset=partition.log_start_offset,
            sealed_end_offset=max(partition.sealed_end, partition.log_start_offset),
            hot_start_offset=files.hot_start,
            high_watermark=partition.high_watermark,
            table_bytes=int(live.size.sum()),
            table_records=int(live.rows.sum()),
            files=len(live.path),
            tail_bytes=partition.tail_bytes,
            tail_runs=len(partition.tail),
            unsealed_since_ms=partition.tail[0].committed_ms if partition.tail else None,
            segments=list(_segments(files)),
            compaction=self._compaction(files, partition, config),
            error=None if files.damage is None else str(files.damage),
        )

    def _compaction(
        self, files: PartitionFiles, partition: Partition, config: TopicConfig
    ) -> Compaction:
        now_ms = self._broker.clock.now_ms()
        columns, clean_end = files.segments, files.clean_end
        cleanable_segments = cleanable(columns, partition, config, clean_end, now_ms)
        merge_bounds = MergeBounds.of(config, config.target_segment_bytes)
        planned = merges(columns, partition, merge_bounds, clean_end, now_ms)
        return Compaction(
            clean_end_offset=clean_end,
            dirty_ratio=cleanable_segments.dirty_ratio,
            is_due=cleanable_segments.is_due(config),
            merges=sum(1 for _ in planned),
        )


def _no_totals(now_ms: int) -> LayoutTotals:
    return LayoutTotals(
        records=0,
        table_bytes=0,
        files=0,
        tail_bytes=0,
        unsealed_since_ms=None,
        due=0,
        merges=0,
        measured_ms=now_ms,
    )


def _add(totals: LayoutTotals, row: PartitionLayout) -> None:
    totals.records += row.table_records + row.high_watermark - row.sealed_end_offset
    totals.table_bytes += row.table_bytes
    totals.files += row.files
    totals.tail_bytes += row.tail_bytes
    since = [ms for ms in (totals.unsealed_since_ms, row.unsealed_since_ms) if ms is not None]
    totals.unsealed_since_ms = min(since, default=None)
    totals.due += row.compaction.is_due
    totals.merges += row.compaction.merges


def _segments(files: PartitionFiles) -> Iterator[Segments]:
    columns = files.live
    count = len(columns.path)
    if not count:
        return
    bounds = np.linspace(0, count, min(count, SEGMENTS_MAX) + 1).astype(int).tolist()
    for first, end in itertools.pairwise(bounds):
        run = columns.between(first, end)
        yield Segments(
            base_offset=int(run.base_offset[0]),
            end_offset=int(run.end_offset[-1]),
            files=end - first,
            bytes=int(run.size.sum()),
            records=int(run.rows.sum()),
            timestamp_min=int(run.timestamp_min.min()),
            timestamp_max=int(run.timestamp_max.max()),
        )
