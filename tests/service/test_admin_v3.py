"""Confluent's v3 dialect: shapes, links and refusals, and random bodies on every route."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.service.http.urls import clean_path, origin
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core.topic_configs import CONFIGS

NOT_HOSTED = {"error_code": 40403, "message": "This server does not host this topic-partition."}

ROUTES_MAX = 40
"""More routes than the application has with a body: each gets one of the bodies."""


def data_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()["data"]


# -- cluster and brokers


@pytest.mark.parametrize("mount", ["/v3", "/kafka/v3"])
async def test_links_lead_to_what_they_name(
    client: httpx.AsyncClient, log: Broker, mount: str
) -> None:
    await log.topics.create("t", 2, {"segment.ms": "5000"})
    seen: set[str] = set()
    follow = [f"http://tide:8082{mount}/clusters"]
    elsewhere = ("acls", "consumer-groups", "reassignment")
    while follow:
        url = follow.pop()
        if url in seen or url.endswith(elsewhere):
            continue
        seen.add(url)
        answer = await client.get(url)
        assert answer.status_code == 200, url
        said = answer.json()
        assert said["metadata"]["self"] == url
        follow += _links(said)
    below = {url.removeprefix(f"http://tide:8082{mount}/clusters") for url in seen}
    cluster_id = log.identity.cluster_id
    assert f"/{cluster_id}/topics/t/partitions/1/replicas/1" in below
    assert f"/{cluster_id}/topics/t/configs/segment.ms" in below
    assert f"/{cluster_id}/brokers/1/configs" in below


def _links(said: Any) -> list[str]:
    if isinstance(said, list):
        return [link for value in said for link in _links(value)]
    if not isinstance(said, dict):
        return []
    own = [said[key] for key in ("self", "related") if key in said]
    return own + [link for value in said.values() for link in _links(value)]


async def test_cluster(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    cluster_id = log.identity.cluster_id
    (cluster,) = data_of(await client.get("/v3/clusters"))
    assert cluster == (await client.get(v3)).json()
    assert cluster["kind"] == "KafkaCluster"
    assert cluster["cluster_id"] == cluster_id
    assert cluster["metadata"] == {
        "self": f"http://tide:8082{v3}",
        "resource_name": f"crn:///kafka={cluster_id}",
    }
    assert cluster["controller"] == {"related": f"http://tide:8082{v3}/brokers/1"}
    answer = await client.get("/v3/clusters/x/topics")
    said = {"error_code": 404, "message": "Cluster x cannot be found."}
    assert (answer.status_code, answer.json()) == (404, said)


async def test_broker_is_where_client_is(client: httpx.AsyncClient, v3: str) -> None:
    (broker,) = data_of(await client.get(f"{v3}/brokers"))
    assert (broker["broker_id"], broker["host"], broker["port"]) == (1, "tide", 8082)
    assert broker["rack"] is None
    answer = await client.get(f"{v3}/brokers/2")
    assert (answer.status_code, answer.json()["error_code"]) == (404, 404)


async def test_other_brokers_are_listed_while_they_live(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    other = Member("c" * 32, "b2", "http://10.0.0.7:4711", "secret", 0, port=8082)
    log._membership.others = [other]
    first, second = data_of(await client.get(f"{v3}/brokers"))
    assert first["broker_id"] == 1
    assert (second["broker_id"], second["host"], second["port"]) == (
        2 + 0xCCCCCCC,
        "10.0.0.7",
        8082,
    )
    assert (await client.get("/brokers")).json() == {"brokers": [1, 2 + 0xCCCCCCC]}
    for path in ("", "/configs", "/partition-replicas"):
        answer = await client.get(f"{v3}/brokers/{other.number}{path}")
        assert answer.status_code == 200
        assert "secret" not in answer.text
    log._membership.others = []
    assert (await client.get(f"{v3}/brokers/{other.number}")).status_code == 404


async def test_broker_replicas_are_all_partitions(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    await log.topics.create("t", 2, {})
    replicas = data_of(await client.get(f"{v3}/brokers/1/partition-replicas"))
    assert [(replica["topic_name"], replica["partition_id"]) for replica in replicas] == [
        ("t", 0),
        ("t", 1),
    ]


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({}, "http://tide:8082"),
        ({"host": "localhost"}, "http://localhost"),
        ({"host": "[::1]:80"}, "http://[::1]"),
        ({"x-forwarded-proto": "https", "x-forwarded-host": "gw"}, "https://gw"),
        ({"x-forwarded-proto": "HTTPS, http", "x-forwarded-host": "gw, b"}, "https://gw"),
        ({"x-forwarded-host": "gw", "x-forwarded-port": "8443"}, "http://gw:8443"),
        ({"forwarded": 'for=1.2.3.4;host="gw:443";proto=https, for=x'}, "https://gw"),
        ({"forwarded": "host=one", "x-forwarded-host": "two"}, "http://one"),
        ({"x-forwarded-prefix": "/log/"}, "http://tide:8082/log"),
        ({"x-forwarded-path": "/log"}, "http://tide:8082/log"),
        ({"x-forwarded-path": "/log/v3/clusters"}, "http://tide:8082/log"),
        ({"x-forwarded-path": "/v3/clusters/"}, "http://tide:8082"),
        ({"x-forwarded-proto": "gopher", "x-forwarded-host": "a b"}, "http://tide:8082"),
        ({"x-forwarded-host": "gw/<script>", "x-forwarded-prefix": "/a b"}, "http://tide:8082"),
    ],
)
async def test_links_go_through_proxy(
    client: httpx.AsyncClient, headers: dict[str, str], url: str
) -> None:
    said = (await client.get("/v3/clusters", headers=headers)).json()
    assert said["metadata"]["self"] == f"{url}/v3/clusters"


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "host",
                "forwarded",
                *(f"x-forwarded-{name}" for name in ("host", "proto", "port", "prefix", "path")),
            ]
        ),
        st.text(),
    ),
    st.text(),
)
def test_no_header_breaks_origin(headers: dict[str, str], path: str) -> None:
    request_origin = origin(headers, clean_path(path), proto="http", server="localhost:80")
    assert httpx.URL(request_origin.url).is_absolute_url


# -- topics


async def test_topic_is_created(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    body = {
        "topic_name": "t",
        "partitions_count": "3",
        "replication_factor": 3,
        "configs": [{"name": "segment.ms", "value": 5000}, {"name": "retention.ms"}],
    }
    answer = await client.post(f"{v3}/topics", json=body)
    url = f"http://tide:8082{v3}/topics/t"
    assert (answer.status_code, answer.headers["location"]) == (201, url)
    assert answer.json() == {
        "kind": "KafkaTopic",
        "metadata": {
            "self": url,
            "resource_name": f"crn:///kafka={log.identity.cluster_id}/topic=t",
        },
        "cluster_id": log.identity.cluster_id,
        "topic_name": "t",
        "is_internal": False,
        "replication_factor": 1,
        "partitions_count": 3,
        "partitions": {"related": f"{url}/partitions"},
        "configs": {"related": f"{url}/configs"},
        "partition_reassignments": {"related": f"{url}/partitions/-/reassignment"},
        "authorized_operations": [],
        "table_uri": None,
    }
    assert (await client.get(f"{v3}/topics/t")).json() == answer.json()
    assert log.state.topic("t").configs == {"segment.ms": "5000"}


async def test_validation_alone_creates_nothing(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    body: dict[str, Any] = {"topic_name": "t", "validate_only": "true"}
    answer = await client.post(f"{v3}/topics", json=body)
    assert (answer.status_code, answer.json()["partitions_count"]) == (200, 1)
    assert log.state.topics == {}
    body = {"topic_name": "t", "partitions_count": 0, "validate_only": True}
    assert (await client.post(f"{v3}/topics", json=body)).status_code == 400


async def test_assignments_count_partitions(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    body: dict[str, Any] = {"topic_name": "t", "replicas_assignments": {"0": [1, 2], "1": [7]}}
    assert (await client.post(f"{v3}/topics", json=body)).json()["partitions_count"] == 2
    for wrong in ({"1": [1]}, {"0": [1], "2": [1]}):
        body = {"topic_name": "u", "replicas_assignments": wrong}
        assert (await client.post(f"{v3}/topics", json=body)).json()["error_code"] == 40002
    body = {"topic_name": "u", "replicas_assignments": {"0": [1]}, "partitions_count": 2}
    assert (await client.post(f"{v3}/topics", json=body)).json()["error_code"] == 40002


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        ({"topic_name": "t"}, 400, 40002, "Topic 't' already exists."),
        ({"topic_name": "t", "validate_only": True}, 400, 40002, "Topic 't' already exists."),
        ({"topic_name": "a\x00"}, 400, 40002, "control characters: a\u2400"),
        ({"topic_name": "u", "configs": [{"name": "x", "value": 1}]}, 400, 40002, "'x'"),
        ({"topic_name": "u", "configs": [{"value": 1}]}, 422, 422, "configs.0.name is missing"),
        ({"topic_name": "u", "parts": 1}, 422, 422, "Unrecognized field: parts"),
        *(
            ({"topic_name": "u", "configs": [{"name": name, "value": value}]}, 400, 40002, name)
            for name, value in (
                ("min.insinc.replicas", "2"),
                ("message.timestamp.difference.max.ms", "1000"),
                ("confluent.value.schema.validation", "true"),
                ("min.insync.replicas", "0"),
                ("unclean.leader.election.enable", "maybe"),
                ("flush.ms", "soon"),
            )
        ),
        ({"topic_name": "u", "partitions_count": True}, 422, 422, "partitions_count"),
        ({"topic_name": "u", "partitions_count": "x"}, 422, 422, "partitions_count"),
        ({"topic_name": "u", "partitions_count": 1.5}, 422, 422, "partitions_count"),
        ({}, 422, 422, "topic_name is missing"),
    ],
)
async def test_bad_creation_is_refused(
    client: httpx.AsyncClient, log: Broker, v3: str, body: Any, status: int, code: int, message: str
) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.post(f"{v3}/topics", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert message in answer.json()["message"]
    assert list(log.state.topics) == ["t"]


async def test_topics_are_listed_by_name(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    for name in ("b", "a"):
        await log.topics.create(name, 1, {})
    said = (await client.get(f"{v3}/topics")).json()
    assert said["kind"] == "KafkaTopicList"
    assert said["metadata"] == {"self": f"http://tide:8082{v3}/topics", "next": None}
    assert [topic["topic_name"] for topic in said["data"]] == ["a", "b"]


async def test_partitions_only_grow(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    await log.topics.create("t", 2, {})
    answer = await client.patch(f"{v3}/topics/t", json={"partitions_count": "5"})
    assert (answer.status_code, answer.json()["partitions_count"]) == (200, 5)
    assert len(log.state.topic("t").partitions) == 5
    for count in (5, 4, 0, -1, 10_001, 2**64):
        answer = await client.patch(f"{v3}/topics/t", json={"partitions_count": count})
        assert (answer.status_code, answer.json()["error_code"]) == (400, 40002), count
    for wrong in (True, "x", 1.5, None):
        answer = await client.patch(f"{v3}/topics/t", json={"partitions_count": wrong})
        assert answer.status_code in (400, 422), answer.text
    assert len(log.state.topic("t").partitions) == 5


async def test_deletion(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.delete(f"{v3}/topics/t")
    assert (answer.status_code, answer.content) == (204, b"")
    assert log.state.topics == {}
    answer = await client.delete(f"{v3}/topics/t")
    assert (answer.status_code, answer.json()) == (404, NOT_HOSTED)


@pytest.mark.parametrize(
    "path", ["", "/configs", "/configs/segment.ms", "/partitions", "/partitions/0/offset"]
)
async def test_unknown_topic_is_not_hosted(client: httpx.AsyncClient, v3: str, path: str) -> None:
    answer = await client.get(f"{v3}/topics/none{path}")
    assert (answer.status_code, answer.json()) == (404, NOT_HOSTED)


# -- configs


async def test_configs_say_where_they_come_from(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    await log.topics.create("t", 1, {"segment.ms": "5000"})
    configs = {
        config["name"]: config for config in data_of(await client.get(f"{v3}/topics/t/configs"))
    }
    assert set(configs) == set(CONFIGS)
    own = configs["segment.ms"]
    assert (own["value"], own["is_default"], own["source"]) == (
        "5000",
        False,
        "DYNAMIC_TOPIC_CONFIG",
    )
    default = {"name": "log.roll.ms", "value": "600000", "source": "DEFAULT_CONFIG"}
    dynamic = {"name": "segment.ms", "value": "5000", "source": "DYNAMIC_TOPIC_CONFIG"}
    assert own["synonyms"] == [dynamic, default]
    other = configs["retention.ms"]
    assert (other["is_default"], other["source"]) == (True, "DEFAULT_CONFIG")
    assert (await client.get(f"{v3}/topics/t/configs/segment.ms")).json() == own
    assert data_of(await client.get(f"{v3}/topics/-/configs")) == list(configs.values())
    defaults = data_of(await client.get(f"{v3}/topics/t/default-configs"))
    assert all(config["is_default"] for config in defaults)
    assert {config["name"]: config["value"] for config in defaults} == {
        name: key.default for name, key in CONFIGS.items()
    }
    answer = await client.get(f"{v3}/topics/t/configs/no.such")
    assert (answer.status_code, answer.json()["error_code"]) == (404, 404)


async def test_config_is_set_and_reset(client: httpx.AsyncClient, log: Broker, v3: str) -> None:
    await log.topics.create("t", 1, {})
    path = f"{v3}/topics/t/configs/segment.ms"
    assert (await client.put(path, json={"value": 7000})).status_code == 204
    assert log.state.topic("t").configs == {"segment.ms": "7000"}
    assert (await client.delete(path)).status_code == 204
    assert log.state.topic("t").configs == {}


KAFKA_CONFIGS = {
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "max.compaction.lag.ms": "86400000",
    "flush.messages": "10000",
    "file.delete.delay.ms": "60000",
    "segment.index.bytes": "10485760",
    "index.interval.bytes": "4096",
    "segment.jitter.ms": "0",
    "preallocate": "false",
    "message.format.version": "3.0-IV1",
    "message.downconversion.enable": "true",
    "message.timestamp.difference.max.ms": "9223372036854775807",
    "remote.storage.enable": "false",
    "local.retention.ms": "-2",
    "follower.replication.throttled.replicas": "",
    "confluent.value.schema.validation": "false",
}
"""Configs without a meaning here, which definitions of Kafka's topics have."""


