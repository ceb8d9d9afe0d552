"""CPU time of a process by kind of thread, and its memory, from /proc (Linux).

The product gives its threads no names there (Python 3.11 does not), but a nice value: the threads
that seal, and the one that collects, have the lowest priority. The main thread runs the event loop.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LOWEST_PRIORITY = 19
SAMPLE_S = 0.2


class CpuTime(NamedTuple):
    """CPU seconds of a process: its main thread, threads of the lowest priority, all others."""

    loop_s: float
    background_s: float
    others_s: float

    @property
    def total_s(self) -> float:
        return self.loop_s + self.background_s + self.others_s

    def since(self, old_time: "CpuTime") -> "CpuTime":
        return CpuTime(*(now - then for now, then in zip(self, old_time, strict=True)))


class Watch:
    """Samples a process from `__enter__` to `__exit__`.

    So threads that end in between are counted up to their last sample. The time after that counts
    as that of other threads.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._pid = str(pid)
        self._seen: dict[str, tuple[bool, float]] = {}
        """By thread: whether it has the lowest priority, and its CPU seconds."""
        self._began_s = time.monotonic()
        self._resident: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.cpu = CpuTime(0.0, 0.0, 0.0)
        """The CPU time between `__enter__` and `__exit__`, after the latter."""

    def __enter__(self) -> Self:
        self._sample()
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._sample()
        self.cpu = self._now().since(self._before)

    def resident_at(self, share: float) -> int:
        """Return the resident bytes after this share of the time."""
        ended_s = self._resident[-1][0]
        return next(size for at_s, size in self._resident if at_s >= share * ended_s)

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with suppress(OSError):
            for name in os.listdir(self._folder / "task"):
                with suppress(OSError, IndexError):
                    folder = self._folder / "task" / name
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    run_ns = int((folder / "schedstat").read_text().split()[0])
                    self._seen[name] = int(fields[16]) == LOWEST_PRIORITY, run_ns / 1e9
            self._resident.append((time.monotonic() - self._began_s, resident_bytes(self._pid)))

    def _now(self) -> CpuTime:
        loop_s = self._seen[self._pid][1]
        background_s = sum(run_s for is_lowest, run_s in self._seen.values() if is_lowest)
        return CpuTime(loop_s, background_s, max(cpu_s(self._pid) - loop_s - background_s, 0.0))


def cpu_s(pid: int | str) -> float:
    """Return the CPU seconds of a process so far, those of ended threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
