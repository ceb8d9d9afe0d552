"""uvicorn's HTTP protocol, as both listeners of a broker use it.

A request that offers another protocol (`Upgrade: h2c`, which Java's HttpClient sends with each
request) is read without the offer (RFC 9110, 7.8). With the offer, llhttp would end the request at
its head, and uvicorn would serve it without its body and parse the body as the next request.

service.http.connection_admission bounds connections, their times and heads. If a request is
answered before its whole body has arrived, its connection ends, because the next bytes belong to
its body.
"""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidelog.service.http.answer_arrival import CountedTransport
from tidelog.service.http.connection_admission import (
    HEAD_BYTES_MAX,
    HEAD_FIELDS_MAX,
    PIPELINED_FIELDS_MAX,
    PIPELINED_MAX,
    UNPROVED_PIPELINED_MAX,
    Admission,
    Limits,
    Phase,
)
from tidelog.service.http.exchange import LINGER_S, Exchange, Flow, busy, last_answer
from tidelog.service.http.handshakes import Handshakes
from tidelog.service.http.tls_transport import TlsTransport

NOT_HTTP = "Invalid HTTP request received."
NOT_TLS = "plain text came to a port with TLS: use https://"
FIRST_REQUEST_S = 1.0
CHECK_S = 1.0
"""Time between two checks of the clocks of all connections."""
UNPROVED_BYTES_MAX = 8 * 1024
"""Maximum bytes of the requests that wait behind another one, of a client that has proved no
principal. Clients that pipeline send their rights with the first request."""
PLAIN_TEXT = frozenset({"HTTP_REQUEST", "WRONG_VERSION_NUMBER"})
"""OpenSSL's reasons for a first packet that is not TLS."""
CHECKED_FIELDS = frozenset({b"host", b"expect", b"transfer-encoding"})
HEALTH = frozenset({"/healthy", "/ready", "/startup", "/_health", "/status/ready"})
"""Routes that are also served on connections above a bound of Admission."""


