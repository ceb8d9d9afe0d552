"""Arrow streams in and out: every type that a client may send, bombs, and broken bytes."""

import contextlib
import random
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import arrow_of
from tests.support.properties import examples
from tidelog.service.formats import arrow as arrow_module
from tidelog.service.formats import arrow_memory
from tidelog.service.formats.arrow import UnpackedTooLarge, decode_arrow, encode_arrow
from tidelog.service.formats.json_in import TIMESTAMP_MS_MAX, InvalidBody
from tidelog.storage.codec.chunk import with_offsets
from tidelog.storage.codec.record_columns import (
    CHUNK_SCHEMA,
    HEADERS_TYPE,
    RECORD_SCHEMA,
    TIMESTAMP_TYPE,
    Rows,
    batch_of_rows,
)
from tidelog.storage.core.errors import RecordTooLarge

NOW = 1_700_000_000_000
MIB = 1 << 20
quick = examples(150)

BATCH = batch_of_rows(
    [
        Rows(
            [1, 2, 3],
            [b"k", None, b""],
            [b"v", b"", None],
            [[("a", b"1"), ("a", None)], None, [("b", b"")]],
        )
    ]
)


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def decoded(body: bytes, bytes_max: int = MIB) -> pa.RecordBatch:
    produced = decode_arrow(body, NOW, bytes_max=bytes_max)
    assert isinstance(produced.rows, pa.RecordBatch)
    produced.rows.validate(full=True)
    assert produced.rows.schema == CHUNK_SCHEMA
    assert produced.count == produced.rows.num_rows > 0
    assert not produced.is_json
    return produced.rows


VALUE = pa.array([b"v", b"w"])


# --- what is taken


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_all_columns_in_any_number_of_batches(compression: str | None) -> None:
    empty = BATCH.slice(0, 0)
    body = arrow_of(BATCH, empty, BATCH.slice(1), compression=compression)
    assert decoded(body).to_pylist() == [*BATCH.to_pylist(), *BATCH.to_pylist()[1:]]


def test_what_was_fetched_can_be_produced() -> None:
    assert decoded(encode_arrow([with_offsets(BATCH, 70)])).equals(BATCH)


def test_value_alone() -> None:
    rows = decoded(arrow_of(batch_of(value=VALUE)))
    now = datetime.fromtimestamp(NOW / 1000, UTC)
    assert rows.to_pylist() == [
        {"timestamp": now, "key": None, "value": value, "headers": None} for value in (b"v", b"w")
    ]


