"""How long one step of the service holds an event loop, in CPU time of the loop's thread.

A step is what runs between two returns to the loop: a callback, or one step of a task. A test runs
on the same loop, and sends most requests through httpx.ASGITransport, so the application runs in a
task of the test. There, a step is what the application runs until it waits. All else in the tasks
of tests and of httpx is not measured: a test may build an application or a large body.
"""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from tests.support.pace import CoreSpeed
from tidelog.storage.runtime.tasks import Steps

AsgiApp: TypeAlias = Callable[..., Coroutine[Any, Any, None]]

HELD_S_MAX = 0.04
"""Twice the target of the service (DESIGN 12.2), and BUSY_FACTOR times the longest step in
tests/service on an idle machine, 8 ms: other work may end before it is noticed."""
BUSY_SLOWNESS, BUSY_FACTOR = 1.1, 5.0
"""If a core is slower than on an idle machine, the limit is higher by this factor: other work on
the core changes the CPU time of the same step up to so many times, from one millisecond to the
next, so a measurement after the step does not show by how much."""
SPEED = CoreSpeed()

CLIENT_FOLDERS = (f"{Path(__file__).parents[1]}/", f"{Path(httpx.__file__).parent}/")
TEST_RUNNER = "TestRunner."
"""The class in whose task anyio runs async tests and fixtures."""


class Held:
    """Finds steps of more than `limit_s` on the thread that makes this object.

    Collections of garbage do not count: a test process has more objects than a broker.
    """

    def __init__(self, limit_s: float, slowness: Callable[[], float]) -> None:
        self.found: list[tuple[float, str]] = []
        """Seconds, and what ran."""
        self._limit_s = limit_s
        self._slowness = slowness
        self._thread = threading.get_ident()
        self._collected_s = 0.0
        self._collection_began_s = 0.0

    def on_collection(self, phase: str, _: object) -> None:
        """Measure a collection of garbage (gc.callbacks)."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collection_began_s = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._collection_began_s

    def run(self, run: Callable[[Any], None], handle: Any) -> None:
        """Run a handle of a loop. Loops of other threads are not measured."""
        if threading.get_ident() != self._thread:
            run(handle)
            return
        callback, began_s = handle._callback, time.thread_time() - self._collected_s
        run(handle)
        held_s = time.thread_time() - self._collected_s - began_s
        if held_s > self._limit_s and not _is_of_client(owner := _owner(callback)):
            self._add(held_s, repr(owner))

    def around(self, app: AsgiApp) -> AsgiApp:
        """Return the application with each step of its requests measured."""

        async def measured_app(scope: Any, receive: Any, send: Any) -> None:
            name = f"{scope.get('method')} {scope.get('path')}"
            await Steps(app(scope, receive, send), partial(self.step, name))

        return measured_app

    def step(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run one step of a coroutine, by its `send` or `throw`."""
        began_s = time.thread_time() - self._collected_s
        try:
            return run(*arguments)
        finally:
            held_s = time.thread_time() - self._collected_s - began_s
            if held_s > self._limit_s:
                self._add(held_s, name)

    def _add(self, held_s: float, name: str) -> None:
        is_busy = self._slowness() > BUSY_SLOWNESS
        if held_s > self._limit_s * (BUSY_FACTOR if is_busy else 1.0):
            self.found.append((round(held_s, 3), name))


def _owner(callback: Any) -> Any:
    """Return the coroutine of the task whose step this callback is; else the callback."""
    task = getattr(callback, "__self__", None)
    return task.get_coro() if isinstance(task, asyncio.Task) else callback


def _is_of_client(owner: Any) -> bool:
    """Whether a test or httpx began the task of this coroutine."""
    code = getattr(owner, "cr_code", None)
    if code is None:
        return False
    return code.co_filename.startswith(CLIENT_FOLDERS) or code.co_qualname.startswith(TEST_RUNNER)


@contextlib.contextmanager
def measured(
    limit_s: float = HELD_S_MAX, slowness: Callable[[], float] = SPEED.slowness
) -> Iterator[Held]:
    """Measure the steps on asyncio's loops (not uvloop's) of this thread.

    A step may take `limit_s`, and BUSY_FACTOR times that while other programs use the machine.
    """
    SPEED.note()
    held_steps, run, make = (
        Held(limit_s, slowness),
        asyncio.Handle._run,
        httpx.ASGITransport.__init__,
    )

    def made(transport: httpx.ASGITransport, app: AsgiApp, **options: Any) -> None:
        make(transport, held_steps.around(app), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", lambda handle: held_steps.run(run, handle))
        patch.setattr(httpx.ASGITransport, "__init__", made)
        gc.callbacks.append(held_steps.on_collection)
        try:
            yield held_steps
        finally:
            gc.callbacks.remove(held_steps.on_collection)
