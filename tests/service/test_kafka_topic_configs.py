"""Topics whose definitions name Kafka's usual configs are created."""

import pytest

from tests.service.conftest import Broker

CONFIGS = {
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "max.compaction.lag.ms": "86400000",
    "flush.ms": "1000",
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


@pytest.mark.parametrize("name", CONFIGS)
async def test_a_config_without_meaning_here_is_kept(broker: Broker, name: str) -> None:
    topics = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/topics"
    config = {"name": name, "value": CONFIGS[name]}
    made = await broker.http.post(topics, json={"topic_name": "t", "configs": [config]})
    assert made.status_code == 201, made.text
    shown = (await broker.http.get(f"{topics}/t/configs/{name}")).json()
    assert (shown["value"], shown["source"]) == (CONFIGS[name], "DYNAMIC_TOPIC_CONFIG")


async def test_an_unknown_config_is_refused(broker: Broker) -> None:
    topics = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/topics"
    config = {"name": "min.insinc.replicas", "value": "2"}
    made = await broker.http.post(topics, json={"topic_name": "t", "configs": [config]})
    assert (made.status_code, made.json()["error_code"]) == (400, 40002)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("message.timestamp.difference.max.ms", "1000"),
        ("confluent.value.schema.validation", "true"),
        ("min.insync.replicas", "0"),
        ("unclean.leader.election.enable", "maybe"),
        ("flush.ms", "soon"),
    ],
)
async def test_a_value_that_promises_what_no_broker_does_is_refused(
    broker: Broker, name: str, value: str
) -> None:
    topics = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/topics"
    made = await broker.http.post(
        topics, json={"topic_name": "t", "configs": [{"name": name, "value": value}]}
    )
    assert (made.status_code, made.json()["error_code"]) == (400, 40002)
    assert name in made.json()["message"]


async def _listed(broker: Broker, path: str) -> set[str]:
    return {config["name"] for config in (await broker.http.get(path)).json()["data"]}


async def test_a_config_is_set_shown_and_reset(broker: Broker) -> None:
    topics = f"/v3/clusters/{broker.log.wal.cluster.cluster_id}/topics"
    await broker.log.create_topic("t", 1, {})
    listed = {
        config["name"] for config in (await broker.http.get(f"{topics}/t/configs")).json()["data"]
    }
    assert "flush.ms" not in listed, "without effect, and not set"
    config_url = f"{topics}/t/configs/flush.ms"
    assert (await broker.http.get(config_url)).json()["is_default"] is True
    (await broker.http.put(config_url, json={"value": "7"})).raise_for_status()
    listed = {
        config["name"] for config in (await broker.http.get(f"{topics}/t/configs")).json()["data"]
    }
    assert "flush.ms" in listed
    assert (await broker.http.get("/topics/t")).json()["configs"]["flush.ms"] == "7"
    (await broker.http.delete(config_url)).raise_for_status()
    assert broker.log.state.topics["t"].configs == {}
