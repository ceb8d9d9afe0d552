"""The partition of a key, by Kafka's murmur2.

Without numpy, because the client uses it too, and may be installed without numpy. Pure.
"""

from tidelog.storage.codec import byte_loops


def partition_of(key: bytes, count: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for a key."""
    return (byte_loops.murmur2(key) & 0x7FFFFFFF) % count
