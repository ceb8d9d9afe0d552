"""The way to other brokers: HTTP/1.1 on connections that are kept, one request at a time on each.

A client of its own because it is on the ack path of every broker but one, and on the sequencer a
thousand times a second: a general one takes 0.6 ms of CPU for what takes 0.1 here.
"""

import asyncio
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from storage.handover import NoAnswer, NotTaken
from storage.members import PROTOCOL, Member
from storage.objectstore import Part

HAND_OVER = f"/peers/v{PROTOCOL}/drafts"
TOLD = f"/peers/v{PROTOCOL}/entries"
GROUP_REQUEST = f"/peers/v{PROTOCOL}/group-requests"
GROUP_CONFIRM = f"/peers/v{PROTOCOL}/group-confirmations"
METRICS = f"/peers/v{PROTOCOL}/metrics"
VITALS = f"/peers/v{PROTOCOL}/vitals"

OK = 200
UNKNOWN_OUTCOMES = (500, 504)
CONNECT_S = 0.5
IDLE_MAX = 4
"""Connections to one peer that are kept: one hands over, one tells."""
ANSWER_BYTES_MAX = 80 * 1024 * 1024
"""The largest fetch, which a consumer instance may have asked for, and its head."""


class _Answer(NamedTuple):
    status: int
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection, among `opened` while it is open. Whoever waits for an answer is told when it
    breaks."""

    def __init__(self, opened: "set[_Connection]") -> None:
        self.is_open = False
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[_Answer] | None = None

    async def request(self, *parts: Part) -> _Answer:
        """Raises ConnectionError when there is no whole answer. Whoever is cancelled closes it."""
        assert self._transport is not None, "not connected yet"
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        try:
            self._transport.writelines(parts)
            return await self._answer
        except BaseException:  # cancelled, maybe with the answer there: nobody keeps it then
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class
        self.is_open = True
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"no answer in HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._opened.discard(self)
        self._break(str(exc or "the connection was closed"))

    # -- httptools

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > ANSWER_BYTES_MAX:
            self._break("the answer is too long")

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._answer is not None and not self._answer.done():
            status = self._parser.get_status_code()
            self._answer.set_result(_Answer(status, bytes(self._body)))

    def _break(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))


class HttpPeers:
    """The transport of a broker to all others. Owned by one event loop; the caller has the patience
    (storage.sequencer, storage.wakeups)."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}
        self._opened: set[_Connection] = set()

    async def hand_over(self, peer: Member, message: bytes) -> bytes:
        return await self.post(peer, HAND_OVER, message)

    async def tell(self, peer: Member, message: bytes) -> None:
        _ = await self.post(peer, TOLD, message)

    async def close(self) -> None:
        """Also those that somebody waits at; who asks later opens another."""
        for connection in list(self._opened):
            connection.close()
        self._idle.clear()

    async def post(self, peer: Member, path: str, message: bytes) -> bytes:
        """The answer's body. Raises NotTaken where the peer has certainly not done it, NoAnswer
        where nobody knows."""
        connection = await self._connection(peer)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {urlsplit(peer.address).netloc}\r\n"
            f"authorization: Bearer {peer.token}\r\ncontent-length: {len(message)}\r\n\r\n"
        )
        try:
            answer = await connection.request(head.encode(), message)
        except ConnectionError as error:
            raise NoAnswer(f"{peer.address}: {error}") from error
        self._keep(peer, connection)
        if answer.status == OK:
            return answer.body
        why = (
            f"{peer.address} answers {answer.status}: {answer.body[:200].decode(errors='replace')}"
        )
        raise NoAnswer(why) if answer.status in UNKNOWN_OUTCOMES else NotTaken(why)

    async def _connection(self, peer: Member) -> _Connection:
        """Raises NotTaken: nothing was sent."""
        idle = self._idle.get(peer.address, [])
        while idle:
            if (kept := idle.pop()).is_open:
                return kept
        for address in [at for at, kept in self._idle.items() if not any(c.is_open for c in kept)]:
            del self._idle[address]  # of brokers that have gone
        try:
            url = urlsplit(peer.address)
            port = url.port or (443 if url.scheme == "https" else 80)
            async with asyncio.timeout(CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._opened),
                    url.hostname or "",
                    port,
                    ssl=url.scheme == "https" or None,
                )
        except (OSError, TimeoutError, ValueError) as error:
            raise NotTaken(f"{peer.address} cannot be reached: {error}") from error
        return made

    def _keep(self, peer: Member, connection: _Connection) -> None:
        idle = self._idle.setdefault(peer.address, [])
        if connection.is_open and len(idle) < IDLE_MAX:
            idle.append(connection)
        else:
            connection.close()
