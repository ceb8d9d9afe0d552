"""Bytes that owners share: M1 to M3 of service.memory_pool."""

import asyncio
import random
from collections import Counter

import pytest

from tidelog.service.memory_pool import (
    EVERYONE,
    UNPROVED,
    UNPROVED_PART,
    WOKEN_AT_ONCE,
    MemoryPool,
    Share,
)


class _Taker:
    def __init__(
        self,
        memory: MemoryPool,
        size: int,
        owner: str = EVERYONE,
        services: list[str] | None = None,
    ) -> None:
        """`services` gets the owner when the taker is served."""
        self.memory, self.size, self.owner = memory, size, owner
        self.services = [] if services is None else services
        self.has_bytes = False

    def on_memory(self) -> None:
        if not self.has_bytes:
            self.has_bytes = self.memory.take(self, self.size)
            self.services += [self.owner] * self.has_bytes


def _takers(memory: MemoryPool, *sizes: int, owner: str = EVERYONE) -> list[_Taker]:
    takers = [_Taker(memory, size, owner) for size in sizes]
    for taker in takers:
        taker.on_memory()
    return takers


def _sizes(takers: list[_Taker]) -> list[int]:
    return [taker.size for taker in takers if taker.has_bytes]


def test_memory_of_one_owner_is_given_in_order_of_requests() -> None:
    memory = MemoryPool(100)
    takers = _takers(memory, 60, 90, 5, 1000)
    assert _sizes(takers) == [60], "the small request does not overtake the large one"
    memory.give(EVERYONE, 60)
    assert _sizes(takers) == [60, 90, 5]
    memory.give(EVERYONE, 90)
    assert _sizes(takers) == [60, 90, 5], "a request above the limit waits until it is alone"
    memory.give(EVERYONE, 5)
    assert _sizes(takers) == [60, 90, 5, 1000]
    memory.give(EVERYONE, 1000)
    assert memory.used == 0


def test_taker_that_leaves_lets_next_one_go_on() -> None:
    memory = MemoryPool(100)
    takers = _takers(memory, 60, 90, 5)
    memory.leave(takers[1])
    assert _sizes(takers) == [60, 5]


