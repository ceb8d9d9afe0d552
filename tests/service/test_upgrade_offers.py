"""A request that offers another protocol is the same request without the offer.

Requests go to a connection's protocol packet by packet, without a socket: the cuts between the
packets are the test's. An application answers each request with what it has received.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from uvicorn.server import ServerState

from tests.service.virtual_connections import Transport
from tidelog.service.http.connection_admission import PIPELINED_MAX
from tidelog.service.http.uvicorn_protocol import Config, Protocol

OFFERS = {
    "java": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "handshake": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "apache": b"Upgrade: TLS/1.2\r\nConnection: Upgrade\r\n",
    "repeated": b"Connection: upgrade\r\nUPGRADE: h2c\r\nUpgrade: websocket\r\nupgrade: x/1\r\n"
    b"connection: Upgrade\r\n",
}
HOP = {"connection", "upgrade", "http2-settings", "sec-websocket-version", "sec-websocket-key"}
INNER = b"POST /inner HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
CHUNKS = b"5\r\nhello\r\n1;extension=1\r\n \r\n5\r\nworld\r\n0\r\n"
LENGTH = b"Content-Length: %d\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
MANY = b"".join(b"X-Field-%d: %d\r\n" % (n, n) for n in range(90))

REQUESTS = {
    "no body": (b"GET /a%20b?c=d HTTP/1.1\r\n", b"", b""),
    "an empty body": (b"POST /a HTTP/1.1\r\n", LENGTH % 0, b""),
    "a body": (b"POST /a HTTP/1.1\r\n", LENGTH % 5, b"hello"),
    "a body that is a request": (b"POST /a HTTP/1.1\r\n", LENGTH % len(INNER), INNER),
    "chunks": (b"POST /a HTTP/1.1\r\n", CHUNKED, CHUNKS + b"\r\n"),
    "trailers that offer": (
        b"POST /a HTTP/1.1\r\n",
        CHUNKED,
        CHUNKS + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ),
    "many fields": (b"PUT /a HTTP/1.1\r\n", MANY + LENGTH % 3, b"abc"),
    "HEAD of many fields": (b"HEAD /a HTTP/1.1\r\n", MANY, b""),
    "empty fields": (b"POST /a HTTP/1.1\r\n", b"X-A:\r\nX-B: \r\n" + LENGTH % 1, b"x"),
    "an expectation": (b"POST /a HTTP/1.1\r\n", b"Expect: 100-continue\r\n" + LENGTH % 5, b"hello"),
    "the last of its connection": (
        b"POST /a HTTP/1.1\r\n",
        b"Connection: close\r\n" + LENGTH % 5,
        b"hello",
    ),
    "HTTP/1.0": (b"POST /a HTTP/1.0\r\n", LENGTH % 5, b"hello"),
}


class Wire(Transport):
    """The broker's end of a connection: keeps what is written before its end."""

    def write(self, data: Any) -> None:
        if not self.is_closed:
            super().write(data)

    def write_eof(self) -> None:
        self.is_closed = True


