"""Every endpoint of consumer instances and of groups (REST.md 1.4, 1.5), in each dialect, with
every error code that it may answer, over a socket by a plain HTTP client.

Rows: what is asked, and what must come back: status, error code or the body's exact keys, and the
media type. Each row leaves its instance as the next one needs it, or has one of its own.
"""

import http.client
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.broker import Broker

V2 = "application/vnd.kafka.v2+json"
EMBEDDED = "application/vnd.kafka.{}.v2+json"
JSON = EMBEDDED.format("json")
BINARY = EMBEDDED.format("binary")
TEXT = EMBEDDED.format("text")
PLAIN = "application/json"
ARROW = "application/vnd.apache.arrow.stream"

TOPIC = "orders"
RECORD = {"topic", "key", "value", "partition", "offset", "timestamp"}
CREATED = {"instance_id", "base_uri"}
OFFSET = {"topic", "partition", "offset", "metadata"}
ONE = {"partitions": [{"topic": TOPIC, "partition": 0}]}
NOWHERE = {"partitions": [{"topic": "nope", "partition": 0}]}
BEYOND = {"partitions": [{"topic": TOPIC, "partition": 99}]}

CONFLUENT = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false"}
KARAPACE = CONFLUENT | {"topic.metadata.refresh.interval.ms": "5000", "fetch.min.bytes": "1"}
STRIMZI = {
    "format": "json",
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "fetch.min.bytes": 512,
    "consumer.request.timeout.ms": 100,
    "isolation.level": "read_committed",
}
REDPANDA = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false"}


class Said(NamedTuple):
    status: int
    media_type: str
    body: Any
    headers: dict[str, str]


