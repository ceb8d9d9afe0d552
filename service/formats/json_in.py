"""Decoding of produce requests in the v2 JSON dialects (Confluent, Karapace, Strimzi).

A body of many records becomes columns without a loop over its bytes in Python. msgspec finds each
value, and this module joins the texts and computes the Arrow offsets. A text that msgspec accepts
is a valid JSON value (RFC 8259: escapes, surrogate pairs, control characters), so an answer may
contain it unchanged. msgspec does not check UTF-8, so this module checks it. A number stays
text. Pure: bytes in, columns out. The module raises only RecordTooLarge and the errors below. The
letters name the proxies whose source has the same error: C (Confluent), K (Karapace), S (Strimzi).
`S 400` means that Strimzi answers the same error with status 400.

    no body, `null`, `records` missing, null or empty          InvalidBody 422  (all)
    unknown keys in the body or a record                       InvalidBody 422  (K; S 400)
    timestamp out of range; text format and not a string       InvalidBody 422  (S)
    json format and a number beyond the range of a double      InvalidBody 422
    not JSON, not UTF-8, not an object                         BadBody 400      (C, K)
    `records` no array, a record no object, a wrong type       BadBody 400      (C, K, S)
    bad base64                                                 BadBody 400      (C, K; S 422)
"""

import codecs
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Raw

from tidelog.service.formats.json_numbers import NumberTooLarge, check_numbers
from tidelog.service.formats.json_scan import excess_objects, has_many_objects
from tidelog.storage.codec.chunk import RECORDS_MAX, weight
from tidelog.storage.codec.partitioner import Column
from tidelog.storage.codec.record_columns import (
    CHUNK_SCHEMA,
    Headers,
    Rows,
    headers_column,
    no_headers,
    same_timestamps,
    timestamps,
)
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge

Format: TypeAlias = Literal["json", "binary", "text"]

ROWS_MAX = 64
"""Up to ROWS_MAX records stay lists (chunk.Rows), because building columns costs ~40 us."""

UTF8_BYTES = 1024 * 1024
"""UTF-8 is checked in blocks of this many bytes: a text in memory may take four times its bytes."""

PRODUCE_BODY_BYTES_MAX = 1 << 30
"""A column's 32-bit offsets suffice for a body of this size (I10). This is the
highest value of the setting `request_bytes_max`."""

HEADERS_MAX = 10_000
"""Bound of the headers of a record (I10), because even a short header takes 100 bytes."""

HEADERS_BYTES = 64 * 1024
"""The headers of records are decoded in slices of about this many bytes of JSON, because as objects
they take ten times the memory."""

TIMESTAMP_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999, the end of most calendars."""

MISSING_RECORDS = 'records is missing: send {"records": [{"value": ...}]}'
JSON_HINT = "To send keys and values as JSON, use Content-Type: application/vnd.kafka.json.v2+json"

QUOTED_MAX = 100
MESSAGE_MAX = 300
"""Bounds, in characters, of two texts in our error messages: a refused value (QUOTED_MAX) and a
library's message."""


class BadBody(InvalidRequest):
    """The body does not have the form that its content type declares."""

    status = 400

    def __init__(self, message: str, code: int = 400) -> None:
        super().__init__(message)
        self.code = code


class InvalidBody(InvalidRequest):
    """The body is well formed but requests something impossible."""

    status = 422

    def __init__(self, message: str, code: int = 422) -> None:
        super().__init__(message)
        self.code = code


class Produced(NamedTuple):
    """The records of one request, with timestamps; `rows` is a batch of CHUNK_SCHEMA or Rows.

    `partitions` has each record's partition or None, not checked for range. If no record names a
    partition, `partitions` is None. `is_json` means that every key and value is null or JSON text
    in valid UTF-8. `weight` is the weight of all records in bytes (chunk.weight), or the bytes of
    their columns if that is more. `has_timestamps` means that the client may have sent timestamps.
    """

    rows: Rows | pa.RecordBatch
    partitions: "list[int | None] | Column | None"
    is_json: bool
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    weight: int
    has_timestamps: bool