class Config(uvicorn.Config):
    """uvicorn's configuration of a listener, with its Admission."""

    def __init__(
        self,
        app: Callable[..., Any],
        admission: "Admission[Protocol] | None" = None,
        *,
        proves_by_head: bool = True,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshakes: Handshakes | None = None,
        **options: Any,
    ) -> None:
        """Without `proves_by_head`, the application proves connections (Guest.owner).

        It calls `scope["prove"](owner)` to prove a connection of this owner. The scopes of a proved
        connection have no "prove". With `tls`, connections use TLS. A new connection gets the
        context that `tls` returns. `handshakes` are those of the event loop, None if no other
        listener has TLS.
        """
        super().__init__(
            app,
            http=Protocol if tls is None else TlsProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # only links use these headers, see service.http.urls
            **options,
        )
        self.admission: Admission[Protocol] = admission or Admission(Limits())
        self.proves_by_head = proves_by_head
        self.tls = tls
        self.handshakes = handshakes or Handshakes()
        self.is_draining = False
        """Whether each answer ends its connection."""
        self._is_armed = False

    def watch(self, loop: asyncio.AbstractEventLoop, after_s: float = CHECK_S) -> None:
        """Check the clocks of all connections in rounds, while there are connections.

        A timer for each request would cost more than the rest of this module.
        """
        if not self._is_armed and self.admission.connections:
            self._is_armed = True
            loop.call_later(after_s, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_armed = False
        overdue, is_last = self.admission.overdue(loop.time())
        for connection, phase in overdue:
            connection.end_late(phase)
        self.watch(loop, CHECK_S if is_last else 0.0)


class _HeadRefused(Exception):
    """An invalid request. The parser wraps this error, so `Protocol._refusal` has the reason."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    config: Config
    flow: Flow
    cycle: Any
    """The Exchange of the newest request, None before the first one."""
    owner = ""
    """The principal that the client has proved (admission.Guest)."""

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._admission = config.admission
        self._turns = config.handshakes.turns
        self._is_proved = self._is_ended = self._is_in_head = False
        self._is_large = self._is_spare = False
        self._app: Callable[..., Any] = self.app
        self._refusal = HTTPStatus.BAD_REQUEST, NOT_HTTP
        self._requests = 0
        self._received = 0
        self._hosts = 0
        self._is_coded = False  # has a Transfer-Encoding other than chunked
        self._served: Any = None
        """The Exchange that the application serves: `cycle`, or an earlier Exchange."""
        self._has_body = False  # the packet has a part of a body
        self._head_bytes = 0
        """In a head: bytes of the packets after the packet in which it began. In a body: bytes of
        the packets after the last packet with a part of it (trailers, chunk extensions)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self.pipeline)
        self.transport = CountedTransport(transport, self.loop)  # type: ignore[assignment]
        self._host = self._turn_owner = self.client[0] if self.client else ""
        displaced = self._admission.arrive(self, self._host)
        self._is_spare = self._admission.is_spare(self)
        self.config.watch(self.loop)
        if displaced is not None:
            displaced.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.leave(self)
        self._turns.leave(self._turn_owner, self)
        self._is_ended = True
        self.pipeline.clear()
        is_aborted = self.transport.is_aborted  # type: ignore[attr-defined]
        self.flow.end_arrivals(is_clean=exc is None and not is_aborted)
        if self._served is not None:
            self.cycle = self._served  # super() reports the end of the connection to it
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self.flow.settle_arrivals()

    def prove(self, owner: str = "") -> None:
        """Mark this connection as proved (A3).

        A later call does nothing: a proxy may send requests of several principals on one
        connection.
        """
        if not self._is_proved:
            self._is_proved, self.owner = True, owner
            self._admission.prove(self)

    # -- heads

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._needs_proof:
            self.scope["prove"] = self.prove  # type: ignore[typeddict-unknown-key]
        self._requests += 1
        self._is_in_head = True
        self._hosts = 0
        self._is_coded = False
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() or self._is_ended:
            return
        version = self._check_head()
        self._is_in_head = False
        self._head_bytes = 0
        self.flow.settle_arrivals()
        if not self._is_proved and self.config.proves_by_head:
            self.prove()
        old_cycle = self.cycle
        if old_cycle is None or old_cycle.response_complete:
            self._begin(version)
            self._start_asgi_task(self.cycle, self._app)
        elif self._may_wait():
            self._begin(version)
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self._app))
        else:
            self._end_after(old_cycle)

    def _may_wait(self) -> bool:
        """Whether a request may wait for the answers to earlier requests."""
        if self._has_too_many_bytes():
            return False
        waiting: list[Any] = [cycle for cycle, _ in self.pipeline]
        fields = len(self.headers) + sum(len(cycle.scope["headers"]) for cycle in waiting)
        most = UNPROVED_PIPELINED_MAX if self._needs_proof else PIPELINED_MAX
        return len(waiting) < most and fields <= PIPELINED_FIELDS_MAX

    @property
    def _needs_proof(self) -> bool:
        """Whether the client must prove its principal, and has not."""
        return not (self._is_proved or self.config.proves_by_head)

    def _has_too_many_bytes(self) -> bool:
        """Whether the requests that wait are too large for a client that proved no principal.

        The head of the newest one counts.
        """
        if not self._needs_proof:
            return False
        heads = [self.headers, *(cycle.scope["headers"] for cycle, _ in self.pipeline)]
        size = len(self.url) + sum(len(name) + len(value) for head in heads for name, value in head)
        for cycle, _ in self.pipeline:
            scope = cycle.scope
            size += len(scope["raw_path"]) + len(scope["query_string"]) + len(cycle.body)
        return size > UNPROVED_BYTES_MAX

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Let the application serve a request, in the turn of the client's address.

        A client that has proved its principal needs no turn. Without turns, thousands of refusals
        would be one step.
        """
        self._served = cycle
        if self._is_ended and not self.pipeline:
            self.transport.linger_s = LINGER_S  # type: ignore[attr-defined]
        if not self._needs_proof:
            super()._start_asgi_task(cycle, app)
            return
        begin = partial(super()._start_asgi_task, cycle, app)
        # A probe of health does not wait behind the other requests of its address.
        is_probe = cycle.scope["path"] in HEALTH
        self._turn_owner = f"{self._host} health" if is_probe else self._host
        self._turns.wait_for_task(self._turn_owner, self, begin, self.loop)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: it must not become a field of the head (RFC 9110, 6.5.1)
        name = name.lower()
        if name in CHECKED_FIELDS:
            self._check_field(name, value)
        self.headers.append((name, value))

    def _check_field(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            self._is_coded = self._is_coded or value.strip().lower() != b"chunked"

    def _check_head(self) -> str:
        """Return the version of HTTP.

        Raise _HeadRefused for a head that is too large, or that HTTP/1.1 does not allow.
        """
        self._check_size()
        version = self.parser.get_http_version()
        if self._is_coded:
            raise self._refused(501, "the only Transfer-Encoding that is accepted is chunked")
        if version == "1.1":
            if self._hosts != 1:
                raise self._refused(400, "a request must have exactly one Host field")
        elif version != "1.0":
            raise self._refused(505, "this version of HTTP is not supported: use 1.1 or 1.0")
        return version

    def _check_size(self) -> None:
        size = self._head_bytes
        if self._is_large:
            size += len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > HEAD_FIELDS_MAX or size > HEAD_BYTES_MAX:
            raise self._refused(431, "the head of the request is too large")

    def _check_trailers(self, size: int) -> None:
        """Raise _HeadRefused after more than HEAD_BYTES_MAX bytes that are no part of the body."""
        self._head_bytes = 0 if self._has_body else self._head_bytes + size
        self._has_body = False
        if self._head_bytes > HEAD_BYTES_MAX:
            raise self._refused(431, "the trailers of the request are too large")

    def _refused(self, status: int, why: str) -> _HeadRefused:
        self._refusal = HTTPStatus(status), why
        return _HeadRefused()

    def _begin(self, version: str) -> None:
        """Make the scope and the cycle of a request, as uvicorn does."""
        scope: Any = self.scope
        parser = self.parser
        scope["method"] = parser.get_method().decode("ascii")
        if version != "1.1":
            scope["http_version"] = version
        url = httptools.parse_url(self.url)
        raw_path = url.path
        path = raw_path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""
        self._app = self.app if not self._is_spare or path in HEALTH else busy
        self.cycle = Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0"
            and not (self._is_spare or self.config.is_draining)
            and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    # -- bodies and answers

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        self._has_body = True
        if self._is_ended or cycle.response_complete or cycle.scope["method"] == "HEAD":
            return
        cycle.body += body
        if cycle is not self._served and self._has_too_many_bytes():
            self._drop_newest()
            return
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if not (self.parser.should_upgrade() or self._is_ended or cycle.response_complete):
            cycle.more_body = False
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        transport: Any = self.transport
        if transport.is_closing():
            return
        if transport.linger_s:
            self._is_ended = True  # what still comes is dropped
            self.pipeline.clear()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self.flow.resume_reading()

    # -- clocks

    def observed(self) -> tuple[Phase, int]:
        """Return what the connection waits for, and its progress (admission.Guest)."""
        cycle, transport = self.cycle, self.transport
        taken_bytes, left_bytes = transport.taken()  # type: ignore[attr-defined]
        if left_bytes or self.flow.write_paused:
            return Phase.ANSWER, taken_bytes
        if self._is_ended:
            return Phase.SERVED, 0
        if cycle is None or cycle.response_complete:
            return Phase.HEAD if self._is_in_head else Phase.IDLE, self._requests
        if cycle.more_body and not (self.flow.read_paused or cycle.waiting_for_100_continue):
            return Phase.STREAM if cycle.response_started else Phase.BODY, self._received
        return Phase.SERVED, 0

    def end_late(self, phase: Phase) -> None:
        """Close the connection, because its time for this phase is over."""
        if phase is Phase.ANSWER:
            self.transport.abort()  # what is unsent is dropped
        elif phase in (Phase.HEAD, Phase.BODY):
            self._end(HTTPStatus.REQUEST_TIMEOUT, f"the whole {phase.value} did not come in time")
        else:
            self.transport.close()

    # -- the ends of a connection

    def end_after_answer(self) -> None:
        """End the connection after the answer to its newest request, if one is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """End the connection after the answers under way.

        A new connection without a request stays open for FIRST_REQUEST_S, because its client has
        perhaps sent a request already.
        """
        is_new = self.cycle is None and not self._is_ended
        if is_new and self.config.is_draining:
            self.loop.call_later(FIRST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        size = len(data)
        self._received += size
        self._is_large = size > HEAD_BYTES_MAX or self._head_bytes > 0
        requests, was_in_head = self._requests, self._is_in_head
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._read_on(memoryview(data), offer)
            if self._is_in_head:
                if was_in_head and requests == self._requests:
                    self._head_bytes += size
                self._check_size()
            elif requests == self._requests and self.cycle is not None and self.cycle.more_body:
                self._check_trailers(size)
        except (httptools.HttpParserError, _HeadRefused):
            self._refuse()

    def _refuse(self) -> None:
        status, why = self._refusal
        unlogged = self._admission.line(self.loop.time())
        if unlogged is not None:
            self.logger.warning("%s (%d more were not logged)", why, unlogged)
        self._admission.ended["refused"] += 1
        last = self.cycle
        if last is None or last.response_complete or last.more_body:
            self._end(status, why)
        else:
            self._end_after(last)

    def _end_after(self, last: Any) -> None:
        """Close the connection after the answers to this request and those before it."""
        last.keep_alive = False
        self._is_ended = True
        self.flow.pause_reading()  # else all that the client sends is read, and dropped
        if last is self._served:
            self.transport.linger_s = LINGER_S  # type: ignore[attr-defined]

    def _end(self, status: HTTPStatus, why: str) -> None:
        """Answer with `status`, unless an answer is being sent, then close the connection.

        If earlier requests wait for answers, send only these answers, then close it.
        """
        if self.pipeline:
            self._drop_newest()
            return
        cycle, self._is_ended = self.cycle, True
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(last_answer(status, why))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.linger_s = LINGER_S  # type: ignore[attr-defined]
        self.transport.close()

    def _drop_newest(self) -> None:
        """Drop the newest request that waits; close the connection after the other answers."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._served
        self._end_after(self.cycle)

    def _read_on(self, data: memoryview, offer: httptools.HttpParserUpgrade) -> None:
        """Parse the rest of a packet whose first head offers another protocol.

        A packet may hold thousands of offers, so `data` is a memoryview, whose slices copy nothing.
        """
        while data:
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
            self.parser.feed_data(head)
            data = data[offer.args[0] :]
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                offer = another
            else:
                return

    def _head_without_offer(self) -> bytes:
        """Return the head after which the parser stopped, without its `Upgrade` fields.

        The parser refuses line ends in names and values, so one field cannot become two fields.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":  # what follows a CONNECT is no body
            raise httptools.HttpParserError("CONNECT is for proxies")
        version = self.parser.get_http_version().encode()
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *fields, b"", b""])