OCTETS: list[tuple[Any, list[Any]]] = [
    (pa.string(), ["é", None, ""]),
    (pa.large_string(), ["é", None, ""]),
    (pa.string_view(), ["é", None, "longer than the twelve bytes that a view holds"]),
    (pa.binary(), [b"\xff", None, b""]),
    (pa.large_binary(), [b"\xff", None, b""]),
    (pa.binary_view(), [b"\xff", None, b"longer than the twelve bytes that a view holds"]),
    (pa.binary(2), [b"ab", None, b"cd"]),
    (pa.null(), [None, None, None]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"]),
    (pa.dictionary(pa.uint32(), pa.large_binary()), [b"a", None, b"a"]),
    (pa.dictionary(pa.uint64(), pa.binary()), [b"a", None, b"longer than twelve bytes"]),
    (pa.dictionary(pa.int8(), pa.string()), [None, None, None]),
]


@pytest.mark.parametrize(("kind", "values"), OCTETS, ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
def test_types_of_key_and_value(kind: pa.DataType, values: list[Any], name: str) -> None:
    columns: dict[str, Any] = {"value": pa.nulls(len(values))} | {name: pa.array(values, kind)}
    rows = decoded(arrow_of(batch_of(**columns), batch_of(**columns)))
    expected = [value.encode() if isinstance(value, str) else value for value in values]
    assert rows.column(name).to_pylist() == expected * 2


@pytest.mark.parametrize(
    ("column", "expected_us"),
    [
        (pa.array([5, None], pa.int64()), 5000),
        (pa.array([5, None], pa.uint8()), 5000),
        (pa.array([5, None], pa.timestamp("s")), 5_000_000),
        (pa.array([5, None], pa.timestamp("ms", tz="Europe/Berlin")), 5000),
        (pa.array([5, None], pa.timestamp("us")), 5),
        (pa.array([5999, None], pa.timestamp("ns", tz="UTC")), 5),
        (pa.array([TIMESTAMP_MS_MAX, None], pa.int64()), TIMESTAMP_MS_MAX * 1000),
    ],
    ids=str,
)
def test_types_of_timestamps(column: pa.Array, expected_us: int) -> None:
    rows = decoded(arrow_of(batch_of(value=VALUE, timestamp=column)))
    assert rows.column("timestamp").view(pa.int64()).to_pylist() == [expected_us, NOW * 1000]


PAIRS = [[("a", "1"), ("b", None)], None, [], [("é", "")]]


@pytest.mark.parametrize("listed", [pa.list_, pa.large_list])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_types_of_headers(listed: Callable[[Any], pa.DataType], kind: pa.DataType) -> None:
    struct_type = pa.struct([("value", kind), ("key", kind)])
    column = pa.array(
        [None if row is None else [{"key": k, "value": v} for k, v in row] for row in PAIRS],
        listed(struct_type),
    )
    batch = batch_of(value=pa.array([b"v"] * 4), headers=column)
    rows = decoded(arrow_of(batch.slice(1), batch))
    expected = [
        None if row is None else [{"key": k, "value": v and v.encode()} for k, v in row]
        for row in PAIRS
    ]
    expected[3] = [{"key": "é", "value": b""}]
    assert rows.column("headers").to_pylist() == [*expected[1:], *expected]


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.uint16(), pa.uint64()], ids=str)
def test_partitions(kind: pa.DataType) -> None:
    body = arrow_of(batch_of(value=VALUE, partition=pa.array([3, None], kind)))
    said = decode_arrow(body, NOW, bytes_max=MIB).partitions
    assert isinstance(said, pa.Array)
    assert said.to_pylist() == [3, None]


def test_partitions_that_say_nothing() -> None:
    for kind in (pa.int32(), pa.null()):
        body = arrow_of(batch_of(value=VALUE, partition=pa.array([None, None], kind)))
        assert decode_arrow(body, NOW, bytes_max=MIB).partitions is None
    assert decode_arrow(arrow_of(BATCH), NOW, bytes_max=MIB).partitions is None


# --- what is refused

