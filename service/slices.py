"""Long work on the event loop, in slices of time, between which the loop runs other callbacks."""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

SLICE_S = 0.005
"""A slice ends with the first item that is done after this time. An item takes at most a few ms."""
KEYS_AT_ONCE = 2_000
"""Keys that are sorted without a pause. For 2,000 tuples of strings, this takes ~3 ms."""

Key: TypeAlias = str | int | tuple[Any, ...]
K = TypeVar("K", bound=Key)
T = TypeVar("T")


class _Turns:
    """The handlers that wait for their next slice.

    The event loop runs one slice between two of its turns, so many handlers together do not hold it
    for longer than one.
    """

    _of_loops: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns]"] = (
        WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @classmethod
    async def wait(cls) -> None:
        """Wait for the turn of this handler."""
        loop = asyncio.get_running_loop()
        turns = cls._of_loops.get(loop)
        if turns is None:
            turns = cls._of_loops[loop] = cls()
        if not turns._waiting:
            loop.call_soon(turns._next)
        turn = loop.create_future()
        turns._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else the handler was cancelled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class Slices:
    """The slices of one handler's work. The handler calls `pause` after each piece of the work."""

    __slots__ = ("_end_s",)

    def __init__(self) -> None:
        self._end_s = time.perf_counter() + SLICE_S

    async def pause(self) -> None:
        """If the slice has taken SLICE_S, let the event loop run other callbacks."""
        if time.perf_counter() >= self._end_s:
            await _Turns.wait()
            self._end_s = time.perf_counter() + SLICE_S


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate in slices over items that other callbacks do not change."""
    slices = Slices()
    for item in items:
        yield item
        await slices.pause()


async def in_order(keys: Iterable[K], start_key: K | None = None) -> Iterator[K]:
    """Return the keys after `start_key`, or all keys if it is None, sorted."""
    all_keys: list[Any] = list(keys)
    runs = []
    for first in range(0, len(all_keys), KEYS_AT_ONCE):
        if first:
            await asyncio.sleep(0)
        batch = all_keys[first : first + KEYS_AT_ONCE]
        runs.append(
            sorted(batch if start_key is None else [key for key in batch if key > start_key])
        )
    return heapq.merge(*runs)
