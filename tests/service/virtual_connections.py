"""One connection to a broker in virtual time: the server's protocol on a transport that is a list.

A test feeds it the bytes of a client, and sees its answer and whether it has closed. Ten
minutes of silence cost nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tests.service.conftest import Broker, broker_on
from tidelog.service.http.uvicorn_protocol import Config
from tidelog.service.peers.listener import PeerApp, PeerListener
from tidelog.storage.store.memory import MemoryStore

SILENCE_S = 600.0
"""Longer than any client is silent in the middle of a request."""


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.is_ended = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """The connection drops what comes from here on: nothing is to be kept."""

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        """A list can always be read."""

    def resume_reading(self) -> None:
        """A list can always be read."""


class Connection:
    def __init__(
        self,
        config: uvicorn.Config,
        server: ServerState | None = None,
        transport: Transport | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.transport = transport or Transport()
        kind: Any = config.http_protocol_class
        self.protocol = kind(config=config, server_state=server or ServerState(), app_state={})
        self.protocol.connection_made(self.transport)

    async def send(self, data: bytes, piece: int = 256 * 1024) -> None:
        """As the loop hands over what a socket has: in pieces, until the server closes."""
        for start in range(0, len(data), piece):
            if self.transport.is_closed:
                return
            self.protocol.data_received(data[start : start + piece])
            await asyncio.sleep(0)

    async def status(self) -> int:
        """Of the answer; 0 when there is none."""
        await asyncio.sleep(1.0)
        return int(self.transport.written[9:12] or b"0")

    @property
    def is_closed(self) -> bool:
        """The client sees that no answer comes any more."""
        return self.transport.is_ended or self.transport.is_closed

    def stop_reading(self) -> None:
        """The client takes no more: the buffers on the way to it are full."""
        self.protocol.pause_writing()

    def read_on(self) -> None:
        self.protocol.resume_writing()

    def end(self) -> None:
        """The client goes away."""
        self.protocol.connection_lost(None)


def client_port(broker: Broker) -> uvicorn.Config:
    """As a broker configures it."""
    app = broker.app
    return Config(app, app.admission, proves_by_head=app.proves_by_head)


def peer_port(broker: Broker) -> uvicorn.Config:
    return PeerListener(PeerApp(broker.log), "127.0.0.1", 0)._server.config


PORTS = {"clients": client_port, "peers": peer_port}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Broker]:
    """A broker on a store in memory, in the virtual time of the loop."""
    async with broker_on(MemoryStore(), **settings) as broker:
        await broker.log.topics.create("t", 1, {})
        yield broker
