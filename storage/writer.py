"""The write path of a broker: requests wait in the open hot segment, one flush commits them all.

One flush is under way at a time; what arrives meanwhile rides in the next, so the batch grows with
the load and the store's latency, and an idle broker flushes at once. `flush_interval_ms` spaces
flushes to bound what the PUTs cost. I10: buffered bytes are bounded, at the bound callers get
Throttled.

And if we die here? Before the commit: acks=all callers have no answer, acks=1 requests are in the
hot log. During it: as the store decides (storage.wal). After it, before the answers: the records
are in the log, a retry with the Idempotency-Key finds the first answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from storage.clock import Clock
from storage.errors import CommitUnknown, Corrupt, LogError, StoreUnfit, Throttled, Unavailable
from storage.histogram import BYTES, COUNTS, Histogram
from storage.hot import ClosedSegment, Encoded, Request
from storage.hotlog import HotLog
from storage.model import Placement
from storage.state import Outcome, another_request, recall
from storage.wal import Committer, Wal

log = logging.getLogger("tidelog.writer")

ENCODE_INLINE_BYTES = 2 * 1024 * 1024
"""Smaller segments are encoded on the loop, ~250 us a MiB: a thread would wait as long for the
interpreter's lock, each time it comes back from Arrow."""


GATHER_ROUNDS_MAX = 8
"""How often a flush looks whether more has just arrived, ~50 us each under load."""

FLUSH_PARTS_MAX = 100_000
"""Requests and their pieces in one entry: each is 20 to 300 bytes of its header, which has a bound
(I10): nobody reads an entry that is over it."""

PART_OVERHEAD_BYTES = 512
"""What a request costs in memory beside its bytes, and again each of its parts: lists, a future."""


LAST_ANSWERS_S = 5.0
"""Of a process that ends: supervisors are patient for 10 to 30 s."""


class Acks(IntEnum):
    """When a produce is answered."""

    NONE = 0  # after validation
    LOCAL = 1  # after fdatasync of the broker's hot log; offsets not known yet
    ALL = -1  # after the commit, with offsets


class WriterSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    flush_bytes: int = 8 * 1024 * 1024
    """An open segment of this size is flushed as soon as a flush may start."""
    flush_bytes_max: int = 64 * 1024 * 1024
    """No entry carries more than about this."""
    flush_interval_ms: int = 0
    """Least time between the starts of two flushes, unless `flush_bytes` are waiting."""
    buffer_bytes_max: int = 256 * 1024 * 1024
    """Requests that are not answered or not committed yet."""
    codec: str = "lz4"
    """Packs large chunks: lz4, zstd or empty."""
    answer_timeout_s: float = 30.0
    """Whoever waits longer is told that the outcome is not known; the commit goes on."""


@dataclass
class WriterCounters:
    """Since the process started."""

    flushes: int = 0
    flushes_failed: int = 0
    requests: int = 0
    throttled: int = 0
    records: int = 0
    flush_bytes: int = 0
    commit_latency: Histogram = field(default_factory=Histogram)
    queue_wait: Histogram = field(default_factory=Histogram)
    """Of the oldest request of each flush."""
    batch_requests: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_records: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))


Waiter: TypeAlias = asyncio.Future[list[Placement]]


class _UnderWay(NamedTuple):
    """The first request with an idempotency key that is not answered yet."""

    request: Request
    fingerprint: bytes
    waiter: Waiter

    @property
    def is_durable(self) -> bool:
        return self.request.hot is not None


