"""Fetch."""

from typing import Annotated

from tidelog.service.kafka.messages.metadata import LeaderIdAndEpoch, NodeEndpoint
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Pieces,
    Structure,
    Uuid,
)


class ReplicaState(Structure):
    """The follower that fetches."""

    replica_id: Int32 = -1
    replica_epoch: Int64 = -1


class FetchPartition(Structure):
    """A partition and the offset to fetch from."""

    partition: Int32
    current_leader_epoch: Annotated[Int32, Field("9+")] = -1
    fetch_offset: Int64
    last_fetched_epoch: Annotated[Int32, Field("12+")] = -1
    log_start_offset: Annotated[Int64, Field("5+")] = -1
    partition_max_bytes: Int32
    replica_directory_id: Annotated[Uuid, Field("17+", tag=0)] = ZERO_UUID
    high_watermark: Annotated[Int64, Field("18+", tag=1)] = 0x7FFF_FFFF_FFFF_FFFF


class FetchTopic(Structure):
    topic: Annotated[str, Field("4-12")] = ""
    topic_id: Annotated[Uuid, Field("13+")] = ZERO_UUID
    partitions: list[FetchPartition]


class ForgottenTopic(Structure):
    """Partitions that the fetch session drops."""

    topic: Annotated[str, Field("7-12")] = ""
    topic_id: Annotated[Uuid, Field("13+")] = ZERO_UUID
    partitions: list[Int32]


class FetchRequest(Message, api_key=1, versions="4-18", flexible="12+"):
    """Fetches record batches. In a session, it names only changed partitions."""

    cluster_id: Annotated[str | None, Field("12+", tag=0)] = None
    replica_id: Annotated[Int32, Field("4-14")] = -1
    replica_state: Annotated[ReplicaState | None, Field("15+", tag=1)] = None
    max_wait_ms: Int32
    min_bytes: Int32
    max_bytes: Int32 = 0x7FFF_FFFF
    isolation_level: Int8 = 0
    session_id: Annotated[Int32, Field("7+")] = 0
    session_epoch: Annotated[Int32, Field("7+")] = -1
    topics: list[FetchTopic]
    forgotten_topics_data: Annotated[list[ForgottenTopic], Field("7+")] = []
    rack_id: Annotated[str, Field("11+")] = ""


class EpochEndOffset(Structure):
    """The largest leader epoch of the broker, and where it ends."""

    epoch: Int32 = -1
    end_offset: Int64 = -1


class SnapshotId(Structure):
    """The end of a snapshot of the metadata log."""

    end_offset: Int64 = -1
    epoch: Int32 = -1


class AbortedTransaction(Structure):
    """A transaction whose records the consumer drops."""

    producer_id: Int64
    first_offset: Int64


class FetchablePartitionResponse(Structure):
    """Record batches of a partition, or the error.

    With an error, the records are empty, not null.
    """

    partition_index: Int32
    error_code: Int16
    high_watermark: Int64
    last_stable_offset: Int64 = -1
    log_start_offset: Annotated[Int64, Field("5+")] = -1
    diverging_epoch: Annotated[EpochEndOffset | None, Field("12+", tag=0)] = None
    current_leader: Annotated[LeaderIdAndEpoch | None, Field("12+", tag=1)] = None
    snapshot_id: Annotated[SnapshotId | None, Field("12+", tag=2)] = None
    aborted_transactions: list[AbortedTransaction] | None
    preferred_read_replica: Annotated[Int32, Field("11+")] = -1
    records: Pieces | None


class FetchableTopicResponse(Structure):
    topic: Annotated[str, Field("4-12")] = ""
    topic_id: Annotated[Uuid, Field("13+")] = ZERO_UUID
    partitions: list[FetchablePartitionResponse]


class FetchResponse(Message, api_key=1, versions="4-18", flexible="12+"):
    """The results of a Fetch request."""

    throttle_time_ms: Int32
    error_code: Annotated[Int16, Field("7+")] = 0
    session_id: Annotated[Int32, Field("7+")] = 0
    responses: list[FetchableTopicResponse]
    node_endpoints: Annotated[list[NodeEndpoint], Field("16+", tag=0)] = []
