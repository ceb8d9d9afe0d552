"""Answers of a broker to its peers over HTTP, and refusals of other clients."""

import asyncio
import contextlib
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.service.conftest import until
from tests.support.logs import append, read_values
from tidelog.service.http.request import HttpResponse
from tidelog.service.peers.client import (
    ANNOUNCE,
    GROUP_REQUEST,
    HAND_OVER,
    OBJECTS,
    SMALL_ANSWER_BYTES,
    HttpPeers,
    Room,
)
from tidelog.service.peers.forwarding import Forwarded, ForwardedCall, _Request
from tidelog.service.peers.listener import (
    OBJECTS_AT_ONCE,
    PEER_BODY_BYTES_MAX,
    PeerApp,
    PeerListener,
)
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    ForwardOutcomeUnknown,
    ForwardRefused,
    ObjectRange,
    encode_announcements,
    encode_object_range,
)
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

pytestmark = pytest.mark.anyio


class Process:
    def __init__(self, folder: Path, name: str) -> None:
        self.peers = HttpPeers()
        settings = LogSettings(is_sealing=False, sequencer=SequencerSettings(5.0))
        self.opening = Broker.open(
            FolderStore(folder), settings, clock=SystemClock(), name=name, peers=self.peers
        )

    async def start(self) -> None:
        self.log = await self.opening
        self.listener = PeerListener(PeerApp(self.log), "127.0.0.1", 0)
        await self.log.join(await self.listener.start(""))

    async def stop(self) -> None:
        self.log.drain()
        await self.log.close()
        await self.listener.close()
        await self.peers.close()
        await self.log._log.store.close()


@pytest.fixture
async def peers() -> AsyncIterator[HttpPeers]:
    peers = HttpPeers()
    yield peers
    await peers.close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Broker]]:
    """Two brokers that know each other, the sequencer first, and topic `t`."""
    processes = [Process(tmp_path, "a"), Process(tmp_path, "b")]
    for process in processes:
        await process.start()
    logs = [process.log for process in processes]
    for log in logs:
        await log._membership.look()
    logs.sort(key=lambda log: log._sequencer.target is not None)
    await logs[0].topics.create("t", 1, {})
    await logs[1]._log.wal.refresh()
    yield logs
    for process in processes:
        await process.stop()


async def test_forwarded_draft_is_known_to_both_at_once(pair: list[Broker]) -> None:
    first, second = pair
    for number in range(20):
        await append(pair[number % 2], str(number))
    assert second._sequencer.counters.handed_over == 10
    assert second._sequencer.counters.own_commits == 0
    assert second._log.wal.counters.puts == 0
    await asyncio.sleep(0.2)
    assert first.state.encode() == second.state.encode()
    assert await read_values(second) == [str(number) for number in range(20)]


async def test_a_peer_reads_parts_of_objects_and_nothing_else(
    peers: HttpPeers, pair: list[Broker]
) -> None:
    await append(pair[0], "x" * 100_000)
    key = object_keys.wal(pair[0].state.seq)
    whole = await pair[0]._log.store.get(key)
    peer = pair[0]._membership.me
    for start, length in ((0, 10), (100, 50_000), (50_000, 4 << 20), (len(whole) - 1, 1)):
        question = encode_object_range(ObjectRange(key, start, length))
        assert await peers.read_object(peer, question) == whole[start : start + length]
    for question in (b"", encode_object_range(ObjectRange("secret.json", 0, 10))):
        with pytest.raises(ForwardRefused, match="400"):
            await peers.read_object(peer, question)
    with pytest.raises(ForwardOutcomeUnknown, match="does not exist"):
        await peers.read_object(peer, encode_object_range(ObjectRange(object_keys.wal(999), 0, 1)))


