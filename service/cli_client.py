"""A broker over HTTP as commands need it: retries of what may be retried, errors by exit status.

A request is repeated when the broker cannot be reached, says 429, 502, 503 or 504, for as long as
`retry_s` allows, waiting what `Retry-After` asks for and else longer every time. All requests that
are sent with `retry_s` > 0 may be repeated: reads, and produces that carry an Idempotency-Key.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from service.cli_results import BadUsage, CommandError, NotReachable, NotThere
from service.settings import BadSettings, client_key, console_server
from storage.clock import SystemClock

T = TypeVar("T")

RETRIED = frozenset({429, 502, 503, 504})
UNREACHABLE = frozenset({502, 503, 504})
CONNECT_S = 5.0
ANSWER_S = 60.0
"""Twice what a broker takes at most to say that it does not know."""
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0


class Refused(CommandError):
    """The broker said no."""

    def __init__(self, message: str, http_status: int) -> None:
        super().__init__(message)
        self.http_status = http_status


class Client:
    """One broker, for one event loop, until `async with` ends."""

    def __init__(self, server: str | None = None, *, retry_s: float = 0.0) -> None:
        self.server = (server or console_server()).rstrip("/")
        self.retry_s = retry_s
        self.retries = 0
        parts = urlsplit(self.server)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise BadUsage(f"server {self.server!r} is not http://host:port")
        self._random = random.Random(SystemClock().new_id())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        try:
            key = client_key()
        except BadSettings as error:
            raise BadUsage(str(error)) from None
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._http = httpx.AsyncClient(base_url=self.server, limits=limits, headers=headers)
        except httpx.InvalidURL as error:
            raise BadUsage(f"server {self.server!r}: {error}") from None

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, **request: Any) -> httpx.Response:
        return await self.call("GET", path, **request)

    async def post(self, path: str, **request: Any) -> httpx.Response:
        return await self.call("POST", path, **request)

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        json: object = None,
        content: bytes | None = None,
        answer_s: float | None = ANSWER_S,
    ) -> httpx.Response:
        """A successful answer. Raises NotThere, NotReachable or CommandError with one line."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.retry_s
        pause_s = PAUSE_FIRST_S
        while True:
            asked_s = 0.0
            try:
                answer = await self._http.request(
                    method,
                    path,
                    params=params,
                    headers=headers,
                    json=json,
                    content=content,
                    timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
                )
            except httpx.RequestError as error:
                why = str(error) or type(error).__name__
                failure: CommandError = NotReachable(f"cannot reach {self.server}: {why}")
            else:
                if answer.is_success:
                    return answer
                failure = _failure(answer)
                if answer.status_code not in RETRIED:
                    raise failure
                asked_s = _retry_after_s(answer)
            # Many clients of one broker that restarts must not come back at the same moment.
            wait_s = max(asked_s, pause_s * self._random.uniform(0.5, 1.0))
            if loop.time() + wait_s > deadline:
                raise failure
            self.retries += 1
            await asyncio.sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def get_json(self, path: str, **request: Any) -> Any:
        """A successful answer's JSON. Raises CommandError where it is none, too."""
        answer = await self.get(path, **request)
        try:
            return answer.json()
        except ValueError:
            raise self.is_no_broker() from None

    async def cluster(self) -> str:
        """Path of the cluster in the v3 dialect."""
        clusters = await self.get_json("/v3/clusters")
        return f"/v3/clusters/{quoted(clusters['data'][0]['cluster_id'])}"

    async def partitions(self, topic: str) -> int:
        """How many partitions the topic has."""
        return len(await self.get_json(f"/topics/{quoted(topic)}/partitions"))

    def is_no_broker(self) -> CommandError:
        """The error for an answer that no broker gives."""
        return CommandError(f"{self.server} does not answer as a broker does")


def quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def with_client(server: str | None, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run a command's work on a connection of its own."""

    async def session() -> T:
        async with Client(server) as client:
            return await work(client)

    return asyncio.run(session())


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Their results; the first failure ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _failure(answer: httpx.Response) -> CommandError:
    status = answer.status_code
    message = f"{answer.request.url}: HTTP {status} {answer.reason_phrase}".rstrip()
    with contextlib.suppress(ValueError, LookupError, TypeError):  # a proxy's answer, perhaps
        message = answer.json()["message"]
    if status == httpx.codes.UNAUTHORIZED:
        message += " (TIDELOG_KEY or --key-file has the key to show)"
    if status == httpx.codes.NOT_FOUND:
        return NotThere(message)
    return NotReachable(message) if status in UNREACHABLE else Refused(message, status)


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
