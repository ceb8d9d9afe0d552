"""Bytes that owners share: M1 to M3 of service.memory_pool."""

import random
from collections import Counter

import pytest

from tidelog.service.memory_pool import EVERYONE, UNPROVED, UNPROVED_PART, MemoryPool, Share


class _Taker:
    """Takes its bytes as soon as there is room."""

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


def test_memory_of_one_owner_is_given_in_the_order_of_requests() -> None:
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


def test_taker_that_leaves_lets_the_next_one_go_on() -> None:
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


def test_a_share_that_has_ended_takes_no_bytes() -> None:
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
def test_an_owner_that_holds_nothing_is_passed_by_another_one_once(seed: int) -> None:
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


def test_connections_without_a_principal_share_a_small_part() -> None:
    memory = MemoryPool(1600)
    takers = _takers(memory, *[10] * 400, owner=UNPROVED)
    assert sum(_sizes(takers)) == 1600 // UNPROVED_PART
    assert _sizes(_takers(memory, 800, owner="User:a")) == [800]


@pytest.mark.parametrize("seed", range(50))
def test_pool_of_random_owners_is_exact_and_serves_each_of_them(seed: int) -> None:
    draw, memory = random.Random(seed), MemoryPool(1000)
    owners = [UNPROVED, *(f"User:{number}" for number in range(5))]
    takers: list[_Taker] = []
    for _ in range(500):
        if draw.random() < 0.6:
            owner = draw.choice(owners)
            size = draw.randrange(1, 1000 // UNPROVED_PART if owner == UNPROVED else 1000)
            takers += _takers(memory, size, owner=owner)
        elif takers:
            taker = takers.pop(draw.randrange(len(takers)))
            if taker.has_bytes:
                memory.give(taker.owner, taker.size)
            else:
                memory.leave(taker)
        held = Counter[str]()
        for taker in takers:
            held[taker.owner] += taker.size if taker.has_bytes else 0
        assert memory.used == held.total() <= 1000
        assert held[UNPROVED] <= 1000 // UNPROVED_PART
    while takers:  # all end: each that waits is served in its turn
        served = [taker for taker in takers if taker.has_bytes]
        assert served, "the pool is empty, and a taker waits"
        takers.remove(served[0])
        memory.give(served[0].owner, served[0].size)
    assert memory.used == 0
