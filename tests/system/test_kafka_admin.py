"""Unchanged admin clients at `tidelog serve --kafka-port`: kafka-python, librdkafka, aiokafka."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as librdkafka
import pytest
from aiokafka.admin import (
    AIOKafkaAdminClient,
    NewPartitions,
    NewTopic,
    RecordsToDelete,
)
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import TopicPartition
from confluent_kafka import admin as rd
from kafka import KafkaAdminClient, errors
from kafka import TopicPartition as KafkaPartition
from kafka.admin import ConfigResource as KafkaResource

from tests.support.broker import Broker
from tests.support.ports import free_port
from tests.system.test_kafka_clients import QUIET, Cluster

RD_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port = free_port()
    with Broker(tmp_path_factory.mktemp("kafka"), kafka_port=port, kafka_node_id=5) as broker:
        yield Cluster(broker, port)


def _produce(address: str, topic: str, count: int) -> None:
    producer = librdkafka.Producer({"bootstrap.servers": address, **QUIET})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=0)
    assert producer.flush(30) == 0


def _rd_outcome(futures: dict[Any, Any]) -> int:
    """The error code of the one future, 0 if it has none."""
    (future,) = futures.values()
    try:
        future.result(RD_TIMEOUT_S)
    except librdkafka.KafkaException as error:
        code: int = error.args[0].code()
        return code
    return 0


def test_librdkafka(cluster: Cluster) -> None:
    client = rd.AdminClient({"bootstrap.servers": cluster.address, **QUIET})
    new_topic = rd.NewTopic("rd", 2, 3, config={"retention.ms": "1000"})
    assert _rd_outcome(client.create_topics([new_topic], validate_only=True)) == 0
    assert _rd_outcome(client.create_topics([new_topic])) == 0
    assert _rd_outcome(client.create_topics([new_topic])) == 36
    for name, count, factor, configs, code in (
        ("a b", 1, 1, {}, 17),
        ("x", 10_001, 1, {}, 37),
        ("x", 1, 1, {"no.such": "1"}, 40),
    ):
        refused = rd.NewTopic(name, count, factor, config=configs)
        assert _rd_outcome(client.create_topics([refused])) == code
    assigned = rd.NewTopic("assigned", 3, replica_assignment=[[5], [5], [5]])
    assert _rd_outcome(client.create_topics([assigned])) == 0
    topics = client.list_topics(timeout=20).topics
    assert (len(topics["rd"].partitions), len(topics["assigned"].partitions)) == (2, 3)

    growth = rd.NewPartitions("rd", 4)
    assert _rd_outcome(client.create_partitions([growth])) == 0
    assert _rd_outcome(client.create_partitions([growth])) == 37
    _produce(cluster.address, "rd", 5)
    place = librdkafka.TopicPartition("rd", 0, 3)
    (deleted,) = client.delete_records([place]).values()
    assert deleted.result(RD_TIMEOUT_S).low_watermark == 3
    place = librdkafka.TopicPartition("rd", 0, 30)
    assert _rd_outcome(client.delete_records([place])) == librdkafka.KafkaError.OFFSET_OUT_OF_RANGE
    place = librdkafka.TopicPartition("rd", 0, librdkafka.OFFSET_END)
    (deleted,) = client.delete_records([place]).values()
    assert deleted.result(RD_TIMEOUT_S).low_watermark == 5

    resource = rd.ConfigResource(rd.ConfigResource.Type.TOPIC, "rd")

    def shown() -> dict[str, tuple[str, int]]:
        (future,) = client.describe_configs([resource]).values()
        configs = future.result(RD_TIMEOUT_S)
        return {name: (entry.value, entry.source) for name, entry in configs.items()}

    assert shown()["retention.ms"] == ("1000", 1)
    assert shown()["segment.ms"] == ("600000", 5)
    operation = librdkafka.admin.AlterConfigOpType
    resource.add_incremental_config(
        rd.ConfigEntry("cleanup.policy", "compact", incremental_operation=operation.APPEND)
    )
    resource.add_incremental_config(
        rd.ConfigEntry("retention.ms", None, incremental_operation=operation.DELETE)
    )
    assert _rd_outcome(client.incremental_alter_configs([resource])) == 0
    assert shown()["cleanup.policy"] == ("delete,compact", 1)
    assert shown()["retention.ms"] == ("604800000", 5)
    replaced = rd.ConfigResource(
        rd.ConfigResource.Type.TOPIC, "rd", set_config={"segment.ms": "5000"}
    )
    with pytest.warns(DeprecationWarning, match="alter_configs"):
        assert _rd_outcome(client.alter_configs([replaced])) == 0
    assert shown()["cleanup.policy"] == ("delete", 5)
    assert shown()["segment.ms"] == ("5000", 1)
    bad = rd.ConfigResource(rd.ConfigResource.Type.TOPIC, "rd")
    bad.add_incremental_config(rd.ConfigEntry("no.such", "1", incremental_operation=operation.SET))
    assert _rd_outcome(client.incremental_alter_configs([bad])) == 40
    of_broker = rd.ConfigResource(rd.ConfigResource.Type.BROKER, "5")
    (future,) = client.describe_configs([of_broker]).values()
    assert future.result(RD_TIMEOUT_S)["log.retention.ms"].value == "604800000"

    assert _rd_outcome(client.delete_topics(["rd"])) == 0
    assert _rd_outcome(client.delete_topics(["rd"])) == 3


def test_kafka_python(cluster: Cluster) -> None:
    client = KafkaAdminClient(bootstrap_servers=cluster.address)
    new_topics = {"kp": {"num_partitions": 2, "configs": {"retention.ms": "1000"}}}
    client.create_topics(new_topics)
    with pytest.raises(errors.TopicAlreadyExistsError):
        client.create_topics(new_topics)
    with pytest.raises(errors.InvalidConfigurationError):
        client.create_topics({"x": {"configs": {"no.such": "1"}}})
    assert len(client.describe_topics(["kp"])[0]["partitions"]) == 2
    client.create_partitions({"kp": 3})
    with pytest.raises(errors.InvalidPartitionsError):
        client.create_partitions({"kp": 3})
    _produce(cluster.address, "kp", 5)
    place = KafkaPartition("kp", 0)
    assert client.delete_records({place: 2})[place]["low_watermark"] == 2
    resource = KafkaResource("TOPIC", "kp")

    def value(name: str) -> str:
        configs = client.describe_configs([resource], config_filter="all")
        shown: str = configs["topic"]["kp"][name]["value"]
        return shown

    assert value("retention.ms") == "1000"
    for incremental, changed in ((True, "7000"), (False, "8000")):
        change = KafkaResource("TOPIC", "kp", {"retention.ms": changed})
        client.alter_configs([change], incremental=incremental)
        assert value("retention.ms") == changed
    client.delete_topics(["kp"])
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        client.delete_topics(["kp"])
    client.close()


def test_acls_of_a_broker_without_keys(cluster: Cluster) -> None:
    client = rd.AdminClient({"bootstrap.servers": cluster.address, **QUIET})
    acl = rd.AclBinding(
        rd.ResourceType.TOPIC,
        "t",
        rd.ResourcePatternType.LITERAL,
        "User:a",
        "*",
        rd.AclOperation.READ,
        rd.AclPermissionType.ALLOW,
    )
    disabled = librdkafka.KafkaError.SECURITY_DISABLED
    assert _rd_outcome(client.create_acls([acl], request_timeout=RD_TIMEOUT_S)) == disabled


def test_defaults_of_the_cluster(cluster: Cluster) -> None:
    """The command line sets them, because neither client can name the brokers of the whole cluster.

    Both show them, and a new topic has them.
    """
    kinds = rd.ConfigResource.Type
    client = rd.AdminClient({"bootstrap.servers": cluster.address, **QUIET})

    def shown(kind: rd.ConfigResource.Type, name: str) -> dict[str, rd.ConfigEntry]:
        (future,) = client.describe_configs([rd.ConfigResource(kind, name)]).values()
        entries: dict[str, rd.ConfigEntry] = future.result(RD_TIMEOUT_S)
        return entries

    values = ["-c", "log.retention.ms=9000", "-c", "num.partitions=3"]
    cluster.broker.cli("defaults", "alter", *values)
    of_one = rd.ConfigResource(kinds.BROKER, "5")
    of_one.add_incremental_config(
        rd.ConfigEntry(
            "log.roll.ms",
            "1000",
            incremental_operation=librdkafka.admin.AlterConfigOpType.SET,
        )
    )
    assert _rd_outcome(client.incremental_alter_configs([of_one])) == 40
    entry = shown(kinds.BROKER, "5")["log.retention.ms"]
    assert (entry.value, entry.source) == ("9000", 3)
    assert _rd_outcome(client.create_topics([rd.NewTopic("inherits", -1)])) == 0
    entry = shown(kinds.TOPIC, "inherits")["retention.ms"]
    assert (entry.value, entry.source) == ("9000", 3)
    assert "log.retention.ms" in entry.synonyms
    assert len(client.list_topics(timeout=20).topics["inherits"].partitions) == 3

    python = KafkaAdminClient(bootstrap_servers=cluster.address)
    configs = python.describe_configs([KafkaResource("BROKER", "5")], config_filter="all")
    assert configs["broker"]["5"]["num.partitions"]["value"] == "3"
    python.close()
    cluster.broker.cli("defaults", "alter", "-u", "num.partitions", "-u", "log.retention.ms")
    entry = shown(kinds.TOPIC, "inherits")["retention.ms"]
    assert (entry.value, entry.source) == ("604800000", 5)


def test_aiokafka(cluster: Cluster) -> None:
    async def run() -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=cluster.address)
        await client.start()
        new_topic = NewTopic("aio", 1, 1, topic_configs={"segment.ms": "5000"})
        assert (await client.create_topics([new_topic])).topic_errors == [("aio", 0, None)]
        again = await client.create_topics([new_topic])
        assert again.topic_errors[0][1] == 36
        await client.create_partitions({"aio": NewPartitions(2)})
        assert len((await client.describe_topics(["aio"]))[0]["partitions"]) == 2
        await asyncio.to_thread(_produce, cluster.address, "aio", 5)
        place = TopicPartition("aio", 0)
        assert await client.delete_records({place: RecordsToDelete(4)}) == {place: 4}
        resource = ConfigResource(ConfigResourceType.TOPIC, "aio", {"segment.ms": "9000"})
        (altered,) = await client.alter_configs([resource])
        assert altered.resources[0][0] == 0
        (described,) = await client.describe_configs([resource])
        (config,) = described.resources[0][4]
        assert config[:2] == ("segment.ms", "9000")
        deleted = await client.delete_topics(["aio"])
        assert deleted.topic_error_codes == [("aio", 0)]
        await client.close()

    asyncio.run(run())


def test_audit_lines_name_the_topic(tmp_path: Path) -> None:
    port, secret, key = free_port(), "k" * 30, tmp_path / "admin"
    key.touch(mode=0o600)
    key.write_text(secret)
    file = tmp_path / "audit.jsonl"
    settings = {"security": "keys", "admin_key": f"@{key}", "audit_log": str(file)}
    with Broker(tmp_path, kafka_port=port, **settings) as broker:
        config = {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "admin",
            "sasl.password": secret,
            **QUIET,
        }
        client = rd.AdminClient(config)
        assert _rd_outcome(client.create_topics([rd.NewTopic("t", 1, 1)])) == 0
        assert _rd_outcome(client.create_topics([rd.NewTopic("t", 1, 1)])) == 36
        assert _rd_outcome(client.delete_topics(["t"])) == 0
        assert broker.stop() == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [
        (line["event"], line["principal"], line["client"], line["request"], line["status"])
        for line in lines
    ] == [
        ("change", "User:admin", "127.0.0.1", "CreateTopics t", 0),
        ("change", "User:admin", "127.0.0.1", "DeleteTopics t", 0),
    ]
