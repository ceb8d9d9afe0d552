"""The client of a request, and what a handler may return instead of a response."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from tidelog.service.security.caller import CallerRights


class ApiClient(NamedTuple):
    """The sender of a request. Handlers get it with each request."""

    version: int
    """The version of the request's API, for handlers whose answer depends on it."""
    client_id: str
    """The first 255 characters of the name that the client gives itself; "" if it
    gives none."""
    host: str
    """The client's address."""
    software: str
    """Name and version of the client's library, for example "librdkafka 2.16.0"; "" if unknown."""
    rights: CallerRights


REQUEST: ContextVar[tuple[str, int, ApiClient] | None] = ContextVar("kafka-request", default=None)
"""The API, the correlation id and the client of the current request, for its log lines."""


def fields_of(api: str, correlation_id: int, client: ApiClient) -> dict[str, str | int]:
    """Return the fields of a log line about a request."""
    return {
        "api": api,
        "correlation_id": correlation_id,
        "client_id": client.client_id,
        "host": client.host,
    }


class Later:
    """An answer that is not known yet.

    The connection sets `on_answer`, and the handler calls it once with the response. A Later costs
    less than a future: a future needs one more turn of the event loop.

    While `begun` is not done, the next request of its connection does not begin, so that batches
    keep their order.
    """

    __slots__ = ("begun", "on_answer")

    def __init__(self) -> None:
        self.on_answer: Callable[[Any], None] | None = None
        self.begun: asyncio.Future[None] | None = None


class EncodedAnswer(NamedTuple):
    """An answer in bytes. `release` is called when the socket has taken all its bytes."""

    pieces: list[bytes | memoryview]
    release: Callable[[], object] | None = None
    throttle_s: float = 0.0


class CloseConnection(Exception):
    """The failure of a request that gets no answer (acks=0).

    The end of the connection shows the failure to the client.
    """
