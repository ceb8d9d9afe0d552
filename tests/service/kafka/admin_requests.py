"""Requests of admin clients, for the tests."""

from typing import Any

from tests.service.kafka.conftest import Client
from tidelog.service.kafka.admin.configs import OF_TOPIC
from tidelog.service.kafka.messages import configs, topics
from tidelog.service.kafka.messages.primitives import ZERO_UUID


def wanted_topic(name: str = "new", count: int = 1, **more: Any) -> topics.CreatableTopic:
    fields = {"replication_factor": 1, "assignments": [], "configs": [], **more}
    return topics.CreatableTopic(name=name, num_partitions=count, **fields)


async def create(
    client: Client, *wanted: topics.CreatableTopic, version: int = 7, validate_only: bool = False
) -> list[topics.CreatableTopicResult]:
    request = topics.CreateTopicsRequest(topics=[*wanted], validate_only=validate_only)
    return (await client.ask(request, topics.CreateTopicsResponse, version)).topics


def assigned(*brokers: list[int], first: int = 0) -> list[topics.CreatableReplicaAssignment]:
    return [
        topics.CreatableReplicaAssignment(partition_index=number, broker_ids=ids)
        for number, ids in enumerate(brokers, first)
    ]


def config(name: str, value: str | None) -> list[topics.CreatableTopicConfig]:
    return [topics.CreatableTopicConfig(name=name, value=value)]


async def delete(
    client: Client, *names: str | bytes, version: int = 6
) -> list[topics.DeletableTopicResult]:
    if version < 6:
        request = topics.DeleteTopicsRequest(topic_names=[*map(str, names)], timeout_ms=1000)
    else:
        states = [
            topics.DeleteTopicState(name=each, topic_id=ZERO_UUID)
            if isinstance(each, str)
            else topics.DeleteTopicState(name=None, topic_id=each)
            for each in names
        ]
        request = topics.DeleteTopicsRequest(topics=states, timeout_ms=1000)
    return (await client.ask(request, topics.DeleteTopicsResponse, version)).responses


async def grow(
    client: Client,
    *wanted: tuple[str, int],
    version: int = 3,
    validate_only: bool = False,
    brokers: list[list[int]] | None = None,
) -> list[int]:
    assigned = None
    if brokers is not None:
        assigned = [topics.CreatePartitionsAssignment(broker_ids=ids) for ids in brokers]
    request = topics.CreatePartitionsRequest(
        topics=[
            topics.CreatePartitionsTopic(name=name, count=count, assignments=assigned)
            for name, count in wanted
        ],
        timeout_ms=1000,
        validate_only=validate_only,
    )
    found = await client.ask(request, topics.CreatePartitionsResponse, version)
    return [each.error_code for each in found.results]


async def delete_records(
    client: Client, topic: str, *offsets: tuple[int, int], version: int = 2
) -> list[tuple[int, int]]:
    """The error and the low watermark of each partition."""
    wanted = [
        topics.DeleteRecordsPartition(partition_index=number, offset=offset)
        for number, offset in offsets
    ]
    request = topics.DeleteRecordsRequest(
        topics=[topics.DeleteRecordsTopic(name=topic, partitions=wanted)], timeout_ms=1000
    )
    found = await client.ask(request, topics.DeleteRecordsResponse, version)
    return [(each.error_code, each.low_watermark) for each in found.topics[0].partitions]


async def describe(
    client: Client, kind: int, name: str, *keys: str, version: int = 4, **more: Any
) -> configs.DescribeConfigsResult:
    resource = configs.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[*keys] or None
    )
    request = configs.DescribeConfigsRequest(resources=[resource], **more)
    (found,) = (await client.ask(request, configs.DescribeConfigsResponse, version)).results
    return found


async def alter(
    client: Client,
    values: dict[str, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    *,
    version: int = 2,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    given = [configs.AlterableConfig(name=key, value=value) for key, value in values.items()]
    resource = configs.AlterConfigsResource(resource_type=kind, resource_name=name, configs=given)
    request = configs.AlterConfigsRequest(resources=[resource], validate_only=validate_only)
    (found,) = (await client.ask(request, configs.AlterConfigsResponse, version)).responses
    return found.error_code, found.error_message


async def alter_some(
    client: Client,
    *changes: tuple[str, int, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    version: int = 1,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    given = [
        configs.IncrementalAlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    resource = configs.IncrementalAlterConfigsResource(
        resource_type=kind, resource_name=name, configs=given
    )
    request = configs.IncrementalAlterConfigsRequest(
        resources=[resource], validate_only=validate_only
    )
    answer = await client.ask(request, configs.IncrementalAlterConfigsResponse, version)
    (found,) = answer.responses
    return found.error_code, found.error_message
