"""Consumer instances, v2: creation, subscriptions, records; every code (DIALECTS)."""

import asyncio
import json
from typing import Any

import pyarrow as pa
import pytest

from tests.service.conftest import (
    ARROW,
    BINARY,
    FIRST_MS,
    JSON,
    TEXT,
    V2,
    Broker,
    append,
    assert_refused,
)
from tests.service.conftest import post as produce
from tests.service.instances import STRIMZI, Instance, created, put, subscribed

# -- create


async def test_create_says_where_the_instance_is(broker: Broker) -> None:
    answer = await broker.http.post("/consumers/my%20group", content=json.dumps({"name": "a b"}))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == V2
    assert answer.json() == {
        "instance_id": "a b",
        "base_uri": "http://tide:8082/consumers/my%20group/instances/a%20b",
    }


async def test_create_with_an_empty_body_names_the_instance(broker: Broker) -> None:
    answer = await broker.http.post("/consumers/g", headers={"content-type": V2})
    name = answer.json()["instance_id"]
    assert name.startswith("rest-consumer-")
    assert (await broker.http.delete(f"/consumers/g/instances/{name}")).status_code == 204


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ({"x-forwarded-host": "lb.example", "x-forwarded-proto": "https"}, "https://lb.example"),
        ({"forwarded": "host=lb.example:99;proto=https"}, "https://lb.example:99"),
        ({"host": "other:1"}, "http://other:1"),
        (
            {"x-forwarded-host": "lb", "x-forwarded-path": "/kafka/consumers/g"},
            "http://lb/kafka",
        ),
    ],
)
async def test_base_uri_is_the_clients(broker: Broker, headers: Any, base: str) -> None:
    answer = await broker.http.post(
        "/consumers/g", content=b'{"name": "x"}', headers=headers | {"content-type": V2}
    )
    assert answer.json()["base_uri"] == f"{base}/consumers/g/instances/x"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ('{"name": "taken"}', 409, 40902),
        ('{"auto.offset.reset": "middle"}', 422, 42204),
        ('{"consumer.request.timeout.ms": 0}', 422, 42204),
        ('{"client.id": "%s"}' % ("é" * 128), 422, 42204),
        ('{"session.timeout.ms": "-1"}', 422, 42204),
        ('{"fetch.min.bytes": -2}', 422, 40001),
        ('{"fetch.min.bytes": 10000001}', 422, 40001),
        ('{"fetch.min.bytes": "many"}', 422, 422),
        ('{"format": "xml"}', 422, 422),
        ('{"colour": "red"}', 422, 422),
        ('{"partition.assignment.strategy": "fair"}', 400, 40002),
        ('{"name": "a\\u0007"}', 400, 40002),
        ("[]", 422, 422),
        ("{", 400, 400),
    ],
)
async def test_create_refused(broker: Broker, body: str, status: int, code: int) -> None:
    await created(broker, name="taken")
    answer = await broker.http.post("/consumers/g", content=body, headers={"content-type": V2})
    assert_refused(answer, status, code)


async def test_create_takes_words_for_numbers_and_every_dialects_names(broker: Broker) -> None:
    for body in (
        {"auto.commit.enable": "false", "fetch.min.bytes": "1", "auto.offset.reset": "smallest"},
        {"enable.auto.commit": True, "isolation.level": "read_committed", "format": "text"},
        {"id": "7", "format": "avro", "topic.metadata.refresh.interval.ms": "1000"},
        {"format": "JSON", "auto.offset.reset": "largest", "consumer.request.timeout.ms": "500"},
    ):
        answer = await broker.http.post("/consumers/g", content=json.dumps(body))
        assert answer.status_code == 200, answer.text


