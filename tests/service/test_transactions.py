"""POST /v3/clusters/{c}/transactions: all or nothing, on any broker, however often (I4, I6)."""

import asyncio
import json
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import Broker, assert_refused, broker_on, ends, stored
from tests.service.test_produce_refusals import JSONISH, anything
from tests.support.faults import FaultyStore
from tidelog.service.formats.transactions import (
    RECORDS_MAX,
    TRANSACTION_OFFSETS_MAX,
    TRANSACTION_TOPICS_MAX,
    decode_transaction,
)
from tidelog.service.routes.transactions import EXAMPLE
from tidelog.storage.core import object_keys
from tidelog.storage.state.committed_offsets import METADATA_BYTES_MAX
from tidelog.storage.store.memory import MemoryStore

JSON = "application/json"
LONG_AGO = "2021-02-05T19:14:42Z"


async def transact(broker: Broker, body: Any, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = f"{broker.v3}/transactions"
    return await broker.http.post(path, content=content, headers=headers)


def records(name: str, *values: Any, **more: Any) -> dict[str, Any]:
    return {
        "topic_name": name,
        "records": [{"value": {"type": "JSON", "data": value}, **more} for value in values],
    }


def keyed(name: str, count: int) -> dict[str, Any]:
    """Every other record has a key, every third no place to go but where it wants."""
    made = [
        {
            "value": {"type": "STRING", "data": f"{name} {n}" + "x" * 900},
            **({"key": {"type": "STRING", "data": f"k{n}"}} if n % 2 else {}),
        }
        for n in range(count)
    ]
    return {"topic_name": name, "records": made}


def group(*offsets: tuple[str, int, int], name: str = "g", **more: Any) -> dict[str, Any]:
    said = [
        {"topic_name": topic, "partition_id": number, "offset": offset}
        for topic, number, offset in offsets
    ]
    return {"consumer_group_id": name, "offsets": said, **more}


async def committed(broker: Broker, name: str = "g") -> dict[tuple[str, int], int] | None:
    """As the broker says it; None when there are none."""
    answer = await broker.http.get(f"{broker.v3}/consumer-groups/{name}/offsets")
    if answer.status_code == 404:
        assert_refused(answer, 404, 404, JSON)
        return None
    assert answer.status_code == 200, answer.text
    return {
        (row["topic_name"], row["partition_id"]): row["offset"] for row in answer.json()["data"]
    }


async def assert_true(broker: Broker, body: dict[str, Any], answer: httpx.Response) -> None:
    """Each record lies where the answer says, and every offset is the group's."""
    assert answer.status_code == 200, answer.text
    said = answer.json()
    for asked, told in zip(body.get("topics", []), said["topics"], strict=True):
        assert told["topic_name"] == asked["topic_name"]
        for record, report in zip(asked["records"], told["records"], strict=True):
            rows = await stored(broker.log, report["partition_id"], asked["topic_name"])
            value = rows[report["offset"]]["value"].decode()
            data = record["value"]["data"]
            assert value == (data if record["value"]["type"] == "STRING" else json.dumps(data))
    for asked, told in zip(body.get("consumer_groups", []), said["consumer_groups"], strict=True):
        assert told["consumer_group_id"] == asked["consumer_group_id"]
        offsets = [{"metadata": "", **offset} for offset in asked["offsets"]]
        assert told["offsets"] == offsets
        committed_offsets = await committed(broker, asked["consumer_group_id"])
        assert committed_offsets is not None
        for offset in offsets:
            assert (
                committed_offsets[offset["topic_name"], offset["partition_id"]] == offset["offset"]
            )


@pytest.fixture
async def two(broker: Broker) -> Broker:
    """A broker with the topics `t` and `u`, three partitions and one."""
    await broker.log.topics.create("t", 3, {})
    await broker.log.topics.create("u", 1, {})
    return broker


async def untouched(broker: Broker) -> bool:
    """Nothing of any request is there."""
    sizes = [*ends(broker.log), *ends(broker.log, "u")]
    return not any(sizes) and await committed(broker) is None


BOTH = {
    "topics": [keyed("t", 30), records("u", {"a": 1}, None, "x")],
    "consumer_groups": [group(("t", 2, 7), ("u", 0, 0)), group(("t", 1, 9), name="h")],
}

# -- what is done


async def test_records_of_topics_and_offsets_of_groups_are_committed_as_one(two: Broker) -> None:
    seq = two.log.state.seq
    body = {**BOTH, "topics": [keyed("t", 30), records("u", {"a": 1}, 2, "x")]}
    answer = await transact(two, body)
    assert answer.headers["content-type"] == JSON
    await assert_true(two, body, answer)
    assert (sum(ends(two.log)), ends(two.log, "u")) == (30, [3])
    assert two.log.state.seq == seq + 1, "one entry"
    metrics = (await two.http.get("/metrics")).text
    assert "tidelog_group_offsets 3.0" in metrics
    assert 'tidelog_http_requests_total{route="transactions",status="2xx"} 1.0' in metrics


async def test_record_is_what_v3_route_makes_of_it(two: Broker) -> None:
    record = {
        "partition_id": 2,
        "headers": [{"name": "h", "value": "/w=="}, {"name": "h"}],
        "key": {"type": "BINARY", "data": "aGk="},
        "timestamp": LONG_AGO,
    }
    answer = await transact(two, {"topics": [{"topic_name": "t", "records": [record, record]}]})
    assert answer.json()["topics"][0]["records"] == [
        {"partition_id": 2, "offset": 0},
        {"partition_id": 2, "offset": 1},
    ]
    for row in await stored(two.log, 2):
        assert (row["key"], row["value"]) == (b"hi", None)
        assert row["headers"] == [{"key": "h", "value": b"\xff"}, {"key": "h", "value": None}]
        assert row["timestamp"].isoformat().startswith("2021-02-05T19:14:42")


async def test_documented_example_works(broker: Broker) -> None:
    for name, partitions in (("flights", 1), ("delays", 3), ("audit", 1)):
        await broker.log.topics.create(name, partitions, {})
    await assert_true(broker, EXAMPLE, await transact(broker, EXAMPLE))


@pytest.mark.parametrize("left_out", ["topics", "consumer_groups"])
async def test_records_alone_and_offsets_alone(two: Broker, left_out: str) -> None:
    body = {name: said for name, said in BOTH.items() if name != left_out}
    answer = await transact(two, {**body, "topics": body.get("topics", [])[:1]})
    assert answer.status_code == 200, answer.text
    assert answer.json()[left_out] == []
    assert (await committed(two) is None) == (left_out == "consumer_groups")


async def test_offsets_are_kept_with_what_was_noted_beside_them(two: Broker) -> None:
    offset = {"topic_name": "t", "partition_id": 0, "offset": 2**63 - 1}
    note = "ü" * (METADATA_BYTES_MAX // 2)
    for metadata in (note, None, "later"):
        said = group(name="a/b c")
        said["offsets"] = [{**offset, "metadata": metadata}]
        assert (await transact(two, {"consumer_groups": [said]})).status_code == 200
        path = f"{two.v3}/consumer-groups/a%2Fb c/offsets"
        answer = await two.http.get(path)
        if answer.status_code == 200:  # a slash in a name is another path to most routers
            assert answer.json()["data"] == [{**offset, "metadata": metadata or ""}]
    offsets_by_topic = two.log.state.committed_offsets.of_group("a/b c")
    assert [
        committed_offset.metadata
        for committed_offset in offsets_by_topic[two.log.state.topic("t").topic_id].values()
    ] == ["later"]


async def test_i3_every_broker_sees_all_of_it_at_once(broker: Broker, other: Broker) -> None:
    await broker.log.topics.create("t", 3, {})
    await other.log.topics.create("u", 1, {})
    answer = await transact(broker, BOTH | {"topics": [keyed("t", 5), records("u", 1)]})
    assert answer.status_code == 200, answer.text
    assert await committed(other) == {("t", 2): 7, ("u", 0): 0}
    assert (sum(ends(other.log)), ends(other.log, "u")) == (5, [1])


async def test_partition_that_was_just_added_elsewhere_is_known(
    broker: Broker, other: Broker
) -> None:
    await broker.log.topics.create("t", 1, {})
    await other.log._log.wal.refresh()
    await broker.log.topics.add_partitions("t", 2)
    body = {"topics": [records("t", 1, partition_id=1)], "consumer_groups": [group(("t", 1, 1))]}
    await assert_true(other, body, await transact(other, body))


# -- with a key


async def test_retry_gets_first_answer_on_any_broker(store: MemoryStore) -> None:
    """Also where topics have grown since, each by its own number."""
    body = {"topics": [keyed("t", 40), keyed("u", 40)], "consumer_groups": [group(("t", 0, 1))]}
    for turn, (before, after) in enumerate([((1, 3), (2, 5)), ((2, 3), (7, 3)), ((4, 1), (64, 2))]):
        async with broker_on(store) as broker, broker_on(store, "b2") as other:
            for name, count in zip(("t", "u"), before, strict=True):
                if turn:
                    await broker.log.topics.delete(name)
                await broker.log.topics.create(name, count, {})
            first = await transact(broker, body, f"turn {turn}")
            await assert_true(broker, body, first)
            for name, count in zip(("t", "u"), after, strict=True):
                if count > len(broker.log.state.topic(name).partitions):
                    await broker.log.topics.add_partitions(name, count)
            for receiver in (broker, other, broker):
                again = await transact(receiver, body, f"turn {turn}")
                assert (again.status_code, again.content) == (200, first.content)
            assert sum(ends(broker.log)) == sum(ends(broker.log, "u")) == 40


async def test_retry_gets_first_answer_although_topic_has_got_stricter(two: Broker) -> None:
    body = {"topics": [records("t", "x" * 900), records("u", 1)]}
    first = await transact(two, body, key="a")
    await two.log.topics.alter("t", {"max.message.bytes": "500"})
    again = await transact(two, body, key="a")
    assert (again.status_code, again.content) == (200, first.content)
    assert (await transact(two, body, key="b")).is_client_error
    assert (await transact(two, body)).is_client_error


async def test_keys_outlive_broker_and_its_checkpoints(store: MemoryStore) -> None:
    body = {"topics": [keyed("t", 9)], "consumer_groups": [group(("t", 0, 1))]}
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 3, {})
        first = await transact(broker, body, "a")
        await transact(broker, {"consumer_groups": [group(("t", 0, 2))]}, "b")
        await broker.log._log.wal.checkpoint()
    async with broker_on(store, "b2") as broker:
        assert (await transact(broker, body, "a")).content == first.content
        assert await committed(broker) == {("t", 0): 2}, "a retry commits no offsets again"
        assert sum(ends(broker.log)) == 9


async def test_key_stands_for_one_body_on_one_route(two: Broker) -> None:
    body = {"topics": [records("t", 1)]}
    first = await transact(two, body, "a")
    for other in (
        {"topics": [records("t", 2)]},
        {"topics": [records("u", 1)]},
        {**body, "consumer_groups": [group(("t", 0, 1))]},
    ):
        assert "key" in assert_refused(await transact(two, other, "a"), 422, 422, JSON)
    headers = {"idempotency-key": "a", "content-type": "application/vnd.kafka.json.v2+json"}
    v2 = await two.http.post("/topics/t", content=json.dumps(body).encode(), headers=headers)
    assert v2.status_code == 422
    assert (sum(ends(two.log)), ends(two.log, "u")) == (1, [0])
    await two.log.topics.delete("t")
    await two.log.topics.create("t", 3, {})
    assert_refused(await transact(two, body, "a"), 422, 422, JSON)
    assert first.status_code == 200


async def test_duplicates_at_once_are_one(broker: Broker, other: Broker) -> None:
    await broker.log.topics.create("t", 3, {})
    await broker.log.topics.create("u", 2, {})
    body = {"topics": [keyed("t", 7), keyed("u", 7)], "consumer_groups": [group(("t", 0, 1))]}
    answers = await asyncio.gather(
        *(transact(receiver, body, "a") for receiver in (broker, other, broker, other) * 3)
    )
    assert {answer.content for answer in answers} == {answers[0].content}
    await assert_true(other, body, answers[0])
    assert sum(ends(broker.log)) == sum(ends(broker.log, "u")) == 7


async def test_lost_answer_is_found_again(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    body = {"topics": [keyed("t", 7)], "consumer_groups": [group(("t", 0, 1))]}
    async with broker_on(faulty, produce_timeout_ms=100) as broker:
        await broker.log.topics.create("t", 2, {})
        gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1), is_after=True)
        answer = await transact(broker, body, "a")
        assert "Idempotency-Key" in assert_refused(answer, 504, 50003, JSON)
        gate.opened.set()
        async with broker_on(store, "b2") as other:
            await assert_true(other, body, await transact(other, body, "a"))
            assert sum(ends(other.log)) == 7


