"""The threads that unpack and check what clients send, and whose turn it is.

These are batches and large requests of Kafka clients, and compressed or large bodies of HTTP. Large
answers are encoded in these threads, too. A few bytes may take seconds and much memory. The threads
are not those of the event loop's executor, because flushes and seals need these. The work of a
request may be done in slices. If several principals wait, the next slice is of the principal with
the fewest slices under way, and among equals, of the one that has waited longest. So one principal
delays another by the slices under way alone. A principal's quota `request_percentage` is charged
with the CPU time of its slices.

Invariants:
C1 At most THREADS slices are under way.
C2 Their unpacked bytes are at most UNPACKED_ALL_BYTES_MAX, or those of one slice. Principals share
   these bytes (memory_pool). They are given back at the end of a slice.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from tidelog.service.memory_pool import UNPROVED, MemoryPool, Share
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.state.access import REQUEST_PERCENTAGE

T = TypeVar("T")

THREADS = 2
UNPACKED_ALL_BYTES_MAX = 96 << 20
"""Unpacked bytes of all slices at a time."""
PERCENT = 100
"""Charges are seconds times PERCENT, because the quota's rate is PERCENT for a whole thread."""


class SliceCaller(Protocol):
    """The caller whose request needs a slice: see service.security.caller.CallerRights."""

    @property
    def principal(self) -> str: ...

    def record(self, quota: str, size: float) -> None: ...


class _Unproved:
    """The caller of a public route."""

    principal = UNPROVED

    def record(self, quota: str, size: float) -> None:
        """No quota counts requests of public routes."""


UNPROVED_CALLER: SliceCaller = _Unproved()


class _Slice:
    """A slice under way: what its caller holds, and has used."""

    __slots__ = ("caller", "share", "unpacked_bytes", "used_s")

    def __init__(
        self, caller: SliceCaller, unpacked_bytes: int, share: "Share | _Use | None"
    ) -> None:
        self.caller = caller
        self.unpacked_bytes = unpacked_bytes
        self.share = share
        if share is not None:
            share.begin_use()
        self.used_s = 0.0
        """CPU time."""

    def run(self, work: Callable[[], T]) -> T:
        """Called in the thread."""
        began_s = time.thread_time()
        try:
            return work()
        finally:
            self.used_s = time.thread_time() - began_s


class _Use:
    """Whether a thread uses the memory of a slice (memory_pool.Share has the same methods)."""

    def __init__(self) -> None:
        self.is_begun = False
        self.ended = asyncio.Event()

    def begin_use(self) -> None:
        self.is_begun = True

    def end_use(self) -> None:
        self.ended.set()


class _Unpacking:
    """A slice that waits for the memory of its unpacked bytes (memory_pool.Taker)."""

    def __init__(self, pool: MemoryPool, owner: str, size: int) -> None:
        self._pool = pool
        self._size = size
        self.owner = owner
        self.has_memory: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_memory(self) -> None:
        if not self.has_memory.done() and self._pool.take(self, self._size):
            self.has_memory.set_result(None)


class UnpackThreads:
    """The threads of one broker. Owned by its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(THREADS, "tidelog-unpack")
        self.unpacked = MemoryPool(UNPACKED_ALL_BYTES_MAX)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: Counter[str] = Counter()

    async def run(
        self,
        caller: SliceCaller,
        unpacked_bytes: int,
        work: Callable[[], T],
        share: "Share | _Use | None" = None,
    ) -> T:
        """Run a slice that unpacks at most so many bytes, when it is its turn.

        Return its result. A slice that was cancelled holds its bytes to the end of its work, also
        those of `share`, which has the memory of what it unpacks.
        """
        principal = caller.principal
        await self._take(principal, unpacked_bytes)
        try:
            await self._begin(principal)
        except BaseException:
            self.unpacked.give(principal, unpacked_bytes)
            raise
        return await self._started(_Slice(caller, unpacked_bytes, share), work)

    async def run_to_end(self, caller: SliceCaller, work: Callable[[], T]) -> T:
        """Run a slice that unpacks nothing, when it is its turn.

        Return its result. After a cancellation, wait until a slice that has begun ends: the caller
        has the memory of what the slice uses, and gives it back.
        """
        use = _Use()
        try:
            return await self.run(caller, 0, work, use)
        except asyncio.CancelledError:
            while use.is_begun and not use.ended.is_set():
                with suppress(asyncio.CancelledError):
                    await use.ended.wait()
            raise

    def _started(self, begun: _Slice, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Begin the work.

        `run` has no variable for the future: the error in a future has `run` in its traceback, and
        such a cycle would keep the body until a garbage collection.
        """
        try:
            future = self._loop.run_in_executor(self._executor, begun.run, work)
        except BaseException:
            self._end_slice(begun)
            raise
        future.add_done_callback(partial(self._end_slice, begun))
        future.add_done_callback(retrieve_exception)
        return asyncio.shield(future)  # a cancellation does not end the work

    def _end_slice(self, ended: _Slice, _: object = None) -> None:
        principal = ended.caller.principal
        ended.caller.record(REQUEST_PERCENTAGE, ended.used_s * PERCENT)
        self.unpacked.give(principal, ended.unpacked_bytes)
        if ended.share is not None:
            ended.share.end_use()
        self._end(principal)

    async def _take(self, principal: str, unpacked_bytes: int) -> None:
        if not unpacked_bytes:
            return
        taker = _Unpacking(self.unpacked, principal, unpacked_bytes)
        taker.on_memory()
        try:
            await taker.has_memory
        except asyncio.CancelledError:
            if taker.has_memory.done() and not taker.has_memory.cancelled():
                self.unpacked.give(principal, unpacked_bytes)
            self.unpacked.leave(taker)
            raise

    async def _begin(self, principal: str) -> None:
        if not self._waiting and self._running.total() < THREADS:
            self._running[principal] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(principal)
            raise

    def _end(self, principal: str) -> None:
        self._running[principal] -= 1
        if not self._running[principal]:
            del self._running[principal]
        while self._waiting and self._running.total() < THREADS:
            first = min(self._waiting, key=self._running.__getitem__)
            turns = self._waiting[first]
            turn = turns.popleft()
            if not turn.cancelled():
                self._running[first] += 1
                turn.set_result(None)
                self._waiting[first] = self._waiting.pop(first)  # behind the others
            if not turns:
                del self._waiting[first]
