"""Consumer groups in the v3 dialect: members, assignments, lag.

Confluent's API only reads groups. tidelog also has routes that list and reset the committed offsets
of a group, and that delete a group. An offset has the same fields as an offset in the body of
`POST /v3/clusters/{c}/transactions`.
"""

import contextlib
from functools import partial
from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Path, Request, Response
from pydantic import BaseModel, Field

from tidelog.service.formats.json_in import TIMESTAMP_MS_MAX, InvalidBody
from tidelog.service.formats.resources_v3 import ListMetadata, ResourceFactory
from tidelog.service.formats.strict_bodies import Items, StrictModel, WholeNumber
from tidelog.service.formats.v3_records import milliseconds
from tidelog.service.http.body_limit import SMALL_BODY
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WHOLE, WantedPage, answer_page
from tidelog.service.http.parameters import partition_number
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.groups import NewOffset, UnknownGroup
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.rights import DELETE_GROUP, DESCRIBE_GROUP, JOIN_GROUP
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    FreshBroker,
    Resources,
    Rights,
    broker_of,
)
from tidelog.service.routes.group_resources_v3 import (
    AssignmentData,
    AssignmentList,
    ConsumerData,
    ConsumerList,
    GroupData,
    GroupDescription,
    GroupList,
    GroupResources,
    LagData,
    LagList,
    LagSummaryData,
)
from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import in_order, sliced
from tidelog.service.telemetry.group_lags import GroupLags, any_topic, group_ids
from tidelog.service.telemetry.lag_times import LagTimes
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import UnknownPartition
from tidelog.storage.core.model import OFFSET_MAX, TopicIdPartition, TopicPartition
from tidelog.storage.core.topic_configs import PARTITIONS_MAX
from tidelog.storage.state.group_state import GroupMember

GroupId = Annotated[str, Path(examples=["enrich"])]
OFFSETS_MAX = 20_000
"""Offsets in one reset."""
ConsumerId = Annotated[str, Path(examples=["rest-consumer-1"])]


class GroupOffsetData(BaseModel):
    """An offset, with the fields that it has in a transaction."""

    topic_name: str = Field(examples=["flights"])
    partition_id: int = Field(examples=[0])
    offset: int = Field(examples=[42], description="of the next record to read")
    metadata: str = Field(examples=[""], description="stored with the offset")


class GroupOffsetList(BaseModel):
    """Offsets of a group, sorted by topic and partition.

    They are the committed offsets, or the offsets that a reset sets. A partition without an offset
    is absent.
    """

    kind: Literal["TidelogConsumerGroupOffsetList"] = "TidelogConsumerGroupOffsetList"
    metadata: ListMetadata
    cluster_id: str
    consumer_group_id: str
    data: list[GroupOffsetData]


class ResetOffset(StrictModel):
    """An offset of one partition."""

    topic_name: str
    partition_id: WholeNumber
    offset: WholeNumber = Field(ge=0, le=OFFSET_MAX)


class Reset(StrictModel):
    """The new position of a group.

    If `topic_name` is absent, the reset is for all partitions in which the group has a committed
    offset.
    """

    to: Literal["EARLIEST", "LATEST", "OFFSET", "SHIFT", "OFFSETS", "TIMESTAMP", "DURATION"] = (
        Field(
            description="OFFSET needs `offset`, SHIFT (of the committed offset) needs `shift_by`, "
            "OFFSETS needs `offsets`, TIMESTAMP needs `timestamp`, and DURATION (before now) needs "
            "`duration_ms`"
        )
    )
    topic_name: str | None = Field(default=None, examples=["flights"])
    partition_ids: Items[WholeNumber] | None = Field(
        default=None, max_length=PARTITIONS_MAX, description="all if absent"
    )
    offset: WholeNumber | None = Field(default=None, ge=0, le=OFFSET_MAX)
    shift_by: WholeNumber | None = Field(default=None, ge=-OFFSET_MAX, le=OFFSET_MAX)
    offsets: Items[ResetOffset] | None = Field(
        default=None, max_length=OFFSETS_MAX, description="an offset for each partition to reset"
    )
    timestamp: str | None = Field(default=None, examples=["2021-02-05T19:14:42Z"])
    duration_ms: WholeNumber | None = Field(default=None, ge=0, le=TIMESTAMP_MS_MAX)
    validate_only: bool = Field(default=False, description="respond, but change nothing")


