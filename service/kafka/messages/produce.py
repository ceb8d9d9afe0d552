"""Produce and InitProducerId."""

from typing import Annotated

from tidelog.service.kafka.messages.metadata import LeaderIdAndEpoch, NodeEndpoint
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

PRODUCE_ELEMENTS_MAX = 10_000
"""Topics and partitions of one request. The event loop decodes each Produce request, and this many
elements take 0.02 s."""


class PartitionProduceData(Structure):
    """The record batch for a partition. The records are a slice of the frame."""

    index: Int32
    records: memoryview | None


class TopicProduceData(Structure):
    """The record batches for a topic."""

    name: Annotated[str, Field("3-12")] = ""
    topic_id: Annotated[Uuid, Field("13+")] = ZERO_UUID
    partition_data: list[PartitionProduceData]


class ProduceRequest(
    Message, api_key=0, versions="3-13", flexible="9+", elements_max=PRODUCE_ELEMENTS_MAX
):
    """Appends record batches."""

    transactional_id: str | None = None
    acks: Int16
    timeout_ms: Int32
    topic_data: list[TopicProduceData]


class BatchIndexAndErrorMessage(Structure):
    """A record that the broker refused, by its place in the batch."""

    batch_index: Int32
    batch_index_error_message: str | None = None


class PartitionProduceResponse(Structure):
    """The offset of the first record, or the error."""

    index: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64 = -1
    log_start_offset: Annotated[Int64, Field("5+")] = -1
    record_errors: Annotated[list[BatchIndexAndErrorMessage], Field("8+")] = []
    error_message: Annotated[str | None, Field("8+")] = None
    current_leader: Annotated[LeaderIdAndEpoch | None, Field("10+", tag=0)] = None


class TopicProduceResponse(Structure):
    name: Annotated[str, Field("3-12")] = ""
    topic_id: Annotated[Uuid, Field("13+")] = ZERO_UUID
    partition_responses: list[PartitionProduceResponse]


class ProduceResponse(Message, api_key=0, versions="3-13", flexible="9+"):
    """The results of a Produce request."""

    responses: list[TopicProduceResponse]
    throttle_time_ms: Int32 = 0
    node_endpoints: Annotated[list[NodeEndpoint], Field("10+", tag=0)] = []


class InitProducerIdRequest(Message, api_key=22, versions="0-5", flexible="2+"):
    transactional_id: str | None
    transaction_timeout_ms: Int32
    producer_id: Annotated[Int64, Field("3+")] = -1
    producer_epoch: Annotated[Int16, Field("3+")] = -1


class InitProducerIdResponse(Message, api_key=22, versions="0-5", flexible="2+"):
    """A producer id and its epoch."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64 = -1
    producer_epoch: Int16
