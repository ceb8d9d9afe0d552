"""Print the records of partitions, each from a start offset to an end offset.

Reads are stateless, so the client repeats a failed request from the same offset, on any broker.
"""

import datetime as dt
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tidelog.service.cli.positions import Last, PartitionOffsets
from tidelog.service.cli.records.output import Output
from tidelog.service.cli.records.undecodable import (
    LinePrinter,
    UndecodableLine,
    joined,
    read_format,
)
from tidelog.service.cli.results import SlowProgress, warn
from tidelog.service.client.connection import Connection
from tidelog.service.client.consumer import POLL_S, AsyncConsumer, DeadLetters
from tidelog.service.client.producer import AsyncProducer
from tidelog.service.client.records import PartitionPage
from tidelog.storage.runtime.tasks import together

Position: TypeAlias = str | int | dt.datetime | Last | PartitionOffsets

READS_AT_ONCE = 8
ENDS_SHOWN = 4


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
    dead_letter: str | None = None
    session_timeout_ms: int = 30_000
    client_id: str = "tidelog"


class _Range(NamedTuple):
    """Range of offsets of one partition to print. If `end` is None, the range has no end."""

    partition: int
    start: int
    end: int | None


def line_printer(connection: Connection, options: ConsumeOptions) -> LinePrinter:
    """Return the printer of the options; its producer of dead letters uses the connection."""
    dead_letters = None
    if options.dead_letter is not None:
        producer = AsyncProducer(connection, linger_ms=0, delivery_s=options.retry_s)
        dead_letters = DeadLetters(producer, options.dead_letter)
    return LinePrinter(
        options.embedded,
        is_ndjson=options.is_ndjson,
        key_separator=options.key_separator,
        on_error=options.on_error if dead_letters is None else "skip",
        dead_letters=dead_letters,
    )


async def consume(connection: Connection, topic: str, options: ConsumeOptions) -> None:
    """Print the records that the options select. Raises CommandError, ClientError."""
    async with connection:
        numbers = options.partitions or range(await connection.partitions(topic))
        consuming = Consuming(connection, topic, options)
        resolving = map(consuming.resolve, dict.fromkeys(numbers))
        ranges = await together(*resolving, at_once=READS_AT_ONCE)
        # Retry only after the broker has answered once, so that a wrong URL fails immediately.
        connection.retry_s = math.inf if options.follow else options.retry_s
        consuming.warn_beyond(ranges)
        await consuming.run(ranges)


class Consuming:
    """State of one run: the count of printed records, and the ranges that are not at their end."""

    def __init__(self, connection: Connection, topic: str, options: ConsumeOptions) -> None:
        self._connection = connection
        self._options = options
        self._topic = topic
        self._ends: dict[int, int] = {}
        """By partition, the end offset if it is before the start of the range."""
        self._left: dict[int, _Range] = {}
        """Ranges that are not at their end, by partition."""
        self._printed = 0
        self._failure: UndecodableLine | None = None
        self._printer = line_printer(connection, options)
        self._output = Output()

    async def resolve(self, number: int) -> _Range:
        """Return the range of offsets of one partition. It has no offset below the log start."""
        low, high = await self._connection.ends(self._topic, number)

        async def offset(position: Position) -> int:
            if isinstance(position, int):
                return position
            if isinstance(position, Last):
                return int(max(low, high - position.records))
            if isinstance(position, PartitionOffsets):
                return await offset(dict(position.of)[number])
            if isinstance(position, str):
                return int(low if position == "beginning" else high)
            stamp = max(0, math.floor(position.timestamp() * 1000))
            offsets = await self._connection.offsets(self._topic, number, timestamp=stamp)
            timestamp_offset = offsets["timestamp_offset"]
            return int(high if timestamp_offset is None else timestamp_offset)

        start = max(low, await offset(self._options.start))
        if start > high:
            self._ends[number] = high
        if self._options.until is None:
            return _Range(number, start, None)
        end = await offset(self._options.until)
        if self._options.follow and isinstance(self._options.until, int):
            return _Range(number, start, end)
        return _Range(number, start, min(end, high))

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

    async def run(self, ranges: Sequence[_Range]) -> None:
        """Print all ranges, but at most `count_max` records. If a record does not decode, its
        partition ends before it. The command then prints the other partitions to their end, and
        fails."""
        wanted = [
            offset_range
            for offset_range in ranges
            if offset_range.end is None or offset_range.start < offset_range.end
        ]
        self._left = {offset_range.partition: offset_range for offset_range in wanted}
        positions = {
            (self._topic, offset_range.partition): offset_range.start for offset_range in wanted
        }
        if not positions:
            return
        consumer = AsyncConsumer(
            self._connection,
            [],
            positions=positions,
            auto_offset_reset="none",
            read_format=read_format(self._options.embedded),
            fetch_bytes=self._options.fetch_bytes,
        )
        total = sum(max((offset_range.end or 0) - offset_range.start, 0) for offset_range in ranges)
        is_wanted = not self._options.follow and not sys.stdout.isatty()
        try:
            with SlowProgress("consuming", total, is_wanted=is_wanted) as progress:
                while self._left and self._rest() != 0:
                    is_waiting = self._options.follow and self._failure is None
                    for page in await consumer.poll_pages(POLL_S if is_waiting else 0.0):
                        await self._print(consumer, page)
                    progress.show(self._printed)
        finally:
            await consumer.close()
        self._printer.show_skipped()
        if self._failure is not None:
            raise self._failure

    def _rest(self) -> int | None:
        """Return how many records are still to print; None: no limit."""
        count_max = self._options.count_max
        return None if count_max is None else count_max - self._printed

    async def _print(self, consumer: AsyncConsumer, page: PartitionPage) -> None:
        number = page.where.partition
        wanted = self._left.get(number)
        if wanted is None:
            return
        shown = await self._printer.shown(page, self._rest(), wanted.end)
        self._printed += len(shown.lines)
        await self._output.write(joined(shown.lines))
        is_over = wanted.end is not None and shown.next_offset >= wanted.end
        if shown.failure is not None:
            self._failure = self._failure or shown.failure
            is_over = True
        if self._failure is not None and not page.records:
            is_over = True
        if is_over:
            del self._left[number]
            consumer.pause(*page.where)
