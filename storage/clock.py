"""Time, randomness and ids as arguments: nothing else in storage/ or compaction/ reads a clock.

The simulator passes its own; the linter (banned-api) keeps `time`, `random`, `uuid` out elsewhere.
"""

import os
import time
from typing import Protocol

IDS_DRAWN = 256


class Clock(Protocol):
    """Two clocks and a source of ids."""

    def now_ms(self) -> int:
        """Wall time, milliseconds since the epoch; may jump."""
        ...

    def boot_s(self) -> float:
        """Seconds since boot *including suspend*; never jumps back. What ages a view of the WAL."""
        ...

    def new_id(self) -> bytes:
        """16 bytes that nobody else will ever draw."""
        ...


class SystemClock:
    """The machine's clocks and its random source. One a process: not to be carried over a fork."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000  # noqa: TID251 - the one place

    def boot_s(self) -> float:
        # CLOCK_MONOTONIC stands still while a machine sleeps: a zombie would believe itself young.
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime(clock)

    def new_id(self) -> bytes:
        # One system call for many ids: a produce of one record draws one, and takes 30 us in all.
        if not self._ids:
            drawn = os.urandom(16 * IDS_DRAWN)
            self._ids = [drawn[at : at + 16] for at in range(0, len(drawn), 16)]
        return self._ids.pop()
