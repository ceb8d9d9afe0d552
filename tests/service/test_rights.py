"""Every route has a rule, and keeps it: a key alone opens nothing, and without one all is shut."""

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service import rights
from service.rights import RULES, Need, Open
from storage.objectstore import MemoryStore
from tests.service.conftest import Broker, append
from tests.service.keyed import ADMIN, assert_denied, assert_unknown, key_of, secured

CONSUMES = {"content-type": "application/vnd.kafka.v2+json"}
HOT = {"produce", "fetch", "records", "transactions", "consumers", "consume", "commit"}
ABOUT_BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/admin/topics"): {"topic_name": "new", "partitions_count": 1},
    ("POST", "/clusters/{cluster_id}/topics"): {"topic_name": "new"},
    ("POST", "/clusters/{cluster_id}/transactions"): {
        "topics": [{"topic_name": "t", "records": [{"value": {"type": "JSON", "data": 1}}]}]
    },
}
"""Whose right is asked for by the handler, and what they would change."""


def walked(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Method and template of each route, of routers as they were written."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from walked(inner.routes)
        else:
            yield from ((method, route.path) for method in route.methods if method != "HEAD")


def inside(app: Any) -> FastAPI:
    found: FastAPI = app._app
    return found


@pytest.fixture
async def broker(store: MemoryStore) -> AsyncIterator[Broker]:
    async with secured(store) as broker:
        await broker.log.create_topic("t", 1, {})
        await append(broker.log, b"1")
        yield broker


def address(route: str, broker: Broker) -> str:
    """A path that the template fits, of things that exist where they can."""
    cluster = broker.log.wal.cluster.cluster_id
    known = {"topic_name": "t", "cluster_id": cluster, "partition_id": "0", "broker_id": "1"}
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda match: known.get(match[1], "g"), route)
    return f"/v3{path}" if route.startswith("/clusters") else path


def routes(broker: Broker) -> list[tuple[str, str]]:
    found = sorted({*walked(inside(broker.app).routes)})
    assert len(found) > 80
    return [each for each in found if not each[1].startswith("/kafka/v3")]


async def asked(broker: Broker, method: str, route: str, headers: dict[str, str]) -> httpx.Response:
    body = ABOUT_BODIES.get((method, re.sub("^/v3", "", route)), {})
    sent = {} if method == "GET" else {"json": body}
    if "/consumers/" in route and route.startswith("/consumers"):
        headers = headers | CONSUMES
    return await broker.http.request(method, address(route, broker), headers=headers, **sent)


async def test_every_route_has_a_rule_and_every_rule_a_route(broker: Broker) -> None:
    found = {(method, re.sub("^(/kafka)?/v3", "", route)) for method, route in routes(broker)}
    assert found == set(RULES)
    for method, route in routes(broker):
        assert rights.rule_of(method, route) is not None


async def test_the_hot_path_asks_for_what_the_table_says(broker: Broker) -> None:
    hot = 0
    for method, route in routes(broker):
        found = broker.app._route(method, address(route, broker))
        if found is None:
            continue
        hot += 1
        rule = rights.rule_of(method, route)
        if isinstance(rule, Need):
            assert (found[2], found[3]) == (rule, "g" if rule.resource_type == "GROUP" else "t")
        else:
            assert (found[2], rule) == (None, Open.INSIDE)
    assert hot == 19


async def test_without_a_key_only_what_is_public_answers(broker: Broker) -> None:
    for method, route in routes(broker):
        answer = await asked(broker, method, route, {})
        if rights.rule_of(method, route) is Open.PUBLIC:
            assert answer.status_code != 403, (method, route)
            assert answer.status_code != 401 or route.endswith("/login"), (method, route)
        else:
            assert_unknown(answer)
    assert {route for (_, route), rule in RULES.items() if rule is Open.PUBLIC} == {
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
        match rights.rule_of(method, route):
            case Need():
                assert_denied(answer)
            case Open.INSIDE if method != "GET":
                assert_denied(answer)
            case Open.INSIDE:
                said = answer.json()
                assert answer.status_code == 200, (method, route, answer.text)
                assert (said["data"] if isinstance(said, dict) else said) == [], route
            case _:
                assert answer.status_code not in (401, 403), (method, route, answer.text)
    assert broker.log.state.encode() == before


async def test_what_is_mounted_twice_is_guarded_twice(broker: Broker) -> None:
    nobody = await key_of(broker.log, "User:nobody")
    cluster = broker.log.wal.cluster.cluster_id
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
async def test_what_is_not_there_is_not_told_to_whoever_has_no_key(
    broker: Broker, path: str
) -> None:
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
