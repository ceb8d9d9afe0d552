"""The listener: sockets, connections within bounds, drain and stop.

Connections have an Admission of their own (service.http.connection_admission), because Kafka's
clients stay idle for minutes. Once a second, the listener checks how long each connection has
waited.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from tidelog.service.http.connection_admission import Limits, Phase, address_max
from tidelog.service.http.handshakes import Handshakes
from tidelog.service.http.listening_sockets import cannot_listen
from tidelog.service.http.tls_transport import TlsTransport
from tidelog.service.kafka.connections.connection import KafkaConnection
from tidelog.service.kafka.connections.listener_parts import ListenerParts
from tidelog.service.kafka.connections.outbox import UNSENT_BYTES_MAX, UNSENT_BYTES_MIN
from tidelog.service.kafka.connections.request_memory import SHARED_BYTES, SMALL_BYTES_MAX
from tidelog.storage.codec import byte_loops

log = logging.getLogger("tidelog.kafka")

CONNECTION_BYTES = SMALL_BYTES_MAX + SHARED_BYTES + UNSENT_BYTES_MIN
"""Maximum bytes of one connection that no pool counts: a part of a small frame, bytes behind the
frames that wait, and the part of answers that the socket has not taken."""
CHECK_S = 1.0
FIRST_FRAME_S = 10.0
FRAME_S = 30.0
IDLE_S = 600.0
"""As in Kafka; Java's client closes its own idle connections after nine minutes."""
ANSWER_S = 10.0
DRAIN_S_MIN, DRAIN_S_MAX = 0.5, 2.0
"""How long a stopping broker refuses requests before it closes the connections. The minimum gives
clients the time to ask another broker. The maximum is for connections that still have requests."""


def limits_of(connections_max: int) -> Limits:
    return Limits(
        connections_max=connections_max,
        unproved_max=connections_max,
        address_max=address_max(connections_max),
        spare_max=1,
        first_byte_s=FIRST_FRAME_S,
        head_s=FRAME_S,
        answer_s=ANSWER_S,
        idle_s=IDLE_S,
    )


