"""Idempotency-Key: a retry gets the answer of the first request, and writes nothing."""

import asyncio
import json
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.service.conftest import (
    ARROW,
    BINARY,
    JSON,
    TEXT,
    Broker,
    arrow,
    assert_refused,
    broker_on,
    ends,
    placed,
    post,
    stored,
)
from tests.support.faults import FaultyStore
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.codec.key_partition import partition_of
from tidelog.storage.core import object_keys
from tidelog.storage.store.memory import MemoryStore

KEYLESS = [{"value": n} for n in range(10)]
KEYED = [{"key": f"k{n}", "value": n} for n in range(10)]
MANY = [{"value": "v" * 1000, **({"key": f"k{n}"} if n % 3 else {})} for n in range(100)]
BODIES = {"keyless": KEYLESS, "keyed": KEYED, "many": MANY}


async def values(log: LogBroker) -> dict[int, list[Any]]:
    return {
        number: [json.loads(row["value"]) for row in await stored(log, number)]
        for number in range(len(log.state.topic("t").partitions))
    }


async def assert_true(
    log: LogBroker, records: list[dict[str, Any]], answer: httpx.Response
) -> None:
    """Each record lies where the answer says."""
    stored_values = await values(log)
    for record, (partition, offset) in zip(records, placed(answer), strict=True):
        assert stored_values[partition][offset or 0] == record["value"]


@pytest.mark.parametrize("name", BODIES)
async def test_retry_gets_first_answer(broker: Broker, topic: str, name: str) -> None:
    first = await post(broker.http, BODIES[name], key="a")
    before = ends(broker.log)
    await assert_true(broker.log, BODIES[name], first)
    for _ in range(3):
        again = await post(broker.http, BODIES[name], key="a")
        assert (again.status_code, again.content) == (200, first.content)
    assert ends(broker.log) == before
    assert sum(before) == len(BODIES[name])


@pytest.mark.parametrize("name", BODIES)
async def test_retry_is_parted_as_first_was(store: MemoryStore, name: str) -> None:
    for turn, (before, after) in enumerate([(1, 2), (2, 3), (3, 7), (4, 64)]):
        async with broker_on(store) as broker, broker_on(store, "b2") as other:
            if turn:
                await broker.log.topics.delete("t")
            await broker.log.topics.create("t", before, {})
            first = await post(broker.http, BODIES[name], key=f"turn {turn}")
            await assert_true(broker.log, BODIES[name], first)
            await other.log._log.wal.refresh()
            await other.log.topics.add_partitions("t", after)
            for receiver in (broker, other, broker):
                again = await post(receiver.http, BODIES[name], key=f"turn {turn}")
                assert (again.status_code, again.content) == (200, first.content)
            assert sum(ends(broker.log)) == len(BODIES[name])


async def test_same_partitions_with_other_records_are_not_same(
    store: MemoryStore,
) -> None:
    # Both ways of parting name partitions 0 and 1, in this order, with two records each.
    both = {key: (partition_of(b"%d" % key, 2), partition_of(b"%d" % key, 3)) for key in range(40)}
    chosen = [
        next(key for key in both if both[key] == pair) for pair in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    records = [{"key": str(key), "value": str(key)} for key in chosen]
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 2, {})
        first = await post(broker.http, records, TEXT, key="a")
        assert [partition for partition, _ in placed(first)] == [0, 1, 0, 1]
        await broker.log.topics.add_partitions("t", 3)
        assert (await post(broker.http, records, TEXT, key="a")).content == first.content


async def test_arrow_is_remembered_too(broker: Broker, topic: str) -> None:
    body = arrow(value=pa.array([b"v" * 10_000] * 20), key=pa.array(["a", None] * 10))
    headers = {"content-type": ARROW, "idempotency-key": "a"}
    first = await broker.http.post("/topics/t", content=body, headers=headers)
    assert first.status_code == 200
    await broker.log.topics.add_partitions("t", 11)
    again = await broker.http.post("/topics/t", content=body, headers=headers)
    assert (again.status_code, again.content) == (200, first.content)
    assert sum(ends(broker.log)) == 20


