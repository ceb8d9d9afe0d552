"""Answers: goldens of every form, columns to JSON and back, and values that try to break out."""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.service.formats.json_in import Format
from tidelog.service.formats.json_out import FEW, FEW_REPORTS, encode_placements, encode_records
from tidelog.service.formats.json_text import Undecodable
from tidelog.storage.codec.chunk import with_offsets
from tidelog.storage.codec.partitioner import Sticky, place
from tidelog.storage.codec.record_columns import Headers, Rows, batch_of_rows
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.model import AppendedRange

quick = examples(120)
MANY = 4 * FEW
Record = tuple[bytes | None, bytes | None, Headers | None]


def batch_of(records: Sequence[Record], base: int = 12, stamp: int = 1_700_000_000_000) -> Any:
    keys, values, headers = map(list, zip(*records, strict=True))
    rows = Rows([stamp + i for i in range(len(keys))], keys, values, headers)
    return with_offsets(batch_of_rows([rows]), base)


def shown(batch: pa.RecordBatch, fmt: Format, is_json: bool = False) -> Any:
    """The records as a client reads them; the three forms must agree."""
    flags = [is_json]
    records = json.loads(encode_records([batch], "t", 3, fmt, is_json=flags))
    lines = encode_records([batch], "t", 3, fmt, is_json=flags, framing="ndjson").decode()
    assert [json.loads(line) for line in lines.splitlines()] == records
    assert lines.count("\n") == len(records)
    events = encode_records([batch], "t", 3, fmt, is_json=flags, framing="sse").decode()
    assert events.endswith("\n\n")
    ids = []
    for event, record in zip(events[:-2].split("\n\n"), records, strict=True):
        number, data = event.split("\n")
        ids.append(number)
        assert json.loads(data.removeprefix("data: ")) == record
    assert ids == [f"id: {record['offset']}" for record in records]
    return records


# --- goldens

GOLDEN: list[Record] = [(b'"k"', b'{"a": 1}', None), (None, b"12", [("h", b"\xff"), ("h", None)])]


@pytest.mark.parametrize("times", [1, MANY])
def test_golden_array(times: int) -> None:
    records = (
        b'{"topic":"t\\"\xc3\xa9","key":"k","value":{"a": 1},"partition":0,"offset":12,'
        b'"timestamp":1700000000000},'
        b'{"topic":"t\\"\xc3\xa9","key":null,"value":12,"partition":0,"offset":13,'
        b'"timestamp":1700000000001,"headers":[{"key":"h","value":"/w=="},{"key":"h","value":null}]}'
    )
    batch = batch_of(GOLDEN)
    body = encode_records([batch] * times, 't"é', 0, "json", is_json=[True] * times)
    assert body == b"[" + b",".join([records] * times) + b"]"


@pytest.mark.parametrize("times", [1, MANY])
def test_golden_binary_and_text(times: int) -> None:
    batch = batch_of([(b'"k"', b'a\n\\"\x01', None), (None, b"", None)])
    tail = b'"partition":7,"offset":%d,"timestamp":%d}'
    tails = tail % (12, 1_700_000_000_000), tail % (13, 1_700_000_000_001)
    binary = (
        b'{"topic":"t","key":"Imsi","value":"YQpcIgE=",%s,{"topic":"t","key":null,"value":"",%s'
    )
    text = (
        b'{"topic":"t","key":"\\"k\\"","value":"a\\n\\\\\\"\\u0001",%s,'
        b'{"topic":"t","key":null,"value":"",%s'
    )
    flags = [False] * times
    body = encode_records([batch] * times, "t", 7, "binary", is_json=flags)
    assert body == b"[" + b",".join([binary % tails] * times) + b"]"
    body = encode_records([batch] * times, "t", 7, "text", is_json=flags)
    assert body == b"[" + b",".join([text % tails] * times) + b"]"


def test_golden_lines_and_events() -> None:
    batch = batch_of([(b"1", b'{\r\n "a" : "\\n"\n}', None)], stamp=0)
    record = (
        b'{"topic":"t","key":1,"value":{   "a" : "\\n" },"partition":0,"offset":12,"timestamp":0}'
    )
    assert (
        encode_records([batch], "t", 0, "json", is_json=[True], framing="ndjson") == record + b"\n"
    )
    assert encode_records([batch], "t", 0, "json", is_json=[False], framing="sse") == (
        b"id: 12\ndata: " + record + b"\n\n"
    )


