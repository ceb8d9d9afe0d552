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
            topics.DeleteTopicState(name=name_or_id, topic_id=ZERO_UUID)
            if isinstance(name_or_id, str)
            else topics.DeleteTopicState(name=None, topic_id=name_or_id)
            for name_or_id in names
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
    response = await client.ask(request, topics.CreatePartitionsResponse, version)
    return [result.error_code for result in response.results]


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
    response = await client.ask(request, topics.DeleteRecordsResponse, version)
    return [
        (partition.error_code, partition.low_watermark)
        for partition in response.topics[0].partitions
    ]


async def describe(
    client: Client, kind: int, name: str, *keys: str, version: int = 4, **more: Any
) -> configs.DescribeConfigsResult:
    resource = configs.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[*keys] or None
    )
    request = configs.DescribeConfigsRequest(resources=[resource], **more)
    (result,) = (await client.ask(request, configs.DescribeConfigsResponse, version)).results
    return result


async def alter(
    client: Client,
    values: dict[str, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    *,
    version: int = 2,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    entries = [configs.AlterableConfig(name=key, value=value) for key, value in values.items()]
    resource = configs.AlterConfigsResource(resource_type=kind, resource_name=name, configs=entries)
    request = configs.AlterConfigsRequest(resources=[resource], validate_only=validate_only)
    (result,) = (await client.ask(request, configs.AlterConfigsResponse, version)).responses
    return result.error_code, result.error_message


async def alter_some(
    client: Client,
    *changes: tuple[str, int, str | None],
    kind: int = OF_TOPIC,
    name: str = "t",
    version: int = 1,
    validate_only: bool = False,
) -> tuple[int, str | None]:
    entries = [
        configs.IncrementalAlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    resource = configs.IncrementalAlterConfigsResource(
        resource_type=kind, resource_name=name, configs=entries
    )
    request = configs.IncrementalAlterConfigsRequest(
        resources=[resource], validate_only=validate_only
    )
    answer = await client.ask(request, configs.IncrementalAlterConfigsResponse, version)
    (result,) = answer.responses
    return result.error_code, result.error_message
