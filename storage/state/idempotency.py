"""Idempotency keys of past requests and their results: a part of the cluster state.

Pure, changed by `apply` (I4). A commit and its key are in the same entry, so the log has both or
neither.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from tidelog.storage.core.entry import IdempotencyKey
from tidelog.storage.core.errors import IdempotencyMismatch
from tidelog.storage.core.model import AppendedRange

KEYS_MAX = 250_000
"""Bound of the kept keys (I10); ~100 bytes each. The oldest key is dropped first."""
KEY_WINDOW_MS = 3_600_000
"""How long a key is kept, in elapsed time."""


class IdempotencyRecord(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The result of a request with an Idempotency-Key."""

    claim: IdempotencyKey
    at_ms: int
    placements: list[AppendedRange]


class IdempotencyRecords:
    """The idempotency records. Owned by the cluster state. Iteration starts with the oldest."""

    def __init__(self) -> None:
        self._keys: dict[str, IdempotencyRecord] = {}
        self._order: deque[str] = deque()

    def __iter__(self) -> Iterator[IdempotencyRecord]:
        return (self._keys[key] for key in self._order)

    def get(self, key: str) -> IdempotencyRecord | None:
        return self._keys.get(key)

    def remember(self, key: IdempotencyRecord) -> None:
        self._keys[key.claim.key] = key
        self._order.append(key.claim.key)

    def forget(self, now_ms: int) -> None:
        """Drop records past their window or over the bound. Cheap if there are none to drop."""
        horizon = now_ms - KEY_WINDOW_MS
        order = self._order
        while order and (self._keys[order[0]].at_ms < horizon or len(order) > KEYS_MAX):
            del self._keys[order.popleft()]


def another_request(key: str) -> IdempotencyMismatch:
    """Return the error for a key that was used by an earlier request with another body."""
    return IdempotencyMismatch(f"idempotency key {key!r} was used for another request")
