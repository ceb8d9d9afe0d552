"""The records of batches: check them, and read them into columns. Pure.

A record is: its length, attributes (one byte), timestamp delta, offset delta, key length, key,
value length, value, number of headers, headers. A header is: name length, name, value length,
value. A length of -1 is a null. All numbers are zigzag varints of at most 5 bytes; the timestamp
delta has at most 10.

A loop in C (`native`) costs ~0.01 us a record, a loop in Python 0.4 us, numpy 70 us a call and 0.14
us a record. Where tidelog was installed without a compiler, `walk` uses the loop in Python for few
records and numpy for many. With and without C, it accepts the same bytes. A broker serves a batch
as it came, so it refuses each batch that some client cannot read.

All loops are linear in the bytes. A number of records or headers in the bytes is compared with the
bytes that are left before a loop or an array has this size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.storage.codec import chunk, native
from tidelog.storage.codec.batch_header import TIMESTAMP_MS_MAX, InvalidBatch
from tidelog.storage.codec.chunk import CHUNK_SCHEMA, HEADER_BYTES, HEADERS_TYPE, RECORD_BYTES
from tidelog.storage.codec.numbers import LONG_MAX, number_at, numbers_at
from tidelog.storage.codec.refusals import (
    HEADERS_MAX,
    REASONS,
    cut_off,
    negative,
    stray,
    too_many_headers,
    wrong_length,
    wrong_name,
    wrong_offset,
)

HEADER_SIZE_MIN = 2
"""The least bytes of a header: the sizes of its name and its value."""

COLUMNS_MIN = 200
"""From this number of records on, numpy is faster than the loop."""

Raw = bytes | bytearray | memoryview
Strings = list[str]
Values = list[bytes | None]


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
    """Check the `count` records from `start` to the end of `raw`; raises InvalidBatch, and before
    the headers are read, TooManyHeaders.

    Their offset deltas must be 0, 1, 2 and so on, and their headers' names UTF-8.
    """
    if native.IS_BUILT:
        return _walk_natively(raw, start, count, base_timestamp, headers_max)
    raw = bytes(raw)
    if count >= COLUMNS_MIN:
        return _walk_columns(raw, start, count, base_timestamp, headers_max)
    try:
        return _walk(raw, start, count, base_timestamp, headers_max)
    except IndexError:
        raise cut_off() from None


def _walk_natively(
    raw: Raw, start: int, count: int, base_timestamp: int, headers_max: int
) -> Walked:
    facts = native.walk(raw, start, count, headers_max)
    if len(facts) == 2:
        reason, number = facts
        raise REASONS[reason](number)
    first, last, content, headers, has_null_key = facts
    _check_timestamp(base_timestamp + first)
    _check_timestamp(base_timestamp + last)
    weight = content + HEADER_BYTES * headers + RECORD_BYTES * count
    return Walked(base_timestamp + first, base_timestamp + last, weight, has_null_key, headers)


def _walk_columns(
    raw: bytes, start: int, count: int, base_timestamp: int, headers_max: int
) -> Walked:
    fields = _Fields(raw, [start], [len(raw)], [count], [base_timestamp])
    headers = int(fields.header_count.sum())
    if headers > headers_max:
        raise too_many_headers()
    *_, headers_weight = fields.headers()
    content = np.maximum(fields.key_size, 0) + np.maximum(fields.value_size, 0)
    return Walked(
        int(fields.timestamps.min()),
        int(fields.timestamps.max()),
        int((content + headers_weight).sum()) + RECORD_BYTES * count,
        bool(fields.key_size.min() < 0),
        headers,
    )


def without_key(raw: Raw, start: int, count: int, most: int) -> list[int]:
    """Return the numbers of the first `most` records without a key. `walk` has checked the
    records."""
    if not native.IS_BUILT:
        raw = bytes(raw)
    fields = _Fields(raw, [start], [len(raw)], [count], [0], has_timestamps=False)
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

    Batch i has `counts[i]` records, which fill `raw[starts[i]:ends[i]]`. `raw` is under 2 GiB.
    """
    fields = _Fields(raw, starts, ends, counts, base_timestamps)
    rows = len(fields.timestamps)
    # The bounds of all keys and values divide `raw` into pieces: framing, key, framing, value. So
    # Arrow copies keys and values out of `raw` without Python objects.
    bounds = np.empty(4 * rows + 1, dtype=np.int32)
    bounds[0] = 0
    bounds[1::4], bounds[2::4] = fields.key_at, fields.key_at + np.maximum(fields.key_size, 0)
    bounds[3::4], bounds[4::4] = fields.value_at, fields.value_at + np.maximum(fields.value_size, 0)
    # Arrow does not check these bounds, so with forged bounds it would read outside of `raw`.
    if int(bounds[-1]) > len(raw) or (bounds[1:] < bounds[:-1]).any():
        raise cut_off()
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(raw)]
    pieces: Any = pa.Array.from_buffers(pa.binary(), 4 * rows, buffers)
    first = np.arange(0, 4 * rows, 4, dtype=np.int32)
    keys = pieces.take(pa.array(first + 1, mask=fields.key_size < 0))
    values = pieces.take(pa.array(first + 3, mask=fields.value_size < 0))
    columns = [chunk.timestamps(fields.timestamps), keys, values, fields.header_column()]
    return pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA)


