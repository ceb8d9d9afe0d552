"""The threads that check the batches of Produce requests, and whose turn it is.

A client may send batches whose check takes seconds. The threads are not those of the event loop's
executor, because flushes and seals need these. A check is done in slices. If several principals
wait, the next slice is of the principal with the fewest slices under way, and among equals, of the
one that has waited longest. So one principal delays another by the slices under way alone.

Invariants:
C1 At most THREADS slices are under way.
C2 Their unpacked bytes are at most UNPACKED_ALL_BYTES_MAX, or those of one batch. Principals share
   these bytes (memory_pool). They are given back at the end of a slice.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tidelog.service.memory_pool import MemoryPool
from tidelog.service.security.caller import CallerRights
from tidelog.service.security.request_time import in_thread

THREADS = 2
UNPACKED_BYTES_MAX = 128 << 20
"""The most bytes that a batch of a producer may unpack to."""
UNPACKED_ALL_BYTES_MAX = 160 << 20
"""Unpacked bytes of all checks at a time."""
SLICE_S = 0.02
"""Time after which a check lets another one go on. The check of one batch may take longer."""


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


class CheckThreads:
    """The threads of one listener. Owned by its event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "tidelog-check")
        self.unpacked = MemoryPool(UNPACKED_ALL_BYTES_MAX)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: Counter[str] = Counter()

    async def run(
        self, rights: CallerRights, unpacked_bytes: int, check_slice: Callable[[], None]
    ) -> None:
        """Run a slice that unpacks at most so many bytes at a time, when it is its turn. Its CPU
        time is charged to the caller."""
        principal = rights.principal
        if not unpacked_bytes:
            await self._run(rights, check_slice)
            return
        await self._take(principal, unpacked_bytes)
        try:
            await self._run(rights, check_slice)
        finally:
            self.unpacked.give(principal, unpacked_bytes)

    async def _take(self, principal: str, unpacked_bytes: int) -> None:
        taker = _Unpacking(self.unpacked, principal, unpacked_bytes)
        taker.on_memory()
        try:
            await taker.has_memory
        except asyncio.CancelledError:
            if taker.has_memory.done() and not taker.has_memory.cancelled():
                self.unpacked.give(principal, unpacked_bytes)
            self.unpacked.leave(taker)
            raise

    async def _run(self, rights: CallerRights, check_slice: Callable[[], None]) -> None:
        principal = rights.principal
        await self._begin(principal)
        try:
            await in_thread(rights, check_slice, executor=self._executor)
        finally:
            self._end(principal)

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
            turns = self._waiting.pop(first)
            turn = turns.popleft()
            if turns:
                self._waiting[first] = turns  # behind the others
            if not turn.cancelled():
                self._running[first] += 1
                turn.set_result(None)
