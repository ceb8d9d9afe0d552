"""Kafka's record batches in the log: every reader gets them as producers sent them.

This holds in both tiers, next to records of other clients.
"""

import asyncio
import random
from typing import Any, NamedTuple

import pytest

from tests.support.logs import (
    COLD,
    MANUAL,
    append,
    closing,
    kill,
    opened,
    read_table,
    rewrite,
    spoil_chunk,
    with_topic,
)
from tests.support.record_batches import CODECS, NO_PRODUCER, checked, consumed, sent
from tests.support.records import TIME_MS, found_cluster
from tidelog.storage.broker import Broker
from tidelog.storage.codec.batch_header import HEADER, HEADER_SIZE, BatchHeader, InvalidBatch
from tidelog.storage.codec.record_batch import Batch
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.core.actions import KAFKA_CODEC
from tidelog.storage.core.errors import (
    DamagedRecords,
    InvalidTimestamp,
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProducerFenced,
    RecordTooLarge,
    UnknownPartition,
)
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.store.memory import MemoryStore


class Written(NamedTuple):
    """A record as a reader must get it; the timestamp is in ms."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def drawn(draw: random.Random, count: int) -> Rows:
    """Records of Kafka's full range."""
    headers: list[Headers | None] = [
        draw.choice([None, [("a", b"1"), ("a", None)], [("b", b"")]]) for _ in range(count)
    ]
    return Rows(
        [TIME_MS + draw.randrange(1000) for _ in range(count)],
        [draw.choice([None, b"", b"key"]) for _ in range(count)],
        [draw.choice([None, b"", draw.randbytes(draw.randrange(60))]) for _ in range(count)],
        headers,
    )


def written(rows: Rows, append_ms: int = -1) -> list[Written]:
    headers = rows.headers or [None] * len(rows)
    columns = zip(rows.timestamps, rows.keys, rows.values, headers, strict=True)
    return [
        Written(stamp if append_ms < 0 else append_ms, key, value, record_headers or [])
        for stamp, key, value, record_headers in columns
    ]


async def send(log: Broker, batch: Batch, partition: int = 0) -> AppendedRange:
    (placed,) = await log.kafka.append(log.state.topic("t"), partition, batch)
    return placed


async def by_columns(log: Broker, partition: int, offset: int = 0) -> dict[int, Written]:
    """The records as other protocols get them."""
    table = await read_table(log, partition=partition, offset=offset)
    return {
        row["offset"]: Written(
            round(row["timestamp"].timestamp() * 1000),
            row["key"],
            row["value"],
            [(header["key"], header["value"]) for header in row["headers"] or []],
        )
        for row in (table.to_pylist() if table.num_rows else [])
    }


async def by_batches(
    log: Broker, partition: int, offset: int = 0, bytes_max: int = 1 << 20
) -> dict[int, Written]:
    """The records as a Kafka consumer gets them, read by read. It drops those before `offset`."""
    record_by_offset: dict[int, Written] = {}
    fetch_offset = offset
    while True:
        read = await log.kafka.read(log.state.topic("t"), partition, fetch_offset, bytes_max)
        body = memoryview(b"".join(read.pieces))
        assert len(body) == read.size
        if not body:
            assert read.next_offset == read.high_watermark == fetch_offset
            return {place: record for place, record in record_by_offset.items() if place >= offset}
        start, position = 0, -1
        while start < len(body):
            header = BatchHeader._make(HEADER.unpack_from(body, start))
            end = start + 12 + header.length
            # Only the first batch may begin before the wanted offset. librdkafka would deliver the
            # records of another such batch twice.
            assert header.base_offset == position if start else header.base_offset <= fetch_offset
            position = header.base_offset + header.last_offset_delta + 1
            record_by_offset |= {
                record[0]: Written(*record[1:]) for record in consumed(body[start:end])
            }
            start = end
        assert read.next_offset == position > fetch_offset
        fetch_offset = read.next_offset