# --- one record after the other


def _walk(  # noqa: C901, PLR0915
    raw: bytes, position: int, count: int, base_timestamp: int, headers_max: int = HEADERS_MAX
) -> Walked:
    """`walk` in Python. Varints of one or two bytes are read in line: a call costs 0.2 us."""
    end = len(raw)
    first = last = weight = 0
    has_null_key = False
    headers_left = headers_max
    for offset_delta in range(count):
        number = raw[position]
        position += 1
        if number > 127:
            following = raw[position]
            if following < 128:
                number += (following << 7) - 128
                position += 1
            else:
                number, position = number_at(raw, position - 1)
        stop = position + (number >> 1)
        if number & 1 or stop > end:
            raise cut_off()
        number = raw[position + 1]  # behind the attributes, which have no meaning
        position += 2
        if number > 127:
            following = raw[position]
            if following < 128:
                number += (following << 7) - 128
                position += 1
            else:
                number, position = number_at(raw, position - 1, LONG_MAX)
        delta = (number >> 1) ^ -(number & 1)
        if not offset_delta:
            first = last = delta
        elif delta > last:
            last = delta
        elif delta < first:
            first = delta
        number = raw[position]
        position += 1
        if number > 127:
            following = raw[position]
            if following < 128:
                number += (following << 7) - 128
                position += 1
            else:
                number, position = number_at(raw, position - 1)
        if number != offset_delta << 1:
            raise wrong_offset(offset_delta)
        number = raw[position]
        position += 1
        if number > 127:
            number, position = number_at(raw, position - 1)
        if number & 1:
            if number != 1:
                raise negative()
            has_null_key = True
        else:
            number >>= 1
            position += number
            weight += number
        number = raw[position]
        position += 1
        if number > 127:
            following = raw[position]
            if following < 128:
                number += (following << 7) - 128
                position += 1
            else:
                number, position = number_at(raw, position - 1)
        if number & 1:
            if number != 1:
                raise negative()
        else:
            number >>= 1
            position += number
            weight += number
        number = raw[position]
        position += 1
        if number:
            number, position = number_at(raw, position - 1)
            headers_left -= _header_count(number, headers_left, stop - position)
            position, content = _read_headers(raw, position, number >> 1, [], [])
            weight += content
        if position != stop:
            raise wrong_length()
    if position != end:
        raise stray()
    _check_timestamp(base_timestamp + first)
    _check_timestamp(base_timestamp + last)
    weight += RECORD_BYTES * count
    headers = headers_max - headers_left
    return Walked(base_timestamp + first, base_timestamp + last, weight, has_null_key, headers)


