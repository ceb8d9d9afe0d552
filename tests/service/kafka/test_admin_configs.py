"""Admin clients: configs of topics and brokers, with each error, and ACLs."""

from typing import Any

import pytest

from tests.service.kafka.admin_requests import (
    alter,
    alter_some,
    config,
    create,
    describe,
    wanted_topic,
)
from tests.service.kafka.conftest import NODE, Kafka, broker
from tests.service.keyed import SETTINGS
from tidelog.service.kafka.admin.configs import OF_BROKER, OF_CLIENT_METRICS, OF_GROUP, OF_TOPIC
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import acls, configs, metadata
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest, ApiVersionsResponse
from tidelog.storage.core import topic_configs

LOGGER = 8


# -- DescribeConfigs


@pytest.mark.parametrize("version", range(1, 5))
async def test_configs_of_a_topic(kafka: Kafka, version: int) -> None:
    await kafka.log.topics.alter("t", {"retention.ms": "1000", "flush.ms": "7"})
    client = kafka.client()
    result = await describe(
        client,
        OF_TOPIC,
        "t",
        version=version,
        include_synonyms=True,
        include_documentation=version >= 3,
    )
    assert result.error_code == 0
    shown = {entry.name: entry for entry in result.configs}
    assert shown.keys() == {*topic_configs.CONFIGS, "flush.ms", "min.insync.replicas"}
    assert shown["min.insync.replicas"].value == "1"
    retention, policy = shown["retention.ms"], shown["cleanup.policy"]
    assert (retention.value, retention.config_source, retention.read_only) == ("1000", 1, False)
    assert [(synonym.value, synonym.source) for synonym in retention.synonyms] == [
        ("1000", 1),
        ("604800000", 5),
    ]
    assert (policy.value, policy.config_source) == ("delete", 5)
    if version >= 3:
        assert (retention.config_type, policy.config_type) == (5, 7)
        assert shown["min.cleanable.dirty.ratio"].config_type == 6
        assert shown["compression.type"].config_type == 2
        assert retention.documentation


async def test_some_configs_of_a_topic(kafka: Kafka) -> None:
    client = kafka.client()
    keys = ("retention.ms", "preallocate", "no.such")
    result = await describe(client, OF_TOPIC, "t", *keys)
    assert {entry.name: (entry.value, entry.config_type) for entry in result.configs} == {
        "retention.ms": ("604800000", 5),
        "preallocate": ("false", 1),
    }
    assert result.configs[0].synonyms == []


async def test_configs_of_many_topics(kafka: Kafka) -> None:
    names = [f"n{number}" for number in range(30)]
    for name in names:
        await kafka.log.topics.create(name, 1, {})
    resources = [
        configs.DescribeConfigsResource(
            resource_type=OF_TOPIC, resource_name=name, configuration_keys=["segment.ms"]
        )
        for name in [*names, "unknown"]
    ]
    request = configs.DescribeConfigsRequest(resources=resources)
    results = (await kafka.client().ask(request, configs.DescribeConfigsResponse, 4)).results
    assert [result.resource_name for result in results] == [*names, "unknown"]
    assert [len(result.configs) for result in results] == [1] * 30 + [0]
    assert results[-1].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_configs_of_a_broker(kafka: Kafka) -> None:
    client = kafka.client()
    result = await describe(client, OF_BROKER, str(NODE.node_id))
    shown = {entry.name: entry for entry in result.configs}
    assert shown["log.retention.ms"].value == "604800000"
    assert shown["num.partitions"].config_source == 4
    assert all(entry.read_only for entry in result.configs)
    assert shown["log.target.segment.bytes"].config_source == 5
    assert (shown["min.insync.replicas"].value, shown["min.insync.replicas"].config_source) == (
        "1",
        5,
    )
    for kind, name in ((OF_BROKER, ""), (OF_CLIENT_METRICS, "x"), (OF_GROUP, "g")):
        empty = await describe(client, kind, name)
        assert (empty.error_code, empty.configs) == (0, [])
    for kind, name in ((OF_BROKER, "8"), (OF_BROKER, "x"), (LOGGER, "7"), (0, "t")):
        refused = await describe(client, kind, name)
        assert (refused.error_code, refused.configs) == (Code.INVALID_REQUEST, [])
    unknown = await describe(client, OF_TOPIC, "none")
    assert unknown.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