REFUSED: dict[str, pa.RecordBatch] = {
    "no value": batch_of(key=VALUE),
    "unknown column": batch_of(value=VALUE, valeu=VALUE),
    "two of a name": pa.RecordBatch.from_arrays([VALUE, VALUE], names=["value", "value"]),
    "no records": batch_of(value=VALUE.slice(0, 0)),
    "numbers": batch_of(value=pa.array([1, 2])),
    "lists": batch_of(value=pa.array([[1], [2]])),
    "dictionary of numbers": batch_of(value=pa.array([1, 2]).dictionary_encode()),
    "no bytes": batch_of(value=pa.array([b"", b""], pa.binary(0))),
    "dictionary without bytes": batch_of(
        value=pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([b""], pa.binary(0)))
    ),
    "position before a dictionary": batch_of(
        value=pa.DictionaryArray.from_arrays(pa.array([-1]), pa.array(["a"]), safe=False)
    ),
    "position behind a dictionary": batch_of(
        value=pa.DictionaryArray.from_arrays(pa.array([1]), pa.array(["a"]), safe=False)
    ),
    "position in no dictionary": batch_of(
        value=pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([], pa.string()), safe=False)
    ),
    "runs": batch_of(
        value=pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["a"]))
    ),
    "dictionary of dictionaries": batch_of(
        value=pa.DictionaryArray.from_arrays(
            pa.array([0, 0], pa.int8()), pa.array(["a"]).dictionary_encode()
        )
    ),
    "offset text": batch_of(value=VALUE, offset=pa.array(["0", "1"])),
    "partition text": batch_of(value=VALUE, partition=pa.array(["0", "1"])),
    "partition float": batch_of(value=VALUE, partition=pa.array([0.0, 1.0])),
    "partition over": batch_of(value=VALUE, partition=pa.array([0, 1 << 63], pa.uint64())),
    "time negative": batch_of(value=VALUE, timestamp=pa.array([0, -1])),
    "time absurd": batch_of(value=VALUE, timestamp=pa.array([0, TIMESTAMP_MS_MAX + 1])),
    "time overflows": batch_of(value=VALUE, timestamp=pa.array([0, 1 << 62])),
    "seconds overflow": batch_of(value=VALUE, timestamp=pa.array([0, 1 << 60], pa.timestamp("s"))),
    "time text": batch_of(value=VALUE, timestamp=pa.array(["2024-01-01", "2024-01-01"])),
    "time date": batch_of(value=VALUE, timestamp=pa.array([1, 2], pa.date32())),
    "headers flat": batch_of(value=VALUE, headers=VALUE),
    "headers of text": batch_of(value=VALUE, headers=pa.array([["a"], ["b"]])),
    "headers of others": batch_of(value=VALUE, headers=pa.array([[{"k": "a"}], []])),
    "header null": batch_of(value=VALUE, headers=pa.array([[None], []], HEADERS_TYPE)),
    "header keyless": batch_of(value=VALUE, headers=pa.array([[{"key": None}], []], HEADERS_TYPE)),
    "header no text": batch_of(
        value=VALUE,
        headers=pa.array(
            [[{"key": b"\xff", "value": b""}], []],
            pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())])),
        ),
    ),
}


@pytest.mark.parametrize("batch", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(batch: pa.RecordBatch) -> None:
    with pytest.raises(InvalidBody) as refused:
        decoded(arrow_of(batch))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("body", [b"", b"\xff" * 8, b"{}", b"ARROW1\0\0", arrow_of(BATCH)[:100]])
def test_no_stream(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        decoded(body)


# --- what would take too much memory


def test_compressed_bombs() -> None:
    batch = batch_of(value=pa.array([b"\0" * (8 * MIB)]))
    for compression in ("zstd", "lz4"):
        body = arrow_of(batch, compression=compression)
        assert len(body) < MIB
        with pytest.raises(RecordTooLarge):
            decoded(body)
        assert decoded(body, 9 * MIB).num_rows == 1


def test_compressed_dictionary_counts() -> None:
    column = pa.array([b"\0" * (8 * MIB)]).dictionary_encode()
    with pytest.raises(RecordTooLarge):
        decoded(arrow_of(batch_of(value=column), compression="zstd"))


def test_false_size_is_not_allocated() -> None:
    body = bytearray(arrow_of(batch_of(value=pa.array([b"\0" * 10_000])), compression="zstd"))
    position = body.rindex(struct.pack("<q", 10_000))
    before = pa.default_memory_pool().max_memory() or 0
    for size in (1 << 40, 1 << 62, (1 << 63) - 1, -2):
        body[position : position + 8] = struct.pack("<q", size)
        with pytest.raises((RecordTooLarge, InvalidBody)):
            decoded(bytes(body))
    assert (pa.default_memory_pool().max_memory() or 0) - before < MIB


def test_many_references_to_one_long_value() -> None:
    long = b"x" * 100_000
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), pa.array([long]))
    with pytest.raises(RecordTooLarge):
        decoded(arrow_of(batch_of(value=dictionary)))
    view = pa.array([long], pa.binary_view())
    _, view_buffer, data = view.buffers()
    assert view_buffer is not None
    many = pa.py_buffer(view_buffer.to_pybytes() * 1000)
    views = pa.Array.from_buffers(pa.binary_view(), 1000, [None, many, data])
    with pytest.raises(RecordTooLarge):
        decoded(arrow_of(batch_of(value=views)))
    assert decoded(arrow_of(batch_of(value=views.slice(0, 3)))).num_rows == 3


