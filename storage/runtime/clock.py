"""Clocks and random ids.

In storage/ and compaction/ only this module reads the machine's clocks and its random source.

Other modules get a `Clock` as an argument; the simulator passes its own. In other modules, the
linter (banned-api) forbids the functions of `time`, `random` and `uuid` that read a clock or a
random source.
"""

import os
import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks and a source of ids."""

    def now_ms(self) -> int:
        """Return wall time in milliseconds since the epoch. Wall time may jump."""

    def boot_s(self) -> float:
        """Return seconds since boot *including suspend*; never jumps back. Measures view age."""

    def new_id(self) -> bytes:
        """Return 16 bytes, unique among all processes."""


# CLOCK_MONOTONIC stops during suspend, so by that clock a resumed broker's old view looks fresh.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's clocks and random source."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000  # noqa: TID251 - the only call

    def boot_s(self) -> float:
        return time.clock_gettime(_BOOT_CLOCK)

    def new_id(self) -> bytes:
        # Do not keep random bytes for later ids, because a copy of the process would keep them too.
        # Two copies of a machine may even get equal bytes from the kernel, before it mixes in new
        # entropy. They also would have to draw in the same nanosecond.
        drawn = int.from_bytes(os.urandom(16)) ^ time.perf_counter_ns()
        return drawn.to_bytes(16)
