"""Processes on one event loop in virtual time: each can be killed or stopped at any await.

A process is a context: tasks, timers and callbacks belong to whichever process made them, and the
loop runs none of a dead one and keeps those of a stopped one until it goes on. So a kill leaves
nothing behind, no `finally` and no answer, as SIGKILL does; and a stop is SIGSTOP. Work that others
do for a process (a store that has its request, a peer that was asked) is of the world, and goes on.

Threads are simulated too: what is given to an executor runs on the loop, a while later. Nothing
here reads a clock or draws by itself; futures and tasks hash by their number, so that sets of them
have an order that a seed repeats.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import selectors
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

TURNS_MAX = 1_000_000
"""Of the loop, in one run: fifty times what a long one takes."""


class Stuck(RuntimeError):
    """Nothing would ever happen again, or it would never end."""


class Process:
    """One life of one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.steps = 0
        """How often it was run: from one await to the next, or a callback."""
        self.dies_at = -1
        self.on_death: Callable[[], None] = self.kill
        """Called instead of step `dies_at`."""
        self.context = copy_context()
        self.context.run(_process.set, self)
        self._held: list[asyncio.Handle] = []

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep it until the process continues; of a killed process, always.

        Python would end a task that is freed by an exception.
        """
        self._held.append(handle)

    def kill(self) -> None:
        self.is_dead = True

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        handles, self._held = self._held, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        if self.is_dead:
            self._held = handles
        else:
            loop.truncate(handles)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task of this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context)


_process: ContextVar[Process] = ContextVar("process")


def current() -> str:
    """The name of the process that runs now; empty for the world."""
    process = _process.get(None)
    return "" if process is None else process.name


def current_process() -> Process | None:
    """The process that runs now; None for the world."""
    return _process.get(None)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """The code in this block runs in no process: `current` is empty."""
    token = _process.set(Process(""))
    try:
        yield
    finally:
        _process.reset(token)


def _keeps(handle: asyncio.Handle) -> bool:
    """Whether the handle's process does not run now; then it has it."""
    context: Context = getattr(handle, "_context")  # noqa: B009 - not in typeshed
    process = context.get(_process)
    if process is None:
        return False
    if not (process.is_dead or process.is_stopped):
        process.steps += 1
        if process.steps != process.dies_at:
            return False
        process.on_death()
    process.hold(handle)
    return True


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if not _keeps(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if not _keeps(self):
            super()._run()


class _Numbers:
    """Of futures and tasks; from 0 in each run, because the order of a set depends on them."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def begin(self) -> None:
        self._next = itertools.count()

    def __next__(self) -> int:
        return next(self._next)


_numbers = _Numbers()


class _Future(asyncio.Future):
    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.number = next(_numbers)

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task):
    def __init__(self, *args: Any, **named: Any) -> None:
        # Before it begins: asyncio puts it into a set at once.
        self.number = next(_numbers)
        context = named.get("context") or copy_context()
        self.process = context.get(_process)
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self.number


class _Selector(selectors.BaseSelector):
    """Nothing ever comes from outside: it only moves the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._map: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no task waits for an event that can occur")
        self.now_s += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._map[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map

    def close(self) -> None:
        self._map.clear()


_MOMENT_S = 1e-6
"""From the end of one work of a thread to that of the next."""


class Loop(asyncio.SelectorEventLoop):
    """Use `run`. `thread_s` says how long a thread takes for its work."""

    def __init__(self, thread_s: Callable[[], float], end_s: float) -> None:
        self._selector_of_time = _Selector()
        super().__init__(self._selector_of_time)
        self._thread_s = thread_s
        self._end_s = end_s
        self._turns = 0
        self._busy_s: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        self.complaints: list[str] = []
        self.set_task_factory(_task)
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._selector_of_time.now_s

    def _run_once(self) -> None:
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise Stuck(f"it goes round and round: {TURNS_MAX} turns of the loop")
        super()._run_once()  # type: ignore[misc]

    def truncate(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs before time passes, but for the caller."""
        return not self._ready  # type: ignore[attr-defined]

    @property
    def next_s(self) -> float:
        """When the next timer is due; infinity if there is none."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return min((timer.when() for timer in timers if not timer.cancelled()), default=math.inf)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if when > self._end_s and self.time() > self._end_s:
            raise Stuck(f"it goes on after {self._end_s} s")
        # asyncio runs a timer of less than its resolution at once. Here no time would pass, and a
        # caller that waits for the rest of a pause would never end.
        when = max(when, self.time() + 2 * self._clock_resolution)  # type: ignore[attr-defined]
        timer = super().call_at(when, callback, *args, context=context)
        timer.__class__ = _TimerHandle
        return timer

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: Any
    ) -> asyncio.Handle:
        handle = super()._call_soon(callback, args, context)  # type: ignore[misc]
        handle.__class__ = _Handle
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        at_s = self.time() + self._thread_s()
        if getattr(executor, "_max_workers", 0) == 1:  # whose work is done in order
            at_s = max(at_s, self._busy_s.get(executor, 0.0) + _MOMENT_S)
            self._busy_s[executor] = at_s
        self.call_at(at_s, _work, future, func, args)
        return future

    def _complain(self, _: object, context: dict[str, Any]) -> None:
        culprit = context.get("task") or context.get("future")
        process = getattr(culprit, "process", None)
        is_dead = process is not None and (process.is_dead or process.is_stopped)
        if not is_dead and "was destroyed but it is pending" not in context["message"]:
            self.complaints.append(f"{context['message']}: {context.get('exception')!r} {culprit}")


def _task(loop: Any, work: Any, **named: Any) -> "asyncio.Task[Any]":
    return _Task(work, loop=loop, **named)


def _work(future: asyncio.Future[T], func: Callable[..., T], args: Any) -> None:
    try:
        result = func(*args)
    except BaseException as error:  # noqa: BLE001 - as an executor does
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Around a run and all that it leaves.

    Garbage is collected when it is over and not before: it would end forgotten tasks at any moment;
    and messages of tasks of killed processes are dropped then.
    """
    gc.disable()
    gc.freeze()  # what is there already is not looked at: it would take longer than the run
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            # Cleanup code of a killed process must not create an event loop.
            asyncio.set_event_loop(None)
            level = logging.root.manager.disable
            logging.disable(logging.CRITICAL)
            while gc.collect():  # the cleanup of tasks makes garbage again
                pass
            logging.disable(level)
    finally:
        sys.unraisablehook = hook
        gc.unfreeze()
        gc.enable()


def run(
    main: Callable[[], Coroutine[Any, Any, T]], *, thread_s: Callable[[], float], end_s: float
) -> T:
    """Run `main()` in the world's own context; use it `quietly`.

    Raises as `main()` does, Stuck, or the errors of failed tasks that no task awaited.
    """
    _numbers.begin()
    loop = Loop(thread_s, end_s)
    try:
        result = loop.run_until_complete(main())
        gc.collect()
        assert not loop.complaints, loop.complaints
    finally:
        loop.set_exception_handler(lambda *_: None)
        loop.close()
    return result
