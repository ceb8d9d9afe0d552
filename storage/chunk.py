"""Records as columns, and the bytes of a chunk: one Arrow record batch message, packed or plain.

A chunk is written without its schema (FORMAT.md section 4 fixes it) and without offsets: those are
assigned when the entry that carries it is applied. Whoever decodes one checks its CRC-32C first.
Knows Arrow and nothing of stores, clocks or the loop.
"""

from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from storage.errors import Corrupt
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
    stamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    for part in parts:
        stamps += part.timestamps
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
        header_array = no_headers(rows)
    return pa.RecordBatch.from_arrays(
        [
            timestamps(np.array(stamps, dtype=np.int64)),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            header_array,
        ],
        schema=CHUNK_SCHEMA,
    )


def timestamps(timestamps_ms: np.ndarray) -> pa.Array:
    """A column of so many ms."""
    # From a buffer: pa.array of a numpy array takes three times as long for a few rows.
    data = pa.py_buffer((timestamps_ms * US_PER_MS).data)
    return pa.Array.from_buffers(TIMESTAMP_TYPE, len(timestamps_ms), [None, data])


def same_timestamps(timestamp_ms: int, rows: int) -> pa.Array:
    """A column of one moment in ms, `rows` times."""
    stamps = np.empty(rows, dtype=np.int64)
    stamps.fill(timestamp_ms * US_PER_MS)
    return pa.Array.from_buffers(TIMESTAMP_TYPE, rows, [None, pa.py_buffer(stamps.data)])


def no_headers(rows: int) -> pa.Array:
    """The headers of records that have none.

    Not pa.nulls: it fills the columns of the headers too, which a message then carries in full for
    every slice: 84 KB for 1,000 rows of 10,000.
    """
    return _NO_HEADERS.slice(0, rows) if rows <= len(_NO_HEADERS) else _no_headers(rows)


def _no_headers(rows: int) -> pa.Array:
    valid, offsets = pa.py_buffer(bytes(rows // 8 + 1)), pa.py_buffer(bytes(4 * (rows + 1)))
    return pa.Array.from_buffers(
        HEADERS_TYPE, rows, [valid, offsets], null_count=rows, children=[_NO_HEADER]
    )


_NO_HEADER = pa.array([], HEADERS_TYPE.value_type)
_NO_HEADERS = _no_headers(16 * 1024)


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
    message: Part | pa.Buffer = body
    if codec:
        if not 0 <= raw_size <= RAW_SIZE_MAX:
            raise Corrupt(key, f"a chunk of {raw_size} bytes is over the limit")
        try:
            message = _CODECS[codec].decompress(pa.py_buffer(body), decompressed_size=raw_size)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise Corrupt(key, f"chunk does not unpack: {error}") from error
    batch = decode_message(message, key)
    if batch.num_rows != rows:
        raise Corrupt(key, f"chunk has {batch.num_rows} rows, its entry says {rows}")
    return batch


def decode_message(message: Part | pa.Buffer, key: str) -> pa.RecordBatch:
    """The batch of CHUNK_SCHEMA that a message holds; raises Corrupt.

    A checksum tells damage, not malice: whoever made the bytes, what looks at the records stays
    inside of them. Costs 1 us, and 5 us for 1,000 rows.
    """
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), CHUNK_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Corrupt(key, f"chunk is no record batch: {error}") from error
    if batch.column(0).null_count:
        raise Corrupt(key, "a record of a chunk has no timestamp")
    return batch


def crc32c(body: Part, before: int = 0) -> int:
    """The checksum of `body`, or of what has the checksum `before` and then `body`."""
    # The library takes bytes and Arrow buffers but no memoryview; wrapping copies nothing.
    data = body if isinstance(body, bytes) else pa.py_buffer(body)
    return google_crc32c.extend(before, data)


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
    return np.diff(sizes_before(batch))


def sizes_before(batch: pa.RecordBatch) -> np.ndarray:
    """Bytes of key and value before each row and, one element more, of all: int64."""
    return _bytes_before(batch.column("key")) + _bytes_before(batch.column("value"))


def rows_bound(batch: pa.RecordBatch, bytes_max: int) -> int:
    """At most so many leading rows have `bytes_max` bytes, and one more: to look at no others.
    Costs a few microseconds however long the batch."""
    values = batch.column("value")
    rows = batch.num_rows
    if values.null_count:
        return rows
    bounds = _bounds(values)
    return min(int(bounds.searchsorted(int(bounds[0]) + bytes_max, side="right")), rows)


def _bounds(column: pa.Array) -> np.ndarray:
    """Where each value begins, and the last one ends: int32, no copy."""
    offsets = np.frombuffer(memoryview(column.buffers()[1] or b""), np.int32)
    return offsets[column.offset : column.offset + len(column) + 1]


def _bytes_before(column: pa.Array) -> np.ndarray:
    rows = len(column)
    if column.null_count == rows:
        return np.zeros(rows + 1, dtype=np.int64)
    bounds = _bounds(column).astype(np.int64)
    if column.null_count:  # foreign ones may have bytes beneath a null: they count for nothing
        lengths = np.diff(bounds)
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
        bounds[0] = 0
        np.cumsum(lengths, out=bounds[1:])
        return bounds
    bounds -= bounds[0]
    return bounds


def with_timestamp(batch: pa.RecordBatch, timestamp_ms: int) -> pa.RecordBatch:
    """The rows stamped alike: `message.timestamp.type=LogAppendTime`."""
    stamps = same_timestamps(timestamp_ms, batch.num_rows)
    return pa.RecordBatch.from_arrays([stamps, *batch.columns[1:]], schema=CHUNK_SCHEMA)


def with_offsets(batch: pa.RecordBatch, base_offset: int) -> pa.RecordBatch:
    """The rows as readers see them: dense offsets from `base_offset`."""
    end_offset = base_offset + batch.num_rows
    data = pa.py_buffer(np.arange(base_offset, end_offset, dtype=np.int64).data)
    offsets = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, data])
    return pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=RECORD_SCHEMA)