class GroupContext(NamedTuple):
    """A group that exists, and the factory of its resources."""

    broker: Broker
    group_id: str
    make: GroupResources
    operations: Operations
    rights: CallerRights
    times: LagTimes

    async def lags(self) -> GroupLags:
        """Return the group's lags, with the times of some sealed records."""
        lags = await self.operations.groups.lags(self.rights, self.group_id, self.times)
        await lags.look()
        return lags

    def lag(self, lags: GroupLags, name: str, number: int) -> LagData | None:
        """Return the lag in a partition.

        If there is no lag, or the caller may not see it, return None.
        """
        topic = self.broker.state.topics.get(name)
        if topic is None or number >= len(topic.partitions):
            return None
        lag = lags.lag(topic, number)
        return None if lag is None else self.make.lag(lag)


async def group_of_path(
    request: Request,
    consumer_group_id: GroupId,
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
) -> GroupContext:
    """Return the group of the path. Raises UnknownGroup."""
    has_members = broker.state.members.has_members(consumer_group_id)
    if not has_members and consumer_group_id not in broker.state.committed_offsets:
        raise UnknownGroup(consumer_group_id)
    resources = GroupResources(broker, make, consumer_group_id)
    times: LagTimes = request.app.state.reports.telemetry.lags.times
    return GroupContext(broker, consumer_group_id, resources, operations, rights, times)


PathGroup = Annotated[GroupContext, Depends(group_of_path)]


async def member_of_path(consumer_id: ConsumerId, group: PathGroup) -> GroupMember:
    """Return the member of the path. Raises NoSuchResource."""
    member = group.broker.state.members.member(group.group_id, consumer_id)
    if member is None:
        raise NoSuchResource(f"Consumer {consumer_id} cannot be found.")
    return member


PathMember = Annotated[GroupMember, Depends(member_of_path)]


async def list_group_offsets(
    consumer_group_id: GroupId,
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
    page: WantedPage,
) -> GroupOffsetList:
    """The committed offsets of a group in topics that the caller may describe.

    404 if the group has no committed offset. An offset is deleted with its topic. An offset is also
    deleted if, for a week, no client commits it and the group has no members.
    """
    if consumer_group_id not in broker.state.committed_offsets:
        raise NoSuchResource(f"Consumer group {consumer_group_id} has no committed offsets.")

    def committed(key: tuple[str, int]) -> GroupOffsetData | None:
        partition = TopicPartition(*key)
        offset = operations.groups.committed_offset(rights, consumer_group_id, partition)
        return None if offset is None else _offset(partition, offset.offset, offset.metadata)

    lags = await GroupLags.of(broker, consumer_group_id, any_topic)
    keys = lags.in_order(page.position(str, int))  # `committed` returns what the caller may see
    shell = _offset_list(make, consumer_group_id)
    response: GroupOffsetList = await answer_page(page, shell, keys, committed)
    return response


