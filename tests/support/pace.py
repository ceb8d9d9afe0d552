"""How slow this machine is at the moment: what limits in real seconds are multiplied by."""

import time

SPIN_CPU_S = 0.2
"""Long enough for the scheduler to give turns to other processes."""


def slowness() -> float:
    """Measure the real time that a second of CPU time takes; 1.0 on an idle machine."""
    began_s, until_s = time.perf_counter(), time.thread_time() + SPIN_CPU_S
    while time.thread_time() < until_s:
        pass
    return max(1.0, (time.perf_counter() - began_s) / SPIN_CPU_S)


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether an idle machine does within `limit_s` what took `took_s` just now."""
    return took_s < limit_s or took_s < limit_s * slowness()
