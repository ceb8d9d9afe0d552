"""Rates of requests, and answers above a share of the cluster's bounds.

No principal takes all of a bound.
"""

import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import JSON, V2, Broker, ends, placed
from tests.service.keyed import MALLORY, SETTINGS, allow, key_of, refill_nothing
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.state import (
    committed_offsets,
    group_members,
    idempotency_records,
    tail_chunk_counts,
)
from tidelog.storage.state import principal_shares as rules

BOUND = 50
MEMBERS = 5
RECORD = '{"records":[{"value":"%s"}]}'
pytestmark = pytest.mark.broker(**SETTINGS)


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

    async def produce(self, key: str = "", value: str = "1", acks: str = "all") -> httpx.Response:
        headers = {"idempotency-key": f'"{key}"'} if key else {}
        path = f"/topics/{self.name}.t?acks={acks}"
        return await self.post(path, RECORD % value, JSON, **headers)

    async def instance(self, name: str = "i", group: str = "g", **more: Any) -> httpx.Response:
        body = {"name": name, "format": "json", "auto.offset.reset": "earliest"} | more
        return await self.post(f"/consumers/{self.name}.{group}", body)

    async def of_instance(self, route: str, body: Any, group: str = "g") -> httpx.Response:
        return await self.post(f"/consumers/{self.name}.{group}/instances/i/{route}", body)

    async def commit(self, partitions: int) -> httpx.Response:
        places = [{"topic": f"{self.name}.t", "partition": number} for number in range(partitions)]
        (await self.of_instance("assignments", {"partitions": places})).raise_for_status()
        offsets = [place | {"offset": 0} for place in places]
        return await self.of_instance("offsets", {"offsets": offsets})

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.broker.http.get(path, headers=self.header | headers)

    async def set_quotas(self, **quotas: int | None) -> None:
        await self.broker.log.access.change(SetQuotas(f"User:{self.name}", quotas))


async def client(broker: Broker, name: str, partitions: int = 1) -> Client:
    await broker.log.topics.create(f"{name}.t", partitions, {})
    for resource_type in ("TOPIC", "GROUP"):
        await allow(broker.log, f"User:{name}", "ALL", resource_type, f"{name}.", "PREFIXED")
    return Client(broker, name, await key_of(broker.log, f"User:{name}"))


@pytest.fixture
async def mallory(broker: Broker) -> Client:
    return await client(broker, "mallory")


