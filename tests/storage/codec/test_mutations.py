"""Changed records with a right checksum: each way to read refuses them, or reads the same."""

import os
import random
import struct

import pytest

from tests.storage.codec.reference import (
    WAYS,
    Record,
    Refused,
    read,
    sent,
    use,
    varint,
    with_header,
)
from tests.storage.codec.test_record_batch import NOW, rows_of
from tests.support.record_batches import check_one
from tidelog.storage.codec import chunk, compression, record_batch
from tidelog.storage.codec.batch_header import HEADER_SIZE, InvalidBatch, LogError

MUTATIONS = int(os.environ.get("TIDELOG_MUTATIONS", "20000"))


def drawn(rng: random.Random) -> list[Record]:
    def octets() -> bytes | None:
        size = rng.choice([0, 1, 5, 63, 64, 300])
        return None if rng.random() < 0.2 else rng.randbytes(size)

    return [
        (
            NOW + rng.choice([0, 1, 99, -70, 10**6, -(10**13)]),
            octets(),
            octets(),
            [(rng.choice(["", "é", "name"]), octets()) for _ in range(rng.choice([0, 0, 0, 1, 3]))],
        )
        for _ in range(rng.choice([1, 1, 2, 5, 20, 70]))
    ]


NUMBERS = [varint(n, pad) for n in (-2, -1, 0, 1, 63, 64, 2**31 - 1, -(2**31)) for pad in (0, 1, 4)]
NUMBERS += [varint(n) for n in (2**31, 2**32, 2**62, 2**63 - 1, -(2**63), -3)]
NUMBERS += [varint(0, 5), varint(0, 9), varint(0, 10), b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x02"]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 4])):
        position = rng.randrange(len(changed)) if changed else 0
        # Most of the numbers are at the front.
        position = rng.choice([position, position % 8, position % 30])
        match rng.randrange(5):
            case 0:
                changed[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[position : position + 1] = rng.choice(NUMBERS)
            case 2:
                del changed[position : position + rng.choice([1, 1, 2, 40])]
            case 3:
                changed[position:position] = rng.randbytes(rng.choice([1, 2, 9]))
            case 4 if len(changed) > 1:  # a longer or a shorter record that still is whole
                number = varint(rng.randrange(-3, 400), rng.choice([0, 0, 1, 3, 5]))
                length = varint(len(number) + len(changed) - 2)
                changed = bytearray(length + changed[1:2] + number + changed[2:])
    return bytes(changed)


def test_changed_records_are_refused_or_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    refused = accepted = 0
    originals: list[bytes] = []
    for number in range(MUTATIONS):
        if number % 50 == 0:
            originals = [sent(drawn(rng)) for _ in range(4)]
        original = rng.choice(originals)
        (count,) = struct.unpack_from(">i", original, 57)
        (base,) = struct.unpack_from(">q", original, 27)
        if rng.random() < 0.1:
            base = rng.choice([2**63 - 1, -(2**63), 2**62, -1, 9 * 10**15])
        raw = mutated(original[HEADER_SIZE:], rng)
        body = with_header(original[:HEADER_SIZE] + raw, base_timestamp=base)
        try:
            expected = read(raw, count, base)
        except Refused:
            expected = None
        for way in WAYS:
            use(way, monkeypatch)
            check(body, expected)
        refused, accepted = refused + (expected is None), accepted + (expected is not None)
    assert min(refused, accepted) > MUTATIONS // 20


def check(body: bytes, expected: list[Record] | None) -> None:
    """Compare what the broker says of a batch with what the format says."""
    batches = record_batch.split(memoryview(body), "k")
    if expected is None:
        with pytest.raises(InvalidBatch):
            check_one(body)
        assert record_batch.decode(batches, "k").undecodable == 1
        return
    rows = rows_of(expected)
    checked = check_one(body)
    assert (checked.timestamp_min, checked.timestamp_max) == chunk.timestamp_range(rows)
    assert checked.weight == chunk.weight(rows)
    assert checked.has_null_key == any(record[1] is None for record in expected)
    decoded = record_batch.decode(record_batch.split(checked.data, "k"), "k")
    decoded.rows.validate(full=True)
    assert decoded.rows.equals(rows)
    assert not decoded.undecodable


def test_changed_bytes_are_refused_or_accepted() -> None:
    """All bytes of a batch, headers and packed records too, with a right checksum."""
    rng = random.Random(8)
    for _ in range(MUTATIONS // 4):
        codec = rng.choice(range(5))
        body = bytearray(sent(drawn(rng)[:5], codec))
        for _ in range(rng.choice([1, 1, 3])):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.9:
            body = bytearray(with_header(bytes(body)))
        try:
            checked = check_one(bytes(body))
        except LogError:
            continue
        batches = record_batch.split(checked.data, "k")
        assert record_batch.decode(batches, "k").undecodable == 0
        again = check_one(checked.data)
        assert (again.data, *again[1:]) == (checked.data, *checked[1:])
        assert compression.NAMES[checked.codec]
