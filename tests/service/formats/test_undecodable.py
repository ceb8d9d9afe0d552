"""Pages of any mix of records: what each `on_error` delivers, in each format and framing."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.formats.test_json_out import batch_of
from tests.support.properties import examples
from tidelog.service.formats.json_in import Format
from tidelog.service.formats.json_out import Framing
from tidelog.service.formats.json_text import Undecodable
from tidelog.service.formats.record_pages import (
    ON_ERROR,
    OnError,
    RecordPage,
    check_first,
    encode_page,
    headers_of,
)
from tidelog.storage.core.model import TopicPartition

BASE = 100
WHERE = TopicPartition("t", 3)

# Values by what reads them: the oracle below asks no code of the product.
JSON_VALUES = [b"1", b'{"a": [1, null]}', b'"\xc3\xa9"', b" true ", b'{"a":\n2}']
TEXTS = [b"no json", b"N14228", b"1,2", b'1},{"x":2', b"", "\u2028".encode()]
OCTETS = [b"\xff", b'"\xff"', b"\xed\xa0\x80", b"\x80abc"]
octets = st.none() | st.sampled_from(JSON_VALUES + TEXTS + OCTETS)
good = st.none() | st.sampled_from(JSON_VALUES)
headers = st.none() | st.just([("h", b"\xff")])
chunks = st.lists(st.lists(st.tuples(octets, octets, headers), max_size=30), max_size=3).map(
    lambda batches: [(False, records) for records in batches]
)
known = st.lists(st.tuples(good, good, headers), max_size=20).map(lambda records: (True, records))
"""A batch that is known to be JSON; one that is not may have anything."""


def part(octets: bytes | None, fmt: str, *, is_key: bool) -> tuple[Any, dict[str, Any], bool]:
    """The part as a client reads it, its extra fields, and whether it decodes."""
    name = "key" if is_key else "value"
    raw = None if octets is None else base64.b64encode(octets).decode()
    if octets is None or fmt == "binary":
        return raw, {}, True
    if octets in OCTETS:
        return None, {f"{name}_base64": raw}, False
    if fmt == "text":
        return octets.decode(), {}, True
    if octets in JSON_VALUES:
        return json.loads(octets), {}, True
    if is_key:
        return octets.decode(), {"key_format": "text"}, True
    return None, {"value_base64": raw}, False


def expected(chunks: list[Any], fmt: str) -> list[tuple[dict[str, Any], bool]]:
    judged_records = []
    for _, records in chunks:
        for key, value, more in records:
            shown_key, key_extra, is_key_good = part(key, fmt, is_key=True)
            shown_value, value_extra, is_value_good = part(value, fmt, is_key=False)
            record = {
                "topic": "t",
                "key": shown_key,
                "value": shown_value,
                "partition": 3,
                "offset": BASE + len(judged_records),
                **key_extra,
                **value_extra,
            }
            if more:
                record["headers"] = [{"key": "h", "value": "/w=="}]
            judged_records.append((record, is_key_good and is_value_good))
    return judged_records


def records_of(page: RecordPage, framing: Framing) -> list[Any]:
    text = page.body.decode()
    if framing == "array":
        return json.loads(text)
    if framing == "ndjson":
        return [json.loads(line) for line in text.splitlines()]
    events = [event.split("\n") for event in text.split("\n\n") if event]
    records = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [f"id: {record['offset']}" for record in records] == [first for first, _ in events]
    return records


def encoded(chunks: list[Any], fmt: Format, framing: Framing, on_error: OnError) -> RecordPage:
    batches, offset = [], BASE
    for _, records in chunks:
        batches.append(
            batch_of(records, offset) if records else batch_of([(None, None, None)]).slice(1)
        )
        offset += len(records)
    flags = [is_json for is_json, _ in chunks]
    return encode_page(batches, *WHERE, fmt, is_json=flags, framing=framing, on_error=on_error)


@examples(300)
@given(
    chunks,
    known,
    st.sampled_from(["json", "text", "binary"]),
    st.sampled_from(["array", "ndjson", "sse"]),
    st.booleans(),
)
def test_each_mode_delivers_exactly_its_records_in_order(
    chunks: list[Any], json_chunk: Any, fmt: Format, framing: Framing, is_known_first: bool
) -> None:
    chunks = [json_chunk, *chunks] if is_known_first else [*chunks, json_chunk]
    whole = expected(chunks, fmt)
    wrong = [record["offset"] for record, is_good in whole if not is_good]
    end = BASE + len(whole)
    for on_error in ON_ERROR:
        page = encoded(chunks, fmt, framing, on_error)
        wanted = [record for record, is_good in whole if is_good or on_error == "raw"]
        if wrong and on_error == "stop":
            wanted = [record for record in wanted if record["offset"] < wrong[0]]
        page_records = records_of(page, framing)
        for record in page_records:
            del record["timestamp"]
        assert page_records == wanted
        assert page.records == len(wanted)
        assert page.first_wrong == (wrong[0] if wrong else 0)
        is_cut = bool(wrong) and on_error == "stop"
        assert page.wrong == (1 if is_cut else len(wrong))
        assert page.skipped == (len(wrong) if on_error == "skip" else 0)
        assert (page.stopped is not None) == is_cut
        if page.stopped is not None:
            assert page.stopped.offset == wrong[0]
            assert page.stopped.where == WHERE
        assert page.end(end) == (wrong[0] if is_cut else end)


@examples(150)
@given(chunks, st.sampled_from(["json", "text", "binary"]))
def test_reading_on_behind_each_stop_passes_nothing(chunks: list[Any], fmt: Format) -> None:
    """A client that goes on behind each record at which it stops gets what `skip` gives."""
    flat = [record for _, records in chunks for record in records]
    start, seen, passed = 0, [], []
    while start < len(flat):
        batch = batch_of(flat, BASE).slice(start)
        page = encode_page([batch], *WHERE, fmt, is_json=[False])
        seen += [record["offset"] for record in records_of(page, "array")]
        if page.records == 0:
            with pytest.raises(Undecodable) as refused:
                check_first([batch], WHERE, fmt, is_json=[False])
            assert refused.value.offset == BASE + start
        else:
            check_first([batch], WHERE, fmt, is_json=[False])
        if page.stopped is None:
            break
        passed.append(page.stopped.offset)
        start = page.stopped.offset - BASE + 1
    whole = expected(chunks, fmt)
    assert seen == [record["offset"] for record, is_good in whole if is_good]
    assert passed == [record["offset"] for record, is_good in whole if not is_good]


def test_error_names_part_of_first_record() -> None:
    for records, offset, name in (
        ([(b"1", b"1", None), (b"\xff", b"1", None), (b"1", b"x", None)], BASE + 1, "key"),
        ([(b"1", b"x", None), (b"\xff", b"1", None)], BASE, "value"),
        ([(b"\xff", b"x", None)], BASE, "key"),
    ):
        stopped = encoded([(False, records)], "json", "array", "stop").stopped
        assert stopped is not None
        assert (stopped.offset, stopped.part) == (offset, name)
        assert str(stopped).startswith(f"{name} deserialization error for format json: ")
        assert f"partition t-3, offset {offset}:" in str(stopped)


@pytest.mark.parametrize("text", [b"no json", "\u2028\x85\n\"'\\".encode(), b'1,"offset":99', b""])
def test_key_of_text_forges_nothing(text: bytes) -> None:
    for framing in ("array", "ndjson", "sse"):
        page = encoded([(False, [(text, b"1", None)] * 40)], "json", framing, "stop")
        page_records = records_of(page, framing)
        assert [record["key"] for record in page_records] == [text.decode()] * 40
        assert {record["key_format"] for record in page_records} == {"text"}


def test_headers_name_first_record_of_each_kind() -> None:
    good, bad = (None, b"1", None), (None, b"x", None)
    skipped = encoded([(False, [good, bad, bad])], "json", "array", "skip")
    stopped = encoded([(False, [good, bad])], "json", "array", "stop")
    assert headers_of([stopped]) == ((b"tidelog-undecodable", b"t-3@101"),)
    assert headers_of([skipped, skipped]) == (
        (b"tidelog-skipped", b"4"),
        (b"tidelog-first-skipped", b"t-3@101"),
    )
    assert headers_of([encoded([(False, [good, bad])], "json", "array", "raw")]) == ()
    assert headers_of([], stopped.stopped) == headers_of([stopped])
    assert headers_of([], ValueError("another error")) == ()
