"""Health, metrics, version and the OpenAPI document.

They are for load balancers, orchestrators and Prometheus.
"""

import importlib.metadata
from typing import Any

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from tidelog.service.http.route import HIDDEN, PLAIN, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import DESCRIBE_CLUSTER
from tidelog.service.routes.dependencies import broker_of
from tidelog.service.telemetry.metrics import Telemetry

VERSION = importlib.metadata.version("tidelog")


class Version(BaseModel):
    version: str = Field(examples=["0.2.0"])


class Uptime(BaseModel):
    process_uptime_sec: int
    tidelog_version: str = Field(examples=["0.2.0"])


class Status(BaseModel):
    status: str = Field(examples=["ready"])


class Readiness(Status):
    """The answer of a ready broker, with four counts; a count of 0 is absent.

    `set_aside` counts the requests acknowledged with acks=1 that the store refuses.
    `tables_in_doubt` counts the topics whose table is in doubt. `damaged_tails` counts the
    partitions whose tail is damaged, and which are sealed only up to the damage. `holds` counts the
    backups that stop collection. GET /tidelog/v1/overview names these topics and partitions.
    """

    set_aside: int | None = Field(default=None, examples=[None])
    tables_in_doubt: int | None = Field(default=None, examples=[None])
    damaged_tails: int | None = Field(default=None, examples=[None])
    holds: int | None = Field(default=None, examples=[None])


async def get_version(request: Request) -> Version:
    """The broker's version; a browser is redirected to the console."""
    if "text/html" in request.headers.get("accept", ""):
        redirect: Any = RedirectResponse("ui/", 307)  # FastAPI sends it as it is
        return redirect
    return Version(version=VERSION)


async def get_uptime(request: Request) -> Uptime:
    """The age of this process."""
    uptime_s = broker_of(request).clock.boot_s() - request.app.state.started_s
    return Uptime(process_uptime_sec=int(uptime_s), tidelog_version=VERSION)


async def get_healthy() -> Status:
    """The process runs. Restart the process if this route does not answer."""
    return Status(status="healthy")


async def get_startup() -> Status:
    """The start is complete.

    The broker has probed the store, loaded the log and committed the hot log of a crashed process.
    Before that, the port is closed.
    """
    return Status(status="started")


async def get_ready(request: Request) -> Readiness:
    """This broker can read and write the log.

    Send it no requests while this route answers 503. `set_aside` counts requests acknowledged with
    acks=1 that the store refuses. Only this broker's disk has these requests. A table in doubt or a
    damaged tail does not make a broker unready, because its topic still accepts records, and other
    topics are not affected.
    """
    broker = broker_of(request)
    await broker.check_ready()
    return Readiness(
        status="ready",
        set_aside=broker.set_aside or None,
        tables_in_doubt=len(broker.stored.doubts()) or None,
        damaged_tails=len(broker.stored.damaged_tails()) or None,
        holds=len(broker.state.holds) or None,
    )


async def get_metrics(request: Request) -> Response:
    """Metrics of this broker, or of all workers that share its port, as Prometheus text.

    The metrics of workers have the label `worker`.
    """
    telemetry: Telemetry = request.app.state.reports.telemetry
    body = await telemetry.text_of_all()
    return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def get_document(request: Request) -> Response:
    """The OpenAPI document."""
    return Response(await request.app.document(), media_type="application/json")


_LABEL = "health"
_PUBLIC = RouteAccess.PUBLIC
_DOC = RouteDoc()
_READY_DOC = RouteDoc({503: "the message has the reason"}, omit="none")
# Health shows nothing of the log. Metrics name topics and groups, so they need Kafka's permission
# to describe a cluster.
_METRICS = Permission(DESCRIBE_CLUSTER)

ROUTES = (
    Route("GET", "/", get_version, RouteAccess.KEY_UNLESS_BROWSER, _LABEL, PLAIN, _DOC),
    Route("GET", "/_health", get_uptime, _PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/healthy", get_healthy, _PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/startup", get_startup, _PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/ready", get_ready, _PUBLIC, _LABEL, PLAIN, _READY_DOC),
    Route("GET", "/status/ready", get_ready, _PUBLIC, _LABEL, PLAIN, HIDDEN._replace(omit="none")),
    Route("GET", "/metrics", get_metrics, _METRICS, _LABEL, PLAIN, _DOC),
    Route("GET", "/openapi.json", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
    Route("GET", "/openapi", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
    Route("GET", "/openapi/v3", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
)
