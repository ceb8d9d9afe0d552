"""Topics, partitions and offsets in Confluent's v3 dialect.

Replication factors and assignments to brokers are accepted and ignored, because Tidelog's
partitions are not on brokers.
"""

from typing import Annotated

from fastapi import Depends, Query, Response
from pydantic import ConfigDict, Field

from tidelog.service.formats.resources_v3 import (
    BROKER_ID,
    PartitionData,
    PartitionList,
    PartitionOffsetsData,
    ReplicaData,
    ReplicaList,
    TopicData,
    TopicList,
)
from tidelog.service.formats.strict_bodies import Items, StrictModel, WholeNumber
from tidelog.service.http.body_limit import SMALL_BODY
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.parameters import (
    InvalidParameter,
    check_printable_field,
    partition_number,
)
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import ALTER_TOPIC, DELETE_TOPIC, DESCRIBE_TOPIC
from tidelog.service.operations.topics import NewTopic
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    CREATE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    ConfigValue,
    FreshBroker,
    PartitionId,
    PathTopic,
    Resources,
    Rights,
    TopicCreation,
    TopicName,
    WithOperations,
    config_text,
    hosted_topic,
    partitions_wanted,
)
from tidelog.service.security.caller import allowed_operations
from tidelog.service.slices import in_order
from tidelog.storage.core.acls import TOPIC
from tidelog.storage.core.topic_configs import PARTITIONS_MAX

CONFIGS_MAX = 1_000
"""Configs in a request for a new topic, some of them given more than once."""


class NewTopicConfig(StrictModel):
    name: str
    value: ConfigValue = Field(default=None, description="null: the default")


class NewTopicV3(TopicCreation):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "topic_name": "flights",
                    "partitions_count": 3,
                    "configs": [{"name": "segment.ms", "value": "60000"}],
                }
            ]
        },
    )
    replicas_assignments: Annotated[dict[int, Items[int]], Field(fail_fast=True)] | None = Field(
        default=None,
        max_length=PARTITIONS_MAX,
        description="sets the number of partitions; the brokers are ignored",
    )
    configs: Items[NewTopicConfig] | None = Field(default=None, max_length=CONFIGS_MAX)
    validate_only: bool = False


class MorePartitions(StrictModel):
    partitions_count: WholeNumber = Field(examples=[6])


async def leading_broker(broker_id: str) -> None:
    """Raise NoSuchResource unless the id is that of this broker, which has the only replica."""
    if broker_id != str(BROKER_ID):
        raise NoSuchResource(f"Broker {broker_id} cannot be found.")


LeadingBroker = Annotated[None, Depends(leading_broker)]


async def list_topics(
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
    page: WantedPage,
    include_authorized_operations: WithOperations = False,
) -> TopicList:
    """All topics that the caller may describe, by name."""

    def topic_data(name: str) -> TopicData | None:
        topic = operations.topics.shown(rights, name)
        if topic is None:
            return None
        data = make.topic(name, len(topic.partitions), operations.topics.table_uri(rights, name))
        if include_authorized_operations:
            data.authorized_operations = allowed_operations(rights, TOPIC, name)
        return data

    names = await in_order(broker.state.topics, page.key(str))
    shell = TopicList(metadata=make.listed("topics"), data=[])
    response: TopicList = await answer_page(page, shell, names, topic_data)
    return response


async def create_topic(
    response: Response,
    body: NewTopicV3,
    make: Resources,
    operations: BrokerOperations,
    change: CallerChange,
) -> TopicData:
    """Create a topic; with `validate_only`, respond 200 and create nothing."""
    check_printable_field(body.topic_name)
    configs = {
        config.name: config_text(config.value)
        for config in body.configs or []
        if config.value is not None
    }
    assigned = tuple(body.replicas_assignments or ())
    topic = NewTopic(partitions_wanted(body), configs, assigned)
    partitions = await operations.topics.create(
        change, body.topic_name, lambda: topic, validate_only=body.validate_only
    )
    uri = operations.topics.table_uri(change.rights, body.topic_name)
    data = make.topic(body.topic_name, partitions, uri)
    if body.validate_only:
        response.status_code = 200
    else:
        response.headers["Location"] = data.metadata.self_url
    return data


async def get_topic(
    context: PathTopic,
    operations: BrokerOperations,
    rights: Rights,
    include_authorized_operations: WithOperations = False,
) -> TopicData:
    """A topic."""
    name = context.topic.name
    uri = operations.topics.table_uri(rights, name)
    topic = context.make.topic(name, len(context.topic.partitions), uri)
    if include_authorized_operations:
        topic.authorized_operations = allowed_operations(rights, TOPIC, name)
    return topic


async def add_partitions(
    body: MorePartitions,
    topic_name: TopicName,
    make: Resources,
    operations: BrokerOperations,
    change: CallerChange,
) -> TopicData:
    """Add partitions to a topic.

    Records stay in their partitions; new records with the same key may go to another partition.
    """
    count = body.partitions_count
    with hosted_topic():
        await operations.topics.add_partitions(change, topic_name, count)
    return make.topic(topic_name, count, operations.topics.table_uri(change.rights, topic_name))


