"""The listener for other brokers (peers), on a port of its own.

It has nine routes:

- a forwarded draft;
- announced entries;
- parts of the objects of tails, which a broker reads for its zone;
- requests of consumer instances for groups that this broker coordinates;
- confirmations that the answers to such requests arrived;
- this broker's metrics, for a worker that shares its port for clients;
- this broker's rates, for a broker that shows the whole cluster;
- the Kafka clients that are connected to this broker, for the same purpose;
- the compactions that clients have started at this broker, for the same purpose.

A peer authenticates with a signature (service.security.peer_signatures) and with the token in this
broker's liveness object. A process that can read the bucket knows the token. Without security there
is no signature, so a process with the token can act as a broker. Bodies are bounded (I10).

The status of the answer gives the outcome of a draft:

- 200: the draft is in the chain;
- 500, 504: the outcome is unknown;
- any other status: this broker did not commit the draft, and will not.
"""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from tidelog.service.http.connection_admission import Admission, Limits
from tidelog.service.http.errors import error_response
from tidelog.service.http.handshakes import Handshakes
from tidelog.service.http.http_server import HttpServer
from tidelog.service.http.request import (
    BodyMemory,
    HttpRequest,
    IncompleteBody,
    Receive,
    Scope,
    Send,
    until_gone,
)
from tidelog.service.http.urls import host_of_url
from tidelog.service.peers.client import (
    ANNOUNCE,
    COMPACTIONS,
    GROUP_ARRIVED,
    GROUP_LOST,
    GROUP_REQUEST,
    HAND_OVER,
    KAFKA_CLIENTS,
    METRICS,
    OBJECTS,
    VITALS,
)
from tidelog.service.peers.forwarding import Forwarded
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.service.security.peer_signatures import HEADER, Signatures
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import PROTOCOL
from tidelog.storage.cluster.messages import ForwardRefused
from tidelog.storage.core.errors import Corrupt, LogError, RecordTooLarge, Unavailable

REPORTS = frozenset({METRICS, VITALS, KAFKA_CLIENTS, COMPACTIONS})
ROUTES = REPORTS | {HAND_OVER, ANNOUNCE, OBJECTS, GROUP_REQUEST, GROUP_ARRIVED, GROUP_LOST}
PEER_BODY_BYTES_MAX = 32 * 1024 * 1024
"""Bound of a request's body. A peer commits a larger draft by itself. A draft with uploaded chunks
is only a header, of about 60 bytes a chunk."""
CONNECTIONS_MAX = 2_500
"""Of brokers. Each forwarded request takes one (TAKEN_MAX of service.peers.forwarding)."""
STRANGERS_SHARE = 8
"""At most one connection in this number may be unproved: its peer has not sent the token yet."""
BODIES_BYTES_MAX = 4 * PEER_BODY_BYTES_MAX
OBJECTS_AT_ONCE = 16
"""Maximum number of parts of objects (4 MiB) that are read or sent at the same time."""
KEEP_ALIVE_S = 600
"""The listener closes a connection that is idle for this time. It is longer than the pause between
two announcements of a peer. If the listener closed a connection at the moment when the peer sends a
draft, the outcome of the draft would be unknown."""


