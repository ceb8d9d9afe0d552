"""Output of records by a thread. If the reader of the pipe blocks, only this thread waits: the
command sends the heartbeats of its group, and SIGTERM ends it.

The thread is a daemon and writes by `os.write`, so the process can end during a write.
"""

import asyncio
import io
import os
import queue
import sys
import threading
from typing import TypeAlias

from tidelog.service.cli.results import BrokenOutput

LAST_WRITE_S = 0.1
Job: TypeAlias = tuple[bytes, asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Output:
    """stdout of one command. `is_written` means that the last write is complete."""

    def __init__(self) -> None:
        self.is_written = True
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def write(self, octets: bytes) -> None:
        """Write all bytes. Raises BrokenOutput. If the task is cancelled, wait LAST_WRITE_S for the
        write, so that the caller knows whether the records are printed."""
        if not octets:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidelog-output", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._jobs.put((octets, loop, written))
        self.is_written = False
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait({written}, timeout=LAST_WRITE_S)
            self.is_written = written.done() and written.exception() is None
            raise
        self.is_written = True

    def _run(self) -> None:
        while True:
            octets, loop, written = self._jobs.get()
            error: Exception | None = None
            try:
                _write(octets)
            except BrokenPipeError:
                error = BrokenOutput()
            except OSError as failed:
                error = failed
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(_settle, written, error)


def _write(octets: bytes) -> None:
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:  # an embedding program has replaced stdout
        sys.stdout.buffer.write(octets)
        return
    rest = memoryview(octets)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _settle(written: "asyncio.Future[None]", error: Exception | None) -> None:
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
