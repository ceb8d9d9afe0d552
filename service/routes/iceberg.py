"""Routes of a read-only Iceberg REST catalog, whose tables are the topics.

They follow Iceberg's specification of the REST catalog, version 1. The warehouse `planned` has the
same tables for clients that let the broker plan their scans: then nothing is written. For other
clients, the load of a table writes the manifests of its newest version, if they are not there.
"""

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response

from tidelog.service.formats import iceberg as formats
from tidelog.service.formats.iceberg import NAMESPACE, PlanPosition
from tidelog.service.http.paging import PAGE_ITEMS_MAX
from tidelog.service.http.parameters import SHOWN_MAX
from tidelog.service.http.route import (
    ICEBERG,
    PLANNED,
    Permission,
    Route,
    RouteAccess,
    RouteDoc,
)
from tidelog.service.operations.rights import DESCRIBE_TOPIC, FETCH
from tidelog.service.routes.dependencies import (
    ERRORS,
    BrokerOperations,
    FreshBroker,
    Rights,
    TopicName,
    broker_of,
)
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import Unauthenticated
from tidelog.service.slices import in_order
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import InvalidRequest, LogError
from tidelog.storage.state.topic import Topic

LABEL = "iceberg"
WRONG_SECRET_S = 1.0
"""Time that the broker waits before it refuses a token request, as it does a login."""
_WAREHOUSES = {"": "", PLANNED: PLANNED}
"""The prefix of each warehouse's paths."""


class NoSuchNamespace(LogError):
    """The namespace does not exist."""

    status = 404
    code = 404
    iceberg_type = "NoSuchNamespaceException"


class NoSuchWarehouse(LogError):
    """The warehouse does not exist."""

    status = 404
    code = 404
    iceberg_type = "NotFoundException"


class NoSuchSnapshot(InvalidRequest):
    """The table's log does not have the version of the snapshot."""


class UnsupportedPlan(LogError):
    """A plan that this catalog does not make."""

    status = 406
    code = 406
    iceberg_type = "UnsupportedOperationException"


async def get_config(
    warehouse: Annotated[
        str, Query(description=f"empty, or `{PLANNED}`: the broker plans the scans")
    ] = "",
) -> Response:
    """Return what a client needs to know of the catalog."""
    prefix = _WAREHOUSES.get(warehouse)
    if prefix is None:
        raise NoSuchWarehouse(
            f"there is no warehouse {warehouse[:SHOWN_MAX]!r}: leave it out, or set {PLANNED!r}, "
            "which lets the broker plan the scans"
        )
    overrides = {"prefix": prefix} if prefix else {}
    defaults = {"scan-planning-mode": "server"} if prefix else {}
    return _json({"defaults": defaults, "overrides": overrides, "endpoints": _ENDPOINTS})


async def get_token(request: Request) -> Response:
    """Return the secret of a key as a token, for clients that have it as their credential.

    The body is the form of OAuth2's client credentials. The token is valid as long as the key. If
    security is off, any secret is returned.
    """
    secret = formats.token_request(await request.body()).secret
    security: Security | None = request.app.state.security
    if security is not None:
        try:
            await security.log_in(secret)
        except Unauthenticated as error:
            await asyncio.sleep(WRONG_SECRET_S)  # slows down guesses; other clients do not wait
            await security.turns.come(request.client.host if request.client else "")
            return _json(
                {
                    "error": "invalid_client",
                    "error_description": str(error),
                    "error_code": 40101,
                    "message": str(error),
                },
                401,
            )
    return _json(formats.token_answer(secret), headers={"Cache-Control": "no-store"})


async def list_namespaces(
    parent: Annotated[str, Query(description="a namespace: it has no namespaces in it")] = "",
) -> Response:
    """List the namespaces: there is one, which has all topics."""
    if parent:
        _check_namespace(parent)
    return _json({"namespaces": [] if parent else [[NAMESPACE]], "next-page-token": None})


async def get_namespace(namespace: str) -> Response:
    """Return a namespace. It has no properties."""
    _check_namespace(namespace)
    return _json({"namespace": [NAMESPACE], "properties": {}})


async def list_tables(
    namespace: str,
    broker: FreshBroker,
    operations: BrokerOperations,
    rights: Rights,
    page_token: Annotated[
        str | None,
        Query(alias="pageToken", description="`next-page-token` of the page before; empty: first"),
    ] = None,
    page_size: Annotated[
        int, Query(alias="pageSize", ge=1, description=f"{PAGE_ITEMS_MAX} at most")
    ] = PAGE_ITEMS_MAX,
) -> Response:
    """List the topics that the caller may describe.

    Without `pageToken`, all of them are in one answer, as in Iceberg's specification.
    """
    _check_namespace(namespace)
    shown = [topic.name for topic in await operations.topics.all_shown(rights)]
    names = await in_order(shown, page_token or None)
    if page_token is None:
        return _json(formats.identifiers(list(names), None))
    size = min(page_size, PAGE_ITEMS_MAX)
    page = [name for name, _ in zip(names, range(size + 1), strict=False)]
    next_token = page[size - 1] if len(page) > size else None
    return _json(formats.identifiers(page[:size], next_token))


async def load_table(
    request: Request, namespace: str, topic_name: TopicName, broker: FreshBroker
) -> Response:
    """Return a table's metadata, with its newest snapshots.

    Clients without a plan of the broker find manifests in the store, which this request writes if
    the table has a new version. The answer has an ETag, which an `If-None-Match` may name.
    """
    topic = _topic(namespace, topic_name, broker)
    is_planned = request.url.path.startswith(f"{ICEBERG.mounts[1]}/")
    table = await (broker.iceberg.load_planned if is_planned else broker.iceberg.load)(topic)
    answer = {
        "metadata-location": table.metadata_location,
        "metadata": table.metadata,
        "config": {"scan-planning-mode": "server"} if is_planned else {},
    }
    body = formats.encode(answer)
    headers = {"ETag": formats.etag_of(body)}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


