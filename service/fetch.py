"""Fetch: records of both tiers in the dialect that the reader asks for.

Stateless: the answer's headers say where to go on. A fetch at the end waits (long poll); a follower
keeps the connection and is sent records as they are committed, as server-sent events or lines.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from service import wire_arrow, wire_out
from service.caller import rights_of
from service.errors import check_printable, error_body, error_response
from service.http import (
    ARROW,
    EVENT_STREAM,
    JSON_V2,
    NDJSON,
    Answer,
    Call,
    InvalidParameter,
    NotAcceptable,
    integer,
    media_type,
)
from service.settings import Settings
from service.telemetry import HttpCounters
from storage.access import CONSUMER_BYTE_RATE
from storage.acls import READ, TOPIC
from storage.errors import LogError, Unavailable, UnknownPartition
from storage.log import Fetched, Log
from storage.state import Topic

OFFSET_MAX = 2**63 - 1
TIMESTAMP_MAX = 253_402_300_799_999  # the end of the year 9999, ms
KEEPALIVE_S = 15.0
DIGITS_MAX = 9
"""Of a partition's number: `int` takes its time for thousands."""
FORMATS: dict[bytes, str] = {
    b"": "binary",
    b"*/*": "binary",
    b"application/*": "binary",
    JSON_V2: "binary",
    b"application/json": "binary",
    b"application/vnd.kafka.v1+json": "binary",
    b"application/vnd.kafka+json": "binary",
    ARROW: "arrow",
    NDJSON: "ndjson",
    EVENT_STREAM: "sse",
    **{
        f"application/vnd.kafka.{name}{version}+json".encode(): name
        for name in ("json", "binary", "text")
        for version in (".v2", ".v1", "")
    },
}
MEDIA_TYPES: dict[str, bytes] = {
    "json": b"application/vnd.kafka.json.v2+json",
    "binary": b"application/vnd.kafka.binary.v2+json",
    "text": b"application/vnd.kafka.text.v2+json",
    "arrow": ARROW,
    "ndjson": NDJSON,
    "sse": EVENT_STREAM,
}
EMBEDDED = ("json", "binary", "text")


class View(NamedTuple):
    """What a reader wants to see, and how."""

    topic: str
    partition: int
    format_name: str
    embedded: str
    bytes_max: int


class Page(NamedTuple):
    """Records as they were read, and as they are sent."""

    fetched: Fetched
    body: bytes
    records: int


class Fetch:
    """GET /topics/{topic}/partitions/{partition}/records. One per broker."""

    def __init__(self, broker: Log, settings: Settings, counters: HttpCounters) -> None:
        self._log = broker
        self._settings = settings
        self._counters = counters
        self._in_flight = 0

    async def serve(self, call: Call, topic: str, partition_text: str) -> Answer | None:
        """The answer, or None when it was streamed."""
        rights = rights_of(call.scope)
        rights.pay(CONSUMER_BYTE_RATE)
        format_name = _format(call.headers.get(b"accept", b""))
        query = call.query()
        embedded = _embedded(query, format_name)
        number = await self._partition(topic, partition_text)
        bytes_max = self._settings.fetch_bytes
        if "max_bytes" in query:
            asked = integer("max_bytes", query["max_bytes"], 1, OFFSET_MAX)
            bytes_max = min(asked, self._settings.fetch_bytes_max)
        wait_ms = 0
        if "timeout" in query:
            asked = integer("timeout", query["timeout"], 0, OFFSET_MAX)
            wait_ms = min(asked, self._settings.fetch_wait_ms_max)
        offset = await self._offset(call, topic, number, query)
        view = View(topic, number, format_name, embedded, bytes_max)
        if format_name == "sse" or (format_name == "ndjson" and query.get("follow") == "true"):
            await self._follow(call, view, offset)
            return None
        page = await self._page(view, offset, wait_ms / 1000, call)
        rights.owe(CONSUMER_BYTE_RATE, len(page.body))
        self._counters.add_records_out(page.records, len(page.body), topic)
        return Answer(200, page.body, MEDIA_TYPES[format_name], _positions(page.fetched))

    async def _page(
        self, view: View, offset: int, wait_s: float = 0.0, call: Call | None = None
    ) -> Page:
        """The records from `offset` on, encoded. Waiting for the first takes none of the bound: or
        a few idle readers would lock out all others."""
        held = self._log.state.partition(view.topic, view.partition)
        if wait_s > 0 and offset >= held.high_watermark:
            started_s = self._log.clock.boot_s()
            fetched = await self._log.fetch(
                view.topic, view.partition, offset, bytes_max=1, wait_s=wait_s
            )
            if call is not None:
                call.waited_s = self._log.clock.boot_s() - started_s
            if not fetched.pieces:
                return encode(view, fetched)
        with self.budget(view.bytes_max):
            return encode(
                view,
                await self._log.fetch(view.topic, view.partition, offset, bytes_max=view.bytes_max),
            )

    def budget(self, size: int) -> "_Budget":
        """Room for an answer of so many bytes while it is made (I10); raises Unavailable."""
        if self._in_flight + size > self._settings.fetch_bytes_in_flight and self._in_flight:
            raise Unavailable(
                f"{self._in_flight} bytes of fetches are being answered, the bound is "
                f"{self._settings.fetch_bytes_in_flight}: try again later"
            )
        return _Budget(self, size)

    def charge(self, size: int) -> None:
        """Count bytes of answers under way (I10)."""
        self._in_flight += size

    def count(self, records: int, size: int, topic: str | None = None) -> None:
        """Records were sent in an answer of so many bytes; no topic: of several."""
        self._counters.add_records_out(records, size, topic)

    async def _partition(self, topic: str, text: str) -> int:
        held = self._log.state.topics.get(topic)
        if held is None or not _is_partition(held, text):
            check_printable("topic_name", topic)
            await self._log.wal.refresh()  # another broker may just have made it (I3)
            held = self._log.state.topic(topic)
            if not _is_partition(held, text):
                raise UnknownPartition(topic, text, len(held.partitions))  # type: ignore[arg-type]
        return int(text)

    async def _offset(self, call: Call, topic: str, number: int, query: dict[str, str]) -> int:
        seen = call.headers.get(b"last-event-id", b"").decode("latin-1")
        if seen or "last-event-id" in query:
            return integer("Last-Event-ID", seen or query["last-event-id"], 0, OFFSET_MAX - 1) + 1
        if "timestamp" in query:
            if "offset" in query:
                raise InvalidParameter("give offset or timestamp, not both")
            stamp = integer("timestamp", query["timestamp"], 0, TIMESTAMP_MAX)
            found = await self._log.offset_for_timestamp(topic, number, stamp)
            if found is not None:
                return found
            return self._log.state.partition(topic, number).high_watermark
        text = query.get("offset", "earliest")
        if text == "earliest":
            return self._log.state.partition(topic, number).log_start_offset
        if text == "latest":
            return (await self._log.offsets(topic, number)).high_watermark
        return integer("offset", text, 0, OFFSET_MAX)

    async def _follow(self, call: Call, view: View, offset: int) -> None:
        # The first page comes before the response starts, so that its errors have a status.
        page = await self._page(view, offset)
        await call.start_stream(MEDIA_TYPES[view.format_name], _positions(page.fetched))
        started_s = self._log.clock.boot_s()
        rights = rights_of(call.scope)
        gone = asyncio.create_task(until_gone(call))
        paging: asyncio.Task[Page] | None = None
        try:
            while not gone.done():
                if page.body:
                    await call.chunk(page.body)
                    self.count(page.records, len(page.body), view.topic)
                    rights.owe(CONSUMER_BYTE_RATE, len(page.body))
                elif view.format_name == "sse":
                    await call.chunk(b": keep-alive\n\n")
                if (owes_s := rights.owes_s(CONSUMER_BYTE_RATE)) > 0:
                    await asyncio.wait({gone}, timeout=min(owes_s, KEEPALIVE_S))
                    page = page._replace(body=b"")
                    await rights.check(READ, TOPIC, view.topic)
                    continue
                await rights.check(READ, TOPIC, view.topic)  # it may have ended meanwhile
                paging = asyncio.create_task(
                    self._page(view, page.fetched.next_offset, KEEPALIVE_S)
                )
                await asyncio.wait({paging, gone}, return_when=asyncio.FIRST_COMPLETED)
                if paging.done():
                    page = paging.result()
        except LogError as error:
            # The status is long sent: the last event says why the stream ends.
            await call.chunk(_last_words(view.format_name, error))
        finally:
            gone.cancel()
            if paging is not None:
                paging.cancel()
            call.waited_s = self._log.clock.boot_s() - started_s
        await call.end()


