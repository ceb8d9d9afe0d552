"""The age of a broker's view, by two clocks (store.moments)."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidelog.storage.core.errors import Corrupt
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.moments import NEVER, Moment, age_s, moment_now
from tidelog.storage.store.object_store import ObjectStore

T = TypeVar("T")
READS_MAX = 5
"""Calls of one read that `retry_after_suspend` makes. If each takes long, the object is damaged and
the store is slow: then the caller gets the error."""


class Freshness:
    """The time at which a view was fresh. Owned by one WAL view."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.moment = NEVER
        """The newest known moment at which the store had no entry that the view lacks."""

    def now(self) -> Moment:
        return moment_now(self._store, self._clock)

    def age_s(self, since: Moment) -> float:
        """Return the seconds since a moment."""
        return age_s(self._store, self._clock, since)

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
