"""ACLs in Confluent's v3 dialect: created, found by filters, deleted.

A deletion names what it deletes; a DELETE or PUT refuses unknown parameters.
"""

import asyncio
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, assert_refused
from tests.service.keyed import ADMIN, ADMIN_KEY, SETTINGS
from tests.support.broker import error_line, json_of, tidelog
from tidelog.storage.core.acls import Acl

WORDS = ("resource_type", "pattern_type", "operation", "permission")
ANYTHING = dict.fromkeys(WORDS, "ANY")
RULES = [
    Acl("TOPIC", "a", "LITERAL", "User:alice", "*", "READ", "DENY"),
    Acl("TOPIC", "b", "PREFIXED", "User:bob", "*", "WRITE", "ALLOW"),
    Acl("GROUP", "a", "LITERAL", "User:alice", "10.0.0.1", "READ", "ALLOW"),
]
READ = {
    "resource_type": "TOPIC",
    "resource_name": "t",
    "pattern_type": "LITERAL",
    "principal": "User:alice",
    "host": "*",
    "operation": "READ",
    "permission": "ALLOW",
}


pytestmark = pytest.mark.broker(**SETTINGS)


async def ask(broker: Broker, method: str, path: str = "acls", **sent: Any) -> httpx.Response:
    return await broker.http.request(method, f"{broker.v3}/{path}", headers=ADMIN, **sent)


async def test_acl_is_created_found_and_deleted(broker: Broker) -> None:
    made = await ask(broker, "POST", json=READ)
    assert (made.status_code, made.content) == (201, b"")
    lower = {name: text.lower() if name in WORDS else text for name, text in READ.items()}
    assert (await ask(broker, "POST", json=lower)).status_code == 201
    said = (await ask(broker, "GET")).json()
    assert said["kind"] == "KafkaAclList"
    assert said["metadata"]["next"] is None
    (shown,) = said["data"]
    assert shown["kind"] == "KafkaAcl"
    assert shown["cluster_id"] == broker.log.identity.cluster_id
    assert {name: shown[name] for name in READ} == READ
    assert made.headers["location"] == shown["metadata"]["self"]
    answer = await broker.http.get(made.headers["location"], headers=ADMIN)
    assert answer.json()["data"] == [shown]
    deletion = await ask(broker, "DELETE", params=ANYTHING | {"principal": "User:alice"})
    assert (deletion.status_code, deletion.json()) == (200, {"data": [shown]})
    assert (await ask(broker, "GET")).json()["data"] == []
    assert (await ask(broker, "DELETE", params=ANYTHING)).json() == {"data": []}


async def test_batch_is_all_or_nothing(broker: Broker) -> None:
    batch = [READ, READ | {"operation": "WRITE"}, READ | {"resource_type": "GROUP"}]
    bad = await ask(broker, "POST", "acls:batch", json={"data": [*batch, READ | {"host": ""}]})
    assert (bad.status_code, bad.json()["error_code"]) == (400, 40002)
    assert not len(broker.log.state.access.acls)
    made = await ask(broker, "POST", "acls:batch", json={"data": batch})
    assert (made.status_code, made.content) == (201, b"")
    assert len(broker.log.state.access.acls) == 3
    for params, count in (
        ({"resource_type": "topic"}, 2),
        ({"operation": "WRITE"}, 1),
        ({"resource_name": "t", "pattern_type": "MATCH"}, 3),
        ({"resource_name": "", "principal": "", "host": ""}, 3),
        ({"resource_name": "u"}, 0),
        ({"permission": "DENY"}, 0),
    ):
        assert len((await ask(broker, "GET", params=params)).json()["data"]) == count, params


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"resource_type": "ANY"}, 400),
        ({"resource_type": "DELEGATION_TOKEN"}, 400),
        ({"pattern_type": "MATCH"}, 400),
        ({"operation": "ANY"}, 400),
        ({"permission": "UNKNOWN"}, 400),
        ({"resource_type": "CLUSTER"}, 400),
        ({"principal": "alice"}, 400),
        ({"principal": None}, 422),
        ({"more": "fields"}, 422),
    ],
)
async def test_what_is_no_acl(broker: Broker, change: dict[str, Any], status: int) -> None:
    answer = await ask(broker, "POST", json=READ | change)
    assert answer.status_code == status, answer.text
    assert answer.json()["error_code"] == (40002 if status == 400 else 422)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_what_is_no_filter(broker: Broker, method: str) -> None:
    await ask(broker, "POST", json=READ)
    answer = await ask(broker, method, params=ANYTHING | {"operation": "FLY"})
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
    assert len(broker.log.state.access.acls) == 1


