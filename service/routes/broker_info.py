"""The version, the uptime, the metrics and the OpenAPI document of a broker."""

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

# Health shows nothing of the log. Metrics name topics and groups, so they need Kafka's permission
# to describe a cluster.
_METRICS = Permission(DESCRIBE_CLUSTER)
_LABEL = "health"
_DOC = RouteDoc()
VERSION = importlib.metadata.version("tidelog")


class Version(BaseModel):
    version: str = Field(examples=["0.2.0"])


class Uptime(BaseModel):
    process_uptime_sec: int
    tidelog_version: str = Field(examples=["0.2.0"])


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


ROUTES = (
    Route("GET", "/", get_version, RouteAccess.KEY_UNLESS_BROWSER, _LABEL, PLAIN, _DOC),
    Route("GET", "/_health", get_uptime, RouteAccess.PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/metrics", get_metrics, _METRICS, _LABEL, PLAIN, _DOC),
    Route("GET", "/openapi.json", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
    Route("GET", "/openapi", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
    Route("GET", "/openapi/v3", get_document, RouteAccess.ANY_KEY, "other", PLAIN, HIDDEN),
)
