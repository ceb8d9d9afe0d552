"""The threads that unpack and check: whose turn it is, and how much is under way."""

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.service.conftest import Broker, append, broker_on, until
from tidelog.service import codec_threads
from tidelog.service.codec_threads import THREADS, UnpackThreads
from tidelog.service.formats.fetched import FetchPage, FetchParams
from tidelog.service.http import request as http_request
from tidelog.service.http.connection_admission import BODY_STEP_BYTES
from tidelog.service.memory_pool import MemoryPool
from tidelog.service.routes import fetch
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.state.access import REQUEST_PERCENTAGE
from tidelog.storage.store.memory import MemoryStore

MIB = 1 << 20


class Caller:
    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.charges: list[tuple[str, float]] = []

    def record(self, quota: str, size: float) -> None:
        self.charges.append((quota, size))


class Work:
    """Slices that run until `gate` is set, and the order in which they began."""

    def __init__(self, threads: UnpackThreads) -> None:
        self.threads = threads
        self.gate = threading.Event()
        self.began: list[str] = []
        self._slots = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()

    def start(self, principal: str, size: int = 0) -> "asyncio.Task[None]":
        work = self._slice(principal)
        return asyncio.ensure_future(self.threads.run(Caller(principal), size, work))

    def _slice(self, principal: str) -> Callable[[], None]:
        def run() -> None:
            self.began.append(principal)
            self._loop.call_soon_threadsafe(self._slots.release)
            self.gate.wait(20)

        return run

    async def until_began(self, count: int) -> None:
        async with asyncio.timeout(20):
            for _ in range(count):
                await self._slots.acquire()


async def test_no_more_slices_run_than_there_are_threads() -> None:
    work = Work(UnpackThreads())
    tasks = [work.start("a") for _ in range(3 * THREADS)]
    await work.until_began(THREADS)
    await asyncio.sleep(0.02)
    assert len(work.began) == THREADS
    work.gate.set()
    await asyncio.gather(*tasks)
    assert len(work.began) == len(tasks)


async def test_next_slice_is_of_principal_with_fewest() -> None:
    work = Work(UnpackThreads())
    tasks = [work.start("a") for _ in range(6)]
    await work.until_began(THREADS)
    tasks += [work.start(name) for name in ("b", "b", "c")]
    await asyncio.sleep(0)
    work.gate.set()
    await asyncio.gather(*tasks)
    assert work.began[:THREADS] == ["a"] * THREADS
    assert {"b", "c"} <= set(work.began[THREADS : THREADS + 3])
    assert sorted(work.began) == ["a"] * 6 + ["b"] * 2 + ["c"]


async def test_unpacked_bytes_at_time_are_bounded() -> None:
    work = Work(UnpackThreads())
    most = codec_threads.UNPACKED_ALL_BYTES_MAX
    tasks = [work.start("a", most), work.start("b", 1)]
    await work.until_began(1)
    await asyncio.sleep(0.02)
    assert work.began == ["a"]
    work.gate.set()
    await asyncio.gather(*tasks)
    assert work.threads.unpacked.used == 0
    large = Work(work.threads)  # a batch above the bound is checked alone
    large.gate.set()
    await large.start("a", most + 1)


async def test_cancelled_wait_for_memory_holds_none() -> None:
    work = Work(UnpackThreads())
    most = codec_threads.UNPACKED_ALL_BYTES_MAX
    first, leaving, staying = (work.start(name, most) for name in ("a", "b", "c"))
    await work.until_began(1)
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    work.gate.set()
    await asyncio.gather(first, staying)
    assert work.began == ["a", "c"]
    assert work.threads.unpacked.used == 0


async def test_cancelled_wait_gives_its_turn_back() -> None:
    work = Work(UnpackThreads())
    tasks = [work.start("a") for _ in range(THREADS)]
    await work.until_began(THREADS)
    leaving, staying = work.start("b"), work.start("c")
    await asyncio.sleep(0)
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    work.gate.set()
    await asyncio.gather(*tasks, staying)
    assert "b" not in work.began
    again = [work.start("d") for _ in range(THREADS)]
    await asyncio.gather(*again)


