"""A deletion of ACLs names what it deletes; a DELETE or PUT refuses unknown parameters."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, listening
from tests.service.keyed import ADMIN, ADMIN_KEY, secured
from tests.support.broker import error_line, json_of, tidelog
from tidelog.storage.core.acls import Acl
from tidelog.storage.core.actions import CreateAcls
from tidelog.storage.store.memory import MemoryStore

WORDS = ("resource_type", "pattern_type", "operation", "permission")
ANYTHING = dict.fromkeys(WORDS, "ANY")
RULES = [
    Acl("TOPIC", "a", "LITERAL", "User:alice", "*", "READ", "DENY"),
    Acl("TOPIC", "b", "PREFIXED", "User:bob", "*", "WRITE", "ALLOW"),
    Acl("GROUP", "a", "LITERAL", "User:alice", "10.0.0.1", "READ", "ALLOW"),
]


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker with three rules."""
    store = MemoryStore()
    async with secured(store) as broker:
        await broker.log.create_topic("t", 1, {"retention.ms": "7200000"})
        await broker.log.change_access(CreateAcls(RULES))
        yield broker
    await store.close()


def v3(broker: Broker, path: str) -> str:
    return f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/{path}"


async def delete(broker: Broker, query: Any) -> httpx.Response:
    return await broker.http.request("DELETE", v3(broker, "acls"), params=query, headers=ADMIN)


def assert_refused(answer: httpx.Response, naming: str) -> None:
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (400, 40002), said
    assert naming in said["message"], said


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


async def test_a_deletion_that_does_not_say_what_deletes_nothing(broker: Broker) -> None:
    for query, naming in REFUSED:
        assert_refused(await delete(broker, query), naming)
        assert set(broker.log.state.access.acls) == set(RULES), query


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
async def test_a_deletion_that_says_what_deletes_that(
    broker: Broker, query: dict[str, str], left: list[Acl]
) -> None:
    answer = await delete(broker, ANYTHING | query)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == len(RULES) - len(left)
    assert set(broker.log.state.access.acls) == set(left)


async def test_a_listing_needs_no_filter(broker: Broker) -> None:
    for query in ({}, {"principal": ""}, {"other": "x"}):
        answer = await broker.http.get(v3(broker, "acls"), params=query, headers=ADMIN)
        assert (answer.status_code, len(answer.json()["data"])) == (200, len(RULES))


async def test_no_delete_or_put_ignores_a_parameter(broker: Broker) -> None:
    document = (await broker.http.get("/openapi.json", headers=ADMIN)).json()
    in_front = "/consumers/"  # served before the application: its routes name what they delete
    routes = [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("delete", "put") and not path.startswith(in_front)
    ]
    assert len(routes) >= 8
    names = {"cluster_id": broker.log.wal.cluster.cluster_id, "topic_name": "t"}
    names |= {"name": "retention.ms", "principal": "User:alice", "key_id": "k"}
    names |= {"consumer_group_id": "g", "broker_id": "1"}
    before = broker.log.state.encode()
    for method, path in routes:
        url = path.format(**names)
        body = {"value": "3600000"} if "configs" in path else {"producer_byte_rate": 1000}
        sent: dict[str, Any] = {"headers": ADMIN} | ({"json": body} if method == "PUT" else {})
        answer = await broker.http.request(method, f"{url}?validate_only=true", **sent)
        assert_refused(answer, "validate_only")
    assert broker.log.state.encode() == before


async def test_the_command_line_removes_what_it_names(broker: Broker) -> None:
    async def remove(url: str, *options: str, status: int = 0) -> Any:
        return await asyncio.to_thread(
            tidelog,
            *("acls", "remove", "--yes", "--json", *options),
            status=status,
            TIDELOG_URL=url,
            TIDELOG_KEY=ADMIN_KEY,
        )

    async with listening(broker.app) as port:
        url = f"http://127.0.0.1:{port}"
        refused = await remove(url, "--topic", "", status=1)
        assert "resource_name is empty" in error_line(refused)
        assert set(broker.log.state.access.acls) == set(RULES)
        removed_acls = json_of(
            await remove(url, "--principal", "alice", "-o", "read", "--topic", "a")
        )
        assert [acl["resource_type"] for acl in removed_acls] == ["TOPIC"]
        assert set(broker.log.state.access.acls) == set(RULES[1:])
        removed_acls = json_of(await remove(url, "--principal", "alice"))
        assert [acl["resource_type"] for acl in removed_acls] == ["GROUP"]
        assert set(broker.log.state.access.acls) == {RULES[1]}
