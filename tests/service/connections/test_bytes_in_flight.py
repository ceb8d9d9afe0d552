"""Bytes of bodies that are still coming, and of answers that are not read, count nowhere."""

import asyncio

import pytest

from tests.service.conftest import BINARY, Broker, append
from tests.service.connections.conftest import Connect
from tests.service.virtual_connections import SILENCE_S
from tidelog.service.routes.fetch import ROOM_WAIT_S

MIB = 1 << 20
CONNECTIONS = 20
BOUND = 4 * MIB
"""Of all connections together; each has a body or an answer of one MiB."""
BUSY = {429, 503}
HEAD = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (
    BINARY.encode(),
    MIB,
)


@pytest.mark.broker(buffer_bytes_max=BOUND, request_bytes_max=MIB)
async def test_bodies_that_are_still_coming_are_bounded(connect: Connect) -> None:
    connections = [connect() for _ in range(CONNECTIONS)]
    for connection in connections:
        await connection.send(HEAD + b" " * (MIB - 1))
    statuses = [await connection.status() for connection in connections]
    served_connections = [
        connection
        for connection, status in zip(connections, statuses, strict=True)
        if status not in BUSY and not connection.is_closed
    ]
    assert len(served_connections) <= BOUND // MIB + 1


async def test_body_that_has_stopped_ends_connection(connect: Connect) -> None:
    connection = connect()
    await connection.send(HEAD + b" ")
    await asyncio.sleep(SILENCE_S)
    assert connection.is_closed


@pytest.mark.parametrize("accept", [BINARY, "text/event-stream"])
@pytest.mark.broker(fetch_bytes_in_flight=BOUND)
async def test_answers_that_are_not_read_are_bounded(
    broker: Broker, connect: Connect, accept: str
) -> None:
    await append(broker.log, b'"' + b"1" * (MIB - 100) + b'"')
    path = b"/topics/t/partitions/0/records?offset=0&max_bytes=%d" % MIB
    connections = [connect() for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.stop_reading()
    for connection in connections:
        await asyncio.sleep(0.1)
        await connection.send(
            b"GET %b HTTP/1.1\r\nHost: x\r\nAccept: %b\r\n\r\n" % (path, accept.encode())
        )
    await asyncio.sleep(0.1 + ROOM_WAIT_S)  # a fetch waits so long for memory
    for connection in connections:
        connection.read_on()
    await asyncio.sleep(0.1)
    statuses = [await connection.status() for connection in connections]
    assert 0 < sum(status not in BUSY for status in statuses) <= BOUND // MIB + 1