@pytest.mark.parametrize("settings", [MANUAL, COLD], ids=["cached", "cold"])
@pytest.mark.parametrize("seed", range(12))
async def test_each_reader_gets_each_record(seed: int, settings: LogSettings) -> None:
    """Batches and other records, in one flush and in several, sealed or not, on two brokers."""
    draw = random.Random(seed)
    inner = MemoryStore()
    log, other = await opened(inner, settings), await opened(inner, settings)
    stamp = draw.choice(["CreateTime", "LogAppendTime"])
    await log.topics.create("t", 2, {"message.timestamp.type": stamp})
    await other.refresh()
    model: dict[int, dict[int, Written]] = {0: {}, 1: {}}
    sequences: dict[tuple[int, int], int] = {}

    async def write(broker: Broker) -> None:
        number, rows = draw.randrange(2), drawn(draw, draw.choice([1, 1, 2, 30]))
        kind = draw.choice(["batch", "producer", "rows"])
        topic = broker.state.topic("t")
        if kind == "rows":
            places = await broker.records.append(topic, [(number, rows)], size=9, is_json=False)
            assert places is not None
            (placed,) = places
        elif kind == "batch":
            placed = await send(broker, checked(rows, codec=draw.randrange(CODECS)), number)
        else:
            producer_id = draw.randrange(3)
            first = sequences.get((producer_id, number), 0)
            sequences[producer_id, number] = first + len(rows)
            batch = checked(rows, (producer_id, 0, first), draw.randrange(CODECS))
            sending = [send(broker, batch, number) for _ in range(draw.choice([1, 1, 2]))]
            placed, *again = await asyncio.gather(*sending)
            assert all(placement == placed for placement in again)
        assert placed.count == len(rows)
        partition = broker.state.partition("t", number)
        chunk = partition.tail[partition.tail_index(placed.base_offset)] if partition.tail else None
        append_ms = -1 if chunk is None else chunk.append_ms
        for place, record in enumerate(written(rows, append_ms), placed.base_offset):
            assert model[number].setdefault(place, record) == record

    async with closing(log, other):
        for _ in range(12):
            broker = draw.choice([log, other])
            await broker.refresh()
            count = draw.choice([1, 1, 4])
            await asyncio.gather(*(write(broker) for _ in range(count)))
            if draw.random() < 0.2:
                await log.records.seal("t")
            if draw.random() < 0.2:
                broker._log.tail.clear()
        for reader in (log, other, await opened(inner, settings)):
            await reader.refresh()
            for number, expected in model.items():
                assert sorted(expected) == list(range(len(expected)))
                start = draw.randrange(len(expected) + 1)
                remaining_records = {
                    offset: record for offset, record in expected.items() if offset >= start
                }
                for bytes_max in (1, 300, draw.randrange(500, 4000), 1 << 20):
                    assert await by_batches(reader, number, start, bytes_max) == remaining_records
                assert await by_columns(reader, number) == expected


async def test_batches_are_kept_as_they_came(inner: MemoryStore) -> None:
    """Compressed as the producer did it, in the WAL, in memory and for the consumer."""
    log = await opened(inner)
    other = await opened(inner)
    async with closing(log, other):
        await log.topics.create("t", 1, {})
        rows = Rows([TIME_MS] * 50, [b"k"] * 50, [b"the same value"] * 50)
        for _ in range(3):
            batch = checked(rows, codec=4)
            await send(log, batch)
        (chunk, *_) = log.state.partition("t", 0).tail
        assert (chunk.codec, chunk.size) == (KAFKA_CODEC, len(batch.data))
        await other.refresh()
        for broker in (log, other):
            read = await broker.kafka.read(broker.state.topic("t"), 0, 60, 1 << 20)
            body = b"".join(read.pieces)
            assert len(body) == 2 * len(batch.data)
            assert body[16 : len(batch.data)] == bytes(batch.data)[16:]
            assert int.from_bytes(body[:8]) == 50
            assert (read.next_offset, read.log_start_offset, read.high_watermark) == (150, 0, 150)


async def test_what_a_batch_is_refused_for() -> None:
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 1, {"max.message.bytes": "2000"})
        await log.topics.create("compacted", 1, {"cleanup.policy": "compact"})
        topic = log.state.topic("t")
        record = Rows([TIME_MS], [None], [b"x"])
        now_ms = log.clock.now_ms()
        for refused, topic_name, partition, rows in (
            (UnknownPartition, "t", 1, record),
            (InvalidBatch, "compacted", 0, record),
            (RecordTooLarge, "t", 0, Rows([TIME_MS], [None], [random.randbytes(3000)])),
            (InvalidTimestamp, "t", 0, Rows([now_ms + 10**9], [None], [b"x"])),
        ):
            with pytest.raises(refused):
                log.kafka.append(log.state.topic(topic_name), partition, checked(rows))
        first = checked(record, (5, 0, 0))
        assert (await send(log, first)).base_offset == 0
        with pytest.raises(OutOfOrderSequence):
            await send(log, checked(record, (5, 0, 7)))
        assert (await send(log, checked(record, (5, 1, 0)))).base_offset == 1
        with pytest.raises(ProducerFenced):
            await send(log, checked(record, (5, 0, 1)))
        assert (await send(log, checked(record))).base_offset == 2
        with pytest.raises(OffsetOutOfRange):
            await log.kafka.read(topic, 0, 4, 100)
        read = await log.kafka.read(topic, 0, 0, 0)
        assert (read.pieces, read.next_offset, read.high_watermark) == ([], 0, 3)


