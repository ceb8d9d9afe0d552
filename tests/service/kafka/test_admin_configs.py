"""Admin clients: configs of topics and brokers, with each error."""

import pytest

from tests.service.kafka.admin_requests import (
    alter,
    alter_some,
    describe,
)
from tests.service.kafka.conftest import NODE, Kafka
from tidelog.service.kafka.admin.configs import OF_BROKER, OF_CLIENT_METRICS, OF_GROUP, OF_TOPIC
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import configs
from tidelog.storage.core import topic_configs

LOGGER = 8


# -- DescribeConfigs


@pytest.mark.parametrize("version", range(1, 5))
async def test_configs_of_a_topic(kafka: Kafka, version: int) -> None:
    await kafka.log.alter_topic("t", {"retention.ms": "1000", "flush.ms": "7"})
    client = kafka.client()
    found = await describe(
        client,
        OF_TOPIC,
        "t",
        version=version,
        include_synonyms=True,
        include_documentation=version >= 3,
    )
    assert found.error_code == 0
    shown = {each.name: each for each in found.configs}
    assert shown.keys() == {*topic_configs.CONFIGS, "flush.ms"}
    retention, policy = shown["retention.ms"], shown["cleanup.policy"]
    assert (retention.value, retention.config_source, retention.read_only) == ("1000", 1, False)
    assert [(one.value, one.source) for one in retention.synonyms] == [
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
    found = await describe(client, OF_TOPIC, "t", *keys)
    assert {each.name: (each.value, each.config_type) for each in found.configs} == {
        "retention.ms": ("604800000", 5),
        "preallocate": ("false", 1),
    }
    assert found.configs[0].synonyms == []


async def test_configs_of_many_topics(kafka: Kafka) -> None:
    names = [f"n{number}" for number in range(30)]
    for name in names:
        await kafka.log.create_topic(name, 1, {})
    resources = [
        configs.DescribeConfigsResource(
            resource_type=OF_TOPIC, resource_name=name, configuration_keys=["segment.ms"]
        )
        for name in [*names, "unknown"]
    ]
    request = configs.DescribeConfigsRequest(resources=resources)
    found = (await kafka.client().ask(request, configs.DescribeConfigsResponse, 4)).results
    assert [each.resource_name for each in found] == [*names, "unknown"]
    assert [len(each.configs) for each in found] == [1] * 30 + [0]
    assert found[-1].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_configs_of_a_broker(kafka: Kafka) -> None:
    client = kafka.client()
    found = await describe(client, OF_BROKER, str(NODE.node_id))
    shown = {each.name: each for each in found.configs}
    assert shown["log.retention.ms"].value == "604800000"
    assert shown["num.partitions"].config_source == 4
    assert all(each.read_only for each in found.configs)
    for kind, name in ((OF_BROKER, ""), (OF_CLIENT_METRICS, "x"), (OF_GROUP, "g")):
        empty = await describe(client, kind, name)
        assert (empty.error_code, empty.configs) == (0, [])
    for kind, name in ((OF_BROKER, "8"), (OF_BROKER, "x"), (LOGGER, "7"), (0, "t")):
        refused = await describe(client, kind, name)
        assert (refused.error_code, refused.configs) == (Code.INVALID_REQUEST, [])
    unknown = await describe(client, OF_TOPIC, "none")
    assert unknown.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


# -- AlterConfigs, IncrementalAlterConfigs


@pytest.mark.parametrize("version", range(3))
async def test_alter_configs_replaces_all(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    await kafka.log.alter_topic("t", {"retention.ms": "1000", "segment.ms": "500"})
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
    found, message = await alter_some(client, good, change, validate_only=validate_only)
    assert found == code
    assert message
    assert change[0] in message
    assert kafka.log.state.topic("t").configs == {}


async def test_alterations_of_other_resources_and_twice(kafka: Kafka) -> None:
    client = kafka.client()
    value: dict[str, str | None] = {"retention.ms": "1"}
    assert (await alter(client, value, name="none"))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert (await alter(client, value, OF_BROKER, "7"))[0] == Code.INVALID_CONFIG
    assert (await alter(client, value, OF_BROKER, ""))[0] == Code.INVALID_CONFIG
    assert (await alter(client, value, OF_BROKER, "8"))[0] == Code.INVALID_REQUEST
    assert (await alter(client, value, LOGGER, "7"))[0] == Code.INVALID_REQUEST
    assert (await alter(client, {"retention.ms": None}))[0] == Code.INVALID_REQUEST
    twice = (("segment.ms", 0, "500"), ("segment.ms", 0, "600"))
    assert (await alter_some(client, *twice))[0] == Code.INVALID_REQUEST
    resource = configs.AlterConfigsResource(resource_type=2, resource_name="t", configs=[])
    request = configs.AlterConfigsRequest(resources=[resource] * 2, validate_only=False)
    found = (await client.ask(request, configs.AlterConfigsResponse, 2)).responses
    assert [each.error_code for each in found] == [Code.INVALID_REQUEST]
    assert kafka.log.state.topic("t").configs == {}
