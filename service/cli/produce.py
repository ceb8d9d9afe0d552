"""`tidelog produce`: the lines of an input, in batches, without loss or duplicates.

AsyncProducer does the work.

The records of a partition keep the order of the input. If a line is wrong, or a broker rejects it,
the lines before it are sent, and the error names it.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from typer import Argument

from tidelog.service.cli.broker_requests import ClientCommand, command_error, run_until_signal
from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.input_lines import (
    IDLE_S,
    BadLine,
    LineInput,
    ProduceOptions,
    ProduceSummary,
    opened,
)
from tidelog.service.cli.output import SlowProgress, plural, warn
from tidelog.service.cli.resumable_produce import ResumableProducer
from tidelog.service.client.connection import Connection
from tidelog.service.client.errors import ClientError
from tidelog.service.client.producer import AsyncProducer, Delivered, Item


def produce(
    topic: TopicArgument,
    file: Annotated[
        str, Argument(metavar="FILE", help="file with lines; - for stdin", show_default=False)
    ] = "-",
    *,
    options: ProduceOptions,
    command: ClientCommand,
) -> None:
    """Produce the lines of a file or stdin.

    Retries neither lose nor duplicate records, because each request has an Idempotency-Key. The
    records of a partition keep the order of the input, because at most one request for the
    partition is in flight.

    Example: tidelog produce events records.ndjson --format ndjson

    A line of ndjson: {"key": "k1", "value": {"n": 1}, "headers": {"source": "shop"}}
    """
    parser = options.parser()
    connection = command.connection(options.retry_s or 0.0)
    kind = LineProducer if options.state is None else ResumableProducer
    with opened(file) as source:
        lines = LineInput(topic, source, options, parser)
        summary = run_until_signal(_produce(kind, connection, lines))
    command.show(summary.as_json(), summary.as_text())


async def _produce(
    kind: "type[LineProducer] | type[ResumableProducer]",
    connection: Connection,
    lines: LineInput,
) -> ProduceSummary:
    async with connection:
        await connection.partitions(lines.topic)
        return await kind(connection, lines).run()


class _Line:
    """The outcome of a line. It keeps only a failure: `on_delivered` counts the others."""

    __slots__ = ("_number", "_run")

    def __init__(self, run: "LineProducer", number: int) -> None:
        self._run = run
        self._number = number

    def done(self) -> bool:
        return False

    def set_result(self, result: Delivered) -> None:
        pass

    def set_exception(self, exception: BaseException) -> None:
        self._run.unknown_records += getattr(exception, "is_unknown", False)
        if self._run.failure is None or self._number < self._run.failure[0]:
            self._run.failure = (self._number, exception)


class LineProducer:
    """One run of the command: its producer, the number of lines, the first failure."""

    def __init__(self, connection: Connection, lines: LineInput) -> None:
        self._connection = connection
        self._topic = lines.topic
        self._source = lines.source
        self._parser = lines.parser
        self._partition = lines.options.partition
        self._lines = 0
        self.failure: tuple[int, BaseException] | None = None
        self.unknown_records = 0
        """Records that were sent and have no answer: they may be in the topic."""
        self._summary = ProduceSummary(lines.topic)
        self._producer = AsyncProducer(
            connection, options=lines.options.of_producer(lines.parser), on_delivered=self._count
        )

    def _count(self, items: Sequence[Item], placed: Sequence[Delivered]) -> None:
        self._summary.add(placed, sum(item.tag for item in items))

    async def run(self) -> ProduceSummary:
        """Produce all lines.

        The message of a CommandError has the number of acknowledged records.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        bad: BadLine | None = None
        try:
            with SlowProgress("producing", self._source.size) as progress:
                try:
                    await self._read_all(progress)
                except BadLine as error:
                    bad = error
                flushing = asyncio.create_task(self._producer.flush())
                while not (await asyncio.wait({flushing}, timeout=IDLE_S))[0]:
                    progress.show(self._summary.input_bytes)
        except asyncio.CancelledError:
            await self._producer.close(flush_s=0.0)
            acked = f"{plural(self._summary.records, 'record')} acknowledged"
            sent = (
                f", {plural(self.unknown_records, 'record')} without an answer may be in the topic"
            )
            warn(f"interrupted: {acked}{sent if self.unknown_records else ''}")
            raise
        finally:
            await self._producer.close(flush_s=0.0)
            self._summary.retries = self._connection.retries
            self._summary.seconds = loop.time() - started_s
        self._check(bad)
        return self._summary

    def _check(self, bad: BadLine | None) -> None:
        """Raise the failure of the first line that is not in the topic."""
        acked = f"{plural(self._summary.records, 'record')} acknowledged"
        if self.failure is not None:
            number, error = self.failure
            if not isinstance(error, ClientError):
                raise error
            cause = error.__cause__ if isinstance(error.__cause__, ClientError) else error
            failed = command_error(cause)
            failed.args = (f"line {number}: {failed} ({acked})",)
            raise failed
        if bad is not None:
            raise BadLine(f"{bad} (the lines before it are in the topic: {acked})")

    async def _read_all(self, progress: SlowProgress) -> None:
        line_start = b""
        while self.failure is None:
            chunk = await asyncio.to_thread(self._source.read, IDLE_S)
            if chunk:
                *lines, line_start = (line_start + chunk).split(b"\n")
                for line in lines:
                    await self._add(line)
            elif chunk is not None:
                break
            progress.show(self._summary.input_bytes)
        if line_start and self.failure is None:
            await self._add(line_start)

    async def _add(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = self._parser.record(line)
        except BadLine as error:
            raise BadLine(f"line {self._lines}: {error}") from None
        if record is None:
            return
        if record.partition is None:
            record = record._replace(partition=self._partition)
        outcome = _Line(self, self._lines)
        if not self._producer.try_put(self._topic, record, outcome, len(line) + 1):
            await self._producer.put(self._topic, record, outcome, len(line) + 1)