@pytest.mark.parametrize("name", KAFKA_CONFIGS)
async def test_config_without_meaning_is_set_shown_and_reset(
    client: httpx.AsyncClient, log: Broker, v3: str, name: str
) -> None:
    value = KAFKA_CONFIGS[name]
    body = {"topic_name": "t", "configs": [{"name": name, "value": value}]}
    made = await client.post(f"{v3}/topics", json=body)
    assert made.status_code == 201, made.text
    shown = (await client.get(f"{v3}/topics/t/configs/{name}")).json()
    assert (shown["value"], shown["source"]) == (value, "DYNAMIC_TOPIC_CONFIG")
    assert (await client.get("/topics/t")).json()["configs"][name] == value
    assert (await client.delete(f"{v3}/topics/t/configs/{name}")).status_code == 204
    assert log.state.topics["t"].configs == {}
    listed = data_of(await client.get(f"{v3}/topics/t/configs"))
    assert name not in {config["name"] for config in listed}, "without effect, and not set"
    assert (await client.get(f"{v3}/topics/t/configs/{name}")).json()["is_default"] is True
    assert (await client.put(f"{v3}/topics/t/configs/{name}", json={"value": value})).is_success
    listed = data_of(await client.get(f"{v3}/topics/t/configs"))
    assert name in {config["name"] for config in listed}


