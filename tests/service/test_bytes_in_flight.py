"""Bytes of bodies that are still coming, and of answers that are not read, count nowhere."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.service.conftest import BINARY, Broker, append
from tests.service.virtual_connections import SILENCE_S, Connection, client_port, served
from tests.support.vloop import run
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


def connected(broker: Broker, cleanup: ExitStack) -> list[Connection]:
    connections = [Connection(client_port(broker)) for _ in range(CONNECTIONS)]
    for connection in connections:
        cleanup.callback(connection.end)
    return connections


def test_bodies_that_are_still_coming_are_bounded() -> None:
    async def main() -> None:
        settings = {"buffer_bytes_max": BOUND, "request_bytes_max": MIB}
        async with served(**settings) as broker:
            with ExitStack() as cleanup:
                connections = connected(broker, cleanup)
                for connection in connections:
                    await connection.send(HEAD + b" " * (MIB - 1))
                statuses = [await connection.status() for connection in connections]
                served_connections = [
                    connection
                    for connection, status in zip(connections, statuses, strict=True)
                    if status not in BUSY and not connection.is_closed
                ]
                assert len(served_connections) <= BOUND // MIB + 1

    run(main)


def test_a_body_that_has_stopped_ends_the_connection() -> None:
    async def main() -> None:
        async with served() as broker:
            with ExitStack() as cleanup:
                connection = Connection(client_port(broker))
                cleanup.callback(connection.end)
                await connection.send(HEAD + b" ")
                await asyncio.sleep(SILENCE_S)
                assert connection.is_closed

    run(main)


def fetching(accept: str) -> bytes:
    path = b"/topics/t/partitions/0/records?offset=0&max_bytes=%d" % MIB
    return b"GET %b HTTP/1.1\r\nHost: x\r\nAccept: %b\r\n\r\n" % (path, accept.encode())


@pytest.mark.parametrize("accept", [BINARY, "text/event-stream"])
def test_answers_that_are_not_read_are_bounded(accept: str) -> None:
    async def main() -> None:
        async with served(fetch_bytes_in_flight=BOUND) as broker:
            await append(broker.log, b'"' + b"1" * (MIB - 100) + b'"')
            with ExitStack() as cleanup:
                connections = connected(broker, cleanup)
                await on_all(connections, Connection.stop_reading)
                for connection in connections:
                    await connection.send(fetching(accept))
                    await asyncio.sleep(0.1)
                await asyncio.sleep(ROOM_WAIT_S)  # a fetch waits so long for memory
                await on_all(connections, Connection.read_on)
                served_connections = [
                    connection
                    for connection in connections
                    if await connection.status() not in BUSY
                ]
                assert 0 < len(served_connections) <= BOUND // MIB + 1

    run(main)


async def on_all(connections: list[Connection], do: Callable[[Connection], None]) -> None:
    for connection in connections:
        do(connection)
    await asyncio.sleep(0.1)
