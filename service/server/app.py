"""The FastAPI application: it declares every route that is not hot, and makes the OpenAPI document.

The router (service.server.router) finds the route of a request, admits the request and answers its
errors. FastAPI parses and validates the parameters and the body, calls the handler, and encodes its
result. The application has no durable state, so a crash loses nothing.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote_from_bytes

from fastapi import Depends, FastAPI, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from tidelog.service.console.topic_layout import TopicLayouts
from tidelog.service.console.wal_entries import WalPage
from tidelog.service.http import openapi
from tidelog.service.http.body_limit import limited_body
from tidelog.service.http.content_coding import (
    PACKED_BYTES_MIN,
    coding_of_answer,
    headers_of,
    packed,
)
from tidelog.service.http.media_types import UnsupportedMediaType, media_type
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.request import UNSTORED, HttpRequest, received_again
from tidelog.service.http.request_id import REQUEST_ID, echo
from tidelog.service.http.route import V2, Route
from tidelog.service.http.urls import clean_path
from tidelog.service.operations.operations import Operations
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.routes.broker_info import VERSION
from tidelog.service.routes.dependencies import V2Response, check_cluster_id
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import Forbidden
from tidelog.service.server.peer_reports import Reports
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker

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
    "iceberg": "A read-only Iceberg REST catalog: its tables are the topics.",
    "console": "Data for the console at /ui and `tidelog clients`: read-only.",
    "security": "Keys, quotas, and the console's login, if `security=keys`.",
    "health": "For load balancers, orchestrators and Prometheus.",
}
"""Descriptions of the parts of the API, in the order of the document."""


class Application(FastAPI):
    """The routes that FastAPI declares: APP_ROUTES and `more_routes`.

    The router (service.server.router) finds the route of a request and calls its handler, so
    FastAPI neither matches nor answers errors. The OpenAPI document has the hot routes, too. The
    handlers of the hot routes use the same `operations` and `held_members`.
    """

    def __init__(
        self,
        operations: Operations,
        held_members: HeldMembers,
        more_routes: Sequence[Route] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.operations = operations
        self.held_members = held_members
        routes = [*_APP_ROUTES, *((route, _api_route(route)) for route in more_routes)]
        self.router.routes += [api_route for _, api_route in routes]
        self.handlers = [(pair[0], DeclaredRoute(self, *pair).serve) for pair in routes]
        """The declared routes, each with its handler for a request and the path's parameters."""
        self._document: bytes | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise Forbidden: only the router admits requests."""
        raise Forbidden("not authorized: the request did not come through the router")

    async def document(self) -> bytes:
        """Return the OpenAPI document as JSON. The first call makes it in a thread, in ~0.7 s."""
        async with self._making:
            if self._document is None:
                self._document = await asyncio.to_thread(
                    lambda: json.dumps(self.openapi(), ensure_ascii=False).encode()
                )
        return self._document

    def openapi(self) -> dict[str, Any]:
        """Return the broker's document, which is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.completed(
                super().openapi(), (*HOT_ROUTES, *APP_ROUTES), HOT_ROUTES
            )
        return self.openapi_schema


DEFAULT_SETTINGS = RequestSettings()


