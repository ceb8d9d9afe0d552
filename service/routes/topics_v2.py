"""Topics, partitions, offsets and the list of brokers in the v2 dialect.

Also the creation of a topic, as in Strimzi's bridge, and the seal of a topic.
"""

from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tidelog.service.formats.json_in import TIMESTAMP_MS_MAX
from tidelog.service.formats.resources_v3 import BROKER_ID
from tidelog.service.http.errors import NoSuchResource, TopicNotHosted
from tidelog.service.http.parameters import (
    SHOWN_MAX,
    check_printable_field,
    integer,
    partition_number,
)
from tidelog.service.http.route import V2, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import ALTER_TOPIC, DESCRIBE_TOPIC
from tidelog.service.operations.topics import NewTopic
from tidelog.service.routes.dependencies import (
    CREATE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    ConfigValue,
    FreshBroker,
    PartitionId,
    Rights,
    TopicCreation,
    TopicName,
    V2Response,
    broker_of,
    config_text,
    partitions_wanted,
)
from tidelog.service.slices import in_order
from tidelog.storage.broker import Broker
from tidelog.storage.core import topic_configs
from tidelog.storage.core.errors import UnknownTopic
from tidelog.storage.state.topic import Topic


class Replica(BaseModel):
    broker: int = BROKER_ID
    leader: bool = True
    in_sync: bool = True


class PartitionInfo(BaseModel):
    """A partition. Its leader and only replica is broker 1, the broker that answers."""

    partition: int
    leader: int = BROKER_ID
    replicas: list[Replica] = [Replica()]


class TopicInfo(BaseModel):
    name: str
    configs: dict[str, str] = Field(examples=[{"retention.ms": "604800000"}])
    partitions: list[PartitionInfo]


class Offsets(BaseModel):
    beginning_offset: int = Field(description="first offset that is kept")
    end_offset: int = Field(description="offset that the next record gets (the high watermark)")
    timestamp_offset: int | None = Field(
        default=None,
        description="first offset whose record is at or after `timestamp`, null if there is none; "
        "absent if the request has no `timestamp`",
    )


class Brokers(BaseModel):
    brokers: list[int] = [BROKER_ID]


class NewTopicV2(TopicCreation):
    """The body of Strimzi's bridge, with `configs` added."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"topic_name": "flights", "partitions_count": 3}]},
    )
    configs: Annotated[dict[str, ConfigValue], Field(fail_fast=True)] = Field(
        default={}, examples=[{"segment.ms": "60000"}]
    )


class SealedRecords(BaseModel):
    sealed_records: int = Field(description="records moved from the tail into the table")


async def list_topics(_: FreshBroker, operations: BrokerOperations, rights: Rights) -> list[str]:
    """The names of all topics that the caller may describe."""
    names = [topic.name for topic in await operations.topics.all_shown(rights)]
    response: Any = V2Response([*await in_order(names)])  # FastAPI sends a response unchanged
    return response


async def get_topic(
    topic_name: TopicName, broker: FreshBroker, operations: BrokerOperations, rights: Rights
) -> TopicInfo:
    """A topic with its partitions, and its effective configs if the caller may describe them."""
    topic = broker.state.topics.get(topic_name)
    if topic is None:
        raise TopicNotHosted(topic_name)
    values_of = broker.state.defaults.values_of_topic
    shown = topic_configs.shown(topic.configs)
    configs = {name: values_of(name, topic.configs)[0].value for name in shown}
    if not operations.configs.is_shown(rights, topic_name):
        configs = {}
    shell = TopicInfo(name=topic.name, configs=configs, partitions=[]).model_dump_json()
    response: Any = Response(
        f"{shell[:-3]}{_partitions(topic)}}}", media_type=V2Response.media_type
    )
    return response


async def list_partitions(topic_name: TopicName, broker: FreshBroker) -> list[PartitionInfo]:
    """The partitions of a topic."""
    response: Any = Response(
        _partitions(broker.state.topic(topic_name)), media_type=V2Response.media_type
    )
    return response


async def get_partition(
    topic_name: TopicName, partition_id: PartitionId, broker: FreshBroker
) -> PartitionInfo:
    """One partition."""
    number = _number(_known(broker, topic_name), partition_id)
    return PartitionInfo(partition=number)


async def get_offsets(
    topic_name: TopicName,
    partition_id: PartitionId,
    broker: FreshBroker,
    timestamp: Annotated[str | None, Query(description="ms since the epoch")] = None,
) -> Offsets:
    """The range of offsets. With `timestamp`, also the first offset at that time or later."""
    topic = _known(broker, topic_name)
    number = _number(topic, partition_id)
    partition = topic.partitions[number]
    range_ = {
        "beginning_offset": partition.log_start_offset,
        "end_offset": partition.high_watermark,
    }
    if timestamp is None:
        return Offsets(**range_)
    stamp = integer("timestamp", timestamp, 0, TIMESTAMP_MS_MAX)
    offset = await broker.records.offset_for_timestamp(topic_name, number, stamp)
    return Offsets(**range_, timestamp_offset=offset)


async def list_brokers(request: Request) -> Brokers:
    """The live brokers.

    The broker that answers always has id 1 in its answer. To clients, broker 1 leads all
    partitions, because any broker serves any request.
    """
    peers = broker_of(request).cluster.members().peers
    return Brokers(brokers=[BROKER_ID, *sorted(member.number for member in peers)])


async def create_topic(
    body: NewTopicV2, operations: BrokerOperations, change: CallerChange
) -> dict[str, str]:
    """Create a topic."""
    check_printable_field(body.topic_name)
    configs = {k: config_text(v) for k, v in body.configs.items() if v is not None}
    topic = NewTopic(partitions_wanted(body), configs)
    await operations.topics.create(change, body.topic_name, lambda: topic)
    return {}


async def seal_topic(topic_name: TopicName, broker: FreshBroker) -> SealedRecords:
    """Move the records in the tails of all partitions into the topic's table now.

    The values of `segment.ms` and `segment.bytes` do not matter. After the move, Spark and other
    readers of the table see the records.
    """
    return SealedRecords(sealed_records=await broker.records.seal(topic_name))


class TopicNotFound(UnknownTopic):
    """A request for a partition names an unknown topic. The message is Karapace's."""

    def __str__(self) -> str:
        return f"Topic {self.topic} not found"


