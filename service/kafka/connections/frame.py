"""The frames of connections: bytes from sockets are cut into requests, within bounds. Pure.

A frame is a size of four bytes and a request. The client gives the size, so the reader compares it
with the bound of the API before it uses memory. The buffer of a large frame grows with the bytes
that have arrived. `RequestMemory` bounds the bytes of the frames of all connections.
"""

import struct
from collections.abc import Callable

from tidelog.service.kafka.connections.request_memory import SMALL_BYTES_MAX

MIB = 1024 * 1024
PRODUCE = 0
PRODUCE_BYTES_MAX = 100 * MIB
"""Largest Produce request: `socket.request.max.bytes` of Kafka."""
REQUEST_BYTES_MAX = 1 * MIB
"""Largest request of another API."""
UNPROVED_BYTES_MAX = 4 * 1024
"""Largest request of a client that has to prove its principal first: a key has 50 characters."""
KEPT_BYTES_MAX = 2 * UNPROVED_BYTES_MAX
"""Maximum bytes of such a client that wait behind its requests. Clients wait for each answer before
they have logged in."""
DECODED_BYTES_MIN = 2 * 1024
"""Larger requests also take their size from `decoded`, apart from Produce requests, whose records
are not decoded."""
DECODED_FACTOR = 40
"""The most memory that a decoded request uses, for each of its bytes."""
FRAME_BYTES_MIN = 10
"""The least size of a request: its header with a client id."""

_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">ih")  # the size, and the key of the API


class FrameRefused(Exception):
    """The size of a frame is out of its bounds. The connection cannot go on."""


class FrameReader:
    """The frames of one connection.

    `push` bytes, then `pull` frames until there is none, then `settle`.
    """

    __slots__ = (
        "_at",
        "_data",
        "_filled",
        "_frame",
        "_is_cut",
        "_size",
        "is_blocked",
        "is_proved",
        "take",
    )

    def __init__(self, take: Callable[[int], bool], *, is_proved: bool) -> None:
        """`take` gets the size of a frame, and returns whether there is memory for it.

        Unless `is_proved`, frames have at most UNPROVED_BYTES_MAX, and KEPT_BYTES_MAX are kept.
        """
        self.take = take
        self.is_proved = is_proved
        self.is_blocked = False
        """Whether the next frame waits for memory."""
        self._data: bytes | memoryview = b""
        self._at = 0
        self._frame: bytearray | None = None
        self._filled = 0
        self._size = 0
        self._is_cut = False  # bytes above KEPT_BYTES_MAX were dropped

    @property
    def is_inside(self) -> bool:
        """Whether a part of a frame has arrived."""
        return self._frame is not None or len(self._data) > self._at

    @property
    def frame_bytes(self) -> int:
        """The memory that `take` has given for a frame that was not pulled."""
        return 0 if self._frame is None or self._size <= SMALL_BYTES_MAX else self._size

    def drop(self) -> None:
        """Free the bytes that have arrived, because the connection has ended.

        The garbage collector finds the connection later.
        """
        self._data, self._at, self._frame, self._filled, self._size = b"", 0, None, 0, 0

    def buffer(self, shared: memoryview) -> memoryview:
        """Return the memory for the next bytes from the socket: the rest of a frame, or `shared`.

        Then call `received`.
        """
        frame = self._frame
        if frame is None or self._filled == self._size:
            return shared
        if self._filled == len(frame):
            self._grow(frame, self._filled + 1)
        return memoryview(frame)[self._filled :]

    def received(self, shared: memoryview, count: int) -> None:
        """Count `count` new bytes in the memory that `buffer` returned."""
        if self._frame is not None and self._filled < self._size:
            self._filled += count
        else:
            self.push(shared[:count])

    def push(self, data: bytes | memoryview) -> None:
        """Take bytes from the socket. `data` must stay as it is until `settle`."""
        if self._is_cut:
            return
        frame = self._frame
        if frame is not None and self._filled < self._size:
            count = min(len(data), self._size - self._filled)
            if len(frame) < self._filled + count:
                self._grow(frame, self._filled + count)
            frame[self._filled : self._filled + count] = data[:count]
            self._filled += count
            if count == len(data):
                return
            data = memoryview(data)[count:]
        if self._at < len(self._data):
            data = b"".join((memoryview(self._data)[self._at :], data))
        self._data, self._at = data, 0

    def _grow(self, frame: bytearray, least: int) -> None:
        new_size = min(self._size, max(least, 2 * len(frame)))
        frame.extend(bytes(new_size - len(frame)))

    def pull(self) -> bytes | bytearray | None:
        """Return the next whole frame, without its size.

        Return None if there is none, or if there is no memory for it (`is_blocked`). Raises
        FrameRefused.
        """
        frame = self._frame
        if frame is not None:
            if self._filled < self._size:
                return None
            if self._size <= SMALL_BYTES_MAX and not self._may_take(self._size):
                return None
            self._frame = None
            return frame
        data, start = self._data, self._at
        remaining_bytes = len(data) - start
        if remaining_bytes < _SIZE.size:
            if self._is_cut:
                raise FrameRefused(
                    f"more than {KEPT_BYTES_MAX} bytes before the answer to a login: wait for it"
                )
            return None
        size = self._checked_size(data, start, remaining_bytes)
        if size is None:
            return None
        is_whole = remaining_bytes - _SIZE.size >= size
        if (is_whole or size > SMALL_BYTES_MAX) and not self._may_take(size):
            return None
        start += _SIZE.size
        end = start + size
        if is_whole:
            self._at = end
            return bytes(data[start:end])
        # The buffer begins with what has arrived; `buffer` and `push` let it grow.
        self._frame = frame = bytearray(data[start:])
        if size <= SMALL_BYTES_MAX:
            frame.extend(bytes(size - len(frame)))
        self._filled, self._size = remaining_bytes - _SIZE.size, size
        self._data, self._at = b"", 0
        return None

    def _checked_size(
        self, data: bytes | memoryview, start: int, remaining_bytes: int
    ) -> int | None:
        (size,) = _SIZE.unpack_from(data, start)
        if not FRAME_BYTES_MIN <= size <= PRODUCE_BYTES_MAX:
            raise FrameRefused(
                f"a request of {size} bytes: at most {PRODUCE_BYTES_MAX} are allowed"
            )
        if size <= UNPROVED_BYTES_MAX:
            return size
        if remaining_bytes < _HEAD.size:
            return None
        _, key = _HEAD.unpack_from(data, start)
        most = REQUEST_BYTES_MAX if key != PRODUCE else PRODUCE_BYTES_MAX
        if not self.is_proved:
            most = UNPROVED_BYTES_MAX
        if size > most:
            raise FrameRefused(f"a request of {size} bytes (API {key}): at most {most} are allowed")
        return size

    def _may_take(self, size: int) -> bool:
        self.is_blocked = not self.take(size)
        return not self.is_blocked

    def settle(self) -> None:
        """Copy the bytes that no frame has taken, because the socket's memory is used again.

        If there are too many, drop them; the next `pull` raises FrameRefused.
        """
        remaining_bytes = len(self._data) - self._at
        if not remaining_bytes:
            self._data = b""
        elif remaining_bytes > KEPT_BYTES_MAX and not self.is_proved:
            self._is_cut = True
            self._data = b""
        elif self._at or not isinstance(self._data, bytes):
            self._data = bytes(self._data[self._at :])
        self._at = 0
