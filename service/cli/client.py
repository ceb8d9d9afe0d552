"""HTTP client of the commands: it repeats requests, and gives each failure an exit status.

A request is repeated for up to `retry_s` if the broker cannot be reached or answers 429, 502, 503
or 504. The pause between two attempts starts at 0.1 s and doubles up to 5 s. Each pause is
multiplied by a random number from 0.5 to 1, and is at least `Retry-After`. A caller sets
`retry_s` > 0 only for requests that are safe to repeat: reads, and produce requests with an
Idempotency-Key.
"""

import asyncio
import contextlib
import errno
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import typer

from tidelog.service.cli.results import (
    BadUsage,
    CommandError,
    GlobalOptions,
    NotReachable,
    NotThere,
)
from tidelog.service.secret_files import why_not_read
from tidelog.service.setting_fields import BadSettings
from tidelog.service.settings import client_ca_file, client_key, console_server
from tidelog.storage.io.clock import SystemClock

Result = TypeVar("Result")

RETRIED = frozenset({429, 502, 503, 504})
UNREACHABLE = frozenset({502, 503, 504})
NO_ROUTE = "HTTP 404 Not Found"
"""A broker's message if none of its routes has the path of the request."""
SECURITY_IS_OFF = "SecurityDisabledException:"
"""The beginning of a broker's message if its security is off. This is Kafka's text, which other
clients know."""
SERVER_CONNECT_S = 5.0
RESPONSE_S = 60.0
"""Timeout of a response: twice the default `produce_timeout_ms` of a broker."""
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0


class Refused(CommandError):
    """The broker rejected the request."""

    def __init__(self, message: str, http_status: int) -> None:
        super().__init__(message)
        self.http_status = http_status


class Client:
    """A connection to one broker. Belongs to one event loop; `async with` closes it."""

    def __init__(
        self,
        server: str,
        *,
        key: str | None = None,
        retry_s: float = 0.0,
        ca_file: str | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self.retry_s = retry_s
        self.retries = 0
        parts = urlsplit(self.server)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise BadUsage(f"server {self.server!r} does not have the form http://HOST:PORT")
        self._random = random.Random(SystemClock().new_id())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._http = httpx.AsyncClient(
                base_url=self.server,
                limits=limits,
                headers=headers,
                verify=_trust(ca_file, parts.scheme),
            )
        except httpx.InvalidURL as error:
            raise BadUsage(f"server {self.server!r}: {error}") from None

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
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
        answer_s: float | None = RESPONSE_S,
    ) -> httpx.Response:
        """Send a request; return the successful response. Raises a CommandError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.retry_s
        pause_s = PAUSE_FIRST_S
        while True:
            retry_after_s = 0.0
            try:
                answer = await self._http.request(
                    method,
                    path,
                    params=params,
                    headers=headers,
                    json=json,
                    content=content,
                    timeout=httpx.Timeout(answer_s, connect=SERVER_CONNECT_S),
                )
            except httpx.RequestError as error:
                failure: CommandError = _not_reached(self.server, error)
            else:
                if answer.is_success:
                    return answer
                failure = _refused(answer)
                if answer.status_code not in RETRIED:
                    raise failure
                retry_after_s = _retry_after_s(answer)
            # Random, so that the clients of a broker retry at different times after its restart.
            wait_s = max(retry_after_s, pause_s * self._random.uniform(0.5, 1.0))
            if loop.time() + wait_s > deadline:
                raise failure
            self.retries += 1
            await asyncio.sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def get_json(self, path: str, **request: Any) -> Any:
        """Return the JSON of a successful response. If the response is the first page of a list,
        add the items of the other pages. Raises CommandError, also if the response is not JSON."""
        found = self.json_of(await self.get(path, **request))
        await self.add_pages(found, path, request.get("params"))
        return found

    async def add_pages(self, found: Any, path: str, params: Mapping[str, str] | None) -> None:
        """If `found` is a page of a list, fetch all next pages and add their items to `found`."""
        page = found
        while isinstance(page, dict) and (url := (page.get("metadata") or {}).get("next")):
            # Use only the token of the URL, because this client may not reach the URL's host.
            token = httpx.URL(url).params["page_token"]
            answer = await self.get(path, params={**(params or {}), "page_token": token})
            page = self.json_of(answer)
            found["data"] += page["data"]

    def json_of(self, answer: httpx.Response) -> Any:
        """Return the JSON of a response. Raises CommandError if it is not JSON."""
        try:
            return answer.json()
        except ValueError:
            raise self.is_no_broker() from None

    async def cluster(self) -> str:
        """Return the path of the cluster in the v3 API."""
        clusters = await self.get_json("/v3/clusters")
        return f"/v3/clusters/{quote(clusters['data'][0]['cluster_id'], safe='')}"

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic."""
        return len(await self.get_json(f"/topics/{quote(topic, safe='')}/partitions"))

    def is_no_broker(self) -> CommandError:
        """Return the error for a response that is not a broker's."""
        return CommandError(f"{self.server} is not a tidelog broker: unexpected response")


