"""Fetch, ListOffsets and OffsetForLeaderEpoch over the wire."""

import asyncio
import random

import pytest
from aiokafka.record.memory_records import MemoryRecords

from tests.service.conftest import QUIET
from tests.service.kafka.conftest import NOW_MS, Client, Kafka, batch, broker
from tests.service.kafka.test_produce import _produce, _request
from tests.support.faults import Call, FaultyStore
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.fetch import (
    FetchablePartitionResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.topics import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tidelog.service.memory_pool import EVERYONE, Share
from tidelog.service.telemetry.rates import NAMES, RateSampler
from tidelog.storage.codec.chunk import Rows
from tidelog.storage.store.memory import MemoryStore


def _wanted(
    *parts: tuple[int, int],
    topic: str = "t",
    topic_id: bytes = ZERO_UUID,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    partition_bytes: int = 1 << 20,
    epoch: int = -1,
) -> FetchRequest:
    partitions = [
        FetchPartition(
            partition=index,
            fetch_offset=offset,
            partition_max_bytes=partition_bytes,
            current_leader_epoch=epoch,
        )
        for index, offset in parts
    ]
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        topics=[FetchTopic(topic=topic, topic_id=topic_id, partitions=partitions)],
    )


async def _fetch(
    client: Client, request: FetchRequest, version: int = 11
) -> list[FetchablePartitionResponse]:
    response = await client.ask(request, FetchResponse, version)
    assert response.session_id == 0
    return response.responses[0].partitions


def _records(part: FetchablePartitionResponse) -> list[tuple[int, bytes | None]]:
    """Offset and value of each record of an answer, read by aiokafka."""
    assert part.records is not None, "librdkafka needs bytes, also in errors"
    records = []
    batches = MemoryRecords(b"".join(part.records))
    while batches.has_next():
        record_batch = batches.next_batch()
        assert record_batch is not None
        records += [(record.offset, record.value) for record in record_batch]
    return records


@pytest.fixture
async def filled(kafka: Kafka) -> Client:
    """Partition 0 has the records 0 to 5 in three batches, partition 1 has one."""
    client = kafka.client()
    for first in (0, 2, 4):
        values = [b"%d" % n for n in (first, first + 1)]
        await _produce(client, _request((0, batch(*values, timestamp=NOW_MS + first * 100))))
    await _produce(client, _request((1, batch(b"one"))))
    return client


@pytest.mark.parametrize("version", range(4, 19))
async def test_each_version_reads(kafka: Kafka, filled: Client, version: int) -> None:
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    parts = await _fetch(filled, _wanted((0, 0), (1, 0), (2, 0), topic_id=topic_id), version)
    assert _records(parts[0]) == [(n, b"%d" % n) for n in range(6)]
    assert _records(parts[1]) == [(0, b"one")]
    assert _records(parts[2]) == []
    assert [(part.high_watermark, part.error_code) for part in parts] == [(6, 0), (1, 0), (0, 0)]
    assert [part.last_stable_offset for part in parts] == [6, 1, 0]


async def test_the_batch_that_contains_the_offset_is_first(kafka: Kafka, filled: Client) -> None:
    (part,) = await _fetch(filled, _wanted((0, 3)))
    records = _records(part)
    assert records[0][0] <= 3
    assert (5, b"5") in records


async def test_one_batch_comes_over_every_bound(kafka: Kafka, filled: Client) -> None:
    first, second = await _fetch(filled, _wanted((0, 0), (1, 0), max_bytes=1, partition_bytes=1))
    assert _records(first)
    assert _records(second) == []
    assert second.high_watermark == 1


async def test_bounds_of_bytes(kafka: Kafka) -> None:
    client = kafka.client()
    for _ in range(5):
        await _produce(client, _request((0, batch(b"x" * 1000)), (1, batch(b"y" * 1000))))
    first, second = await _fetch(
        client, _wanted((0, 0), (1, 0), max_bytes=4000, partition_bytes=2500)
    )
    assert 1 <= len(_records(first)) <= 3
    size = sum(len(b"".join(part.records or [])) for part in (first, second))
    assert size <= 4000
    assert _records(second), "the second partition gets what the first leaves"