async def reset_group_offsets(
    request: Request,
    consumer_group_id: GroupId,
    body: Reset,
    make: Resources,
    operations: BrokerOperations,
    change: CallerChange,
) -> GroupOffsetList:
    """Set the position of a group to the log start, to the end, to an offset, or to a time.

    If the offset does not exist, the position is the nearest existing offset. A time is a
    timestamp, or a duration before now. With a time, the position is the first record that is not
    older. The reset changes all partitions or none. 409/40903 while the group has members that
    share partitions.
    """
    broker = broker_of(request)
    topics = [offset.topic_name for offset in body.offsets or ()]
    if body.topic_name is not None:
        topics.insert(0, body.topic_name)
    new_offsets = await operations.groups.reset_offsets(
        change,
        consumer_group_id,
        topics,
        partial(_partitions, broker, consumer_group_id, body),
        await _new_offset(broker, consumer_group_id, body),
        validate_only=body.validate_only,
    )
    shell = _offset_list(make, consumer_group_id)
    reset: GroupOffsetList = await answer_page(
        WHOLE, shell, new_offsets, lambda partition: _offset(partition, new_offsets[partition], "")
    )
    return reset


def _offset_list(make: ResourceFactory, group_id: str) -> GroupOffsetList:
    """Return the list without data."""
    return GroupOffsetList(
        metadata=make.listed("consumer-groups", group_id, "offsets"),
        cluster_id=make.cluster_id,
        consumer_group_id=group_id,
        data=[],
    )


def _offset(partition: TopicPartition, offset: int, metadata: str) -> GroupOffsetData:
    return GroupOffsetData(
        topic_name=partition.topic,
        partition_id=partition.partition,
        offset=offset,
        metadata=metadata,
    )


def _within(broker: Broker, topic_partition: TopicPartition, offset: int) -> int:
    """Return the existing offset that is nearest to `offset`."""
    partition = broker.state.partition(topic_partition.topic, topic_partition.partition)
    return min(max(offset, partition.log_start_offset), partition.high_watermark)


async def _shifted(
    broker: Broker, group_id: str, shift_by: int | None, partition: TopicPartition
) -> int:
    if shift_by is None:
        raise InvalidBody("shift_by is missing")
    topic = broker.state.topic(partition.topic)
    offsets = broker.state.committed_offsets.of_group(group_id).get(topic.topic_id, {})
    committed = offsets.get(partition.partition)
    if committed is None:
        raise InvalidBody(f"{partition} has no committed offset to shift: name other partition_ids")
    return _within(broker, partition, committed.offset + shift_by)


async def _partitions(broker: Broker, group_id: str, body: Reset) -> list[TopicPartition]:
    if body.to == "OFFSETS":
        if not body.offsets:
            raise InvalidBody("offsets are missing")
        places = [
            TopicPartition(
                offset.topic_name,
                partition_number(broker.state.topic(offset.topic_name), str(offset.partition_id)),
            )
            async for offset in sliced(body.offsets)
        ]
        if len(set(places)) < len(places):
            raise InvalidBody("offsets name a partition twice")
        return places
    if body.topic_name is None:
        if body.partition_ids is not None:
            raise InvalidBody("partition_ids need a topic_name")
        committed = list(broker.groups.committed_offsets(group_id))
        if not committed:
            raise NoSuchResource(
                f"Consumer group {group_id} has no committed offsets: name a topic (topic_name)."
            )
        return committed
    topic = broker.state.topic(body.topic_name)
    numbers = body.partition_ids
    if numbers is None:
        return [TopicPartition(topic.name, number) for number in range(len(topic.partitions))]
    return [
        TopicPartition(topic.name, partition_number(topic, str(number)))
        for number in sorted(set(numbers))
    ]


async def _new_offset(broker: Broker, group_id: str, body: Reset) -> NewOffset:
    """Return the function for the new offset of a partition."""
    if body.to == "OFFSETS":
        requested_offsets = {
            TopicPartition(offset.topic_name, offset.partition_id): offset.offset
            async for offset in sliced(body.offsets or ())
        }

        async def requested(partition: TopicPartition) -> int:
            return _within(broker, partition, requested_offsets[partition])

        return requested
    if body.to == "SHIFT":
        return partial(_shifted, broker, group_id, body.shift_by)
    return partial(_target, broker, body)


