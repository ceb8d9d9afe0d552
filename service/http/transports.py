"""The transports of a connection, below its protocol: TLS, and a count of the written bytes.

TLS is OpenSSL on two buffers in memory, between the socket's transport and the protocol. asyncio's
own TLS (`create_server(ssl=...)`) is not used, for two reasons. With it, a protocol gets its
connection only after the handshake, so Admission could not bound the connections that are in a
handshake. And asyncio's TLS encrypts a whole answer at once and hides how much of it is unsent.
Here an answer is encrypted in steps, and each step waits until the socket has room.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

RECORD_BYTES = 16 * 1024
"""Maximum bytes of a TLS record. One read returns at most one record."""
STEP_BYTES = 128 * 1024
"""Maximum bytes encrypted in one turn of the event loop. This takes about 0.1 ms."""
UNASKED_MAX = 32
"""Maximum messages after the handshake that OpenSSL answers by itself (KeyUpdate). No client needs
more: Java's client sends one KeyUpdate for each 137 GB. Without the bound, answers for a client
that does not read would fill the memory."""


class TlsTransport:
    """TLS over the transport of a socket. To the protocol above, it is a transport.

    The protocol passes the loop's calls on to `received`, `pause_writing` and `resume_writing`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        on_paused: Callable[[bool], object],
    ) -> None:
        """`on_paused(True)` stops the writing of the protocol above. `on_paused(False)` resumes
        it."""
        self._raw = transport
        self._loop = loop
        self._context = context
        self._on_paused = on_paused
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._unasked = 0
        self._is_raw_paused = self._is_above_paused = False
        self._is_ending = self._is_closing = self._is_shut = self._is_turn_due = False
        self.is_open = False
        """Whether the handshake is done."""
        self.is_over = False
        """Whether the client has ended its side."""

    # -- reading

    def received(self, data: bytes) -> bytes:
        """Decrypt bytes from the socket and return the plain text. Raises SSLError if the bytes are
        not TLS, or if the handshake fails. Then the caller refuses the client."""
        if self._is_shut:
            return b""
        self._incoming.write(data)
        plain: list[bytes] = []
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self.is_open = True
                self._send_outgoing()
            while piece := self._tls.read(RECORD_BYTES):
                plain.append(piece)
            self.is_over = True
        except ssl.SSLZeroReturnError:
            self.is_over = True
        except ssl.SSLWantReadError:
            if self._send_outgoing() and self.is_open:
                self._unasked += 1
                if self._unasked > UNASKED_MAX:
                    self.abort()
        return plain[0] if len(plain) == 1 else b"".join(plain)

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()

    # -- writing

    def write(self, data: bytes) -> None:
        if self._is_ending or not self.is_open:
            return
        self._waiting.append(memoryview(data))
        self._waiting_bytes += len(data)
        if not self._is_turn_due:
            self._encrypt()

    def pause_writing(self) -> None:
        self._is_raw_paused = True
        self._pass_on_pause()

    def resume_writing(self) -> None:
        self._is_raw_paused = False
        self._encrypt()

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes + self._raw.get_write_buffer_size()

    def _next_turn(self) -> None:
        self._is_turn_due = False
        self._encrypt()

    def _encrypt(self) -> None:
        """Encrypt up to STEP_BYTES of the queue, unless the socket's buffer is full. The next turn
        of the loop, or `resume_writing`, continues with the rest."""
        left = STEP_BYTES
        while self._waiting and left and not self._is_raw_paused:
            data = self._waiting.popleft()
            if len(data) > left:
                self._waiting.appendleft(data[left:])
                data = data[:left]
            left -= len(data)
            self._waiting_bytes -= len(data)
            try:
                self._tls.write(data)
            except ssl.SSLError:
                self.abort()
                return
        self._send_outgoing()
        if self._waiting and not self._is_raw_paused and not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._next_turn)
        self._pass_on_pause()
        if self._is_ending and not self._waiting:
            self._shut()

    def _pass_on_pause(self) -> None:
        is_paused = self._is_raw_paused or bool(self._waiting)
        if is_paused != self._is_above_paused:
            self._is_above_paused = is_paused
            self._on_paused(is_paused)

    def _send_outgoing(self) -> bool:
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)
        return bool(data)

    # -- the end

    def refuse(self, answer: bytes) -> None:
        """Answer a client whose handshake failed. Send `answer` in plain text or, if `answer` is
        empty, send the TLS alert. The caller closes the connection."""
        if answer:
            _ = self._outgoing.read()
            self._raw.write(answer)
        else:
            self._send_outgoing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send the queue, then EOF. Bytes that the client sends after that are dropped."""
        self._is_ending = True
        if not self._waiting:
            self._shut()

    def close(self) -> None:
        """Send the queue, then close."""
        self._is_ending = self._is_closing = True
        if not self._waiting:
            self._shut()

    def abort(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_ending = self._is_closing = self._is_shut = True
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def _shut(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            if self.is_open:
                with contextlib.suppress(ssl.SSLError):  # the client has not ended its side yet
                    self._tls.unwrap()
                self._send_outgoing()
            if not self._raw.is_closing():
                self._raw.write_eof()
        if self._is_closing:
            self._raw.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._context if name == "sslcontext" else self._raw.get_extra_info(name, default)


class CountedTransport:
    """A transport for uvicorn that counts the written bytes and can delay its close."""

    def __init__(
        self, transport: asyncio.Transport | TlsTransport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._written = 0
        self.linger_s = 0.0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """Close. If `linger_s` is set, send EOF now and close after this time. If the broker closed
        while the client still sends, TCP would reset the connection, and the client could lose the
        answer."""
        if not self.linger_s:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(self.linger_s, self._transport.close)

    def taken(self) -> tuple[int, int]:
        """Return how many written bytes the socket has taken, and how many wait for it."""
        size = self._transport.get_write_buffer_size()
        return self._written - size, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