def client_of(ctx: typer.Context, server: str | None, *, retry_s: float = 0.0) -> Client:
    """Return a client for `--server` with the key of `--key-file` and the CAs of `--ca-file`.
    Raises BadUsage."""
    options: GlobalOptions = ctx.obj
    try:
        key = client_key(options.key_file)
    except BadSettings as error:
        raise BadUsage(str(error)) from None
    ca_file = options.ca_file or client_ca_file()
    return Client(server or console_server(), key=key, retry_s=retry_s, ca_file=ca_file)


def with_client(
    ctx: typer.Context, server: str | None, work: Callable[[Client], Awaitable[Result]]
) -> Result:
    """Run a command's work with a client that is closed at the end."""

    async def session() -> Result:
        async with client_of(ctx, server) as client:
            return await work(client)

    return asyncio.run(session())


def _trust(ca_file: str | None, scheme: str) -> ssl.SSLContext | bool:
    """Return the value for `verify` of httpx. Raises BadUsage."""
    if ca_file is None and scheme == "http":
        # A context without CAs: http:// uses none, and well-known CAs take time to load.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise BadUsage(
            f"--ca-file {ca_file}: not a PEM file of certificates ({error.reason})"
        ) from None
    except OSError as error:
        raise BadUsage(f"--ca-file: cannot read {ca_file}: {why_not_read(error)}") from None


def _not_reached(server: str, error: httpx.RequestError) -> NotReachable:
    """Return the error for a request without a response."""
    return NotReachable(f"cannot reach {server}: {_why(error)}")


def _refused(answer: httpx.Response) -> CommandError:
    """Return the error for a response that is not a success."""
    status = answer.status_code
    said = ""
    with contextlib.suppress(ValueError, LookupError, TypeError):  # a proxy may send no JSON
        said = answer.json()["message"]
    if status == httpx.codes.NOT_FOUND and said in {"", NO_ROUTE}:
        return NotReachable(f"{answer.request.url}: HTTP 404: is this the URL of a broker?")
    message = said or f"{answer.request.url}: HTTP {status} {answer.reason_phrase}".rstrip()
    if message.startswith(SECURITY_IS_OFF):
        message = "security is off on this broker: start it with --security keys"
    if status == httpx.codes.UNAUTHORIZED:
        message += " (set TIDELOG_KEY or --key-file)"
    if status == httpx.codes.NOT_FOUND:
        return NotThere(message)
    return NotReachable(message) if status in UNREACHABLE else Refused(message, status)


def _why(error: httpx.RequestError) -> str:
    """Return the reason in plain words, because httpx's text names its own layers or is empty."""
    causes = list(_causes(error))
    for cause in causes:
        match cause:
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return "the server does not speak TLS: use http://"
            case ssl.SSLCertVerificationError(verify_message=message):
                return (
                    f"the broker's certificate is not accepted ({message}): name its CA with "
                    "--ca-file or TIDELOG_CA_FILE"
                )
            case ConnectionRefusedError():
                return (
                    "connection refused; start a broker (tidelog serve), or name one with "
                    "--server or TIDELOG_URL"
                )
            case socket.gaierror():
                return f"the name of the host gives no address ({cause.strerror})"
            case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
                return "no route to this host"
            case _:
                pass
    match error:
        case httpx.ConnectTimeout():
            return "no connection in time"
        case httpx.TimeoutException():
            return "no response in time"
        case _:
            return str(error) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes. anyio groups the errors of several addresses."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
