"""Forwarding of consumer instances' requests to the group's coordinator.

A client sends requests for an instance to any broker. If another broker coordinates the instance's
group, the client's broker forwards the whole request, and returns the coordinator's whole answer.
For the coordinator, the records of a read are delivered only after the forwarding broker confirms
that they have arrived at its client (`settle`, service.http.answer_arrival). If they are lost, the
forwarding broker says so, and the coordinator returns the same records again. The instance's next
read waits for this message, at most `SETTLED_S`. If the client leaves before the answer, the
forwarding broker closes its connection to the coordinator, which ends the read. Otherwise a client
that gives up reads would wait for one read after another, and might never get an answer.

A coordinator that stops refuses a request that arrives after the release of its groups
(storage.groups.group_release): the forwarding broker then asks the next coordinator.

**On a coordinator crash**: if the coordinator cannot be reached, it has not received the request,
and this broker takes over the group. If the coordinator does not answer, the outcome is unknown,
and the client receives an error that asks for a retry.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec

from tidelog.service.http.answer_arrival import Arrival
from tidelog.service.http.request import ClientGone, HttpRequest, Scope
from tidelog.service.memory_pool import MemoryPool, Share
from tidelog.service.peers.client import GROUP_ARRIVED, GROUP_LOST, GROUP_REQUEST, HttpPeers, Room
from tidelog.service.security.caller import CallerRights, address_of, rights_of
from tidelog.storage.broker import Members
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import ForwardOutcomeUnknown, ForwardRefused
from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.core.model import Part

T = TypeVar("T")

SETTLED_S = 5.0
"""Longest wait for the message whether an answer has arrived."""
TAKEN_MAX = 2_000
"""Most forwarded requests under way at a coordinator, of the connections for peers (CONNECTIONS_MAX
of service.peers.listener). The rest is for drafts and announcements. Principals share them."""
FORWARDED_MAX = 1_000
"""Most requests that a broker has under way at one coordinator. Principals share them."""
LOOK_S = 0.5
"""Interval at which a pending request checks whether the coordinator is still alive."""
SECRET_HEADERS = (b"authorization", b"cookie")
NO_BODY = memoryview(b"")


class Unreached(Exception):
    """The coordinator has certainly not begun the request, or may not know of the arrival.

    It may not have received the message whether an answer has arrived.
    """


class CoordinatorTransport(Protocol):
    """Transport to the broker that the cluster state names as a group's coordinator."""

    async def request(self, coordinator: str, message: bytes, room: Room | None) -> Part:
        """Call `Forwarded.take` on the coordinator.

        Wait for `room` before a large answer is read. Raises Unreached. Raises Unavailable if the
        outcome is unknown.
        """

    async def settle(self, coordinator: str, ticket: bytes, *, has_arrived: bool) -> None:
        """Call `Forwarded.settle` on the coordinator.

        Raises Unreached, also if the outcome is unknown.
        """


class _Request(msgspec.Struct, array_like=True):
    """A forwarded request.

    `caller` is the principal and the address that the forwarding broker authenticated. Both are
    empty if security is off on that broker. `proof` has the ids of the key and of the session, and
    the time in ms when they end (0 if they do not end). `address` is the client's address, even if
    security is off. Version 0.1 sends neither `proof` nor `address`. Brokers do not forward
    secrets.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    scheme: str
    server: tuple[str, int | None]
    body: bytes
    caller: tuple[str, str] = ("", "")
    proof: tuple[str, str, int] = ("", "", 0)
    address: str = ""


class _Response(msgspec.Struct, array_like=True):
    """The answer to a forwarded request.

    `ticket` is empty if the coordinator need not know whether the answer arrives. Versions before
    0.2 do not know `is_refused`. `body` is a view of the message, because it may be large.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: memoryview
    ticket: bytes = b""
    is_refused: bool = False
    """Whether the coordinator has given up its groups, and has not begun the request."""


_encode = msgspec.msgpack.encode
_requests = msgspec.msgpack.Decoder(_Request)
_responses = msgspec.msgpack.Decoder(_Response)


def _decode(decoder: msgspec.msgpack.Decoder[T], message: Part) -> T:
    """Raises msgspec.DecodeError."""
    try:
        return decoder.decode(message)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _slot(pool: MemoryPool, principal: str, activity: str) -> Share:
    """Hold one of the requests that may be under way at a time. Raises Unavailable."""
    slot = Share(pool, principal)
    if not slot.set(1):
        raise Unavailable(
            f"{pool.used} requests {activity}; principals share {pool.limit}: try again later, "
            "or at the coordinator"
        )
    return slot