# -- refusals: nothing is there (I6)


async def test_unknown_topics_and_partitions(two: Broker) -> None:
    good = records("t", 1)
    for body, code, name in (
        ({"topics": [good, records("nope", 1)]}, 40401, "nope"),
        ({"topics": [good, records("u", 1, partition_id=1)]}, 40402, "u"),
        ({"topics": [good], "consumer_groups": [group(("nope", 0, 1))]}, 40401, "nope"),
        ({"topics": [good], "consumer_groups": [group(("u", 1, 1))]}, 40402, "u"),
        ({"topics": [good], "consumer_groups": [group(("t", 2**31 - 1, 1))]}, 40402, "t"),
        ({"topics": [good, records("a\nb", 1)]}, 40002, "a"),
    ):
        status = 400 if code == 40002 else 404
        assert name in assert_refused(await transact(two, body), status, code, JSON)
    path = "/v3/clusters/another/transactions"
    assert_refused(await two.http.post(path, json={"topics": [good]}), 404, 404, JSON)
    assert await untouched(two)


async def test_member_of_no_group_has_no_generation(two: Broker) -> None:
    body = {"topics": [records("t", 1)], "consumer_groups": [group(("t", 0, 1), generation=0)]}
    assert "generation 0" in assert_refused(await transact(two, body, "a"), 409, 40903, JSON)
    assert await untouched(two)
    body["consumer_groups"] = [group(("t", 0, 1), generation=-1)]
    await assert_true(
        two, {"topics": body["topics"]}, await transact(two, body | {"consumer_groups": []}, "a")
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not a transaction"),
        (b"{", "not a transaction"),
        (b"[]", "not a transaction"),
        (b"\xff", "not a transaction"),
        (b'{"topics":[{"topic_name":"\xff"}]}', "not a transaction"),
        ({}, "records or offsets"),
        ({"topics": [], "consumer_groups": []}, "records or offsets"),
        ({"topics": {}}, "$.topics"),
        ({"topics": [records("t", 1)], "offsets": []}, "Unrecognized field: `offsets`"),
        ({"topics": [records("t", 1), records("t", 2)]}, "topic 't' occurs twice"),
        ({"topics": [records("t", 1), records("u")]}, "topic 'u' has no records"),
        ({"topics": [{"records": []}]}, "topic_name"),
        ({"topics": [{"topic_name": "t", "records": [1]}]}, "topics[0].records[0]"),
        ({"topics": [records("t", 1, partition_id=-1)]}, "partition_id -1"),
        ({"topics": [records("t", 1, partition_id=2**70)]}, "record 0"),
        ({"topics": [records("t", 1, timestamp="now")]}, "timestamp 'now'"),
        ({"topics": [records("t", 1, more=1)]}, "`more`"),
        ({"topics": [records("t", 1, headers=[{"name": "h", "value": "?"}])]}, "base64"),
        ({"topics": [records("t", 1)], "consumer_groups": [group()]}, "no offsets"),
        ({"consumer_groups": [group(("t", 0, 1)), group(("t", 1, 1))]}, "consumer group 'g'"),
        ({"consumer_groups": [group(("t", 0, 1), ("t", 0, 2))]}, "occurs twice"),
        ({"consumer_groups": [group(("t", 0, 1), name="")]}, "1 to 255 bytes"),
        ({"consumer_groups": [group(("t", 0, 1), name="a\nb")]}, "printable"),
        ({"consumer_groups": [group(("t", 0, -1))]}, "offset"),
        ({"consumer_groups": [group(("t", 0, 2**63))]}, "offset"),
        ({"consumer_groups": [group(("t", -1, 1))]}, "partition_id"),
        ({"consumer_groups": [group(("t", 0, 1), generation=-2)]}, "generation"),
        ({"consumer_groups": [group(("t", 0, 1), generation=2**31)]}, "generation"),
        (
            {"topics": [records(f"t{n}", 1) for n in range(TRANSACTION_TOPICS_MAX + 1)]},
            "100 topics at most",
        ),
        ({"topics": [records("t", *range(RECORDS_MAX + 1))]}, "10000 records at most"),
        (
            {
                "consumer_groups": [
                    group(*(("t", n, 1) for n in range(TRANSACTION_OFFSETS_MAX + 1)))
                ]
            },
            "1000 offsets at most",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_body_that_is_none_is_refused(two: Broker, body: Any, why: str) -> None:
    assert why in assert_refused(await transact(two, body), 422, 422, JSON)
    assert await untouched(two)


async def test_what_is_noted_beside_offset_has_bound(two: Broker) -> None:
    said = group(("t", 0, 1))
    said["offsets"][0]["metadata"] = "x" * (METADATA_BYTES_MAX + 1)
    body = {"topics": [records("t", 1)], "consumer_groups": [said]}
    assert "4097 bytes" in assert_refused(await transact(two, body), 422, 422, JSON)
    assert await untouched(two)


async def test_record_that_is_too_large_for_its_topic_refuses_all(two: Broker) -> None:
    await two.log.topics.alter("u", {"max.message.bytes": "34"})
    large = {"topics": [records("t", "x" * 100), records("u", "x", "x" * 9)]}
    message = assert_refused(await transact(two, large), 413, 413, JSON)
    assert message.startswith("topic 'u': record 1 has 35 bytes")
    assert await untouched(two)
    large["topics"][1]["records"].pop()
    assert (await transact(two, large)).status_code == 200


def test_many_headers_are_columns() -> None:
    """The event loop would need long for lists of 500,000 headers."""
    record = {"value": {"type": "JSON", "data": 1}, "headers": [{"name": "a", "value": "Yg=="}] * 9}
    body = json.dumps({"topics": [{"topic_name": "t", "records": [record] * 8}]}).encode()
    (topic,) = decode_transaction(body, 0).topics
    rows = topic.produced.rows
    assert isinstance(rows, pa.RecordBatch)
    assert rows.column("headers").to_pylist() == [[{"key": "a", "value": b"b"}] * 9] * 8


@pytest.mark.broker(topics={"t": 1}, request_bytes_max=70000)
async def test_body_over_bound_is_refused(broker: Broker) -> None:
    assert (await transact(broker, {"topics": [records("t", "x" * 69_000)]})).status_code == 200
    answer = await transact(broker, {"topics": [records("t", "x" * 71_000)]})
    assert_refused(answer, 413, 413, JSON)


async def test_data_with_schema_needs_registry(two: Broker) -> None:
    record = {"value": {"type": "AVRO", "data": 1}}
    answer = await transact(two, {"topics": [{"topic_name": "t", "records": [record]}]})
    assert_refused(answer, 408, 40801, JSON)


@pytest.mark.parametrize("deleted_topic", ["t", "u"])
async def test_i4_topic_that_goes_meanwhile_takes_all_of_it_along(
    broker: Broker, other: Broker, faulty: FaultyStore, deleted_topic: str
) -> None:
    """Deleted by another broker after everything was checked: `apply` refuses the whole."""
    await broker.log.topics.create("t", 2, {})
    await broker.log.topics.create("u", 1, {})
    await other.log._log.wal.refresh()
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1))
    body = {"topics": [keyed("t", 5)], "consumer_groups": [group(("u", 0, 1), ("t", 0, 1))]}
    asking = asyncio.create_task(transact(broker, body, "a"))
    await gate.reached.wait()
    await other.log.topics.delete(deleted_topic)
    gate.opened.set()
    assert deleted_topic in assert_refused(await asking, 404, 40401, JSON)
    assert await committed(broker) is None
    left = "u" if deleted_topic == "t" else "t"
    assert not any(ends(broker.log, left))
    assert_refused(await transact(broker, body, "a"), 404, 40401, JSON)