async def test_cancelled_wait_leaves_its_principal_its_place() -> None:
    threads = UnpackThreads()
    before, after = [Work(threads) for _ in range(THREADS)], Work(threads)
    tasks = [work.start("c") for work in before]
    for work in before:
        await work.until_began(1)
    leaving = after.start("a")
    tasks += [after.start("a"), after.start("b")]
    await asyncio.sleep(0)
    leaving.cancel()
    before[0].gate.set()
    await after.until_began(1)
    assert after.began == ["a"]
    for work in (*before, after):
        work.gate.set()
    await asyncio.gather(*tasks)


async def test_cancelled_slice_holds_its_bytes_to_its_end() -> None:
    """Else a client could send bodies and close, again and again: the threads work on."""
    work = Work(UnpackThreads())
    tasks = [work.start("a", 1000) for _ in range(THREADS)]
    await work.until_began(THREADS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert work.threads.unpacked.used == THREADS * 1000
    waiting = work.start("b")
    await asyncio.sleep(0.02)
    assert "b" not in work.began, "the threads are busy"
    work.gate.set()
    await waiting
    await until(lambda: not work.threads.unpacked.used)  # the other thread ends a little later


async def test_cancelled_request_holds_its_packed_body_to_end_of_its_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, pool = Work(UnpackThreads()), MemoryPool(MIB)
    run = work._slice("a")
    monkeypatch.setattr(http_request, "unpack", lambda *_: run())

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"packed"}

    async def send(_: Any) -> None:
        """There is no answer."""

    scope = {"headers": [(b"content-encoding", b"gzip")], "rights": Caller("User:a")}
    request = http_request.HttpRequest(
        scope, receive, send, http_request.BodyMemory(pool, work.threads)
    )
    reading = asyncio.create_task(request.body(MIB))
    await work.until_began(1)
    reading.cancel()
    await asyncio.wait({reading})
    request.release()
    assert pool.used == BODY_STEP_BYTES
    work.gate.set()
    await until(lambda: not pool.used)


async def test_reader_that_leaves_holds_its_page_to_end_of_its_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "ENCODE_INLINE_BYTES", 0)
    async with broker_on(MemoryStore()) as broker:
        await broker.log.topics.create("t", 1, {})
        await append(broker.log, b'"x"')
        work, answers = Work(broker.app._bodies.threads), broker.app.admission.answers
        run, encode = work._slice("a"), fetch.encode
        monkeypatch.setattr(fetch, "encode", lambda *view: (run(), encode(*view))[1])
        path = "/topics/t/partitions/0/records?offset=0"
        reading = asyncio.create_task(broker.http.get(path))
        await work.until_began(1)
        reading.cancel()
        await asyncio.wait({reading})
        assert answers.used > 0
        work.gate.set()
        await until(lambda: not answers.used)


async def test_slice_is_charged_to_its_caller_also_if_it_fails_or_nobody_waits() -> None:
    def busy() -> None:
        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.01:
            pass

    def fails() -> None:
        busy()
        raise ValueError

    threads, gate = UnpackThreads(), threading.Event()
    callers = {name: Caller(name) for name in ("done", "failed", "left")}
    await threads.run(callers["done"], 0, busy)
    with pytest.raises(ValueError, match=r"^$"):
        await threads.run(callers["failed"], 0, fails)
    left = asyncio.ensure_future(threads.run(callers["left"], 0, lambda: gate.wait(20) and busy()))
    await until(lambda: threads._running["left"] == 1)
    left.cancel()
    gate.set()
    for caller in callers.values():
        await until(lambda caller=caller: bool(caller.charges))
        ((quota, size),) = caller.charges
        assert quota == REQUEST_PERCENTAGE
        assert 1 <= size < 20, "percent of a thread's second"


