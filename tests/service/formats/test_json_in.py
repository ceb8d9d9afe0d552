"""Produce bodies in JSON: accepted records, refusals, and no other result for any bytes."""

import base64
import json
import random
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.service.formats import json_in
from tidelog.service.formats.json_in import (
    ROWS_MAX,
    TIMESTAMP_MS_MAX,
    BadBody,
    Format,
    InvalidBody,
    Produced,
    decode_json,
)
from tidelog.storage.codec.record_columns import CHUNK_SCHEMA, Rows, batch_of_rows
from tidelog.storage.core.errors import InvalidRequest

NOW = 1_700_000_000_000
FORMATS: tuple[Format, ...] = ("json", "binary", "text")
quick = examples(150)


def body_of(records: object, **more: object) -> bytes:
    return json.dumps({"records": records, **more}).encode()


def rows_of(produced: Produced) -> list[dict[str, Any]]:
    """The records as dicts, whichever form they have; timestamps in ms."""
    rows = produced.rows
    batch = batch_of_rows([rows]) if isinstance(rows, Rows) else rows
    batch.validate(full=True)
    assert batch.schema == CHUNK_SCHEMA
    assert batch.num_rows == produced.count
    records = batch.to_pylist()
    for row in records:
        row["timestamp"] = int(row["timestamp"].timestamp() * 1000 + 0.5)
        row["headers"] = [(h["key"], h["value"]) for h in row["headers"] or []]
    return records


def said_by(produced: Produced) -> list[int | None]:
    assert not isinstance(produced.partitions, pa.Array)
    return produced.partitions or [None] * produced.count


# --- goldens


def test_json_keeps_text_that_was_sent() -> None:
    body = b"""{"records": [
        {"key": "k", "value": {"a" : [1, 2.50, "\\u00e9\xc3\xa9"]}},
        {"key": null, "value": null}, {}, {"value": false}, {"value": 0}, {"value": ""},
        {"value": {}}, {"value":\t[ ]\n}, {"key": 1e300, "value": "\\ud83d\\ude00"}
    ], "key_schema": null, "value_schema_id": 3}"""
    produced = decode_json(body, "json", NOW)
    assert produced.is_json
    assert produced.partitions is None
    assert isinstance(produced.rows, Rows)
    assert produced.rows.headers is None
    assert produced.rows.timestamps == [NOW] * 9
    assert produced.rows.keys == [b'"k"', *[None] * 7, b"1e300"]
    assert produced.rows.values == [
        b'{"a" : [1, 2.50, "\\u00e9\xc3\xa9"]}',
        *(None, None, b"false", b"0", b'""', b"{}", b"[ ]", b'"\\ud83d\\ude00"'),
    ]


def test_binary() -> None:
    body = body_of([{"key": "a2V5", "value": "AP+A"}, {"key": "", "value": None}, {"key": None}])
    produced = decode_json(body, "binary", NOW)
    assert not produced.is_json
    assert isinstance(produced.rows, Rows)
    assert produced.rows.keys == [b"key", b"", None]
    assert produced.rows.values == [b"\x00\xff\x80", None, None]


def test_text() -> None:
    produced = decode_json(body_of([{"key": "é\n", "value": "null"}, {"value": ""}]), "text", NOW)
    assert not produced.is_json
    assert isinstance(produced.rows, Rows)
    assert produced.rows.keys == ["é\n".encode(), None]
    assert produced.rows.values == [b"null", b""]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("times", [1, 300])
def test_strimzis_fields(fmt: Format, times: int) -> None:
    records = [
        {"value": "YQ==", "partition": 2, "timestamp": 12},
        {"value": "YQ==", "partition": "3", "timestamp": str(TIMESTAMP_MS_MAX)},
        {"value": "YQ==", "partition": None, "timestamp": None, "headers": None},
        {"value": "YQ==", "headers": []},
        {"value": "YQ==", "headers": [{"key": "h", "value": "AP8="}, {"key": "h", "value": None}]},
    ] * times
    produced = decode_json(body_of(records), fmt, NOW)
    assert said_by(produced) == [2, 3, None, None, None] * times
    rows = rows_of(produced)
    assert [row["timestamp"] for row in rows] == [12, TIMESTAMP_MS_MAX, NOW, NOW, NOW] * times
    assert [row["headers"] for row in rows] == (
        [[], [], [], [], [("h", b"\x00\xff"), ("h", None)]] * times
    )


def test_no_headers_is_null_whatever_size() -> None:
    for times in (1, 300):
        rows = decode_json(body_of([{"value": 1, "headers": []}] * times), "json", NOW).rows
        batch = batch_of_rows([rows]) if isinstance(rows, Rows) else rows
        assert batch.column("headers").null_count == times


