"""Threads of a part that closes while requests may run, their priority, and a second event loop.

The work of a resource on this loop does not block the caller's loop.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from tidelog.storage.core.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")
LOWEST_PRIORITY = 19


class Threads(ThreadPoolExecutor):
    """Threads that refuse work after their end with the error of a request that was not done."""

    def submit(
        self, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs
    ) -> Future[T]:
        """Run the call in a thread. Raises Unavailable after `shutdown`."""
        try:
            return super().submit(call, *arguments, **keywords)
        except RuntimeError as error:
            raise Unavailable("the broker stops: ask another one") from error


class CpuTime:
    """The CPU time of calls in any threads, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._turn = threading.Lock()

    def of(self, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        """Return the result of the call; count its CPU time, also if it fails."""
        began_s = time.thread_time()
        try:
            return call(*arguments, **keywords)
        finally:
            self.add(time.thread_time() - began_s)

    def add(self, seconds: float) -> None:
        with self._turn:
            self.seconds += seconds


R = TypeVar("R")


class _Live(NamedTuple, Generic[T]):
    loop: asyncio.AbstractEventLoop
    resource: T
    closing: asyncio.Event


class LoopThread(Generic[T]):
    """A thread with its own event loop.

    On that loop, `open` enters the context manager `resource`, `run` uses the resource, and `close`
    exits the context manager.

    The thread is a daemon: a process that does not call `close` still ends.
    """

    def __init__(
        self, resource: Callable[[], contextlib.AbstractAsyncContextManager[T]], *, name: str
    ) -> None:
        self._resource = resource
        self._live: concurrent.futures.Future[_Live[T]] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        for future in (self._live, self._ended):
            future.set_running_or_notify_cancel()  # a cancelled waiter cannot cancel it for others
        # In the context of the caller: requests to the store are counted under its duty.
        run = partial(copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    async def open(self) -> None:
        self._thread.start()
        await asyncio.wrap_future(self._live)

    async def run(self, call: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """Run `call` on the thread's loop. If the caller is cancelled, `call` is cancelled, too."""
        live = self._live.result(timeout=0)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(call(live.resource), live.loop)
        )

    async def close(self) -> None:
        """Cancel the calls on the thread's loop and wait for the thread.

        Idempotent. If the caller is cancelled here, the thread still ends, and other callers still
        wait for it.
        """
        if self._thread.is_alive():
            with contextlib.suppress(Exception):  # `open` has raised the error of a failed start
                live = await asyncio.wrap_future(self._live)
                live.loop.call_soon_threadsafe(live.closing.set)
            await asyncio.wrap_future(self._ended)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            self._ended.set_result(None)

    async def _main(self) -> None:
        try:
            async with self._resource() as resource:
                closing = asyncio.Event()
                self._live.set_result(_Live(asyncio.get_running_loop(), resource, closing))
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - the thread's root; `open` raises it
            if not self._live.done():
                self._live.set_exception(error)


def lower_priority() -> None:
    """Give the current thread the lowest priority.

    Threads that encode Parquet at normal priority cost producers 27 to 43 % of their throughput
    (DESIGN 12.2).
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