async def test_few_parts_of_objects_are_in_memory_at_the_same_time(
    peers: HttpPeers, pair: list[Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = highest = 0

    async def read_object(message: bytes) -> bytes:
        nonlocal reading, highest
        reading += 1
        highest = max(highest, reading)
        await asyncio.sleep(0.005)
        reading -= 1
        return b"x"

    monkeypatch.setattr(pair[0].cluster, "read_object", read_object)
    asking = [peers.read_object(pair[0]._membership.me, b"?") for _ in range(50)]
    assert await asyncio.gather(*asking) == [b"x"] * 50
    assert highest == OBJECTS_AT_ONCE


async def test_request_without_token_is_refused(pair: list[Broker]) -> None:
    me = pair[0]._membership.me
    async with httpx.AsyncClient(base_url=me.address, trust_env=False) as client:
        right = {"authorization": f"Bearer {me.token}"}
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {'0' * 32}"}):
            for path in (HAND_OVER, ANNOUNCE, OBJECTS, "/", "/metrics"):
                answer = await client.post(path, content=b"", headers=headers)
                assert answer.status_code == 401
                assert me.token not in answer.text
        assert (await client.get(ANNOUNCE, headers=right)).status_code == 404
        assert (await client.post("/metrics", headers=right)).status_code == 404
        assert (await client.post(ANNOUNCE, content=b"x", headers=right)).status_code == 400
        assert (await client.post(HAND_OVER, content=b"x", headers=right)).status_code == 503
        told = encode_announcements([EntryAnnouncement(10**6, b"nonsense")])
        assert (await client.post(ANNOUNCE, content=told, headers=right)).status_code == 200
        large = await client.post(HAND_OVER, content=bytes(PEER_BODY_BYTES_MAX + 1), headers=right)
        assert large.status_code == 413
    await append(pair[1], "it goes on")


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Member]:
    """A peer that says this to whatever it is sent, and hangs up."""
    closed = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(asyncio.get_running_loop().create_future())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"draft")
            writer.write(answer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        closed[-1].set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Member("0" * 32, "x", f"http://127.0.0.1:{port}", "", 0)
    finally:
        server.close()
        await server.wait_closed()
    await asyncio.gather(*closed)


async def test_refused_connection_is_definite_failure(peers: HttpPeers) -> None:
    async with answering(b"") as peer:
        pass
    with pytest.raises(ForwardRefused):
        await peers.forward(peer, b"draft")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nfull", ForwardRefused),
        (b"HTTP/1.1 404 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", ForwardRefused),
        (b"HTTP/1.1 504 Maybe\r\ncontent-length: 0\r\n\r\n", ForwardOutcomeUnknown),
        (b"HTTP/1.1 500 Bug\r\ncontent-length: 0\r\n\r\n", ForwardOutcomeUnknown),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", ForwardOutcomeUnknown),
        (b"SSH-2.0-OpenSSH\r\n", ForwardOutcomeUnknown),
        (b"", ForwardOutcomeUnknown),
    ],
)
async def test_what_answer_means(peers: HttpPeers, answer: bytes, error: type[LogError]) -> None:
    async with answering(answer) as peer:
        with pytest.raises(error):
            await peers.forward(peer, b"draft")


async def test_caller_that_times_out_leaves_no_connection_in_use(
    peers: HttpPeers, pair: list[Broker]
) -> None:
    me = pair[0]._membership.me
    await peers.announce(me, encode_announcements([]))
    (connection,) = peers._idle[me.address]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await peers.announce(me, encode_announcements([]))
    assert not connection.is_open
    await peers.announce(me, encode_announcements([]))
    (again,) = peers._idle[me.address]
    assert again is not connection
    await peers.close()
    assert not again.is_open


async def test_caller_cancelled_with_answer_there_leaves_no_connection(
    peers: HttpPeers, pair: list[Broker]
) -> None:
    me = pair[0]._membership.me
    asking = asyncio.create_task(peers.announce(me, encode_announcements([])))
    async with asyncio.timeout(240):
        while not peers._opened or next(iter(peers._opened))._answer is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    (connection,) = peers._opened
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await asyncio.sleep(0.01)
    assert not peers._opened


async def test_port_that_is_taken_is_named(peers: HttpPeers, pair: list[Broker]) -> None:
    port = int(pair[0]._membership.me.address.rpartition(":")[2])
    listener = PeerListener(PeerApp(pair[0]), "127.0.0.1", port)
    with pytest.raises(LogError, match=f"cannot listen for peers on 127.0.0.1:{port}"):
        await listener.start("")
    await listener.close()


LARGE = 8 << 20


async def test_large_answer_is_read_when_there_is_room_for_it(peers: HttpPeers) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE
    sizes, has_room = [], asyncio.Event()

    async def room(size: int) -> None:
        sizes.append(size)
        await has_room.wait()

    content = random.Random(1).randbytes(LARGE)
    async with answering(head + content) as peer:
        asking = asyncio.create_task(peers.post(peer, HAND_OVER, b"draft", room))
        await until(lambda: bool(sizes))
        (connection,) = peers._opened
        await asyncio.sleep(0.05)
        assert len(connection._body) < LARGE // 8
        has_room.set()
        assert await asking == content
    assert sizes == [LARGE]