def test_large_requests_are_columns() -> None:
    assert isinstance(decode_json(body_of([{}] * ROWS_MAX), "json", NOW).rows, Rows)
    batch = decode_json(body_of([{}] * (ROWS_MAX + 1)), "json", NOW).rows
    assert isinstance(batch, pa.RecordBatch)


def test_nulls_in_columns_leave_no_bytes() -> None:
    records = [{"key": "null", "value": None}, {"key": None, "value": 1234}, {"value": "true"}]
    batch = decode_json(body_of(records * 100), "json", NOW).rows
    assert isinstance(batch, pa.RecordBatch)
    assert batch.column("key").to_pylist() == [b'"null"', None, None] * 100
    assert batch.column("value").to_pylist() == [None, b"1234", b'"true"'] * 100
    data = batch.column("key").buffers()[2]
    assert data is not None
    assert b"null" not in data.to_pybytes().replace(b'"null"', b"")
    nothing = decode_json(body_of([{"key": None, "value": None}] * 100), "json", NOW).rows
    assert isinstance(nothing, pa.RecordBatch)
    assert nothing.column("value").null_count == 100


# --- refusals

BAD, INVALID = 400, 422


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((b"", INVALID), (b" \n", INVALID), (b"null", INVALID), (b"{}", INVALID)),
        *((b'{"records":null}', INVALID), (b'{"records":[]}', INVALID)),
        (b'{"records":[{}],"x":1}', INVALID),
        (b'{"records":[{"valeu":1}]}', INVALID),
        (b'{"records":[{"headers":[{"value":"YQ=="}]}]}', INVALID),
        (b'{"records":[{"timestamp":-1}]}', INVALID),
        (b'{"records":[{"timestamp":"-1"}]}', INVALID),
        (b'{"records":[{"timestamp":253402300800000}]}', INVALID),
        (b'{"records":[{"timestamp":123456789012345678901234567890}]}', INVALID),
        *((b"[]", BAD), (b"7", BAD), (b'"x"', BAD), (b"{", BAD), (b'{"records":[{}]} x', BAD)),
        *((b'{"records":[{},]}', BAD), (b'{"records":{}}', BAD), (b'{"records":"x"}', BAD)),
        *((b'{"records":5}', BAD), (b"records", BAD), (b'"\xff"', BAD), (b"[" * 100_000, BAD)),
        *((b'{"records":[1]}', BAD), (b'{"records":[5]}', BAD)),
        (b'{"records":[{"value":"aGk=","timestamp":-1}]}', INVALID),
        (b'{"records":[{"value":"aGk=","partition":"x"}]}', BAD),
        (b'{"records":[{"value":"aGk=","headers":[{"key":"h","value":"?"}]}]}', BAD),
        (b'{"records":[null]}', BAD),
        (b'{"records":[[]]}', BAD),
        (b'{"records":[{"partition":1.5}]}', BAD),
        (b'{"records":[{"partition":true}]}', BAD),
        (b'{"records":[{"partition":"two"}]}', BAD),
        (b'{"records":[{"partition":"\xd9\xa1"}]}', BAD),
        (b'{"records":[{"timestamp":{}}]}', BAD),
        (b'{"records":[{"headers":{}}]}', BAD),
        (b'{"records":[{"headers":[{"key":1,"value":"YQ=="}]}]}', BAD),
        (b'{"records":[{"headers":[{"key":"a","value":"Y"}]}]}', BAD),
        (b'{"records":[{"headers":null,"headers":[{"key":"a","value":"Y"}]}]}', BAD),
        (b'\xef\xbb\xbf{"records":[{}]}', BAD),
        (b'{"records":[{"value":"\xff"}]}', BAD),
        (b'{"records":[{"value":"\xed\xa0\x80"}]}', BAD),
        (b'{"records":[{}],"key_schema":"\xff"}', BAD),
    ],
)
def test_refusals(fmt: Format, body: bytes, status: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_json(body, fmt, NOW)
    assert isinstance(refused.value, BadBody if status == BAD else InvalidBody)
    assert refused.value.status == refused.value.code == status
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        *(b'"\xc3\x28"', b'"\\ud800"', b'"\\ude00"', b'"\\ud800\\u0041"', b'"\\q"', b'"\\u12"'),
        *(b'"a\nb"', b'"\x00"', b'"a\tb"', b"01", b"1.", b".5", b"+1", b"-", b"1e", b"NaN"),
        *(b"nul", b"Infinity", b"'a'", b"[1,]", b"{1:2}", b'{"a" 1}', b"", b"[" * 5000),
    ],
)
@pytest.mark.parametrize("times", [1, 300])
def test_what_is_no_json_value_is_not_stored(text: bytes, times: int) -> None:
    body = b'{"records":[' + b'{"value":1},' * times + b'{"value":' + text + b"}]}"
    with pytest.raises(BadBody):
        decode_json(body, "json", NOW)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((f'"{bad}"', f'"{bad}"') for bad in ("YQ", "YQ=", "Y", "Y Q==", "_-8=", "YQ==\\n", "é")),
        *(("1", "1"), ("[1]", "[1]"), ("true", "true"), ('"' + "-" * 500 + '"', '"' + "-" * 99)),
    ],
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_bad_base64_is_shown(value: str, shown: str, name: str) -> None:
    for times in (0, 1, 300):
        good = '{"key":"YQ==","value":"YQ=="},' * times
        body = f'{{"records":[{good}{{"{name}":{value}}}]}}'.encode()
        with pytest.raises(BadBody) as refused:
            decode_json(body, "binary", NOW)
        assert str(refused.value).startswith(f"data={shown}")
        hint = str(refused.value).partition(" is not a base64 string. ")[2]
        assert "application/vnd.kafka.json.v2+json" in hint


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("body", [b'{"value":1}', b"{}", b'{"value":"%s"}' % (b"v" * 9000)])
def test_body_without_records_shows_smallest_right_one(fmt: Format, body: bytes) -> None:
    with pytest.raises(InvalidBody) as refused:
        decode_json(body, fmt, NOW)
    assert str(refused.value) == 'records is missing: send {"records": [{"value": ...}]}'
    for other in (b'{"records":[],"value":1}', b'{"value":1,"records":[{}]}'):
        with pytest.raises(InvalidBody, match="unknown field `value`"):
            decode_json(other, fmt, NOW)


