"""The newest record of each key.

The input is keys and offsets; the output is the offsets to keep. Pure.

Only keys and offsets go through the aggregation, never a value (DESIGN 12.5). Memory grows with the
number of distinct keys, not with the length of the log. `add` collects new rows until they have as
many bytes as the known rows. The known rows are the result of the last grouping: one row for each
key. Then `add` groups the known and the new rows together. So all groupings together have at most
about twice as many rows as the log.

If the keys do not fit in memory, the caller has two ways. It divides the keys into shares, and
reads the log once for each share. Or it calls `take_ranks`, which returns the result so far as a
table of RANKS and empties the aggregation. Then the caller continues with the rest of the log.

To group a million keys takes ten times as long per key as to group 20,000, which fit in the
processor's cache. So a hash first divides the records of each block into buckets, on any number of
threads; then each bucket is grouped by itself.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.codec.partitioner import partitions_of

FOLD_BYTES_MIN = 64 * 1024 * 1024
"""`add` groups new rows only when their keys and offsets have this many bytes, or `bytes_max` if
that is less. A grouping in steps of a million rows takes 1.5 times as long."""
BUCKETS = 32
"""A power of two. With a million keys, a bucket fits in a core's own cache; with ten million, in
the cache that the cores share."""
FOLDERS = 2
"""Threads that group buckets."""
UNLIMITED = 2**63

_RANKS: dict[str, pa.DataType] = {"key": pa.binary(), "alone": pa.int64(), "rank": pa.int64()}
RANKS = pa.schema(_RANKS)
"""Columns of the result of one part of the log. An aggregation over all parts takes the largest
rank of each (key, alone). A rank is twice the offset, plus 1 for an expired tombstone. `alone` is
the offset of a record without a key, else null."""

_SHARED = 1_000_003
"""A prime. The keys of one partition have the same murmur2 modulo the number of partitions. Modulo
this prime they differ, so they fall into different shares."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_TO_BUCKET = np.uint64(65 - BUCKETS.bit_length())
_WORD = 8
_HASHED = 64
"""The bucket of a key follows from its length, its last `_WORD` bytes, and this many of its first
bytes. If two keys are equal in all three, both get the same bucket; this costs only time."""
_FIRST = np.array([2 ** (8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
"""Masks of the first 0 to 8 bytes of a word."""
_NONE = np.zeros(0, np.int64)


class TooManyKeys(Exception):
    """The keys exceed the memory limit: the caller takes more shares, or the ranks."""


class Kept(NamedTuple):
    """Offsets to keep, in any order, and the newest offset seen."""

    offsets: np.ndarray
    newest: int


class Seen(NamedTuple):
    """Content of a block.

    Its newest offset; records with a key of the share, sorted by bucket (`ends` are the ends of the
    buckets); offsets of records without a key; offsets of expired tombstones.
    """

    newest: int
    keyed: pa.RecordBatch
    ends: Sequence[int]
    keyless: np.ndarray
    gone: np.ndarray


class Latest:
    """Aggregation of blocks, added in any order.

    `see` may run in any number of threads, the other methods in one thread at a time. A record
    without a key is kept. The newest record of a key is kept, unless it is a tombstone below offset
    `expires`.

    An aggregation contains only the keys of share number `share` of `shares`. `add`, `kept` raise
    TooManyKeys if the keys of this share take more than `bytes_max`.
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
        """Return the columns that `see` needs for records from `base_offset` on."""
        return ["offset", "key", *(["value"] if base_offset < self._expires else [])]

    def see(self, batch: pa.RecordBatch) -> Seen:
        """Divide a block into buckets.

        The block has one or more records, and at least the columns that `columns` returns.
        """
        offsets, keys = _numbers(batch.column("offset")), batch.column("key")
        keyed, keyless = batch.select(["key", "offset"]), _NONE
        if keys.null_count:
            has_key = pc.is_valid(keys)
            keyed = keyed.filter(has_key)
            keyless = _numbers(batch.column("offset").filter(pc.invert(has_key)))
        tombstones = _NONE
        if self._expires > offsets[0]:
            is_tombstone: Any = pc.and_(pc.is_valid(keys), pc.is_null(batch.column("value")))
            tombstones = offsets[
                is_tombstone.to_numpy(zero_copy_only=False) & (offsets < self._expires)
            ]
        if self._shares > 1 and keyed.num_rows:
            of = partitions_of(_keys(keyed), _SHARED).astype(np.int64) * self._shares
            keyed = keyed.filter(pa.array(of // _SHARED == self._share))
        buckets = _buckets(_keys(keyed))
        order = np.argsort(buckets, kind="stable")
        ends = np.cumsum(np.bincount(buckets, minlength=BUCKETS)).tolist()
        return Seen(int(offsets[-1]), keyed.take(order), ends, keyless, tombstones)

    def add(self, block: Seen) -> None:
        """Add the next block."""
        self.newest = max(self.newest, block.newest)
        if self._share == 0:
            self._keyless.append(block.keyless)
        self._gone.append(block.gone)
        self._new.append(block)
        self._new_bytes += block.keyed.nbytes
        if self._new_bytes >= max(self._known_bytes, min(FOLD_BYTES_MIN, self._bytes_max)):
            self._fold()

    def kept(self) -> Kept:
        """Return the offsets of this share to keep."""
        self._fold()
        newest = np.concatenate([_NONE, *(_numbers(table["offset"]) for table in self._known)])
        newest = newest[~np.isin(newest, self._all_gone(), assume_unique=True)]
        return Kept(np.concatenate([newest, *self._keyless]), self.newest)

    def take_ranks(self) -> pa.Table:
        """Return the content as a table of RANKS, and empty the aggregation.

        A caller may do this after TooManyKeys, too.
        """
        with contextlib.suppress(TooManyKeys):
            self._fold()
        parts, tombstones = [RANKS.empty_table()], self._all_gone()
        for table in self._known:
            offsets = _numbers(table["offset"])
            ranks = offsets * 2 + np.isin(offsets, tombstones, assume_unique=True)
            keyed = [table["key"], pa.nulls(len(offsets), pa.int64()), pa.array(ranks)]
            parts.append(pa.table(keyed, schema=RANKS))
        for offsets in self._keyless:
            no_key = pa.nulls(len(offsets), pa.binary())
            parts.append(pa.table([no_key, pa.array(offsets), pa.array(offsets * 2)], schema=RANKS))
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
        self._known_bytes = sum(table.nbytes for table in self._known)
        if self._known_bytes > self._bytes_max:
            raise TooManyKeys

    def _folded(self, new: Sequence[Seen], bucket: int) -> pa.Table:
        batches = []
        for block in new:
            first = block.ends[bucket - 1] if bucket else 0
            batches.append(block.keyed.slice(first, block.ends[bucket] - first))
        parts = [*self._known[bucket : bucket + 1], pa.Table.from_batches(batches)]
        # Combine first: pyarrow's calls on many small chunks would take longer than the grouping.
        grouped = pa.concat_tables(parts).combine_chunks().group_by("key", use_threads=False)
        newest = grouped.aggregate([("offset", "max")]).select(["key", "offset_max"])
        return newest.rename_columns(["key", "offset"])


def of_shares(shares: Sequence[Kept]) -> np.ndarray:
    """Return the offsets to keep of all shares, ascending.

    If there is none, return the offset of the newest record, because the segments of a partition
    must reach the sealed end.
    """
    offsets = np.sort(np.concatenate([share.offsets for share in shares]))
    newest = max(share.newest for share in shares)
    return offsets if len(offsets) else np.array([newest], np.int64)


def of_ranks(ranks: np.ndarray) -> np.ndarray:
    """Return the offsets to keep, as `of_shares` does.

    `ranks` has the largest rank of each (key, alone), in any order.
    """
    offsets = np.sort(ranks[ranks % 2 == 0] // 2)
    return offsets if len(offsets) else np.array([ranks.max() // 2], np.int64)


def _buckets(keys: pa.BinaryArray) -> np.ndarray:
    """Return the bucket of each key, uint8; equal keys have equal buckets."""
    if not len(keys):
        return np.zeros(0, np.uint8)
    _, ends, octets = keys.buffers()
    assert ends is not None
    bounds = np.frombuffer(memoryview(ends), np.int32)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(memoryview(octets or b""), np.uint8)[bounds[0] : bounds[-1]]
    data = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    # Element n is the word that begins at byte n.
    words = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
    lengths = np.diff(bounds).astype(np.int64)
    starts = bounds[:-1] - np.int64(bounds[0])
    last = words[starts + np.maximum(lengths - _WORD, 0)] & _FIRST[np.minimum(lengths, _WORD)]
    hashes = _mixed(lengths.astype(np.uint64), last)
    for position in range(0, min(int(lengths.max()) - _WORD, _HASHED), _WORD):
        has_it = lengths > position + _WORD
        there = words[np.where(has_it, starts + position, 0)]
        hashes = np.where(has_it, _mixed(hashes, there), hashes)
    return (hashes >> _TO_BUCKET).astype(np.uint8)


def _mixed(hashes: np.ndarray, words: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ words) * _MIX
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _keys(batch: pa.RecordBatch) -> pa.BinaryArray:
    return batch.column("key")  # type: ignore[return-value]


def _numbers(column: Any) -> np.ndarray:
    return column.to_numpy().astype(np.int64, copy=False)