def _known(broker: Broker, name: str) -> Topic:
    topic = broker.state.topics.get(name)
    if topic is None:
        raise TopicNotFound(name)
    return topic


def _number(topic: Topic, text: str) -> int:
    """Return the partition number of the path.

    If the text is not a number, raise NoSuchResource, as Karapace does.
    """
    if not (text.isascii() and text.isdigit()):
        raise NoSuchResource(f"partition {text[:SHOWN_MAX]!r} is not a number")
    return partition_number(topic, text)


def _partitions(topic: Topic) -> str:
    """Return the partitions as JSON.

    A partition takes ~0.3 us, but with pydantic it would take 30 us.
    """
    prefix, suffix = PartitionInfo(partition=0).model_dump_json().split("0", 1)
    return f"[{','.join(f'{prefix}{n}{suffix}' for n in range(len(topic.partitions)))}]"


_TOPIC = "/topics/{topic_name}"
_PARTITION = f"{_TOPIC}/partitions/{{partition_id}}"
_DESCRIBE = Permission(DESCRIBE_TOPIC, "topic_name")
_ALTER = Permission(ALTER_TOPIC, "topic_name")
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_DOC = RouteDoc(ERRORS)
_OFFSETS_DOC = RouteDoc(ERRORS, omit="unset")
_CREATE_DOC = RouteDoc(ERRORS | CREATE_ERRORS, 201)

ROUTES = (
    Route("GET", "/topics", list_topics, _CHECKED, "topics", V2, _DOC),
    Route("GET", _TOPIC, get_topic, _DESCRIBE, "topics", V2, _DOC),
    Route("GET", f"{_TOPIC}/partitions", list_partitions, _DESCRIBE, "topics", V2, _DOC),
    Route("GET", _PARTITION, get_partition, _DESCRIBE, "topics", V2, _DOC),
    Route("GET", f"{_PARTITION}/offsets", get_offsets, _DESCRIBE, "topics", V2, _OFFSETS_DOC),
    Route("GET", "/brokers", list_brokers, RouteAccess.ANY_KEY, "cluster", V2, _DOC),
    Route("POST", "/admin/topics", create_topic, _CHECKED, "topics", V2, _CREATE_DOC),
    Route("POST", "/admin/topics/{topic_name}/seal", seal_topic, _ALTER, "topics", V2, _DOC),
)
