"""Coroutines that run together, all at once or a few at a time."""

import asyncio

import pytest

from tidelog.storage.runtime.tasks import together


@pytest.mark.parametrize(("at_once", "seconds", "most"), [(None, 1.0, 7), (3, 3.0, 3), (1, 7.0, 1)])
async def test_at_most_so_many_run_at_the_same_time(
    at_once: int | None, seconds: float, most: int
) -> None:
    now, seen = 0, 0

    async def work(number: int) -> int:
        nonlocal now, seen
        now += 1
        seen = max(seen, now)
        await asyncio.sleep(1.0)
        now -= 1
        return number

    began_s = asyncio.get_running_loop().time()
    assert await together(*map(work, range(7)), at_once=at_once) == list(range(7))
    assert (asyncio.get_running_loop().time() - began_s, seen) == (seconds, most)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("at_once", [None, 2])
async def test_the_first_error_ends_the_others_also_those_that_wait_for_their_turn(
    at_once: int | None,
) -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(1.0 + number)
        ended.append(number)
        if number == 1:
            raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        await together(*map(work, range(5)), at_once=at_once)
    await asyncio.sleep(10.0)
    assert ended == [0, 1]
