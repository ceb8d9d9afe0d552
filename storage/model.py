"""The nouns of the log that carry no behaviour: shared by every module, importing none of them."""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition by its topic's name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Placement(NamedTuple):
    """Where consecutive records of one request came to lie: [base_offset, base_offset + count)."""

    topic: str
    partition: int
    base_offset: int
    count: int  # type: ignore[assignment]  # nobody counts values in this tuple

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count


class SegmentFile(NamedTuple):
    """One immutable Parquet file of one partition, as the manifest names it.

    `path` is relative to the topic's prefix, sizes are bytes, times are ms since the epoch,
    `end_offset` is exclusive. `rows` is less than the offset range only after key compaction.
    """

    path: str
    partition: int
    base_offset: int
    end_offset: int
    size: int
    rows: int
    timestamp_min: int
    timestamp_max: int
