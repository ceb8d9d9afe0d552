"""`tidelog consume`: the records of partitions or, with --group, of a member of a group.

Each partition is read from a start offset to an end offset.

Reads of partitions are stateless, so the client repeats a failed request from the same offset, on
any broker.

A member commits exactly the printed records. The group reads again the records that the command
fetched and did not print. At the end, and at SIGINT and SIGTERM, the command deletes its instance,
so that other members continue at once. AsyncConsumer continues after rebalances, expiry and
restarts of brokers. After an expiry, the group reads the last printed records again.
"""

import asyncio
import datetime as dt
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias

import typer
from typer import Option

from tidelog.service.cli.broker_requests import (
    RETRY_FOR_S,
    ClientCommand,
    RetryOption,
    run_until_signal,
)
from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.options import ServerOption
from tidelog.service.cli.output import SlowProgress, warn
from tidelog.service.cli.output_lines import (
    LineForm,
    LineOutput,
    LinePrinter,
    ShownLines,
    UndecodableLine,
    joined,
    read_format,
)
from tidelog.service.cli.positions import (
    BEGINNING,
    END,
    Form,
    Last,
    PartitionOffsets,
    at_time,
    forms_in_words,
    now,
    position,
)
from tidelog.service.client.connection import Connection
from tidelog.service.client.consumer import POLL_S, AsyncConsumer, DeadLetters
from tidelog.service.client.producer import AsyncProducer
from tidelog.service.client.records import PartitionPage
from tidelog.storage.runtime.tasks import together

StartPosition: TypeAlias = str | int | dt.datetime | Last | PartitionOffsets

READS_AT_ONCE = 8
ENDS_SHOWN = 4
WAIT_S = 2.0
"""Timeout of a member's read without --follow; an empty response means the end of the member's
partitions."""
SESSION_TIMEOUT_MS = 30_000
CLIENT_ID = "tidelog"
FROM = (Form.EDGES, Form.OFFSET, Form.LAST, Form.TIME, Form.PARTITIONS)
UNTIL = (Form.EDGES, Form.OFFSET, Form.TIME)


class ConsumeBounds(NamedTuple):
    """The partitions to read (none: all), and where to begin and to end.

    If `until` is None, there is no end.
    """

    partitions: Sequence[int]
    start: StartPosition
    until: StartPosition | None


class _Range(NamedTuple):
    """Range of offsets of one partition to print.

    If `end` is None, the range has no end. `high` is the end offset of the partition.
    """

    partition: int
    start: int
    end: int | None
    high: int


