"""Produce: a request's body becomes columns, columns become parts, parts become part of the log.

Everything is checked before anything is handed to the log: a request that is refused here has
written nothing (I6). The answer's order is the request's order.
"""

import contextlib
import hashlib
from typing import cast

import msgspec
import pyarrow as pa

from service import wire_arrow, wire_in, wire_out
from service.caller import EVERYTHING, Rights, check_creation, rights_of
from service.errors import check_printable
from service.http import (
    ARROW,
    JSON_V2,
    Answer,
    Call,
    InvalidParameter,
    UnsupportedMediaType,
    media_type,
)
from service.settings import Settings
from service.telemetry import HttpCounters
from service.wire_v3 import NoSchemaRegistry
from storage import chunk as chunks
from storage.access import PRODUCER_BYTE_RATE
from storage.chunk import Rows
from storage.entry import IdempotencyKey
from storage.errors import (
    InvalidRequest,
    LogError,
    RecordTooLarge,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from storage.log import Log
from storage.model import Placement
from storage.partitioner import NoSuchPartition, Places, Sticky, place, tally
from storage.state import Topic
from storage.topics import TopicConfig
from storage.writer import Acks

KEY_LENGTH_MAX = 255
UNPACKED_FACTOR_MAX = 4
"""An Arrow body may unpack to so many times the bound of a body (I10)."""
ACKS = {"all": Acks.ALL, "-1": Acks.ALL, "1": Acks.LOCAL, "0": Acks.NONE}
FORMATS: dict[bytes, str] = {
    b"": "binary",
    JSON_V2: "binary",
    b"application/json": "binary",
    b"application/vnd.kafka+json": "binary",
    b"application/vnd.kafka.v1+json": "binary",
    b"application/octet-stream": "binary",
    ARROW: "arrow",
    **{
        f"application/vnd.kafka.{name}{version}+json".encode(): name
        for name in ("json", "binary", "text", "avro", "jsonschema", "protobuf")
        for version in (".v2", ".v1", "")
    },
}
SCHEMA_FORMATS = frozenset({"avro", "jsonschema", "protobuf"})


class SchemaMissing(wire_in.InvalidBody):
    """A schema'd body without a schema."""


class Produce:
    """The v2 produce routes. One per broker."""

    def __init__(self, broker: Log, settings: Settings, counters: HttpCounters) -> None:
        self._log = broker
        self._settings = settings
        self._counters = counters
        seed = int.from_bytes(broker.clock.new_id()[:8], "little")
        self.sticky = Sticky(seed)

    async def serve(self, call: Call, topic_name: str, partition: str | None) -> Answer:
        """POST /topics/{topic} and /topics/{topic}/partitions/{partition}."""
        format_name = FORMATS.get(media_type(call.headers.get(b"content-type", b"")))
        if format_name is None:
            given = call.headers[b"content-type"].decode("latin-1")
            raise UnsupportedMediaType(f"HTTP 415 Unsupported Media Type: {given}")
        rights = rights_of(call.scope)
        rights.pay(PRODUCER_BYTE_RATE)  # who owes need not send it
        body = await call.body(self._settings.request_bytes_max)
        query = call.query()
        acks = _acks(query)
        topic = await self.topic(topic_name, rights)
        try:
            number, produced, key, places = self._placed(call, topic, partition, body, format_name)
        except UnknownPartition:
            topic = await self.newest(topic)
            number, produced, key, places = self._placed(call, topic, partition, body, format_name)
        rights.pay(PRODUCER_BYTE_RATE, len(body))
        placements = await self.append(topic, produced, places, acks, key, len(body))
        if key is not None and placements is not None:
            places = self._places_of_first(topic, places, produced, number, key)
        self._counters.add_records_in(produced.count, len(body), topic.name)
        if query.get("async") == "true":
            return Answer(204, b"")
        if format_name == "arrow":
            return Answer(200, _ranges(places, placements, produced.count))
        return Answer(200, wire_out.encode_placements(places, placements, produced.count))

    async def append(
        self,
        topic: Topic,
        produced: wire_in.Produced,
        places: Places,
        acks: Acks,
        key: IdempotencyKey | None,
        size: int,
    ) -> list[Placement] | None:
        """Hand checked records to the log; None when their offsets are not known yet."""
        parts = [(places, produced.rows)]
        return await self._log.append(
            topic, parts, size=size, is_json=produced.is_json, acks=acks, key=key
        )

    async def topic(self, name: str, rights: Rights = EVERYTHING) -> Topic:
        """The topic, from a fresh look at the WAL before it is said not to exist. Raises Forbidden
        where it would have to be created, by whoever may not."""
        try:
            return self._log.state.topic(name)
        except UnknownTopic:
            check_printable("topic_name", name)
            await self._log.wal.refresh()
        if name not in self._log.state.topics and self._settings.auto_create_topics:
            await check_creation(rights, name)
            with contextlib.suppress(TopicExists):  # by another broker, just now
                await self._log.create_topic(name, self._settings.default_partitions, {})
        return self._log.state.topic(name)

    async def newest(self, topic: Topic) -> Topic:
        """The topic with the partitions that other brokers may just have added (I3)."""
        await self._log.wal.refresh()
        return self._log.state.topic(topic.name)

    def _placed(
        self, call: Call, topic: Topic, partition: str | None, body: bytes, format_name: str
    ) -> tuple[int | None, wire_in.Produced, IdempotencyKey | None, Places]:
        """The path's partition, the records, the request's key, and where the records go."""
        number = None if partition is None else _partition(topic, partition)
        produced = self._decode(body, format_name)
        name = client_key(call)
        key = None
        if name is not None:
            mark = fingerprint(f"{topic.topic_id}/{number}/{format_name}", body)
            key = IdempotencyKey(name, mark, len(topic.partitions))
        return number, produced, key, self.place(topic, produced, number, key)

    def _decode(self, body: bytes, format_name: str) -> wire_in.Produced:
        now_ms = self._log.clock.now_ms()
        if format_name == "arrow":
            bytes_max = self._settings.request_bytes_max * UNPACKED_FACTOR_MAX
            return wire_arrow.decode_arrow(body, now_ms, bytes_max=bytes_max)
        if format_name in SCHEMA_FORMATS:
            raise schema_error(body)
        return wire_in.decode_json(body, cast("wire_in.Format", format_name), now_ms)

    def place(
        self,
        topic: Topic,
        produced: wire_in.Produced,
        number: int | None,
        key: IdempotencyKey | None,
    ) -> Places:
        """Where the checked records go. A keyed request is parted by nothing but its content and
        the number of partitions: a retry gets the same parts, on any broker."""
        check_records(produced.rows, self._log.state.config(topic))
        return self.place_among(topic.name, len(topic.partitions), produced, number, key)

    def place_among(
        self,
        name: str,
        count: int,
        produced: wire_in.Produced,
        number: int | None,
        key: IdempotencyKey | None,
    ) -> Places:
        """Where records go in a topic of so many partitions. Raises UnknownPartition."""
        sticky = self.sticky
        if key is not None:
            sticky = Sticky(int.from_bytes(key.fingerprint[:8], "little"))
        try:
            return place(produced.rows, produced.partitions, count, sticky, otherwise=number)
        except NoSuchPartition as error:
            raise UnknownPartition(name, error.partition, error.count) from error

    def _places_of_first(
        self,
        topic: Topic,
        places: Places,
        produced: wire_in.Produced,
        number: int | None,
        key: IdempotencyKey,
    ) -> Places:
        """`places`, or what they were when the request was first made: if the topic has grown since
        then, the placements are of those."""
        known = self._log.state.remembered(key.key)
        if known is None or known.claim.partitions == key.partitions:
            return places
        assert isinstance(known.claim.partitions, int), "its fingerprint is of another route"
        return self.place_among(topic.name, known.claim.partitions, produced, number, key)


def check_records(rows: Rows | pa.RecordBatch, config: TopicConfig) -> None:
    """Raises RecordTooLarge; InvalidRequest for the first record without a key on a topic that is
    compacted: nothing would ever supersede it."""
    check_sizes(rows, config.max_message_bytes)
    if "compact" in config.cleanup_policy:
        if isinstance(rows, Rows):
            index = rows.keys.index(None) if None in rows.keys else -1
        else:
            index = rows.column("key").is_null().index(True).as_py()
        if index >= 0:
            raise InvalidRequest(f"record {index} has no key, and the topic is compacted by key")


def check_sizes(rows: Rows | pa.RecordBatch, bytes_max: int) -> None:
    """Raises RecordTooLarge for the first record whose key and value are over max.message.bytes."""
    if isinstance(rows, Rows):
        for index, (key, value) in enumerate(zip(rows.keys, rows.values, strict=True)):
            size = len(key or b"") + len(value or b"")
            if size > bytes_max:
                raise _record_too_large(index, size, bytes_max)
        return
    before = chunks.sizes_before(rows)
    if before[-1] <= bytes_max:
        return
    sizes = before[1:] - before[:-1]
    index = int(sizes.argmax())
    if sizes[index] > bytes_max:
        raise _record_too_large(index, int(sizes[index]), bytes_max)


def _record_too_large(index: int, size: int, bytes_max: int) -> RecordTooLarge:
    return RecordTooLarge(
        f"record {index} has {size} bytes of key and value, the topic's max.message.bytes is "
        f"{bytes_max}"
    )


def _acks(query: dict[str, str]) -> Acks:
    if query.get("async") == "true":
        return Acks.NONE  # Strimzi's fire and forget
    text = query.get("acks", "all")
    if text not in ACKS:
        raise InvalidParameter(f"parameter acks={text!r} must be all, 1 or 0")
    return ACKS[text]


def _partition(topic: Topic, text: str) -> int:
    count = len(topic.partitions)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) >= count:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else text
        raise UnknownPartition(topic.name, number, count)  # type: ignore[arg-type]
    return int(text)


