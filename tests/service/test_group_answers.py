"""Answers of group reads that do not arrive, over real sockets.

Their records come again, are not committed, and an answer that arrived does not come again.
"""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.service.conftest import Broker, listening, until
from tests.service.instances import Instance, created, put, subscribed
from tests.support.certificates import Authority
from tidelog.service.http.answer_arrival import ACKNOWLEDGED_S
from tidelog.service.security.tls_certificates import ServerCertificate, TlsFiles
from tidelog.storage.runtime.clock import SystemClock

VALUES = ["a", "b", "c"]
ENDS = ["keep-alive", "close", "HTTP/1.0"]


class Port(NamedTuple):
    """A listening broker. `tls` is None if it listens without TLS."""

    number: int
    tls: ssl.SSLContext | None


class Client:
    """One connection of a client without a library: it ends exactly as a test says."""

    def __init__(self, port: Port, receive_bytes: int = 0) -> None:
        self._port = port
        self._receive_bytes = receive_bytes
        self._socket: socket.socket

    async def connect(self) -> "Client":
        await asyncio.to_thread(self._connect)
        return self

    def _connect(self) -> None:
        raw = socket.socket()
        if self._receive_bytes:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", self._port.number))
        tls = self._port.tls
        self._socket = raw if tls is None else tls.wrap_socket(raw, server_hostname="127.0.0.1")

    def ask(self, path: str, end: str = "keep-alive", **headers: str) -> None:
        """Send a GET. Returns at once, so the event loop of the broker has not run since."""
        version = "HTTP/1.0" if end == "HTTP/1.0" else "HTTP/1.1"
        fields = {"Host": "localhost", **{n.replace("_", "-"): v for n, v in headers.items()}}
        if end == "close":
            fields["Connection"] = "close"
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._socket.sendall(f"GET {path} {version}\r\n{head}\r\n".encode())

    async def answer(self) -> tuple[dict[str, str], list[Any]]:
        """Return the headers and the values of an answer."""
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> tuple[dict[str, str], list[Any]]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, body = received.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")[1:]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(body) < int(headers["content-length"]):
            body += self._more()
        return headers, [record["value"] for record in json.loads(body)]

    def _more(self) -> bytes:
        received = self._socket.recv(1 << 16)
        if not received:
            raise ConnectionError("the broker ended the connection")
        return received

    async def until_it_has_bytes(self) -> None:
        """Wait until the answer is in the client's TCP, and do not read it."""
        while True:
            try:
                fd = socket.socket(fileno=socket.dup(self._socket.fileno()))
                with fd:
                    fd.setblocking(False)
                    if len(fd.recv(1, socket.MSG_PEEK)):
                        return
            except BlockingIOError:
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Close with a reset though everything is read, as some proxies do."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@pytest.fixture(params=["plain", "tls"])
async def port(
    broker: Broker, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Port]:
    async with _port(broker.app, tmp_path, is_tls=request.param == "tls") as port:
        yield port


@asynccontextmanager
async def _port(app: Any, folder: Path, *, is_tls: bool) -> AsyncIterator[Port]:
    if not is_tls:
        async with listening(app) as number:
            yield Port(number, None)
        return
    authority = Authority(folder)
    pair = authority.pair("broker")
    files = TlsFiles("tls", str(pair.cert), str(pair.key))
    tls = ServerCertificate(files, SystemClock())
    async with listening(app, tls=tls.server) as number:
        yield Port(number, ssl.create_default_context(cafile=str(authority.ca)))


async def read_on(port: Port, path: str, **headers: str) -> list[Any]:
    """Read as a client that has a new connection for each request; read no more after it."""
    client = await Client(port).connect()
    client.ask(f"{path}/records?timeout=0", **headers)
    _, values = await client.answer()
    client.close()
    return values


async def committed_after_reads(broker: Broker, instance: Instance, port: Port) -> dict[int, int]:
    assert await read_on(port, instance.path) == []
    await broker.consumers.commit_delivered()
    return await instance.committed()


@pytest.mark.parametrize("end", ENDS)
async def test_answer_after_the_clients_fin_is_returned_again(
    broker: Broker, topic: str, port: Port, end: str
) -> None:
    """The FIN came with the request: a broker that stood still sees both at once."""
    instance = await subscribed(broker)
    await put(broker, *VALUES)
    for _ in range(5):
        client = await Client(port).connect()
        client.ask(f"{instance.path}/records", end)
        client.close()
        await asyncio.sleep(0.02)
    await broker.consumers.commit(await broker.consumers.heartbeat("g", _name(instance)))
    assert (await instance.committed())[0] == -1
    assert await read_on(port, instance.path) == VALUES
    assert (await committed_after_reads(broker, instance, port))[0] == 3


@pytest.mark.parametrize("end", ENDS)
async def test_answer_that_the_client_did_not_read_is_returned_again(
    broker: Broker, topic: str, port: Port, end: str
) -> None:
    instance = await subscribed(broker)
    await put(broker, *VALUES)
    for _ in range(3):
        client = await Client(port).connect()
        client.ask(f"{instance.path}/records", end)
        await client.until_it_has_bytes()
        client.close()
    await instance.ok("POST", "/offsets", None)
    assert (await instance.committed())[0] == -1
    assert await read_on(port, instance.path) == VALUES
    assert (await committed_after_reads(broker, instance, port))[0] == 3