def build_app(
    broker: Broker,
    settings: RequestSettings = DEFAULT_SETTINGS,
    *,
    http: HttpCounters | None = None,
    routes: Sequence[Route] = (),
    security: Security | None = None,
    reports: Reports | None = None,
    operations: Operations | None = None,
    held_members: HeldMembers | None = None,
) -> Application:
    """Build the application of an open broker. `routes` are served beside APP_ROUTES.

    By default, the broker has no peers. Then it coordinates all groups.
    """
    counters = HttpCounters() if http is None else http
    app = Application(
        operations or Operations.of(broker, settings.topic_defaults),
        held_members or HeldMembers(broker.groups.rest, None),
        routes,
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
    app.state.broker = broker
    app.state.settings = settings
    app.state.counters = counters
    app.state.security = security
    app.state.reports = reports or Reports.of(broker, counters)
    app.state.layouts = TopicLayouts(broker)
    app.state.wal_page = WalPage(broker)
    app.state.started_s = broker.clock.boot_s()
    return app


def _api_route(route: Route) -> APIRoute:
    """Return a route as FastAPI declares it, under its first mount."""
    doc = route.doc
    path = route.paths[0]
    dependencies = [Depends(check_cluster_id)] if "{cluster_id}" in route.path else []
    response_class = V2Response if route.dialect is V2 else JSONResponse
    is_plain = route.serve.__annotations__.get("return") is Response
    return APIRoute(
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
        include_in_schema=not doc.is_hidden,
        response_model_exclude_none=doc.omit == "none",
        response_model_exclude_unset=doc.omit == "unset",
    )


_APP_ROUTES = [(route, _api_route(route)) for route in APP_ROUTES]
"""APP_ROUTES, each with FastAPI's route. They have no state, so a process makes them once, at its
imports: FastAPI needs 0.1 s of CPU for them."""


class DeclaredRoute:
    """A route whose parameters, body and answer FastAPI parses, validates and encodes.

    Its errors leave it as exceptions, as those of the hot routes do.
    """

    def __init__(self, app: Application, route: Route, api_route: APIRoute) -> None:
        self._app = app
        self._names = [*api_route.param_convertors]
        self._api_route = api_route
        self._checks_query = route.method in ("DELETE", "PUT")
        self._serve = AsyncExitStackMiddleware(api_route.app)

    async def serve(self, call: HttpRequest, *parameters: str) -> None:
        """Answer a request with these parameters of the path."""
        query = _ascii(call.scope["query_string"])
        if self._checks_query:
            self._check_query(QueryParams(query))
        receive = _limited(call)
        if self._api_route.body_field is not None:  # else FastAPI would answer its errors with 400
            receive = received_again(await limited_body(call), call.receive)
        scope = {
            **call.scope,
            "app": self._app,
            "path": clean_path(call.scope["path"]),
            "path_params": dict(zip(self._names, parameters, strict=True)),
            "query_string": query,
            "headers": _typed(call.scope["headers"]),
        }
        try:
            await self._serve(scope, receive, _completing(call))
        except RequestValidationError as error:
            if not _is_no_json(error):
                raise
            sent = media_type(call.headers.get(b"content-type", b"")).decode("latin-1")
            raise UnsupportedMediaType(
                f"HTTP 415 Unsupported Media Type: send application/json, not {sent!r}"
            ) from error

    def _check_query(self, query: QueryParams) -> None:
        """Raise InvalidParameter for a parameter that the route does not have, or that is repeated.

        If the route ignored it, the request could change more than its client wants.
        """
        own: Dependant = self._api_route.dependant
        parameters = {
            field.alias for part in (own, *own.dependencies) for field in part.query_params
        }
        names = [name for name, _ in query.multi_items()]
        for name in names:
            if name not in parameters:
                takes = ", ".join(sorted(parameters)) or "none"
                raise InvalidParameter(
                    f"parameter {name[:SHOWN_MAX]!r} is unknown: the parameters of this route: "
                    f"{takes}"
                )
            if names.count(name) > 1:
                raise InvalidParameter(f"parameter {name} is given more than once")


def _limited(call: HttpRequest) -> Receive:
    """Return a `receive` that gives the whole body at once, up to the limit of its route."""
    then: Receive | None = None

    async def receive() -> Message:
        nonlocal then
        if then is None:
            then = received_again(await limited_body(call), call.receive)
        return await then()

    return receive


def _is_no_json(error: RequestValidationError) -> bool:
    """Whether FastAPI passed the body on as bytes, because its Content-Type is not JSON."""
    first = error.errors()[0]
    return first["loc"] == ("body",) and isinstance(first["input"], bytes)


def _completing(call: HttpRequest) -> Send:
    """Return a `send` that completes the head of the answer with the first part of the body."""
    head: Message = {}

    async def send(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
            return
        if head:
            head, message = await _completed(call, head, message)
            call.status = head["status"]
            await call.send(head)
            head = {}
        await call.send(message)

    return send


async def _completed(call: HttpRequest, head: Message, body: Message) -> tuple[Message, Message]:
    """Return the first two messages of an answer, with the headers that every answer has.

    If the body is large and in one message, and the client accepts a coding, the body is
    compressed.
    """
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
    """Return the query with bytes above 127 escaped: starlette decodes no others as UTF-8."""
    return query if query.isascii() else quote_from_bytes(query, safe=_ASCII).encode()


def _typed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers with a Content-Type.

    A body without a Content-Type is JSON, as in every dialect except Redpanda's.
    """
    if any(name == b"content-type" for name, _ in headers):
        return headers
    return [*headers, (b"content-type", b"application/json")]
