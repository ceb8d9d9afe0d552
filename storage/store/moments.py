"""Ages by two clocks: the machine's boot clock and the store's.

The boot clock may stop while a host pauses the machine. The store's clock has a resolution of a
second, and is not known before the store's first answer. So an age is the longer of the two times
that these clocks show.
"""

import math
from typing import NamedTuple

from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.object_store import ObjectStore

STORE_CLOCK_STEP_S = 1.0
"""Resolution of the store's clock: S3 gives dates in seconds."""


class Moment(NamedTuple):
    """A moment by the machine's boot clock, and by the store's in its last answer (0: none yet)."""

    boot_s: float
    store_ms: int


NEVER = Moment(-math.inf, 0)


def moment_now(store: ObjectStore, clock: Clock) -> Moment:
    return Moment(clock.boot_s(), store.seen_ms)


def age_s(store: ObjectStore, clock: Clock, since: Moment) -> float:
    """Return the seconds since a moment."""
    boot_s = clock.boot_s() - since.boot_s
    seen_ms = store.seen_ms
    if not (since.store_ms and seen_ms):
        return boot_s
    return max(boot_s, (seen_ms - since.store_ms) / 1000 - STORE_CLOCK_STEP_S)
