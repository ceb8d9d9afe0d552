"""An object store that counts what it is asked: the bill, and how long the store takes.

Around any store, for one broker. Counted is what this process asks for through the seam; what the
SDK repeats by itself, and what Delta's own client sends for a commit to a table, is not seen here.
A microsecond a call, beside milliseconds.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

from storage.clock import Clock
from storage.errors import LogError, NotFound
from storage.histogram import Histogram
from storage.objectstore import Created, ObjectInfo, ObjectStore, Part

VERBS: Final = ("create", "put", "get", "list", "delete")


class StoreCounters:
    """Since the process started, by verb. `create` is the conditional PUT."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(VERBS, 0)
        self.failures = dict.fromkeys(VERBS, 0)
        self.seconds = {verb: Histogram() for verb in VERBS}
        self.bytes_written = 0
        self.bytes_read = 0


class MeteredStore:
    """The store inside, counted. Safe for concurrent tasks of one event loop."""

    def __init__(self, inner: ObjectStore, clock: Clock) -> None:
        self.inner = inner
        self.counters = StoreCounters()
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        """What only some stores have: a table's URI and options, tables in memory."""
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    async def get(self, key: str) -> bytes:
        with _Timed(self.counters, "get", self._clock.boot_s):
            body = await self.inner.get(key)
        self.counters.bytes_read += len(body)
        return body

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        with _Timed(self.counters, "get", self._clock.boot_s):
            body = await self.inner.get_range(key, start, length)
        self.counters.bytes_read += len(body)
        return body

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        self.counters.bytes_written += sum(memoryview(part).nbytes for part in parts)
        with _Timed(self.counters, "create", self._clock.boot_s):
            return await self.inner.create(key, parts)

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        self.counters.bytes_written += sum(memoryview(part).nbytes for part in parts)
        with _Timed(self.counters, "put", self._clock.boot_s):
            await self.inner.put(key, parts)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """One request for each page of S3's size."""
        seen = 0
        with _Timed(self.counters, "list", self._clock.boot_s):
            async for info in self.inner.list(prefix, start_after=start_after):
                seen += 1
                yield info
        self.counters.requests["list"] += max(seen - 1, 0) // 1000

    async def delete(self, keys: Iterable[str]) -> None:
        with _Timed(self.counters, "delete", self._clock.boot_s):
            await self.inner.delete(keys)

    async def close(self) -> None:
        await self.inner.close()


class _Timed:
    """One call. An object that is not there is an answer, not a failure."""

    __slots__ = ("_counters", "_now_s", "_started_s", "_verb")

    def __init__(self, counters: StoreCounters, verb: str, now_s: Callable[[], float]) -> None:
        self._counters = counters
        self._verb = verb
        self._now_s = now_s

    def __enter__(self) -> None:
        self._counters.requests[self._verb] += 1
        self._started_s = self._now_s()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._counters.seconds[self._verb].add(self._now_s() - self._started_s)
        if kind is not None and issubclass(kind, LogError) and not issubclass(kind, NotFound):
            self._counters.failures[self._verb] += 1
