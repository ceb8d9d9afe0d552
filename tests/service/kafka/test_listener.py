"""The listener on real sockets, in virtual time: clocks, bounds of connections, drain."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.service.kafka.test_connection import FETCH, METADATA, Peer
from tests.service.kafka.wire import framed
from tests.support.vloop import VIRTUAL_TIME
from tidelog.service.http.connection_admission import Admission
from tidelog.service.http.handshakes import Handshakes
from tidelog.service.http.listening_sockets import bound_sockets
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.connections import listener as listeners
from tidelog.service.kafka.connections.listener import (
    ANSWER_S,
    DRAIN_S_MAX,
    FIRST_FRAME_S,
    FRAME_S,
    IDLE_S,
    Listener,
    limits_of,
)
from tidelog.storage.codec import byte_loops


class _Served:
    """A listener with the handlers of a Peer."""

    def __init__(self, fetch: Callable[..., Any] | None, most: int) -> None:
        self.peer = Peer(fetch=fetch)
        self.peer.connection.closed()
        self.admission: Admission[Any] = Admission(limits_of(most))
        self.server = self.peer.server._replace(admission=self.admission)
        self.listener = Listener(self.server, None, Handshakes())
        self.port = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def _serving(
    fetch: Callable[..., Any] | None = None, most: int = 100
) -> AsyncIterator[_Served]:
    served = _Served(fetch, most)
    sockets = bound_sockets("127.0.0.1", 0)
    served.port = sockets[0].getsockname()[1]
    await served.listener.listen(sockets, 10)
    try:
        yield served
    finally:
        await served.listener.close()
        await asyncio.sleep(0.01)
        assert served.peer.memory.used == 0
        assert not served.listener.connections


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return VIRTUAL_TIME


async def test_a_broker_says_once_why_it_does_not_use_the_code_in_c(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(byte_loops, "WHY_SLOW", "its version is 0, not 1: install tidelog again")
    with caplog.at_level(logging.INFO, "tidelog"):
        async with _serving():
            pass
    (line,) = [text for text in caplog.messages if "code in C" in text]
    assert "not used: its version is 0, not 1: install tidelog again. Record batches" in line


async def _seconds_until_closed(reader: asyncio.StreamReader) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    return loop.time() - began_s


@pytest.mark.parametrize(
    ("sent", "least_s"),
    [
        (b"", FIRST_FRAME_S),
        (framed(METADATA, 9)[:-1], FRAME_S),
        (framed(METADATA, 9) + framed(METADATA, 9)[:-1], FRAME_S),
        (framed(METADATA, 9), IDLE_S),
    ],
    ids=["nothing", "a part of the first", "a part of the second", "idle"],
)
async def test_a_connection_that_waits_too_long_is_closed(sent: bytes, least_s: float) -> None:
    async with _serving() as served:
        reader, writer = await served.connect()
        writer.write(sent)
        took_s = await _seconds_until_closed(reader)
        assert least_s <= took_s <= least_s + 5
        writer.close()


async def test_a_client_that_takes_no_answers_gets_no_more_and_is_closed() -> None:
    made = 0

    async def large(request: Any, client: ApiClient) -> EncodedAnswer:
        nonlocal made
        made += 1
        return EncodedAnswer([bytes(1 << 20)])

    async with _serving(large) as served:
        reader, writer = await served.connect()
        reader.set_exception(ConnectionError("the client does not read"))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(framed(FETCH, 12) * 200)
        await asyncio.sleep(ANSWER_S + 5)
        assert made < 30, "what the buffers of the system take, and 1 MiB more"
        assert not served.listener.connections
        writer.transport.abort()


async def test_connections_above_the_bound() -> None:
    async with _serving(most=2) as served:
        first = await served.connect()
        first[1].write(framed(METADATA, 9))
        await first[0].read(4)
        unproved = await served.connect()
        await asyncio.sleep(0.01)
        third = await served.connect()
        assert await _seconds_until_closed(unproved[0]) < 1, "a client without a request goes"
        third[1].write(framed(METADATA, 9))
        await third[0].read(4)
        fourth = await served.connect()
        assert await _seconds_until_closed(fourth[0]) < 1, "all others have sent a request"
        assert len(served.listener.connections) == 2
        for _, writer in (first, unproved, third, fourth):
            writer.close()


async def test_a_drain_waits_for_requests_but_not_long() -> None:
    async def slow(request: Any, client: ApiClient) -> Any:
        await asyncio.sleep(1000)

    async with _serving(slow) as served:
        idle_reader, idle = await served.connect()
        busy_reader, busy = await served.connect()
        busy.write(framed(FETCH, 12))
        late_reader, late = await served.connect()
        late.write(framed(METADATA, 9))
        await asyncio.sleep(0.5)
        began_s = asyncio.get_running_loop().time()
        draining = asyncio.create_task(served.listener.drain())
        assert (await late_reader.read(4)) != b"", "a request under way is answered"
        await draining
        took_s = asyncio.get_running_loop().time() - began_s
        assert listeners.DRAIN_S_MIN <= took_s <= DRAIN_S_MAX + 0.1
        assert served.server.context.is_draining
        for reader in (idle_reader, busy_reader, late_reader):
            await _seconds_until_closed(reader)
        with pytest.raises(ConnectionRefusedError):
            await served.connect()
        for writer in (idle, busy, late):
            writer.close()
