"""How long callbacks hold the event loop, in CPU time of its thread.

Meanwhile, no other request is served.

A timer is due each PERIOD_S. If it runs late, callbacks have held the loop for that time, or the
thread has waited for a CPU or a lock. So the probe records the smaller of two times: the delay of
the timer, and the thread's CPU time since the timer ran last. A callback that begins before the
timer is due is measured too short, by at most PERIOD_S. A measurement costs ~3 us.
"""

import asyncio
import time

from tidelog.storage.core.histogram import Histogram

PERIOD_S = 0.01
HELD_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds of the histogram, in seconds. The target is at most 0.02 s."""


class LoopProbe:
    """The measurement of the running event loop, from `start` to `stop`."""

    def __init__(self, histogram: Histogram) -> None:
        self._held = histogram
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._cpu_s = 0.0

    def start(self) -> None:
        """Start the timer. Call it on the loop's thread."""
        self._due_s = time.perf_counter() + PERIOD_S
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(PERIOD_S, self._measure)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        late_s = time.perf_counter() - self._due_s
        self._held.add(max(min(late_s, time.thread_time() - self._cpu_s), 0.0))
        self.start()
