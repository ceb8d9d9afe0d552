"""The parts of a listener that its connections share, and the class of unanswered requests."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from tidelog.service.http.admission import Admission
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import Client, Encoded
from tidelog.service.kafka.connections.frame import RequestMemory
from tidelog.service.kafka.context import Context
from tidelog.service.security.authenticator import Security

LOGGED_MAX = 1000
"""Bound of the set `logged` of bad requests, by client and reason."""


class Transport(Protocol):
    """The transport of a connection, with or without TLS."""

    def writelines(self, pieces: list[bytes | memoryview]) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...


class Server(NamedTuple):
    """The parts that all connections of a listener share."""

    loop: asyncio.AbstractEventLoop
    context: Context
    apis: Mapping[int, Api]
    admission: "Admission[Any]"
    memory: RequestMemory
    security: Security | None
    logged: set[tuple[str, str]]

    def is_logged(self, key: tuple[str, str]) -> bool:
        """Whether to log this bad request: the first of a client with this reason, within the rate
        of log lines."""
        if key in self.logged:
            return False
        if len(self.logged) >= LOGGED_MAX:
            self.logged.clear()
        self.logged.add(key)
        return self.admission.line(self.loop.time()) is not None


class Pending:
    """A request that is not answered."""

    __slots__ = ("answer", "api", "client", "correlation_id", "frame", "started_s", "task")

    def __init__(
        self, api: Api, client: Client, correlation_id: int, frame: bytes | bytearray
    ) -> None:
        self.api = api
        self.client = client
        self.correlation_id = correlation_id
        self.frame = frame
        self.answer: Encoded | None = None
        self.task: asyncio.Task[Any] | None = None
        self.started_s = time.perf_counter()