class Echo:
    """An application that answers with the request as it came."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.paths.append(scope["path"])
        body, is_more = b"", True
        while is_more:
            event = await receive()
            assert event["type"] == "http.request", "the client is still there"
            body += event["body"]
            is_more = event["more_body"]
        fields = [[name.decode(), value.decode()] for name, value in scope["headers"]]
        said = {name: scope[name] for name in ("method", "path", "http_version")}
        said["query"] = scope["query_string"].decode()
        said["fields"] = [field for field in fields if field[0] not in HOP]
        said["body"] = body.decode()
        answer = json.dumps(said).encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def answers(packets: Iterable[bytes]) -> tuple[bytes, bool, list[str]]:
    """The bytes written to a connection, whether it is closed then, and the paths served."""
    app, state, wire = Echo(), ServerState(), Wire()
    config = Config(app)
    protocol = Protocol(config, state, {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    for packet in packets:
        if not wire.is_closed:
            protocol.data_received(packet)
        await asyncio.sleep(0)
    for _ in range(20_000):
        if not state.tasks:
            break
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # a head that waits for its body
    said = bytes(wire.written), wire.is_closed, app.paths
    protocol.connection_lost(None)
    if state.tasks:  # requests that are not whole
        await asyncio.wait(state.tasks, timeout=5)
    return said


def request(name: str, offer: bytes = b"", host: bytes = b"x") -> tuple[bytes, bytes]:
    """Head and body; the offer stands between the fields."""
    line, fields, body = REQUESTS[name]
    return line + b"Host: " + host + b"\r\n" + offer + fields + b"\r\n", body


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("offer", OFFERS)
async def test_offer_changes_no_request_wherever_packets_end(name: str, offer: str) -> None:
    plain = await answers([b"".join(request(name))])
    assert plain[2] in (["/a"], ["/a b"]), "one request, none of a body"
    head, body = request(name, OFFERS[offer])
    whole = head + body
    ends = range(1, len(whole)) if offer == "java" and len(whole) < 500 else [1, len(head) - 1]
    assert await answers([whole]) == plain
    assert await answers([head, body] if body else [head]) == plain
    assert await answers(whole[position : position + 1] for position in range(len(whole))) == plain
    for end in ends:
        assert await answers([whole[:end], whole[end:]]) == plain, whole[:end]


@pytest.mark.parametrize("offer", OFFERS)
async def test_offers_between_other_requests_are_answered_in_order(offer: str) -> None:
    names = [name for name in REQUESTS if name not in ("the last of its connection", "HTTP/1.0")]
    sent = [(name, OFFERS[offer] if number % 2 else b"") for number, name in enumerate(names * 2)]
    offered = [b"".join(request(name, offer)) for name, offer in sent]
    plain = [b"".join(request(name)) for name, _ in sent]
    expected = await answers([b"".join(plain)])
    assert len(expected[2]) == len(sent)
    assert await answers([b"".join(offered)]) == expected
    assert await answers(offered) == expected


async def test_many_offers_in_one_packet() -> None:
    count = PIPELINED_MAX
    packet = b"".join(request("a body", OFFERS["java"])) * count
    written, is_closed, paths = await answers([packet])
    assert (len(paths), written.count(b"HTTP/1.1 200"), is_closed) == (count, count, False)


@pytest.mark.parametrize("fields", [b"", OFFERS["java"], OFFERS["websocket"]])
@pytest.mark.parametrize("target", [b"/topics", b"127.0.0.1:80"])
@pytest.mark.parametrize("is_apart", [False, True])
async def test_connect_is_refused_and_what_follows_is_not_run(
    fields: bytes, target: bytes, is_apart: bool
) -> None:
    head = b"CONNECT %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (target, fields)
    written, is_closed, paths = await answers([head, INNER] if is_apart else [head + INNER])
    assert written.startswith(b"HTTP/1.1 400 ")
    assert written.count(b"HTTP/1.1 ") == 1
    assert (is_closed, paths) == (True, [])


@pytest.mark.parametrize(
    "follows", [b"no request\r\n\r\n", b"\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\n:"]
)
async def test_what_is_no_request_behind_offer_is_refused(follows: bytes) -> None:
    plain = await answers([b"".join(request("no body")) + follows])
    assert plain[0].startswith(b"HTTP/1.1 200 ")
    assert plain[0].count(b"HTTP/1.1 ") == 1, "of the request before it"
    assert plain[1]
    assert await answers([b"".join(request("no body", OFFERS["java"])) + follows]) == plain


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: +5\r\n",
        b"X: a\r\n Content-Length: 5\r\n",
        b"X: a\nContent-Length: 5\r\n",
        b"X: a\rContent-Length: 5\r\n",
        b"Content-Length : 5\r\n",
    ],
)
async def test_offer_hides_no_fault_of_head(fields: bytes) -> None:
    for offer in (b"", *OFFERS.values()):
        head = b"POST /a HTTP/1.1\r\nHost: x\r\n%s%s\r\n" % (offer, fields)
        written, is_closed, paths = await answers([head + b"hello"])
        assert written.startswith(b"HTTP/1.1 400 ")
        assert (is_closed, paths) == (True, [])