async def has_table(namespace: str, topic_name: TopicName, broker: FreshBroker) -> Response:
    """Respond with 204 if the table exists."""
    _topic(namespace, topic_name, broker)
    return Response(status_code=204)


async def report_metrics(namespace: str, topic_name: TopicName, request: Request) -> Response:
    """Take a client's report of a scan, and drop it."""
    _topic(namespace, topic_name, broker_of(request))
    return Response(status_code=204)


async def plan_scan(
    request: Request, namespace: str, topic_name: TopicName, broker: FreshBroker
) -> Response:
    """Return the files of a scan: those that may have rows that match its filter.

    Nothing is written. A plan has at most 2,000 files; the next ones are those of its task.
    """
    topic = _topic(namespace, topic_name, broker)
    plan = formats.plan_request(await request.body())
    if plan.start_snapshot_id is not None or plan.end_snapshot_id is not None:
        raise UnsupportedPlan(
            "an incremental scan is not planned here: leave out the warehouse, and the client "
            "plans it"
        )
    position = PlanPosition(plan.snapshot_id, 0, plan.filter)
    return _json({"status": "completed", **await _tasks(broker, topic, position)})


async def get_plan_tasks(
    request: Request, namespace: str, topic_name: TopicName, broker: FreshBroker
) -> Response:
    """Return the files of a plan's task."""
    topic = _topic(namespace, topic_name, broker)
    position = formats.task_position(await request.body())
    return _json(await _tasks(broker, topic, position))


async def _tasks(broker: Broker, topic: Topic, position: PlanPosition) -> dict[str, Any]:
    planned = await broker.iceberg.plan(
        topic, position.snapshot_id, position.filter, position.first, formats.FILES_MAX
    )
    if planned is None:
        raise NoSuchSnapshot(
            f"topic {topic.name!r} has no files of snapshot {position.snapshot_id}: load the table"
        )
    return formats.scan_tasks(planned, position)


def _check_namespace(namespace: str) -> None:
    if namespace != NAMESPACE:
        raise NoSuchNamespace(
            f"there is no namespace {namespace[:SHOWN_MAX]!r}: the namespace is {NAMESPACE!r}"
        )


def _topic(namespace: str, name: str, broker: Broker) -> Topic:
    _check_namespace(namespace)
    return broker.state.topic(name)


def _json(
    answer: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    body = formats.encode(answer)
    return Response(body, status, media_type="application/json", headers=headers)


_NAMESPACE = "/namespaces/{namespace}"
_TABLES = f"{_NAMESPACE}/tables"
_TABLE = f"{_TABLES}/{{topic_name}}"
_DESCRIBE = Permission(DESCRIBE_TOPIC, "topic_name")
_READ = Permission(FETCH, "topic_name")
_ANY_KEY = RouteAccess.ANY_KEY
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_ERRORS = {400: ERRORS[400], 404: "no such namespace or table", 503: ERRORS[503]}
_DOC = RouteDoc(_ERRORS)
_LOAD_DOC = RouteDoc(_ERRORS | {422: "a parameter is invalid"})
_NO_CONTENT_DOC = RouteDoc(_ERRORS, 204)
_PLAN_DOC = RouteDoc(_ERRORS | {406: "an incremental scan", 413: "the body is over its limit"})
_TOKEN_DOC = RouteDoc(
    {400: "the form has no secret", 401: "no key has this secret", 413: "the body is too large"}
)

ROUTES = (
    Route("GET", "/config", get_config, _ANY_KEY, LABEL, ICEBERG, _DOC),
    Route(
        "POST",
        "/oauth/tokens",
        get_token,
        RouteAccess.PUBLIC,
        LABEL,
        ICEBERG,
        _TOKEN_DOC,
        is_reading=True,
    ),
    Route("GET", "/namespaces", list_namespaces, _ANY_KEY, LABEL, ICEBERG, _DOC),
    Route("GET", _NAMESPACE, get_namespace, _ANY_KEY, LABEL, ICEBERG, _DOC),
    Route("GET", _TABLES, list_tables, _CHECKED, LABEL, ICEBERG, _LOAD_DOC),
    Route("GET", _TABLE, load_table, _READ, LABEL, ICEBERG, _DOC),
    Route("HEAD", _TABLE, has_table, _DESCRIBE, LABEL, ICEBERG, _NO_CONTENT_DOC),
    Route(
        "POST",
        f"{_TABLE}/metrics",
        report_metrics,
        _READ,
        LABEL,
        ICEBERG,
        _NO_CONTENT_DOC,
        is_reading=True,
    ),
    Route("POST", f"{_TABLE}/plan", plan_scan, _READ, LABEL, ICEBERG, _PLAN_DOC, is_reading=True),
    Route(
        "POST", f"{_TABLE}/tasks", get_plan_tasks, _READ, LABEL, ICEBERG, _PLAN_DOC, is_reading=True
    ),
)

_ENDPOINTS = [
    f"{route.method} /v1/{{prefix}}{route.path.replace('{topic_name}', '{table}')}"
    for route in ROUTES
    if route.path.startswith("/namespaces")
] + [f"HEAD /v1/{{prefix}}{_NAMESPACE}"]
"""The routes as the configuration lists them."""
