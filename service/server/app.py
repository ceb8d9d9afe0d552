"""The FastAPI application: every route that is not hot, the OpenAPI document, and the limits of
every request that reaches it.

A request first gets to the router (service.server.router), which serves the hot routes itself. The
application has no durable state, so a crash loses nothing.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote_from_bytes

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidelog.service.console.topic_layout import TopicLayouts
from tidelog.service.console.wal_entries import WalPage
from tidelog.service.http import openapi
from tidelog.service.http.body_limit import limited_body
from tidelog.service.http.call import UNSTORED, HttpRequest
from tidelog.service.http.content_coding import (
    PACKED_BYTES_MIN,
    coding_of_answer,
    headers_of,
    packed,
)
from tidelog.service.http.errors import answered, error_response
from tidelog.service.http.media_types import UnsupportedMediaType, media_type
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.request_id import REQUEST_ID, echo, id_of_error
from tidelog.service.http.route import V2, Access, Route
from tidelog.service.http.urls import clean_path
from tidelog.service.operations.operations import Operations
from tidelog.service.routes.dependencies import V2Response, check_cluster_id
from tidelog.service.routes.health import VERSION
from tidelog.service.security.authenticator import Security
from tidelog.service.server.reports import Reports
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES
from tidelog.service.telemetry.metrics import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.topic_configs import of_settings
from tidelog.storage.runtime.tasks import TASK_ENDS

_ASCII = bytes(range(128))

DESCRIPTION = """
A log service like Kafka on object storage, with a REST API.

The dialects of Confluent's REST proxy (v2 and v3), Karapace, Strimzi's bridge and Redpanda's proxy
are served side by side. A client library for any of these dialects works with this service's URL.
Every error is `{"error_code": int, "message": str}`.

With `security=keys`, every request needs a key, except for health and the console's files.
"""
TAGS = {
    "records": "Produce and fetch records, v2 and v3.",
    "consumers": "Consumer instances, v2: any broker serves them.",
    "topics": "Topics, partitions and offsets, v2.",
    "cluster": "The cluster, v2.",
    "v3 cluster": "The cluster in the v3 dialect.",
    "v3 topics": "Topics in the v3 dialect; also under `/kafka/v3`.",
    "v3 configs": "Configs of topics; also under `/kafka/v3`.",
    "v3 consumer groups": "Groups, their lag, and transactions; also under `/kafka/v3`.",
    "console": "Data for the console at /ui and `tidelog clients`: read-only.",
    "security": "Keys, quotas, and the console's login, if `security=keys`.",
    "health": "For load balancers, orchestrators and Prometheus.",
}
"""Descriptions of the parts of the API, in the order of the document."""


class Application(FastAPI):
    """FastAPI with the hot routes in its OpenAPI document."""

    async def document(self) -> bytes:
        """Return the OpenAPI document as JSON. The first call makes it in a thread, in ~0.7 s."""
        async with self.state.making:
            if self.state.document is None:
                self.state.document = await asyncio.to_thread(
                    lambda: json.dumps(self.openapi(), ensure_ascii=False).encode()
                )
        document: bytes = self.state.document
        return document

    def openapi(self) -> dict[str, Any]:
        """Return the broker's document, which is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.completed(
                super().openapi(), (*HOT_ROUTES, *APP_ROUTES), HOT_ROUTES
            )
        return self.openapi_schema


DEFAULT_SETTINGS = of_settings(1, is_auto_create=False)


