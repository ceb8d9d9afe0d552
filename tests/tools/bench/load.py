"""A load generator that is cheaper than what it measures: raw HTTP/1.1 over asyncio protocols.

Requests are bytes made beforehand; of a response only its status, length and body are looked at.
Closed loop: each connection sends its next request when the answer to the last one is whole. wrk
sends a sustained load where it is installed, because it takes a tenth of the CPU.
"""

import asyncio
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench.bodies import Pool, Requests


class Measured(NamedTuple):
    """One run: wall seconds, latencies in ms, bytes of answers, CPU seconds of the broker."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    bytes_in: int

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


class Connection(asyncio.Protocol):
    """One connection of a load.

    `on_answer` gets it, whether the request succeeded as a status of HTTP (200 if so), and the
    bytes of the answer.
    """

    def __init__(self, on_answer: Callable[["Connection", int, int], None]) -> None:
        self._on_answer = on_answer
        self.transport: asyncio.Transport
        self.sent_s = 0.0
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(exc)

    def send(self, request: bytes) -> None:
        self.sent_s = time.perf_counter()
        self.transport.write(request)


class HttpConnection(Connection):
    """HTTP/1.1, with bodies of a known length."""

    def __init__(self, on_answer: Callable[[Connection, int, int], None]) -> None:
        super().__init__(on_answer)
        self._head = b""
        self._left = 0
        self._size = 0
        self._status = 0

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            self._status = int(head[9:12])
            position = head.find(b"content-length: ")
            stop = head.find(b"\r\n", position)
            self._size = int(head[position + 16 : stop if stop >= 0 else end])
            self._left = self._size - (len(self._head) - end - 4)
            self._head = b""
        assert self._left >= 0, "an answer is longer than it said"
        if self._left == 0:
            self._on_answer(self, self._status, self._size)


async def run(
    host: str,
    port: int,
    requests: Sequence[bytes],
    *,
    connections: int,
    seconds: float,
    requests_min: int = 0,
    kind: type[Connection] = HttpConnection,
) -> Measured:
    """Send requests round robin over the connections for about so long.

    Send at least `requests_min`; raises on any non-200.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    bytes_in = 0
    sent = 0
    deadline = 0.0
    idle = 0
    future = loop.create_future()

    def answered(connection: Connection, status: int, size: int) -> None:
        nonlocal sent, bytes_in, idle
        now = time.perf_counter()
        if status != 200:
            if not future.done():
                future.set_exception(RuntimeError(f"status {status}"))
            return
        latencies.append(now - connection.sent_s)
        bytes_in += size
        if now >= deadline and sent >= requests_min:
            idle += 1
            if idle == connections and not future.done():
                future.set_result(None)
            return
        connection.send(requests[sent % len(requests)])
        sent += 1

    all_connections = [
        (await loop.create_connection(lambda: kind(answered), host, port))[1]
        for _ in range(connections)
    ]
    started = time.perf_counter()
    deadline = started + seconds
    for connection in all_connections:
        connection.send(requests[sent % len(requests)])
        sent += 1
    await future
    took = time.perf_counter() - started
    return await _measured(all_connections, latencies, took, bytes_in)


