"""Topics, partitions and offsets in the v2 dialect, creation as Strimzi has it, and our own seal.

Whoever reads the state here, or decides by it, first learns what was committed before the request
came: `FreshLog` is the one place that does so (I3). The state changes through Log alone.
"""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from service.caller import Rights, check_creation, rights_of
from service.errors import TopicNotHosted, check_printable_field, documented
from service.http import JSON_V2, integer
from storage import topics
from storage.acls import DESCRIBE, DESCRIBE_CONFIGS, TOPIC
from storage.errors import CommitUnknown, UnknownPartition
from storage.log import Log
from storage.state import Topic

BROKER_ID = 1
"""Whoever answers: any process serves everything, and is broker 1 to its clients."""
DECISION_S_MAX = 30.0
"""How long a client waits for a change of the cluster before it is told that nobody knows."""
TIMESTAMP_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""
PARTITION_DIGITS_MAX = 9

T = TypeVar("T")


class V2Response(JSONResponse):
    """JSON under the v2 dialect's media type."""

    media_type = JSON_V2.decode()


class Replica(BaseModel):
    broker: int = BROKER_ID
    leader: bool = True
    in_sync: bool = True


class PartitionInfo(BaseModel):
    """A partition; its leader and only replica is the logical broker."""

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
        description="first offset stamped at or after `timestamp`, null when there is none yet; "
        "only when `timestamp` was given",
    )


class Brokers(BaseModel):
    brokers: list[int] = [BROKER_ID]


class NewTopic(BaseModel):
    """Strimzi's body, and `configs` for ours."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"topic_name": "flights", "partitions_count": 3}]},
    )
    topic_name: str
    partitions_count: int | None = Field(default=None, description="-1 or none: the default")
    replication_factor: int | None = Field(
        default=None, description="accepted and ignored: the object store replicates"
    )
    configs: dict[str, str | int | float | bool | None] = Field(
        default={}, examples=[{"segment.ms": "60000"}]
    )


class SealedRecords(BaseModel):
    sealed_records: int = Field(description="records that went from the tail into the table")


# -- what routes share


def broker_log(request: Request) -> Log:
    """The broker's log, as it is."""
    log: Log = request.app.state.log
    return log


async def fresh_log(request: Request) -> Log:
    """The broker's log after a look at the WAL's end: all that was acked before is in its state."""
    log = broker_log(request)
    await log.wal.refresh()
    return log


async def rights_of_caller(request: Request) -> Rights:
    """What who asks may do; all where security is off."""
    return rights_of(request.scope)


FreshLog = Annotated[Log, Depends(fresh_log)]
Asking = Annotated[Rights, Depends(rights_of_caller)]
TopicName = Annotated[str, Path(examples=["flights"])]
PartitionNumber = Annotated[str, Path(examples=["0"], description="from 0 on")]


def partition_number(topic: Topic, text: str) -> int:
    """A partition of the topic from a path's text; UnknownPartition for whatever is none."""
    count = len(topic.partitions)
    is_number = text.isascii() and text.isdigit() and len(text) <= PARTITION_DIGITS_MAX
    if not is_number or int(text) >= count:
        raise UnknownPartition(topic.name, text, count)  # type: ignore[arg-type]
    return int(text)


def partitions_wanted(request: Request, count: int | None) -> int:
    """-1 and nothing mean the default."""
    default: int = request.app.state.default_partitions
    return default if count is None or count == -1 else count