class Writer:
    """Owned by one event loop; lives between `start` and `close`."""

    def __init__(
        self,
        wal: Wal,
        clock: Clock,
        settings: WriterSettings,
        on_committed: Callable[[ClosedSegment, Encoded, Sequence[Outcome]], None],
    ) -> None:
        self.wal = wal
        self.committer: Committer = wal
        self.clock = clock
        self.settings = settings
        self.counters = WriterCounters()
        self.hot_log: HotLog | None = None
        self.flushing: Callable[[list[Request]], AbstractContextManager[object]] = nullcontext
        """Around each flush, for whoever watches them."""
        self.buffered_bytes = 0
        self._on_committed = on_committed
        self._open: list[Request] = []
        self._open_bytes = 0
        self._opened_s = 0.0
        self._waiters: dict[Request, Waiter] = {}
        self._keyed: dict[str, _UnderWay] = {}
        self._deadlines: deque[tuple[float, Waiter]] = deque()
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._is_hurried = False
        self._closing = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._run(), name="tidelog-writer")
        self._watch = asyncio.create_task(self._watch_deadlines(), name="tidelog-deadlines")

    def hurry(self) -> None:
        """The end is near: flushes wait for no interval any more, and nobody waits for an answer
        longer than a few seconds."""
        self._is_hurried = True
        self._full.set()
        last_s = self.clock.boot_s() + LAST_ANSWERS_S
        self._deadlines = deque((min(at_s, last_s), it) for at_s, it in self._deadlines)

    async def close(self) -> None:
        """Flush what is open, then stop. New requests are refused from now on."""
        self._closing = True
        self.hurry()
        if self.hot_log is not None:
            await self.hot_log.drain()  # its last requests come here, to be flushed
        self._wake.set()
        if self.task is not None:
            await self.task
            self._watch.cancel()
        if self.hot_log is not None:
            await self.hot_log.close(is_drained=not self._open)

    # -- taking requests

    async def append(self, request: Request, acks: Acks) -> list[Placement] | None:
        """Make the request part of the log; its placements, or None when they are not known yet.

        Raises Throttled (nothing done), Unavailable (definitely not done), CommitUnknown, or the
        refusal that `apply` recorded. Cancelling the caller does not cancel the commit.
        """
        if request.key is not None:
            known = self.wal.state.remembered(request.key.key)
            if known is not None:
                outcome = recall(known, request.key.fingerprint)
                if outcome.refusal is not None:
                    raise outcome.refusal
                return outcome.placements
            under_way = self._keyed.get(request.key.key)
            if under_way is not None:
                if under_way.fingerprint != request.key.fingerprint:
                    raise another_request(request.key.key)
                if acks is Acks.LOCAL and under_way.is_durable:
                    return None  # what was promised then, at once
                return await asyncio.shield(under_way.waiter)
        self._admit(request)
        if acks is Acks.LOCAL and self.hot_log is not None:
            # Known by its key from here on: another request must not be promised what this one is.
            self._expect(request).add_done_callback(_forget)
            await self.hot_log.append(request)
            return None
        waiter = self._enqueue(request)
        if acks is Acks.NONE:
            waiter.add_done_callback(_forget)
            return None
        # Shielded: the waiter may be shared by a retry with the same key.
        return await asyncio.shield(waiter) if request.key is not None else await waiter

    def recover(self, requests: Sequence[Request]) -> list[Waiter]:
        """Take marked requests of a hot log, in order, before any others."""
        self.buffered_bytes += sum(map(_cost, requests))
        return [self._enqueue(request) for request in requests]

    def enqueue_durable(self, request: Request) -> None:
        """A request that the hot log holds: it is committed whatever happens to its caller."""
        _ = self._enqueue(request)

    def release(self, request: Request, error: LogError) -> None:
        """A request that the hot log could not take: its caller, if there still is one, knows."""
        self._answer(request, [], error)

    def _admit(self, request: Request) -> None:
        if self._closing:
            raise Unavailable("this broker is shutting down: send the request to another")
        is_over = self.buffered_bytes + _cost(request) > self.settings.buffer_bytes_max
        if is_over and self.buffered_bytes:  # what the bound of a body let pass always fits alone
            self.counters.throttled += 1
            raise Throttled(
                f"{self.buffered_bytes} bytes wait to be committed, the bound is "
                f"{self.settings.buffer_bytes_max}: try again later",
                retry_after_ms=1000,
            )
        self.buffered_bytes += _cost(request)
        self.counters.requests += 1

    def _expect(self, request: Request) -> Waiter:
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiters[request] = waiter
        if request.key is not None:
            waiter.add_done_callback(_see)  # its callers may all be gone by then
            under_way = _UnderWay(request, request.key.fingerprint, waiter)
            self._keyed.setdefault(request.key.key, under_way)
        return waiter

    def _enqueue(self, request: Request) -> Waiter:
        waiter = self._waiters.get(request) or self._expect(request)
        if not self._open:
            self._opened_s = self.clock.boot_s()
        self._open.append(request)
        self._open_bytes += request.size
        self._wake.set()
        if self._open_bytes >= self.settings.flush_bytes:
            self._full.set()
        if request.hot is None:  # what the hot log holds is committed however long it takes
            deadline_s = self.clock.boot_s() + self.settings.answer_timeout_s
            self._deadlines.append((deadline_s, waiter))
        return waiter

    async def _watch_deadlines(self) -> None:
        # One look a second for all: a timer for each request would cost as much as its commit.
        while True:
            await asyncio.sleep(min(1.0, self.settings.answer_timeout_s / 4))
            now_s = self.clock.boot_s()
            late: set[Waiter] = set()
            while self._deadlines:
                # Waiters, not requests: those would be kept alive, records and all, until then.
                deadline_s, waiter = self._deadlines[0]
                if not waiter.done():
                    if deadline_s > now_s:
                        break
                    late.add(waiter)
                self._deadlines.popleft()
            if late:
                # A dict, for its order: callers are told in the order in which they came.
                self._give_up({one: None for one, at in self._waiters.items() if at in late})

    def _give_up(self, overdue: Mapping[Request, None]) -> None:
        """Tell callers who waited too long. What no flush has taken yet is simply withdrawn."""
        patience = f"after {self.settings.answer_timeout_s:.0f} s"
        withdrawn = {request: None for request in self._open if request in overdue}
        self._open = [request for request in self._open if request not in overdue]
        self._open_bytes -= sum(request.size for request in withdrawn)
        for request in withdrawn:
            self._answer(
                request, [], Unavailable(f"the store does not keep up: gave up {patience}")
            )
        for request in overdue:
            if request not in withdrawn and not self._waiters[request].done():
                self._waiters[request].set_exception(
                    CommitUnknown(
                        f"the outcome is not known {patience}: the records may or may not be in "
                        "the log; retry with the same Idempotency-Key"
                    )
                )

    # -- flushing

    async def _run(self) -> None:
        started_s = -1e9
        while True:
            if not self._open:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            pause_s = started_s + self.settings.flush_interval_ms / 1000 - self.clock.boot_s()
            is_full = self._is_hurried or self._open_bytes >= self.settings.flush_bytes
            if pause_s > 0 and not is_full:
                await self._wait_until_full(pause_s)
            await self._gather()
            started_s = self.clock.boot_s()
            self.counters.queue_wait.add(started_s - self._opened_s)
            requests = self._take()
            with self.flushing(requests):
                is_done = await self._flush(requests)
            if not is_done and self._closing:
                # What the hot log holds stays there for the next start.
                self._failed(
                    self._take_first(len(self._open)), Unavailable("this broker is shutting down")
                )
                return

    async def _gather(self) -> None:
        """Let what has arrived already ride along: answers just given bring the next requests, and
        a flush costs as much for one of them as for many. Idle, this is two turns of the loop."""
        for _ in range(GATHER_ROUNDS_MAX):
            before = len(self._open)
            for _ in range(2):  # a socket is read in one turn, its request handled in the next
                await asyncio.sleep(0)
            if len(self._open) == before or self._open_bytes >= self.settings.flush_bytes:
                return

    async def _wait_until_full(self, pause_s: float) -> None:
        self._full.clear()
        try:
            async with asyncio.timeout(pause_s):
                await self._full.wait()
        except TimeoutError:
            pass

    def _take(self) -> list[Request]:
        """The open segment, or as much of it as one entry carries."""
        taken_bytes = taken_parts = 0
        for count, request in enumerate(self._open):
            taken_bytes += request.size
            taken_parts += request.pieces
            if count and (
                taken_bytes > self.settings.flush_bytes_max or taken_parts > FLUSH_PARTS_MAX
            ):
                return self._take_first(count)
        return self._take_first(len(self._open))

    def _take_first(self, count: int) -> list[Request]:
        taken, self._open = self._open[:count], self._open[count:]
        self._open_bytes -= sum(request.size for request in taken)
        return taken

    async def _flush(self, requests: list[Request]) -> bool:
        segment = ClosedSegment(requests)
        try:
            encoded = await self._encode(segment, requests)
            started_s = self.clock.boot_s()
            outcomes = await self.committer.commit(encoded.draft)
        except Unavailable as error:  # definitely not in the WAL (Wal.commit)
            self._failed(requests, error)
            await asyncio.sleep(0.1)  # a full disk stays full for a while
            return False
        except CommitUnknown as error:
            self._failed(requests, error)
            return False
        except (Corrupt, StoreUnfit) as error:
            # The chain does not go on, so nobody can say whether our entry is in it.
            self._failed(requests, CommitUnknown(f"the WAL cannot be continued: {error}"))
            await asyncio.sleep(1.0)
            return False
        self._count(len(requests), encoded, self.clock.boot_s() - started_s)
        self._on_committed(segment, encoded, outcomes)
        for answer in segment.answers(outcomes):
            self._answer(answer.request, answer.placements, answer.error)
        if self.hot_log is not None:
            marks = [request.hot for request in requests if request.hot is not None]
            self.hot_log.committed(marks)
        return True

    def _count(self, requests: int, encoded: Encoded, seconds: float) -> None:
        size = sum(len(body) for body in encoded.draft.bodies)
        records = sum(chunk.rows for chunk in encoded.draft.chunks)
        counters = self.counters
        counters.flushes += 1
        counters.flush_bytes += size
        counters.records += records
        counters.commit_latency.add(seconds)
        counters.batch_requests.add(requests)
        counters.batch_records.add(records)
        counters.batch_bytes.add(size)

    async def _encode(self, segment: ClosedSegment, requests: list[Request]) -> Encoded:
        if sum(request.size for request in requests) < ENCODE_INLINE_BYTES:
            return segment.encode(self.settings.codec)
        return await asyncio.to_thread(segment.encode, self.settings.codec)

    def _failed(self, requests: list[Request], error: LogError) -> None:
        """Tell those who wait for the commit; keep, in order and first, what was acked already."""
        self.counters.flushes_failed += 1
        log.error("flush of %d requests failed: %s", len(requests), error)
        acked = [request for request in requests if request.hot is not None]
        for request in requests:
            if request.hot is None:
                self._answer(request, [], error)
        self._open[:0] = acked
        self._open_bytes += sum(request.size for request in acked)

    def _answer(
        self, request: Request, placements: list[Placement], error: LogError | None
    ) -> None:
        self.buffered_bytes -= _cost(request)
        waiter = self._waiters.pop(request)
        if request.key is not None:
            under_way = self._keyed.get(request.key.key)
            if under_way is not None and under_way.waiter is waiter:
                del self._keyed[request.key.key]
        if waiter.done():
            return  # its caller has gone
        if error is None:
            waiter.set_result(placements)
        else:
            waiter.set_exception(error)


def _cost(request: Request) -> int:
    return request.size + PART_OVERHEAD_BYTES * request.pieces


def _see(waiter: Waiter) -> None:
    """Shielded callers that go away leave an error that nobody has looked at: asyncio minds."""
    if not waiter.cancelled():
        waiter.exception()


def _forget(waiter: Waiter) -> None:
    """Nobody asks for the answer of acks=0 and 1; a refusal is worth a line."""
    if not waiter.cancelled() and (error := waiter.exception()) is not None:
        log.warning("unanswered request was not committed: %s", error)