async def test_configs_change_together_or_not_at_all(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    await log.topics.create("t", 1, {"segment.ms": "5000"})
    alter = f"{v3}/topics/t/configs:alter"
    changes: dict[str, Any] = {
        "data": [
            {"name": "segment.ms", "operation": "DELETE"},
            {"name": "retention.ms", "value": "9", "operation": "SET"},
            {"name": "cleanup.policy", "value": "compact"},
        ]
    }
    assert (await client.post(alter, json=changes | {"validate_only": True})).status_code == 204
    assert log.state.topic("t").configs == {"segment.ms": "5000"}
    assert (await client.post(alter, json=changes)).status_code == 204
    now = {"retention.ms": "9", "cleanup.policy": "compact"}
    assert log.state.topic("t").configs == now
    changes["data"] = [{"name": "retention.ms", "value": "1"}, {"name": "segment.ms", "value": "x"}]
    answer = await client.post(alter, json=changes)
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
    assert log.state.topic("t").configs == now


@pytest.mark.parametrize(
    ("method", "path", "body", "word"),
    [
        ("PUT", "configs/no.such", {"value": "1"}, "no.such"),
        ("PUT", "configs/segment.ms", {"value": "1"}, "must be"),
        ("PUT", "configs/segment.ms", {"value": None}, "Null value"),
        ("DELETE", "configs/no.such", None, "no.such"),
        ("POST", "configs:alter", {"data": [{"name": "no.such", "value": "1"}]}, "no.such"),
        ("POST", "configs:alter", {"data": [{"name": "segment.ms"}]}, "Null value"),
        ("POST", "configs:alter", {"data": [{"name": "x", "operation": "DELETE"}]}, "'x'"),
        ("POST", "configs:alter", {"data": [{"name": "segment.ms", "value": "5000"}] * 2}, "twice"),
    ],
)
async def test_bad_config_is_refused(
    client: httpx.AsyncClient, log: Broker, v3: str, method: str, path: str, body: Any, word: str
) -> None:
    await log.topics.create("t", 1, {})
    answer = await client.request(method, f"{v3}/topics/t/{path}", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
    assert word in answer.json()["message"]
    assert log.state.topic("t").configs == {}


# -- partitions


async def test_partitions_replicas_and_offsets(
    client: httpx.AsyncClient, log: Broker, v3: str
) -> None:
    await log.topics.create("t", 2, {})
    partitions = data_of(await client.get(f"{v3}/topics/t/partitions"))
    assert [partition["partition_id"] for partition in partitions] == [0, 1]
    path = f"{v3}/topics/t/partitions/1"
    assert partitions[1] == (await client.get(path)).json()
    (replica,) = data_of(await client.get(f"{path}/replicas"))
    assert replica == (await client.get(f"{path}/replicas/1")).json()
    assert (replica["broker_id"], replica["is_leader"], replica["is_in_sync"]) == (1, True, True)
    assert (await client.get(f"{path}/replicas/2")).status_code == 404
    assert (await client.get(f"{path}/reassignment")).status_code == 404
    assert data_of(await client.get(f"{v3}/topics/t/partitions/-/reassignment")) == []
    for number in ("2", "x", "-1"):
        answer = await client.get(f"{v3}/topics/t/partitions/{number}")
        assert (answer.status_code, answer.json()["error_code"]) == (404, 40402)


@pytest.mark.parametrize(
    ("query", "offsets"),
    [
        ("", {"earliest_offset": 0, "latest_offset": 0}),
        ("?offset_type=earliest", {"earliest_offset": 0}),
        ("?offset_type=latest", {"latest_offset": 0}),
        ("?offset_type=earliest_and_latest", {"earliest_offset": 0, "latest_offset": 0}),
    ],
)
async def test_offsets_of_partition(
    client: httpx.AsyncClient, log: Broker, v3: str, query: str, offsets: dict[str, int]
) -> None:
    await log.topics.create("t", 1, {})
    said = (await client.get(f"{v3}/topics/t/partitions/0/offset{query}")).json()
    assert said.pop("metadata")["self"].endswith("/topics/t/partitions/0/offset")
    assert said == {
        "kind": "KafkaPartitionWithOffsets",
        "cluster_id": log.identity.cluster_id,
        "topic_name": "t",
        "partition_id": 0,
        **offsets,
    }
    answer = await client.get(f"{v3}/topics/t/partitions/0/offset?offset_type=middle")
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)


# -- whatever is sent

FIELDS = [
    *("topic_name", "partitions_count", "replication_factor", "replicas_assignments", "configs"),
    *("validate_only", "name", "value", "data", "operation"),
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=20)
    | st.sampled_from(["t", "", "segment.ms", "cleanup.policy", "SET", "DELETE", "5000", "true"])
)
names = st.sampled_from(FIELDS) | st.text(st.characters(exclude_categories=[]), max_size=5)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
bodies = st.dictionaries(names, values, max_size=6).map(json.dumps).map(str.encode)
types = st.sampled_from(
    [
        *("application/json", "application/vnd.kafka.v2+json", "text/plain"),
        *("multipart/form-data", "", "/"),
    ]
)


