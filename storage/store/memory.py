"""An object store in memory: the store `memory://`, also used by tests and the simulator."""

from collections.abc import AsyncIterator, Iterable, Sequence

from tidelog.storage.core.errors import ObjectNotFound
from tidelog.storage.core.model import Part
from tidelog.storage.store.object_store import Created, ObjectInfo


class MemoryStore:
    """The reference implementation of a store: objects in a dict, lost with the process."""

    def __init__(self, *, now_ms: int = 0) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self.now_ms = now_ms

    @property
    def url(self) -> str:
        return "memory://"

    @property
    def seen_ms(self) -> int:
        return self.now_ms

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
        """Do nothing: there is nothing to release."""

    def _object(self, key: str) -> bytes:
        try:
            return self._objects[key][0]
        except KeyError:
            raise ObjectNotFound(key) from None
