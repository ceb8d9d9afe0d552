"""An answer is one packet; what has only begun is seen to have begun; order is kept."""

import asyncio
import contextlib
import gzip
import json
import threading
from typing import Any

import pytest

from tests.service.conftest import Broker, connected, listening, until
from tidelog.service.codec_threads import THREADS, UNPROVED_CALLER, UnpackThreads
from tidelog.service.http.connection_admission import BODY_STEP_BYTES
from tidelog.service.http.exchange import JOINED_BYTES_MAX
from tidelog.service.http.request import LEFT, BodyMemory, HttpRequest, HttpResponse
from tidelog.service.memory_pool import MemoryPool
from tidelog.storage.core.errors import InvalidRequest, Unavailable


class App:
    """Answers with a body of the size in the path, whole or in two messages of ASGI."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _, size, *parted = scope["path"].split("/")
        body = b"x" * int(size)
        if not parted:
            await HttpRequest(scope, receive, send).answer(HttpResponse(200, body))
            return
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": body})


def gets(*paths: str) -> list[bytes]:
    return [f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in paths]


async def test_small_answer_is_one_packet() -> None:
    async with listening(App()) as port:
        for size in (0, 2, 1000):
            async with connected(port, *gets(f"/{size}")) as (reader, _):
                got = await reader.read(1 << 20)
                assert got.startswith(b"HTTP/1.1 200 OK\r\n")
                assert got.endswith(b"\r\n\r\n" + b"x" * size)


async def test_answers_of_any_size_one_after_other() -> None:
    async with listening(App()) as port:
        sizes = (5, 3 * JOINED_BYTES_MAX, 0, JOINED_BYTES_MAX, JOINED_BYTES_MAX + 1, 7)
        async with connected(port, *gets(*(f"/{size}" for size in sizes))) as (reader, _):
            for size in sizes:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"content-length: %d\r\n" % size in head
                assert await reader.readexactly(size) == b"x" * size


async def test_what_is_not_http_is_refused_by_error_object(broker: Broker, port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"not HTTP\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body).keys() == {"error_code", "message"}


async def test_head_does_not_wait_for_body_that_is_late() -> None:
    app = App()
    async with listening(app) as port, connected(port, *gets("/3/late")) as (reader, _):
        async with asyncio.timeout(240):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            app.go_on.set()
            assert await reader.readexactly(3) == b"xxx"


async def test_client_that_goes_in_middle_is_no_error() -> None:
    app = App()
    async with listening(app) as port:
        async with connected(port, *gets("/3/late")) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
            app.go_on.set()
        async with connected(port, *gets("/4")) as (reader, _):
            assert (await reader.read(1000)).endswith(b"xxxx")


async def test_answer_before_end_of_body_arrives_and_is_last() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})

    async with listening(refuse) as port, connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        for _ in range(64):  # the client sends on, and reads afterwards
            writer.write(b"x" * 100_000)
            await writer.drain()
        async with asyncio.timeout(240):
            answer = await reader.read()  # ends: the client sees that nothing comes any more
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.endswith(b"\r\n\r\nno")


async def test_header_of_answer_never_becomes_two() -> None:
    async def split(scope: Any, receive: Any, send: Any) -> None:
        headers = ((b"location", b"/x\r\nset-cookie: a=b"),)
        await HttpRequest(scope, receive, send).answer(HttpResponse(200, b"{}", headers=headers))

    async with listening(split) as port, connected(port, *gets("/")) as (reader, _):
        got = await reader.read(1 << 20)
        assert got.startswith(b"HTTP/1.1 500 ")
        assert b"set-cookie" not in got


@pytest.mark.parametrize(
    ("method", "status", "code"), [("GET", 503, 50302), ("HEAD", 503, 50302), ("POST", 504, 50003)]
)
async def test_request_that_stop_of_broker_ends_has_answer(
    method: str, status: int, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server cancels requests that take longer than it waits. A change may have been done."""

    async def stopped(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async with listening(stopped) as port, connected(port) as (reader, writer):
        writer.write(f"{method} /topics/t HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        assert lines[0].startswith(b"http/1.1 %d " % status)
        assert {b"content-type: application/vnd.kafka.v2+json", b"connection: close"} <= {*lines}
        assert (b"retry-after: 1" in lines) is (status == 503)
        assert body == b"" if method == "HEAD" else json.loads(body)["error_code"] == code
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


async def test_application_that_fails_or_says_nothing_gets_error_of_api() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/bug":
            raise KeyError("bug")

    async with listening(silent) as port:
        for path in ("/bug", "/nothing"):
            async with connected(port, *gets(path)) as (reader, _):
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 500 ")
                assert json.loads(body)["error_code"] == 50002
                assert b"KeyError" not in body


@pytest.mark.parametrize("field", ["", "connection: close\r\n"])
async def test_last_answer_says_so_and_ends_connection(field: str) -> None:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        call = HttpRequest(scope, receive, send)
        await call.answer(HttpResponse(200, await call.body(100)))

    async with listening(serve) as port, connected(port) as (reader, writer):
        version = "1.1" if field else "1.0"
        head = f"POST / HTTP/{version}\r\nhost: x\r\n{field}content-length: 5\r\n\r\n"
        writer.write(head.encode() + b"hello")
        got = await reader.read(-1)
        assert b"\r\nconnection: close\r\n" in got
        assert got.endswith(b"\r\n\r\nhello")


async def test_whole_bodies_and_parted_ones_are_read_on_one_connection() -> None:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        call = HttpRequest(scope, receive, send)
        await call.answer(HttpResponse(200, await call.body(1 << 20)))

    async with listening(serve) as port, connected(port) as (reader, writer):
        for size, is_parted in ((5, False), (5, True), (0, False), (300_000, True), (1, False)):
            body = b"x" * size
            head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
            if is_parted:
                writer.write(head + body[: size // 2])
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.write(body[size // 2 :])
            else:
                writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % size in answer
            assert await reader.readexactly(size) == body


async def test_bodies_of_one_principal_leave_memory_for_those_of_others() -> None:
    """The bodies of a client that stops in the middle are held."""
    pool = MemoryPool(16 * BODY_STEP_BYTES)
    bodies = BodyMemory(pool, UnpackThreads())

    async def begun(principal: str | None) -> tuple[HttpRequest, asyncio.Task[bytes]]:
        parts = [{"type": "http.request", "body": b"x", "more_body": True}]

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        rights = type("Rights", (), {"principal": principal})
        scope = {"headers": [(b"content-length", b"50000")], "method": "POST"}
        if principal is not None:
            scope["rights"] = rights
        call = HttpRequest(scope, receive, no_send, bodies)
        reading = asyncio.create_task(call.body(100_000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return call, reading

    async def no_send(message: Any) -> None:
        raise AssertionError(message)

    strangers = [await begun(None) for _ in range(16)]  # of a public route
    assert sum(reading.done() for _, reading in strangers) == 15
    greedy = [await begun("User:greedy") for _ in range(16)]
    assert sum(reading.done() for _, reading in greedy) == 8
    other, its_reading = await begun("User:other")
    assert not its_reading.done(), "it is read"
    assert pool.used == 10 * BODY_STEP_BYTES
    for call, reading in [*strangers, *greedy, (other, its_reading)]:
        if reading.done():
            with pytest.raises(Unavailable, match="try again later"):
                reading.result()
        reading.cancel()
        call.release()
        call.release()
    assert pool.used == 0


@pytest.mark.parametrize("pieces", [1, 2])
async def test_body_counts_as_it_arrived_also_if_it_cannot_be_unpacked(pieces: int) -> None:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        call = HttpRequest(scope, receive, send)
        with contextlib.suppress(InvalidRequest):
            await call.body(100)
        await call.answer(HttpResponse(200, b"%d" % call.received))

    body = gzip.compress(bytes(1000))
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    async with listening(serve) as port, connected(port) as (reader, writer):
        writer.write(head % len(body) + (body if pieces == 1 else body[:5]))
        if pieces == 2:
            await asyncio.sleep(0.02)
            writer.write(body[5:])
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"%d" % len(body)


async def test_packed_body_is_charged_while_it_waits_and_not_unpacked_if_its_client_left() -> None:
    pool, threads, gate = MemoryPool(64 * BODY_STEP_BYTES), UnpackThreads(), threading.Event()
    bodies = BodyMemory(pool, threads)
    outcomes: list[str] = []
    exchanges: list[Any] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        call = HttpRequest(scope, receive, send, bodies)
        exchanges.append(receive.__self__)
        try:
            outcomes.append(str(len(await call.body(1 << 20))))
            await call.answer(HttpResponse(200, b""))
        except InvalidRequest as error:
            outcomes.append(str(error))
        finally:
            call.release()

    body = gzip.compress(bytes(1000))
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    busy = [
        asyncio.ensure_future(threads.run(UNPROVED_CALLER, 0, lambda: gate.wait(20)))
        for _ in range(THREADS)
    ]
    async with listening(serve) as port:
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in clients:
            writer.write(head % len(body) + body)
        await until(lambda: pool.used == 3 * BODY_STEP_BYTES)
        leaving = clients.pop()[1]
        leaving.transport.abort()
        await until(lambda: any(exchange.disconnected for exchange in exchanges))
        gate.set()
        for reader, writer in clients:
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        await until(lambda: len(outcomes) == 3)
    await asyncio.gather(*busy)
    assert sorted(outcomes) == ["1000", "1000", LEFT]
    assert pool.used == 0
