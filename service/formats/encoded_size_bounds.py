"""Upper bounds of the bytes of encoded pages: a broker has their memory before it encodes them.

An encoded record may have six times the bytes of the stored one: a text of control characters
becomes `\\u0001...`. The bounds are linear in the bytes of keys, values and headers, so they need
no look at the content, and take at most ~20 ns a record. Pure.
"""

import math
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.service.http.media_types import SCHEMA_FORMATS
from tidelog.storage.codec.chunk import RECORD_BYTES, octets_before, weight, weight_before
from tidelog.storage.records import FetchResult

ESCAPED = 6.0
"""Bytes of `\\u0001`, for one byte of a text."""
BASE64 = 4 / 3
LINE_BREAK = 3.0
"""In lines, `\\u0085` replaces two bytes (json_out)."""
FIXED_BYTES = 240
"""Bound of a record without topic, key, value and headers, in any format: names of fields, numbers,
`null`, quotes, the padding of base64."""
PAGE_BYTES = 4096
"""Bound of a page without records."""
_LINES = ("ndjson", "sse")


class Growth(NamedTuple):
    """Encoded bytes for each byte of keys, values and weight of headers, and for each record."""

    key: float
    value: float
    headers: float
    record: int


class FittedPage(NamedTuple):
    """Records of a fetch, and the upper bound of their bytes in an answer."""

    fetched: FetchResult
    size: int


def fitted(
    fetched: FetchResult,
    topic: str,
    format_name: str,
    embedded: str,
    bytes_max: float = math.inf,
    *,
    at_least: int = 1,
) -> FittedPage:
    """Return the leading records that need at most `bytes_max` encoded, or `at_least` records.

    `embedded` is the format of keys and values. The result ends before the first record that is
    left out. If it has no record, its `next_offset` is not changed.
    """
    size, pieces = float(PAGE_BYTES), fetched.pieces[:0]
    for piece in fetched.pieces:
        batch = piece.batch
        growth = _growth(topic, format_name, embedded, is_json=piece.is_json)
        if (bound := _quick_bound(batch, growth)) <= bytes_max - size:
            size += bound
            pieces.append(piece)
            continue
        sizes = _size_before(batch, growth)
        rows = int(sizes.searchsorted(bytes_max - size, side="right")) - 1
        rows = min(max(rows, 0 if pieces else at_least), batch.num_rows)
        size += float(sizes[rows])
        if rows:
            pieces.append(piece._replace(batch=batch.slice(0, rows)))
        if rows < batch.num_rows:
            return FittedPage(_ended(fetched._replace(pieces=pieces)), math.ceil(size))
    return FittedPage(fetched, math.ceil(size))


def _ended(fetched: FetchResult) -> FetchResult:
    """Return the fetch with the end and the weight of its pieces."""
    end = fetched.next_offset
    if fetched.pieces:
        end = int(fetched.pieces[-1].batch.column("offset")[-1].as_py()) + 1
    heavy = sum(weight(piece.batch) for piece in fetched.pieces)
    return fetched._replace(next_offset=end, weight=heavy)


def _growth(topic: str, format_name: str, embedded: str, *, is_json: bool) -> Growth:
    record = FIXED_BYTES + len(topic.encode())
    if format_name == "arrow":
        return Growth(1.0, 1.0, 1.0, record)
    if embedded == "text":
        return Growth(ESCAPED, ESCAPED, ESCAPED, record)
    if embedded == "binary" or embedded in SCHEMA_FORMATS:
        return Growth(BASE64, BASE64, ESCAPED, record)
    line = LINE_BREAK if format_name in _LINES else 1.0
    if is_json:
        return Growth(line, line, ESCAPED, record)
    # A key that is no JSON becomes a string, and a value may become base64 (pages).
    return Growth(ESCAPED, max(line, BASE64), ESCAPED, record)


def _quick_bound(batch: pa.RecordBatch, growth: Growth) -> float:
    """Return a bound of the encoded batch in ~5 us, for a batch without headers."""
    factors = [0.0]
    for part, factor in (("key", growth.key), ("value", growth.value), ("headers", growth.headers)):
        column = batch.column(part)
        if column.null_count < len(column):
            factors.append(factor)
    content = weight(batch) - RECORD_BYTES * batch.num_rows
    return max(factors) * content + growth.record * batch.num_rows


def _size_before(batch: pa.RecordBatch, growth: Growth) -> np.ndarray:
    """Return the bound of the encoded records before each row; the last element is the total."""
    keys, values = (octets_before(batch.column(part)) for part in ("key", "value"))
    records = np.arange(len(keys))
    headers = weight_before(batch) - keys - values - RECORD_BYTES * records
    content = growth.key * keys + growth.value * values + growth.headers * headers
    return content + float(growth.record) * records
