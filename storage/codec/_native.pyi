"""The functions of native.c, and of plain_byte_loops.py, which has the same ones.

`raw` and the arrays are contiguous buffers.
"""

from typing import TypeAlias

import numpy as np
import pyarrow as pa

Column: TypeAlias = tuple[pa.Buffer | None, pa.Buffer | None, pa.Buffer | None, int]
"""The buffers of a binary column, and its first row: validity, int32 bounds, data, offset."""

Refusal: TypeAlias = tuple[int, int]
"""Why bytes are no records: the reason (native.c), and the number of the record in its batch."""

VERSION: int

def walk(
    raw: bytes | bytearray | memoryview, start: int, count: int, headers_max: int
) -> tuple[int, int, int, int, bool] | Refusal:
    """Check `count` records from `start` to the end of `raw`.

    Return the smallest and largest timestamp delta, the bytes of keys, values and headers, the
    number of headers, and whether a key is null; or why the records are not accepted.
    """

def fields(
    deltas: np.ndarray,
    places: np.ndarray,
    raw: bytes | bytearray | memoryview,
    starts: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
) -> Refusal | None:
    """Check the records of batches in `raw`, except for the content of headers.

    Batch i has `counts[i]` records in `raw[starts[i]:ends[i]]`; these are int64. Fill `deltas`
    (int64) with the timestamp deltas, and the rows of `places` (int32, 7 for each record): where
    the key starts, its size or -1 for a null, the same of the value, where the headers start, how
    many there are, where the record ends. Return None, or why the records are not accepted.
    """

def headers(
    places: np.ndarray,
    raw: bytes | bytearray | memoryview,
    starts: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
) -> Refusal | None:
    """Check the headers of records in `raw`.

    Record i has `counts[i]` headers, which fill `raw[starts[i]:ends[i]]`; these are int32. Fill the
    rows of `places` (int32, 4 for each header): where the name starts, its size, the same of the
    value, whose size is -1 for a null. Return None, or why the headers are not accepted.
    """

def write(
    out: np.ndarray,
    bounds: np.ndarray,
    timestamp_deltas: np.ndarray,
    offset_deltas: np.ndarray,
    keys: Column,
    values: Column,
    headers: Column | None,
) -> int:
    """Write a record for each of the deltas (int64) to `out` (uint8); return the number of bytes.

    Write to `bounds` (int32) where each record starts and the last ends. The column `headers` has
    the bytes behind the values; without it, no record has headers. Raises ValueError if the records
    do not fit.
    """

def murmur2(key: bytes | bytearray | memoryview) -> int:
    """Return Kafka's hash of a key, unsigned, 32 bits."""

def murmur2_column(
    hashes: np.ndarray, bounds: np.ndarray, data: bytes | bytearray | memoryview
) -> None:
    """Fill `hashes` (uint32) with those of the keys in `data`.

    `bounds` (int32) has where each key starts and the last one ends. Raises ValueError if the
    bounds are not those of the data.
    """
