"""The result of an entry, the outcome of a commit, and the outcome of its retry. Pure."""

from typing import NamedTuple

from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.state import idempotency
from tidelog.storage.state.idempotency import IdempotencyRecord
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.state.topic_checks import Topic


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
    """The result of an entry: one outcome per commit, the deleted topics, and the ids of groups
    whose members, assignments or positions changed."""

    outcomes: list[Outcome]
    deleted: list[Topic]
    groups: set[str]


def recall(known: IdempotencyRecord, fingerprint: bytes) -> Outcome:
    """Return the outcome of a retry: the placements of the first request. If the content of the
    retry differs from the first request's, return a refusal."""
    if known.claim.fingerprint != fingerprint:
        return Outcome([], idempotency.another_request(known.claim.key))
    return Outcome(known.placements, is_duplicate=True)