class ConsumeOptions(NamedTuple):
    """Which records are printed, and how."""

    partition: Annotated[
        list[int] | None,
        Option(
            "--partition", "-p", min=0, metavar="N", help="partition (default: all); repeatable"
        ),
    ] = None
    group: Annotated[
        str | None,
        Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="read as a member of this consumer group: start at the group's committed offsets "
            "(or, without them, at --from), and commit the offsets of the printed records",
        ),
    ] = None
    start: Annotated[str, Option("--from", metavar="POSITION", help=forms_in_words(FROM))] = (
        "beginning"
    )
    last: Annotated[
        int | None,
        Option(
            "--last",
            min=0,
            metavar="N",
            help="print the last N records of each partition, as --from -N",
        ),
    ] = None
    until: Annotated[
        str,
        Option(
            "--until",
            metavar="POSITION",
            help="stop before this position; end is the end offset when the command starts. "
            f"{forms_in_words(UNTIL)}",
        ),
    ] = "end"
    count_max: Annotated[
        int | None, Option("--max", "-n", min=0, help="maximum number of records")
    ] = None
    follow: Annotated[
        bool, Option("--follow", help="wait for new records at the end, up to --until or --max")
    ] = False
    shown: Annotated[
        Literal["text", "json", "binary", "ndjson"] | None,
        Option(
            "--format",
            "-f",
            help="values as text (default), json or binary (base64); ndjson is the same as --json. "
            "With --json: form of keys and values (default json)",
            show_default=False,
        ),
    ] = None
    key_separator: Annotated[
        str | None,
        Option(metavar="TEXT", help="print the key and this separator before each value"),
    ] = None
    on_error: Annotated[
        Literal["stop", "skip", "raw", "escape"],
        Option(
            help="what to do with a record that does not decode in the format. stop: end its "
            "partition before it, print the other partitions, then fail. skip: omit it. raw: print "
            "its bytes in base64. escape: print escapes such as \\xff for bytes that are not UTF-8"
        ),
    ] = "stop"
    dead_letter: Annotated[
        str | None,
        Option(
            "--dead-letter",
            metavar="TOPIC",
            help="send records that do not decode to this topic, byte for byte, and go on",
        ),
    ] = None
    session_timeout_ms: Annotated[
        int,
        Option(
            min=10_000,
            max=45_000,
            help="with --group: how long the group waits for this member after a crash, before "
            "other members get its partitions. A member that is ended by SIGINT or SIGTERM leaves "
            "at once",
        ),
    ] = SESSION_TIMEOUT_MS
    client_id: Annotated[
        str,
        Option(
            "--client-id",
            metavar="NAME",
            help="with --group: name of this client. If members with one name on one machine join "
            "and end often, the broker delays their joins: then give each a name of its own",
        ),
    ] = CLIENT_ID
    fetch_bytes: Annotated[int, Option(min=1, help="approximate bytes of a response")] = 1024 * 1024
    retry_s: RetryOption = None

    def line_form(self, *, as_json: bool) -> LineForm:
        """Return the form of the printed lines. Raises BadUsage."""
        is_ndjson = as_json or self.shown == "ndjson"
        if is_ndjson and self.key_separator is not None:
            raise BadUsage(
                "--key-separator and --json exclude each other: the JSON objects have the keys"
            )
        if self.shown is None or self.shown == "ndjson":
            return LineForm("json" if is_ndjson else "text", is_ndjson, self.key_separator)
        return LineForm(self.shown, is_ndjson, self.key_separator)

    def bounds(self, topic: str) -> ConsumeBounds:
        """Return the partitions of the topic to read, and where to begin and to end.

        Raises BadUsage, also if other options exclude each other.
        """
        start = self.start
        if self.last is not None:
            if start != BEGINNING:
                raise BadUsage("--last and --from exclude each other")
            start = f"-{self.last}"
        first = at_time(position(start, FROM), now())
        partitions = self.partition or []
        if isinstance(first, PartitionOffsets):
            if partitions:
                raise BadUsage(f"--from {start} names the partitions: remove --partition")
            partitions = [number for number, _ in first.of]
        self._check_group(start, partitions)
        if self.dead_letter is not None and self.on_error != "stop":
            raise BadUsage("--dead-letter and --on-error exclude each other")
        if self.dead_letter == topic:
            raise BadUsage(f"--dead-letter {topic}: the command would read its own dead letters")
        is_endless = self.follow and self.until == END
        until = None if is_endless else at_time(position(self.until, UNTIL), now())
        if self.follow and isinstance(until, dt.datetime):
            raise BadUsage(
                "--follow excludes --until with a time, because a later record may have an earlier "
                "timestamp: give an offset"
            )
        return ConsumeBounds(partitions, first, until)

    def _check_group(self, start: str, partitions: Sequence[int]) -> None:
        """Raise BadUsage if an option contradicts the absence or presence of --group."""
        if self.group is None:
            if self.session_timeout_ms != SESSION_TIMEOUT_MS or self.client_id != CLIENT_ID:
                raise BadUsage("--session-timeout-ms and --client-id need --group")
        elif partitions or self.until != END or start not in {BEGINNING, END}:
            raise BadUsage(
                "--group excludes --partition, --until, and --from other than beginning or end"
            )

    @property
    def request_retry_s(self) -> float:
        """How long a request after the first one is repeated.

        The first one is not, so that a wrong URL fails immediately.
        """
        return RETRY_FOR_S if self.retry_s is None else self.retry_s

    def line_printer(self, connection: Connection, form: LineForm) -> LinePrinter:
        """Return the printer of lines; its producer of dead letters uses the connection."""
        if self.dead_letter is None:
            return LinePrinter(form, self.on_error)
        producer = AsyncProducer(connection, linger_ms=0, delivery_s=self.request_retry_s)
        return LinePrinter(form, "skip", DeadLetters(producer, self.dead_letter))


