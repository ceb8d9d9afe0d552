"""Where to send requests: brokers, topics, partitions, coordinators of groups."""

from typing import Annotated

from tidelog.service.kafka.messages.primitives import OPERATIONS_NOT_ASKED, ZERO_UUID
from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Message,
    Structure,
    Uuid,
)


class LeaderIdAndEpoch(Structure):
    """The broker that leads the partition now."""

    leader_id: Int32 = -1
    leader_epoch: Int32 = -1


class NodeEndpoint(Structure):
    """Where clients reach a broker."""

    node_id: Int32
    host: str
    port: Int32
    rack: str | None = None


class MetadataRequestTopic(Structure):
    """A topic by its name; from version 10 on, by its id with a null name."""

    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    name: Annotated[str | None, Field(null="10+")]


class MetadataRequest(Message, api_key=3, versions="0-13", flexible="9+"):
    """Asks for brokers and topics. Null topics ask for all; in version 0, an empty list does."""

    topics: Annotated[list[MetadataRequestTopic] | None, Field(null="1+")]
    allow_auto_topic_creation: Annotated[bool, Field("4+")] = True
    include_cluster_authorized_operations: Annotated[bool, Field("8-10")] = False
    include_topic_authorized_operations: Annotated[bool, Field("8+")] = False


class MetadataResponseBroker(Structure):
    """Where clients reach a broker."""

    node_id: Int32
    host: str
    port: Int32
    rack: Annotated[str | None, Field("1+")] = None


class MetadataResponsePartition(Structure):
    """The leader and the replicas of a partition."""

    error_code: Int16
    partition_index: Int32
    leader_id: Int32
    leader_epoch: Annotated[Int32, Field("7+")] = -1
    replica_nodes: list[Int32]
    isr_nodes: list[Int32]
    offline_replicas: Annotated[list[Int32], Field("5+")] = []


class MetadataResponseTopic(Structure):
    """A topic, or the error for this topic."""

    error_code: Int16
    name: Annotated[str | None, Field(null="12+")]
    topic_id: Annotated[Uuid, Field("10+")] = ZERO_UUID
    is_internal: Annotated[bool, Field("1+")] = False
    partitions: list[MetadataResponsePartition]
    topic_authorized_operations: Annotated[Int32, Field("8+")] = OPERATIONS_NOT_ASKED


class MetadataResponse(Message, api_key=3, versions="0-13", flexible="9+"):
    """The brokers of the cluster and the topics of the request."""

    throttle_time_ms: Annotated[Int32, Field("3+")] = 0
    brokers: list[MetadataResponseBroker]
    cluster_id: Annotated[str | None, Field("2+")] = None
    controller_id: Annotated[Int32, Field("1+")] = -1
    topics: list[MetadataResponseTopic]
    cluster_authorized_operations: Annotated[Int32, Field("8-10")] = OPERATIONS_NOT_ASKED
    error_code: Annotated[Int16, Field("13+")] = 0


class DescribeClusterRequest(Message, api_key=60, versions="0-2", flexible="0+"):
    """Asks for the brokers of the cluster."""

    include_cluster_authorized_operations: bool
    endpoint_type: Annotated[Int8, Field("1+")] = 1
    include_fenced_brokers: Annotated[bool, Field("2+")] = False


class DescribeClusterBroker(Structure):
    """Where clients reach a broker."""

    broker_id: Int32
    host: str
    port: Int32
    rack: str | None = None
    is_fenced: Annotated[bool, Field("2+")] = False


class DescribeClusterResponse(Message, api_key=60, versions="0-2", flexible="0+"):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: str | None = None
    endpoint_type: Annotated[Int8, Field("1+")] = 1
    cluster_id: str
    controller_id: Int32 = -1
    brokers: list[DescribeClusterBroker]
    cluster_authorized_operations: Int32 = OPERATIONS_NOT_ASKED


class TopicRequest(Structure):
    """A topic by its name."""

    name: str


class Cursor(Structure):
    """Where the next page of partitions begins."""

    topic_name: str
    partition_index: Int32


class DescribeTopicPartitionsRequest(Message, api_key=75, versions="0", flexible="0+"):
    """Asks for the partitions of topics, a page at a time."""

    topics: list[TopicRequest]
    response_partition_limit: Int32 = 2000
    cursor: Cursor | None = None


class DescribeTopicPartitionsResponsePartition(Structure):
    """The leader and the replicas of a partition."""

    error_code: Int16
    partition_index: Int32
    leader_id: Int32
    leader_epoch: Int32 = -1
    replica_nodes: list[Int32]
    isr_nodes: list[Int32]
    # Kafka's default is null, but Java's admin client fails at null.
    eligible_leader_replicas: list[Int32] | None = []
    last_known_elr: list[Int32] | None = []
    offline_replicas: list[Int32]


class DescribeTopicPartitionsResponseTopic(Structure):
    """A topic and its partitions, or the error for this topic."""

    error_code: Int16
    name: str | None
    topic_id: Uuid
    is_internal: bool = False
    partitions: list[DescribeTopicPartitionsResponsePartition]
    topic_authorized_operations: Int32 = OPERATIONS_NOT_ASKED


class DescribeTopicPartitionsResponse(Message, api_key=75, versions="0", flexible="0+"):
    """A page of partitions, and where the next begins."""

    throttle_time_ms: Int32
    topics: list[DescribeTopicPartitionsResponseTopic]
    next_cursor: Cursor | None = None


class FindCoordinatorRequest(Message, api_key=10, versions="0-6", flexible="3+"):
    """Asks for the coordinators of groups or transactions; one key up to version 3."""

    key: Annotated[str, Field("0-3")] = ""
    key_type: Annotated[Int8, Field("1+")] = 0
    coordinator_keys: Annotated[list[str], Field("4+")] = []


class KeyCoordinator(Structure):
    """The coordinator of one key."""

    key: str
    node_id: Int32
    host: str
    port: Int32
    error_code: Int16
    error_message: str | None


class FindCoordinatorResponse(Message, api_key=10, versions="0-6", flexible="3+"):
    """The coordinators; up to version 3, the one coordinator in fields of its own."""

    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    error_code: Annotated[Int16, Field("0-3")] = 0
    error_message: Annotated[str | None, Field("1-3")] = None
    node_id: Annotated[Int32, Field("0-3")] = 0
    host: Annotated[str, Field("0-3")] = ""
    port: Annotated[Int32, Field("0-3")] = 0
    coordinators: Annotated[list[KeyCoordinator], Field("4+")] = []
