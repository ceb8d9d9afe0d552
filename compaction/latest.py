"""The newest record of each key: keys and offsets in, the offsets that stay out. Pure.

Only (key, offset) goes through the aggregation, never a value (NUMBERS 5). Memory follows the
number of distinct keys, not the length of the log: what came is folded into what is known whenever
it has grown as large, so that each key is looked at a logarithmic number of times. More keys than
fit are taken share by share, in as many passes.

Grouping a million keys waits for memory at each of them: ten times as long as for 20,000, which
stay in the processor's cache. So records are parted by a hash of their key first, block by block
and on any number of threads, and each bucket is grouped by itself.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.partitioner import partitions_of

FOLD_BYTES_MIN = 64 * 1024 * 1024
"""Of keys and offsets: folding a million rows at a time takes half as long again."""
BUCKETS = 32
"""A power of two. Of a million keys a bucket stays in a core's cache; of ten million, in that which
cores share."""
FOLDERS = 2
"""Buckets that are grouped at once."""
UNLIMITED = 2**63

_RANKS: dict[str, pa.DataType] = {"key": pa.binary(), "alone": pa.int64(), "rank": pa.int64()}
RANKS = pa.schema(_RANKS)
"""What is known of a part of a log, for others to go on with: the largest rank of each (key, alone)
is what stays. `alone` is the offset of a record without a key, else null."""

_SHARED = 1_000_003
"""A prime: the keys of one partition have their murmur2 modulo the number of partitions in common,
and modulo this nothing."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_TO_BUCKET = np.uint64(65 - BUCKETS.bit_length())
_WORD = 8
_HASHED = 64
"""Bytes of a key that decide where it goes; its length and its end do as well. Keys that have all
of that in common meet in one bucket, which costs time and nothing else."""
_FIRST = np.array([2 ** (8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
"""Masks of the first bytes of a word."""
_NONE = np.zeros(0, np.int64)


class TooManyKeys(Exception):
    """They do not fit: begin again, in more shares."""


class Kept(NamedTuple):
    """Offsets that stay, in any order, and the newest that was seen."""

    offsets: np.ndarray
    newest: int


class Seen(NamedTuple):
    """What a block of records says: those with a key by bucket, of which `ends` are the ends; the
    offsets of those without one, and of tombstones that have expired."""

    newest: int
    keyed: pa.RecordBatch
    ends: Sequence[int]
    keyless: np.ndarray
    gone: np.ndarray


class Latest:
    """Fed blocks in any order: `see` is for any number of threads, the rest for one at a time. A
    record without a key is superseded by nothing, and stays; nor is a key ever without its newest
    record, be that a tombstone, until `expires` takes it.

    Looks at share `share` of `shares` of all keys; raises TooManyKeys beyond `bytes_max`.
    """

    def __init__(
        self, expires: int = 0, *, bytes_max: int = UNLIMITED, share: int = 0, shares: int = 1
    ) -> None:
        self._expires = expires
        self._bytes_max = bytes_max
        self._share = share
        self._shares = shares
        self._known: list[pa.Table] = []
        self._new: list[Seen] = []
        self._known_bytes = self._new_bytes = 0
        self._keyless: list[np.ndarray] = []
        self._gone: list[np.ndarray] = []
        self.newest = -1

    def columns(self, base_offset: int) -> list[str]:
        """The columns that `see` needs of records from `base_offset` on."""
        return ["offset", "key", *(["value"] if base_offset < self._expires else [])]

    def see(self, batch: pa.RecordBatch) -> Seen:
        """Records with at least those columns, one or more of them."""
        offsets, keys = _numbers(batch.column("offset")), batch.column("key")
        keyed, keyless = batch.select(["key", "offset"]), _NONE
        if keys.null_count:
            has_key = pc.is_valid(keys)
            keyed = keyed.filter(has_key)
            keyless = _numbers(batch.column("offset").filter(pc.invert(has_key)))
        gone = _NONE
        if self._expires > offsets[0]:
            is_tombstone: Any = pc.and_(pc.is_valid(keys), pc.is_null(batch.column("value")))
            gone = offsets[is_tombstone.to_numpy(zero_copy_only=False) & (offsets < self._expires)]
        if self._shares > 1 and keyed.num_rows:
            of = partitions_of(_keys(keyed), _SHARED).astype(np.int64) * self._shares
            keyed = keyed.filter(pa.array(of // _SHARED == self._share))
        buckets = _buckets(_keys(keyed))
        order = np.argsort(buckets, kind="stable")
        ends = np.cumsum(np.bincount(buckets, minlength=BUCKETS)).tolist()
        return Seen(int(offsets[-1]), keyed.take(order), ends, keyless, gone)

    def add(self, seen: Seen) -> None:
        """What was seen next."""
        self.newest = max(self.newest, seen.newest)
        if self._share == 0:
            self._keyless.append(seen.keyless)
        self._gone.append(seen.gone)
        self._new.append(seen)
        self._new_bytes += seen.keyed.nbytes
        if self._new_bytes >= max(self._known_bytes, min(FOLD_BYTES_MIN, self._bytes_max)):
            self._fold()

    def kept(self) -> Kept:
        """Of this share."""
        self._fold()
        newest = np.concatenate([_NONE, *(_numbers(some["offset"]) for some in self._known)])
        newest = newest[~np.isin(newest, self._all_gone(), assume_unique=True)]
        return Kept(np.concatenate([newest, *self._keyless]), self.newest)

    def take_ranks(self) -> pa.Table:
        """What is known by now, as RANKS, to be forgotten here; also after TooManyKeys."""
        with contextlib.suppress(TooManyKeys):
            self._fold()
        parts, gone = [RANKS.empty_table()], self._all_gone()
        for some in self._known:
            offsets = _numbers(some["offset"])
            ranks = offsets * 2 + np.isin(offsets, gone, assume_unique=True)
            keyed = [some["key"], pa.nulls(len(offsets), pa.int64()), pa.array(ranks)]
            parts.append(pa.table(keyed, schema=RANKS))
        for offsets in self._keyless:
            nobody = pa.nulls(len(offsets), pa.binary())
            parts.append(pa.table([nobody, pa.array(offsets), pa.array(offsets * 2)], schema=RANKS))
        self._known, self._known_bytes, self._keyless, self._gone = [], 0, [], []
        return pa.concat_tables(parts)

    def _all_gone(self) -> np.ndarray:
        return np.concatenate([_NONE, *self._gone])

    def _fold(self) -> None:
        new, self._new, self._new_bytes = self._new, [], 0
        if not new:
            return
        with ThreadPoolExecutor(FOLDERS) as pool:
            self._known = list(pool.map(partial(self._folded, new), range(BUCKETS)))
        self._known_bytes = sum(some.nbytes for some in self._known)
        if self._known_bytes > self._bytes_max:
            raise TooManyKeys

    def _folded(self, new: Sequence[Seen], bucket: int) -> pa.Table:
        batches = []
        for seen in new:
            first = seen.ends[bucket - 1] if bucket else 0
            batches.append(seen.keyed.slice(first, seen.ends[bucket] - first))
        parts = [*self._known[bucket : bucket + 1], pa.Table.from_batches(batches)]
        # In one piece: each call for a few rows of a small one would take longer than the rows.
        grouped = pa.concat_tables(parts).combine_chunks().group_by("key", use_threads=False)
        newest = grouped.aggregate([("offset", "max")]).select(["key", "offset_max"])
        return newest.rename_columns(["key", "offset"])


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


def _buckets(keys: pa.BinaryArray) -> np.ndarray:
    """For each key the bucket that it is always in, uint8."""
    if not len(keys):
        return np.zeros(0, np.uint8)
    _, ends, octets = keys.buffers()
    assert ends is not None
    bounds = np.frombuffer(memoryview(ends), np.int32)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(memoryview(octets or b""), np.uint8)[bounds[0] : bounds[-1]]
    data = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    words = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))  # one from every byte on
    lengths = np.diff(bounds).astype(np.int64)
    starts = bounds[:-1] - np.int64(bounds[0])
    last = words[starts + np.maximum(lengths - _WORD, 0)] & _FIRST[np.minimum(lengths, _WORD)]
    found = _mixed(lengths.astype(np.uint64), last)
    for at in range(0, min(int(lengths.max()) - _WORD, _HASHED), _WORD):
        has_it = lengths > at + _WORD
        there = words[np.where(has_it, starts + at, 0)]
        found = np.where(has_it, _mixed(found, there), found)
    return (found >> _TO_BUCKET).astype(np.uint8)


def _mixed(found: np.ndarray, words: np.ndarray) -> np.ndarray:
    found = (found ^ words) * _MIX
    found ^= found >> np.uint64(32)
    return found


def _keys(batch: pa.RecordBatch) -> pa.BinaryArray:
    return batch.column("key")  # type: ignore[return-value]


def _numbers(column: Any) -> np.ndarray:
    return column.to_numpy().astype(np.int64, copy=False)
