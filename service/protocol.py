"""uvicorn's HTTP protocol, with the head and the body of an answer in one packet.

ASGI sends them apart and uvloop writes at once: two system calls and two packets for each answer,
~8 us of CPU. A head waits for what comes next, or for the loop's next turn: a stream that has only
begun is seen to have begun.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = b"HTTP/1.1 "
JOINED_BYTES_MAX = 64 * 1024
"""A larger body is not copied for it."""


class HeadWithBody:
    """A transport as uvicorn uses it. Order is kept; nothing but a head ever waits."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head and len(data) <= JOINED_BYTES_MAX:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        elif self._head:
            self._flush()
            self._transport.write(data)
        elif data.startswith(HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            data, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Protocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = HeadWithBody(transport, self.loop)  # type: ignore[assignment]
