"""Resources of consumer groups in the v3 dialect.

The module has their fields, and their values from the cluster state. service.telemetry.group_lags
computes the lag of a group in a partition.
"""

import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from tidelog.service.formats.resources_v3 import (
    BROKER_ID,
    Related,
    Resource,
    ResourceFactory,
    ResourceList,
)
from tidelog.service.telemetry.group_lags import Lag, LagSummary
from tidelog.storage.broker import Broker
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.groups.join_backoff import HeldMember
from tidelog.storage.state.group_state import (
    DEFAULT_ASSIGNOR,
    ClientMember,
    ConsumerGroup,
    GroupMember,
)


class _GroupResource(Resource):
    consumer_group_id: str


G = TypeVar("G", bound=_GroupResource)


GroupState = Literal["STABLE", "PREPARING_REBALANCE", "EMPTY"]


def state_of(group: ConsumerGroup | None) -> GroupState:
    """Return the state of a group, as the cluster state has it."""
    if group is None or not group.members:
        return "EMPTY"
    return "PREPARING_REBALANCE" if group.is_preparing else "STABLE"


def assignor_of(group: ConsumerGroup | None) -> str:
    if group is None:
        return DEFAULT_ASSIGNOR
    return group.protocol if group.is_assigned_by_clients else group.assignor


class GroupData(_GroupResource):
    kind: Literal["KafkaConsumerGroup"] = "KafkaConsumerGroup"
    is_simple: bool = Field(description="the group has no members")
    partition_assignor: str = Field(examples=["sticky"])
    state: GroupState
    type: Literal["CLASSIC"] = "CLASSIC"
    assigned_by: Literal["LOG", "CLIENTS"] = Field(
        description="LOG: the log assigns partitions, as to consumer instances. CLIENTS: a member "
        "does, as in groups of Kafka clients. Not in Confluent's API"
    )
    is_mixed_consumer_group: bool = False
    generation: int = Field(description="grows with every new assignment; not in Confluent's API")
    coordinator: Related
    consumers: Related
    lag_summary: Related


class HeldMemberData(BaseModel):
    """A client whose next join must wait, because too many of its members had short lives."""

    consumer_id: str = Field(description="the name in its last join")
    instance_id: str | None = Field(description="`group.instance.id` of a static member")
    client_id: str
    host: str = Field(description="the client's address; empty if unknown")
    short_lives: int = Field(
        description="members of this client that, in the last five minutes, ended or changed their "
        "subscription within a minute of their join"
    )
    retry_after_ms: int = Field(description="time until the coordinator accepts its next join")


class GroupDescription(GroupData):
    """A group with its held members, which only the group's coordinator knows."""

    held_members: list[HeldMemberData] | None = Field(
        description="null if the coordinator does not answer; not in Confluent's API"
    )


class ConsumerData(_GroupResource):
    kind: Literal["KafkaConsumer"] = "KafkaConsumer"
    consumer_id: str
    instance_id: str | None = Field(description="`group.instance.id` of a static member")
    client_id: str
    host: str = Field(
        description="address of a member that a Kafka client assigned, else empty; not in "
        "Confluent's API"
    )
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
    current_offset: int = Field(
        description="the committed offset; if there is none, the offset at which the member starts"
    )
    is_committed: bool = Field(
        description="the group has a committed offset; not in Confluent's API"
    )
    log_end_offset: int
    lag: int
    lag_seconds: float | None = Field(
        description="age of the oldest record that the group has not read; null if it is not "
        "known; not in Confluent's API"
    )
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
    lag_seconds: float | None = Field(
        description="the largest of all partitions where it is known; not in Confluent's API"
    )
    max_lag_consumer: Related
    max_lag_partition: Related


MOST = ("consumer_id", "instance_id", "client_id", "topic_name", "partition_id")
"""Fields that a summary copies from the partition with the largest lag."""


D = TypeVar("D", bound=GroupData)


class GroupList(ResourceList[GroupData]):
    kind: Literal["KafkaConsumerGroupList"] = "KafkaConsumerGroupList"


class ConsumerList(ResourceList[ConsumerData]):
    kind: Literal["KafkaConsumerList"] = "KafkaConsumerList"