def test_shares_of_one_owner_leave_room_for_those_of_others() -> None:
    memory = MemoryPool(90)
    greedy = [Share(memory, "User:greedy") for _ in range(9)]
    assert sum(share.set(10) for share in greedy) == 5, "as many as are free, or less"
    other = Share(memory, "User:other")
    assert other.set(20)
    assert not other.set(60), "more than is free"
    assert not Share(memory, UNPROVED).set(90 // UNPROVED_PART + 1)
    assert (memory.used, memory.refused) == (70, 6)
    for share in greedy:
        assert share.set(0)
    assert other.set(1000), "alone, a share may have any size"
    assert not greedy[0].set(1)
    assert other.set(0)
    assert memory.used == 0


def test_share_that_has_ended_takes_no_bytes() -> None:
    memory = MemoryPool(90)
    share = Share(memory, "User:a")
    assert share.set(30)
    share.end()
    assert not share.set(1)
    assert share.set(0)
    assert (memory.used, share.size) == (0, 0)


def test_owner_that_waits_for_its_share_delays_no_other_owner() -> None:
    memory = MemoryPool(90)
    greedy = _takers(memory, *[10] * 9, owner="User:greedy")
    assert _sizes(greedy) == [10] * 5, "an owner takes while it then holds what is free, or less"
    other = _takers(memory, 10, 10, 10, owner="User:other")
    assert _sizes(other) == [10, 10]
    assert _sizes(_takers(memory, 10, owner="User:new")) == [10]


def test_owner_that_holds_nothing_is_not_passed_for_ever() -> None:
    memory = MemoryPool(100)
    small = _takers(memory, *[10] * 5, owner="User:a")
    large = _takers(memory, 80, owner="User:b")
    later = _takers(memory, 10, owner="User:c")
    assert (_sizes(large), _sizes(later)) == ([], [])
    for _ in range(3):
        memory.give("User:a", small.pop().size)
    assert (_sizes(large), _sizes(later)) == ([80], [])


def test_owner_whose_queue_never_empties_delays_another_one_by_what_it_holds() -> None:
    memory = MemoryPool(96)
    fed = _takers(memory, *[16] * 5, owner="User:fed")
    large = _takers(memory, 64, owner="User:large")
    ended = 0
    while not large[0].has_bytes:
        fed += _takers(memory, 16, owner="User:fed")
        memory.give("User:fed", fed[ended].size)
        ended += 1
        assert ended < 4, "it held three takes"
    memory.give("User:large", 64)
    assert sum(taker.has_bytes for taker in fed[ended:]) == 3, "its queue goes on"


@pytest.mark.parametrize("seed", range(20))
def test_owner_that_holds_nothing_is_passed_by_another_one_once(seed: int) -> None:
    draw, memory, services = random.Random(seed), MemoryPool(1000), list[str]()
    queues: dict[str, list[_Taker]] = {f"User:{number}": [] for number in range(4)}
    waits_since: dict[str, int] = {}
    for _ in range(1000):
        owner, queue = draw.choice([*queues.items()])
        served = [taker for taker in queue if taker.has_bytes]
        if served and len(queue) > draw.randrange(6):
            queue.remove(served[0])
            memory.give(owner, served[0].size)
        else:
            queue.append(_Taker(memory, draw.randrange(1, 1001), owner, services))
            queue[-1].on_memory()
        for name, takers in queues.items():
            if not takers or any(taker.has_bytes for taker in takers):
                waits_since.pop(name, None)
                continue
            others = Counter(services[waits_since.setdefault(name, len(services)) :])
            assert max(others.values(), default=0) <= 1
    assert len(services) > 200


def test_taker_whose_owner_changes_delays_no_other_one() -> None:
    memory = MemoryPool(1600)
    first, logging_in, other = _takers(memory, 100, 10, 10, owner=UNPROVED)
    assert _sizes([first, logging_in, other]) == [100]
    logging_in.owner = "User:a"
    logging_in.on_memory()
    assert logging_in.has_bytes
    memory.give(UNPROVED, 100)
    assert other.has_bytes
    memory.leave(logging_in)


def test_taker_that_leaves_after_its_owner_has_changed_is_not_woken() -> None:
    memory = MemoryPool(1600)
    first, logging_in, other = _takers(memory, 100, 10, 10, owner=UNPROVED)
    logging_in.owner = "User:a"
    memory.leave(logging_in)
    memory.give(UNPROVED, 100)
    assert _sizes([first, logging_in, other]) == [100, 10]
    assert other.has_bytes


def test_connections_without_principal_share_small_part() -> None:
    memory = MemoryPool(1600)
    takers = _takers(memory, *[10] * 400, owner=UNPROVED)
    assert sum(_sizes(takers)) == 1600 // UNPROVED_PART
    assert _sizes(_takers(memory, 800, owner="User:a")) == [800]


class _Quick(_Taker):
    """Gives its bytes back as soon as it has them, as a request does that is answered at once."""

    def on_memory(self) -> None:
        super().on_memory()
        if self.has_bytes:
            self.has_bytes = False
            self.memory.give(self.owner, self.size)


class _Broken(_Taker):
    def on_memory(self) -> None:
        raise ZeroDivisionError


def test_takers_that_give_their_bytes_back_at_once_are_all_served() -> None:
    memory, services = MemoryPool(100), list[str]()
    (large,) = _takers(memory, 100)
    for number in range(3_000):
        _Quick(memory, 1 + number % 50, f"User:{number % 7}", services).on_memory()
    assert services == []
    memory.give(EVERYONE, large.size)
    assert len(services) == 3_000
    assert memory.used == 0


def test_taker_with_bug_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryPool(100)
    (large,) = _takers(memory, 100)
    broken = _Broken(memory, 10)
    assert not memory.take(broken, 10)
    behind = _takers(memory, 10) + _takers(memory, 10, owner="User:a")
    memory.give(EVERYONE, large.size)
    assert all(taker.has_bytes for taker in behind)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info


async def test_iteration_of_event_loop_wakes_so_many_takers() -> None:
    memory, services = MemoryPool(10_000), list[str]()
    (large,) = _takers(memory, 10_000)
    for _ in range(2 * WOKEN_AT_ONCE + 1):
        _Taker(memory, 1, services=services).on_memory()
    memory.give(EVERYONE, large.size)
    counts = [len(services)]
    while counts[-1] < 2 * WOKEN_AT_ONCE + 1:
        await asyncio.sleep(0)
        counts.append(len(services))
    assert counts == [WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE + 1]


class _Left(_Taker):
    def on_memory(self) -> None:
        pytest.fail("it has left, and is woken")


async def test_taker_that_is_late_wakes_those_behind_it_after_its_call() -> None:
    memory = MemoryPool(100)
    (large,) = _takers(memory, 100)
    late = _Taker(memory, 10)
    assert not memory.take(late, 10)
    late.has_bytes = True  # its turn has not come
    (behind,) = _takers(memory, 10)
    memory.give(EVERYONE, large.size)
    assert memory.take(late, 10)
    assert not behind.has_bytes, "the late one is still in its call"
    await asyncio.sleep(0)
    assert behind.has_bytes


class _Crowd:
    """Takers of a pool of LIMIT bytes, in random states.

    A taker begins, ends, leaves, logs in, and some give their bytes back at once.
    """

    LIMIT = 1000

    def __init__(self, seed: int) -> None:
        self.draw, self.memory = random.Random(seed), MemoryPool(self.LIMIT)
        self.takers: list[_Taker] = []
        self.owners = [UNPROVED, *(f"User:{number}" for number in range(5))]

    def begin(self, owner: str = "") -> None:
        owner = owner or self.draw.choice(self.owners)
        most = self.LIMIT // UNPROVED_PART if owner == UNPROVED else self.LIMIT + 100
        kind = _Quick if self.draw.random() < 0.2 else _Taker
        taker = kind(self.memory, self.draw.randrange(1, most + 1), owner)
        self.takers.append(taker)
        taker.on_memory()

    def end(self, taker: _Taker) -> None:
        """Give the bytes of a taker back, or let it leave."""
        self.takers.remove(taker)
        if taker.has_bytes:
            self.memory.give(taker.owner, taker.size)
        else:
            self.memory.leave(taker)
            taker.__class__ = _Left

    def log_in(self, taker: _Taker) -> None:
        """Change the owner of a taker that waits; some leave the pool before."""
        if taker.has_bytes or isinstance(taker, _Quick) or taker.owner != UNPROVED:
            return
        if self.draw.random() < 0.5:
            self.memory.leave(taker)
        taker.owner = self.draw.choice(self.owners[1:])
        taker.on_memory()
        self.memory.wake()

    def step(self) -> None:
        chance = self.draw.random()
        if chance < 0.5 or not self.takers:
            self.begin()
        elif chance < 0.7:
            self.log_in(self.draw.choice(self.takers))
        else:
            self.end(self.draw.choice(self.takers))

    def check(self) -> None:
        memory, bytes_of_owner = self.memory, Counter[str]()
        with_bytes = [taker for taker in self.takers if taker.has_bytes]
        for taker in with_bytes:
            bytes_of_owner[taker.owner] += taker.size
        assert memory.used == bytes_of_owner.total()
        assert memory.used <= self.LIMIT or len(with_bytes) == 1, "a larger one is alone"
        assert bytes_of_owner[UNPROVED] <= self.LIMIT // UNPROVED_PART
        memory.wake()
        assert memory.used == bytes_of_owner.total(), "none waits while there is room"


class _Late(_Taker):
    """Takes its bytes in a later turn, as a connection does whose time is over."""

    is_due = False

    def on_memory(self) -> None:
        if self.is_due:
            super().on_memory()


def test_those_behind_late_taker_go_on_when_it_has_its_bytes() -> None:
    memory = MemoryPool(100)
    (first,) = _takers(memory, 100)
    late = _Late(memory, 10)
    late.is_due = True
    late.on_memory()
    behind = _takers(memory, 20, 30)
    late.is_due = False
    memory.give(first.owner, first.size)
    assert memory.used == 0
    late.is_due = True
    late.on_memory()
    assert _sizes([late, *behind]) == [10, 20, 30]


@pytest.mark.parametrize("seed", range(30))
def test_pool_of_random_owners_is_exact_and_serves_each_of_them(seed: int) -> None:
    crowd = _Crowd(seed)
    for number in range(400):
        crowd.step()
        crowd.check()
        if number == 200:  # many wait for one that has all bytes
            for taker in [*crowd.takers]:
                crowd.end(taker)
            alone = _Taker(crowd.memory, crowd.LIMIT, "User:0")
            crowd.takers.append(alone)
            alone.on_memory()
            quick = [_Quick(crowd.memory, 1, "User:1") for _ in range(400)]
            for small_taker in quick:
                small_taker.on_memory()
            crowd.end(alone)
            assert all(small_taker.services for small_taker in quick)
    while waiting := [taker for taker in crowd.takers if not (taker.has_bytes or taker.services)]:
        served = [taker for taker in crowd.takers if taker.has_bytes]
        assert served, f"the pool is empty, and {len(waiting)} takers wait"
        crowd.end(served[0])
    for taker in [*crowd.takers]:
        crowd.end(taker)
    assert crowd.memory.used == 0
