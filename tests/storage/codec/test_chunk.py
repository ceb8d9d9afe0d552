"""Chunks: columns of the records of small requests, and one weight of records in any form."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.codec import chunk, record_columns
from tidelog.storage.codec.chunk import HEADER_BYTES, RECORD_BYTES
from tidelog.storage.codec.record_columns import CHUNK_SCHEMA, Headers, Rows, batch_of_rows


@pytest.mark.parametrize(
    "headers",
    [[], [None], [[]], [[("a", b"1"), ("b", None)]], [None, [("a", b"1")], [], None] * 3],
    ids=str,
)
def test_a_batch_has_the_headers_of_its_rows(headers: list[Headers | None]) -> None:
    count = len(headers)
    batch = batch_of_rows([Rows([1] * count, [None] * count, [b"v"] * count, headers)])
    batch.validate(full=True)
    assert batch.schema == CHUNK_SCHEMA
    pairs = [
        None if row is None else [(pair["key"], pair["value"]) for pair in row]
        for row in batch.column("headers").to_pylist()
    ]
    assert pairs == headers


def test_rows_without_headers_and_rows_with_them_become_one_batch() -> None:
    parts = [
        Rows([1], [None], [b"x"]),
        Rows([2], [b"k"], [None], [[("a", b"1")]]),
        Rows([], [], []),
    ]
    assert batch_of_rows(parts).column("headers").is_null().to_pylist() == [True, False]


@pytest.mark.parametrize("nulls", [[], [0], [1, 3], [4]])
def test_long_items_are_copied_once(nulls: list[int]) -> None:
    items = [None if row in nulls else bytes([row]) * (row * 300_000) for row in range(5)]
    old_bytes = pa.total_allocated_bytes()
    batch = batch_of_rows([Rows([1] * 5, items, items[::-1])])
    assert pa.total_allocated_bytes() - old_bytes < 10_000, "the items are outside of Arrow's pool"
    batch.validate(full=True)
    assert batch.column("key").to_pylist() == items
    assert batch.column("value").equals(pa.array(items[::-1], pa.binary()))


OCTETS = st.none() | st.binary(max_size=9)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=3), OCTETS), max_size=3)
RECORDS = st.lists(st.tuples(OCTETS, OCTETS, HEADERS), min_size=1, max_size=20)


def weighed(key: bytes | None, value: bytes | None, headers: Headers | None) -> int:
    return (
        RECORD_BYTES
        + len(key or b"")
        + len(value or b"")
        + sum(HEADER_BYTES + len(name.encode()) + len(text or b"") for name, text in headers or ())
    )


@given(RECORDS, st.data())
def test_a_record_weighs_its_content_and_a_constant(records: list, data: st.DataObject) -> None:
    keys, values, headers = map(list, zip(*records, strict=True))
    rows = Rows([0] * len(records), keys, values, headers if any(headers) else None)
    expected = [weighed(*record) for record in records]
    batch = record_columns.batch_of_rows([rows])
    assert chunk.weight(rows) == chunk.weight(batch) == sum(expected)
    assert chunk.weights(rows).tolist() == chunk.weights(batch).tolist() == expected
    first = data.draw(st.integers(0, len(records) - 1))
    part = batch.slice(first, data.draw(st.integers(0, len(records) - first)))
    expected_weights = expected[first : first + part.num_rows]
    assert chunk.weight(part) == sum(expected_weights)
    assert chunk.weight_before(part).tolist() == np.cumsum([0, *expected_weights]).tolist()
    bytes_max = data.draw(st.integers(1, 200))
    fitting = int((np.cumsum(expected_weights) <= bytes_max).sum())
    assert chunk.rows_bound(part, bytes_max) >= min(fitting + 1, part.num_rows)


def test_bytes_behind_a_null_weigh_nothing() -> None:
    offsets, data = np.array([0, 5, 9], np.int32), pa.py_buffer(b"hiddenabc")
    values = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(bytes([0b10])), pa.py_buffer(offsets), data]
    )
    columns = [
        record_columns.same_timestamps(0, 2),
        pa.nulls(2, pa.binary()),
        values,
        record_columns.no_headers(2),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=record_columns.CHUNK_SCHEMA)
    assert chunk.weights(batch).tolist() == [RECORD_BYTES, RECORD_BYTES + 4]
    assert chunk.weight(batch) == 2 * RECORD_BYTES + 4