async def test_names_with_control_characters_and_other_media_types(broker: Broker) -> None:
    answer = await broker.http.post("/consumers/a%0Db", content=b"{}")
    assert "Invalid parameter 'group_name'" in assert_refused(answer, 400, 40002)
    answer = await broker.http.post(
        "/consumers/g", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert "send application/vnd.kafka.v2+json, not" in assert_refused(answer, 415, 415)


ALL = [
    ("DELETE", "", None),
    ("POST", "/subscription", {"topics": ["t"]}),
    ("GET", "/subscription", None),
    ("DELETE", "/subscription", None),
    ("POST", "/assignments", {"partitions": []}),
    ("GET", "/assignments", None),
    ("GET", "/records", None),
    ("POST", "/offsets", {}),
    ("GET", "/offsets", None),
    ("POST", "/positions", {"offsets": []}),
    ("POST", "/positions/beginning", {"partitions": []}),
    ("POST", "/positions/end", {"partitions": []}),
]


@pytest.mark.parametrize(("method", "what", "body"), ALL)
async def test_an_instance_that_is_not_there(
    broker: Broker, method: str, what: str, body: Any
) -> None:
    for name in ("nobody", "gone"):
        if name == "gone":
            await (await created(broker, name="gone")).ok("DELETE")
        instance = Instance(broker.http, f"/consumers/g/instances/{name}")
        answer = await instance(method, what, body)
        assert assert_refused(answer, 404, 40403) == "Consumer instance not found."


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        ("/subscription", {"topics": "t"}),
        ("/subscription", {}),
        ("/subscription", {"topics": ["t"], "topic_pattern": 7}),
        ("/assignments", {}),
        ("/assignments", {"partitions": [{"topic": "t"}]}),
        ("/offsets", {"offsets": [{"topic": "t", "partition": 0, "offset": -1}]}),
        ("/offsets", {"offsets": [{"topic": "t", "partition": 0}]}),
        ("/positions", {"offsets": [{"topic": "t", "partition": 0, "offset": -1}]}),
        ("/positions/end", []),
    ],
)
async def test_useless_bodies_are_refused(consumer: Instance, what: str, bad: Any) -> None:
    assert_refused(await consumer("POST", what, bad), 422, 422)
    answer = await consumer.http.post(
        consumer.path + what, content=b"{", headers={"content-type": V2}
    )
    assert_refused(answer, 400, 400)


# -- subscription and assignment


async def test_the_first_read_has_the_assignment(broker: Broker, topic: str) -> None:
    await put(broker, 1, 2)
    consumer = await created(broker)
    assert await consumer.ok("GET", "/subscription") == {"topics": []}
    await consumer.ok("POST", "/subscription", {"topics": ["t", "later"]})
    assert await consumer.ok("GET", "/subscription") == {"topics": ["later", "t"]}
    assert await consumer.ok("GET", "/assignments") == {
        "partitions": [{"topic": "t", "partition": n} for n in range(3)]
    }
    answer = await consumer("GET", "/records")
    assert answer.headers["content-type"] == JSON
    assert answer.headers["tidelog-generation"] == "1"
    assert [record["value"] for record in answer.json()] == [1, 2]
    assert answer.json()[0].keys() == {"topic", "key", "value", "partition", "offset", "timestamp"}


async def test_strimzi_sees_its_partitions_in_the_subscription(broker: Broker, topic: str) -> None:
    answer = await broker.http.post("/consumers/g", content=json.dumps(STRIMZI))
    consumer = Instance(broker.http, f"/consumers/g/instances/{answer.json()['instance_id']}")
    await consumer.ok("POST", "/subscription", {"topics": ["t"]})
    assert await consumer.ok("GET", "/subscription") == {
        "topics": ["t"],
        "partitions": [{"t": [0, 1, 2]}],
    }


async def test_one_way_to_configure_only(consumer: Instance, broker: Broker, topic: str) -> None:
    both = {"topics": ["t"], "topic_pattern": "t.*"}
    by_hand = {"partitions": [{"topic": "t", "partition": 1}]}
    other = await created(broker)
    await other.ok("POST", "/assignments", by_hand)
    assert await other.ok("GET", "/assignments") == by_hand
    for answer in (
        await consumer("POST", "/subscription", both),
        await consumer("POST", "/subscription", {"topic_pattern": "t.*"}),
        await consumer("POST", "/assignments", by_hand),
        await other("POST", "/subscription", {"topics": ["t"]}),
        await other("POST", "/subscription", {"topic_pattern": "t"}),
    ):
        why = assert_refused(answer, 409, 40903)
        assert why.startswith("IllegalStateError: You must choose only one way")
    for instance in (consumer, other):
        assert (await instance("DELETE", "/subscription")).status_code == 204
        assert await instance.ok("GET", "/assignments") == {"partitions": []}
    await consumer.ok("POST", "/assignments", by_hand)
    await other.ok("POST", "/subscription", {"topic_pattern": "t.*"})


