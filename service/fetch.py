"""Fetch: records of both tiers in the dialect that the reader asks for.

Stateless: the answer's headers say where to go on. A fetch at the end waits (long poll); a follower
keeps the connection and is sent records as they are committed, as server-sent events or lines.
"""

import asyncio
from collections.abc import Callable

from service import wire_arrow, wire_out
from service.errors import error_body, error_response
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
from storage.errors import LogError, Unavailable, UnknownPartition
from storage.log import Fetched, Log

OFFSET_MAX = 2**63 - 1
TIMESTAMP_MAX = 253_402_300_799_999  # the end of the year 9999, ms
KEEPALIVE_S = 15.0
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


class Fetch:
    """GET /topics/{topic}/partitions/{partition}/records. One per broker."""

    def __init__(self, broker: Log, settings: Settings, counters: HttpCounters) -> None:
        self._log = broker
        self._settings = settings
        self._counters = counters
        self._in_flight = 0

    async def serve(self, call: Call, topic: str, partition_text: str) -> Answer | None:
        """The answer, or None when it was streamed."""
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
        if format_name == "sse" or (format_name == "ndjson" and query.get("follow") == "true"):
            await self._follow(call, topic, number, offset, bytes_max, format_name, embedded)
            return None
        with self._budget(bytes_max):
            fetched = await self._log.fetch(
                topic, number, offset, bytes_max=bytes_max, wait_s=wait_ms / 1000
            )
            body, records = encode(fetched, topic, number, format_name, embedded)
        return Answer(
            200, body, MEDIA_TYPES[format_name], headers=_positions(fetched), records=records
        )

    def _budget(self, size: int) -> "_Budget":
        if self._in_flight + size > self._settings.fetch_bytes_in_flight and self._in_flight:
            raise Unavailable(
                f"{self._in_flight} bytes of fetches are being answered, the bound is "
                f"{self._settings.fetch_bytes_in_flight}: try again later"
            )
        return _Budget(self, size)

    def charge(self, size: int) -> None:
        """Count bytes of answers under way (I10)."""
        self._in_flight += size

    async def _partition(self, topic: str, text: str) -> int:
        if topic not in self._log.state.topics:
            await self._log.wal.refresh()
        count = len(self._log.state.topic(topic).partitions)
        if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) < count:
            return int(text)
        raise UnknownPartition(topic, text, count)  # type: ignore[arg-type]

    async def _offset(self, call: Call, topic: str, number: int, query: dict[str, str]) -> int:
        if "last-event-id" in query or b"last-event-id" in call.headers:
            text = (
                call.headers.get(b"last-event-id", b"").decode("latin-1") or query["last-event-id"]
            )
            return integer("Last-Event-ID", text, 0, OFFSET_MAX - 1) + 1
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

    async def _follow(
        self,
        call: Call,
        topic: str,
        number: int,
        offset: int,
        bytes_max: int,
        format_name: str,
        embedded: str,
    ) -> None:
        # The first fetch comes before the response starts, so that its errors have a status.
        fetched = await self._log.fetch(topic, number, offset, bytes_max=bytes_max)
        body, records = encode(fetched, topic, number, format_name, embedded)
        await call.start_stream(MEDIA_TYPES[format_name], _positions(fetched))
        gone = asyncio.create_task(_until_gone(call))
        try:
            while not gone.done():
                if body:
                    await call.chunk(body)
                    self._counters.add_records_out(records, len(body))
                elif format_name == "sse":
                    await call.chunk(b": keep-alive\n\n")
                fetching = asyncio.create_task(
                    self._log.fetch(
                        topic,
                        number,
                        fetched.next_offset,
                        bytes_max=bytes_max,
                        wait_s=KEEPALIVE_S,
                    )
                )
                await asyncio.wait({fetching, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    fetching.cancel()
                    break
                fetched = fetching.result()
                body, records = encode(fetched, topic, number, format_name, embedded)
        except LogError as error:
            # The status is long sent: the last event says why the stream ends.
            await call.chunk(_last_words(format_name, error))
        finally:
            gone.cancel()
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


def encode(
    fetched: Fetched, topic: str, number: int, format_name: str, embedded: str
) -> tuple[bytes, int]:
    """The body of an answer, and how many records are in it."""
    batches = [piece.batch for piece in fetched.pieces]
    records = sum(batch.num_rows for batch in batches)
    if format_name == "arrow":
        return wire_arrow.encode_arrow(batches), records
    encoder: Callable[..., bytes] = {
        "ndjson": wire_out.encode_ndjson,
        "sse": wire_out.encode_sse,
    }.get(format_name, wire_out.encode_records)
    flags = [piece.is_json for piece in fetched.pieces]
    return encoder(batches, topic, number, embedded, is_json=flags), records


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


def _positions(fetched: Fetched) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"tidelog-next-offset", b"%d" % fetched.next_offset),
        (b"tidelog-high-watermark", b"%d" % fetched.high_watermark),
        (b"tidelog-log-start-offset", b"%d" % fetched.log_start_offset),
    )


async def _until_gone(call: Call) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass
