"""Small entries that peers announced: headers (AnnouncedEntries), chunks (AnnouncedChunks).

If an announcement ends a long poll, the broker answers the poll from these chunks, without a GET.

Pure, with bounded memory (I10). `get` verifies the bytes by the chunk's checksum in the WAL. If the
bytes do not match, the caller reads the store.
"""

import logging

from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import DecodedEntry
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, NewerLevel

log = logging.getLogger("tidelog.wal")

ANNOUNCED_CHUNK_BYTES_MAX = 8 * 1024 * 1024
ANNOUNCED_ENTRIES_MAX = 64
ANNOUNCED_ENTRY_BYTES_MAX = 64 * 1024
"""Largest header that is kept. In place of a larger header, an empty one is kept."""


class AnnouncedChunks:
    """The newest announced chunks. Owned by one event loop."""

    def __init__(self, bytes_max: int = ANNOUNCED_CHUNK_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._bodies: dict[str, tuple[int, bytes]] = {}

    def add(self, object_key: str, start: int, body: bytes) -> None:
        """Store `body`, the bytes of the object from position `start` on.

        If all bytes together exceed `bytes_max`, drop the oldest bodies.
        """
        if not body or object_key in self._bodies:
            return
        self._bodies[object_key] = (start, body)
        self.bytes += len(body)
        while self.bytes > self.bytes_max:
            _, dropped = self._bodies.pop(next(iter(self._bodies)))
            self.bytes -= len(dropped)

    def get(self, object_key: str, position: int, size: int, crc: int) -> bytes | None:
        """Return a range of the object.

        If the range is not here, or does not match `crc`, return None.
        """
        start, body = self._bodies.get(object_key, (0, b""))
        part = body[position - start : position - start + size] if position >= start else b""
        return part if len(part) == size and crc32c(part) == crc else None


class AnnouncedEntries:
    """Announced headers by entry number. Owned by one WAL view."""

    def __init__(self) -> None:
        self._headers: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._headers)

    def add(self, seq: int, header: bytes) -> None:
        """Store an announcement. An empty header says only that entry `seq` is in the chain."""
        if len(self._headers) < ANNOUNCED_ENTRIES_MAX:
            self._headers[seq] = header if len(header) <= ANNOUNCED_ENTRY_BYTES_MAX else b""

    def pop_next(self, seq: int, entry_hash: bytes) -> DecodedEntry | None:
        """Remove and return entry `seq` + 1, if it names `entry_hash` as the hash of `seq`."""
        for past in [past for past in self._headers if past <= seq]:
            del self._headers[past]
        header = self._headers.get(seq + 1)
        if not header:
            return None
        try:
            key = object_keys.wal(seq + 1)
            decoded = entries.decode(header, key, seq=seq + 1, previous=entry_hash)
        except (Corrupt, NewerLevel) as error:
            log.warning("a peer announced an entry that cannot be read: %s", error)
            self._headers[seq + 1] = b""
            return None
        del self._headers[seq + 1]
        return decoded

    def numbers(self) -> list[int]:
        return list(self._headers)

    def drop(self, numbers: list[int]) -> None:
        """Drop announcements of entries that a later read of the store did not find."""
        for seq in numbers:
            self._headers.pop(seq, None)
