"""Consumer instances, v2: every endpoint, every code, in each dialect (REST.md 1.4)."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from storage.objectstore import MemoryStore
from tests.service.conftest import (
    BINARY,
    JSON,
    TEXT,
    V2,
    Broker,
    append,
    assert_refused,
    broker_on,
)
from tests.service.conftest import post as produce

STRIMZI = {"enable.auto.commit": False, "auto.offset.reset": "earliest", "format": "json"}


class Instance:
    """One consumer instance over HTTP."""

    def __init__(self, http: httpx.AsyncClient, path: str) -> None:
        self.http = http
        self.path = path

    async def __call__(
        self, method: str, what: str = "", body: Any = None, **headers: str
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        sent = {"content-type": V2} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, f"{self.path}{what}", content=content, headers=sent)

    async def ok(self, method: str, what: str = "", body: Any = None) -> Any:
        answer = await self(method, what, body)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    async def read(self, **query: Any) -> list[Any]:
        """Values."""
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return [each["value"] for each in await self.ok("GET", f"/records?{text}")]

    async def committed(self) -> dict[int, int]:
        said = await self.ok("GET", "/offsets")
        return {each["partition"]: each["offset"] for each in said["offsets"]}


async def created(broker: Broker, group: str = "g", **body: Any) -> Instance:
    said = {"format": "json", "auto.offset.reset": "earliest"} | {
        name.replace("_", "."): value for name, value in body.items()
    }
    answer = await broker.http.post(
        f"/consumers/{group}", content=json.dumps(said), headers={"content-type": V2}
    )
    assert answer.status_code == 200, answer.text
    name = answer.json()["instance_id"]
    return Instance(broker.http, f"/consumers/{group}/instances/{name}")


async def subscribed(broker: Broker, group: str = "g", **body: Any) -> Instance:
    instance = await created(broker, group, **body)
    await instance.ok("POST", "/subscription", {"topics": ["t"]})
    return instance


async def put(broker: Broker, *values: Any, partition: int = 0) -> None:
    records = [{"value": value, "partition": partition} for value in values]
    assert (await produce(broker.http, records)).status_code == 200


@pytest.fixture
async def consumer(broker: Broker, topic: str) -> Instance:
    """Subscribed to t, from its beginning, nothing commits by itself."""
    return await subscribed(broker, auto_commit_enable=False)


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
    assert_refused(answer, 415, 415)


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
async def test_bodies_that_say_nothing_useful(consumer: Instance, what: str, bad: Any) -> None:
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
    assert [each["value"] for each in answer.json()] == [1, 2]
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
    await broker.log.create_topic("t1", 1, {})
    await broker.log.create_topic("other", 1, {})
    answer = await produce(broker.http, [{"value": "late"}], path="/topics/t1")
    assert answer.status_code == 200
    assert await consumer.read(timeout=5000) == ["late"]
    assert await consumer.ok("GET", "/subscription") == {"topics": ["t", "t1"]}


async def test_two_members_share_and_the_third_idles_until_one_leaves(
    broker: Broker, topic: str
) -> None:
    several = [await subscribed(broker) for _ in range(4)]
    owned = [(await one.ok("GET", "/assignments"))["partitions"] for one in several]
    assert sorted(map(len, owned)) == [0, 1, 1, 1]
    idle = several[[len(each) for each in owned].index(0)]
    busy = several[[len(each) for each in owned].index(1)]
    await put(broker, *"abc", partition=0)
    waiting = asyncio.create_task(idle.read(timeout=5000))
    await asyncio.sleep(0.05)
    await busy.ok("DELETE")
    assert len((await idle.ok("GET", "/assignments"))["partitions"]) == 1
    for n in range(3):
        await put(broker, "x", partition=n)
    assert await waiting


async def test_a_pod_that_comes_again_takes_its_place(broker: Broker, topic: str) -> None:
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
    assert await consumer.read(max_bytes=3) == [1, 2, 3]
    await broker.consumers.commit_delivered()
    assert (await consumer.committed())[0] == 1
    await consumer.ok("DELETE")
    assert broker.log.committed_offsets("g")["t", 0].offset == 4  # type: ignore[index]
    again = await subscribed(broker)
    assert await again.read() == [4]


async def test_a_read_waits_for_the_first_record_and_no_longer(
    consumer: Instance, broker: Broker
) -> None:
    waiting = asyncio.create_task(consumer.read(timeout=20_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await put(broker, "now", partition=2)
    async with asyncio.timeout(2):
        assert await waiting == ["now"]
    started = asyncio.get_running_loop().time()
    assert await consumer.read(timeout=100) == []
    assert 0.09 <= asyncio.get_running_loop().time() - started < 2


async def test_the_instances_own_timeout_is_the_default(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, consumer_request_timeout_ms=50)
    started = asyncio.get_running_loop().time()
    assert await consumer.read() == []
    assert await consumer.read(timeout=-1, max_bytes=-1) == []
    assert asyncio.get_running_loop().time() - started < 0.9


async def test_fetch_min_bytes_waits_for_more(broker: Broker, topic: str) -> None:
    consumer = await subscribed(broker, fetch_min_bytes=5)
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


async def test_every_partition_gets_its_turn(consumer: Instance, broker: Broker) -> None:
    for partition in range(3):
        await put(broker, *[partition] * 10, partition=partition)
    seen = [await consumer.read(max_bytes=1) for _ in range(6)]
    assert sorted(value for one in seen for value in one) == [0, 0, 1, 1, 2, 2]


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
    assert [each["partition"] for each in said["offsets"]] == [0, 2]
    assert {each["offset"] for each in said["offsets"]} == {-1}
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
    path = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/transactions"

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
    await append(broker.log, b"0", b"1", b"2", b"3", at=1_700_000_000_000)
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
    where = {"partitions": [{"topic": "t", "partition": 0}]}
    await consumer.ok("POST", "/positions/beginning", where)
    assert await consumer.read() == [0, 1, 2, 3]
    await consumer.ok("POST", "/positions/beginning", where)
    await consumer.ok("POST", "/positions/end", where)
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


async def test_any_broker_serves_an_instance(store: MemoryStore) -> None:
    """Whoever is asked takes the group: nothing that was committed or sought is lost."""
    async with broker_on(store, "a") as a, broker_on(store, "b") as b:
        await a.log.create_topic("t", 1, {})
        consumer = await subscribed(a, auto_commit_enable=False)
        await put(a, *range(6))
        assert await consumer.read(max_bytes=2) == [0, 1]
        body = {"offsets": [{"topic": "t", "partition": 0, "offset": 1}]}
        there = Instance(b.http, consumer.path)
        await there.ok("POST", "/offsets", body)
        assert await there.read(max_bytes=2) == [2, 3]
        await there.ok("POST", "/positions", {"offsets": body["offsets"]})
        await a.log.wal.refresh()
        assert await consumer.read(max_bytes=2) == [1, 2]
        await b.log.wal.refresh()
        assert await there.read(max_bytes=2) == [1, 2]  # nothing of it was committed
        assert (await there("DELETE")).status_code == 204
        await a.log.wal.refresh()
        assert_refused(await consumer("GET", "/records"), 404, 40403)


async def test_a_broker_that_starts_again_goes_on(store: MemoryStore) -> None:
    async with broker_on(store) as broker:
        await broker.log.create_topic("t", 1, {})
        consumer = await subscribed(broker, auto_offset_reset="latest")
        await put(broker, "while it lives")
    async with broker_on(store) as broker:
        again = Instance(broker.http, consumer.path)
        await put(broker, "afterwards")
        assert await again.read() == ["while it lives", "afterwards"]
