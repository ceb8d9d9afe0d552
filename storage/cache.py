"""A byte-bounded, single-flight cache of what was read from the store (I10).

Whoever asks for a key that is being loaded waits for that load; a load that fails is told to all
who waited and not remembered. The least recently used go first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Owned by one event loop. `size_of` gives a value's bytes."""

    def __init__(self, bytes_max: int, size_of: Callable[[Value], int]) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._size_of = size_of
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[Value]] = {}

    def peek(self, key: Key) -> bool:
        """Whether the key is here or on its way."""
        return key in self._values or key in self._loading

    async def get(self, key: Key, load: Callable[[], Awaitable[Value]]) -> Value:
        """The value of the key, from here or by `load`; raises what `load` raises."""
        if key in self._values:
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        task = self._loading.get(key)
        if task is None:
            self.misses += 1
            # A task of its own: a reader that goes away must not fail those who wait with it.
            task = asyncio.create_task(self._load(key, load))
            task.add_done_callback(_see)
            self._loading[key] = task
        return await asyncio.shield(task)

    async def _load(self, key: Key, load: Callable[[], Awaitable[Value]]) -> Value:
        try:
            value = await load()
        finally:
            del self._loading[key]
        self._put(key, value)
        return value

    def _put(self, key: Key, value: Value) -> None:
        size = self._size_of(value)
        if size > self.bytes_max:
            return
        self._values[key] = value
        self.bytes += size
        while self.bytes > self.bytes_max:
            _, old = self._values.popitem(last=False)
            self.bytes -= self._size_of(old)


def _see(task: "asyncio.Task[Value]") -> None:
    """When all who waited have gone away, nobody else looks at a failure, and asyncio minds."""
    if not task.cancelled():
        task.exception()