async def test_one_refusal_is_one_partitions() -> None:
    """Batches of one flush are separate commits."""
    async with closing(await with_topic(MemoryStore(), partitions=2)) as log:
        record = Rows([TIME_MS], [None], [b"x"])
        seq = log.state.seq
        results: list[Any] = await asyncio.gather(
            send(log, checked(record, (7, 0, 0)), 0),
            send(log, checked(record, (8, 0, 0)), 1),
            send(log, checked(record, (7, 0, 5)), 0),
            send(log, checked(record, (7, 0, 1)), 0),
            send(log, checked(record), 1),
            return_exceptions=True,
        )
        assert log.state.seq == seq + 1
        assert isinstance(results.pop(2), OutOfOrderSequence)
        assert [(placement.partition, placement.base_offset) for placement in results] == [
            (0, 0),
            (1, 0),
            (0, 1),
            (1, 1),
        ]
        assert len(await by_batches(log, 0)) == len(await by_columns(log, 0)) == 2


async def test_below_level_4_batches_become_columns(inner: MemoryStore) -> None:
    """Versions that do not know the codec can read the WAL."""
    await found_cluster(inner, 3)
    async with closing(await with_topic(inner)) as log:
        assert log.state.level == 3
        rows = drawn(random.Random(1), 40)
        await send(log, checked(rows, codec=3))
        assert {chunk.codec for chunk in log.state.partition("t", 0).tail} == {""}
        expected = dict(enumerate(written(rows)))
        assert await by_batches(log, 0) == await by_columns(log, 0) == expected
        ids = [await log.kafka.reserve_producer_id() for _ in range(3)]
        assert ids == [0, 1, 2]


async def test_producer_ids_of_brokers_differ(inner: MemoryStore) -> None:
    log, other = await opened(inner), await opened(inner)
    await log.topics.create("t", 1, {})
    seq = log.state.seq
    ids = await asyncio.gather(*(log.kafka.reserve_producer_id() for _ in range(150)))
    assert sorted(ids) == list(range(150))
    assert log.state.seq <= seq + 2, "concurrent calls share an entry"
    assert len(log.state.producers.reserved) == 1
    await kill(log)
    async with closing(other):
        await other.refresh()
        assert await other.kafka.reserve_producer_id() == 150
        record = Rows([TIME_MS], [None], [b"x"])
        with pytest.raises(OutOfOrderSequence):
            await send(other, checked(record, (149, 0, 1)))
        assert (await send(other, checked(record, (149, 0, 0)))).count == 1
        assert (await send(other, checked(record, (4000, 0, 9)))).count == 1  # of no broker


async def test_a_copy_of_a_machine_gives_no_id_of_its_original(inner: MemoryStore) -> None:
    """The copy has the names and the memory of the original (I11)."""
    original, copied, other = [await opened(inner) for _ in range(3)]
    async with closing(original, copied, other):
        await original.topics.create("t", 1, {})
        await original.kafka.reserve_producer_id()
        await copied.refresh()
        copied._log.wal.writer = copied._log.wal.clone_fence.writer = original._log.wal.writer
        copied._log.wal.clone_fence._puts = dict(original._log.wal.clone_fence._puts)
        copied._membership.me = original._membership.me
        copied.kafka.__dict__.update(
            {name: value for name, value in vars(original.kafka).items() if name != "_log"}
        )
        ids = await asyncio.gather(
            *(log.kafka.reserve_producer_id() for log in (original, copied, other)),
            return_exceptions=True,
        )
        producer_ids = [number for number in ids if isinstance(number, int)]
        assert len(producer_ids) == len(set(producer_ids)) >= 1
        record = Rows([TIME_MS], [None], [b"x"])
        await other.refresh()
        offsets = {
            (await send(other, checked(record, (number, 0, 0)))).base_offset
            for number in producer_ids
        }
        assert len(offsets) == len(producer_ids), "no batch was taken for one of another producer"


