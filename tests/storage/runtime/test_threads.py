"""The thread with an event loop of its own, and callers that are cancelled."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from tidelog.storage.runtime.threads import LoopThread


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
