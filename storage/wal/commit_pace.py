"""The pace of commits: when the next entry may begin, and when a broker closes its hot segment.

Each entry costs one PUT, so the pace is the price. It is the cluster's: one broker, the sequencer,
commits for all, and its pace counts. It sends the others the time to its next entry (`Tick`), and
they close their hot segments a moment before, so that their drafts arrive in time for it.

The budget is a bucket of tokens. An entry takes a token. While tokens are left, an entry begins as
soon as a request asks for it; without one it waits for the next token. A request that may not wait
for it makes the entry begin, too. The next entry then waits one interval at most, so the budget is
exceeded by the entries of such requests.

Correctness never depends on the pace. A wrong tick, or none, costs latency or PUTs. The budget is
in memory: each broker counts the entries that it sees, so the next sequencer knows it, too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tidelog.storage.core.log_settings import PaceSettings
from tidelog.storage.runtime.clock import Clock

LEAD_S = 0.02
"""A broker closes its hot segment earlier by this time, and by a round trip to the sequencer."""
LATE_S = 0.75 * LEAD_S
"""A hot segment that is closed later by this time is still in time. Timers are late, too."""
NEAR_S = 0.0001
"""Times that are closer than this are the same."""
INTERVAL_S_MAX = 60.0
"""A broker takes a longer interval of the sequencer for this one."""
ROUND_TRIP_GAIN = 0.25


class Tick(msgspec.Struct, frozen=True, array_like=True):
    """The sequencer's pace, in ms from the moment at which the message was made.

    `next_ms` is the time to its next entry, or 0 if it may begin now. In the answer to a forwarded
    draft, `held_ms` is the time for which the sequencer had the draft.
    """

    next_ms: int
    interval_ms: int = 0
    held_ms: int = 0


class _LeaderTick(NamedTuple):
    """A tick of the broker `leader_id`, in seconds of this broker's boot time."""

    leader_id: str
    next_s: float
    interval_s: float
    is_free: bool


