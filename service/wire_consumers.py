"""Bodies of consumer instances, v2: what four dialects send, decoded; what they expect, encoded.

Numbers and booleans may come as strings (REST.md section 0.10). Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from service.errors import check_printable_field
from service.wire_in import BadBody, InvalidBody, one_line
from service.wire_v3 import milliseconds
from storage.entry import MemberConfig
from storage.groups import OFFSET_MAX
from storage.model import TopicPartition

T = TypeVar("T")

FORMATS = ("binary", "json", "text", "avro", "jsonschema", "protobuf")
RESETS = {"earliest": "earliest", "latest": "latest", "smallest": "earliest", "largest": "latest"}
FETCH_MIN_BYTES_MAX = 10_000_000
TIMEOUT_MS_MAX = 2**31 - 1
INVALID_CONFIG = 42204
INVALID_CONSTRAINT = 40001
STRIMZI = "strimzi"


class _Create(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str | None = None
    id: str | None = None
    format: str | None = None
    auto_offset_reset: str | None = msgspec.field(name="auto.offset.reset", default=None)
    auto_commit_enable: bool | None = msgspec.field(name="auto.commit.enable", default=None)
    enable_auto_commit: bool | None = msgspec.field(name="enable.auto.commit", default=None)
    fetch_min_bytes: int | None = msgspec.field(name="fetch.min.bytes", default=None)
    request_timeout_ms: int | None = msgspec.field(name="consumer.request.timeout.ms", default=None)
    isolation_level: str | None = msgspec.field(name="isolation.level", default=None)
    refresh_ms: int | None = msgspec.field(name="topic.metadata.refresh.interval.ms", default=None)
    session_timeout_ms: int | None = msgspec.field(name="session.timeout.ms", default=None)
    max_poll_interval_ms: int | None = msgspec.field(name="max.poll.interval.ms", default=None)
    instance_id: str | None = msgspec.field(name="group.instance.id", default=None)
    client_id: str | None = msgspec.field(name="client.id", default=None)
    assignor: str | None = msgspec.field(name="partition.assignment.strategy", default=None)


class Creation(NamedTuple):
    """A new instance; an empty `name` is for us to choose."""

    name: str
    config: MemberConfig
    instance_id: str
    assignor: str


class _Partition(msgspec.Struct):
    topic: str
    partition: int

    @property
    def where(self) -> TopicPartition:
        check_printable_field(self.topic)
        return TopicPartition(self.topic, self.partition)


class _Offset(_Partition):
    offset: int
    metadata: str | None = None


class _Timestamp(_Partition):
    timestamp: str | int


class _Partitions(msgspec.Struct):
    partitions: list[_Partition]


class _Commit(msgspec.Struct):
    offsets: list[_Offset] | None = None
    partitions: list[_Offset] | None = None


class _Positions(msgspec.Struct):
    offsets: list[_Offset] = []
    timestamps: list[_Timestamp] = []


class _Subscription(msgspec.Struct):
    topics: list[str] | None = None
    topic_pattern: str | None = None


class Subscription(NamedTuple):
    """Names, or a pattern."""

    topics: list[str]
    pattern: str


class Commit(NamedTuple):
    """Offsets to commit, None: of all that was returned. `is_exact`: they are those of the next
    records; else of the last ones read. `is_silent`: answered by 204."""

    offsets: dict[TopicPartition, tuple[int, str]] | None
    is_silent: bool


class Positions(NamedTuple):
    """Where to go on."""

    offsets: dict[TopicPartition, int]
    timestamps: dict[TopicPartition, int]


def decode_creation(body: bytes, session_timeout_ms: int) -> Creation:
    """A body may be empty: everything has a default."""
    said = _decoded(body or b"{}", _Create)
    is_strimzi = said.enable_auto_commit is not None or said.isolation_level is not None
    auto_commit = said.auto_commit_enable
    if auto_commit is None:
        auto_commit = said.enable_auto_commit
    reset = said.auto_offset_reset or "latest"
    if reset not in RESETS:
        raise InvalidBody(
            f"Invalid value {reset!r} for configuration auto.offset.reset: "
            f"String must be one of: {', '.join(RESETS)}",
            INVALID_CONFIG,
        )
    chosen = (said.format or "binary").lower()
    if chosen not in FORMATS:
        raise InvalidBody(f"Invalid format type {chosen!r}: one of {', '.join(FORMATS)}")
    min_bytes = -1 if said.fetch_min_bytes is None else said.fetch_min_bytes
    if not -1 <= min_bytes <= FETCH_MIN_BYTES_MAX:
        raise InvalidBody(
            f"fetch.min.bytes must be -1 to {FETCH_MIN_BYTES_MAX}, not {min_bytes}",
            INVALID_CONSTRAINT,
        )
    config = MemberConfig(
        format=chosen,
        auto_offset_reset=RESETS[reset],
        auto_commit=auto_commit is not False,
        fetch_min_bytes=min_bytes,
        request_timeout_ms=_ms("consumer.request.timeout.ms", said.request_timeout_ms, 1000),
        session_timeout_ms=_ms("session.timeout.ms", said.session_timeout_ms, session_timeout_ms),
        max_poll_interval_ms=_ms(
            "max.poll.interval.ms", said.max_poll_interval_ms, max(300_000, session_timeout_ms)
        ),
        dialect=STRIMZI if is_strimzi else "",
        client_id=said.client_id or "",
    )
    name = said.name or said.id or ""
    for text in (name, said.instance_id or "", config.client_id):
        check_printable_field(text)
    return Creation(name, config, said.instance_id or "", said.assignor or "")


def _ms(name: str, value: int | None, default: int) -> int:
    value = default if value is None else value
    if not 1 <= value <= TIMEOUT_MS_MAX:
        raise InvalidBody(
            f"Invalid value {value} for configuration {name}: 1 to {TIMEOUT_MS_MAX}", INVALID_CONFIG
        )
    return value


def decode_subscription(body: bytes) -> Subscription | None:
    """None when both are given, which each dialect calls an illegal state."""
    said = _decoded(body, _Subscription)
    if said.topics is not None and said.topic_pattern is not None:
        return None
    if said.topics is None and not said.topic_pattern:
        raise InvalidBody("a subscription has topics, or a topic_pattern")
    for name in said.topics or ():
        check_printable_field(name)
    return Subscription(said.topics or [], said.topic_pattern or "")


def decode_partitions(body: bytes) -> list[TopicPartition]:
    """`{"partitions": [{"topic", "partition"}]}`."""
    return [each.where for each in _decoded(body, _Partitions).partitions]


def decode_commit(body: bytes, dialect: str) -> Commit:
    """Confluent and Karapace name the last record read, Strimzi and Redpanda the next to read: the
    first three in `offsets`, told apart by what the instance was created with; Redpanda in
    `partitions`."""
    said = _decoded(body if body.strip() else b"{}", _Commit, _COMMIT)
    is_strimzi = dialect == STRIMZI
    if said.partitions is not None:
        return Commit(_offsets(said.partitions, 0), is_silent=True)
    if said.offsets is None:
        return Commit(None, is_strimzi)
    return Commit(_offsets(said.offsets, 0 if is_strimzi else 1), is_strimzi)


def _offsets(said: Sequence[_Offset], more: int) -> dict[TopicPartition, tuple[int, str]]:
    found = {}
    for each in said:
        _check_offset(each.offset)
        found[each.where] = (each.offset + more, each.metadata or "")
    return found


def _check_offset(offset: int) -> None:
    if not 0 <= offset < OFFSET_MAX:
        raise InvalidBody(f"an offset is 0 to {OFFSET_MAX - 1}, not {offset}")


def decode_positions(body: bytes) -> Positions:
    """Exact offsets, and moments (ISO 8601, or ms)."""
    said = _decoded(body, _Positions)
    for each in said.offsets:
        _check_offset(each.offset)
    offsets = {each.where: each.offset for each in said.offsets}
    timestamps = {
        each.where: each.timestamp
        if isinstance(each.timestamp, int)
        else milliseconds(each.timestamp)
        for each in said.timestamps
    }
    return Positions(offsets, timestamps)


def encode_partitions(partitions: Sequence[TopicPartition]) -> bytes:
    listed = [{"topic": each.topic, "partition": each.partition} for each in partitions]
    return msgspec.json.encode({"partitions": listed})


def encode_subscription(
    topics: Sequence[str], partitions: Mapping[str, Sequence[int]] | None
) -> bytes:
    """`partitions` is Strimzi's."""
    said: dict[str, Any] = {"topics": topics}
    if partitions is not None:
        said["partitions"] = [{topic: numbers} for topic, numbers in partitions.items()]
    return msgspec.json.encode(said)


def encode_offsets(offsets: Mapping[TopicPartition, tuple[int, str]]) -> bytes:
    """Committed offsets; -1 where nothing is."""
    return msgspec.json.encode(
        {
            "offsets": [
                {
                    "topic": where.topic,
                    "partition": where.partition,
                    "offset": offset,
                    "metadata": metadata,
                }
                for where, (offset, metadata) in offsets.items()
            ]
        }
    )


_COMMIT = msgspec.json.Decoder(_Commit, strict=False)
"""Made once, for what comes most often."""


def _decoded(body: bytes, kind: type[T], decoder: msgspec.json.Decoder[T] | None = None) -> T:
    try:
        return (decoder or msgspec.json.Decoder(kind, strict=False)).decode(body)
    except msgspec.ValidationError as error:
        why = one_line(str(error)).replace("Object contains unknown field", "Unrecognized field:")
        raise InvalidBody(why) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {one_line(str(error))}") from error
