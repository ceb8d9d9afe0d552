"""The broker's ASGI application, which takes every request the same way.

It finds the route, admits the request, checks the caller's right, calls the handler, answers,
counts.

A handler of a hot route (produce, fetch, consumer instances) takes the request as it is, because
FastAPI costs about three times as much per request (DESIGN 12). FastAPI declares
the other routes (service.server.app); their handlers are called in the same way.
"""

import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from starlette.exceptions import HTTPException

from tidelog.service.codec_threads import UnpackThreads
from tidelog.service.console import api, cluster_health, files, groups, kafka_clients
from tidelog.service.http.body_limit import set_limit
from tidelog.service.http.connection_admission import Limits, address_max
from tidelog.service.http.cors import Cors, exposing
from tidelog.service.http.errors import answered
from tidelog.service.http.media_types import JSON, NotAcceptable, is_served, not_acceptable
from tidelog.service.http.parameters import InvalidParameter, check_printable
from tidelog.service.http.request import BodyMemory, HttpRequest, HttpResponse, Receive, Scope, Send
from tidelog.service.http.request_id import REQUEST_ID, id_of_error
from tidelog.service.http.route import Access, Permission, Route, RouteAccess
from tidelog.service.http.urls import clean_path
from tidelog.service.operations.operations import Operations
from tidelog.service.peers.forwarding import Forwarded, ForwardedCall
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.routes import (
    acls_v3,
    broker_info,
    cluster_v3,
    configs_v3,
    consumers_v2,
    consumers_v2_routes,
    fetch,
    groups_v3,
    health,
    iceberg,
    keys,
    login,
    produce,
    produce_v3,
    quotas,
    retention_preview,
    topics_v2,
    topics_v3,
    transactions,
)
from tidelog.service.routes import follow_topic as topic_follower
from tidelog.service.routes import topic_maintenance as topic_upkeep
from tidelog.service.security.audit import Audit, AuditedRequest
from tidelog.service.security.authenticator import READING, Security
from tidelog.service.security.caller import ALL_RIGHTS, charge_request, rights_of
from tidelog.service.security.origin_check import Sites
from tidelog.service.security.request_cpu_time import measured
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import CLUSTER_NAME
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.state.access import REQUEST_PERCENTAGE

HOT_ROUTES: tuple[Route, ...] = (
    *produce.ROUTES,
    *fetch.ROUTES,
    *topic_follower.ROUTES,
    *produce_v3.ROUTES,
    *transactions.ROUTES,
    *consumers_v2_routes.ROUTES,
)
APP_ROUTES: tuple[Route, ...] = (
    *health.ROUTES,
    *broker_info.ROUTES,
    *topics_v2.ROUTES,
    *api.ROUTES,
    *groups.ROUTES,
    *cluster_health.ROUTES,
    *kafka_clients.ROUTES,
    *login.ROUTES,
    *keys.ROUTES,
    *quotas.ROUTES,
    *files.ROUTES,
    *cluster_v3.ROUTES,
    *configs_v3.ROUTES,
    *topics_v3.ROUTES,
    *groups_v3.ROUTES,
    *acls_v3.ROUTES,
    *topic_upkeep.ROUTES,
    *retention_preview.ROUTES,
    *iceberg.ROUTES,
)
ACK_LABELS = frozenset(route.label for route in HOT_ROUTES if route.is_ack)

KEEP_ALIVE_S = 130.0
"""Time after which a broker closes an idle connection. It must be longer than the idle time of
balancers (AWS: 120 s in our files), else a balancer may send a request on a connection that the
broker closes at this moment, and answer 502."""
NAMES_IN_ERRORS = {"consumer_group_id": "group_name"}
"""The names of path parameters in Redpanda's messages, where these names are not the path's."""

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, HttpResponse | None]]
T = TypeVar("T")