async def test_large_answer_cut_in_the_middle_is_returned_again(
    broker: Broker, topic: str, port: Port
) -> None:
    instance = await subscribed(broker)
    values = [str(number) * 300_000 for number in range(3)]
    for value in values:
        await put(broker, value)
    for _ in range(2):
        client = await Client(port).connect()
        client.ask(f"{instance.path}/records")
        await asyncio.to_thread(client._more)
        client.close()
    assert await read_on(port, instance.path) == values
    assert (await committed_after_reads(broker, instance, port))[0] == 3


@pytest.mark.parametrize("end", ENDS)
async def test_client_gone_during_a_long_poll_passes_over_nothing(
    broker: Broker, topic: str, port: Port, end: str
) -> None:
    instance = await subscribed(broker)
    client = await Client(port).connect()
    client.ask(f"{instance.path}/records?timeout=20000", end)
    await asyncio.sleep(0.1)
    client.close()
    await put(broker, *VALUES)
    assert await read_on(port, instance.path) == VALUES


@pytest.mark.parametrize("end", ENDS)
async def test_answer_that_was_read_is_not_returned_again(
    broker: Broker, topic: str, port: Port, end: str
) -> None:
    """A client with a new connection for each request: it reads each record once."""
    instance = await subscribed(broker)
    received = []
    for value in VALUES:
        await put(broker, value)
        client = await Client(port).connect()
        client.ask(f"{instance.path}/records", end)
        _, values = await client.answer()
        received += values
        client.close()
    assert received == VALUES
    assert (await committed_after_reads(broker, instance, port))[0] == 3


async def test_open_connection_that_took_the_answer_is_not_waited_for(
    broker: Broker, topic: str, port: Port
) -> None:
    """A pool of connections: the member reads on at another one while the first one is open."""
    instance = await subscribed(broker)
    clients = [await Client(port).connect() for _ in range(3)]
    received = []
    began_s = asyncio.get_running_loop().time()
    for client, value in zip(clients, VALUES, strict=True):
        await put(broker, value)
        client.ask(f"{instance.path}/records")
        received += (await client.answer())[1]
    assert received == VALUES
    assert await read_on(port, instance.path) == []
    assert asyncio.get_running_loop().time() - began_s < ACKNOWLEDGED_S
    for client in clients:
        client.close()


async def test_reset_after_the_next_request_of_the_connection_loses_nothing(
    broker: Broker, topic: str, port: Port
) -> None:
    instance = await subscribed(broker)
    await put(broker, *VALUES)
    client = await Client(port).connect()
    client.ask(f"{instance.path}/records")
    assert (await client.answer())[1] == VALUES
    client.ask(f"{instance.path}/records?timeout=0")
    assert (await client.answer())[1] == []
    client.reset()
    await asyncio.sleep(0.05)
    assert await read_on(port, instance.path) == []


async def test_answer_to_a_client_that_stands_still_is_returned_again(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Its computer is dead and sends no FIN: its TCP acknowledges nothing more."""
    instance = await subscribed(broker)
    value = "v" * 200_000
    await put(broker, value)
    async with _port(broker.app, tmp_path, is_tls=False) as port:
        client = await Client(port, receive_bytes=4096).connect()
        client.ask(f"{instance.path}/records")
        await client.until_it_has_bytes()
        began_s = asyncio.get_running_loop().time()
        assert await read_on(port, instance.path) == [value]
        assert asyncio.get_running_loop().time() - began_s < ACKNOWLEDGED_S + 2
        client.close()


async def test_member_that_names_its_last_read_decides_what_is_returned(
    broker: Broker, topic: str, port: Port
) -> None:
    """Behind a proxy, which takes the answer and drops it, TCP shows nothing to the broker."""
    instance = await subscribed(broker)
    await put(broker, *VALUES)
    answers = [await instance("GET", "/records", tidelog_read="0") for _ in range(3)]
    assert [[record["value"] for record in answer.json()] for answer in answers] == [VALUES] * 3
    last = answers[-1].headers["tidelog-read"]
    assert len({answer.headers["tidelog-read"] for answer in answers}) == 3
    assert await read_on(port, instance.path, tidelog_read=last) == []
    await broker.consumers.commit_delivered()
    assert (await instance.committed())[0] == 3


async def test_commit_of_an_offset_of_the_answer_proves_that_it_arrived(
    broker: Broker, topic: str, port: Port
) -> None:
    instance = await subscribed(broker, auto_commit_enable=False)
    await put(broker, *VALUES)
    client = await Client(port).connect()
    client.ask(f"{instance.path}/records")
    assert (await client.answer())[1] == VALUES
    offset = {"topic": "t", "partition": 0, "offset": 2}
    await instance.ok("POST", "/offsets", {"offsets": [offset]})
    client.reset()
    await asyncio.sleep(0.05)
    assert await read_on(port, instance.path) == []


async def test_departure_does_not_commit_a_lost_answer(
    broker: Broker, topic: str, port: Port
) -> None:
    instance = await subscribed(broker)
    await put(broker, *VALUES)
    client = await Client(port).connect()
    client.ask(f"{instance.path}/records")
    client.close()
    await until(lambda: not broker.consumers.requests._under_way)
    await instance.ok("DELETE")
    again = await created(broker)
    await again.ok("POST", "/subscription", {"topics": ["t"]})
    assert await read_on(port, again.path) == VALUES


def _name(instance: Instance) -> str:
    return instance.path.rsplit("/", 1)[1]
