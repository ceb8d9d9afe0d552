"""Produce requests: which batches are checked, and where; the queue keeps their order."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

from tests.service.kafka.conftest import Client, Kafka, batch, broker
from tests.service.kafka.test_produce import _produce, _request
from tests.storage.codec.reference import varint, with_header
from tests.support.faults import FaultyStore, Gate
from tidelog.service.kafka import appends
from tidelog.service.kafka.errors import Code
from tidelog.storage.broker import LogSettings, WriterSettings
from tidelog.storage.codec import byte_loops, compression
from tidelog.storage.codec.batch_header import HEADER_SIZE
from tidelog.storage.codec.record_batch import ANY, Batch, Effort, Rules
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError
from tidelog.storage.state import shares as rules
from tidelog.storage.state import tail_chunks
from tidelog.storage.store.memory import MemoryStore

ROOM = 64 * 1024
LARGE, SMALL = b"x" * 50_000, b"y" * 100


@asynccontextmanager
async def _held() -> AsyncIterator[tuple[Kafka, Gate]]:
    """A broker whose next commit waits for the gate, and whose write buffer has ROOM bytes."""
    writer = WriterSettings(buffer_bytes_max=ROOM, flush_bytes=ROOM)
    settings = LogSettings(poll_interval_s=60.0, is_sealing=False, writer=writer)
    store = FaultyStore(MemoryStore())
    async with broker(settings, object_store=store) as kafka:
        await kafka.log.create_topic("t", 1, {})
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


async def test_batches_above_the_share_of_chunks_are_refused_and_no_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_chunks, "CHUNKS_MAX", 2 * rules.PARTS)
    async with broker() as kafka:
        for topic in ("t", "u"):
            await kafka.log.create_topic(topic, 3, {})
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
        assert await kafka.log.seal("t") == 2
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
    return with_header(usual[:HEADER_SIZE] + packed, attributes=compression.ZSTD)


async def test_a_thread_checks_a_batch_of_few_bytes_that_takes_long(
    kafka: Kafka, checks: list[bool]
) -> None:
    """Other connections go on, and the requests behind it on its own connection keep their
    order."""
    client, sent = kafka.client(), heavy()
    assert len(sent) < 200
    asked = [_produce(client, _request((0, body))) for body in (batch(SMALL), sent, batch(SMALL))]
    answers = await asyncio.gather(*asked)
    assert [(part.error_code, part.base_offset) for (part,) in answers] == [(0, 0), (0, 1), (0, 2)]
    assert checks == [True, True, False, True]


async def test_parts_that_may_not_be_appended_are_not_checked(
    kafka: Kafka, checks: list[bool]
) -> None:
    """Neither unpacked nor read: their topic, their partition or their size is refused."""
    await kafka.log.create_topic("small", 1, {"max.message.bytes": "50"})
    client = kafka.client()
    codes = [
        (await _produce(client, _request((number, heavy()), topic=topic)))[0].error_code
        for topic, number in (("unknown", 0), ("t", 9), ("t", -1), ("small", 0))
    ]
    assert codes == [Code.UNKNOWN_TOPIC_OR_PARTITION] * 3 + [Code.MESSAGE_TOO_LARGE]
    assert checks == []


async def test_a_request_of_many_parts_is_admitted_and_checked(
    kafka: Kafka, checks: list[bool]
) -> None:
    parts = [(number % 4, batch(SMALL)) for number in range(2 * appends.PARTS_MAX)]
    responses = await _produce(kafka.client(), _request(*parts))
    codes = [Code.NONE] * 3 + [Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert [part.error_code for part in responses] == codes * (len(parts) // 4)
    assert len(checks) == len(parts) * 3 // 4


async def test_the_records_without_keys_in_an_answer_are_bounded(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appends, "RECORD_ERRORS_MAX", 3)
    await kafka.log.create_topic("c", 1, {"cleanup.policy": "compact"})
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
    """Else clients that send and close again and again would fill the broker's memory. With acks=0
    a producer may close its connection as soon as it has sent: the records must not be lost."""
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
