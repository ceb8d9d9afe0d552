"""Requests to the brokers of one cluster: retries, failover, deadlines.

A request is repeated for up to `retry_s` if a broker cannot be reached or answers 429, 502, 503 or
504. After such a failure the next broker gets it at once, except after 429. If all known brokers
have failed, the client waits: at least `Retry-After`, and a pause that starts at 0.1 s and doubles
up to 5 s, multiplied by a random number from 0.5 to 1. A caller sets `retry_s` > 0 only for
requests that are safe to repeat: reads, and changes with an Idempotency-Key or a fixed target. With
`retry_s` 0, only a request that no broker got goes to the next broker.

A broker may accept a request and never answer, for example while its machine is suspended. So if
there are other brokers, one response gets half of the time that is left.

A client learns the other brokers from the broker that answers: for each, the address that brokers
use, and the port for clients. A learned broker gets requests only after a failure. So if this
client cannot reach the address, one attempt fails.
"""

import asyncio
import contextlib
import errno
import math
import os
import random
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import httpx

from tidelog.service.client.errors import (
    BadArgument,
    ClientError,
    NotABroker,
    NotFound,
    NotReachable,
    Refused,
)
from tidelog.service.client.servers import Servers

UNREACHABLE = frozenset({502, 503, 504})
THROTTLED = 429
RETRIED = UNREACHABLE | {THROTTLED}
NO_ROUTE = "HTTP 404 Not Found"
"""A broker's message if none of its routes has the path of the request."""
CONNECT_S = 5.0
RESPONSE_S = 60.0
"""Timeout of a response: twice the default `produce_timeout_ms` of a broker."""
RESPONSE_S_MIN = 5.0
"""Timeout of a response if little time is left."""
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
LEARN_S = 60.0
LEARN_AGAIN_S = 1.0
"""Times after which a client asks again for the brokers of the cluster: LEARN_S after a success,
LEARN_AGAIN_S after a failure."""

WITHOUT_PROXY: dict[str, httpx.AsyncBaseTransport | None] = {
    "all://127.0.0.1": None,
    "all://[::1]": None,
    "all://localhost": None,
}
"""A proxy in the environment (http_proxy) does not reach a broker on this machine."""


class _Failure(NamedTuple):
    """A request without a successful response. `was_sent`: a broker may have got it."""

    failure: ClientError
    was_sent: bool
    is_repeatable: bool = True
    is_throttled: bool = False
    retry_after_s: float = 0.0


class Connected:
    """Base of producer, consumer and admin, with the Connection of its caller or its own.

    `_disconnect` closes its own.
    """

    def __init__(self, servers: "str | Connection", **options: Any) -> None:
        self._owns = not isinstance(servers, Connection)
        self.connection = (
            servers if isinstance(servers, Connection) else Connection(servers, **options)
        )

    async def _disconnect(self) -> None:
        if self._owns:
            await self.connection.close()


