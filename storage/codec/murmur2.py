"""Kafka's murmur2 hash of a key, and the partition that follows from it. Without numpy, because the
client uses it too, and may be installed without numpy. Pure."""

from tidelog.storage.codec import byte_loops


def murmur2(key: bytes) -> int:
    """Return Kafka's `Utils.murmur2`: a signed 32-bit hash."""
    h = byte_loops.murmur2(key)
    return h - (1 << 32) if h >> 31 else h


def partition_of(key: bytes, count: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for a key."""
    return (murmur2(key) & 0x7FFFFFFF) % count
