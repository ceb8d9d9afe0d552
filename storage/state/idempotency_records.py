"""The idempotency keys of past requests with their results: a part of the cluster state.

Pure, changed by `apply` (I4). A commit and its key are in the same entry, so the log has both or
neither. From level 3 on a key belongs to the principal of its request, so two principals may use
the same key. `apply` refuses a commit above a share or above the bound (state.principal_shares),
and keeps each key for the whole KEY_WINDOW_MS. Below level 3 keys belong to no principal, and above
the bound `apply` drops the oldest key.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core.errors import IdempotencyMismatch, LogError
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.state.principal_shares import (
    IDEMPOTENCY_KEYS,
    IDEMPOTENCY_PLACEMENTS,
    Need,
    Shares,
)

KEYS_MAX = 250_000
"""Bound of the kept keys (I10); ~500 bytes each, and ~110 for each placement."""
PLACEMENTS_MAX = 4 * KEYS_MAX
"""Bound of the placements of the kept keys (shares.DERIVED)."""
KEY_WINDOW_MS = 3_600_000
"""How long a key is kept, in elapsed time."""


class IdempotencyRecord(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The result of a request with an Idempotency-Key."""

    claim: IdempotencyKey
    at_ms: int
    placements: list[AppendedRange]


OwnedRecords: TypeAlias = dict[str, list[IdempotencyRecord]]
"""Records in a checkpoint by principal, the oldest first."""


class IdempotencyRecords:
    """The idempotency records.

    Owned by the cluster state. The principal is empty for records of clients without
    authentication, and for records of commits below level 3.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._records: dict[str, dict[str, IdempotencyRecord]] = {}
        # The oldest first. Two queues, because a queue of pairs takes 56 bytes more for each key.
        self._order: deque[str] = deque()
        self._principals: deque[str] = deque()

    def get(self, key: str, principal: str = "") -> IdempotencyRecord | None:
        """Return the principal's record of the key, else the record without a principal.

        So a retry of a request from before level 3, or before authentication was on, gets the first
        answer.
        """
        own = self._records.get(principal)
        record = None if own is None else own.get(key)
        if record is None and principal and "" in self._records:
            record = self._records[""].get(key)
        return record

    def needs(self, principal: str) -> Need:
        return Need(IDEMPOTENCY_KEYS, principal, 1, KEYS_MAX)

    def refusal(
        self, principal: str, placements: int, quota: Callable[[str, str], int | None]
    ) -> LogError | None:
        """Return why no broker may accept a new key with so many placements, or None."""
        needs = (
            self.needs(principal),
            Need(IDEMPOTENCY_PLACEMENTS, principal, placements, PLACEMENTS_MAX),
        )
        return self._shares.refusal(needs, quota)

    def remember(self, record: IdempotencyRecord, principal: str = "") -> None:
        self._records.setdefault(principal, {})[record.claim.key] = record
        self._order.append(record.claim.key)
        self._principals.append(principal)
        self._count(record, principal, 1)

    def forget(self, now_ms: int, *, is_bounded: bool = True) -> None:
        """Drop records older than KEY_WINDOW_MS.

        If `is_bounded`, also drop the oldest ones above the bound. Cheap if there are none to drop.
        """
        horizon = now_ms - KEY_WINDOW_MS
        order = self._order
        while order:
            key, principal = order[0], self._principals[0]
            own = self._records[principal]
            is_over = is_bounded and len(order) > KEYS_MAX
            if own[key].at_ms >= horizon and not is_over:
                break
            self._count(own.pop(key), principal, -1)
            if not own:
                del self._records[principal]
            order.popleft()
            self._principals.popleft()

    def _count(self, record: IdempotencyRecord, principal: str, sign: int) -> None:
        self._shares.add(IDEMPOTENCY_KEYS, principal, sign)
        self._shares.add(IDEMPOTENCY_PLACEMENTS, principal, sign * len(record.placements))

    def kept(self) -> OwnedRecords:
        """Return the records by principal, as part of a checkpoint."""
        return {principal: list(own.values()) for principal, own in self._records.items()}

    def load(self, records: OwnedRecords) -> None:
        """Restore the records from a checkpoint.

        The order of records with the same time has no effect, because they expire together.
        """
        pairs = [(record, principal) for principal, own in records.items() for record in own]
        for record, principal in sorted(pairs, key=lambda pair: pair[0].at_ms):
            self.remember(record, principal)


def another_request(key: str) -> IdempotencyMismatch:
    """Return the error for a key that was used by an earlier request with another body."""
    return IdempotencyMismatch(f"idempotency key {key!r} was used for another request")


def recall(record: IdempotencyRecord, fingerprint: bytes) -> Outcome:
    """Return the outcome of a retry: the placements of the first request.

    If the content of the retry differs from the first request's, return a refusal.
    """
    if record.claim.fingerprint != fingerprint:
        return Outcome([], another_request(record.claim.key))
    return Outcome(record.placements, is_duplicate=True)
