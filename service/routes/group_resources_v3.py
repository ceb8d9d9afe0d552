"""Resources of consumer groups in the v3 dialect: their fields, and how they follow from the state.

Lag is the distance from a committed offset to the end of the log. As in Confluent's API, a
partition without a committed offset has no lag.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from tidelog.service.formats.resources_v3 import (
    BROKER_ID,
    Related,
    Resource,
    ResourceFactory,
    ResourceList,
)
from tidelog.service.http.paging import Slices, in_order, sliced
from tidelog.service.security.caller import CallerRights
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import DESCRIBE, TOPIC
from tidelog.storage.core.model import TopicIdPartition, TopicPartition
from tidelog.storage.state.group_types import DEFAULT_ASSIGNOR, GroupMember


class _GroupResource(Resource):
    consumer_group_id: str


G = TypeVar("G", bound=_GroupResource)


class GroupData(_GroupResource):
    kind: Literal["KafkaConsumerGroup"] = "KafkaConsumerGroup"
    is_simple: bool = Field(description="the group has no members")
    partition_assignor: str = Field(examples=["sticky"])
    state: Literal["STABLE", "EMPTY"]
    type: Literal["CLASSIC"] = "CLASSIC"
    is_mixed_consumer_group: bool = False
    generation: int = Field(description="grows with every new assignment; not in Confluent's API")
    coordinator: Related
    consumers: Related
    lag_summary: Related


class ConsumerData(_GroupResource):
    kind: Literal["KafkaConsumer"] = "KafkaConsumer"
    consumer_id: str
    instance_id: str | None = Field(description="`group.instance.id` of a static member")
    client_id: str
    assignments: Related


class AssignmentData(_GroupResource):
    kind: Literal["KafkaConsumerAssignment"] = "KafkaConsumerAssignment"
    consumer_id: str
    topic_name: str
    partition_id: int
    partition: Related
    lag: Related


class LagData(_GroupResource):
    """A group's lag in a partition. `consumer_id` is empty if no member reads the partition."""

    kind: Literal["KafkaConsumerLag"] = "KafkaConsumerLag"
    topic_name: str
    partition_id: int
    current_offset: int
    log_end_offset: int
    lag: int
    consumer_id: str
    instance_id: str | None
    client_id: str


class LagSummaryData(_GroupResource):
    kind: Literal["KafkaConsumerGroupLagSummary"] = "KafkaConsumerGroupLagSummary"
    max_lag_consumer_id: str
    max_lag_instance_id: str | None
    max_lag_client_id: str
    max_lag_topic_name: str
    max_lag_partition_id: int
    max_lag: int
    total_lag: int
    max_lag_consumer: Related
    max_lag_partition: Related


MOST = ("consumer_id", "instance_id", "client_id", "topic_name", "partition_id")
"""Fields that a summary copies from the partition with the largest lag."""


class GroupList(ResourceList[GroupData]):
    kind: Literal["KafkaConsumerGroupList"] = "KafkaConsumerGroupList"


class ConsumerList(ResourceList[ConsumerData]):
    kind: Literal["KafkaConsumerList"] = "KafkaConsumerList"


class AssignmentList(ResourceList[AssignmentData]):
    kind: Literal["KafkaConsumerAssignmentList"] = "KafkaConsumerAssignmentList"


class LagList(ResourceList[LagData]):
    kind: Literal["KafkaConsumerLagList"] = "KafkaConsumerLagList"


class Lag(NamedTuple):
    """A group's lag in a partition, and the member that reads it."""

    partition: TopicPartition
    current_offset: int
    end_offset: int
    member: GroupMember | None

    @property
    def lag(self) -> int:
        return max(self.end_offset - self.current_offset, 0)


def group_ids(log: Broker) -> list[str]:
    """Return the ids of all groups with members or committed offsets, unsorted. An id takes ~0.05
    us."""
    offsets = log.state.committed_offsets
    with_members = (group.group_id for group in log.state.members if group.members)
    return [*offsets, *(each for each in with_members if each not in offsets)]


class LagSums(NamedTuple):
    """The number of partitions, their total lag, the largest lag, and the topics."""

    partitions: int
    total: int
    most: Lag | None
    topics: set[str]


async def lag_sums(log: Broker, group_id: str, rights: CallerRights) -> LagSums:
    """Sum up the lags of a group in all topics that the caller may describe. The event loop may
    apply commits meanwhile, so the lags may be of different times. Of equal lags, `most` is that of
    the first partition, sorted by topic."""
    owners = await owners_of(log, group_id)
    offsets, slices = log.state.committed_offsets, Slices()
    partitions = total = 0
    topics = set[str]()
    most: Lag | None = None
    for topic_id in list(offsets.of_group(group_id)):
        for number in list(offsets.of_group(group_id).get(topic_id, ())):
            await slices.pause()
            one = lag_of(log, group_id, TopicIdPartition(topic_id, number), owners, rights)
            if one is None:
                continue
            partitions += 1
            total += one.lag
            topics.add(one.partition.topic)
            if most is None or (-one.lag, one.partition) < (-most.lag, most.partition):
                most = one
    return LagSums(partitions, total, most, topics)


