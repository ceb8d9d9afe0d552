"""`Engine`, the interface of the executors of merges and compactions, and `InProcess`, the executor
in this process. compaction/spark_engine.py has the other executor.

An engine reads segments and writes segments. compaction/compact.py plans before the engine runs,
and commits after it. So engines differ only in speed.

**On a crash**: segments that no version names remain for collection.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tidelog.compaction.newest_per_key import UNLIMITED, Kept, Latest, Seen, TooManyKeys, of_shares
from tidelog.compaction.rewrite import Rewrite, pieces, pump, rewrite
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.io.clock import Clock
from tidelog.storage.io.object_store import ObjectStore
from tidelog.storage.read.segment_reader import FetchedGroups

OnRows = Callable[[int], None]

KEYS_BYTES_MAX = 256 * 1024 * 1024
"""Memory for keys and offsets. Grouping new rows with them takes about four times as much."""
MORE_SHARES = 4
"""Factor by which the number of shares grows after TooManyKeys."""
SHARES_MAX = 256
"""From this number of shares on, memory is not bounded. If the keys of one share still do not fit,
a client chose the keys by their murmur2."""


class KeyScan(NamedTuple):
    """Neighbouring segments of a partition. Tombstones below offset `expires` are older than
    `delete.retention.ms`, so compaction removes them."""

    prefix: str
    files: Sequence[SegmentFile]
    expires: int


class Engine(Protocol):
    """Writer of segments; concurrent calls are allowed. Raises Unavailable, Corrupt."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    @property
    def partitions_max(self) -> int:
        """Number of partitions to work on at once."""
        ...

    @property
    def merges_max(self) -> int:
        """Number of merges to write before they are committed."""
        ...

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        """Return the offsets that key compaction keeps: ascending int64, at least one."""
        ...

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        """Write one segment for each task, in their order; no table names the segments yet."""
        ...


class InProcess:
    """Engine that writes one segment after the other. Its memory is bounded by KEYS_BYTES_MAX and
    one encoded output; it does not grow with the log or its number of keys."""

    name = "in-process"
    partitions_max = 1
    merges_max = 1

    def __init__(
        self, store: ObjectStore, clock: Clock, keys_bytes_max: int = KEYS_BYTES_MAX
    ) -> None:
        self._store = store
        self._clock = clock
        self._keys_bytes_max = keys_bytes_max

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        shares = 1
        while True:
            try:
                done = [await self._share(scan, n, shares, on_rows) for n in range(shares)]
                return await asyncio.to_thread(of_shares, done)
            except TooManyKeys:
                shares *= MORE_SHARES

    async def _share(self, scan: KeyScan, share: int, shares: int, on_rows: OnRows) -> Kept:
        bytes_max = self._keys_bytes_max if shares < SHARES_MAX else UNLIMITED
        latest = Latest(scan.expires, bytes_max=bytes_max, share=share, shares=shares)

        def seen(block: FetchedGroups) -> Seen:
            return latest.see(block.batch(latest.columns(block.of.start)))

        await pump(self._store, pieces(scan.prefix, scan.files), seen, latest.add, on_rows)
        return await asyncio.to_thread(latest.kept)

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        return [
            await rewrite(self._store, task, self._clock.new_id().hex(), on_rows) for task in tasks
        ]
