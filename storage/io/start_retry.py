"""Repetition of requests at a start: the store may not serve them for a moment.

A starting broker has no clients yet, so it waits for its store. A process that ended instead would
be started again by its supervisor, with longer and longer pauses. A running broker does not use
this: its callers have deadlines of their own.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tidelog.storage.core.errors import StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.io.clock import Clock

log = logging.getLogger("tidelog.start")

T = TypeVar("T")

START_RETRY_S = 60.0
"""Time for which one step of a start may fail. A store that restarts (SeaweedFS, MinIO, a gateway)
answers again within it, and an orchestrator gives a start two minutes."""
REFUSALS_MAX = 3
"""A refusal (403, no space) that repeats is definite: rights that were granted seconds ago and
proxies in trouble refuse once or twice."""
PAUSE_S = 0.2
"""First pause between two tries; it doubles, and half of each pause is random: brokers that were
started together do not ask together."""
PAUSE_S_MAX = 3.0


class StartRetry(NamedTuple):
    """Repeats steps of a start for a while. Each step has the whole budget: a store that
    serves other requests in between makes progress."""

    clock: Clock
    budget_s: float = START_RETRY_S

    async def until_done(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeat the step until it succeeds. It may be repeated after any Unavailable.

        Raises the last Unavailable when the budget is spent; StoreUnfit if the store refuses
        REFUSALS_MAX times in a row; any other error at once.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s, pause_s, refusals = now_s() + self.budget_s, PAUSE_S, 0
        while True:
            try:
                return await step()
            except StoreRefused as error:
                refusals += 1
                if refusals == REFUSALS_MAX:
                    raise StoreUnfit(str(error)) from error
            except Unavailable as error:
                refusals = 0
                left_s = deadline_s - now_s()
                if left_s <= 0:
                    raise
                log.warning("%s; trying again for %.0f s", error, left_s)
            await asyncio.sleep(pause_s * (0.5 + self.clock.new_id()[-1] / 512))
            pause_s = min(pause_s * 2, PAUSE_S_MAX)
