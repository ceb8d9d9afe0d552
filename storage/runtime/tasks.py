"""Tasks of asyncio: their exceptions, tasks that run together, the steps of a coroutine.

Exceptions end a task or one round of it, or no caller awaits the task.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import copy_context
from typing import Any, TypeVar

from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.request_context import DUTY

T = TypeVar("T")


TASK_ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task or the process. The outermost function of a task raises them again.
The task continues after any other exception, even the BaseException of a panic in Rust code."""


@contextlib.contextmanager
def surviving(log: logging.Logger, duty: str) -> Iterator[None]:
    """Log an exception in one round of a task's duty, and let the task continue.

    If the exception is a bug, log its traceback too.
    """
    try:
        yield
    except TASK_ENDS:
        raise
    except (LogError, OSError) as error:
        log.warning("%s failed and will be retried: %s", duty, error)
    except BaseException as error:
        log.critical("bug: %s failed and will be retried", duty, exc_info=error)


def begin_duty(duty: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Begin a task of the broker. Its requests to the store are counted under `duty`."""
    context = copy_context()
    context.run(DUTY.set, duty)
    return asyncio.create_task(work, name=f"tidelog-{duty}", context=context)


def retrieve_exception(future: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a task or future that perhaps no task awaits.

    Used as a done callback, because asyncio logs exceptions that are never retrieved.
    """
    if not future.cancelled():
        future.exception()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, for `seconds` at most."""
    if seconds == math.inf:
        await event.wait()
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class Steps(Coroutine[Any, Any, T]):
    """A coroutine that runs the coroutine `work` in steps.

    A step is the code between two waits. `step(call, *arguments)` must make the call, which runs
    one step, and return its result.
    """

    __slots__ = ("_step", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], step: Callable[..., Any]) -> None:
        self._work, self._step = work, step

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)


async def together(*calls: Coroutine[Any, Any, Any], at_once: int | None = None) -> list[Any]:
    """Run coroutines concurrently; return their results in order.

    At most `at_once` of them run at the same time. The first error cancels the other coroutines.
    """
    work: Iterable[Coroutine[Any, Any, Any]] = calls
    if at_once is not None:
        turns = asyncio.Semaphore(at_once)
        work = [_in_turn(turns, call) for call in calls]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        for call in calls:  # those that were cancelled before their turn
            call.close()
    return [task.result() for task in tasks]


async def _in_turn(turns: asyncio.Semaphore, call: Coroutine[Any, Any, T]) -> T:
    async with turns:
        return await call
