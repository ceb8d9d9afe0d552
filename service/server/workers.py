"""`tidelog serve --workers N`: worker processes that share the port. Each worker is a broker.

The parent serves no requests. It starts the workers and sends SIGTERM to them when it gets SIGTERM
or SIGINT. If a worker ends, the parent starts it again: at once after the first end, and after
growing pauses if the worker ends again within LIVED_S. If every worker fails before any worker has
listened, the parent stops. Workers share only the store, as all brokers do.

**On a crash**: if the parent is killed, Linux sends SIGTERM to its workers.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event

from tidelog.service.exit_status import EXIT_FAILED, EXIT_OK
from tidelog.service.server.log_lines import log_to_stderr
from tidelog.service.server.serve import STOP_S_MAX, leave, run
from tidelog.service.settings.settings import Settings
from tidelog.storage.runtime.clock import SystemClock

log = logging.getLogger("tidelog.workers")

RESTART_S = 0.5
RESTART_S_MAX = 15.0
LIVED_S = 30.0
"""If a worker ran for this time, the parent counts its failures from 1 again."""
END_MARGIN_S = 6.0
"""Workers must end within `drain_ms`, STOP_S_MAX and this time."""

_CLOCK = SystemClock()
_PR_SET_PDEATHSIG = 1


def restart_pause_s(failures: int) -> float:
    """Return the pause before a restart, after this number of early ends in a row."""
    return 0.0 if failures <= 1 else min(RESTART_S * 2 ** min(failures - 2, 10), RESTART_S_MAX)


@dataclass(eq=False)
class _Worker:
    number: int
    process: SpawnProcess | None = None
    is_up: Event | None = None
    started_s: float = 0.0
    next_start_s: float = 0.0
    failures: int = 0
    status: int = EXIT_OK


class Workers:
    """The worker processes, owned by the parent. `run` blocks its main thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("spawn")
        self._workers = [_Worker(number) for number in range(1, settings.workers + 1)]
        self._is_ending = False
        self._has_been_up = False
        self._wake, self._signalled = socket.socketpair()

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until each worker has failed and none has ever listened.

        Return the exit status.
        """
        self._signalled.setblocking(False)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        try:
            while not self._is_ending and not self._has_failed():
                self._start_due()
                self._wait(self._pause_s())
                self._look()
        finally:
            self._is_ending = True
            status = self._wait_for_ends()
            signal.set_wakeup_fd(-1)
            self._wake.close()
            self._signalled.close()
        return status

    def _end(self, *_: object) -> None:
        if self._is_ending:  # a second signal: the workers end their drains
            self._terminate()
        self._is_ending = True

    def _terminate(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.terminate()

    def _has_failed(self) -> bool:
        """Whether each worker has failed and none has ever listened."""
        return not self._has_been_up and all(worker.failures for worker in self._workers)

    def _start_due(self) -> None:
        for worker in self._workers:
            if worker.process is None and worker.next_start_s <= _CLOCK.boot_s():
                worker.is_up = self._context.Event()
                worker.process = self._context.Process(
                    target=_work,
                    args=(self._settings, worker.number, worker.is_up, os.getpid()),
                )
                worker.started_s = _CLOCK.boot_s()
                worker.process.start()

    def _pause_s(self) -> float:
        waits = [
            worker.next_start_s - _CLOCK.boot_s() for worker in self._workers if not worker.process
        ]
        return max(min([1.0, *waits]), 0.0)

    def _wait(self, seconds: float) -> None:
        sentinels = [worker.process.sentinel for worker in self._workers if worker.process]
        _ = connection.wait([*sentinels, self._wake], seconds)

    def _look(self) -> None:
        """Note which workers listen. If a worker has ended, set the time of its restart."""
        for worker in self._workers:
            process = worker.process
            if process is None or worker.is_up is None:
                continue
            self._has_been_up = self._has_been_up or worker.is_up.is_set()
            if process.exitcode is None:
                continue
            lived_s = _CLOCK.boot_s() - worker.started_s
            worker.failures = 1 if lived_s >= LIVED_S else worker.failures + 1
            worker.status = process.exitcode
            worker.process = None
            pause_s = restart_pause_s(worker.failures)
            worker.next_start_s = _CLOCK.boot_s() + pause_s
            if not self._is_ending:
                log.error(
                    "worker %d (process %d) ended with %d after %.1f s, restart in %.1f s",
                    worker.number,
                    process.pid,
                    process.exitcode,
                    lived_s,
                    pause_s,
                )
            process.close()

    def _wait_for_ends(self) -> int:
        """Send SIGTERM to all workers, wait for their ends, then kill those that still run.

        Return the first status that is not 0 (EXIT_FAILED for a signal), else 0. Workers that ended
        before this call count only if each worker has failed and none has ever listened.
        """
        has_failed = self._has_failed()
        statuses = [worker.status for worker in self._workers if has_failed]
        deadline_s = _CLOCK.boot_s() + self._settings.drain_ms / 1000 + STOP_S_MAX + END_MARGIN_S
        self._terminate()
        for worker in self._workers:
            if worker.process is not None:
                worker.process.join(max(deadline_s - _CLOCK.boot_s(), 0.1))
                if worker.process.exitcode is None:
                    log.error("worker %d did not end in time: killing it", worker.number)
                    worker.process.kill()
                    worker.process.join()
                statuses.append(worker.process.exitcode or EXIT_OK)
        failed = [status for status in statuses if status != EXIT_OK]
        if not failed:
            return EXIT_OK
        return failed[0] if failed[0] > 0 else EXIT_FAILED


def supervise(settings: Settings) -> int:
    log_to_stderr(settings)
    return Workers(settings).run()


def end_with(parent: int) -> None:
    """Let Linux send SIGTERM to this process when its parent ends. If it has ended, exit."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


def _work(settings: Settings, number: int, is_up: Event, parent: int) -> None:
    """Run one worker. This is the entry point of its process."""
    end_with(parent)
    leave(run(settings, on_listening=is_up.set, worker=number))