class ForwardedCall(HttpRequest):
    """A request whose client is connected to another broker.

    `response` collects the whole answer for that broker.
    """

    __slots__ = (
        "answered",
        "caller",
        "has_arrived",
        "is_awaited",
        "is_trusted",
        "proof",
        "response",
    )

    def __init__(self, request: _Request, *, is_trusted: bool) -> None:
        scope: Scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "query_string": request.query,
            "headers": request.headers,
            "scheme": request.scheme,
            "server": request.server,
            "client": (request.address, 0),
        }
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.has_arrived: asyncio.Future[bool] = loop.create_future()
        self.is_awaited = False
        self.caller, self.proof, self.is_trusted = request.caller, request.proof, is_trusted
        response = _Response(0, [], NO_BODY)
        bodies, has_arrived = [request.body], self.has_arrived

        async def receive() -> Any:  # without a reference to the call, which refers to it
            if not bodies:
                await asyncio.wait({has_arrived})
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = message["headers"]
            else:
                response.body = memoryview(message["body"])

        super().__init__(scope, receive, send)
        self.response = response

    def refuse(self) -> None:
        """Tell the forwarding broker that this broker has not begun the request, and will not."""
        self.response.is_refused = True

    async def until_delivered(self) -> None:
        self.is_awaited = True
        self.answered.set_result(None)
        async with asyncio.timeout(SETTLED_S):
            if not await self.has_arrived:
                raise ClientGone

    def settle(self, *, has_arrived: bool) -> None:
        """Note the end of the exchange with the client."""
        if not self.has_arrived.done():
            self.has_arrived.set_result(has_arrived)


