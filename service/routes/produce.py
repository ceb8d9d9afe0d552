"""The produce routes of the v2 dialect, and what the routes of v3 and transactions share.

They share the checks of records, the Idempotency-Key and the fingerprint of a request.

A request takes three steps: decode its body, choose each record's partition, append the records.
The broker checks the whole request before the log gets any part of it, so a request with an error
writes nothing (I6). The response has the order of the request.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TypeVar, cast

import msgspec

from tidelog.service.codec_threads import UnpackThreads
from tidelog.service.formats import arrow, json_in, json_out
from tidelog.service.formats.schema_refusals import schema_error
from tidelog.service.http.media_types import (
    ARROW,
    EMBEDDED,
    JSON_V2,
    SCHEMA_FORMATS,
    UnsupportedMediaType,
    media_type,
    types_of_formats,
)
from tidelog.service.http.parameters import InvalidParameter, check_printable, partition_number
from tidelog.service.http.request import HttpRequest, HttpResponse
from tidelog.service.http.route import (
    V2,
    Answer,
    Body,
    Content,
    Parameter,
    Permission,
    Route,
    RouteDoc,
)
from tidelog.service.operations.change_request import HttpChange
from tidelog.service.operations.rights import PRODUCE
from tidelog.service.operations.topics import TopicOperations
from tidelog.service.routes.produce_requests import (
    LINGER_S_MAX,
    body_of,
    check_records,
    client_key,
    linger_of,
)
from tidelog.service.security.audit import Audit, AuditedRequest
from tidelog.service.security.caller import ALL_RIGHTS, CallerRights, rights_of
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.partitioner import (
    NoSuchPartition,
    RecordPartitions,
    Sticky,
    place,
    tally,
)
from tidelog.storage.core.errors import (
    InvalidRequest,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import Acks, AppendedRange
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.state.access import PRODUCER_BYTE_RATE
from tidelog.storage.state.topic import Topic

T = TypeVar("T")

DECODE_INLINE_BYTES = 1024 * 1024
"""Bodies of at most this size are decoded on the event loop, which takes ~2 ms at most. A thread
for a larger body costs ~100 us."""
DECODE_INLINE_MESSAGES = 8
"""A stream of Arrow with more messages (batches and dictionaries) is decoded in a thread, because
each takes ~50 us."""
DECODED_FACTOR = 8
"""Most bodies take less memory for each of their bytes while they are decoded."""
ACKS = {"all": Acks.ALL, "-1": Acks.ALL, "1": Acks.LOCAL, "0": Acks.NONE}
PRODUCE_FORMATS: dict[bytes, str] = {
    b"": "binary",
    JSON_V2: "binary",
    b"application/json": "binary",
    b"application/vnd.kafka+json": "binary",
    b"application/vnd.kafka.v1+json": "binary",
    b"application/octet-stream": "binary",
    ARROW: "arrow",
    **types_of_formats((*EMBEDDED, *SCHEMA_FORMATS)),
}

ACCEPTED = (
    "application/vnd.kafka.json.v2+json (keys and values as JSON), the same with .text or .binary "
    f"(base64) in place of .json, or {ARROW.decode()}"
)
"""The types that a refusal names. JSON's type comes first, because most clients that get this
refusal send JSON."""


class OffsetReport(msgspec.Struct):
    """The position of a record. `offset` is null with acks=1 and 0."""

    partition: int
    offset: int | None
    error_code: int | None
    error: str | None


class ProduceReport(msgspec.Struct):
    """One entry per record, in the request's order."""

    offsets: list[OffsetReport]
    key_schema_id: int | None
    value_schema_id: int | None


class RangeReport(msgspec.Struct):
    """The first offset and the number of the records that one partition got."""

    partition: int
    base_offset: int | None
    count: int


class ArrowReport(msgspec.Struct):
    """The response to an Arrow request: one range per partition."""

    partitions: list[RangeReport]


