"""The judgement of `make fuzz INPUTS=N`: how long a target's inputs hold the event loop.

Also what they leave in memory.

Steps are measured in CPU time of their thread (held_loop), and memory after the broker of the
target has stopped. So other work on the machine changes neither.
"""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.held_loop import Held, measured

STEP_CPU_S_MAX = 0.1
"""The longest step of the service on the event loop."""
GROWTH_MAX = 1.1
"""Memory at the end, divided by the memory after the warm-up."""
WARM_UP_PART, WARM_UP_MIN = 10, 2_000
"""The first tenth of the inputs, and at least so many, fill caches and load modules."""
MIB = 1 << 20


class Judge:
    """Judges the inputs of one target. `settle` frees all that its inputs may leave."""

    def __init__(self, held_steps: Held, settle: Callable[[], None]) -> None:
        self._held = held_steps
        self._settle = settle
        self._begin_bytes = 0

    def begin(self) -> None:
        """Note the memory: the warm-up is over."""
        self._begin_bytes = self._settled_bytes()

    def slow_steps(self) -> list[str]:
        """Return the steps above STEP_CPU_S_MAX since the last call."""
        steps = [
            f"a step of {held_s} s of CPU: {step_name}" for held_s, step_name in self._held.found
        ]
        self._held.found.clear()
        return steps

    def growth(self) -> str:
        """Return what has grown since `begin`; empty if the memory is back."""
        end_bytes = self._settled_bytes()
        if not self._begin_bytes or end_bytes <= self._begin_bytes * GROWTH_MAX:
            return ""
        return f"memory grew from {self._begin_bytes // MIB} to {end_bytes // MIB} MiB"

    def _settled_bytes(self) -> int:
        self._settle()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        return _resident_bytes()


@contextlib.contextmanager
def judging(settle: Callable[[], None]) -> Iterator[Judge]:
    """Judge what runs on the event loops of this thread."""
    with measured(STEP_CPU_S_MAX, slowness=lambda: 1.0) as held_steps:
        yield Judge(held_steps, settle)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
