"""One connection of a Kafka client: requests in, answers out in the same order.

Produce requests begin as soon as they arrive, so those of one connection share a commit. Every
other request begins when all earlier requests of its connection are answered, as in Kafka. While a
client has too many unanswered requests, or does not take its answers, the broker does not read from
its connection.

If a request cannot be read, the broker closes the connection after CLOSE_DELAY_S, because a
client's library may connect again at once, each time.
"""

import asyncio
import contextvars
import logging
import time
from collections import deque
from functools import partial
from types import CoroutineType
from typing import Any

from tidelog.service.http.connection_admission import Phase
from tidelog.service.kafka.answer_forms import CloseConnection, EncodedAnswer, Later
from tidelog.service.kafka.apis import API_VERSIONS, SASL_KEYS, versions_answer
from tidelog.service.kafka.client import REQUEST, ApiClient, fields_of
from tidelog.service.kafka.connections.frame import DECODED_BYTES_MIN, FrameReader, FrameRefused
from tidelog.service.kafka.connections.handshake import Handshake
from tidelog.service.kafka.connections.listener_parts import ListenerParts
from tidelog.service.kafka.connections.outbox import ConnectionTransport, Outbox
from tidelog.service.kafka.connections.pending_requests import Pending, served_large, throttle_s_of
from tidelog.service.kafka.error_responses import called
from tidelog.service.kafka.messages.header import decode_header, frame_response
from tidelog.service.kafka.messages.primitives import MalformedMessage
from tidelog.service.memory_pool import EVERYONE, UNPROVED
from tidelog.service.security.caller import NO_RIGHTS, Unauthenticated
from tidelog.service.security.request_cpu_time import measured
from tidelog.service.telemetry.kafka_clients import ConnectionNow
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.state.access import REQUEST_PERCENTAGE, REQUEST_RATE

log = logging.getLogger("tidelog.kafka")

UNANSWERED_MAX = 16
UNANSWERED_BYTES_MAX = 32 * 1024 * 1024
"""Requests of one connection that are read and not answered, and their bytes."""
DECODE_INLINE_BYTES = 8 * 1024
"""The event loop decodes requests up to this size. It also decodes all Produce requests: the
decoder reads no records. A thread, which takes about 0.1 ms, decodes the others and encodes their
answers."""
CLOSE_DELAY_S = 1.0
MUTE_S_MAX = 30.0
"""Longest time for which a quota stops the reading of a connection."""


