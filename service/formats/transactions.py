"""Decoding of an atomic request: records for several topics and offsets of groups.

    {"topics": [{"topic_name": "out", "records": [<v3 record>, ...]}, ...],
     "consumer_groups": [{"consumer_group_id": "g", "generation": -1,
                          "offsets": [{"topic_name": "in", "partition_id": 0, "offset": 42,
                                       "metadata": "why"}, ...]}, ...]}

The format is tidelog's own, with the field names of the v3 dialect. An invalid body gives
InvalidBody (422). If a record is wrong, the error names its topic and its number. Pure.
"""

from collections.abc import Iterable
from operator import gt
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tidelog.service.formats.json_in import (
    BadBody,
    InvalidBody,
    Produced,
    check_utf8,
    one_line,
)
from tidelog.service.formats.json_scan import has_many_objects, objects_at
from tidelog.service.formats.strict_bodies import StrictBody, unrecognized
from tidelog.service.formats.v3_records import (
    EncodedRecord,
    V3Record,
    columns_of_many,
    v3_record,
)
from tidelog.storage.codec.chunk import weight
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import GroupOffset
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.model import OFFSET_MAX
from tidelog.storage.state.committed_offsets import check_group_id, check_offset
from tidelog.storage.state.group_state import NO_GENERATION

TRANSACTION_TOPICS_MAX = 100
RECORDS_MAX = 10_000
"""Bound for a request (I10), because each record may need its own chunk, and one entry has all
chunks."""
TRANSACTION_OFFSETS_MAX = 1_000
"""Bound for a request (I10). With 4 KiB of metadata each, the offsets take 4 MiB of the 64 MiB that
an entry's header may have."""
TRANSACTION_HEADERS_MAX = 500_000
"""Bound for a request (I10), because even a short header takes 100 bytes."""
_DEPTHS = {
    2: TRANSACTION_TOPICS_MAX + TRANSACTION_OFFSETS_MAX,
    4: RECORDS_MAX + TRANSACTION_OFFSETS_MAX,
    6: TRANSACTION_HEADERS_MAX,
}
"""By depth: about how many objects a body may have, because they are topics and groups, records and
offsets, or headers."""

Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Topic(StrictBody):
    topic_name: str
    records: list[EncodedRecord]


class RequestedOffset(StrictBody):
    """An offset to commit, with the name of its topic."""

    topic_name: str
    partition_id: Int32
    offset: Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
    metadata: str | None = None


class GroupOffsets(StrictBody):
    """Offsets that one group commits."""

    consumer_group_id: str
    offsets: list[RequestedOffset]
    generation: Annotated[int, Meta(ge=NO_GENERATION, le=2**31 - 1)] = NO_GENERATION
    consumer_id: str | None = None


class _Body(StrictBody):
    topics: list[_Topic] = msgspec.field(default_factory=list)
    consumer_groups: list[GroupOffsets] = msgspec.field(default_factory=list)


class TransactionRecords(NamedTuple):
    """The records for one topic."""

    name: str
    produced: Produced


class TransactionRequest(NamedTuple):
    """An atomic request. Each topic and each group occurs once."""

    topics: list[TransactionRecords]
    groups: list[GroupOffsets]

    @property
    def records(self) -> int:
        return sum(topic.produced.count for topic in self.topics)

    @property
    def weight(self) -> int:
        """The weight of all records, in bytes (chunk.weight)."""
        return sum(topic.produced.weight for topic in self.topics)


_decode = msgspec.json.Decoder(_Body).decode


def decode_transaction(body: bytes, now_ms: int) -> TransactionRequest:
    """Decode the request. Records without a timestamp get `now_ms`.

    Raises InvalidBody, NoSchemaRegistry or RecordTooLarge. Does not check whether topics and
    partitions exist.
    """
    if has_many_objects(body) and any(map(gt, objects_at(body, _DEPTHS), _DEPTHS.values())):
        raise InvalidBody(
            f"a transaction has {TRANSACTION_TOPICS_MAX} topics, {RECORDS_MAX} records, "
            f"{TRANSACTION_OFFSETS_MAX} offsets and {TRANSACTION_HEADERS_MAX} headers at most"
        )
    try:
        check_utf8(body)
        request = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBody(
            f"the body is not a transaction: {unrecognized(one_line(str(error)))}"
        ) from error
    _check_bounds(request)
    topics = [
        TransactionRecords(topic.topic_name, _produced(topic.topic_name, topic.records, now_ms))
        for topic in request.topics
    ]
    for group in request.consumer_groups:
        _check_group(group)
    return TransactionRequest(topics, request.consumer_groups)


def _check_bounds(request: _Body) -> None:
    records = sum(len(topic.records) for topic in request.topics)
    offsets = sum(len(group.offsets) for group in request.consumer_groups)
    if not records and not offsets:
        raise InvalidBody("a transaction must have records or offsets")
    for count, bound, noun in (
        (len(request.topics), TRANSACTION_TOPICS_MAX, "topics"),
        (records, RECORDS_MAX, "records"),
        (offsets, TRANSACTION_OFFSETS_MAX, "offsets"),
    ):
        if count > bound:
            raise InvalidBody(f"a transaction has {bound} {noun} at most, not {count}")
    _check_once((topic.topic_name for topic in request.topics), "topic")
    _check_once((group.consumer_group_id for group in request.consumer_groups), "consumer group")


def _check_once(names: Iterable[object], noun: str) -> None:
    known_names = set()
    for name in names:
        if name in known_names:
            raise InvalidBody(f"{noun} {name!r} occurs twice")
        known_names.add(name)


def _produced(topic: str, records: list[EncodedRecord], now_ms: int) -> Produced:
    if not records:
        raise InvalidBody(f"topic {topic!r} has no records")
    decoded = [_record(topic, number, record, now_ms) for number, record in enumerate(records)]
    partitions = [record.partition for record in decoded]
    rows = [record.rows for record in decoded]
    headers = [None if row.headers is None else row.headers[0] for row in rows]
    merged = columns_of_many(
        Rows(
            [row.timestamps[0] for row in rows],
            [row.keys[0] for row in rows],
            [row.values[0] for row in rows],
            headers if any(headers) else None,
        )
    )
    return Produced(
        merged,
        partitions if any(partition is not None for partition in partitions) else None,
        all(record.is_json for record in decoded),
        len(decoded),
        weight(merged),
        has_timestamps=True,
    )


def _record(topic: str, number: int, encoded: EncodedRecord, now_ms: int) -> V3Record:
    try:
        record = v3_record(encoded, now_ms)
        if record.partition is not None and not 0 <= record.partition < 2**31:
            raise InvalidBody(f"partition_id {record.partition} is out of range")
    except (BadBody, InvalidBody) as error:
        why = str(error).removeprefix("Bad Request: ")
        raise InvalidBody(f"record {number} of topic {topic!r}: {why}") from error
    return record


def _check_group(group: GroupOffsets) -> None:
    """Check a group. An offset without metadata gets an empty text. Raises InvalidBody."""
    _refuse(check_group_id(group.consumer_group_id))
    if not group.offsets:
        raise InvalidBody(f"consumer group {group.consumer_group_id!r} has no offsets")
    _check_once(((offset.topic_name, offset.partition_id) for offset in group.offsets), "partition")
    for offset in group.offsets:
        offset.metadata = offset.metadata or ""
        _refuse(
            check_offset(
                GroupOffset("", offset.partition_id, offset.offset, metadata=offset.metadata)
            )
        )


def _refuse(refusal: InvalidRequest | None) -> None:
    if refusal is not None:
        raise InvalidBody(str(refusal)) from refusal
