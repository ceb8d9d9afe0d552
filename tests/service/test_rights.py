"""Every route keeps to its declared access: a key without permissions opens nothing, and a request
without a key only what is public."""

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.conftest import Broker, http_client
from tests.service.keyed import ADMIN, SETTINGS, assert_denied, assert_unknown, key_of
from tidelog.service.http.route import V3, Permission, RouteAccess
from tidelog.service.security.caller import Forbidden, rights_of
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES

CONSUMES = {"content-type": "application/vnd.kafka.v2+json"}
ROUTES = (*HOT_ROUTES, *APP_ROUTES)
ABOUT_BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/admin/topics"): {"topic_name": "new", "partitions_count": 1},
    ("POST", "/clusters/{cluster_id}/topics"): {"topic_name": "new"},
    ("POST", "/clusters/{cluster_id}/transactions"): {
        "topics": [{"topic_name": "t", "records": [{"value": {"type": "JSON", "data": 1}}]}]
    },
}
"""Whose right is asked for by the handler, and what they would change."""


def inside(app: Any) -> FastAPI:
    application: FastAPI = app._app
    return application


pytestmark = pytest.mark.broker(topics={"t": 1}, records=[b"1"], **SETTINGS)


def address(route: str, broker: Broker) -> str:
    """A path that the template fits, of things that exist where they can."""
    cluster = broker.log.identity.cluster_id
    values = {"topic_name": "t", "cluster_id": cluster, "partition_id": "0", "broker_id": "1"}
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda match: values.get(match[1], "g"), route)
    return f"/v3{path}" if route.startswith("/clusters") else path


DECLARED = {
    (route.method, route.path if route.dialect is V3 else route.paths[0]): route for route in ROUTES
}
"""By method and path, without the mount of the v3 dialect."""


def routes(broker: Broker) -> list[tuple[str, str]]:
    assert len(DECLARED) == len(ROUTES) > 80
    return sorted(DECLARED)


async def asked(broker: Broker, method: str, route: str, headers: dict[str, str]) -> httpx.Response:
    body = ABOUT_BODIES.get((method, re.sub("^/v3", "", route)), {})
    sent = {} if method == "GET" else {"json": body}
    if "/consumers/" in route and route.startswith("/consumers"):
        headers = headers | CONSUMES
    return await broker.http.request(method, address(route, broker), headers=headers, **sent)


async def test_the_application_serves_the_declared_routes_and_no_others(broker: Broker) -> None:
    """A route that is not declared has no access: it must not exist."""
    served = {
        (method, route.path) for route in inside(broker.app).routes for method in route.methods
    }
    assert served == {(route.method, route.paths[0]) for route in APP_ROUTES}


async def test_every_path_leads_to_its_own_route(broker: Broker) -> None:
    hot = {id(route) for route in HOT_ROUTES}
    for (method, path), route in DECLARED.items():
        node, segments = broker.app._root.find(address(path, broker))
        assert node is not None, path
        target = node.methods[method]
        assert target.route is route
        assert target.is_declared == (id(route) not in hot)
        if isinstance(route.access, Permission) and route.access.parameter:
            assert target.name_at is not None
            assert segments[target.name_at] == (
                "g" if route.access.resource_type == "GROUP" else "t"
            )


async def test_a_topic_may_have_the_name_of_a_word(broker: Broker) -> None:
    """A word in a path is also a parameter of other routes: `-` is a topic's name."""
    await broker.log.create_topic("-", 1, {})
    cluster = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}"
    record = {"value": {"type": "JSON", "data": 1}}
    path = f"{cluster}/topics/-/records"
    assert (await broker.http.post(path, json=record, headers=ADMIN)).status_code == 200
    answer = await broker.http.get(f"{cluster}/topics/-", headers=ADMIN)
    assert answer.json()["topic_name"] == "-"
    assert (await broker.http.get(f"{cluster}/topics/-/configs", headers=ADMIN)).status_code == 200


