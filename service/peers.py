"""Brokers among themselves: the port of their own.

Six routes and nothing else: a draft handed over, entries told of, requests of consumer instances
for the groups that this broker coordinates, and that their answers arrived; what this broker
counts, as metrics for another worker of its port and as vitals for whoever shows a cluster. Whoever
shows the token that this broker's liveness object holds can read the bucket, and is a broker.
Bodies are bounded (I10); what happened to a draft is said by the status: 200 it is in the chain;
504 and 500 nobody knows; everything else, never by this broker.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from service.group_forwarding import Forwarded
from service.peer_client import GROUP_CONFIRM, GROUP_REQUEST, HAND_OVER, METRICS, TOLD, VITALS
from storage.errors import Corrupt, LogError
from storage.handover import NotTaken
from storage.log import Log
from storage.members import PROTOCOL

log = logging.getLogger("tidelog.peers")

ROUTES = frozenset({HAND_OVER, TOLD, GROUP_REQUEST, GROUP_CONFIRM, METRICS, VITALS})
BODY_BYTES_MAX = 32 * 1024 * 1024
"""A draft whose chunks were uploaded is a header: ~60 bytes a chunk. More than that many commits
themselves."""
CONNECTIONS_MAX = 1000
KEEP_ALIVE_S = 600
"""Longer than peers are silent, who tell each other of every commit: a connection that breaks under
a request leaves its draft in doubt."""


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class PeerApp:
    """What a broker answers its peers. Plain ASGI."""

    def __init__(self, broker: Log) -> None:
        self.groups: Forwarded | None = None
        self.told_of: dict[str, Callable[[], bytes]] = {}
        """What METRICS and VITALS are answered with."""
        self._log = broker
        self._token = f"Bearer {broker.membership.me.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, body = 200, b""
        try:
            message = await self._message(scope, receive)
            body = await self._do(scope["path"], message)
        except _Refused as error:
            status, body = error.status, str(error).encode()
        except Corrupt as error:
            status, body = 400, str(error).encode()
        except NotTaken as error:
            status, body = 503, str(error).encode()
        except LogError as error:
            status, body = 504, str(error).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _do(self, path: str, message: bytes) -> bytes:
        if path == HAND_OVER:
            return await self._log.sequencer.take(message)
        if path == TOLD:
            self._log.sequencer.told(message)
            return b""
        if (tell := self.told_of.get(path)) is not None:
            return tell()
        if self.groups is None or path in (METRICS, VITALS):
            raise _Refused(503, "this broker has not started yet")
        if path == GROUP_CONFIRM:
            self.groups.confirm(message)
            return b""
        try:
            return await self.groups.take(message, self._log.clock.new_id())
        except msgspec.MsgspecError as error:
            raise Corrupt("a peer's request", f"does not decode: {error}") from error

    async def _message(self, scope: Scope, receive: Receive) -> bytes:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, self._token):
            raise _Refused(401, "not the token of this broker's liveness object")
        if scope["path"] not in ROUTES or scope["method"] != "POST":
            raise _Refused(404, f"no such route: this broker speaks version {PROTOCOL}")
        parts: list[bytes] = []
        size, is_more = 0, True
        while is_more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise _Refused(400, "the body ended early")
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            is_more = event.get("more_body", False)
            if size > BODY_BYTES_MAX:
                raise _Refused(413, f"over the limit of {BODY_BYTES_MAX} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _PeerServer(uvicorn.Server):
    """Ended by its owner alone, after everything else."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say that the port is taken; it has logged why
            where = f"{self.config.host}:{self.config.port}"
            raise LogError(
                f"cannot listen for peers on {where}: is another process there?"
            ) from None


class PeerListener:
    """The port, between `start` and `close`."""

    def __init__(self, broker: Log, host: str, port: int) -> None:
        self._host = host
        self.app = PeerApp(broker)
        config = uvicorn.Config(
            self.app,
            host=host,
            port=port,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
        )
        self._server = _PeerServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Listen; the address to tell peers: `address` unless that is empty."""
        self._task = asyncio.create_task(self._server.serve(), name="tidelog-peers")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return address or f"http://{_reachable(self._host)}:{port}"

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(LogError):  # `start` has said it
                await self._task


def _reachable(host: str) -> str:
    """The host under which others find this machine."""
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    far = "2001:db8::1" if host == "::" else "192.0.2.1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((far, 9))  # sends nothing: it only picks the way out, and so our end of it
        found: str = asking.getsockname()[0]
        return f"[{found}]" if ":" in found else found
    return socket.gethostname()
