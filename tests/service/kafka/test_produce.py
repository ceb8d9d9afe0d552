"""Produce and InitProducerId over the wire: offsets, refusals by partition, idempotence."""

import asyncio
import gc
import random
import struct
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

from tests.service.kafka.conftest import Client, Kafka, batch, broker, init_producer
from tests.storage.codec.reference import varint, with_header
from tests.support.faults import Call, Fault, FaultyStore, Gate
from tidelog.service.kafka import appends, refused_batches
from tidelog.service.kafka.connections import connection
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.produce import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.storage.broker import LogSettings, WriterSettings
from tidelog.storage.codec import byte_loops, decompression
from tidelog.storage.codec.batch_header import HEADER_SIZE
from tidelog.storage.codec.record_batch import ANY, Batch, Effort, Rules
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state import tail_chunk_counts
from tidelog.storage.store.memory import MemoryStore


def _request(
    *parts: tuple[int, bytes | None],
    topic: str = "t",
    topic_id: bytes = ZERO_UUID,
    acks: int = -1,
    timeout_ms: int = 10_000,
) -> ProduceRequest:
    data = [
        PartitionProduceData(index=index, records=None if records is None else memoryview(records))
        for index, records in parts
    ]
    topics = [TopicProduceData(name=topic, topic_id=topic_id, partition_data=data)]
    return ProduceRequest(acks=acks, timeout_ms=timeout_ms, topic_data=topics)


async def _produce(
    client: Client, request: ProduceRequest, version: int = 9
) -> list[PartitionProduceResponse]:
    response = await client.ask(request, ProduceResponse, version)
    return response.responses[0].partition_responses


async def _code(kafka: Kafka, records: bytes | None, topic: str = "t") -> int:
    (part,) = await _produce(kafka.client(), _request((0, records), topic=topic))
    return part.error_code


@pytest.mark.parametrize("version", range(3, 14))
async def test_each_version_appends(kafka: Kafka, version: int) -> None:
    client = kafka.client()
    topic_id = bytes.fromhex(kafka.log.state.topic("t").topic_id)
    for base_offset in (0, 2):
        request = _request((1, batch(b"a", b"b")), topic_id=topic_id)
        (part,) = await _produce(client, request, version)
        assert (part.index, part.error_code, part.base_offset) == (1, 0, base_offset)
        assert part.log_append_time_ms == -1
    assert kafka.log.state.partition("t", 1).high_watermark == 4
    fetched = await kafka.log.records.fetch("t", 1, 0, bytes_max=1 << 20)
    values = [
        value for piece in fetched.pieces for value in piece.batch.column("value").to_pylist()
    ]
    assert values == [b"a", b"b"] * 2
    assert kafka.counters.topics["t"].records_in == 4


async def test_requests_under_way_share_commits_and_keep_their_order(kafka: Kafka) -> None:
    client = kafka.client()
    asked = [_produce(client, _request((0, batch(b"%d" % n)))) for n in range(12)]
    answers = await asyncio.gather(*asked)
    assert [part.base_offset for (part,) in answers] == list(range(12))
    assert kafka.log.stats().wal.puts < 12


async def test_a_refusal_of_one_partition_leaves_the_others(kafka: Kafka) -> None:
    broken = bytearray(batch(b"x"))
    broken[-1] ^= 1
    parts = ((0, batch(b"a")), (1, bytes(broken)), (9, batch(b"b")), (2, None), (2, batch(b"c")))
    responses = await _produce(kafka.client(), _request(*parts))
    assert [(part.error_code, part.base_offset) for part in responses] == [
        (Code.NONE, 0),
        (Code.CORRUPT_MESSAGE, -1),
        (Code.UNKNOWN_TOPIC_OR_PARTITION, -1),
        (Code.INVALID_RECORD, -1),
        (Code.NONE, 0),
    ]
    assert responses[1].error_message is not None
    errors = kafka.counters.kafka.errors
    assert errors["Produce", "CORRUPT_MESSAGE"] == errors["Produce", "INVALID_RECORD"] == 1