class _RefusedMessage(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class PeerApp:
    """The routes for peers, as plain ASGI."""

    def __init__(
        self,
        broker: Broker,
        groups: Forwarded | None = None,
        reports: Mapping[str, Callable[[], bytes | Awaitable[bytes]]] | None = None,
        signatures: Signatures | None = None,
    ) -> None:
        """`reports` has the functions that answer REPORTS.

        If `signatures` is given, peers must sign their messages.
        """
        self._signatures = signatures
        self._api = broker.cluster.peer_api
        self._cluster = broker.cluster
        self._object_slots = asyncio.Semaphore(OBJECTS_AT_ONCE)
        self._new_id = broker.clock.new_id
        self._groups = groups
        self._requests = broker.groups.rest.requests
        self._reports = reports or {}
        self.bodies: BodyMemory | None = None
        """The memory of the bodies of requests. PeerListener sets it."""
        self._token = f"Bearer {broker.cluster.members().me.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        async with contextlib.AsyncExitStack() as slots:
            await self._answer(scope, receive, send, slots)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, slots: contextlib.AsyncExitStack
    ) -> None:
        """Answer a request. It keeps the slot that it needs until its answer is sent."""
        status, body = 200, b""
        request = HttpRequest(scope, receive, send, self.bodies)
        try:
            body = await self._do(request, slots)
        except _RefusedMessage as error:
            status, body = error.status, str(error).encode()
        except Corrupt as error:
            status, body = 400, str(error).encode()
        except ForwardRefused as error:
            status, body = 503, str(error).encode()
        except LogError as error:
            status, body = 504, str(error).encode()
        finally:
            request.release()
        headers = [(b"content-length", str(len(body)).encode())]
        if status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_trusted(self, scope: Scope, message: bytes) -> bool:
        if self._signatures is None:
            return True
        signature = dict(scope["headers"]).get(HEADER.encode(), b"")
        return self._signatures.accepts(signature, scope["path"], message)

    async def _do(self, request: HttpRequest, slots: contextlib.AsyncExitStack) -> bytes:
        scope, message = request.scope, await self._message(request)
        path, is_trusted = scope["path"], self._is_trusted(scope, message)
        if not is_trusted and path != GROUP_REQUEST:
            raise _RefusedMessage(401, "the message is unsigned, for another broker, or repeated")
        if path == HAND_OVER:
            request.release()  # the queue of drafts counts it at once
            return await self._api.on_forward(message)
        if path == ANNOUNCE:
            return self._api.on_announcements(message)
        if path == OBJECTS:
            await slots.enter_async_context(self._object_slots)
            return await self._cluster.read_object(message)
        if (report := self._reports.get(path)) is not None:
            content = report()
            return content if isinstance(content, bytes) else await content
        if self._groups is None or path in REPORTS:
            raise _RefusedMessage(503, "this broker has no consumer groups and no reports")
        if path in (GROUP_ARRIVED, GROUP_LOST):
            self._groups.settle(message, has_arrived=path == GROUP_ARRIVED)
            return b""
        await self._requests.until_decided()
        if self._requests.is_released:
            raise ForwardRefused("this broker stops and has given its groups to others")
        try:
            answer = self._groups.take(
                message,
                self._new_id(),
                is_trusted=is_trusted,
                until_gone=partial(until_gone, request.receive),
            )
        except msgspec.MsgspecError as error:
            raise Corrupt("a peer's request", f"does not decode: {error}") from error
        del message  # the request may wait for long
        request.release()
        return await answer

    async def _message(self, request: HttpRequest) -> bytes:
        scope = request.scope
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, self._token):
            raise _RefusedMessage(
                401, "the token differs from the one in this broker's liveness object"
            )
        if (prove := scope.get("prove")) is not None:
            prove()
        if scope["path"] not in ROUTES or scope["method"] != "POST":
            raise _RefusedMessage(
                404, f"no such route: this broker has peer protocol version {PROTOCOL}"
            )
        scope["rights"] = ALL_RIGHTS  # of a broker: its bodies are not those of strangers
        try:
            return await request.body(PEER_BODY_BYTES_MAX)
        except (RecordTooLarge, IncompleteBody, Unavailable) as error:
            raise _RefusedMessage(error_response(error).status, str(error)) from error


class PeerListener:
    """The server for peers; listens from `start` to `close`."""

    def __init__(
        self,
        app: PeerApp,
        host: str,
        port: int,
        connections_max: int | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        most = CONNECTIONS_MAX if connections_max is None else connections_max
        limits = Limits(
            connections_max=most,
            unproved_max=max(most // STRANGERS_SHARE, 1),
            address_max=most,
            spare_max=1,
            bodies_bytes_max=BODIES_BYTES_MAX,
            idle_s=KEEP_ALIVE_S,
        )
        self._host = host
        self._scheme = "http" if tls is None else "https"
        self.admission: Admission[Any] = Admission(limits)
        app.bodies = BodyMemory(self.admission.bodies)
        self._server = HttpServer(
            app,
            host,
            port,
            role="for peers ",
            date_header=False,
            admission=self.admission,
            proves_by_head=False,
            tls=tls,
            handshakes=handshakes,
            timeout_graceful_shutdown=1,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Listen, and return the address to announce to peers.

        It is `address`, or, if that is empty, an address of this machine with the port.
        """
        self._task = asyncio.create_task(self._server.serve(), name="tidelog-peers")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return address or f"{self._scheme}://{host_of_url(reachable(self._host))}:{port}"

    async def close(self) -> None:
        self._server.stop()
        if self._task is not None:
            with contextlib.suppress(LogError):  # `start` has raised the error
                await self._task


def reachable(host: str) -> str:
    """Return the host name or address at which peers reach this machine."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    far = "2001:db8::1" if host == "::" else "192.0.2.1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))  # sends nothing, but chooses a route and with it a local address
        address: str = probe.getsockname()[0]
        return address
    return socket.gethostname()