async def test_assignments_of_what_does_not_exist(consumer: Instance, broker: Broker) -> None:
    other = await created(broker)
    for topic, partition, code in (("nope", 0, 40401), ("t", 9, 40402)):
        body = {"partitions": [{"topic": topic, "partition": partition}]}
        assert_refused(await other("POST", "/assignments", body), 404, code)


async def test_patterns_find_topics_that_come(broker: Broker, topic: str) -> None:
    consumer = await created(broker)
    answer = await consumer("POST", "/subscription", {"topic_pattern": "(?=x)"})
    assert_refused(answer, 400, 40002)
    await consumer.ok("POST", "/subscription", {"topic_pattern": "t[0-9]*"})
    assert await consumer.ok("GET", "/subscription") == {"topics": ["t"]}
    await broker.log.topics.create("t1", 1, {})
    await broker.log.topics.create("other", 1, {})
    answer = await produce(broker.http, [{"value": "late"}], path="/topics/t1")
    assert answer.status_code == 200
    assert await consumer.read(timeout=20_000) == ["late"]
    assert await consumer.ok("GET", "/subscription") == {"topics": ["t", "t1"]}


async def test_two_members_share_and_the_third_idles_until_one_leaves(
    broker: Broker, topic: str
) -> None:
    several = [await subscribed(broker) for _ in range(4)]
    owned = [(await consumer.ok("GET", "/assignments"))["partitions"] for consumer in several]
    assert sorted(map(len, owned)) == [0, 1, 1, 1]
    idle = several[[len(partitions) for partitions in owned].index(0)]
    busy = several[[len(partitions) for partitions in owned].index(1)]
    await put(broker, *"abc", partition=0)
    waiting = asyncio.create_task(idle.read(timeout=5000))
    await asyncio.sleep(0.05)
    await busy.ok("DELETE")
    assert len((await idle.ok("GET", "/assignments"))["partitions"]) == 1
    for n in range(3):
        await put(broker, "x", partition=n)
    assert await waiting


async def test_a_static_member_that_joins_again_takes_its_place(broker: Broker, topic: str) -> None:
    first = await subscribed(broker, group_instance_id="pod-0")
    other = await subscribed(broker)
    owned = await first.ok("GET", "/assignments")
    second = await created(broker, group_instance_id="pod-0")
    assert_refused(await first("GET", "/records"), 404, 40403)
    assert await second.ok("GET", "/assignments") == owned
    assert (await other("GET", "/records?timeout=0")).headers["tidelog-generation"] == "2"


# -- records


async def test_reads_go_on_and_commits_follow_what_was_returned(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker)
    await put(broker, *range(5))
    assert await consumer.committed() == {0: -1, 1: -1, 2: -1}
    assert await consumer.read(max_bytes=1) == [0]
    await broker.consumers.commit_delivered()
    assert await consumer.committed() == {0: -1, 1: -1, 2: -1}  # its answer may be lost
    assert await consumer.read(max_records=3) == [1, 2, 3]
    await broker.consumers.commit_delivered()
    assert (await consumer.committed())[0] == 1
    await consumer.ok("DELETE")
    assert broker.log.groups.committed_offsets("g")["t", 0].offset == 4  # type: ignore[index]
    again = await subscribed(broker)
    assert await again.read() == [4]


