"""Confluent's v3 produce: a stream of concatenated JSON records, and batches of records.

Each record is a request of its own, and goes into the next commit. Reports have the order of the
records. If the request has an `Idempotency-Key`, each record gets its own key from it: `<key>/<n>`
for record n of a stream (from 0), `<key>/<id>` for an entry of a batch.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from tidelog.service.formats import json_in, v3_records
from tidelog.service.http.connection_admission import STREAM_BYTES
from tidelog.service.http.errors import TopicNotHosted, answered
from tidelog.service.http.media_types import JSON
from tidelog.service.http.request import HttpRequest, HttpResponse
from tidelog.service.http.route import V3, Answer, Body, Content, Permission, Route, RouteDoc
from tidelog.service.operations.rights import PRODUCE
from tidelog.service.routes.dependencies import check_cluster
from tidelog.service.routes.produce import IDEMPOTENCY_KEY, LINGER, Produce
from tidelog.service.routes.produce_requests import body_of, client_key, linger_of
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.service.security.request_cpu_time import measured
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.codec.chunk import RECORDS_MAX, weight
from tidelog.storage.core.errors import (
    InvalidRequest,
    LogError,
    RecordTooLarge,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import Acks
from tidelog.storage.state.access import PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE
from tidelog.storage.state.topic import Topic

Report: TypeAlias = dict[str, Any]
T = TypeVar("T")

IN_FLIGHT_MAX = 1000
"""Maximum uncommitted records of one stream. At this number, the broker stops reading the stream
until it has sent a report (I10)."""
DECODE_INLINE_BYTES = 64 * 1024
"""Records and batches of at most this size are decoded on the event loop. A header takes ~1 us."""
SPLIT_BYTES = 16 * 1024
"""A stream is split into objects in pieces of at most this size, because each of them may have
thousands of objects."""
REPORTS_TOGETHER = 100
"""Reports that are ready are sent together, at most so many."""


class _StreamMemory:
    """The bytes that a stream holds beside the write buffer.

    They are its unpacked body if it was compressed, its records without a report, and the object
    that has not ended. They are charged to the memory of bodies.
    """

    def __init__(self, call: HttpRequest) -> None:
        self._call = call
        self._body = self._records = self._unfinished = 0
        self._has_report = asyncio.Event()

    def take_body(self, size: int) -> None:
        self._body = size

    def take_record(self, size: int) -> None:
        self._records += size

    def give_record(self, size: int) -> None:
        self._records -= size
        self._has_report.set()
        share = self._call.share
        if share is not None and self._size() < share.size:
            self._call.charge(self._size())

    def _size(self) -> int:
        size = self._records + self._unfinished
        return self._body + (size if size > STREAM_BYTES else 0)

    async def charge(self, unfinished: int) -> None:
        """Charge what the stream holds now.

        If it does not fit, wait for reports: then only an object that has not ended does not fit.
        Raises Unavailable.
        """
        self._unfinished = unfinished
        while (size := self._size()) or self._call.share is not None:
            try:
                self._call.charge(size)
                return
            except Unavailable:
                if not self._records:
                    raise
            self._has_report.clear()
            await self._has_report.wait()


class _Decoded(NamedTuple):
    """A record, and what its report shows of it."""

    produced: json_in.Produced
    timestamp_ms: int
    key: v3_records.ShownValue | None
    value: v3_records.ShownValue | None


class BatchReport(msgspec.Struct):
    """The response to a batch: a report for each entry, with the entry's id."""

    successes: list[dict[str, Any]]
    failures: list[dict[str, Any]]


