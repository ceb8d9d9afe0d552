"""A client that sends many requests of an attack over HTTP."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.broker import Broker

TIMEOUT_S = 120.0


def sent(broker: Broker, requests: Iterable[tuple[str, str, Any]], at_once: int = 1) -> str:
    """Send requests (method, path, keywords of httpx), `at_once` at a time. Return the number of
    answers by status."""

    def one(request: tuple[str, str, Any]) -> str:
        method, path, more = request
        try:
            return str(client.request(method, path, **more).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    with (
        httpx.Client(base_url=broker.base_url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        counts = Counter(pool.map(one, requests))
    return ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
