"""TLS of a listener: handshakes, answers that are not read, files that change."""

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service import conftest
from tests.service.virtual_connections import Connection
from tests.support.certificates import Authority, Pair
from tidelog.service.http.connection_admission import Admission, Limits, Phase
from tidelog.service.http.tls_transport import STEP_BYTES
from tidelog.service.http.uvicorn_protocol import Config
from tidelog.service.peers.client import HttpPeers
from tidelog.service.security.tls_certificates import ServerCertificate, TlsFiles
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import ForwardOutcomeUnknown, ForwardRefused
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock

MIB = 1 << 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.pair("broker")


def certificate(pair: Pair, ca: Path | None = None) -> ServerCertificate:
    """Of the port for clients; with `ca`, of the port for peers."""
    files = TlsFiles("tls", str(pair.cert), str(pair.key))
    if ca is not None:
        files = files._replace(ca=str(ca), host="127.0.0.1")
    return ServerCertificate(files, SystemClock())


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with as many bytes as the path says, or with the request's body."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    size = int(scope["path"][1:] or 0)
    body = body or b"x" * size
    headers = [(b"content-length", b"%d" % len(body)), (b"x-scheme", scope["scheme"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(
    used: ServerCertificate, admission: Admission[Any] | None = None, serve: Any = app
) -> AsyncIterator[int]:
    async with conftest.listening(serve, tls=used.server, admission=admission) as port:
        yield port


@contextlib.asynccontextmanager
async def connected(
    port: int, ca: Path, protocols: tuple[str, ...] = ("http/1.1",)
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(list(protocols))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(size)


async def test_requests_and_answers_of_any_size(authority: Authority, pair: Pair) -> None:
    async with (
        listening(certificate(pair)) as port,
        connected(port, authority.ca) as (reader, writer),
    ):
        for size in (1, STEP_BYTES, STEP_BYTES + 1, 9 * MIB, 3):
            writer.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % size)
            head, body = await answer(reader)
            assert body == b"x" * size
            assert b"x-scheme: https" in head
        sent = bytes(range(256)) * (MIB // 64)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(sent))
        writer.write(sent)
        assert (await answer(reader))[1] == sent


async def test_protocol_is_http_1(authority: Authority, pair: Pair) -> None:
    async with (
        listening(certificate(pair)) as port,
        connected(port, authority.ca, ("h2", "http/1.1")) as (_, writer),
    ):
        tls = writer.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == "http/1.1"
        assert tls.version() == "TLSv1.3"


@pytest.mark.filterwarnings("ignore:.*TLSv1_1:DeprecationWarning")
async def test_old_versions_of_tls_are_refused(pair: Pair) -> None:
    admission: Admission[Any] = Admission(Limits())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1_1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with listening(certificate(pair), admission) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
    assert admission.ended["handshake"] == 1


async def test_plain_text_is_answered_closed_and_counted(pair: Pair) -> None:
    admission: Admission[Any] = Admission(Limits())
    async with listening(certificate(pair), admission) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthy HTTP/1.1\r\nhost: x\r\n\r\n")
        head, body = await answer(reader)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"https://" in body
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert admission.ended == {"plain text": 1}


class Handshake:
    """A client without a socket: the test passes on what both sides send."""

    def __init__(self, pair: Pair, admission: Admission[Any] | None = None) -> None:
        used = certificate(pair)
        config = Config(app, admission, tls=used.server)
        self.connection = Connection(config)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = used.client().wrap_bio(self.incoming, self.outgoing)

    async def flow(self) -> None:
        written = self.connection.transport.written
        self.incoming.write(bytes(written))
        written.clear()
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        if data := self.outgoing.read():
            self.connection.protocol.data_received(data)
            await asyncio.sleep(0)  # the turn of the handshake


async def test_connection_counts_from_its_first_packet_and_its_handshake_has_clock(
    pair: Pair,
) -> None:
    admission: Admission[Any] = Admission(Limits(first_byte_s=10.0))
    client = Handshake(pair, admission)
    await client.flow()  # its hello, and no more
    assert admission.connections == 1
    assert client.connection.transport.written
    assert admission.overdue(0.0) == ([], True)
    assert admission.overdue(5.0) == ([], True)
    protocol = client.connection.protocol
    assert admission.overdue(9.9) == ([], True)
    admission.overdue(10.0)
    late_clients, _ = admission.overdue(15.0)
    assert late_clients == [(protocol, Phase.HANDSHAKE)]
    protocol.end_late(Phase.HANDSHAKE)
    assert client.connection.transport.is_closed
    client.connection.end()
    assert admission.connections == 0
    assert admission.ended == {"handshake": 1}


async def test_answer_that_is_not_read_is_encrypted_in_steps(pair: Pair) -> None:
    client = Handshake(pair)
    for _ in range(3):
        await client.flow()
    protocol, transport = client.connection.protocol, client.connection.transport
    transport.written.clear()
    client.tls.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % (8 * MIB))
    protocol.data_received(client.outgoing.read())
    for _ in range(1000):
        await asyncio.sleep(0)
        if len(transport.written) >= STEP_BYTES:
            break
    protocol.pause_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(transport.written) < 5 * STEP_BYTES
    assert protocol.observed()[0] is Phase.ANSWER
    assert protocol.transport.get_write_buffer_size() > 7 * MIB
    transport.written.clear()
    protocol.resume_writing()
    protocol.pause_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert STEP_BYTES <= len(transport.written) <= 2 * STEP_BYTES
    protocol.resume_writing()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert protocol.transport.get_write_buffer_size() == 0
    assert len(transport.written) > 7 * MIB
    assert protocol.observed()[0] is Phase.IDLE


# -- files


def replace(pair: Pair, by: Pair) -> None:
    shutil.copyfile(by.key, pair.key)
    shutil.copyfile(by.cert, pair.cert)


async def subject(port: int, ca: Path) -> str:
    async with connected(port, ca) as (_, writer):
        return str(writer.get_extra_info("peercert")["subject"][0][0][1])


async def test_changed_files_serve_new_connections(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    used, new = certificate(pair), authority.pair("new")
    async with listening(used) as port, connected(port, authority.ca) as (reader, writer):
        assert await subject(port, authority.ca) == "broker"
        replace(pair, new)
        await used.look()
        assert await subject(port, authority.ca) == "new"
        before = used.server()
        pair.cert.write_text("-----BEGIN CERTIFICATE-----\n")
        await used.look()
        await used.look()
        assert used.failures == 1
        assert used.server() is before
        assert str(pair.cert) in caplog.text
        assert await subject(port, authority.ca) == "new"
        writer.write(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")  # an open connection goes on
        assert (await answer(reader))[1] == b"xx"


def test_certificate_that_ends_soon_is_named(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert certificate(authority.pair("long", days=8)).ends_s > SystemClock().now_ms() / 1000
    assert not caplog.text
    certificate(authority.pair("short", days=6))
    assert "short.crt expires in 14" in caplog.text


DAMAGES: list[tuple[Callable[[Pair, Authority], object], str]] = [
    (lambda pair, _: pair.cert.unlink(), "tls_cert_file: cannot read .*broker.crt: no such file"),
    (lambda pair, _: pair.key.chmod(0o644), "tls_key_file: other users can .*chmod 0600"),
    (
        lambda pair, authority: shutil.copyfile(authority.pair("other").key, pair.key),
        "the key does not fit the certificate",
    ),
    (lambda pair, _: pair.cert.write_text("nothing"), "not PEM files"),
    (
        lambda pair, authority: replace(pair, authority.pair("old", days=-1)),
        "broker.crt has expired",
    ),
    (
        lambda pair, authority: replace(pair, authority.pair("far", host="192.0.2.1")),
        "is not valid for 127.0.0.1.*set peer_address",
    ),
    (
        lambda pair, authority: replace(
            pair, Authority(authority.ca.parent / "x", "foreign").pair("strange")
        ),
        "is not accepted: unable to get local issuer certificate",
    ),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES, ids=[why for _, why in DAMAGES])
def test_files_that_cannot_be_used_are_named_in_one_line(
    authority: Authority, pair: Pair, damage: Callable[[Pair, Authority], object], why: str
) -> None:
    damage(pair, authority)
    with pytest.raises(LogError, match=why) as caught:
        certificate(pair, authority.ca)
    assert "\n" not in str(caught.value)


# -- between brokers


async def test_brokers_take_only_certificates_of_their_ca(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "other")
    own, foreign = certificate(pair, authority.ca), certificate(other.pair("x"), other.ca)
    async with listening(own) as port:
        peer = Member("x", "x", f"https://127.0.0.1:{port}", "t", started_ms=0)
        plain = Member("x", "x", f"http://127.0.0.1:{port}", "t", started_ms=0)
        peers, strange = HttpPeers(own.client), HttpPeers(foreign.client)
        assert await peers.post(peer, "/", b"a draft") == b"a draft"
        assert await peers.post(peer, "/", b"y" * MIB) == b"y" * MIB
        with pytest.raises(ForwardRefused, match="certificate verify failed"):
            await strange.post(peer, "/", b"a draft")
        with pytest.raises(ForwardRefused, match="has no TLS"):
            await peers.post(plain, "/", b"a draft")
        # A client that trusts this CA, and shows a certificate of another one.
        foreign.client().load_verify_locations(authority.ca)
        with pytest.raises((ForwardRefused, ForwardOutcomeUnknown)):
            await strange.post(peer, "/", b"a draft")
        await peers.close()
        await strange.close()


async def test_what_comes_after_last_answer_is_not_served(authority: Authority, pair: Pair) -> None:
    paths: list[str] = []
    size = 16 * MIB  # more than the socket takes before the client reads

    async def last(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        headers = [(b"content-length", b"%d" % size), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    async with (
        listening(certificate(pair), serve=last) as port,
        connected(port, authority.ca) as (reader, writer),
    ):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        assert len(await reader.read()) == size
    assert paths == ["/a"]