class Produce:
    """The v2 produce routes. One per broker."""

    def __init__(
        self,
        broker: Broker,
        topics: TopicOperations,
        settings: RequestSettings,
        counters: HttpCounters,
        threads: UnpackThreads,
        audit: Audit | None,
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._settings = settings
        self._counters = counters
        self._threads = threads
        self._audit = audit
        seed = int.from_bytes(broker.clock.new_id()[:8], "little")
        self.sticky = Sticky(seed)

    async def produce(
        self, call: HttpRequest, topic_name: str, partition: str | None = None
    ) -> HttpResponse:
        """Append the records of a request."""
        format_name = PRODUCE_FORMATS.get(media_type(call.headers.get(b"content-type", b"")))
        if format_name is None:
            sent = call.headers[b"content-type"].decode("latin-1")
            raise UnsupportedMediaType(
                f"HTTP 415 Unsupported Media Type: send {ACCEPTED}, not {sent!r}"
            )
        rights = rights_of(call.scope)
        body = await body_of(call, rights, self._settings.request_bytes_max)
        query = call.query()
        acks = _acks(query)
        name, linger_s = client_key(call), linger_of(call)
        topic = await self.topic(topic_name, rights)
        try:
            number = None if partition is None else partition_number(topic, partition)
        except UnknownPartition:
            topic = await self.newest(topic)
            number = None if partition is None else partition_number(topic, partition)
        size = len(body)
        produced = self._decode_small(body, format_name)
        if produced is None:
            produced = await self._decode_large(call, body, format_name)
            topic = await self.topic(topic_name, rights)  # it may be new or deleted by now
        if produced.weight > size:
            rights.record(PRODUCER_BYTE_RATE, produced.weight - size)
        target = f"{number}/{format_name}"
        try:
            key, places = await self.placed(rights, topic, produced, number, name, target, body)
        except UnknownPartition:
            call.charge(max(size, produced.weight))
            topic = await self.newest(topic)
            key, places = await self.placed(rights, topic, produced, number, name, target, body)
        if format_name != "arrow":  # its columns refer to the body
            body = b""
        call.release()  # the records are now those of the write buffer
        placements = await self.append(topic, produced, places, acks, key, size, linger_s)
        if key is not None and placements is not None:
            places = self._places_of_first(topic, places, produced, number, key)
        self._counters.add_records_in(produced.count, size, topic.name)
        if query.get("async") == "true":
            return HttpResponse(204, b"")
        if format_name == "arrow":
            return HttpResponse(200, _ranges(places, placements, produced.count))
        return HttpResponse(200, json_out.encode_placements(places, placements, produced.count))

    async def append(
        self,
        topic: Topic,
        produced: json_in.Produced,
        places: RecordPartitions,
        acks: Acks,
        key: IdempotencyKey | None,
        size: int,
        linger_s: float | None,
    ) -> list[AppendedRange] | None:
        """Append the checked records of a body of `size` bytes.

        If acks is not `all`, return None, because the offsets are not known yet.
        """
        return await self._broker.records.append(
            topic,
            [(places, produced.rows)],
            size=max(size, produced.weight),
            is_json=produced.is_json,
            acks=acks,
            key=key,
            has_timestamps=produced.has_timestamps,
            linger_s=linger_s,
        )

    async def topic(self, name: str, rights: CallerRights = ALL_RIGHTS) -> Topic:
        """Return the topic, or create it if it does not exist and auto-creation is on.

        If it is not in the view, refresh the view first. Raises Forbidden if the caller may not
        create it.
        """
        try:
            return self._broker.state.topic(name)
        except UnknownTopic:
            check_printable("topic_name", name)
            await self._broker.refresh()
        topic = self._broker.state.topics.get(name)
        return topic or await self._topics.create_on_demand(
            HttpChange(rights, partial(self._audit_creation, rights)), name
        )

    def _audit_creation(self, rights: CallerRights, name: str, status: int) -> None:
        if self._audit is not None:
            request = AuditedRequest(f"auto.create.topics {name}", rights.principal, rights.host)
            self._audit.changed(request, status)

    async def newest(self, topic: Topic) -> Topic:
        """Return the topic with partitions that other brokers may have added (I3)."""
        await self._broker.refresh()
        return self._broker.state.topic(topic.name)

    async def placed(
        self,
        rights: CallerRights,
        topic: Topic,
        produced: json_in.Produced,
        number: int | None,
        name: str | None,
        target: str,
        body: bytes,
    ) -> tuple[IdempotencyKey | None, RecordPartitions]:
        """Check the records; return the request's key and the records' partitions.

        `name` is the key's, None without one; `target` is that of `fingerprint` without the topic.
        With a key, the partitions depend only on the request's content and on the topic's number of
        partitions, so a retry gets the same partitions on any broker.
        """
        key = None
        if name is not None:
            mark = await self.fingerprint(rights, f"{topic.topic_id}/{target}", body)
            key = IdempotencyKey(name, mark, len(topic.partitions))
        await self.check(produced, topic.config, key)
        return key, self.place_among(topic.name, len(topic.partitions), produced, number, key)

    async def check(
        self, produced: json_in.Produced, config: TopicConfig, key: IdempotencyKey | None
    ) -> None:
        """Check the records of a request, unless they are in the log under its key.

        If they are, the answer is that of the first request, although the topic may have got other
        configs. Raises InvalidRequest.
        """
        try:
            check_records(produced, config)
        except InvalidRequest:
            if key is None:
                raise
            await self._broker.refresh()  # another broker may have appended them
            if self._broker.state.idempotency_record(key.key, PRINCIPAL.get()) is None:
                raise

    def _decode_small(self, body: bytes, format_name: str) -> json_in.Produced | None:
        """Decode a body on the event loop.

        If the body, or what it unpacks to, has more than DECODE_INLINE_BYTES, or more than
        DECODE_INLINE_MESSAGES, return None.
        """
        if len(body) > DECODE_INLINE_BYTES:
            return None
        now_ms = self._broker.store_time.now_ms()
        try:
            return _decoded(body, format_name, now_ms, DECODE_INLINE_BYTES, DECODE_INLINE_MESSAGES)
        except arrow.UnpackedTooLarge:
            return None

    async def _decode_large(
        self, call: HttpRequest, body: bytes, format_name: str
    ) -> json_in.Produced:
        """Decode a body in a thread.

        A body of Arrow may unpack to `request_bytes_max` (I10). Most do not, so the first try is
        for less memory, and more of them are decoded at once.
        """
        decode = partial(_decoded, body, format_name, self._broker.store_time.now_ms())
        bound, most = self._decoded_max(body), self._settings.request_bytes_max
        weight_of = attrgetter("weight")
        try:
            return await self.decode_large(call, body, partial(decode, bound), weight_of, bound)
        except arrow.UnpackedTooLarge:
            if bound == most:
                raise
        return await self.decode_large(call, body, partial(decode, most), weight_of, most)

    async def decode_large(
        self,
        call: HttpRequest,
        body: bytes,
        decode: Callable[[], T],
        weight_of: Callable[[T], int],
        decoded_max: int | None = None,
    ) -> T:
        """Decode a large body in a thread.

        The call then has the memory of the body, or of what is decoded from it if that is more.
        Raises Unavailable.
        """
        call.charge(len(body))
        bound = self._decoded_max(body) if decoded_max is None else decoded_max
        decoded = await self._threads.run(rights_of(call.scope), bound, decode, call.share)
        call.charge(max(len(body), weight_of(decoded)))
        return decoded

    async def decode_in_thread(
        self, rights: CallerRights, body: bytes, decode: Callable[[], T]
    ) -> T:
        """Decode a large record in a thread, while the event loop serves other requests.

        The record has its memory already.
        """
        return await self._threads.run(rights, self._decoded_max(body), decode)

    async def fingerprint(self, rights: CallerRights, target: str, body: bytes) -> bytes:
        """Return 16 bytes that identify a request: the hash of its target and its body.

        A v2 target has the topic, the partition and the format.
        """
        work = partial(_fingerprint, target, body)
        if len(body) <= DECODE_INLINE_BYTES:
            return work()
        return await self._threads.run_to_end(rights, work)

    def _decoded_max(self, body: bytes) -> int:
        size = max(len(body), DECODE_INLINE_BYTES)  # of a small body that takes more memory
        return min(DECODED_FACTOR * size, self._settings.request_bytes_max)

    def place_among(
        self,
        name: str,
        count: int,
        produced: json_in.Produced,
        number: int | None,
        key: IdempotencyKey | None,
    ) -> RecordPartitions:
        """Return the records' partitions in a topic with `count` partitions.

        Raises UnknownPartition.
        """
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
        places: RecordPartitions,
        produced: json_in.Produced,
        number: int | None,
        key: IdempotencyKey,
    ) -> RecordPartitions:
        """Return the partitions that the first request with this key got.

        They differ from `places` if the topic has got more partitions since then.
        """
        key_record = self._broker.state.idempotency_record(key.key, PRINCIPAL.get())
        if key_record is None or key_record.claim.partitions == key.partitions:
            return places
        assert isinstance(key_record.claim.partitions, int), "one topic has one count"
        return self.place_among(topic.name, key_record.claim.partitions, produced, number, key)


