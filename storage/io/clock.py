"""Time, randomness and ids as an argument: only this module of storage/ and compaction/ reads them.

The simulator passes its own clock. The linter (banned-api) forbids `time`, `random`, `uuid`.
"""

import os
import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks and a source of ids."""

    def now_ms(self) -> int:
        """Return wall time, milliseconds since the epoch; it may jump."""

    def boot_s(self) -> float:
        """Return seconds since boot *including suspend*; never jumps back. Ages a WAL view."""

    def new_id(self) -> bytes:
        """Return 16 bytes, unique among all processes."""


# CLOCK_MONOTONIC stops during suspend: a resumed broker would take its view for fresh.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's clocks and random source."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000  # noqa: TID251 - the only call

    def boot_s(self) -> float:
        return time.clock_gettime(_BOOT_CLOCK)

    def new_id(self) -> bytes:
        # Never from a stock in memory: a copy of the process would have the same ids.
        return os.urandom(16)
