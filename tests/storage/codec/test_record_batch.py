"""Batches of client libraries: accepted as they are, refused, served, read and built."""

import gc
import os
import random
import struct
import zlib
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.codec.golden import GOLDEN
from tests.storage.codec.reference import (
    BUILDERS,
    WAYS,
    AiokafkaBuilder,
    Record,
    Refused,
    read,
    sent,
    use,
    varint,
    with_header,
)
from tests.support.properties import examples
from tests.support.record_batches import check_one
from tidelog.storage.codec import chunk, decompression, record_batch, record_columns, records
from tidelog.storage.codec.batch_header import (
    CONTROL,
    HEADER,
    HEADER_SIZE,
    TRANSACTIONAL,
    BatchHeader,
    CorruptBatch,
    InvalidBatch,
    TransactionalBatch,
)
from tidelog.storage.codec.records import TooManyHeaders
from tidelog.storage.core.errors import Corrupt, InvalidRequest, LogError, RecordTooLarge

NOW = 1_700_000_000_000
OCTETS = st.none() | st.binary(max_size=200)
HEADERS = st.lists(st.tuples(st.text(max_size=4), OCTETS), max_size=3)
RECORDS = st.lists(
    # The builders take -1 for "now".
    st.tuples(st.integers(-(10**14), 10**14).filter(lambda t: t != -1), OCTETS, OCTETS, HEADERS),
    min_size=1,
    max_size=20,
)
THREE: list[Record] = [
    (NOW, b"key", b"value" * 6, [("name", b"x"), ("none", None)]),
    (NOW + 5, None, b"value" * 6, []),
    (NOW - 1, b"", None, []),
]


def rows_of(sent_records: list[Record]) -> pa.RecordBatch:
    stamps, keys, values, headers = map(list, zip(*sent_records, strict=True))
    return record_columns.batch_of_rows(
        [record_columns.Rows(stamps, keys, values, [item or None for item in headers])]
    )


def decoded(*sent_batches: bytes) -> pa.RecordBatch:
    body = memoryview(b"".join(sent_batches))
    decoded_batches = record_batch.decode(record_batch.split(body, "k"), "k")
    decoded_batches.rows.validate(full=True)
    assert not decoded_batches.undecodable
    return decoded_batches.rows


@pytest.mark.parametrize("codec", decompression.NAMES)
def test_the_bytes_of_a_client_have_these_records(codec: str) -> None:
    golden = bytes.fromhex(GOLDEN[codec])
    checked = check_one(golden)
    expected = rows_of(THREE)
    assert checked == (
        *(
            golden,
            3,
            decompression.NAMES.index(codec),
            NOW - 1,
            NOW + 5,
            97,
            chunk.weight(expected),
            True,
        ),
        *(-1, -1, -1),
    )
    assert decoded(golden).equals(expected)


@given(RECORDS, st.sampled_from(BUILDERS), st.sampled_from(range(5)))
def test_batches_of_clients_are_accepted(drawn: list[Record], builder: Any, codec: int) -> None:
    if builder is not AiokafkaBuilder:
        codec = min(codec, decompression.GZIP)
    built = sent(drawn, codec, builder, producer=(7, 1, 5))
    checked = check_one(built)
    expected = rows_of(drawn)
    stamps = [record[0] for record in drawn]
    assert bytes(checked.data) == built
    codec = built[22] & 7  # a builder sends records plain that a codec makes longer
    assert checked[1:5] == (len(drawn), codec, min(stamps), max(stamps))
    assert checked.weight == chunk.weight(expected)
    assert checked.has_null_key == any(record[1] is None for record in drawn)
    assert checked[-3:] == (7, 1, 5)
    assert decoded(built).equals(expected)
    assert records.walk(built_raw(built), 0, len(drawn), stamps[0])[:4] == walk_of(checked)


def built_raw(built: bytes) -> bytes:
    return decompression.unpack(built[22] & 7, built[HEADER_SIZE:])


def walk_of(checked: record_batch.Batch) -> tuple[int, int, int, bool]:
    return checked.timestamp_min, checked.timestamp_max, checked.weight, checked.has_null_key


