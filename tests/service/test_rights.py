"""Every route keeps to its declared access, for every kind of principal.

A request without a key opens only what is public.

Routes and their access come from the table of the router. A route whose handler checks by itself
has a row in BY_HANDLER: a new one without a row fails.
"""

import importlib
import pkgutil
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.conftest import Broker, http_client
from tests.service.keyed import (
    ADMIN,
    SETTINGS,
    allow,
    assert_denied,
    assert_unknown,
    key_of,
    secured,
)
from tests.support.vloop import run
from tidelog.service import console as console_package
from tidelog.service import routes as routes_package
from tidelog.service.formats.iceberg import NAMESPACE
from tidelog.service.http.media_types import ARROW, EVENT_STREAM, JSON_V2_TYPES, NDJSON
from tidelog.service.http.route import V3, Permission, RouteAccess
from tidelog.service.operations.rights import FETCH
from tidelog.service.routes import login
from tidelog.service.security.authenticator import READING
from tidelog.service.security.caller import Forbidden, rights_of
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES
from tidelog.storage.core.acls import CLUSTER, DESCRIBE, GROUP, READ, RIGHTS_TO, TOPIC, WRITE
from tidelog.storage.core.actions import DeleteKey
from tidelog.storage.store.memory import MemoryStore

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
    declared = app._root.find("/healthy")[0].methods["GET"]
    application: FastAPI = declared.serve.__self__._app
    return application


pytestmark = pytest.mark.broker(topics={"t": 1}, records=[b"1"], **SETTINGS)


def address(route: str, broker: Broker) -> str:
    """A path that the template fits, of things that exist where they can."""
    cluster = broker.log.identity.cluster_id
    values = {"topic_name": "t", "cluster_id": cluster, "partition_id": "0", "broker_id": "1"}
    values["namespace"] = NAMESPACE
    assert "{topic}" not in route, "name the parameter {topic_name}, as other routes do"
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda match: values.get(match[1], "g"), route)
    return f"/v3{path}" if route.startswith("/clusters") else path


DECLARED = {
    (route.method, route.path if route.dialect is V3 else route.paths[0]): route for route in ROUTES
}
"""By method and path, without the mount of the v3 dialect."""


def test_router_has_the_routes_of_every_module() -> None:
    packages = (routes_package, console_package)
    names = [
        module.name
        for package in packages
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    modules = [importlib.import_module(name) for name in names]
    listed = [route for module in modules for route in getattr(module, "ROUTES", ())]
    assert {id(route) for route in listed} == {id(route) for route in ROUTES}


def routes(broker: Broker) -> list[tuple[str, str]]:
    assert len(DECLARED) == len(ROUTES) > 80
    return sorted(DECLARED)


async def asked(broker: Broker, method: str, route: str, headers: dict[str, str]) -> httpx.Response:
    body = ABOUT_BODIES.get((method, re.sub("^/v3", "", route)), {})
    sent = {} if method == "GET" else {"json": body}
    if "/consumers/" in route and route.startswith("/consumers"):
        headers = headers | CONSUMES
    return await broker.http.request(method, address(route, broker), headers=headers, **sent)


async def test_application_serves_declared_routes_and_no_others(broker: Broker) -> None:
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
                "g" if route.access.right.resource_type == "GROUP" else "t"
            )


async def test_topic_may_have_name_of_word(broker: Broker) -> None:
    """A word in a path is also a parameter of other routes: `-` is a topic's name."""
    await broker.log.topics.create("-", 1, {})
    cluster = f"{broker.v3}"
    record = {"value": {"type": "JSON", "data": 1}}
    path = f"{cluster}/topics/-/records"
    assert (await broker.http.post(path, json=record, headers=ADMIN)).status_code == 200
    answer = await broker.http.get(f"{cluster}/topics/-", headers=ADMIN)
    assert answer.json()["topic_name"] == "-"
    assert (await broker.http.get(f"{cluster}/topics/-/configs", headers=ADMIN)).status_code == 200


