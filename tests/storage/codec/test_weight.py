"""The weight of records: one number, however they are held."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.codec import chunk
from tidelog.storage.codec.chunk import HEADER_BYTES, RECORD_BYTES, Headers, Rows

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
    batch = chunk.batch_of_rows([rows])
    assert chunk.weight(rows) == chunk.weight(batch) == sum(expected)
    assert chunk.weights(rows).tolist() == chunk.weights(batch).tolist() == expected
    first = data.draw(st.integers(0, len(records) - 1))
    part = batch.slice(first, data.draw(st.integers(0, len(records) - first)))
    wanted = expected[first : first + part.num_rows]
    assert chunk.weight(part) == sum(wanted)
    assert chunk.weight_before(part).tolist() == np.cumsum([0, *wanted]).tolist()
    bytes_max = data.draw(st.integers(1, 200))
    fitting = int((np.cumsum(wanted) <= bytes_max).sum())
    assert chunk.rows_bound(part, bytes_max) >= min(fitting + 1, part.num_rows)


def test_bytes_behind_a_null_weigh_nothing() -> None:
    offsets, data = np.array([0, 5, 9], np.int32), pa.py_buffer(b"hiddenabc")
    values = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(bytes([0b10])), pa.py_buffer(offsets), data]
    )
    columns = [
        chunk.same_timestamps(0, 2),
        pa.nulls(2, pa.binary()),
        values,
        chunk.no_headers(2),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=chunk.CHUNK_SCHEMA)
    assert chunk.weights(batch).tolist() == [RECORD_BYTES, RECORD_BYTES + 4]
    assert chunk.weight(batch) == 2 * RECORD_BYTES + 4