async def test_a_fetch_waits_for_records(kafka: Kafka, filled: Client) -> None:
    waiting = asyncio.create_task(_fetch(filled, _wanted((0, 6), (1, 1), wait_ms=20_000), 12))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await _produce(kafka.client(), _request((1, batch(b"new"))))
    parts = await waiting
    assert [_records(part) for part in parts] == [[], [(1, b"new")]]


async def test_a_fetch_waits_for_min_bytes_over_all_partitions(
    kafka: Kafka, filled: Client
) -> None:
    size = len(batch(b"new"))
    request = _wanted((0, 6), (1, 1), wait_ms=20_000, min_bytes=2 * size)
    waiting = asyncio.create_task(_fetch(filled, request))
    other = kafka.client()
    await _produce(other, _request((0, batch(b"new"))))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await _produce(other, _request((1, batch(b"new"))))
    assert [len(_records(part)) for part in await waiting] == [1, 1]


async def test_an_empty_answer_after_the_wait(kafka: Kafka, filled: Client) -> None:
    (part,) = await _fetch(filled, _wanted((0, 6), wait_ms=20))
    assert (_records(part), part.high_watermark) == ([], 6)


async def test_errors_are_by_partition_and_come_at_once(kafka: Kafka, filled: Client) -> None:
    parts = await _fetch(filled, _wanted((0, 7), (9, 0), (1, 0), wait_ms=20_000))
    assert [part.error_code for part in parts] == [
        Code.OFFSET_OUT_OF_RANGE,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.NONE,
    ]
    assert _records(parts[0]) == []
    assert parts[0].high_watermark == 6
    (unknown,) = await _fetch(filled, _wanted((0, 0), topic="u", wait_ms=20_000))
    assert unknown.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    (by_id,) = await _fetch(filled, _wanted((0, 0), topic_id=b"u" * 16), 13)
    assert by_id.error_code == Code.UNKNOWN_TOPIC_ID
    (epoch,) = await _fetch(filled, _wanted((0, 0), epoch=5))
    assert epoch.error_code == Code.UNKNOWN_LEADER_EPOCH


async def test_a_topic_that_is_deleted_ends_the_wait(kafka: Kafka, filled: Client) -> None:
    waiting = asyncio.create_task(_fetch(filled, _wanted((2, 0), wait_ms=20_000)))
    await asyncio.sleep(0.01)
    await kafka.log.delete_topic("t")
    (part,) = await waiting
    assert part.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_an_unknown_session(kafka: Kafka, filled: Client) -> None:
    request = _wanted((0, 0))
    request.session_id, request.session_epoch = 5, 3
    response = await filled.ask(request, FetchResponse, 11)
    assert response.error_code == Code.FETCH_SESSION_ID_NOT_FOUND


