"""The head of a request has no bound of its size, its fields or its time, on either port."""

import asyncio

import pytest

from tests.service.virtual_connections import PORTS, SILENCE_S, Connection, client_port, served
from tests.support.vloop import run

MIB = 1 << 20
START = b"GET /healthy HTTP/1.1\r\nHost: x\r\n"
FIELDS = b"".join(b"a%d: b\r\n" % number for number in range(20_000))
LONG = {
    "one field": b"x: " + b"y" * MIB + b"\r\n",
    "many fields": FIELDS,
}
REFUSALS = {400, 414, 431}


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("part", LONG)
def test_a_long_head_is_refused(port: str, part: str) -> None:
    async def main() -> None:
        async with served() as broker:
            connection = Connection(PORTS[port](broker))
            await connection.send(START + LONG[part] + b"\r\n")
            status = await connection.status()
            is_closed = connection.is_closed
            connection.end()
            assert status in REFUSALS
            assert is_closed

    run(main)


def test_a_long_target_is_refused_before_all_of_it_came() -> None:
    async def main() -> None:
        async with served() as broker:
            connection = Connection(client_port(broker))
            await connection.send(b"GET /" + b"x" * (2 * MIB))
            is_closed = connection.is_closed
            connection.end()
            assert is_closed

    run(main)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("part", LONG)
def test_a_head_that_does_not_end_is_refused(port: str, part: str) -> None:
    async def main() -> None:
        async with served() as broker:
            connection = Connection(PORTS[port](broker))
            await connection.send(START + LONG[part])
            is_closed = connection.is_closed
            connection.end()
            assert is_closed

    run(main)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("sent", [b"", b"GET", START], ids=["nothing", "a word", "half a head"])
def test_a_head_that_does_not_come_ends_the_connection(port: str, sent: bytes) -> None:
    async def main() -> None:
        async with served() as broker:
            connection = Connection(PORTS[port](broker))
            await connection.send(sent)
            await asyncio.sleep(SILENCE_S * 2)  # peers keep a connection for ten minutes
            is_closed = connection.is_closed
            connection.end()
            assert is_closed

    run(main)


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
def test_a_head_that_http_does_not_allow_is_refused(head: bytes) -> None:
    async def main() -> None:
        async with served() as broker:
            connection = Connection(client_port(broker))
            await connection.send(head)
            status, is_closed = await connection.status(), connection.is_closed
            connection.end()
            assert (status, is_closed) in {(400, True), (501, True), (505, True)}

    run(main)