@pytest.mark.parametrize("fmt", ["json", "binary", "text"])
def test_nothing(fmt: Format) -> None:
    for batches in ([], [batch_of(GOLDEN).slice(0, 0)]):
        flags = [False] * len(batches)
        assert encode_records(batches, "t", 0, fmt, is_json=flags) == b"[]"
        assert encode_records(batches, "t", 0, fmt, is_json=flags, framing="ndjson") == b""
        assert encode_records(batches, "t", 0, fmt, is_json=flags, framing="sse") == b""


def test_one_timestamp_for_all_or_one_each() -> None:
    for stamps in ([7] * MANY, [7] * (MANY - 1) + [8]):
        rows = Rows(stamps, [None] * MANY, [b"1"] * MANY)
        batch = with_offsets(batch_of_rows([rows]), 0)
        assert [record["timestamp"] for record in shown(batch, "json")] == stamps


def test_line_breaks_that_only_some_clients_see() -> None:
    text = "\x85 \u2028 \u2029 \\\u2028 é"
    stored = json.dumps(text, ensure_ascii=False).encode()
    cases: tuple[tuple[Format, bytes], ...] = (("json", stored), ("text", text.encode()))
    for fmt, value in cases:
        assert shown(batch_of([(None, value, [(text, None)])]), fmt)[0]["value"] == text


def test_batches_of_both_kinds_keep_their_order() -> None:
    batches = [
        batch_of(GOLDEN * times, base) for times, base in ((1, 0), (9, 2), (20, 20), (1, 60))
    ]
    body = encode_records(batches, "t", 0, "json", is_json=[True, False, False, True])
    offsets = [record["offset"] for record in json.loads(body)]
    assert offsets == [*range(60), 60, 61]


# --- what is not JSON does not get in

FORGED = [
    *(b"1,2", b'1},{"x":2', b"1}", b"]", b'"', b'"a', b'a"', b"{", b'{"a":1', b"", b" ", b"nul"),
    *(
        *(b'1,"offset":99', b"//", b"NaN", b"01", b"'a'", b'"\n"', b"\xef\xbb\xbf1", b'"\\"'),
        b"[" * 5000,
    ),
    *(b'"\xff"', b'"\xed\xa0\x80"', b"\xff", b'"\\ud800"', b"1 2", b"{} {}", b'{"a":1}}', b"\x00"),
]


@pytest.mark.parametrize("value", FORGED)
@pytest.mark.parametrize("total", [1, MANY])
def test_forged_values_are_named_and_refused(value: bytes, total: int) -> None:
    good: Record = (b'"k"', b"{}", None)
    bads: list[Record] = [(value, b"1", None), (b"1", value, None), (None, value, None)]
    for bad in bads:
        batch = batch_of([good] * (total - 1) + [bad, good])
        for framing in ("array", "ndjson", "sse"):
            with pytest.raises(Undecodable) as refused:
                encode_records([batch], "t", 0, "json", is_json=[False], framing=framing)
            assert refused.value.offset == 12 + total - 1
            assert refused.value.format == "json"
            assert (refused.value.status, refused.value.code) == (422, 422)
            part = "key" if bad[0] == value else "value"
            assert refused.value.part == part
            beginning = f"{part} deserialization error for format json: partition t-0, offset"
            assert str(refused.value).startswith(beginning)
            assert isinstance(refused.value, InvalidRequest)


def test_two_halves_do_not_make_whole() -> None:
    halves: list[Record] = [(b"[1", b"2]", None), (b'{"a":1', b'"b":2}', None)]
    for half in halves:
        with pytest.raises(Undecodable):
            encode_records([batch_of([half] * MANY)], "t", 0, "json", is_json=[False])


@pytest.mark.parametrize("total", [1, MANY])
def test_text_must_be_utf_8(total: int) -> None:
    batch = batch_of([(None, b"\xff", None)] * total)
    with pytest.raises(Undecodable, match="for format text: partition t-0, offset 12: "):
        encode_records([batch], "t", 0, "text", is_json=[False])


@quick
@given(
    st.lists(
        st.sampled_from([b"1", b",", b"{", b"}", b'"', b"[", b"]", b" ", b":", b"\\", b"\xff"])
    )
    .map(b"".join)
    .filter(bool),
    st.sampled_from([1, MANY]),
)
def test_any_value_is_one_value_or_refused(value: bytes, total: int) -> None:
    batch = batch_of([(value, value, None)] * total)
    try:
        records = shown(batch, "json")
    except Undecodable:
        with pytest.raises(ValueError, match=r".*"):
            json.loads(value)
        return
    assert [record["value"] for record in records] == [json.loads(value)] * total
    assert set(records[0]) == {"topic", "key", "value", "partition", "offset", "timestamp"}


# --- round trips

