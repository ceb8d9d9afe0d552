"""Snapshots of the log, each after one WAL entry. Pure.

For each partition a `LogSnapshot` has the segments that hold [log_start_offset, sealed_end) and the
tail chunks that hold [sealed_end, high_watermark) (I7). All values can be pickled.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.storage.core.model import SegmentFile, TopicPartition
from tidelog.storage.state.partition import TailChunk


class PartitionSnapshot(NamedTuple):
    """One partition: log_start_offset <= sealed_end <= high_watermark; lists in offset order."""

    number: int
    log_start_offset: int
    sealed_end: int
    high_watermark: int
    segments: Sequence[SegmentFile]
    tail: Sequence[TailChunk]


class TopicSnapshot(NamedTuple):
    """One topic; `partitions[n].number == n`.

    `prefix` + "/" + a segment's path is the segment's key.
    """

    name: str
    topic_id: str
    prefix: str
    is_log_append_time: bool
    partitions: Sequence[PartitionSnapshot]

    @property
    def rows_max(self) -> int:
        """At most so many records are in the topic, by its offsets."""
        return sum(max(part.high_watermark - part.log_start_offset, 0) for part in self.partitions)


class LogSnapshot(NamedTuple):
    """Topics by name, after WAL entry `seq`."""

    cluster_id: str
    seq: int
    topics: Mapping[str, TopicSnapshot]

    def partition(self, of: TopicPartition) -> PartitionSnapshot:
        return self.topics[of.topic].partitions[of.partition]

    def all_partitions(self) -> list[TopicPartition]:
        return [
            TopicPartition(name, view.number)
            for name in sorted(self.topics)
            for view in self.topics[name].partitions
        ]
