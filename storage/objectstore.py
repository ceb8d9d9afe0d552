"""The narrow seam to object storage, and its in-memory implementation.

Five verbs and one promise: `create` is atomic create-if-absent. Everything that tidelog guarantees
rests on it. Objects are immutable (house rule 2); `put` exists for liveness files alone.

`create` has three outcomes (DESIGN 4). A caller that gets anything but DONE reads the key back and
compares what it finds with what it wrote: EXISTS may be one's own success, reported by a
transport that silently repeated the request. A definite refusal (no space, no permission) raises
`StoreRefused`, and promises that nothing was stored and nothing will be.
"""

import enum
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from storage.errors import NotFound

Part: TypeAlias = bytes | bytearray | memoryview
"""Bytes of an object; bodies are passed as several parts so that nobody has to join megabytes."""


class Created(enum.Enum):
    """What became of a create-if-absent."""

    DONE = "done"  # the store said yes: the object is durable and was made by this call
    EXISTS = "exists"  # something has that key; possibly this very call's own bytes
    UNKNOWN = "unknown"  # no answer or an ambiguous one: stored, not stored, or stored later


class ObjectInfo(NamedTuple):
    """One line of a listing; `modified_ms` is the store's clock, not ours."""

    key: str
    size: int
    modified_ms: int


class ObjectStore(Protocol):
    """One prefix of an object store. Keys are relative to it, `/`-separated ASCII.

    Safe for concurrent tasks of one event loop. Reads raise `NotFound`, or `Unavailable` after
    their own bounded retries.
    """

    @property
    def url(self) -> str:
        """The `--store` URL that leads here, without secrets."""
        ...

    async def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length); shorter at the object's end, empty beyond it."""
        ...

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        """Store the object unless the key exists; durable before DONE. Never retried inside."""
        ...

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        """Store or overwrite."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in byte order of keys, after `start_after`."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that does not exist is no error."""
        ...

    async def close(self) -> None:
        """Release connections and threads. Idempotent."""
        ...


class MemoryStore:
    """Objects in a dict: the reference implementation, for tests and simulations."""

    def __init__(self, *, now_ms: int = 0) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self.now_ms = now_ms

    @property
    def url(self) -> str:
        return "memory://"

    async def get(self, key: str) -> bytes:
        return self._object(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._object(key)[start : start + length]

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if key in self._objects:
            return Created.EXISTS
        self._objects[key] = (b"".join(parts), self.now_ms)
        return Created.DONE

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        self._objects[key] = (b"".join(parts), self.now_ms)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for key in sorted(self._objects):
            if key.startswith(prefix) and key > start_after and key in self._objects:
                body, modified_ms = self._objects[key]
                yield ObjectInfo(key, len(body), modified_ms)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    async def close(self) -> None:
        """Nothing to release."""

    def _object(self, key: str) -> bytes:
        try:
            return self._objects[key][0]
        except KeyError:
            raise NotFound(key) from None
