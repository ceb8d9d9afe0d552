"""An event loop in virtual time: when nothing is left to do, its clock jumps to the next timer.

So sleeps and timeouts cost nothing and come in an order that only the program decides. Threads keep
real time: while an executor works, the clock stands still and the loop really waits for it.
"""

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

STUCK_S = 120.0
"""Real seconds without an event, with no timer set: a deadlock."""


class Stuck(RuntimeError):
    """Nothing would ever happen again."""


class _Selector(selectors.BaseSelector):
    """The machine's selector, but it never waits for time to pass: it moves `now_s`."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 0.0
        self.busy_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 and len(self._real.get_map()) == 1:
            return []  # callbacks are due, and no event but of the loop's own pipe can come
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None or self.busy_threads:
            ready = self._real.select(STUCK_S)
            if not ready:
                raise Stuck(f"no event for {STUCK_S} s, {self.busy_threads} threads at work")
            return ready
        self.now_s += timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


_failures: list[str] = []
"""Reports of loops that have ended since `checked` began."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use `run` or VIRTUAL_TIME; `time()` starts at zero."""

    def __init__(self) -> None:
        self._selector_of_time = _Selector()
        self._reports: list[str] = []
        super().__init__(self._selector_of_time)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._reports.append(str(context))

    def close(self) -> None:
        super().close()
        _failures.extend(self._reports)
        self._reports.clear()

    def time(self) -> float:
        return self._selector_of_time.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._selector_of_time.busy_threads += 1
        future.add_done_callback(self._one_less)
        return future

    def _one_less(self, _: object) -> None:
        self._selector_of_time.busy_threads -= 1


VIRTUAL_TIME = ("asyncio", {"loop_factory": VirtualLoop})
"""The value of a fixture `anyio_backend`: async tests run on a loop of their own each."""


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Fail if a loop that ends in the block reported an exception or a failed callback.

    The exception is one that no task retrieved. pytest's hooks use it for each test, and for its
    teardown.
    """
    try:
        yield
    finally:
        failures, _failures[:] = _failures[:], []
    assert not failures, failures


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`main()` on a loop of its own, in virtual time; what it leaves behind is cancelled."""
    with checked(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
