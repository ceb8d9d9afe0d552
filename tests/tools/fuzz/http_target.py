"""Whole requests against a whole broker: method, path, query, headers and body are anything.

The answer is one of ours whatever comes: no 500, a status below 600 that HTTP has, and every error
the body that every error has. Requests change the broker's topics and groups, which are thrown away
now and then.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.service.conftest import Broker, broker_on
from tests.tools.fuzz.target import Target
from tidelog.service.settings.settings import Settings
from tidelog.storage.store.memory import MemoryStore

T = TypeVar("T")

ANSWER_S = 240.0
REQUESTS_MAX = 400
"""Of one broker; then comes the next, and what the last one holds is gone."""


class Hasty(Settings):
    """A long poll takes 5 ms."""

    fetch_wait_ms_max = 5


STATUSES: Counter[int] = Counter()
"""Of all answers in this process, for the report of `make fuzz INPUTS=...`."""
SETTINGS: dict[str, Any] = {"kind": Hasty, "produce_timeout_ms": 2000}


class Served:
    """A broker on a store in memory, with topic t; its loop runs while a request is served."""

    def __init__(self, **settings: Any) -> None:
        self._settings = SETTINGS | settings
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.requests = 0
        self._runner.get_loop()
        self.broker = self._runner.run(self._open())

    async def _open(self) -> Broker:
        broker = await self._stack.enter_async_context(broker_on(MemoryStore(), **self._settings))
        await broker.log.topics.create("t", 2, {})
        return broker

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def ask(self, scope: dict[str, Any], body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers, body."""
        return self.run(asyncio.wait_for(self._ask(scope, body), ANSWER_S))

    def run(self, asking: Coroutine[Any, Any, T]) -> T:
        """Let the loop run until the coroutine returns."""
        self.requests += 1
        return self._runner.run(asking)

    async def _ask(
        self, scope: dict[str, Any], body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        pieces = [body[:7], body[7:]]
        start: dict[str, Any] = {}
        answer: list[bytes] = []
        answering = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await answering.wait()  # a follower disconnects at once, other clients after the answer
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                answering.set()
            else:
                answer.append(message.get("body", b""))

        # A task of its own, so that its steps are those of the service (held_loop).
        await asyncio.create_task(self.broker.app(scope, receive, send))
        return start["status"], dict(start["headers"]), b"".join(answer)


_served: list[Served] = []


def served() -> Served:
    """The broker at hand."""
    if _served and _served[0].requests >= REQUESTS_MAX:
        close()
    if not _served:
        _served.append(Served())
    return _served[0]


def close() -> None:
    """Stop it."""
    while _served:
        _served.pop().close()


# -- a request as bytes: method, path, query, a line a header, an empty line, the body


def _requests() -> list[bytes]:
    cluster = "/v3/clusters/{cluster}"
    v2 = "content-type: application/vnd.kafka.json.v2+json"
    requests = [
        ("POST", "/topics/t", "acks=all&async=false", [v2], '{"records":[{"value":{"a":1}}]}'),
        ("POST", "/topics/t/partitions/1", "", [v2, 'idempotency-key: "k"'], '{"records":[{}]}'),
        ("POST", "/topics/t", "", ["content-type: application/vnd.apache.arrow.stream"], "ARROW"),
        ("GET", "/topics/t/partitions/0/records", "offset=0&max_bytes=10&timeout=5", [], ""),
        ("GET", "/topics/t/partitions/0/records", "timestamp=5&follow=true", ["accept: */*"], ""),
        ("GET", "/topics/t/partitions/1/records", "", ["accept: text/event-stream"], ""),
        (
            *("GET", "/topics/t/records", "last-event-id=0:1,1:-1&reset=earliest"),
            *(["accept: text/event-stream", "last-event-id: 1:2,0:-1"], ""),
        ),
        ("GET", "/topics/t/records", "follow=true&on_error=skip", ["accept: */*"], ""),
        ("POST", f"{cluster}/topics/t/records", "", [], '{"value":{"type":"JSON","data":1}}'),
        ("POST", f"{cluster}/topics/t/records:batch", "", [], '{"entries":[{"id":"1"}]}'),
        ("POST", f"{cluster}/transactions", "", [], '{"topics":[{"topic_name":"t","records":[]}]}'),
        ("POST", f"{cluster}/topics", "", [], '{"topic_name":"u","partitions_count":2}'),
        ("PATCH", f"{cluster}/topics/t", "", [], '{"partitions_count":3}'),
        ("DELETE", f"{cluster}/topics/u", "", [], ""),
        ("PUT", f"{cluster}/topics/t/configs/retention.ms", "", [], '{"value":"5000"}'),
        ("POST", f"{cluster}/topics/t/configs:alter", "", [], '{"data":[{"name":"retention.ms"}]}'),
        ("GET", f"{cluster}/topics/t/partitions/0", "", [], ""),
        ("GET", f"{cluster}/consumer-groups/g/lags", "", ["host: a:80"], ""),
        ("POST", "/consumers/g", "", [v2], '{"name":"c","format":"json"}'),
        ("POST", "/consumers/g/instances/c/subscription", "", [v2], '{"topics":["t"]}'),
        ("GET", "/consumers/g/instances/c/records", "timeout=1&max_bytes=9", [v2], ""),
        ("POST", "/consumers/g/instances/c/offsets", "", [v2], '{"offsets":[]}'),
        ("DELETE", "/consumers/g/instances/c", "", [v2], ""),
        ("GET", "/topics/t/partitions/0/offsets", "timestamp=1", ["x-forwarded-host: b"], ""),
        ("GET", "/openapi.json", "", [], ""),
        ("GET", "/metrics", "", ["accept: text/plain"], ""),
    ]
    return [
        "\n".join([method, path, query, *headers, "", body]).encode()
        for method, path, query, headers, body in requests
    ]


def check_request(data: bytes) -> None:
    method, path, query, remaining = [*data.split(b"\n", 3), b"", b"", b""][:4]
    lines: list[bytes] = []
    line, _, remaining = remaining.partition(b"\n")
    while line:
        lines.append(line)
        line, _, remaining = remaining.partition(b"\n")
    body = remaining
    scope = _scope(method, path, query, lines)
    service = served()
    scope["path"] = scope["path"].replace(
        "{cluster}", service.broker.log._log.wal.cluster.cluster_id
    )
    status, headers, answer = service.ask(scope, body)
    STATUSES[status] += 1
    assert 200 <= status < 600, status
    assert status != 500, answer
    if status >= 400:
        error = json.loads(answer)
        assert error.keys() == {"error_code", "message"}, error
        assert b"json" in headers[b"content-type"]
    elif answer and headers.get(b"content-type", b"").endswith(b"json"):
        has_lines = path.endswith(b"/records") or headers[b"content-type"].endswith(b"ndjson")
        for line in answer.splitlines() if has_lines else [answer]:
            assert not line or json.loads(line, parse_int=str) is not None


def _scope(method: bytes, path: bytes, query: bytes, lines: list[bytes]) -> dict[str, Any]:
    """As a server gives it: what no server lets through does not come here."""
    headers = []
    for line in lines:
        name, _, text = line.partition(b":")
        headers.append((name.strip().lower(), text.strip()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.decode("latin-1").upper() or "GET",
        "path": "/" + path.decode("utf-8", "replace").lstrip("/"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8082),
    }


TARGETS = [Target("request", _requests, check_request, 300)]
