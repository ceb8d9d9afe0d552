"""Kafka's error codes, and one table from the log's errors to them.

A code tells a client what to do, so the code of one error depends on the kind of the request: a
producer repeats a batch after NOT_ENOUGH_REPLICAS, and a member of a group looks for its
coordinator after COORDINATOR_NOT_AVAILABLE. UNKNOWN_SERVER_ERROR is fatal for Java's producer, so
it is only for requests that a client must not repeat.
"""

from collections.abc import Mapping
from enum import IntEnum

from tidelog.service.operations.groups import UnknownGroup
from tidelog.service.operations.topics import InvalidAssignment, UnknownTopicId
from tidelog.service.security.caller import Forbidden, Unauthenticated
from tidelog.storage.codec.batch_header import CorruptBatch, TransactionalBatch
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidConfig,
    InvalidPartitions,
    InvalidRequest,
    InvalidTimestamp,
    InvalidTopicName,
    LogError,
    OffsetMetadataTooLarge,
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProducerFenced,
    RecordTooLarge,
    StaleCommit,
    Throttled,
    TopicExists,
    Unavailable,
    UnknownMember,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)


class Code(IntEnum):
    """The error codes of Kafka that a broker uses in its answers."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    NOT_ENOUGH_REPLICAS = 19
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    UNKNOWN_PRODUCER_ID = 59
    UNKNOWN_LEADER_EPOCH = 75
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    THROTTLING_QUOTA_EXCEEDED = 89
    UNKNOWN_TOPIC_ID = 100
    FETCH_SESSION_TOPIC_ID_ERROR = 106


class RequestKind(IntEnum):
    """Kinds of requests; the columns of the table."""

    PRODUCE = 0
    FETCH = 1
    GROUP = 2
    ADMIN = 3


_BAD = (Code.INVALID_RECORD, Code.INVALID_REQUEST, Code.INVALID_REQUEST, Code.INVALID_REQUEST)
_TABLE: Mapping[type[LogError], tuple[Code, Code, Code, Code]] = {
    LogError: (Code.UNKNOWN_SERVER_ERROR,) * 4,
    InvalidRequest: _BAD,
    TopicExists: (*_BAD[:3], Code.TOPIC_ALREADY_EXISTS),
    InvalidTopicName: (*_BAD[:3], Code.INVALID_TOPIC_EXCEPTION),
    InvalidPartitions: (*_BAD[:3], Code.INVALID_PARTITIONS),
    InvalidAssignment: (*_BAD[:3], Code.INVALID_REPLICA_ASSIGNMENT),
    InvalidConfig: (*_BAD[:3], Code.INVALID_CONFIG),
    RecordTooLarge: (Code.MESSAGE_TOO_LARGE, *_BAD[1:]),
    InvalidTimestamp: (Code.INVALID_TIMESTAMP, *_BAD[1:]),
    OffsetMetadataTooLarge: (*_BAD[:2], Code.OFFSET_METADATA_TOO_LARGE, Code.INVALID_REQUEST),
    TransactionalBatch: (Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, *_BAD[1:]),
    CorruptBatch: (Code.CORRUPT_MESSAGE,) * 4,
    UnknownTopic: (Code.UNKNOWN_TOPIC_OR_PARTITION,) * 4,
    UnknownTopicId: (Code.UNKNOWN_TOPIC_ID,) * 4,
    UnknownPartition: (Code.UNKNOWN_TOPIC_OR_PARTITION,) * 4,
    OffsetOutOfRange: (Code.UNKNOWN_SERVER_ERROR, *(Code.OFFSET_OUT_OF_RANGE,) * 3),
    ProducerFenced: (Code.INVALID_PRODUCER_EPOCH,) * 4,
    UnknownProducer: (Code.UNKNOWN_PRODUCER_ID,) * 4,
    OutOfOrderSequence: (Code.OUT_OF_ORDER_SEQUENCE_NUMBER,) * 4,
    StaleCommit: (Code.INVALID_RECORD, *(Code.INVALID_REQUEST,) * 3),
    IllegalGeneration: (Code.ILLEGAL_GENERATION,) * 4,
    InconsistentGroupProtocol: (Code.INCONSISTENT_GROUP_PROTOCOL,) * 4,
    UnknownMember: (Code.UNKNOWN_MEMBER_ID,) * 4,
    UnknownGroup: (Code.GROUP_ID_NOT_FOUND,) * 4,
    GroupNotEmpty: (Code.NON_EMPTY_GROUP,) * 4,
    Throttled: (
        Code.NOT_ENOUGH_REPLICAS,
        Code.KAFKA_STORAGE_ERROR,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.THROTTLING_QUOTA_EXCEEDED,
    ),
    Unavailable: (
        Code.NOT_ENOUGH_REPLICAS,
        Code.KAFKA_STORAGE_ERROR,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.REQUEST_TIMED_OUT,
    ),
    # A producer repeats the batch. If the producer is idempotent, it then gets the first offset.
    CommitUnknown: (Code.REQUEST_TIMED_OUT,) * 4,
    Corrupt: (Code.UNKNOWN_SERVER_ERROR, Code.CORRUPT_MESSAGE, *(Code.UNKNOWN_SERVER_ERROR,) * 2),
    Forbidden: (
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
    ),
    Unauthenticated: (Code.SASL_AUTHENTICATION_FAILED,) * 4,
}


def code_of(error: LogError, kind: RequestKind) -> Code:
    """Return the code that answers an error of the log in a request of this kind."""
    return next(_TABLE[error_type] for error_type in type(error).__mro__ if error_type in _TABLE)[
        kind
    ]


def message_of(error: LogError) -> str:
    """Return the text for a client. The encoders bound it, because messages quote requests."""
    return str(error).encode("utf-8", "replace").decode()