octets = st.none() | st.binary(max_size=12)
texts = st.none() | st.text(max_size=12).map(str.encode)
json_texts = st.none() | st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
).flatmap(
    lambda value: st.builds(
        lambda indent, ascii_only: json.dumps(
            value, indent=indent, ensure_ascii=ascii_only
        ).encode(),
        st.sampled_from([None, 1, "\t"]),
        st.booleans(),
    )
)
listed = st.none() | st.lists(st.tuples(st.text(max_size=6), octets), max_size=3)


def as_json(octets: bytes | None) -> Any:
    return None if octets is None else json.loads(octets)


def as_text(octets: bytes | None) -> Any:
    return None if octets is None else octets.decode()


def as_base64(octets: bytes | None) -> Any:
    return None if octets is None else base64.b64encode(octets).decode()


def check(records: list[Record], fmt: Format, times: int, skip: int, is_json: bool) -> None:
    read: Callable[[bytes | None], Any] = {"json": as_json, "text": as_text, "binary": as_base64}[
        fmt
    ]
    records *= times
    batch = batch_of(records).slice(skip)
    if not batch.num_rows:
        return
    for number, (record, row) in enumerate(
        zip(records[skip:], shown(batch, fmt, is_json), strict=True), start=skip
    ):
        expected = {
            "topic": "t",
            "key": read(record[0]),
            "value": read(record[1]),
            "partition": 3,
            "offset": 12 + number,
            "timestamp": 1_700_000_000_000 + number,
        }
        if record[2]:
            expected["headers"] = [{"key": k, "value": as_base64(v)} for k, v in record[2]]
        assert row == expected


repeats = st.sampled_from([1, MANY])
skips = st.integers(0, 3)


@quick
@given(st.lists(st.tuples(json_texts, json_texts, listed), min_size=1, max_size=6), repeats, skips)
def test_json_round_trip(records: list[Record], times: int, skip: int) -> None:
    for is_json in (True, False):
        check(list(records), "json", times, skip, is_json)


@quick
@given(st.lists(st.tuples(octets, octets, listed), min_size=1, max_size=6), repeats, skips)
def test_binary_round_trip(records: list[Record], times: int, skip: int) -> None:
    check(records, "binary", times, skip, is_json=False)


@quick
@given(st.lists(st.tuples(texts, texts, listed), min_size=1, max_size=6), repeats, skips)
def test_text_round_trip(records: list[Record], times: int, skip: int) -> None:
    check(records, "text", times, skip, is_json=False)


# --- produce reports


def reports(body: bytes) -> Any:
    report = json.loads(body)
    assert report["key_schema_id"] is report["value_schema_id"] is None
    assert list(report) == ["offsets", "key_schema_id", "value_schema_id"]
    return report["offsets"]


def test_golden_report() -> None:
    body = encode_placements(0, [AppendedRange("t", 0, 1, 1)], 1)
    assert body == (
        b'{"offsets":[{"partition":0,"offset":1,"error_code":null,"error":null}],'
        b'"key_schema_id":null,"value_schema_id":null}'
    )


@pytest.mark.parametrize("count", [1, 2, FEW_REPORTS, FEW_REPORTS + 1, 1000])
@pytest.mark.parametrize("base", [0, 995, (1 << 63) - 2000, None])
def test_reports_of_one_run(count: int, base: int | None) -> None:
    placements = None if base is None else [AppendedRange("t", 4, base, count)]
    assert reports(encode_placements(4, placements, count)) == [
        {
            "partition": 4,
            "offset": None if base is None else base + row,
            "error_code": None,
            "error": None,
        }
        for row in range(count)
    ]


@pytest.mark.parametrize("count", [2, FEW_REPORTS, FEW_REPORTS + 1, 500])
@pytest.mark.parametrize("bases", [(100, 2000, 0), None])
@pytest.mark.parametrize("as_batch", [True, False])
def test_reports_follow_request(count: int, bases: tuple[int, ...] | None, as_batch: bool) -> None:
    asked = [(row * row) % 3 for row in range(count)]
    rows = Rows([0] * count, [None] * count, [None] * count)
    places = place(batch_of_rows([rows]) if as_batch else rows, asked, 3, Sticky(1))
    placements = bases and [
        AppendedRange("t", partition, base, asked.count(partition))
        for partition, base in enumerate(bases)
    ]
    seen = [0, 0, 0]
    for partition, report in zip(
        asked, reports(encode_placements(places, placements, count)), strict=True
    ):
        offset = bases and bases[partition] + seen[partition]
        assert (report["partition"], report["offset"]) == (partition, offset)
        seen[partition] += 1