def lag_of(
    log: Broker,
    group_id: str,
    where: TopicIdPartition,
    owners: Mapping[TopicIdPartition, GroupMember],
    rights: CallerRights,
) -> Lag | None:
    """Return the lag in a partition. If the group has no committed offset in it, or the caller may
    not describe its topic, return None."""
    topic = log.state.topic_of_id(where.topic_id)
    held = log.state.committed_offsets.of_group(group_id).get(where.topic_id, {})
    committed = held.get(where.partition)
    if topic is None or committed is None or not rights.may(DESCRIBE, TOPIC, topic.name):
        return None
    end_offset = topic.partitions[where.partition].high_watermark
    partition = TopicPartition(topic.name, where.partition)
    return Lag(partition, committed.offset, end_offset, owners.get(where))


async def owners_of(log: Broker, group_id: str) -> dict[TopicIdPartition, GroupMember]:
    """Return the member that reads each partition."""
    group, owners = log.state.members.get(group_id), dict[TopicIdPartition, GroupMember]()
    async for member in sliced([] if group is None else list(group.members.values())):
        owners.update(dict.fromkeys(member.owned, member))
    return owners


async def assigned_in_order(
    log: Broker, owned: Iterable[TopicIdPartition], rights: CallerRights
) -> Iterator[TopicPartition]:
    """Return the partitions whose topic the caller may describe, sorted."""
    names: dict[str, str | None] = {}
    found: list[TopicPartition] = []
    async for at in sliced(list(owned)):
        if at.topic_id not in names:
            topic = log.state.topic_of_id(at.topic_id)
            is_shown = topic is not None and rights.may(DESCRIBE, TOPIC, topic.name)
            names[at.topic_id] = topic.name if topic is not None and is_shown else None
        name = names[at.topic_id]
        if name is not None:
            found.append(TopicPartition(name, at.partition))
    return await in_order(found)


def committed_in_order(
    log: Broker, group_id: str, after: tuple[Any, ...] | None
) -> Iterator[tuple[str, int]]:
    """Iterate over (topic name, partition) of the group's committed offsets, sorted, from the first
    one after `after` on."""
    offsets = log.state.committed_offsets
    topics = (log.state.topic_of_id(topic_id) for topic_id in list(offsets.of_group(group_id)))
    named = sorted((topic.name, topic.topic_id) for topic in topics if topic is not None)
    for name, topic_id in named:
        if after is not None and name < after[0]:
            continue
        least = after[1] + 1 if after is not None and name == after[0] else 0
        for number in sorted(offsets.of_group(group_id).get(topic_id, {})):
            if number >= least:
                yield name, number


class GroupResources:
    """Creates the resources of one group in one response."""

    def __init__(self, log: Broker, make: ResourceFactory, group_id: str) -> None:
        self._log = log
        self._make = make
        self._group_id = group_id
        self._at: tuple[str | int, ...] = ("consumer-groups", group_id)

    def group(self) -> GroupData:
        group = self._log.state.members.get(self._group_id)
        has_members = group is not None and bool(group.members)
        return self._create(
            GroupData,
            "",
            (),
            is_simple=not has_members,
            partition_assignor=DEFAULT_ASSIGNOR if group is None else group.assignor,
            state="STABLE" if has_members else "EMPTY",
            generation=0 if group is None else group.generation,
            coordinator=self._make.related("brokers", BROKER_ID),
            consumers=self._make.related(*self._at, "consumers"),
            lag_summary=self._make.related(*self._at, "lag-summary"),
        )

    def consumer(self, member: GroupMember) -> ConsumerData:
        below = ("consumers", member.member_id)
        return self._create(
            ConsumerData,
            f"/consumer={member.member_id}",
            below,
            consumer_id=member.member_id,
            instance_id=member.instance_id or None,
            client_id=member.config.client_id,
            assignments=self._make.related(*self._at, *below, "assignments"),
        )

    def assignment(self, member: GroupMember, partition: TopicPartition) -> AssignmentData:
        at = (partition.topic, "partitions", partition.partition)
        return self._create(
            AssignmentData,
            f"/consumer={member.member_id}/assignment={partition}",
            ("consumers", member.member_id, "assignments", *at),
            consumer_id=member.member_id,
            topic_name=partition.topic,
            partition_id=partition.partition,
            partition=self._make.related("topics", *at),
            lag=self._make.related(*self._at, "lags", *at),
        )

    def lag(self, lag: Lag) -> LagData:
        topic, number = lag.partition
        member = lag.member
        return self._create(
            LagData,
            f"/lag={lag.partition}",
            ("lags", topic, "partitions", number),
            topic_name=topic,
            partition_id=number,
            current_offset=lag.current_offset,
            log_end_offset=lag.end_offset,
            lag=lag.lag,
            consumer_id="" if member is None else member.member_id,
            instance_id=None if member is None else member.instance_id or None,
            client_id="" if member is None else member.config.client_id,
        )

    def summary(self, total: int, largest: Lag) -> LagSummaryData:
        most = self.lag(largest)
        return self._create(
            LagSummaryData,
            "/lag-summary",
            ("lag-summary",),
            **{f"max_lag_{name}": getattr(most, name) for name in MOST},
            max_lag=most.lag,
            total_lag=total,
            max_lag_consumer=self._make.related(*self._at, "consumers", most.consumer_id),
            max_lag_partition=self._make.related(
                "topics", most.topic_name, "partitions", most.partition_id
            ),
        )

    def _create(self, kind: type[G], crn: str, below: tuple[str | int, ...], **fields: Any) -> G:
        """Create a resource of the group. Its path and its name begin with the group's."""
        return self._make.create(
            kind,
            f"/consumer-group={self._group_id}{crn}",
            (*self._at, *below),
            consumer_group_id=self._group_id,
            **fields,
        )
