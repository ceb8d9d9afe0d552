"""The cluster's defaults of topics in Confluent's v3 dialect: sources, changes, rights, audit."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, assert_refused, broker_on
from tests.service.keyed import ADMIN, SETTINGS, allow, assert_denied, key_of
from tests.service.test_admin_v3 import data_of
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core.topic_configs import DEFAULTS
from tidelog.storage.store.memory import MemoryStore


async def test_defaults_of_cluster(client: httpx.AsyncClient, log: LogBroker, v3: str) -> None:
    await log.topics.create("t", 1, {"retention.ms": "5000"})
    path = f"{v3}/broker-configs"
    before = {config["name"]: config for config in data_of(await client.get(path))}
    assert set(before) == set(DEFAULTS)
    assert before["log.roll.ms"]["source"] == "DEFAULT_CONFIG"
    assert before["num.partitions"]["source"] == "STATIC_BROKER_CONFIG"
    changes = {
        "data": [
            {"name": "log.roll.ms", "value": 7000},
            {"name": "log.retention.ms", "value": "9000", "operation": "SET"},
            {"name": "num.partitions", "value": "3"},
        ]
    }
    dry = await client.post(f"{path}:alter", json={**changes, "validate_only": True})
    assert (dry.status_code, log.state.defaults.values) == (204, {})
    assert (await client.post(f"{path}:alter", json=changes)).status_code == 204
    shown = (await client.get(f"{path}/log.roll.ms")).json()
    cluster_id = log.identity.cluster_id
    assert shown == {
        "kind": "KafkaClusterConfig",
        "metadata": {
            "self": f"http://tide:8082{path}/log.roll.ms",
            "resource_name": f"crn:///kafka={cluster_id}/broker-config=log.roll.ms",
        },
        "cluster_id": cluster_id,
        "config_type": "BROKER",
        "name": "log.roll.ms",
        "value": "7000",
        "is_default": False,
        "is_read_only": False,
        "is_sensitive": False,
        "source": "DYNAMIC_DEFAULT_BROKER_CONFIG",
        "synonyms": [
            {"name": "log.roll.ms", "value": "7000", "source": "DYNAMIC_DEFAULT_BROKER_CONFIG"},
            {"name": "log.roll.ms", "value": "600000", "source": "DEFAULT_CONFIG"},
        ],
    }
    configs = {
        config["name"]: config for config in data_of(await client.get(f"{v3}/topics/t/configs"))
    }
    inherited, own = configs["segment.ms"], configs["retention.ms"]
    assert (inherited["value"], inherited["is_default"]) == ("7000", False)
    assert inherited["source"] == "DYNAMIC_DEFAULT_BROKER_CONFIG"
    sources = [(synonym["name"], synonym["value"]) for synonym in own["synonyms"]]
    assert sources == [
        ("retention.ms", "5000"),
        ("log.retention.ms", "9000"),
        ("log.retention.ms", "604800000"),
    ]
    assert (await client.get("/topics/t")).json()["configs"]["segment.ms"] == "7000"
    new = data_of(await client.get(f"{v3}/topics/new/default-configs"))
    assert {config["name"]: config["value"] for config in new}["retention.ms"] == "9000"
    assert (await client.post("/admin/topics", json={"topic_name": "new"})).status_code == 201
    assert len(log.state.topic("new").partitions) == 3
    assert log.state.topic("new").configs == {}
    of_broker = (await client.get(f"{v3}/brokers/1/configs/num.partitions")).json()
    assert (of_broker["kind"], of_broker["broker_id"]) == ("KafkaBrokerConfig", 1)
    assert (of_broker["value"], of_broker["is_read_only"]) == ("3", True)
    listed = data_of(await client.get(f"{v3}/brokers/-/configs"))
    assert listed == data_of(await client.get(f"{v3}/brokers/1/configs"))
    assert {config["name"] for config in listed} == set(DEFAULTS)
    assert (await client.put(f"{path}/num.partitions", json={"value": 2})).status_code == 204
    assert (await client.delete(f"{path}/log.roll.ms")).status_code == 204
    assert log.state.defaults.values == {"log.retention.ms": "9000", "num.partitions": "2"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("log.roll.ms", "soon", "must be a whole number"),
        ("log.roll.ms", None, "Null value not supported"),
        ("segment.ms", "1000", "use the name log.roll.ms"),
        ("unclean.leader.election.enable", True, "cannot have a default"),
        ("log.dirs", "/x", "unknown default"),
        ("num.partitions", 0, "must be 1 to 10000"),
    ],
)
async def test_defaults_that_are_refused(
    client: httpx.AsyncClient, log: LogBroker, v3: str, name: str, value: object, why: str
) -> None:
    for answer in (
        await client.put(f"{v3}/broker-configs/{name}", json={"value": value}),
        await client.post(
            f"{v3}/broker-configs:alter",
            json={
                "data": [{"name": "log.retention.ms", "value": 1}, {"name": name, "value": value}]
            },
        ),
    ):
        assert (answer.status_code, answer.json()["error_code"]) == (400, 40002), answer.text
        assert why in answer.json()["message"]
    assert log.state.defaults.values == {}


async def test_defaults_need_rights_on_cluster_and_have_audit_lines(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with broker_on(MemoryStore(), **SETTINGS, audit_log=str(file)) as broker:
        http, log = broker.http, broker.log
        path = f"/v3/clusters/{log._log.wal.cluster.cluster_id}/broker-configs"
        alice = await key_of(log, "User:alice")
        body = {"data": [{"name": "log.roll.ms", "value": "7000"}]}
        assert_denied(await http.get(path, headers=alice))
        assert_denied(await http.post(f"{path}:alter", json=body, headers=alice))
        for operation in ("DESCRIBE_CONFIGS", "ALTER_CONFIGS"):
            await allow(log, "User:alice", operation, "CLUSTER", "kafka-cluster")
        assert (await http.get(path, headers=alice)).status_code == 200
        assert (await http.post(f"{path}:alter", json=body, headers=alice)).status_code == 204
        assert (await http.delete(f"{path}/log.roll.ms", headers=ADMIN)).status_code == 204
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    changes = [line for line in lines if line["event"] == "change"]
    assert [(change["principal"], change["detail"]) for change in changes] == [
        ("User:alice", "User:alice changed defaults: log.roll.ms=7000"),
        ("User:admin", "User:admin changed defaults: log.roll.ms removed"),
    ]


@pytest.mark.parametrize("path", ["broker-configs/c", "brokers/1/configs/c"])
async def test_unknown_config_of_brokers_is_named(broker: Broker, path: str) -> None:
    answer = await broker.http.get(f"{broker.v3}/{path}")
    assert answer.status_code == 404
    assert answer.json()["message"] != "HTTP 404 Not Found"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "brokers/1/configs/c", {"value": "1"}),
        ("DELETE", "brokers/1/configs/c", None),
        ("POST", "brokers/1/configs:alter", {"data": [{"name": "c", "value": "1"}]}),
    ],
)
async def test_configs_of_brokers_are_read_only(
    broker: Broker, method: str, path: str, body: Any
) -> None:
    answer = await broker.http.request(method, f"{broker.v3}/{path}", json=body)
    assert "read-only" in assert_refused(answer, 400, 40002, "application/json")
