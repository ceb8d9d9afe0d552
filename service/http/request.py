"""A request and a response without a framework: headers, query, body, stream."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from tidelog.service.codec_threads import UNPROVED_CALLER, SliceCaller, UnpackThreads
from tidelog.service.http.answer_arrival import Arrival
from tidelog.service.http.connection_admission import BODY_STEP_BYTES
from tidelog.service.http.content_coding import (
    PACKED_BYTES_MIN,
    BodyTooLarge,
    coding_of_answer,
    coding_of_body,
    headers_of,
    packed,
    unpack,
)
from tidelog.service.http.media_types import JSON_V2
from tidelog.service.http.request_id import echo
from tidelog.service.memory_pool import MemoryPool, Share
from tidelog.storage.codec.decompression import bound_of
from tidelog.storage.core.errors import InvalidRequest, Unavailable

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Pack: TypeAlias = Callable[[bytes, bytes], Awaitable[bytes]]
"""Packs the body of an answer with a coding (content_coding)."""

UNSTORED = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
"""Headers of each stream, and of each other answer unless the method is POST. A browser neither
stores nor runs an answer to a POST."""
LEFT = "the client disconnected before its request was read"
LENGTH_DIGITS_MAX = 18
"""Maximum digits of a Content-Length that is parsed. For thousands of digits, `int` raises."""


class IncompleteBody(InvalidRequest):
    """The client disconnected before its whole body was read."""

    status = 400
    code = 400


class ClientGone(Exception):
    """The client has ended its connection before its answer."""


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    body: bytes
    media_type: bytes = JSON_V2
    headers: tuple[tuple[bytes, bytes], ...] = ()


class WholeExchange(ABC):
    """A request and its answer without ASGI messages.

    `receive` and `send` of a request are methods of this object, unless an application wraps them.
    """

    disconnected: bool
    """Whether the client has ended the connection. Threads read it."""

    @abstractmethod
    def whole_body(self) -> bytes | None:
        """Take and return the body, or return None if it has not arrived completely."""

    @abstractmethod
    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Write the whole answer. `headers` must have its Content-Length."""

    @abstractmethod
    def watch(self) -> Arrival:
        """Watch whether the answer arrives.

        Call this just before the answer. Raises ClientGone if the client has ended the connection,
        perhaps in the same packet as the request.
        """


def _whole_exchange(method: object) -> WholeExchange | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, WholeExchange) else None


class BodyMemory(NamedTuple):
    """The memory of the bodies of a listener, and the threads in which they are unpacked.

    Without `threads`, they are unpacked at once: brokers do not compress what they send to each
    other.
    """

    pool: MemoryPool
    threads: UnpackThreads | None = None


