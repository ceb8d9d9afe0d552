"""Records as columns: made of rows, of headers and timestamps, and joined. Pure."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

Headers = list[tuple[str, bytes | None]]
"""One record's headers, as in Kafka: ordered; names may repeat, values may be null."""
HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
CHUNK_SCHEMA = pa.schema(
    [  # type: ignore[arg-type]  # the stubs require fields of one type
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""The columns of a chunk: data from producers."""
RECORD_SCHEMA = pa.schema([pa.field("offset", pa.int64()), *CHUNK_SCHEMA])
"""The columns of a segment and of every read (FORMAT.md section 6)."""
US_PER_MS = 1000
JOINED_BYTES_MIN, JOINED_MEAN_BYTES_MIN = 1 << 20, 256
"""From these bytes on, of all items and of the mean item, a column is made by joining its items."""
_NO_HEADER = pa.array([], HEADERS_TYPE.value_type)


class Rows(NamedTuple):
    """The records of a small request as plain lists, one element per record.

    An Arrow batch costs ~15 us at any size, so small requests stay lists until their hot segment
    closes. `timestamps` are ms. `headers` is None if no record has headers.
    """

    timestamps: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers | None] | None = None

    def __len__(self) -> int:  # the number of records, not of fields
        return len(self.values)


def count(rows: Rows | pa.RecordBatch) -> int:
    return len(rows.values) if isinstance(rows, Rows) else rows.num_rows


def batch_of_rows(parts: Sequence[Rows]) -> pa.RecordBatch:
    """Return the records of all parts, in order, as one batch of CHUNK_SCHEMA."""
    stamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    for part in parts:
        stamps += part.timestamps
        keys += part.keys
        values += part.values
    rows = len(values)
    if any(part.headers is not None for part in parts):
        header_array = _headers_of_rows(parts)
    else:
        header_array = no_headers(rows)
    return pa.RecordBatch.from_arrays(
        [
            timestamps(np.array(stamps, dtype=np.int64)),
            _binary_column(keys),
            _binary_column(values),
            header_array,
        ],
        schema=CHUNK_SCHEMA,
    )


def _binary_column(items: Sequence[bytes | None]) -> pa.Array:
    """Return a column of these items.

    Long ones are joined, because `pa.array` doubles its buffer again and again: it would take three
    times their bytes.
    """
    size = sum(map(len, filter(None, items)))
    if size < max(JOINED_BYTES_MIN, JOINED_MEAN_BYTES_MIN * len(items)):
        return pa.array(items, pa.binary())
    is_valid = np.array([item is not None for item in items], dtype=np.bool_)
    buffers = _buffers_of([len(item or b"") for item in items], is_valid)
    data = pa.py_buffer(b"".join(item or b"" for item in items))
    return pa.Array.from_buffers(pa.binary(), len(items), [*buffers, data])


def _buffers_of(lengths: Sequence[int] | np.ndarray, is_valid: np.ndarray) -> list[Any]:
    """Return validity and offsets of a column whose elements have these lengths, 0 for null."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    valid = np.packbits(is_valid, bitorder="little")
    return [pa.py_buffer(valid.data), pa.py_buffer(offsets.data)]


def _headers_of_rows(parts: Sequence[Rows]) -> pa.Array:
    rows = [row for part in parts for row in part.headers or [None] * len(part.values)]
    return headers_column(
        [name for row in rows if row for name, _ in row],
        [value for row in rows if row for _, value in row],
        [None if row is None else len(row) for row in rows],
    )


def headers_column(
    names: Sequence[str], values: Sequence[bytes | None], lengths: Sequence[int | None]
) -> pa.Array:
    """Return the headers of all records, in order, as a column.

    `lengths` has the number of each record's headers, or None for null. An object for each header
    would take ten times the memory of the column.
    """
    columns = pa.array(names, pa.string()), pa.array(values, pa.binary())
    is_valid = np.array([length is not None for length in lengths], dtype=np.bool_)
    return headers_of_columns(*columns, [length or 0 for length in lengths], is_valid)


def headers_of_columns(
    names: pa.Array, values: pa.Array, lengths: Sequence[int] | np.ndarray, is_valid: np.ndarray
) -> pa.Array:
    """Do `headers_column` for names and values that are columns; a null has the length 0."""
    columns: list[Any] = [names, values]
    # From buffers, because for a few rows the functions of pyarrow take four times as long.
    pairs = pa.Array.from_buffers(HEADERS_TYPE.value_type, len(names), [None], children=columns)
    buffers = _buffers_of(lengths, is_valid)
    return pa.Array.from_buffers(HEADERS_TYPE, len(lengths), buffers, children=[pairs])


def timestamps(timestamps_ms: np.ndarray) -> pa.Array:
    """Return a timestamp column from int64 milliseconds."""
    # From a buffer, because for a few rows pa.array of a numpy array takes three times as long.
    data = pa.py_buffer((timestamps_ms * US_PER_MS).data)
    return pa.Array.from_buffers(TIMESTAMP_TYPE, len(timestamps_ms), [None, data])


def same_timestamps(timestamp_ms: int, rows: int) -> pa.Array:
    stamps = np.empty(rows, dtype=np.int64)
    stamps.fill(timestamp_ms * US_PER_MS)
    return pa.Array.from_buffers(TIMESTAMP_TYPE, rows, [None, pa.py_buffer(stamps.data)])


def no_headers(rows: int) -> pa.Array:
    """Return a headers column for records without headers.

    `pa.nulls` would fill the child columns too. The Arrow message of a slice would contain all
    bytes of the child columns: 84 KB for 1,000 of 10,000 rows.
    """
    return _NO_HEADERS.slice(0, rows) if rows <= len(_NO_HEADERS) else _no_headers(rows)


def _no_headers(rows: int) -> pa.Array:
    valid, offsets = pa.py_buffer(bytes(rows // 8 + 1)), pa.py_buffer(bytes(4 * (rows + 1)))
    return pa.Array.from_buffers(
        HEADERS_TYPE, rows, [valid, offsets], null_count=rows, children=[_NO_HEADER]
    )


_NO_HEADERS = _no_headers(16 * 1024)


def joined(batches: Iterable[pa.RecordBatch], rows_min: int) -> Generator[pa.RecordBatch]:
    """Yield the rows in batches of at least `rows_min`, except the last one."""
    small: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        small.append(batch)
        count += batch.num_rows
        if count >= rows_min:
            yield concat(small)
            small, count = [], 0
    if small:
        yield concat(small)


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return all rows, in order, as one batch. A single batch is not copied."""
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)  # type: ignore[attr-defined]  # missing in the stubs
