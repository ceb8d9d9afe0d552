"""Print the records of partitions, each from a start offset to an end offset.

Reads are stateless, so the command repeats a failed request from the same offset. The broker sends
NDJSON. The command decodes a line only to print parts of it, or to find the end of the range.
"""

import asyncio
import datetime as dt
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import httpx
import msgspec
from msgspec import Raw

from tidelog.service.cli.client import Client, Refused
from tidelog.service.cli.requests import quoted
from tidelog.service.cli.results import CommandError, SlowProgress, warn, write_out
from tidelog.storage.io.tasks import together

Position: TypeAlias = str | int | dt.datetime

READS_AT_ONCE = 8
ENDS_SHOWN = 4
UNDECODABLE = 422
POLL_MS = 20_000
"""Timeout of a long poll at the end of a partition with `--follow`."""


class ConsumeOptions(NamedTuple):
    """Options of the command line. If `until` is None, there is no end. With --group, `start`
    applies, but `until` does not."""

    partitions: Sequence[int]
    start: Position
    until: Position | None
    count_max: int | None
    follow: bool
    embedded: str
    is_ndjson: bool
    key_separator: str | None
    fetch_bytes: int
    retry_s: float
    on_error: str = "stop"


class UndecodableRecord(CommandError):
    """A partition's next record does not decode in the format of the output."""


class Line(msgspec.Struct):
    """The printed fields of a record. With `--on-error raw`, `key_base64` or `value_base64` has a
    key or value that does not decode."""

    offset: int
    key: Raw
    value: Raw
    key_base64: str | None = None
    value_base64: str | None = None


_decode = msgspec.json.Decoder(Line).decode


class _Range(NamedTuple):
    """Range of offsets of one partition to print. If `end` is None, the range has no end."""

    partition: int
    start: int
    end: int | None


async def consume(client: Client, topic: str, options: ConsumeOptions) -> None:
    """Print the records that the options select. Raises CommandError."""
    async with client:
        numbers = options.partitions or range(await client.partitions(topic))
        consumer = Consumer(client, topic, options)
        ranges = await together(*(consumer.resolve(number) for number in dict.fromkeys(numbers)))
        # Retry only after the broker has answered once, so that a wrong URL fails immediately.
        client.retry_s = math.inf if options.follow else options.retry_s
        consumer.warn_beyond(ranges)
        await consumer.run(ranges)