REFUSED: list[tuple[Any, str]] = [
    ({}, "resource_type"),
    ({"principal": "User:alice"}, "resource_type"),
    *(({name: "ANY" for name in WORDS if name != left}, left) for left in WORDS),
    *((ANYTHING | {name: ""}, name) for name in WORDS),
    *((ANYTHING | {name: "UNKNOWN"}, name) for name in WORDS),
    *((ANYTHING | {name: ""}, name) for name in ("resource_name", "principal", "host")),
    ({"resourceType": "TOPIC", "resourceName": "a"}, "resourceType"),
    (ANYTHING | {"resourceName": "a"}, "resourceName"),
    (ANYTHING | {"Principal": "User:alice"}, "Principal"),
    (ANYTHING | {"principal ": "User:alice"}, "principal "),
    (ANYTHING | {"dry_run": "true"}, "dry_run"),
    ([*ANYTHING.items(), ("principal", "User:x"), ("principal", "User:alice")], "principal"),
    ([*ANYTHING.items(), ("operation", "READ")], "operation"),
]


@pytest.mark.broker(acls=RULES)
async def test_deletion_without_whole_filter_deletes_nothing(broker: Broker) -> None:
    for query, naming in REFUSED:
        answer = await ask(broker, "DELETE", params=query)
        assert naming in assert_refused(answer, 400, 40002, "application/json"), query
        assert set(broker.log.state.access.acls) == set(RULES), query


@pytest.mark.broker(acls=RULES)
@pytest.mark.parametrize(
    ("query", "left"),
    [
        ({}, []),
        ({"resource_type": "any", "operation": "any"}, []),
        ({"resource_type": "TOPIC"}, RULES[2:]),
        ({"permission": "deny"}, RULES[1:]),
        ({"principal": "User:alice"}, RULES[1:2]),
        ({"principal": "User:carol"}, RULES),
        ({"host": "10.0.0.1"}, RULES[:2]),
        ({"resource_name": "a", "resource_type": "GROUP"}, RULES[:2]),
        ({"resource_name": "bc", "pattern_type": "MATCH"}, [RULES[0], RULES[2]]),
    ],
    ids=str,
)
async def test_deletion_deletes_what_its_filter_names(
    broker: Broker, query: dict[str, str], left: list[Acl]
) -> None:
    answer = await ask(broker, "DELETE", params=ANYTHING | query)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == len(RULES) - len(left)
    assert set(broker.log.state.access.acls) == set(left)


@pytest.mark.broker(acls=RULES)
async def test_listing_needs_no_filter(broker: Broker) -> None:
    for query in ({}, {"principal": ""}, {"other": "x"}):
        answer = await ask(broker, "GET", params=query)
        assert (answer.status_code, len(answer.json()["data"])) == (200, len(RULES))


@pytest.mark.broker(acls=RULES)
async def test_no_delete_or_put_ignores_parameter(broker: Broker) -> None:
    await broker.log.topics.create("t", 1, {"retention.ms": "7200000"})
    document = (await broker.http.get("/openapi.json", headers=ADMIN)).json()
    in_front = "/consumers/"  # served before the application: its routes name what they delete
    routes = [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("delete", "put") and not path.startswith(in_front)
    ]
    assert len(routes) >= 8
    names = {"cluster_id": broker.log._log.wal.cluster.cluster_id, "topic_name": "t"}
    names |= {"name": "retention.ms", "principal": "User:alice", "key_id": "k"}
    names |= {"consumer_group_id": "g", "broker_id": "1"}
    before = broker.log.state.encode()
    for method, path in routes:
        url = path.format(**names)
        body = {"value": "3600000"} if "configs" in path else {"producer_byte_rate": 1000}
        sent: dict[str, Any] = {"headers": ADMIN} | ({"json": body} if method == "PUT" else {})
        answer = await broker.http.request(method, f"{url}?validate_only=true", **sent)
        assert "validate_only" in assert_refused(answer, 400, 40002, answer.headers["content-type"])
    assert broker.log.state.encode() == before


@pytest.mark.broker(acls=RULES)
async def test_command_line_removes_what_it_names(broker: Broker, port: int) -> None:
    async def remove(url: str, *options: str, status: int = 0) -> Any:
        return await asyncio.to_thread(
            tidelog,
            *("acls", "remove", "--yes", "--json", *options),
            status=status,
            TIDELOG_URL=url,
            TIDELOG_KEY=ADMIN_KEY,
        )

    url = f"http://127.0.0.1:{port}"
    refused = await remove(url, "--topic", "", status=1)
    assert "resource_name is empty" in error_line(refused)
    assert set(broker.log.state.access.acls) == set(RULES)
    removed_acls = json_of(await remove(url, "--principal", "alice", "-o", "read", "--topic", "a"))
    assert [acl["resource_type"] for acl in removed_acls] == ["TOPIC"]
    assert set(broker.log.state.access.acls) == set(RULES[1:])
    removed_acls = json_of(await remove(url, "--principal", "alice"))
    assert [acl["resource_type"] for acl in removed_acls] == ["GROUP"]
    assert set(broker.log.state.access.acls) == {RULES[1]}
