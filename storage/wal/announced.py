"""Headers of entries that peers announced. Pure, with bounded memory (I10)."""

import logging

from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import DecodedEntry
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, NewerLevel

log = logging.getLogger("tidelog.wal")

ANNOUNCED_ENTRIES_MAX = 64
ANNOUNCED_ENTRY_BYTES_MAX = 256 * 1024
"""Largest header that is kept. In place of a larger header, an empty one is kept."""


class AnnouncedEntries:
    """Announced headers by entry number. Owned by one WAL view."""

    def __init__(self) -> None:
        self._headers: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._headers)

    def __contains__(self, seq: int) -> bool:
        return seq in self._headers

    def add(self, seq: int, header: bytes) -> None:
        """Store an announcement. An empty header says only that entry `seq` is in the chain."""
        if not header and seq in self._headers:
            return
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