def consume(
    ctx: typer.Context,
    topic: TopicArgument,
    *,
    options: ConsumeOptions,
    server: ServerOption = None,
    as_json: Annotated[
        bool, Option("--json", help="print records as JSON objects, one a line")
    ] = False,
) -> None:
    """Print the records of a topic, one a line.

    The records of a partition keep their order, but the output mixes partitions. A null value is
    printed as null. With --follow the command runs until it is interrupted.

    Example: tidelog consume events --from @2026-01-31T12:00:00Z --max 10 --json
    """
    form = options.line_form(as_json=as_json)
    bounds = options.bounds(topic)
    connection = ClientCommand(ctx, server).connection(options.retry_s or 0.0)
    run_until_signal(Consuming(connection, topic, options, form).run(bounds))


class Consuming:
    """State of one run: connection, count of printed records, ranges of unfinished partitions."""

    def __init__(
        self, connection: Connection, topic: str, options: ConsumeOptions, form: LineForm
    ) -> None:
        self._connection = connection
        self._options = options
        self._topic = topic
        self._read_format = read_format(form.embedded)
        self._printer = options.line_printer(connection, form)
        self._output = LineOutput()
        self._printed = 0
        self._failure: UndecodableLine | None = None
        self._left: dict[int, _Range] = {}
        """Ranges that are not at their end, by partition."""

    async def run(self, bounds: ConsumeBounds) -> None:
        """Print the records. Raises CommandError, ClientError."""
        async with self._connection:
            if self._options.group is None:
                await self._read_partitions(bounds)
            else:
                await self._read_as_member(self._options.group, is_from_end=bounds.start == END)

    def _retry_reads(self) -> None:
        options = self._options
        self._connection.retry_s = math.inf if options.follow else options.request_retry_s

    def _rest(self) -> int | None:
        """Return how many records are still to print; None: no limit."""
        count_max = self._options.count_max
        return None if count_max is None else count_max - self._printed

    # -- partitions

    async def _read_partitions(self, bounds: ConsumeBounds) -> None:
        """Print the records between the bounds."""
        numbers = bounds.partitions or range(await self._connection.partitions(self._topic))
        resolving = (self._resolve(bounds, number) for number in dict.fromkeys(numbers))
        ranges = await together(*resolving, at_once=READS_AT_ONCE)
        self._retry_reads()
        self._warn_beyond(ranges)
        await self._print_ranges(ranges)

    async def _resolve(self, bounds: ConsumeBounds, number: int) -> _Range:
        """Return the range of offsets of one partition. It has no offset below the log start."""
        low, high = await self._connection.ends(self._topic, number)
        start = max(low, await self._offset(bounds.start, number, low, high))
        if bounds.until is None:
            return _Range(number, start, None, high)
        end = await self._offset(bounds.until, number, low, high)
        is_fixed = self._options.follow and isinstance(bounds.until, int)
        return _Range(number, start, end if is_fixed else min(end, high), high)

    async def _offset(self, place: StartPosition, number: int, low: int, high: int) -> int:
        """Return the offset of a position in a partition with the offsets from `low` to `high`."""
        match place:
            case int():
                return place
            case str():
                return low if place == BEGINNING else high
            case Last():
                return max(low, high - place.records)
            case PartitionOffsets():
                return await self._offset(dict(place.of)[number], number, low, high)
            case dt.datetime():
                stamp = max(0, math.floor(place.timestamp() * 1000))
                offsets = await self._connection.offsets(self._topic, number, timestamp=stamp)
                offset: int | None = offsets["timestamp_offset"]
                return high if offset is None else offset

    def _warn_beyond(self, ranges: Sequence[_Range]) -> None:
        """If all partitions end before the start of their range, warn and name their ends.

        With --follow do not warn, because the broker refuses the read and names the end.
        """
        if self._options.follow or any(
            offset_range.start <= offset_range.high for offset_range in ranges
        ):
            return
        ends = [
            f"partition {offset_range.partition} at {offset_range.high}"
            for offset_range in sorted(ranges)
        ]
        if ends:
            ellipsis = ", ..." if len(ends) > ENDS_SHOWN else ""
            warn(
                f"no record from offset {ranges[0].start} on: {self._topic} ends before it "
                f"({', '.join(ends[:ENDS_SHOWN])}{ellipsis})"
            )

    async def _print_ranges(self, ranges: Sequence[_Range]) -> None:
        """Print all ranges, but at most `count_max` records.

        If a record does not decode, its partition ends before it. The command then prints the other
        partitions to their end, and fails.
        """
        self._left = {
            offset_range.partition: offset_range
            for offset_range in ranges
            if offset_range.end is None or offset_range.start < offset_range.end
        }
        if not self._left:
            return
        follow = self._options.follow
        consumer = AsyncConsumer(
            self._connection,
            [],
            positions={
                (self._topic, number): offset_range.start
                for number, offset_range in self._left.items()
            },
            auto_offset_reset="none",
            read_format=self._read_format,
            fetch_bytes=self._options.fetch_bytes,
        )
        total = sum(max((offset_range.end or 0) - offset_range.start, 0) for offset_range in ranges)
        is_shown = not follow and not sys.stdout.isatty()
        try:
            with SlowProgress("consuming", total, is_wanted=is_shown) as progress:
                while self._left and self._rest() != 0:
                    is_waiting = follow and self._failure is None
                    for page in await consumer.poll_pages(POLL_S if is_waiting else 0.0):
                        await self._print_page(consumer, page)
                    progress.show(self._printed)
        finally:
            await consumer.close()
        self._printer.show_skipped()
        if self._failure is not None:
            raise self._failure

    async def _print_page(self, consumer: AsyncConsumer, page: PartitionPage) -> None:
        number = page.where.partition
        offset_range = self._left.get(number)
        if offset_range is None:
            return
        shown = await self._printer.shown(page, self._rest(), offset_range.end)
        self._printed += len(shown.lines)
        await self._output.write(joined(shown.lines))
        is_over = offset_range.end is not None and shown.next_offset >= offset_range.end
        if shown.failure is not None:
            self._failure = self._failure or shown.failure
            is_over = True
        if self._failure is not None and not page.records:
            is_over = True
        if is_over:
            del self._left[number]
            consumer.pause(*page.where)

    # -- a member of a group

    async def _read_as_member(self, group: str, *, is_from_end: bool) -> None:
        """Print the records of this member's partitions."""
        # A subscription to a missing topic would wait for the topic, so fail here.
        _ = await self._connection.partitions(self._topic)
        self._retry_reads()
        consumer = AsyncConsumer(
            self._connection,
            self._topic,
            group,
            auto_offset_reset="latest" if is_from_end else "earliest",
            read_format=self._read_format,
            fetch_bytes=self._options.fetch_bytes,
            session_timeout_ms=self._options.session_timeout_ms,
            client_id=self._options.client_id,
        )
        try:
            await self._print_as_member(consumer)
        finally:
            await consumer.close()
            self._printer.show_skipped()

    async def _print_as_member(self, consumer: AsyncConsumer) -> None:
        """Print records until `count_max` or the end."""
        loop = asyncio.get_running_loop()
        follow = self._options.follow
        wait_s = POLL_S if follow else WAIT_S
        while self._rest() != 0:
            started_s = loop.time()
            pages = await consumer.poll_pages(wait_s)
            if pages:
                await self._print_pages(consumer, pages)
            # A read also ends early, without records, when the group has a new generation.
            elif not follow and loop.time() - started_s >= wait_s * 0.9:
                return

    async def _print_pages(self, consumer: AsyncConsumer, pages: list[PartitionPage]) -> None:
        """Print pages; their records are done then, so the next read commits them.

        If a record does not decode, print the other pages, too, and raise the first such error.
        """
        next_offsets = {}
        shown_pages: list[ShownLines] = []
        for page in pages:
            shown = await self._printer.shown(page, self._rest())
            self._printed += len(shown.lines)
            if shown.next_offset > page.records[0].offset:
                next_offsets[page.where] = shown.next_offset
            shown_pages.append(shown)
        try:
            await self._output.write(
                joined([line for shown in shown_pages for line in shown.lines])
            )
        finally:
            if self._output.is_written:
                consumer.done(next_offsets)
        for shown in shown_pages:
            if shown.failure is not None:
                raise shown.failure
