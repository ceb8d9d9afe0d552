"""The answers on their way to the sockets: written in order, within bounds of memory.

An answer without records goes to its transport in slices, when the socket has taken those before.
A transport copies what it gets, and the pieces of an answer are often bytes that the broker keeps
anyway: metadata of groups. Records are written at once, which costs less CPU: they have a budget.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

SLICE_BYTES = 256 * 1024
UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes of answers that a transport keeps. Above this bound, it gets no slice, and no request of
its connection begins."""
UNSENT_BYTES_MIN = 64 * 1024
"""So many bytes of a connection are not noted in UnsentAnswers."""
PIECES_MAX = 100
"""Pieces of an answer without records that are written one by one. The transport makes an object
of 200 bytes for each piece, and most pieces are smaller."""


class ConnectionTransport(Protocol):
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

    @property
    def owner(self) -> str:
        """The owner of the bytes (memory_pool)."""
        ...

    def end_unread(self) -> None:
        """End the connection, because its client takes no answers."""
        ...


class UnsentAnswers:
    """The bytes of answers without records that a listener's clients have not taken.

    Each client may ask for a large answer and read nothing for `answer_s`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._noted: dict[Receiver, tuple[str, int]] = {}
        """Owner and bytes, from the client that has taken nothing for the longest time."""
        self._owned: Counter[str] = Counter()

    def __contains__(self, receiver: Receiver) -> bool:
        return receiver in self._noted

    def note(self, receiver: Receiver, size: int) -> None:
        """Note how many bytes the client of a connection has not taken.

        If all clients together exceed the limit, end a connection of the owner that has the most
        bytes: the one whose client has taken nothing for the longest time.
        """
        owner, old_size = self._noted.get(receiver, (receiver.owner, 0))
        self._add(owner, size - old_size)
        if size < old_size or not size:
            self._noted.pop(receiver, None)
        if size:
            self._noted[receiver] = owner, size
        while self.used > self.limit:
            self._end_oldest(max(self._owned, key=self._owned.__getitem__))

    def _end_oldest(self, owner: str) -> None:
        oldest = next(
            receiver for receiver, (its_owner, _) in self._noted.items() if its_owner == owner
        )
        self._add(owner, -self._noted.pop(oldest)[1])
        oldest.end_unread()

    def _add(self, owner: str, size: int) -> None:
        self.used += size
        self._owned[owner] += size
        if not self._owned[owner]:
            del self._owned[owner]


class AnswerShares:
    """The memory of answers that a connection has written and the socket has not taken.

    Owned by one connection.
    """

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

    def __init__(self, receiver: Receiver, unsent: UnsentAnswers) -> None:
        self.written = 0
        """Bytes that were written."""
        self._receiver = receiver
        self._all_unsent = unsent
        self._shares = AnswerShares()
        self._transport: ConnectionTransport | None = None
        self._waiting: deque[bytes | memoryview] = deque()
        """Bytes that the transport has not received yet."""
        self._waiting_bytes = 0
        self._is_writable = True

    def opened(self, transport: ConnectionTransport) -> None:
        """Begin. The transport calls `set_writable` when it keeps more than UNSENT_BYTES_MAX."""
        self._transport = transport

    @property
    def unsent(self) -> int:
        """Return the bytes that the client has not taken."""
        if self._transport is None:
            return 0
        return self._waiting_bytes + self._transport.get_write_buffer_size()

    @property
    def has_room(self) -> bool:
        """Whether the next request may begin."""
        return self._is_writable and not self._waiting

    def set_writable(self, is_writable: bool) -> None:
        """Stop or resume the slices."""
        self._is_writable = is_writable
        self._write_slices()

    def write(self, framed: list[bytes | memoryview], *, is_counted: bool) -> int:
        """Write an answer; return its bytes.

        Note it in UnsentAnswers, unless it `is_counted` by another budget.
        """
        assert self._transport is not None
        size = sum(map(len, framed))
        self.written += size
        if not is_counted and len(framed) > PIECES_MAX:
            framed = [b"".join(framed)]
        if (is_counted or size <= SLICE_BYTES) and not self._waiting:
            self._transport.writelines(framed)
        else:
            self._waiting.extend(framed)
            self._waiting_bytes += size
            self._write_slices()
        if not is_counted and self.unsent > UNSENT_BYTES_MIN:
            self._all_unsent.note(self._receiver, self.unsent)
        return size

    def _write_slices(self) -> None:
        transport = self._transport
        assert transport is not None
        while self._waiting and self._is_writable and not transport.is_closing():
            transport.writelines(self._next_slice())

    def _next_slice(self) -> list[bytes | memoryview]:
        pieces, remaining_bytes = list[bytes | memoryview](), SLICE_BYTES
        while self._waiting and remaining_bytes:
            piece = self._waiting.popleft()
            if len(piece) > remaining_bytes:
                piece = memoryview(piece)
                self._waiting.appendleft(piece[remaining_bytes:])
                piece = piece[:remaining_bytes]
            pieces.append(piece)
            remaining_bytes -= len(piece)
        self._waiting_bytes -= SLICE_BYTES - remaining_bytes
        return pieces

    def release_when_taken(self, release: Callable[[], object]) -> None:
        """Call `release` when the socket has taken all that is written."""
        self._shares.add(self.written, release)

    def settle(self) -> None:
        """Release the answers that the socket has taken."""
        self._shares.taken(self.written - self.unsent)
        if self._receiver in self._all_unsent:
            self._all_unsent.note(self._receiver, self.unsent)

    def end(self) -> None:
        """Close the transport when the client has taken all that is written."""
        if self._transport is not None:
            if self._waiting:
                self._transport.writelines([*self._waiting])
                self._drop()
            self._transport.close()

    def close(self) -> None:
        """Release all answers."""
        self._drop()
        self._shares.release_all()
        self._all_unsent.note(self._receiver, 0)

    def _drop(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
