"""Bodies of v2 consumer instances: decoding of requests in four dialects, encoding of answers.

Clients may send numbers and booleans as strings (DIALECTS, v2 consumers). Pure.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec

from tidelog.service.formats import arrow
from tidelog.service.formats.encoded_size_bounds import fitted
from tidelog.service.formats.json_in import InvalidBody
from tidelog.service.formats.json_text import ReadFormat
from tidelog.service.formats.record_pages import (
    ON_ERROR,
    OnError,
    RecordPage,
    check_first,
    encode_page,
)
from tidelog.service.formats.strict_bodies import StrictBody, decode_body
from tidelog.service.formats.v3_records import milliseconds
from tidelog.service.http.media_types import SCHEMA_FORMATS
from tidelog.service.http.parameters import (
    InvalidParameter,
    check_printable,
    check_printable_field,
    integer,
)
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.core.model import OFFSET_MAX, TopicPartition
from tidelog.storage.groups.read_result import Portion, PortionCheck, Read
from tidelog.storage.state.group_members import GROUP_PARTITIONS_MAX
from tidelog.storage.state.group_state import NAME_BYTES_MAX

CONSUMER_FORMATS = ("binary", "json", "text", *SCHEMA_FORMATS)
RESETS = {"earliest": "earliest", "latest": "latest", "smallest": "earliest", "largest": "latest"}
FETCH_MIN_BYTES_MAX = 10_000_000
TIMEOUT_MS_MAX = 2**31 - 1
SESSION_TIMEOUT_MS_MAX = 1_800_000
"""Maximum session timeout, the same as Kafka's `group.max.session.timeout.ms`. If the broker's own
default is higher, that default is the maximum. A member that has failed keeps its partitions, and
counts as a member, until its session timeout has passed."""
INVALID_CONFIG = 42204
INVALID_CONSTRAINT = 40001
STRIMZI = "strimzi"
_ON_ERROR, _POLL_RECORDS = ";on_error=", ";max_poll_records="
"""Prefixes of `on.error` and `max.poll.records` in an instance's stored format, because the stored
config has no fields for these. For a broker of an older version, the whole text is an unknown
format, so this broker refuses the instance's reads."""


_Item = TypeVar("_Item")
_Many: TypeAlias = Annotated[list[_Item], msgspec.Meta(max_length=GROUP_PARTITIONS_MAX)]


class _Create(StrictBody, omit_defaults=True):
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
    on_error: str | None = msgspec.field(name="on.error", default=None)
    poll_records: int | None = msgspec.field(name="max.poll.records", default=None)


class Creation(NamedTuple):
    """A request for a new instance. If `name` is empty, the broker chooses a name."""

    name: str
    config: MemberConfig
    instance_id: str
    assignor: str


class _Partition(StrictBody):
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
    metadata: str | None = None


class _Partitions(StrictBody):
    partitions: _Many[_Partition]


class _CommitBody(StrictBody):
    offsets: _Many[_Offset] | None = None
    partitions: _Many[_Offset] | None = None


class _Positions(StrictBody):
    offsets: _Many[_Offset] | None = None
    timestamps: _Many[_Timestamp] | None = None


class _Subscription(StrictBody):
    topics: list[str] | None = None
    topic_pattern: str | None = None


_CREATE = msgspec.json.Decoder(_Create, strict=False)
_PARTITIONS = msgspec.json.Decoder(_Partitions, strict=False)
_COMMIT = msgspec.json.Decoder(_CommitBody, strict=False)
_POSITIONS = msgspec.json.Decoder(_Positions, strict=False)
_SUBSCRIPTION = msgspec.json.Decoder(_Subscription, strict=False)


class Subscription(NamedTuple):
    """Topic names, or a pattern."""

    topics: list[str]
    pattern: str


class OffsetCommit(NamedTuple):
    """Offsets to commit.

    `offsets` has the next offset to read, and the metadata, of each partition. If it is None, the
    instance commits all records that it returned. If `is_silent`, the answer is 204.
    """

    offsets: dict[TopicPartition, tuple[int, str]] | None
    is_silent: bool


class SeekPositions(NamedTuple):
    """Positions to seek to."""

    offsets: dict[TopicPartition, int]
    timestamps: dict[TopicPartition, int]


