"""The result of an entry, and the outcome of a commit. Pure."""

from typing import NamedTuple

from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.state.topic import Topic


class Outcome(NamedTuple):
    """The result of a commit: one placement per Append, in order, or a refusal.

    If `is_duplicate`, an earlier commit had the same key, hot mark, draft id or producer batches.
    Then `placements` are the placements of the earlier commit, or empty for a hot mark or draft id.
    `repeated` has the indexes of placements whose producer batch was in the log before. `producer`
    is the result of an InitProducer.
    """

    placements: list[AppendedRange]
    refusal: LogError | None = None
    is_duplicate: bool = False
    repeated: frozenset[int] = frozenset()
    producer: ProducerEpoch | None = None


class Applied(NamedTuple):
    """The result of an entry: an outcome per commit, deleted topics, ids of changed groups.

    A group changes if its members, assignments or positions do.
    """

    outcomes: list[Outcome]
    deleted: list[Topic]
    groups: set[str]