async def test_method_that_no_route_has(broker: Broker) -> None:
    answer = await broker.http.put("/topics/t", headers=ADMIN, json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")
    assert answer.json() == {"error_code": 405, "message": "HTTP 405 Method Not Allowed"}
    assert_unknown(await broker.http.put("/topics/t", json={}))
    answer = await broker.http.put("/healthy", json={})
    assert answer.status_code == 405, "public: it needs no key"


async def test_document_says_what_needs_key(broker: Broker) -> None:
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


def test_public_routes_are_few() -> None:
    assert {route.paths[0] for route in ROUTES if route.access is RouteAccess.PUBLIC} == {
        *("/_health", "/docs", "/healthy", "/ready", "/startup", "/status/ready"),
        *("/tidelog/v1/login", "/tidelog/v1/logout", "/ui", "/ui/{path:path}"),
        "/iceberg/v1/oauth/tokens",
    }


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
async def test_no_spelling_of_path_is_way_around(broker: Broker, path: str) -> None:
    nobody = await key_of(broker.log, "User:nobody")
    body = {"json": {"records": [{"value": "MQ=="}]}} if "records" not in path else {}
    method, path = ("POST" if body else "GET"), f"http://tide:8082{path}"
    assert_denied(await broker.http.request(method, path, headers=nobody, **body))
    assert_unknown(await broker.http.request(method, path, **body))


@pytest.mark.parametrize("path", ["/nothing", "/tidelog/v2/x", "/ui/../topics", "/healthy/x"])
async def test_absence_is_not_revealed_without_key(broker: Broker, path: str) -> None:
    assert_unknown(await broker.http.get(path))
    assert (await broker.http.get(path, headers=ADMIN)).status_code in (200, 404)


async def test_administrator_may_everything(broker: Broker) -> None:
    for method, route in routes(broker):
        answer = await asked(broker, method, route, ADMIN)
        assert answer.status_code not in (401, 403, 500) or route.endswith("/login"), (
            method,
            route,
            answer.text,
        )


async def test_request_without_caller_opens_nothing(broker: Broker) -> None:
    """A handler that is reached without `admit`, by a mistake, refuses."""
    rights = rights_of({})
    assert not rights.may(FETCH, "t")
    with pytest.raises(Forbidden):
        await rights.check(FETCH, "t")
    with pytest.raises(Forbidden):
        rights.charge("consumer_byte_rate")
    async with http_client(inside(broker.app)) as past:
        with pytest.raises(Forbidden, match="did not come through the router"):
            await past.get("/topics")


# -- each route with each kind of principal

GRANTS: dict[str, set[tuple[str, str]]] = {
    "nothing": set(),
    "reader": {(READ, TOPIC), (READ, GROUP)},
    "writer": {(WRITE, TOPIC)},
    "describer": {(DESCRIBE, TOPIC), (DESCRIBE, GROUP), (DESCRIBE, CLUSTER)},
}
"""Operations on topic t, group g and the cluster."""
IMPLIED = {READ: {DESCRIBE}, WRITE: {DESCRIBE}}
CLUSTER_ID = "/clusters/{cluster_id}"
ICEBERG = "/iceberg/v1"
BY_HANDLER: dict[tuple[str, str], set[str]] = {
    ("POST", f"{CLUSTER_ID}/transactions"): {"writer"},
    ("POST", f"{CLUSTER_ID}/topics"): set(),
    ("POST", "/admin/topics"): set(),
    **{
        ("GET", path): set(GRANTS)  # each sees a part of the list
        for path in (
            *("/topics", "/tidelog/v1/topics", "/tidelog/v1/groups", "/tidelog/v1/compactions"),
            f"{CLUSTER_ID}/topics",
            f"{CLUSTER_ID}/topics/-/configs",
            f"{CLUSTER_ID}/brokers/{{broker_id}}/partition-replicas",
            f"{CLUSTER_ID}/consumer-groups",
            f"{ICEBERG}/namespaces/{{namespace}}/tables",
        )
    },
}
"""The principals that are not refused."""
ACCEPTS = (
    *JSON_V2_TYPES,
    b"application/vnd.kafka.binary.v2+json",
    b"application/vnd.kafka.json.v2+json",
    ARROW,
    NDJSON,
    EVENT_STREAM,
    b"text/html, image/png",
)


def may(who: str, method: str, route: str) -> bool:
    access = DECLARED[method, route].access
    if access is RouteAccess.CHECKED_BY_HANDLER:
        return who in BY_HANDLER[method, route]
    if not isinstance(access, Permission):
        return True
    granted = {
        (implied, resource_type)
        for operation, resource_type in GRANTS[who]
        for implied in {operation, *IMPLIED.get(operation, ())}
    }
    return access.right in granted


def test_each_route_whose_handler_checks_has_row() -> None:
    by_handler = {
        key for key, route in DECLARED.items() if route.access is RouteAccess.CHECKED_BY_HANDLER
    }
    assert by_handler == BY_HANDLER.keys()
    named = {operation for grants in GRANTS.values() for operation, _ in grants}
    assert named <= {right.operation for rights in RIGHTS_TO.values() for right in rights}


@pytest.mark.parametrize("who", GRANTS)
async def test_principal_gets_what_it_was_granted_and_no_more(broker: Broker, who: str) -> None:
    header = await key_of(broker.log, f"User:{who}")
    names = {TOPIC: "t", GROUP: "g", CLUSTER: "kafka-cluster"}
    for operation, resource_type in GRANTS[who]:
        await allow(broker.log, f"User:{who}", operation, resource_type, names[resource_type])
    allowed, before = 0, broker.log.state.encode()
    for method, route in routes(broker):
        answer = await asked(broker, method, route, header)
        if not may(who, method, route):
            assert answer.status_code == 403
            assert method == "HEAD" or assert_denied(answer)
            continue
        allowed += 1
        assert answer.status_code not in (401, 403, 500), (method, route, answer.text)
        if who == "nothing" and DECLARED[method, route].access is RouteAccess.CHECKED_BY_HANDLER:
            said = answer.json()
            items = said.get("data", said.get("identifiers")) if isinstance(said, dict) else said
            assert items == [], route
    assert 20 < allowed < len(DECLARED)
    assert who != "nothing" or broker.log.state.encode() == before


@pytest.mark.parametrize("kind", ["no", "wrong", "malformed", "revoked"])
async def test_without_valid_key_only_public_routes_answer(broker: Broker, kind: str) -> None:
    header = await key_of(broker.log, "User:bob")
    await allow(broker.log, "User:bob", "ALL", "TOPIC", "*")
    if kind == "revoked":
        assert (await broker.http.get("/topics/t", headers=header)).status_code == 200
        (key_id,) = broker.log.state.access.keys
        await broker.log.access.change(DeleteKey(key_id))
    elif kind == "no":
        header = {}
    else:
        header = {"authorization": "Bearer of-nothing" if kind == "wrong" else "Digest x"}
    before = broker.log.state.encode()
    for method, route in routes(broker):
        answer = await asked(broker, method, route, header)
        if DECLARED[method, route].access is not RouteAccess.PUBLIC:
            assert answer.status_code == 401
            assert method == "HEAD" or assert_unknown(answer)
            continue
        assert kind != "no" or answer.status_code not in (401, 403) or route.endswith("/login")
        if DECLARED[method, route].label == "health":
            assert answer.status_code == 200, (method, route)
        else:
            assert answer.status_code != 500, (method, route, answer.text)
    assert broker.log.state.encode() == before


def test_wrong_login_takes_second_and_right_one_does_not() -> None:
    async def main() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        async with secured(MemoryStore()) as broker:
            for key, status, least_s in (
                ("w" * 40, 401, login.WRONG_LOGIN_S),
                (ADMIN["authorization"].removeprefix("Bearer "), 200, 0.0),
            ):
                started_s = loop.time()
                answer = await broker.http.post("/tidelog/v1/login", json={"key": key})
                assert answer.status_code == status
                assert least_s <= loop.time() - started_s < least_s + login.WRONG_LOGIN_S

    run(main)


def changes(broker: Broker) -> list[tuple[str, str, bytes]]:
    """Every route that changes something, with every type of an Accept."""
    changing = [(method, route) for method, route in routes(broker) if method not in READING]
    assert len(changing) > 40
    return [(method, route, accept) for method, route in changing for accept in ACCEPTS]


async def test_change_whose_answer_is_not_wanted_changes_nothing(broker: Broker) -> None:
    """A type that only other routes have is refused, too."""
    headers = ADMIN | {"content-type": "application/json"}
    made = await broker.http.post("/consumers/g", content=b'{"name":"g"}', headers=headers)
    assert made.status_code == 200, made.text
    before = broker.log.state.encode()
    for method, route, accept in changes(broker):
        if accept not in DECLARED[method, route].dialect.served:
            answer = await asked(broker, method, route, ADMIN | {"accept": accept.decode()})
            assert (answer.status_code, answer.json()["error_code"]) == (406, 40601), (
                method,
                route,
                accept,
            )
    assert broker.log.state.encode() == before


async def test_change_whose_answer_is_wanted_is_served(broker: Broker) -> None:
    for method, route, accept in changes(broker):
        if accept in DECLARED[method, route].dialect.served:
            answer = await asked(broker, method, route, ADMIN | {"accept": accept.decode()})
            assert answer.status_code not in (406, 500), (method, route, accept)


def test_documented_types_of_changes_are_served() -> None:
    for (method, _), route in DECLARED.items():
        contents = [content for answer in route.doc.answers.values() for content in answer.contents]
        types = {kind for content in contents for kind in content.media_types}
        assert method in READING or types <= set(route.dialect.served), route.path
