"""The bytes of a chunk: one Arrow message of records as columns, compressed or plain.

A chunk contains no schema, because FORMAT.md section 4 fixes the schema. It contains no offsets,
because `apply` assigns the offsets. `decode` checks the CRC-32C first. Pure: must not use stores,
clocks or the event loop.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.record_columns import (
    CHUNK_SCHEMA,
    RECORD_SCHEMA,
    US_PER_MS,
    Headers,
    Rows,
    same_timestamps,
)
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import Part


class EncodedChunk(NamedTuple):
    """The bytes of a chunk and its attributes in an entry. Timestamps are ms.

    `codec` is empty for a plain message. Else the whole message of `raw_size` bytes is compressed
    in one call. Arrow's own compression needs one call per column and makes small buffers larger.
    """

    body: memoryview
    crc32c: int
    rows: int
    timestamp_min: int
    timestamp_max: int
    codec: str
    raw_size: int


PACK_BYTES_MIN = 16 * 1024
"""Smaller chunks stay plain: a codec costs ~100 us a write and ~200 us a read at any size."""
RAW_SIZE_MAX = 1 << 30
"""Largest size of a decompressed chunk in bytes (I10): a reader refuses a larger one,
and `encode` does not compress it. The writer refuses a request of more unpacked bytes."""

_CODECS = {"lz4": pa.Codec("lz4"), "zstd": pa.Codec("zstd", compression_level=1)}


def encode(batch: pa.RecordBatch, codec: str = "") -> EncodedChunk:
    """Encode at least one row as a chunk.

    Compress it with `codec` (lz4, zstd or empty: no codec) if that makes it smaller.
    """
    message = batch.serialize()
    body = memoryview(message)
    if codec and PACK_BYTES_MIN <= message.size <= RAW_SIZE_MAX:
        # Without asbytes, Codec.compress returns a buffer whose length is its capacity.
        packed = _CODECS[codec].compress(message, asbytes=True)
        if len(packed) < message.size:
            body = memoryview(packed)
    if body.nbytes == message.size:
        codec = ""
    first, last = timestamp_range(batch)
    return EncodedChunk(body, crc32c(body), batch.num_rows, first, last, codec, message.size)


def decode(
    body: Part, *, crc: int, rows: int, codec: str, raw_size: int, key: str
) -> pa.RecordBatch:
    """Decode the bytes of a chunk; `key` names the object in the error.

    Raises Corrupt if any bit is wrong. Arrow reads the bytes only after the checksum matches.
    """
    if crc32c(body) != crc:
        raise Corrupt(key, "checksum of a chunk differs")
    message: Part | pa.Buffer = body
    if codec:
        if not 0 <= raw_size <= RAW_SIZE_MAX:
            raise Corrupt(key, f"a chunk of {raw_size} decompressed bytes is over the limit")
        try:
            message = _CODECS[codec].decompress(pa.py_buffer(body), decompressed_size=raw_size)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise Corrupt(key, f"a chunk does not decompress: {error}") from error
    batch = decode_message(message, key)
    if batch.num_rows != rows:
        raise Corrupt(key, f"a chunk has {batch.num_rows} rows, its entry says {rows}")
    return batch


def decode_message(message: Part | pa.Buffer, key: str) -> pa.RecordBatch:
    """Decode an Arrow message to a batch of CHUNK_SCHEMA; raises Corrupt.

    A checksum detects damage but not malicious bytes, which could make later code read outside the
    buffers. So this function validates the batch in full. That costs 1 us, or 5 us for 1,000 rows.
    """
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), CHUNK_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Corrupt(key, f"a chunk is no record batch: {error}") from error
    if batch.column(0).null_count:
        raise Corrupt(key, "a record of a chunk has no timestamp")
    return batch


def timestamp_range(batch: pa.RecordBatch) -> tuple[int, int]:
    """Return the smallest and the largest timestamp in ms; needs at least one row."""
    stamps = timestamps_us(batch.column("timestamp"))
    if len(stamps) == 1:
        return int(stamps[0]) // US_PER_MS, int(stamps[0]) // US_PER_MS
    return int(stamps.min()) // US_PER_MS, int(stamps.max()) // US_PER_MS


def timestamps_us(column: pa.Array) -> np.ndarray:
    """Return a timestamp column's microseconds as int64, without a copy."""
    return column.view(pa.int64()).to_numpy(zero_copy_only=True)


def with_timestamp(batch: pa.RecordBatch, timestamp_ms: int) -> pa.RecordBatch:
    """Return the rows with one timestamp, for `message.timestamp.type=LogAppendTime`."""
    stamps = same_timestamps(timestamp_ms, batch.num_rows)
    return pa.RecordBatch.from_arrays([stamps, *batch.columns[1:]], schema=CHUNK_SCHEMA)


def with_offsets(batch: pa.RecordBatch, base_offset: int) -> pa.RecordBatch:
    """Return the rows with RECORD_SCHEMA: dense offsets from `base_offset`."""
    end_offset = base_offset + batch.num_rows
    data = pa.py_buffer(np.arange(base_offset, end_offset, dtype=np.int64).data)
    offsets = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, data])
    return pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=RECORD_SCHEMA)


# --- the weight of records

