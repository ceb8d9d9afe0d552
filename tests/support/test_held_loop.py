"""Which steps count as holding the loop, with a clock that the test sets."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support import held_loop
from tests.support.held_loop import HELD_S_MAX, Held, measured

LONG_S = 2 * HELD_S_MAX
HALF_S = 0.6 * HELD_S_MAX


class Cpu:
    """CPU time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.slowness = 1.0

    def use(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Cpu:
    cpu = Cpu()
    monkeypatch.setattr(held_loop, "time", SimpleNamespace(thread_time=lambda: cpu.now_s))
    return cpu


@pytest.fixture
def held_steps(cpu: Cpu) -> Iterator[Held]:
    with measured(slowness=lambda: cpu.slowness) as held_steps:
        yield held_steps


def client_of(cpu: Cpu, *steps_s: float) -> httpx.AsyncClient:
    """A client of an application whose requests have these steps."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for seconds in steps_s:
            cpu.use(seconds)
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://tide")


async def test_a_long_step_of_a_request_is_found(cpu: Cpu, held_steps: Held) -> None:
    async with client_of(cpu, 0.0, LONG_S) as client:
        assert (await client.get("/slow")).status_code == 204
    assert held_steps.found == [(LONG_S, "GET /slow")]


async def test_a_step_on_a_busy_machine_may_take_longer(cpu: Cpu, held_steps: Held) -> None:
    cpu.slowness = 1.2
    async with client_of(cpu, LONG_S, 3 * LONG_S) as client:
        await client.get("/slow")
    assert held_steps.found == [(3 * LONG_S, "GET /slow")]


async def test_steps_of_one_request_do_not_add_up(cpu: Cpu, held_steps: Held) -> None:
    async with client_of(cpu, HALF_S, HALF_S, HALF_S) as client:
        await client.get("/")
        await asyncio.gather(client.get("/"), client.get("/"))
    assert held_steps.found == []


async def test_a_long_step_after_a_cancellation_is_found(cpu: Cpu, held_steps: Held) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cpu.use(LONG_S)

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tide") as client:
        asking = asyncio.create_task(client.get("/waits"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert held_steps.found == [(LONG_S, "GET /waits")]


async def test_callbacks_count_and_the_test_itself_does_not(cpu: Cpu, held_steps: Held) -> None:
    async def of_a_test() -> None:
        cpu.use(LONG_S)

    cpu.use(LONG_S)
    await asyncio.create_task(of_a_test())
    assert held_steps.found == []
    asyncio.get_running_loop().call_soon(cpu.use, LONG_S)
    await asyncio.sleep(0)
    ((seconds, name),) = held_steps.found
    assert seconds == LONG_S
    assert "Cpu.use" in name


async def test_tasks_of_other_code_count(cpu: Cpu, held_steps: Held) -> None:
    namespace: dict[str, Any] = {"use": cpu.use, "seconds": LONG_S}
    exec("async def of_the_service():\n    use(seconds)\n", namespace)  # not in this file
    await asyncio.create_task(namespace["of_the_service"]())
    ((_, name),) = held_steps.found
    assert "of_the_service" in name


async def test_collections_of_garbage_do_not_count(cpu: Cpu, held_steps: Held) -> None:
    def collects() -> None:
        held_steps.on_collection("start", None)
        cpu.use(LONG_S)
        held_steps.on_collection("stop", None)

    asyncio.get_running_loop().call_soon(collects)
    await asyncio.sleep(0)
    assert held_steps.found == []