async def test_a_read_waits_for_the_first_record_and_no_longer(
    consumer: Instance, broker: Broker
) -> None:
    waiting = asyncio.create_task(consumer.read(timeout=20_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await put(broker, "now", partition=2)
    async with asyncio.timeout(15):
        assert await waiting == ["now"]
    started = asyncio.get_running_loop().time()
    assert await consumer.read(timeout=100) == []
    assert 0.09 <= asyncio.get_running_loop().time() - started < 15


async def test_the_instances_own_timeout_is_the_default(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, consumer_request_timeout_ms=1400)
    for query in ({}, {"timeout": -1, "max_bytes": -1}):
        started = asyncio.get_running_loop().time()
        assert await consumer.read(**query) == []
        assert asyncio.get_running_loop().time() - started > 1.3  # 1 s where nothing is said


async def test_fetch_min_bytes_waits_for_more(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, fetch_min_bytes=40)  # a record weighs 24 and its value
    await put(broker, 1)
    waiting = asyncio.create_task(consumer.read(timeout=5000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await put(broker, 23456, partition=1)
    assert sorted(await waiting) == [1, 23456]
    await put(broker, 7)
    assert await consumer.read(timeout=50) == [7]


async def test_a_record_over_max_bytes_is_returned(consumer: Instance, broker: Broker) -> None:
    await put(broker, "x" * 5000, "y")
    assert await consumer.read(max_bytes=10) == ["x" * 5000]
    assert await consumer.read(max_bytes=10) == ["y"]


async def test_max_poll_records_bounds_each_read(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, **{"max.poll.records": 2})
    await put(broker, *range(5))
    assert await consumer.read(max_records=9) == [0, 1]
    assert await consumer.read(max_records=1) == [2]
    assert await consumer.read() == [3, 4]


async def test_every_partition_gets_its_turn(consumer: Instance, broker: Broker) -> None:
    for partition in range(3):
        await put(broker, *[partition] * 10, partition=partition)
    seen = [await consumer.read(max_bytes=1) for _ in range(6)]
    assert sorted(value for page in seen for value in page) == [0, 0, 1, 1, 2, 2]


async def test_a_second_read_waits_its_turn(consumer: Instance, broker: Broker) -> None:
    first = asyncio.create_task(consumer.read(timeout=10_000))
    await asyncio.sleep(0.02)
    assert await consumer.read(timeout=50) == []  # its wait counts
    second = asyncio.create_task(consumer.read(timeout=10_000))
    await asyncio.sleep(0.02)
    await put(broker, 1)
    assert await first == [1]
    await put(broker, 2)
    assert await second == [2]


@pytest.mark.parametrize(("fmt", "media_type"), [("binary", BINARY), ("text", TEXT)])
async def test_formats(broker: Broker, topic: str, fmt: str, media_type: str) -> None:
    await append(broker.log, b"hi")
    consumer = await subscribed(broker, format=fmt)
    answer = await consumer("GET", "/records", accept=f"{V2}, */*")
    assert answer.headers["content-type"] == media_type
    assert answer.json()[0]["value"] == ("hi" if fmt == "text" else "aGk=")
    for other in (JSON, "application/vnd.kafka.avro.v2+json", "text/html"):
        assert_refused(await consumer("GET", "/records", accept=other), 406, 40601)
    answer = await consumer("GET", "/records?timeout=0", accept=media_type)
    assert answer.status_code == 200


async def test_any_instance_answers_in_columns(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, format="avro")
    assert pa.ipc.open_stream((await consumer("GET", "/records?timeout=0", accept=ARROW)).content)
    await append(broker.log, b"a", b"b", timestamp_ms=FIRST_MS)
    await append(broker.log, b"c", partition=2)
    answer = await consumer("GET", "/records", accept=ARROW)
    assert answer.headers["content-type"] == ARROW
    assert answer.headers["tidelog-generation"] == "1"
    read = pa.ipc.open_stream(answer.content).read_all()
    assert read.select(["topic", "partition", "offset", "value"]).to_pylist() == [
        {"topic": "t", "partition": number, "offset": offset, "value": value}
        for number, offset, value in ((0, 0, b"a"), (0, 1, b"b"), (2, 0, b"c"))
    ]
    assert read.column("timestamp").to_pylist()[1].microsecond == 1000
    assert (await consumer("GET", "/records?timeout=0", accept=ARROW)).status_code == 200


async def test_what_does_not_decode_is_not_passed_over(broker: Broker, topic: str) -> None:
    await append(broker.log, b"{no json")
    consumer = await subscribed(broker)
    for _ in range(2):
        why = assert_refused(await consumer("GET", "/records"), 422, 422)
        assert why.startswith("value deserialization error for format json")
    avro = await subscribed(broker, group="h", format="avro")
    why = assert_refused(await avro("GET", "/records"), 422, 422)
    assert why.startswith("value deserialization error for format avro")


@pytest.mark.parametrize("query", ["timeout=x", "timeout=-2", "max_bytes=0", "max_bytes=1.5"])
async def test_queries_that_are_none(consumer: Instance, query: str) -> None:
    assert_refused(await consumer("GET", f"/records?{query}"), 400, 40002)


async def test_a_read_of_nothing(broker: Broker) -> None:
    consumer = await created(broker)
    assert_refused(await consumer("GET", "/records"), 409, 40903)


async def test_latest_begins_where_the_log_ended_at_the_subscription(
    broker: Broker, topic: str
) -> None:
    await put(broker, "before")
    consumer = await subscribed(broker, auto_offset_reset="latest")
    await put(broker, "after")
    assert await consumer.read() == ["after"]
