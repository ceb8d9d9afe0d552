"""All errors that the log raises.

An error has a class of its own only if a caller handles it differently from other errors (DESIGN 2,
Errors).

A message is one lower-case line: what happened, where, which value, what to do. Callers get the
values in a message from the error's attributes.
"""

from typing import TypeVar


class LogError(Exception):
    """Root of all errors of the log."""


E = TypeVar("E", bound=BaseException)


def bare(error: E) -> E:
    """Return the error without its traceback and its causes.

    Whatever keeps an error beyond its handler must keep this: a traceback has the frames of the
    functions that it left, and these frames have all their values, for example unpacked bytes.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class InvalidRequest(LogError):
    """The request cannot succeed unless the caller changes it."""


class RecordTooLarge(InvalidRequest):
    """A record is larger than max.message.bytes, or a body is larger than its bound."""


class InvalidTimestamp(InvalidRequest):
    """A record's timestamp is too far from the broker's time: Kafka's INVALID_TIMESTAMP."""


class IdempotencyMismatch(InvalidRequest):
    """The Idempotency-Key belongs to an earlier request with another body."""


class OffsetMetadataTooLarge(InvalidRequest):
    """The metadata of a committed offset is over Kafka's offset.metadata.max.bytes."""


class TopicExists(InvalidRequest):
    """A topic of that name exists."""


class InvalidTopicName(InvalidRequest):
    """No topic may have this name: Kafka's INVALID_TOPIC_EXCEPTION."""


class InvalidPartitions(InvalidRequest):
    """A topic cannot have this number of partitions: Kafka's INVALID_PARTITIONS."""


class MemberExists(InvalidRequest):
    """The group has a member of that name."""


class NotAssigned(InvalidRequest):
    """The partition is not assigned to the member."""


class AssignedOtherwise(InvalidRequest):
    """A member requested a subscription and a manual assignment. The message is Kafka's."""

    def __init__(self) -> None:
        super().__init__(
            "IllegalStateError: You must choose only one way to configure your consumer: (1) "
            "subscribe to specific topics by name, (2) subscribe to topics matching a regex "
            "pattern, (3) assign itself specific topic-partitions."
        )


class InvalidConfig(InvalidRequest):
    """A topic config that does not exist, or a value that is not valid for its config."""


class UnknownTopic(LogError):
    """No topic of that name."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist")
        self.topic = topic


class UnknownPartition(LogError):
    """The topic has no such partition."""

    def __init__(self, topic: str, partition: int | str, count: int) -> None:
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
    """A commit that conflicts with the cluster state. A retry without a change fails again."""


class ProducerFenced(StaleCommit):
    """The epoch is older than the producer's newest epoch: Kafka's PRODUCER_FENCED."""


class OutOfOrderSequence(StaleCommit):
    """A batch does not follow the producer's last batch (OUT_OF_ORDER_SEQUENCE_NUMBER in Kafka)."""


class UnknownProducer(OutOfOrderSequence):
    """The partition does not know the producer of a batch: Kafka's UNKNOWN_PRODUCER_ID.

    It has no batch of the producer, and this batch is not the producer's first one there. The
    producer begins again with another epoch.
    """


class IllegalGeneration(StaleCommit):
    """The generation is not the group's current one: Kafka's ILLEGAL_GENERATION."""


class UnknownMember(StaleCommit):
    """The group has no such member, or no members: Kafka's UNKNOWN_MEMBER_ID."""


class InconsistentGroupProtocol(StaleCommit):
    """The group has members of another kind: Kafka's INCONSISTENT_GROUP_PROTOCOL.

    Members that the log assigns and members that Kafka's clients assign cannot share a group.
    """


class GroupNotEmpty(StaleCommit):
    """The group has members, so it cannot be deleted.

    Or it has subscribed members, so no other client may commit its offsets. In Kafka:
    NON_EMPTY_GROUP.
    """


class Throttled(LogError):
    """A bound is reached, or a principal's share of a bound (I10); nothing was written."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class BoundReached(Throttled):
    """`apply` refused a commit that would exceed a bound of the state or a principal's share.

    Another commit may still succeed.
    """


class Unavailable(LogError):
    """A request that was definitely not done (I6). The request is valid; a retry may succeed."""


class StoreRefused(Unavailable):
    """A definite refusal by the store (no space, no permission, no bucket). Nothing was stored."""


class CommitUnknown(LogError):
    """A commit whose outcome is unknown: its records may be in the log, or may appear later.

    A retry needs the same Idempotency-Key.
    """


class SetAside(CommitUnknown):
    """A request that was acknowledged with acks=1 and that the store refuses.

    The broker keeps the request in a file of the hot log, and commits it when the store accepts it.
    """


class Corrupt(LogError):
    """An object whose bytes do not verify."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"object {key} is corrupt: {why}")
        self.key = key
        self.why = why


def missing_object(key: str) -> Corrupt:
    """Return the error for an object that does not exist, although the log names it."""
    return Corrupt(key, "the log names the object, but it does not exist")


def cut_off(key: str, size: int, expected_bytes: int, start: int) -> Corrupt:
    """Return the error for an object that ends before the `expected_bytes` from `start` on."""
    return Corrupt(key, f"has {size} of {expected_bytes} bytes at {start}: it is cut off")


class DamagedRecords(Corrupt):
    """Records [offset, end_offset) of a partition's tail whose chunk is damaged or gone.

    The damage affects no other record.
    """

    def __init__(
        self, topic: str, partition: int, offset: int, end_offset: int, of: Corrupt
    ) -> None:
        super().__init__(of.key, of.why)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.end_offset = end_offset
        self.args = (
            f"{of}: the records at offsets {offset} to {end_offset - 1} of {topic}-{partition} "
            f"cannot be read, but records from {end_offset} on can be read; restore the object, "
            "or give the unreadable records up with tidelog repair --lost",
        )


class TableInDoubt(Corrupt):
    """A table that is not what the log put there.

    It is damaged, ahead of the WAL, or changed by another program. The topic keeps its tails and
    its files until a repair.
    """

    def __init__(self, prefix: str, version: int, why: str) -> None:
        super().__init__(f"{prefix}/_delta_log", why)
        topic = prefix.rpartition("/")[2].rpartition("-")[0]
        doubt = f"table {self.key} is in doubt at version {version}"
        self.args = (f"{doubt}: {why}; see tidelog repair",)
        self.topic = topic
        self.version = version


class ObjectNotFound(LogError):
    """No object has this key. This error never reaches service/."""

    def __init__(self, key: str) -> None:
        super().__init__(f"object {key} does not exist")
        self.key = key


class StoreUnfit(LogError):
    """A store that cannot hold this cluster.

    Its probe failed, its content is invalid, or it holds another cluster.
    """


class NewerLevel(StoreUnfit):
    """An undamaged object at a level of the format that this version does not know."""

    def __init__(self, key: str, level: int, newest: int) -> None:
        super().__init__(
            f"object {key} has level {level} of the format, this version reads up to {newest}: "
            "it needs a newer tidelog"
        )
        self.key = key
        self.level = level


class Fenced(StoreUnfit):
    """A copy of this process writes to the log under the name of this process, which must stop."""

    def __init__(self, writer: str, seq: int) -> None:
        super().__init__(
            f"entry {seq} has the name of this process, {writer}, but this process did not write "
            "it: a copy of the process runs (a cloned machine or a restored snapshot); this "
            "process stops"
        )
