"""uvicorn's server and its HTTP protocol, as both listeners of a broker use them.

The head and the body of an answer go in one packet. ASGI sends them apart and uvloop writes at
once: two system calls and two packets for each answer, ~8 us of CPU. A head waits for what comes
next, or for the loop's next turn: a stream that has only begun is seen to have begun.

A request that offers another protocol (`Upgrade: h2c`, which Java's HttpClient sends with each
request) is read as if it did not (RFC 9110, 7.8). llhttp ends such a request at its head; uvicorn
then serves it without its body, and the body is parsed as the next request.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidelog.service.http.errors import error_body
from tidelog.storage.core.errors import LogError

HEAD = b"HTTP/1.1 "
JOINED_BYTES_MAX = 64 * 1024
"""A larger body is not copied for it."""
LINGER_S = 2.0
"""How long a connection stays after an answer that came before the end of its request's body."""
NOT_HTTP = "Invalid HTTP request received."
_PASSIVE = socket.AI_PASSIVE
_REASONS = {
    errno.EADDRINUSE: "another process uses the port: stop it, or give another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address: give another host",
    errno.EACCES: "this user may not use the port: give one above 1023",
}


class HeadWithBody:
    """A transport as uvicorn uses it. Order is kept; nothing but a head ever waits."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        protocol: HttpToolsProtocol,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._protocol = protocol
        self._head = b""
        self._is_ending = False

    def write(self, data: bytes) -> None:
        if self._head and len(data) <= JOINED_BYTES_MAX:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        elif self._head:
            self._flush()
            self._transport.write(data)
        elif data.startswith(HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close. While a body comes, end the answers at once, drop the body, and close after
        LINGER_S: to close at once would reset the connection, and the client would not get its
        answer."""
        self._flush()
        cycle: Any = self._protocol.cycle
        if cycle is None or not cycle.more_body or self.is_closing():
            self._transport.close()
            return
        self._is_ending = True
        self._transport.set_protocol(_Dropping(self._protocol))
        self._transport.resume_reading()
        if self._transport.can_write_eof():  # TLS has no such end
            self._transport.write_eof()
        self._loop.call_later(LINGER_S, self._transport.close)

    def is_closing(self) -> bool:
        return self._is_ending or self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            data, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Dropping(asyncio.Protocol):
    """Stands in for a protocol whose connection ends."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def bound_sockets(
    host: str, port: int, *, role: str = "", is_shared: bool = False
) -> list[socket.socket]:
    """Return a socket for each address of the host, bound, not listening yet. With `is_shared`,
    several processes may bind the port: the kernel distributes the connections (SO_REUSEPORT).
    Raises LogError."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound.append(socket.socket(family, kind, protocol))
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:  # an address of IPv4 has a socket of its own
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
    except OSError as error:
        for each in bound:
            each.close()
        raise _cannot_listen(host, port, role, error) from error
    return bound


def _cannot_listen(host: str, port: int, role: str, error: OSError) -> LogError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return LogError(f"cannot listen {role}on {host}:{port}: {reason}")


class Server(uvicorn.Server):
    """A server without uvicorn's signal handlers, which would end a drained process by the signal:
    its owner calls `stop`."""

    def __init__(
        self,
        app: Callable[..., Any],
        host: str,
        port: int,
        *,
        role: str = "",
        on_listening: Callable[[str], object] = lambda _: None,
        **options: Any,
    ) -> None:
        """`role` names the port in an error, `on_listening` gets its URL. `options` are those of
        uvicorn.Config."""
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=Protocol,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # only links use these headers, see service.http.urls
            **options,
        )
        super().__init__(config)
        self._role = role
        self._on_listening = on_listening

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`, or on the host and port. Raises LogError."""
        host, port = self.config.host, self.config.port
        if sockets is None:
            sockets = bound_sockets(host, port, role=self._role)
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has bound the port as early, and listens
            raise _cannot_listen(host, port, self._role, error) from error
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self._on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def _log_started_message(self, listeners: Sequence[socket.SocketType]) -> None:
        """Omit uvicorn's line: it would name the port for peers before the port for clients."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = HeadWithBody(transport, self.loop, self)  # type: ignore[assignment]

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._read_on(memoryview(data), offer)
        except httptools.HttpParserError:
            self.logger.warning(NOT_HTTP)
            self.send_400_response(NOT_HTTP)

    def send_400_response(self, msg: str) -> None:
        body = error_body(HTTPStatus.BAD_REQUEST, msg)
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    def _read_on(self, data: memoryview, offer: httptools.HttpParserUpgrade) -> None:
        """Parse the rest of a packet whose first head has an offer. A packet may hold thousands of
        offers; slices of a memoryview copy nothing."""
        while data:
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's is
            self.parser.feed_data(head)
            data = data[offer.args[0] :]
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                offer = another
            else:
                return

    def _head_without_offer(self) -> bytes:
        """The head that the parser has ended at, without its `Upgrade` fields.

        The parser refuses line ends in names and values: one field cannot become two.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":  # whatever follows it is no body
            raise httptools.HttpParserError("CONNECT is for proxies")
        version = self.parser.get_http_version().encode()
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *fields, b"", b""])
