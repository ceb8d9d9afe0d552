"""A transport from the client to an application in this process, with faults as chosen."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx

OK, REFUSED, LOST, BUSY, THROTTLED, UNKNOWN = (
    *("ok", "refused", "lost", "busy", "throttled", "unknown"),
)
HELD, PAGE, GONE, INVALID, FAILED, PROXY_BUSY = (
    *("held", "page", "gone", "invalid", "failed", "proxy busy"),
)
"""HELD: served, but the response stays on the way, up to the timeout. REFUSED: no connection. LOST:
served, but the response does not arrive. BUSY: 503. THROTTLED: 429. UNKNOWN: served, and answered
504. PAGE: served, but a proxy answers 200 with a page of its own. GONE, INVALID:
404, 422 of a broker. FAILED: served, and answered 500. PROXY_BUSY: served, and a proxy answers
503."""
ANSWERS = {BUSY: 503, THROTTLED: 429, GONE: 404, INVALID: 422}
PAGES = {PAGE: 200, FAILED: 500, PROXY_BUSY: 503}

Choice = Callable[[httpx.Request], str]


class FaultyTransport(httpx.AsyncBaseTransport):
    """Serves by `app`; `choose` names the fault of each request. `seen` has all requests."""

    def __init__(self, app: Any, choose: Choice = lambda _: OK) -> None:
        self._inner = httpx.ASGITransport(app=app)
        self.choose = choose
        self.seen: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        fault = self.choose(request)
        if fault == REFUSED:
            raise httpx.ConnectError("refused", request=request) from ConnectionRefusedError()
        if fault in ANSWERS:
            headers = {"retry-after": "0"}
            body = {"error_code": 1, "message": "not now"}
            return httpx.Response(ANSWERS[fault], json=body, headers=headers, request=request)
        answer = await self._inner.handle_async_request(request)
        if fault == HELD:
            await answer.aread()
            await asyncio.sleep(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("", request=request)
        if fault == LOST:
            await answer.aread()
            raise httpx.ReadError("reset", request=request)
        if fault in PAGES:
            await answer.aread()
            return httpx.Response(PAGES[fault], html="<p>Welcome</p>", request=request)
        if fault == UNKNOWN:
            await answer.aread()
            return httpx.Response(504, json={"error_code": 50003, "message": "?"}, request=request)
        return answer

    def bodies(self, path: str) -> list[tuple[str | None, bytes]]:
        """Idempotency-Key and body of the requests whose path ends so."""
        return [
            (request.headers.get("idempotency-key"), request.content)
            for request in self.seen
            if request.url.path.endswith(path)
        ]


def script(*faults: str, of: str = "", method: str = "") -> Choice:
    """The first requests whose path contains `of` get these faults, all others none."""
    left: Iterator[str] = iter(faults)

    def choose(request: httpx.Request) -> str:
        is_meant = of in request.url.path and method in ("", request.method)
        return next(left, OK) if is_meant else OK

    return choose


def at_random(seed: int, share: float, *faults: str) -> Choice:
    """A share of all requests gets one of these faults."""
    rng = random.Random(seed)

    def choose(_: httpx.Request) -> str:
        return rng.choice(faults) if rng.random() < share else OK

    return choose
