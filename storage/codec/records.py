"""The records of batches: check them, read them into columns, write columns as records. Pure.

A record is: its length, attributes (one byte), timestamp delta, offset delta, key length, key,
value length, value, number of headers, headers. A header is: name length, name, value length,
value. A length of -1 is a null. All numbers are zigzag varints of at most 5 bytes; the timestamp
delta has at most 10. A broker serves a batch as it came, so it refuses each batch that some client
cannot read.

`byte_loops` reads and writes the bytes, except headers that are written. All of this is linear in
the bytes. A number of records or headers in the bytes is compared with the bytes that are left
before an array has this size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from tidelog.storage.codec import byte_loops, chunk, plain_byte_loops, record_columns
from tidelog.storage.codec.batch_header import TIMESTAMP_MS_MAX, InvalidBatch
from tidelog.storage.codec.chunk import HEADER_BYTES, RECORD_BYTES
from tidelog.storage.codec.record_columns import CHUNK_SCHEMA

HEADERS_MAX = 100_000
"""Bound of the headers in a batch, like RECORDS_MAX: a header costs CPU, but only two bytes."""

Raw: TypeAlias = bytes | bytearray | memoryview


class TooManyHeaders(InvalidBatch):
    """A batch has more headers than the caller allows."""


REASONS: Sequence[Callable[[int], InvalidBatch]] = (
    lambda _: InvalidBatch("the records are cut off"),
    lambda _: InvalidBatch("the records do not end at the end of their batch"),
    lambda _: InvalidBatch("a record's content does not end at the record's end"),
    lambda _: InvalidBatch("a length or a number of headers is negative"),
    lambda _: InvalidBatch("a number of a record is too long"),
    lambda _: TooManyHeaders(
        f"a batch has more than {HEADERS_MAX} headers: send fewer records in it"
    ),
    lambda _: InvalidBatch("the name of a header is not UTF-8"),
    lambda number: InvalidBatch(f"the offset delta of record {number} of a batch is not {number}"),
)
"""The errors of the reasons of native.c, in the same order. They take the number of the record."""


class Walked(NamedTuple):
    """The result of `walk`: facts about the records of a batch.

    Timestamps are ms. The weight is that of `chunk.weight`.
    """

    timestamp_min: int
    timestamp_max: int
    weight: int
    has_null_key: bool
    headers: int


def walk(
    raw: Raw, start: int, count: int, base_timestamp: int, headers_max: int = HEADERS_MAX
) -> Walked:
    """Check the `count` records from `start` to the end of `raw`.

    Their offset deltas must be 0, 1, 2 and so on, and their headers' names UTF-8. Raises
    InvalidBatch, and before more than `headers_max` headers are read, TooManyHeaders.
    """
    facts = byte_loops.walk(raw, start, count, headers_max)
    if len(facts) == 2:
        raise _refusal(*facts)
    first, last, content, headers, has_null_key = facts
    _check_timestamp(base_timestamp + first)
    _check_timestamp(base_timestamp + last)
    weight = content + HEADER_BYTES * headers + RECORD_BYTES * count
    return Walked(base_timestamp + first, base_timestamp + last, weight, has_null_key, headers)


def without_key(raw: Raw, start: int, count: int, most: int) -> list[int]:
    """Return the numbers of the first `most` records without a key.

    `walk` has checked the records.
    """
    fields = _fields(raw, [start], [len(raw)], [count])
    numbers: list[int] = np.flatnonzero(fields.key_size < 0)[:most].tolist()
    return numbers


def read(
    raw: bytes,
    starts: Sequence[int],
    ends: Sequence[int],
    counts: Sequence[int],
    base_timestamps: Sequence[int],
) -> pa.RecordBatch:
    """Return the records of one or more batches as columns of CHUNK_SCHEMA; raises InvalidBatch.

    Batch i has `counts[i]` records, which fill `raw[starts[i]:ends[i]]`. The batches are in the
    order of their bytes. `raw` is under 2 GiB.
    """
    fields = _fields(raw, starts, ends, counts)
    if int(fields.headers.sum()) > HEADERS_MAX * len(counts):
        raise _refusal(plain_byte_loops.TOO_MANY_HEADERS, 0)
    stamps = _timestamps(fields.deltas, counts, base_timestamps)
    keys, values = _pairs(raw, fields.key_at, fields.key_size, fields.value_at, fields.value_size)
    columns = [record_columns.timestamps(stamps), keys, values, _header_column(raw, fields)]
    return pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA)


class _Fields(NamedTuple):
    """The fields of records, an int32 array for each field; a size of -1 is a null.

    Deltas are those of timestamps, in ms, int64. Places are those in the bytes.
    """

    deltas: np.ndarray
    key_at: np.ndarray
    key_size: np.ndarray
    value_at: np.ndarray
    value_size: np.ndarray
    headers_at: np.ndarray
    headers: np.ndarray
    stops: np.ndarray


def _fields(raw: Raw, starts: Sequence[int], ends: Sequence[int], counts: Sequence[int]) -> _Fields:
    deltas = np.empty(sum(counts), dtype=np.int64)
    places = np.empty((7, len(deltas)), dtype=np.int32)
    batches = [np.array(numbers, dtype=np.int64) for numbers in (starts, ends, counts)]
    _check(byte_loops.fields(deltas, places, raw, *batches))
    return _Fields(deltas, *places)


def _timestamps(
    deltas: np.ndarray, counts: Sequence[int], base_timestamps: Sequence[int]
) -> np.ndarray:
    base = np.array(base_timestamps, dtype=np.int64)
    if len(counts) > 1:
        base = np.repeat(base, counts)
    # The sum of two numbers below 2**62 has no overflow. Larger numbers are out of range, or
    # nearly. They are added as exact integers, so that the result is that of `walk`.
    if _is_large(deltas) or _is_large(base):
        base = base.astype(object)
    stamps = base + deltas
    _check_timestamp(int(stamps.min()))
    _check_timestamp(int(stamps.max()))
    return stamps.astype(np.int64)


def _pairs(
    raw: bytes,
    first_at: np.ndarray,
    first_size: np.ndarray,
    second_at: np.ndarray,
    second_size: np.ndarray,
) -> tuple[pa.Array, pa.Array]:
    """Return two binary columns of parts of `raw`.

    These are in order: the first of a row, its second, the first of the next row.
    """
    rows = len(first_at)
    # The bounds of all parts divide `raw` into pieces: framing, first, framing, second. So Arrow
    # copies the parts out of `raw` without Python objects.
    bounds = np.empty(4 * rows + 1, dtype=np.int32)
    bounds[0] = 0
    bounds[1::4], bounds[2::4] = first_at, first_at + np.maximum(first_size, 0)
    bounds[3::4], bounds[4::4] = second_at, second_at + np.maximum(second_size, 0)
    # Arrow does not check these bounds, so with forged bounds it would read outside of `raw`.
    if int(bounds[-1]) > len(raw) or (bounds[1:] < bounds[:-1]).any():
        raise _refusal(plain_byte_loops.CUT_OFF, 0)
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(raw)]
    pieces: Any = pa.Array.from_buffers(pa.binary(), 4 * rows, buffers)
    numbers = np.arange(0, 4 * rows, 4, dtype=np.int32)
    first = pieces.take(pa.array(numbers + 1, mask=first_size < 0))
    return first, pieces.take(pa.array(numbers + 3, mask=second_size < 0))


def _header_column(raw: bytes, fields: _Fields) -> pa.Array:
    """Return the headers of all records; a record without headers has a null."""
    with_headers = np.flatnonzero(fields.headers)
    if not len(with_headers):
        return record_columns.no_headers(len(fields.headers))
    places = np.empty((4, int(fields.headers.sum())), dtype=np.int32)
    spans = (column[with_headers] for column in (fields.headers_at, fields.headers, fields.stops))
    _check(byte_loops.headers(places, raw, *spans))
    names, values = _pairs(raw, *places)
    return record_columns.headers_of_columns(
        names.cast(pa.string()), values, fields.headers, fields.headers > 0
    )


def _check(refusal: tuple[int, int] | None) -> None:
    if refusal is not None:
        raise _refusal(*refusal)


def _refusal(reason: int, number: int) -> InvalidBatch:
    return REASONS[reason](number)


def _is_large(numbers: np.ndarray) -> bool:
    return int(numbers.max()) >= 1 << 62 or int(numbers.min()) < -(1 << 62)


def _check_timestamp(timestamp: int) -> None:
    if not -TIMESTAMP_MS_MAX <= timestamp <= TIMESTAMP_MS_MAX:
        raise InvalidBatch(f"timestamp {timestamp} is not within {TIMESTAMP_MS_MAX} ms of 1970")


# --- writing


def write(
    rows: pa.RecordBatch, timestamp_deltas: np.ndarray, offset_deltas: np.ndarray
) -> tuple[memoryview, np.ndarray]:
    """Return the rows as records, back to back, and the place where each record starts.

    The last place is the end.

    The deltas are int64; those of offsets are 0 or more and fit into 31 bits. The rows have the
    columns of CHUNK_SCHEMA, and maybe others.
    """
    keys, values = rows.column("key"), rows.column("value")
    headers = _written_headers(rows.column("headers"))
    content = rows.num_rows  # a zero for the headers
    for column in (keys, values) if headers is None else (keys, values, headers):
        ends = chunk.bounds_of(column)
        content += int(ends[-1]) - int(ends[0])
    size = rows.num_rows * plain_byte_loops.NUMBERS_BYTES_MAX + content
    out = np.empty(size, dtype=np.uint8)
    bounds = np.empty(rows.num_rows + 1, dtype=np.int32)
    written = byte_loops.write(
        out,
        bounds,
        np.ascontiguousarray(timestamp_deltas),
        np.ascontiguousarray(offset_deltas),
        _buffers(keys),
        _buffers(values),
        None if headers is None else _buffers(headers),
    )
    return memoryview(out.data)[:written], bounds


def record(timestamp_delta: int, offset_delta: int, key: bytes, value: bytes) -> bytes:
    """Return the bytes of one record without headers."""
    numbers = plain_byte_loops.varint(timestamp_delta) + plain_byte_loops.varint(offset_delta)
    content = plain_byte_loops.octets(key) + plain_byte_loops.octets(value)
    return plain_byte_loops.octets(b"\0" + numbers + content + b"\0")


def _buffers(column: Any) -> tuple[Any, Any, Any, int]:
    return (*column.buffers(), column.offset)


def _written_headers(headers: pa.Array) -> Any:
    """Return the bytes behind the value of each record, or None if no record has headers."""
    if headers.null_count == len(headers):
        return None
    written = [_written_pairs(pairs or []) for pairs in headers.to_pylist()]
    return pa.array(written, pa.binary())


def _written_pairs(pairs: list[dict[str, Any]]) -> bytes:
    octets = plain_byte_loops.octets
    headers = (octets((pair["key"] or "").encode()) + octets(pair["value"]) for pair in pairs)
    return plain_byte_loops.varint(len(pairs)) + b"".join(headers)
