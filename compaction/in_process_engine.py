"""The engine that runs rewrites in the process of the command."""

import asyncio
from collections.abc import Sequence

import numpy as np

from tidelog.compaction.engine import KeyScan, OnRows
from tidelog.compaction.newest_per_key import UNLIMITED, Kept, Latest, Seen, TooManyKeys, of_shares
from tidelog.compaction.rewrite import Rewrite, pieces, pump, rewrite
from tidelog.storage.core.log_settings import COMPACT_MEMORY_BYTES
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.segment_reader import FetchedGroups
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.threads import CpuTime
from tidelog.storage.store.object_store import ObjectStore

KEYS_PART = 4
"""Divisor of `compact_memory_bytes`. A pass has the known keys, the new keys and their union in
memory. The known keys may take one part, the new keys one part, and the union two parts."""
KEYS_BYTES_MAX = COMPACT_MEMORY_BYTES // KEYS_PART
"""Memory for keys and offsets. To group new rows with the known rows takes about four times this
memory."""
MORE_SHARES = 4
"""Factor by which the number of shares grows after TooManyKeys. A share is a part of the keys, by
their murmur2. For each share, `newest` reads the segments once."""
SHARES_MAX = 256
"""From this number of shares on, memory is not bounded. If the keys of one share do not fit even
then, a client chose the keys by their murmur2."""


class InProcess:
    """Engine that writes one segment after the other.

    Its memory is about four times `keys_bytes_max`, one encoded output, and 8 bytes for the offset
    of each kept record and of each expired tombstone.
    """

    name = "in-process"
    partitions_max = 1
    merges_max = 1

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        keys_bytes_max: int = KEYS_BYTES_MAX,
        *,
        cpu_time: CpuTime | None = None,
    ) -> None:
        """`cpu_time` counts the CPU time of the rewrites."""
        self._store = store
        self._clock = clock
        self._keys_bytes_max = keys_bytes_max
        self.cpu_time = cpu_time or CpuTime()

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        shares = 1
        while True:
            try:
                results = [await self._share(scan, n, shares, on_rows) for n in range(shares)]
                return await asyncio.to_thread(of_shares, results)
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
            await rewrite(self._store, task, self._clock.new_id().hex(), on_rows, self.cpu_time)
            for task in tasks
        ]
