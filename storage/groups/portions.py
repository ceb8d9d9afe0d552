"""The result of a member's read: portions, each with records of one partition. Pure."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

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

    Until the read ends, its caller may replace a portion by a portion with a lower `next_offset`.
    Then the next read begins there. `failure` is the error of a partition that could not be read.
    """

    portions: list[Portion]
    generation: int
    failure: LogError | None = None

    @property
    def weight(self) -> int:
        """The weight of the records in bytes (chunk.weight)."""
        return sum(portion.fetched.weight for portion in self.portions)

    @property
    def records(self) -> int:
        return sum(portion.fetched.records for portion in self.portions)


PortionCheck: TypeAlias = Callable[[Portion], None]
"""A check of a portion: raises LogError if the caller can deliver none of its records."""
