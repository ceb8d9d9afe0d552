"""DescribeLogDirs and ListPartitionReassignments: where partitions are stored."""

from typing import Annotated

from tidelog.service.kafka.messages.schema import (
    Field,
    Int16,
    Int32,
    Int64,
    Message,
    Structure,
)


class ListPartitionReassignmentsTopics(Structure):
    name: str
    partition_indexes: list[Int32]


class ListPartitionReassignmentsRequest(Message, api_key=46, versions="0", flexible="0+"):
    """Asks which partitions change their replicas; null topics ask for all."""

    timeout_ms: Int32 = 60000
    topics: list[ListPartitionReassignmentsTopics] | None = None


class OngoingPartitionReassignment(Structure):
    """A partition whose replicas change."""

    partition_index: Int32
    replicas: list[Int32]
    adding_replicas: list[Int32]
    removing_replicas: list[Int32]


class OngoingTopicReassignment(Structure):
    name: str
    partitions: list[OngoingPartitionReassignment]


class ListPartitionReassignmentsResponse(Message, api_key=46, versions="0", flexible="0+"):
    """The partitions that change their replicas."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: str | None
    topics: list[OngoingTopicReassignment]


class DescribableLogDirTopic(Structure):
    topic: str
    partitions: list[Int32]


class DescribeLogDirsRequest(Message, api_key=35, versions="1-4", flexible="2+"):
    """Asks for the sizes of partitions; null topics ask for all."""

    topics: list[DescribableLogDirTopic] | None


class DescribeLogDirsPartition(Structure):
    partition_index: Int32
    partition_size: Int64
    offset_lag: Int64
    is_future_key: bool


class DescribeLogDirsTopic(Structure):
    name: str
    partitions: list[DescribeLogDirsPartition]


class DescribeLogDirsResult(Structure):
    """A directory of the broker and the partitions in it."""

    error_code: Int16
    log_dir: str
    topics: list[DescribeLogDirsTopic]
    total_bytes: Annotated[Int64, Field("4+")] = -1
    usable_bytes: Annotated[Int64, Field("4+")] = -1


class DescribeLogDirsResponse(Message, api_key=35, versions="1-4", flexible="2+"):
    """The directories of the broker."""

    throttle_time_ms: Int32
    error_code: Annotated[Int16, Field("3+")] = 0
    results: list[DescribeLogDirsResult]