async def test_buffer_of_large_answer_is_whole_when_there_is_room(peers: HttpPeers) -> None:
    """A growing buffer moves, and leaves holes of up to 32 MB in the heap."""
    has_room = asyncio.Event()

    async def room(_: int) -> None:
        await has_room.wait()

    async with answering(b"") as peer:
        asking = asyncio.create_task(peers.post(peer, ANNOUNCE, b"message", room))
        await until(lambda: any(connection._answer for connection in peers._opened))
        (connection,) = peers._opened
        try:
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nab" % LARGE)
            has_room.set()
            await until(lambda: len(connection._body) == LARGE)
            buffer = connection._body
            rest = bytes(LARGE - 4)
            connection.data_received(rest[: LARGE // 2])
            assert connection._body is buffer
            connection.data_received(rest[LARGE // 2 :] + b"yz")
            answer = await asking
        finally:
            await peers.close()
        assert answer is buffer
        assert answer == b"ab" + rest + b"yz"


async def test_answer_without_room_is_not_read(peers: HttpPeers) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE

    async def room(size: int) -> None:
        raise Unavailable("no room")

    async with answering(head) as peer:
        with pytest.raises(Unavailable, match="no room"):
            await peers.post(peer, HAND_OVER, b"draft", room)
    await until(lambda: not peers._opened)


@asynccontextmanager
async def with_whole_answer(
    room: Room,
) -> AsyncIterator[tuple[HttpPeers, "asyncio.Task[bytearray]"]]:
    """A request that waits for room, though its whole answer arrived in one read."""
    peers = HttpPeers()
    async with answering(b"") as peer:
        asking = asyncio.create_task(peers.post(peer, ANNOUNCE, b"message", room))
        await until(lambda: any(connection._answer for connection in peers._opened))
        (connection,) = peers._opened
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (SMALL_ANSWER_BYTES + 1)
        connection.data_received(head + bytes(SMALL_ANSWER_BYTES + 1))
        try:
            yield peers, asking
        finally:
            await peers.close()


async def test_whole_answer_waits_for_its_room_and_its_connection_reads_on() -> None:
    has_room = asyncio.Event()

    async def room(_: int) -> None:
        await has_room.wait()

    async with with_whole_answer(room) as (peers, asking):
        (connection,) = peers._opened
        await asyncio.sleep(0.01)
        assert not asking.done()
        has_room.set()
        assert len(await asking) == SMALL_ANSWER_BYTES + 1
        assert list(peers._idle.values()) == [[connection]]
        assert connection._transport is not None
        assert connection._transport.is_reading()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_whole_answer_without_room_closes_its_connection(is_cancelled: bool) -> None:
    is_refused = asyncio.Event()

    async def room(_: int) -> None:
        await is_refused.wait()
        raise Unavailable("no room")

    async with with_whole_answer(room) as (peers, asking):
        await asyncio.sleep(0.01)
        if is_cancelled:
            asking.cancel()
        is_refused.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else Unavailable):
            await asking
        assert not any(peers._idle.values())
        await until(lambda: not peers._opened)


async def test_forwarded_request_that_waits_keeps_no_message(pair: list[Broker]) -> None:
    class Message(bytearray):
        """A message that has weak references."""

    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve(call: ForwardedCall) -> None:
        begun.set()
        await ended.wait()
        await call.answer(HttpResponse(200, b""))

    request = _Request("GET", "/", b"", [], "http", ("b", 1), b"")
    messages = [Message(msgspec.msgpack.encode(request))]
    message_ref = weakref.ref(messages[0])

    async def receive() -> dict[str, Any]:
        if messages:
            return {"type": "http.request", "body": messages.pop()}
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        """The answer is of no interest."""

    app = PeerApp(pair[0], Forwarded(serve))
    token = pair[0]._membership.me.token.encode()
    headers = [(b"authorization", b"Bearer " + token)]
    scope = {"type": "http", "method": "POST", "path": GROUP_REQUEST, "headers": headers}
    serving = asyncio.create_task(app(scope, receive, send))
    await begun.wait()
    assert message_ref() is None
    ended.set()
    await serving
