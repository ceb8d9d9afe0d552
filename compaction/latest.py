"""The newest record of each key: keys and offsets in, the offsets that stay out. Pure.

Only (key, offset) goes through the aggregation, never a value (NUMBERS 5). Memory follows the
number of distinct keys, not the length of the log: what came is folded into what is known whenever
it has grown as large, so that each key is looked at a logarithmic number of times. More keys than
fit are taken share by share, in as many passes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.partitioner import partitions_of

FOLD_BYTES_MIN = 128 * 1024 * 1024
"""Of keys and offsets: folding a million rows at a time takes twice as long."""
UNLIMITED = 2**63

_RANKS: dict[str, pa.DataType] = {"key": pa.binary(), "alone": pa.int64(), "rank": pa.int64()}
RANKS = pa.schema(_RANKS)
"""What is known of a part of a log, for others to go on with: the largest rank of each (key, alone)
is what stays. `alone` is the offset of a record without a key, else null."""

_BUCKETS = 1_000_003
"""A prime: the keys of one partition have their murmur2 modulo the number of partitions in common,
and modulo this nothing."""


class TooManyKeys(Exception):
    """They do not fit: begin again, in more shares."""


class Kept(NamedTuple):
    """Offsets that stay, in any order, and the newest that was seen."""

    offsets: np.ndarray
    newest: int


class Latest:
    """Fed batches in any order. A record without a key is superseded by nothing, and stays; nor is
    a key ever without its newest record, be that a tombstone, until `expires` takes it.

    Looks at share `share` of `shares` of all keys; raises TooManyKeys beyond `bytes_max`.
    """

    def __init__(
        self, expires: int = 0, *, bytes_max: int = UNLIMITED, share: int = 0, shares: int = 1
    ) -> None:
        self._expires = expires
        self._bytes_max = bytes_max
        self._share = share
        self._shares = shares
        self._known: pa.Table | None = None
        self._new: list[pa.Table] = []
        self._new_bytes = 0
        self._keyless: list[np.ndarray] = []
        self._tombstones: list[np.ndarray] = []
        self.newest = -1

    def columns(self, base_offset: int) -> list[str]:
        """The columns that `add` needs of records from `base_offset` on."""
        return ["offset", "key", *(["value"] if base_offset < self._expires else [])]

    def add(self, batch: pa.RecordBatch) -> None:
        """Records with at least those columns."""
        offsets = batch.column("offset")
        self.newest = max(self.newest, int(offsets[-1].as_py()))
        has_key = pc.is_valid(batch.column("key"))
        if batch.column("key").null_count and self._share == 0:
            self._keyless.append(_numbers(offsets.filter(pc.invert(has_key))))
        if self._expires > int(offsets[0].as_py()):
            is_tombstone: Any = pc.and_(has_key, pc.is_null(batch.column("value")))
            is_expired: Any = pc.and_(is_tombstone, pc.less(offsets, pa.scalar(self._expires)))
            self._tombstones.append(_numbers(offsets.filter(is_expired)))
        keyed = batch.select(["key", "offset"])
        if batch.column("key").null_count:
            keyed = keyed.filter(has_key)
        if self._shares > 1 and keyed.num_rows:
            keys: Any = keyed.column("key")
            of = partitions_of(keys, _BUCKETS).astype(np.int64) * self._shares
            keyed = keyed.filter(pa.array(of // _BUCKETS == self._share))
        self._new.append(pa.Table.from_batches([keyed]))
        self._new_bytes += keyed.nbytes
        known = 0 if self._known is None else self._known.nbytes
        if self._new_bytes >= max(known, min(FOLD_BYTES_MIN, self._bytes_max)):
            self._fold()

    def kept(self) -> Kept:
        """Of this share."""
        self._fold()
        newest = np.zeros(0, np.int64)
        if self._known is not None:
            newest = _numbers(self._known.column("offset"))
        newest = np.setdiff1d(newest, self._gone(), assume_unique=True)
        return Kept(np.concatenate([newest, *self._keyless]), self.newest)

    def take_ranks(self) -> pa.Table:
        """What is known by now, as RANKS, to be forgotten here; also after TooManyKeys."""
        with contextlib.suppress(TooManyKeys):
            self._fold()
        parts = [RANKS.empty_table()]
        if self._known is not None:
            offsets = _numbers(self._known.column("offset"))
            ranks = offsets * 2 + np.isin(offsets, self._gone(), assume_unique=True)
            alone = pa.nulls(len(offsets), pa.int64())
            keyed = [self._known.column("key"), alone, pa.array(ranks)]
            parts.append(pa.table(keyed, schema=RANKS))
        for offsets in self._keyless:
            nobody = pa.nulls(len(offsets), pa.binary())
            parts.append(pa.table([nobody, pa.array(offsets), pa.array(offsets * 2)], schema=RANKS))
        self._known, self._keyless, self._tombstones = None, [], []
        return pa.concat_tables(parts)

    def _gone(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *self._tombstones])

    def _fold(self) -> None:
        if not self._new:
            return
        parts = self._new if self._known is None else [self._known, *self._new]
        grouped = pa.concat_tables(parts).group_by("key").aggregate([("offset", "max")])
        self._known = grouped.select(["key", "offset_max"]).rename_columns(["key", "offset"])
        self._new, self._new_bytes = [], 0
        if self._known.nbytes > self._bytes_max:
            raise TooManyKeys


def of_shares(shares: Sequence[Kept]) -> np.ndarray:
    """What stays of all records, ascending; when nothing would, the newest of all: a partition's
    segments reach to the end of what is sealed."""
    kept = np.sort(np.concatenate([share.offsets for share in shares]))
    newest = max(share.newest for share in shares)
    return kept if len(kept) else np.array([newest], np.int64)


def of_ranks(ranks: np.ndarray) -> np.ndarray:
    """The same, of the largest ranks by key of all parts of a log, in any order."""
    kept = np.sort(ranks[ranks % 2 == 0] // 2)
    return kept if len(kept) else np.array([ranks.max() // 2], np.int64)


def _numbers(column: Any) -> np.ndarray:
    return column.to_numpy().astype(np.int64, copy=False)
