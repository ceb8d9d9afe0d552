"""A wrapper of an object store that counts requests (the cost), bytes, latencies and failures.

It wraps any store, for one broker. It counts calls of the `ObjectStore` interface. It does not see
retries inside the SDK. Delta's own client goes past it: storage.tables.delta_requests counts for
it. It adds a microsecond to a call that takes milliseconds.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NamedTuple

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, ObjectNotFound
from tidelog.storage.core.histogram import Histogram
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.request_context import DUTY
from tidelog.storage.runtime.tracer_interface import NO_OBSERVER, ObservedRequest, Observer
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore

VERBS: Final = ("create", "put", "get", "list", "delete")
OWN, DELTALAKE = "tidelog", "deltalake"
"""The clients of a store in this process."""
PAGE: Final = 1000
"""Number of objects in one page of an S3 listing."""
NOT_OF_ONE_OBJECT: Final = {"list", "delete"}
"""Verbs of calls that the observer does not get."""


class CountedRequest(NamedTuple):
    """The fields by which requests are counted.

    `verb` is one of VERBS, of which `create` is the conditional PUT. `kind` is the kind of the
    object, or of the listed ones (`object_keys.kind`). `duty` is why the broker sent it.
    """

    client: str
    verb: str
    kind: str
    duty: str


class StoreCounters:
    """Counters since the process started. Threads may count."""

    def __init__(self) -> None:
        self.requests: Counter[CountedRequest] = Counter()
        self._lock = threading.Lock()
        self.failures = dict.fromkeys(VERBS, 0)
        self.seconds = {verb: Histogram() for verb in VERBS}
        self.bytes_written = 0
        self.bytes_read = 0

    def count(self, verb: str, key: str, requests: int = 1, *, client: str = OWN) -> None:
        """Count requests for an object, or of a listing, under the duty of the current task."""
        request = CountedRequest(client, verb, object_keys.kind(key), DUTY.get())
        with self._lock:
            self.requests[request] += requests

    def by_verb(self) -> dict[str, int]:
        counts = dict.fromkeys(VERBS, 0)
        for request, count in self.requests.copy().items():
            counts[request.verb] += count
        return counts


class MeteredStore:
    """The wrapper of store `inner`. Safe for concurrent tasks of one event loop."""

    def __init__(
        self,
        inner: ObjectStore,
        clock: Clock,
        observer: Observer = NO_OBSERVER,
        counters: StoreCounters | None = None,
    ) -> None:
        self.inner = inner
        self.counters = StoreCounters() if counters is None else counters
        self.boot_s = clock.boot_s
        self.observer = None if observer is NO_OBSERVER else observer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only some stores have, such as `table_uri` or `tables`."""
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def seen_ms(self) -> int:
        return self.inner.seen_ms

    async def get(self, key: str) -> bytes:
        with _Timed(self, "get", key):
            body = await self.inner.get(key)
        self.counters.bytes_read += len(body)
        return body

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        with _Timed(self, "get", key, length):
            body = await self.inner.get_range(key, start, length)
        self.counters.bytes_read += len(body)
        return body

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        size = sum(memoryview(part).nbytes for part in parts)
        self.counters.bytes_written += size
        with _Timed(self, "create", key, size) as observed:
            created = await self.inner.create(key, parts)
            if observed is not None:
                observed.outcome(created.value)
            return created

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        self.counters.bytes_written += sum(memoryview(part).nbytes for part in parts)
        with _Timed(self, "put", key):
            await self.inner.put(key, parts)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """List objects; count one request for each PAGE of them.

        The latency of a listing is the time in which its caller waits for the store, not the time
        in which the caller works.
        """
        now_s = self.boot_s
        object_count = 0
        timed = _Timed(self, "list", prefix)
        with timed:
            async for info in self.inner.list(prefix, start_after=start_after):
                if object_count and object_count % PAGE == 0:
                    self.counters.count("list", prefix)
                object_count += 1
                yielded_s = now_s()
                try:
                    yield info
                finally:
                    timed.skip(now_s() - yielded_s)

    async def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        with _Timed(self, "delete", keys[0] if keys else ""):
            await self.inner.delete(keys)

    async def close(self) -> None:
        await self.inner.close()


class _Timed:
    """A context manager that counts one call.

    ObjectNotFound counts as an answer, not as a failure. If the call is for one object, the
    observer gets the call too.
    """

    __slots__ = ("_key", "_observed", "_size", "_started_s", "_store", "_verb")

    def __init__(
        self, store: MeteredStore, verb: str, key: str = "", size: int | None = None
    ) -> None:
        self._store = store
        self._verb = verb
        self._key = key
        self._size = size
        self._observed: AbstractContextManager[ObservedRequest | None] | None = None

    def __enter__(self) -> ObservedRequest | None:
        store = self._store
        store.counters.count(self._verb, self._key)
        self._started_s = store.boot_s()
        if store.observer is None or self._verb in NOT_OF_ONE_OBJECT:
            return None
        self._observed = store.observer.request(self._verb, self._key, self._size)
        return self._observed.__enter__()

    def skip(self, seconds: float) -> None:
        """Leave out time in which the call did not wait for the store."""
        self._started_s += seconds

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._observed is not None:
            self._observed.__exit__(kind, error, trace)
        counters = self._store.counters
        counters.seconds[self._verb].add(self._store.boot_s() - self._started_s)
        if kind is not None and issubclass(kind, LogError) and not issubclass(kind, ObjectNotFound):
            counters.failures[self._verb] += 1