def test_text_must_be_strings() -> None:
    with pytest.raises(InvalidBody, match="embedded format is 'text', the value must be a string"):
        decode_json(b'{"records":[{"value":1}]}', "text", NOW)


# --- properties

CHARACTERS = 'ab"\\/ \t\n\r\x00\x1f\x7f\u00e9\u20ac\u2028\ufffd\U0001f30a'


def any_text(draw: random.Random) -> str:
    return "".join(draw.choices(CHARACTERS, k=draw.randrange(9)))


def any_json(draw: random.Random, depth: int = 2) -> Any:
    match draw.randrange(8 if depth else 6):
        case 0:
            return draw.choice([None, True, False])
        case 1:
            return draw.choice(
                [0, -1, 2**31, 2**63, -(2**63) - 1, 10**30, draw.randrange(-999, 999)]
            )
        case 2:
            return draw.choice([0.0, -0.0, 1e300, 5e-324, 0.1, draw.uniform(-9, 9)])
        case 3 | 4 | 5:
            return any_text(draw)
        case 6:
            return [any_json(draw, depth - 1) for _ in range(draw.randrange(4))]
        case _:
            return {any_text(draw): any_json(draw, depth - 1) for _ in range(draw.randrange(4))}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("times", [1, 40])
def test_json_round_trip(times: int, ascii_only: bool, indent: int | None) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        few = range(draw.randint(1, 5))
        records = [{"key": any_json(draw), "value": any_json(draw)} for _ in few] * times
        body = json.dumps({"records": records}, ensure_ascii=ascii_only, indent=indent).encode()
        produced = decode_json(body, "json", NOW)
        for record, row in zip(records, rows_of(produced), strict=True):
            for name in ("key", "value"):
                assert (None if row[name] is None else json.loads(row[name])) == record[name], seed
                assert row[name] != b"null"


@quick
@given(
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=9),
            st.none() | st.binary(max_size=9),
            st.none() | st.integers(0, 99),
            st.none() | st.integers(0, TIMESTAMP_MS_MAX),
            st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=2),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 40]),
)
def test_binary_round_trip(records: list[tuple[Any, ...]], times: int) -> None:
    records *= times
    produced = decode_json(
        body_of(
            [
                {
                    "key": _base64(key),
                    "value": _base64(value),
                    "partition": partition,
                    "timestamp": timestamp,
                    "headers": [
                        {"key": name, "value": _base64(octets)} for name, octets in headers
                    ],
                }
                for key, value, partition, timestamp, headers in records
            ]
        ),
        "binary",
        NOW,
    )
    rows = rows_of(produced)
    assert [(row["key"], row["value"]) for row in rows] == [record[:2] for record in records]
    assert said_by(produced) == [record[2] for record in records]
    expected = [NOW if record[3] is None else record[3] for record in records]
    assert [row["timestamp"] for row in rows] == expected
    assert [row["headers"] for row in rows] == [record[4] for record in records]


