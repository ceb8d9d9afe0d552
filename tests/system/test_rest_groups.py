"""Groups (DIALECTS, confluent v3): every endpoint with every error code.

Over a socket by a plain HTTP client.

Rows: what is asked, and what must come back: status, error code or the body's exact keys, and the
media type. Each row has an instance, or a group, of its own.
"""

from typing import Any

import pytest

from tests.system.rest import CONFLUENT, PLAIN, TOPIC, World, empty, refused

# -- 1.5

LISTED = {"kind", "metadata", "data"}
GROUP = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "is_simple", "partition_assignor"),
    *("state", "type", "is_mixed_consumer_group", "generation", "coordinator", "consumers"),
    "assigned_by",
    "lag_summary",
}
CONSUMER = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "consumer_id", "instance_id"),
    *("client_id", "host", "assignments"),
}
ASSIGNMENT = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "consumer_id", "topic_name"),
    *("partition_id", "partition", "lag"),
}
LAG = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "topic_name", "partition_id"),
    *("current_offset", "is_committed", "log_end_offset", "lag", "consumer_id", "instance_id"),
    *("client_id", "lag_seconds"),
}
SUMMARY = {
    *("kind", "metadata", "cluster_id", "consumer_group_id", "max_lag_consumer_id"),
    *("max_lag_instance_id", "max_lag_client_id", "max_lag_topic_name", "max_lag_partition_id"),
    *("max_lag", "total_lag", "max_lag_consumer", "max_lag_partition", "lag_seconds"),
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
        ("/seen", "KafkaConsumerGroup", GROUP | {"held_members"}, "", set()),
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
        answer = seen("GET", f"{mount}{seen.groups}{path}", accept=PLAIN)
        assert (answer.status, answer.media_type) == (200, PLAIN), answer
        assert (answer.body["kind"], answer.body.keys()) == (kind, keys)
        assert answer.body["metadata"]["self"].endswith(f"/consumer-groups{path}")
        if item:
            assert answer.body["metadata"]["next"] is None
            assert {
                (resource["kind"], frozenset(resource)) for resource in answer.body["data"]
            } == {(item, frozenset(item_keys))}


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
        ("GET", f"/seen/lags/{TOPIC}/partitions/9", None, 404, 404),
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
    answer = world(method, f"{world.v3}/acls{path}", body, PLAIN)
    assert "No Authorizer is configured" in refused(answer, 400, 40002, PLAIN)


def test_a_group_is_reset_and_deleted(world: World) -> None:
    path = f"{world.groups}/moved"
    partitions = {"topic_name": TOPIC, "partition_ids": [0]}
    for body, offset in (
        ({"to": "LATEST"}, 1),
        ({"to": "EARLIEST"}, 0),
        ({"to": "OFFSET", "offset": 1}, 1),
        ({"to": "TIMESTAMP", "timestamp": "2020-01-01T00:00:00Z"}, 0),
        ({"to": "DURATION", "duration_ms": 0}, 1),
    ):
        answer = world("POST", f"{path}/offsets:reset", body | partitions, PLAIN)
        assert (answer.status, answer.media_type) == (200, PLAIN), answer
        assert [row["offset"] for row in answer.body["data"]] == [offset], body
        assert world("GET", f"{path}/offsets").body["data"] == answer.body["data"]
    empty(world("DELETE", path))
    refused(world("GET", path), 404, 404, PLAIN)