def build_app(
    broker: Broker,
    *,
    http: HttpCounters | None = None,
    default_settings: Mapping[str, str] = DEFAULT_SETTINGS,
    routes: Sequence[Route] = (),
    security: Security | None = None,
    reports: Reports | None = None,
) -> FastAPI:
    """Build the application on an open log. `routes` are served beside APP_ROUTES.
    `default_settings` are defaults of topics that the broker's settings give (`of_settings`)."""
    counters = HttpCounters() if http is None else http
    app = Application(
        title="tidelog",
        version=VERSION,
        summary="A log service on object storage",
        description=DESCRIPTION,
        openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,  # the table of routes has the document's route, with its access
        docs_url=None,  # FastAPI's page loads scripts from other hosts; the console has such a page
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.log = broker
    app.state.document, app.state.making = None, asyncio.Lock()
    app.state.default_settings = default_settings
    app.state.operations = Operations.of(broker, default_settings)
    app.state.counters = counters
    app.state.security = security
    app.state.reports = reports or Reports.of(broker, counters)
    app.state.layouts = TopicLayouts(broker)
    app.state.wal_page = WalPage(broker)
    app.state.started_s = broker.clock.boot_s()
    for kind in (LogError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Edge, counters=counters)
    app.router.routes.extend(_APP_ROUTES)
    for route in routes:
        _add(app.router, route)
    return app


def _add(router: APIRouter, route: Route) -> None:
    """Give a route to FastAPI, under each mount. Only the first mount is documented."""
    doc = route.doc
    dependencies = [Depends(check_cluster_id)] if "{cluster_id}" in route.path else []
    response_class = V2Response if route.dialect is V2 else JSONResponse
    kind = type("_RouteWithAccess", (_CheckedRoute,), {"access": route.access})
    is_plain = route.serve.__annotations__.get("return") is Response
    for number, path in enumerate(route.paths):
        router.add_api_route(
            path,
            route.serve,
            methods=[route.method],
            tags=[route.label],
            status_code=doc.status,
            dependencies=dependencies,
            responses={
                status: openapi.error_answer(path, description)
                for status, description in doc.errors.items()
            },
            response_class=Response if is_plain else response_class,
            include_in_schema=not (number or doc.is_hidden),
            response_model_exclude_none=doc.omit == "none",
            response_model_exclude_unset=doc.omit == "unset",
            route_class_override=kind,
        )


class _CheckedRoute(APIRoute):
    """A route that checks each request before FastAPI reads and parses its body: the caller has
    access, and a DELETE or PUT has no query parameter that the route ignores. The router has
    checked the names in the path."""

    access: ClassVar[Access]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        serve = super().get_route_handler()

        async def checked(request: Request) -> Response:
            security: Security | None = request.app.state.security
            if security is not None:
                await security.check_access(request.scope, self.access, request.path_params)
            if request.method in ("DELETE", "PUT"):
                _check_query(request)
            return await serve(request)

        return checked


def _app_routes() -> tuple[BaseRoute, ...]:
    router = APIRouter(redirect_slashes=False)
    for route in APP_ROUTES:
        _add(router, route)
    return tuple(router.routes)


_APP_ROUTES = _app_routes()
"""APP_ROUTES as FastAPI's routes. They have no state, so a process makes them once, at its imports:
FastAPI needs 0.15 s of CPU for them."""


def _check_query(request: Request) -> None:
    """Raise InvalidParameter for a parameter that the route does not have, or that is repeated. If
    the route ignored it, the request could change more than its client wants."""
    own: Dependant = request.scope["route"].dependant
    parameters = {field.alias for part in (own, *own.dependencies) for field in part.query_params}
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in parameters:
            takes = ", ".join(sorted(parameters)) or "none"
            raise InvalidParameter(
                f"parameter {name[:SHOWN_MAX]!r} is unknown: the parameters of this route: {takes}"
            )
        if names.count(name) > 1:
            raise InvalidParameter(f"parameter {name} is given more than once")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError) and _is_no_json(error):
        header = request.headers.get("content-type", "").encode("latin-1")
        sent = media_type(header).decode("latin-1")
        error = UnsupportedMediaType(
            f"HTTP 415 Unsupported Media Type: send application/json, not {sent!r}"
        )
    path = request.url.path
    request_id = id_of_error(request.headers.get("x-request-id", ""), request.app.state.log.clock)
    answer = answered(error, request.scope, request.app.state.counters, request_id)
    response = answer.response(path)
    headers = {**answer.headers, "X-Request-Id": request_id}
    return Response(
        response.body, response.status, headers, media_type=response.media_type.decode()
    )