async def test_a_method_that_no_route_has(broker: Broker) -> None:
    answer = await broker.http.put("/topics/t", headers=ADMIN, json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")
    assert answer.json() == {"error_code": 405, "message": "HTTP 405 Method Not Allowed"}
    assert_unknown(await broker.http.put("/topics/t", json={}))
    answer = await broker.http.put("/healthy", json={})
    assert answer.status_code == 405, "public: it needs no key"


async def test_the_document_says_what_needs_a_key(broker: Broker) -> None:
    document = (await broker.http.get("/openapi.json", headers=ADMIN)).json()
    assert set(document["components"]["securitySchemes"]) == {"basic", "bearer", "session"}
    keyed = [{"basic": []}, {"bearer": []}, {"session": []}]
    for route in ROUTES:
        if not route.doc.is_hidden:
            operation = document["paths"][route.paths[0]][route.method.lower()]
            if route.access is RouteAccess.PUBLIC:
                assert operation["security"] == []
            else:
                assert operation["security"][:3] == keyed


async def test_without_a_key_only_what_is_public_answers(broker: Broker) -> None:
    for method, route in routes(broker):
        answer = await asked(broker, method, route, {})
        if DECLARED[method, route].access is RouteAccess.PUBLIC:
            assert answer.status_code != 403, (method, route)
            assert answer.status_code != 401 or route.endswith("/login"), (method, route)
        else:
            assert_unknown(answer)
    assert {route.paths[0] for route in ROUTES if route.access is RouteAccess.PUBLIC} == {
        "/_health",
        "/docs",
        "/healthy",
        "/ready",
        "/startup",
        "/status/ready",
        "/tidelog/v1/login",
        "/tidelog/v1/logout",
        "/ui",
        "/ui/{path:path}",
    }


async def test_a_key_without_rights_opens_nothing_and_sees_nothing(broker: Broker) -> None:
    nobody = await key_of(broker.log, "User:nobody")
    before = broker.log.state.encode()
    for method, route in routes(broker):
        answer = await asked(broker, method, route, nobody)
        match DECLARED[method, route].access:
            case Permission():
                assert_denied(answer)
            case RouteAccess.CHECKED_BY_HANDLER if method != "GET":
                assert_denied(answer)
            case RouteAccess.CHECKED_BY_HANDLER:
                said = answer.json()
                assert answer.status_code == 200, (method, route, answer.text)
                assert (said["data"] if isinstance(said, dict) else said) == [], route
            case _:
                assert answer.status_code not in (401, 403), (method, route, answer.text)
    assert broker.log.state.encode() == before


async def test_what_is_mounted_twice_is_guarded_twice(broker: Broker) -> None:
    nobody = await key_of(broker.log, "User:nobody")
    cluster = broker.log.identity.cluster_id
    for path in ("topics/t", "acls", "consumer-groups/g", "topics/t/configs"):
        answer = await broker.http.get(f"/kafka/v3/clusters/{cluster}/{path}", headers=nobody)
        assert_denied(answer)
        assert_unknown(await broker.http.get(f"/kafka/v3/clusters/{cluster}/{path}"))
    answer = await broker.http.post(
        f"/kafka/v3/clusters/{cluster}/topics/t/records", headers=nobody, content=b"{}"
    )
    assert_denied(answer)


@pytest.mark.parametrize(
    "path", ["//topics//t/", "/topics/t/", "/topics/%74", "//topics/t/partitions/0/records"]
)
async def test_no_spelling_of_a_path_is_a_way_around(broker: Broker, path: str) -> None:
    nobody = await key_of(broker.log, "User:nobody")
    body = {"json": {"records": [{"value": "MQ=="}]}} if "records" not in path else {}
    method, path = ("POST" if body else "GET"), f"http://tide:8082{path}"
    assert_denied(await broker.http.request(method, path, headers=nobody, **body))
    assert_unknown(await broker.http.request(method, path, **body))


@pytest.mark.parametrize("path", ["/nothing", "/tidelog/v2/x", "/ui/../topics", "/healthy/x"])
async def test_absence_is_not_revealed_without_a_key(broker: Broker, path: str) -> None:
    assert_unknown(await broker.http.get(path))
    assert (await broker.http.get(path, headers=ADMIN)).status_code in (200, 404)


async def test_an_administrator_may_everything(broker: Broker) -> None:
    for method, route in routes(broker):
        answer = await asked(broker, method, route, ADMIN)
        assert answer.status_code not in (401, 403, 500) or route.endswith("/login"), (
            method,
            route,
            answer.text,
        )


async def test_a_request_without_a_caller_opens_nothing(broker: Broker) -> None:
    """A handler that is reached without `admit`, by a mistake, refuses."""
    rights = rights_of({})
    assert not rights.may("READ", "TOPIC", "t")
    with pytest.raises(Forbidden):
        await rights.check("READ", "TOPIC", "t")
    with pytest.raises(Forbidden):
        rights.charge("consumer_byte_rate")
    async with http_client(inside(broker.app)) as past:
        with pytest.raises(Forbidden, match="did not come through the router"):
            await past.get("/topics")
