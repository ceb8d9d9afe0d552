"""uvicorn's server for HTTP, on the listening sockets of a broker."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from tidelog.service.http.connection_admission import Admission
from tidelog.service.http.listening_sockets import (
    QUEUE_S,
    begin_no_connections,
    bound_sockets,
    cannot_listen,
)
from tidelog.service.http.urls import host_of_url
from tidelog.service.http.uvicorn_protocol import Config, Protocol


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
