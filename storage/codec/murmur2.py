"""Kafka's murmur2 hash of one key, and the partition that follows from the hash: in C, or else in
Python. Without numpy, because the command line uses this module too, and may be installed without
it. `murmur2_columns` hashes a column of keys. Pure."""

import struct
from collections.abc import Sequence

from tidelog.storage.codec import native

SEED = 0x9747B28C
M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_unpack_words = [struct.Struct(f"<{words}I").unpack_from for words in range(33)]
"""Element n unpacks n little-endian words from the start of a key. Few keys have over 32 words."""


def murmur2(key: bytes) -> int:
    """Return Kafka's `Utils.murmur2`: a signed 32-bit hash."""
    h = native.murmur2(key) if native.IS_BUILT else _murmur2(key)
    return h - (1 << 32) if h >> 31 else h


def _murmur2(key: bytes) -> int:
    length = len(key)
    words = length >> 2
    unpacked = _unpack_words[words](key) if words <= 32 else struct.unpack_from(f"<{words}I", key)
    h = absorb(SEED ^ length, unpacked)
    if length & 3:
        h = (h ^ int.from_bytes(key[words << 2 :], "little")) * M & _MASK
    h = (h ^ (h >> 13)) * M & _MASK
    return h ^ h >> 15


def absorb(h: int, words: Sequence[int]) -> int:
    """Return the hash after these words, where `h` is the hash of the words before them."""
    for word in words:
        k = word * M & _MASK
        h = (h * M ^ (k ^ (k >> 24)) * M) & _MASK
    return h


def partition_of(key: bytes, count: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for a key."""
    return (murmur2(key) & 0x7FFFFFFF) % count
