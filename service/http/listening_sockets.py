"""uvicorn's server for HTTP, the sockets that a server listens on, and the reason if it cannot.

A listening socket that is closed resets the connections that wait in its queue: clients that have
sent requests would lose them without an answer. So before the end, a socket filter drops the
packets that begin new connections, while the queue is served. The kernels of the clients send these
packets again, after a second, and the closed port refuses them.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import uvicorn

from tidelog.service.http.connection_admission import Admission
from tidelog.service.http.urls import host_of_url
from tidelog.service.http.uvicorn_protocol import Config, Protocol
from tidelog.storage.core.errors import LogError

log = logging.getLogger("tidelog.http")

QUEUE_S = 0.05
"""Time for which the queue of a socket is served that takes no new connections: a round trip for
the last packet of a handshake, and turns of the event loop."""

_PASSIVE = socket.AI_PASSIVE
_REASONS = {
    errno.EADDRINUSE: "another process uses the port: stop it, or give another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address: give another host",
    errno.EACCES: "this user may not use the port: give a port above 1023",
}
_SO_ATTACH_FILTER = 26
_NO_SYN = (  # classic BPF on a TCP header: drop a packet with SYN, take all others
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x45, 0, 1, 0x02),  # SYN is set: next instruction, else the one after it
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFF_FFFF),
)


def bound_sockets(
    host: str, port: int, *, role: str = "", is_shared: bool = False
) -> list[socket.socket]:
    """Return a bound socket for each address of the host.

    The sockets do not listen yet. With `is_shared`, several processes may bind the port, and the
    kernel distributes the connections (SO_REUSEPORT). Raises LogError.
    """
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            bound.append(socket.socket(family, kind, protocol))
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:  # an address of IPv4 has a socket of its own
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
    except OSError as error:
        for sock in bound:
            sock.close()
        raise cannot_listen(host, port, role, error) from error
    return bound


def cannot_listen(host: str, port: int, role: str, error: OSError) -> LogError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return LogError(f"cannot listen {role}on {host}:{port}: {reason}")


def begin_no_connections(sockets: Iterable[socket.socket]) -> None:
    """Let the sockets begin no new connections.

    Connections in their queues are not affected. On other systems than Linux, do nothing.
    """
    if sys.platform != "linux":
        return
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _NO_SYN)
    program = ctypes.create_string_buffer(code)
    option = struct.pack("HP", len(_NO_SYN), ctypes.addressof(program))
    for sock in sockets:
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as same:  # uvloop's has no options
                same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
        except OSError as error:
            log.warning("connections that begin at this moment may be reset: %s", error)


class HttpServer(uvicorn.Server):
    """A server without uvicorn's signal handlers, whose owner calls `stop`.

    The handlers raise the signal again after the drain and so end the process.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        host: str,
        port: int,
        *,
        role: str = "",
        on_listening: Callable[[str], object] = lambda _: None,
        admission: "Admission[Protocol] | None" = None,
        **options: Any,
    ) -> None:
        """`role` names the port in errors. `on_listening` gets its URL. `options` go to Config."""
        super().__init__(Config(app, admission, host=host, port=port, **options))
        self._role = role
        self._on_listening = on_listening

    def stop(self) -> None:
        self.should_exit = True

    def begin_drain(self) -> None:
        """Serve all requests and new connections, but end each connection after its answer."""
        self.config.is_draining = True  # type: ignore[attr-defined]
        for connection in self.server_state.connections:
            assert isinstance(connection, Protocol)
            connection.end_after_answer()

    @property
    def activity(self) -> tuple[int, int]:
        """The number of open connections, and of requests that were answered so far."""
        return len(self.server_state.connections), self.server_state.total_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port without a reset of a connection; then wait for running requests."""
        begin_no_connections(sock for server in self.servers for sock in server.sockets)
        await asyncio.sleep(QUEUE_S)
        self.begin_drain()
        await super().shutdown(sockets)

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
        except OSError as error:  # another process bound the port, too, and listens already
            raise cannot_listen(host, port, self._role, error) from error
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "http" if self.config.tls is None else "https"  # type: ignore[attr-defined]
        self._on_listening(f"{scheme}://{host_of_url(host)}:{port}")

    def _log_started_message(self, listeners: Sequence[socket.SocketType]) -> None:
        """Omit uvicorn's line, which would name the port for peers before the port for clients."""