class ProduceV3:
    """The v3 produce routes. One per broker."""

    def __init__(
        self, broker: Broker, settings: RequestSettings, produce: Produce, counters: HttpCounters
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._produce = produce
        self._counters = counters

    async def stream(self, call: HttpRequest, cluster: str, topic_name: str) -> None:
        """Append the records of a stream; send reports while records arrive."""
        rights = rights_of(call.scope)
        rights.charge(PRODUCER_BYTE_RATE)
        await self._topic(cluster, topic_name, rights)
        key, linger_s = client_key(call), linger_of(call)
        reports: asyncio.Queue[asyncio.Task[Report] | None] = asyncio.Queue(IN_FLIGHT_MAX)
        sender = asyncio.create_task(_send_reports(call, reports))
        number = 0
        memory = _StreamMemory(call)
        try:
            try:
                async for record in _records(call, memory, self._settings.request_bytes_max):
                    name = None if key is None else f"{key}/{number}"
                    memory.take_record(len(record))
                    reporting = self._report(
                        call, topic_name, record, name, rights, linger_s, memory
                    )
                    report = asyncio.create_task(measured(rights, reporting))
                    # If the sender has failed, `_put` raises its error, and reading ends.
                    await _put(reports, report, sender)
                    number += 1
            except (InvalidRequest, Unavailable) as error:
                if not number:
                    raise
                # The rest of the body is not split into records, so this is the last report.
                await _put(reports, asyncio.create_task(self._refused(call, error)), sender)
            if not number:
                raise json_in.InvalidBody("the body is empty")
            await _put(reports, None, sender)
            await sender
        finally:
            sender.cancel()

    async def batch(self, call: HttpRequest, cluster: str, topic_name: str) -> HttpResponse:
        """Append the records of a batch; respond 207 with successes and failures by id."""
        rights = rights_of(call.scope)
        rights.charge(PRODUCER_BYTE_RATE)  # a throttled client creates no topic
        await self._topic(cluster, topic_name, rights)
        key, linger_s = client_key(call), linger_of(call)
        body = await body_of(call, rights, self._settings.request_bytes_max)
        entries = await self._entries(call, body)
        del body  # the entries are copies
        reports = await asyncio.gather(
            *(
                measured(
                    rights,
                    self._report(
                        call,
                        topic_name,
                        record,
                        None if key is None else f"{key}/{entry_id}",
                        rights,
                        linger_s,
                    ),
                )
                for entry_id, record in entries
            )
        )
        successes: list[Report] = []
        failures: list[Report] = []
        for (entry_id, _), report in zip(entries, reports, strict=True):
            is_done = report["error_code"] == 200
            (successes if is_done else failures).append({"id": entry_id, **report})
        return HttpResponse(207, msgspec.json.encode(BatchReport(successes, failures)), JSON)

    async def _entries(self, call: HttpRequest, body: bytes) -> list[tuple[str, bytes]]:
        """Return the id and the record of each entry of a batch.

        If the batch is large, the call has their memory.
        """
        if len(body) <= DECODE_INLINE_BYTES:
            return v3_records.decode_v3_batch(body)
        decode = partial(v3_records.decode_v3_batch, body)
        return await self._produce.decode_large(call, body, decode, _bytes_of_records)

    async def _decoded(self, rights: CallerRights, body: bytes, decode: Callable[[], T]) -> T:
        if len(body) <= DECODE_INLINE_BYTES:
            return decode()
        return await self._produce.decode_in_thread(rights, body, decode)

    async def _topic(self, cluster: str, name: str, rights: CallerRights) -> Topic:
        check_cluster(cluster, self._broker.identity.cluster_id)
        try:
            return await self._produce.topic(name, rights)
        except UnknownTopic as error:
            raise TopicNotHosted(name) from error

    async def _report(
        self,
        call: HttpRequest,
        topic_name: str,
        record: bytes,
        name: str | None,
        rights: CallerRights,
        linger_s: float | None,
        memory: _StreamMemory | None = None,
    ) -> Report:
        """Append one record and return its report, also after an error.

        A record of a stream is in `memory`, and no quota is charged with its bytes yet.
        """
        try:
            # Check for each record, because a stream may outlast the caller's key and permission.
            if memory is not None:
                rights.charge(REQUEST_PERCENTAGE)
                rights.charge(PRODUCER_BYTE_RATE, len(record))
            await rights.check(PRODUCE, topic_name)
            return await self._append(topic_name, record, name, rights, linger_s)
        except UnknownTopic:
            return await self._refused(call, TopicNotHosted(topic_name))
        except LogError as error:
            return await self._refused(call, error)
        finally:
            if memory is not None:
                memory.give_record(len(record))

    async def _refused(self, call: HttpRequest, error: LogError) -> Report:
        answer = answered(error, call.scope, self._counters)
        return {"error_code": answer.code, "message": answer.message}

    async def _append(
        self,
        topic_name: str,
        record: bytes,
        name: str | None,
        rights: CallerRights,
        linger_s: float | None,
    ) -> Report:
        now_ms = self._broker.store_time.now_ms()
        decoded = await self._decoded(rights, record, partial(_decoded, record, now_ms))
        produced = decoded.produced
        rights.record(PRODUCER_BYTE_RATE, max(produced.weight - len(record), 0))
        # Find the topic for each record, because it may be deleted or get more partitions
        # meanwhile.
        topic = await self._produce.topic(topic_name, rights)
        placed = partial(self._produce.placed, rights)
        try:
            key, places = await placed(topic, produced, None, name, "v3", record)
        except UnknownPartition:
            topic = await self._produce.newest(topic)
            key, places = await placed(topic, produced, None, name, "v3", record)
        placements = await self._produce.append(
            topic, produced, places, Acks.ALL, key, len(record), linger_s
        )
        self._counters.add_records_in(1, len(record), topic.name)
        assert placements is not None, "acks=all returns the appended ranges"
        (placement,) = placements
        return {
            "error_code": 200,
            "cluster_id": self._broker.identity.cluster_id,
            "topic_name": topic.name,
            "partition_id": placement.partition,
            "offset": placement.base_offset,
            "timestamp": _instant(decoded.timestamp_ms),
            "key": _shown(decoded.key),
            "value": _shown(decoded.value),
        }


def _bytes_of_records(entries: list[tuple[str, bytes]]) -> int:
    return sum(len(record) for _, record in entries)


def _decoded(record: bytes, now_ms: int) -> _Decoded:
    decoded = v3_records.decode_v3_record(record, now_ms)
    rows = v3_records.columns_of_many(decoded.rows)
    partitions: list[int | None] | None = None
    if decoded.partition is not None:
        partitions = [decoded.partition]
    produced = json_in.Produced(
        rows, partitions, decoded.is_json, 1, weight(rows), has_timestamps=True
    )
    return _Decoded(produced, decoded.rows.timestamps[0], decoded.key, decoded.value)


async def _records(
    call: HttpRequest, memory: _StreamMemory, bytes_max: int
) -> AsyncIterator[bytes]:
    """Iterate over the JSON objects of the body as they arrive.

    Raises InvalidRequest at the first invalid object, and Unavailable if there is no memory for an
    object.

    A body with a Content-Encoding is unpacked when it is complete. `bytes_max` is its maximum
    size, and RECORDS_MAX the maximum number of its records.
    """
    stream = v3_records.ObjectStream()
    has_more = b"content-encoding" not in call.headers
    if not has_more:
        body = await call.body(bytes_max)
        memory.take_body(len(body))
        await _check_count(body)
        async for record in _split(stream, memory, body):
            yield record
            if call.has_left:
                return
    while has_more:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            return
        has_more = message.get("more_body", False)
        async for record in _split(stream, memory, message.get("body", b"")):
            yield record
        stream.feed(b"")  # raises now if the bytes after these objects are invalid
    stream.finish()


async def _split(
    stream: v3_records.ObjectStream, memory: _StreamMemory, octets: bytes
) -> AsyncIterator[bytes]:
    """Iterate over the objects that end in the next bytes of a stream."""
    async for piece in _pieces(octets):
        for record in stream.feed(piece):
            yield record
        await memory.charge(stream.unfinished_bytes)


async def _pieces(octets: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(octets), SPLIT_BYTES):
        if start:
            await asyncio.sleep(0)
        yield octets[start : start + SPLIT_BYTES]


async def _check_count(body: bytes) -> None:
    """Raise RecordTooLarge for a body with more than RECORDS_MAX records.

    A few bytes may unpack to millions of them, and each has a report.
    """
    if body.count(b"}") <= RECORDS_MAX:
        return
    count, stream = 0, v3_records.ObjectStream()
    with contextlib.suppress(InvalidRequest):  # the report of this error comes in its place
        async for piece in _pieces(body):
            count += len(stream.feed(piece))
            if count > RECORDS_MAX:
                break
    if count > RECORDS_MAX:
        raise RecordTooLarge(
            f"a stream with Content-Encoding has {RECORDS_MAX} records at most: send it without, "
            "or in several requests"
        )


async def _put(
    reports: "asyncio.Queue[asyncio.Task[Report] | None]",
    report: "asyncio.Task[Report] | None",
    sender: "asyncio.Task[None]",
) -> None:
    """Queue a report, or None for the end of the stream.

    While the queue has room, this does not wait, so all records of one piece of the body get into
    the same flush.
    """
    if not reports.full():
        reports.put_nowait(report)
        return
    putting = asyncio.ensure_future(reports.put(report))
    await asyncio.wait({putting, sender}, return_when=asyncio.FIRST_COMPLETED)
    if not putting.done():
        putting.cancel()
        sender.result()


async def _send_reports(
    call: HttpRequest, reports: "asyncio.Queue[asyncio.Task[Report] | None]"
) -> None:
    ready: list[bytes] = []
    while (task := await reports.get()) is not None:
        if ready and not task.done():
            await _send(call, ready)
        ready.append(msgspec.json.encode(await task))
        if reports.empty() or len(ready) == REPORTS_TOGETHER:
            await _send(call, ready)
    await _send(call, ready)
    await call.end()


async def _send(call: HttpRequest, ready: list[bytes]) -> None:
    """Send the reports that are ready, each in a line."""
    if not ready:
        return
    if not call.status:
        await call.start_stream(JSON)
    await call.chunk(b"\r\n".join([*ready, b""]))
    ready.clear()


def _shown(shown: v3_records.ShownValue | None) -> dict[str, Any] | None:
    return None if shown is None else shown._asdict()


def _instant(timestamp_ms: int) -> str:
    instant = dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_RECORD = {"value": {"type": "JSON", "data": {"delay": 2}}}
_DOC = RouteDoc(
    {
        400: "an invalid Idempotency-Key or Linger, or a body that is not JSON",
        404: "404 another cluster, 40403 unknown topic",
        413: "the body is over its limit",
        422: "no records, or too many for a batch",
        503: "the store does not answer: retry",
    },
    parameters=(IDEMPOTENCY_KEY, LINGER),
)
_WRITE = Permission(PRODUCE, "topic_name")
_TOPIC = "/clusters/{cluster_id}/topics/{topic_name}"

ROUTES = (
    Route(
        "POST",
        f"{_TOPIC}/records",
        ProduceV3.stream,
        _WRITE,
        "records",
        V3,
        _DOC._replace(
            summary="Produce a stream of concatenated JSON records",
            text="The broker sends reports, in the records' order, while records arrive.",
            body=Body(JSON, _RECORD),
            answers={200: Answer("A report for each record.", (Content((JSON,)),))},
        ),
        is_ack=True,
        body=None,
    ),
    Route(
        "POST",
        f"{_TOPIC}/records:batch",
        ProduceV3.batch,
        _WRITE,
        "records",
        V3,
        _DOC._replace(
            summary="Produce up to ten records, with a report for each",
            text="The response is 207 with `successes` and `failures` by entry id.",
            body=Body(JSON, {"entries": [{"id": "1", **_RECORD}]}),
            answers={207: Answer("A report for each entry.", (Content((JSON,), (BatchReport,)),))},
        ),
        is_ack=True,
        body=None,
    ),
)
