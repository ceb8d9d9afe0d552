"""Counters of a store: listings."""

from collections.abc import AsyncIterator

import pytest

from tests.support.clock import ManualClock
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import PAGE, MeteredStore
from tidelog.storage.store.object_store import ObjectInfo


class Slow(MemoryStore):
    """An object takes 1 ms to list; one of `failing` fails."""

    def __init__(self, clock: ManualClock, count: int, failing: int = -1) -> None:
        super().__init__()
        self._clock = clock
        self._count = count
        self._failing = failing

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for number in range(self._count):
            self._clock.advance(0.001)
            if number == self._failing:
                raise Unavailable("no answer")
            yield ObjectInfo(f"{prefix}{number}", 1, 0)


async def test_a_listings_latency_is_without_its_callers_work() -> None:
    clock = ManualClock()
    store = MeteredStore(Slow(clock, 100), clock)
    async for _ in store.list("a/"):
        clock.advance(5.0)
    latency = store.counters.seconds["list"]
    assert (sum(latency.counts), latency.total) == (1, pytest.approx(0.1))


@pytest.mark.parametrize(("count", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
async def test_each_page_is_a_request(count: int, pages: int) -> None:
    clock = ManualClock()
    store = MeteredStore(Slow(clock, count), clock)
    assert len([info async for info in store.list("a/")]) == count
    assert store.counters.by_verb()["list"] == pages


async def test_pages_of_a_listing_that_is_left_early_are_counted() -> None:
    clock = ManualClock()
    store = MeteredStore(Slow(clock, 5 * PAGE), clock)
    listing = store.list("a/")
    for _ in range(2 * PAGE + 1):
        await anext(listing)
    await listing.aclose()
    assert store.counters.by_verb()["list"] == 3
    assert sum(store.counters.seconds["list"].counts) == 1
    assert store.counters.failures["list"] == 0


async def test_a_listing_that_fails_is_a_failure() -> None:
    clock = ManualClock()
    store = MeteredStore(Slow(clock, 10, failing=5), clock)
    with pytest.raises(Unavailable):
        [info async for info in store.list("a/")]
    assert (store.counters.by_verb()["list"], store.counters.failures["list"]) == (1, 1)
