"""ACLs in Confluent's v3 dialect: created, found by filters, deleted; and refused where security is
off."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker
from tests.service.keyed import ADMIN, secured
from tidelog.storage.store.memory import MemoryStore

ANYTHING = dict.fromkeys(("resource_type", "pattern_type", "operation", "permission"), "ANY")
READ = {
    "resource_type": "TOPIC",
    "resource_name": "t",
    "pattern_type": "LITERAL",
    "principal": "User:alice",
    "host": "*",
    "operation": "READ",
    "permission": "ALLOW",
}


@pytest.fixture
async def broker(store: MemoryStore) -> AsyncIterator[Broker]:
    async with secured(store) as broker:
        yield broker


async def ask(broker: Broker, method: str, path: str = "acls", **sent: Any) -> httpx.Response:
    url = f"/v3/clusters/{broker.log.identity.cluster_id}/{path}"
    return await broker.http.request(method, url, headers=ADMIN, **sent)


async def test_an_acl_is_created_found_and_deleted(broker: Broker) -> None:
    made = await ask(broker, "POST", json=READ)
    assert (made.status_code, made.content) == (201, b"")
    again = await ask(
        broker,
        "POST",
        json={
            name: text.lower()
            if name in ("resource_type", "pattern_type", "operation", "permission")
            else text
            for name, text in READ.items()
        },
    )
    assert again.status_code == 201
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


async def test_a_batch_is_all_or_nothing(broker: Broker) -> None:
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