# -- AlterConfigs, IncrementalAlterConfigs


async def test_unused_config_is_logged(kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    client = kafka.client()
    values: dict[str, str | None] = {"min.insync.replicas": "2", "preallocate": "false"}
    (result,) = await create(client, wanted_topic(configs=config("min.insync.replicas", "2")))
    assert result.error_code == 0
    for _ in range(2):
        assert await alter(client, values) == (0, None)
    why = "min.insync.replicas has no effect here: the object store replicates"
    assert caplog.messages == [
        f"Kafka client 'test' at 192.0.2.1: topic {name!r}: {why}" for name in ("new", "t")
    ]


@pytest.mark.parametrize("version", range(3))
async def test_alter_configs_replaces_all(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    await kafka.log.topics.alter("t", {"retention.ms": "1000", "segment.ms": "500"})
    values: dict[str, str | None] = {"segment.ms": "700"}
    assert await alter(client, values, version=version, validate_only=True) == (0, None)
    assert kafka.log.state.topic("t").configs["segment.ms"] == "500"
    assert await alter(client, values, version=version) == (0, None)
    assert kafka.log.state.topic("t").configs == {"segment.ms": "700"}
    assert await alter(client, {}, version=version) == (0, None)
    assert kafka.log.state.topic("t").configs == {}


@pytest.mark.parametrize("version", range(2))
async def test_incremental_alter_configs(kafka: Kafka, version: int) -> None:
    client, topic = kafka.client(), kafka.log.state.topic("t")
    change = ("retention.ms", 0, "1000")
    assert await alter_some(client, change, version=version, validate_only=True) == (0, None)
    assert topic.configs == {}
    assert await alter_some(client, change, ("flush.ms", 0, "9"), version=version) == (0, None)
    assert topic.configs == {"retention.ms": "1000", "flush.ms": "9"}
    changes = (("retention.ms", 1, None), ("cleanup.policy", 2, "compact,delete"))
    assert await alter_some(client, *changes, version=version) == (0, None)
    assert topic.configs == {"flush.ms": "9", "cleanup.policy": "delete,compact"}
    assert await alter_some(client, ("cleanup.policy", 3, "delete"), version=version) == (0, None)
    assert topic.configs["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("no.such", 0, "1"), Code.INVALID_CONFIG),
        (("no.such", 1, None), Code.INVALID_CONFIG),
        (("no.such", 2, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 2, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 3, "1"), Code.INVALID_CONFIG),
        (("retention.ms", 0, "x"), Code.INVALID_CONFIG),
        (("flush.ms", 0, "1" * 2000), Code.INVALID_CONFIG),
        (("cleanup.policy", 2, "shred"), Code.INVALID_CONFIG),
        (("cleanup.policy", 3, "delete"), Code.INVALID_CONFIG),
        (("retention.ms", 0, None), Code.INVALID_REQUEST),
        (("retention.ms", 4, "1"), Code.INVALID_REQUEST),
    ],
)
@pytest.mark.parametrize("validate_only", [True, False])
async def test_changes_that_are_refused(
    kafka: Kafka, change: tuple[str, int, str | None], code: Code, validate_only: bool
) -> None:
    client = kafka.client()
    good = ("segment.ms", 0, "500")
    error_code, message = await alter_some(client, good, change, validate_only=validate_only)
    assert error_code == code
    assert message
    assert change[0] in message
    assert kafka.log.state.topic("t").configs == {}


async def test_alterations_of_other_resources_and_twice(kafka: Kafka) -> None:
    client = kafka.client()
    value: dict[str, str | None] = {"retention.ms": "1"}
    assert (await alter(client, value, name="none"))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
    code, message = await alter(client, value, OF_BROKER, "7")
    assert code == Code.INVALID_CONFIG
    assert "--entity-default" in str(message)
    code, message = await alter(client, value, OF_BROKER, "")
    assert (code, kafka.log.state.defaults.values) == (Code.INVALID_CONFIG, {})
    of_broker: dict[str, Any] = {"kind": OF_BROKER, "name": "7"}
    throttles = [(f"{role}.replication.throttled.rate", 1, None) for role in ("leader", "follower")]
    assert await alter_some(client, *throttles, **of_broker) == (0, None), "there are none"
    change = ("leader.replication.throttled.rate", 0, "1")
    assert (await alter_some(client, *throttles[1:], change, **of_broker))[0] == code
    assert "use the name log.retention.ms" in str(message)
    assert (await alter(client, value, OF_BROKER, "8"))[0] == Code.INVALID_REQUEST
    assert (await alter(client, value, LOGGER, "7"))[0] == Code.INVALID_REQUEST
    assert (await alter(client, {"retention.ms": None}))[0] == Code.INVALID_REQUEST
    twice = (("segment.ms", 0, "500"), ("segment.ms", 0, "600"))
    assert (await alter_some(client, *twice))[0] == Code.INVALID_REQUEST
    resource = configs.AlterConfigsResource(resource_type=2, resource_name="t", configs=[])
    request = configs.AlterConfigsRequest(resources=[resource] * 2, validate_only=False)
    results = (await client.ask(request, configs.AlterConfigsResponse, 2)).responses
    assert [result.error_code for result in results] == [Code.INVALID_REQUEST]
    assert kafka.log.state.topic("t").configs == {}


# -- the cluster's defaults


@pytest.mark.parametrize("version", range(2))
async def test_defaults_of_the_cluster(kafka: Kafka, version: int) -> None:
    client, log = kafka.client(), kafka.log
    of_cluster: dict[str, Any] = {"kind": OF_BROKER, "name": "", "version": version}
    changes = (("log.retention.ms", 0, "9000"), ("log.cleanup.policy", 2, "compact"))
    assert await alter_some(client, *changes, **of_cluster, validate_only=True) == (0, None)
    assert log.state.defaults.values == {}
    assert await alter_some(client, *changes, **of_cluster) == (0, None)
    assert await alter_some(client, ("num.partitions", 0, "5"), **of_cluster) == (0, None)
    set_values = {
        "log.retention.ms": "9000",
        "log.cleanup.policy": "delete,compact",
        "num.partitions": "5",
    }
    assert log.state.defaults.values == set_values
    result = await describe(client, OF_BROKER, "", include_synonyms=True)
    assert {entry.name: entry.value for entry in result.configs} == set_values
    assert not any(entry.read_only for entry in result.configs)
    partitions = next(entry for entry in result.configs if entry.name == "num.partitions")
    synonyms = [(synonym.name, synonym.value, synonym.source) for synonym in partitions.synonyms]
    name = "num.partitions"
    assert synonyms == [(name, "5", 3), (name, "1", 4), (name, "1", 5)]
    of_broker = await describe(client, OF_BROKER, str(NODE.node_id))
    shown = {entry.name: entry for entry in of_broker.configs}
    assert (shown["log.retention.ms"].value, shown["log.retention.ms"].config_source) == ("9000", 3)
    assert shown["log.roll.ms"].config_source == 5
    await log.topics.alter("t", {"retention.ms": "7"})
    of_topic = await describe(client, OF_TOPIC, "t", include_synonyms=True)
    configs_of_t = {entry.name: entry for entry in of_topic.configs}
    retention, policy = configs_of_t["retention.ms"], configs_of_t["cleanup.policy"]
    assert [(synonym.name, synonym.value, synonym.source) for synonym in retention.synonyms] == [
        ("retention.ms", "7", 1),
        ("log.retention.ms", "9000", 3),
        ("log.retention.ms", "604800000", 5),
    ]
    assert (policy.value, policy.config_source) == ("delete,compact", 3)
    (made,) = await create(client, wanted_topic(count=-1))
    assert (made.error_code, made.num_partitions) == (0, 5)
    assert made.configs is not None
    sources = {entry.name: (entry.value, entry.config_source) for entry in made.configs}
    assert (sources["retention.ms"], sources["segment.ms"]) == (("9000", 3), ("600000", 5))
    removals = (("log.cleanup.policy", 3, "delete"), ("num.partitions", 1, None))
    assert await alter_some(client, *removals, **of_cluster) == (0, None)
    assert log.state.defaults.values == {
        "log.retention.ms": "9000",
        "log.cleanup.policy": "compact",
    }
    assert await alter(client, {"log.roll.ms": "8000"}, OF_BROKER, "") == (0, None)
    assert log.state.defaults.values == {"log.roll.ms": "8000"}


@pytest.mark.parametrize(
    "change",
    [
        ("log.retention.ms", 0, "x"),
        ("log.retention.ms", 2, "1"),
        ("retention.ms", 1, None),
        ("min.insync.replicas", 0, "2"),
        ("log.retention.hours", 0, "1"),
        ("num.partitions", 0, "0"),
        ("log.cleanup.policy", 3, "delete"),
    ],
)
@pytest.mark.parametrize("validate_only", [True, False])
async def test_defaults_that_are_refused(
    kafka: Kafka, change: tuple[str, int, str | None], validate_only: bool
) -> None:
    good = ("log.roll.ms", 0, "500")
    code, message = await alter_some(
        kafka.client(), good, change, kind=OF_BROKER, name="", validate_only=validate_only
    )
    assert (code, kafka.log.state.defaults.values) == (Code.INVALID_CONFIG, {})
    assert message
    assert change[0] in message


async def test_the_cluster_turns_creation_of_topics_on_and_off(kafka: Kafka) -> None:
    """The value of the cluster wins over the setting, which is off."""
    client = kafka.client()

    async def asked(name: str) -> int:
        topic = metadata.MetadataRequestTopic(name=name)
        request = metadata.MetadataRequest(topics=[topic], allow_auto_topic_creation=True)
        return (await client.ask(request, metadata.MetadataResponse, 9)).topics[0].error_code

    assert await asked("a") == Code.UNKNOWN_TOPIC_OR_PARTITION
    values: dict[str, str | None] = {"auto.create.topics.enable": "true", "num.partitions": "4"}
    assert await alter(client, values, OF_BROKER, "") == (0, None)
    assert await asked("a") == 0
    assert len(kafka.log.state.topic("a").partitions) == 4
    assert await alter(client, {"auto.create.topics.enable": "false"}, OF_BROKER, "") == (0, None)
    assert await asked("b") == Code.UNKNOWN_TOPIC_OR_PARTITION


ACL_KEYS = {29, 30, 31}
CREATION = acls.AclCreation(
    resource_type=2, resource_name="t", principal="User:a", host="*", operation=3, permission_type=3
)
EVERYTHING: dict[str, Any] = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
"""The filter that fits all ACLs."""


@pytest.mark.parametrize("version", acls.DescribeAclsRequest.versions)
async def test_acls_without_keys_are_security_disabled(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    description = acls.DescribeAclsRequest(**EVERYTHING)
    described = await client.ask(description, acls.DescribeAclsResponse, version)
    assert (described.error_code, described.resources) == (Code.SECURITY_DISABLED, [])
    assert "security=off" in described.error_message
    creation = acls.CreateAclsRequest(creations=[CREATION] * 2)
    created = await client.ask(creation, acls.CreateAclsResponse, version)
    assert [result.error_code for result in created.results] == [Code.SECURITY_DISABLED] * 2
    deletion = acls.DeleteAclsRequest(filters=[acls.DeleteAclsFilter(**EVERYTHING)] * 2)
    deleted = await client.ask(deletion, acls.DeleteAclsResponse, version)
    assert [result.error_code for result in deleted.filter_results] == [Code.SECURITY_DISABLED] * 2


async def test_a_broker_with_keys_does_not_list_the_apis(kafka: Kafka) -> None:
    async with broker(**SETTINGS) as secured:
        for server, listed in ((kafka, ACL_KEYS), (secured, set())):
            answer = await server.client().ask(ApiVersionsRequest(), ApiVersionsResponse, 0)
            assert {api.api_key for api in answer.api_keys} & ACL_KEYS == listed