def _changed(position: int, value: bytes) -> bytes:
    made = bytearray(batch(b"x"))
    made[position : position + len(value)] = value
    return bytes(made)


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (None, Code.INVALID_RECORD),
        (b"", Code.INVALID_RECORD),
        (batch(b"x")[:-1], Code.INVALID_RECORD),
        (batch(b"x") * 2, Code.INVALID_RECORD),
        (_changed(16, b"\1"), Code.INVALID_RECORD),  # magic 1
        (_changed(17, b"\0\0\0\0"), Code.CORRUPT_MESSAGE),
        (_changed(0, struct.pack(">q", 1)), Code.INVALID_RECORD),  # base offset
        (batch(b"x", producer=(5, 0, -1)), Code.INVALID_RECORD),
        (batch(b"x" * 1_100_000), Code.MESSAGE_TOO_LARGE),
        (batch(b"x", timestamp=4_000_000_000_000), Code.INVALID_TIMESTAMP),
    ],
)
async def test_refusals(kafka: Kafka, records: bytes | None, code: Code) -> None:
    assert await _code(kafka, records) == code
    assert kafka.log.state.partition("t", 0).high_watermark == 0


async def test_unknown_topics_and_acks(kafka: Kafka) -> None:
    assert await _code(kafka, batch(b"x"), topic="u") == Code.UNKNOWN_TOPIC_OR_PARTITION
    client = kafka.client()
    (part,) = await _produce(client, _request((0, batch(b"x")), topic_id=b"u" * 16), 13)
    assert part.error_code == Code.UNKNOWN_TOPIC_ID
    (part,) = await _produce(client, _request((0, batch(b"x")), acks=2))
    assert part.error_code == Code.INVALID_REQUIRED_ACKS


async def test_acks_0_is_written_and_not_answered(kafka: Kafka) -> None:
    client = kafka.client()
    silent = asyncio.create_task(client.ask(_request((0, batch(b"a")), acks=0), ProduceResponse, 9))
    await asyncio.sleep(0)
    (part,) = await _produce(client, _request((0, batch(b"b"))))
    assert part.base_offset == 1
    assert not silent.done()
    silent.cancel()


