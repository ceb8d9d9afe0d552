"""The queue of Produce requests: requests of a turn are checked together, and keep their order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.service.kafka.conftest import Client, Kafka, batch, broker
from tests.service.kafka.test_produce import _produce, _request
from tests.storage.kafka.reference import with_header
from tests.support.faults import FaultyStore, Gate
from tidelog.service.kafka import appends
from tidelog.service.kafka.errors import Code
from tidelog.storage.broker import LogSettings, WriterSettings
from tidelog.storage.core import object_keys
from tidelog.storage.io.memory import MemoryStore
from tidelog.storage.kafka import native
from tidelog.storage.kafka.layout import HEADER_SIZE

ROOM = 64 * 1024
LARGE, SMALL = b"x" * 50_000, b"y" * 100


@asynccontextmanager
async def _held() -> AsyncIterator[tuple[Kafka, Gate]]:
    """A broker whose next commit waits for the gate, and whose write buffer has ROOM bytes."""
    writer = WriterSettings(buffer_bytes_max=ROOM, flush_bytes=ROOM)
    settings = LogSettings(poll_interval_s=60.0, is_sealing=False, writer=writer)
    store = FaultyStore(MemoryStore())
    async with broker(settings, at=store) as kafka:
        await kafka.log.create_topic("t", 1, {})
        gate = store.hold("create", object_keys.wal(kafka.log.state.seq + 1))
        try:
            yield kafka, gate
        finally:
            gate.opened.set()


async def _asked(client: Client, *values: bytes) -> list[asyncio.Task[int]]:
    """Send a request for each value; return the tasks of the base offsets."""

    async def offset(value: bytes) -> int:
        (found,) = await _produce(client, _request((0, batch(value))))
        assert found.error_code == Code.NONE
        return found.base_offset

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


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of batches of each check of the queue, without the code in C."""
    monkeypatch.setattr(native, "IS_BUILT", False)
    counts: list[int] = []

    def count(sent: Sequence[memoryview | None]) -> object:
        counts.append(len(sent))
        return check(sent)

    check = appends.check
    monkeypatch.setattr(appends, "check", count)
    return counts


async def test_the_requests_of_a_turn_are_checked_together(
    kafka: Kafka, checked: list[int]
) -> None:
    asked = [_produce(kafka.client(), _request((0, batch(SMALL)))) for _ in range(20)]
    await asyncio.gather(*asked)
    assert checked == [20]


async def test_a_thread_checks_what_the_code_in_c_refuses(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may take 0.1 s for such a batch: then other connections go on, and the requests behind
    it on its own connection keep their order."""
    if not native.IS_BUILT:
        pytest.skip("there is no code in C")
    threads: list[bool] = []

    def count(sent: Sequence[memoryview | None]) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return check(sent)

    check = appends.check
    monkeypatch.setattr(appends, "check", count)
    # A length of five bytes, where one is enough.
    usual = batch(SMALL)
    raw = usual[HEADER_SIZE:]
    size, rest = (raw[0] & 127) | raw[1] << 7, raw[2:]
    unusual = bytes([size & 127 | 128, size >> 7 | 128, 128, 128, 0]) + rest
    assert native.walk(unusual, 0, 1, 9) is None
    sent = with_header(usual[:HEADER_SIZE] + unusual)
    client = kafka.client()
    asked = [_produce(client, _request((0, body))) for body in (usual, sent, usual)]
    found = await asyncio.gather(*asked)
    assert [(one.error_code, one.base_offset) for (one,) in found] == [(0, 0), (0, 1), (0, 2)]
    assert threads == [False]


async def test_a_turn_checks_no_more_than_it_may(
    kafka: Kafka, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_cost = appends._cost(memoryview(batch(LARGE)))
    monkeypatch.setattr(appends, "INLINE_COST", 4 * one_cost)
    asked = [_produce(kafka.client(), _request((0, batch(LARGE)))) for _ in range(10)]
    found = await asyncio.gather(*asked)
    assert sorted(one.base_offset for (one,) in found) == list(range(10))
    assert sum(checked) == 10
    assert max(checked) <= 4


async def test_a_bug_in_a_check_ends_only_the_requests_of_the_turn(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "IS_BUILT", False)
    check, client = appends.check, kafka.client()

    def broken(sent: object) -> object:
        monkeypatch.setattr(appends, "check", check)
        raise RuntimeError("a bug")

    monkeypatch.setattr(appends, "check", broken)
    (found,) = await _produce(client, _request((0, batch(SMALL))))
    assert found.error_code == Code.UNKNOWN_SERVER_ERROR
    assert "bug in Kafka's Produce" in caplog.text
    (found,) = await _produce(client, _request((0, batch(SMALL))))
    assert (found.error_code, found.base_offset) == (Code.NONE, 0)


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
