"""A connection of Kafka's protocol in memory: a transport, and requests and answers as bytes."""

import struct
from typing import Any

from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.header import FIRST_FLEXIBLE
from tidelog.service.kafka.messages.schema import Message


class MemoryTransport:
    """Keeps what a connection writes. `unsent` says how much of it the client has not taken."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.unsent = 0
        self.is_paused = False
        self.is_aborted = False
        self.is_closed = False

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        self.written += b"".join(pieces)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def frames(self) -> list[bytes]:
        """Take the whole answers that were written, each without its size.

        A long answer is written in slices.
        """
        frames = []
        while len(self.written) >= 4:
            (size,) = struct.unpack_from(">i", self.written)
            if len(self.written) < 4 + size:
                break
            frames.append(bytes(self.written[4 : 4 + size]))
            del self.written[: 4 + size]
        return frames


def framed(request: Message, version: int, number: int = 1, client_id: str | None = "c") -> bytes:
    """Return a request with its header and its size."""
    key = request.api_key
    assert key is not None
    name = b"" if client_id is None else client_id.encode()
    length = -1 if client_id is None else len(name)
    head = struct.pack(">hhih", key, version, number, length) + name
    if version >= FIRST_FLEXIBLE.get(key, 1 << 15):
        head += b"\0"
    body = head + b"".join(encoder(type(request), version)(request))
    return struct.pack(">i", len(body)) + body


def answer(frame: bytes, kind: type[Message], version: int) -> tuple[int, Any]:
    """Return the number of the request that an answer is for, and the answer."""
    (number,) = struct.unpack_from(">i", frame)
    position = 4
    key = kind.api_key
    assert key is not None
    if key != 18 and version >= FIRST_FLEXIBLE.get(key, 1 << 15):
        assert frame[position] == 0
        position += 1
    return number, decoder(kind, version)(frame, position)
