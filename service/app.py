"""The application: routes, their documentation, health, and the edge that every request passes.

Produce and fetch are served in front of it (`hotpath`); what is here is not hot. It holds no state
but `Readiness`: a process that dies loses nothing.
"""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote_from_bytes

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import acls_v3, admin_v3, configs_v3, console_api, groups_v3, keys_api, topics
from service.console import console
from service.errors import (
    INTERNAL_ERROR,
    ErrorBody,
    add_handlers,
    check_printable,
    error_body,
    json_type,
)
from service.paths import clean_path
from service.security import Security
from service.telemetry import CareCounters, HttpCounters, Telemetry, Worker
from service.topic_picture import Pictures
from service.vitals import Ask, Vitals, nobody
from service.wal_view import WalView
from storage.errors import LogError, Unavailable
from storage.log import Log

log = logging.getLogger("tidelog.http")

VERSION = importlib.metadata.version("tidelog")
BODY_BYTES_MAX = 4 * 1024 * 1024
"""Of requests that carry no records (I10): a topic with every partition assigned fits."""
READY_WAIT_S = 1.0
READY_GRACE_S = 10.0
"""One slow answer of the store is no reason to take a broker out of rotation."""

_ASCII = bytes(range(128))

DESCRIPTION = """
A log service in the sense of Kafka on object storage, spoken to over REST.

The dialects of Confluent's REST proxy (v2 and v3), Karapace, Strimzi's bridge and Redpanda's proxy
are served side by side: a client library written for any of them works by changing its URL. Every
error is `{"error_code": int, "message": str}`.
"""
TAGS = [
    {"name": "records", "description": "Produce and fetch: the hot routes."},
    {"name": "consumers", "description": "Consumer instances, v2: any broker serves them."},
    {"name": "topics", "description": "Topics, partitions and offsets, v2."},
    {"name": "cluster", "description": "The cluster, v2."},
    {"name": "v3 cluster", "description": "The cluster in the v3 dialect."},
    {"name": "v3 topics", "description": "Topics in the v3 dialect; also under `/kafka/v3`."},
    {"name": "v3 configs", "description": "Configs of topics; also under `/kafka/v3`."},
    {
        "name": "v3 consumer groups",
        "description": "Groups, their lag, and transactions; also under `/kafka/v3`.",
    },
    {"name": "console", "description": "What the console at /ui shows beyond the rest: read-only."},
    {
        "name": "security",
        "description": "Keys, quotas, and the console's login, where `security=keys`.",
    },
    {"name": "health", "description": "For load balancers, orchestrators and Prometheus."},
]


class Readiness:
    """Whether requests should be sent here. One per process."""

    def __init__(self, broker: Log) -> None:
        self._log = broker
        self._fresh_s: float | None = None
        self._is_draining = False

    def drain(self) -> None:
        """From now on: not ready. For the time between the signal to stop and the closed port."""
        self._is_draining = True

    async def check(self) -> None:
        """Raises Unavailable, with the reason, unless the WAL was read to its end just now or a
        short while ago: then the view is not void and the store answers."""
        writer = self._log.writer.task
        if self._is_draining or writer is None or writer.done():
            raise Unavailable("this broker is shutting down")
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._log.wal.refresh()
        except (LogError, TimeoutError) as error:
            age_s = self._log.clock.boot_s() - (self._fresh_s or 0.0)
            if self._fresh_s is None or age_s > READY_GRACE_S:
                why = str(error) or f"no answer within {READY_WAIT_S:.0f} s"
                raise Unavailable(f"the WAL cannot be read: {why}") from error
        else:
            self._fresh_s = self._log.clock.boot_s()


class Version(BaseModel):
    version: str = Field(examples=["0.1.0"])


class Uptime(BaseModel):
    process_uptime_sec: int
    tidelog_version: str = Field(examples=["0.1.0"])


class Status(BaseModel):
    status: str = Field(examples=["ready"])