@pytest.mark.parametrize(
    "config", [{"max.message.bytes": "500"}, {"cleanup.policy": "compact"}], ids=str
)
async def test_retry_gets_first_answer_although_topic_has_got_stricter(
    store: MemoryStore, config: dict[str, str | None]
) -> None:
    async with broker_on(store) as broker, broker_on(store, "b2") as other:
        await broker.log.topics.create("t", 3, {})
        await other.log.refresh()
        first = await post(broker.http, MANY, key="a")
        await other.log.topics.alter("t", config)
        for receiver in (other, broker):
            again = await post(receiver.http, MANY, key="a")
            assert (again.status_code, again.content) == (200, first.content)
            await receiver.log.refresh()
            assert (await post(receiver.http, MANY, key="b")).is_client_error
            assert (await post(receiver.http, MANY)).is_client_error
            assert (await post(receiver.http, MANY[:50], key="a")).status_code == 422
        assert sum(ends(broker.log)) == len(MANY)


async def test_key_stands_for_one_request(broker: Broker, topic: str) -> None:
    await broker.log.topics.create("u", 3, {})
    await post(broker.http, KEYED, key="a", path="/topics/t/partitions/1")
    before = ends(broker.log)
    for others in (
        post(broker.http, KEYED[:-1], key="a", path="/topics/t/partitions/1"),
        post(broker.http, KEYED, key="a", path="/topics/t/partitions/2"),
        post(broker.http, KEYED, key="a", path="/topics/t"),
        post(broker.http, KEYED, key="a", path="/topics/u/partitions/1"),
        post(broker.http, KEYED, key="a", path="/topics/u/partitions/1", acks="1"),
        post(broker.http, KEYED, TEXT, key="a", path="/topics/t/partitions/1"),
    ):
        answer = await others
        assert answer.status_code == 422, answer.text
    assert ends(broker.log) == before
    assert ends(broker.log, "u") == [0, 0, 0]


async def test_same_bytes_of_another_format_are_another_request(broker: Broker, topic: str) -> None:
    record = {"value": "aGk=", "partition": 0}
    await post(broker.http, [record], BINARY, key="a")
    assert "key" in assert_refused(await post(broker.http, [record], JSON, key="a"), 422, 422)
    assert [row["value"] for row in await stored(broker.log)] == [b"hi"]
    # Two names of one format are not two formats.
    assert placed(await post(broker.http, [record], "application/json", key="a")) == [(0, 0)]


async def test_refused_request_leaves_its_key_free(broker: Broker, topic: str) -> None:
    assert (await post(broker.http, [{"value": 1, "partition": 9}], key="a")).status_code == 404
    assert placed(await post(broker.http, [{"value": 1, "partition": 2}], key="a")) == [(2, 0)]


@pytest.mark.parametrize("name", ["keyless", "keyed"])
async def test_duplicates_at_once_are_one(broker: Broker, other: Broker, name: str) -> None:
    await broker.log.topics.create("t", 5, {})
    answers = await asyncio.gather(
        *(
            post(receiver.http, BODIES[name], key="a")
            for receiver in (broker, other, broker, other) * 3
        )
    )
    assert {answer.content for answer in answers} == {answers[0].content}
    await assert_true(other.log, BODIES[name], answers[0])
    assert sum(ends(broker.log)) == len(BODIES[name])


async def test_concurrent_requests_with_one_key_and_other_bodies_are_refused(
    broker: Broker, topic: str
) -> None:
    answers = await asyncio.gather(
        *(post(broker.http, [{"value": n, "partition": 0}], key="a") for n in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 422, 422, 422, 422]
    assert ends(broker.log) == [1, 0, 0]


@pytest.mark.broker(topics={"t": 2})
async def test_retry_meets_first_under_way(broker: Broker, faulty: FaultyStore) -> None:
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1), is_after=True)
    first = asyncio.create_task(post(broker.http, KEYED, key="a"))
    await gate.reached.wait()
    first.cancel()  # the client gave up
    await asyncio.gather(first, return_exceptions=True)
    again = asyncio.create_task(post(broker.http, KEYED, key="a"))
    await asyncio.sleep(0.01)
    gate.opened.set()
    await assert_true(broker.log, KEYED, await again)
    assert sum(ends(broker.log)) == len(KEYED)


@pytest.mark.broker(topics={"t": 2}, produce_timeout_ms=100)
async def test_lost_answer_is_found_again(
    broker: Broker, faulty: FaultyStore, store: MemoryStore
) -> None:
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1), is_after=True)
    answer = await post(broker.http, KEYED, key="a")
    assert "Idempotency-Key" in assert_refused(answer, 504, 50003)
    gate.opened.set()
    async with broker_on(store, "b2") as other:
        await assert_true(other.log, KEYED, await post(other.http, KEYED, key="a"))
        assert sum(ends(other.log)) == len(KEYED)


