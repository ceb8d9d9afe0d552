"""The result of a member's read: portions, each with records of one partition. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.records import FetchResult


class Portion(NamedTuple):
    """Records of one partition."""

    where: TopicIdPartition
    topic: str
    offset: int
    fetched: FetchResult


class AnswerArrival(Protocol):
    """How the caller of a read can learn whether the member has received the records."""

    async def has_arrived(self) -> bool:
        """Return whether the records have arrived.

        If it is not certain, wait a few seconds for the proof, then return False.
        """


@dataclass(slots=True, eq=False)
class Read:
    """Result of a read: records of partitions that the member owns in this generation.

    Until the read ends, its caller may replace a portion by a portion with a lower `next_offset`.
    Then the next read begins there. The caller sets `arrival`; without one, the records have
    arrived when the read ends. `failure` is the error of a partition that could not be read.
    """

    portions: list[Portion]
    generation: int
    failure: LogError | None = None
    read_id: str = ""
    """Names this read to the member. Empty if it has no records."""
    arrival: AnswerArrival | None = None
    _dropped: int = 0

    @property
    def weight(self) -> int:
        """The weight of the records in bytes (chunk.weight)."""
        return sum(portion.fetched.weight for portion in self.portions)

    @property
    def records(self) -> int:
        return self._dropped + sum(portion.fetched.records for portion in self.portions)

    def drop_records(self) -> None:
        """Free the records, which may be large. Their number, weight and offsets stay."""
        self._dropped = self.records
        self.portions = [
            portion._replace(fetched=portion.fetched._replace(pieces=[]))
            for portion in self.portions
        ]


@dataclass(slots=True, eq=False)
class SentRead:
    """A read with records whose response was sent, without its records.

    `arrival` is None if they have arrived.
    """

    read_id: str
    records: int
    arrival: AnswerArrival | None


PortionCheck: TypeAlias = Callable[[Portion], None]
"""A check of a portion: raises LogError if the caller can deliver none of its records."""
