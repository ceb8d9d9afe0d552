"""TLS handshakes take turns and a bounded memory. Messages without data are bounded."""

import asyncio
import ssl
import struct
from typing import Any

import pytest

from tests.service.virtual_connections import Transport
from tests.support.certificates import Authority, Pair
from tests.support.tls_client import TlsClient, client_context
from tidelog.service.http.handshakes import (
    HANDSHAKES_BYTES_MAX,
    HELLO_BYTES_MAX,
    PIECE_BYTES,
    PIECE_RECORDS,
    RETRY_RANDOM,
    SILENT_BYTES,
    UNDER_WAY_BYTES,
    Handshakes,
    Records,
)
from tidelog.service.http.loop_turns import Turns
from tidelog.service.http.tls_transport import UNASKED_MAX, TlsTransport


@pytest.fixture
def pair(tmp_path: Any) -> Pair:
    return Authority(tmp_path).pair("broker")


@pytest.fixture
def context(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    return context


class Above:
    """The protocol above: notes the calls, and closes as a listener does."""

    def __init__(self) -> None:
        self.plain = b""
        self.failures: list[str] = []
        self.displaced = 0
        self.tls: TlsTransport

    def on_plain(self, plain: bytes) -> None:
        self.plain += plain

    def on_failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.tls.close()

    def on_displaced(self) -> None:
        self.displaced += 1

    def on_paused(self, is_paused: bool) -> None:
        """Nothing is written."""


class Address(Transport):
    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 1) if name == "peername" else default


class Arrived:
    def __init__(
        self, context: ssl.SSLContext, handshakes: Handshakes, address: str = "127.0.0.1"
    ) -> None:
        self.raw, self.above = Address(address), Above()
        loop = asyncio.get_running_loop()
        self.tls = TlsTransport(self.raw, loop, context, self.above, handshakes)
        self.above.tls = self.tls