class Forwarded:
    """The coordinator's side of forwarding: serves requests that peers forward.

    `serve` must also answer a request that fails. A principal has a share of the requests under
    way, however many brokers forward its requests.
    """

    def __init__(self, serve: Callable[[ForwardedCall], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._calls: dict[bytes, ForwardedCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = MemoryPool(TAKEN_MAX)

    def take(
        self,
        message: bytes,
        ticket: bytes,
        *,
        is_trusted: bool = False,
        until_gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Coroutine[Any, Any, bytes]:
        """Decode a request that a peer forwarded.

        Return the coroutine that serves it, which needs the message no more, and which raises
        Unavailable. `ticket` is a unique id of the request. Without `is_trusted`, a broker with
        security on refuses the request, because the sender is perhaps no broker. `until_gone`
        returns when the peer waits for the answer no more. Raises msgspec.DecodeError.
        """
        call = ForwardedCall(_decode(_requests, message), is_trusted=is_trusted)
        return self._taken(call, ticket, until_gone)

    async def _taken(
        self,
        call: ForwardedCall,
        ticket: bytes,
        until_gone: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> bytes:
        activity = "of other brokers are under way at the group's coordinator"
        slot = _slot(self._under_way, call.caller[0], activity)
        task = asyncio.create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: slot.end())
        watching = None if until_gone is None else asyncio.create_task(until_gone())
        if watching is not None:
            watching.add_done_callback(
                lambda ended: None if ended.cancelled() else call.settle(has_arrived=False)
            )
        try:
            await asyncio.wait({task, call.answered}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            if watching is not None:
                watching.cancel()
        response = call.response
        if call.is_awaited:
            self._calls[ticket] = call
            task.add_done_callback(lambda _: self._calls.pop(ticket, None))
            response.ticket = ticket
        message = _encode(response)
        response.body = NO_BODY  # the call may wait for its end
        return message

    def settle(self, ticket: bytes, *, has_arrived: bool) -> None:
        """Note whether the answer has arrived at the client of the forwarding broker."""
        call = self._calls.get(ticket)
        if call is not None:
            call.settle(has_arrived=has_arrived)


class Forwarder:
    """The other brokers' side of forwarding: sends requests to the coordinator."""

    def __init__(self, transport: CoordinatorTransport) -> None:
        self._transport = transport
        self._under_way: dict[str, MemoryPool] = {}
        """By coordinator: its requests under way, shared by principal."""
        self._settling: set[asyncio.Task[None]] = set()

    async def ask(
        self, call: HttpRequest, coordinator: str, body: bytes, room: Room
    ) -> Callable[[], Awaitable[None]]:
        """Forward the call.

        Return a function that sends the coordinator's answer to the client of the call, and that
        raises ClientGone. The answer has its memory from `room`. Raises Unreached, Unavailable.
        """
        server = call.scope.get("server") or ("localhost", None)
        rights = rights_of(call.scope)
        request = _Request(
            call.scope["method"],
            call.scope["path"],
            call.scope["query_string"],
            [pair for pair in call.scope["headers"] if pair[0] not in SECRET_HEADERS],
            call.scope.get("scheme", "http"),
            (server[0], server[1]),
            body,
            (rights.principal, rights.host),
            rights.proof,
            address_of(call.scope),
        )
        with self._slot(rights.principal, coordinator):
            response = await self._ask(coordinator, request, room)
        return partial(self._answer, call, coordinator, response)

    @contextlib.contextmanager
    def _slot(self, principal: str, coordinator: str) -> Iterator[None]:
        """Hold one of the requests under way to the coordinator.

        Each takes a connection there, and brokers need some for their records. Raises Unavailable.
        """
        pool = self._under_way.setdefault(coordinator, MemoryPool(FORWARDED_MAX))
        slot = _slot(pool, principal, "wait here for the group's coordinator")
        try:
            yield
        finally:
            slot.end()
            if not pool.used:
                self._under_way.pop(coordinator, None)

    async def _answer(self, call: HttpRequest, coordinator: str, response: _Response) -> None:
        """Send the coordinator's answer, and tell it whether the answer arrives, in any case."""
        is_sent, arrival = False, None
        try:
            rights_of(call.scope).check_valid()  # send no records if the key was deleted meanwhile
            arrival = call.watch() if response.ticket else None
            is_sent = True
            call.status = response.status
            headers = [(bytes(name), bytes(text)) for name, text in response.headers]
            start = {"type": "http.response.start", "status": response.status, "headers": headers}
            await call.send(start)
            await call.send({"type": "http.response.body", "body": response.body})
        finally:
            if response.ticket:
                settling = self._settle(coordinator, response.ticket, arrival, is_sent=is_sent)
                task = asyncio.create_task(settling)
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    async def get(self, rights: CallerRights, coordinator: str, path: str) -> bytes:
        """Return the body of a coordinator's answer to a GET that only brokers send.

        Raises Unreached. Raises Unavailable if no answer comes, or if its status is not 200 (the
        coordinator has a version without the route).
        """
        identity, none = (rights.principal, rights.host), ("", None)
        request = _Request("GET", path, b"", [], "http", none, b"", identity, rights.proof)
        response = await self._ask(coordinator, request)
        if response.status != HTTPStatus.OK:
            raise Unavailable(f"the group's coordinator answered {path} with {response.status}")
        return bytes(response.body)

    async def _ask(
        self, coordinator: str, request: _Request, room: Room | None = None
    ) -> _Response:
        try:
            answer = await self._transport.request(coordinator, _encode(request), room)
            response = _decode(_responses, answer)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"invalid response from the group's coordinator: {error}") from error
        if response.is_refused:
            raise Unreached(f"broker {coordinator} has given up its groups")
        if not response.status:
            raise Unavailable("no response from the group's coordinator: retry")
        return response

    async def _settle(
        self, coordinator: str, ticket: bytes, arrival: Arrival | None, *, is_sent: bool
    ) -> None:
        # If the coordinator gets no message, the next read waits, and returns the records again.
        has_arrived = is_sent and (arrival is None or await arrival.has_arrived())
        with contextlib.suppress(Unreached, LogError):
            await self._transport.settle(coordinator, ticket, has_arrived=has_arrived)


class GroupPeers:
    """Transport through the port for peers. Owned by one event loop; lives as long as the broker.

    If a coordinator was reached and does not answer, the caller waits until the coordinator answers
    or is no longer among the live peers, because only the coordinator knows the outcome.
    """

    def __init__(self, members: Callable[[], Members], peers: HttpPeers) -> None:
        self._members = members
        self._peers = peers

    async def request(self, coordinator: str, message: bytes, room: Room | None) -> Part:
        peer = self._peer(coordinator)
        pending = asyncio.create_task(self._peers.post(peer, GROUP_REQUEST, message, room))
        try:
            while not pending.done():
                await asyncio.wait({pending}, timeout=LOOK_S)
                if not pending.done() and not self._is_live(coordinator):
                    raise Unavailable(f"broker {peer.name}, the group's coordinator, is not alive")
            return pending.result()
        except ForwardRefused as error:
            raise Unreached(str(error)) from error
        except ForwardOutcomeUnknown as error:
            raise Unavailable(f"no response from the group's coordinator: {error}") from error
        finally:
            pending.cancel()

    async def settle(self, coordinator: str, ticket: bytes, *, has_arrived: bool) -> None:
        peer = self._peer(coordinator)
        try:
            async with asyncio.timeout(SETTLED_S):
                # A broker of an older version does not know GROUP_LOST, and waits.
                path = GROUP_ARRIVED if has_arrived else GROUP_LOST
                _ = await self._peers.post(peer, path, ticket)
        except (ForwardRefused, ForwardOutcomeUnknown, TimeoutError) as error:
            raise Unreached(str(error)) from error

    def _peer(self, coordinator: str) -> Member:
        for peer in self._members().peers:
            if peer.id == coordinator:
                return peer
        raise Unreached(f"broker {coordinator} is not alive")

    def _is_live(self, coordinator: str) -> bool:
        return any(peer.id == coordinator for peer in self._members().peers)