def _base64(octets: bytes | None) -> str | None:
    return None if octets is None else base64.b64encode(octets).decode()


@quick
@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.text()), min_size=1, max_size=80))
def test_text_round_trip(pairs: list[tuple[str | None, str | None]]) -> None:
    body = body_of([{"key": key, "value": value} for key, value in pairs])
    for row, pair in zip(rows_of(decode_json(body, "text", NOW)), pairs, strict=True):
        assert (row["key"], row["value"]) == tuple(
            None if text is None else text.encode() for text in pair
        )


TOKENS = [
    *(
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"1", b" ", b"\n", b"\xff"),
        b"YQ==",
    ),
    *(b'"records"', b'"key"', b'"value"', b'"headers"', b'"partition"', b'"timestamp"', b"true"),
    *(b'{"records":[{', b'"value":', b'"YQ=="', b"}]}", b'"headers":[{"key":"a"', b"-1", b"1e9"),
]
nonsense = st.binary(max_size=60) | st.lists(st.sampled_from(TOKENS), max_size=30).map(b"".join)


@quick
@given(nonsense, st.sampled_from(FORMATS), st.booleans())
def test_any_bytes_are_records_or_refused(body: bytes, fmt: Format, large: bool) -> None:
    if large:  # past where the plain form is tried first
        body = b'{"records":[' + b'{"value":"YQ=="},' * 300 + b"{" + body
    try:
        produced = decode_json(body, fmt, NOW)
    except (BadBody, InvalidBody):
        return
    assert len(rows_of(produced)) == produced.count > 0
    if produced.is_json:
        for row in rows_of(produced):
            assert all(row[name] is None or json.loads(row[name]) is not None for name in KEYS)


KEYS = ("key", "value")


def many(records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Produced:
    """Decode the records as those of a body of many objects, a few headers at a time."""
    monkeypatch.setattr(json_in, "has_many_objects", lambda _: True)
    monkeypatch.setattr(json_in, "HEADERS_BYTES", 100)
    return decode_json(json.dumps({"records": records}).encode(), "text", 1)


def test_headers_are_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    drawn: list[Any] = [
        draw.choice([None, [], [{"key": "é", "value": "YQ=="}], [{"key": "a"}] * draw.randrange(9)])
        for _ in range(200)
    ]
    records = [{"value": str(row), "headers": headers} for row, headers in enumerate(drawn)]
    records[7].pop("headers")
    records[8]["headers"] = [{"key": "x" * 1000}]
    expected = decode_json(json.dumps({"records": records}).encode(), "text", 1)
    assert isinstance(expected.rows, pa.RecordBatch)
    assert many(records, monkeypatch).rows.equals(expected.rows)


def test_error_in_slice_names_record(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[Any] = [{"key": "a", "value": "YQ=="}] * 3
    records = [{"headers": headers} for _ in range(50)]
    for wrong, message in (
        ([*headers, {"key": "a", "value": "Y"}], 'data="Y" is not a base64 string'),
        ([*headers, {"key": 1}], "at `$.records[33].headers[3].key`"),
        (1, "at `$.records[33].headers`"),
    ):
        changed = [*records[:33], {"headers": wrong}, *records[34:]]
        with pytest.raises(BadBody) as refused:
            many(changed, monkeypatch)
        assert message in str(refused.value)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("count", [1, 100])
def test_record_has_so_many_headers_at_most(
    count: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = [{"key": "a"}] * json_in.HEADERS_MAX
    monkeypatch.setattr(json_in, "has_many_objects", lambda _: is_large)
    body = json.dumps({"records": [{"headers": headers}] * count}).encode()
    assert decode_json(body, "json", 1).count == count
    headers.append({"key": "b"})
    body = json.dumps({"records": [{"headers": headers}] * count}).encode()
    with pytest.raises(InvalidBody, match="10000 headers at most"):
        decode_json(body, "json", 1)


@pytest.mark.parametrize(
    "field", ['"%b":1', '"value":"%b"', '"headers":[{"key":"a","value":"%b"}]'], ids=str
)
def test_message_of_refusal_takes_no_memory_for_words_of_body(field: str) -> None:
    """msgspec's message quotes an unknown field, and ours a value that is not base64."""
    body = b'{"records":[{%b}]}' % field.encode().replace(b"%b", b"ab " * 500_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refusal:
            decode_json(body, "binary", NOW)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(refusal.value)) < 1000
    assert peak < 4 * len(body)