class JsonHeader(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A record's header in JSON; the value is base64."""

    key: str
    value: bytes | None = None


_ABSENT = Raw(b"")
_MORE: list[Any] = [
    ("partition", int | str | None, None),
    ("timestamp", int | str | None, None),
    ("headers", list[JsonHeader] | None, None),
]
_RAW_HEADERS = [*_MORE[:-1], ("headers", Raw, _ABSENT)]
_SCHEMAS: list[Any] = [
    # Confluent's clients send these fields with every format. The fields have no effect, because
    # there are no schemas.
    (name, Raw, _ABSENT)
    for name in ("key_schema", "key_schema_id", "value_schema", "value_schema_id")
]


def _decoder(kind: Any, absent: Any, extra_fields: list[Any]) -> msgspec.json.Decoder[Any]:
    fields = [("key", kind, absent), ("value", kind, absent), *extra_fields]
    record = msgspec.defstruct("Record", fields, forbid_unknown_fields=True, gc=False)
    records: Any = list[record]  # type: ignore[valid-type]
    body = msgspec.defstruct(
        "Body", [("records", records), *_SCHEMAS], forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(body)


_KINDS: dict[Format, tuple[Any, Any]] = {
    "json": (Raw, _ABSENT),
    "binary": (bytes | None, None),
    "text": (str | None, None),
}
_PLAIN = {fmt: _decoder(kind, absent, []) for fmt, (kind, absent) in _KINDS.items()}
"""Decoders of records with only a key and a value, as in nearly all large bodies. They save three
empty fields in each record. If they fail on a record with more fields, _FULL decodes the body."""

_FULL = {fmt: _decoder(kind, absent, _MORE) for fmt, (kind, absent) in _KINDS.items()}

_MANY = {fmt: _decoder(kind, absent, _RAW_HEADERS) for fmt, (kind, absent) in _KINDS.items()}
"""Decoders for bodies of many objects. They leave the headers to `_header_slices`."""

_headers = msgspec.json.Decoder(list[list[JsonHeader] | None]).decode


def decode_json(body: bytes, fmt: Format, now_ms: int) -> Produced:
    """Decode the records of `{"records": [...]}`. Records without a timestamp get `now_ms`.

    Format json keeps key and value as the JSON text that the client sent. A key or value that is
    missing or `null` is null, but `false`, `0`, `""` and `{}` are values. Raises BadBody,
    InvalidBody or RecordTooLarge.
    """
    if len(body) > PRODUCE_BODY_BYTES_MAX:
        raise RecordTooLarge(
            f"body of {len(body)} bytes is over the limit of {PRODUCE_BODY_BYTES_MAX}"
        )
    is_many = has_many_objects(body)
    if is_many:
        check_records(body)
    try:
        return _decoded(body, fmt, now_ms, is_many)
    except msgspec.ValidationError as error:
        raise refusal(str(error), body, fmt) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body.strip():
            raise InvalidBody("the body is empty") from error
        raise BadBody(f"the body is not JSON: {error}") from error


def _decoded(body: bytes, fmt: Format, now_ms: int, is_many: bool) -> Produced:
    records, is_plain = _records(body, fmt, is_many)
    count = len(records)
    if not count:
        raise InvalidBody("records is empty")
    check_count(count)
    if fmt == "json":
        try:
            check_numbers(body)
        except NumberTooLarge as error:
            raise InvalidBody(str(error)) from error
    partitions, client_stamps = (
        (None, None) if is_plain else (_partitions(records), _given(records))
    )
    make = _rows if count <= ROWS_MAX and not is_many else _batch
    rows = make(records, fmt, now_ms, client_stamps, is_plain)
    return Produced(rows, partitions, fmt == "json", count, weight(rows), client_stamps is not None)


def check_records(body: bytes) -> None:
    """Raise RecordTooLarge for `{"records": [...]}` with too many, before they take memory."""
    check_count(excess_objects(body, 2, RECORDS_MAX))


def check_count(count: int) -> None:
    """Raise RecordTooLarge for a request with too many records."""
    if count > RECORDS_MAX:
        raise RecordTooLarge(
            f"the request has {count} records, the limit is {RECORDS_MAX}: send it in several "
            "requests"
        )


def check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError if the body is not UTF-8.

    msgspec checks only the texts that it decodes.
    """
    if body.isascii():
        return
    start = 0
    while start < len(body):
        end = start + UTF8_BYTES
        try:
            start += codecs.utf_8_decode(memoryview(body)[start:end], "strict", end >= len(body))[1]
        except UnicodeDecodeError as error:
            places = start + error.start, start + error.end
            raise UnicodeDecodeError("utf-8", body, *places, error.reason) from None


def _records(body: bytes, fmt: Format, is_many: bool) -> tuple[list[Any], bool]:
    """Return the records, and whether each is known to have only a key and a value."""
    check_utf8(body)
    if len(body) > 4096:
        try:
            return _PLAIN[fmt].decode(body).records, True
        except msgspec.ValidationError:
            pass  # more fields, or an error: decode with the full type
    decoders = _MANY if is_many else _FULL
    return decoders[fmt].decode(body).records, False


# --- fields of every format


def _partitions(records: list[Any]) -> list[int | None] | None:
    partitions = _integers("partition", [record.partition for record in records])
    return None if partitions.count(None) == len(partitions) else partitions


def _given(records: list[Any]) -> list[int | None] | None:
    """Return the timestamps that the client sent. If it sent none, return None."""
    client_stamps = _integers("timestamp", [record.timestamp for record in records])
    return None if client_stamps.count(None) == len(client_stamps) else client_stamps


def _timestamps(client_stamps: list[int | None], now_ms: int) -> list[int]:
    stamps = [now_ms if stamp is None else stamp for stamp in client_stamps]
    if min(stamps) < 0 or max(stamps) > TIMESTAMP_MS_MAX:
        wrong = next(stamp for stamp in stamps if not 0 <= stamp <= TIMESTAMP_MS_MAX)
        raise InvalidBody(
            f"timestamp {_shown(str(wrong))} is not between 0 and {TIMESTAMP_MS_MAX} ms"
        )
    return stamps


def _integers(name: str, numbers: list[int | str | None]) -> list[int | None]:
    if str not in set(map(type, numbers)):
        return numbers  # type: ignore[return-value]  # none is a string
    return [integer(name, number) if isinstance(number, str) else number for number in numbers]


def integer(name: str, number: str) -> int:
    """Parse a number that the client sent as a string, as many clients do."""
    if not re.fullmatch(r"-?[0-9]{1,19}", number):
        raise BadBody(f"{name} is not a valid int: {_shown(number)}")
    return int(number)


def _shown(text: str) -> str:
    return text if len(text) <= QUOTED_MAX else text[:QUOTED_MAX] + "..."


def one_line(message: str) -> str:
    """Shorten a library's message, which may quote the whole body, for one of our messages."""
    return " ".join(message[: 2 * MESSAGE_MAX].split())[:MESSAGE_MAX]


# --- few records: lists


def _rows(
    records: list[Any],
    fmt: Format,
    now_ms: int,
    client_stamps: list[int | None] | None,
    is_plain: bool,
) -> Rows:
    octets = _OCTETS_BY_FORMAT[fmt]
    headers: list[Headers | None] | None = None
    stamps = (
        [now_ms] * len(records) if client_stamps is None else _timestamps(client_stamps, now_ms)
    )
    if not is_plain and any(record.headers for record in records):
        headers = [_pairs(record.headers) for record in records]
    keys = [octets(record.key) for record in records]
    return Rows(stamps, keys, [octets(record.value) for record in records], headers)


def _pairs(headers: list[JsonHeader] | None) -> Headers | None:
    if not headers:
        return None
    if len(headers) > HEADERS_MAX:
        check_headers(len(headers))
    return [(header.key, header.value) for header in headers]


def octets_of_raw(raw: Raw) -> bytes | None:
    """Return the text of a JSON value, or None if the value is null or missing."""
    text = bytes(raw)
    return None if text == b"null" else text or None


def _octets_of_text(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _same(octets: bytes | None) -> bytes | None:
    return octets


_OCTETS_BY_FORMAT: dict[Format, Callable[[Any], bytes | None]] = {
    "json": octets_of_raw,
    "binary": _same,
    "text": _octets_of_text,
}


# --- many records: columns


def _batch(
    records: list[Any],
    fmt: Format,
    now_ms: int,
    client_stamps: list[int | None] | None,
    is_plain: bool,
) -> pa.RecordBatch:
    column = _COLUMN_BY_FORMAT[fmt]
    keys = column([record.key for record in records])
    values = column([record.value for record in records])
    headers: Column = no_headers(len(records))
    if client_stamps is None:
        stamps = same_timestamps(now_ms, len(records))
    else:
        stamps = timestamps(np.array(_timestamps(client_stamps, now_ms), dtype=np.int64))
    if not is_plain and any(record.headers for record in records):
        columns: list[Any] = [_headers_column(rows) for rows in _header_slices(records)]
        headers = columns[0] if len(columns) == 1 else pa.concat_arrays(columns)
    return pa.RecordBatch.from_arrays(
        [stamps, keys, values, headers],
        schema=CHUNK_SCHEMA,
    )


def _raw_column(raws: Sequence[Raw]) -> Column:
    rows = len(raws)
    lengths = np.frombuffer(struct.pack(f"{rows}i", *map(len, raws)), dtype=np.int32)
    offsets = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    data = b"".join(raws)
    column: Column = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(offsets.data), pa.py_buffer(data)]
    )
    if lengths.min() > len(b"null"):
        return column
    nulls = _null_texts(data, offsets[:-1], lengths)
    null_count = int(np.count_nonzero(nulls))
    if null_count == rows:
        return pa.nulls(rows, pa.binary())
    if null_count:
        # `if_else` would mark the rows as null but keep their bytes.
        indices: Any = pa.array(np.arange(rows), mask=nulls)
        column = column.take(indices)
    return column


def _null_texts(
    data: bytes, starts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Find the texts that are missing or `null`."""
    nulls: npt.NDArray[np.bool_] = lengths == 0
    rows = np.flatnonzero(lengths == 4)
    if rows.size:
        anywhere = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))  # 4 bytes at each position
        nulls[rows] = anywhere[starts[rows]] == int.from_bytes(b"null", "little")
    return nulls


def _binary_column(octets: list[bytes | None]) -> Column:
    return pa.array(octets, pa.binary())


def _text_column(texts: list[str | None]) -> Column:
    return pa.array(texts, pa.string()).view(pa.binary())


_COLUMN_BY_FORMAT: dict[Format, Callable[[Any], Column]] = {
    "json": _raw_column,
    "binary": _binary_column,
    "text": _text_column,
}


def _header_slices(records: list[Any]) -> Iterator[list[list[JsonHeader] | None]]:
    """Return the headers of all records.

    If they are not decoded yet, decode those of a few records at a time.
    """
    if not isinstance(records[0].headers, Raw):
        yield [record.headers for record in records]
        return
    first, size = 0, 0
    for row, record in enumerate(records):
        size += len(record.headers)
        if size > HEADERS_BYTES and row > first:
            yield _decoded_headers(records[first:row], first)
            first, size = row, len(record.headers)
    yield _decoded_headers(records[first:], first)


def _decoded_headers(records: list[Any], first: int) -> list[list[JsonHeader] | None]:
    """Decode the headers of records. `first` is the number of the first of them in the request."""
    raws = [record.headers or b"null" for record in records]
    if len(raws) == 1:
        check_headers(excess_objects(bytes(raws[0]), 1, HEADERS_MAX))
    try:
        rows = _headers(b"[%b]" % b",".join(raws))
    except msgspec.ValidationError as error:
        message = one_line(str(error))
        path = _ROW.sub(lambda row: f"`$.records[{first + int(row[1])}].headers", message)
        raise msgspec.ValidationError(path) from error
    return rows


def check_headers(count: int) -> None:
    """Raise InvalidBody for a record with too many headers."""
    if count > HEADERS_MAX:
        raise InvalidBody(f"a record has {HEADERS_MAX} headers at most")


def _headers_column(rows: list[list[JsonHeader] | None]) -> Column:
    flat = [header for row in rows if row for header in row]
    lengths = [len(row) if row else None for row in rows]
    check_headers(max(length or 0 for length in lengths))
    names, values = [header.key for header in flat], [header.value for header in flat]
    return headers_column(names, values, lengths)


# --- refusals

_ROW = re.compile(r"`\$\[(\d+)\]")
_PATH = re.compile(r" - at `\$\.records\[(\d+)\](?:\.(key|value|headers\[(\d+)\]\.value))?`")


def refusal(message: str, body: bytes, fmt: Format) -> InvalidRequest:
    """Return our error for msgspec's message, which has the expected type and the path."""
    message = one_line(message)
    if "unknown field" in message or "missing required field" in message:
        return InvalidBody(MISSING_RECORDS if _lacks_records(message, body) else message)
    if message == "Expected `object`, got `null`":
        return InvalidBody("the body is null")
    if message == "Expected `array`, got `null` - at `$.records`":
        return InvalidBody("records is null")
    if message.startswith(("Invalid base64", "Expected `bytes")):
        return BadBody(_not_base64(message, body))
    if fmt == "text" and (path := _PATH.search(message)) and path[2] in ("key", "value"):
        return InvalidBody(
            f"because the embedded format is 'text', the {path[2]} must be a string: {message}"
        )
    return BadBody(message)


def _lacks_records(message: str, body: bytes) -> bool:
    """Whether the body is an object without `records`.

    msgspec's `message` says only that a field is unknown or missing.
    """
    if " - at `" in message:
        return False
    try:
        return msgspec.json.decode(body, type=_AnyRecords).records is msgspec.UNSET
    except (msgspec.MsgspecError, RecursionError):
        return False  # the body has another error, too


def _not_base64(message: str, body: bytes) -> str:
    """Return Karapace's message, which quotes the value that is not base64.

    For a key or a value it also says how to send JSON, because this is the first request of many
    clients.
    """
    path = _PATH.search(message)
    if path is None:
        return message
    try:
        record: Any = msgspec.json.decode(body, type=_Loose).records[int(path[1])]
        if path[3] is None:
            return f"{not_base64(getattr(record, path[2]))} {JSON_HINT}"
        headers = msgspec.json.decode(record.headers, type=list[_LooseHeader])
        return not_base64(headers[int(path[3])].value)
    except (msgspec.MsgspecError, LookupError, RecursionError):
        return message  # the body has another error, too, or a field twice


def not_base64(raw: Raw) -> str:
    """Return the message for a JSON value, as sent, that is not base64."""
    text = bytes(memoryview(raw)[: 4 * (QUOTED_MAX + 1)]).decode("utf-8", "ignore")
    return f"data={_shown(text)} is not a base64 string."


class _LooseHeader(msgspec.Struct, gc=False):
    value: Raw = Raw(b"")


class _LooseRecord(msgspec.Struct, gc=False):
    key: Raw = Raw(b"")
    value: Raw = Raw(b"")
    headers: Raw = Raw(b"[]")


class _Loose(msgspec.Struct):
    records: list[_LooseRecord]


class _AnyRecords(msgspec.Struct):
    records: Raw | msgspec.UnsetType = msgspec.UNSET
