"""Administration of topics and their partitions."""

from typing import Annotated

from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Structure,
    Uuid,
)


class CreatableReplicaAssignment(Structure):
    """The brokers that the client wants for a partition."""

    partition_index: Int32
    broker_ids: list[Int32]


class CreatableTopicConfig(Structure):
    name: str
    value: str | None


class CreatableTopic(Structure):
    """A topic to create; -1 asks for the default of the broker."""

    name: str
    num_partitions: Int32
    replication_factor: Int16
    assignments: list[CreatableReplicaAssignment]
    configs: list[CreatableTopicConfig]


class CreateTopicsRequest(Message, api_key=19, versions="2-7", flexible="5+"):
    topics: list[CreatableTopic]
    timeout_ms: Int32 = 60000
    validate_only: bool = False


class CreatableTopicConfigs(Structure):
    """A config of the created topic."""

    name: str
    value: str | None
    read_only: bool
    config_source: Int8 = -1
    is_sensitive: bool


class CreatableTopicResult(Structure):
    """The created topic, or the error."""

    name: str
    topic_id: Annotated[Uuid, Field("7+")] = ZERO_UUID
    error_code: Int16
    error_message: str | None
    topic_config_error_code: Annotated[Int16, Field("5+", tag=0)] = 0
    num_partitions: Annotated[Int32, Field("5+")] = -1
    replication_factor: Annotated[Int16, Field("5+")] = -1
    configs: Annotated[list[CreatableTopicConfigs] | None, Field("5+")] = None


class CreateTopicsResponse(Message, api_key=19, versions="2-7", flexible="5+"):
    """The results of a CreateTopics request."""

    throttle_time_ms: Int32
    topics: list[CreatableTopicResult]


class DeleteTopicState(Structure):
    """A topic by its name or, with a null name, by its id."""

    name: str | None = None
    topic_id: Uuid


class DeleteTopicsRequest(Message, api_key=20, versions="1-6", flexible="4+"):
    """Deletes topics; by their names alone up to version 5."""

    topics: Annotated[list[DeleteTopicState], Field("6+")] = []
    topic_names: Annotated[list[str], Field("1-5")] = []
    timeout_ms: Int32


class DeletableTopicResult(Structure):
    name: Annotated[str | None, Field(null="6+")]
    topic_id: Annotated[Uuid, Field("6+")] = ZERO_UUID
    error_code: Int16
    error_message: Annotated[str | None, Field("5+")] = None


class DeleteTopicsResponse(Message, api_key=20, versions="1-6", flexible="4+"):
    """The results of a DeleteTopics request."""

    throttle_time_ms: Int32
    responses: list[DeletableTopicResult]


class CreatePartitionsAssignment(Structure):
    """The brokers that the client wants for a new partition."""

    broker_ids: list[Int32]


class CreatePartitionsTopic(Structure):
    """A topic and its new count of partitions."""

    name: str
    count: Int32
    assignments: list[CreatePartitionsAssignment] | None


class CreatePartitionsRequest(Message, api_key=37, versions="0-3", flexible="2+"):
    topics: list[CreatePartitionsTopic]
    timeout_ms: Int32
    validate_only: bool


class CreatePartitionsTopicResult(Structure):
    name: str
    error_code: Int16
    error_message: str | None = None


class CreatePartitionsResponse(Message, api_key=37, versions="0-3", flexible="2+"):
    """The results of a CreatePartitions request."""

    throttle_time_ms: Int32
    results: list[CreatePartitionsTopicResult]


class DeleteRecordsPartition(Structure):
    """A partition and the offset of its first record to keep; -1 keeps none."""

    partition_index: Int32
    offset: Int64


class DeleteRecordsTopic(Structure):
    name: str
    partitions: list[DeleteRecordsPartition]


class DeleteRecordsRequest(Message, api_key=21, versions="0-2", flexible="2+"):
    """Deletes the oldest records of partitions."""

    topics: list[DeleteRecordsTopic]
    timeout_ms: Int32


class DeleteRecordsPartitionResult(Structure):
    """The new log start offset of a partition, or the error."""

    partition_index: Int32
    low_watermark: Int64
    error_code: Int16


class DeleteRecordsTopicResult(Structure):
    name: str
    partitions: list[DeleteRecordsPartitionResult]


class DeleteRecordsResponse(Message, api_key=21, versions="0-2", flexible="2+"):
    """The results of a DeleteRecords request."""

    throttle_time_ms: Int32
    topics: list[DeleteRecordsTopicResult]
