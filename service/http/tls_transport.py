"""TLS below the protocol of a connection.

It is OpenSSL on two buffers in memory, between the socket's transport and the protocol. asyncio's
own TLS (`create_server(ssl=...)`) is not used, for two reasons. With it, a protocol gets its
connection only after the handshake, so Admission could not bound the connections that are in a
handshake. And asyncio's TLS encrypts a whole answer at once and hides how much of it is unsent.
Here an answer is encrypted in steps, and each step waits until the socket has room.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from typing import Any, Protocol

from tidelog.service.http.handshakes import (
    HELLO_BYTES_MAX,
    RETRY_RANDOM,
    SILENT_BYTES,
    UNDER_WAY_BYTES,
    ClientHello,
    Handshakes,
    Records,
)

RECORD_BYTES = 16 * 1024
"""Maximum bytes of a TLS record. One read returns at most one record."""
STEP_BYTES = 128 * 1024
"""Maximum bytes encrypted in one turn of the event loop. This takes about 0.1 ms."""
UNASKED_MAX = 32
UNASKED_RECORDS = 1024 * 1024
"""Maximum records without data after the handshake: UNASKED_MAX, and one for each UNASKED_RECORDS
with data. They are KeyUpdates, of 27 bytes each, which cost more CPU than 16 KiB of data. Clients
send at most one for each 2 ** 24 records."""


class Above(Protocol):
    """The protocol above a TlsTransport."""

    def on_plain(self, plain: bytes) -> None:
        """Take decrypted bytes, perhaps none, and look whether the client has ended its side.

        `TlsTransport.is_over` says so.
        """
        ...

    def on_failed(self, reason: str) -> None:
        """End the connection, because its bytes are not TLS or its handshake failed.

        `reason` is OpenSSL's name.
        """
        ...

    def on_displaced(self) -> None:
        """Count a connection that was closed, because handshakes take too much memory."""
        ...

    def on_paused(self, is_paused: bool) -> None:
        """Stop the writing, or resume it."""
        ...


class TlsTransport:
    """TLS over the transport of a socket. To the protocol above, it is a transport.

    The protocol passes the loop's calls on to `received`, `pause_writing`, `resume_writing` and
    `lost`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        above: Above,
        handshakes: Handshakes,
    ) -> None:
        self._raw = transport
        self._loop = loop
        self._context = context
        self._above = above
        self._handshakes = handshakes
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None  # from the whole ClientHello on
        self._hello: ClientHello | None = ClientHello()  # that the client has to send now
        self._early = bytearray()  # bytes that wait for a step of the handshake
        self._records = Records()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._unasked = self._data_records = 0
        self._is_raw_paused = self._is_above_paused = False
        self._is_ending = self._is_closing = self._is_shut = self._is_turn_due = False
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        self.is_open = False
        """Whether the handshake is done."""
        self.is_waiting = False
        """Whether the handshake waits for the broker."""
        self.is_over = False
        """Whether the client has ended its side."""
        self.end_bytes = 0
        """Bytes after the last answer: the end of TLS, and the FIN, which TCP counts as a byte."""
        self.is_aborted = False
        handshakes.charge(self, SILENT_BYTES)

    # -- reading

    def received(self, data: bytes) -> None:
        """Take bytes from the socket.

        The protocol above gets their plain text, at once or when the handshake is done.
        """
        if self._is_shut:
            return
        if self.is_open:
            self._read(data)
            return
        hello = self._hello
        if hello is not None and hello.end:
            return  # a client sends nothing before the answer to its ClientHello
        self._early += data
        if hello is not None:
            hello.look(self._early)
            del self._early[hello.end or len(self._early) :]
            if len(self._early) > HELLO_BYTES_MAX:
                self._above.on_failed("the ClientHello is too large")
                return
        elif len(self._early) > HELLO_BYTES_MAX:
            self.step()  # the rest is data: the broker keeps no more of it
            return
        size = SILENT_BYTES if self._tls is None else UNDER_WAY_BYTES
        self._handshakes.charge(self, size + len(self._early))
        if hello is None or hello.end:
            self._wait()

    def _wait(self) -> None:
        if not self._is_shut:
            self.is_waiting = True
            self._handshakes.wait(self, self._loop, is_hello=self._hello is not None)

    def step(self) -> None:
        """Do a step of the handshake, with the bytes that wait for it."""
        self.is_waiting = False
        data, self._early = self._early, bytearray()
        was_hello, self._hello = self._hello is not None, None
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        flight = self._read(data)
        if self.is_open or self._is_shut:
            self._handshakes.leave(self)
        elif was_hello and not flight:
            self._above.on_failed("no ClientHello")
        else:
            if flight[11:43] == RETRY_RANDOM:
                self._hello = ClientHello()
            self._handshakes.charge(self, UNDER_WAY_BYTES)

    def displace(self) -> None:
        """Close the connection, because newer handshakes need its memory."""
        self.abort()
        self._above.on_displaced()

    def _read(self, data: bytes | bytearray) -> bytes:
        """Decrypt bytes. Return what was sent in answer to them by TLS itself."""
        assert self._tls is not None
        tls = self._tls
        plain: list[bytes] = []
        try:
            for piece, records in self._records.split(data):
                self._incoming.write(piece)
                old_size = len(plain)
                try:
                    if not self.is_open:
                        tls.do_handshake()
                        self.is_open, records = True, 0
                    while text := tls.read(RECORD_BYTES):
                        plain.append(text)
                    self.is_over = True
                except ssl.SSLWantReadError:
                    if self.is_open and not self._is_asked(records, len(plain) - old_size):
                        self._above.on_failed("too many messages")
                        return b""
                if self.is_over:
                    break
        except ssl.SSLZeroReturnError:
            self.is_over = True
        except ssl.SSLError as error:
            self._above.on_failed(error.reason)
            return b""
        sent = self._send_outgoing()
        if self.is_open:
            self._above.on_plain(plain[0] if len(plain) == 1 else b"".join(plain))
        return sent

    def _is_asked(self, records: int, with_data: int) -> bool:
        """Count records. Return whether the client may send that many without data."""
        self._data_records += with_data
        self._unasked += max(records - with_data, 0)
        return self._unasked <= UNASKED_MAX + self._data_records // UNASKED_RECORDS

    def lost(self) -> None:
        """Give up the handshake, if it is not done: the connection is closed, or will be."""
        self._handshakes.leave(self)
        self.is_waiting = False
        if not self.is_open:
            self._tls = None
            self._early.clear()

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
        """Encrypt up to STEP_BYTES of the queue, unless the socket's buffer is full.

        The next turn of the loop, or `resume_writing`, continues with the rest.
        """
        remaining_bytes = STEP_BYTES
        while self._waiting and remaining_bytes and not self._is_raw_paused:
            data = self._waiting.popleft()
            if len(data) > remaining_bytes:
                self._waiting.appendleft(data[remaining_bytes:])
                data = data[:remaining_bytes]
            remaining_bytes -= len(data)
            self._waiting_bytes -= len(data)
            assert self._tls is not None
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
            self._above.on_paused(is_paused)

    def _send_outgoing(self) -> bytes:
        """Send what TLS has made, and return it."""
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)
        return data

    # -- the end

    def refuse(self, answer: bytes) -> None:
        """Answer a client whose handshake failed.

        Send `answer` in plain text or, if `answer` is empty, send the TLS alert. The caller closes
        the connection.
        """
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
        self.is_aborted = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_ending = self._is_closing = self._is_shut = True
        self.lost()
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def _shut(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            if self.is_open and self._tls is not None:
                with contextlib.suppress(ssl.SSLError):  # the client has not ended its side yet
                    self._tls.unwrap()
                self.end_bytes = len(self._send_outgoing())
            else:
                self.lost()
            if not self._raw.is_closing():
                self._raw.write_eof()
                self.end_bytes += 1
        if self._is_closing:
            self._raw.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._context if name == "sslcontext" else self._raw.get_extra_info(name, default)
