"""Wall time that the store's clock bounds.

A machine whose clock is wrong would stamp records so that retention deletes them at once, or never.
All brokers share the store's clock. The store's time now is the time in its last answer, plus the
time since that answer by this machine's boot clock.
"""

from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.object_store import ObjectStore


class StoreTime:
    """This machine's wall time, and its distance from the store's. Owned by one event loop."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._seen_ms = 0
        self._seen_s = 0.0

    def now_ms(self) -> int:
        """Return this machine's wall time, moved to within SKEW_MS_MAX of the store's."""
        own_ms = self._clock.now_ms()
        skew_ms = self._skew_ms(own_ms)
        if abs(skew_ms) <= SKEW_MS_MAX:
            return own_ms
        return own_ms - skew_ms + (SKEW_MS_MAX if skew_ms > 0 else -SKEW_MS_MAX)

    def skew_ms(self) -> int:
        """Return how far this machine's clock is ahead of the store's.

        If it is behind, the number is negative. If no answer of the store had a time yet, return 0.
        """
        return self._skew_ms(self._clock.now_ms())

    def why_wrong(self) -> str:
        """Return why this machine's clock must be set, or "" if it is within SKEW_MS_MAX."""
        skew_ms = self.skew_ms()
        if abs(skew_ms) <= SKEW_MS_MAX:
            return ""
        side = "ahead of" if skew_ms > 0 else "behind"
        return f"this machine's clock is {abs(skew_ms) / 1000:.0f} s {side} the store's: set it"

    def _skew_ms(self, own_ms: int) -> int:
        seen_ms, now_s = self._store.seen_ms, self._clock.boot_s()
        if seen_ms != self._seen_ms:
            self._seen_ms, self._seen_s = seen_ms, now_s
        return own_ms - seen_ms - int((now_s - self._seen_s) * 1000) if seen_ms else 0