async def test_answers_wait_for_memory(kafka: Kafka, filled: Client) -> None:
    answers = kafka.counters.admission.answers
    other = Share(answers, EVERYONE)
    assert other.set(answers.limit)
    waiting = asyncio.create_task(_fetch(filled, _wanted((0, 0), wait_ms=20_000)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    other.set(0)
    (part,) = await waiting
    assert len(_records(part)) == 6
    await asyncio.sleep(0)
    assert answers.used == 0


async def test_a_stopping_broker_ends_waits(kafka: Kafka, filled: Client) -> None:
    waiting = asyncio.create_task(_fetch(filled, _wanted((0, 6), wait_ms=20_000)))
    await asyncio.sleep(0.01)
    kafka.log.drain()
    kafka.server.begin_drain()
    (part,) = await waiting
    assert _records(part) == []
    (part,) = await _fetch(filled, _wanted((0, 0)))
    assert part.error_code == Code.NOT_LEADER_OR_FOLLOWER


async def test_records_of_kafka_clients_count_in_the_rates_of_the_broker(kafka: Kafka) -> None:
    """Sealed records, rows of HTTP clients and batches; a client that begins inside a batch."""
    client, http = kafka.client(), kafka.counters
    rates = RateSampler(kafka.log, http, "1", ack_labels=())
    topic = kafka.log.state.topic("t")
    await kafka.log.append(topic, [(0, Rows([NOW_MS], [None], [b"row"]))], size=3, is_json=False)
    await kafka.log.seal("t")
    await _produce(client, _request((0, batch(*[b"v"] * 10)), (1, batch(b"w"))))
    (first, second) = await _fetch(client, _wanted((0, 0), (1, 0)))
    assert len(_records(first)) + len(_records(second)) == 12
    await _fetch(client, _wanted((0, 6)))
    traffic = http.protocols["kafka"]
    assert (traffic.records_in, traffic.records_out) == (11, 12 + 5)
    assert (http.topics["t"].records_in, http.topics["t"].records_out) == (11, 17)
    assert http.protocols["http"].records_out == 0
    assert traffic.bytes_out > 3 * 61
    recent = dict(zip(NAMES, rates.own().recent.added, strict=True))
    assert (recent["records_in"], recent["records_out"]) == (11, 17)
    assert recent["requests"] == 3
    assert sum(rates.own().recent.acks) == 1


async def test_fetch_without_partitions_is_answered_at_once(kafka: Kafka) -> None:
    """A consumer that closes ends its session with such a request."""
    request = FetchRequest(max_wait_ms=20_000, min_bytes=1, session_epoch=-1, topics=[])
    async with asyncio.timeout(15):
        response = await kafka.client().ask(request, FetchResponse, 11)
    assert (response.error_code, response.responses) == (0, [])


async def test_fetch_at_the_end_has_the_records_that_another_broker_acked() -> None:
    """I3: the brokers share a store, and the other broker announces nothing."""
    store = FaultyStore(MemoryStore())
    settings = QUIET._replace(poll_interval_s=3600.0)
    async with (
        broker(settings, object_store=store) as writing,
        broker(settings, object_store=store) as reading,
    ):
        await writing.log.create_topic("t", 1, {})
        writer, reader = writing.client(), reading.client()
        for number, wait_ms in enumerate((0, 0, 30)):
            await _produce(writer, _request((0, batch(b"%d" % number))))
            (answer,) = await _fetch(reader, _wanted((0, number), wait_ms=wait_ms))
            assert _records(answer) == [(number, b"%d" % number)]
        probes: list[Call] = []
        store.plan = lambda call: probes.append(call) if call.key.startswith("wal/") else None
        readers = [reading.client() for _ in range(50)]
        await asyncio.gather(*(_fetch(client, _wanted((0, 3), wait_ms=50)) for client in readers))
        assert 1 <= len(probes) <= 5, "readers that wait at the same time share a read of the WAL"


# -- ListOffsets


async def test_list_offsets_has_the_records_that_another_broker_acked() -> None:
    """I3: the brokers share a store, and the other broker announces nothing."""
    store, settings = MemoryStore(), QUIET._replace(poll_interval_s=3600.0)
    async with (
        broker(settings, object_store=store) as writing,
        broker(settings, object_store=store) as reading,
    ):
        await writing.log.create_topic("t", 1, {})
        for number in range(3):
            await _produce(writing.client(), _request((0, batch(b"%d" % number))))
            assert await _offset(reading.client(), -1) == (0, number + 1, -1)


async def _offset(
    client: Client, timestamp: int, version: int = 11, partition: int = 0, epoch: int = -1
) -> tuple[int, int, int]:
    """Error, offset and timestamp."""
    asked = ListOffsetsPartition(
        partition_index=partition, current_leader_epoch=epoch, timestamp=timestamp
    )
    request = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsTopic(name="t", partitions=[asked])]
    )
    response = await client.ask(request, ListOffsetsResponse, version)
    (part,) = response.topics[0].partitions
    return part.error_code, part.offset, part.timestamp


