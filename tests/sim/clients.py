"""Clients of a simulated cluster: they ask any broker, and record requests and answers.

Each client is a process. An answer decides only the client's next step; the judge is
tests.sim.checker.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from tests.sim import history
from tests.sim.history import Place, Read, Written
from tests.sim.network import Refusal, Silence
from tests.sim.world import Broker, World
from tests.support.record_batches import CODECS, checked, consumed
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.record_batch import Batch
from tidelog.storage.codec.record_columns import RECORD_SCHEMA, Rows, batch_of_rows
from tidelog.storage.core.errors import CommitUnknown, LogError, OffsetOutOfRange, StaleCommit
from tidelog.storage.core.model import Acks, AppendedRange
from tidelog.storage.read.reader import ReadBatch
from tidelog.storage.records import FetchResult as Answer

T = TypeVar("T")

TOPIC = "t"
IDENTITY = "id"
"""The header that names a record where its value cannot: tombstones have none."""
KAFKA_FETCHES = 3
"""One fetch of so many is that of Kafka's listener."""


class Load(NamedTuple):
    """The mix of requests. Rates are shares of requests."""

    partitions: int = 2
    pause_s: float = 0.3
    keyed: float = 0.4
    """With an idempotency key, retried at other brokers until the outcome is known."""
    local: float = 0.0
    """acks=1."""
    producers: float = 0.2
    """As a Kafka producer, with ids and sequences."""
    spread: float = 0.3
    """Over several partitions."""
    is_compacted: bool = False
    patience_s: float = 8.0
    """How long clients wait for an answer."""
    lingers_s: tuple[float | None, ...] = (None,)
    """How long requests may wait for their commit, by their number."""


class Client:
    """Base of all clients: a name, a world, and a broker for each request."""

    def __init__(self, world: World, name: str, load: Load) -> None:
        self.world = world
        self.name = name
        self.load = load
        self.is_over = False
        """It should end."""
        self.is_done = False

    async def live(self) -> None:
        await self.run()
        self.is_done = True

    async def run(self) -> None:
        raise NotImplementedError

    async def pause(self, mean_s: float | None = None) -> None:
        mean_s = self.load.pause_s if mean_s is None else mean_s
        await asyncio.sleep(self.world.draws.expovariate(1 / mean_s))

    async def reach(self, broker: Broker, call: Callable[[Broker], Awaitable[T]]) -> T:
        return await self.world.ask(broker.address, call, timeout_s=self.load.patience_s)

    async def ask(
        self,
        op: int,
        broker: Broker,
        call: Callable[[Broker], Awaitable[T]],
    ) -> T | None:
        """The answer; None when there is none, whose kind is recorded.

        Raises OffsetOutOfRange, of which nothing is recorded, and StaleCommit.
        """
        try:
            answer = await self.reach(broker, call)
        except (CommitUnknown, Silence) as error:
            self.world.record(history.Unknown(self.world.now_s, op, str(error)))
            self.world.count("unknown")
        except OffsetOutOfRange:
            raise
        except (LogError, Refusal) as error:
            why = f"{type(error).__name__}: {error}"
            self.world.record(history.Refused(self.world.now_s, op, why))
            self.world.count("refused")
            if isinstance(error, StaleCommit):
                raise
        else:
            return answer
        return None

    def begin(self, kind: Callable[..., history.Event], *fields: object, **named: object) -> int:
        op = self.world.recorder.next_op()
        self.world.record(kind(self.world.now_s, op, *fields, **named))
        return op

    def end(self, kind: Callable[..., history.Event], op: int, *fields: object) -> None:
        self.world.record(kind(self.world.now_s, op, *fields))
        self.world.count(kind.__name__.lower())