class Consumer:
    """State of one run: the count of printed records, and the requests in flight."""

    def __init__(self, client: Client, topic: str, options: ConsumeOptions) -> None:
        self._client = client
        self._options = options
        self._path = f"/topics/{quoted(topic)}/partitions"
        self._topic = topic
        self._ends: dict[int, int] = {}
        """End offsets of the partitions that end before the start of their range."""
        self._printed = 0
        self._skipped = Skipped()
        self._failure: UndecodableRecord | None = None
        self._enough = asyncio.Event()
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._text = line_printer(options)
        self._progress = SlowProgress("consuming", is_wanted=False)

    async def resolve(self, number: int) -> _Range:
        """Return the range of offsets of one partition. It has no offset below the log start."""
        async with self._reads:
            start, end = await self._resolve(number)
        return _Range(number, start, end)

    async def _resolve(self, number: int) -> tuple[int, int | None]:
        held = await self._offsets(number, {})
        low, high = held["beginning_offset"], held["end_offset"]

        async def offset(position: Position) -> int:
            if isinstance(position, int):
                return position
            if isinstance(position, str):
                return low if position == "beginning" else high
            stamp = max(0, math.floor(position.timestamp() * 1000))
            found = (await self._offsets(number, {"timestamp": stamp}))["timestamp_offset"]
            return high if found is None else found

        start = max(low, await offset(self._options.start))
        if start > high:
            self._ends[number] = high
        if self._options.until is None:
            return start, None
        end = await offset(self._options.until)
        if self._options.follow and isinstance(self._options.until, int):
            return start, end
        return start, min(end, high)

    def warn_beyond(self, ranges: Sequence[_Range]) -> None:
        """If all partitions end before the start of their range, warn and name their ends. With
        --follow do not warn, because the broker refuses the read and names the end."""
        if ranges and len(self._ends) == len(ranges) and not self._options.follow:
            ends = [f"partition {number} at {end}" for number, end in sorted(self._ends.items())]
            more = ", ..." if len(ends) > ENDS_SHOWN else ""
            warn(
                f"no record from offset {ranges[0].start} on: {self._topic} ends before it "
                f"({', '.join(ends[:ENDS_SHOWN])}{more})"
            )

    async def _offsets(self, number: int, params: dict[str, int]) -> dict[str, Any]:
        path = f"{self._path}/{number}/offsets"
        found: dict[str, Any] = await self._client.get_json(path, params=params)
        return found

    async def run(self, ranges: Sequence[_Range]) -> None:
        """Print all ranges, but at most `count_max` records. If a record does not decode, its
        partition ends before it. The command then prints the other partitions to their end, and
        fails."""
        total = sum(max((each.end or 0) - each.start, 0) for each in ranges)
        is_wanted = not self._options.follow and not sys.stdout.isatty()
        self._progress = SlowProgress("consuming", total, is_wanted=is_wanted)
        reading = asyncio.ensure_future(together(*(self._read(each) for each in ranges)))
        enough = asyncio.ensure_future(self._enough.wait())
        with self._progress:
            await asyncio.wait({reading, enough}, return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})
            else:
                reading.result()
        self._skipped.show()
        if self._failure is not None:
            raise self._failure

    async def _read(self, wanted: _Range) -> None:
        offset, end = wanted.start, wanted.end
        while (end is None or offset < end) and self._wants_more():
            is_ending = self._failure is not None
            try:
                if self._options.follow and not is_ending:
                    answered, lines = await self._fetch(wanted.partition, offset, POLL_MS)
                else:
                    async with self._reads:
                        answered, lines = await self._fetch(wanted.partition, offset, 0)
            except UndecodableRecord as error:
                self._failure = self._failure or error
                return
            if is_ending and answered == offset:
                return
            self._print(lines, None if end is None or answered <= end else end)
            offset = answered

    def _wants_more(self) -> bool:
        if self._options.count_max is not None and self._printed >= self._options.count_max:
            self._enough.set()
        return not self._enough.is_set()

    async def _fetch(self, number: int, offset: int, wait_ms: int) -> tuple[int, bytes]:
        params = {
            "offset": offset,
            "timeout": wait_ms,
            "max_bytes": self._options.fetch_bytes,
            "format": self._options.embedded,
            "on_error": self._options.on_error,
        }
        answer = await read_records(
            self._client,
            f"{self._path}/{number}/records",
            self._options,
            params=params,
            headers={"accept": "application/x-ndjson"},
        )
        self._skipped.add(answer)
        return int(answer.headers["tidelog-next-offset"]), answer.content

    def _print(self, body: bytes, end: int | None) -> None:
        """Print the lines below offset `end`, up to `count_max` in all."""
        if not body:
            return
        lines = body.removesuffix(b"\n").split(b"\n")
        if end is not None:
            lines = [line for line in lines if _decode(line).offset < end]
        if self._options.count_max is not None:
            lines = lines[: max(self._options.count_max - self._printed, 0)]
        self._printed += len(lines)
        self._wants_more()
        if not self._options.is_ndjson:
            lines = [self._text(_decode(line)) for line in lines]
        write_out(b"".join(line + b"\n" for line in lines))
        self._progress.show(self._printed)


class Skipped:
    """Counts the records that brokers have skipped (`--on-error skip`)."""

    def __init__(self) -> None:
        self._count = 0
        self._first = ""

    def add(self, answer: httpx.Response) -> int:
        """Return the number of records that the broker skipped for this answer."""
        count = int(answer.headers.get("tidelog-skipped", "0"))
        if count:
            self._first = self._first or answer.headers["tidelog-first-skipped"]
            self._count += count
        return count

    def show(self) -> None:
        """If records were skipped, print their number and the first one on stderr."""
        if self._count:
            warn(f"skipped records that do not decode: {self._count}, first {self._first}")


async def read_records(
    client: Client, path: str, options: ConsumeOptions, **request: Any
) -> httpx.Response:
    """Request records. If the broker cannot convert the next record to the format of the output,
    raise UndecodableRecord, which names other formats. Raises CommandError."""
    try:
        return await client.get(path, **request)
    except Refused as refused:
        if refused.http_status != UNDECODABLE:
            raise
        other = "binary" if options.embedded == "text" else "text or binary"
        hint = f"try --format {other}, or --on-error skip"
        raise UndecodableRecord(f"{refused} ({hint})") from None


def line_printer(options: ConsumeOptions) -> Callable[[Line], bytes]:
    """Return a function that formats a record as a line of text, without the line break."""
    shown = _SHOWN[options.embedded]

    def part(text: Raw, in_base64: str | None) -> bytes:
        return shown(text) if in_base64 is None else in_base64.encode()

    if options.key_separator is None:
        return lambda line: part(line.value, line.value_base64)
    separator = options.key_separator.encode()
    return lambda line: (
        part(line.key, line.key_base64) + separator + part(line.value, line.value_base64)
    )


def _unquoted(text: Raw) -> bytes:
    """Return the text of a JSON string; null is `null`."""
    found = msgspec.json.decode(text, type=str | None)
    return b"null" if found is None else found.encode()


_SHOWN: dict[str, Callable[[Raw], bytes]] = {
    "json": bytes,
    "text": _unquoted,
    "binary": _unquoted,  # base64 needs no escapes
}