async def test_refused_acks_0_disconnects(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_DELAY_S", 0.01)
    unknown = _request((0, batch(b"a")), topic="unknown", acks=0)  # needs a refreshed view
    for refused in (_request((0, batch(b"a")[:-1]), acks=0), unknown):
        with pytest.raises(ConnectionError):
            await kafka.client().ask(refused, ProduceResponse, 9)


async def test_records_without_a_key_in_a_compacted_topic(kafka: Kafka) -> None:
    await kafka.log.topics.create("c", 1, {"cleanup.policy": "compact"})
    request = _request((0, batch(b"a", b"b", key=None)), topic="c")
    (part,) = await _produce(kafka.client(), request)
    assert part.error_code == Code.INVALID_RECORD
    assert [record_error.batch_index for record_error in part.record_errors] == [0, 1]


async def test_log_append_time_is_in_the_answer(kafka: Kafka) -> None:
    await kafka.log.topics.create("l", 1, {"message.timestamp.type": "LogAppendTime"})
    request = _request((0, batch(b"a", timestamp=1)), topic="l")
    (part,) = await _produce(kafka.client(), request)
    assert part.error_code == Code.NONE
    assert abs(part.log_append_time_ms - kafka.log.clock.now_ms()) < 60_000


async def test_an_idempotent_producer(kafka: Kafka) -> None:
    client = kafka.client()
    producer = await init_producer(client)
    assert (producer.error_code, producer.producer_epoch) == (0, 0)
    sent = (
        ((0, 0), 0, 0),
        ((0, 0), 0, 0),  # again: the first offset
        ((0, 9), Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1),
        ((0, 2), 0, 2),
        ((0, 0), 0, 0),
        ((1, 5), Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1),
        ((1, 0), 0, 4),
        ((0, 4), Code.INVALID_PRODUCER_EPOCH, -1),
    )
    for (epoch, sequence), code, base_offset in sent:
        body = batch(b"a", b"b", producer=(producer.producer_id, epoch, sequence))
        (part,) = await _produce(client, _request((0, body)))
        assert (part.error_code, part.base_offset) == (code, base_offset), (epoch, sequence)


@pytest.mark.parametrize("seed", range(12))
async def test_batches_behind_a_refused_one_get_its_error(seed: int) -> None:
    """The store refuses entries or loses their outcome.

    A producer as librdkafka's, with up to five batches under way, never has to bump its epoch, and
    each record is in the log once, in order.
    """
    draw = random.Random(seed)
    store = FaultyStore(MemoryStore())
    store.latency = lambda _: draw.choice([0.0, 0.01, 0.03])
    async with broker(LogSettings(is_sealing=False), object_store=store) as kafka:
        await kafka.log.topics.create("t", 1, {})
        client = kafka.client()
        producer_id = (await init_producer(client)).producer_id
        faults = [Fault.REFUSED, Fault.STORED, None, None]

        def plan(call: Call) -> Fault | None:
            return draw.choice(faults) if call.verb == "create" and "wal/" in call.key else None

        acked, codes = list[int](), set[int]()
        while len(acked) < 40:
            store.plan = plan if len(acked) < 35 else lambda _: None
            first = len(acked)
            sending = []
            for number in range(first, min(first + 5, 40)):
                body = batch(b"%d" % number, producer=(producer_id, 0, number))
                sending.append(asyncio.create_task(_produce(client, _request((0, body)))))
                await asyncio.sleep(draw.choice([0.0, 0.002, 0.01]))
            answers = await asyncio.gather(*sending)
            codes |= {answer.error_code for (answer,) in answers}
            for (answer,) in answers:
                if answer.error_code or answer.base_offset != len(acked):
                    assert answer.error_code, "an acked record has its place"
                    break
                acked.append(answer.base_offset)
        assert codes <= {Code.NONE, Code.NOT_ENOUGH_REPLICAS, Code.REQUEST_TIMED_OUT}
        assert Code.NOT_ENOUGH_REPLICAS in codes
        assert kafka.log.state.partition("t", 0).high_watermark == 40


async def test_old_refusal_is_out_of_order(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    client = kafka.client()
    first = batch(b"0", producer=(7, 0, 0))
    assert (await _produce(client, _request((0, first))))[0].error_code == 0
    refusals = kafka.server.listener.server.context.refused_batches
    topic_id = kafka.log.state.topic("t").topic_id
    missing = memoryview(batch(b"1", producer=(7, 0, 1)))
    for kept_s, code in (
        (60.0, Code.NOT_ENOUGH_REPLICAS),
        (0.0, Code.OUT_OF_ORDER_SEQUENCE_NUMBER),
    ):
        monkeypatch.setattr(refused_batches, "KEPT_S", kept_s)
        now_s = kafka.log.clock.boot_s()
        refusals.error_of(missing, topic_id, 0, Unavailable("the store refuses"), now_s)
        behind = batch(b"2", producer=(7, 0, 2))
        assert (await _produce(client, _request((0, behind))))[0].error_code == code


def test_a_refusal_keeps_no_frames_and_is_dropped_when_it_is_old() -> None:
    class Segment:
        """The bytes of a failed flush."""

    segment_refs: list[weakref.ref[Segment]] = []
    refusals = refused_batches.RefusedBatches()

    def fails() -> None:
        segment = Segment()
        segment_refs.append(weakref.ref(segment))
        try:
            raise OSError
        except OSError as error:
            raise Unavailable("the store refuses") from error

    gc.disable()
    try:
        for producer_id in range(3):
            refused = memoryview(batch(b"0", producer=(producer_id, 0, 0)))
            try:
                fails()
            except Unavailable as error:
                refusals.error_of(refused, "topic", 0, error, producer_id * 40.0)
        assert [ref() for ref in segment_refs] == [None] * 3
        assert [place.producer_id for place in refusals._refusals] == [1, 2]
    finally:
        gc.enable()


async def test_batches_of_one_producer_in_flight(kafka: Kafka) -> None:
    client = kafka.client()
    producer = await init_producer(client)
    bodies = [batch(b"x", producer=(producer.producer_id, 0, n)) for n in range(5)]
    answers = await asyncio.gather(*(_produce(client, _request((0, body))) for body in bodies))
    assert [(part.error_code, part.base_offset) for (part,) in answers] == [
        (0, n) for n in range(5)
    ]


async def test_producer_ids(kafka: Kafka) -> None:
    client, ids = kafka.client(), set[int]()
    for version in range(6):
        request = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=0, producer_id=7, producer_epoch=3
        )
        response = await client.ask(request, InitProducerIdResponse, version)
        ids.add(response.producer_id)
    assert len(ids) == 6
    for transactional_id, code in (("", 42), ("tx", 53)):
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=0)
        response = await client.ask(request, InitProducerIdResponse, 4)
        assert (response.error_code, response.producer_id) == (code, -1)


