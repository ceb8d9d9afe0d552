"""Produce the lines of an input, in batches, without loss or duplicates: the work of AsyncProducer.

The records of a partition keep the order of the input. If a line is wrong, or a broker rejects it,
the lines before it are sent, and the error names it.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tidelog.service.cli.client import command_error
from tidelog.service.cli.records.lines import BadLine, LineSource, Parser
from tidelog.service.cli.results import SlowProgress, plural, warn
from tidelog.service.client.connection import Connection
from tidelog.service.client.errors import ClientError
from tidelog.service.client.producer import AsyncProducer, Delivered, Item, ProducerOptions

IDLE_S = 0.2
"""Maximum time that a read of input blocks, because an interrupt must wait for the read."""


class ProduceOptions(NamedTuple):
    """Options of the command line."""

    parse: Parser
    media_type: str
    partition: int | None
    acks: str
    batch_records: int
    batch_bytes: int
    in_flight: int
    linger_s: float
    retry_s: float

    def of_producer(self) -> ProducerOptions:
        return ProducerOptions(
            media_type=self.media_type,
            acks=self.acks,
            linger_ms=self.linger_s * 1000,
            batch_records=self.batch_records,
            batch_bytes=self.batch_bytes,
            in_flight=self.in_flight,
            # Each lane has a batch in flight, and fills the next one meanwhile.
            buffer_bytes=max(2 * self.in_flight, 4) * max(self.batch_bytes, 1024 * 1024),
            delivery_s=self.retry_s,
        )


class ProduceSummary:
    """Counts of acknowledged records of one run."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.input_bytes = 0
        self.batches = 0
        self.retries = 0
        self.seconds = 0.0
        self.ranges: dict[int, tuple[int, int]] = {}
        """First offset and exclusive end offset by partition. It is empty unless `acks` is all."""

    def add(self, placed: Sequence[Delivered], input_bytes: int) -> None:
        """Count one acknowledged request."""
        self.records += len(placed)
        self.input_bytes += input_bytes
        self.batches += 1
        for place in placed:
            if place.offset is not None:
                first, end = self.ranges.get(place.partition, (place.offset, 0))
                wider = (min(first, place.offset), max(end, place.offset + 1))
                self.ranges[place.partition] = wider

    def as_json(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "records": self.records,
            "input_bytes": self.input_bytes,
            "requests": self.batches,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
            "offsets": {
                str(number): {"first": first, "end": end}
                for number, (first, end) in sorted(self.ranges.items())
            },
        }

    def as_text(self) -> str:
        rate = self.records / self.seconds if self.seconds else 0
        again = f", {self.retries} retried" if self.retries else ""
        return (
            f"produced {plural(self.records, 'record')} to {self.topic} in {self.seconds:.1f} s "
            f"({rate:,.0f}/s, {plural(self.batches, 'request')}{again})"
        )


class _Line:
    """The outcome of a line. It keeps only a failure: `on_delivered` counts the others."""

    __slots__ = ("_number", "_run")

    def __init__(self, run: "_ProduceRun", number: int) -> None:
        self._run = run
        self._number = number

    def done(self) -> bool:
        return False

    def set_result(self, result: Delivered) -> None:
        pass

    def set_exception(self, exception: BaseException) -> None:
        if self._run.failure is None or self._number < self._run.failure[0]:
            self._run.failure = (self._number, exception)


async def produce(
    connection: Connection, topic: str, source: LineSource, options: ProduceOptions
) -> ProduceSummary:
    """Produce all lines of `source`. The message of a CommandError has the number of acknowledged
    records."""
    async with connection:
        await connection.partitions(topic)
        return await _ProduceRun(connection, topic, options).run(source)


class _ProduceRun:
    """State of one run: the producer, the number of lines, the first failure."""

    def __init__(self, connection: Connection, topic: str, options: ProduceOptions) -> None:
        self._connection = connection
        self._topic = topic
        self._options = options
        self._lines = 0
        self.failure: tuple[int, BaseException] | None = None
        self._summary = ProduceSummary(topic)
        self._producer = AsyncProducer(
            connection, options=options.of_producer(), on_delivered=self._count
        )

    def _count(self, items: Sequence[Item], placed: Sequence[Delivered]) -> None:
        self._summary.add(placed, sum(item.tag for item in items))

    async def run(self, source: LineSource) -> ProduceSummary:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        bad: BadLine | None = None
        try:
            with SlowProgress("producing", source.size) as progress:
                try:
                    await self._read_all(source, progress)
                except BadLine as error:
                    bad = error
                flushing = asyncio.create_task(self._producer.flush())
                while not (await asyncio.wait({flushing}, timeout=IDLE_S))[0]:
                    progress.show(self._summary.input_bytes)
        except asyncio.CancelledError:
            warn(f"interrupted: {plural(self._summary.records, 'record')} acknowledged")
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

    async def _read_all(self, source: LineSource, progress: SlowProgress) -> None:
        rest = b""
        while self.failure is None:
            chunk = await asyncio.to_thread(source.read, IDLE_S)
            if chunk:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    await self._add(line)
            elif chunk is not None:
                break
            progress.show(self._summary.input_bytes)
        if rest and self.failure is None:
            await self._add(rest)

    async def _add(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = self._options.parse.record(line)
        except BadLine as error:
            raise BadLine(f"line {self._lines}: {error}") from None
        if record is None:
            return
        if record.partition is None:
            record = record._replace(partition=self._options.partition)
        outcome = _Line(self, self._lines)
        if not self._producer.try_put(self._topic, record, outcome, len(line) + 1):
            await self._producer.put(self._topic, record, outcome, len(line) + 1)