async def _target(broker: Broker, body: Reset, topic_partition: TopicPartition) -> int:
    partition = broker.state.partition(topic_partition.topic, topic_partition.partition)
    if body.to == "EARLIEST":
        return partition.log_start_offset
    if body.to == "LATEST":
        return partition.high_watermark
    if body.to == "OFFSET":
        if body.offset is None:
            raise InvalidBody("offset is missing")
        return _within(broker, topic_partition, body.offset)
    if body.to == "TIMESTAMP":
        if body.timestamp is None:
            raise InvalidBody("timestamp is missing")
        stamp = milliseconds(body.timestamp)
    else:
        if body.duration_ms is None:
            raise InvalidBody("duration_ms is missing")
        stamp = max(broker.clock.now_ms() - body.duration_ms, 0)
    offset = await broker.records.offset_for_timestamp(*topic_partition, stamp)
    return partition.high_watermark if offset is None else offset


async def list_groups(
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
    page: WantedPage,
) -> GroupList:
    """The groups that the caller may describe and that have members or committed offsets."""

    def group(group_id: str) -> GroupData | None:
        if not operations.groups.is_shown(rights, group_id):
            return None
        return GroupResources(broker, make, group_id).group()

    ids = await in_order(group_ids(broker), page.key(str))
    shell = GroupList(metadata=make.listed("consumer-groups"), data=[])
    response: GroupList = await answer_page(page, shell, ids, group)
    return response


async def get_group(request: Request, group: PathGroup) -> GroupDescription:
    """A group, and its held members: clients whose next join must wait."""
    held_members: HeldMembers = request.app.held_members
    members = await held_members.of(group.group_id, group.rights)
    return group.make.description(members)


async def delete_group(
    consumer_group_id: GroupId, operations: BrokerOperations, change: CallerChange
) -> Response:
    """Delete a group and its committed offsets. 409/40903 while the group has members."""
    await operations.groups.delete(change, consumer_group_id)
    return Response(status_code=204)


async def list_consumers(group: PathGroup, make: Resources, page: WantedPage) -> ConsumerList:
    """Members of a group."""
    in_state = group.broker.state.members.get(group.group_id)
    members = {} if in_state is None else dict(in_state.members)
    names = await in_order(members, page.key(str))
    metadata = make.listed("consumer-groups", group.group_id, "consumers")
    response: ConsumerList = await answer_page(
        page,
        ConsumerList(metadata=metadata, data=[]),
        names,
        lambda name: group.make.consumer(members[name]),
    )
    return response


async def get_consumer(group: PathGroup, member: PathMember) -> ConsumerData:
    """A member."""
    return group.make.consumer(member)


async def list_assignments(
    group: PathGroup, member: PathMember, make: Resources, page: WantedPage
) -> AssignmentList:
    """The partitions that a member reads, in topics that the caller may describe."""
    path = ("consumer-groups", group.group_id, "consumers", member.member_id, "assignments")
    start_key = page.position(str, int)
    owned_partitions = group.broker.state.members.partitions_of(member)
    assigned = await group.operations.groups.shown_partitions(group.rights, owned_partitions)
    keys = (
        assigned
        if start_key is None
        else (partition for partition in assigned if partition > start_key)
    )
    shell = AssignmentList(metadata=make.listed(*path), data=[])
    response: AssignmentList = await answer_page(
        page, shell, keys, lambda key: group.make.assignment(member, key)
    )
    return response


async def get_assignment(
    group: PathGroup, member: PathMember, topic_name: str, partition_id: str
) -> AssignmentData:
    """One partition that a member reads, in a topic that the caller may describe."""
    topic = group.operations.topics.shown(group.rights, topic_name)
    if topic is not None:
        with contextlib.suppress(UnknownPartition):
            number = partition_number(topic, partition_id)
            partition = TopicIdPartition(topic.topic_id, number)
            if partition in group.broker.state.members.partitions_of(member):
                return group.make.assignment(member, TopicPartition(topic_name, number))
    raise NoSuchResource(f"Assignment {topic_name}-{partition_id} cannot be found.")


