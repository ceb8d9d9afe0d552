"""TLS handshakes of one event loop: their turns, and the memory that they take.

A handshake costs 0.3 ms of CPU with a P-256 key, and 6 ms with an RSA key of 4096 bits. Clients
without a login can begin thousands of handshakes at once. So the handshakes of all listeners of a
loop take turns (service.http.loop_turns), by the addresses of clients. The last steps of
handshakes, which cost 0.1 ms, go before ClientHellos.

OpenSSL takes memory for a ClientHello as soon as it has the first bytes, as much as they say: up to
128 KiB. So OpenSSL gets a ClientHello when all of it has come.
"""

import asyncio
import struct
from typing import Protocol

from tidelog.service.http.loop_turns import Turns

HELLO_BYTES_MAX = 16 * 1024
"""Maximum bytes of a ClientHello. Those of clients have 0.2 to 4 KiB."""
SILENT_BYTES = 12 * 1024
"""Memory of a connection that has sent nothing."""
UNDER_WAY_BYTES = 60 * 1024
"""Memory of a connection between the ClientHello and the end of the handshake."""
HANDSHAKES_BYTES_MAX = 160 * 1024 * 1024
"""Maximum memory of all connections whose handshake is not done. At the bound, the oldest of them
is closed."""
PIECE_RECORDS, PIECE_BYTES = 32, 32 * 1024
"""OpenSSL gets pieces of this size, because a connection keeps the memory of its largest piece."""

HEADER = struct.Struct(">BHH")
"""Of a TLS record: kind, version, bytes of the content."""
CHANGE_CIPHER_SPEC, HANDSHAKE = 20, 22
RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random of a ServerHello that asks for a second ClientHello (RFC 8446, 4.1.3)."""


class Handshaking(Protocol):
    """A connection whose handshake is not done."""

    address: str

    def step(self) -> None:
        """Do the next step of the handshake."""
        ...

    def displace(self) -> None:
        """Close the connection at once."""
        ...


class Handshakes:
    """The handshakes of one event loop that are not done."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self._sizes: dict[Handshaking, int] = {}
        """The memory of each connection, the oldest first."""
        self.bytes = self._peak_bytes = 0

    def charge(self, connection: Handshaking, size: int) -> None:
        """Note the memory of a connection. Close the oldest connections above the bound."""
        self.bytes += size - self._sizes.get(connection, 0)
        self._sizes[connection] = size
        while self.bytes > HANDSHAKES_BYTES_MAX:
            oldest = next(iter(self._sizes))
            self.leave(oldest)
            oldest.displace()
        self._peak_bytes = max(self._peak_bytes, self.bytes)

    def wait(
        self, connection: Handshaking, loop: asyncio.AbstractEventLoop, *, is_hello: bool
    ) -> None:
        """Call `connection.step`, for a ClientHello or for the last step, when it is its turn."""
        self.turns.wait(
            connection.address, connection, connection.step, loop, is_first=not is_hello
        )

    def leave(self, connection: Handshaking) -> None:
        """Forget a connection that is open or closed. A second call does nothing."""
        self.bytes -= self._sizes.pop(connection, 0)
        self.turns.leave(connection.address, connection)

    def peak_bytes(self) -> int:
        """Return the most memory that the handshakes had since the last call."""
        peak, self._peak_bytes = self._peak_bytes, self.bytes
        return peak


class ClientHello:
    """The search for the end of a ClientHello in the bytes of a connection."""

    def __init__(self) -> None:
        self.end = 0
        """Where the ClientHello ends; 0 as long as some of it is missing. If other bytes come in
        its place, the end of what OpenSSL needs to name the error."""
        self._record = 0  # where the next record begins
        self._begin = b""  # of the message: its kind and size, 4 bytes
        self._size = 0  # of the message's part that has come

    def look(self, data: bytearray) -> None:
        """Look on, in all bytes that have come."""
        while not self.end and len(data) >= self._record + HEADER.size:
            kind, _, size = HEADER.unpack_from(data, self._record)
            begin = self._record + HEADER.size
            if kind not in (HANDSHAKE, CHANGE_CIPHER_SPEC):
                self.end = min(len(data), HELLO_BYTES_MAX)
                return
            if len(data) < begin + size:
                return
            self._record = begin + size
            if kind == HANDSHAKE:
                self._begin += data[begin : begin + min(size, 4 - len(self._begin))]
                self._size += size
                if self._size >= 4 + int.from_bytes(self._begin[1:]) and len(self._begin) == 4:
                    self.end = self._record


class Records:
    """The TLS records of a connection's bytes."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the record that has begun
        self._header = b""  # the part of a header that has come

    def split(self, data: bytes | bytearray) -> list[tuple[bytes | memoryview, int]]:
        """Split bytes into pieces in which at most PIECE_RECORDS records end.

        A piece ends with the record that reaches PIECE_BYTES. Return each piece with the number of
        records that end in it.
        """
        end, records, begin = self._left, 0, 0
        if self._header:
            data, self._header = self._header + data, b""
        size = len(data)
        if not end and size >= HEADER.size and HEADER.size + HEADER.unpack_from(data)[2] == size:
            return [(bytes(data), 1)]
        view = memoryview(data)
        pieces: list[tuple[bytes | memoryview, int]] = []
        while end <= size:
            records += end > 0
            if records == PIECE_RECORDS or end - begin >= PIECE_BYTES:
                pieces.append((view[begin:end], records))
                begin, records = end, 0
            if end + HEADER.size > size:
                self._header = bytes(view[end:])
                size = end
                break
            end += HEADER.size + HEADER.unpack_from(view, end)[2]
        self._left = end - size
        if begin < size:
            pieces.append((view[begin:size], records))
        return pieces
