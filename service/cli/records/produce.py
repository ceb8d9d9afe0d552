"""Produce lines in batches, with several requests in flight, without loss or duplicates.

The records of a partition keep the order of the input. Each partition belongs to one lane. A lane
sends one request at a time and repeats it (same Idempotency-Key, same bytes) until the broker
acknowledges it, for up to `retry_s`. For records without a key, the client chooses the partitions
in turn. For records with a key, the broker chooses the partition by the hash of the key. The client
computes the same hash, to find the lane. If partitions are added to the topic during the run, this
client continues with the old number of partitions. A key then stays in its lane, so the records of
one key keep their order in each partition. But one partition may then have the records of several
lanes, in another order than the input. No record is lost or duplicated.
"""

import asyncio
from typing import NamedTuple

import msgspec

from tidelog.service.cli.client import Client
from tidelog.service.cli.records.lines import BadLine, Parser, Source
from tidelog.service.cli.requests import quoted
from tidelog.service.cli.results import CommandError, SlowProgress, plural, warn
from tidelog.storage.core.murmur2 import partition_of
from tidelog.storage.io.clock import SystemClock

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


class Batch:
    """Records of one request. `size` counts bytes of JSON, `input_size` bytes of input."""

    __slots__ = ("input_size", "opened_s", "records", "size")

    def __init__(self, now_s: float) -> None:
        self.records: list[bytes] = []
        self.size = 0
        self.input_size = 0
        self.opened_s = now_s


class _Place(msgspec.Struct):
    partition: int | None = None
    offset: int | None = None
    error_code: int | None = None
    error: str | None = None


class _PlacedBatch(msgspec.Struct):
    offsets: list[_Place]


_decode_placed = msgspec.json.Decoder(_PlacedBatch).decode


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

    def add(self, batch: Batch, placed: _PlacedBatch) -> None:
        self.records += len(batch.records)
        self.input_bytes += batch.input_size
        self.batches += 1
        for place in placed.offsets:
            if place.partition is not None and place.offset is not None:
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


async def produce(
    client: Client, topic: str, source: Source, options: ProduceOptions
) -> ProduceSummary:
    """Produce all lines of `source`. The message of a CommandError has the number of acknowledged
    records."""
    async with client:
        partitions = await client.partitions(topic)
        client.retry_s = options.retry_s
        return await Producer(client, topic, partitions, options).run(source)


class Producer:
    """State of one run: an open batch and a queue for each lane, and the summary."""

    def __init__(
        self, client: Client, topic: str, partitions: int, options: ProduceOptions
    ) -> None:
        self._client = client
        self._options = options
        self._partitions = partitions
        self._path = f"/topics/{quoted(topic)}"
        self._run_id = SystemClock().new_id().hex()
        self._number = 0
        self.report = ProduceSummary(topic)
        lanes = min(options.in_flight, partitions)
        self._open: list[Batch | None] = [None] * lanes
        self._lanes: list[asyncio.Queue[Batch | None]] = [asyncio.Queue(1) for _ in range(lanes)]
        self._unkeyed_partition = 0
        self._unkeyed_records = 0
        self._unkeyed_bytes = 0
        self._lines = 0

    async def run(self, source: Source) -> ProduceSummary:
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                sending = [group.create_task(self._send_all(lane)) for lane in self._lanes]
                with SlowProgress("producing", source.size) as progress:
                    await self._read_all(source, progress)
                    while (await asyncio.wait(sending, timeout=IDLE_S))[1]:
                        progress.show(self.report.input_bytes)
        except asyncio.CancelledError:
            warn(f"interrupted: {plural(self.report.records, 'record')} acknowledged")
            raise
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, CommandError):
                acked = plural(self.report.records, "record")
                error.args = (f"{error} ({acked} acknowledged)",)
            raise error from None
        finally:
            self.report.retries = self._client.retries
            self.report.seconds = asyncio.get_running_loop().time() - started_s
        return self.report

    # -- input

    async def _read_all(self, source: Source, progress: SlowProgress) -> None:
        rest = b""
        while True:
            wait_s = min(self._options.linger_s, IDLE_S) if any(self._open) else IDLE_S
            taken = await asyncio.to_thread(source.read, wait_s)
            if taken:
                *lines, rest = (rest + taken).split(b"\n")
                for line in lines:
                    await self._add(line)
            elif taken is not None:
                break
            progress.show(self.report.input_bytes)
            await self._flush_aged()
        if rest:
            await self._add(rest)
        for number, lane in enumerate(self._lanes):
            await self._close(number)
            await lane.put(None)

    async def _add(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = self._options.parse.record(line)
        except BadLine as error:
            raise BadLine(f"line {self._lines}: {error}") from None
        if record is None:
            return
        partition = record.partition if record.partition is not None else self._options.partition
        if partition is not None:
            text = b'{"partition":%d,%b}' % (partition, record.members)
        elif record.key is not None:
            partition = partition_of(record.key, self._partitions)
            text = b"{%b}" % record.members
        else:
            partition = self._next_unkeyed(len(line))
            text = b'{"partition":%d,%b}' % (partition, record.members)
        number = partition % len(self._lanes)
        batch = self._open[number]
        if batch is not None and batch.size + len(text) > self._options.batch_bytes:
            await self._close(number)
            batch = None
        if batch is None:
            batch = self._open[number] = Batch(asyncio.get_running_loop().time())
        batch.records.append(text)
        batch.size += len(text) + 1
        batch.input_size += len(line) + 1
        if len(batch.records) >= self._options.batch_records:
            await self._close(number)

    def _next_unkeyed(self, size: int) -> int:
        """Return the same partition for about one batch of records, then the next partition, as
        Kafka's producer does."""
        self._unkeyed_records += 1
        self._unkeyed_bytes += size
        is_full = self._unkeyed_records > self._options.batch_records
        if is_full or self._unkeyed_bytes > self._options.batch_bytes:
            self._unkeyed_records = self._unkeyed_bytes = 0
            self._unkeyed_partition = (self._unkeyed_partition + 1) % self._partitions
        return self._unkeyed_partition

    async def _flush_aged(self) -> None:
        """Close batches older than `linger_s` whose lane has no other batch in its queue."""
        horizon_s = asyncio.get_running_loop().time() - self._options.linger_s
        for number, batch in enumerate(self._open):
            if batch is not None and batch.opened_s <= horizon_s and self._lanes[number].empty():
                await self._close(number)

    async def _close(self, number: int) -> None:
        batch = self._open[number]
        if batch is not None:
            self._open[number] = None
            await self._lanes[number].put(batch)

    # -- output

    async def _send_all(self, lane: "asyncio.Queue[Batch | None]") -> None:
        while (batch := await lane.get()) is not None:
            await self._send(batch)

    async def _send(self, batch: Batch) -> None:
        self._number += 1
        answer = await self._client.post(
            self._path,
            params={"acks": self._options.acks},
            headers={
                "content-type": self._options.media_type,
                "idempotency-key": f'"{self._run_id}-{self._number}"',
            },
            content=b'{"records":[%b]}' % b",".join(batch.records),
        )
        try:
            placed = _decode_placed(answer.content)
        except msgspec.MsgspecError:
            raise self._client.is_no_broker() from None
        for place in placed.offsets:
            if place.error_code is not None:
                raise CommandError(f"the broker rejected a record: {place.error}")
        self.report.add(batch, placed)