class AssignmentList(ResourceList[AssignmentData]):
    kind: Literal["KafkaConsumerAssignmentList"] = "KafkaConsumerAssignmentList"


class LagList(ResourceList[LagData]):
    kind: Literal["KafkaConsumerLagList"] = "KafkaConsumerLagList"


class GroupResources:
    """The factory of the resources of one group, for one response."""

    def __init__(self, broker: Broker, make: ResourceFactory, group_id: str) -> None:
        self._broker = broker
        self._make = make
        self._group_id = group_id
        self._at: tuple[str | int, ...] = ("consumer-groups", group_id)

    def group(self) -> GroupData:
        return self._group(GroupData)

    def description(self, held_members: list[HeldMember] | None) -> GroupDescription:
        """Return the group with its held members.

        `held_members` is None if the coordinator does not answer.
        """
        shown = None
        if held_members is not None:
            shown = [
                HeldMemberData(
                    consumer_id=member.member_id,
                    instance_id=member.client.instance_id or None,
                    client_id=member.client.client_id,
                    host=member.client.host,
                    short_lives=member.short_lives,
                    retry_after_ms=math.ceil(member.wait_s * 1000),
                )
                for member in held_members
            ]
        return self._group(GroupDescription, held_members=shown)

    def _coordinator(self) -> int:
        """Return the id of the group's coordinator.

        If the group has no members, return the id of the broker that would become its coordinator.
        The broker that answers has the id 1.
        """
        coordinator_id = self._broker.groups.coordinator_of(self._group_id)
        peers = self._broker.cluster.members().peers
        return next((peer.number for peer in peers if peer.id == coordinator_id), BROKER_ID)

    def _group(self, kind: type[D], **fields: Any) -> D:
        group = self._broker.state.members.get(self._group_id)
        has_members = group is not None and bool(group.members)
        return self._create(
            kind,
            "",
            (),
            **fields,
            is_simple=not has_members,
            partition_assignor=assignor_of(group),
            state=state_of(group),
            assigned_by="CLIENTS" if group and group.is_assigned_by_clients else "LOG",
            generation=0 if group is None else group.generation,
            coordinator=self._make.related("brokers", self._coordinator()),
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
            host=member.host.lstrip("/") if isinstance(member, ClientMember) else "",
            assignments=self._make.related(*self._at, *below, "assignments"),
        )

    def assignment(self, member: GroupMember, partition: TopicPartition) -> AssignmentData:
        partition_path = (partition.topic, "partitions", partition.partition)
        return self._create(
            AssignmentData,
            f"/consumer={member.member_id}/assignment={partition}",
            ("consumers", member.member_id, "assignments", *partition_path),
            consumer_id=member.member_id,
            topic_name=partition.topic,
            partition_id=partition.partition,
            partition=self._make.related("topics", *partition_path),
            lag=self._make.related(*self._at, "lags", *partition_path),
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
            is_committed=lag.is_committed,
            log_end_offset=lag.end_offset,
            lag=lag.lag,
            lag_seconds=lag.seconds,
            consumer_id="" if member is None else member.member_id,
            instance_id=None if member is None else member.instance_id or None,
            client_id="" if member is None else member.config.client_id,
        )

    def summary(self, summary: LagSummary) -> LagSummaryData | None:
        """Return the largest lag and the total, or None if the group has no lag."""
        if summary.largest is None:
            return None
        most = self.lag(summary.largest)
        return self._create(
            LagSummaryData,
            "/lag-summary",
            ("lag-summary",),
            **{f"max_lag_{name}": getattr(most, name) for name in MOST},
            max_lag=most.lag,
            total_lag=summary.total,
            lag_seconds=summary.seconds,
            max_lag_consumer=self._make.related(*self._at, "consumers", most.consumer_id),
            max_lag_partition=self._make.related(
                "topics", most.topic_name, "partitions", most.partition_id
            ),
        )

    def _create(self, kind: type[G], crn: str, below: tuple[str | int, ...], **fields: Any) -> G:
        """Create a resource of the group.

        Its path and its name begin with the path and the name of the group.
        """
        return self._make.create(
            kind,
            f"/consumer-group={self._group_id}{crn}",
            (*self._at, *below),
            consumer_group_id=self._group_id,
            **fields,
        )