async def paced(
    host: str,
    port: int,
    requests: Sequence[bytes],
    *,
    connections: int,
    seconds: float,
    per_second: float,
    kind: type[Connection] = HttpConnection,
) -> Measured:
    """Open loop: so many requests a second, evenly, whatever the answers do.

    A latency counts from when its request was due, so that a server which stalls is not asked less.
    Raises on non-200.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    bytes_in = sent = 0
    total = round(seconds * per_second)
    due: list[float] = []
    future = loop.create_future()

    def answered(connection: Connection, status: int, size: int) -> None:
        nonlocal bytes_in
        latencies.append(time.perf_counter() - connection.sent_s)
        bytes_in += size
        idle.append(connection)
        if status != 200 and not future.done():
            future.set_exception(RuntimeError(f"status {status}"))
        if len(latencies) == total and not future.done():
            future.set_result(None)

    def send_due() -> None:
        nonlocal sent
        now = time.perf_counter()
        while sent + len(due) < min(total, (now - started) * per_second):
            due.append(started + (sent + len(due)) / per_second)
        while due and idle:
            connection = idle.popleft()
            connection.send(requests[sent % len(requests)])
            connection.sent_s = due.pop(0)
            sent += 1
        if not future.done():
            loop.call_later(0.001, send_due)

    idle: deque[Connection] = deque()
    for _ in range(connections):
        _, connection = await loop.create_connection(lambda: kind(answered), host, port)
        idle.append(connection)
    all_connections = list(idle)
    started = time.perf_counter()
    send_due()
    await future
    took = time.perf_counter() - started
    return await _measured(all_connections, latencies, took, bytes_in)


async def _measured(
    all_connections: Sequence[Connection], latencies: list[float], took: float, bytes_in: int
) -> Measured:
    """Closes the connections, too."""
    for connection in all_connections:
        connection.transport.close()
        await connection.lost
    latencies.sort()
    return Measured(
        len(latencies),
        took,
        1000 * statistics.median(latencies),
        1000 * latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))],
        bytes_in,
    )


class Answered(NamedTuple):
    """One response, headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Caller:
    """One kept connection: a request, its answer, the next request. No framework between."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def __call__(self, sent: bytes) -> Answered:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(sent)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in lines[1:] if line)
        headers = {name.lower(): text for name, _, text in pairs}
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answered(int(lines[0].split()[1]), headers, body)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def request(
    method: str, path: str, *, body: bytes = b"", headers: dict[str, str], body_bytes: int = 0
) -> bytes:
    """The bytes of one HTTP/1.1 request on a kept connection.

    Without a body, but with `body_bytes`, only its head.
    """
    size = len(body) or body_bytes
    lines = [f"{method} {path} HTTP/1.1", "host: bench", f"content-length: {size}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


WRK = """
local file = io.open("units", "rb")
local units = file:read("*a")
file:close()
file = io.open("head", "rb")
local head = file:read("*a")
file:close()
local number = 0
function request()
  local at = number * {of_body} % {distinct} * {unit_bytes}
  number = number + 1
  return head .. units:sub(at + 1, at + {of_body} * {unit_bytes} - {cut}) .. "{suffix}"
end
function done(summary, latency)
  local failed = summary.errors
  io.write(string.format("RESULT %d %d %d %d %d %d\\n", summary.requests, summary.duration,
    failed.status + failed.connect + failed.read + failed.write + failed.timeout,
    latency:percentile(50), latency:percentile(99), summary.bytes))
end
"""


def has_wrk() -> bool:
    return shutil.which("wrk") is not None


def sustained(
    port: int, path: str, body_pool: Pool, *, connections: int, seconds: float
) -> Measured:
    """A closed loop of the pool's bodies, by wrk, or by `run` if wrk is not installed.

    Raises RuntimeError if a request failed.
    """
    head = head_of(path, body_pool)
    if not has_wrk():
        load = run(
            "127.0.0.1", port, Requests(head, body_pool), connections=connections, seconds=seconds
        )
        return asyncio.run(load)
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as folder:
        (Path(folder) / "units").write_bytes(body_pool.units)
        (Path(folder) / "head").write_bytes(head + body_pool.prefix)
        suffix = body_pool.suffix.decode()
        script = WRK
        for name in ("of_body", "distinct", "unit_bytes", "cut"):
            script = script.replace(f"{{{name}}}", str(getattr(body_pool, name)))
        (Path(folder) / "load.lua").write_text(script.replace("{suffix}", suffix))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(round(seconds), 1)}s", "--timeout"]
        command += ["30s", "-s", "load.lua", f"http://127.0.0.1:{port}{path}"]
        process = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT"))
    requests, took_us, failed, p50_us, p99_us, size = (int(word) for word in line.split()[1:])
    if failed or not requests:
        raise RuntimeError(f"wrk: {failed} of {requests} requests failed")
    return Measured(requests, took_us / 1e6, p50_us / 1000, p99_us / 1000, size)


def head_of(path: str, body_pool: Pool) -> bytes:
    """The head of a produce request with a body of the pool."""
    return request(
        "POST",
        path,
        headers={"content-type": body_pool.media_type},
        body_bytes=len(body_pool.body(0)),
    )
