"""Record batches of Kafka's producers: as sent, and with a checksum that is right."""

import struct

import google_crc32c

from tests.fuzz.target import Target
from tests.storage.kafka.golden import GOLDEN
from tests.support.record_batches import check_one
from tidelog.storage.core.errors import Corrupt, InvalidRequest
from tidelog.storage.kafka import batch
from tidelog.storage.kafka.layout import ATTRIBUTES_AT, HEADER_SIZE, CorruptBatch


def _check(data: bytes) -> None:
    _check_batch(data)
    if len(data) >= HEADER_SIZE:
        length = struct.pack(">i", len(data) - 12)
        crc = struct.pack(">I", google_crc32c.value(data[ATTRIBUTES_AT:]))
        _check_batch(data[:8] + length + data[12:17] + crc + data[ATTRIBUTES_AT:])


def _check_batch(data: bytes) -> None:
    """A chunk of these bytes gives rows for all of its batches, also if they are no records."""
    try:
        batches = batch.split(memoryview(data), "k")
        if batches:
            rows, _ = batch.decode(batches, "k")
            rows.validate(full=True)
            assert rows.num_rows == sum(item.count for item in batches)
    except Corrupt:
        pass
    try:
        checked = check_one(data)
    except (InvalidRequest, CorruptBatch):
        return
    (item,) = batch.split(checked.data, "k")
    assert item.count == checked.count
    rows, undecodable = batch.decode([item], "k")
    assert (rows.num_rows, undecodable) == (checked.count, 0)
    again = check_one(checked.data)
    assert (bytes(again.data), *again[1:]) == (bytes(checked.data), *checked[1:])


TARGETS = [Target("kafka-batch", lambda: [bytes.fromhex(text) for text in GOLDEN.values()], _check)]
