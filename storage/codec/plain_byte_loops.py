"""The loops over bytes in Python: the functions of native.c, with the same results.

Their contracts are in _native.pyi. They run where tidelog was installed without a C compiler, and
where the code in C is another version's; and they are the oracle of the tests. `varint` and
`octets` write what is not written in C.

One plain way for all bytes: a record takes about 6 us, in C 0.01 to 0.05 us. All loops are linear
in the bytes. Without numpy, because the client hashes keys too, and may be installed without it.
Pure.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

VERSION = 3

CUT_OFF, STRAY, WRONG_LENGTH, NEGATIVE, TOO_LONG, TOO_MANY_HEADERS, WRONG_NAME, WRONG_OFFSET = (
    range(8)
)
"""Why bytes are no records."""
Refusal: TypeAlias = tuple[int, int]
INT, LONG = (5, 32), (10, 64)
"""For an int and a long: the most bytes of a varint, and the bits of its number."""
HEADER_BYTES_MIN = 2
"""A header has at least the sizes of its name and its value."""
NUMBERS_BYTES_MAX = 5 + 1 + 10 + 10 + 5 + 5
"""The most bytes of the numbers of a record that `write` writes."""
_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF
_MISFIT = "columns and buffers do not fit each other"


class _Refused(Exception):
    def __init__(self, reason: int) -> None:
        self.reason = reason


class _Octets(NamedTuple):
    """A part of the bytes; a size of -1 is a null."""

    start: int
    size: int


class _Record(NamedTuple):
    """A record up to its headers, which fill the bytes from `headers_start` to `stop`."""

    timestamp_delta: int
    key: _Octets
    value: _Octets
    headers_start: int
    headers: int
    stop: int


class _Reader:
    """Reads from `position` on."""

    __slots__ = ("position", "raw")

    def __init__(self, raw: bytes, position: int) -> None:
        self.raw = raw
        self.position = position

    def number(self, stop: int, kind: tuple[int, int] = INT) -> int:
        """Read a zigzag varint before `stop`."""
        bytes_max, bits = kind
        zigzag = 0
        for shift in range(0, 7 * bytes_max, 7):
            if self.position >= stop:
                raise _Refused(CUT_OFF)
            byte = self.raw[self.position]
            self.position += 1
            zigzag |= (byte & 127) << shift
            if byte < 128:
                if zigzag >> bits:
                    break
                return (zigzag >> 1) ^ -(zigzag & 1)
        raise _Refused(TOO_LONG)

    def octets(self, stop: int, *, may_be_null: bool = True) -> _Octets:
        """Read a size, and go behind so many bytes."""
        size = self.number(stop)
        start = self.position
        if size < 0:
            if size == -1 and may_be_null:
                return _Octets(start, size)
            raise _Refused(NEGATIVE)
        if size > stop - start:
            raise _Refused(CUT_OFF)
        self.position += size
        return _Octets(start, size)

    def record(self, end: int, offset_delta: int) -> _Record:
        length = self.number(end)
        if length < 1 or length > end - self.position:
            raise _Refused(CUT_OFF if length else WRONG_LENGTH)
        stop = self.position + length
        self.position += 1  # the attributes have no meaning
        timestamp_delta = self.number(stop, LONG)
        if self.number(stop) != offset_delta:
            raise _Refused(WRONG_OFFSET)
        key, value = self.octets(stop), self.octets(stop)
        headers = self.number(stop)
        if headers < 0:
            raise _Refused(NEGATIVE)
        if headers > (stop - self.position) // HEADER_BYTES_MIN:
            raise _Refused(CUT_OFF)
        if not headers and self.position != stop:
            raise _Refused(WRONG_LENGTH)
        return _Record(timestamp_delta, key, value, self.position, headers, stop)

    def headers(self, count: int, stop: int) -> Iterator[tuple[_Octets, _Octets]]:
        """Yield name and value of each header; they must end at `stop`."""
        for _ in range(count):
            name = self.octets(stop, may_be_null=False)
            try:
                self.raw[name.start : name.start + name.size].decode()
            except UnicodeDecodeError:
                raise _Refused(WRONG_NAME) from None
            yield name, self.octets(stop)
        if self.position != stop:
            raise _Refused(WRONG_LENGTH)


# --- reading


def walk(
    raw: Any, start: int, count: int, headers_max: int
) -> tuple[int, int, int, int, bool] | Refusal:
    raw = bytes(raw)
    reader = _Reader(raw, start)
    deltas = list[int]()
    content = headers = number = 0
    has_null_key = False
    try:
        if start < 0 or count < 1:
            raise _Refused(CUT_OFF)
        for number in range(count):
            record = reader.record(len(raw), number)
            headers += record.headers
            if headers > headers_max:
                raise _Refused(TOO_MANY_HEADERS)
            if record.headers:
                for name, value in reader.headers(record.headers, record.stop):
                    content += name.size + max(value.size, 0)
            content += max(record.key.size, 0) + max(record.value.size, 0)
            has_null_key |= record.key.size < 0
            deltas.append(record.timestamp_delta)
        if reader.position != len(raw):
            number = count
            raise _Refused(STRAY)
    except _Refused as refused:
        return refused.reason, number
    return min(deltas), max(deltas), content, headers, has_null_key


def fields(
    deltas: Any, places: Any, raw: Any, starts: Any, ends: Any, counts: Any
) -> Refusal | None:
    raw = bytes(raw)
    reader = _Reader(raw, 0)
    records = list[_Record]()
    number = 0
    try:
        for start, end, count in zip(*map(_numbers, (starts, ends, counts)), strict=True):
            number = 0
            if start < 0 or end > len(raw) or not 0 < count <= len(deltas) - len(records):
                raise _Refused(CUT_OFF)
            reader.position = start
            for number in range(count):
                records.append(reader.record(end, number))
                reader.position = records[-1].stop
            number = count
            if reader.position != end:
                raise _Refused(STRAY)
        if len(records) != len(deltas):
            raise _Refused(CUT_OFF)
    except _Refused as refused:
        return refused.reason, number
    deltas[:] = [record.timestamp_delta for record in records]
    _fill(places, [(*record.key, *record.value, *record[3:]) for record in records])
    return None


def headers(places: Any, raw: Any, starts: Any, counts: Any, ends: Any) -> Refusal | None:
    raw = bytes(raw)
    rows = list[tuple[int, int, int, int]]()
    total = len(places[0])
    record = 0
    try:
        spans = list(zip(*map(_numbers, (starts, counts, ends)), strict=True))
        for record in range(len(spans)):
            start, count, end = spans[record]
            if not 0 <= start <= end <= len(raw) or not 0 <= count <= total - len(rows):
                raise _Refused(CUT_OFF)
            rows += [(*name, *value) for name, value in _Reader(raw, start).headers(count, end)]
        if len(rows) != total:
            record = len(spans)
            raise _Refused(CUT_OFF)
    except _Refused as refused:
        return refused.reason, record
    _fill(places, rows)
    return None


def _fill(columns: Any, rows: Sequence[Sequence[int]]) -> None:
    for column, values in zip(columns, zip(*rows, strict=True), strict=bool(rows)):
        column[:] = values


def _numbers(array: Any) -> list[int]:
    numbers: list[int] = array.tolist()
    return numbers


# --- writing


def write(
    out: Any,
    bounds: Any,
    timestamp_deltas: Any,
    offset_deltas: Any,
    keys: Any,
    values: Any,
    headers: Any,
) -> int:
    columns = [_Column(column) for column in (keys, values, headers) if column is not None]
    if len(offset_deltas) != len(timestamp_deltas) or len(bounds) != len(offset_deltas) + 1:
        raise ValueError(_MISFIT)
    written, ends = bytearray(), [0]
    for row, (timestamp_delta, offset_delta) in enumerate(
        zip(_numbers(timestamp_deltas), _numbers(offset_deltas), strict=True)
    ):
        key, value, *behind = (column.item(row) for column in columns)
        added = b"\0" if not behind else behind[0]
        content = len(key or b"") + len(value or b"") + len(added or b"")
        if not added or content > len(out) - len(written) - NUMBERS_BYTES_MAX:
            raise ValueError(_MISFIT)
        numbers = varint(timestamp_delta) + varint(offset_delta)
        written += octets(b"\0" + numbers + octets(key) + octets(value) + added)
        ends.append(len(written))
    out[: len(written)] = memoryview(written)
    bounds[:] = ends
    return len(written)


class _Column:
    """A binary column of Arrow by its buffers: validity or None, int32 bounds, data or None."""

    def __init__(self, column: Sequence[Any]) -> None:
        valid, bounds, data, self._first = column
        self._valid = None if valid is None else memoryview(valid)
        self._bounds = memoryview(b"" if bounds is None else bounds)
        self._data = memoryview(b"" if data is None else data)
        if not 0 <= self._first < self._bounds.nbytes // 4:
            raise ValueError("a column has no bounds for its first row")

    def item(self, row: int) -> bytes | None:
        """Return the bytes of a row, None for a null. Raises ValueError if the row is not there."""
        place = self._first + row
        if self._valid is not None:
            if place >= 8 * self._valid.nbytes:
                raise ValueError(_MISFIT)
            if not self._valid[place >> 3] >> (place & 7) & 1:
                return None
        if place + 1 >= self._bounds.nbytes // 4:
            raise ValueError(_MISFIT)
        start, end = struct.unpack_from("=2i", self._bounds, 4 * place)
        if not 0 <= start <= end <= self._data.nbytes:
            raise ValueError(_MISFIT)
        return bytes(self._data[start:end])


def varint(number: int) -> bytes:
    """Return a number of 64 bits as a zigzag varint."""
    zigzag = (number << 1) ^ (number >> 63)
    written = bytearray()
    while zigzag > 127:
        written.append(zigzag & 127 | 128)
        zigzag >>= 7
    written.append(zigzag)
    return bytes(written)


def octets(content: bytes | None) -> bytes:
    """Return bytes behind their size; the size of a null is -1."""
    return varint(-1) if content is None else varint(len(content)) + content


# --- hashes of keys


def murmur2(key: Any) -> int:
    key = memoryview(key)
    words = len(key) >> 2
    h = _SEED ^ len(key)
    for word in struct.unpack_from(f"<{words}I", key):
        k = word * _FACTOR & _MASK
        h = (h * _FACTOR ^ (k ^ (k >> 24)) * _FACTOR) & _MASK
    if len(key) & 3:
        h = (h ^ int.from_bytes(key[words << 2 :], "little")) * _FACTOR & _MASK
    h = (h ^ (h >> 13)) * _FACTOR & _MASK
    return h ^ h >> 15


def murmur2_column(hashes: Any, bounds: Any, data: Any) -> None:
    data = memoryview(data)
    spans = list(pairwise(_numbers(bounds)))
    if len(spans) != len(hashes) or not all(0 <= start <= end <= len(data) for start, end in spans):
        raise ValueError("the bounds of the keys are not those of the data")
    for row, (start, end) in enumerate(spans):
        hashes[row] = murmur2(data[start:end])
