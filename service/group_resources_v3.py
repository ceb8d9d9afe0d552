"""Resources of consumer groups in the v3 dialect: their fields, and how they follow from the state.

Lag is what is committed against the end of the log; partitions without a committed offset have
none, as in Confluent's API.
"""

from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

from service.caller import EVERYTHING, Rights
from service.resources_v3 import ListMetadata, Metadata, Related, Resources
from service.topics import BROKER_ID
from storage.acls import DESCRIBE, TOPIC
from storage.assignors import Owned
from storage.group import DEFAULT_ASSIGNOR, GroupMember
from storage.log import Log
from storage.model import TopicPartition


class GroupData(BaseModel):
    kind: Literal["KafkaConsumerGroup"] = "KafkaConsumerGroup"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    is_simple: bool = Field(description="has no members, and commits by itself")
    partition_assignor: str = Field(examples=["sticky"])
    state: Literal["STABLE", "EMPTY"]
    type: Literal["CLASSIC"] = "CLASSIC"
    is_mixed_consumer_group: bool = False
    generation: int = Field(description="ours: grows with every change of who reads what")
    coordinator: Related
    consumers: Related
    lag_summary: Related


class ConsumerData(BaseModel):
    kind: Literal["KafkaConsumer"] = "KafkaConsumer"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    consumer_id: str
    instance_id: str | None = Field(description="`group.instance.id` of a static member")
    client_id: str
    assignments: Related


class AssignmentData(BaseModel):
    kind: Literal["KafkaConsumerAssignment"] = "KafkaConsumerAssignment"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    consumer_id: str
    topic_name: str
    partition_id: int
    partition: Related
    lag: Related


class LagData(BaseModel):
    """Whoever reads the partition now is named; nobody is ''."""

    kind: Literal["KafkaConsumerLag"] = "KafkaConsumerLag"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    topic_name: str
    partition_id: int
    current_offset: int
    log_end_offset: int
    lag: int
    consumer_id: str
    instance_id: str | None
    client_id: str


class LagSummaryData(BaseModel):
    kind: Literal["KafkaConsumerGroupLagSummary"] = "KafkaConsumerGroupLagSummary"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    max_lag_consumer_id: str
    max_lag_instance_id: str | None
    max_lag_client_id: str
    max_lag_topic_name: str
    max_lag_partition_id: int
    max_lag: int
    total_lag: int
    max_lag_consumer: Related
    max_lag_partition: Related


class GroupList(BaseModel):
    kind: Literal["KafkaConsumerGroupList"] = "KafkaConsumerGroupList"
    metadata: ListMetadata
    data: list[GroupData]


class ConsumerList(BaseModel):
    kind: Literal["KafkaConsumerList"] = "KafkaConsumerList"
    metadata: ListMetadata
    data: list[ConsumerData]


class AssignmentList(BaseModel):
    kind: Literal["KafkaConsumerAssignmentList"] = "KafkaConsumerAssignmentList"
    metadata: ListMetadata
    data: list[AssignmentData]


class LagList(BaseModel):
    kind: Literal["KafkaConsumerLagList"] = "KafkaConsumerLagList"
    metadata: ListMetadata
    data: list[LagData]


class Lag(NamedTuple):
    """How far a group is behind in a partition, and who reads it."""

    where: TopicPartition
    current_offset: int
    end_offset: int
    member: GroupMember | None

    @property
    def lag(self) -> int:
        return max(self.end_offset - self.current_offset, 0)


def group_ids(log: Log) -> list[str]:
    """Groups that have members or committed offsets."""
    with_members = (group.group_id for group in log.state.members if group.members)
    return sorted({*log.state.groups, *with_members})


def lags(log: Log, group_id: str, asking: Rights = EVERYTHING) -> list[Lag]:
    """Of all partitions with a committed offset whose topics may be described, sorted."""
    group = log.state.members.get(group_id)
    owners: dict[Owned, GroupMember] = {}
    if group is not None:
        owners = {where: one for one in group.members.values() for where in one.owned}
    found = []
    for where, committed in log.committed_offsets(group_id).items():
        if not asking.may(DESCRIBE, TOPIC, where.topic):
            continue
        topic = log.state.topic(where.topic)
        end = topic.partitions[where.partition].high_watermark
        owner = owners.get(Owned(topic.topic_id, where.partition))
        found.append(Lag(where, committed.offset, end, owner))
    return found


