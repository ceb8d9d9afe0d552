"""Confluent's v3 records: one object, a stream of them however it is cut, and batches."""

import contextlib
import json
from collections import deque
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.service.formats.json_in import ROWS_MAX, BadBody, InvalidBody
from tidelog.service.formats.v3_records import (
    BATCH_CODE,
    ENTRIES_MAX,
    NoSchemaRegistry,
    ObjectStream,
    columns_of_many,
    decode_v3_batch,
    decode_v3_record,
)
from tidelog.storage.codec.chunk import weight
from tidelog.storage.codec.record_columns import Headers, Rows
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge

NOW = 1_700_000_000_000
quick = examples(150)


def rows_with(count: int, headers: int | None) -> Rows:
    """Return records of which each has so many headers."""
    pairs: list[Headers | None] | None = (headers and [[("a", None)] * headers] * count) or None
    return Rows([NOW] * count, [None] * count, [b"v"] * count, pairs)


def record_of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def typed(kind: str, data: object) -> dict[str, object]:
    return {"type": kind, "data": data}


# --- one record


def test_golden_record() -> None:
    record = decode_v3_record(
        b'{"partition_id":2,"headers":[{"name":"h","value":"AP8="},{"name":"n","value":null}],'
        b'"key":{"type":"BINARY","data":"Zm9v"},"value":{"type":"JSON","data":{"a" : "\xc3\xa9"}},'
        b'"timestamp":"2021-02-05T19:14:42Z"}',
        NOW,
    )
    assert record.rows.timestamps == [1612552482000]
    assert record.rows.keys == [b"foo"]
    assert record.rows.values == [b'{"a" : "\xc3\xa9"}']
    assert record.rows.headers == [[("h", b"\x00\xff"), ("n", None)]]
    assert record.partition == 2
    assert not record.is_json
    assert record.key == ("BINARY", 3)
    assert record.value == ("JSON", 12)


@pytest.mark.parametrize(
    ("given_value", "stored", "is_json"),
    [
        (None, None, True),
        (typed("JSON", None), None, True),
        (typed("JSON", False), b"false", True),
        (typed("JSON", 0), b"0", True),
        (typed("JSON", {}), b"{}", True),
        (typed("JSON", "aGk="), b'"aGk="', True),
        (typed("BINARY", "aGk="), b"hi", False),
        (typed("STRING", "ü☃𝄞\x00"), "ü☃𝄞\x00".encode(), False),
        (typed("JSON", ""), b'""', True),
        (typed("STRING", "é"), "é".encode(), False),
        (typed("STRING", ""), b"", False),
        (typed("STRING", None), None, True),
        (typed("BINARY", ""), b"", False),
        (typed("BINARY", None), None, True),
        ({"type": "BINARY"}, None, True),
        ({"type": "JSON"}, None, True),
        ({"type": "STRING"}, None, True),
    ],
)
def test_values(given_value: Any, stored: bytes | None, is_json: bool) -> None:
    record = decode_v3_record(record_of(value=given_value), NOW)
    assert record.rows.values == [stored]
    assert record.rows.keys == [None]
    assert record.rows.headers is None
    assert record.rows.timestamps == [NOW]
    assert record.is_json == is_json
    assert record.key is None
    expected = given_value and (given_value["type"], len(stored or b""))
    assert record.value == expected


@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00.0019+01:00", 1),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ],
)
def test_timestamps(text: str, stamp: int) -> None:
    assert decode_v3_record(record_of(timestamp=text), NOW).rows.timestamps == [stamp]


