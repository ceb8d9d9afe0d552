"""Coroutines that run together, the thread with an event loop of its own, and ids of a process."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator

import pytest

from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import together
from tidelog.storage.runtime.threads import LoopThread


@pytest.mark.parametrize(("at_once", "seconds", "most"), [(None, 1.0, 7), (3, 3.0, 3), (1, 7.0, 1)])
async def test_bounded_number_runs_together(at_once: int | None, seconds: float, most: int) -> None:
    now, highest = 0, 0

    async def work(number: int) -> int:
        nonlocal now, highest
        now += 1
        highest = max(highest, now)
        await asyncio.sleep(1.0)
        now -= 1
        return number

    began_s = asyncio.get_running_loop().time()
    assert await together(*map(work, range(7)), at_once=at_once) == list(range(7))
    assert (asyncio.get_running_loop().time() - began_s, highest) == (seconds, most)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("at_once", [None, 2])
async def test_first_error_ends_running_and_waiting_calls(at_once: int | None) -> None:
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


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_cancelled_close_cancels_no_other_close(is_open: bool) -> None:
    gate = threading.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[int]:
        if not is_open:
            await asyncio.to_thread(gate.wait)
        yield 1
        await asyncio.to_thread(gate.wait)

    lane = LoopThread(slow, name="test")
    opening = asyncio.create_task(lane.open())
    if is_open:
        await opening
    else:
        await asyncio.sleep(0.01)
    close_task, other_close_task = (
        asyncio.create_task(lane.close()),
        asyncio.create_task(lane.close()),
    )
    await asyncio.sleep(0.01)
    close_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await close_task
    gate.set()
    await other_close_task
    await opening
    await lane.close()


def test_copies_of_a_machine_draw_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal ids, a broker would take a commit of its copy for its own.

    It would acknowledge a request that is not in the log.
    """
    monkeypatch.setattr(os, "urandom", bytes)  # both copies get the same random bytes
    own_clock, copied_clock = SystemClock(), SystemClock()
    drawn = [clock.new_id() for _ in range(1000) for clock in (own_clock, copied_clock)]
    assert len(set(drawn)) == len(drawn)
    assert {len(drawn_id) for drawn_id in drawn} == {16}