async def test_a_damaged_chunk_is_refused_to_both_kinds_of_readers(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD)) as log:
        await send(log, checked(drawn(random.Random(1), 5), codec=1))
        (chunk,) = log.state.partition("t", 0).tail
        await spoil_chunk(inner, chunk, 30)
        with pytest.raises(DamagedRecords):
            await log.kafka.read(log.state.topic("t"), 0, 0, 100)
        with pytest.raises(DamagedRecords):
            await log.records.fetch("t", 0, 0, bytes_max=100)


async def test_a_request_of_many_flushes_is_read_in_large_pieces() -> None:
    """The tail cache joins kept batches; a read does not copy them."""
    async with closing(await with_topic(MemoryStore())) as log:
        for number in range(64):
            await send(log, checked(Rows([TIME_MS], [None], [b"%d" % number])))
        pieces = log._log.tail.read((log.state.topic("t").topic_id, 0), 0)
        assert len(pieces) <= 6
        read = await log.kafka.read(log.state.topic("t"), 0, 0, 1 << 20)
        assert len(read.pieces) == 2 * 64
        await append(log, "other")
        assert len(await by_batches(log, 0)) == 65


class CountedList(list[Any]):
    """A list that counts how often an element is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("settings", [MANUAL, COLD], ids=["cached", "cold"])
async def test_short_read_of_long_tail_looks_at_few_chunks(settings: LogSettings) -> None:
    async with closing(await with_topic(MemoryStore(), settings)) as log:
        for _ in range(300):
            await append(log, "x" * 100)
        await send(log, checked(Rows([TIME_MS], [None], [b"last"])))
        partition = log.state.partition("t", 0)
        assert len(partition.tail) == 301
        partition.tail = chunks = CountedList(partition.tail)
        read = await log.kafka.read(log.state.topic("t"), 0, 10, 1000)
        assert 10 < read.next_offset <= 20
        assert chunks.reads < 300, "no read looks at the whole tail"
        assert len(await by_batches(log, 0, bytes_max=5000)) == 301


def test_a_batch_as_sent_is_unchanged_by_the_check() -> None:
    rows = drawn(random.Random(3), 7)
    for codec in range(CODECS):
        assert bytes(checked(rows, NO_PRODUCER, codec).data) == sent(rows, NO_PRODUCER, codec)


async def test_a_consumer_reads_a_chunk_of_the_wal_once(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner)) as log:
        await asyncio.gather(
            *(send(log, checked(Rows([TIME_MS], [None], [b"x"]), (9, 0, n))) for n in range(8))
        )
    async with closing(await opened(inner)) as reader:
        assert len(await by_batches(reader, 0, bytes_max=1)) == 8
        assert reader._log.reader.chunk_cache.misses == 1


async def test_records_that_compaction_removed_are_not_read_from_memory() -> None:
    """The tail cache still has the batches as they were before they were sealed."""
    async with closing(await opened(MemoryStore(), MANUAL)) as log:
        await log.topics.create("t", 1, {"cleanup.policy": "compact"})
        for number in range(10):
            await send(log, checked(Rows([TIME_MS], [b"key"], [b"%d" % number])))
        await log.records.seal("t")
        await send(log, checked(Rows([TIME_MS], [b"key"], [b"10"])))
        topic = log.state.topic("t")
        assert log._log.tail.read((topic.topic_id, 0), 0)
        await rewrite(log, [3, 9])
        for offset in range(11):
            expected = [place for place in (3, 9, 10) if place >= offset]
            assert list(await by_batches(log, 0, offset)) == expected


async def test_undecodable_batch_is_sealed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Only an error of the broker's check can accept one; it must not stop the partition."""
    async with closing(await with_topic(MemoryStore())) as log:
        good = checked(Rows([TIME_MS], [b"k"], [b"good"]))
        bad = bytearray(sent(Rows([TIME_MS] * 2, [b"k"] * 2, [b"bad"] * 2)))
        bad[HEADER_SIZE] ^= 0x40  # the length of the first record
        for batch in (good, good._replace(data=memoryview(bad), count=2), good):
            await send(log, batch)
        assert await log.records.seal("t") == 4
        values = [record.value for record in (await by_columns(log, 0)).values()]
        assert values == [b"good", bytes(bad), None, b"good"]
        log._log.tail.clear()
        record_by_offset = await by_columns(log, 0)
        assert [record.value for record in record_by_offset.values()] == values
        assert [name for name, _ in record_by_offset[1].headers] == ["tidelog.undecodable"]
    assert "sealed 2 records of batches that do not decode" in caplog.text
