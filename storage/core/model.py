"""Value types that many modules of the log share, and two limits.

Imports no other module of the log.
"""

import sys
from enum import IntEnum
from typing import NamedTuple, TypeAlias

OFFSET_MAX = 2**63 - 1
SKEW_MS_MAX = 60_000
"""Largest accepted difference between a machine's wall clock and the store's clock. Brokers and
`apply` reduce a larger difference to this value. They do not correct a smaller difference, because
the store's dates are inexact: a date has whole seconds, and is already old when its response
arrives.
"""


class TopicPartition(NamedTuple):
    """A partition, named by its topic's name and its number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class AppendedRange(NamedTuple):
    """The offsets of consecutive records of one request: [base_offset, base_offset + count)."""

    topic: str
    partition: int
    base_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no code calls

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count


class Acks(IntEnum):
    """When the broker answers a produce request."""

    NONE = 0  # after validation
    LOCAL = 1  # after fdatasync of the broker's hot log; offsets are not known yet
    ALL = -1  # after the commit, with offsets


class SegmentFile(NamedTuple):
    """One immutable Parquet file of one partition, as the manifest describes it.

    `path` is relative to the topic's prefix. Sizes are bytes, times are ms since the epoch, and
    `end_offset` is exclusive. `rows` is less than `end_offset - base_offset` only after a key
    compaction, or if lost records lie in the range.
    """

    path: str
    partition: int
    base_offset: int
    end_offset: int
    size: int
    rows: int
    timestamp_min: int
    timestamp_max: int


Part: TypeAlias = bytes | bytearray | memoryview
"""A part of an object's body. Callers pass a body as several parts and need not join them."""


class TopicIdPartition(NamedTuple):
    """A partition, named by its topic's id. A topic that is created again has another id."""

    topic_id: str
    partition: int


class ReadBounds(NamedTuple):
    """Bounds of one read; all its records are before `offset_end`.

    `bytes_max` bounds the weight of all records (chunk.weight), `records_max` their number.
    """

    bytes_max: int
    records_max: int = sys.maxsize
    offset_end: int = sys.maxsize
