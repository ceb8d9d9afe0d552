"""Requests behind others on one connection, and trailers: no request gets a part of another."""

import asyncio
from typing import Any

import pytest

from tests.service.conftest import Broker, ends
from tests.service.connections.conftest import Connect
from tests.service.virtual_connections import Connection, client_port
from tidelog.service.http.connection_admission import (
    HEAD_BYTES_MAX,
    PIPELINED_FIELDS_MAX,
    PIPELINED_MAX,
)
from tidelog.service.http.request import HttpRequest, HttpResponse
from tidelog.service.http.uvicorn_protocol import Config

FOLLOW = (
    b"GET /topics/t/partitions/0/records?follow=true HTTP/1.1\r\nHost: x\r\n"
    b"Accept: text/event-stream\r\n\r\n"
)
POLL = b"GET /topics/t/partitions/0/records?timeout=5000 HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
RECORD = b'{"records": [{"value": 1}]}'
CHUNK = b"%x\r\n%b\r\n" % (len(RECORD), RECORD)


@pytest.mark.parametrize("piece", [1, 1 << 18])
async def test_trailers_are_no_fields_of_head(piece: int) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = HttpRequest(scope, receive, send)
        await call.body(100)
        seen.append(call.scope["headers"])
        await call.answer(HttpResponse(200, b"{}"))

    connection = Connection(Config(app))
    trailers = b"Authorization: Bearer stolen\r\nHost: evil\r\nX-Last: 1\r\n\r\n"
    await connection.send(CHUNKED + CHUNK + b"0\r\n" + trailers, piece)
    await connection.send(b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n", piece)
    await asyncio.sleep(1.0)
    connection.end()
    first, second = ([name for name, _ in fields] for fields in seen)
    assert first == [b"host", b"content-type", b"transfer-encoding"]
    assert second == [b"host"]


@pytest.mark.parametrize("trailers", [b"X: " + b"y" * (4 * HEAD_BYTES_MAX), b"X: y\r\n" * 100_000])
async def test_trailers_are_bounded(connect: Connect, trailers: bytes) -> None:
    connection = connect()
    await connection.send(CHUNKED + CHUNK + b"0\r\n", 1)
    await connection.send(trailers, HEAD_BYTES_MAX // 3)
    assert await connection.status() == 431
    assert connection.is_closed


async def test_body_in_small_pieces_is_no_trailer(broker: Broker, connect: Connect) -> None:
    connection = connect()
    spaces = b"1;x=%b\r\n \r\n" % (b"y" * 1000) * (2 * HEAD_BYTES_MAX // 1000)
    await connection.send(CHUNKED + spaces + CHUNK + b"0\r\n\r\n", 700)
    assert await connection.status() == 200
    assert ends(broker.log) == [1]


@pytest.mark.parametrize("first", [FOLLOW, POLL])
async def test_client_that_goes_ends_request_before_its_last(broker: Broker, first: bytes) -> None:
    before = len(asyncio.all_tasks())
    connection = Connection(client_port(broker))
    await connection.send(first + b"GET /topics HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(1.0)
    connection.end()
    await asyncio.sleep(10.0)
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("wrong", [CHUNKED + b"zz\r\n", POST + b"Content-Length: 9\r\n\r\n{"])
async def test_requests_before_one_whose_body_is_wrong_get_their_answers(
    broker: Broker, connect: Connect, wrong: bytes
) -> None:
    connection = connect()
    poll = POLL.replace(b"5000", b"30000")
    whole = POST + b"Content-Length: %d\r\n\r\n%b" % (len(RECORD), RECORD)
    await connection.send(poll + whole + wrong)
    await asyncio.sleep(120.0)
    written = bytes(connection.transport.written)
    assert written.count(b"HTTP/1.1 200 OK") == 2, written
    assert connection.is_closed
    assert ends(broker.log) == [1]


async def test_packet_is_read_when_requests_before_are_served(connect: Connect) -> None:
    """Else a client could send much that no budget counts, behind requests that are waited for."""
    connection = connect()
    paused = 0
    transport: Any = connection.transport

    def pause() -> None:
        nonlocal paused
        paused = 1

    def resume() -> None:
        nonlocal paused
        paused = 0

    transport.pause_reading, transport.resume_reading = pause, resume
    whole = POST + b"Content-Length: %d\r\n\r\n%b" % (len(RECORD), RECORD)
    await connection.send(whole + POLL.replace(b"5000", b"50") + whole)
    assert paused
    while bytes(transport.written).count(b"HTTP/1.1 200 OK") < 2:
        assert paused
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.0)
    assert bytes(transport.written).count(b"HTTP/1.1 200 OK") == 3
    assert not paused


@pytest.mark.parametrize(
    ("fields", "served_most"), [(0, PIPELINED_MAX + 1), (95, 1 + PIPELINED_FIELDS_MAX // 96)]
)
async def test_heads_that_wait_are_bounded(fields: int, served_most: int) -> None:
    served_paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served_paths.append(scope["path"])
        await asyncio.sleep(1.0)
        await HttpRequest(scope, receive, send).answer(HttpResponse(200, b"{}"))

    connection = Connection(Config(app))
    heads = [
        b"GET /%d HTTP/1.1\r\nHost: x\r\n%b\r\n" % (number, b"a:\r\n" * fields)
        for number in range(100)
    ]
    await connection.send(b"".join(heads), 1 << 18)
    await asyncio.sleep(200.0)
    assert connection.is_closed
    connection.end()
    assert served_paths == [f"/{number}" for number in range(served_most)]