@pytest.mark.parametrize(
    "obj",
    [
        *(b"", b"1", b"[]", b"null", b"{", b"{} {}", b'{"partition":1}', b'{"partition_id":"1"}'),
        *(b'{"partition_id":1.5}', b'{"value":"x"}', b'{"value":{"data":"x"}}', b'{"headers":{}}'),
        *(b'{"value":{"type":"XML","data":"x"}}', b'{"value":{"type":"STRING","data":1}}'),
        *(
            b'{"value":{"type":"JSON","data":"\xff"}}',
            b'{"value":{"type":"JSON","data":"\\ud800"}}',
        ),
        *(b'{"headers":[{"value":"YQ=="}]}', b'{"timestamp":5}', b'{"timestamp":"yesterday"}'),
        *(b'{"timestamp":"2021-02-05T19:14:42"}', b'{"value":' + b"[" * 5000),
    ],
)
def test_refusals(obj: bytes) -> None:
    with pytest.raises(BadBody) as refused:
        decode_v3_record(obj, NOW)
    assert (refused.value.status, refused.value.code) == (400, 400)
    assert str(refused.value).startswith("Bad Request: ")


@pytest.mark.parametrize(("rows", "headers"), [(ROWS_MAX, None), (1, ROWS_MAX - 1)])
def test_few_records_and_headers_stay_lists(rows: int, headers: int | None) -> None:
    few = rows_with(rows, headers)
    assert columns_of_many(few) is few
    many = rows_with(rows + (headers is None), headers and headers + 1)
    columns = columns_of_many(many)
    assert isinstance(columns, pa.RecordBatch)
    assert weight(columns) == weight(many)
    assert columns.column("headers").to_pylist() == [
        row and [{"key": "a", "value": None}] * len(row) for row in many.headers or [None] * rows
    ] + [None] * (headers is None)


@pytest.mark.parametrize("text", ["1969-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00"])
def test_timestamps_before_epoch(text: str) -> None:
    with pytest.raises(InvalidBody):
        decode_v3_record(record_of(timestamp=text), NOW)


@pytest.mark.parametrize(("data", "text"), [(1, "1"), ("x", '"x"'), ({}, "{}")])
def test_bad_base64_in_confluents_words(data: object, text: str) -> None:
    for obj in (
        record_of(value=typed("BINARY", data)),
        record_of(headers=[{"name": "a", "value": data}]),
    ):
        with pytest.raises(BadBody) as refused:
            decode_v3_record(obj, NOW)
        assert str(refused.value) == f"Bad Request: data={text} is not a base64 string."


@pytest.mark.parametrize(
    "value",
    [
        typed("AVRO", 1),
        {"schema_id": 3, "data": 1},
        {"subject": "s", "data": 1, "type": "PROTOBUF"},
    ],
)
def test_schemas(value: object) -> None:
    with pytest.raises(NoSchemaRegistry) as refused:
        decode_v3_record(record_of(value=value), NOW)
    assert (refused.value.status, refused.value.code) == (408, 40801)


# --- streams

OBJECTS = [
    b"{}",
    b'{"a":"}{\\"\\\\"}',
    b'{"b":[1,{"c":{}},"]"],"d":"' + b"x" * 300 + b'"}',
    b'{"e":[{"f":"}"},{"g":"{\\""},{},{"h":{"i":{}}}]}',
    '{"é":"\\u007d"}'.encode(),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 10_000])
@pytest.mark.parametrize("between", [b"", b" ", b"\r\n\t "])
def test_stream_in_pieces_of_any_size(size: int, between: bytes) -> None:
    body = between + between.join(OBJECTS * 3) + between
    stream = ObjectStream()
    objects = [
        obj
        for start in range(0, len(body), size)
        for obj in stream.feed(body[start : start + size])
    ]
    stream.finish()
    assert objects == OBJECTS * 3


@quick
@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=8))), st.data())
def test_stream_cut_anywhere(values: list[dict[str, str]], data: st.DataObject) -> None:
    objects = [json.dumps(value, ensure_ascii=False).encode() for value in values]
    body = b"".join(objects)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=5).map(sorted))
    stream = ObjectStream()
    stream_objects = []
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        stream_objects += stream.feed(body[start:end])
    stream.finish()
    assert stream_objects == objects


