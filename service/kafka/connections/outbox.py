"""The answers on their way to the sockets: written in order, within bounds of memory."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

UNSENT_BYTES_MIN = 64 * 1024
"""So many bytes of a connection are not noted in UnsentAnswers."""
PIECES_MAX = 100
"""Pieces of an answer without records that are written one by one. The transport makes an object
of 200 bytes for each piece, and most pieces are smaller."""


class Transport(Protocol):
    """The transport of a connection, with or without TLS."""

    def writelines(self, pieces: list[bytes | memoryview]) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...


class Receiver(Protocol):
    """A connection whose client takes answers."""

    def end_unread(self) -> None:
        """End the connection, because its client takes no answers."""
        ...


class UnsentAnswers:
    """The bytes of answers without records that clients have not taken, over all connections of a
    listener. Each client may ask for a large answer and read nothing for `answer_s`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: dict[Receiver, int] = {}

    def __contains__(self, owner: Receiver) -> bool:
        return owner in self._held

    def note(self, owner: Receiver, size: int) -> None:
        """Note how many bytes the client of a connection has not taken. If all clients together
        exceed the limit, end the connection whose client has taken nothing for the longest
        time."""
        before = self._held.get(owner, 0)
        self.used += size - before
        if size < before or not size:
            self._held.pop(owner, None)
        if size:
            self._held[owner] = size
        while self.used > self.limit:
            oldest = next(iter(self._held))
            self.used -= self._held.pop(oldest)
            oldest.end_unread()


class AnswerShares:
    """The memory of answers that a connection has written and the socket has not taken. Owned by
    one connection."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: deque[tuple[int, Callable[[], object]]] = deque()

    def add(self, end: int, release: Callable[[], object]) -> None:
        """Call `release` when the socket has taken `end` bytes of this connection."""
        self._held.append((end, release))

    def taken(self, end: int) -> None:
        """Release the answers that end at or before `end`."""
        while self._held and self._held[0][0] <= end:
            self._held.popleft()[1]()

    def release_all(self) -> None:
        while self._held:
            self._held.popleft()[1]()


class Outbox:
    """The answers that one connection has written."""

    def __init__(self, owner: Receiver, unsent: UnsentAnswers) -> None:
        self.written = 0
        """Bytes that were written."""
        self._owner = owner
        self._unsent = unsent
        self._shares = AnswerShares()
        self._transport: Transport | None = None

    def opened(self, transport: Transport) -> None:
        """Begin."""
        self._transport = transport

    @property
    def unsent(self) -> int:
        """Return the bytes that the client has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, framed: list[bytes | memoryview], *, is_counted: bool) -> int:
        """Write an answer; return its bytes. Note it in UnsentAnswers, unless it `is_counted` by
        another budget."""
        assert self._transport is not None
        size = sum(map(len, framed))
        self.written += size
        if not is_counted and len(framed) > PIECES_MAX:
            framed = [b"".join(framed)]
        self._transport.writelines(framed)
        if not is_counted and self.unsent > UNSENT_BYTES_MIN:
            self._unsent.note(self._owner, self.unsent)
        return size

    def release_when_taken(self, release: Callable[[], object]) -> None:
        """Call `release` when the socket has taken all that is written."""
        self._shares.add(self.written, release)

    def settle(self) -> None:
        """Release the answers that the socket has taken."""
        self._shares.taken(self.written - self.unsent)
        if self._owner in self._unsent:
            self._unsent.note(self._owner, self.unsent)

    def close(self) -> None:
        """Release all answers."""
        self._shares.release_all()
        self._unsent.note(self._owner, 0)