RECORD_BYTES = 24
"""The weight of a record without content: its memory in columns (a timestamp of 8 bytes, three
offsets of 4, bits for nulls), rounded up. In Kafka, a record has 7 to 20 bytes beside its
content."""
HEADER_BYTES = 8
"""The weight of a header without content: two offsets of 4 bytes."""
RECORDS_MAX = 100_000
"""Bound of the records in a request and in an answer (I10). A client sends records without content
with few bytes, but each record costs the broker CPU and memory."""


def weight(rows: Rows | pa.RecordBatch) -> int:
    """Return the weight of the records in bytes, in ~4 us for a batch without headers.

    The weight of a record is the bytes of its key, its value, and its headers' names and values,
    plus HEADER_BYTES for each header, plus RECORD_BYTES. It is the size of the record in each
    limit: `max.message.bytes`, `max_bytes`, buffers, flushes and quotas. For a produce request,
    buffers, flushes and quotas count the bytes of the body if these are more.
    """
    if isinstance(rows, Rows):
        content = sum(map(len, filter(None, rows.keys))) + sum(map(len, filter(None, rows.values)))
        if rows.headers is not None:
            content += sum(map(_weight_of_headers, rows.headers))
        return content + RECORD_BYTES * len(rows.values)
    content = _octets(rows.column("key")) + _octets(rows.column("value"))
    headers = rows.column("headers")
    if headers.null_count < len(headers):
        content += int(_headers_before(headers)[-1])
    return content + RECORD_BYTES * rows.num_rows


def weights(rows: Rows | pa.RecordBatch) -> np.ndarray:
    """Return the weight of each record, int64."""
    if not isinstance(rows, Rows):
        return np.diff(weight_before(rows))
    headers = rows.headers or [None] * len(rows)
    return np.array(
        [
            RECORD_BYTES + len(key or b"") + len(value or b"") + _weight_of_headers(names)
            for key, value, names in zip(rows.keys, rows.values, headers, strict=True)
        ],
        dtype=np.int64,
    )


def weight_before(batch: pa.RecordBatch) -> np.ndarray:
    """Return the weight of the records before each row, int64; the last element is the total."""
    weights = octets_before(batch.column("key")) + octets_before(batch.column("value"))
    weights += (
        _RECORDS_BEFORE[: len(weights)] if len(weights) <= _FEW else _records_before(len(weights))
    )
    headers = batch.column("headers")
    if headers.null_count < len(headers):
        weights += _headers_before(headers)
    return weights


def rows_bound(batch: pa.RecordBatch, bytes_max: int) -> int:
    """Return an upper bound of the rows that a read of `bytes_max` bytes needs.

    It is the leading rows that fit, and one more. This takes a few microseconds for a batch of any
    length.
    """
    values = batch.column("value")
    rows = min(batch.num_rows, bytes_max // RECORD_BYTES + 1)
    if values.null_count:
        return rows
    bounds = bounds_of(values)
    return min(int(bounds.searchsorted(int(bounds[0]) + bytes_max, side="right")), rows)


def octets_before(column: pa.Array) -> np.ndarray:
    """Return the bytes of a column's values before each row, int64; the last element is the total.

    The column is binary or a string.
    """
    rows = len(column)
    if column.null_count == rows:
        return np.zeros(rows + 1, dtype=np.int64)
    bounds = bounds_of(column).astype(np.int64)
    if column.null_count:  # do not count bytes that other writers may store for a null
        lengths = np.diff(bounds)
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
        bounds[0] = 0
        np.cumsum(lengths, out=bounds[1:])
        return bounds
    bounds -= bounds[0]
    return bounds


def headers_before(headers: pa.Array) -> np.ndarray:
    """Return the bytes of the headers' names and values before each row, int64."""
    if headers.null_count == len(headers):
        return np.zeros(len(headers) + 1, dtype=np.int64)
    return _headers_before(headers, 0)


def _headers_before(headers: pa.Array, header_bytes: int = HEADER_BYTES) -> np.ndarray:
    flat: Any = headers.flatten()  # type: ignore[attr-defined]  # without content of null lists
    weights = octets_before(flat.field("key")) + octets_before(flat.field("value"))
    weights += header_bytes * np.arange(len(weights))
    counts = pc.list_value_length(headers).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.zeros(len(headers) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return weights[ends]


def _weight_of_headers(headers: Headers | None) -> int:
    return sum(
        HEADER_BYTES + len(name.encode()) + len(value or b"") for name, value in headers or ()
    )


def _octets(column: pa.Array) -> int:
    """Return the bytes of all values of a column."""
    nulls = column.null_count
    if not nulls and len(column):
        offsets: Any = column.buffers()[1]
        end = 4 * (column.offset + len(column))
        (first,), (last,) = _OFFSET(offsets, 4 * column.offset), _OFFSET(offsets, end)
        return int(last - first)
    return 0 if nulls == len(column) else int(octets_before(column)[-1])


def bounds_of(column: pa.Array) -> np.ndarray:
    """Return the start of each value and the end of the last value, as int32, without a copy."""
    offsets = np.frombuffer(memoryview(column.buffers()[1] or b""), np.int32)
    return offsets[column.offset : column.offset + len(column) + 1]


def _records_before(count: int) -> np.ndarray:
    return np.arange(0, count * RECORD_BYTES, RECORD_BYTES, dtype=np.int64)


_OFFSET = struct.Struct("<i").unpack_from
_FEW = 16 * 1024  # up to this number of rows, `weight_before` takes a slice of the next array
_RECORDS_BEFORE = _records_before(_FEW)
