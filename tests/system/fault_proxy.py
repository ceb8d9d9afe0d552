"""A way to an S3 server on which requests are slow, refused, or done and not answered.

Failures that are no answers, as proxies, balancers and servers produce them: a 503 before the
store gets the request, a 500, a reset or half an answer after the store has served it.
"""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

HOP_BY_HOP = ("Connection", "Keep-Alive", "Transfer-Encoding", "Expect")


class Faults(NamedTuple):
    """Shares of requests, drawn one after the other."""

    slowed: float = 0.0
    """Up to `slow_s` before the store gets them, or after it has served them."""
    refused: float = 0.0
    """503, and the store never gets them."""
    denied: float = 0.0
    """Done, and answered with 500 or 503."""
    unanswered: float = 0.0
    """Done, and the connection is reset."""
    halved: float = 0.0
    """Done, and the connection is reset in the middle of the answer's body."""
    slow_s: float = 0.3


NONE = Faults()


class FaultProxy:
    """HTTP from a port of ours to `url`, in a thread. `faults` may be changed at any time."""

    def __init__(self, url: str, seed: int, address: str = "127.0.0.1") -> None:
        self._upstream = url
        self._address = address
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._lets_through = asyncio.Event()
        self._lets_through.set()
        self.faults = NONE
        self.counts: Counter[str] = Counter()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults = NONE
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def having(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        try:
            yield
        finally:
            self.faults = NONE

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Requests and answers wait until the end of it."""
        self._loop.call_soon_threadsafe(self._lets_through.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._lets_through.set)

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)  # type: ignore[arg-type]
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        await self._lets_through.wait()
        faults = self.faults
        self.counts["requests"] += 1
        if self._hits("slowed", faults.slowed):
            await asyncio.sleep(faults.slow_s * self._random.random())
        if self._hits("refused", faults.refused):
            return web.Response(status=503, headers={"Connection": "close"})
        headers = _without_hops(request.headers)
        target = URL(self._upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, target, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            payload = await answer.read()
        if self._hits("slowed", faults.slowed):
            await asyncio.sleep(faults.slow_s * self._random.random())
        await self._lets_through.wait()
        if self._hits("denied", faults.denied):
            return web.Response(status=self._random.choice((500, 503)))
        if self._hits("unanswered", faults.unanswered):
            return _reset(request)
        response = web.StreamResponse(status=answer.status, headers=_without_hops(answer.headers))
        with contextlib.suppress(ConnectionError):  # the client is gone
            await response.prepare(request)
            if payload and self._hits("halved", faults.halved):
                await response.write(payload[: len(payload) // 2])
                return _reset(request, response)
            if request.method != "HEAD":
                await response.write(payload)
            await response.write_eof()
        return response

    def _hits(self, name: str, share: float) -> bool:
        is_hit = share > 0 and self._random.random() < share
        self.counts[name] += is_hit
        return is_hit


def _without_hops(headers: object) -> CIMultiDict[str]:
    end_to_end_headers: CIMultiDict[str] = CIMultiDict(headers)  # type: ignore[arg-type]
    for name in HOP_BY_HOP:
        end_to_end_headers.popall(name, None)
    return end_to_end_headers


def _reset(request: web.BaseRequest, begun: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return begun or web.Response()
