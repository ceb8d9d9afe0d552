"""Kafka's murmur2 hash of a column of keys: `murmur2` of each row, in C or else by numpy. Pure."""

import struct
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.storage.codec import native
from tidelog.storage.codec.murmur2 import SEED, M, absorb

Ints: TypeAlias = npt.NDArray[np.int64]
Lengths: TypeAlias = npt.NDArray[np.int32]

_M32 = np.uint32(M)
ACTIVE_MIN = 32
"""A numpy pass over fewer rows than this costs more than the scalar loop."""


def murmur2_column(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Return the hashes of all rows. A null row's hash has no meaning."""
    _, offset_buffer, data_buffer = keys.buffers()
    assert offset_buffer is not None
    data = memoryview(data_buffer or b"")
    bounds = np.frombuffer(memoryview(offset_buffer), np.int32)
    bounds = bounds[keys.offset : keys.offset + len(keys) + 1]
    if native.IS_BUILT:
        hashes = np.empty(len(keys), np.uint32)
        native.murmur2_column(hashes, bounds, data)
        return hashes
    starts = bounds[:-1].astype(np.int64)
    lengths = np.diff(bounds)
    length = int(lengths[0])
    if length <= 256 and (lengths == length).all():
        return _hash_uniform(data, int(starts[0]), len(keys), length)
    return _hash_mixed(data, starts, lengths)


def _hash_uniform(data: memoryview, start: int, rows: int, length: int) -> npt.NDArray[np.uint32]:
    """Hash keys of equal length. The keys lie at equal distances, so one strided view has the n-th
    word of all keys."""
    h = np.full(rows, SEED ^ length, dtype=np.uint32)
    for position in range(0, length & ~3, 4):
        h *= _M32
        h ^= _scramble(np.ndarray((rows,), "<u4", data, start + position, (length,)))
    if length & 3:
        for shift in range(length & 3):
            position = start + (length & ~3) + shift
            tail = np.ndarray((rows,), np.uint8, data, position, (length,))
            h ^= tail.astype(np.uint32) << np.uint32(8 * shift)
        h *= _M32
    return _finish(h)


def _hash_mixed(data: memoryview, starts: Ints, lengths: Lengths) -> npt.NDArray[np.uint32]:
    """Hash keys of several lengths. The rows are sorted, longest key first, so all keys that have
    an n-th word are in the first rows."""
    order = np.argsort(-lengths, kind="stable")
    starts = starts[order]
    words = lengths[order] >> 2
    tails = lengths[order] & 3
    h = np.uint32(SEED) ^ lengths[order].astype(np.uint32)
    _absorb_mixed(h, data, starts, words)
    octets = np.frombuffer(data, np.uint8)
    ends = starts + (words << 2)
    for shift in range(3):
        rows = np.flatnonzero(tails > shift)
        h[rows] ^= octets[ends[rows] + shift].astype(np.uint32) << np.uint32(8 * shift)
    np.multiply(h, _M32, out=h, where=tails > 0)
    hashes = np.empty_like(h)
    hashes[order] = _finish(h)
    return hashes


def _absorb_mixed(
    h: npt.NDArray[np.uint32], data: memoryview, starts: Ints, words: Lengths
) -> None:
    done = 0
    if len(data) >= 4:
        anywhere = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))  # element n: word at byte n
        for done, active in _passes(words):
            prefix = h[:active]
            prefix *= _M32
            prefix ^= _scramble(anywhere[starts[:active] + 4 * (done - 1)])
    # Few keys have words left. The scalar loop hashes these words, because with numpy one key of
    # 1 MB would cost 250,000 passes.
    for row in range(int(np.count_nonzero(words > done))):
        left = int(words[row]) - done
        rest = struct.unpack_from(f"<{left}I", data, int(starts[row]) + 4 * done)
        h[row] = absorb(int(h[row]), rest)


def _passes(words: Lengths) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each pass: how many words of a key are done when the pass ends, and how
    many rows are in the pass. The passes end when fewer than ACTIVE_MIN rows have another word."""
    counts = words[::-1]  # ascending
    rows = len(counts)
    last = int(words[ACTIVE_MIN - 1]) if rows >= ACTIVE_MIN else 0
    short = np.searchsorted(counts, np.arange(last), side="right")
    for done, fewer in enumerate(short.tolist(), start=1):
        yield done, rows - fewer


def _scramble(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    k = words * _M32
    k ^= k >> np.uint32(24)
    k *= _M32
    return k


def _finish(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h ^= h >> np.uint32(13)
    h *= _M32
    h ^= h >> np.uint32(15)
    return h
