"""The body of an atomic request: records for several topics and offsets of groups, to values.

    {"topics": [{"topic_name": "out", "records": [<v3 record>, ...]}, ...],
     "consumer_groups": [{"consumer_group_id": "g", "generation": -1,
                          "offsets": [{"topic_name": "in", "partition_id": 0, "offset": 42,
                                       "metadata": "why"}, ...]}, ...]}

Ours, in the words of the v3 dialect; whatever is wrong with it is a 422 that says where. Pure.
"""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from service.wire_in import BadBody, InvalidBody, Produced, check_objects, one_line
from service.wire_v3 import Said, V3Record, v3_record
from storage.chunk import Rows
from storage.entry import GroupOffset
from storage.errors import InvalidRequest
from storage.group_members import NO_GENERATION
from storage.groups import check_group_id, check_offset

TOPICS_MAX = 100
RECORDS_MAX = 10_000
"""Of a request (I10): each may need a chunk of its own, and all are one entry's."""
OFFSETS_MAX = 1_000
"""Of a request (I10): with metadata of 4 KiB they take 4 of the 64 MiB of an entry's header."""

Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Topic(msgspec.Struct, forbid_unknown_fields=True):
    topic_name: str
    records: list[Said]


class _Offset(msgspec.Struct, forbid_unknown_fields=True):
    topic_name: str
    partition_id: Int32
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    metadata: str | None = None


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    consumer_group_id: str
    offsets: list[_Offset]
    generation: Annotated[int, Meta(ge=NO_GENERATION, le=2**31 - 1)] = NO_GENERATION
    consumer_id: str | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    topics: list[_Topic] = []
    consumer_groups: list[_Group] = []


class TopicRecords(NamedTuple):
    """The records that go to one topic."""

    name: str
    produced: Produced


class SaidOffset(NamedTuple):
    """An offset to commit, its topic still by name."""

    topic: str
    partition: int
    offset: int
    metadata: str


class GroupOffsets(NamedTuple):
    """What a group has read so far."""

    group_id: str
    generation: int
    offsets: list[SaidOffset]
    consumer_id: str = ""


class Transaction(NamedTuple):
    """An atomic request; each topic and each group is there once."""

    topics: list[TopicRecords]
    groups: list[GroupOffsets]

    @property
    def records(self) -> int:
        return sum(topic.produced.count for topic in self.topics)


_decode = msgspec.json.Decoder(_Body).decode


def decode_transaction(body: bytes, now_ms: int) -> Transaction:
    """The request; records without a timestamp get `now_ms`.

    Raises InvalidBody, or NoSchemaRegistry. Whether topics and partitions exist is not looked at.
    """
    check_objects(body)
    try:
        if not body.isascii():
            str(body, "utf-8")
        said = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is no transaction: {one_line(str(error))}") from error
    _check_bounds(said)
    topics = [
        TopicRecords(each.topic_name, _produced(each.topic_name, each.records, now_ms))
        for each in said.topics
    ]
    return Transaction(topics, [_group(each) for each in said.consumer_groups])


def _check_bounds(said: _Body) -> None:
    records = sum(len(each.records) for each in said.topics)
    offsets = sum(len(each.offsets) for each in said.consumer_groups)
    if not records and not offsets:
        raise InvalidBody("a transaction has records, or offsets, or both")
    for count, bound, what in (
        (len(said.topics), TOPICS_MAX, "topics"),
        (records, RECORDS_MAX, "records"),
        (offsets, OFFSETS_MAX, "offsets"),
    ):
        if count > bound:
            raise InvalidBody(f"a transaction has {bound} {what} at most, not {count}")
    _check_once((each.topic_name for each in said.topics), "topic")
    _check_once((each.consumer_group_id for each in said.consumer_groups), "consumer group")


def _check_once(names: Iterable[object], what: str) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidBody(f"{what} {name!r} is there twice")
        seen.add(name)


def _produced(topic: str, records: list[Said], now_ms: int) -> Produced:
    if not records:
        raise InvalidBody(f"topic {topic!r} has no records")
    decoded = [_record(topic, number, said, now_ms) for number, said in enumerate(records)]
    partitions = [record.partition for record in decoded]
    rows = [record.rows for record in decoded]
    headers = [None if row.headers is None else row.headers[0] for row in rows]
    together = Rows(
        [row.timestamps[0] for row in rows],
        [row.keys[0] for row in rows],
        [row.values[0] for row in rows],
        headers if any(headers) else None,
    )
    return Produced(
        together,
        partitions if any(partition is not None for partition in partitions) else None,
        all(record.is_json for record in decoded),
        len(decoded),
    )


def _record(topic: str, number: int, said: Said, now_ms: int) -> V3Record:
    try:
        record = v3_record(said, now_ms)
        if record.partition is not None and not 0 <= record.partition < 2**31:
            raise InvalidBody(f"partition_id {record.partition} is no partition")
    except (BadBody, InvalidBody) as error:
        why = str(error).removeprefix("Bad Request: ")
        raise InvalidBody(f"record {number} of topic {topic!r}: {why}") from error
    return record


def _group(said: _Group) -> GroupOffsets:
    _refuse(check_group_id(said.consumer_group_id))
    if not said.offsets:
        raise InvalidBody(f"consumer group {said.consumer_group_id!r} has no offsets")
    _check_once(((each.topic_name, each.partition_id) for each in said.offsets), "partition")
    offsets = [
        SaidOffset(each.topic_name, each.partition_id, each.offset, each.metadata or "")
        for each in said.offsets
    ]
    for each in offsets:
        _refuse(check_offset(GroupOffset("", each.partition, each.offset, metadata=each.metadata)))
    return GroupOffsets(said.consumer_group_id, said.generation, offsets, said.consumer_id or "")


def _refuse(refusal: InvalidRequest | None) -> None:
    if refusal is not None:
        raise InvalidBody(str(refusal)) from refusal
