"""How slow this machine is at the moment: what limits in seconds are multiplied by."""

import time

SPIN_CPU_S = 0.2
"""Long enough for the scheduler to give turns to other processes."""
UNIT_STEPS = 20_000
UNITS = 32
"""Units of work that measure the speed of a core: ~20 ms, as long as a step that is too long."""


def slowness() -> float:
    """Measure the real time that a second of CPU time takes; 1.0 on an idle machine."""
    began_s, until_s = time.perf_counter(), time.thread_time() + SPIN_CPU_S
    while time.thread_time() < until_s:
        pass
    return max(1.0, (time.perf_counter() - began_s) / SPIN_CPU_S)


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether an idle machine does within `limit_s` what took `took_s` just now."""
    return took_s < limit_s or took_s < limit_s * slowness()


class CoreSpeed:
    """The CPU time of a unit of work.

    Other work on the machine changes it, because cores share caches and the host's time. The least
    time that this process has seen is the time on an idle machine.
    """

    def __init__(self) -> None:
        self._least_s = self.unit_s()

    def unit_s(self) -> float:
        """Do a unit of work; return its CPU time."""
        total, began_s = 0, time.thread_time()
        for step in range(UNIT_STEPS):
            total += step
        return time.thread_time() - began_s

    def note(self) -> None:
        """Do a unit of work, for the least time."""
        self._least_s = min(self._least_s, self.unit_s())

    def slowness(self) -> float:
        """Return how many times slower the core is now, by the slowest of some units."""
        units_s = [self.unit_s() for _ in range(UNITS)]
        self._least_s = min(self._least_s, *units_s)
        return max(units_s) / self._least_s