def test_rows_of_nothing() -> None:
    nothing = pa.Array.from_buffers(pa.null(), 1 << 30, [None])
    with pytest.raises(RecordTooLarge):
        decoded(arrow_of(batch_of(value=nothing)))


# --- what would take too much work


def test_dictionary_is_converted_once_for_all_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[int] = []
    validate = arrow_module._validate

    def counted(column: Any) -> None:
        if column.type == pa.binary():
            validated.append(len(column))
        validate(column)

    monkeypatch.setattr(arrow_module, "_validate", counted)
    words = pa.array([b"a", None, b"longer than twelve bytes", b"\xff"])
    columns = [
        pa.DictionaryArray.from_arrays(pa.array([index, None], pa.int8()), words)
        for index in (0, 1, 2, 3)
    ]
    others = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([b"b", b"c"]))
    body = arrow_of(*(batch_of(value=column) for column in (*columns, others, others)))
    expected = [value for word in words.to_pylist() for value in (word, None)]
    assert decoded(body).column("value").to_pylist() == [*expected, b"b", b"c", b"b", b"c"]
    assert validated == [len(words), len(others.dictionary)]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_dictionaries_of_headers_in_many_batches(is_hidden: bool) -> None:
    keys = pa.array(["a", "b", "a"]).dictionary_encode()
    values = pa.array([b"1", None, b"longer than twelve bytes"]).dictionary_encode()
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    mask = pa.array([False, True, False]) if is_hidden else None
    headers: Any = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pairs, mask=mask)
    batch = batch_of(value=pa.array([b"v"] * 3), headers=headers)
    rows = [
        [{"key": "a", "value": b"1"}],
        None if is_hidden else [{"key": "b", "value": None}],
        [{"key": "a", "value": b"longer than twelve bytes"}],
    ]
    decoded_rows = decoded(arrow_of(batch, batch, batch.slice(1)))
    assert decoded_rows.column("headers").to_pylist() == [*rows, *rows, *rows[1:]]


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = arrow_of(*[BATCH] * 4)
    assert decode_arrow(body, NOW, bytes_max=MIB, messages_max=5).count == 4 * len(BATCH)
    with pytest.raises(UnpackedTooLarge):
        decode_arrow(body, NOW, bytes_max=MIB, messages_max=4)
    monkeypatch.setattr(arrow_memory, "MESSAGES_MAX", 4)
    with pytest.raises(RecordTooLarge, match="more than 4 batches") as refused:
        decode_arrow(body, NOW, bytes_max=MIB, messages_max=4)
    assert not isinstance(refused.value, UnpackedTooLarge), "more memory would not help"


def test_headers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_module, "HEADERS_MAX", 2)
    with pytest.raises(RecordTooLarge, match="3 headers"):
        decoded(arrow_of(BATCH))
    texts = pa.struct([("key", pa.string()), ("value", pa.string())])
    column = pa.array([[{"key": "a", "value": "b"}] * 3], pa.list_(texts))
    with pytest.raises(RecordTooLarge, match="3 headers"):
        decoded(arrow_of(batch_of(value=VALUE.slice(1), headers=column)))


# --- metadata


def test_metadata_is_taken_and_forgotten() -> None:
    """pandas and Spark write some."""
    batch = batch_of(value=VALUE).replace_schema_metadata({"pandas": "{}" * 5000, "": ""})
    assert decoded(arrow_of(batch)).num_rows == 2
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"a": "b"})
    assert decoded(sink.getvalue().to_pybytes()).num_rows == 2