def _is_no_json(error: RequestValidationError) -> bool:
    """Whether FastAPI passed the body on as bytes, because its Content-Type is not JSON."""
    first = error.errors()[0]
    return first["loc"] == ("body",) and isinstance(first["input"], bytes)


class Edge:
    """The outermost layer of the application: it normalizes the path, limits the body, counts the
    request, and answers after an unexpected exception."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        scope = {
            **scope,
            "path": clean_path(scope["path"]),
            "query_string": _ascii(scope["query_string"]),
            "headers": _typed(scope["headers"]),
        }
        call = HttpRequest(scope, receive, send, scope.get("bodies"))
        status = 0
        head: Message = {}

        async def watched(message: Message) -> None:
            nonlocal status, head
            if message["type"] == "http.response.start":
                status, head = message["status"], message
                return
            if head:
                head, message = await _completed(call, head, message)
                await send(head)
                head = {}
            await send(message)

        try:
            await self._app(scope, _whole_body(call), watched)
        except TASK_ENDS:
            raise
        except BaseException as error:  # no caller handles it
            sent_id, clock = call.headers.get(REQUEST_ID, b""), scope["app"].state.log.clock
            call.headers[REQUEST_ID] = request_id = id_of_error(sent_id, clock).encode()
            answer = answered(error, scope, self._counters, request_id.decode())
            if status:
                raise  # half a response is sent: the server closes the connection
            await call.answer(answer.response(scope["path"]))
        finally:
            call.release()
        # FastAPI's tag is the label of the route. Routes share labels, because a histogram for each
        # of 80 routes would be too much.
        tags = getattr(scope.get("route"), "tags", None) or ["other"]
        self._counters.observe(str(tags[0]), call.status or status, time.perf_counter() - started)


def _whole_body(call: HttpRequest) -> Receive:
    """Return a `receive` that gives the whole body at once, and refuses a body over the limit of
    its route."""
    body: bytes | None = None

    async def receive() -> Message:
        nonlocal body
        if body is not None:
            return await call.receive()
        try:
            body = await limited_body(call)
        except LogError as error:  # FastAPI would answer every other exception with 400
            refusal = error_response(error)
            raise HTTPException(refusal.status, str(error), refusal.headers) from error
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _completed(call: HttpRequest, head: Message, body: Message) -> tuple[Message, Message]:
    """Return the first two messages of an answer, with the headers that every answer has. If the
    body is large and in one message, and the client accepts a coding, the body is compressed."""
    headers = [*head["headers"]]
    names = {name for name, _ in headers}
    headers += (header for header in UNSTORED if header[0] not in names)
    if REQUEST_ID not in names:
        headers += echo(call.headers)
    content = body.get("body", b"")
    is_whole = not body.get("more_body", False) and len(content) >= PACKED_BYTES_MIN
    if is_whole and not names & {b"content-encoding", b"etag"}:
        accepted = call.headers.get(b"accept-encoding", b"")
        coding = coding_of_answer(accepted, is_hot=False)
        if coding:
            content = await packed(content, coding)
            headers = [header for header in headers if header[0] != b"content-length"]
            headers += [(b"content-length", b"%d" % len(content)), *headers_of(coding)]
    return {**head, "headers": headers}, {**body, "body": content}


def _ascii(query: bytes) -> bytes:
    """Return the query with bytes above 127 escaped, because starlette decodes only escaped bytes
    as UTF-8."""
    return query if query.isascii() else quote_from_bytes(query, safe=_ASCII).encode()


def _typed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers with a Content-Type. A body without a Content-Type is JSON, as in every
    dialect except Redpanda's."""
    if any(name == b"content-type" for name, _ in headers):
        return headers
    return [*headers, (b"content-type", b"application/json")]
