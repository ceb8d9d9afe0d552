"""Produce a stream of lines: batches, several requests in flight, nothing lost, doubled or swapped.

The order that is kept is that of each partition. Every partition belongs to one lane; a lane sends
one request at a time, and repeats it (same Idempotency-Key, same bytes) until it is acknowledged
before it sends the next. Lanes know partitions because keys are hashed here as the broker hashes
them, and records without a key are given to one partition after the other. A topic that gets more
partitions meanwhile maps keys anew, as everywhere; nothing is lost or doubled by that.
"""

import asyncio
from typing import NamedTuple

import msgspec

from service.cli_client import Client, quoted
from service.cli_lines import BadLine, Parser, Source
from service.cli_results import CommandError, SlowProgress, plural, warn
from storage.clock import SystemClock
from storage.partitioner import partition_of

IDLE_S = 0.2
"""How long a read of input blocks at most: what an interrupt has to wait."""


class Options(NamedTuple):
    """What the command line says."""

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
    """Records of one request; `size` and `input_size` in bytes, of JSON and of lines."""

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


class _Placed(msgspec.Struct):
    offsets: list[_Place]


_decode_placed = msgspec.json.Decoder(_Placed).decode


class Report:
    """What was acknowledged so far."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.input_bytes = 0
        self.batches = 0
        self.retries = 0
        self.seconds = 0.0
        self.ranges: dict[int, tuple[int, int]] = {}
        """First offset, and the one after the last, by partition; empty unless acks=all."""

    def add(self, batch: Batch, placed: _Placed) -> None:
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


async def produce(server: str | None, topic: str, source: Source, options: Options) -> Report:
    """Produce all that `source` gives. Raises CommandError that says how much is acknowledged."""
    async with Client(server) as client:
        partitions = await client.partitions(topic)
        client.retry_s = options.retry_s
        return await Producer(client, topic, partitions, options).run(source)


class Producer:
    """One run of the command."""

    def __init__(self, client: Client, topic: str, partitions: int, options: Options) -> None:
        self._client = client
        self._options = options
        self._partitions = partitions
        self._path = f"/topics/{quoted(topic)}"
        self._run_id = SystemClock().new_id().hex()
        self._number = 0
        self.report = Report(topic)
        lanes = min(options.in_flight, partitions)
        self._open: list[Batch | None] = [None] * lanes
        self._lanes: list[asyncio.Queue[Batch | None]] = [asyncio.Queue(1) for _ in range(lanes)]
        self._unkeyed_partition = 0
        self._unkeyed_records = 0
        self._unkeyed_bytes = 0
        self._lines = 0

    async def run(self, source: Source) -> Report:
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
        """One partition for about a batch of them, then the next: as Kafka's producer does."""
        self._unkeyed_records += 1
        self._unkeyed_bytes += size
        is_full = self._unkeyed_records > self._options.batch_records
        if is_full or self._unkeyed_bytes > self._options.batch_bytes:
            self._unkeyed_records = self._unkeyed_bytes = 0
            self._unkeyed_partition = (self._unkeyed_partition + 1) % self._partitions
        return self._unkeyed_partition

    async def _flush_aged(self) -> None:
        """Send what has lingered, where nothing else is waiting to be sent."""
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
                raise CommandError(f"a record was refused: {place.error}")
        self.report.add(batch, placed)