def decode_creation(body: bytes, session_timeout_ms: int) -> Creation:
    """Decode the creation of an instance. Every field has a default, so the body may be empty."""
    fields = decode_body(body if body.strip() else b"{}", _CREATE)
    is_strimzi = fields.enable_auto_commit is not None or fields.isolation_level is not None
    auto_commit = fields.auto_commit_enable
    if auto_commit is None:
        auto_commit = fields.enable_auto_commit
    reset = fields.auto_offset_reset or "latest"
    if reset not in RESETS:
        raise InvalidBody(
            f"Invalid value {reset!r} for configuration auto.offset.reset: "
            f"String must be one of: {', '.join(RESETS)}",
            INVALID_CONFIG,
        )
    chosen = (fields.format or "binary").lower()
    if chosen not in CONSUMER_FORMATS:
        raise InvalidBody(f"Invalid format type {chosen!r}: one of {', '.join(CONSUMER_FORMATS)}")
    on_error = fields.on_error or "stop"
    if on_error not in ON_ERROR:
        raise InvalidBody(
            f"Invalid value {on_error!r} for configuration on.error: one of {', '.join(ON_ERROR)}",
            INVALID_CONFIG,
        )
    min_bytes = -1 if fields.fetch_min_bytes is None else fields.fetch_min_bytes
    if not -1 <= min_bytes <= FETCH_MIN_BYTES_MAX:
        raise InvalidBody(
            f"fetch.min.bytes must be -1 to {FETCH_MIN_BYTES_MAX}, not {min_bytes}",
            INVALID_CONSTRAINT,
        )
    poll_records = RECORDS_MAX if fields.poll_records is None else fields.poll_records
    if poll_records < 1:
        raise InvalidBody(
            f"Invalid value {poll_records} for configuration max.poll.records: 1 or more",
            INVALID_CONFIG,
        )
    if on_error != "stop":
        chosen += _ON_ERROR + on_error
    if poll_records < RECORDS_MAX:
        chosen += f"{_POLL_RECORDS}{poll_records}"
    config = MemberConfig(
        format=chosen,
        auto_offset_reset=RESETS[reset],
        auto_commit=auto_commit is not False,
        fetch_min_bytes=min_bytes,
        request_timeout_ms=_ms("consumer.request.timeout.ms", fields.request_timeout_ms, 1000),
        session_timeout_ms=_ms(
            "session.timeout.ms",
            fields.session_timeout_ms,
            session_timeout_ms,
            max(SESSION_TIMEOUT_MS_MAX, session_timeout_ms),
        ),
        max_poll_interval_ms=_ms(
            "max.poll.interval.ms", fields.max_poll_interval_ms, max(300_000, session_timeout_ms)
        ),
        dialect=STRIMZI if is_strimzi else "",
        client_id=fields.client_id or "",
    )
    name = fields.name or fields.id or ""
    for text in (name, fields.instance_id or "", config.client_id):
        check_printable_field(text)
    if (size := len(config.client_id.encode())) > NAME_BYTES_MAX:
        raise InvalidBody(
            f"client.id has {size} bytes, the limit is {NAME_BYTES_MAX}", INVALID_CONFIG
        )
    return Creation(name, config, fields.instance_id or "", fields.assignor or "")


def options_of(config: MemberConfig) -> tuple[str, OnError, int]:
    """Return an instance's format, `on.error` (records that do not decode), `max.poll.records`."""
    chosen, _, poll_records = config.format.partition(_POLL_RECORDS)
    chosen, _, on_error = chosen.partition(_ON_ERROR)
    return chosen, cast("OnError", on_error or "stop"), int(poll_records or RECORDS_MAX)


def _ms(name: str, value: int | None, default: int, most: int = TIMEOUT_MS_MAX) -> int:
    value = default if value is None else value
    if not 1 <= value <= most:
        raise InvalidBody(
            f"Invalid value {value} for configuration {name}: 1 to {most}", INVALID_CONFIG
        )
    return value


def decode_subscription(body: bytes) -> Subscription | None:
    """Decode a subscription.

    If it has both topics and a pattern, return None, because every dialect refuses both together.
    """
    request = decode_body(body, _SUBSCRIPTION)
    if request.topics is not None and request.topic_pattern is not None:
        return None
    if request.topics is None and not request.topic_pattern:
        raise InvalidBody("a subscription needs topics or a topic_pattern")
    for name in request.topics or ():
        check_printable_field(name)
    return Subscription(request.topics or [], request.topic_pattern or "")


def decode_partitions(body: bytes) -> list[TopicPartition]:
    """Decode `{"partitions": [{"topic", "partition"}]}`."""
    return [partition.where for partition in decode_body(body, _PARTITIONS).partitions]


def decode_commit(body: bytes, dialect: str) -> OffsetCommit:
    """Decode a commit of offsets.

    Clients of Confluent and Karapace send the last offset that was read. Clients of Strimzi and
    Redpanda send the next offset to read. Redpanda's clients send the field `partitions`, all
    others send `offsets`. `dialect` is STRIMZI if a client of Strimzi created the instance.
    `decode_creation` recognises such a client by fields that only Strimzi has.
    """
    request = decode_body(body if body.strip() else b"{}", _COMMIT)
    is_strimzi = dialect == STRIMZI
    if request.partitions is not None:
        return OffsetCommit(_offsets(request.partitions, 0), is_silent=True)
    if request.offsets is None:
        return OffsetCommit(None, is_strimzi)
    return OffsetCommit(_offsets(request.offsets, 0 if is_strimzi else 1), is_strimzi)


def _offsets(requested: Sequence[_Offset], step: int) -> dict[TopicPartition, tuple[int, str]]:
    offsets = {}
    for offset in requested:
        _check_offset(offset.offset)
        offsets[offset.where] = (offset.offset + step, offset.metadata or "")
    return offsets


def _check_offset(offset: int) -> None:
    if not 0 <= offset < OFFSET_MAX:
        raise InvalidBody(f"an offset is 0 to {OFFSET_MAX - 1}, not {offset}")