def limits_of(settings: RequestSettings, connections_max: int | None = None) -> Limits:
    """Return the limits of the listener for clients.

    `connections_max` is the number that the limit of open files allows.
    """
    most = settings.connections_max if connections_max is None else connections_max
    return Limits(
        connections_max=most,
        unproved_max=most,
        address_max=address_max(most),
        spare_max=max(4, min(64, most // 16)),
        bodies_bytes_max=max(settings.buffer_bytes_max // 2, 2 * settings.request_bytes_max),
        answers_bytes_max=settings.fetch_bytes_in_flight,
        idle_s=KEEP_ALIVE_S,
        unproved_idle_s=KEEP_ALIVE_S,
    )


class DeclaredRoutes(Protocol):
    """The application with the routes that FastAPI declares (service.server.app)."""

    @property
    def handlers(self) -> Iterable[tuple[Route, Handler]]: ...

    @property
    def operations(self) -> Operations: ...

    @property
    def held_members(self) -> HeldMembers: ...


class Target(NamedTuple):
    """A route in the tree."""

    route: Route
    serve: Handler
    positions: tuple[int, ...]
    """The positions of the path's parameters among its segments."""
    names: tuple[str, ...]
    """The names of these parameters in error messages."""
    name_at: int | None
    """The position of the name of the resource that the route's permission is for. None if this
    resource is the cluster."""
    has_rest: bool
    """Whether the last parameter is the rest of the path."""
    is_declared: bool
    """Whether FastAPI declares the route."""

    def parameters(self, segments: list[str]) -> list[str]:
        """Return the path's parameters."""
        if self.has_rest:
            first = self.positions[-1]
            segments = [*segments[:first], "/".join(segments[first:])]
        return [segments[position] for position in self.positions]


_Paths: TypeAlias = list[tuple[list[str], Target]]
"""The segments of a path, and its route."""


class PathNode:
    """All routes whose paths begin with the same segments."""

    __slots__ = ("methods", "parameter", "rest", "words")

    def __init__(self, paths: _Paths, depth: int = 0) -> None:
        longer = [pair for pair in paths if len(pair[0]) > depth]
        parameters = [pair for pair in longer if _is_parameter(pair[0][depth])]
        self.words: dict[str, PathNode] = {}
        """The next nodes, by a segment that is a word of a route."""
        for word in {path[depth] for path, _ in longer if path[depth][0] != "{"}:
            # Routes with a parameter here fit a word, too. They are part of the word's node, so
            # that a lookup never has to go back.
            words = [pair for pair in longer if pair[0][depth] == word]
            self.words[word] = PathNode(words + parameters, depth + 1)
        self.parameter = PathNode(parameters, depth + 1) if parameters else None
        """The next node for every other segment."""
        rests = [pair for pair in longer if pair[0][depth].endswith(":path}")]
        self.rest = (
            PathNode([(path[:depth], target) for path, target in rests], depth) if rests else None
        )
        """The node for any number of other segments."""
        self.methods: dict[str, Target] = {}
        """The routes that end here, by method. Of two routes with the same method, the route with
        more words is taken."""
        ending = [target for path, target in paths if len(path) == depth]
        for target in sorted(ending, key=lambda target: len(target.positions)):
            self.methods.setdefault(target.route.method, target)
        if "GET" in self.methods:
            self.methods.setdefault("HEAD", self.methods["GET"])

    @property
    def allowed(self) -> list[str]:
        """The methods of the path, sorted."""
        return sorted({*self.methods, "OPTIONS"})

    def find(self, path: str) -> "tuple[PathNode | None, list[str]]":
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
    """The ASGI application of one broker process, which also answers errors.

    `app` has the handlers of the routes that are not hot, and what all handlers share.
    """

    def __init__(
        self,
        app: DeclaredRoutes,
        broker: Broker,
        settings: Settings,
        counters: HttpCounters,
        security: Security | None = None,
        threads: UnpackThreads | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.admission = counters.admission
        threads = threads or UnpackThreads()
        self._bodies = BodyMemory(self.admission.bodies, threads)
        self._clock = broker.clock
        self._cors = Cors(settings.cors_origin_names) if settings.cors_origins else None
        self._security = security
        self.proves_by_head = security is None
        """Whether the head of any request proves its connection (A3 of connection_admission)."""
        self._sites = Sites(settings)
        self._audit = audit
        self.counters = counters
        fetcher = fetch.Fetch(broker, settings, counters, self.admission.answers, threads)
        follower = topic_follower.TopicFollower(broker, fetcher)
        producer = produce.Produce(
            broker, app.operations.topics, settings, counters, threads, audit
        )
        self.consumers = consumers_v2.ConsumerHandlers(
            broker, settings, app.operations, app.held_members, fetcher
        )
        self.forwarded = Forwarded(self._serve_for_peer)
        """Serves the requests that other brokers forward to this one."""
        producer_v3 = produce_v3.ProduceV3(broker, settings, producer, counters)
        transactor = transactions.Transactions(
            broker, app.operations.records, settings, producer, counters
        )
        self._root = PathNode(
            [
                *_paths(_methods(produce.ROUTES, producer)),
                *_paths(_methods(fetch.ROUTES, fetcher)),
                *_paths(_methods(topic_follower.ROUTES, follower)),
                *_paths(_methods(produce_v3.ROUTES, producer_v3)),
                *_paths(_methods(transactions.ROUTES, transactor)),
                *_paths(
                    (route, self.consumers.bound(route)) for route in consumers_v2_routes.ROUTES
                ),
                *_paths(app.handlers, is_declared=True),
            ]
        )
        for_peers = (*consumers_v2_routes.ROUTES, *consumers_v2_routes.PEER_ROUTES)
        self._forwarded_root = PathNode(
            [*_paths((route, self.consumers.bound_here(route)) for route in for_peers)]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._security is None:
            scope["rights"] = ALL_RIGHTS
        node, segments = self._root.find(scope["path"])
        method: str = scope["method"]
        target = None if node is None else node.methods.get(method)
        call = HttpRequest(scope, receive, send, self._bodies)
        headers = call.headers
        origin = b""
        if self._cors is not None and (origin := self._cors.origin(headers)):
            if node is not None and _is_preflight(scope):
                preflight = HttpResponse(204, b"", JSON, self._cors.preflight(origin, node.allowed))
                await call.answer(preflight)
                return
            call.send = exposing(call.send, origin)
        if method == "HEAD":
            call.send = _without_body(call.send)
        refusal: Exception | None = None
        if (
            headers.get(b"host") not in self._sites.known
            or b"origin" in headers
            or b"sec-fetch-site" in headers
        ):
            refusal = self._site_refusal(call, target, is_allowed=origin != b"")
        if refusal is None and self._security is not None and not _is_health(target):
            refusal = await _refusal(self._security, scope, node, target, segments)
            if "prove" in scope and "rights" in scope:
                scope["prove"](rights_of(scope).principal)
        if refusal is None and (target is None or not scope["path"].isprintable()):
            refusal = _refusal_of_path(method, node, target, segments)
        if refusal is None and target is not None and method not in READING:
            refusal = _refusal_of_accept(target, headers)
        if refusal is not None:
            await self._refuse(target, call, refusal)
        elif target is None:
            assert node is not None, "else the path is refused"
            allow = ((b"allow", ", ".join(node.allowed).encode()),)
            await call.answer(HttpResponse(204, b"", JSON, allow))
        else:
            set_limit(scope, target.route.body)
            work = self._serve(target, segments, call)
            if self._audit is not None and target.is_declared and not _is_reading(method, target):
                work = self._audit.change(work, call)
            await self._measured(call, work)

    def _measured(self, call: HttpRequest, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return work if self._security is None else measured(rights_of(call.scope), work)

    def _site_refusal(
        self, call: HttpRequest, target: Target | None, *, is_allowed: bool
    ) -> LogError | None:
        """Return the error if the request's `Host` or `Origin` is refused.

        `is_allowed` means that pages of this origin may use the API (`cors_origins`).
        """
        is_reading = call.scope["method"] in READING
        if is_reading and target is not None and target.route.access is RouteAccess.PUBLIC:
            return None  # health checks may use any host name
        # Each GET of an instance is a heartbeat, and a read moves its positions.
        is_instance = target is not None and target.route in consumers_v2_routes.ROUTES
        has_effects = (not is_reading or is_instance) and not is_allowed
        return self._sites.refusal(call.scope, call.headers, has_effects=has_effects)

    async def _serve(self, target: Target, segments: list[str], call: HttpRequest) -> None:
        started = time.perf_counter()
        try:
            response = await target.serve(call, *target.parameters(segments))
            if response is not None:
                await call.answer(response)
        except TASK_ENDS:
            raise
        except BaseException as error:  # noqa: BLE001 no caller handles it; `answered` logs it
            await self._answer_error(call, error)
        finally:
            call.release()
        took = time.perf_counter() - started - call.waited_s
        self.counters.observe(target.route.label, call.status, max(took, 0.0))

    async def _refuse(self, target: Target | None, call: HttpRequest, refusal: Exception) -> None:
        started = time.perf_counter()
        await self._answer_error(call, refusal)
        label = "other" if target is None else target.route.label
        self.counters.observe(label, call.status, time.perf_counter() - started)

    async def _serve_for_peer(self, call: ForwardedCall) -> None:
        """Serve a request that another broker has forwarded.

        This broker counts and logs the errors of the request, as of every other request. The other
        broker counts the request and its latency.
        """
        node, segments = self._forwarded_root.find(call.scope["path"])
        target = None if node is None else node.methods.get(call.scope["method"])
        try:
            if target is None:
                raise HTTPException(404)
            if self._security is None:
                call.scope["rights"] = ALL_RIGHTS
            else:
                if not call.is_trusted:
                    raise self._security.refused("peer", "a peer's message is not signed")
                rights = await self._security.of_peer(*call.caller, call.proof)
                call.scope["rights"] = rights
                PRINCIPAL.set(call.scope["rights"].principal)
                rights.charge(REQUEST_PERCENTAGE)
            set_limit(call.scope, target.route.body)
            serving = target.serve(call, *target.parameters(segments))
            response = await self._measured(call, serving)
            if response is not None:
                await call.answer(response)
        except Exception as error:  # noqa: BLE001 no caller handles it; `answered` logs it
            await self._answer_error(call, error)

    async def _answer_error(self, call: HttpRequest, error: BaseException) -> None:
        scope = call.scope
        request_id = id_of_error(call.headers.get(REQUEST_ID, b""), self._clock)
        answer = answered(error, scope, self.counters, request_id)
        if self._audit is not None:
            self._audit.refused(error, partial(AuditedRequest.of_http, scope))
        if not call.status:  # with a status, half a response is sent already
            call.headers[REQUEST_ID] = request_id.encode()
            await call.answer(answer.response(clean_path(scope["path"])))


def _refusal_of_accept(target: Target, headers: Mapping[bytes, bytes]) -> NotAcceptable | None:
    """Return the error if the client of a change does not take its answer.

    A GET with an unknown Accept is served, as RFC 9110 allows. Only GET routes with several formats
    refuse it.
    """
    accept = headers.get(b"accept", b"*/*")
    served = target.route.dialect.served
    if accept == b"*/*" or is_served(accept, served):
        return None
    return not_acceptable(accept, served[0].decode())


def _refusal_of_path(
    method: str, node: PathNode | None, target: Target | None, segments: list[str]
) -> Exception | None:
    """Return the error if the path cannot be served with this method. The body is not read yet."""
    if target is None:
        if node is None or not node.methods:
            return HTTPException(404)
        if method == "OPTIONS":
            return None
        return HTTPException(405, headers={"Allow": ", ".join(node.allowed)})
    try:
        for name, position in zip(target.names, target.positions, strict=True):
            check_printable(name, segments[position])
    except InvalidParameter as error:
        return error
    return None


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page of another origin may send a request."""
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )


def _without_body(send: Send) -> Send:
    """Return a `send` for the answer to a HEAD request: a GET's head, without the body."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return sending


async def _refusal(
    security: Security,
    scope: Scope,
    node: PathNode | None,
    target: Target | None,
    segments: list[str],
) -> LogError | None:
    """Return the error if the caller has no access."""
    access: Access = RouteAccess.ANY_KEY
    if target is not None:
        access = target.route.access
    elif node is not None and node.methods:
        # A public path shows its methods to every client.
        accesses = {method_target.route.access for method_target in node.methods.values()}
        access = RouteAccess.PUBLIC if accesses == {RouteAccess.PUBLIC} else access
    refusal = await security.admit(scope, access)
    if refusal is not None:
        return refusal
    if "rights" not in scope:
        return None  # a public route
    rights = rights_of(scope)
    is_reading = _is_reading(scope["method"], target) or (
        target is not None and target.route.is_ack
    )
    if (refusal := charge_request(rights, is_mutation=not is_reading)) is not None:
        return refusal
    if target is None or not isinstance(access, Permission):
        return None
    name = CLUSTER_NAME if target.name_at is None else segments[target.name_at]
    try:
        await rights.check(access.right, name)
    except LogError as error:
        return error
    return None


def _is_reading(method: str, target: Target | None) -> bool:
    return method in READING or (target is not None and target.route.is_reading)


def _is_health(target: Target | None) -> bool:
    """Whether the route is served with any key, also with an invalid key.

    Without this rule, a probe with an old key would fail, and the orchestrator would end the
    broker.
    """
    if target is None or target.route.access is not RouteAccess.PUBLIC:
        return False
    return target.route.label == "health"


def _methods(routes: Iterable[Route], owner: object) -> Iterator[tuple[Route, Handler]]:
    """Iterate over hot routes, whose handlers are methods of `owner`."""
    return ((route, MethodType(route.serve, owner)) for route in routes)


def _paths(
    handlers: Iterable[tuple[Route, Handler]], *, is_declared: bool = False
) -> Iterator[tuple[list[str], Target]]:
    """Iterate over the paths of routes, under every mount."""
    for route, serve in handlers:
        for path in route.paths:
            segments = [*filter(None, path.split("/"))]
            positions = tuple(
                position for position, segment in enumerate(segments) if segment[0] == "{"
            )
            names = (segments[position].strip("{}").removesuffix(":path") for position in positions)
            shown = tuple(NAMES_IN_ERRORS.get(name, name) for name in names)
            name_at = None
            if isinstance(route.access, Permission) and route.access.parameter:
                name_at = segments.index(f"{{{route.access.parameter}}}")
            has_rest = path.endswith(":path}")
            yield segments, Target(route, serve, positions, shown, name_at, has_rest, is_declared)


def _is_parameter(segment: str) -> bool:
    return segment[0] == "{" and not segment.endswith(":path}")