async def test_keys_outlive_broker(store: MemoryStore) -> None:
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 3, {})
        first = await post(broker.http, KEYLESS, key="a")
        await broker.log._log.wal.checkpoint()
        second = await post(broker.http, KEYLESS, key="b")
    async with broker_on(store, "b2") as broker:
        assert (await post(broker.http, KEYLESS, key="a")).content == first.content
        assert (await post(broker.http, KEYLESS, key="b")).content == second.content
        assert_refused(await post(broker.http, KEYED, key="a"), 422, 422)
        assert sum(ends(broker.log)) == 2 * len(KEYLESS)


async def test_acks_1_and_0_take_keys(broker: Broker, topic: str) -> None:
    for acks in ("0", "1"):
        for _ in range(3):
            assert (await post(broker.http, KEYED, key=acks, acks=acks)).status_code == 200
        answer = await post(broker.http, KEYED, key=acks)
        await assert_true(broker.log, KEYED, answer)
    assert sum(ends(broker.log)) == 2 * len(KEYED)


@pytest.mark.parametrize("key", [b"", b'""', b"k" * 256, b"a\tb", b"a\x01", b"\xa0", b"\x7f"])
async def test_bad_key_is_refused(broker: Broker, topic: str, key: bytes) -> None:
    headers = {"content-type": JSON, "idempotency-key": key}
    body = json.dumps({"records": KEYED})
    cluster = broker.log.identity.cluster_id
    for path, media_type in (
        ("/topics/t", "application/vnd.kafka.v2+json"),
        (f"/v3/clusters/{cluster}/topics/t/records", "application/json"),
        (f"/v3/clusters/{cluster}/topics/t/records:batch", "application/json"),
    ):
        answer = await broker.http.post(path, content=body, headers=headers)
        assert "Idempotency-Key" in assert_refused(answer, 400, 40002, media_type)
    assert ends(broker.log) == [0, 0, 0]


async def test_quoted_key_is_key(broker: Broker, topic: str) -> None:
    first = await post(broker.http, KEYED, key='"a b"')
    assert (await post(broker.http, KEYED, key="a b")).content == first.content
    assert placed(await post(broker.http, KEYED, key="k" * 255))


# -- v3


async def stream(broker: Broker, records: list[Any], key: str = "a") -> list[Any]:
    body = "".join(map(json.dumps, records))
    headers = {"idempotency-key": key}
    answer = await broker.http.post(f"{broker.v3}/topics/t/records", content=body, headers=headers)
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


def v3_record(n: int, **more: Any) -> dict[str, Any]:
    return {"value": {"type": "JSON", "data": n}, "timestamp": "2021-02-05T19:14:42Z", **more}


async def test_records_of_stream_are_remembered_one_by_one(store: MemoryStore) -> None:
    records = [v3_record(n) for n in range(8)]
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 3, {})
        half = await stream(broker, records[:4])  # and then the connection broke
        await broker.log.topics.add_partitions("t", 5)
        whole = await stream(broker, records)
        assert whole[:4] == half
        assert {report["error_code"] for report in whole} == {200}
    async with broker_on(store, "b2") as broker:
        assert await stream(broker, records) == whole
        other = await stream(broker, [v3_record(99), *records[1:]])
        assert other[0]["error_code"] == 422
        assert other[1:] == whole[1:]
        assert sum(ends(broker.log)) == 8


async def test_record_that_is_refused_counts(broker: Broker, topic: str) -> None:
    bad = {"value": {"type": "JSON", "data": 1}, "partition_id": 9}
    first = await stream(broker, [v3_record(0), bad, v3_record(2)])
    assert [report["error_code"] for report in first] == [200, 40402, 200]
    assert await stream(broker, [v3_record(0), bad, v3_record(2)]) == first


async def test_entries_of_batch_are_remembered_by_id(store: MemoryStore) -> None:
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 3, {})

    async def batch(broker: Broker, ids: list[int]) -> dict[str, Any]:
        body = {"entries": [v3_record(n, id=str(n)) for n in ids]}
        headers = {"idempotency-key": "a"}
        answer = await broker.http.post(
            f"{broker.v3}/topics/t/records:batch", json=body, headers=headers
        )
        assert answer.status_code == 207
        assert not answer.json()["failures"]
        return {success["id"]: success for success in answer.json()["successes"]}

    async with broker_on(store) as broker:
        first = await batch(broker, [1, 2, 3])
        await broker.log.topics.add_partitions("t", 7)
    async with broker_on(store, "b2") as broker:
        again = await batch(broker, [3, 4, 1, 2])
        assert {name: again[name] for name in first} == first
        assert sum(ends(broker.log)) == 4
