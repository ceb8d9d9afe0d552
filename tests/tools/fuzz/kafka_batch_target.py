"""Record batches of Kafka's producers: as sent, and with a checksum that is right.

Some of the seeds are small and unpack to much.
"""

import struct
from contextlib import suppress

import google_crc32c

from tests.storage.codec.golden import GOLDEN
from tests.support.record_batches import check_one
from tests.tools.attack.produce_attacks import many_headers, runs
from tests.tools.fuzz.target import Target
from tidelog.storage.codec import decompression, record_batch
from tidelog.storage.codec.batch_header import ATTRIBUTES_AT, HEADER_SIZE, CorruptBatch
from tidelog.storage.core.errors import Corrupt, InvalidRequest, LogError


def _check(data: bytes) -> None:
    _check_batch(data)
    if len(data) >= HEADER_SIZE:
        length = struct.pack(">i", len(data) - 12)
        crc = struct.pack(">I", google_crc32c.value(data[ATTRIBUTES_AT:]))
        _check_batch(data[:8] + length + data[12:17] + crc + data[ATTRIBUTES_AT:])


def _check_batch(data: bytes) -> None:
    """A chunk of these bytes gives rows for all of its batches, also if they are no records."""
    try:
        batches = record_batch.split(memoryview(data), "k")
        if batches:
            rows, _ = record_batch.decode(batches, "k")
            rows.validate(full=True)
            assert rows.num_rows == sum(item.count for item in batches)
    except Corrupt:
        pass
    _check_effort(memoryview(data))
    try:
        checked = check_one(data)
    except (InvalidRequest, CorruptBatch):
        return
    (item,) = record_batch.split(checked.data, "k")
    assert item.count == checked.count
    rows, undecodable = record_batch.decode([item], "k")
    assert (rows.num_rows, undecodable) == (checked.count, 0)
    again = check_one(checked.data)
    assert (bytes(again.data), *again[1:]) == (bytes(checked.data), *checked[1:])


def _check_effort(data: memoryview) -> None:
    """A check within an effort finds the same as one without, or stops. An error has no frames."""
    outcome = record_batch.check(data)
    if isinstance(outcome, LogError):
        assert outcome.__traceback__ is outcome.__context__ is outcome.__cause__ is None
    effort = record_batch.Effort(4096, 10)
    with suppress(record_batch.TooMuchEffort):
        within = record_batch.check(data, effort=effort)
        assert type(within) is type(outcome)
        assert str(within) == str(outcome)
    assert effort.unpacked >= 0
    assert effort.headers >= 0


def _seeds() -> list[bytes]:
    usual = [bytes.fromhex(text) for text in GOLDEN.values()]
    return [
        *usual,
        runs(),
        many_headers(0, decompression.ZSTD),
        many_headers(4, decompression.ZSTD),
    ]


TARGETS = [Target("kafka-batch", _seeds, _check)]