class HttpRequest:
    """One request being served."""

    __slots__ = (
        "_exchange",
        "bodies",
        "headers",
        "receive",
        "received",
        "scope",
        "send",
        "share",
        "status",
        "waited_s",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, bodies: BodyMemory | None = None
    ) -> None:
        self.scope = scope
        self.bodies = bodies
        self.share: Share | None = None
        """The memory that the body holds; `release` gives it back."""
        self.receive = receive
        self.send = send
        self._exchange = _whole_exchange(receive)  # also if `receive` or `send` is wrapped later
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status = 0
        self.received = 0
        """Bytes of the body that have arrived, before it is unpacked."""
        self.waited_s = 0.0
        """Time in a long poll or a stream. The latency of the response excludes it."""

    def query(self) -> dict[str, str]:
        """Return the query's parameters. For a repeated parameter, return the last value."""
        raw: bytes = self.scope["query_string"]
        if not raw:
            return {}
        text = raw.decode("latin-1")
        if "%" in text or "+" in text:
            return dict(parse_qsl(text, keep_blank_values=True))
        parts = (part.partition("=") for part in text.split("&") if part)
        return {name: value for name, _, value in parts}

    async def body(self, bytes_max: int) -> bytes:
        """Read the whole body.

        Unpack it if it has a Content-Encoding. Raises BodyTooLarge if the body is over `bytes_max`,
        and UnpacksToMore for its content; the rest is neither read nor unpacked (I10). Raises
        Unavailable if there is no memory for the bodies of this principal. An uncompressed body
        that arrives in one piece is not charged here. Raises UnsupportedEncoding and BadEncoding.
        Raises IncompleteBody if the client disconnects, because half an Arrow stream would decode
        as a shorter stream.
        """
        coding = b""
        if b"content-encoding" in self.headers:
            coding = coding_of_body(self.headers[b"content-encoding"])
        body = await self._received(bytes_max)
        if not coding:
            return body
        # If this broker forwards the request, it sends the unpacked body.
        del self.headers[b"content-encoding"]
        headers = [header for header in self.scope["headers"] if header[0] != b"content-encoding"]
        self.scope["headers"] = headers
        if self.bodies is None or self.bodies.threads is None:
            return unpack(body, coding, bytes_max)
        self.charge(len(body))
        work = partial(self._unpacked, body, coding, bytes_max)
        unpacked_bytes = bound_of(len(body), bytes_max)
        threads = self.bodies.threads
        content = await threads.run(self._caller(), unpacked_bytes, work, self.share)
        self.charge(len(body) + len(content))
        return content

    def _unpacked(self, body: bytes, coding: bytes, bytes_max: int) -> bytes:
        """Called in a thread, perhaps a long time after the body has arrived."""
        if self.has_left:
            raise IncompleteBody(LEFT)
        return unpack(body, coding, bytes_max)

    @property
    def has_left(self) -> bool:
        """Whether the client has ended its connection. Threads read it."""
        return self._exchange is not None and self._exchange.disconnected

    async def _received(self, bytes_max: int) -> bytes:
        size = 0
        declared = self.headers.get(b"content-length")
        if declared is not None and declared.isdigit():
            size = int(declared) if len(declared) <= LENGTH_DIGITS_MAX else sys.maxsize
            if size > bytes_max:
                raise BodyTooLarge(size, bytes_max)
        exchange = _whole_exchange(self.receive)
        whole = None if exchange is None else exchange.whole_body()
        if whole is not None:
            self.received = len(whole)
            if len(whole) > bytes_max:
                raise BodyTooLarge(len(whole), bytes_max)
            return whole
        message = await self._part()
        first: bytes = message.get("body", b"")
        self.received = received = len(first)
        if received > bytes_max:
            raise BodyTooLarge(received, bytes_max)
        if not message.get("more_body", False):
            return first
        parts = [first]
        while message.get("more_body", False):
            # If all declared bytes are here, only the end of the message is missing.
            if not 0 < size <= received:
                self.charge(max(size, received))
            message = await self._part()
            parts.append(message.get("body", b""))
            self.received = received = received + len(parts[-1])
            if received > bytes_max:
                raise BodyTooLarge(received, bytes_max)
        return b"".join(parts)

    async def _part(self) -> MutableMapping[str, Any]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise IncompleteBody(LEFT)
        return message

    def charge(self, size: int) -> None:
        """Hold so many bytes for the body, and for what is made of it. Raises Unavailable."""
        if self.bodies is None:
            return
        if self.share is None:
            self.share = Share(self.bodies.pool, self._caller().principal)
        if not self.share.set(-(-size // BODY_STEP_BYTES) * BODY_STEP_BYTES):
            pool = self.share.pool
            raise Unavailable(
                f"bodies of {pool.used} bytes are being read, the limit of all principals is "
                f"{pool.limit}: try again later"
            )

    def _caller(self) -> SliceCaller:
        rights: SliceCaller | None = self.scope.get(
            "rights"
        )  # a request of a public route has none
        return UNPROVED_CALLER if rights is None else rights

    def release(self) -> None:
        """Give the memory of the body back, and hold none from now on.

        Called when the body is freed, and at the end of the request.
        """
        if self.share is not None:
            self.share.end()
        self.bodies = None

    async def answer(self, answer: HttpResponse, pack: Pack = packed) -> None:
        body = answer.body
        headers = list(answer.headers)
        if answer.status != HTTPStatus.NO_CONTENT:
            if len(body) >= PACKED_BYTES_MIN and b"accept-encoding" in self.headers:
                coding = coding_of_answer(self.headers[b"accept-encoding"], is_hot=True)
                if coding:
                    answer = answer._replace(body=b"")
                    body = await pack(body, coding)
                    headers += headers_of(coding)
            headers.append((b"content-type", answer.media_type))
            headers.append((b"content-length", b"%d" % len(body)))
        if self.scope["method"] != "POST":
            headers += UNSTORED
        headers += echo(self.headers)
        self.status = answer.status
        if (exchange := _whole_exchange(self.send)) is not None:
            await exchange.answer(answer.status, headers, body)
            return
        await self.send(
            {"type": "http.response.start", "status": answer.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body})

    def watch(self) -> Arrival | None:
        """Watch whether the answer arrives at the client; call this just before the answer.

        Return None if the request has no connection of its own. Raises ClientGone.
        """
        return None if self._exchange is None else self._exchange.watch()

    async def until_delivered(self) -> None:
        """Wait until the answer has arrived at the client of another broker.

        Here, the broker has a connection to the client, so `watch` shows the arrival. The subclass
        ForwardedCall (service.peers.forwarding) waits for `Forwarded.settle`. Raises ClientGone,
        TimeoutError.
        """

    async def start_stream(
        self, media_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Begin a response of unknown length. `chunk` sends a part of it, and `end` ends it."""
        self.status = 200
        start = [(b"content-type", media_type), *UNSTORED, *headers, *echo(self.headers)]
        await self.send({"type": "http.response.start", "status": 200, "headers": start})

    async def chunk(self, body: bytes) -> None:
        if body:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


async def until_gone(receive: Receive) -> None:
    """Return when the client of a request whose body was read has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def received_again(body: bytes, then: Receive) -> Receive:
    """Return a `receive` that first returns `body`, which was read already, then calls `then`."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await then()

    return receive