@examples(60, is_fixture_shared=True)
@given(
    st.lists(
        st.tuples(bodies | st.binary(max_size=40), types), min_size=ROUTES_MAX, max_size=ROUTES_MAX
    ),
    st.sampled_from(["segment.ms", "no.such"]),
)
async def test_no_body_is_answered_with_500(
    client: httpx.AsyncClient, app: FastAPI, log: Broker, sent: list[tuple[bytes, str]], config: str
) -> None:
    if "t" not in log.state.topics:
        await log.topics.create("t", 1, {})
    names_in_path = {
        "{cluster_id}": log.identity.cluster_id,
        "{topic_name}": "t",
        "{consumer_group_id}": "g",
        "{name}": config,
    }
    routes = [
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods & {"POST", "PUT", "PATCH"}
    ]
    for (method, path), (body, content_type) in zip(routes, sent[: len(routes)], strict=True):
        for name, value in names_in_path.items():
            path = path.replace(name, value)
        answer = await client.request(
            method, path, content=body, headers={"content-type": content_type}
        )
        assert answer.status_code < 500, (method, path, body, answer.text)
        if answer.status_code >= 400:
            said = answer.json()
            own = {"error"} if path.startswith("/iceberg/") else set()  # Iceberg's form beside ours
            assert set(said) == {"error_code", "message"} | own, said
    # Nothing of it reached the log that it could not take.
    assert log._log.writer.task is not None
    assert not log._log.writer.task.done()