class Producer(Client):
    """One request after the other."""

    def __init__(self, world: World, name: str, load: Load) -> None:
        super().__init__(world, name, load)
        self._idempotent = Idempotent(world, name, load, by_init)

    async def run(self) -> None:
        number = 0
        while not self.is_over:
            await self.pause()
            number += 1
            how = self.world.draws.random()
            values = [f"{self.name}/{number}.{i}" for i in range(self.world.draws.randint(1, 3))]
            if how < self.load.producers:
                await self._as_producer(values)
            elif how < self.load.producers + self.load.keyed:
                await self._until_told(values, f"{self.name}/{number}")
            else:
                is_local = self.world.draws.random() < self.load.local
                await self.once(self._records(values), is_local=is_local)

    def _records(self, values: list[str]) -> list[Written]:
        draws, topics = self.world.draws, self.world.inputs()
        topic = TOPIC if len(topics) == 1 or draws.random() < 0.5 else draws.choice(list(topics))
        first, is_spread = draws.randrange(topics[topic]), draws.random() < self.load.spread
        return [
            Written(
                topic,
                value,
                (first + i * is_spread) % topics[topic],
                f"k{draws.randrange(5)}" if self.load.is_compacted else None,
                self.load.is_compacted and draws.random() < 0.2,
            )
            for i, value in enumerate(values)
        ]

    async def _until_told(self, values: list[str], key: str) -> None:
        records = self._records(values)
        for _ in range(6):
            if await self.once(records, key=key) or self.is_over:
                return
            await self.pause()

    async def once(
        self,
        records: list[Written],
        *,
        key: str | None = None,
        is_local: bool = False,
        broker: Broker | None = None,
    ) -> bool:
        """One attempt; whether it was acked."""
        broker = broker or self.world.anyone()
        if broker is None:
            return False
        parted: dict[int, list[Written]] = {}
        for record in records:
            parted.setdefault(record.partition or 0, []).append(record)
        ordered = [record for part in parted.values() for record in part]
        op = self.begin(history.Append, self.name, ordered, key, broker.name)

        async def append(broker: Broker) -> list[AppendedRange] | None:
            log = broker.log
            claim = None
            if key is not None:
                digest = hashlib.blake2b(repr(ordered).encode()).digest()[:16]
                claim = IdempotencyKey(key, digest, self.load.partitions)
            parts = [(number, rows_of(part)) for number, part in parted.items()]
            size = sum(len(record.value) for record in ordered)
            acks = Acks.LOCAL if is_local else Acks.ALL
            name = records[0].topic
            for number in parted:
                _ = log.state.partition(name, number)
            topic = log.state.topic(name)
            if key is None and not is_local and len(parts) == 1 and op % 2:
                ((number, rows),) = parts
                return await log.kafka.append(topic, number, checked(rows, codec=op % CODECS))
            linger_s = self.load.lingers_s[op // 2 % len(self.load.lingers_s)]
            return await log.records.append(
                topic, parts, size=size, is_json=False, acks=acks, key=claim, linger_s=linger_s
            )

        placed = await self.ask(op, broker, lambda broker: _wrapped(append(broker)))
        if placed is None:
            return False
        self.end(history.Acked, op, None if placed[0] is None else places_of(placed[0]))
        return True

    async def _as_producer(self, values: list[str]) -> None:
        if await self._idempotent.introduce():
            number = self.world.draws.randrange(self.world.inputs()[TOPIC])
            await self._idempotent.send(number, values)


async def by_init(broker: Broker) -> int:
    """A producer id as level 1 has it. Its epoch is 0."""
    return (await broker.log.records.init_producer()).producer_id


async def by_reservation(broker: Broker) -> int:
    """A producer id as Kafka's listener gives it. Its epoch is 0."""
    return await broker.log.kafka.reserve_producer_id()


class Idempotent(Client):
    """An idempotent producer of Kafka's protocol, with an id that a broker gives it.

    Its batches to a partition have sequences without a gap. After an unknown outcome it needs a new
    id.
    """

    def __init__(
        self,
        world: World,
        name: str,
        load: Load,
        id_of: Callable[[Broker], Awaitable[int]] = by_reservation,
    ) -> None:
        super().__init__(world, name, load)
        self._id_of = id_of
        self.epoch: tuple[int, int] | None = None
        """Its id, and the epoch of its next batch."""
        self.sequences: dict[int, int] = {}
        """The next one of each partition."""
        self.is_sending = False

    def anyone(self) -> Broker | None:
        return self.world.anyone()

    async def introduce(self) -> bool:
        """Get an id, unless it has one; whether it has one now."""
        broker = self.anyone()
        if broker is None:
            return False
        if self.epoch is None:
            with contextlib.suppress(LogError, Refusal, Silence):
                producer_id = await self.reach(broker, self._id_of)
                self.world.record(history.Given(self.world.now_s, self.name, producer_id))
                self.epoch, self.sequences = (producer_id, 0), {}
        return self.epoch is not None

    async def send(self, number: int, values: list[str], topic: str = TOPIC) -> bool:
        """One batch to a partition, until it is acked; whether it was. `topic`: in the history."""
        assert self.epoch is not None, "it has an id"
        self.is_sending = True
        records = [Written(topic, value, number, "p") for value in values]
        for _ in range(6):
            broker = self.anyone()
            if broker is not None:
                op = self.begin(
                    history.Append, self.name, records, None, broker.name, is_producer=True
                )
                first = self.sequences.get(number, 0)
                batch = checked(rows_of(records), (*self.epoch, first), codec=first % CODECS)
                try:
                    placed = await self.ask(op, broker, partial(_append_batch, number, batch))
                except StaleCommit as error:
                    if not self.goes_on_after(error):
                        break
                    continue
                if placed is not None:
                    places = [place._replace(topic=topic) for place in places_of([placed])]
                    self.end(history.Acked, op, places)
                    self.sequences[number] = first + len(records)
                    self.is_sending = False
                    return True
            await self.pause()
        self.epoch = None  # the outcome of the last is unknown
        self.is_sending = False
        return False

    def goes_on_after(self, error: StaleCommit) -> bool:
        """Whether to send the batch again after this refusal: no log refuses its next batch."""
        self.world.bug(f"producer {self.name} at {self.epoch}, {self.sequences}: {error!r}")
        return False


async def _append_batch(number: int, batch: Batch, broker: Broker) -> AppendedRange:
    log = broker.log
    _ = log.state.partition(TOPIC, number)
    (placed,) = await log.kafka.append(log.state.topic(TOPIC), number, batch)
    return placed


class Newcomers(Client):
    """Idempotent producers that come and go.

    Each gets its id from any broker, and sends a few batches while others come.
    """

    PAUSE_S = 0.3
    BATCHES_MAX = 5

    def __init__(self, world: World, name: str, load: Load, pause_s: float = PAUSE_S) -> None:
        super().__init__(world, name, load)
        self._pause_s = pause_s
        self.producers: list[Idempotent] = []

    async def run(self) -> None:
        while not self.is_over:
            await self.pause(self._pause_s)
            name = f"{self.name}.{len(self.producers)}"
            self.producers.append(Idempotent(self.world, name, self.load))
            self.world.spawn(name, self._lived(self.producers[-1]))
        while not all(producer.is_done for producer in self.producers):  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def _lived(self, producer: Idempotent) -> None:
        if await producer.introduce():
            for batch in range(self.world.draws.randint(1, self.BATCHES_MAX)):
                number = self.world.draws.randrange(self.load.partitions)
                if not await producer.send(number, [f"{producer.name}/{batch}"]):
                    break
                await self.pause()
        producer.is_done = True


async def _wrapped(call: Awaitable[T]) -> list[T]:
    """None is an answer, too."""
    return [await call]


def rows_of(records: list[Written]) -> Rows:
    return Rows(
        [TIME_MS] * len(records),
        [None if record.record_key is None else record.record_key.encode() for record in records],
        [None if record.is_tombstone else record.value.encode() for record in records],
        [[(IDENTITY, record.value.encode())] for record in records],
    )


def places_of(placements: list[AppendedRange]) -> list[Place]:
    return [
        Place(placement.topic, placement.partition, placement.base_offset + i)
        for placement in placements
        for i in range(placement.count)
    ]


def reads_of(fetched: Answer) -> list[Read]:
    """By the header that every record has."""
    reads = []
    for piece in fetched.pieces:
        offsets: list[Any] = piece.batch.column("offset").to_pylist()
        headers: list[Any] = piece.batch.column("headers").to_pylist()
        reads += [
            Read(offset, str(record_headers[0]["value"], "ascii"))
            for offset, record_headers in zip(offsets, headers, strict=True)
        ]
    return reads


async def by_batches(
    log: LogBroker, topic: str, number: int, offset: int, bytes_max: int
) -> Answer:
    """Fetch as Kafka's listener does, and read the batches as a client does."""
    await log.refresh()
    read = await log.kafka.read(log.state.topic(topic), number, offset, bytes_max)
    records = consumed(b"".join(read.pieces), offset)
    rows = Rows(
        [record.timestamp for record in records],
        [record.key for record in records],
        [record.value for record in records],
        [record.headers for record in records],
    )
    columns = [
        pa.array([record.offset for record in records], pa.int64()),
        *batch_of_rows([rows]).columns,
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
    pieces = [ReadBatch(batch, is_json=False)] if records else []
    return Answer(pieces, read.next_offset, read.log_start_offset, read.high_watermark)


class Deleter(Client):
    """Moves the log start of one partition, some times in a row, by a broker's DeleteRecords."""

    async def run(self) -> None:
        draws = self.world.draws
        number = draws.randrange(self.load.partitions)
        for _ in range(draws.choice([1, 6])):
            await self.pause(0.1)
            await self._delete(number, draws.choice([1, 1, 4]))

    async def _delete(self, number: int, count: int) -> None:
        async def delete(broker: Broker) -> None:
            start = broker.log.state.partition(TOPIC, number).log_start_offset
            _ = await broker.log.topics.delete_records(TOPIC, number, start + count)
            self.world.count("log starts moved by a client")

        broker = self.world.anyone()
        if broker is not None:
            with contextlib.suppress(LogError, Refusal, Silence):
                await self.world.ask(broker.address, delete, timeout_s=self.load.patience_s)


class Reader(Client):
    """Follows one partition from where it begins, any broker each time; and looks at others."""

    async def run(self) -> None:
        draws = self.world.draws
        number, life, offset = draws.randrange(self.load.partitions), 0, 0
        while not self.is_over:
            await self.pause()
            if draws.random() < 0.3:
                await self._look(draws.randrange(self.load.partitions))
            try:
                next_offset = await self.fetch(number, offset, f"{self.name}.{life}")
            except OffsetOutOfRange as error:
                life, offset = life + 1, max(error.log_start_offset, 0)
            else:
                offset = offset if next_offset is None else next_offset

    async def fetch(self, number: int, offset: int, stream: str, topic: str = TOPIC) -> int | None:
        """Where to go on; None when there was no answer."""
        draws, broker = self.world.draws, self.world.anyone()
        if broker is None:
            return None
        bytes_max, wait_s = draws.choice([1, 70, 1 << 20]), draws.choice([0.0, 0.0, 1.0])
        op = self.begin(
            history.Fetch,
            self.name,
            topic,
            number,
            offset,
            broker=broker.name,
            stream=stream,
            may_lag=wait_s > 0 and self.world.has_unknown_brokers,
            lag_s=self.world.settings.read_freshness_s if wait_s else 0.0,
        )

        async def fetch(broker: Broker) -> Answer:
            if not op % KAFKA_FETCHES:
                return await by_batches(broker.log, topic, number, offset, bytes_max)
            return await broker.log.records.fetch(
                topic, number, offset, bytes_max=bytes_max, wait_s=wait_s
            )

        try:
            fetched = await self.ask(op, broker, fetch)
        except OffsetOutOfRange as error:
            self.end(history.OutOfRange, op, error.log_start_offset, error.high_watermark)
            raise
        if fetched is None:
            return None
        reads = reads_of(fetched)
        start, end = fetched.log_start_offset, fetched.high_watermark
        self.end(history.Fetched, op, reads, fetched.next_offset, start, end, broker.name)
        return fetched.next_offset

    async def _look(self, number: int) -> None:
        broker = self.world.anyone()
        if broker is None:
            return
        op = self.begin(history.Look, self.name, TOPIC, number, broker.name)

        async def look(broker: Broker) -> tuple[int, int]:
            offsets = await broker.log.records.offsets(TOPIC, number)
            return offsets.log_start_offset, offsets.high_watermark

        bounds = await self.ask(op, broker, look)
        if bounds is not None:
            self.end(history.Looked, op, *bounds)


class Witness(Client):
    """Reads another's ack as soon as it is there, at another broker (I3)."""

    async def run(self) -> None:
        event_count = 0
        reader = Reader(self.world, self.name, self.load)
        while not self.is_over:
            await asyncio.sleep(0.05)
            events = self.world.recorder.events
            acked = [event for event in events[event_count:] if isinstance(event, history.Acked)]
            event_count = len(events)
            if acked and acked[-1].places:
                place = acked[-1].places[-1]
                with contextlib.suppress(OffsetOutOfRange):
                    await reader.fetch(place.partition, place.offset, "", place.topic)
