"""The head of a request has no bound of its size, its fields or its time, on either port."""

import asyncio
import logging

import pytest

from tests.service.connections.conftest import Connect
from tests.service.virtual_connections import PORTS, SILENCE_S

MIB = 1 << 20
START = b"GET /healthy HTTP/1.1\r\nHost: x\r\n"
FIELDS = b"".join(b"a%d: b\r\n" % number for number in range(20_000))
LONG = {"one field": b"x: " + b"y" * MIB + b"\r\n", "many fields": FIELDS}
REFUSALS = {400, 414, 431}


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("part", LONG)
@pytest.mark.parametrize("is_whole", [False, True])
async def test_long_head_is_refused(
    connect: Connect, port: str, part: str, *, is_whole: bool
) -> None:
    connection = connect(port)
    await connection.send(START + LONG[part] + b"\r\n" * is_whole)
    assert not is_whole or await connection.status() in REFUSALS
    assert connection.is_closed


async def test_long_target_is_refused_before_all_of_it_came(connect: Connect) -> None:
    connection = connect()
    await connection.send(b"GET /" + b"x" * (2 * MIB))
    assert connection.is_closed


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("sent", [b"", b"GET", START], ids=["nothing", "a word", "half a head"])
async def test_head_that_does_not_come_ends_connection(
    connect: Connect, port: str, sent: bytes
) -> None:
    connection = connect(port)
    await connection.send(sent)
    await asyncio.sleep(SILENCE_S * 2)  # peers keep a connection for ten minutes
    assert connection.is_closed


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthy HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /healthy HTTP/1.1\r\n\r\n",
        b"GET /healthy\r\n\r\n",
        b"GET /healthy HTTP/2.0\r\nHost: x\r\n\r\n",
        b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.v2+json\r\n"
        b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["two hosts", "no host", "no version", "another version", "a coding that is ignored"],
)
async def test_head_that_http_does_not_allow_is_refused(connect: Connect, head: bytes) -> None:
    connection = connect()
    await connection.send(head)
    assert (await connection.status(), connection.is_closed) in {
        (400, True),
        (501, True),
        (505, True),
    }


async def test_bad_requests_do_not_fill_log(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            await connect().send(b"no request\r\n\r\n")
    assert len(caplog.records) < 100


@pytest.mark.broker(request_bytes_max=1024)
async def test_body_that_is_too_long_ends_connection(connect: Connect) -> None:
    connection = connect()
    await connection.send(b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert (await connection.status(), connection.is_closed) == (413, True)
