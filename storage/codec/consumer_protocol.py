"""The format of the assignments of Kafka's consumers, which a group stores as bytes. Pure.

A broker reads an assignment only to show a member's partitions. All numbers are big-endian:

    version i16 | array of topics: name (i16 length, UTF-8), array of partitions (i32) | user data
"""

import struct

PARTITIONS_MAX = 20_000
"""Bound of the partitions of one assignment (I10). `assigned` returns none for a larger one."""
_COUNT = struct.Struct(">i")
_LENGTH = struct.Struct(">h")


def assigned(assignment: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return the assigned partitions of each topic.

    Return an empty list for bytes that are not an assignment of Kafka's consumers.
    """
    topic_partitions: list[tuple[str, tuple[int, ...]]] = []
    remaining_count = PARTITIONS_MAX
    try:
        (version,) = _LENGTH.unpack_from(assignment)
        (topics,) = _COUNT.unpack_from(assignment, _LENGTH.size)
        position = _LENGTH.size + _COUNT.size
        if version < 0 or not 0 <= topics <= len(assignment):
            return []
        for _ in range(topics):
            (length,) = _LENGTH.unpack_from(assignment, position)
            position += _LENGTH.size
            (count,) = _COUNT.unpack_from(assignment, position + length)
            name = assignment[position : position + length].decode()
            position += length + _COUNT.size
            remaining_count -= count
            if length < 0 or count < 0 or remaining_count < 0:
                return []
            topic_partitions.append((name, struct.unpack_from(f">{count}i", assignment, position)))
            position += count * _COUNT.size
    except (struct.error, UnicodeDecodeError):
        return []
    return topic_partitions