class Steps:
    """A clock that goes on by a step's time each time it is asked."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def hello(size: int = 0) -> bytes:
    """Return a ClientHello, padded to this size."""
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    data = outgoing.read()
    return padded(data, size) if size else data


def padded(data: bytes, size: int) -> bytes:
    """Return the ClientHello with one more, unknown extension, in one record of `size` bytes."""
    extensions = 44 + data[43]  # behind the session id; then the suites and the compression
    extensions += 2 + struct.unpack_from(">H", data, extensions)[0]
    extensions += 1 + data[extensions]
    more = size - len(data)
    (before,) = struct.unpack_from(">H", data, extensions)
    message = b"".join(
        [
            data[9:extensions],
            struct.pack(">H", before + more),
            data[extensions + 2 :],
            struct.pack(">HH", 0x5A5A, more - 4),
            bytes(more - 4),
        ]
    )
    begin = b"\x01" + len(message).to_bytes(3, "big")
    return record(begin + message)


def record(content: bytes, kind: int = 22) -> bytes:
    return struct.pack(">BHH", kind, 0x0301, len(content)) + content


def half(size: int, claimed: int = 0x1FF00) -> bytes:
    """Return `size` bytes of a ClientHello that says it has more, in one record."""
    content = b"\x01" + claimed.to_bytes(3, "big") + b"\x03\x03" + bytes(size - 11)
    return record(content)


# -- turns


async def test_handshakes_of_many_clients_take_turns_of_loop(context: ssl.SSLContext) -> None:
    handshakes = Handshakes(Turns(Steps(0.003)))  # two steps fit in a turn
    clients = [Arrived(context, handshakes) for _ in range(7)]
    data = hello()
    for client in clients:
        client.tls.received(data)
    assert not any(client.raw.written for client in clients)
    answered = []
    for _ in range(4):
        await asyncio.sleep(0)
        answered.append(sum(bool(client.raw.written) for client in clients))
    assert answered == [2, 4, 6, 7]


async def test_flood_of_one_address_does_not_delay_another_one(context: ssl.SSLContext) -> None:
    handshakes = Handshakes(Turns(Steps(0.005)))  # one step a turn
    flood = [Arrived(context, handshakes) for _ in range(20)]
    other = Arrived(context, handshakes, "127.0.0.2")
    for client in (*flood, other):
        client.tls.received(hello())
    for _ in range(2):
        await asyncio.sleep(0)
    assert other.raw.written
    assert sum(bool(client.raw.written) for client in flood) == 1


async def test_last_step_of_handshake_goes_before_client_hellos(
    context: ssl.SSLContext,
) -> None:
    handshakes = Handshakes(Turns(Steps(0.005)))  # one step a turn
    client, arrived = TlsClient(), Arrived(context, handshakes)
    arrived.tls.received(client.handshake())
    await asyncio.sleep(0)
    flood = [Arrived(context, handshakes) for _ in range(5)]
    for flooding in flood:
        flooding.tls.received(hello())
    arrived.tls.received(client.handshake(bytes(arrived.raw.written)))
    await asyncio.sleep(0)
    assert arrived.tls.is_open
    assert not any(flooding.raw.written for flooding in flood)


async def test_client_that_leaves_has_no_turn(context: ssl.SSLContext) -> None:
    handshakes = Handshakes()
    client = Arrived(context, handshakes)
    client.tls.received(hello())
    client.tls.lost()
    await asyncio.sleep(0)
    assert not client.raw.written
    assert handshakes.bytes == 0


# -- memory


@pytest.mark.parametrize("size", [11, 4096, HELLO_BYTES_MAX])
async def test_openssl_gets_no_half_client_hello(
    context: ssl.SSLContext, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Arrived(context, Handshakes())
    monkeypatch.setattr(client.tls, "step", lambda: pytest.fail("a step with half a ClientHello"))
    client.tls.received(half(size))
    await asyncio.sleep(0)
    assert client.tls.is_waiting is False


async def test_client_hello_that_is_too_large_is_refused(context: ssl.SSLContext) -> None:
    handshakes = Handshakes()
    client = Arrived(context, handshakes)
    data = half(HELLO_BYTES_MAX - 5) + half(100)
    client.tls.received(data[:-100])
    assert not client.above.failures
    client.tls.received(data[-100:])
    assert client.above.failures == ["the ClientHello is too large"]
    assert client.raw.is_closed
    assert handshakes.bytes == 0


@pytest.mark.parametrize("size", [0, 4000, HELLO_BYTES_MAX])
@pytest.mark.parametrize("piece", [1, 1000, HELLO_BYTES_MAX])
async def test_whole_client_hellos_are_answered(
    context: ssl.SSLContext, size: int, piece: int
) -> None:
    client = Arrived(context, Handshakes())
    data = hello(size)
    assert not size or len(data) == size
    for begin in range(0, len(data), piece):
        assert not client.tls.is_waiting
        client.tls.received(data[begin : begin + piece])
    await asyncio.sleep(0)
    assert client.raw.written[:1] == b"\x16"
    assert not client.above.failures


async def test_client_hello_in_many_records_is_answered(context: ssl.SSLContext) -> None:
    client = Arrived(context, Handshakes())
    message = hello()[5:]
    client.tls.received(
        b"".join(record(message[start : start + 7]) for start in range(0, len(message), 7))
    )
    await asyncio.sleep(0)
    assert client.raw.written[:1] == b"\x16"


async def test_second_client_hello_must_be_whole_too(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    context.set_ecdh_curve("secp384r1")  # clients send a key share of another curve
    client = Arrived(context, Handshakes())
    client.tls.received(hello())
    await asyncio.sleep(0)
    assert client.raw.written[11:43] == RETRY_RANDOM
    monkeypatch.setattr(client.tls, "step", lambda: pytest.fail("a step with half a ClientHello"))
    client.tls.received(record(b"\x01", 20) + half(100))
    assert not client.tls.is_waiting


async def test_oldest_handshakes_end_at_bound_of_memory(context: ssl.SSLContext) -> None:
    handshakes = Handshakes()
    size = SILENT_BYTES + HELLO_BYTES_MAX
    clients = [Arrived(context, handshakes) for _ in range(HANDSHAKES_BYTES_MAX // size + 10)]
    for client in clients:
        client.tls.received(half(HELLO_BYTES_MAX))
    assert handshakes.bytes <= HANDSHAKES_BYTES_MAX
    displaced = [bool(client.above.displaced) for client in clients]
    assert displaced == [True] * 10 + [False] * (len(clients) - 10)
    assert all(client.raw.is_closed for client in clients[:10])
    for client in clients[10:]:
        client.tls.lost()
    assert handshakes.bytes == 0
    assert handshakes.peak_bytes() > HANDSHAKES_BYTES_MAX - size
    assert handshakes.peak_bytes() == 0


async def opened(context: ssl.SSLContext, handshakes: Handshakes) -> tuple[TlsClient, Arrived]:
    client, arrived = TlsClient(), Arrived(context, handshakes)
    while not arrived.tls.is_open:
        received = bytes(arrived.raw.written)
        arrived.raw.written.clear()
        arrived.tls.received(client.handshake(received))
        await asyncio.sleep(0)
    return client, arrived


async def test_handshake_is_charged_until_it_is_done(context: ssl.SSLContext) -> None:
    handshakes = Handshakes()
    silent = Arrived(context, handshakes)
    assert handshakes.bytes == SILENT_BYTES
    silent.tls.received(hello())
    await asyncio.sleep(0)
    assert handshakes.bytes == UNDER_WAY_BYTES
    await opened(context, handshakes)
    assert handshakes.bytes == UNDER_WAY_BYTES
    silent.tls.lost()
    assert handshakes.bytes == 0


# -- messages without data


async def test_key_updates_end_connection_after_few(context: ssl.SSLContext) -> None:
    client, arrived = await opened(context, Handshakes())
    arrived.tls.received(client.key_updates(UNASKED_MAX) + client.data(b"a"))
    assert arrived.above.plain == b"a"
    assert not arrived.above.failures
    arrived.tls.received(client.data(b"b") + client.key_updates(1) + client.data(b"c"))
    assert arrived.above.failures == ["too many messages"]
    assert arrived.raw.is_closed


async def test_packet_of_key_updates_is_not_read_to_its_end(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, arrived = await opened(context, Handshakes())
    fed: list[int] = []

    class Counted:
        def write(self, piece: Any) -> int:
            fed.append(len(piece))
            return incoming.write(piece)

    incoming = arrived.tls._incoming
    monkeypatch.setattr(arrived.tls, "_incoming", Counted())
    updates = client.key_updates(2000)
    arrived.tls.received(updates)
    assert arrived.above.failures == ["too many messages"]
    assert sum(fed) == 2 * PIECE_RECORDS * len(updates) // 2000


async def test_small_records_are_data(context: ssl.SSLContext) -> None:
    client, arrived = await opened(context, Handshakes())
    sent = b"".join(client.data(b"%d" % (number % 10)) for number in range(3 * PIECE_RECORDS))
    for begin in range(0, len(sent), 7):
        arrived.tls.received(sent[begin : begin + 7])
    arrived.tls.received(client.data(b"x" * 16384) + client.data(b"y"))
    assert len(arrived.above.plain) == 3 * PIECE_RECORDS + 16385
    assert not arrived.above.failures


def test_piece_of_large_records_has_few_bytes() -> None:
    """OpenSSL keeps memory for the largest piece of a connection, to its end."""
    data = record(bytes(16_000)) * 20
    pieces = Records().split(data)
    assert b"".join(piece for piece, _ in pieces) == data
    assert sum(count for _, count in pieces) == 20
    assert max(len(piece) for piece, _ in pieces) < PIECE_BYTES + 16_005


@pytest.mark.parametrize("packet", [1, 3, 6, 100, 700, 1000, 10_000])
def test_records_are_counted_in_packets_of_any_size(packet: int) -> None:
    sizes = [0, 1, 5, 300, 0, 0, 17, *[2] * (3 * PIECE_RECORDS), 400, 3]
    data = b"".join(record(bytes(size)) for size in sizes)
    data += record(bytes(9))[:8]  # not whole
    records = Records()
    pieces = [
        piece
        for begin in range(0, len(data), packet)
        for piece in records.split(data[begin : begin + packet])
    ]
    assert b"".join(piece for piece, _ in pieces) == data
    assert sum(count for _, count in pieces) == len(sizes)
    assert max(count for _, count in pieces) <= PIECE_RECORDS
