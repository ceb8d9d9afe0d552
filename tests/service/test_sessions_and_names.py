"""Sessions that do not end, names that are shown, lines that are missing or too many."""

import json

import httpx
import pytest

from tests.service.conftest import JSON, V2, Broker
from tests.service.keyed import ADMIN_KEY, SETTINGS, allow, key_of

ALICE, BOB = "User:alice", "User:bob"
SECRET = "secret-topic"
INSTANCE = "/consumers/g/instances/i"
pytestmark = pytest.mark.broker(topics={SECRET: 1}, **SETTINGS)


@pytest.fixture
async def instance(broker: Broker) -> dict[str, str]:
    """An instance of alice. The header of bob, with the right to read the group and no other."""
    for resource_type, name in (("GROUP", "g"), ("TOPIC", SECRET)):
        await allow(broker.log, ALICE, "ALL", resource_type, name)
    await allow(broker.log, BOB, "READ", "GROUP", "g")
    header = await key_of(broker.log, ALICE) | {"content-type": V2}
    for path, body in (
        ("/consumers/g", {"name": "i", "format": "json"}),
        (f"{INSTANCE}/subscription", {"topics": [SECRET]}),
    ):
        answer = await broker.http.post(path, content=json.dumps(body), headers=header)
        answer.raise_for_status()
    offsets = {"offsets": [{"topic": SECRET, "partition": 0, "offset": 0}]}
    accepting = header | {"accept": JSON}
    read = await broker.http.get(f"{INSTANCE}/records?timeout=0", headers=accepting)
    read.raise_for_status()
    committed = await broker.http.post(
        f"{INSTANCE}/offsets", content=json.dumps(offsets), headers=header
    )
    committed.raise_for_status()
    return await key_of(broker.log, BOB) | {"content-type": V2}


@pytest.mark.parametrize("what", ["offsets", "subscription", "assignments"])
async def test_group_does_not_show_what_is_not_to_be_seen(
    broker: Broker, instance: dict[str, str], what: str
) -> None:
    answer = await broker.http.get(f"{INSTANCE}/{what}", headers=instance)
    assert SECRET not in answer.text


async def test_v3_does_not_show_what_is_not_to_be_seen(
    broker: Broker, instance: dict[str, str]
) -> None:
    await allow(broker.log, BOB, "DESCRIBE", "GROUP", "g")
    cluster = broker.log._log.wal.cluster.cluster_id
    group = f"/v3/clusters/{cluster}/consumer-groups/g/consumers"
    consumers = (await broker.http.get(group, headers=instance)).json()["data"]
    name = consumers[0]["consumer_id"]
    answer = await broker.http.get(f"{group}/{name}/assignments", headers=instance)
    answer.raise_for_status()
    assert SECRET not in answer.text


async def test_commit_needs_topic_too(broker: Broker, instance: dict[str, str]) -> None:
    answer = await broker.http.post(f"{INSTANCE}/offsets", content=b"", headers=instance)
    assert answer.status_code == 403


@pytest.mark.parametrize("path", ["/tidelog/v1/me", f"/topics/{SECRET}/partitions/0/records"])
async def test_answers_are_not_stored_or_guessed(broker: Broker, path: str) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer: httpx.Response = await broker.http.get(path, headers=headers)
    answer.raise_for_status()
    assert answer.headers.get("x-content-type-options") == "nosniff"
    assert "no-store" in answer.headers.get("cache-control", "")