class PlainConnection(KafkaConnection, asyncio.BufferedProtocol):
    """A connection without TLS. Bytes go from the kernel into the frame's memory."""

    def __init__(self, listener: "Listener") -> None:
        super().__init__(listener.server)
        self._listener = listener
        self._shared = listener.shared

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.opened(transport, _host_of(transport))
        self._listener.admit(self, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.frames.buffer(self._shared)

    def buffer_updated(self, nbytes: int) -> None:
        self.frames.received(self._shared, nbytes)
        self.advance()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed()
        self._listener.connections.discard(self)

    def pause_writing(self) -> None:
        self.set_writable(False)

    def resume_writing(self) -> None:
        self.set_writable(True)


class TlsConnection(KafkaConnection, asyncio.Protocol):
    is_tls = True
    _tls: TlsTransport

    def __init__(self, listener: "Listener", context: ssl.SSLContext) -> None:
        super().__init__(listener.server)
        self._listener = listener
        self._tls_context = context

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        listener = self._listener
        self._tls = TlsTransport(
            transport, listener.server.loop, self._tls_context, self, listener.handshakes
        )
        self.opened(_JoinedWrites(self._tls), _host_of(transport))
        listener.admit(self, transport)

    def data_received(self, data: bytes) -> None:
        self._tls.received(data)

    def on_plain(self, plain: bytes) -> None:
        if plain and not self._tls.is_closing():
            self.frames.push(plain)
            self.advance()
        if self._tls.is_over:
            self._tls.close()

    def on_failed(self, reason: str) -> None:
        admission = self._listener.server.admission
        if self._tls.is_open:
            admission.ended["tls"] += 1
            self._tls.abort()
            return
        self._listener.refuse_handshake(reason)
        self._tls.refuse(b"")
        self._tls.close()

    def on_displaced(self) -> None:
        self._listener.server.admission.ended["displaced"] += 1

    def on_paused(self, is_paused: bool) -> None:
        self.set_writable(not is_paused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.lost()
        self.closed()
        self._listener.connections.discard(self)

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def observed(self) -> tuple[Phase, int]:
        if self._tls.is_open:
            return super().observed()
        return Phase.SERVED if self._tls.is_waiting else Phase.HANDSHAKE, 0


class _JoinedWrites:
    """A TlsTransport that takes an answer in pieces."""

    def __init__(self, tls: TlsTransport) -> None:
        self._tls = tls

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        self._tls.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)


class Listener:
    """The servers of one broker for Kafka's protocol: `bind`, `listen`, `drain`, `close`."""

    def __init__(
        self,
        server: ListenerParts,
        tls: Callable[[], ssl.SSLContext] | None,
        handshakes: Handshakes,
    ) -> None:
        """With `tls`, connections use TLS.

        A new connection gets the context that `tls` returns. `handshakes` are those of the event
        loop.
        """
        self.server = server
        self.handshakes = handshakes
        self._tls = tls
        self.shared = memoryview(bytearray(SHARED_BYTES))
        """The memory for bytes from sockets. The event loop reads one socket at a time."""
        self.connections: set[PlainConnection | TlsConnection] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, sockets: "list[Any]", backlog: int) -> None:
        """Accept connections on bound sockets. Raises LogError."""
        if byte_loops.WHY_SLOW:
            log.info(
                "tidelog's code in C is not used: %s. Record batches of Kafka clients cost many "
                "times the CPU",
                byte_loops.WHY_SLOW,
            )
        loop = self.server.loop
        for sock in sockets:
            host, port = sock.getsockname()[:2]
            try:
                self._servers.append(
                    await loop.create_server(self._protocol, sock=sock, backlog=backlog)
                )
            except OSError as error:
                raise cannot_listen(host, port, "for Kafka clients ", error) from error
        self._timer = loop.call_later(CHECK_S, self._check)

    def _protocol(self) -> PlainConnection | TlsConnection:
        return PlainConnection(self) if self._tls is None else TlsConnection(self, self._tls())

    def admit(
        self, connection: "PlainConnection | TlsConnection", transport: asyncio.Transport
    ) -> None:
        """Count a new connection. Above the bounds, close this connection or another one."""
        admission = self.server.admission
        self.connections.add(connection)
        displaced = admission.arrive(connection, _host_of(transport))
        if displaced is not None:
            displaced.end_late()
        if admission.is_spare(connection):
            transport.abort()

    def refuse_handshake(self, reason: str) -> None:
        """Count a failed TLS handshake, and log it within the rate of log lines."""
        admission = self.server.admission
        admission.ended["handshake"] += 1
        unlogged = admission.line(self.server.loop.time())
        if unlogged is not None:
            log.warning(
                "a TLS handshake of a Kafka client failed: %s (%d more were not logged)",
                reason,
                unlogged,
            )

    def _check(self) -> None:
        """Close the connections whose time is over."""
        loop = self.server.loop
        overdue, is_last = self.server.admission.overdue(loop.time())
        for connection, _ in overdue:
            connection.end_late()
        self._timer = loop.call_later(CHECK_S if is_last else 0.0, self._check)

    # -- the end

    async def drain(self) -> None:
        """Accept no connection, send clients to other brokers, then close the connections."""
        for server in self._servers:
            server.close()
        self.server.context.is_draining = True
        if not self.connections:
            return
        loop = self.server.loop
        begin_s = loop.time()
        while loop.time() < begin_s + DRAIN_S_MAX:
            await asyncio.sleep(0.05)
            if not self.connections:
                return
            is_quiet = all(connection.is_quiet for connection in self.connections)
            if is_quiet and loop.time() >= begin_s + DRAIN_S_MIN:
                break
        for connection in list(self.connections):
            connection.end_quietly()

    async def close(self) -> None:
        """End all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.end_late()
        await asyncio.sleep(0)


def _host_of(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    host: str = peer[0] if peer else ""
    return host.removeprefix("::ffff:") if "." in host else host
