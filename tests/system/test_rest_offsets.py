"""Offsets and positions of consumer instances (DIALECTS, v2 consumers), in each dialect.

With every error code, over a socket by a plain HTTP client.

Rows: what is asked, and what must come back: status, error code or the body's exact keys, and the
media type. Each row has an instance, or a group, of its own.
"""

from typing import Any

import httpx
import pytest

from tests.system.client import wait_until
from tests.system.rest import (
    BEYOND,
    CONFLUENT,
    KARAPACE,
    NOWHERE,
    OFFSET,
    ONE,
    PLAIN,
    REDPANDA,
    STRIMZI,
    TOPIC,
    V2,
    World,
    empty,
    refused,
)

# -- 1.4: offsets


@pytest.mark.parametrize(
    ("settings", "body", "status", "expected_body", "stored"),
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
    world: World, settings: Any, body: Any, status: int, expected_body: Any, stored: int
) -> None:
    path = world.instance(settings)
    assert len(world("GET", f"{path}/records?timeout=100").body) == 3
    answer_of_commit = world("POST", f"{path}/offsets?async=false", body)
    assert (answer_of_commit.status, answer_of_commit.body) == (status, expected_body), (
        answer_of_commit
    )
    answer = world("GET", f"{path}/offsets", ONE)
    assert (answer.status, answer.media_type) == (200, V2)
    assert answer.body == {
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


def test_member_with_an_expired_session_commits_nothing(world: World) -> None:
    """Another member has its partitions by then.

    The resumed one gets the codes of UNKNOWN_MEMBER_ID and ILLEGAL_GENERATION, whichever way it
    commits.
    """
    path = world.instance(CONFLUENT | {"name": "sleeper", "session.timeout.ms": 3000}, group="nap")
    read = world("GET", f"{path}/records?timeout=2000")
    assert len(read.body) == 3
    other = world.instance(group="nap")
    wait_until(
        lambda: len(world("GET", f"{other}/assignments").body["partitions"]) == 3, "the rebalance"
    )
    commit = {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]}
    refused(world("POST", f"{path}/offsets", commit), 404, 40403)
    refused(world("POST", f"{path}/offsets", {}), 404, 40403)
    refused(world("GET", f"{path}/records"), 404, 40403)
    generation = int(read.headers["tidelog-generation"])
    for consumer in ("sleeper", other.rpartition("/")[2]):
        group = {
            "consumer_group_id": "nap",
            "consumer_id": consumer,
            "generation": generation,
            "offsets": [{"topic_name": TOPIC, "partition_id": 0, "offset": 1}],
        }
        answer = world("POST", f"{world.v3}/transactions", {"consumer_groups": [group]}, PLAIN)
        refused(answer, 409, 40903, PLAIN)
    offsets = world("GET", f"{other}/offsets").body["offsets"]
    assert {row["offset"] for row in offsets} == {-1}, "nothing of it was committed"


def test_committed_offsets(world: World) -> None:
    path = world.instance(STRIMZI)
    answer = world("GET", f"{path}/offsets")
    assert [row["offset"] for row in answer.body["offsets"]] == [-1, -1, -1]
    assert answer.body["offsets"][0].keys() == OFFSET
    noted = {"topic": TOPIC, "partition": 2, "offset": 1, "metadata": "noted"}
    empty(world("POST", f"{path}/offsets", {"offsets": [noted]}))
    answer = world("GET", f"{path}/offsets?topic={TOPIC}&partition=2&partition=0")
    assert answer.body["offsets"][0] == noted
    assert answer.body["offsets"][1]["offset"] == -1
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
    partition = {"topic": TOPIC, "partition": 0}
    for suffix, body, record_count in (
        ("", {"offsets": [partition | {"offset": 0, "metadata": ""}]}, 1),
        ("", {"offsets": [partition | {"offset": 1}]}, 0),
        ("", {"timestamps": [partition | {"timestamp": "2020-01-01T00:00:00Z"}]}, 1),
        ("", {"timestamps": [partition | {"timestamp": "2120-01-01T00:00:00Z"}]}, 0),
        ("/beginning", ONE, 1),
        ("/end", ONE, 0),
    ):
        empty(world("POST", f"{path}/positions{suffix}", body))
        assert read() == record_count, (suffix, body)


@pytest.mark.parametrize(
    ("suffix", "body", "status", "code"),
    [
        ("", {"offsets": [{"topic": TOPIC, "partition": 1, "offset": 0}]}, 409, 40903),
        ("", {"offsets": [{"topic": "nope", "partition": 1, "offset": 0}]}, 409, 40903),
        ("", {"offsets": [{"topic": TOPIC, "partition": 0, "offset": -1}]}, 422, 422),
        ("", {"timestamps": [{"topic": TOPIC, "partition": 0, "timestamp": "noon"}]}, 400, 400),
        ("/beginning", {"partitions": [{"topic": TOPIC, "partition": 1}]}, 409, 40903),
        ("/beginning", NOWHERE, 409, 40903),
        ("/end", {"partitions": [{"topic": TOPIC, "partition": 1}]}, 409, 40903),
        ("/end", BEYOND, 409, 40903),
        ("/end", {}, 422, 422),
    ],
)
def test_positions_refused(world: World, suffix: str, body: Any, status: int, code: int) -> None:
    path = world.instance(topics=(), partitions=ONE["partitions"])
    refused(world("POST", f"{path}/positions{suffix}", body), status, code)


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
        ({"Host": "kafka.internal:80"}, "http://kafka.internal"),
    ],
)
def test_base_uri_is_the_balancers(world: World, headers: dict[str, str], base: str) -> None:
    answer = world("POST", "/consumers/behind", {}, **headers)
    url = f"{base}/consumers/behind/instances/{answer.body['instance_id']}"
    assert answer.body["base_uri"] == url
    assert str(world.broker.port) not in answer.body["base_uri"]


def test_the_same_answers_to_another_client(world: World) -> None:
    """One connection, kept, of a client that many use."""
    with httpx.Client(base_url=world.broker.base_url) as client:
        answer = client.post("/consumers/kept", json=CONFLUENT)
        path = f"/consumers/kept/instances/{answer.json()['instance_id']}"
        assert client.post(f"{path}/subscription", json={"topics": [TOPIC]}).status_code == 204
        assert len(client.get(f"{path}/records?timeout=2000").json()) == 3
        assert client.post(f"{path}/offsets").json() == []
        assert client.delete(path).status_code == 204
