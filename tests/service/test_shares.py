"""Rates of requests, and answers above a share of the cluster's bounds."""

import json

import httpx
import pytest

from tests.service.conftest import JSON, V2, Broker, placed
from tests.service.keyed import MALLORY, OPEN_TO_MALLORY, RECORDS, allow, key_of, refill_nothing
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.state import group_members, tail_chunks
from tidelog.storage.state import shares as rules

pytestmark = OPEN_TO_MALLORY


@pytest.fixture
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    refill_nothing(monkeypatch)


async def set_quotas(broker: Broker, **quotas: int | None) -> None:
    await broker.log.change_access(SetQuotas(MALLORY, quotas))


@pytest.mark.usefixtures("time_stands_still")
async def test_mutations_above_the_rate_are_refused_and_produce_is_not(broker: Broker) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_quotas(broker, mutation_rate=1)
    headers = mallory | {"content-type": V2}
    answers = [
        await broker.http.post("/consumers/m.g", content="{}", headers=headers) for _ in range(4)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[-1].json()["message"].startswith("User:mallory has used up its mutation_rate")
    assert "1 requests a second" in answers[-1].json()["message"]
    assert int(answers[-1].headers["retry-after"]) >= 1
    headers = mallory | {"content-type": JSON}
    produced = await broker.http.post("/topics/m.t", content=RECORDS, headers=headers)
    assert produced.status_code == 200
    assert (await broker.http.get("/topics/m.t", headers=mallory)).status_code == 200
    alice = await key_of(broker.log, "User:alice")
    await allow(broker.log, "User:alice", "ALL", "GROUP", "a.", "PREFIXED")
    made = await broker.http.post(
        "/consumers/a.g", content="{}", headers=alice | {"content-type": V2}
    )
    assert made.status_code == 200


@pytest.mark.usefixtures("time_stands_still")
async def test_every_request_counts_for_the_rate_of_requests(broker: Broker) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_quotas(broker, request_rate=1)
    statuses = [
        (await broker.http.get("/topics/m.t", headers=mallory)).status_code for _ in range(4)
    ]
    assert statuses == [200, 200, 429, 429]
    await set_quotas(broker, request_rate=None)
    assert (await broker.http.get("/topics/m.t", headers=mallory)).status_code == 200


async def test_a_topic_above_the_share_is_429_with_the_bounds_name(broker: Broker) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_quotas(broker, partitions=3, topics=2)
    path = "/admin/topics"

    async def create(name: str, partitions: int) -> tuple[int, str]:
        body = {"topic_name": name, "partitions_count": partitions}
        answer = await broker.http.post(path, json=body, headers=mallory)
        return answer.status_code, answer.text

    assert (await create("m.1", 2))[0] == 201
    status, text = await create("m.2", 2)
    assert status == 429
    message = "the principal User:mallory has 2 of its 3 partitions and needs 2 more: delete topics"
    assert message in text
    assert "(bound partitions)" in text
    assert (await create("m.3", 1))[0] == 201
    assert (await create("m.4", 1))[0] == 429
    await broker.log.delete_topic("m.1")
    assert (await create("m.4", 1))[0] == 201


@pytest.mark.parametrize("acks", ["all", "1"])
async def test_a_keyed_request_above_the_share_is_refused_before_it_is_acknowledged(
    broker: Broker, acks: str
) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_quotas(broker, idempotency_keys=2)

    async def produce(key: str) -> int:
        headers = mallory | {"content-type": JSON, "idempotency-key": f'"{key}"'}
        path = f"/topics/m.t?acks={acks}"
        return (await broker.http.post(path, content=RECORDS, headers=headers)).status_code

    assert [await produce(key) for key in ("1", "2", "3", "1", "2")] == [200, 200, 429, 200, 200]
    end = broker.log.state.partition("m.t", 0).high_watermark
    assert end == 2


async def test_automatic_commits_count_for_the_members_principal(broker: Broker) -> None:
    mallory = await key_of(broker.log, MALLORY)
    headers = mallory | {"content-type": V2}
    body = '{"name":"i","format":"json","auto.offset.reset":"earliest"}'
    made = await broker.http.post("/consumers/m.g", content=body, headers=headers)
    made.raise_for_status()
    path = "/consumers/m.g/instances/i"
    subscribed = await broker.http.post(
        f"{path}/subscription", content='{"topics":["m.t"]}', headers=headers
    )
    subscribed.raise_for_status()
    sent = mallory | {"content-type": JSON}
    placed(await broker.http.post("/topics/m.t", content=RECORDS, headers=sent))
    for _ in range(2):
        accepted = mallory | {"accept": "application/vnd.kafka.json.v2+json"}
        read = await broker.http.get(f"{path}/records?timeout=100", headers=accepted)
        read.raise_for_status()
    await broker.consumers.commit_delivered()
    assert broker.log.state.committed_offsets.owners == {"m.g": MALLORY}


async def test_a_subscription_above_the_share_of_bytes_is_429(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_members, "MEMBER_BYTES_MAX", 40_000)
    headers = await key_of(broker.log, MALLORY) | {"content-type": V2}
    statuses = []
    for group in ("m.g", "m.h"):
        body = json.dumps({"name": "i"})
        made = await broker.http.post(f"/consumers/{group}", content=body, headers=headers)
        assert made.status_code == 200
        body = json.dumps({"topics": [f"m.{number}" for number in range(50)]})
        path = f"/consumers/{group}/instances/i/subscription"
        answer = await broker.http.post(path, content=body, headers=headers)
        statuses.append(answer.status_code)
    assert statuses == [204, 429]
    assert "bytes of subscriptions and assignments" in answer.json()["message"]
    assert "delete consumer instances" in answer.json()["message"]


@pytest.mark.parametrize("acks", ["all", "1", "0"])
async def test_records_above_the_share_of_chunks_are_429_until_the_topic_is_sealed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, acks: str
) -> None:
    share = 6
    monkeypatch.setattr(tail_chunks, "CHUNKS_MAX", share * rules.PARTS)
    headers = await key_of(broker.log, MALLORY) | {"content-type": JSON}
    await broker.log.create_topic("m.wide", 4, {})

    async def produce(partitions: int, acks: str = "all") -> httpx.Response:
        """Produce a record to each of the first partitions."""
        records = [{"partition": number, "value": 1} for number in range(partitions)]
        body = json.dumps({"records": records})
        path = f"/topics/m.wide?acks={acks}"
        return await broker.http.post(path, content=body, headers=headers)

    assert (await produce(4)).status_code == 200
    answer = await produce(3, acks)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "the topic 'm.wide' has 4 of its 6 chunks" in answer.json()["message"]
    ends = [partition.high_watermark for partition in broker.log.state.topic("m.wide").partitions]
    assert ends == [1, 1, 1, 1], "nothing of the request is in the log"
    assert (await produce(2)).status_code == 200
    assert (await produce(1)).status_code == 429
    assert (await broker.http.post("/topics/m.t", content=RECORDS, headers=headers)).is_success
    assert await broker.log.seal("m.wide") == 6
    assert (await produce(3, acks)).is_success


async def test_a_retry_of_a_keyed_request_above_the_share_of_chunks_gets_its_answer(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_chunks, "CHUNKS_MAX", rules.PARTS)
    headers = await key_of(broker.log, MALLORY) | {"content-type": JSON}

    async def produce(key: str) -> int:
        more = {"idempotency-key": f'"{key}"'}
        answer = await broker.http.post("/topics/m.t", content=RECORDS, headers=headers | more)
        return answer.status_code

    assert [await produce(key) for key in ("1", "2", "1")] == [200, 429, 200]
    await broker.log.seal("m.t")
    assert await produce("2") == 200