class World:
    """A broker with a topic of three partitions, each with a record, and instances by name."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._names = itertools.count()
        broker.create_topic(TOPIC, 3)
        broker.create_topic("raw", 1)
        records = [{"key": f"k{n}", "value": {"n": n}, "partition": n} for n in range(3)]
        assert self("POST", f"/topics/{TOPIC}", {"records": records}, JSON).status == 200
        assert self("POST", "/topics/raw", {"records": [{"value": "/w=="}]}, BINARY).status == 200
        listed = self("GET", "/v3/clusters", None).body
        self.v3 = f"/v3/clusters/{listed['data'][0]['cluster_id']}"
        self.groups = f"{self.v3}/consumer-groups"

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str | None = V2,
        accept: str | None = None,
        **headers: str,
    ) -> Said:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        raw = body.encode() if isinstance(body, str) else None
        if body is not None and raw is None:
            raw = json.dumps(body, separators=(",", ":")).encode()
        if content_type is not None and body is not None:
            sent["Content-Type"] = content_type
        if accept is not None:
            sent["Accept"] = accept
        connection = http.client.HTTPConnection("127.0.0.1", self.broker.port, timeout=20)
        connection.request(method, path, raw, sent)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        media_type = answer.headers.get("Content-Type", "")
        told = json.loads(content) if content and "json" in media_type else content
        return Said(answer.status, media_type, told, dict(answer.headers))

    def instance(
        self, settings: Any = None, topics: Any = (TOPIC,), partitions: Any = (), group: str = ""
    ) -> str:
        """The path of a new one in a group of its own."""
        group = group or f"g{next(self._names)}"
        made = self("POST", f"/consumers/{group}", CONFLUENT if settings is None else settings)
        assert made.status == 200, made
        path = f"/consumers/{group}/instances/{made.body['instance_id']}"
        if topics:
            assert self("POST", f"{path}/subscription", {"topics": topics}).status == 204
        elif partitions:
            assert self("POST", f"{path}/assignments", {"partitions": partitions}).status == 204
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with Broker(tmp_path_factory.mktemp("rest")) as broker:
        yield World(broker)


def refused(said: Said, status: int, code: int, media_type: str = V2) -> str:
    assert (said.status, said.body.get("error_code")) == (status, code), said
    assert said.body.keys() == {"error_code", "message"}
    assert said.media_type == media_type
    return str(said.body["message"])


def empty(said: Said) -> None:
    assert (said.status, said.body, said.media_type) == (204, b"", ""), said


# -- 1.4: create and delete


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (None, None),
        ("", V2),
        ({}, V2),
        ({}, PLAIN),
        ({}, f"{V2}; charset=utf-8"),
        ({}, "application/vnd.kafka.v1+json"),
        ({}, "application/vnd.kafka+json"),
        ({}, BINARY),
        (CONFLUENT | {"name": "confluent", "id": "7"}, V2),
        (CONFLUENT | {"consumer.request.timeout.ms": 1000, "fetch.min.bytes": -1}, V2),
        (CONFLUENT | {"auto.offset.reset": "smallest"}, V2),
        (CONFLUENT | {"auto.offset.reset": "largest", "auto.commit.enable": True}, V2),
        (KARAPACE, JSON),
        (STRIMZI, V2),
        (STRIMZI | {"format": "text", "name": "strimzi"}, V2),
        (REDPANDA | {"name": "redpanda"}, V2),
        *(({"format": name}, V2) for name in ("binary", "JSON", "avro", "jsonschema", "protobuf")),
    ],
)
def test_create_and_delete(world: World, body: Any, content_type: str | None) -> None:
    made = world("POST", "/consumers/made", body, content_type)
    assert (made.status, made.media_type, made.body.keys()) == (200, V2, CREATED), made
    if isinstance(body, dict) and "name" in body:
        assert made.body["instance_id"] == body["name"]
    path = f"/consumers/made/instances/{made.body['instance_id']}"
    assert made.body["base_uri"] == f"http://127.0.0.1:{world.broker.port}{path}"
    empty(world("DELETE", f"{path}/"))
    assert refused(world("DELETE", path), 404, 40403) == "Consumer instance not found."


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        ({"name": "taken"}, V2, 409, 40902),
        ({"auto.offset.reset": "middle"}, V2, 422, 42204),
        ({"session.timeout.ms": 0}, V2, 422, 42204),
        ({"consumer.request.timeout.ms": -5}, V2, 422, 42204),
        ({"fetch.min.bytes": -2}, V2, 422, 40001),
        ({"fetch.min.bytes": 10_000_001}, V2, 422, 40001),
        ({"format": "xml"}, V2, 422, 422),
        ({"fetch.min.bytes": "many"}, V2, 422, 422),
        ({"auto.commit.enable": "perhaps"}, V2, 422, 422),
        ({"no.such.key": 1}, V2, 422, 422),
        ([], V2, 422, 422),
        ("{", V2, 400, 400),
        ({"name": "a\nb"}, V2, 400, 40002),
        ({"partition.assignment.strategy": "best"}, V2, 400, 40002),
        ({}, "text/plain", 415, 415),
        ({}, "application/xml", 415, 415),
    ],
)
def test_create_refused(world: World, body: Any, content_type: str, status: int, code: int) -> None:
    world("POST", "/consumers/refused", {"name": "taken"})
    refused(world("POST", "/consumers/refused", body, content_type), status, code)


def test_paths_and_methods_that_nobody_serves(world: World) -> None:
    path = world.instance(topics=())
    assert "Invalid parameter 'group_name' got 'a␍b'" in refused(
        world("POST", "/consumers/a%0Db", {}), 400, 40002
    )
    refused(world("POST", f"/consumers/{'g' * 256}", {}), 400, 40002)
    refused(world("GET", "/consumers/g/instances/a%0Db/records"), 400, 40002)
    for method, at, status in (
        ("PUT", "/consumers/g", 405),
        ("GET", "/consumers/g", 405),
        ("PUT", f"{path}/subscription", 405),
        ("DELETE", f"{path}/records", 405),
        ("POST", f"{path}/records", 405),
        ("GET", f"{path}/positions", 405),
        ("GET", f"{path}/nothing", 404),
        ("GET", "/consumers/g/members/x", 404),
    ):
        refused(world(method, at), status, status)
    assert world("GET", f"/{path}//assignments/").status == 200


# -- 1.4: every path of an instance that is not there, and of bodies that say nothing

PATHS = [
    ("DELETE", ""),
    ("POST", "/subscription"),
    ("GET", "/subscription"),
    ("DELETE", "/subscription"),
    ("POST", "/assignments"),
    ("GET", "/assignments"),
    ("GET", "/records"),
    ("POST", "/offsets"),
    ("GET", "/offsets"),
    ("POST", "/positions"),
    ("POST", "/positions/beginning"),
    ("POST", "/positions/end"),
]
FITTING: dict[str, Any] = {
    "/subscription": {"topics": [TOPIC]},
    "/assignments": ONE,
    "/offsets": {},
    "/positions": {"offsets": []},
    "/positions/beginning": ONE,
    "/positions/end": ONE,
}


@pytest.mark.parametrize(("method", "what"), PATHS)
def test_instance_not_found(world: World, method: str, what: str) -> None:
    body = FITTING.get(what) if method == "POST" else None
    said = world(method, f"/consumers/g/instances/nobody{what}", body)
    assert refused(said, 404, 40403) == "Consumer instance not found."


@pytest.mark.parametrize("what", FITTING)
def test_bodies_and_media_types_that_are_none(world: World, what: str) -> None:
    path = world.instance()
    refused(world("POST", path + what, "{"), 400, 400)
    refused(world("POST", path + what, []), 422, 422)
    refused(world("POST", path + what, FITTING[what], "text/html"), 415, 415)


# -- 1.4: subscription and assignments


def test_subscriptions(world: World) -> None:
    path = world.instance(topics=())
    what = f"{path}/subscription"
    assert world("GET", what).body == {"topics": []}
    for body in ({"topics": [TOPIC]}, {"topics": [TOPIC, "later"]}, {"topics": []}):
        empty(world("POST", what, body))
        said = world("GET", what)
        assert (said.status, said.media_type) == (200, V2)
        assert said.body == {"topics": sorted(body["topics"])}
    empty(world("POST", what, {"topic_pattern": "ord.*"}))
    assert world("GET", what).body == {"topics": [TOPIC]}
    both = {"topics": [TOPIC], "topic_pattern": "x"}
    for body, status, code in (
        (both, 409, 40903),
        ({"topics": [TOPIC]}, 409, 40903),
        ({}, 422, 422),
        ({"topics": TOPIC}, 422, 422),
        ({"topics": [7]}, 422, 422),
        ({"topic_pattern": "(?=x)"}, 400, 40002),
        ({"topics": ["a\rb"]}, 400, 40002),
    ):
        refused(world("POST", what, body), status, code)
    refused(world("POST", f"{path}/assignments", ONE), 409, 40903)
    empty(world("DELETE", what))
    assert world("GET", what).body == {"topics": []}


def test_strimzi_shows_partitions_in_its_subscription(world: World) -> None:
    said = world("GET", f"{world.instance(STRIMZI)}/subscription")
    assert said.body == {"topics": [TOPIC], "partitions": [{TOPIC: [0, 1, 2]}]}


def test_assignments(world: World) -> None:
    path = world.instance(topics=())
    what = f"{path}/assignments"
    assert world("GET", what).body == {"partitions": []}
    empty(world("POST", what, ONE))
    said = world("GET", what)
    assert (said.status, said.media_type, said.body) == (200, V2, ONE)
    for body, status, code in (
        (NOWHERE, 404, 40401),
        (BEYOND, 404, 40402),
        ({"partitions": [{"topic": TOPIC, "partition": -1}]}, 404, 40402),
        ({"partitions": [{"topic": TOPIC}]}, 422, 422),
        ({}, 422, 422),
    ):
        refused(world("POST", what, body), status, code)
    message = refused(world("POST", f"{path}/subscription", {"topics": [TOPIC]}), 409, 40903)
    assert message.startswith("IllegalStateError: You must choose only one way")
    refused(world("POST", f"{path}/subscription", {"topic_pattern": "o.*"}), 409, 40903)
    empty(world("DELETE", f"{path}/subscription"))
    empty(world("POST", f"{path}/subscription", {"topics": [TOPIC]}))


# -- 1.4: records


@pytest.mark.parametrize(
    ("fmt", "accept", "answered"),
    [
        ("json", None, JSON),
        ("json", "*/*", JSON),
        ("json", V2, JSON),
        ("json", PLAIN, JSON),
        ("json", JSON, JSON),
        ("json", f"{V2}; q=0.9, {JSON}", JSON),
        ("json", EMBEDDED.format("json").replace(".v2", ".v1"), JSON),
        ("binary", None, BINARY),
        ("binary", BINARY, BINARY),
        ("text", TEXT, TEXT),
        ("json", ARROW, ARROW),
        ("protobuf", ARROW, ARROW),
    ],
)
def test_records(world: World, fmt: str, accept: str | None, answered: str) -> None:
    path = world.instance(CONFLUENT | {"format": fmt})
    said = world("GET", f"{path}/records?timeout=2000&max_bytes=100000", accept=accept)
    assert (said.status, said.media_type) == (200, answered), said
    assert said.headers["tidelog-generation"] == "1"
    if answered == ARROW:
        assert said.body.startswith(b"\xff\xff\xff\xff")
        return
    assert [each.keys() for each in said.body] == [RECORD] * 3
    values = [each["value"] for each in sorted(said.body, key=lambda one: one["partition"])]
    assert values[1] == {"json": {"n": 1}, "binary": "eyJuIjoxfQ==", "text": '{"n":1}'}[fmt]
    none = world("GET", f"{path}/records?timeout=1", accept=accept)
    assert (none.status, none.media_type, none.body) == (200, answered, [])


@pytest.mark.parametrize(
    ("query", "accept", "status", "code"),
    [
        ("", BINARY, 406, 40601),
        ("", EMBEDDED.format("avro"), 406, 40601),
        ("", "text/html", 406, 40601),
        ("?timeout=x", None, 400, 40002),
        ("?timeout=-2", None, 400, 40002),
        ("?max_bytes=0", None, 400, 40002),
        ("?max_bytes=1.5", None, 400, 40002),
    ],
)
def test_records_refused(
    world: World, query: str, accept: str | None, status: int, code: int
) -> None:
    path = world.instance()
    refused(world("GET", f"{path}/records{query}", accept=accept), status, code)
    assert len(world("GET", f"{path}/records?timeout=2000").body) == 3, "nothing was passed over"


def test_records_of_nothing_and_records_that_do_not_decode(world: World) -> None:
    refused(world("GET", f"{world.instance(topics=())}/records"), 409, 40903)
    for fmt in ("json", "text", "avro", "jsonschema", "protobuf"):
        path = world.instance(CONFLUENT | {"format": fmt}, topics=["raw"])
        for _ in range(2):
            message = refused(world("GET", f"{path}/records?timeout=2000"), 422, 422)
            assert message.startswith(f"value deserialization error for format {fmt}")


def test_headers_of_records_and_an_oversized_record(world: World) -> None:
    world.broker.create_topic("large", 1)
    header = {"key": "h", "value": "eA=="}
    records = [{"value": "x" * 50_000, "headers": [header]}, {"value": "y"}]
    assert world("POST", "/topics/large", {"records": records}, JSON).status == 200
    path = world.instance(STRIMZI, topics=["large"])
    (first,) = world("GET", f"{path}/records?timeout=2000&max_bytes=10").body
    assert (first.keys(), first["headers"]) == (RECORD | {"headers"}, [header])
    (second,) = world("GET", f"{path}/records?timeout=2000&max_bytes=10").body
    assert (second.keys(), second["value"]) == (RECORD, "y")


# -- 1.4: offsets


@pytest.mark.parametrize(
    ("settings", "body", "status", "said", "stored"),
    [
        (CONFLUENT, {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]}, 200, [], 1),
        (KARAPACE, {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]}, 200, [], 1),
        (STRIMZI, {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 1}]}, 204, b"", 1),
        (REDPANDA, {"partitions": [{"topic": TOPIC, "partition": 0, "offset": 1}]}, 204, b"", 1),
        (CONFLUENT, None, 200, [], 1),
        (CONFLUENT, "", 200, [], 1),
        (KARAPACE, {}, 200, [], 1),
        (STRIMZI, {}, 204, b"", 1),
    ],
)
def test_commit(
    world: World, settings: Any, body: Any, status: int, said: Any, stored: int
) -> None:
    path = world.instance(settings)
    assert len(world("GET", f"{path}/records?timeout=100").body) == 3
    done = world("POST", f"{path}/offsets?async=false", body)
    assert (done.status, done.body) == (status, said), done
    held = world("GET", f"{path}/offsets", ONE)
    assert (held.status, held.media_type) == (200, V2)
    assert held.body == {
        "offsets": [{"topic": TOPIC, "partition": 0, "offset": stored, "metadata": ""}]
    }
    empty(world("DELETE", path))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"offsets": [{"topic": "nope", "partition": 0, "offset": 1}]}, 404, 40401),
        ({"offsets": [{"topic": TOPIC, "partition": 99, "offset": 1}]}, 404, 40402),
        ({"offsets": [{"topic": TOPIC, "partition": 0, "offset": -1}]}, 422, 422),
        ({"offsets": [{"topic": TOPIC, "partition": 0}]}, 422, 422),
        ({"offsets": [{"topic": TOPIC, "partition": 0, "offset": 2**63 - 1}]}, 422, 422),
        (
            {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 1, "metadata": "x" * 5000}]},
            422,
            422,
        ),
    ],
)
def test_commit_refused(world: World, body: Any, status: int, code: int) -> None:
    refused(world("POST", f"{world.instance()}/offsets", body), status, code)


def test_a_commit_of_what_another_member_owns_now(world: World) -> None:
    path = world.instance(group="shared")
    other = world.instance(group="shared")
    lost = world("GET", f"{other}/assignments").body["partitions"][0]["partition"]
    body = {"offsets": [{"topic": TOPIC, "partition": lost, "offset": 0}]}
    assert "generation 2" in refused(world("POST", f"{path}/offsets", body), 409, 40903)


def test_committed_offsets(world: World) -> None:
    path = world.instance(STRIMZI)
    held = world("GET", f"{path}/offsets")
    assert [each["offset"] for each in held.body["offsets"]] == [-1, -1, -1]
    assert held.body["offsets"][0].keys() == OFFSET
    noted = {"topic": TOPIC, "partition": 2, "offset": 1, "metadata": "noted"}
    empty(world("POST", f"{path}/offsets", {"offsets": [noted]}))
    held = world("GET", f"{path}/offsets?topic={TOPIC}&partition=2&partition=0")
    assert held.body["offsets"][0] == noted
    assert held.body["offsets"][1]["offset"] == -1
    for query, body, status, code in (
        ("", NOWHERE, 404, 40401),
        ("", BEYOND, 404, 40402),
        ("?topic=nope&partition=0", None, 404, 40401),
        (f"?topic={TOPIC}&partition=99", None, 404, 40402),
        (f"?topic={TOPIC}&partition=x", None, 400, 40002),
        ("?topic=a&topic=b&partition=0", None, 400, 40002),
        ("", "{", 400, 400),
        ("", {}, 422, 422),
    ):
        refused(world("GET", f"{path}/offsets{query}", body), status, code)


# -- 1.4: positions


def test_positions(world: World) -> None:
    path = world.instance(topics=(), partitions=ONE["partitions"])

    def read() -> int:
        return len(world("GET", f"{path}/records?timeout=50").body)

    assert (read(), read()) == (1, 0)
    at = {"topic": TOPIC, "partition": 0}
    for what, body, left in (
        ("", {"offsets": [at | {"offset": 0, "metadata": ""}]}, 1),
        ("", {"offsets": [at | {"offset": 1}]}, 0),
        ("", {"timestamps": [at | {"timestamp": "2020-01-01T00:00:00Z"}]}, 1),
        ("", {"timestamps": [at | {"timestamp": "2120-01-01T00:00:00Z"}]}, 0),
        ("/beginning", ONE, 1),
        ("/end", ONE, 0),
    ):
        empty(world("POST", f"{path}/positions{what}", body))
        assert read() == left, (what, body)


@pytest.mark.parametrize(
    ("what", "body", "status", "code"),
    [
        ("", {"offsets": [{"topic": TOPIC, "partition": 1, "offset": 0}]}, 409, 40903),
        ("", {"offsets": [{"topic": "nope", "partition": 1, "offset": 0}]}, 404, 40401),
        ("", {"offsets": [{"topic": TOPIC, "partition": 0, "offset": -1}]}, 422, 422),
        ("", {"timestamps": [{"topic": TOPIC, "partition": 0, "timestamp": "noon"}]}, 400, 400),
        ("/beginning", {"partitions": [{"topic": TOPIC, "partition": 1}]}, 409, 40903),
        ("/beginning", NOWHERE, 404, 40401),
        ("/end", {"partitions": [{"topic": TOPIC, "partition": 1}]}, 409, 40903),
        ("/end", BEYOND, 404, 40402),
        ("/end", {}, 422, 422),
    ],
)
def test_positions_refused(world: World, what: str, body: Any, status: int, code: int) -> None:
    path = world.instance(topics=(), partitions=ONE["partitions"])
    refused(world("POST", f"{path}/positions{what}", body), status, code)


# -- 1.4: base_uri behind a balancer


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ({"X_Forwarded_Host": "lb.example", "X_Forwarded_Proto": "https"}, "https://lb.example"),
        ({"X_Forwarded_Host": "lb.example:8443"}, "http://lb.example:8443"),
        (
            {"X_Forwarded_Host": "lb", "X_Forwarded_Path": "/rest/consumers/behind"},
            "http://lb/rest",
        ),
        ({"X_Forwarded_Host": "lb", "X_Forwarded_Prefix": "/rest"}, "http://lb/rest"),
        ({"Forwarded": "for=1.2.3.4;host=lb.example;proto=https"}, "https://lb.example"),
        ({"Forwarded": 'host="lb.example:99";proto=http, host=inner'}, "http://lb.example:99"),
        ({"Host": "kafka.example:80"}, "http://kafka.example"),
    ],
)
def test_base_uri_is_the_balancers(world: World, headers: dict[str, str], base: str) -> None:
    made = world("POST", "/consumers/behind", {}, **headers)
    at = f"{base}/consumers/behind/instances/{made.body['instance_id']}"
    assert made.body["base_uri"] == at
    assert str(world.broker.port) not in made.body["base_uri"]


# -- 1.5

LISTED = {"kind", "metadata", "data"}
GROUP = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "is_simple", "partition_assignor"),
    *("state", "type", "is_mixed_consumer_group", "generation", "coordinator", "consumers"),
    "lag_summary",
}
CONSUMER = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "consumer_id", "instance_id"),
    *("client_id", "assignments"),
}
ASSIGNMENT = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "consumer_id", "topic_name"),
    *("partition_id", "partition", "lag"),
}
LAG = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "topic_name", "partition_id"),
    *("current_offset", "log_end_offset", "lag", "consumer_id", "instance_id", "client_id"),
}
SUMMARY = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "max_lag_consumer_id"),
    *("max_lag_instance_id", "max_lag_client_id", "max_lag_topic_name", "max_lag_partition_id"),
    *("max_lag", "total_lag", "max_lag_consumer", "max_lag_partition"),
}


@pytest.fixture(scope="module")
def seen(world: World) -> World:
    """The group `seen`, whose member `m` has committed one record of partition 0."""
    path = world.instance(CONFLUENT | {"name": "m"}, group="seen")
    body = {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]}
    assert world("POST", f"{path}/offsets", body).status == 200
    return world


@pytest.mark.parametrize(
    ("path", "kind", "keys", "item", "item_keys"),
    [
        ("", "KafkaConsumerGroupList", LISTED, "KafkaConsumerGroup", GROUP),
        ("/seen", "KafkaConsumerGroup", GROUP, "", set()),
        ("/seen/consumers", "KafkaConsumerList", LISTED, "KafkaConsumer", CONSUMER),
        ("/seen/consumers/m", "KafkaConsumer", CONSUMER, "", set()),
        (
            "/seen/consumers/m/assignments",
            "KafkaConsumerAssignmentList",
            LISTED,
            "KafkaConsumerAssignment",
            ASSIGNMENT,
        ),
        (
            f"/seen/consumers/m/assignments/{TOPIC}/partitions/0",
            "KafkaConsumerAssignment",
            ASSIGNMENT,
            "",
            set(),
        ),
        ("/seen/lags", "KafkaConsumerLagList", LISTED, "KafkaConsumerLag", LAG),
        (f"/seen/lags/{TOPIC}/partitions/0", "KafkaConsumerLag", LAG, "", set()),
        ("/seen/lag-summary", "KafkaConsumerGroupLagSummary", SUMMARY, "", set()),
    ],
)
def test_v3_resources(
    seen: World, path: str, kind: str, keys: set[str], item: str, item_keys: set[str]
) -> None:
    for mount in ("", "/kafka"):
        said = seen("GET", f"{mount}{seen.groups}{path}", accept=PLAIN)
        assert (said.status, said.media_type) == (200, PLAIN), said
        assert (said.body["kind"], said.body.keys()) == (kind, keys)
        assert said.body["metadata"]["self"].endswith(f"/consumer-groups{path}")
        if item:
            assert said.body["metadata"]["next"] is None
            assert {(one["kind"], frozenset(one)) for one in said.body["data"]} == {
                (item, frozenset(item_keys))
            }


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nope", None, 404, 404),
        ("GET", "/nope/consumers", None, 404, 404),
        ("GET", "/nope/consumers/m", None, 404, 404),
        ("GET", "/nope/lags", None, 404, 404),
        ("GET", "/nope/lag-summary", None, 404, 404),
        ("GET", "/nope/offsets", None, 404, 404),
        ("GET", "/seen/consumers/nope", None, 404, 404),
        ("GET", "/seen/consumers/nope/assignments", None, 404, 404),
        ("GET", f"/seen/consumers/m/assignments/{TOPIC}/partitions/9", None, 404, 404),
        ("GET", f"/seen/lags/{TOPIC}/partitions/1", None, 404, 404),
        ("GET", "/seen/lags/nope/partitions/0", None, 404, 404),
        ("PUT", "/seen", None, 405, 405),
        ("DELETE", "/nope", None, 404, 404),
        ("DELETE", "/seen", None, 409, 40903),
        ("POST", "/seen/offsets:reset", {"to": "LATEST"}, 409, 40903),
        ("POST", "/idle/offsets:reset", {"to": "LATEST"}, 404, 404),
        ("POST", "/idle/offsets:reset", {"to": "LATEST", "topic_name": "nope"}, 404, 40401),
        ("POST", "/idle/offsets:reset", {"to": "MIDDLE"}, 422, 422),
        ("POST", "/idle/offsets:reset", "{", 400, 400),
    ],
)
def test_v3_refused(seen: World, method: str, path: str, body: Any, status: int, code: int) -> None:
    refused(seen(method, seen.groups + path, body, PLAIN), status, code, PLAIN)


def test_v3_of_another_cluster(world: World) -> None:
    for path in ("consumer-groups", "acls"):
        refused(world("GET", f"/v3/clusters/another/{path}"), 404, 404, PLAIN)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("POST", ""), ("DELETE", ""), ("POST", ":batch")]
)
def test_acls_are_off(world: World, method: str, path: str) -> None:
    body = {"resource_type": "TOPIC"} if method == "POST" else None
    said = world(method, f"{world.v3}/acls{path}", body, PLAIN)
    assert "No Authorizer is configured" in refused(said, 400, 40002, PLAIN)


def test_a_group_is_reset_and_deleted(world: World) -> None:
    path = f"{world.groups}/moved"
    where = {"topic_name": TOPIC, "partition_ids": [0]}
    for body, offset in (
        ({"to": "LATEST"}, 1),
        ({"to": "EARLIEST"}, 0),
        ({"to": "OFFSET", "offset": 1}, 1),
        ({"to": "TIMESTAMP", "timestamp": "2020-01-01T00:00:00Z"}, 0),
        ({"to": "DURATION", "duration_ms": 0}, 1),
    ):
        said = world("POST", f"{path}/offsets:reset", body | where, PLAIN)
        assert (said.status, said.media_type) == (200, PLAIN), said
        assert [each["offset"] for each in said.body["data"]] == [offset], body
        assert world("GET", f"{path}/offsets").body["data"] == said.body["data"]
    empty(world("DELETE", path))
    refused(world("GET", path), 404, 404, PLAIN)


def test_the_same_answers_to_another_client(world: World) -> None:
    """One connection, kept, of a client that many use."""
    with httpx.Client(base_url=world.broker.base_url) as client:
        made = client.post("/consumers/kept", json=CONFLUENT)
        at = f"/consumers/kept/instances/{made.json()['instance_id']}"
        assert client.post(f"{at}/subscription", json={"topics": [TOPIC]}).status_code == 204
        assert len(client.get(f"{at}/records?timeout=2000").json()) == 3
        assert client.post(f"{at}/offsets").json() == []
        assert client.delete(at).status_code == 204