class KafkaConnection:
    """One connection. A subclass connects it with a socket (connections.listener)."""

    is_tls = False

    def __init__(self, server: ListenerParts) -> None:
        self._server = server
        self._context = server.context
        self._is_secured = server.security is not None
        self.frames = FrameReader(self._take, is_proved=not self._is_secured)
        self._transport: ConnectionTransport | None = None
        self._host = ""
        self._client_id = ""
        self._connected_s = 0.0
        self.owner = UNPROVED if self._is_secured else EVERYONE
        """The owner of this connection's bytes (memory_pool.Taker)."""
        self._frame_owner = self.owner
        """The owner of the frame that is received."""
        self._handshake = Handshake(
            server.apis, server.security, self._on_handshake, server.context.audit_refusal
        )
        self._variables = contextvars.copy_context()
        """The context variables of this connection's requests: PRINCIPAL."""
        self._clients: dict[tuple[int, str | None], ApiClient] = {}
        self._waiting: deque[tuple[Pending, int]] = deque()
        self._begun: deque[Pending] = deque()
        self._gate: asyncio.Future[None] | None = None
        self._is_serial = False  # the request under way is not a Produce request
        self._unanswered_bytes = self._requests = self._read = 0
        self._outbox = Outbox(self, server.unsent)
        self._is_paused = self._is_muted = self._is_turn_due = self._is_ending = False
        self._is_closed = False
        self._is_first_frame = True

    # -- the socket

    def opened(self, transport: ConnectionTransport, host: str) -> None:
        """Begin to serve the socket. The caller closes connections above the bounds."""
        self._transport, self._host = transport, host
        self._connected_s = self._server.loop.time()
        self._outbox.opened(transport)

    def closed(self) -> None:
        """Release all that the connection holds. Requests that reached the log go on."""
        if self._is_closed:
            return
        self._is_ending = self._is_closed = True
        server = self._server
        server.admission.leave(self)
        server.memory.leave(self)
        for pending in self._begun:
            pending.has_left = True
            if pending.task is not None:
                if pending.api.is_waiting:
                    pending.task.cancel()
                # The request holds its memory to its end. Else clients could send large requests
                # and close, again and again.
                pending.task.add_done_callback(partial(self._give, pending))
            elif not pending.is_later:
                self._give(pending)  # else `_resolved` does
            if pending.answer is not None and pending.answer.release is not None:
                pending.answer.release()
        for pending, _ in self._waiting:
            self._give(pending)
        self._begun.clear()
        self._waiting.clear()
        self._outbox.close()
        self._handshake.close()
        if size := self.frames.frame_bytes:
            server.memory.give(self._frame_owner, size)
        self.frames.drop()

    def _give(self, pending: Pending, _: object = None) -> None:
        """Give the memory of a request back."""
        memory = self._server.memory
        if pending.frame:
            memory.give(pending.owner, len(pending.frame))
            pending.frame = b""
        if pending.decoded_bytes:
            memory.decoded.give(pending.decoded_owner, pending.decoded_bytes)
            pending.decoded_bytes = 0

    def advance(self) -> None:
        """Read the requests that have arrived, begin those that may begin.

        All connections of the event loop take turns: if the time of this iteration is over, the
        connection waits.
        """
        turns = self._server.turns
        end_s = turns.begin(self._server.loop)
        if self.frames.is_inside and turns.clock_s() >= end_s:
            self._wait_for_turn()
        self._advance(end_s)

    def _advance(self, end_s: float) -> None:
        clock_s = self._server.turns.clock_s
        while not (self._is_ending or self._is_turn_due):
            while self._waiting and self._begin_next():
                pass
            if self._is_muted or self._is_full():
                break
            try:
                frame = self.frames.pull()
            except FrameRefused as error:
                self._refuse("size", str(error), "")
                break
            if frame is None:
                break
            self._arrived(frame)
            if clock_s() >= end_s:
                self._wait_for_turn()
        self.frames.settle()
        self._update_reading()

    def _wait_for_turn(self) -> None:
        """Go on in a later iteration of the event loop.

        A principal has its own turns. Clients that have not proved their principal have those of
        their address.
        """
        if self._is_turn_due:
            return
        self._is_turn_due = True
        owner = self.owner
        turns_of = self._host if owner in (EVERYONE, UNPROVED) else owner
        self._server.turns.wait(turns_of, self, self._next_turn, self._server.loop)

    def _next_turn(self) -> None:
        self._is_turn_due = False
        self._advance(self._server.turns.begin(self._server.loop))

    def _is_full(self) -> bool:
        count = len(self._begun) + len(self._waiting)
        part = 2 if self._is_paused else 1
        return (
            count * part >= UNANSWERED_MAX or self._unanswered_bytes * part >= UNANSWERED_BYTES_MAX
        )

    def _update_reading(self) -> None:
        if self._is_closed or self._transport is None:
            return
        is_held = self._is_ending or self._is_muted or self._is_turn_due
        is_paused = is_held or self.frames.is_blocked or self._is_full()
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def set_writable(self, is_writable: bool) -> None:
        """Stop or resume the writing of answers."""
        self._outbox.set_writable(is_writable)
        if is_writable:
            self._outbox.settle()
            self._write_answers()
            self.advance()

    def _take(self, size: int) -> bool:
        self._frame_owner = self.owner
        return self._server.memory.take(self, size)

    def on_memory(self) -> None:
        """Go on with the frame that waited for memory (memory_pool.Taker).

        If the time of this iteration is over, take the memory, and go on in a turn. A connection
        that may not go on now must not delay the others, so it leaves, and requests memory later.
        """
        turns = self._server.turns
        if turns.clock_s() >= turns.begin(self._server.loop):
            self._wait_for_turn()
        if self._is_turn_due:
            self._take_only()
        else:
            self.advance()
        if self.frames.is_blocked and (self._is_ending or self._is_muted or self._is_full()):
            self._server.memory.leave(self)
        if not self._may_begin():
            self._server.memory.decoded.leave(self)

    def _take_only(self) -> None:
        """Take memory without its use.

        It is for the frame that waited for it, or for decoding the first request.
        """
        if self.frames.is_blocked and not (self._is_ending or self._is_muted or self._is_full()):
            frame = self.frames.pull()  # its size was checked before it waited
            if frame is not None:
                self._arrived(frame)
            self.frames.settle()
            self._update_reading()
        if self._waiting and not self._begun and self._may_begin():
            self._has_decoded(self._waiting[0][0])

    # -- requests

    def _arrived(self, frame: bytes | bytearray) -> None:
        """Take a whole frame: check its header and its API, and queue it."""
        self._requests += 1
        try:
            key, version, correlation_id, client_id, position = decode_header(frame)
        except MalformedMessage as error:
            self._server.memory.give(self._frame_owner, len(frame))
            self._refuse("malformed", str(error), "")
            return
        if self._is_first_frame:
            self._is_first_frame = False
            if not self._is_secured:
                self._server.admission.prove(self)
        api = self._server.apis.get(key)
        if api is None or version not in api.request.versions:
            if key != API_VERSIONS:
                name = f"API {key}" if api is None else api.name
                self._server.memory.give(self._frame_owner, len(frame))
                self._refuse("version", f"{name} version {version} is not served", client_id or "")
                return
            api, version = self._server.apis[key], -1
        self._unanswered_bytes += len(frame)
        client = self._clients.get((version, client_id))
        if client is None:
            client = self._client(version, client_id)
        pending = Pending(api, client, correlation_id, frame, self._frame_owner)
        self._waiting.append((pending, position))
        if len(self._waiting) == 1 and not self._is_turn_due:
            self._begin_next()

    def _client(self, version: int, client_id: str | None) -> ApiClient:
        if len(self._clients) >= UNANSWERED_MAX:
            self._clients.clear()
        handshake = self._handshake
        client = ApiClient(
            version, client_id or "", self._host, handshake.software, handshake.rights
        )
        self._clients[version, client_id] = client
        self._client_id = client.client_id
        return client

    def _begin_next(self) -> bool:
        """Begin the first request that waits, if it may begin. Return whether it began."""
        pending, position = self._waiting[0]
        if self._begun and (self._is_serial or not pending.api.is_pipelined):
            return False
        if not self._may_begin():
            return False
        if pending.size > DECODED_BYTES_MIN and not self._has_decoded(pending):
            return False
        self._waiting.popleft()
        self._begun.append(pending)
        self._is_serial = not pending.api.is_pipelined
        self._begin(pending, position)
        return True

    def _has_decoded(self, pending: Pending) -> bool:
        """Take the memory that a request uses when it is decoded.

        Return False if there is none: `on_memory` is called when there is room.
        """
        if pending.size <= DECODED_BYTES_MIN or pending.api.is_pipelined or pending.decoded_bytes:
            return True
        if not self._server.memory.decoded.take(self, pending.size):
            return False
        pending.decoded_bytes, pending.decoded_owner = pending.size, self.owner
        return True

    def _may_begin(self) -> bool:
        return not (self._is_ending or self._is_muted or self._gate) and self._outbox.has_room

    def _begin(self, pending: Pending, position: int) -> None:
        """Call the handler of a request."""
        api, version = pending.api, pending.client.version
        try:
            if self._is_secured and api.key != API_VERSIONS and not self._is_allowed(pending):
                return
            if version < 0:
                self._answered(pending, versions_answer(self._server.apis, is_known=False))
                return
            result: Any
            if api.is_pipelined or len(pending.frame) <= DECODE_INLINE_BYTES:
                request = api.decode(pending.frame, position, version)
                result = self._variables.run(self._called, pending, request)
            else:
                call = partial(self._called, is_task=False)
                large = served_large(self._context, pending, position, call)
                result = self._variables.run(self._server.loop.create_task, large)
        except Exception as error:  # noqa: BLE001 no caller handles it
            self._refuse_by(pending, error)
        else:
            self._receive(pending, result)

    def _called(self, pending: Pending, request: Any, *, is_task: bool = True) -> Any:
        """Call the handler. Return its result, or a future of it; a coroutine unless `is_task`."""
        api = pending.api
        REQUEST.set((api.name, pending.correlation_id, pending.client))
        serve = api.serve or partial(self._handshake.serve, api)
        callbacks = (partial(self._give, pending),) if api.is_kept_by_group else ()
        result = called(self._context, api, serve, request, pending.client, *callbacks)
        if type(result) is CoroutineType:
            if self._is_secured:
                result = measured(self._handshake.rights, result)
            return self._server.loop.create_task(result) if is_task else result
        return result

    def _receive(self, pending: Pending, result: Any) -> None:
        """Take the result of a handler: an answer, or a future of it."""
        if isinstance(result, Later):
            result.on_answer = partial(self._resolved, pending)
            pending.is_later = True
            if result.begun is not None:
                self._gate = result.begun
                result.begun.add_done_callback(self._on_gate)
        elif isinstance(result, asyncio.Future):
            if isinstance(result, asyncio.Task):
                pending.task = result
            result.add_done_callback(partial(self._done, pending))
        else:
            self._answered(pending, result)

    def _on_gate(self, _: "asyncio.Future[None]") -> None:
        self._gate = None
        self.advance()

    def _resolved(self, pending: Pending, response: Any) -> None:
        pending.is_later = False
        if self._is_closed:
            self._give(pending)
            return
        if isinstance(response, CloseConnection):
            self._refuse("acks=0", str(response), pending.client.client_id)
            return
        self._answered(pending, response)
        self.advance()

    def _done(self, pending: Pending, result: "asyncio.Future[Any]") -> None:
        """Take the end of a request's task.

        A task keeps the error that ended it, also its cancellation. The frames of the error name
        the request. If the request named the task, the bytes would stay until a garbage collection,
        though their memory is given back.
        """
        pending.task = None
        if result.cancelled():
            if not self._is_closed:
                self._end("cancelled")
            return
        error = result.exception()
        if self._is_closed:
            answer = None if error is not None else result.result()
            if isinstance(answer, EncodedAnswer) and answer.release is not None:
                answer.release()
            if error is not None:
                self._refuse_by(pending, error)
        elif error is None:
            self._answered(pending, result.result())
            self.advance()
        else:
            self._refuse_by(pending, error)

    def _refuse_by(self, pending: Pending, error: BaseException) -> None:
        """End the connection because of an exception of a handler."""
        client_id = pending.client.client_id
        if isinstance(error, MalformedMessage):
            self._refuse("malformed", f"{pending.api.name}: {error}", client_id)
        elif isinstance(error, Unauthenticated):
            self._context.audit_refusal(pending.api.name, pending.client, error)
            self._refuse("revoked", str(error), client_id)
        elif isinstance(error, CloseConnection):
            self._refuse("acks=0", str(error), client_id)
        else:
            name = pending.api.name
            fields = fields_of(name, pending.correlation_id, pending.client)
            log.error("bug in Kafka's %s", name, exc_info=error, extra={"fields": fields})
            self._end("bug")

    # -- answers

    def _answered(self, pending: Pending, response: Any) -> None:
        """Encode the answer of a request, and write all answers that are due."""
        throttle_s = self._charge(pending, response) if self._is_secured else 0.0
        if response is None:  # a Produce request with acks=0 gets no answer
            pending.answer = EncodedAnswer([], None, throttle_s)
        elif isinstance(response, EncodedAnswer):
            pending.answer = response._replace(throttle_s=throttle_s) if throttle_s else response
        else:
            try:
                pieces = pending.api.encode(response, max(pending.client.version, 0))
            except Exception as error:  # noqa: BLE001 no caller handles it
                self._refuse_by(pending, error)
                return
            pending.answer = EncodedAnswer(pieces, None, throttle_s)
        self._write_answers()

    def _charge(self, pending: Pending, response: Any) -> float:
        """Charge one request. Return how long the broker must not read the connection, in s."""
        rights = self._handshake.rights
        throttle_s = throttle_s_of(response)
        rights.record(REQUEST_RATE, 1)
        for quota in (REQUEST_RATE, REQUEST_PERCENTAGE):
            throttle_s = max(throttle_s, rights.throttle_s(quota))
        throttle_s = min(throttle_s, MUTE_S_MAX)
        if throttle_s and hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = round(throttle_s * 1000)
        return throttle_s

    def _write_answers(self) -> None:
        begun, transport, outbox = self._begun, self._transport, self._outbox
        while begun and begun[0].answer is not None and outbox.has_room and transport is not None:
            pending = begun.popleft()
            answer = pending.answer
            assert answer is not None
            size_in, size_out = pending.size, 0
            self._read += size_in
            if answer.pieces and not transport.is_closing():
                api, version = pending.api, max(pending.client.version, 0)
                framed = frame_response(api.key, version, pending.correlation_id, answer.pieces)
                size_out = outbox.write(framed, is_counted=answer.release is not None)
            if answer.release is not None:
                self._outbox.release_when_taken(answer.release)
                self._server.loop.call_soon(self._outbox.settle)
            self._context.counters.observe(
                pending.api.name, time.perf_counter() - pending.started_s, size_in, size_out
            )
            self._unanswered_bytes -= size_in
            self._give(pending)
            if answer.throttle_s:
                self._mute(answer.throttle_s)

    def _mute(self, seconds: float) -> None:
        """Read nothing for a time, because a quota of the principal is used up."""
        self._is_muted = True
        self._server.loop.call_later(seconds, self._unmute)

    def _unmute(self) -> None:
        self._is_muted = False
        self.advance()

    # -- the first requests of a connection

    def _on_handshake(self) -> None:
        """Take the name of the client's library, and the principal that the client has proved."""
        rights = self._handshake.rights
        self._clients.clear()
        if self._is_secured and rights is not NO_RIGHTS:
            self.owner = rights.principal
            if not self.frames.is_proved:
                self.frames.is_proved = True
                self._server.admission.prove(self)
                # Those that wait behind it without a login may go on. It takes memory as its
                # principal when the login is answered.
                self._server.memory.leave(self)
            self._variables.run(PRINCIPAL.set, rights.principal)

    def _is_allowed(self, pending: Pending) -> bool:
        """Whether the client may use the API now. If not, close the connection."""
        api, security = pending.api, self._server.security
        if api.key in SASL_KEYS or security is None:
            return True
        if not self._handshake.is_current:
            error = security.refused("missing", f"{api.name} before authentication")
            self._context.audit_refusal(api.name, pending.client, error)
            self._refuse("unauthenticated", str(error), "")
            return False
        self._handshake.rights.check_valid()
        return True

    def now(self) -> ConnectionNow:
        """Return the client, and how much it has sent and received."""
        handshake = self._handshake
        return ConnectionNow(
            self._client_id,
            handshake.software,
            handshake.rights.principal,
            self._host,
            self.is_tls,
            self._server.loop.time() - self._connected_s,
            self._requests,
            self._read,
            self._outbox.written,
        )

    # -- the end

    def _refuse(self, reason: str, why: str, client_id: str) -> None:
        """End the connection because of a request, and log the first such request."""
        if self._context.refusal_lines.is_due(client_id or self._host, why[:40]):
            fields = {"host": self._host, "client_id": client_id, "reason": reason}
            line = "closing the connection of %s %r: %s"
            log.warning(line, self._host, client_id, why, extra={"fields": fields})
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self._context.counters.closed[reason] += 1
        self._server.memory.leave(self)
        self._update_reading()
        if self._transport is not None:
            self._server.loop.call_later(CLOSE_DELAY_S, self._transport.abort)

    @property
    def is_quiet(self) -> bool:
        """Whether no request is under way, and all answers are sent."""
        return not (self._begun or self._waiting or self._outbox.unsent)

    def end_quietly(self) -> None:
        """Close the connection when the written answers are sent."""
        self._is_ending = True
        self._outbox.end()

    def observed(self) -> tuple[Phase, int]:
        """Return what the connection waits for, and its progress (admission.Guest)."""
        self._outbox.settle()
        if unsent := self._outbox.unsent:
            return Phase.ANSWER, self._outbox.written - unsent
        if self._begun or self._waiting or self._is_paused:
            return Phase.SERVED, 0
        if self.frames.is_inside and self.frames.is_proved:
            return Phase.HEAD, self._requests
        return Phase.IDLE, self._requests

    def end_unread(self) -> None:
        """End the connection, because all clients together have not taken too many bytes."""
        self._context.counters.closed["unread"] += 1
        self.end_late()

    def end_late(self) -> None:
        """End the connection, because its time for a phase is over."""
        if self._transport is not None:
            self._transport.abort()