def build_app(
    broker: Log,
    *,
    http: HttpCounters | None = None,
    default_partitions: int = 1,
    extra: Sequence[APIRouter] = (),
    care: CareCounters | None = None,
    worker: Worker | None = None,
    peers: Ask = nobody,
    security: Security | None = None,
) -> FastAPI:
    """The application on an open log. `extra` routers are served (or only documented) with it.

    `app.state.readiness` is its Readiness: call `drain()` before the port is closed.
    """
    counters = HttpCounters() if http is None else http
    app = FastAPI(
        title="tidelog",
        version=VERSION,
        summary="A log service on object storage",
        description=DESCRIPTION,
        openapi_tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        docs_url=None,  # theirs loads its scripts from elsewhere; the console has one
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(_allowed_and_printable)],
    )
    app.state.log = broker
    app.state.default_partitions = default_partitions
    app.state.readiness = Readiness(broker)
    app.state.counters = counters
    app.state.security = security
    app.state.telemetry = Telemetry(broker, counters, VERSION, care, worker)
    number = 0 if worker is None else worker.number
    app.state.vitals = Vitals(broker, counters, VERSION, number, peers)
    app.state.pictures = Pictures(broker)
    app.state.wal_view = WalView(broker)
    app.state.started_s = broker.clock.boot_s()
    add_handlers(app)
    app.add_middleware(Edge, counters=counters)
    app.include_router(_health)
    for router in extra:
        app.include_router(router)
    app.include_router(topics.router)
    app.include_router(console_api.router)
    app.include_router(keys_api.router)
    app.include_router(console())
    for mount in admin_v3.MOUNTS:
        app.include_router(admin_v3.clusters, prefix=mount, include_in_schema=mount == "/v3")
        for v3 in (admin_v3, configs_v3, groups_v3, acls_v3):
            app.include_router(v3.router, prefix=mount, include_in_schema=mount == "/v3")
    return app


async def _allowed_and_printable(request: Request) -> None:
    """Who asks may; and names in any path are free of control characters."""
    security: Security | None = request.app.state.security
    if security is not None:
        await security.allow_route(request.scope)
    for parameter, text in request.path_params.items():
        check_printable(parameter, str(text))


class Edge:
    """What every request passes: one spelling of paths, a bound of the body, a count, and an answer
    to what nobody foresaw."""

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
        status = 0
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > BODY_BYTES_MAX:
                raise HTTPException(
                    413, f"request body is over the limit of {BODY_BYTES_MAX} bytes"
                )
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, bounded, watched)
        except Exception as error:  # the root of a request: nothing above knows what to do
            self._counters.refused(error)
            log.exception("bug in %s %s", scope["method"], scope["path"])
            if status:
                raise  # half an answer is out: the server closes the connection
            await _internal_error(scope["path"], watched)
        # By tag: forty routes with a histogram each are more series than they are worth.
        tags = getattr(scope.get("route"), "tags", None) or ["other"]
        self._counters.observe(str(tags[0]), status, time.perf_counter() - started)


def _ascii(query: bytes) -> bytes:
    """A query of which every byte may stand in a URL: starlette decodes it as UTF-8."""
    return query if query.isascii() else quote_from_bytes(query, safe=_ASCII).encode()


def _typed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers with a Content-Type: a body without one is JSON, as everybody but Redpanda has it."""
    if any(name == b"content-type" for name, _ in headers):
        return headers
    return [*headers, (b"content-type", b"application/json")]


async def _internal_error(path: str, send: Send) -> None:
    status, code, message = INTERNAL_ERROR
    body = error_body(code, message)
    headers = [
        (b"content-type", json_type(path).encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# -- health

_health = APIRouter(tags=["health"])
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "the message says why not"}
}


@_health.get("/", response_model=Version)
async def get_version(request: Request) -> Any:
    """Who answers; browsers are led to the console."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("ui/", 307)
    return Version(version=VERSION)


@_health.get("/_health")
async def get_uptime(request: Request) -> Uptime:
    """How long this process has lived."""
    lived_s = topics.broker_log(request).clock.boot_s() - request.app.state.started_s
    return Uptime(process_uptime_sec=int(lived_s), tidelog_version=VERSION)


@_health.get("/healthy")
async def get_healthy() -> Status:
    """The process lives. Restart it when this does not answer."""
    return Status(status="healthy")


@_health.get("/startup")
async def get_startup() -> Status:
    """The start is over: the store was probed, the log loaded, a dead broker's hot log committed.
    Before that nobody listens at the port."""
    return Status(status="started")


@_health.get("/status/ready", include_in_schema=False)
@_health.get("/ready", responses=_NOT_READY)
async def get_ready(request: Request) -> Status:
    """The log can be read and written from here. Send no requests while this answers 503."""
    await request.app.state.readiness.check()
    return Status(status="ready")


@_health.get("/metrics", response_class=Response)
async def get_metrics(request: Request) -> Response:
    """Prometheus text: of this broker, and of all workers where several share the port, which the
    label `worker` tells apart."""
    telemetry: Telemetry = request.app.state.telemetry
    body = await telemetry.text_of_all()
    return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})
