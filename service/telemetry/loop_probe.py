"""How long the event loop runs callbacks before it looks at its timers again, in CPU time of its
thread: meanwhile, no other request goes on.

A timer runs each PERIOD_S. If it runs late, the loop was held for as long as it is late, unless the
thread waited for a CPU or a lock: so the time that counts is not more than the CPU time since the
timer ran last. A stretch that begins before the timer is due is seen too short, by PERIOD_S at
most. ~3 us each time.
"""

import asyncio
import time

from tidelog.storage.core.histogram import Histogram

PERIOD_S = 0.01
HELD_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds of the histogram. The aim is at most 0.02."""


class LoopProbe:
    """Measures the running event loop, from `start` to `stop`."""

    def __init__(self, held: Histogram) -> None:
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._cpu_s = 0.0

    def start(self) -> None:
        """Start the timer. Call it on the loop's thread."""
        self._due_s = time.perf_counter() + PERIOD_S
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(PERIOD_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        late_s = time.perf_counter() - self._due_s
        self._held.add(max(min(late_s, time.thread_time() - self._cpu_s), 0.0))
        self.start()
