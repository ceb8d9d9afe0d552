"""The interface of object stores.

It has five verbs and one guarantee: `create` is an atomic create-if-absent. All guarantees of
tidelog depend on `create`. Objects are immutable; `put` is for liveness objects only.

`create` has three outcomes (DESIGN 4). If the outcome is not DONE, a caller that needs to know what
is stored reads the key back and compares the bytes with its own. EXISTS may be the caller's own
success, because a transport may repeat a request and not tell the caller. A definite refusal (no
space, no permission) raises `StoreRefused`: nothing was stored and nothing will be (I6).
"""

import asyncio
import enum
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol

from tidelog.storage.core.model import Part

UPLOAD_RETRY_S = 0.05


class Created(enum.Enum):
    """The outcome of a create-if-absent."""

    DONE = "done"  # this call created the object, and it is durable
    EXISTS = "exists"  # an object has that key; it may hold the bytes of this call
    UNKNOWN = "unknown"  # no answer or an ambiguous one: stored, not stored, or stored later


class ObjectInfo(NamedTuple):
    """One line of a listing; `modified_ms` is by the store's clock, not by the broker's."""

    key: str
    size: int
    modified_ms: int


class ObjectStore(Protocol):
    """One prefix of an object store. Keys are ASCII, separated by `/`, relative to the prefix.

    Safe for concurrent tasks of one event loop. A read of a missing key raises `ObjectNotFound`. A
    read raises `Unavailable` after a bounded number of retries.
    """

    @property
    def url(self) -> str:
        """Return the `--store` URL of this store, without secrets."""

    @property
    def seen_ms(self) -> int:
        """Return the time of the store's clock in its last answer, 0 if no answer had a time.

        This time also passes while this machine is paused; the machine's own clocks may stop then.
        In S3, it is the `Date` of the last answer, in whole seconds. In a folder, it is the mtime
        of the last file that this process wrote.
        """

    async def get(self, key: str) -> bytes:
        """Return the whole object."""

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes [start, start + length); fewer at the object's end, none after it."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        """Store the object unless the key exists; DONE means durable. Never retries."""

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        """Store or overwrite the object."""

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects with keys under `prefix` and after `start_after`, in byte order of keys."""

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing object is no error."""

    async def close(self) -> None:
        """Release connections and threads. Idempotent."""


async def upload(store: ObjectStore, key: str, parts: Sequence[Part]) -> None:
    """Create an object whose name only this call uses.

    Repeat the create while its outcome is unknown. EXISTS at a repetition means that an earlier
    attempt arrived.
    """
    pause_s = UPLOAD_RETRY_S
    while await store.create(key, parts) is Created.UNKNOWN:
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 2.0)
