"""The bound of a page is at least the bytes of the encoded page, in each format."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.formats.test_json_out import Record, batch_of
from tests.support.properties import examples
from tidelog.service.formats import consumers
from tidelog.service.formats.arrow import encode_arrow_of_many
from tidelog.service.formats.encoded_size_bounds import PAGE_BYTES, fitted
from tidelog.service.formats.fetched import FetchParams, encode
from tidelog.service.formats.json_out import FEW
from tidelog.storage.codec.chunk import weight
from tidelog.storage.core.model import ReadBounds, TopicIdPartition
from tidelog.storage.groups.read_result import Portion, Read
from tidelog.storage.read.reader import ReadBatch
from tidelog.storage.records import FetchResult

FORMATS = [
    *(("json", "json"), ("binary", "binary"), ("text", "text"), ("avro", "avro")),
    *((lines, form) for lines in ("ndjson", "sse") for form in ("json", "binary", "text")),
    ("arrow", "arrow"),
]
WORST = ["\x01", '"', "\x85", "\u2028", "\\", "é", "a"]
texts = st.one_of(
    st.builds(lambda char, count: char * count, st.sampled_from(WORST), st.integers(0, 40)),
    st.text(max_size=9),
)
octets = st.one_of(texts.map(str.encode), st.binary(max_size=9))
headers = st.lists(st.tuples(texts, st.none() | octets), max_size=3)
records = st.lists(st.tuples(st.none() | octets, st.none() | octets, st.none() | headers))
TOPIC = "t" * 249
PARTITION = 2**31 - 1
BASE = 10**15


def fetched(*batches: list[Record], is_json: bool = False, base: int = BASE) -> FetchResult:
    pieces = list[ReadBatch]()
    for listed in filter(None, batches):
        batch = batch_of(listed, base)
        pieces.append(ReadBatch(batch, is_json))
        base += len(listed)
    return FetchResult(pieces, base, 0, base, sum(weight(piece.batch) for piece in pieces))


def encoded(
    fetch_result: FetchResult, format_name: str, embedded: str, on_error: Any = "raw"
) -> bytes:
    view = FetchParams(TOPIC, PARTITION, format_name, embedded, ReadBounds(1, 1), on_error)
    return encode(view, fetch_result).page.body


@pytest.mark.parametrize(("format_name", "embedded"), FORMATS)
@given(first=records, second=records, copies=st.sampled_from([1, FEW]))
@examples(30)
def test_no_page_has_more_bytes(
    format_name: str, embedded: str, first: list[Record], second: list[Record], copies: int
) -> None:
    fetch_result = fetched(first * copies, second)
    _, size = fitted(fetch_result, TOPIC, format_name, embedded)
    assert len(encoded(fetch_result, format_name, embedded)) <= size
    if format_name == "arrow":
        parts = [(TOPIC, PARTITION, [piece.batch for piece in fetch_result.pieces])]
        if fetch_result.pieces:
            assert len(encode_arrow_of_many(parts)) <= size


@pytest.mark.parametrize("format_name", ["json", "ndjson", "sse"])
@pytest.mark.parametrize("char", WORST)
def test_no_page_of_json_has_more_bytes(format_name: str, char: str) -> None:
    value = b'"%b"' % (char.encode() if char not in '\x01"\\' else b"a") * 1
    listed: list[Record] = [(value, value[:-1] + value[1:-1] * 1000 + b'"', None)] * (2 * FEW)
    fetch_result = fetched(listed, is_json=True)
    assert (
        len(encoded(fetch_result, format_name, "json"))
        <= fitted(fetch_result, TOPIC, format_name, "json")[1]
    )


def test_page_ends_where_its_bound_does() -> None:
    listed: list[Record] = [(None, b"\x01" * 1000, None)] * 30
    offset, offsets = BASE, list[int]()
    while left := listed[offset - BASE :]:
        fetch_result = fetched(left[:1], left[1:], base=offset)
        page, size = fitted(fetch_result, TOPIC, "text", "text", 20_000)
        assert size <= 20_000
        assert page.weight == 1024 * page.records
        assert page.next_offset == offset + page.records
        offsets += [row for piece in page.pieces for row in piece.batch["offset"].to_pylist()]
        offset = page.next_offset
    assert offsets == list(range(BASE, BASE + 30))


def test_record_above_bound_is_alone() -> None:
    fetch_result = fetched([(None, b"\x01" * 1000, None)] * 3)
    page, size = fitted(fetch_result, TOPIC, "text", "text", 1)
    assert (page.records, page.next_offset) == (1, BASE + 1)
    assert size > 6000
    none, size = fitted(fetch_result, TOPIC, "text", "text", 1, at_least=0)
    assert (none.records, size) == (0, PAGE_BYTES)


def test_read_of_partitions_ends_where_its_bound_does() -> None:
    listed: list[Record] = [(None, b"\x01" * 1000, None)] * 3
    portions = [
        Portion(TopicIdPartition("id", number), "t", BASE, fetched(listed)) for number in range(3)
    ]
    read = Read(list(portions), 1)
    assert consumers.fit(read, "text", 40_000) <= 40_000
    assert [portion.fetched.records for portion in read.portions] == [3, 2]
    assert read.portions[1].fetched.next_offset == BASE + 2
    read = Read(list(portions), 1)
    consumers.fit(read, "text", 1)
    assert [portion.fetched.records for portion in read.portions] == [1]
