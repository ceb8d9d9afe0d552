"""Who does the work of merges and compactions: this process, or Spark (compaction/spark_jobs.py).

An engine reads segments and writes segments. It decides nothing and commits nothing: what is to be
done was planned before, and whether it counts is decided after, both in compaction/compact.py. So
the two cannot differ in anything but speed.

And if we die in one? Segments that nothing names, for collection.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from compaction.latest import UNLIMITED, Kept, Latest, Seen, TooManyKeys, of_shares
from compaction.rewrite import Rewrite, pieces, pump, rewrite
from storage.clock import Clock
from storage.model import SegmentFile
from storage.objectstore import ObjectStore
from storage.scan import SegmentSlice
from storage.slices import Fetched, decode_whole

OnRows = Callable[[int], None]

KEYS_BYTES_MAX = 256 * 1024 * 1024
"""Keys and offsets that are known at once; folding more into them takes about four times that."""
MORE_SHARES = 4
SHARES_MAX = 256
"""Keys that are no fewer in so small a share are somebody's who knows murmur2."""


class KeyScan(NamedTuple):
    """Neighbouring segments of a partition. Tombstones below `expires` have been there for long
    enough."""

    prefix: str
    files: Sequence[SegmentFile]
    expires: int


class Engine(Protocol):
    """Safe for any number of concurrent calls. Raises Unavailable, Corrupt."""

    @property
    def name(self) -> str:
        """As the command line calls it."""
        ...

    @property
    def partitions_max(self) -> int:
        """How many partitions it is worth to work on at once."""
        ...

    @property
    def merges_max(self) -> int:
        """How many merges it is worth to write before they are committed."""
        ...

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        """The offsets that key compaction keeps, ascending int64, one at least."""
        ...

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        """The segments of the tasks, in their order; no table knows them yet."""
        ...


class InProcess:
    """One segment after the other. Its memory is that of the keys that are known at once, and of
    one encoded output; not of the log, nor of its keys."""

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

        def seen(piece: SegmentSlice, block: Fetched) -> Seen:
            return latest.see(decode_whole(piece, block, latest.columns(piece.start)))

        await pump(self._store, pieces(scan.prefix, scan.files), seen, latest.add, on_rows)
        return await asyncio.to_thread(latest.kept)

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        return [
            await rewrite(self._store, task, self._clock.new_id().hex(), on_rows) for task in tasks
        ]
