"""The newest record of each key: keys and offsets in, the offsets that stay out. Pure.

Only (key, offset) goes through the aggregation, never a value (NUMBERS 5). Memory follows the
number of distinct keys, not the length of the log: what came is folded into what is known whenever
it has grown as large, so that each key is looked at a logarithmic number of times.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FOLD_ROWS_MIN = 1_000_000


class Latest:
    """Fed batches in any order. A record without a key is superseded by nothing, and stays; nor is
    a key ever without its newest record, be that a tombstone, until `expired` takes it."""

    def __init__(self) -> None:
        self._known: pa.Table | None = None
        self._new: list[pa.Table] = []
        self._new_rows = 0
        self._keyless: list[np.ndarray] = []
        self._tombstones: list[np.ndarray] = []
        self.newest = -1

    def add(self, batch: pa.RecordBatch, *, expires: int = 0) -> None:
        """Columns offset and key; value, too, where tombstones below offset `expires` are looked
        for."""
        offsets = batch.column("offset")
        self.newest = max(self.newest, int(offsets[-1].as_py()))
        has_key = pc.is_valid(batch.column("key"))
        if batch.column("key").null_count:
            self._keyless.append(_numbers(offsets.filter(pc.invert(has_key))))
        if expires > int(offsets[0].as_py()):
            is_tombstone: Any = pc.and_(has_key, pc.is_null(batch.column("value")))
            is_expired: Any = pc.and_(is_tombstone, pc.less(offsets, pa.scalar(expires)))
            self._tombstones.append(_numbers(offsets.filter(is_expired)))
        table = pa.Table.from_batches([batch.select(["key", "offset"])])
        if batch.column("key").null_count:
            table = table.filter(has_key)
        self._new.append(table)
        self._new_rows += table.num_rows
        known = 0 if self._known is None else self._known.num_rows
        if self._new_rows >= max(known, FOLD_ROWS_MIN):
            self._fold()

    def kept(self) -> np.ndarray:
        """Offsets that stay, ascending; when there would be none, the newest of all: a partition's
        segments reach to the end of what is sealed."""
        self._fold()
        newest = np.zeros(0, np.int64)
        if self._known is not None:
            newest = _numbers(self._known.column("offset"))
        gone = np.concatenate([newest[:0], *self._tombstones])
        newest = np.setdiff1d(newest, gone, assume_unique=True)
        kept = np.sort(np.concatenate([newest, *self._keyless]))
        return kept if len(kept) else np.array([self.newest], np.int64)

    def _fold(self) -> None:
        if not self._new:
            return
        parts = self._new if self._known is None else [self._known, *self._new]
        grouped = pa.concat_tables(parts).group_by("key").aggregate([("offset", "max")])
        self._known = grouped.select(["key", "offset_max"]).rename_columns(["key", "offset"])
        self._new, self._new_rows = [], 0


def _numbers(column: Any) -> np.ndarray:
    return column.to_numpy().astype(np.int64, copy=False)
