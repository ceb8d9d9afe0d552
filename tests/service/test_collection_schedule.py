"""One broker collects garbage, while garbage is expected, and once a day in any case."""

from types import SimpleNamespace
from typing import Any

from tests.support.clock import ManualClock
from tidelog.service.server.collection_schedule import (
    IDLE_ROUNDS,
    OTHERS_ROUNDS,
    ROUNDS,
    CollectionSchedule,
)
from tidelog.storage.core.time_bounds import Bounds

ROUND_S = 300.0


class Rounds:
    """The rounds of a broker; `seq` is its newest entry."""

    def __init__(self, *, is_owner: bool = True) -> None:
        self.clock = ManualClock(1)
        bounds = SimpleNamespace(now=Bounds())
        self.state = SimpleNamespace(seq=1, bounds=bounds)
        cluster = SimpleNamespace(owns=lambda _: is_owner)
        broker: Any = SimpleNamespace(clock=self.clock, state=self.state, cluster=cluster)
        self.schedule = CollectionSchedule(broker, ROUND_S)

    def collections(self, rounds: int) -> int:
        count = 0
        for _ in range(rounds):
            count += self.schedule.begin_if_due()
            self.clock.advance(ROUND_S)
        return count


def test_a_busy_cluster_collects_each_hour() -> None:
    rounds = Rounds()
    count = 0
    for _ in range(10):
        rounds.state.seq += 1
        count += rounds.collections(ROUNDS)
    assert count == 10


def test_an_idle_cluster_ends_its_garbage_and_then_collects_once_a_day() -> None:
    rounds = Rounds()
    first = rounds.collections(4 * ROUNDS)
    assert first >= 3, "the retention of the last entries passes"
    assert rounds.collections(3 * IDLE_ROUNDS) == 3
    rounds.state.seq += 1
    assert rounds.collections(3 * ROUNDS) >= 2


def test_other_brokers_collect_where_own_broker_may_not() -> None:
    rounds = Rounds(is_owner=False)
    assert rounds.collections(OTHERS_ROUNDS) == 0
    assert rounds.collections(OTHERS_ROUNDS) == 1
