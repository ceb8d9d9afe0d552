"""Turns of one event loop: work of connections that may take the loop from the others.

In each iteration of the loop, such work has TURN_S in all. The rest of it waits for the next
iterations, in which the owners take turns: addresses of clients, or principals. So a client with
thousands of connections delays another client by one piece of its work.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

TURN_S = 0.004

Work = Callable[[], object]


class Turns:
    """The turns of one event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.clock_s = clock_s
        self._end_s = 0.0
        """When the work of this iteration of the loop ends; 0 if it has not begun."""
        self._has_task = False  # whose work the next iteration does
        self._first: dict[object, Work] = {}
        """Work that goes before that of all owners, by connection."""
        self._waiting: dict[str, dict[object, Work]] = {}
        """The work of each owner, by connection. The first owner is the next."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return when work of this iteration of the loop must stop, by `clock_s`."""
        if not self._end_s:
            self._end_s = self.clock_s() + TURN_S
            loop.call_soon(self._next_iteration, loop)
        return self._end_s

    def wait(
        self,
        owner: str,
        connection: object,
        work: Work,
        loop: asyncio.AbstractEventLoop,
        *,
        is_first: bool = False,
    ) -> None:
        """Call `work` of a connection when it is its owner's turn, or before all owners."""
        of_owner = self._first if is_first else self._waiting.setdefault(owner, {})
        of_owner[connection] = work
        self.begin(loop)

    async def come(self, owner: str) -> None:
        """Return when it is the owner's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        try:
            self.wait_for_task(owner, turn, partial(_resume, turn), loop)
            await turn
        finally:
            self.leave(owner, turn)
        self.begin(loop)

    def wait_for_task(
        self, owner: str, connection: object, begin: Work, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Call `begin`, which begins or resumes a task, when it is the owner's turn.

        One task has a turn in an iteration, because its work is done in the next one, which this
        iteration cannot measure.
        """
        self.wait(owner, connection, partial(self._begin_task, begin), loop)

    def _begin_task(self, begin: Work) -> None:
        begin()
        self._has_task = True

    def leave(self, owner: str, connection: object) -> None:
        """Forget the work of a connection. A second call does nothing."""
        self._first.pop(connection, None)
        of_owner = self._waiting.get(owner)
        if of_owner is not None:
            of_owner.pop(connection, None)
            if not of_owner:
                del self._waiting[owner]

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end_s = 0.0
        if not (self._first or self._waiting):
            return
        end_s = self.begin(loop)
        while self._first or self._waiting:
            self._has_task = False
            self._pop()()
            if self._has_task or self.clock_s() >= end_s:
                break

    def _pop(self) -> Work:
        if self._first:
            return self._first.pop(next(iter(self._first)))
        owner = next(iter(self._waiting))
        of_owner = self._waiting.pop(owner)
        work = of_owner.pop(next(iter(of_owner)))
        if of_owner:
            self._waiting[owner] = of_owner
        return work


def _resume(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
