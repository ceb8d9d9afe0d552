"""Requests of consumer instances on their way to the group's coordinator.

Any broker takes any request; where another one coordinates the group it is handed over whole, and
the answer handed back. What a read returned counts as returned only when the broker in between says
that its client has it (`confirm`): if that broker dies before, the coordinator returns the same
again. Until then, or until `CONFIRM_S` have passed, the instance's next read waits.

And if the coordinator dies? When it cannot be reached it has not got the request, and this broker
takes the group over; when it does not answer, nobody knows, and the client is told to try again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from service.caller import rights_of
from service.errors import error_body, error_response
from service.http import JSON_V2, Answer, Call, Scope
from storage.errors import LogError, Unavailable

log = logging.getLogger("tidelog.groups")

T = TypeVar("T")

CONFIRM_S = 5.0
SECRET_HEADERS = (b"authorization", b"cookie")


class Unreached(Exception):
    """The coordinator has certainly not got the request."""


class Transport(Protocol):
    """The way to another broker, whom the cluster state names as a group's coordinator."""

    async def request(self, coordinator: str, message: bytes) -> bytes:
        """What its `Forwarded.take` returns. Raises Unreached, or Unavailable: nobody knows."""
        ...

    async def confirm(self, coordinator: str, ticket: bytes) -> None:
        """Have its `Forwarded.confirm` called; the same errors."""
        ...


class _Request(msgspec.Struct, array_like=True):
    """`caller` is whom the broker in between has let in, and their address; empty where it asks
    nobody. What they showed for it is not handed on."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    scheme: str
    server: tuple[str, int | None]
    body: bytes
    caller: tuple[str, str] = ("", "")


class _Response(msgspec.Struct, array_like=True):
    """`ticket` is empty when nobody waits to hear that it arrived."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    ticket: bytes = b""


_encode = msgspec.msgpack.encode
_requests = msgspec.msgpack.Decoder(_Request)
_responses = msgspec.msgpack.Decoder(_Response)


def _decode(decoder: msgspec.msgpack.Decoder[T], message: bytes) -> T:
    """Raises msgspec.DecodeError."""
    try:
        return decoder.decode(message)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


class ForwardedCall(Call):
    """A call whose client is at another broker. Its answer goes there whole."""

    __slots__ = ("answered", "arrived", "caller", "is_awaited", "response")

    def __init__(self, said: _Request) -> None:
        scope: Scope = {
            "type": "http",
            "method": said.method,
            "path": said.path,
            "query_string": said.query,
            "headers": said.headers,
            "scheme": said.scheme,
            "server": said.server,
        }
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.arrived: asyncio.Future[None] = loop.create_future()
        self.is_awaited = False
        self.caller = said.caller
        response = _Response(0, [], b"")
        bodies = [said.body]

        async def receive() -> Any:
            if not bodies:
                await asyncio.Event().wait()  # its client going away is not heard of here
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = message["headers"]
            else:
                response.body = message["body"]

        super().__init__(scope, receive, send)
        self.response = response

    async def until_delivered(self) -> None:
        self.is_awaited = True
        self.answered.set_result(None)
        async with asyncio.timeout(CONFIRM_S):
            await self.arrived


class Forwarded:
    """The coordinator's end: calls of other brokers. `serve` is a call's handler here."""

    def __init__(self, serve: Callable[[Call], Awaitable[Answer | None]]) -> None:
        self._serve = serve
        self._calls: dict[bytes, ForwardedCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: bytes, ticket: bytes) -> bytes:
        """Serve a request that another broker handed over; `ticket` is a name for it that is never
        used again."""
        call = ForwardedCall(_decode(_requests, message))
        task = asyncio.create_task(self._answer(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task, call.answered}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        response = call.response
        if call.is_awaited:
            self._calls[ticket] = call
            task.add_done_callback(lambda _: self._calls.pop(ticket, None))
            response.ticket = ticket
        return _encode(response)

    def confirm(self, ticket: bytes) -> None:
        """The client has the answer."""
        call = self._calls.get(ticket)
        if call is not None and not call.arrived.done():
            call.arrived.set_result(None)

    async def _answer(self, call: ForwardedCall) -> None:
        try:
            answer = await self._serve(call)
        except LogError as error:
            said = error_response(error)
            pairs = ((name.lower().encode(), text.encode()) for name, text in said.headers.items())
            body = error_body(said.code, said.message)
            answer = Answer(said.status, body, JSON_V2, tuple(pairs))
        except Exception:
            log.exception("bug in a forwarded %s %s", call.scope["method"], call.scope["path"])
            answer = Answer(500, error_body(50002, "internal error"), JSON_V2)
        if answer is not None:
            await call.answer(answer)


class Forwarder:
    """The other end: calls that are for another broker."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._confirming: set[asyncio.Task[None]] = set()

    async def forward(self, call: Call, coordinator: str, body: bytes) -> None:
        """Answer the call as the coordinator does. Raises Unreached, Unavailable."""
        server = call.scope.get("server") or ("localhost", None)
        rights = rights_of(call.scope)
        said = _Request(
            call.scope["method"],
            call.scope["path"],
            call.scope["query_string"],
            [pair for pair in call.scope["headers"] if pair[0] not in SECRET_HEADERS],
            call.scope.get("scheme", "http"),
            (server[0], server[1]),
            body,
            (rights.principal, rights.host),
        )
        try:
            answer = await self._transport.request(coordinator, _encode(said))
            response = _decode(_responses, answer)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the group's coordinator answers nonsense: {error}") from error
        if not response.status:
            raise Unavailable("the group's coordinator gave no answer: try again")
        call.status = response.status
        headers = [(bytes(name), bytes(text)) for name, text in response.headers]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        await call.send(start)
        await call.send({"type": "http.response.body", "body": response.body})
        if response.ticket:
            task = asyncio.create_task(self._confirm(coordinator, response.ticket))
            self._confirming.add(task)
            task.add_done_callback(self._confirming.discard)

    async def _confirm(self, coordinator: str, ticket: bytes) -> None:
        with contextlib.suppress(Unreached, LogError):  # then it is returned again
            await self._transport.confirm(coordinator, ticket)
