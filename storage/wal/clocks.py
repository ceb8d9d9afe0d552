"""The age of a view by two clocks, and wall time that the store's clock bounds.

The two clocks are the machine's boot clock and the store's.

The boot clock may stop while a host pauses the machine. The store's clock has a resolution of a
second, and is not known before the store's first answer. So a view's age is the longer of the two
times that these clocks show (`Freshness`).

A machine whose clock is wrong would stamp records so that retention deletes them at once, or never.
All brokers share the store's clock. The store's time now is the time in its last answer, plus the
time since that answer by this machine's boot clock (`StoreTime`).
"""

import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.object_store import ObjectStore

T = TypeVar("T")

STORE_CLOCK_STEP_S = 1.0
"""Resolution of the store's clock: S3 gives dates in seconds."""
READS_MAX = 5
"""Calls of one read that `retry_after_suspend` makes. If each takes long, the object is damaged and
the store is slow: then the caller gets the error."""


class Moment(NamedTuple):
    """A moment by the machine's boot clock, and by the store's in its last answer (0: none yet)."""

    boot_s: float
    store_ms: int


NEVER = Moment(-math.inf, 0)


class Freshness:
    """The time at which a view was fresh. Owned by one WAL view."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.moment = NEVER
        """The newest known moment at which the store had no entry that the view lacks."""

    def now(self) -> Moment:
        return Moment(self._clock.boot_s(), self._store.seen_ms)

    def age_s(self, since: Moment) -> float:
        """Return the seconds since a moment."""
        boot_s = self._clock.boot_s() - since.boot_s
        seen_ms = self._store.seen_ms
        if not (since.store_ms and seen_ms):
            return boot_s
        return max(boot_s, (seen_ms - since.store_ms) / 1000 - STORE_CLOCK_STEP_S)

    def view_age_s(self) -> float:
        return self.age_s(self.moment)

    def advance(self, moment: Moment) -> None:
        """Handle an answer of the store: at `moment`, it had no entry that the view lacks."""
        self.moment = max(self.moment, moment)

    def expire(self) -> None:
        self.moment = NEVER

    async def retry_after_suspend(self, read: Callable[[], Awaitable[T]], pause_max_s: float) -> T:
        """Return the result of `read`.

        If it raises Corrupt after more than `pause_max_s`, call it again, at most READS_MAX times
        in all: the process was suspended or the store was slow, and a needed object may have been
        collected meanwhile.
        """
        for _ in range(READS_MAX - 1):
            started = self.now()
            try:
                return await read()
            except Corrupt:
                if self.age_s(started) <= pause_max_s:
                    raise
        return await read()


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
