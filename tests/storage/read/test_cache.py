"""The cache of what was read: one load at a time for a key, a bound, and no memory of failures."""

import asyncio
import random

import pytest

from tidelog.storage.core.errors import Corrupt, Unavailable
from tidelog.storage.read.cache import Cache


class Loads:
    """Loads of a second each, counted; keys in `failing` fail."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.failing: dict[str, Exception] = {}

    def of(self, key: str, size: int = 1):
        async def load() -> str:
            self.begun.append(key)
            await asyncio.sleep(1)
            if key in self.failing:
                raise self.failing[key]
            return key * size

        return load


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def cache() -> Cache[str, str]:
    return Cache(100, len)


async def test_readers_at_one_time_share_one_load(cache: Cache[str, str], loads: Loads) -> None:
    first = asyncio.create_task(cache.get("a", loads.of("a")))
    await asyncio.sleep(0.5)
    assert cache.peek("a")
    later_tasks = [asyncio.create_task(cache.get("a", loads.of("a"))) for _ in range(9)]
    assert await asyncio.gather(first, *later_tasks) == ["a"] * 10
    assert asyncio.get_running_loop().time() == 1.0
    assert await cache.get("a", loads.of("a")) == "a"
    assert loads.begun == ["a"]
    assert (cache.hits, cache.misses) == (1, 1)


async def test_a_cancelled_reader_fails_no_other(cache: Cache[str, str], loads: Loads) -> None:
    first = asyncio.create_task(cache.get("a", loads.of("a")))
    second = asyncio.create_task(cache.get("a", loads.of("a")))
    await asyncio.sleep(0.5)
    first.cancel()
    assert await second == "a"
    assert loads.begun == ["a"]
    # Nor does it waste the load when it was the only one.
    only = asyncio.create_task(cache.get("b", loads.of("b")))
    await asyncio.sleep(0.5)
    only.cancel()
    await asyncio.sleep(1)
    assert await cache.get("b", loads.of("b")) == "b"
    assert loads.begun == ["a", "b"]


@pytest.mark.parametrize("error", [Unavailable("away"), Corrupt("x", "bad"), ValueError("bug")])
async def test_failure_is_uncached(cache: Cache[str, str], loads: Loads, error: Exception) -> None:
    loads.failing["a"] = error
    waiting = [asyncio.create_task(cache.get("a", loads.of("a"))) for _ in range(3)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results == [error] * 3
    assert not cache.peek("a")
    del loads.failing["a"]
    assert await cache.get("a", loads.of("a")) == "a"
    assert loads.begun == ["a", "a"]


async def test_failure_without_waiters_is_not_logged(cache: Cache[str, str], loads: Loads) -> None:
    loads.failing["a"] = Unavailable("away")
    cancelled_task = asyncio.create_task(cache.get("a", loads.of("a")))
    await asyncio.sleep(0.5)
    cancelled_task.cancel()
    await asyncio.sleep(1)
    assert cache.bytes == 0


async def test_i10_the_least_recently_used_go_first(loads: Loads) -> None:
    cache: Cache[str, str] = Cache(10, len)
    for key in "abcd":
        await cache.get(key, loads.of(key, 3))
        assert cache.bytes <= 10
    assert [cache.peek(key) for key in "abcd"] == [False, True, True, True]
    await cache.get("b", loads.of("b"))
    await cache.get("e", loads.of("e", 3))
    assert [cache.peek(key) for key in "bcde"] == [True, False, True, True]
    assert cache.bytes == 9


async def test_i10_what_is_larger_than_the_cache_is_given_and_not_kept(loads: Loads) -> None:
    cache: Cache[str, str] = Cache(10, len)
    await cache.get("a", loads.of("a", 5))
    assert await cache.get("b", loads.of("b", 11)) == "b" * 11
    assert cache.peek("a")
    assert not cache.peek("b")
    assert cache.bytes == 5
    none: Cache[str, str] = Cache(0, len)
    assert await none.get("a", loads.of("a")) == "a"
    assert none.bytes == 0


@pytest.mark.parametrize("seed", range(3))
async def test_i10_the_bound_holds_under_any_load(loads: Loads, seed: int) -> None:
    draws = random.Random(seed)
    cache: Cache[str, str] = Cache(50, len)

    async def reader() -> None:
        for _ in range(50):
            key = draws.choice("abcdefgh")
            if draws.random() < 0.1:
                loads.failing[key] = Unavailable("away")
            else:
                loads.failing.pop(key, None)
            try:
                value = await cache.get(key, loads.of(key, ord(key) - 90))
                assert value == key * (ord(key) - 90)
            except Unavailable:
                pass
            assert cache.bytes == sum(map(len, cache._values.values())) <= 50
            await asyncio.sleep(draws.choice([0, 0.5]))

    await asyncio.gather(*(reader() for _ in range(10)))
    assert cache.hits + cache.misses <= 500
    assert cache.hits > 0
