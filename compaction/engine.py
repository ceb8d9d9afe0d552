"""The interface of engines that run rewrites.

compaction/in_process_engine.py has the engine in this process, compaction/spark_engine.py the
other. An engine reads segments and writes segments. compaction/compact.py and
compaction/retention.py make the plans, and `commit_rewrites` commits the result. So engines differ
only in speed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tidelog.compaction.rewrite import Rewrite
from tidelog.storage.core.model import SegmentFile

OnRows = Callable[[int], None]


class KeyScan(NamedTuple):
    """Neighbouring segments of a partition.

    Tombstones below offset `expires` are older than `delete.retention.ms`, so compaction removes
    them.
    """

    prefix: str
    files: Sequence[SegmentFile]
    expires: int


class Rewriter(Protocol):
    """Writer of segments; concurrent calls are allowed. Raises Unavailable, Corrupt."""

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        """Write one segment for each task, in their order; no table names the segments yet."""
        ...


class Engine(Rewriter, Protocol):
    """Writer of segments that also finds the newest record of each key."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    @property
    def partitions_max(self) -> int:
        """Number of partitions that a run works on at once."""
        ...

    @property
    def merges_max(self) -> int:
        """Upper bound of the merges that one commit has."""
        ...

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        """Return the offsets that key compaction keeps: ascending int64, at least one."""
        ...
