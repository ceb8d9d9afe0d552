"""What a topic looks like from inside: where each partition's records lie, in which segments, and
what merging and compaction would find to do. Only looks.

The manifest that this broker has loaded may be older than what retention and compaction did since:
it is loaded anew where it is behind the seal, and else every half minute at most.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from pydantic import BaseModel, Field

from compaction.plan import clean_app_id, cleanable, merges
from storage.log import Log
from storage.manifest import SegmentColumns, Table, seal_app_id
from storage.partition import Partition
from storage.state import Topic
from storage.topics import TopicConfig

SEGMENTS_MAX = 120
"""Of a partition, one by one; of more, neighbours are shown as one."""
REFRESH_S = 30.0


class Segments(BaseModel):
    """A segment, or several that are neighbours."""

    base_offset: int
    end_offset: int
    files: int
    bytes: int
    records: int
    timestamp_min: int
    timestamp_max: int


class Compaction(BaseModel):
    """What key compaction and merging would find."""

    clean_end_offset: int = Field(description="keys are compacted below it")
    dirty_ratio: float = Field(description="part of the sealed bytes that is new since then")
    is_due: bool = Field(description="the ratio is over `min.cleanable.dirty.ratio`")
    merges: int = Field(description="groups of small segments that a merge would join")


class PartitionPicture(BaseModel):
    """Offsets: [log_start, sealed_end) is in the table, from there to high_watermark in the WAL,
    and from hot_start on also in this broker's memory."""

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
    error: str | None = Field(default=None, description="why the table cannot be shown")


class Pictures:
    """Of one broker's log."""

    def __init__(self, broker: Log) -> None:
        self._log = broker
        self._refreshed_s: dict[str, float] = {}

    async def of(self, topic: Topic, numbers: range) -> list[PartitionPicture]:
        """The topic's partitions of these numbers. Raises Unavailable, Corrupt."""
        table = await self._log.table_of(topic)
        await self._refresh(topic, table, numbers)
        config = self._log.state.config(topic)
        return [await self._partition(topic, table, number, config) for number in numbers]

    async def _refresh(self, topic: Topic, table: Table, numbers: range) -> None:
        now_s = self._log.clock.boot_s()
        refreshed_s = self._refreshed_s.get(topic.topic_id, -REFRESH_S)
        is_old = now_s - refreshed_s >= REFRESH_S
        for number in numbers:
            sealed = await table.transaction_version(seal_app_id(number)) or 0
            is_old = is_old or sealed < topic.partitions[number].sealed_end
        if is_old:
            live = {each.topic_id for each in self._log.state.topics.values()}
            kept = {key: at for key, at in self._refreshed_s.items() if key in live}
            self._refreshed_s = kept | {topic.topic_id: now_s}
            await table.refresh()

    async def _partition(
        self, topic: Topic, table: Table, number: int, config: TopicConfig
    ) -> PartitionPicture:
        columns = (await table.segments(number)).columns
        clean_end = await table.transaction_version(clean_app_id(number)) or 0
        held = topic.partitions[number]  # as of now, without another await below
        live = _between(columns, held.log_start_offset, held.sealed_end)
        hot = self._log.tail.start((topic.topic_id, number))
        hot = held.high_watermark if hot is None else max(hot, held.log_start_offset)
        return PartitionPicture(
            partition_id=number,
            log_start_offset=held.log_start_offset,
            sealed_end_offset=max(held.sealed_end, held.log_start_offset),
            hot_start_offset=hot,
            high_watermark=held.high_watermark,
            table_bytes=int(live.size.sum()),
            table_records=int(live.rows.sum()),
            files=len(live.path),
            tail_bytes=held.tail_bytes,
            tail_runs=len(held.tail),
            unsealed_since_ms=held.tail[0].committed_ms if held.tail else None,
            segments=list(_segments(live)),
            compaction=self._compaction(columns, held, config, clean_end),
        )

    def _compaction(
        self, columns: SegmentColumns, held: Partition, config: TopicConfig, clean_end: int
    ) -> Compaction:
        now_ms = self._log.clock.now_ms()
        found = cleanable(columns, held, config, clean_end, now_ms)
        is_compacted = "compact" in config.cleanup_policy
        is_dirty = found.dirty_ratio > config.min_cleanable_dirty_ratio
        planned = merges(columns, held, config.target_segment_bytes, clean_end)
        return Compaction(
            clean_end_offset=clean_end,
            dirty_ratio=found.dirty_ratio,
            is_due=is_compacted and is_dirty,
            merges=sum(1 for _ in planned),
        )


def _between(columns: SegmentColumns, start: int, end: int) -> SegmentColumns:
    """The segments that hold offsets of [start, end)."""
    first = int(np.searchsorted(columns.end_offset, start, side="right"))
    last = int(np.searchsorted(columns.base_offset, end, side="left"))
    return columns.between(first, max(last, first))


def _segments(columns: SegmentColumns) -> Iterator[Segments]:
    count = len(columns.path)
    if not count:
        return
    bounds = np.linspace(0, count, min(count, SEGMENTS_MAX) + 1).astype(int).tolist()
    for first, end in itertools.pairwise(bounds):
        some = columns.between(first, end)
        yield Segments(
            base_offset=int(some.base_offset[0]),
            end_offset=int(some.end_offset[-1]),
            files=end - first,
            bytes=int(some.size.sum()),
            records=int(some.rows.sum()),
            timestamp_min=int(some.timestamp_min.min()),
            timestamp_max=int(some.timestamp_max.max()),
        )
