"""The schedule of a broker's checkpoints of its view.

**On a crash** during the write: a whole checkpoint is left, or none (wal_objects).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tidelog.storage.runtime.tasks import begin_duty, surviving
from tidelog.storage.wal.wal_objects import WalObjects

log = logging.getLogger("tidelog.wal")


class CheckpointSchedule:
    """The schedule of one WAL view's checkpoints. Writes one checkpoint at a time, in a task."""

    def __init__(
        self, objects: WalObjects, *, entries_least: int, entries_max: int, interval_s: float
    ) -> None:
        """A checkpoint is due after `entries_least` entries and `interval_s` seconds.

        Both count from the last checkpoint, if this broker has committed since then. After
        `entries_max` entries a checkpoint is due in any case.
        """
        self._objects = objects
        self._entries_least = entries_least
        self._entries_max = entries_max
        self._interval_s = interval_s
        self._seq = 0
        self._begun_s = 0.0
        self._committed = 0
        self._writing: asyncio.Task[None] | None = None

    def on_loaded(self, seq: int) -> None:
        """Handle a load of the view from the checkpoint after entry `seq`."""
        self._seq = seq
        self._begun_s = self._objects.clock.boot_s()

    def write_if_due(self, seq: int, write: Callable[[], Awaitable[object]]) -> None:
        """If a checkpoint is due after entry `seq`, let `write` write it."""
        since = seq - self._seq
        now_s, committed = self._objects.clock.boot_s(), self._objects.counters.entries_committed
        rested = now_s - self._begun_s >= self._interval_s
        # Only a broker that commits writes checkpoints. Else all brokers would write the same one.
        is_due = rested and since >= self._entries_least and committed > self._committed
        is_running = self._writing is not None and not self._writing.done()
        if (is_due or since >= self._entries_max) and not is_running:
            self._begun_s = now_s
            self._seq = seq
            self._committed = committed
            self._writing = begin_duty("checkpoint", self._write(write))

    def write_now(self, seq: int, write: Callable[[], Awaitable[object]]) -> None:
        """If there is no checkpoint after entry `seq`, let `write` write one.

        A broker calls this at its start and at its stop. The next start then does not read the
        entries up to `seq`, so it does not fail if one of these entries is damaged.
        """
        if seq > self._seq and (self._writing is None or self._writing.done()):
            self._seq = seq
            self._writing = begin_duty("checkpoint", self._write(write))

    async def write_last(self, seq: int, write: Callable[[], Awaitable[object]]) -> None:
        """Wait for the checkpoint that is being written, do as `write_now`, and wait again."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        self.write_now(seq, write)
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self, write: Callable[[], Awaitable[object]]) -> None:
        with surviving(log, "a checkpoint"):  # retried when the next one is due
            await write()

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._writing