def decode_positions(body: bytes) -> SeekPositions:
    """Decode exact offsets and timestamps (ISO 8601, or ms)."""
    request = decode_body(body, _POSITIONS)
    if request.offsets is None and request.timestamps is None:
        raise InvalidBody("a seek needs offsets or timestamps")
    for offset in request.offsets or ():
        _check_offset(offset.offset)
    offsets = {offset.where: offset.offset for offset in request.offsets or ()}
    timestamps = {
        timestamp.where: timestamp.timestamp
        if isinstance(timestamp.timestamp, int)
        else milliseconds(timestamp.timestamp)
        for timestamp in request.timestamps or ()
    }
    return SeekPositions(offsets, timestamps)


def encode_partitions(partitions: Sequence[TopicPartition]) -> bytes:
    return msgspec.json.encode({"partitions": [partition._asdict() for partition in partitions]})


def encode_subscription(
    topics: Sequence[str], partitions: Mapping[str, Sequence[int]] | None
) -> bytes:
    """Encode a subscription. Only Strimzi's answer has `partitions`."""
    answer: dict[str, Any] = {"topics": topics}
    if partitions is not None:
        answer["partitions"] = [{topic: numbers} for topic, numbers in partitions.items()]
    return msgspec.json.encode(answer)


def encode_offsets(offsets: Mapping[TopicPartition, tuple[int, str]]) -> bytes:
    """Encode committed offsets. -1 means that no offset is committed."""
    listed = [
        {**partition._asdict(), "offset": offset, "metadata": metadata}
        for partition, (offset, metadata) in offsets.items()
    ]
    return msgspec.json.encode({"offsets": listed})


def partitions_of_query(query: bytes) -> list[TopicPartition]:
    """Parse `?topic=t&partition=0` (repeatable), for clients that cannot send a body with GET."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    topics = [text for name, text in pairs if name == "topic"]
    numbers = [
        integer("partition", text, 0, 2**31 - 1) for name, text in pairs if name == "partition"
    ]
    if len(topics) == 1:
        topics *= len(numbers)
    if len(topics) != len(numbers):
        raise InvalidParameter("give a topic for each partition, or one topic for all")
    for topic in topics:
        check_printable("topic", topic)
    return list(map(TopicPartition, topics, numbers))


# -- the body of a read


def columns_of_read(read: Read) -> tuple[int, bytes]:
    """Return the number of records, and one Arrow stream with the records of all partitions."""
    parts = [
        (portion.topic, portion.where.partition, [piece.batch for piece in portion.fetched.pieces])
        for portion in read.portions
    ]
    records = sum(batch.num_rows for _, _, batches in parts for batch in batches)
    return records, arrow.encode_arrow_of_many(parts)


def fit(read: Read, fmt: str, bytes_max: int) -> int:
    """Leave the leading records of the read that need at most `bytes_max` encoded, or one.

    Return an upper bound of their bytes. The next read begins with what is left out.
    """
    size, portions = 0, list[Portion]()
    for portion in read.portions:
        fetched, added_bytes = fitted(
            portion.fetched, portion.topic, fmt, fmt, bytes_max - size, at_least=int(not portions)
        )
        if fetched.pieces:
            size += added_bytes
            portions.append(portion._replace(fetched=fetched))
    read.portions = portions
    return size


def array_of_read(read: Read, fmt: str, on_error: OnError) -> tuple[list[RecordPage], bytes]:
    """Encode the portions. Return their pages, and the pages' records as one JSON array."""
    pages = [
        encode_page(
            [piece.batch for piece in portion.fetched.pieces],
            portion.topic,
            portion.where.partition,
            cast("ReadFormat", fmt),
            is_json=[piece.is_json for piece in portion.fetched.pieces],
            on_error=on_error,
        )
        for portion in read.portions
    ]
    if len(pages) == 1:
        return pages, pages[0].body
    bodies = [memoryview(page.body)[1:-1] for page in pages if page.records]
    return pages, b"".join((b"[", b",".join(bodies), b"]"))


def end_at_pages(read: Read, pages: Sequence[RecordPage]) -> None:
    """If a page stopped before a record that does not decode, end its portion there.

    So the next read begins with that record.
    """
    for number, (portion, page) in enumerate(zip(read.portions, pages, strict=True)):
        if page.stopped is not None:
            fetched = portion.fetched._replace(next_offset=page.stopped.offset)
            read.portions[number] = portion._replace(fetched=fetched)


def check_of_portions(fmt: str, on_error: OnError) -> PortionCheck | None:
    """Return the check that refuses portions whose first record does not decode.

    So the reader still gets the other portions.
    """
    if fmt in ("arrow", "binary") or on_error != "stop":
        return None
    return partial(_check_first, cast("ReadFormat", fmt))


def _check_first(fmt: ReadFormat, portion: Portion) -> None:
    check_first(
        [piece.batch for piece in portion.fetched.pieces],
        TopicPartition(portion.topic, portion.where.partition),
        fmt,
        is_json=[piece.is_json for piece in portion.fetched.pieces],
    )
