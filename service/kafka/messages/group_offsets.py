"""Committed offsets of consumer groups."""

from typing import Annotated

from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.schema import (
    Field,
    Int16,
    Int32,
    Int64,
    Message,
    Structure,
    Uuid,
)


class OffsetCommitRequestPartition(Structure):
    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Annotated[Int32, Field("6+")] = -1
    committed_metadata: str | None


class OffsetCommitRequestTopic(Structure):
    name: Annotated[str, Field("2-9")] = ""
    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    partitions: list[OffsetCommitRequestPartition]


class OffsetCommitRequest(Message, api_key=8, versions="2-10", flexible="8+"):
    group_id: str
    generation_id_or_member_epoch: Int32 = -1
    member_id: str
    group_instance_id: Annotated[str | None, Field("7+")] = None
    retention_time_ms: Annotated[Int64, Field("2-4")] = -1
    topics: list[OffsetCommitRequestTopic]


class OffsetCommitResponsePartition(Structure):
    """The result for one partition."""

    partition_index: Int32
    error_code: Int16


class OffsetCommitResponseTopic(Structure):
    name: Annotated[str, Field("2-9")] = ""
    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    partitions: list[OffsetCommitResponsePartition]


class OffsetCommitResponse(Message, api_key=8, versions="2-10", flexible="8+"):
    """The results of an OffsetCommit request."""

    throttle_time_ms: Annotated[Int32, Field("3+")] = 0
    topics: list[OffsetCommitResponseTopic]


class OffsetFetchRequestTopic(Structure):
    """The partitions of a topic, up to version 7."""

    name: str
    partition_indexes: list[Int32]


class OffsetFetchRequestTopics(Structure):
    """The partitions of a topic, from version 8 on."""

    name: Annotated[str, Field("8-9")] = ""
    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    partition_indexes: list[Int32]


class OffsetFetchRequestGroup(Structure):
    """A group and its topics; null topics ask for all."""

    group_id: str
    member_id: Annotated[str | None, Field("9+")] = None
    member_epoch: Annotated[Int32, Field("9+")] = -1
    topics: list[OffsetFetchRequestTopics] | None


class OffsetFetchRequest(Message, api_key=9, versions="1-10", flexible="6+"):
    """Asks for committed offsets. Null topics ask for all. Up to version 7, it has one group."""

    group_id: Annotated[str, Field("1-7")] = ""
    topics: Annotated[list[OffsetFetchRequestTopic] | None, Field("1-7", null="2-7")] = []
    groups: Annotated[list[OffsetFetchRequestGroup], Field("8+")] = []
    require_stable: Annotated[bool, Field("7+")] = False


class OffsetFetchResponsePartition(Structure):
    """The committed offset of a partition or -1, up to version 7."""

    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Annotated[Int32, Field("5-7")] = -1
    metadata: str | None
    error_code: Int16


class OffsetFetchResponseTopic(Structure):
    """The results of a topic, up to version 7."""

    name: str
    partitions: list[OffsetFetchResponsePartition]


class OffsetFetchResponsePartitions(Structure):
    """The committed offset of a partition or -1, from version 8 on."""

    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Int32 = -1
    metadata: str | None
    error_code: Int16


class OffsetFetchResponseTopics(Structure):
    """The results of a topic, from version 8 on."""

    name: Annotated[str, Field("8-9")] = ""
    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    partitions: list[OffsetFetchResponsePartitions]


class OffsetFetchResponseGroup(Structure):
    group_id: str
    topics: list[OffsetFetchResponseTopics]
    error_code: Int16 = 0


class OffsetFetchResponse(Message, api_key=9, versions="1-10", flexible="6+"):
    """The results of an OffsetFetch request."""

    throttle_time_ms: Annotated[Int32, Field("3+")] = 0
    topics: Annotated[list[OffsetFetchResponseTopic], Field("1-7")] = []
    error_code: Annotated[Int16, Field("2-7")] = 0
    groups: Annotated[list[OffsetFetchResponseGroup], Field("8+")] = []


class OffsetDeleteRequestPartition(Structure):
    """A partition whose committed offset is to be deleted."""

    partition_index: Int32


class OffsetDeleteRequestTopic(Structure):
    name: str
    partitions: list[OffsetDeleteRequestPartition]


class OffsetDeleteRequest(Message, api_key=47, versions="0", flexible="none"):
    """Deletes committed offsets of a group."""

    group_id: str
    topics: list[OffsetDeleteRequestTopic]


class OffsetDeleteResponsePartition(Structure):
    """The result for one partition."""

    partition_index: Int32
    error_code: Int16


class OffsetDeleteResponseTopic(Structure):
    name: str
    partitions: list[OffsetDeleteResponsePartition]


class OffsetDeleteResponse(Message, api_key=47, versions="0", flexible="none"):
    """The results of an OffsetDelete request."""

    error_code: Int16
    throttle_time_ms: Int32
    topics: list[OffsetDeleteResponseTopic]
