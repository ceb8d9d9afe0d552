"""Records as columns, and the bytes of a chunk: one Arrow record batch message, packed or plain.

A chunk is written without its schema (FORMAT.md section 4 fixes it) and without offsets: those are
assigned when the entry that carries it is applied. Whoever decodes one checks its CRC-32C first.
Knows Arrow and nothing of stores, clocks or the loop.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import Corrupt, InvalidRequest
from storage.objectstore import Part

Headers = list[tuple[str, bytes | None]]
"""One record's headers: names may repeat, order counts, values may be null (Kafka)."""

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")

CHUNK_SCHEMA = pa.schema(
    [  # type: ignore[arg-type]  # the stubs know no list of fields of several types
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""The columns of a chunk: what a producer gives."""

RECORD_SCHEMA = pa.schema([pa.field("offset", pa.int64()), *CHUNK_SCHEMA])
"""The columns of a segment and of every read: DESIGN section 10."""

US_PER_MS = 1000


class Rows(NamedTuple):
    """A few records as plain lists, one element a record: what small requests decode to.

    Arrow costs ~15 us a batch however small, so requests of a few records stay lists until
    their hot segment closes. `timestamps` are ms; `headers` is None when no record has any.
    """

    timestamps: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers | None] | None = None

    def __len__(self) -> int:  # the number of records, not of fields
        return len(self.values)


def count(rows: Rows | pa.RecordBatch) -> int:
    """Number of records."""
    return len(rows.values) if isinstance(rows, Rows) else rows.num_rows


def batch_of_rows(parts: Sequence[Rows]) -> pa.RecordBatch:
    """The records of all parts, in order, as one batch of CHUNK_SCHEMA."""
    timestamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    for part in parts:
        timestamps += part.timestamps
        keys += part.keys
        values += part.values
    rows = len(values)
    if any(part.headers is not None for part in parts):
        headers = [
            None if row is None else [{"key": name, "value": value} for name, value in row]
            for part in parts
            for row in part.headers or [None] * len(part.values)
        ]
        header_array = pa.array(headers, HEADERS_TYPE)
    else:
        header_array = _no_headers(rows)
    return pa.RecordBatch.from_arrays(
        [
            _timestamps(np.array(timestamps, dtype=np.int64)),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            header_array,
        ],
        schema=CHUNK_SCHEMA,
    )


def _timestamps(timestamps_ms: np.ndarray) -> pa.Array:
    # From a buffer: pa.array of a numpy array takes three times as long for a few rows.
    data = pa.py_buffer((timestamps_ms * US_PER_MS).data)
    return pa.Array.from_buffers(TIMESTAMP_TYPE, len(timestamps_ms), [None, data])


@functools.lru_cache(maxsize=256)
def _no_headers(rows: int) -> pa.Array:
    return pa.nulls(rows, HEADERS_TYPE)


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows in order as one batch; no copy for a single one."""
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)  # type: ignore[attr-defined]  # missing in the stubs


class Encoded(NamedTuple):
    """The bytes of a chunk and what an entry says of them. Timestamps are ms.

    `codec` is empty for a plain message; otherwise the whole message of `raw_size` bytes is
    compressed at once: one call each way, where Arrow's own per-buffer compression costs one per
    column and leaves small buffers larger than they were.
    """

    body: memoryview
    crc32c: int
    rows: int
    timestamp_min: int
    timestamp_max: int
    codec: str
    raw_size: int


PACK_BYTES_MIN = 16 * 1024
"""Smaller chunks stay plain: packing takes ~100 us a write and ~200 us a read whatever the size."""
RAW_SIZE_MAX = 1 << 30
"""A chunk is at most this large when unpacked (I10)."""

_CODECS = {"lz4": pa.Codec("lz4"), "zstd": pa.Codec("zstd", compression_level=1)}


def encode(batch: pa.RecordBatch, codec: str = "") -> Encoded:
    """One chunk of at least one row, packed with `codec` (lz4, zstd or empty) if that saves
    bytes."""
    message = batch.serialize()
    body = memoryview(message)
    if codec and message.size >= PACK_BYTES_MIN:
        # As bytes: the buffer that Codec.compress returns says its capacity is its length.
        packed = _CODECS[codec].compress(message, asbytes=True)
        if len(packed) < message.size:
            body = memoryview(packed)
    if body.nbytes == message.size:
        codec = ""
    first, last = timestamp_range(batch)
    return Encoded(body, crc32c(body), batch.num_rows, first, last, codec, message.size)


def decode(
    body: Part, *, crc: int, rows: int, codec: str, raw_size: int, key: str
) -> pa.RecordBatch:
    """The batch of a chunk's bytes; `key` names the object in the error.

    Raises Corrupt when a bit is wrong anywhere: the checksum decides, and only then Arrow reads.
    """
    if crc32c(body) != crc:
        raise Corrupt(key, "checksum of a chunk differs")
    try:
        message = pa.py_buffer(body)
        if codec:
            if raw_size > RAW_SIZE_MAX:
                raise Corrupt(key, f"a chunk of {raw_size} bytes is over the limit")
            message = _CODECS[codec].decompress(message, decompressed_size=raw_size)
        batch = pa.ipc.read_record_batch(message, CHUNK_SCHEMA)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise Corrupt(key, f"chunk is no record batch: {error}") from error
    if batch.num_rows != rows:
        raise Corrupt(key, f"chunk has {batch.num_rows} rows, its entry says {rows}")
    return batch


def crc32c(body: Part) -> int:
    # The library takes bytes and Arrow buffers but no memoryview; wrapping copies nothing.
    data = body if isinstance(body, bytes) else pa.py_buffer(body)
    return google_crc32c.value(data)


def timestamp_range(batch: pa.RecordBatch) -> tuple[int, int]:
    """Smallest and largest timestamp of at least one row, ms."""
    stamps = timestamps_us(batch.column("timestamp"))
    if len(stamps) == 1:
        return int(stamps[0]) // US_PER_MS, int(stamps[0]) // US_PER_MS
    return int(stamps.min()) // US_PER_MS, int(stamps.max()) // US_PER_MS


def timestamps_us(column: pa.Array) -> np.ndarray:
    """A timestamp column's microseconds as int64, without a copy."""
    return column.view(pa.int64()).to_numpy(zero_copy_only=True)


def sizes(batch: pa.RecordBatch) -> np.ndarray:
    """Bytes of key and value of each row: what `max_bytes` and `max.message.bytes` count."""
    return _lengths(_binary(batch, "key")) + _lengths(_binary(batch, "value"))


def _binary(batch: pa.RecordBatch, name: str) -> pa.BinaryArray:
    return cast("pa.BinaryArray", batch.column(name))


def _lengths(column: pa.BinaryArray) -> np.ndarray:
    lengths: pa.Int32Array = pc.binary_length(column)
    if lengths.null_count:
        lengths = cast("pa.Int32Array", pc.fill_null(lengths, pa.scalar(0, pa.int32())))
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def with_timestamp(batch: pa.RecordBatch, timestamp_ms: int) -> pa.RecordBatch:
    """The rows stamped alike: `message.timestamp.type=LogAppendTime`."""
    stamps = _timestamps(np.full(batch.num_rows, timestamp_ms, dtype=np.int64))
    return pa.RecordBatch.from_arrays([stamps, *batch.columns[1:]], schema=CHUNK_SCHEMA)


def with_offsets(batch: pa.RecordBatch, base_offset: int) -> pa.RecordBatch:
    """The rows as readers see them: dense offsets from `base_offset`."""
    end_offset = base_offset + batch.num_rows
    data = pa.py_buffer(np.arange(base_offset, end_offset, dtype=np.int64).data)
    offsets = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, data])
    return pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=RECORD_SCHEMA)


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Foreign columns (an Arrow request) cast to CHUNK_SCHEMA; raises InvalidRequest.

    `value` must be there; `key`, `timestamp` and `headers` may be missing. Timestamps of any unit
    and integers (ms) are taken; a missing or null one is left null for the caller to fill.
    The batch is fully validated first: these bytes come from outside.
    """
    try:
        batch.validate(full=True)
        columns = [_conform_column(batch, field) for field in CHUNK_SCHEMA]
        return pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidRequest(f"arrow batch does not fit the record columns: {error}") from error


def _conform_column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        if field.name == "value":
            raise InvalidRequest("arrow batch has no column 'value'")
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(index)
    if column.type == field.type:
        return column
    if field.name == "timestamp" and pa.types.is_integer(column.type):
        column = column.cast(pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    return column.cast(field.type)
