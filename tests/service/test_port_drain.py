"""The listener in a drain: each answer ends its connection, and no connection is reset."""

import asyncio
import socket
import sys
from typing import Any

import pytest

from tests.service.conftest import listening_server
from tidelog.service.http.http_server import HttpServer
from tidelog.service.http.listening_sockets import begin_no_connections
from tidelog.service.http.request import HttpRequest, HttpResponse

REQUEST = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSE = b"connection: close\r\n"


class App:
    """Answers at once: whole, or, for the path /parts, in messages of ASGI.

    For the path /slow, it answers after `go_on`.
    """

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/parts":
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        if scope["path"] == "/slow":
            self.begun.set()
            await self.go_on.wait()
        await HttpRequest(scope, receive, send).answer(HttpResponse(200, b"ok"))


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, server: HttpServer) -> "Client":
        port = server.servers[0].sockets[0].getsockname()[1]
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, path: bytes) -> None:
        self._writer.write(REQUEST % path)

    async def head(self) -> bytes:
        """Return the head of the next answer, which is whole."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await self._reader.readexactly(2) == b"ok"
        return head

    async def ask(self, path: bytes) -> bytes:
        self.send(path)
        return await self.head()

    async def is_ended(self) -> bool:
        return await self._reader.read(1) == b""

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.mark.parametrize("path", [b"/whole", b"/parts"])
async def test_each_answer_of_drain_ends_its_connection(path: bytes) -> None:
    async with listening_server(App()) as server:
        old = await Client.of(server)
        assert CLOSE not in await old.ask(path)
        server.begin_drain()
        assert (await old.ask(path)).count(CLOSE) == 1
        assert await old.is_ended()
        new = await Client.of(server)
        assert (await new.ask(path)).count(CLOSE) == 1
        assert await new.is_ended()
        await old.close()
        await new.close()


async def test_answer_under_way_ends_its_connection() -> None:
    app = App()
    async with listening_server(app) as server:
        client = await Client.of(server)
        client.send(b"/slow")
        await app.begun.wait()
        assert server.activity == (1, 0)
        server.begin_drain()
        app.go_on.set()
        assert CLOSE in await client.head()
        assert await client.is_ended()
        assert server.activity[1] == 1
        await client.close()


async def test_first_request_of_connection_is_served_after_stop() -> None:
    async with listening_server(App()) as server:
        client = await Client.of(server)
        while not server.activity[0]:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.001)
        server.begin_drain()
        for connection in server.server_state.connections:
            connection.shutdown()
        assert CLOSE in await client.ask(b"/whole")
        assert await client.is_ended()
        await client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has socket filters")
def test_port_that_ends_keeps_its_queue_and_refuses_new_connections() -> None:
    with socket.socket() as listener, socket.socket() as queued, socket.socket() as late:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        address = listener.getsockname()
        queued.connect(address)
        begin_no_connections([listener])
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.connect(address)
        accepted, _ = listener.accept()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        listener.close()
        with accepted:
            queued.sendall(b"request")
            assert accepted.recv(100) == b"request"
            accepted.sendall(b"answer")
            assert queued.recv(100) == b"answer"
        with socket.socket() as refused, pytest.raises(ConnectionRefusedError):
            refused.connect(address)
