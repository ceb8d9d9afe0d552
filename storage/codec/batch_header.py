"""The layout of a Kafka record batch of magic 2, and the errors of batches that clients send. Pure.

A batch is a header of 61 bytes and its records; the records may be compressed together. All numbers
of the header are big-endian. The CRC-32C covers the bytes from the attributes to the end. So a
broker may change the base offset and the leader epoch of a batch without a new checksum.
"""

import struct
from typing import NamedTuple

from tidelog.storage.core.errors import InvalidRequest, LogError

TRANSACTIONS_NOT_SERVED = "transactions are not served to Kafka clients: remove transactional.id"


class InvalidBatch(InvalidRequest):
    """A record batch that no client may send: Kafka's INVALID_RECORD."""


class TransactionalBatch(InvalidBatch):
    """A batch of a transaction, which the log does not support."""


class CorruptBatch(LogError):
    """The checksum of a batch differs: its bytes changed on the way.

    The client may send it again. Kafka's CORRUPT_MESSAGE.
    """


class BatchHeader(NamedTuple):
    """The header of a batch. Timestamps are ms; `length` counts the bytes behind itself."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no code calls


HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE = HEADER.size
LENGTH_FROM = 12
"""The first byte that the length counts."""
ATTRIBUTES_AT, MAX_TIMESTAMP_AT = 21, 35
MAGIC = 2

CODEC_BITS = 0b111
LOG_APPEND_TIME = 1 << 3
TRANSACTIONAL = 1 << 4
CONTROL = 1 << 5

RECORD_SIZE_MIN = 7
"""The least bytes of a record: one for each field, without a key, a value and headers."""
TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""Largest timestamp in ms. In microseconds, it and its negative fit into the int64 of a column."""
