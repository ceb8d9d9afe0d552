"""Faults of the pace of commits: one stops the cluster without its guard, the others cost time.

A tick, a token and an alignment are advice. So the simulator must find nothing in `HARMLESS`.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.wal.commit_pace import CommitBudget, CommitPace, Tick

Patch = tuple[Any, str, Any]
Made: TypeAlias = Callable[[], list[Patch]]

STEP_S = 0.05


async def _wait_for_own(self: Sequencer) -> None:
    """Let drafts of peers wait until this broker has a draft of its own, or stops.

    The world is made before.
    """
    while self.wal.state.topics and self._queue and not self._is_closing:
        if any(waiting.origin is None for waiting in self._queue):
            return
        await asyncio.sleep(STEP_S)


def never_ticks() -> list[Patch]:
    return [(Sequencer, "_wait_until_due", _wait_for_own)]


def never_ticks_and_is_trusted() -> list[Patch]:
    return [*never_ticks(), (Sequencer, "_wait_and_timeout_s", lambda _: (60.0, math.inf))]


def never_aligns() -> list[Patch]:
    return [(CommitPace, "first_close_s", lambda _: -math.inf)]


def never_refills() -> list[Patch]:
    return [(CommitBudget, "tokens", lambda *_: 0.0)]


def ticks_are_wrong() -> list[Patch]:
    real, numbers = CommitPace.on_tick, iter(range(1_000_000_000))

    def on_tick(self: CommitPace, tick: Tick) -> None:
        number = next(numbers)
        real(self, Tick(number * 7919 % 700 - 100, number * 31 % 900, number * 17 % 3000))

    return [(CommitPace, "on_tick", on_tick)]


MUTATIONS = (
    (
        "a sequencer that never ticks is not suspected",
        never_ticks_and_is_trusted,
        ("brokers",),
        20,
    ),
)
HARMLESS: tuple[Made, ...] = (never_ticks, never_aligns, never_refills, ticks_are_wrong)
