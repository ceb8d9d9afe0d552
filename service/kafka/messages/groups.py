"""Membership of consumer groups (the classic protocol), and their administration."""

from typing import Annotated

from tidelog.service.kafka.messages.primitives import OPERATIONS_NOT_ASKED
from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Message,
    Structure,
    Uuid,
)


class JoinGroupRequestProtocol(Structure):
    """An assignor and the member's subscription for it."""

    name: str
    metadata: bytes


class JoinGroupRequest(Message, api_key=11, versions="0-9", flexible="6+"):
    group_id: str
    session_timeout_ms: Int32
    rebalance_timeout_ms: Annotated[Int32, Field("1+")] = -1
    member_id: str
    group_instance_id: Annotated[str | None, Field("5+")] = None
    protocol_type: str
    protocols: list[JoinGroupRequestProtocol]
    reason: Annotated[str | None, Field("8+")] = None


class JoinGroupResponseMember(Structure):
    """A member and its subscription, for the leader."""

    member_id: str
    group_instance_id: Annotated[str | None, Field("5+")] = None
    metadata: bytes


class JoinGroupResponse(Message, api_key=11, versions="0-9", flexible="6+"):
    """The generation that the member joined; for the leader, all members."""

    throttle_time_ms: Annotated[Int32, Field("2+")] = 0
    error_code: Int16
    generation_id: Int32 = -1
    protocol_type: Annotated[str | None, Field("7+")] = None
    protocol_name: Annotated[str | None, Field(null="7+")]
    leader: str
    skip_assignment: Annotated[bool, Field("9+")] = False
    member_id: str
    members: list[JoinGroupResponseMember]


class SyncGroupRequestAssignment(Structure):
    """The assignment of one member."""

    member_id: str
    assignment: bytes


class SyncGroupRequest(Message, api_key=14, versions="0-5", flexible="4+"):
    """Asks for the assignment of the member. The leader's request has the assignments of all."""

    group_id: str
    generation_id: Int32
    member_id: str
    group_instance_id: Annotated[str | None, Field("3+")] = None
    protocol_type: Annotated[str | None, Field("5+")] = None
    protocol_name: Annotated[str | None, Field("5+")] = None
    assignments: list[SyncGroupRequestAssignment]


class SyncGroupResponse(Message, api_key=14, versions="0-5", flexible="4+"):
    """The assignment of the member."""

    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    error_code: Int16
    protocol_type: Annotated[str | None, Field("5+")] = None
    protocol_name: Annotated[str | None, Field("5+")] = None
    assignment: bytes


class HeartbeatRequest(Message, api_key=12, versions="0-4", flexible="4+"):
    """Keeps a member in its group."""

    group_id: str
    generation_id: Int32
    member_id: str
    group_instance_id: Annotated[str | None, Field("3+")] = None


class HeartbeatResponse(Message, api_key=12, versions="0-4", flexible="4+"):
    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    error_code: Int16


class MemberIdentity(Structure):
    """A member that leaves."""

    member_id: str
    group_instance_id: str | None = None
    reason: Annotated[str | None, Field("5+")] = None


class LeaveGroupRequest(Message, api_key=13, versions="0-5", flexible="4+"):
    """Takes members out of a group; one member up to version 2."""

    group_id: str
    member_id: Annotated[str, Field("0-2")] = ""
    members: Annotated[list[MemberIdentity], Field("3+")] = []


class MemberResponse(Structure):
    """The result for one member."""

    member_id: str
    group_instance_id: str | None
    error_code: Int16


class LeaveGroupResponse(Message, api_key=13, versions="0-5", flexible="4+"):
    """The results of a LeaveGroup request."""

    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    error_code: Int16
    members: Annotated[list[MemberResponse], Field("3+")] = []


class ListGroupsRequest(Message, api_key=16, versions="0-5", flexible="3+"):
    """Asks for the groups that the broker coordinates."""

    states_filter: Annotated[list[str], Field("4+")] = []
    types_filter: Annotated[list[str], Field("5+")] = []


class ListedGroup(Structure):
    """A group in a list."""

    group_id: str
    protocol_type: str
    group_state: Annotated[str, Field("4+")] = ""
    group_type: Annotated[str, Field("5+")] = ""


class ListGroupsResponse(Message, api_key=16, versions="0-5", flexible="3+"):
    """The groups that the broker coordinates."""

    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    error_code: Int16
    groups: list[ListedGroup]


class DescribeGroupsRequest(Message, api_key=15, versions="0-6", flexible="5+"):
    """Asks for the members of groups."""

    groups: list[str]
    include_authorized_operations: Annotated[bool, Field("3+")] = False


class DescribedGroupMember(Structure):
    member_id: str
    group_instance_id: Annotated[str | None, Field("4+")] = None
    client_id: str
    client_host: str
    member_metadata: bytes
    member_assignment: bytes


class DescribedGroup(Structure):
    """A group and its members, or the error for this group."""

    error_code: Int16
    error_message: Annotated[str | None, Field("6+")] = None
    group_id: str
    group_state: str
    protocol_type: str
    protocol_data: str
    members: list[DescribedGroupMember]
    authorized_operations: Annotated[Int32, Field("3+")] = OPERATIONS_NOT_ASKED


class DescribeGroupsResponse(Message, api_key=15, versions="0-6", flexible="5+"):
    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    groups: list[DescribedGroup]


class DeleteGroupsRequest(Message, api_key=42, versions="0-2", flexible="2+"):
    """Deletes groups without members."""

    groups_names: list[str]


class DeletableGroupResult(Structure):
    group_id: str
    error_code: Int16


class DeleteGroupsResponse(Message, api_key=42, versions="0-2", flexible="2+"):
    """The results of a DeleteGroups request."""

    throttle_time_ms: Int32
    results: list[DeletableGroupResult]


class ConsumerGroupHeartbeatRequestTopic(Structure):
    """The partitions of a topic that the member has."""

    topic_id: Uuid
    partitions: list[Int32]


class ConsumerGroupHeartbeatRequest(Message, api_key=68, versions="0-1", flexible="0+"):
    """Joins a group of the protocol of KIP-848, stays in it, or leaves it."""

    group_id: str
    member_id: str
    member_epoch: Int32
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: Int32 = -1
    subscribed_topic_names: list[str] | None = None
    subscribed_topic_regex: Annotated[str | None, Field("1+")] = None
    server_assignor: str | None = None
    topic_partitions: list[ConsumerGroupHeartbeatRequestTopic] | None = None


class ConsumerGroupHeartbeatResponse(Message, api_key=68, versions="0-1", flexible="0+"):
    """A refusal. In Kafka, `assignment` is a structure, whose null is the byte -1."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: str | None = None
    member_id: str | None = None
    member_epoch: Int32
    heartbeat_interval_ms: Int32
    assignment: Int8 = -1