async def get_lag_summary(group: PathGroup) -> LagSummaryData:
    """The total lag of a group, and the partition with the largest lag.

    Only topics that the caller may describe count. 404 if the group has no committed offset in them
    and no member that reads them.
    """
    lags = await group.lags()
    summary = group.make.summary(await lags.summary())
    if summary is None:
        raise NoSuchResource(f"Consumer group {group.group_id} has no committed offsets.")
    return summary


async def list_lags(group: PathGroup, make: Resources, page: WantedPage) -> LagList:
    """The lag of a group in each partition that has a committed offset or a member that reads it.

    Without a committed offset, the lag counts from the offset at which the member starts. This is
    the offset of its seek or, without a seek, the offset that its `auto.offset.reset` selects.
    """
    lags = await group.lags()
    keys = lags.in_order(page.position(str, int))
    shell = LagList(metadata=make.listed("consumer-groups", group.group_id, "lags"), data=[])
    response: LagList = await answer_page(page, shell, keys, lambda key: group.lag(lags, *key))
    return response


async def get_lag(group: PathGroup, topic_name: str, partition_id: str) -> LagData:
    """The lag of a group in one partition."""
    topic = group.broker.state.topics.get(topic_name)
    if topic is not None:
        with contextlib.suppress(UnknownPartition):
            number = partition_number(topic, partition_id)
            lags = await group.lags()
            lag = group.lag(lags, topic_name, number)
            if lag is not None:
                return lag
    raise NoSuchResource(f"Lag of {topic_name}-{partition_id} cannot be found.")


_GROUPS = "/clusters/{cluster_id}/consumer-groups"
_GROUP = f"{_GROUPS}/{{consumer_group_id}}"
_CONSUMER = f"{_GROUP}/consumers/{{consumer_id}}"
_PARTITION = "{topic_name}/partitions/{partition_id}"
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_DESCRIBE = Permission(DESCRIBE_GROUP, "consumer_group_id")
_DELETE = Permission(DELETE_GROUP, "consumer_group_id")
_READ = Permission(JOIN_GROUP, "consumer_group_id")
_LABEL = "v3 consumer groups"
_DOC = RouteDoc(ERRORS)
_HAS_MEMBERS = {409: "40903: the group has members"}
_RESET_DOC = RouteDoc(ERRORS | CHANGE_ERRORS | _HAS_MEMBERS)
_DELETE_DOC = RouteDoc(ERRORS | CHANGE_ERRORS | _HAS_MEMBERS, 204)
_RESET_BODY = SMALL_BODY.with_items(OFFSETS_MAX, 128, 4)

ROUTES = (
    Route("GET", _GROUPS, list_groups, _CHECKED, _LABEL, V3, _DOC),
    Route("GET", _GROUP, get_group, _DESCRIBE, _LABEL, V3, _DOC),
    Route("DELETE", _GROUP, delete_group, _DELETE, _LABEL, V3, _DELETE_DOC),
    Route("GET", f"{_GROUP}/offsets", list_group_offsets, _DESCRIBE, _LABEL, V3, _DOC),
    Route(
        "POST",
        f"{_GROUP}/offsets:reset",
        reset_group_offsets,
        _READ,
        _LABEL,
        V3,
        _RESET_DOC,
        body=_RESET_BODY,
    ),
    Route("GET", f"{_GROUP}/consumers", list_consumers, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", _CONSUMER, get_consumer, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_CONSUMER}/assignments", list_assignments, _DESCRIBE, _LABEL, V3, _DOC),
    Route(
        "GET", f"{_CONSUMER}/assignments/{_PARTITION}", get_assignment, _DESCRIBE, _LABEL, V3, _DOC
    ),
    Route("GET", f"{_GROUP}/lag-summary", get_lag_summary, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_GROUP}/lags", list_lags, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_GROUP}/lags/{_PARTITION}", get_lag, _DESCRIBE, _LABEL, V3, _DOC),
)
