"""One request and its answer on a connection.

If the whole body of a request has arrived, the broker reads it, and writes the answer, without ASGI
messages. For each request, ASGI messages would cost 15 us of CPU, and one more packet, because ASGI
sends the head and the body of an answer separately. Streams, and applications that wrap `receive`
or `send`, use ASGI messages.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tidelog.service.http.answer_arrival import Arrival, is_ending
from tidelog.service.http.errors import INTERNAL_ERROR, error_body, error_response
from tidelog.service.http.request import (
    ClientGone,
    HttpRequest,
    HttpResponse,
    Receive,
    Scope,
    Send,
    WholeExchange,
)
from tidelog.service.http.route import media_type_of_errors
from tidelog.storage.core.errors import CommitUnknown, LogError, Unavailable

log = logging.getLogger("tidelog.http")

JOINED_BYTES_MAX = 64 * 1024
"""A larger body is written separately from its head, because the copy that joins them would cost
more than a second write."""
CLOSE = (b"connection", b"close")
LINGER_S = 2.0
"""How long a connection stays open after an answer that is sent before the end of its request."""


def last_answer(status: HTTPStatus, why: str) -> bytes:
    """Return the bytes of an answer to an invalid or incomplete request.

    The caller closes the connection after it.
    """
    body = error_body(status, why)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
    return STATUS_LINE[status] + head + b"\r\n\r\n" + body


async def busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503. This ASGI application serves connections above a bound of Admission."""
    body = error_body(50302, "too many connections: retry later")
    media_type = media_type_of_errors(scope["path"])
    busy = HttpResponse(503, body, media_type, ((b"retry-after", b"1"),))
    await HttpRequest(scope, receive, send).answer(busy)


class Flow(FlowControl):
    """The flow control of a connection.

    While requests wait for the answers to earlier requests, nothing is read. Without this rule,
    each served request would let one more packet in (I10).
    """

    def __init__(self, transport: asyncio.Transport, waiting: deque[Any]) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self.arrivals: list[Arrival] = []
        """Watched answers of the connection that have not certainly arrived."""

    def settle_arrivals(self) -> None:
        """Note which watched answers have arrived. Called before other bytes follow them."""
        if self.arrivals:
            self.arrivals = [arrival for arrival in self.arrivals if arrival.settle() is None]

    def end_arrivals(self, *, is_clean: bool) -> None:
        """Decide about all watched answers, because the connection ends now.

        It ends clean if neither a reset nor an error ended it.
        """
        for arrival in self.arrivals:
            if is_clean:
                arrival.settle(is_last=True)
            arrival.lose()
        self.arrivals.clear()

    def resume_reading(self) -> None:
        if self.read_paused and not self._waiting:
            super().resume_reading()


class Exchange(RequestResponseCycle, WholeExchange):
    """One request and its answer.

    `answer` and `send` return when the socket has taken all bytes except a bounded rest
    (CONNECTION_BYTES of service.http.connection_admission). Until then, the caller keeps its share
    of the memory.
    """

    arrival: Arrival | None = None
    """The arrival of the answer, if the application watches it."""

    async def run_asgi(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        """Serve the request. The server cancels it if the broker stops before the answer."""
        scope: Any = self.scope
        receive: Any = self.receive
        error: LogError | None = None
        try:
            await app(scope, receive, self.send)
            if not (self.response_started or self.disconnected):
                error = LogError("no answer")
        except asyncio.CancelledError:
            is_reading = scope["method"] in ("GET", "HEAD")
            why = "the broker stops"
            error = Unavailable(f"{why}: try again") if is_reading else CommitUnknown(why)
        except BaseException as bug:
            log.error("bug in %s %s", scope["method"], scope["path"], exc_info=bug)
            error = LogError(INTERNAL_ERROR[2])
        finally:
            self.on_response = lambda: None
        if error is not None and not self.response_started:
            self.keep_alive = False
            answer = error_response(error).response(scope["path"])
            if scope["method"] == "HEAD":
                answer = answer._replace(body=b"")
            await HttpRequest(scope, receive, self.send).answer(answer)
        elif not self.response_complete and not self.disconnected:
            self.transport.close()

    def watch(self) -> Arrival:
        transport: Any = self.transport
        flow: Any = self.flow
        if not self.disconnected and (transport.is_closing() or is_ending(transport)):
            self.disconnected = True
            self.message_event.set()
            transport.close()
        if self.disconnected:
            raise ClientGone
        if not self.keep_alive:
            transport.linger_s = LINGER_S  # a closed socket shows no acknowledgement
            transport.before_end = flow.settle_arrivals
        self.arrival = Arrival(transport)
        flow.arrivals.append(self.arrival)
        return self.arrival

    def whole_body(self) -> bytes | None:
        if self.more_body or self.disconnected or self.response_complete:
            return None
        self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = self.body, bytearray()
        return bytes(body)

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        flow = self.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        if self.response_started:
            raise RuntimeError("the request has an answer already")
        if self.more_body:
            self._end_early()
        fields = [b"%b: %b\r\n" % field for field in (*self.default_headers, *headers)]
        if not self.keep_alive:
            fields.append(b"connection: close\r\n")
        head = STATUS_LINE[status] + b"".join(fields) + b"\r\n"
        if head.count(b"\n") != len(fields) + 2:
            raise RuntimeError("a header of the answer has a line end")
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        if len(body) <= JOINED_BYTES_MAX:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        self._begin_arrival()
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        if flow.write_paused and not self.disconnected:
            await flow.drain()

    async def send(self, message: MutableMapping[str, Any]) -> None:  # type: ignore[override]
        if self.more_body:
            self._answer_early(message)
        if not self.keep_alive and message["type"] == "http.response.start":
            headers = message.get("headers", ())
            if CLOSE not in headers:
                message["headers"] = [*headers, CLOSE]
        await super().send(message)  # type: ignore[arg-type]
        self._begin_arrival()
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()

    def _begin_arrival(self) -> None:
        if self.arrival is not None and self.response_complete:
            self.arrival.begin(asyncio.get_running_loop().time())

    def _answer_early(self, message: MutableMapping[str, Any]) -> None:
        """Prepare a message of an answer before the whole body of the request has arrived.

        The connection ends after this answer.
        """
        if message["type"] == "http.response.start":
            if message["status"] >= HTTPStatus.BAD_REQUEST:
                message["headers"] = [*message.get("headers", ()), CLOSE]
        elif not message.get("more_body", False):
            self._end_early()

    def _end_early(self) -> None:
        self.keep_alive = False
        transport: Any = self.transport
        transport.linger_s = LINGER_S
