"""The broker's ASGI application: it matches every request against the table of routes, and serves
the hot routes itself.

FastAPI costs about three times as much per request as the same work here (storage/DESIGN.md section
12), and produce, fetch and consumer instances are most of all requests. All other routes go on to
the FastAPI application, which has them from the same table.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

from starlette.exceptions import HTTPException

from tidelog.service.console import api, files
from tidelog.service.http.admission import Admission, Limits
from tidelog.service.http.call import HttpRequest, HttpResponse, Receive, Scope, Send
from tidelog.service.http.errors import CrossSite, answered
from tidelog.service.http.route import Access, Permission, Route, RouteAccess
from tidelog.service.peers.forwarding import Forwarded, ForwardedCall, Forwarder
from tidelog.service.routes import (
    acls_v3,
    cluster_v3,
    configs_v3,
    consumer_routes,
    consumers,
    fetch,
    groups_v3,
    health,
    keys,
    produce,
    produce_v3,
    topics,
    topics_v3,
    transactions,
)
from tidelog.service.security.authenticator import READING, Security
from tidelog.service.settings import Settings
from tidelog.service.telemetry.metrics import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import CLUSTER_NAME
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.observer import PRINCIPAL
from tidelog.storage.groups.instances import Instances
from tidelog.storage.io.threads import TASK_ENDS

HOT_ROUTES: tuple[Route, ...] = (
    *produce.ROUTES,
    *fetch.ROUTES,
    *produce_v3.ROUTES,
    *transactions.ROUTES,
    *consumer_routes.ROUTES,
)
APP_ROUTES: tuple[Route, ...] = (
    *health.ROUTES,
    *topics.ROUTES,
    *api.ROUTES,
    *keys.ROUTES,
    *files.ROUTES,
    *cluster_v3.ROUTES,
    *configs_v3.ROUTES,
    *topics_v3.ROUTES,
    *groups_v3.ROUTES,
    *acls_v3.ROUTES,
)
ACK_LABELS = frozenset(route.label for route in HOT_ROUTES if route.is_ack)

ADDRESSES_MIN = 1000
"""With fewer connections than this, one address may have all."""

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler: TypeAlias = Callable[..., Awaitable[HttpResponse | None]]


def limits_of(settings: Settings, connections_max: int | None = None) -> Limits:
    """Return the limits of the listener for clients; `connections_max` is by open files."""
    most = settings.connections_max if connections_max is None else connections_max
    return Limits(
        connections_max=most,
        unproved_max=most,
        address_max=most if most < ADDRESSES_MIN else most // 4,
        spare_max=max(4, min(64, most // 16)),
        bodies_bytes_max=settings.buffer_bytes_max,
        answers_bytes_max=settings.fetch_bytes_in_flight,
    )


class Target(NamedTuple):
    """A route in the tree."""

    route: Route
    serve: Handler | None
    """None: the FastAPI application serves it."""
    positions: tuple[int, ...]
    """Of the path's parameters, among its segments."""
    name_at: int | None
    """The position of the name that the route's permission is about; None: the cluster."""


_Paths: TypeAlias = list[tuple[list[str], Target]]
"""The segments of a path, and its route."""


class Node:
    """All routes whose paths begin with the same segments."""

    __slots__ = ("methods", "parameter", "rest", "words")

    def __init__(self, paths: _Paths, depth: int = 0) -> None:
        longer = [each for each in paths if len(each[0]) > depth]
        parameters = [each for each in longer if _is_parameter(each[0][depth])]
        self.words: dict[str, Node] = {}
        """By the next segment, where that is a word of a route."""
        for word in {path[depth] for path, _ in longer if path[depth][0] != "{"}:
            # Routes with a parameter here fit a word, too. They are part of the word's node, so
            # that a lookup never has to go back.
            words = [each for each in longer if each[0][depth] == word]
            self.words[word] = Node(words + parameters, depth + 1)
        self.parameter = Node(parameters, depth + 1) if parameters else None
        """For every other segment."""
        rests = [each for each in longer if each[0][depth].endswith(":path}")]
        self.rest = (
            Node([(path[:depth], target) for path, target in rests], depth) if rests else None
        )
        """For any number of other segments."""
        self.methods: dict[str, Target] = {}
        """The routes that end here. If two fit, the one with more words wins."""
        ending = [target for path, target in paths if len(path) == depth]
        for target in sorted(ending, key=lambda each: len(each.positions)):
            self.methods.setdefault(target.route.method, target)

    def find(self, path: str) -> "tuple[Node | None, list[str]]":
        """Return the node of a path, and the path's segments."""
        segments = path.split("/")[1:]
        if "" in segments:
            # Clients send `//topics/x` and `/topics/x/`; both mean `/topics/x`.
            segments = [*filter(None, segments)]
        node = self
        for segment in segments:
            following = node.words.get(segment) or node.parameter
            if following is None:
                return node.rest, segments
            node = following
        return node, segments