@pytest.mark.parametrize("version", range(1, 12))
async def test_offsets_in_each_version(filled: Client, version: int) -> None:
    assert await _offset(filled, -1, version) == (0, 6, -1)
    assert await _offset(filled, -2, version) == (0, 0, -1)
    newest = (0, 5, NOW_MS + 401) if version >= 7 else (Code.UNSUPPORTED_VERSION, -1, -1)
    assert await _offset(filled, -3, version) == newest
    local = (0, 0, -1) if version >= 8 else (Code.UNSUPPORTED_VERSION, -1, -1)
    assert await _offset(filled, -4, version) == local
    tiered = (0, -1, -1) if version >= 9 else (Code.UNSUPPORTED_VERSION, -1, -1)
    assert await _offset(filled, -5, version) == tiered
    assert (await _offset(filled, -7, version))[0] == Code.UNSUPPORTED_VERSION


async def test_an_offset_by_time_is_exact_to_the_record(filled: Client) -> None:
    for after_ms, offset in ((0, 0), (1, 1), (2, 2), (200, 2), (201, 3), (400, 4), (401, 5)):
        answer = await _offset(filled, NOW_MS + after_ms)
        assert answer[:2] == (0, offset), after_ms
    assert await _offset(filled, NOW_MS + 201) == (0, 3, NOW_MS + 201)
    assert await _offset(filled, NOW_MS + 402) == (0, -1, -1)
    assert await _offset(filled, 2**63 - 1) == (0, -1, -1)


async def test_offsets_that_are_refused(filled: Client) -> None:
    assert (await _offset(filled, -1, partition=9))[0] == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert (await _offset(filled, -1, epoch=1))[0] == Code.UNKNOWN_LEADER_EPOCH


@pytest.mark.parametrize("seed", range(10))
async def test_newest_timestamp_of_kept_records_is_exact(kafka: Kafka, seed: int) -> None:
    """Records below the log start count in the statistics of their chunk or segment."""
    draw, client, model = random.Random(seed), kafka.client(), dict[int, int]()
    for _ in range(draw.randrange(1, 5)):
        first, step = draw.randrange(20), draw.randrange(-5, 6)
        values = [b"v"] * draw.randrange(1, 6)
        for place in range(len(values)):
            model[len(model)] = NOW_MS + first + place * step
        await _produce(
            client, _request((0, batch(*values, timestamp=NOW_MS + first, step_ms=step)))
        )
        if draw.random() < 0.3:
            await kafka.log.seal("t")
    for start in range(len(model) + 1):
        await kafka.log.delete_records("t", 0, start)
        stamps = {offset: stamp for offset, stamp in model.items() if offset >= start}
        newest = max(stamps.values(), default=-1)
        first_offset = min(
            (offset for offset, stamp in stamps.items() if stamp == newest), default=-1
        )
        assert await _offset(client, -3) == (0, first_offset, newest)


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_the_only_leader_epoch_is_0(filled: Client, version: int) -> None:
    asked = [
        OffsetForLeaderPartition(partition=number, leader_epoch=epoch)
        for number, epoch in ((0, 0), (0, 3), (9, 0))
    ]
    request = OffsetForLeaderEpochRequest(
        topics=[OffsetForLeaderTopic(topic="t", partitions=asked)]
    )
    response = await filled.ask(request, OffsetForLeaderEpochResponse, version)
    answers = [
        (part.error_code, part.leader_epoch, part.end_offset)
        for part in response.topics[0].partitions
    ]
    assert answers == [(0, 0, 6), (0, -1, -1), (Code.UNKNOWN_TOPIC_OR_PARTITION, -1, -1)]


async def test_sizes_and_reassignments(kafka: Kafka, filled: Client) -> None:
    for version in range(1, 5):
        sizes = await filled.ask(
            DescribeLogDirsRequest(topics=None), DescribeLogDirsResponse, version
        )
        (place,) = sizes.results
        partitions = {
            partition.partition_index: partition.partition_size
            for partition in place.topics[0].partitions
        }
        assert partitions[0] > partitions[1] > partitions[2] == 0
    none = await filled.ask(
        ListPartitionReassignmentsRequest(), ListPartitionReassignmentsResponse, 0
    )
    assert (none.error_code, none.topics) == (0, [])