def test_too_much_metadata_is_refused() -> None:
    entries = {f"{number}": "" for number in range(arrow_memory.TEXTS_MAX + 1)}
    with pytest.raises(InvalidBody, match="metadata"):
        decoded(arrow_of(batch_of(value=VALUE).replace_schema_metadata(entries)))


@pytest.mark.parametrize("version", [pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_older_streams(version: Any, is_legacy: bool) -> None:
    options = pa.ipc.IpcWriteOptions(metadata_version=version, use_legacy_format=is_legacy)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCH.schema, options=options) as writer:
        writer.write_batch(BATCH)
        writer.write_batch(BATCH)
    assert decoded(sink.getvalue().to_pybytes()).to_pylist() == BATCH.to_pylist() * 2


# --- broken bytes


@quick
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    for start in (b"", struct.pack("<II", 0xFFFFFFFF, 48)):
        with contextlib.suppress(InvalidBody, RecordTooLarge):
            decoded(start + body)


BASES = [
    arrow_of(BATCH, BATCH),
    arrow_of(BATCH, compression="lz4"),
    arrow_of(BATCH, compression="zstd"),
    arrow_of(batch_of(value=pa.array(["a", "b"]).dictionary_encode(), partition=pa.array([0, 1]))),
    arrow_of(batch_of(value=pa.array(["a" * 20, "b"], pa.string_view()))),
    arrow_of(batch_of(value=pa.array(["a" * 20, None, "b"], pa.string_view()))),
]


@pytest.mark.parametrize("seed", range(5))
def test_damaged_streams_are_records_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(600):
        body = bytearray(draw.choice(BASES))
        for _ in range(draw.choice([1, 1, 2, 5])):
            position = draw.randrange(len(body))
            if draw.random() < 0.3:
                wide = draw.choice([1 << 31, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1])
                body[position : position + 8] = wide.to_bytes(8, "little")
            else:
                body[position] = draw.randrange(256)
        if draw.random() < 0.1:
            del body[draw.randrange(len(body)) :]
        with contextlib.suppress(InvalidBody, RecordTooLarge):
            decoded(bytes(body))


# --- out


def test_encode_is_stream_of_records() -> None:
    batches = [with_offsets(BATCH, 10), with_offsets(BATCH.slice(1), 20)]
    with pa.ipc.open_stream(encode_arrow(batches)) as reader:
        assert reader.schema == RECORD_SCHEMA
        table = reader.read_all()
    assert table.equals(pa.Table.from_batches(batches))
    table.validate(full=True)


def test_small_batches_are_merged_and_large_ones_left() -> None:
    large = with_offsets(batch_of_rows([Rows([0] * 2000, [None] * 2000, [b"v"] * 2000)]), 0)
    for batches, count in (([large] * 3, 3), ([large.slice(i, 1) for i in range(50)], 1)):
        with pa.ipc.open_stream(encode_arrow(batches)) as reader:
            assert len(list(reader)) == count


def test_nothing_is_stream_too() -> None:
    with pa.ipc.open_stream(encode_arrow([])) as reader:
        assert reader.read_all().equals(RECORD_SCHEMA.empty_table())


@quick
@given(
    st.lists(
        st.tuples(
            st.integers(0, TIMESTAMP_MS_MAX), st.none() | st.binary(), st.none() | st.binary()
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 1 << 60),
)
def test_round_trip(records: list[tuple[int, bytes | None, bytes | None]], base: int) -> None:
    stamps, keys, values = map(list, zip(*records, strict=True))
    batch = batch_of_rows([Rows(stamps, keys, values)])
    body = encode_arrow([with_offsets(batch, base)])
    assert decoded(body).equals(batch)
    with pa.ipc.open_stream(body) as reader:
        offsets = reader.read_all().column("offset").to_numpy()
    assert (offsets == np.arange(base, base + len(records))).all()
    assert batch.column("timestamp").type == TIMESTAMP_TYPE