async def test_a_large_request_is_checked_in_a_thread_and_keeps_the_order(kafka: Kafka) -> None:
    client = kafka.client()
    large = batch(*(b"x" * 40 for _ in range(14_000)))
    asked = [
        _produce(client, _request((0, large))),
        _produce(client, _request((0, batch(b"b")))),
        _produce(client, _request((0, large))),
    ]
    answers = await asyncio.gather(*asked)
    assert [part.base_offset for (part,) in answers] == [0, 14_000, 14_001]


async def test_a_full_write_buffer_holds_requests_back() -> None:
    writer = WriterSettings(buffer_bytes_max=64 * 1024, flush_bytes=64 * 1024)
    settings = LogSettings(poll_interval_s=60.0, is_sealing=False, writer=writer)
    async with broker(settings) as kafka:
        await kafka.log.topics.create("t", 1, {})
        client = kafka.client()
        body = batch(b"x" * 50_000)
        asked = [_produce(client, _request((0, body))) for _ in range(6)]
        answers = await asyncio.gather(*asked)
        assert [(part.error_code, part.base_offset) for (part,) in answers] == [
            (0, offset) for offset in range(6)
        ]
        refused = _request((0, body), (0, body), timeout_ms=0)
        codes = {part.error_code for part in await _produce(client, refused)}
        assert codes == {Code.NONE, Code.NOT_ENOUGH_REPLICAS}


async def test_a_stopping_broker_sends_clients_to_another_one(kafka: Kafka) -> None:
    kafka.server.begin_drain()
    await asyncio.sleep(0)
    assert await _code(kafka, batch(b"x")) == Code.NOT_LEADER_OR_FOLLOWER


# -- checks, and the queue of a write buffer


ROOM = 64 * 1024
LARGE, SMALL = b"x" * 50_000, b"y" * 100


@asynccontextmanager
async def _held() -> AsyncIterator[tuple[Kafka, Gate]]:
    """A broker whose next commit waits for the gate, and whose write buffer has ROOM bytes."""
    writer = WriterSettings(buffer_bytes_max=ROOM, flush_bytes=ROOM)
    settings = LogSettings(poll_interval_s=60.0, is_sealing=False, writer=writer)
    store = FaultyStore(MemoryStore())
    async with broker(settings, object_store=store) as kafka:
        await kafka.log.topics.create("t", 1, {})
        gate = store.hold("create", object_keys.wal(kafka.log.state.seq + 1))
        try:
            yield kafka, gate
        finally:
            gate.opened.set()


async def _asked(client: Client, *values: bytes) -> list[asyncio.Task[int]]:
    """Send a request for each value; return the tasks of the base offsets."""

    async def offset(value: bytes) -> int:
        (part,) = await _produce(client, _request((0, batch(value))))
        assert part.error_code == Code.NONE
        return part.base_offset

    tasks = [asyncio.create_task(offset(value)) for value in values]
    await asyncio.sleep(0)
    return tasks


async def test_no_request_passes_one_that_waits_for_room() -> None:
    async with _held() as (kafka, gate):
        first, second = kafka.client(), kafka.client()
        asked = await _asked(first, LARGE, LARGE, SMALL)
        asked += await _asked(second, SMALL)
        await gate.reached.wait()
        asked += await _asked(first, SMALL)
        gate.opened.set()
        assert await asyncio.gather(*asked) == [0, 1, 2, 3, 4]


