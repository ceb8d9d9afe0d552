"""Something that lives on an event loop of its own thread, so that its work does not hold ours."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _Live(NamedTuple, Generic[T]):
    loop: asyncio.AbstractEventLoop
    resource: T
    closing: asyncio.Event


class LoopThread(Generic[T]):
    """Enters `resource` on its own loop at `open`, leaves it at `close`. Calls cross over by `run`.

    A daemon: a process that forgets `close` still ends.
    """

    def __init__(
        self, resource: Callable[[], contextlib.AbstractAsyncContextManager[T]], *, name: str
    ) -> None:
        self._resource = resource
        self._live: concurrent.futures.Future[_Live[T]] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def open(self) -> None:
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._live))

    async def run(self, call: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """`call` on that loop. A cancellation here cancels it there."""
        live = self._live.result(timeout=0)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(call(live.resource), live.loop)
        )

    async def close(self) -> None:
        """Idempotent. What still runs there is cancelled. Whoever is cancelled in here leaves the
        thread to its end, and no other one waiting for it."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):  # that it never opened was told to its opener
                live = await asyncio.wrap_future(self._live)
                live.loop.call_soon_threadsafe(live.closing.set)
            await asyncio.wrap_future(self._ended)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits
                self._ended.set_result(None)

    async def _main(self) -> None:
        try:
            async with self._resource() as resource:
                closing = asyncio.Event()
                self._live.set_result(_Live(asyncio.get_running_loop(), resource, closing))
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - the thread's root; whoever opens it is told
            if not self._live.done():
                self._live.set_exception(error)
