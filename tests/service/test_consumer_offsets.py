"""Consumer instances (DIALECTS, v2 consumers): commits, positions, on one broker and several."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import (
    V2,
    Broker,
    append,
    assert_refused,
    broker_on,
    listening,
)
from tests.service.instances import STRIMZI, Instance, created, put, subscribed
from tidelog.storage.store.memory import MemoryStore

# -- offsets


async def test_confluent_commits_the_last_record_read(consumer: Instance, broker: Broker) -> None:
    body = {"offsets": [{"topic": "t", "partition": 0, "offset": 4, "metadata": "here"}]}
    await put(broker, *range(9))
    answer = await consumer("POST", "/offsets", body)
    assert (answer.status_code, answer.json()) == (200, [])
    said = await consumer.ok("GET", "/offsets", {"partitions": [{"topic": "t", "partition": 0}]})
    assert said == {"offsets": [{"topic": "t", "partition": 0, "offset": 5, "metadata": "here"}]}


async def test_strimzi_commits_the_next(broker: Broker, topic: str) -> None:
    answer = await broker.http.post("/consumers/g", content=json.dumps(STRIMZI))
    consumer = Instance(broker.http, f"/consumers/g/instances/{answer.json()['instance_id']}")
    await consumer.ok("POST", "/subscription", {"topics": ["t"]})
    body = {"offsets": [{"topic": "t", "partition": 0, "offset": 4}]}
    answer = await consumer("POST", "/offsets", body)
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await consumer.committed())[0] == 4
    assert (await consumer("POST", "/offsets", {})).status_code == 204


async def test_redpanda_commits_the_next(consumer: Instance) -> None:
    body = {"partitions": [{"topic": "t", "partition": 0, "offset": 4}]}
    assert (await consumer("POST", "/offsets", body)).status_code == 204
    assert (await consumer.committed())[0] == 4


async def test_no_body_commits_what_was_returned(consumer: Instance, broker: Broker) -> None:
    await put(broker, *range(3))
    await put(broker, 9, partition=1)
    for _ in range(2):
        await consumer.read(max_bytes=1)
    answer = await consumer.http.post(
        f"{consumer.path}/offsets?async=true", headers={"content-type": V2}
    )
    assert (answer.status_code, answer.json()) == (200, [])
    assert await consumer.committed() == {0: 1, 1: 1, 2: -1}


async def test_offsets_by_query_and_of_what_does_not_exist(consumer: Instance) -> None:
    said = await consumer.ok("GET", "/offsets?topic=t&partition=0&partition=2")
    assert [row["partition"] for row in said["offsets"]] == [0, 2]
    assert {row["offset"] for row in said["offsets"]} == {-1}
    for query, status, code in (
        ("topic=nope&partition=0", 404, 40401),
        ("topic=t&partition=9", 404, 40402),
        ("topic=t&topic=u&partition=0", 400, 40002),
        ("topic=t&partition=x", 400, 40002),
    ):
        assert_refused(await consumer("GET", f"/offsets?{query}"), status, code)
    for topic, number, code in (("nope", 0, 40401), ("t", 9, 40402)):
        body = {"offsets": [{"topic": topic, "partition": number, "offset": 1}]}
        assert_refused(await consumer("POST", "/offsets", body), 404, code)


async def test_a_partition_that_is_anothers_now_is_not_committed(
    consumer: Instance, broker: Broker
) -> None:
    other = await subscribed(broker)
    lost = (await other.ok("GET", "/assignments"))["partitions"][0]["partition"]
    body = {"offsets": [{"topic": "t", "partition": lost, "offset": 0}]}
    why = assert_refused(await consumer("POST", "/offsets", body), 409, 40903)
    assert "generation 2" in why


async def test_a_member_commits_results_and_offsets_in_one_request(
    consumer: Instance, broker: Broker
) -> None:
    await put(broker, 1, 2, 3)
    answer = await consumer("GET", "/records?max_bytes=1")
    assert len(answer.json()) == 1
    name = consumer.path.rpartition("/")[2]
    path = f"/v3/clusters/{broker.log.identity.cluster_id}/transactions"

    async def transact(**more: Any) -> httpx.Response:
        offset = {"topic_name": "t", "partition_id": 0, "offset": 1}
        group = {"consumer_group_id": "g", "offsets": [offset]} | more
        return await broker.http.post(path, content=json.dumps({"consumer_groups": [group]}))

    generation = int(answer.headers["tidelog-generation"])
    for refused in (
        {},
        {"generation": generation},
        {"generation": generation + 1, "consumer_id": name},
        {"generation": generation, "consumer_id": "nobody"},
    ):
        assert_refused(await transact(**refused), 409, 40903, "application/json")
    assert (await transact(generation=generation, consumer_id=name)).status_code == 200
    assert (await consumer.committed())[0] == 1
    for _ in range(3):
        await subscribed(broker)
    answer = await transact(generation=generation, consumer_id=name)
    assert_refused(answer, 409, 40903, "application/json")


# -- positions


async def test_positions_are_exact_and_by_time(consumer: Instance, broker: Broker) -> None:
    await append(broker.log, b"0", b"1", b"2", b"3", timestamp_ms=1_700_000_000_000)
    assert len(await consumer.read()) == 4
    await consumer.ok(
        "POST", "/positions", {"offsets": [{"topic": "t", "partition": 0, "offset": 2}]}
    )
    assert await consumer.read() == [2, 3]
    for stamp, left in (
        ("2023-11-14T22:13:20.001Z", [1, 2, 3]),
        (1_700_000_000_003, [3]),
        ("2033-01-01T00:00:00Z", []),
    ):
        body = {"timestamps": [{"topic": "t", "partition": 0, "timestamp": stamp}]}
        await consumer.ok("POST", "/positions", body)
        assert await consumer.read(timeout=10) == left
    partitions = {"partitions": [{"topic": "t", "partition": 0}]}
    await consumer.ok("POST", "/positions/beginning", partitions)
    assert await consumer.read() == [0, 1, 2, 3]
    await consumer.ok("POST", "/positions/beginning", partitions)
    await consumer.ok("POST", "/positions/end", partitions)
    assert await consumer.read(timeout=10) == []


async def test_positions_of_what_is_not_assigned(consumer: Instance, broker: Broker) -> None:
    other = await created(broker)
    for what, body in (
        ("/positions", {"offsets": [{"topic": "t", "partition": 0, "offset": 2}]}),
        ("/positions/beginning", {"partitions": [{"topic": "t", "partition": 0}]}),
        ("/positions/end", {"partitions": [{"topic": "t", "partition": 0}]}),
    ):
        assert_refused(await other("POST", what, body), 409, 40903)
    body = {"timestamps": [{"topic": "t", "partition": 0, "timestamp": "noon"}]}
    assert_refused(await consumer("POST", "/positions", body), 400, 400)


async def test_a_seek_wakes_a_read_that_waits(consumer: Instance, broker: Broker) -> None:
    await put(broker, "a")
    assert await consumer.read() == ["a"]
    waiting = asyncio.create_task(consumer.read(timeout=10_000))
    await asyncio.sleep(0.02)
    await consumer.ok(
        "POST", "/positions/beginning", {"partitions": [{"topic": "t", "partition": 0}]}
    )
    assert await waiting == ["a"]


# -- several brokers


async def test_any_broker_serves_an_instance(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any broker that gets a request adopts the group: commits and seeks are kept."""
    monkeypatch.setattr(
        "tidelog.storage.groups.rest_members.HANDOVER_S", 0.0
    )  # each knows of the other
    async with broker_on(store, "a") as a, broker_on(store, "b") as b:
        await a.log.topics.create("t", 1, {})
        consumer = await subscribed(a, auto_commit_enable=False)
        await put(a, *range(6))
        assert await consumer.read(max_records=2) == [0, 1]
        body = {"offsets": [{"topic": "t", "partition": 0, "offset": 1}]}
        there = Instance(b.http, consumer.path)
        await there.ok("POST", "/offsets", body)
        assert await there.read(max_records=2) == [2, 3]
        await there.ok("POST", "/positions", {"offsets": body["offsets"]})
        await a.log._log.wal.refresh()
        assert await consumer.read(max_records=2) == [1, 2]
        await b.log._log.wal.refresh()
        assert await there.read(max_records=2) == [1, 2]  # nothing of it was committed
        assert (await there("DELETE")).status_code == 204
        await a.log._log.wal.refresh()
        assert_refused(await consumer("GET", "/records"), 404, 40403)


async def test_a_broker_that_starts_again_goes_on(store: MemoryStore) -> None:
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 1, {})
        consumer = await subscribed(broker, auto_offset_reset="latest")
        await put(broker, "while it lives")
    async with broker_on(store) as broker:
        again = Instance(broker.http, consumer.path)
        await put(broker, "afterwards")
        assert await again.read() == ["while it lives", "afterwards"]


# -- over a socket


async def test_who_hangs_up_while_it_waits_has_read_nothing(
    consumer: Instance, broker: Broker
) -> None:
    async with listening(broker.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET {consumer.path}/records?timeout=20000 HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        await put(broker, "once")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            said = await Instance(http, consumer.path).read(timeout=2000)
            assert said == ["once"]
            made = await http.post("/consumers/h", headers={"x-forwarded-host": "lb"})
            assert made.json()["base_uri"].startswith("http://lb/consumers/h/instances/")
            wrong = await http.put("/consumers/h", content=b"{}")
            assert wrong.status_code in (404, 405)
            assert (await http.request("GET", f"{consumer.path}/offsets", content=b"")).is_success