def config_text(value: str | int | float | bool) -> str:
    """A config's value as Kafka writes it: clients send JSON's own types, too."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


async def decided(change: Coroutine[Any, Any, T]) -> T:
    """The result of a change of the cluster. Raises CommitUnknown when the store does not say in
    time; giving up waiting does not cancel the commit."""
    try:
        async with asyncio.timeout(DECISION_S_MAX):
            return await change
    except TimeoutError:
        raise CommitUnknown(
            f"the outcome is not known after {DECISION_S_MAX:.0f} s: look before you repeat it"
        ) from None


# -- routes

ERRORS = documented(
    {
        400: "a name with control characters, or a parameter that cannot be used",
        404: "no such topic or partition",
        422: "the body is not what it should be",
        503: "the object store does not answer: try again",
    }
)
CHANGE_ERRORS = documented(
    {
        413: "the body is over its bound",
        415: "the body is not said to be JSON",
        504: "not known whether it was done: look, and try again",
    }
)
CREATE_ERRORS = CHANGE_ERRORS | documented({400: "it exists, or a name or config is wrong"})

router = APIRouter(default_response_class=V2Response, responses=ERRORS)


@router.get("/topics", tags=["topics"])
async def list_topics(log: FreshLog, asking: Asking) -> list[str]:
    """Names of all topics that may be described."""
    return sorted(name for name in log.state.topics if asking.may(DESCRIBE, TOPIC, name))


@router.get("/topics/{topic_name}", tags=["topics"])
async def get_topic(topic_name: TopicName, log: FreshLog, asking: Asking) -> TopicInfo:
    """A topic with its effective configs, where they may be described, and its partitions."""
    topic = log.state.topics.get(topic_name)
    if topic is None:
        raise TopicNotHosted(topic_name)
    configs = {name: key.default for name, key in topics.CONFIGS.items()} | topic.configs
    if not asking.may(DESCRIBE_CONFIGS, TOPIC, topic_name):
        configs = {}
    return TopicInfo(name=topic.name, configs=configs, partitions=_partitions(topic))


@router.get("/topics/{topic_name}/partitions", tags=["topics"])
async def list_partitions(topic_name: TopicName, log: FreshLog) -> list[PartitionInfo]:
    """The partitions of a topic."""
    return _partitions(log.state.topic(topic_name))


@router.get("/topics/{topic_name}/partitions/{partition_id}", tags=["topics"])
async def get_partition(
    topic_name: TopicName, partition_id: PartitionNumber, log: FreshLog
) -> PartitionInfo:
    """One partition."""
    number = partition_number(log.state.topic(topic_name), partition_id)
    return PartitionInfo(partition=number)


@router.get(
    "/topics/{topic_name}/partitions/{partition_id}/offsets",
    tags=["topics"],
    response_model_exclude_unset=True,
)
async def get_offsets(
    topic_name: TopicName,
    partition_id: PartitionNumber,
    log: FreshLog,
    timestamp: Annotated[str | None, Query(description="ms since the epoch")] = None,
) -> Offsets:
    """The range of offsets, and with `timestamp` the first offset of that time or later."""
    topic = log.state.topic(topic_name)
    number = partition_number(topic, partition_id)
    held = topic.partitions[number]
    range_ = {"beginning_offset": held.log_start_offset, "end_offset": held.high_watermark}
    if timestamp is None:
        return Offsets(**range_)
    stamp = integer("timestamp", timestamp, 0, TIMESTAMP_MS_MAX)
    found = await log.offset_for_timestamp(topic_name, number, stamp)
    return Offsets(**range_, timestamp_offset=found)


@router.get("/brokers", tags=["cluster"])
async def list_brokers(request: Request) -> Brokers:
    """The brokers that live. 1 is whoever answers: any of them serves everything."""
    others = broker_log(request).membership.others
    return Brokers(brokers=[BROKER_ID, *sorted(member.number for member in others)])


@router.post("/admin/topics", status_code=201, tags=["topics"], responses=CREATE_ERRORS)
async def create_topic(
    request: Request, body: NewTopic, log: FreshLog, asking: Asking
) -> dict[str, str]:
    """Create a topic."""
    check_printable_field(body.topic_name)
    await check_creation(asking, body.topic_name)
    configs = {k: config_text(v) for k, v in body.configs.items() if v is not None}
    partitions = partitions_wanted(request, body.partitions_count)
    await decided(log.create_topic(body.topic_name, partitions, configs))
    return {}


@router.post("/admin/topics/{topic_name}/seal", tags=["topics"])
async def seal_topic(topic_name: TopicName, log: FreshLog) -> SealedRecords:
    """Move what is in the tail of all partitions into the topic's table now, so that Spark and
    others see it there, whatever `segment.ms` and `segment.bytes` say."""
    return SealedRecords(sealed_records=await log.seal(topic_name))


def _partitions(topic: Topic) -> list[PartitionInfo]:
    return [PartitionInfo(partition=number) for number in range(len(topic.partitions))]
