"""Consumer instances (DIALECTS, v2 consumers): every endpoint in each dialect.

With every error code that it may answer, over a socket by a plain HTTP client.

Rows: what is asked, and what must come back: status, error code or the body's exact keys, and the
media type. Each row has an instance, or a group, of its own.
"""

from typing import Any

import pytest

from tests.system.rest import (
    ARROW,
    BEYOND,
    BINARY,
    CONFLUENT,
    CREATED,
    EMBEDDED,
    JSON,
    KARAPACE,
    NOWHERE,
    ONE,
    PLAIN,
    RECORD,
    REDPANDA,
    STRIMZI,
    TEXT,
    TOPIC,
    V2,
    World,
    empty,
    refused,
)

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
    answer = world("POST", "/consumers/made", body, content_type)
    assert (answer.status, answer.media_type, answer.body.keys()) == (200, V2, CREATED), answer
    if isinstance(body, dict) and "name" in body:
        assert answer.body["instance_id"] == body["name"]
    path = f"/consumers/made/instances/{answer.body['instance_id']}"
    assert answer.body["base_uri"] == f"http://127.0.0.1:{world.broker.port}{path}"
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
        pytest.param(" " * (4 * 1024 * 1024 + 1), V2, 413, 413, id="large"),
    ],
)
def test_create_refused(world: World, body: Any, content_type: str, status: int, code: int) -> None:
    world("POST", "/consumers/refused", {"name": "taken"})
    refused(world("POST", "/consumers/refused", body, content_type), status, code)


def test_unknown_paths_and_methods(world: World) -> None:
    path = world.instance(topics=())
    assert "Invalid parameter 'group_name' got 'a␍b'" in refused(
        world("POST", "/consumers/a%0Db", {}), 400, 40002
    )
    refused(world("POST", f"/consumers/{'g' * 256}", {}), 400, 40002)
    refused(world("GET", "/consumers/g/instances/a%0Db/records"), 400, 40002)
    for method, wrong_path, status in (
        ("PUT", "/consumers/g", 405),
        ("GET", "/consumers/g", 405),
        ("PUT", f"{path}/subscription", 405),
        ("DELETE", f"{path}/records", 405),
        ("POST", f"{path}/records", 405),
        ("GET", f"{path}/positions", 405),
        ("GET", f"{path}/nothing", 404),
        ("GET", "/consumers/g/members/x", 404),
    ):
        refused(world(method, wrong_path), status, status)
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


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_instance_not_found(world: World, method: str, path: str) -> None:
    body = FITTING.get(path) if method == "POST" else None
    answer = world(method, f"/consumers/g/instances/nobody{path}", body)
    assert refused(answer, 404, 40403) == "Consumer instance not found."


@pytest.mark.parametrize("part", FITTING)
def test_invalid_bodies_and_media_types(world: World, part: str) -> None:
    path = world.instance()
    refused(world("POST", path + part, "{"), 400, 400)
    refused(world("POST", path + part, []), 422, 422)
    refused(world("POST", path + part, FITTING[part], "text/html"), 415, 415)


# -- 1.4: subscription and assignments


def test_subscriptions(world: World) -> None:
    path = world.instance(topics=())
    url = f"{path}/subscription"
    assert world("GET", url).body == {"topics": []}
    for body in ({"topics": [TOPIC]}, {"topics": [TOPIC, "later"]}, {"topics": []}):
        empty(world("POST", url, body))
        answer = world("GET", url)
        assert (answer.status, answer.media_type) == (200, V2)
        assert answer.body == {"topics": sorted(body["topics"])}
    empty(world("POST", url, {"topic_pattern": "ord.*"}))
    assert world("GET", url).body == {"topics": [TOPIC]}
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
        refused(world("POST", url, body), status, code)
    refused(world("POST", f"{path}/assignments", ONE), 409, 40903)
    empty(world("DELETE", url))
    assert world("GET", url).body == {"topics": []}


def test_strimzi_shows_partitions_in_its_subscription(world: World) -> None:
    answer = world("GET", f"{world.instance(STRIMZI)}/subscription")
    assert answer.body == {"topics": [TOPIC], "partitions": [{TOPIC: [0, 1, 2]}]}


def test_assignments(world: World) -> None:
    path = world.instance(topics=())
    url = f"{path}/assignments"
    assert world("GET", url).body == {"partitions": []}
    empty(world("POST", url, ONE))
    answer = world("GET", url)
    assert (answer.status, answer.media_type, answer.body) == (200, V2, ONE)
    for body, status, code in (
        (NOWHERE, 404, 40401),
        (BEYOND, 404, 40402),
        ({"partitions": [{"topic": TOPIC, "partition": -1}]}, 404, 40402),
        ({"partitions": [{"topic": TOPIC}]}, 422, 422),
        ({}, 422, 422),
    ):
        refused(world("POST", url, body), status, code)
    message = refused(world("POST", f"{path}/subscription", {"topics": [TOPIC]}), 409, 40903)
    assert message.startswith("IllegalStateError: You must choose only one way")
    refused(world("POST", f"{path}/subscription", {"topic_pattern": "o.*"}), 409, 40903)
    empty(world("DELETE", f"{path}/subscription"))
    empty(world("POST", f"{path}/subscription", {"topics": [TOPIC]}))


# -- 1.4: records


@pytest.mark.parametrize(
    ("fmt", "accept", "media_type"),
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
def test_records(world: World, fmt: str, accept: str | None, media_type: str) -> None:
    path = world.instance(CONFLUENT | {"format": fmt})
    answer = world("GET", f"{path}/records?timeout=2000&max_bytes=100000", accept=accept)
    assert (answer.status, answer.media_type) == (200, media_type), answer
    assert answer.headers["tidelog-generation"] == "1"
    if media_type == ARROW:
        assert answer.body.startswith(b"\xff\xff\xff\xff")
        return
    assert [record.keys() for record in answer.body] == [RECORD] * 3
    values = [
        record["value"] for record in sorted(answer.body, key=lambda record: record["partition"])
    ]
    assert values[1] == {"json": {"n": 1}, "binary": "eyJuIjoxfQ==", "text": '{"n":1}'}[fmt]
    none = world("GET", f"{path}/records?timeout=1", accept=accept)
    assert (none.status, none.media_type, none.body) == (200, media_type, [])


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