async def test_mutations_above_rate_are_refused_and_produce_is_not(
    broker: Broker, mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    refill_nothing(monkeypatch)
    await mallory.set_quotas(mutation_rate=1)
    answers = [await mallory.post("/consumers/mallory.g", "{}") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[-1].json()["message"].startswith("User:mallory has used up its mutation_rate")
    assert "1 requests a second" in answers[-1].json()["message"]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert (await mallory.produce()).status_code == 200
    assert (await mallory.get("/topics/mallory.t")).status_code == 200
    assert (await (await client(broker, "alice")).instance()).status_code == 200


async def test_every_request_counts_for_rate_of_requests(
    mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    refill_nothing(monkeypatch)
    await mallory.set_quotas(request_rate=1)
    statuses = [(await mallory.get("/topics/mallory.t")).status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    await mallory.set_quotas(request_rate=None)
    assert (await mallory.get("/topics/mallory.t")).status_code == 200


async def test_topic_above_share_is_429_with_name_of_bound(broker: Broker, mallory: Client) -> None:
    await mallory.set_quotas(partitions=3, topics=2)  # mallory.t is of no principal

    async def create(name: str, partitions: int) -> tuple[int, str]:
        body = {"topic_name": name, "partitions_count": partitions}
        answer = await mallory.post("/admin/topics", body, "application/json")
        return answer.status_code, answer.text

    assert (await create("mallory.1", 2))[0] == 201
    status, text = await create("mallory.2", 2)
    assert status == 429
    message = "the principal User:mallory has 2 of its 3 partitions and needs 2 more: delete topics"
    assert message in text
    assert "(bound partitions)" in text
    assert (await create("mallory.3", 1))[0] == 201
    assert (await create("mallory.4", 1))[0] == 429
    await broker.log.topics.delete("mallory.1")
    assert (await create("mallory.4", 1))[0] == 201


@pytest.mark.parametrize("acks", ["all", "1"])
async def test_keyed_request_above_share_is_refused_before_it_is_acknowledged(
    broker: Broker, mallory: Client, acks: str
) -> None:
    await mallory.set_quotas(idempotency_keys=2)
    statuses = [(await mallory.produce(key, acks=acks)).status_code for key in "12312"]
    assert statuses == [200, 200, 429, 200, 200]
    assert broker.log.state.partition("mallory.t", 0).high_watermark == 2


async def test_automatic_commits_count_for_principal_of_member(
    broker: Broker, mallory: Client
) -> None:
    (await mallory.instance()).raise_for_status()
    (await mallory.of_instance("subscription", {"topics": ["mallory.t"]})).raise_for_status()
    placed(await mallory.produce())
    for _ in range(2):
        path = "/consumers/mallory.g/instances/i/records?timeout=100"
        (await mallory.get(path, accept=JSON)).raise_for_status()
    await broker.consumers.commit_delivered()
    assert broker.log.state.committed_offsets.owners == {"mallory.g": MALLORY}


async def test_subscription_above_share_of_bytes_is_429(
    mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_members, "MEMBER_BYTES_MAX", 40_000)
    statuses = []
    for group in ("g", "h"):
        assert (await mallory.instance(group=group)).status_code == 200
        body = {"topics": [f"mallory.{number}" for number in range(50)]}
        answer = await mallory.of_instance("subscription", body, group)
        statuses.append(answer.status_code)
    assert statuses == [204, 429]
    assert "bytes of subscriptions and assignments" in answer.json()["message"]
    assert "delete consumer instances" in answer.json()["message"]


@pytest.mark.parametrize("acks", ["all", "1", "0"])
async def test_records_above_share_of_chunks_are_429_until_topic_is_sealed(
    broker: Broker, mallory: Client, monkeypatch: pytest.MonkeyPatch, acks: str
) -> None:
    share = 6
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", share * rules.PARTS)
    await broker.log.topics.create("mallory.wide", 4, {})

    async def produce(partitions: int, acks: str = "all") -> httpx.Response:
        """Produce a record to each of the first partitions."""
        records = [{"partition": number, "value": 1} for number in range(partitions)]
        return await mallory.post(f"/topics/mallory.wide?acks={acks}", {"records": records}, JSON)

    assert (await produce(4)).status_code == 200
    answer = await produce(3, acks)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "the topic 'mallory.wide' has 4 of its 6 chunks" in answer.json()["message"]
    assert ends(broker.log, "mallory.wide") == [1] * 4, "nothing of the request is in the log"
    assert (await produce(2)).status_code == 200
    assert (await produce(1)).status_code == 429
    assert (await mallory.produce()).is_success
    assert await broker.log.records.seal("mallory.wide") == 6
    assert (await produce(3, acks)).is_success


async def test_retry_of_keyed_request_above_share_of_chunks_gets_its_answer(
    broker: Broker, mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", rules.PARTS)
    assert [(await mallory.produce(key)).status_code for key in "121"] == [200, 429, 200]
    await broker.log.records.seal("mallory.t")
    assert (await mallory.produce("2")).status_code == 200


# -- without quotas


async def test_stranger_takes_and_ends_no_idempotency_key(
    broker: Broker, mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency_records, "KEYS_MAX", BOUND)
    alice = await client(broker, "alice")
    placed(await mallory.produce("order-18", "mine"))
    first = placed(await alice.produce("order-18", "a"))
    record = '{"partition_id":0,"value":{"type":"JSON","data":1}}'
    await mallory.post(
        f"{broker.v3}/topics/mallory.t/records",
        record * (BOUND + 10),
        "application/json",
        **{"idempotency-key": '"one"'},
    )
    await alice.produce(value="b")
    assert placed(await alice.produce("order-18", "a")) == first


async def test_stranger_does_not_use_up_offsets(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_offsets, "OFFSETS_MAX", BOUND)
    for name, partitions in (("mallory", BOUND), ("alice", 1)):
        caller = await client(broker, name, BOUND)
        (await caller.instance()).raise_for_status()
        committed = await caller.commit(partitions)
    assert committed.status_code == 200, committed.text


async def test_stranger_does_not_use_up_members(
    broker: Broker, mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_members, "MEMBERS_MAX", MEMBERS)
    for number in range(MEMBERS):
        await mallory.instance(f"i{number}")
    assert (await (await client(broker, "alice")).instance()).status_code == 200


async def test_session_ends_within_half_an_hour(mallory: Client) -> None:
    half_an_hour = 30 * 60 * 1000
    (await mallory.instance(**{"session.timeout.ms": half_an_hour})).raise_for_status()
    answer = await mallory.instance("j", **{"session.timeout.ms": 2**31 - 1})
    assert answer.status_code in (400, 422)
