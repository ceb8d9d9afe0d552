"""The cluster's elapsed time: a lower bound of the time that has passed.

The cluster forgets some data after a time: idempotency keys, offsets, producers, drafts, holds,
uploads. It measures this time as elapsed time. To forget late is harmless, but to forget early is
not. A clock that is wrong, jumps or stops may slow the elapsed time, but cannot move it far ahead.

An entry advances the elapsed time to this sum: the elapsed time after the writer's previous entry,
plus the time (at most `STEP_MS_MAX`) that passed on the writer's clock since that entry. The
elapsed time never decreases, and a writer's first entry does not change it.

Pure: a part of the cluster state, the same on every broker (I4).
"""

import msgspec

STEP_MS_MAX = 600_000
"""The most that one entry adds. So a clock that jumps by years adds ten minutes."""
WRITERS_MAX = 1000
"""Writers whose clocks are kept (I10); ~100 bytes each. The writer whose last entry is oldest is
dropped first."""


class WriterClock(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The time on a writer's clock at its last entry, and the elapsed time after that entry."""

    writer: str
    at_ms: int
    elapsed_ms: int


class ElapsedCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Elapsed time in a checkpoint. The clocks are in the order of their writers' last entries."""

    elapsed_ms: int
    writers: list[WriterClock]


class ElapsedTime:
    """The elapsed time, in ms; its zero has no meaning. Owned by the cluster state."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._writers: dict[str, WriterClock] = {}

    def see(self, writer: str, at_ms: int) -> None:
        """Advance the elapsed time for an entry of `writer`, whose clock was at `at_ms`."""
        clock = self._writers.pop(writer, None)  # inserted again below, at the end
        if clock is not None:
            passed_ms = min(max(at_ms - clock.at_ms, 0), STEP_MS_MAX)
            self.now_ms = max(self.now_ms, clock.elapsed_ms + passed_ms)
        self._writers[writer] = WriterClock(writer, at_ms, self.now_ms)
        if len(self._writers) > WRITERS_MAX:
            del self._writers[next(iter(self._writers))]

    def last_ms(self, writer: str) -> int | None:
        """Return the time on the writer's clock at the writer's last entry.

        If the writer is not known, return None.
        """
        clock = self._writers.get(writer)
        return None if clock is None else clock.at_ms

    def kept(self) -> ElapsedCheckpoint:
        return ElapsedCheckpoint(self.now_ms, list(self._writers.values()))

    def load(self, checkpoint: ElapsedCheckpoint | None) -> None:
        if checkpoint is None:
            return  # level 1
        self.now_ms = checkpoint.elapsed_ms
        self._writers = {clock.writer: clock for clock in checkpoint.writers}