class TlsProtocol(Protocol):
    """One connection with TLS. Admission counts it from the start and bounds its handshake time."""

    _tls: TlsTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        config = self.config
        assert config.tls is not None
        self._tls = TlsTransport(transport, self.loop, config.tls(), self, config.handshakes)
        super().connection_made(self._tls)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._tls.received(data)

    def on_plain(self, plain: bytes) -> None:
        if plain and not self._tls.is_closing():
            super().data_received(plain)
        if self._tls.is_over:
            self.flow.settle_arrivals()
            self.transport.close()

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def on_paused(self, is_paused: bool) -> None:
        (self.flow.pause_writing if is_paused else self.flow.resume_writing)()

    def observed(self) -> tuple[Phase, int]:
        if self._tls.is_open or self._is_ended:
            return super().observed()
        return Phase.SERVED if self._tls.is_waiting else Phase.HANDSHAKE, 0

    def end_late(self, phase: Phase) -> None:
        if phase is Phase.HANDSHAKE:
            self.transport.abort()
        else:
            super().end_late(phase)

    def on_displaced(self) -> None:
        self._admission.ended["displaced"] += 1

    def on_failed(self, reason: str) -> None:
        if self._tls.is_open:  # a TLS record is damaged: the rest cannot be read
            self._admission.ended["tls"] += 1
            self.transport.abort()
            return
        is_plain = reason in PLAIN_TEXT
        self._admission.ended["plain text" if is_plain else "handshake"] += 1
        unlogged = self._admission.line(self.loop.time())
        if unlogged is not None:
            why = NOT_TLS if is_plain else f"the TLS handshake of a client failed: {reason}"
            self.logger.warning("%s (%d more were not logged)", why, unlogged)
        self._tls.refuse(last_answer(HTTPStatus.BAD_REQUEST, NOT_TLS) if is_plain else b"")
        self._is_ended = True
        self.transport.linger_s = LINGER_S  # type: ignore[attr-defined]
        self.transport.close()
