"""Encoding of columns of records as JSON texts, and `Undecodable`.

It is the error of a record that does not decode in the format of the answer.

A JSON answer contains a stored value unchanged only if it is known to be exactly one JSON text in
UTF-8. This module escapes or refuses every other value. Pure.
"""

from collections import deque
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.service.formats.json_in import Format, one_line
from tidelog.service.formats.json_numbers import NumberTooLarge, check_numbers
from tidelog.service.http.media_types import SCHEMA_FORMATS
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.model import TopicPartition

RecordPart: TypeAlias = Literal["key", "value"]
SchemaFormat: TypeAlias = Literal["avro", "jsonschema", "protobuf"]
ReadFormat: TypeAlias = Format | SchemaFormat
"""Formats of keys and values in answers. In a SchemaFormat only null decodes."""

to_json = msgspec.json.encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


class NotDecodable(ValueError):
    """A value of a column does not decode. `row` is the row of the first such value."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


class NeedsRegistry(ValueError):
    """A value decodes only with the schema that a registry has for it."""


class Undecodable(InvalidRequest):
    """A record cannot be encoded in the requested format.

    `part` is its key or its value. The message begins like the proxies' messages (DIALECTS,
    errors).
    """

    status = 422
    code = 422

    def __init__(
        self, partition: TopicPartition, fmt: str, part: RecordPart, offset: int, why: str
    ) -> None:
        super().__init__(
            f"{part} deserialization error for format {fmt}: partition {partition}, "
            f"offset {offset}: {why}; on_error=skip or raw passes it"
        )
        self.where = partition
        self.format = fmt
        self.part = part
        self.offset = offset


def scalar(text: str | bytes) -> Any:
    """Return the text as an Arrow scalar, to join columns with it."""
    return pa.scalar(text.encode() if isinstance(text, str) else text, pa.binary())


EMPTY = scalar("")
_QUOTE = scalar('"')
_CLOSE = scalar("}")
_KEY = scalar('{"key":')
_VALUE = scalar(',"value":')
_HEADERS = scalar(',"headers":[')
_END = scalar("]")


def decimal(numbers: Any) -> Any:
    return numbers.cast(pa.string()).view(pa.binary())


def require_json(column: Any) -> None:
    """Check that every value is one JSON text, because `1,2` or `1},{"x":2` would forge records.

    Raises NotDecodable.
    """
    if not all_decode("json", column):
        raise _first_wrong("json", column)


def all_decode(fmt: ReadFormat, column: Any) -> bool:
    """Return whether each value decodes in this format. If so, this takes ~0.1 us a value."""
    if fmt == "binary" or column.null_count == len(column):
        return True
    if fmt in SCHEMA_FORMATS:
        return False
    try:
        column.cast(pa.string())  # checks UTF-8, which msgspec.Raw does not
        if fmt == "json":
            texts = column.drop_null().to_pylist()
            deque(map(_check_json, texts), maxlen=0)
            check_numbers(b"\n".join(texts))
    except (pa.ArrowInvalid, msgspec.DecodeError, RecursionError, NumberTooLarge):
        return False
    return True


NOT_DECODED = (
    UnicodeDecodeError,
    msgspec.DecodeError,
    RecursionError,
    NumberTooLarge,
    NeedsRegistry,
)


def check(fmt: ReadFormat, octets: bytes) -> None:
    """Check one value. Raises one of NOT_DECODED."""
    if fmt in SCHEMA_FORMATS:
        raise NeedsRegistry("there is no schema registry")
    if fmt != "binary":
        str(octets, "utf-8")
    if fmt == "json":
        _check_json(octets)
        check_numbers(octets)


def why_not(fmt: ReadFormat, octets: bytes | None) -> str:
    """Return why the value does not decode in this format, or an empty text if it does."""
    try:
        if octets is not None:
            check(fmt, octets)
    except NOT_DECODED as error:
        return one_line(str(error))
    return ""


def _first_wrong(fmt: ReadFormat, column: Any) -> NotDecodable:
    for row, octets in enumerate(column.to_pylist()):
        if why := why_not(fmt, octets):
            return NotDecodable(row, why)
    raise AssertionError("the column failed but each of its values is valid")


_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def on_one_line(column: Any) -> Any:
    """Replace line breaks in JSON texts by spaces. JSON has line breaks only between tokens."""
    octets = _octets(column)
    if b"\n" not in octets and b"\r" not in octets:
        return column
    bounds = _bounds(column)
    flat = _binary(bounds - bounds[0], pa.py_buffer(octets.translate(_LINE_BREAKS)))
    return pc.if_else(column.is_null(), None, flat) if column.null_count else flat


def quoted(column: Any) -> Any:
    """Encode texts as JSON strings and null as null. Raises NotDecodable if a text is not UTF-8."""
    try:
        strings = column.cast(pa.string())
    except pa.ArrowInvalid:
        raise _first_wrong("text", column) from None
    octets = np.frombuffer(_octets(column), np.uint8)
    if not ((octets < ord(" ")) | (octets == ord('"')) | (octets == ord("\\"))).any():
        return pc.binary_join_element_wise(_QUOTE, column, _QUOTE, EMPTY)
    texts = strings.to_pylist()
    return pa.array([None if text is None else to_json(text) for text in texts], pa.binary())


def base64(column: Any) -> Any:
    """Encode values as base64 strings or null, each followed by a comma.

    msgspec encodes `["...","...",null,...]` in one call. The lengths of the values give the
    lengths of the elements. The elements with their commas are adjacent, as Arrow requires, so they
    become a column without a copy.
    """
    rows = len(column)
    if column.null_count == rows:
        return pa.array([b"null,"] * rows, pa.binary())
    lengths = (np.diff(_bounds(column)) + 2) // 3 * 4 + len('"",')
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = len("null,")
    bounds = np.empty(rows + 1, dtype=np.int32)
    bounds[0] = len("[")
    np.cumsum(lengths, out=bounds[1:])
    bounds[1:] += len("[")
    octets = [*column.to_pylist(), None]  # the last null puts a comma after each value
    return _binary(bounds, pa.py_buffer(to_json(octets)))


def headers(column: Any) -> list[Any]:
    """Encode `,"headers":[{"key","value"},...]` for records with headers.

    If no record has headers, return an empty list.
    """
    if column.null_count == len(column):
        return []
    flat = column.flatten()
    if not len(flat):
        return []
    keys = pa.array([to_json(key) for key in flat.field("key").to_pylist()], pa.binary())
    values = pc.binary_slice(base64(flat.field("value")), 0, -1)  # without the comma
    pairs = pc.binary_join_element_wise(_KEY, keys, _VALUE, values, _CLOSE, EMPTY)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets: Any = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, pairs), b",")
    listed = pc.binary_join_element_wise(_HEADERS, joined, _END, EMPTY)
    return [pc.if_else(pa.array(lengths > 0), listed, EMPTY)]


def _octets(column: Any) -> bytes:
    """Return the bytes of all values, one after the other.

    For a slice, return only its own values.
    """
    bounds = _bounds(column)
    data = column.buffers()[2]
    return data[int(bounds[0]) : int(bounds[-1])].to_pybytes() if data else b""


def _bounds(column: Any) -> npt.NDArray[np.int32]:
    """Return the starts of a binary column's values, and the end of the last value."""
    offsets = np.frombuffer(memoryview(column.buffers()[1]), np.int32)
    return offsets[column.offset : column.offset + len(column) + 1]


def _binary(bounds: npt.NDArray[np.int32], data: pa.Buffer) -> Any:
    offsets = pa.array(bounds).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, offsets, data])
