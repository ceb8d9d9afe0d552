"""The budget of commits, and the ticks by which brokers close their hot segments; pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.core.log_settings import PaceSettings
from tidelog.storage.wal.commit_pace import (
    INTERVAL_S_MAX,
    LEAD_S,
    NEAR_S,
    CommitBudget,
    CommitPace,
    Tick,
)

MONTH_S = 2_628_000
NUMBERS = st.integers(-(2**63), 2**63 - 1)


class HandClock:
    """A clock that the test moves."""

    now_s = 1000.0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def boot_s(self) -> float:
        return self.now_s

    def new_id(self) -> bytes:
        return bytes(16)


def follower(**settings: int) -> tuple[CommitPace, HandClock]:
    clock = HandClock()
    return CommitPace(clock, PaceSettings(**settings), leader=lambda: "leader"), clock


@examples(100)
@given(
    st.floats(0.1, 50),
    st.integers(1, 100),
    st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_no_load_gets_more_than_the_rate_and_the_burst(
    per_s: float, burst: int, pauses_s: list[float]
) -> None:
    budget, now_s = CommitBudget(per_s, burst, 0.0), 0.0
    for entries, pause_s in enumerate(pauses_s, start=1):
        now_s += max(pause_s, budget.wait_s(now_s + pause_s) + pause_s)
        assert budget.wait_s(now_s) < NEAR_S
        budget.take(now_s)
        assert entries <= burst + now_s * per_s + 0.01
        assert budget.wait_s(now_s) <= 1 / per_s + NEAR_S


def test_a_month_of_constant_load_costs_what_the_settings_say() -> None:
    """By day, as fast as PUTs of 60 ms go; all of the budget of the night is not needed."""
    settings = PaceSettings()
    budget = CommitBudget(settings.commits_per_minute / 60, settings.commits_burst, 0.0)
    now_s, entries = 0.0, 0
    while now_s < MONTH_S / 30:
        now_s += max(budget.wait_s(now_s), 0.06)
        budget.take(now_s)
        entries += 1
    dollars = (entries * 30 - settings.commits_burst * 29) * 5e-6
    assert dollars == pytest.approx(26.32, abs=0.02)


def test_an_early_entry_delays_the_next_by_one_interval_at_most() -> None:
    clock = HandClock()
    pace = CommitPace(clock, PaceSettings(120, 1))
    for _ in range(20):
        pace.begin_entry()
        assert pace.entry_s() - clock.now_s == pytest.approx(0.5)
        clock.now_s += 0.01
    assert pace.early_entries == 19


def test_without_budget_and_interval_an_entry_may_always_begin() -> None:
    clock = HandClock()
    pace = CommitPace(clock, PaceSettings(0))
    for _ in range(3):
        assert pace.entry_s() <= clock.now_s
        pace.begin_entry()
    assert pace.tick() == Tick(0, 0, 0)
    assert pace.tokens == -1


def test_an_interval_replaces_the_budget() -> None:
    clock = HandClock()
    pace = CommitPace(clock, PaceSettings(1, 1, 250))
    pace.begin_entry()
    assert pace.entry_s() == clock.now_s + 0.25
    assert pace.tick() == Tick(250, 250, 0)


def test_a_broker_closes_a_round_trip_and_a_moment_before_the_tick() -> None:
    pace, clock = follower()
    pace.on_round_trip(0.004)
    pace.on_tick(Tick(200, 250))
    close_s = clock.now_s + 0.2 - LEAD_S - 0.004
    assert pace.first_close_s() == pytest.approx(close_s)
    clock.now_s = close_s + LEAD_S / 2  # a late timer
    assert pace.first_close_s() == pytest.approx(close_s)
    clock.now_s = close_s + LEAD_S  # too late for this tick: the next one
    assert pace.first_close_s() == pytest.approx(close_s + 0.25)
    clock.now_s = close_s + 0.3  # no entry was made: the sequencer has tokens again
    assert pace.first_close_s() <= clock.now_s


def test_a_free_tick_closes_at_once() -> None:
    pace, clock = follower()
    pace.on_tick(Tick(0, 500))
    assert pace.first_close_s() <= clock.now_s
    assert pace.leader_wait_s == 0
    pace.on_tick(Tick(1, 500))
    assert pace.leader_wait_s == 0.5


def test_the_tick_of_another_sequencer_does_not_count() -> None:
    clock, leaders = HandClock(), ["another", "leader"]
    pace = CommitPace(clock, PaceSettings(60, 1), leader=lambda: leaders[-1])
    pace.on_tick(Tick(100, 250))
    leaders.pop()
    assert pace.interval_s == 1.0
    assert pace.first_close_s() <= clock.now_s
    pace.begin_entry()
    assert pace.first_close_s() == pytest.approx(clock.now_s + 1.0)


@examples(200)
@given(NUMBERS, NUMBERS, st.floats(0, 100), st.floats(0, 10), st.floats(0, 20))
def test_no_tick_makes_a_broker_wait_longer_than_an_interval(
    next_ms: int, interval_ms: int, round_trip_s: float, pause_s: float, class_s: float
) -> None:
    pace, clock = follower()
    pace.on_tick(Tick(next_ms, interval_ms))
    pace.on_round_trip(round_trip_s)
    clock.now_s += pause_s
    assert pace.first_close_s() <= clock.now_s + min(pace.interval_s, INTERVAL_S_MAX)
    until_s = clock.now_s + class_s
    assert pace.last_close_s(until_s) <= until_s


def test_a_patient_request_goes_with_the_last_tick_before_its_class_ends() -> None:
    pace, clock = follower()
    pace.on_tick(Tick(100, 250))
    first_s = clock.now_s + 0.1 - LEAD_S
    assert pace.last_close_s(first_s + 1.1) == pytest.approx(first_s + 1.0)
    assert pace.last_close_s(first_s - 0.05) == first_s - 0.05  # no tick is early enough
    pace.on_tick(Tick(0, 250))  # with tokens left, it may wait for others as long as it can
    assert pace.last_close_s(clock.now_s + 3) == clock.now_s + 3


def test_a_flush_that_others_wait_behind_hurries() -> None:
    clock = HandClock()
    moved: list[float] = []
    pace = CommitPace(clock, PaceSettings(120, 1), on_hurry=moved.append)
    pace.begin_flush(clock.now_s + 9)
    assert pace.until_s == clock.now_s + 0.5
    pace.hurry(clock.now_s + 0.6)
    pace.hurry(clock.now_s + 0.2)
    pace.hurry(clock.now_s + 0.3)
    assert moved == [clock.now_s + 0.2] == [pace.until_s]