class CommitBudget:
    """Tokens for entries, `per_s` a second and `burst` at most. Pure: time is an argument."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._tokens = float(burst)
        self._counted_s = now_s

    def tokens(self, now_s: float) -> float:
        passed_s = max(now_s - self._counted_s, 0.0)
        return min(self._tokens + passed_s * self.per_s, self.burst)

    def take(self, now_s: float) -> None:
        """Take a token. If there is no whole one, take what there is.

        So no entry makes the next one wait for more than one token.
        """
        self._tokens = max(self.tokens(now_s) - 1, 0.0)
        self._counted_s = max(now_s, self._counted_s)

    def wait_s(self, now_s: float) -> float:
        """Return the time until there is a token."""
        return max(1 - self.tokens(now_s), 0.0) / self.per_s


class CommitPace:
    """The pace as one broker knows it, owned by one event loop."""

    def __init__(
        self,
        clock: Clock,
        settings: PaceSettings,
        *,
        leader: Callable[[], str | None] = lambda: None,
        lead_s: Callable[[], float] = lambda: 0.0,
        on_hurry: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`leader` returns the id of the peer that commits this broker's drafts, or None.

        `lead_s` returns by how much this broker closes its segments before its own entries.
        `on_hurry` is called with a new `until_s` of the flush under way.
        """
        self._clock = clock
        self._least_s = settings.flush_interval_ms / 1000
        self._budget: CommitBudget | None = None
        if settings.commits_per_minute and not settings.flush_interval_ms:
            per_s = settings.commits_per_minute / 60
            self._budget = CommitBudget(per_s, settings.commits_burst, clock.boot_s())
        self._entry_s = self._flush_s = -math.inf
        self._tick: _LeaderTick | None = None
        self._round_trip_s = 0.0
        self._leader = leader
        self._lead_s = lead_s
        self._on_hurry = on_hurry
        self.until_s = math.inf
        """The boot time until which the entry of the flush under way may wait to begin."""
        self.early_entries = 0
        """Entries of this broker that began without a token, since the process started."""

    # -- entries of this broker

    @property
    def tokens(self) -> float:
        """The tokens that are left, or -1 without a budget."""
        budget = self._budget
        return -1.0 if budget is None else budget.tokens(self._clock.boot_s())

    @property
    def own_interval_s(self) -> float:
        """The longest time for which this broker's own pace makes an entry wait."""
        return self._least_s if self._budget is None else 1 / self._budget.per_s

    def entry_s(self) -> float:
        """Return the boot time from which this broker may begin an entry."""
        now_s = self._clock.boot_s()
        wait_s = 0.0 if self._budget is None else self._budget.wait_s(now_s)
        return max(now_s + wait_s if wait_s else -math.inf, self._entry_s + self._least_s)

    def begin_entry(self) -> None:
        """Note that this broker begins an entry."""
        now_s = self._clock.boot_s()
        self.early_entries += self.entry_s() > now_s + NEAR_S
        self._entry_s = now_s
        self.on_entry()

    def on_entry(self) -> None:
        """Take a token for an entry of any broker."""
        if self._budget is not None:
            self._budget.take(self._clock.boot_s())

    def tick(self, held_s: float = 0.0) -> Tick:
        """Return this broker's tick, for its peers."""
        next_s = self.entry_s() - self._clock.boot_s()
        return Tick(
            math.ceil(next_s * 1000) if next_s > NEAR_S else 0,
            math.ceil(self.own_interval_s * 1000),
            int(held_s * 1000),
        )

    # -- the sequencer's ticks

    def on_tick(self, tick: Tick) -> None:
        """Take a tick of the sequencer. Any values do no harm."""
        if (leader_id := self._leader()) is not None:
            interval_s = min(max(tick.interval_ms / 1000, 0.0), INTERVAL_S_MAX)
            next_s = self._clock.boot_s() + min(tick.next_ms / 1000, interval_s)
            self._tick = _LeaderTick(leader_id, next_s, interval_s, tick.next_ms <= 0)

    def on_round_trip(self, seconds: float) -> None:
        """Take the duration of a message to the sequencer and of its answer."""
        mean_s = self._round_trip_s + (seconds - self._round_trip_s) * ROUND_TRIP_GAIN
        self._round_trip_s = max(seconds, mean_s, 0.0)

    @property
    def leader_wait_s(self) -> float:
        """How long the sequencer may let a draft wait; 0 if it had tokens, or sent no tick."""
        tick = self._leader_tick()
        return 0.0 if tick is None or tick.is_free else tick.interval_s

    @property
    def interval_s(self) -> float:
        """The interval of the broker that commits this broker's drafts."""
        tick = self._leader_tick()
        return self.own_interval_s if tick is None else tick.interval_s

    def _leader_tick(self) -> _LeaderTick | None:
        tick = self._tick
        return tick if tick is not None and tick.leader_id == self._leader() else None

    # -- flushes

    @property
    def floor_s(self) -> float:
        """The boot time before which no class of a request closes the hot segment."""
        return self._flush_s + self._least_s

    def first_close_s(self) -> float:
        """Return the boot time of the first close from now on; if it is now, an earlier time."""
        tick = self._leader_tick()
        if tick is None:
            return max(self.entry_s(), self.floor_s) - self._lead_s()
        now_s, first_s = self._clock.boot_s(), tick.next_s - LEAD_S - self._round_trip_s
        if tick.is_free or now_s <= first_s + LATE_S:
            return first_s
        # Nothing is known of this tick's entry. Under load the next tick follows.
        second_s = first_s + tick.interval_s
        return second_s if now_s <= second_s else -math.inf

    def last_close_s(self, until_s: float) -> float:
        """Return the boot time of the last close for a request that may wait until `until_s`.

        If other requests make entries all the time, the request goes with one of them.
        """
        first_s, interval_s = self.first_close_s(), self.interval_s
        if first_s <= self._clock.boot_s() or first_s >= until_s or not interval_s:
            return until_s
        return first_s + math.floor((until_s - first_s) / interval_s) * interval_s

    def begin_flush(self, until_s: float) -> None:
        """Note that a flush begins, whose entry may wait until `until_s` at most."""
        self._flush_s = self._clock.boot_s()
        self.until_s = min(until_s, self._flush_s + self.interval_s)

    def hurry(self, until_s: float) -> None:
        """Let the flush under way wait until `until_s` at most: a request waits behind it."""
        if until_s < self.until_s:
            self.until_s = until_s
            self._on_hurry(until_s)