class Router:
    """One per process. `app` serves the routes that are not hot."""

    def __init__(
        self,
        app: AsgiApp,
        broker: Broker,
        settings: Settings,
        counters: HttpCounters,
        instances: Instances,
        forwarder: Forwarder | None = None,
        security: Security | None = None,
        admission: "Admission[Any] | None" = None,
    ) -> None:
        self._app = app
        self.admission = admission or Admission(limits_of(settings))
        """Of the listener that this serves."""
        self._security = security
        self._counters = counters
        fetcher = fetch.Fetch(broker, settings, counters, self.admission.answers)
        producer = produce.Produce(broker, settings, counters)
        self.consumers = consumers.ConsumerHandlers(broker, settings, instances, fetcher, forwarder)
        self.forwarded = Forwarded(self._serve_for_peer)
        """Serves the requests that other brokers forward to this one."""
        producer_v3 = produce_v3.ProduceV3(broker, settings, producer, counters)
        transactor = transactions.Transactions(broker, settings, producer, counters)
        self._root = Node(
            [
                *_paths(produce.ROUTES, lambda route: MethodType(route.serve, producer)),
                *_paths(fetch.ROUTES, lambda route: MethodType(route.serve, fetcher)),
                *_paths(produce_v3.ROUTES, lambda route: MethodType(route.serve, producer_v3)),
                *_paths(transactions.ROUTES, lambda route: MethodType(route.serve, transactor)),
                *_paths(consumer_routes.ROUTES, self.consumers.bound),
                *_paths(APP_ROUTES, lambda _: None),
            ]
        )
        self._forwarded_root = Node([*_paths(consumer_routes.ROUTES, self.consumers.bound_here)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        node, segments = self._root.find(scope["path"])
        target = None if node is None else node.methods.get(scope["method"])
        refusal: Exception | None = None
        if scope["method"] not in READING and _is_cross_site(scope["headers"]):
            refusal = CrossSite()
        elif self._security is not None and not _is_health(target):
            refusal = await _refusal(self._security, scope, node, target, segments)
        if refusal is None and target is None and node is not None and node.methods:
            refusal = HTTPException(405, headers={"Allow": ", ".join(sorted(node.methods))})
        if refusal is not None:
            await self._refuse(target, HttpRequest(scope, receive, send), refusal)
        elif target is None or target.serve is None:
            scope["bodies"] = self.admission.bodies
            await self._app(scope, receive, send)
        else:
            bodies = self.admission.bodies
            await self._serve(target, segments, HttpRequest(scope, receive, send, bodies))

    async def _serve(self, target: Target, segments: list[str], call: HttpRequest) -> None:
        assert target.serve is not None, "FastAPI serves the others"
        started = time.perf_counter()
        try:
            response = await target.serve(call, *[segments[at] for at in target.positions])
            if response is not None:
                await call.answer(response)
        except TASK_ENDS:
            raise
        except BaseException as error:  # noqa: BLE001 the root of a request; `answered` logs it
            await self._answer_error(call, error)
        finally:
            call.release()
        took = time.perf_counter() - started - call.waited_s
        self._counters.observe(target.route.label, call.status, max(took, 0.0))

    async def _refuse(self, target: Target | None, call: HttpRequest, refusal: Exception) -> None:
        started = time.perf_counter()
        await self._answer_error(call, refusal)
        label = "other" if target is None else target.route.label
        self._counters.observe(label, call.status, time.perf_counter() - started)

    async def _serve_for_peer(self, call: ForwardedCall) -> None:
        """Serve a request that another broker has forwarded.

        Its errors are counted and logged here, as those of every other request; the other broker
        counts the request and its latency.
        """
        node, segments = self._forwarded_root.find(call.scope["path"])
        target = None if node is None else node.methods.get(call.scope["method"])
        try:
            if target is None or target.serve is None:
                raise HTTPException(404)
            if self._security is not None:
                call.scope["rights"] = self._security.of_peer(*call.caller)
                PRINCIPAL.set(call.scope["rights"].principal)
            response = await target.serve(call, *[segments[at] for at in target.positions])
            if response is not None:
                await call.answer(response)
        except Exception as error:  # noqa: BLE001 the root of a request; `answered` logs it
            await self._answer_error(call, error)

    async def _answer_error(self, call: HttpRequest, error: BaseException) -> None:
        scope = call.scope
        answer = answered(error, f"{scope['method']} {scope['path']}", self._counters)
        if not call.status:  # else half a response is sent
            await call.answer(answer.response(scope["path"]))


async def _refusal(
    security: Security,
    scope: Scope,
    node: Node | None,
    target: Target | None,
    segments: list[str],
) -> LogError | None:
    """Return why the caller has no access. FastAPI's routes check their permissions themselves
    (_Check in service.server.app): the route that is served is the one that counts."""
    name: str | None = None
    access: Access = RouteAccess.ANY_KEY
    if target is not None:
        access = target.route.access
        if target.serve is not None and isinstance(access, Permission):
            name = CLUSTER_NAME if target.name_at is None else segments[target.name_at]
    elif node is not None and node.methods:
        # A public path shows its methods to every client.
        accesses = {each.route.access for each in node.methods.values()}
        access = RouteAccess.PUBLIC if accesses == {RouteAccess.PUBLIC} else access
    return await security.admit(scope, access, name)


def _is_health(target: Target | None) -> bool:
    """Whether the route is served whatever key is sent: a probe with an old key must not end the
    broker."""
    if target is None or target.route.access is not RouteAccess.PUBLIC:
        return False
    return target.route.label == "health"


def _paths(
    routes: Iterable[Route], bind: Callable[[Route], Handler | None]
) -> Iterator[tuple[list[str], Target]]:
    """Iterate over the paths of routes, under every mount; `bind` returns a route's handler."""
    for route in routes:
        serve = bind(route)
        for path in route.paths:
            segments = [*filter(None, path.split("/"))]
            positions = tuple(at for at, each in enumerate(segments) if each[0] == "{")
            name_at = None
            if isinstance(route.access, Permission) and route.access.parameter:
                name_at = segments.index(f"{{{route.access.parameter}}}")
            yield segments, Target(route, serve, positions, name_at)


def _is_parameter(segment: str) -> bool:
    return segment[0] == "{" and not segment.endswith(":path}")


def _is_cross_site(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a browser sends the request for a page of another site. All current browsers send
    this header. Without security there is no login that the page would lack, and a request that
    looks like a form's needs no permission (CORS)."""
    return (b"sec-fetch-site", b"cross-site") in headers
