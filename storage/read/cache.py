"""A byte-bounded, single-flight cache of data from the store (I10).

All callers that request a key during its load wait for that load. If the load fails, all of them
get the error; the cache does not keep errors. The least recently used values are evicted first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from tidelog.storage.runtime.tasks import retrieve_exception

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """An LRU cache, owned by one event loop. `size_of` returns a value's size in bytes."""

    def __init__(self, bytes_max: int, size_of: Callable[[Value], int]) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._size_of = size_of
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[Value]] = {}

    def peek(self, key: Key) -> bool:
        """Return whether the key is cached or being loaded."""
        return key in self._values or key in self._loading

    async def get(self, key: Key, load: Callable[[], Awaitable[Value]]) -> Value:
        """Return the key's value, from the cache or from `load`; raises the errors of `load`."""
        if key in self._values:
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        task = self._loading.get(key)
        if task is None:
            self.misses += 1
            # Load in a separate task, so that a cancelled reader does not fail the other readers.
            task = asyncio.create_task(self._load(key, load))
            task.add_done_callback(retrieve_exception)
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
