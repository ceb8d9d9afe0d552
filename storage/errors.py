"""Every error that the log raises; a class exists only where a caller acts differently.

    LogError
    ├── InvalidRequest          the caller's fault, nothing was written          (400, 422)
    │   ├── RecordTooLarge      over max.message.bytes or the request's bound     (413)
    │   ├── IdempotencyMismatch the key was used for another body                 (422)
    │   ├── OffsetMetadataTooLarge  over offset.metadata.max.bytes                (422)
    │   ├── TopicExists                                                           (400)
    │   ├── MemberExists        the group has a member of that name               (409)
    │   ├── NotAssigned         the partition is none of the member's             (409)
    │   ├── AssignedOtherwise   subscribed and assigned by hand exclude each other (409)
    │   └── InvalidConfig       unknown topic config or value                     (400)
    ├── UnknownTopic / UnknownPartition                                           (404)
    ├── OffsetOutOfRange        carries the valid range                           (400)
    ├── StaleCommit             what it builds on is not so any more              (409)
    │   ├── ProducerFenced      a newer instance of the producer has taken over
    │   ├── OutOfOrderSequence  a producer's batch came before the one it follows
    │   ├── IllegalGeneration   the group has gone on without this member
    │   ├── UnknownMember       the group has no such member, or only members may do this
    │   └── GroupNotEmpty       it has members, and this is for groups without
    ├── Throttled               a bound was reached, come back later              (429)
    ├── Unavailable             definitely not done, try again                    (503)
    │   └── StoreRefused        the store said no and stored nothing
    ├── CommitUnknown           nobody knows yet: retry with the same key         (504)
    ├── Corrupt                 bytes that do not verify; names the object        (500)
    ├── NotFound                no such object (inside storage/ only)
    └── StoreUnfit              the store cannot carry a log: probe, version, foreign cluster

Messages are one lower-case line: what, where, which value, what to do. Facts are attributes.
"""


class LogError(Exception):
    """Root of all errors of the log."""


class InvalidRequest(LogError):
    """The request can never succeed as it stands."""


class RecordTooLarge(InvalidRequest):
    """A record or a body is over its bound."""


class IdempotencyMismatch(InvalidRequest):
    """The Idempotency-Key is remembered for a request with another body."""


class OffsetMetadataTooLarge(InvalidRequest):
    """The note beside a committed offset is over its bound."""


class TopicExists(InvalidRequest):
    """A topic of that name exists."""


class MemberExists(InvalidRequest):
    """The group has a member of that name."""


class NotAssigned(InvalidRequest):
    """The member does not read that partition."""


class AssignedOtherwise(InvalidRequest):
    """A member subscribes, or is assigned partitions by hand: Kafka's words for both at once."""

    def __init__(self) -> None:
        super().__init__(
            "IllegalStateError: You must choose only one way to configure your consumer: (1) "
            "subscribe to specific topics by name, (2) subscribe to topics matching a regex "
            "pattern, (3) assign itself specific topic-partitions."
        )


class InvalidConfig(InvalidRequest):
    """A topic config that does not exist, or a value it cannot take."""


class UnknownTopic(LogError):
    """No topic of that name."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist")
        self.topic = topic


class UnknownPartition(LogError):
    """The topic has no such partition."""

    def __init__(self, topic: str, partition: int, count: int) -> None:
        super().__init__(f"topic {topic!r} has no partition {partition}: it has 0 to {count - 1}")
        self.topic = topic
        self.partition = partition


class OffsetOutOfRange(LogError):
    """The offset is below the log start or beyond the high watermark."""

    def __init__(
        self, topic: str, partition: int, offset: int, *, log_start_offset: int, high_watermark: int
    ) -> None:
        super().__init__(
            f"offset {offset} is out of range for {topic}-{partition}: "
            f"valid offsets are {log_start_offset} to {high_watermark}"
        )
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.high_watermark = high_watermark


class StaleCommit(LogError):
    """Refused for good as it stands: the committer's view of itself is not the cluster's."""


class ProducerFenced(StaleCommit):
    """The epoch is older than the producer's newest: Kafka's PRODUCER_FENCED."""


class OutOfOrderSequence(StaleCommit):
    """A batch does not follow the producer's last: Kafka's OUT_OF_ORDER_SEQUENCE_NUMBER."""


class IllegalGeneration(StaleCommit):
    """The generation is not the group's: Kafka's ILLEGAL_GENERATION."""


class UnknownMember(StaleCommit):
    """Not, or no longer, a member of the group: Kafka's UNKNOWN_MEMBER_ID."""


class GroupNotEmpty(StaleCommit):
    """The group has members: Kafka's NON_EMPTY_GROUP."""


class Throttled(LogError):
    """A bounded buffer is full (I10); nothing was written."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unavailable(LogError):
    """Definitely not done and not the caller's fault (I6); a retry may succeed."""


class StoreRefused(Unavailable):
    """The object store answered a definite no: no space, no permission, no bucket. Nothing was
    stored."""


class CommitUnknown(LogError):
    """The outcome is not known yet: the records may or may not become part of the log."""


class Corrupt(LogError):
    """Bytes of an object do not verify."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"object {key} is corrupt: {why}")
        self.key = key
        self.why = why


class NotFound(LogError):
    """No object has this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"object {key} does not exist")
        self.key = key


class StoreUnfit(LogError):
    """The store, or what lies in it, cannot carry this cluster."""
