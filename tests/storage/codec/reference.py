"""A second reader of record batches, by the format's text alone, and batches to change in tests."""

import struct
import warnings
from typing import Any

import google_crc32c
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder

from tidelog.storage.codec import byte_loops, plain_byte_loops
from tidelog.storage.codec.batch_header import HEADER, HEADER_SIZE, TIMESTAMP_MS_MAX, BatchHeader

if not byte_loops.WHY_SLOW:
    from tidelog.storage.codec import _native

with warnings.catch_warnings(action="ignore"):  # kafka-python reads its schemas the old way
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

BUILDERS = (AiokafkaBuilder, KafkaPythonBuilder)
Record = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Timestamp in ms, key, value, headers."""

WAYS = {"Python": plain_byte_loops, **({} if byte_loops.WHY_SLOW else {"C": _native})}
"""The loops that read and write the records of batches."""
FUNCTIONS = ("walk", "fields", "headers", "write", "murmur2", "murmur2_column")


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and write all records in this way."""
    for name in FUNCTIONS:
        monkeypatch.setattr(byte_loops, name, getattr(WAYS[way], name))


class Refused(Exception):
    """The bytes are no records."""


def sent(
    records: list[Record],
    codec: int = 0,
    builder: Any = AiokafkaBuilder,
    producer: tuple = (-1,) * 3,
) -> bytes:
    """A batch as a client library builds it."""
    build = builder(2, codec, 0, *producer, 1 << 30)
    for offset, (timestamp, key, value, headers) in enumerate(records):
        assert build.append(offset, timestamp, key, value, headers) is not None
    return bytes(build.build())


def with_header(batch: bytes, **fields: int) -> bytes:
    """The batch with other fields in its header, its length and its checksum right unless given."""
    fields = {"length": len(batch) - 12, **fields}
    header = BatchHeader._make(HEADER.unpack_from(batch))._replace(**fields)
    changed = HEADER.pack(*header) + batch[HEADER_SIZE:]
    if "crc" in fields:
        return changed
    return changed[:17] + struct.pack(">I", google_crc32c.value(changed[21:])) + changed[21:]


def varint(number: int, pad: int = 0) -> bytes:
    """A zigzag varint; `pad` adds bytes without a meaning."""
    number, written = (number << 1) ^ (number >> 63), bytearray()
    while number > 127 or pad:
        if number <= 127:
            pad -= 1
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def read(raw: bytes, count: int, base_timestamp: int) -> list[Record]:
    position = 0

    def number(bytes_max: int = 5, bits: int = 32) -> int:
        nonlocal position
        zigzag = 0
        for place in range(bytes_max):
            if position >= len(raw):
                raise Refused
            byte = raw[position]
            position += 1
            zigzag |= (byte & 127) << 7 * place
            if byte < 128:
                if zigzag >> bits:
                    raise Refused
                return zigzag >> 1 ^ -(zigzag & 1)
        raise Refused

    def octets(size: int) -> bytes:
        nonlocal position
        if size < 0 or position + size > len(raw):
            raise Refused
        position += size
        return raw[position - size : position]

    def nullable() -> bytes | None:
        size = number()
        return None if size == -1 else octets(size)

    records = list[Record]()
    for offset in range(count):
        length = number()
        stop = position + length
        octets(1)
        timestamp = base_timestamp + number(10, 64)
        if number() != offset or abs(timestamp) > TIMESTAMP_MS_MAX:
            raise Refused
        key, value, headers = nullable(), nullable(), list[tuple[str, bytes | None]]()
        header_count = number()
        if header_count < 0:
            raise Refused
        for _ in range(header_count):
            name = octets(number())
            try:
                headers.append((name.decode(), nullable()))
            except UnicodeDecodeError:
                raise Refused from None
        if position != stop:
            raise Refused
        records.append((timestamp, key, value, headers))
    if position != len(raw):
        raise Refused
    return records
