"""Requests that carried an Idempotency-Key, and what they were answered: a part of the state.

Pure. A key is remembered with the commit that carried it, in the same entry, so there is no moment
at which one of them is in the log and not the other.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from storage.entry import IdempotencyKey
from storage.model import Placement

KEYS_MAX = 250_000
"""Idempotency keys remembered (I10); the oldest go first. ~100 bytes each."""
KEY_WINDOW_MS = 3_600_000
"""How long a key is remembered, in entry time."""


class RememberedKey(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a request with an Idempotency-Key was answered."""

    claim: IdempotencyKey
    at_ms: int
    placements: list[Placement]


class RememberedKeys:
    """Part of the cluster state, owned by it; iterates the oldest first."""

    def __init__(self) -> None:
        self._keys: dict[str, RememberedKey] = {}
        self._order: deque[str] = deque()

    def __iter__(self) -> Iterator[RememberedKey]:
        return (self._keys[key] for key in self._order)

    def get(self, key: str) -> RememberedKey | None:
        return self._keys.get(key)

    def remember(self, key: RememberedKey) -> None:
        self._keys[key.claim.key] = key
        self._order.append(key.claim.key)

    def forget(self, now_ms: int) -> None:
        """What is past its window, or too much. Cheap when there is nothing."""
        horizon = now_ms - KEY_WINDOW_MS
        order = self._order
        while order and (self._keys[order[0]].at_ms < horizon or len(order) > KEYS_MAX):
            del self._keys[order.popleft()]
