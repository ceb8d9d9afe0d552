"""Consumer groups in the v3 dialect: who is in them, who reads what, how far behind they are.

Confluent's API looks only. Ours are the committed offsets, in the words in which
`POST /v3/clusters/{c}/transactions` commits them, their reset, and the end of a group.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from service.admin_v3 import Made, known_cluster
from service.caller import Rights, check_topics, may_describe_group
from service.errors import NoSuchResource, documented
from service.group_resources_v3 import (
    AssignmentData,
    AssignmentList,
    ConsumerData,
    ConsumerList,
    GroupData,
    GroupList,
    GroupResources,
    Lag,
    LagData,
    LagList,
    LagSummaryData,
    group_ids,
    lags,
)
from service.resources_v3 import ListMetadata
from service.topics import (
    CHANGE_ERRORS,
    ERRORS,
    TIMESTAMP_MS_MAX,
    Asking,
    FreshLog,
    decided,
    partition_number,
)
from service.wire_in import InvalidBody
from service.wire_v3 import milliseconds
from storage.acls import DESCRIBE, READ, TOPIC
from storage.entry import CommitOffsets, GroupOffset
from storage.errors import GroupNotEmpty
from storage.group import GroupMember
from storage.group_members import NO_GENERATION
from storage.groups import OFFSET_MAX, check_group_id
from storage.log import Log
from storage.model import TopicPartition

GroupId = Annotated[str, Path(examples=["enrich"])]
ConsumerId = Annotated[str, Path(examples=["rest-consumer-1"])]


class GroupOffsetData(BaseModel):
    """An offset as a transaction commits it."""

    topic_name: str = Field(examples=["flights"])
    partition_id: int = Field(examples=[0])
    offset: int = Field(examples=[42], description="of the next record to read")
    metadata: str = Field(examples=[""], description="what the group wrote beside it")


class GroupOffsetList(BaseModel):
    """By topic and partition; partitions without a committed offset are not there."""

    kind: Literal["TidelogConsumerGroupOffsetList"] = "TidelogConsumerGroupOffsetList"
    metadata: ListMetadata
    cluster_id: str
    consumer_group_id: str
    data: list[GroupOffsetData]


class Reset(BaseModel):
    """Where a group is to go on. Without a topic: all partitions that it has committed."""

    model_config = ConfigDict(extra="forbid")
    to: Literal["EARLIEST", "LATEST", "OFFSET", "TIMESTAMP", "DURATION"] = Field(
        description="OFFSET, TIMESTAMP and DURATION (that long ago) with the field of their name"
    )
    topic_name: str | None = Field(default=None, examples=["flights"])
    partition_ids: list[int] | None = Field(default=None, description="all when not given")
    offset: int | None = Field(default=None, ge=0, le=OFFSET_MAX)
    timestamp: str | None = Field(default=None, examples=["2021-02-05T19:14:42Z"])
    duration_ms: int | None = Field(default=None, ge=0, le=TIMESTAMP_MS_MAX)
    validate_only: bool = Field(default=False, description="answer, and leave it as it is")


class Known(NamedTuple):
    """A group that is there, and what makes its resources."""

    log: Log
    group_id: str
    make: GroupResources
    asking: Rights

    def lags(self) -> list[Lag]:
        """As far as who asks may see."""
        return lags(self.log, self.group_id, self.asking)


async def known_group(
    consumer_group_id: GroupId, log: FreshLog, make: Made, asking: Asking
) -> Known:
    """The group of the path."""
    held = log.state.members.has_members(consumer_group_id)
    if not held and consumer_group_id not in log.state.groups:
        raise NoSuchResource(f"Consumer group {consumer_group_id} cannot be found.")
    return Known(log, consumer_group_id, GroupResources(log, make, consumer_group_id), asking)


KnownGroup = Annotated[Known, Depends(known_group)]


async def known_member(consumer_id: ConsumerId, known: KnownGroup) -> GroupMember:
    """The member of the path."""
    member = known.log.state.members.member(known.group_id, consumer_id)
    if member is None:
        raise NoSuchResource(f"Consumer {consumer_id} cannot be found.")
    return member


KnownMember = Annotated[GroupMember, Depends(known_member)]

router = APIRouter(
    prefix="/clusters/{cluster_id}",
    tags=["v3 consumer groups"],
    dependencies=[Depends(known_cluster)],
    responses=ERRORS,
)


@router.get("/consumer-groups/{consumer_group_id}/offsets")
async def list_group_offsets(
    consumer_group_id: GroupId, log: FreshLog, make: Made, asking: Asking
) -> GroupOffsetList:
    """Where a group goes on reading, as of now on every broker, of topics that may be described.

    404 when it has committed nothing yet, or when all it did was forgotten: an offset is kept for a
    week after its commit, and no longer than its topic.
    """
    committed = log.committed_offsets(consumer_group_id)
    if not committed:
        raise NoSuchResource(f"Consumer group {consumer_group_id} has no committed offsets.")
    shown = {
        where: (each.offset, each.metadata)
        for where, each in committed.items()
        if asking.may(DESCRIBE, TOPIC, where.topic)
    }
    return _offset_list(make, consumer_group_id, shown)


@router.post(
    "/consumer-groups/{consumer_group_id}/offsets:reset",
    responses=CHANGE_ERRORS | documented({409: "40903: the group has members"}),
)
async def reset_group_offsets(
    consumer_group_id: GroupId, body: Reset, log: FreshLog, make: Made, asking: Asking
) -> GroupOffsetList:
    """Let a group go on elsewhere: at the first record that is kept, after the last, at an offset
    (the nearest that there is), at the first record of a time, or of so long ago. All of it or
    nothing. 409/40903 while the group has members that share partitions."""
    refusal = check_group_id(consumer_group_id)
    if refusal is not None:
        raise refusal
    group = log.state.members.get(consumer_group_id)
    if group is not None and group.is_active:
        raise GroupNotEmpty(f"group {consumer_group_id!r} has members: stop them first")
    if body.topic_name is not None:
        await asking.check(READ, TOPIC, body.topic_name)
    wanted = _partitions(log, consumer_group_id, body)
    await check_topics(asking, READ, [where.topic for where in wanted])
    found = {where: await _target(log, where, body) for where in wanted}
    if not body.validate_only and found:
        offsets = [
            GroupOffset(log.state.topic(where.topic).topic_id, where.partition, offset)
            for where, offset in found.items()
        ]
        commit = CommitOffsets(consumer_group_id, NO_GENERATION, offsets)
        await decided(log.exactly_once.transact([], [commit], size=0, is_json=False))
    shown = {where: (offset, "") for where, offset in found.items()}
    return _offset_list(make, consumer_group_id, shown)


def _offset_list(
    make: Made, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]]
) -> GroupOffsetList:
    """Offsets and their metadata."""
    return GroupOffsetList(
        metadata=make.listed("consumer-groups", group_id, "offsets"),
        cluster_id=make.cluster_id,
        consumer_group_id=group_id,
        data=[
            GroupOffsetData(
                topic_name=where.topic, partition_id=where.partition, offset=offset, metadata=text
            )
            for where, (offset, text) in offsets.items()
        ],
    )


def _partitions(log: Log, group_id: str, body: Reset) -> list[TopicPartition]:
    if body.topic_name is None:
        if body.partition_ids is not None:
            raise InvalidBody("partition_ids go with a topic_name")
        committed = list(log.committed_offsets(group_id))
        if not committed:
            raise NoSuchResource(f"Consumer group {group_id} has no committed offsets.")
        return committed
    topic = log.state.topic(body.topic_name)
    numbers = body.partition_ids
    if numbers is None:
        return [TopicPartition(topic.name, number) for number in range(len(topic.partitions))]
    return [
        TopicPartition(topic.name, partition_number(topic, str(number)))
        for number in sorted(set(numbers))
    ]


async def _target(log: Log, where: TopicPartition, body: Reset) -> int:
    held = log.state.partition(where.topic, where.partition)
    if body.to == "EARLIEST":
        return held.log_start_offset
    if body.to == "LATEST":
        return held.high_watermark
    if body.to == "OFFSET":
        if body.offset is None:
            raise InvalidBody("offset is missing")
        return min(max(body.offset, held.log_start_offset), held.high_watermark)
    if body.to == "TIMESTAMP":
        if body.timestamp is None:
            raise InvalidBody("timestamp is missing")
        stamp = milliseconds(body.timestamp)
    else:
        if body.duration_ms is None:
            raise InvalidBody("duration_ms is missing")
        stamp = max(log.clock.now_ms() - body.duration_ms, 0)
    found = await log.offset_for_timestamp(where.topic, where.partition, stamp)
    return held.high_watermark if found is None else found


@router.get("/consumer-groups")
async def list_groups(log: FreshLog, make: Made, asking: Asking) -> GroupList:
    """Groups that have members, or committed offsets, and may be described."""
    shown = [each for each in group_ids(log) if may_describe_group(asking, each)]
    data = [GroupResources(log, make, group_id).group() for group_id in shown]
    return GroupList(metadata=make.listed("consumer-groups"), data=data)


@router.get("/consumer-groups/{consumer_group_id}")
async def get_group(known: KnownGroup) -> GroupData:
    """A group."""
    return known.make.group()


@router.delete(
    "/consumer-groups/{consumer_group_id}",
    status_code=204,
    responses=CHANGE_ERRORS | documented({409: "40903: the group has members"}),
)
async def delete_group(known: KnownGroup) -> Response:
    """Forget a group and all that it committed. Ours. 409/40903 while it has members."""
    await decided(known.log.delete_group(known.group_id))
    return Response(status_code=204)


@router.get("/consumer-groups/{consumer_group_id}/consumers")
async def list_consumers(known: KnownGroup, make: Made) -> ConsumerList:
    """Members of a group."""
    group = known.log.state.members.get(known.group_id)
    members = [] if group is None else sorted(group.members.items())
    return ConsumerList(
        metadata=make.listed("consumer-groups", known.group_id, "consumers"),
        data=[known.make.consumer(member) for _, member in members],
    )


@router.get("/consumer-groups/{consumer_group_id}/consumers/{consumer_id}")
async def get_consumer(known: KnownGroup, member: KnownMember) -> ConsumerData:
    """A member."""
    return known.make.consumer(member)


@router.get("/consumer-groups/{consumer_group_id}/consumers/{consumer_id}/assignments")
async def list_assignments(known: KnownGroup, member: KnownMember, make: Made) -> AssignmentList:
    """What a member reads."""
    at = ("consumer-groups", known.group_id, "consumers", member.member_id, "assignments")
    return AssignmentList(metadata=make.listed(*at), data=known.make.assignments(member))


@router.get(
    "/consumer-groups/{consumer_group_id}/consumers/{consumer_id}/assignments/{topic_name}"
    "/partitions/{partition_id}"
)
async def get_assignment(
    known: KnownGroup, member: KnownMember, topic_name: str, partition_id: str
) -> AssignmentData:
    """One partition that a member reads."""
    for each in known.make.assignments(member):
        if (each.topic_name, str(each.partition_id)) == (topic_name, partition_id):
            return each
    raise NoSuchResource(f"Assignment {topic_name}-{partition_id} cannot be found.")


@router.get("/consumer-groups/{consumer_group_id}/lag-summary")
async def get_lag_summary(known: KnownGroup) -> LagSummaryData:
    """How far a group is behind, and where most. 404 when it has committed nothing."""
    behind = known.lags()
    if not behind:
        raise NoSuchResource(f"Consumer group {known.group_id} has no committed offsets.")
    return known.make.summary(behind)


@router.get("/consumer-groups/{consumer_group_id}/lags")
async def list_lags(known: KnownGroup, make: Made) -> LagList:
    """How far a group is behind in each partition."""
    return LagList(
        metadata=make.listed("consumer-groups", known.group_id, "lags"),
        data=[known.make.lag(each) for each in known.lags()],
    )


@router.get("/consumer-groups/{consumer_group_id}/lags/{topic_name}/partitions/{partition_id}")
async def get_lag(known: KnownGroup, topic_name: str, partition_id: str) -> LagData:
    """How far a group is behind in one partition."""
    for each in known.lags():
        if (each.where.topic, str(each.where.partition)) == (topic_name, partition_id):
            return known.make.lag(each)
    raise NoSuchResource(f"Lag of {topic_name}-{partition_id} cannot be found.")