SAID = st.fixed_dictionaries(
    {},
    optional={
        "topics": st.lists(
            st.fixed_dictionaries(
                {"topic_name": st.sampled_from(["t", "u"]) | JSONISH},
                optional={"records": st.lists(JSONISH, max_size=3) | JSONISH},
            ),
            max_size=2,
        )
        | JSONISH,
        "consumer_groups": st.lists(
            st.fixed_dictionaries(
                {"consumer_group_id": st.sampled_from(["g"]) | JSONISH},
                optional={
                    "generation": st.integers() | JSONISH,
                    "offsets": st.lists(
                        st.fixed_dictionaries(
                            {
                                "topic_name": st.sampled_from(["t", "u"]) | JSONISH,
                                "partition_id": st.integers(-1, 4) | st.integers() | JSONISH,
                                "offset": st.integers() | JSONISH,
                            }
                        ),
                        max_size=3,
                    ),
                },
            ),
            max_size=2,
        )
        | JSONISH,
    },
)


@anything
@given(st.binary(max_size=60) | SAID)
async def test_whatever_is_sent_is_answered_in_our_form(two: Broker, body: Any) -> None:
    answer = await transact(two, body)
    if answer.status_code != 200:
        assert answer.status_code in {400, 404, 408, 409, 422}, answer.text
        assert_refused(answer, answer.status_code, answer.json()["error_code"], JSON)
