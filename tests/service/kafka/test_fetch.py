"""Fetch, ListOffsets and OffsetForLeaderEpoch over the wire."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from aiokafka.record.memory_records import MemoryRecords

from tests.service.conftest import QUIET
from tests.service.kafka.conftest import NOW_MS, Client, Kafka, batch, broker
from tests.service.kafka.test_produce import _produce, _request
from tests.support.faults import Call, FaultyStore
from tidelog.service.kafka import fetch_sessions
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.fetch_sessions import FetchSession, FetchSessions, SessionRefused
from tidelog.service.kafka.messages.fetch import (
    FetchablePartitionResponse,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
)
from tidelog.service.kafka.messages.log_dirs import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tidelog.service.kafka.messages.offsets import (
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
from tidelog.service.memory_pool import EVERYONE, Share
from tidelog.service.telemetry.rates import NAMES, RateSampler
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore


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


async def test_fetch_waits_for_min_bytes_of_all_partitions(kafka: Kafka, filled: Client) -> None:
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
    await kafka.log.topics.delete("t")
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
    await kafka.log.records.append(
        topic, [(0, Rows([NOW_MS], [None], [b"row"]))], size=3, is_json=False
    )
    await kafka.log.records.seal("t")
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


@contextlib.asynccontextmanager
async def two_brokers(
    store: ObjectStore, *, freshness_s: float = 0.0
) -> AsyncIterator[tuple[Kafka, Kafka]]:
    """Brokers that share a store and announce nothing. The first one made topic `t`."""
    settings = QUIET._replace(poll_interval_s=3600.0, read_freshness_s=freshness_s)
    async with (
        broker(settings, object_store=store) as writing,
        broker(settings, object_store=store) as reading,
    ):
        await writing.log.topics.create("t", 1, {})
        yield writing, reading


async def test_i3_fetch_at_the_end_has_the_records_that_another_broker_acked() -> None:
    store = FaultyStore(MemoryStore())
    async with two_brokers(store) as (writing, reading):
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


async def test_i3_fetch_that_waits_may_lack_what_is_younger_than_read_freshness() -> None:
    async with two_brokers(MemoryStore(), freshness_s=3600.0) as (writing, reading):
        writer, reader = writing.client(), reading.client()
        assert await _offset(reader, -1) == (0, 0, -1)  # reads the WAL
        await _produce(writer, _request((0, batch(b"0"))))
        (answer,) = await _fetch(reader, _wanted((0, 0), wait_ms=30))
        assert _records(answer) == []
        (answer,) = await _fetch(reader, _wanted((0, 0), wait_ms=0))
        assert _records(answer) == [(0, b"0")]


# -- ListOffsets


async def test_i3_list_offsets_has_the_records_that_another_broker_acked() -> None:
    async with two_brokers(MemoryStore()) as (writing, reading):
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
            await kafka.log.records.seal("t")
    for start in range(len(model) + 1):
        await kafka.log.topics.delete_records("t", 0, start)
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


# -- sessions


def _in_session(session_id: int, epoch: int, *parts: tuple[int, int], **more: int) -> FetchRequest:
    request = _wanted(*parts, **more)
    request.session_id, request.session_epoch = session_id, epoch
    if not parts:
        request.topics = []
    return request


async def _ask(
    client: Client, request: FetchRequest, version: int = 11
) -> tuple[FetchResponse, dict[int, int]]:
    """Return the answer, and the number of records of each partition in it."""
    response = await client.ask(request, FetchResponse, version)
    partitions = [partition for topic in response.responses for partition in topic.partitions]
    return response, {
        partition.partition_index: len(_records(partition)) for partition in partitions
    }


async def test_answers_have_only_what_changed(kafka: Kafka) -> None:
    client = kafka.client()
    first, counts = await _ask(client, _in_session(0, 0, (0, 0), (1, 0), (2, 0)))
    assert first.session_id > 0
    assert counts == {0: 0, 1: 0, 2: 0}
    session = first.session_id
    response, counts = await _ask(client, _in_session(session, 1))
    assert (response.session_id, counts) == (session, {})
    await _produce(client, _request((1, batch(b"a", b"b"))))
    assert (await _ask(client, _in_session(session, 2)))[1] == {1: 2}
    # Without the new offset, the same records come again.
    assert (await _ask(client, _in_session(session, 3)))[1] == {1: 2}
    assert (await _ask(client, _in_session(session, 4, (1, 2))))[1] == {}
    await _produce(client, _request((0, batch(b"c"))))
    await _produce(client, _request((1, batch(b"d"))))
    assert (await _ask(client, _in_session(session, 5)))[1] == {0: 1, 1: 1}


async def test_partitions_are_forgotten_and_added(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0))))[0].session_id
    await _produce(client, _request((0, batch(b"a")), (1, batch(b"b"))))
    request = _in_session(session, 1, (1, 0))
    request.forgotten_topics_data = [ForgottenTopic(topic="t", partitions=[0, 7])]
    assert (await _ask(client, request))[1] == {1: 1}
    assert (await _ask(client, _in_session(session, 2, (0, 0))))[1] == {0: 1, 1: 1}


async def test_a_wait_in_a_session_ends_with_the_records(kafka: Kafka) -> None:
    client, other = kafka.client(), kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0), (1, 0))))[0].session_id
    waiting = asyncio.create_task(_ask(client, _in_session(session, 1, wait_ms=20_000)))
    await asyncio.sleep(0.01)
    await _produce(other, _request((1, batch(b"b"))))
    assert (await waiting)[1] == {1: 1}


async def test_errors_come_each_time_and_their_end_too(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0), (1, 0))))[0].session_id
    for epoch in (1, 2):
        response, _ = await _ask(client, _in_session(session, epoch, (0, 99)))
        (part,) = response.responses[0].partitions
        assert part.error_code == Code.OFFSET_OUT_OF_RANGE
    response, _ = await _ask(client, _in_session(session, 3, (0, 0)))
    (part,) = response.responses[0].partitions
    assert (part.error_code, part.high_watermark) == (0, 0)


async def test_the_ends_of_a_session(kafka: Kafka) -> None:
    client = kafka.client()
    session = (await _ask(client, _in_session(0, 0, (0, 0))))[0].session_id

    async def code(request: FetchRequest, version: int = 11) -> int:
        response, _ = await _ask(client, request, version)
        assert response.error_code == 0 or not response.responses
        return int(response.error_code)

    assert await code(_in_session(session, 2)) == Code.INVALID_FETCH_SESSION_EPOCH
    assert await code(_in_session(session + 1, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND
    assert await code(_in_session(session, 1), 13) == Code.FETCH_SESSION_TOPIC_ID_ERROR
    # All partitions again under the old id: a new session.
    response, counts = await _ask(client, _in_session(session, 0, (0, 0)))
    assert response.session_id not in {0, session}
    assert counts == {0: 0}
    assert await code(_in_session(session, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND
    # The client ends the session.
    ended, counts = await _ask(client, _in_session(response.session_id, -1, (0, 0)))
    assert (ended.session_id, counts) == (0, {0: 0})
    assert await code(_in_session(response.session_id, 1)) == Code.FETCH_SESSION_ID_NOT_FOUND


# --- the sessions of a broker


def _request_of(*numbers: int, session_id: int = 0, epoch: int = 0) -> FetchRequest:
    parts = [FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1) for n in numbers]
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=1,
        session_id=session_id,
        session_epoch=epoch,
        topics=[FetchTopic(topic="t", partitions=parts)],
    )


def _begun(sessions: FetchSessions, now_s: float, *numbers: int) -> FetchSession | None:
    return sessions.begin(_request_of(*numbers), "User:a", now_s, is_by_id=False)


def test_the_bounds_of_sessions_and_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "SESSIONS_MAX", 3)
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 10)
    sessions = FetchSessions(2**31 - 2)
    opened = [_begun(sessions, 0.0, 1, 2), _begun(sessions, 50.0, 1), _begun(sessions, 60.0, 1)]
    assert [session and session.session_id for session in opened] == [2**31 - 2, 2**31 - 1, 1]
    assert _begun(sessions, 100.0, 1) is None, "no session is idle for long enough"
    assert _begun(sessions, 121.0, 1) is not None
    oldest = opened[0]
    assert oldest is not None
    request = _request_of(session_id=oldest.session_id, epoch=1)
    with pytest.raises(SessionRefused):
        sessions.open(request, "User:a", 122.0, is_by_id=False)
    assert _begun(sessions, 10_000.0, *range(11)) is None, "too many partitions for any room"
    assert len(sessions) == 0
    # A session that grows over the bound ends.
    grown = _begun(sessions, 0.0, 1)
    assert grown is not None
    request = _request_of(*range(11), session_id=grown.session_id, epoch=1)
    assert sessions.open(request, "User:a", 0.0, is_by_id=False) is grown
    assert len(sessions) == sessions._partitions == 0


def test_a_session_is_of_its_principal() -> None:
    sessions = FetchSessions(5)
    session = _begun(sessions, 0.0, 1)
    assert session is not None
    for epoch in (-1, 0):  # neither may another principal end it
        request = _request_of(1, session_id=session.session_id, epoch=epoch)
        assert sessions.open(request, "User:b", 0.0, is_by_id=False) is None
    request = _request_of(session_id=session.session_id, epoch=1)
    with pytest.raises(SessionRefused):
        sessions.open(request, "User:b", 0.0, is_by_id=False)
    assert sessions.open(request, "User:a", 0.0, is_by_id=False) is session


def test_epochs_begin_again_at_one() -> None:
    sessions = FetchSessions(5)
    session = _begun(sessions, 0.0, 1)
    assert session is not None
    session.epoch = 2**31 - 1
    for epoch in (2**31 - 1, 1):
        request = _request_of(session_id=5, epoch=epoch)
        assert sessions.open(request, "User:a", 0.0, is_by_id=False) is session


def test_a_client_with_a_session_knows_what_one_without_knows() -> None:
    """Property: partitions that an answer leaves out are as the client has them."""
    rng = random.Random(11)
    for _ in range(200):
        session = FetchSession(1, "User:a", is_by_id=False)
        session.update(_request_of(*range(4)))
        truth = dict.fromkeys(range(4), (0, 0, 0))  # error, high watermark, log start offset
        client_state = dict(truth)
        for step in range(12):
            for number in rng.sample(range(4), rng.randrange(3)):
                error = rng.choice([0, 0, 1])
                truth[number] = (
                    (error, -1, -1) if error else (0, rng.randrange(3), rng.randrange(2))
                )
            answers = {
                partition.partition: FetchablePartitionResponse(
                    partition_index=partition.partition,
                    error_code=truth[partition.partition][0],
                    high_watermark=truth[partition.partition][1],
                    log_start_offset=truth[partition.partition][2],
                    aborted_transactions=None,
                    records=[b"r"]
                    if rng.random() < 0.2 and not truth[partition.partition][0]
                    else [],
                )
                for topic in session.topics()
                for partition in topic.partitions
            }
            assert sorted(answers) == [0, 1, 2, 3]
            with_records = {n for n, answer in answers.items() if answer.records}
            topic_response = FetchableTopicResponse(
                topic="t", topic_id=ZERO_UUID, partitions=list(answers.values())
            )
            response = FetchResponse(throttle_time_ms=0, responses=[topic_response])
            session.remove_unchanged(response, is_full=step == 0)
            sent = [partition for topic in response.responses for partition in topic.partitions]
            assert with_records <= {partition.partition_index for partition in sent}
            for partition in sent:
                said = (partition.error_code, partition.high_watermark, partition.log_start_offset)
                client_state[partition.partition_index] = said
            assert client_state == truth
            order = [
                partition.partition for topic in session.topics() for partition in topic.partitions
            ]
            if with_records:
                assert set(order[-len(with_records) :]) == with_records


@pytest.mark.parametrize("version", [11, 17])
async def test_session_has_no_partition_that_is_unknown(kafka: Kafka, version: int) -> None:
    """A request of few bytes must not ask for many errors again and again."""
    client = kafka.client()
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    unknown = FetchTopic(topic="unknown", topic_id=bytes(15) + b"\1", partitions=[])
    unknown.partitions = [
        FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1) for n in range(100)
    ]

    async def ask(session: int, epoch: int, *topics: FetchTopic) -> FetchResponse:
        request = _in_session(session, epoch)
        request.topics = list(topics)
        return (await _ask(client, request, version))[0]

    response = await ask(0, 0, unknown)
    assert response.session_id == 0
    assert len(response.responses[0].partitions) == 100
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
    of_known = FetchTopic(topic="t", topic_id=topic_id, partitions=[partition])
    session = (await ask(0, 0, of_known)).session_id
    assert session > 0
    response = await ask(session, 1, unknown)
    assert len(response.responses[0].partitions) == 100
    response = await ask(session, 2)
    assert (response.error_code, response.responses) == (Code.FETCH_SESSION_ID_NOT_FOUND, [])