async def test_failed_slice_keeps_no_body() -> None:
    """A cycle of an error and its frames would keep it until a garbage collection."""

    class Body:
        def unpack(self) -> None:
            raise ValueError

    body = Body()
    body_ref = weakref.ref(body)
    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"^$"):
            await UnpackThreads().run(Caller("a"), 10, body.unpack)
        del body
        assert await _is_freed(body_ref)
    finally:
        gc.enable()


async def _is_freed(reference: "weakref.ref[Any]") -> bool:
    for _ in range(100):  # a thread forgets its last work a little later
        if reference() is None:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_slice_that_fails_without_caller_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would log its error with a traceback: it is for a caller that has left."""
    threads, gate = UnpackThreads(), threading.Event()

    def fails() -> None:
        gate.wait(60)
        raise ValueError

    caller = Caller("a")
    slice_task = asyncio.create_task(threads.run(caller, 10, fails))
    await until(lambda: threads._running["a"] == 1)
    await asyncio.sleep(0)
    slice_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slice_task
    gate.set()
    await until(lambda: bool(caller.charges))
    gc.collect()
    assert not caplog.records


async def test_thread_that_cannot_start_gives_turn_and_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = UnpackThreads()

    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads._executor, "submit", fails)
        for _ in range(2 * THREADS):
            with pytest.raises(RuntimeError, match="new thread"):
                await threads.run(Caller("a"), 10, int)
    assert threads.unpacked.used == 0
    assert await threads.run(Caller("a"), 10, int) == 0


async def test_reader_waits_for_no_slice_of_another_reader_of_its_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "ENCODE_INLINE_BYTES", 0)
    view = FetchParams("t", 0, "sse", "json", ReadBounds(MIB, 10))
    async with broker_on(MemoryStore()) as broker:
        await broker.log.topics.create("t", 1, {})
        await append(broker.log, b'"x"')
        fetcher, threads = broker.app.consumers._fetch, broker.app._bodies.threads
        before, busy = Work(threads), Work(threads)

        async def read(principal: str) -> FetchPage:
            with fetcher.answer_share(principal) as share:
                return await fetcher.page(view, 0, share, Caller(principal))

        tasks: list[asyncio.Task[Any]] = [before.start("c") for _ in range(THREADS)]
        await before.until_began(THREADS)
        tasks += [busy.start("a") for _ in range(2 * THREADS)]
        tasks += [asyncio.create_task(read("a")) for _ in range(2)]
        await until(lambda: bool(fetcher._encoding))
        tasks.append(asyncio.create_task(read("b")))
        await until(lambda: "b" in threads._waiting)
        before.gate.set()
        async with asyncio.timeout(20):
            await tasks[-1]
        assert not any(task.done() for task in tasks[THREADS:-1])
        busy.gate.set()
        await asyncio.gather(*tasks)
        assert tasks[-3].result().page is tasks[-2].result().page


V3_RECORD = {"value": {"type": "STRING", "data": "x" * 100_000}}
LARGE_BODIES: dict[str, Any] = {
    "topics/t/records:batch": {"entries": [{"id": "1"} | V3_RECORD]},
    "transactions": {"topics": [{"topic_name": "t", "records": [V3_RECORD]}]},
}


@pytest.mark.parametrize("path", LARGE_BODIES)
@pytest.mark.broker(topics={"t": 1})
async def test_body_that_waits_for_thread_has_its_memory(
    broker: Broker, port: int, path: str
) -> None:
    body = json.dumps(LARGE_BODIES[path]).encode()
    work, bodies = Work(broker.app._bodies.threads), broker.app.admission.bodies
    tasks = [work.start("another") for _ in range(THREADS)]
    await work.until_began(THREADS)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    target = f"{broker.v3}/{path}"
    length = f"Content-Length: {len(body)}"
    writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
    await until(lambda: len(body) <= bodies.used <= len(body) + BODY_STEP_BYTES)
    work.gate.set()
    assert b" 20" in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    await asyncio.gather(*tasks)
    await until(lambda: not bodies.used)