class GroupResources:
    """Makes the resources of one group in one answer."""

    def __init__(self, log: Log, make: Resources, group_id: str) -> None:
        self._log = log
        self._make = make
        self._group_id = group_id
        self._at: tuple[str | int, ...] = ("consumer-groups", group_id)
        self._crn = f"/consumer-group={group_id}"

    def group(self) -> GroupData:
        held = self._log.state.members.get(self._group_id)
        has_members = held is not None and bool(held.members)
        return GroupData(
            metadata=self._make.metadata(*self._at, crn=self._crn),
            cluster_id=self._make.cluster_id,
            consumer_group_id=self._group_id,
            is_simple=not has_members,
            partition_assignor=DEFAULT_ASSIGNOR if held is None else held.assignor,
            state="STABLE" if has_members else "EMPTY",
            generation=0 if held is None else held.generation,
            coordinator=self._make.related("brokers", BROKER_ID),
            consumers=self._make.related(*self._at, "consumers"),
            lag_summary=self._make.related(*self._at, "lag-summary"),
        )

    def consumer(self, member: GroupMember) -> ConsumerData:
        at = (*self._at, "consumers", member.member_id)
        crn = f"{self._crn}/consumer={member.member_id}"
        return ConsumerData(
            metadata=self._make.metadata(*at, crn=crn),
            cluster_id=self._make.cluster_id,
            consumer_group_id=self._group_id,
            consumer_id=member.member_id,
            instance_id=member.instance_id or None,
            client_id=member.config.client_id,
            assignments=self._make.related(*at, "assignments"),
        )

    def assignments(self, member: GroupMember) -> list[AssignmentData]:
        found = []
        for where in member.owned:
            topic = self._log.state.topic_of_id(where.topic)
            if topic is not None:
                found.append(self._assignment(member, TopicPartition(topic.name, where.partition)))
        return sorted(found, key=lambda one: (one.topic_name, one.partition_id))

    def _assignment(self, member: GroupMember, where: TopicPartition) -> AssignmentData:
        below = (where.topic, "partitions", where.partition)
        at = (*self._at, "consumers", member.member_id, "assignments", *below)
        crn = f"{self._crn}/consumer={member.member_id}/assignment={where}"
        return AssignmentData(
            metadata=self._make.metadata(*at, crn=crn),
            cluster_id=self._make.cluster_id,
            consumer_group_id=self._group_id,
            consumer_id=member.member_id,
            topic_name=where.topic,
            partition_id=where.partition,
            partition=self._make.related("topics", *below),
            lag=self._make.related(*self._at, "lags", *below),
        )

    def lag(self, lag: Lag) -> LagData:
        below = (lag.where.topic, "partitions", lag.where.partition)
        member = lag.member
        return LagData(
            metadata=self._make.metadata(
                *self._at, "lags", *below, crn=f"{self._crn}/lag={lag.where}"
            ),
            cluster_id=self._make.cluster_id,
            consumer_group_id=self._group_id,
            topic_name=lag.where.topic,
            partition_id=lag.where.partition,
            current_offset=lag.current_offset,
            log_end_offset=lag.end_offset,
            lag=lag.lag,
            consumer_id="" if member is None else member.member_id,
            instance_id=None if member is None else member.instance_id or None,
            client_id="" if member is None else member.config.client_id,
        )

    def summary(self, behind: list[Lag]) -> LagSummaryData:
        """Of one partition at least."""
        most = max(behind, key=lambda one: one.lag)
        data = self.lag(most)
        return LagSummaryData(
            metadata=self._make.metadata(*self._at, "lag-summary", crn=f"{self._crn}/lag-summary"),
            cluster_id=self._make.cluster_id,
            consumer_group_id=self._group_id,
            max_lag_consumer_id=data.consumer_id,
            max_lag_instance_id=data.instance_id,
            max_lag_client_id=data.client_id,
            max_lag_topic_name=data.topic_name,
            max_lag_partition_id=data.partition_id,
            max_lag=data.lag,
            total_lag=sum(one.lag for one in behind),
            max_lag_consumer=self._make.related(*self._at, "consumers", data.consumer_id),
            max_lag_partition=self._make.related(
                "topics", data.topic_name, "partitions", data.partition_id
            ),
        )
