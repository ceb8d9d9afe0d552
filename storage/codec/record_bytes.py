"""The bytes of records, from columns (the layout is in `records`). Pure.

`native` writes them. Where it is not built, a loop writes few records. For many, numpy writes the
numbers at once, and Arrow joins them with keys and values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.codec import chunk, native

_NUMBERS_BYTES_MAX = 5 + 1 + 10 + 10 + 5 + 5
"""Bytes of a record's length, attributes, timestamp delta, offset delta and sizes, at most."""
_JOIN_MIN = 120
"""Fewer records are written by a loop: numpy and Arrow take ~100 us for any number."""


def write(
    rows: pa.RecordBatch, timestamp_deltas: np.ndarray, offset_deltas: np.ndarray
) -> tuple[memoryview, np.ndarray]:
    """Return the rows as records, back to back, and the place where each record starts. The last
    place is the end.

    The deltas are int64; those of offsets are 0 or more and fit into 31 bits. The rows have the
    columns of CHUNK_SCHEMA, and maybe others.
    """
    if native.IS_BUILT:
        return _write_natively(rows, timestamp_deltas, offset_deltas)
    if rows.num_rows < _JOIN_MIN:
        return _write_few(rows, timestamp_deltas.tolist(), offset_deltas.tolist())
    keys, values = rows.column("key"), rows.column("value")
    key_size, value_size = _sizes(keys), _sizes(values)
    headers = _written_headers(rows.column("headers"))
    headers_size = 1 if headers is None else _sizes(headers)
    fields = [_zigzag(timestamp_deltas), _zigzag(offset_deltas), _zigzag(key_size)]
    value_size_field = _zigzag(value_size)
    length = 1 + headers_size + np.maximum(key_size, 0) + np.maximum(value_size, 0)
    for field in (*fields, value_size_field):
        length += _varint_size(field)
    attributes = np.zeros(len(length), dtype=np.uint64)
    join: Any = pc.binary_join_element_wise  # the stubs want one type for all arguments
    joined: Any = join(
        _written_varints([_zigzag(length), attributes, *fields]),
        keys,
        _written_varints([value_size_field]),
        values,
        pa.scalar(b"\0", pa.binary()) if headers is None else headers,
        b"",
        null_handling="replace",
        null_replacement=b"",
    )
    bounds = chunk.bounds_of(joined)
    return memoryview(joined.buffers()[2]), bounds


def _write_natively(
    rows: pa.RecordBatch, timestamp_deltas: np.ndarray, offset_deltas: np.ndarray
) -> tuple[memoryview, np.ndarray]:
    keys, values = rows.column("key"), rows.column("value")
    headers = _written_headers(rows.column("headers"))
    content = rows.num_rows  # a zero for the headers
    for column in (keys, values) if headers is None else (keys, values, headers):
        ends = chunk.bounds_of(column)
        content += int(ends[-1]) - int(ends[0])
    out = np.empty(rows.num_rows * _NUMBERS_BYTES_MAX + content, dtype=np.uint8)
    bounds = np.empty(rows.num_rows + 1, dtype=np.int32)
    written = native.write(
        out,
        bounds,
        np.ascontiguousarray(timestamp_deltas),
        np.ascontiguousarray(offset_deltas),
        _buffers(keys),
        _buffers(values),
        None if headers is None else _buffers(headers),
    )
    return memoryview(out.data)[:written], bounds


def _buffers(column: Any) -> tuple[Any, Any, Any, int]:
    return (*column.buffers(), column.offset)


def _write_few(
    rows: pa.RecordBatch, timestamp_deltas: list[int], offset_deltas: list[int]
) -> tuple[memoryview, np.ndarray]:
    written, bounds = bytearray(), [0]
    columns = [rows.column(name).to_pylist() for name in ("key", "value", "headers")]
    for timestamp_delta, offset_delta, key, value, pairs in zip(
        timestamp_deltas, offset_deltas, *columns, strict=True
    ):
        written += record(timestamp_delta, offset_delta, key, value, pairs)
        bounds.append(len(written))
    return memoryview(written), np.array(bounds)


def record(
    timestamp_delta: int,
    offset_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: list[dict[str, Any]] | None = None,
) -> bytes:
    """Return the bytes of one record."""
    content = bytearray(1)  # attributes
    _add_varint(content, timestamp_delta)
    _add_varint(content, offset_delta)
    _add_octets(content, key)
    _add_octets(content, value)
    content += _written_pairs(headers) if headers else b"\0"
    written = bytearray()
    _add_octets(written, content)
    return bytes(written)


def _sizes(column: Any) -> np.ndarray:
    """Return the bytes of each key or value, int64; -1 for a null."""
    size: Any = pc.binary_length(column).cast(pa.int64()).fill_null(-1)
    sizes: np.ndarray = size.to_numpy(zero_copy_only=False)
    return sizes


def _written_headers(headers: pa.Array) -> Any:
    """Return the bytes behind the value of each record, or None if no record has headers."""
    if headers.null_count == len(headers):
        return None
    written = [_written_pairs(pairs) if pairs else b"\0" for pairs in headers.to_pylist()]
    return pa.array(written, pa.binary())


def _written_pairs(pairs: list[dict[str, Any]]) -> bytes:
    written = bytearray()
    _add_varint(written, len(pairs))
    for pair in pairs:
        _add_octets(written, (pair["key"] or "").encode())
        _add_octets(written, pair["value"])
    return bytes(written)


def _add_octets(written: bytearray, octets: bytes | bytearray | None) -> None:
    _add_varint(written, -1 if octets is None else len(octets))
    written += octets or b""


def _add_varint(written: bytearray, number: int) -> None:
    number = (number << 1) ^ (number >> 63)
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)


def _zigzag(numbers: np.ndarray) -> np.ndarray:
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)


def _varint_size(numbers: np.ndarray) -> np.ndarray:
    """Return the bytes of the varint of each number, int64."""
    size = np.ones(len(numbers), dtype=np.int64)
    most = int(numbers.max(initial=0))
    for shift in range(7, 70, 7):
        if not most >> shift:
            break
        size += numbers >= np.uint64(1 << shift)
    return size


def _written_varints(fields: Sequence[np.ndarray]) -> pa.Array:
    """Return for each row the varints of all fields, back to back, as a binary column."""
    rows = len(fields[0])
    columns, used = list[np.ndarray](), list[np.ndarray]()
    for field in fields:
        most, left = int(field.max(initial=0)), field
        present = np.ones(rows, dtype=bool)
        while True:
            columns.append((left & np.uint64(127)).astype(np.uint8))
            used.append(present)
            most >>= 7
            if not most:
                break
            left = left >> np.uint64(7)
            present = left > 0
            columns[-1][present] |= 128
    mask = np.stack(used, axis=1)
    bounds = np.zeros(rows + 1, dtype=np.int32)
    bounds[1:] = np.cumsum(mask.sum(axis=1))
    data = np.stack(columns, axis=1)[mask]
    return pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(bounds.data), pa.py_buffer(data.data)]
    )