@pytest.mark.parametrize("way", WAYS)
def test_a_large_batch_is_read_whole(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    drawn = [
        (NOW + 7 * i, b"k%d" % i, b"v" * (i % 90), [("h", b"%d" % i)] * (i % 3)) for i in range(999)
    ]
    built = sent(drawn, decompression.LZ4)
    checked = check_one(built)
    raw = built_raw(built)
    assert records.walk(raw, 0, 999, NOW)[:4] == walk_of(checked)
    assert checked.weight == chunk.weight(rows_of(drawn))
    assert decoded(built, sent(THREE), built).equals(
        record_columns.concat([rows_of(drawn), rows_of(THREE), rows_of(drawn)])
    )


def with_raw(raw: bytes, count: int, base: int = 0, **fields: int) -> bytes:
    """A batch without compression that has these bytes as its records."""
    header = HEADER.pack(0, 0, 0, 2, 0, 0, count - 1, base, base, -1, -1, -1, count)
    return with_header(header + raw, **fields)


PLAIN = sent(THREE)
MINIMAL = b"\x0c\0\0\0\x01\x01\0"  # length 6, timestamp 0, offset 0, nulls, no headers
REFUSED = {
    "no bytes": (b"", "less than the header"),
    "part of a header": (PLAIN[:60], "less than the header"),
    "magic 1": (with_header(PLAIN, magic=1), "magic 1 is not supported"),
    "a wrong checksum": (with_header(PLAIN, crc=1), "checksum"),
    "a wrong checksum, 8 KiB": (
        with_header(sent([(NOW, None, bytes(8192), [])]), crc=1),
        "checksum",
    ),
    "two batches": (PLAIN + PLAIN, "exactly one batch"),
    "a stray byte behind": (PLAIN + b"\0", "exactly one batch"),
    "cut off": (PLAIN[:-1], "exactly one batch"),
    "a negative length": (with_header(PLAIN, length=-1), "exactly one batch"),
    "no records": (with_header(PLAIN, count=0, last_offset_delta=-1), "0 records"),
    "a negative count": (with_header(PLAIN, count=-2, last_offset_delta=-3), "-2"),
    "another last offset": (with_header(PLAIN, last_offset_delta=3), "do not fit"),
    "2**31 - 1 records": (
        with_header(PLAIN, count=2**31 - 1, last_offset_delta=2**31 - 2),
        "send smaller batches",
    ),
    "more records than bytes": (
        with_header(PLAIN, count=90_000, last_offset_delta=89_999),
        "cannot hold",
    ),
    "a base offset": (with_header(PLAIN, base_offset=1), "base offset 1"),
    "a control batch": (with_header(PLAIN, attributes=0x20), "control"),
    "a transaction": (with_header(PLAIN, attributes=0x10), "transactional.id"),
    "a delete horizon": (with_header(PLAIN, attributes=0x40), "attributes 64 have"),
    "all attributes": (with_header(PLAIN, attributes=-1), "transactional.id"),
    "the sign of the attributes": (with_header(PLAIN, attributes=-(2**15)), "without a meaning"),
    "codec 5": (with_header(PLAIN, attributes=5), "codec 5 is none"),
    "a producer without a sequence": (
        with_header(PLAIN, producer_id=7, producer_epoch=0),
        "producer id, epoch and sequence",
    ),
    "a producer of -2": (with_header(PLAIN, producer_id=-2), "producer id"),
    "fewer records than the count": (with_header(PLAIN, count=4, last_offset_delta=3), "cut off"),
    "more records than the count": (with_header(PLAIN, count=2, last_offset_delta=1), "do not end"),
    "gzip that is none": (with_header(PLAIN, attributes=1), "unpack with gzip"),
    "lz4 that is none": (with_header(PLAIN, attributes=3), "unpack with lz4"),
    "an offset delta of 1": (with_raw(b"\x0c\0\0\x02\x01\x01\0", 1), "offset delta of record 0"),
    "a key length of -2": (with_raw(b"\x0c\0\0\0\x03\x01\0", 1), "negative"),
    "a value length of -2": (with_raw(b"\x0c\0\0\0\x01\x03\0", 1), "negative"),
    "-1 headers": (with_raw(b"\x0c\0\0\0\x01\x01\x01", 1), "negative"),
    "a name that is null": (with_raw(b"\x10\0\0\0\x01\x01\x02\x01\x01", 1), "negative"),
    "a name that is not UTF-8": (with_raw(b"\x12\0\0\0\x01\x01\x02\x02\xff\x01", 1), "not UTF-8"),
    "a key over the end": (with_raw(b"\x0c\0\0\0\x7e\x01\0", 1), "cut off"),
    "a key of 2**31 - 1 bytes": (with_raw(b"\x14\0\0\0\xfe\xff\xff\xff\x0f\x01\0", 1), "cut off"),
    "a number of six bytes": (with_raw(b"\x16\0\0\0\x80\x80\x80\x80\x80\0\x01\0", 1), "too long"),
    "a timestamp delta of 65 bits": (
        with_raw(b"\x1e\0" + b"\x80" * 9 + b"\x02\0\x01\x01\0", 1, base=-(2**63)),
        "too long",
    ),
    "a record of no bytes": (with_raw(bytes(7), 1), "not end at the record's end"),
    "a record over the end": (with_raw(b"\x0e\0\0\0\x01\x01\0", 1), "cut off"),
    "a byte behind the fields": (
        with_raw(b"\x0e\0\0\0\x01\x01\0\0", 1),
        "not end at the record's end",
    ),
    "a byte behind the headers": (
        with_raw(b"\x12\0\0\0\x01\x01\x02\0\x01\0", 1),
        "not end at the record's end",
    ),
    "a header over the end": (with_raw(b"\x10\0\0\0\x01\x01\x02\0\x0a", 1), "cut off"),
    "10**9 headers": (with_raw(b"\x14\0\0\0\x01\x01\x80\xa8\xd6\xb9\x07", 1), "cut off"),
    "a timestamp beyond microseconds": (with_raw(MINIMAL, 1, base=2**60), "not within"),
    "the timestamp -2**63": (with_raw(MINIMAL, 1, base=-(2**63)), "not within"),
}
OTHER_ERRORS = {
    "a wrong checksum": CorruptBatch,
    "a wrong checksum, 8 KiB": CorruptBatch,
    "2**31 - 1 records": RecordTooLarge,
    "a transaction": TransactionalBatch,
    "all attributes": TransactionalBatch,
}
"""Of requests in REFUSED; all others are InvalidBatch."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_producer_may_not_send_it(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    (body, text), error = REFUSED[name], OTHER_ERRORS.get(name, InvalidBatch)
    with pytest.raises(error) as raised:
        check_one(body)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    assert text in str(raised.value)


def test_the_refusals_have_two_kinds() -> None:
    assert issubclass(InvalidBatch, InvalidRequest)
    assert not issubclass(CorruptBatch, InvalidRequest)
    assert check_one(with_raw(MINIMAL, 1)).count == 1


def test_a_false_maximum_timestamp_and_a_set_bit_are_put_right() -> None:
    """sarama sends no maximum timestamp; Kafka takes a bit that a client set (3)."""
    for codec in (decompression.NONE, decompression.ZSTD):
        built = sent(THREE, codec)
        for wrong in ({"max_timestamp": -1}, {"attributes": codec | 8}):
            checked = check_one(with_header(built, **wrong))
            assert bytes(checked.data) == built


def test_a_batch_is_placed_without_a_copy() -> None:
    view = memoryview(PLAIN)
    first, tail = record_batch.placed(view, 2**40)
    assert isinstance(tail, memoryview)
    assert tail.obj is PLAIN
    header = BatchHeader._make(HEADER.unpack(bytes(first) + tail[: HEADER_SIZE - len(first)]))
    assert header == BatchHeader._make(HEADER.unpack_from(PLAIN))._replace(
        base_offset=2**40, leader_epoch=0
    )
    assert bytes(first) + tail == with_header(PLAIN, base_offset=2**40, leader_epoch=0)


@pytest.mark.parametrize("size", [1, 9000])
def test_the_time_of_the_append_gets_a_checksum(size: int) -> None:
    built = sent([(NOW, b"k", b"v" * size, [])], decompression.NONE)
    parts = record_batch.placed(memoryview(built), 11, append_ms=NOW + 99)
    assert b"".join(parts) == with_header(
        built, base_offset=11, leader_epoch=0, attributes=8, max_timestamp=NOW + 99
    )


def test_the_batches_of_a_chunk() -> None:
    bodies = [PLAIN, sent(THREE[:1], decompression.GZIP), PLAIN]
    body = memoryview(b"".join(bodies))
    batches = record_batch.split(body, "k")
    assert [bytes(item.data) for item in batches] == bodies
    assert [item.count for item in batches] == [3, 1, 3]
    assert record_batch.split(memoryview(b""), "k") == []


@pytest.mark.parametrize(
    "body",
    [
        PLAIN[:-1],
        PLAIN + b"\0",
        PLAIN + PLAIN[:-1],
        PLAIN + with_header(PLAIN, length=-1),
        with_header(PLAIN, length=48),
        with_header(PLAIN, length=2**31 - 1),
        with_header(PLAIN, magic=3),
        with_header(PLAIN, count=0, last_offset_delta=-1),
        with_header(PLAIN, count=4),
    ],
)
def test_bytes_that_are_no_batches_are_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt, match="object k is corrupt"):
        record_batch.split(memoryview(body), "k")


def test_a_batch_that_does_not_decode_becomes_rows() -> None:
    bad = with_header(PLAIN, attributes=decompression.LZ4)
    body = memoryview(PLAIN + bad + PLAIN)
    rows, undecodable = record_batch.decode(record_batch.split(body, "k"), "k")
    rows.validate(full=True)
    assert undecodable == 1
    assert rows.slice(0, 3).equals(rows_of(THREE))
    assert rows.slice(6, 3).equals(rows_of(THREE))
    lost = rows.slice(3, 3).to_pylist()
    assert [row["value"] for row in lost] == [bad, None, None]
    assert {row["key"] for row in lost} == {None}
    assert [row["headers"][0]["key"] for row in lost] == ["tidelog.undecodable"] * 3
    assert b"unpack with lz4" in lost[0]["headers"][0]["value"]
    assert chunk.timestamp_range(rows.slice(3, 3)) == (NOW + 5, NOW + 5)


@pytest.mark.parametrize("way", WAYS)
def test_the_bound_of_headers_is_for_each_batch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    monkeypatch.setattr(records, "HEADERS_MAX", 3)
    three = sent([(NOW, b"k", b"v", [("h", b"x")] * 3)])
    assert check_one(three).count == 1
    raw, size = three[HEADER_SIZE:], len(three) - HEADER_SIZE
    starts, ends = [0, size, 2 * size], [size, 2 * size, 3 * size]
    assert records.read(raw * 3, starts, ends, [1] * 3, [NOW] * 3).num_rows == 3


@pytest.mark.parametrize("way", WAYS)
def test_headers_above_bound_are_not_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    four = sent([(NOW, b"k", b"v", [("h", b"x")] * 2)] * 2)[HEADER_SIZE:]
    assert records.walk(four, 0, 2, NOW, headers_max=4).headers == 4
    with pytest.raises(TooManyHeaders):
        records.walk(four, 0, 2, NOW, headers_max=3)


@pytest.mark.parametrize("way", WAYS)
def test_error_names_records_without_key(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    monkeypatch.setattr(record_batch, "KEYLESS_MAX", 2)
    keys = [b"k", None, b"k", None, None]
    for codec in (decompression.NONE, decompression.GZIP):
        body = memoryview(sent([(NOW, key, b"v", []) for key in keys], codec))
        assert isinstance(record_batch.check(body), record_batch.Batch)
        outcome = record_batch.check(body, record_batch.Rules(needs_keys=True))
        assert isinstance(outcome, record_batch.KeylessRecords)
        assert outcome.numbers == [1, 3]


def reachable(start: object) -> list[object]:
    """Return all objects that `start` refers to, apart from modules and types."""
    objects: dict[int, object] = {}
    waiting = [start]
    while waiting:
        for item in gc.get_referents(waiting.pop()):
            if id(item) not in objects and not isinstance(item, ModuleType | type):
                objects[id(item)] = item
                waiting.append(item)
    return list(objects.values())


@pytest.mark.parametrize("way", WAYS)
def test_an_error_refers_to_none_of_the_bytes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request keeps its errors until its answer is sent.

    250 errors of batches that unpack to 16 MiB each would hold 4 GiB.
    """
    use(way, monkeypatch)
    bodies = [body for body, _ in REFUSED.values()]
    bodies += [sent([(NOW, None, bytes(1 << 20), [])], codec) for codec in range(1, 5)]
    bodies += [with_raw(zlib.compress(bytes(1 << 20), wbits=31), 1, attributes=decompression.GZIP)]
    for body in bodies:
        error = record_batch.check(memoryview(body), record_batch.Rules(needs_keys=True))
        assert isinstance(error, LogError)
        assert error.__traceback__ is error.__context__ is error.__cause__ is None
        buffers = [item for item in reachable(error) if isinstance(item, bytes | memoryview)]
        assert not buffers


def test_a_check_with_an_effort_stops_before_it_takes_long() -> None:
    headers = sent([(NOW, b"k", b"v", [("h", b"x")] * 9)], decompression.ZSTD)
    large = sent([(NOW, b"k", bytes(10_000), [])], decompression.GZIP)
    for body, effort in ((headers, (10_000, 8)), (large, (9_000, 0))):
        with pytest.raises(record_batch.TooMuchEffort):
            record_batch.check(memoryview(body), effort=record_batch.Effort(*effort))
    effort = record_batch.Effort(11_000, 9)
    assert isinstance(record_batch.check(memoryview(large), effort=effort), record_batch.Batch)
    assert effort.unpacked < 1_000
    with pytest.raises(record_batch.TooMuchEffort):
        record_batch.check(memoryview(large), effort=effort)


def test_a_batch_that_fails_late_uses_up_the_effort() -> None:
    """Else a request of many such parts would hold the event loop for each of them."""
    effort = record_batch.Effort(1 << 20, 10)
    cut = with_raw(zlib.compress(bytes(1 << 19), wbits=31)[:-9], 1, attributes=decompression.GZIP)
    assert isinstance(record_batch.check(memoryview(cut), effort=effort), InvalidBatch)
    assert effort.unpacked == 0
    wrong_name = with_raw(b"\x12\0\0\0\x01\x01\x02\x02\xff\x01", 1)
    assert isinstance(record_batch.check(memoryview(wrong_name), effort=effort), InvalidBatch)
    assert effort.headers == 0


def test_the_rules_of_a_topic_bound_the_unpacked_bytes() -> None:
    body = memoryview(sent([(NOW, b"k", bytes(10_000), [])], decompression.ZSTD))
    assert isinstance(
        record_batch.check(body, record_batch.Rules(unpacked_max=11_000)), record_batch.Batch
    )
    error = record_batch.check(body, record_batch.Rules(unpacked_max=9_000))
    assert "unpack to more than 9000 bytes" in str(error)


def test_a_chunk_that_unpacks_too_large_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not undecodable: a batch alone would be."""
    monkeypatch.setattr(chunk, "RAW_SIZE_MAX", 150)
    body = memoryview(PLAIN + PLAIN)
    with pytest.raises(Corrupt, match="more than 150 unpacked bytes"):
        record_batch.decode(record_batch.split(body, "k"), "k")


# --- built batches


@given(RECORDS, st.data())
@examples(100)
def test_built_batches_have_offsets_of_rows(drawn: list[Record], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 300), min_size=len(drawn), max_size=len(drawn)))
    start, end_gap = data.draw(st.tuples(st.integers(0, 2**50), st.integers(1, 2**31)))
    offsets, offset = list[int](), start - 1
    for gap in gaps:
        offset += gap
        offsets.append(offset)
    rows = pa.RecordBatch.from_arrays(
        [pa.array(offsets, pa.int64()), *rows_of(drawn).columns],
        schema=record_columns.RECORD_SCHEMA,
    )
    skipped = data.draw(st.integers(0, len(drawn) - 1))
    built = record_batch.build(rows.slice(skipped), start, offset + end_gap)
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            assert record_batch.build(rows.slice(skipped), start, offset + end_gap) == built
    markers = [item for item in built if is_control(item)]
    assert built[len(built) - len(markers) :] == markers
    read_records = read_with_aiokafka(built[: len(built) - len(markers)])
    assert [item[0] for item in read_records] == offsets[skipped:]
    assert [item[1:] for item in read_records] == drawn[skipped:]
    assert reached(built, start) == offset + end_gap
    assert len(markers) == (end_gap > 1)


def is_control(item: bytes) -> bool:
    return bool(BatchHeader._make(HEADER.unpack_from(item)).attributes & CONTROL)


def reached(built: list[bytes], start: int) -> int:
    """Return the offset behind the batches, which must lie end to end from `start` on."""
    for item in built:
        header = BatchHeader._make(HEADER.unpack_from(item))
        assert header.base_offset == start
        start += header.last_offset_delta + 1
    return start


def read_with_aiokafka(built: list[bytes]) -> list[tuple]:
    from aiokafka.record.default_records import DefaultRecordBatch

    read_records = list[tuple]()
    for item in built:
        reader = DefaultRecordBatch(item)
        assert reader.validate_crc()
        read_records += [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in reader]
    return read_records


def test_built_batches_are_whole_and_lie_end_to_end() -> None:
    drawn: list[Record] = [(NOW + i, None, b"v" * 1000, []) for i in range(999)]
    drawn[500] = (NOW, b"k", b"large" * 200_000, [])
    rows = chunk.with_offsets(rows_of(drawn), 10)
    built = record_batch.build(rows, 10, 1009)
    assert len(built) == 5  # 255 records weigh a batch; the large one is alone
    assert [item[1:] for item in read_with_aiokafka(built)] == drawn
    assert sorted(map(len, built))[-2] < record_batch.BATCH_BYTES
    offset = 10
    for item in built:
        header = BatchHeader._make(HEADER.unpack_from(item))
        assert header.base_offset == offset
        offset += header.last_offset_delta + 1
        again = check_one(with_header(item, base_offset=0))
        assert again.timestamp_max == header.max_timestamp
    assert offset == 1009


def test_range_without_records_is_one_commit_marker() -> None:
    rows = chunk.with_offsets(rows_of(THREE), 0).slice(0, 0)
    (marker,) = record_batch.build(rows, 5, 9)
    header = BatchHeader._make(HEADER.unpack_from(marker))
    assert (header.base_offset, header.last_offset_delta, header.count) == (5, 3, 1)
    assert header.attributes == TRANSACTIONAL | CONTROL
    ((offset, _, key, value, headers),) = read_with_aiokafka([marker])
    assert (offset, key, value, headers) == (8, b"\0\0\0\1", bytes(6), [])


def test_gap_over_the_bits_of_a_delta_is_between_batches_or_several_markers() -> None:
    rows = rows_of(THREE)
    offsets = [5, 5 + 2**31, 5 + 2**40]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(offsets), *rows.columns], schema=record_columns.RECORD_SCHEMA
    )
    built = record_batch.build(rows, 5, 2**40 + 2**33)
    assert [item[0] for item in read_with_aiokafka(built[:3])] == offsets
    assert reached(built[3:], offsets[-1] + 1) == 2**40 + 2**33
    assert len(built[3:]) == 4
    assert all(map(is_control, built[3:]))


def test_a_sequence_without_a_producer_has_no_meaning() -> None:
    checked_batch = check_one(with_header(PLAIN, base_sequence=0))
    assert checked_batch.producer_id == -1


# -- changed records with a right checksum


MUTATIONS = int(os.environ.get("TIDELOG_MUTATIONS", "4000"))
"""The first 1,000 take each branch that 20,000 take."""


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
        assert decompression.NAMES[checked.codec]
