"""The written bytes of a connection, and whether an answer has arrived at the client.

A client that did not receive an answer of a group read must get the records again
(storage.groups.delivery_outcome). A broker sees the following, on Linux:

- The client's TCP has acknowledged all bytes, and no reset came: the answer has arrived. A client
  that closes its socket before it has read the answer sends a reset, and a client that has closed
  already answers with a reset. So a FIN that acknowledges all bytes is a proof.
- The connection ended otherwise, or ACKNOWLEDGED_S passed: the answer counts as lost. If it arrives
  nevertheless, the client gets the records twice.

A broker does not see whether the program behind a TCP that acknowledged the answer has read it: a
proxy may drop it, and a computer may stop. For these cases, a read can name the last answer that
its client has (READ_ID of service.routes.consumers_v2).
"""

import asyncio
import fcntl
import select
import struct
import termios
from collections.abc import Callable
from typing import Any

from tidelog.service.http.tls_transport import TlsTransport

END_S = 0.5
"""How long a client with TLS may take to close after its last answer, before the broker ends."""

ACKNOWLEDGED_S = 3.0
"""Longest wait for the acknowledgement of an answer that was written. TCP sends lost packets again
after 0.2, 0.6 and 1.4 s. Shorter than SETTLED_S of service.peers.forwarding."""
LOOK_S_MIN, LOOK_S_MAX = 0.0005, 0.05
"""Intervals at which a waiting task looks at the socket: TCP reports no acknowledgement."""
_NOTHING = bytes(4)


class CountedTransport:
    """A transport for uvicorn that counts the written bytes and can delay its close."""

    def __init__(
        self, transport: asyncio.Transport | TlsTransport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._written = 0
        self._end_bytes = 0
        self._is_aborted = False
        self.linger_s = 0.0
        self.before_end: Callable[[], object] | None = None
        """With TLS, called END_S after `close` and before the end is sent. Until then, a client
        that has its answer can close without a reset. If the client has not read the end of TLS, a
        reset follows its close, as if it had not read the answer."""

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """Close, or, with `linger_s`, send EOF now and close after this time.

        If the broker closed while the client still sends, TCP would reset the connection, and the
        client could lose the answer.
        """
        if not self.linger_s:
            self._transport.close()
            return
        if self.before_end is not None and isinstance(self._transport, TlsTransport):
            self._loop.call_later(END_S, self._end_tls, self.before_end)
        else:
            self._end()
        self._transport.resume_reading()
        self._loop.call_later(self.linger_s, self._transport.close)

    def _end_tls(self, before_end: Callable[[], object]) -> None:
        if not self._transport.is_closing():
            before_end()
            self._end()

    def _end(self) -> None:
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._end_bytes = 1

    def abort(self) -> None:
        self._is_aborted = True
        self._transport.abort()

    @property
    def is_aborted(self) -> bool:
        """Whether unsent bytes were dropped."""
        transport = self._transport
        return self._is_aborted or (isinstance(transport, TlsTransport) and transport.is_aborted)

    @property
    def end_bytes(self) -> int:
        """How many bytes at the end of the stream are no part of an answer."""
        transport = self._transport
        return transport.end_bytes if isinstance(transport, TlsTransport) else self._end_bytes

    def taken(self) -> tuple[int, int]:
        """Return how many written bytes the socket has taken, and how many wait for it."""
        size = self._transport.get_write_buffer_size()
        return self._written - size, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Arrival:
    """The arrival of one answer.

    Owned by the event loop of its connection; lives until the client's next read, which may come on
    another connection.
    """

    __slots__ = ("_deadline_s", "_transport", "_verdict", "_waiter")

    def __init__(self, transport: CountedTransport) -> None:
        self._transport: CountedTransport | None = transport
        self._verdict: bool | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that the answer was written at `now_s` of the loop's clock."""
        self._deadline_s = now_s + ACKNOWLEDGED_S

    def settle(self, *, is_last: bool = False) -> bool | None:
        """Return True if the answer has arrived, False if it is lost, None if neither is known yet.

        With `is_last`, the connection ends now.
        """
        transport = self._transport
        if transport is not None:
            # In this order: a reset between the two looks empties the queue, and is seen then.
            is_acknowledged = self._deadline_s > 0 and unacknowledged(transport) == 0
            if transport.is_aborted or is_reset(transport):
                self.lose()
            elif is_acknowledged or is_last:
                self._decide(has_arrived=is_acknowledged)
        return self._verdict

    def lose(self) -> None:
        """Note that no proof of the arrival can come, unless the arrival is proved already."""
        if self._verdict is None:
            self._decide(has_arrived=False)

    async def has_arrived(self) -> bool:
        """Return whether the answer has arrived.

        Waits up to ACKNOWLEDGED_S after it was written.
        """
        loop = asyncio.get_running_loop()
        pause_s = LOOK_S_MIN
        while (verdict := self.settle()) is None:
            if loop.time() >= self._deadline_s:
                self.lose()
                continue
            if self._waiter is None:
                self._waiter = loop.create_future()
            await asyncio.wait({self._waiter}, timeout=pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        return verdict

    def _decide(self, *, has_arrived: bool) -> None:
        self._verdict = has_arrived
        self._transport = None  # the member keeps this object after the end of the connection
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def is_ending(transport: CountedTransport) -> bool:
    """Return whether the client has ended its side of the connection, or has reset it."""
    return bool(_events(transport, select.POLLRDHUP | select.POLLERR | select.POLLHUP))


def is_reset(transport: CountedTransport) -> bool:
    return bool(_events(transport, select.POLLERR) & select.POLLERR)


def unacknowledged(transport: CountedTransport) -> int:
    """Return how many bytes before the end of the connection the client's TCP has not acknowledged.

    Bytes that wait for the socket count too.
    """
    queue = fcntl.ioctl(_fd(transport), termios.TIOCOUTQ, _NOTHING)
    (size,) = struct.unpack("i", queue)
    return max(0, transport.get_write_buffer_size() + size - transport.end_bytes)


def _events(transport: CountedTransport, events: int) -> int:
    poll = select.poll()
    poll.register(_fd(transport), events)
    return next((mask for _, mask in poll.poll(0)), 0)


def _fd(transport: CountedTransport) -> int:
    return transport.get_extra_info("socket").fileno()
