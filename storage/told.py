"""Chunks of small entries as peers told them, for a while: a long poll that a wake-up ended is
answered from here instead of by a GET.

Pure, byte-bounded (I10). Nothing of it is believed: whoever takes bytes from here compares them
with the checksum that the chain gives, and asks the store otherwise.
"""

from storage.chunk import crc32c

BYTES_MAX = 8 * 1024 * 1024


class ToldBodies:
    """The newest bodies. Owned by one event loop."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._bodies: dict[str, tuple[int, bytes]] = {}

    def add(self, object_key: str, start: int, body: bytes) -> None:
        """What lies from `start` on in an object."""
        if not body or object_key in self._bodies:
            return
        self._bodies[object_key] = (start, body)
        self.bytes += len(body)
        while self.bytes > self.bytes_max:
            _, dropped = self._bodies.pop(next(iter(self._bodies)))
            self.bytes -= len(dropped)

    def get(self, object_key: str, position: int, size: int, crc: int) -> bytes | None:
        """These bytes of the object, if they are here and right."""
        start, body = self._bodies.get(object_key, (0, b""))
        part = body[position - start : position - start + size] if position >= start else b""
        return part if len(part) == size and crc32c(part) == crc else None