async def delete_topic(
    topic_name: TopicName, operations: BrokerOperations, change: CallerChange
) -> None:
    """Delete a topic with all its records."""
    with hosted_topic():
        await operations.topics.delete(change, topic_name)


async def list_partitions(context: PathTopic, page: WantedPage) -> PartitionList:
    """The partitions of a topic."""
    name, make = context.topic.name, context.make
    start_key = page.key(int)
    numbers = range(
        0 if start_key is None else max(start_key + 1, 0), len(context.topic.partitions)
    )
    shell = PartitionList(metadata=make.listed("topics", name, "partitions"), data=[])
    response: PartitionList = await answer_page(
        page, shell, numbers, lambda number: make.partition(name, number)
    )
    return response


async def get_partition(partition_id: PartitionId, context: PathTopic) -> PartitionData:
    """One partition."""
    return context.make.partition(context.topic.name, partition_number(context.topic, partition_id))


async def get_partition_offsets(
    partition_id: PartitionId,
    context: PathTopic,
    offset_type: Annotated[
        str, Query(description="`earliest`, `latest` or `earliest_and_latest`")
    ] = "earliest_and_latest",
) -> PartitionOffsetsData:
    """The log start offset, and the offset of the next record."""
    words = {
        "earliest": (True, False),
        "latest": (False, True),
        "earliest_and_latest": (True, True),
    }
    if offset_type not in words:
        raise InvalidParameter(f"offset_type={offset_type!r} must be one of {', '.join(words)}")
    earliest, latest = words[offset_type]
    number = partition_number(context.topic, partition_id)
    partition = context.topic.partitions[number]
    return context.make.partition_offsets(
        context.topic.name, number, partition, earliest=earliest, latest=latest
    )


async def list_replicas(partition_id: PartitionId, context: PathTopic) -> ReplicaList:
    """The one replica of a partition, which the API shows on broker 1."""
    name, number = context.topic.name, partition_number(context.topic, partition_id)
    return ReplicaList(
        metadata=context.make.listed("topics", name, "partitions", number, "replicas"),
        data=[context.make.replica(name, number)],
    )


async def get_replica(
    _: LeadingBroker, partition_id: PartitionId, context: PathTopic
) -> ReplicaData:
    """The one replica of a partition. 404 if the broker's id is not 1."""
    return context.make.replica(context.topic.name, partition_number(context.topic, partition_id))


async def get_reassignment(partition_id: PartitionId, context: PathTopic) -> None:
    """Always 404, because partitions never move."""
    number = partition_number(context.topic, partition_id)
    raise NoSuchResource(f"Partition {number} of {context.topic.name} is not being reassigned.")


_TOPICS = "/clusters/{cluster_id}/topics"
_TOPIC = f"{_TOPICS}/{{topic_name}}"
_PARTITION = f"{_TOPIC}/partitions/{{partition_id}}"
_DESCRIBE = Permission(DESCRIBE_TOPIC, "topic_name")
_ALTER = Permission(ALTER_TOPIC, "topic_name")
_DELETE = Permission(DELETE_TOPIC, "topic_name")
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_NEW_TOPIC_BODY = SMALL_BODY.with_items(PARTITIONS_MAX, 64, 5)
"""With an assignment of each partition to up to four brokers."""
_LABEL = "v3 topics"
_DOC = RouteDoc(ERRORS)
_CREATE_DOC = RouteDoc(ERRORS | CREATE_ERRORS, 201)
_ADD_DOC = RouteDoc(ERRORS | CREATE_ERRORS)
_DELETE_DOC = RouteDoc(ERRORS | CHANGE_ERRORS, 204)
_OFFSETS_DOC = RouteDoc(ERRORS, omit="none")

ROUTES = (
    Route("GET", _TOPICS, list_topics, _CHECKED, _LABEL, V3, _DOC),
    Route("POST", _TOPICS, create_topic, _CHECKED, _LABEL, V3, _CREATE_DOC, body=_NEW_TOPIC_BODY),
    Route("GET", _TOPIC, get_topic, _DESCRIBE, _LABEL, V3, _DOC),
    Route("PATCH", _TOPIC, add_partitions, _ALTER, _LABEL, V3, _ADD_DOC),
    Route("DELETE", _TOPIC, delete_topic, _DELETE, _LABEL, V3, _DELETE_DOC),
    Route("GET", f"{_TOPIC}/partitions", list_partitions, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", _PARTITION, get_partition, _DESCRIBE, _LABEL, V3, _DOC),
    Route(
        "GET", f"{_PARTITION}/offset", get_partition_offsets, _DESCRIBE, _LABEL, V3, _OFFSETS_DOC
    ),
    Route("GET", f"{_PARTITION}/replicas", list_replicas, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_PARTITION}/replicas/{{broker_id}}", get_replica, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_PARTITION}/reassignment", get_reassignment, _DESCRIBE, _LABEL, V3, _DOC),
)
