"""The fence between a process's own entries and those of a copy of the process.

A cloned machine and a restored snapshot continue with the name, the ids and the memory of the
process. The hash of an entry shows who wrote it: this process knows the hashes of its own PUTs.
A view that is loaded again does not read entries that a checkpoint covers. But the loaded state has
the time of the last entry under the name of this process. If none of this process's own PUTs has
that time, a copy wrote the entry.
"""

import asyncio
import logging

from tidelog.storage.codec.entry import DecodedEntry, Entry
from tidelog.storage.core.errors import Fenced, LogError
from tidelog.storage.state.cluster_state import ClusterState

log = logging.getLogger("tidelog.wal")

PUTS_KEPT = 1000
"""Number of own PUTs whose hashes are kept. The hashes distinguish this process's entries from the
entries of a copy of this process."""


class CloneFence:
    """The fence of one WAL view, which owns it. The view's entries have the name `writer`."""

    def __init__(self, writer: str) -> None:
        self.writer = writer
        # Number and time of own entries by their hash, the newest last.
        self._puts: dict[bytes, tuple[int, int]] = {}
        self._fence: LogError | None = None
        self._fenced = asyncio.Event()

    def add(self, entry_hash: bytes, entry: Entry) -> None:
        """Register an entry before its PUT."""
        self._puts[entry_hash] = entry.seq, entry.at_ms
        if len(self._puts) > PUTS_KEPT:
            del self._puts[next(iter(self._puts))]

    def check_writer(self, decoded: DecodedEntry) -> None:
        """Fence this process if another process wrote the entry under the name of this one.

        An entry whose hash is kept is from this process. If PUTS_KEPT hashes are kept, each entry
        before the oldest of them also counts as an entry of this process.
        """
        seq = decoded.entry.seq
        if decoded.entry.writer != self.writer or decoded.hash in self._puts:
            return
        is_forgotten = len(self._puts) == PUTS_KEPT and seq < next(iter(self._puts.values()))[0]
        if not is_forgotten:
            self.fence(seq)

    def check_loaded(self, state: ClusterState) -> None:
        """Fence this process if the loaded state has an entry that a copy of this process wrote.

        At level 1 the state does not have the times of writers.
        """
        at_ms = state.elapsed.last_ms(self.writer)
        if at_ms is not None and all(at_ms != own_ms for _, own_ms in self._puts.values()):
            self.fence(state.seq)

    def fence(self, seq: int) -> None:
        """Stop new commits of this process: its copy wrote entry `seq` or an earlier entry."""
        self.stop(Fenced(self.writer, seq))

    def stop(self, error: LogError) -> None:
        """Stop new commits of this process: they raise the error. Keep the first error."""
        if self._fence is None:
            self._fence = error
            log.error("%s", self._fence)
            self._fenced.set()

    def check_fence(self) -> None:
        """Raise Fenced if the WAL has shown a copy of this process, or the error of `stop`."""
        if self._fence is not None:
            raise self._fence

    async def until_fenced(self) -> None:
        """Wait until `check_fence` raises its error; then raise it."""
        await self._fenced.wait()
        self.check_fence()
