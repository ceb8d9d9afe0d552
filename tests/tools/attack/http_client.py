"""A client that sends many requests of an attack over HTTP, and connections of many addresses."""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from tests.support.broker import Broker

TIMEOUT_S = 120.0
JSON = {"content-type": "application/json"}
V2 = {"content-type": "application/vnd.kafka.v2+json"}
ADDRESSES = 4
"""A broker bounds the connections of each address."""


def opened(
    broker: Broker, count: int, stack: ExitStack, port: int | None = None
) -> Iterator[socket.socket]:
    """Open connections one after the other, from ADDRESSES addresses.

    They go to the port of HTTP or to another one. The stack closes them.
    """
    place = broker.address, broker.port if port is None else port
    for number in range(count):
        source = f"127.0.0.{number % ADDRESSES + 1}", 0
        yield stack.enter_context(socket.create_connection(place, TIMEOUT_S, source_address=source))


def sent(broker: Broker, requests: Iterable[tuple[str, str, Any]], at_once: int = 1) -> str:
    """Send requests (method, path, keywords of httpx), `at_once` at a time.

    Return the number of answers by status.
    """

    def one(request: tuple[str, str, Any]) -> str:
        method, path, options = request
        try:
            return str(client.request(method, path, **options).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    with (
        httpx.Client(base_url=broker.base_url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        counts = Counter(pool.map(one, requests))
    return counted(counts)


def counted(statuses: Counter[str]) -> str:
    """Return the number of answers by status, as a text."""
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