class Connection:
    """Connections to the brokers of one cluster. Belongs to one event loop; `async with` closes it.

    `retries` counts the repeated requests.
    """

    def __init__(
        self,
        servers: str,
        *,
        key: str | None = None,
        ca_file: str | None = None,
        retry_s: float = 0.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.servers = Servers(servers)
        self.retry_s = retry_s
        self.retries = 0
        self._random = random.Random(os.urandom(16))
        self._learning: asyncio.Task[None] | None = None
        self._learned_s = -LEARN_S
        self._cluster = ""
        is_tls = any(url.startswith("https:") for url in self.servers.named)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._http = httpx.AsyncClient(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                headers=headers,
                verify=_trust(ca_file, is_tls=is_tls),
                transport=transport,
                mounts=WITHOUT_PROXY if transport is None else None,
            )
        except (ImportError, ValueError) as error:
            raise BadArgument(f"the proxy in the environment cannot be used: {error}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        await self._http.aclose()

    # -- requests

    async def get(self, path: str, **request: Any) -> httpx.Response:
        return await self.call("GET", path, **request)

    async def post(self, path: str, **request: Any) -> httpx.Response:
        return await self.call("POST", path, **request)

    async def call(
        self,
        method: str,
        path: str,
        *,
        wait_s: float = 0.0,
        response_s: float | None = None,
        retry_s: float | None = None,
        **request: Any,
    ) -> httpx.Response:
        """Send a request; return the successful response. Raises ClientError.

        `request` has arguments of httpx: params, headers, json, content. `retry_s` bounds the time
        for retries (default: that of this object), `response_s` the time for one response (default:
        see `response_s`). `wait_s` is added to it: the time that the broker waits as the request
        says.
        """
        loop = asyncio.get_running_loop()
        retry_s = self.retry_s if retry_s is None else retry_s
        deadline_s = loop.time() + retry_s
        pause_s = PAUSE_FIRST_S
        failed: set[str] = set()
        is_unknown = False
        while True:
            server = self.servers.current
            timeout_s = response_s
            if timeout_s is None:
                timeout_s = self.response_s(deadline_s - loop.time() if retry_s > 0 else math.inf)
            attempt = await self._attempt(method, server, path, wait_s + timeout_s, request)
            if isinstance(attempt, httpx.Response):
                return attempt
            is_unknown |= attempt.failure.is_unknown
            attempt.failure.is_unknown = is_unknown
            if not attempt.is_repeatable:
                raise attempt.failure
            if not attempt.is_throttled:
                failed.add(server)
                self.servers.move_on(server)
                if self.servers.current not in failed and (retry_s > 0 or not attempt.was_sent):
                    self.retries += 1
                    continue
            failed.clear()
            # Random, so that the clients of a broker retry at different times after its restart.
            delay_s = max(attempt.retry_after_s, pause_s * self._random.uniform(0.5, 1.0))
            if loop.time() + delay_s > deadline_s:
                raise attempt.failure
            self.retries += 1
            await asyncio.sleep(delay_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def response_s(self, left_s: float) -> float:
        """Return the timeout of a response if a request may be repeated for `left_s`."""
        if len(self.servers.all) == 1:
            return RESPONSE_S
        return min(RESPONSE_S, max(left_s / 2, RESPONSE_S_MIN))

    async def _attempt(
        self, method: str, server: str, path: str, timeout_s: float, request: dict[str, Any]
    ) -> "httpx.Response | _Failure":
        """Send a request once. Return the successful response, or the failure."""
        timeout = httpx.Timeout(timeout_s if timeout_s < math.inf else None, connect=CONNECT_S)
        try:
            answer = await self._http.request(method, server + path, timeout=timeout, **request)
        except httpx.InvalidURL as error:
            raise BadArgument(f"server {server!r}: {error}") from None
        except httpx.RequestError as error:
            why, advice = _why(error)
            was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            failure = NotReachable(f"cannot reach {server}: {why}", advice, is_unknown=was_sent)
            return _Failure(failure, was_sent=was_sent)
        if answer.is_success:
            return answer
        status = answer.status_code
        return _Failure(
            refusal(answer),
            was_sent=True,
            is_repeatable=status in RETRIED,
            is_throttled=status == THROTTLED,
            retry_after_s=_retry_after_s(answer),
        )

    async def get_json(self, path: str, **request: Any) -> Any:
        """Return the JSON of a successful response.

        If the response is the first page of a list, add the items of the other pages. Raises
        ClientError.
        """
        body = self.json_of(await self.get(path, **request))
        await self.add_pages(body, path, **request)
        return body

    async def add_pages(self, body: Any, path: str, **request: Any) -> None:
        """If `body` is a page of a list, fetch all next pages and add their items to `body`."""
        page = body
        params = request.pop("params", None) or {}
        while isinstance(page, dict) and (url := (page.get("metadata") or {}).get("next")):
            # Use only the token of the URL, because this client may not reach the URL's host.
            token = httpx.URL(url).params["page_token"]
            answer = await self.get(path, params={**params, "page_token": token}, **request)
            page = self.json_of(answer)
            body["data"] += page["data"]

    def json_of(self, answer: httpx.Response) -> Any:
        """Return the JSON of a response. Raises NotABroker."""
        try:
            return answer.json()
        except ValueError:
            raise self.is_no_broker() from None

    def is_no_broker(self) -> NotABroker:
        """Return the error for a response that is not a broker's."""
        return NotABroker(f"{self.servers.current} is not a tidelog broker: unexpected response")

    # -- the cluster

    async def cluster(self, **request: Any) -> str:
        """Return the path of the cluster in the v3 API."""
        if not self._cluster:
            clusters = await self.get_json("/v3/clusters", **request)
            try:
                self._cluster = f"/v3/clusters/{quoted(clusters['data'][0]['cluster_id'])}"
            except (LookupError, TypeError):
                raise self.is_no_broker() from None
        return self._cluster

    async def partitions(self, topic: str, **request: Any) -> int:
        """Return the number of partitions of a topic."""
        listed = await self.get_json(f"/topics/{quoted(topic)}/partitions", **request)
        if not isinstance(listed, list):
            raise self.is_no_broker()
        return len(listed)

    async def offsets(self, topic: str, partition: int, **params: int) -> dict[str, Any]:
        """Return the `beginning_offset` and the `end_offset` of a partition.

        With `timestamp` (ms) also the `timestamp_offset`, which is None if all records are older.
        """
        path = f"/topics/{quoted(topic)}/partitions/{partition}/offsets"
        offsets = await self.get_json(path, params=params)
        if not isinstance(offsets, dict) or not offsets.keys() >= {
            "beginning_offset",
            "end_offset",
        }:
            raise self.is_no_broker()
        return offsets

    async def ends(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the log start offset and the end offset of a partition."""
        offsets = await self.offsets(topic, partition)
        return offsets["beginning_offset"], offsets["end_offset"]

    def learn_soon(self) -> None:
        """Start a task that asks for the brokers of the cluster, unless one ran within LEARN_S."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._learned_s < LEARN_S or self._learning is not None:
            return
        self._learned_s = now_s
        self._learning = asyncio.create_task(self._learn(), name="tidelog-client-brokers")

    async def _learn(self) -> None:
        try:
            await self.learn()
        except ClientError:
            self._learned_s += LEARN_AGAIN_S - LEARN_S
        self._learning = None

    async def learn(self) -> None:
        """Ask for the live brokers, and remember their addresses. Raises ClientError."""
        server = urlsplit(self.servers.current)
        if server.path:
            return  # a path belongs to a proxy, and the brokers' addresses are not that proxy's
        listed = await self.get_json(f"{await self.cluster()}/brokers", retry_s=0.0)
        self.servers.learn(
            f"{server.scheme}://{_host(broker['host'])}:{broker['port']}"
            for broker in listed["data"]
            if broker.get("host") and broker.get("port")
        )


def quoted(name: str) -> str:
    """Return a name as one segment of a URL path."""
    return quote(name, safe="")


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _trust(ca_file: str | None, *, is_tls: bool) -> ssl.SSLContext | bool:
    """Return the value for `verify` of httpx. Raises BadArgument."""
    if ca_file is None and not is_tls:
        # A context without CAs: http:// uses none, and well-known CAs take time to load.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise BadArgument(f"{ca_file}: not a PEM file of certificates ({error.reason})") from None
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadArgument(f"cannot read {ca_file}: {why}") from None


def refusal(answer: httpx.Response) -> ClientError:
    """Return the error for a response that is not a success."""
    status = answer.status_code
    reason, code = "", 0
    with contextlib.suppress(ValueError, LookupError, TypeError):  # a proxy may send no JSON
        body = answer.json()
        reason, code = str(body["message"]), int(body["error_code"])
    if status == httpx.codes.NOT_FOUND and reason in {"", NO_ROUTE}:
        return NotReachable(f"{answer.request.url}: HTTP 404: is this the URL of a broker?")
    message = reason or f"{answer.request.url}: HTTP {status} {answer.reason_phrase}".rstrip()
    if status in UNREACHABLE:
        return NotReachable(message, is_unknown=_is_unknown(status, code))
    kind = NotFound if status == httpx.codes.NOT_FOUND else Refused
    advice = "key" if status == httpx.codes.UNAUTHORIZED else ""
    error = kind(message, advice, status=status, code=code)
    error.is_unknown = _is_unknown(status, code)
    return error


def _is_unknown(status: int, code: int) -> bool:
    """Whether a broker may have done what the request says.

    `code` is 0 in a proxy's response: the proxy may have sent the request to a broker.
    """
    if status in {httpx.codes.REQUEST_TIMEOUT, httpx.codes.SERVICE_UNAVAILABLE}:
        return not code
    return status >= httpx.codes.INTERNAL_SERVER_ERROR


def _why(error: httpx.RequestError) -> tuple[str, str]:
    """Return the reason and the advice (errors.ADVICE).

    The reason is not httpx's text, which names httpx's layers or is empty.
    """
    for cause in _causes(error):
        match cause:
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return "the server does not use TLS: use http://", ""
            case ssl.SSLCertVerificationError(verify_message=message):
                return f"the broker's certificate is not accepted ({message})", "ca"
            case ConnectionRefusedError():
                return "connection refused", "server"
            case socket.gaierror():
                return f"the name of the host has no address ({cause.strerror})", ""
            case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
                return "no route to this host", ""
            case _:
                pass
    match error:
        case httpx.RemoteProtocolError() if str(error).startswith("Server disconnected"):
            return "no response: the server closed the connection (a port for Kafka clients?)", ""
        case httpx.ConnectTimeout():
            return "no connection in time", ""
        case httpx.TimeoutException():
            return "no response in time", ""
        case _:
            return str(error) or type(error).__name__, ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes. anyio groups the errors of several addresses."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for cause in error.exceptions:
                yield from _causes(cause)
        error = error.__cause__ or error.__context__


def _retry_after_s(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