class _Budget:
    """Holds bytes of the bound while an answer is made."""

    def __init__(self, owner: Fetch, size: int) -> None:
        self._owner = owner
        self._size = size

    def __enter__(self) -> None:
        self._owner.charge(self._size)

    def __exit__(self, *_: object) -> None:
        self._owner.charge(-self._size)


def encode(view: View, fetched: Fetched) -> Page:
    """The body of an answer, in the form that the reader asked for."""
    batches = [piece.batch for piece in fetched.pieces]
    records = sum(batch.num_rows for batch in batches)
    if view.format_name == "arrow":
        return Page(fetched, wire_arrow.encode_arrow(batches), records)
    encoder: Callable[..., bytes] = {
        "ndjson": wire_out.encode_ndjson,
        "sse": wire_out.encode_sse,
    }.get(view.format_name, wire_out.encode_records)
    flags = [piece.is_json for piece in fetched.pieces]
    body = encoder(batches, view.topic, view.partition, view.embedded, is_json=flags)
    return Page(fetched, body, records)


def _last_words(format_name: str, error: LogError) -> bytes:
    """Why a stream ends, as its last event or line."""
    body = error_body(error_response(error).code, str(error))
    return b"event: error\ndata: " + body + b"\n\n" if format_name == "sse" else body + b"\n"


def _format(accept: bytes) -> str:
    for part in accept.split(b",") if b"," in accept else (accept,):
        found = FORMATS.get(media_type(part))
        if found is not None:
            return found
    raise NotAcceptable(f"HTTP 406 Not Acceptable: {accept.decode('latin-1')}")


def _embedded(query: dict[str, str], format_name: str) -> str:
    """How keys and values appear inside: the format itself, or `format=` for lines and events."""
    if format_name in EMBEDDED:
        return format_name
    embedded = query.get("format", "json")
    if embedded not in EMBEDDED:
        raise InvalidParameter(f"parameter format={embedded!r} must be json, binary or text")
    return embedded


def _is_partition(topic: Topic, text: str) -> bool:
    is_number = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    return is_number and int(text) < len(topic.partitions)


def _positions(fetched: Fetched) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"tidelog-next-offset", b"%d" % fetched.next_offset),
        (b"tidelog-high-watermark", b"%d" % fetched.high_watermark),
        (b"tidelog-log-start-offset", b"%d" % fetched.log_start_offset),
    )


async def until_gone(call: Call) -> None:
    """Returns when the client has gone away."""
    while (await call.receive())["type"] != "http.disconnect":
        pass
