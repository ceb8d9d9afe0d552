"""The threads that check the batches of Produce requests, and whose turn it is.

A client may send batches whose check takes seconds. The threads are not those of the event loop's
executor, because flushes and seals need these. A check is done in slices. If several principals
wait, the next slice is of the principal with the fewest slices under way, and among equals, of the
one that has waited longest. So one principal delays another by the slices under way alone.

Invariants:
C1 At most THREADS slices are under way.
C2 Their unpacked bytes are at most UNPACKED_ALL_BYTES_MAX, or those of one batch.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tidelog.service.security.caller import CallerRights
from tidelog.service.security.request_time import in_thread

THREADS = 2
UNPACKED_BYTES_MAX = 128 << 20
"""The most bytes that a batch of a producer may unpack to."""
UNPACKED_ALL_BYTES_MAX = 160 << 20
"""Unpacked bytes of all checks at a time."""
SLICE_S = 0.02
"""Time after which a check lets another one go on. The check of one batch may take longer."""


class CheckThreads:
    """The threads of one listener. Owned by its event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "tidelog-check")
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._running: Counter[str] = Counter()
        self._under_way = self._unpacked_bytes = 0

    async def run(
        self, rights: CallerRights, unpacked_bytes: int, check_slice: Callable[[], None]
    ) -> None:
        """Run a slice that unpacks at most so many bytes at a time, when it is its turn. Its CPU
        time is charged to the caller."""
        principal = rights.principal
        await self._begin(principal, unpacked_bytes)
        try:
            await in_thread(rights, check_slice, executor=self._executor)
        finally:
            self._end(principal, unpacked_bytes)

    async def _begin(self, principal: str, unpacked_bytes: int) -> None:
        if not self._waiting and self._has_room(unpacked_bytes):
            self._count(principal, unpacked_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append((unpacked_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(principal, unpacked_bytes)
            raise

    def _has_room(self, unpacked_bytes: int) -> bool:
        all_bytes = self._unpacked_bytes + unpacked_bytes
        is_within = not self._under_way or all_bytes <= UNPACKED_ALL_BYTES_MAX
        return self._under_way < THREADS and is_within

    def _count(self, principal: str, unpacked_bytes: int) -> None:
        self._running[principal] += 1
        self._under_way += 1
        self._unpacked_bytes += unpacked_bytes

    def _end(self, principal: str, unpacked_bytes: int) -> None:
        self._under_way -= 1
        self._unpacked_bytes -= unpacked_bytes
        self._running[principal] -= 1
        if not self._running[principal]:
            del self._running[principal]
        while self._waiting:
            first = min(self._waiting, key=self._running.__getitem__)
            turns = self._waiting[first]
            size, turn = turns[0]
            if not turn.cancelled() and not self._has_room(size):
                return
            turns.popleft()
            del self._waiting[first]
            if turns:
                self._waiting[first] = turns  # behind the others
            if not turn.cancelled():
                self._count(first, size)
                turn.set_result(None)