def client_key(call: Call) -> str | None:
    """The Idempotency-Key header (IETF draft: a quoted string; bare ones are taken too)."""
    header = call.headers.get(b"idempotency-key")
    if header is None:
        return None
    key = header.decode("latin-1").strip('"')
    if not 1 <= len(key) <= KEY_LENGTH_MAX or not key.isprintable():
        raise InvalidParameter(
            f"Idempotency-Key must be 1 to {KEY_LENGTH_MAX} printable characters, not {len(key)}"
        )
    return key


def fingerprint(goal: str, body: bytes) -> bytes:
    """16 bytes that another request will not have: of where it goes, how it is read, and every
    byte of it."""
    digest = hashlib.blake2b(f"{goal}/".encode(), digest_size=16)
    digest.update(body)
    return digest.digest()


def _ranges(places: Places, placements: list[Placement] | None, count: int) -> bytes:
    """The answer to columns is columns' size: one range a partition, not one line a record."""
    ranges: list[tuple[int, int | None, int]] = (
        [(partition, None, rows) for partition, rows in tally(places, count)]
        if placements is None
        else [(placed.partition, placed.base_offset, placed.count) for placed in placements]
    )
    said = [
        {"partition": partition, "base_offset": base, "count": rows}
        for partition, base, rows in ranges
    ]
    return msgspec.json.encode({"partitions": said})


class _Schemas(msgspec.Struct):
    """What of such a body is looked at."""

    key_schema: msgspec.Raw = msgspec.Raw()
    key_schema_id: msgspec.Raw = msgspec.Raw()
    value_schema: msgspec.Raw = msgspec.Raw()
    value_schema_id: msgspec.Raw = msgspec.Raw()
    records: msgspec.Raw = msgspec.Raw()

    def names(self, what: str) -> bool:
        """Whether there is a schema for it."""
        given = (getattr(self, f"{what}_schema"), getattr(self, f"{what}_schema_id"))
        return any(bytes(each) not in (b"", b"null") for each in given)


def schema_error(body: bytes) -> LogError:
    """What the proxies answer to a body of a format that needs a schema registry."""
    try:
        given = msgspec.json.decode(body, type=_Schemas)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return wire_in.BadBody("the body is not a JSON object")
    if not given.names("value"):
        return SchemaMissing("Value schema is missing: give value_schema or value_schema_id", 42202)
    if b'"key"' in bytes(given.records) and not given.names("key"):
        return SchemaMissing("Key schema is missing: give key_schema or key_schema_id", 42201)
    return NoSchemaRegistry("no schema registry: tidelog takes json, binary, text and arrow")