def _decoded(
    body: bytes,
    format_name: str,
    now_ms: int,
    bytes_max: int,
    messages_max: int = arrow.MESSAGES_MAX,
) -> json_in.Produced:
    if format_name == "arrow":
        return arrow.decode_arrow(body, now_ms, bytes_max=bytes_max, messages_max=messages_max)
    if format_name in SCHEMA_FORMATS:
        raise schema_error(body)
    return json_in.decode_json(body, cast("json_in.Format", format_name), now_ms)


def _acks(query: dict[str, str]) -> Acks:
    if query.get("async") == "true":
        return Acks.NONE  # Strimzi's fire and forget
    text = query.get("acks", "all")
    if text not in ACKS:
        raise InvalidParameter(f"parameter acks={text!r} must be all, 1 or 0")
    return ACKS[text]


def _fingerprint(target: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(f"{target}/".encode(), digest_size=16)
    digest.update(body)
    return digest.digest()


def _ranges(places: RecordPartitions, placements: list[AppendedRange] | None, count: int) -> bytes:
    """Return the response to an Arrow request: one range per partition, not one line per record."""
    ranges: list[tuple[int, int | None, int]] = (
        [(partition, None, rows) for partition, rows in tally(places, count)]
        if placements is None
        else [(placed.partition, placed.base_offset, placed.count) for placed in placements]
    )
    return msgspec.json.encode(ArrowReport([RangeReport(*fields) for fields in ranges]))


RETRY_ERRORS = {
    429: "the buffer is full: retry after `Retry-After` seconds",
    503: "not written: retry",
    504: "the outcome is unknown: retry with the same Idempotency-Key",
}
IDEMPOTENCY_KEY = Parameter(
    "idempotency-key",
    "a retry with the same key and body gets the first response, on any broker",
    {"type": "string"},
    "header",
)
LINGER = Parameter(
    "linger",
    f"seconds for which the records may wait for their commit, 0 to {LINGER_S_MAX:g}: a patient "
    "request shares the PUT of another one; `0` begins a commit at once, also if the cluster's "
    "budget of commits is used up. Without it, the topic's `flush.ms` counts, or the budget",
    {"type": "number", "minimum": 0, "maximum": LINGER_S_MAX},
    "header",
)
_DOC = RouteDoc(
    {
        400: "not JSON, invalid base64, a wrong type; an invalid parameter, Linger or "
        "Idempotency-Key",
        404: "40401 unknown topic, 40402 unknown partition",
        408: "40801: a body with a schema, but there is no schema registry",
        413: "the body, or a record, is over its limit",
        415: "an unknown Content-Type",
        422: "no records; a timestamp beyond the topic's bounds; or the Idempotency-Key was used "
        "for another body",
        **RETRY_ERRORS,
    },
    tag="records",
    parameters=(
        Parameter(
            "acks",
            "`all`: the broker answers when the records are in object storage, with their offsets; "
            "`1`: when they are on its disk; `0`: when it has checked them",
            {"type": "string", "default": "all"},
        ),
        IDEMPOTENCY_KEY,
        LINGER,
    ),
    body=Body(
        b"application/vnd.kafka.json.v2+json",
        {"records": [{"key": "N14228", "value": {"delay": 2}}]},
    ),
    answers={
        200: Answer(
            "One entry per record, in the request's order. `offset` is null with acks=1 and 0. The "
            "response to an Arrow request has one range per partition.",
            (
                Content(
                    (JSON_V2,),
                    (ProduceReport, ArrowReport),
                    {
                        "offsets": [
                            {"partition": 0, "offset": 42, "error_code": None, "error": None}
                        ],
                        "key_schema_id": None,
                        "value_schema_id": None,
                    },
                ),
            ),
        ),
        204: Answer("With `async=true`: accepted, without an acknowledgment."),
    },
)
_WRITE = Permission(PRODUCE, "topic_name")
_TOPIC = "/topics/{topic_name}"

ROUTES = (
    Route(
        "POST",
        _TOPIC,
        Produce.produce,
        _WRITE,
        "produce",
        V2,
        _DOC._replace(
            summary="Produce records",
            text="A record goes to the partition in its field `partition`. Without this field, the "
            "partition is the hash (murmur2) of the record's key, modulo the number of partitions. "
            "For records without a key, the broker chooses a partition, and takes the next "
            "partition after about 16 KiB of values of such records.",
        ),
        is_ack=True,
        body=None,
    ),
    Route(
        "POST",
        f"{_TOPIC}/partitions/{{partition_id}}",
        Produce.produce,
        _WRITE,
        "produce",
        V2,
        _DOC._replace(
            summary="Produce records to a partition",
            text="A record's own `partition` takes precedence.",
        ),
        is_ack=True,
        body=None,
    ),
)