async def test_batches_above_share_of_chunks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", 2 * rules.PARTS)
    async with broker() as kafka:
        for topic in ("t", "u"):
            await kafka.log.topics.create(topic, 3, {})
        client = kafka.client()
        (made,) = await _produce(client, _request((0, batch(b"x"))))
        assert made.error_code == Code.NONE
        wide = [(number, batch(b"x")) for number in range(3)]
        await _produce(client, _request(*wide[1:2]))
        parts = await _produce(client, _request(*wide, timeout_ms=60_000))
        assert [part.error_code for part in parts] == [Code.NOT_ENOUGH_REPLICAS] * 3
        assert str(parts[0].error_message).startswith("the topic 't' has 2 of its 2 chunks")
        (other,) = await _produce(client, _request((0, batch(b"x")), topic="u"))
        assert other.error_code == Code.NONE
        assert await kafka.log.records.seal("t") == 2
        (again,) = await _produce(client, _request(wide[0]))
        assert (again.error_code, again.base_offset) == (Code.NONE, 1)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the event loop ran each check of a batch."""
    on_loop: list[bool] = []

    def count(
        sent: memoryview | None, rules: Rules = ANY, effort: Effort | None = None
    ) -> Batch | LogError:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return check(sent, rules, effort)

    check = appends.check
    monkeypatch.setattr(appends, "check", count)
    return on_loop


def heavy() -> bytes:
    """Return a batch of few bytes with more headers than the event loop checks."""
    count = byte_loops.INLINE_HEADERS + 1
    body = b"\0\0\0\x01\x01" + varint(count) + b"\0\x01" * count
    packed = pa.Codec("zstd").compress(varint(len(body)) + body, asbytes=True)
    usual = batch(SMALL)
    return with_header(usual[:HEADER_SIZE] + packed, attributes=decompression.ZSTD)


async def test_thread_checks_small_slow_batch(kafka: Kafka, checks: list[bool]) -> None:
    """Other connections go on, and later requests on its own connection keep their order."""
    client, sent = kafka.client(), heavy()
    assert len(sent) < 200
    asked = [_produce(client, _request((0, body))) for body in (batch(SMALL), sent, batch(SMALL))]
    answers = await asyncio.gather(*asked)
    assert [(part.error_code, part.base_offset) for (part,) in answers] == [(0, 0), (0, 1), (0, 2)]
    assert checks == [True, True, False, True]


async def test_refused_parts_are_not_checked(kafka: Kafka, checks: list[bool]) -> None:
    """Neither unpacked nor read: their topic, their partition or their size is refused."""
    await kafka.log.topics.create("small", 1, {"max.message.bytes": "50"})
    client = kafka.client()
    codes = [
        (await _produce(client, _request((number, heavy()), topic=topic)))[0].error_code
        for topic, number in (("unknown", 0), ("t", 9), ("t", -1), ("small", 0))
    ]
    assert codes == [Code.UNKNOWN_TOPIC_OR_PARTITION] * 3 + [Code.MESSAGE_TOO_LARGE]
    assert checks == []


async def test_request_of_many_parts_is_checked(kafka: Kafka, checks: list[bool]) -> None:
    parts = [(number % 4, batch(SMALL)) for number in range(2 * appends.PARTS_MAX)]
    responses = await _produce(kafka.client(), _request(*parts))
    codes = [Code.NONE] * 3 + [Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert [part.error_code for part in responses] == codes * (len(parts) // 4)
    assert len(checks) == len(parts) * 3 // 4


async def test_keyless_records_are_bounded(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "RECORD_ERRORS_MAX", 3)
    await kafka.log.topics.create("c", 1, {"cleanup.policy": "compact"})
    keyless = batch(SMALL, SMALL, key=None)
    responses = await _produce(kafka.client(), _request(*[(0, keyless)] * 3, topic="c"))
    assert [part.error_code for part in responses] == [Code.INVALID_RECORD] * 3
    assert [
        [record_error.batch_index for record_error in part.record_errors] for part in responses
    ] == [[0, 1], [0], []]


async def test_a_bug_in_a_check_ends_only_its_request(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sent: object, *_: object) -> object:
        raise RuntimeError("a bug")

    client = kafka.client()
    with monkeypatch.context() as patch:
        patch.setattr(appends, "check", broken)
        patch.setattr(appends, "INLINE_COST", 0)
        (part,) = await _produce(client, _request((0, batch(SMALL))))
    assert part.error_code == Code.UNKNOWN_SERVER_ERROR
    assert "bug in Kafka's Produce" in caplog.text
    (part,) = await _produce(client, _request((0, batch(SMALL))))
    assert (part.error_code, part.base_offset) == (Code.NONE, 0)


async def test_a_request_that_waits_for_room_holds_its_memory_when_its_connection_ends() -> None:
    """Else clients that send and close again and again would fill the broker's memory.

    With acks=0 a producer may close its connection as soon as it has sent: the records must not be
    lost.
    """
    async with _held() as (kafka, gate):
        memory = kafka.server.listener.server.memory
        asked = await _asked(kafka.client(), LARGE)
        await gate.reached.wait()
        before = memory.used
        leaving = kafka.client()
        leaving.send(_request((0, batch(LARGE)), acks=0), 9)
        assert memory.used > before + len(LARGE)
        leaving.connection.closed()
        assert memory.used > before + len(LARGE)
        gate.opened.set()
        await asyncio.gather(*asked)
        asked = await _asked(kafka.client(), SMALL)
        assert await asyncio.gather(*asked) == [2]
        assert memory.used == 0
