"""ListOffsets and OffsetForLeaderEpoch."""

from typing import Annotated

from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Structure,
)


class ListOffsetsPartition(Structure):
    """A partition and a time in ms; -1 stands for the end, -2 for the beginning."""

    partition_index: Int32
    current_leader_epoch: Annotated[Int32, Field("4+")] = -1
    timestamp: Int64


class ListOffsetsTopic(Structure):
    name: str
    partitions: list[ListOffsetsPartition]


class ListOffsetsRequest(Message, api_key=2, versions="1-11", flexible="6+"):
    """Asks for offsets by time."""

    replica_id: Int32
    isolation_level: Annotated[Int8, Field("2+")] = 0
    topics: list[ListOffsetsTopic]
    timeout_ms: Annotated[Int32, Field("10+")] = 0


class ListOffsetsPartitionResponse(Structure):
    """The first offset at or after the time, or -1."""

    partition_index: Int32
    error_code: Int16
    timestamp: Int64 = -1
    offset: Int64 = -1
    leader_epoch: Annotated[Int32, Field("4+")] = -1


class ListOffsetsTopicResponse(Structure):
    name: str
    partitions: list[ListOffsetsPartitionResponse]


class ListOffsetsResponse(Message, api_key=2, versions="1-11", flexible="6+"):
    """The results of a ListOffsets request."""

    throttle_time_ms: Annotated[Int32, Field("2+")] = 0
    topics: list[ListOffsetsTopicResponse]


class OffsetForLeaderPartition(Structure):
    """A partition and the leader epoch that the client knows."""

    partition: Int32
    current_leader_epoch: Int32 = -1
    leader_epoch: Int32


class OffsetForLeaderTopic(Structure):
    topic: str
    partitions: list[OffsetForLeaderPartition]


class OffsetForLeaderEpochRequest(Message, api_key=23, versions="2-4", flexible="4+"):
    """Asks where leader epochs end."""

    replica_id: Annotated[Int32, Field("3+")] = -2
    topics: list[OffsetForLeaderTopic]


class LeaderEpochEndOffset(Structure):
    """The end offset of the leader epoch, or -1."""

    error_code: Int16
    partition: Int32
    leader_epoch: Int32 = -1
    end_offset: Int64 = -1


class OffsetForLeaderTopicResult(Structure):
    topic: str
    partitions: list[LeaderEpochEndOffset]


class OffsetForLeaderEpochResponse(Message, api_key=23, versions="2-4", flexible="4+"):
    """The results of an OffsetForLeaderEpoch request."""

    throttle_time_ms: Int32
    topics: list[OffsetForLeaderTopicResult]
