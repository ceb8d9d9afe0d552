"""Retries of requests while a broker starts, because the store may be unavailable for a moment.

A starting broker has no clients yet, so it waits for its store. If the process ended instead, its
supervisor would start it again, with longer and longer pauses. A running broker does not use this
module, because its callers have their own deadlines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tidelog.storage.core.errors import StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.runtime.clock import Clock

log = logging.getLogger("tidelog.start")

T = TypeVar("T")

REFUSALS_MAX = 3
"""Refusals (403, no space) in a row after which the start fails. One or two refusals may be
temporary, for example because access was granted seconds ago or a proxy has a problem."""
PAUSE_S = 0.2
"""First pause between two tries. The pause doubles after each try, up to PAUSE_S_MAX. Half of it is
random, so that brokers that start together do not send their requests together."""
PAUSE_S_MAX = 3.0


class StartRetry(NamedTuple):
    """The retry policy of one start.

    Each step may use the whole budget, because the start makes progress with each step that
    succeeds.
    """

    clock: Clock
    budget_s: float

    async def until_done(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeat the step until it succeeds. The step must allow a repetition after Unavailable.

        When the budget is spent, raises the last Unavailable. If the store refuses REFUSALS_MAX
        times in a row, raises StoreUnfit. Raises any other error at once.
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
