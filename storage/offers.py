"""Entries that peers say are in the chain: what waits until it is the next one.

Pure and bounded (I10). An offer is believed only if it names the entry before it by hash; what does
not, or was too large to be told, is a hint that there is something to read.
"""

import logging

from storage import entry as entries
from storage import keys
from storage.entry import Decoded
from storage.errors import Corrupt

log = logging.getLogger("tidelog.wal")

OFFERED_MAX = 64
OFFERED_BYTES_MAX = 64 * 1024
"""Of one header."""


class Offers:
    """By number; owned by one view."""

    def __init__(self) -> None:
        self._headers: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._headers)

    def add(self, seq: int, header: bytes) -> None:
        """An empty header says no more than that there is such an entry."""
        if len(self._headers) < OFFERED_MAX:
            self._headers[seq] = header if len(header) <= OFFERED_BYTES_MAX else b""

    def pop_next(self, seq: int, entry_hash: bytes) -> Decoded | None:
        """The entry that follows number `seq`, if it was offered and fits."""
        for past in [past for past in self._headers if past <= seq]:
            del self._headers[past]
        header = self._headers.get(seq + 1)
        if not header:
            return None
        try:
            key = keys.wal(seq + 1)
            decoded = entries.decode(header, key, seq=seq + 1, previous=entry_hash)
        except Corrupt as error:
            log.warning("a peer offered what is not in the chain: %s", error)
            self._headers[seq + 1] = b""
            return None
        del self._headers[seq + 1]
        return decoded

    def numbers(self) -> list[int]:
        return list(self._headers)

    def drop(self, numbers: list[int]) -> None:
        """What was offered when the store said that the chain ends before it: no peer's word."""
        for seq in numbers:
            self._headers.pop(seq, None)