@pytest.mark.parametrize("body", [b"x", b"[{}]", b'"a"', b"}", b" ,{}", b"\0", b"1 {}"])
def test_what_is_no_object(body: bytes) -> None:
    with pytest.raises(BadBody):
        ObjectStream().feed(body)
    stream = ObjectStream()
    assert stream.feed(b'{"a":1} ' + body) == [b'{"a":1}']
    for again in (lambda: stream.feed(b"{}"), stream.finish):
        with pytest.raises(BadBody):
            again()


@pytest.mark.parametrize("body", [b"{", b'{"a', b'{"a\\', b'{"a":[1,', b'{} {"a":{}'])
def test_stream_that_ends_inside_object(body: bytes) -> None:
    stream = ObjectStream()
    stream.feed(body)
    with pytest.raises(BadBody, match="ends inside an object"):
        stream.finish()


@pytest.mark.parametrize("piece", [b"x" * 50, b"[" * 50, b'"",' * 20, b'{"b":1},' * 20])
def test_object_over_bound(piece: bytes) -> None:
    stream = ObjectStream(object_bytes_max=200)
    stream.feed(b'{"a":"' if piece.startswith(b"x") else b'{"a":[')
    with pytest.raises(RecordTooLarge):
        deque(map(stream.feed, [piece] * 5))
    assert len(stream._buffer) < 400
    with pytest.raises(RecordTooLarge):
        ObjectStream(object_bytes_max=9).feed(b'{"a":1234}')
    assert ObjectStream(object_bytes_max=10).feed(b'{"a":1234}') == [b'{"a":1234}']


def test_objects_nested_without_end() -> None:
    with pytest.raises(BadBody, match="nested deeper"):
        ObjectStream().feed(b'{"a":' * 5000)


def test_long_strings_in_one_byte_pieces() -> None:
    # Beginning again with each piece would take minutes.
    body = b'{"a":"' + b'\\"' * 50_000 + b'","b":[' + b'"",' * 30_000 + b"1]}"
    stream = ObjectStream()
    objects = [obj for start in range(len(body)) for obj in stream.feed(body[start : start + 1])]
    assert objects == [body]


@quick
@given(st.lists(st.sampled_from([b"{", b"}", b'"', b"\\", b" ", b"x", b'{"a":']), max_size=25))
def test_any_bytes(pieces: list[bytes]) -> None:
    whole, cut = ObjectStream(), ObjectStream()
    outputs: list[list[bytes]] = [[], []]
    for stream, objects, parts in (
        (whole, outputs[0], [b"".join(pieces)]),
        (cut, outputs[1], pieces),
    ):
        with contextlib.suppress(BadBody):
            for part in parts:
                objects += stream.feed(part)
            stream.finish()
    assert outputs[0] == outputs[1]
    for obj in outputs[0]:
        with contextlib.suppress(InvalidRequest):
            decode_v3_record(obj, NOW)


# --- batches


def test_batch() -> None:
    entries = [{"id": "1", "value": typed("STRING", "a")}, {"id": 2, "partition_id": 1}]
    decoded_entries = decode_v3_batch(json.dumps({"entries": entries}).encode())
    assert [name for name, _ in decoded_entries] == ["1", "2"]
    records = [decode_v3_record(obj, NOW) for _, obj in decoded_entries]
    assert [record.rows.values for record in records] == [[b"a"], [None]]
    assert [record.partition for record in records] == [None, 1]


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [{"id": str(number)} for number in range(ENTRIES_MAX + 1)],
        [{"id": "a"}, {"id": "a"}],
        [{"id": ""}],
        [{"id": "a b"}],
        [{"id": "a" * 81}],
    ],
)
def test_batches_that_are_wrong_as_whole(entries: list[object]) -> None:
    with pytest.raises(InvalidBody) as refused:
        decode_v3_batch(json.dumps({"entries": entries}).encode())
    assert (refused.value.status, refused.value.code) == (422, BATCH_CODE)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"{", b"null", b"[]", b'{"entries":5}', b'{"entries":{}}'),
        *(b'{"entries":[1]}', b'{"entries":[{}]}', b"\xff"),
    ],
)
def test_no_batch(body: bytes) -> None:
    with pytest.raises(BadBody):
        decode_v3_batch(body)