def _read_headers(
    raw: bytes, position: int, count: int, names: Strings, values: Values
) -> tuple[int, int]:
    """Append the headers of one record to both lists. Return the place behind them, and their
    weight."""
    weight = HEADER_BYTES * count
    try:
        for _ in range(count):
            size = raw[position]
            position += 1
            if size > 127:
                size, position = number_at(raw, position - 1)
            if size & 1:
                raise negative()
            stop = position + (size >> 1)
            names.append(raw[position:stop].decode())
            weight += stop - position
            size = raw[stop]
            position = stop + 1
            if size > 127:
                size, position = number_at(raw, stop)
            if size == 1:
                values.append(None)
                continue
            if size & 1:
                raise negative()
            stop = position + (size >> 1)
            values.append(raw[position:stop])
            weight += stop - position
            position = stop
    except UnicodeDecodeError:
        raise wrong_name() from None
    except IndexError:
        raise cut_off() from None
    return position, weight


def _header_count(number: int, headers_left: int, bytes_left: int) -> int:
    if number & 1:
        raise negative()
    if number >> 1 > bytes_left // HEADER_SIZE_MIN:
        raise cut_off()
    if number >> 1 > headers_left:
        raise too_many_headers()
    return number >> 1


# --- all records at once


class _Fields:
    """The fields of the records of some batches, an array for each field, checked.

    Places are those in `raw`; a size of -1 is a null; timestamps are ms.
    """

    def __init__(
        self,
        raw: Raw,
        starts: Sequence[int],
        ends: Sequence[int],
        counts: Sequence[int],
        base_timestamps: Sequence[int],
        *,
        has_timestamps: bool = True,
    ) -> None:
        """Unless `has_timestamps`, the timestamps are left out."""
        self.raw: Any = raw  # no memoryview where Python reads it
        self._has_timestamps = has_timestamps
        self._headers_max = HEADERS_MAX * len(counts)
        if not native.IS_BUILT or not self._read_natively(starts, ends, counts, base_timestamps):
            self._read(starts, ends, counts, base_timestamps)
        self.with_headers = np.flatnonzero(self.header_count)

    def _read_natively(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        counts: Sequence[int],
        base_timestamps: Sequence[int],
    ) -> bool:
        deltas = np.empty(sum(counts), dtype=np.int64)
        places = np.empty((7, len(deltas)), dtype=np.int32)
        batches = [np.array(numbers, dtype=np.int64) for numbers in (starts, ends, counts)]
        if not native.fields(deltas, places, self.raw, *batches):
            return False
        self.key_at, self.key_size, self.value_at, self.value_size = places[:4]
        self.headers_at, self.header_count, self.stops = places[4:]
        self._set_timestamps(deltas, counts, base_timestamps)
        return True

    def _read(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        counts: Sequence[int],
        base_timestamps: Sequence[int],
    ) -> None:
        try:
            record_starts, batch_stops = _record_starts(self.raw, starts, counts)
            if batch_stops != list(ends):
                raise stray()
            buffer = np.frombuffer(self.raw, dtype=np.uint8)
            first_at = np.array(record_starts, dtype=np.int64)
            # `_record_starts` ignores the sign of a length, so compare each end with the next
            # start.
            length, positions = numbers_at(buffer, first_at)
            stops = positions + length
            last = np.cumsum(np.array(counts, dtype=np.int64)) - 1
            expected = np.empty_like(stops)
            expected[:-1] = first_at[1:]
            expected[last] = ends
            if (stops != expected).any():
                raise wrong_length()
            delta, positions = numbers_at(buffer, positions + 1, LONG_MAX)
            offset_delta, positions = numbers_at(buffer, positions)
            self.key_size, self.key_at = numbers_at(buffer, positions)
            self._check_size(self.key_size, self.key_at, stops)
            positions = self.key_at + np.maximum(self.key_size, 0)
            self.value_size, self.value_at = numbers_at(buffer, positions)
            self._check_size(self.value_size, self.value_at, stops)
            positions = self.value_at + np.maximum(self.value_size, 0)
            self.header_count, self.headers_at = numbers_at(buffer, positions)
        except IndexError:
            raise cut_off() from None
        rows = np.arange(len(stops), dtype=np.int64)
        if len(counts) > 1:
            rows -= np.repeat(last - (np.array(counts, dtype=np.int64) - 1), counts)
        if (offset_delta != rows).any():
            wrong = int(np.flatnonzero(offset_delta != rows)[0])
            raise wrong_offset(int(rows[wrong]))
        self._set_timestamps(delta, counts, base_timestamps)
        if (self.header_count < 0).any():
            raise negative()
        if (self.header_count > (stops - self.headers_at) // HEADER_SIZE_MIN).any():
            raise cut_off()
        plain = self.header_count == 0
        if (plain & (self.headers_at != stops)).any():
            raise wrong_length()
        self.stops = stops

    @staticmethod
    def _check_size(size: np.ndarray, positions: np.ndarray, stops: np.ndarray) -> None:
        if (size < -1).any():
            raise negative()
        if (size > stops - positions).any():
            raise wrong_length()

    def _set_timestamps(
        self, delta: np.ndarray, counts: Sequence[int], base_timestamps: Sequence[int]
    ) -> None:
        if not self._has_timestamps:
            return
        base = np.array(base_timestamps, dtype=np.int64)
        if len(counts) > 1:
            base = np.repeat(base, counts)
        # The sum of two numbers below 2**62 has no overflow. Larger numbers are out of range, or
        # nearly. They are added as exact integers, so that the result is that of `_walk`.
        if _is_large(delta) or _is_large(base):
            base = base.astype(object)
        stamps = base + delta
        low, high = int(stamps.min()), int(stamps.max())
        _check_timestamp(low)
        _check_timestamp(high)
        self.timestamps = stamps.astype(np.int64)

    def headers(self) -> tuple[Strings, Values, np.ndarray, np.ndarray]:
        """Return the names of all headers, the values, the number of headers before each record,
        and the weight of the headers of each record. The numbers are int32, with the total at the
        end."""
        before = np.zeros(len(self.timestamps) + 1, dtype=np.int32)
        names, values = Strings(), Values()
        weight = np.zeros(len(self.timestamps), dtype=np.int64)
        if len(self.with_headers):
            rows = self.with_headers
            weights = list[int]()
            for position, count, stop in zip(
                self.headers_at[rows].tolist(),
                self.header_count[rows].tolist(),
                self.stops[rows].tolist(),
                strict=True,
            ):
                _header_count(count << 1, self._headers_max - len(names), stop - position)
                end, content = _read_headers(self.raw, position, count, names, values)
                if end != stop:
                    raise wrong_length()
                weights.append(content)
            weight[rows] = weights
            before[1:] = np.cumsum(self.header_count)
        return names, values, before, weight

    def header_column(self) -> pa.Array:
        """Return the headers of all records; a record without headers has a null."""
        rows = len(self.timestamps)
        if not len(self.with_headers):
            return chunk.no_headers(rows)
        names, values, before, _ = self.headers()
        valid = np.packbits(self.header_count > 0, bitorder="little")
        children: Any = [pa.array(names, pa.string()), pa.array(values, pa.binary())]
        pairs = pa.StructArray.from_arrays(children, fields=list(HEADERS_TYPE.value_type))
        buffers: list[pa.Buffer | None] = [pa.py_buffer(valid.data), pa.py_buffer(before.data)]
        return pa.Array.from_buffers(HEADERS_TYPE, rows, buffers, children=[pairs])


def _record_starts(
    raw: bytes, starts: Sequence[int], counts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return where each record starts, and where the last record of each batch ends."""
    record_starts, stops = list[int](), list[int]()
    add = record_starts.append
    for position, count in zip(starts, counts, strict=True):
        for _ in range(count):
            add(position)
            number = raw[position]
            if number < 128:
                position += 1 + (number >> 1)
                continue
            following = raw[position + 1]
            if following < 128:
                position += 2 + ((number & 127 | following << 7) >> 1)
            else:
                number, position = number_at(raw, position)
                position += number >> 1
        stops.append(position)
    return record_starts, stops


def _is_large(numbers: np.ndarray) -> bool:
    return bool(len(numbers)) and (int(numbers.max()) >= 1 << 62 or int(numbers.min()) < -(1 << 62))


def _check_timestamp(timestamp: int) -> None:
    if not -TIMESTAMP_MS_MAX <= timestamp <= TIMESTAMP_MS_MAX:
        raise InvalidBatch(f"timestamp {timestamp} is not within {TIMESTAMP_MS_MAX} ms of 1970")
