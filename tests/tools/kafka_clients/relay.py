"""A relay between Kafka clients and a broker, which writes down what the clients ask for.

The broker advertises the relay's address, so each connection of each client goes through it. The
relay changes no byte. It reads the beginning of each request: the API and its version, and the
software of the connection from ApiVersions. For software without a name, it takes the client id.
"""

import asyncio
import contextlib
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

from tests.service.kafka.every_message import every_message
from tidelog.service.kafka.apis import API_VERSIONS
from tidelog.service.kafka.messages import handshake
from tidelog.service.kafka.messages.compiler import decoder
from tidelog.service.kafka.messages.header import decode_header

PIECE = 2**18
HEAD = 4096
"""More than the header of any request, and a whole ApiVersions."""
NAMED_SINCE = 3
"""ApiVersions has the name of the software from this version on."""
NAMES = {
    message.api_key: message.__name__.removesuffix("Request")
    for message in every_message()
    if message.__name__.endswith("Request")
}

Seen = dict[str, dict[str, set[int]]]
"""Versions by software and API."""


class _Connection:
    """The requests of one connection, as they pass."""

    def __init__(self, requests: Seen) -> None:
        self._seen = requests
        self._software = ""
        self._head = bytearray()
        self._left = 0

    def passed(self, piece: bytes) -> None:
        """Read the requests that begin in a piece."""
        position = 0
        while position < len(piece):
            if self._left:
                step = min(self._left, len(piece) - position)
                keep = max(0, min(step, HEAD - len(self._head)))
                self._head += piece[position : position + keep]
                self._left -= step
                position += step
                if not self._left:
                    self._request()
                    self._head.clear()
            else:
                step = min(4 - len(self._head), len(piece) - position)
                self._head += piece[position : position + step]
                position += step
                if len(self._head) == 4:
                    (self._left,) = struct.unpack(">i", self._head)
                    self._head.clear()

    def _request(self) -> None:
        header = decode_header(self._head)
        if header.api_key == API_VERSIONS and header.api_version in _OF_VERSIONS:
            request = _OF_VERSIONS[header.api_version](self._head, header.position)
            self._software = f"{request.client_software_name} {request.client_software_version}"
        software = self._software or header.client_id or "unnamed"
        name = NAMES.get(header.api_key, str(header.api_key))
        self._seen[software][name].add(header.api_version)


_OF_VERSIONS = {
    version: decoder(handshake.ApiVersionsRequest, version)
    for version in handshake.ApiVersionsRequest.versions
    if version >= NAMED_SINCE
}


class Relay:
    """Listens at `port`, and relays to `target`, both on 127.0.0.1."""

    def __init__(self, port: int, target: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.seen: Seen = defaultdict(lambda: defaultdict(set))
        self._port = port
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator["Relay"]:
        """Run in a thread."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self._port))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._close(server), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                broker, requests = await asyncio.open_connection("127.0.0.1", self._target)
                with contextlib.closing(requests):
                    connection = _Connection(self.seen)
                    await asyncio.gather(
                        _copy(client, requests, connection), _copy(broker, answers, None)
                    )
        finally:
            answers.close()
            self._tasks.discard(task)


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, connection: _Connection | None
) -> None:
    """Copy all bytes; at their end, end the other way, too."""
    try:
        while piece := await source.read(PIECE):
            if connection is not None:
                connection.passed(piece)
            target.write(piece)
            await target.drain()
    finally:
        target.close()
