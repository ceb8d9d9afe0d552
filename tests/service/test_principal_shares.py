"""Bounds of the cluster's state have no shares, so one principal takes all of each."""

import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import JSON, V2, Broker, placed
from tests.service.keyed import SETTINGS, allow, key_of
from tidelog.storage.state import committed_offsets, group_members, outcome

BOUND = 50
MEMBERS = 5
RECORD = '{"records":[{"value":"%s"}]}'


class Client:
    """A principal that may do all with the topics and groups whose names begin with its own."""

    def __init__(self, broker: Broker, name: str, header: dict[str, str]) -> None:
        self.broker, self.name, self.header = broker, name, header

    async def post(
        self, path: str, body: Any, media_type: str = V2, **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, str) else json.dumps(body)
        sent = self.header | {"content-type": media_type} | headers
        return await self.broker.http.post(path, content=content, headers=sent)

    async def produce(self, key: str, value: str) -> httpx.Response:
        headers = {"idempotency-key": f'"{key}"'}
        return await self.post(f"/topics/{self.name}.t", RECORD % value, JSON, **headers)

    async def instance(self, name: str, **more: Any) -> httpx.Response:
        body = {"name": name, "format": "json"} | more
        return await self.post(f"/consumers/{self.name}.g", body)

    async def commit(self, instance: str, partitions: int) -> httpx.Response:
        path = f"/consumers/{self.name}.g/instances/{instance}"
        assignments = [
            {"topic": f"{self.name}.t", "partition": number} for number in range(partitions)
        ]
        assigned = await self.post(f"{path}/assignments", {"partitions": assignments})
        assigned.raise_for_status()
        offsets = [assignment | {"offset": 0} for assignment in assignments]
        return await self.post(f"{path}/offsets", {"offsets": offsets})


pytestmark = pytest.mark.broker(**SETTINGS)


async def client(broker: Broker, name: str) -> Client:
    await broker.log.create_topic(f"{name}.t", BOUND * 2, {})
    for resource_type in ("TOPIC", "GROUP"):
        await allow(broker.log, f"User:{name}", "ALL", resource_type, f"{name}.", "PREFIXED")
    return Client(broker, name, await key_of(broker.log, f"User:{name}"))


async def test_a_stranger_does_not_end_an_idempotency_key(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "KEYS_MAX", BOUND)
    alice, mallory = await client(broker, "alice"), await client(broker, "mallory")
    first = placed(await alice.produce("order-18", "a"))
    cluster = broker.log.wal.cluster.cluster_id
    record = '{"partition_id":0,"value":{"type":"JSON","data":1}}'
    await mallory.post(
        f"/v3/clusters/{cluster}/topics/mallory.t/records",
        record * (BOUND + 10),
        "application/json",
        **{"idempotency-key": '"one"'},
    )
    await alice.post("/topics/alice.t", RECORD % "b", JSON)
    assert placed(await alice.produce("order-18", "a")) == first


async def test_a_stranger_does_not_take_an_idempotency_key(broker: Broker) -> None:
    alice, mallory = await client(broker, "alice"), await client(broker, "mallory")
    placed(await mallory.produce("order-17", "mine"))
    assert (await alice.produce("order-17", "a")).status_code == 200


async def test_a_stranger_does_not_use_up_the_offsets(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_offsets, "OFFSETS_MAX", BOUND)
    alice, mallory = await client(broker, "alice"), await client(broker, "mallory")
    for caller, partitions in ((mallory, BOUND), (alice, 1)):
        (await caller.instance("i")).raise_for_status()
        committed = await caller.commit("i", partitions)
    assert committed.status_code == 200, committed.text


async def test_a_stranger_does_not_use_up_the_members(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_members, "MEMBERS_MAX", MEMBERS)
    alice, mallory = await client(broker, "alice"), await client(broker, "mallory")
    for number in range(MEMBERS):
        await mallory.instance(f"i{number}")
    assert (await alice.instance("i")).status_code == 200


async def test_a_session_ends_within_half_an_hour(broker: Broker) -> None:
    mallory = await client(broker, "mallory")
    half_an_hour = 30 * 60 * 1000
    made = await mallory.instance("i", **{"session.timeout.ms": half_an_hour})
    made.raise_for_status()
    answer = await mallory.instance("j", **{"session.timeout.ms": 2**31 - 1})
    assert answer.status_code in (400, 422)
