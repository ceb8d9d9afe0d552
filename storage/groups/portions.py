"""Data of a member's read: the records of its partitions, by portions. Pure."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tidelog.storage.core.chunk import sizes_before
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.log import FetchResult


class Portion(NamedTuple):
    """Records of one partition."""

    where: TopicIdPartition
    topic: str
    offset: int
    fetched: FetchResult


class Read(NamedTuple):
    """Result of a read: records of partitions that the member owns in this generation.

    Until the read ends, its caller may replace a portion by one with an earlier `next_offset`: the
    next read begins there. `failure`: the error of a partition that could not be read.
    """

    portions: list[Portion]
    generation: int
    failure: LogError | None = None


PortionCheck: TypeAlias = Callable[[Portion], None]
"""Raises LogError for a portion of which the caller can deliver nothing."""


def portion_bytes(portion: Portion) -> int:
    """Count the bytes of keys and values."""
    return sum(int(sizes_before(piece.batch)[-1]) for piece in portion.fetched.pieces)
