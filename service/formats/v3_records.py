"""Decoding of Confluent's v3 records to rows: a stream of JSON objects, or one batch of records.

A v3 request may stay open for a day and have any number of objects. ObjectStream splits the request
as its bytes arrive. This takes time linear in the number of bytes, even if they arrive in small
pieces. Each object is then decoded or refused, independently of the others. Pure.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
import pyarrow as pa
from msgspec import Raw

from tidelog.service.formats.json_in import (
    HEADERS_MAX,
    ROWS_MAX,
    TIMESTAMP_MS_MAX,
    BadBody,
    InvalidBody,
    check_headers,
    check_utf8,
    not_base64,
    octets_of_raw,
    one_line,
)
from tidelog.service.formats.json_numbers import NumberTooLarge, check_numbers
from tidelog.service.formats.json_scan import excess_objects
from tidelog.service.formats.schema_refusals import NoSchemaRegistry
from tidelog.service.formats.strict_bodies import StrictBody, unrecognized
from tidelog.storage.codec.record_columns import Headers, Rows, batch_of_rows
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge

OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""ObjectStream refuses a larger object (I10)."""

ENTRIES_MAX = 10
"""Confluent's limit of the entries in a batch."""

DEPTH_MAX = 1000
"""Bound of the depth of nested objects. The decoder's own limit is about the same."""

BATCH_CODE = 42208

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA_TYPES = ("AVRO", "JSONSCHEMA", "PROTOBUF")


class ShownValue(NamedTuple):
    """A key or value in a produce report: the type that the client sent, and the size in bytes."""

    type: str
    size: int


class V3Record(NamedTuple):
    """One record, alone in `rows`. `key` and `value` are None if the client did not send them."""

    rows: Rows
    partition: int | None
    is_json: bool
    key: ShownValue | None
    value: ShownValue | None


class _Data(StrictBody):
    data: Raw = Raw(b"")
    type: str | None = None
    subject: str | None = None
    subject_name_strategy: str | None = None
    schema_id: int | None = None
    schema_version: int | None = None
    schema: str | None = None


class _V3Header(StrictBody, gc=False):
    name: str
    value: Raw = Raw(b"")


class EncodedRecord(StrictBody):
    """A record in a request. The data of its key and value is not decoded yet."""

    id: str | int | None = None  # only in a batch
    partition_id: int | None = None
    headers: Raw = Raw(b"")
    key: _Data | None = None
    value: _Data | None = None
    timestamp: str | None = None


class _Id(msgspec.Struct):
    id: str | int


class _Ids(msgspec.Struct):
    entries: list[_Id]


class _RecordBatch(StrictBody):
    entries: list[Raw]


_record = msgspec.json.Decoder(EncodedRecord).decode
_ids = msgspec.json.Decoder(_Ids).decode
_batch = msgspec.json.Decoder(_RecordBatch).decode
_id = msgspec.json.Decoder(_Id).decode
_string = msgspec.json.Decoder(str | None).decode
_headers = msgspec.json.Decoder(list[_V3Header] | None).decode
_octets = msgspec.json.Decoder(bytes | None).decode


def decode_v3_record(obj: bytes, now_ms: int) -> V3Record:
    """Decode an object of a stream, or an entry of a batch. `now_ms` is the default timestamp.

    Raises BadBody, InvalidBody or NoSchemaRegistry, with Confluent's message if there is one.
    """
    try:
        check_utf8(obj)
        record = _record(obj)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"Bad Request: {unrecognized(one_line(str(error)))}") from error
    return v3_record(record, now_ms)


def v3_record(record: EncodedRecord, now_ms: int) -> V3Record:
    """Decode the data of a record. Raises the errors of `decode_v3_record`."""
    headers = _decoded_headers(record.headers) if record.headers else None
    key, value = _decoded(record.key), _decoded(record.value)
    stamp = now_ms if record.timestamp is None else milliseconds(record.timestamp)
    return V3Record(
        Rows([stamp], [key], [value], [headers] if headers else None),
        record.partition_id,
        _is_json(record.key, key) and _is_json(record.value, value),
        _shown(record.key, key),
        _shown(record.value, value),
    )


def columns_of_many(rows: Rows) -> Rows | pa.RecordBatch:
    """Return many records or headers as columns: lists would hold up the event loop."""
    headers = sum(len(row or ()) for row in rows.headers or ())
    return rows if len(rows) + headers <= ROWS_MAX else batch_of_rows([rows])


def decode_v3_batch(body: bytes, *, entries_max: int = ENTRIES_MAX) -> list[tuple[str, bytes]]:
    """Return (id, bytes for `decode_v3_record`) of each entry of `{"entries": [...]}`.

    If the batch as a whole is wrong, raises BadBody, RecordTooLarge, or InvalidBody (code 42208).
    """
    try:
        check_utf8(body)
        # An entry that is not an object fails here, before memory is taken for all entries.
        count = excess_objects(body, 2, entries_max) or len(_ids(body).entries)
        if count > entries_max:
            raise InvalidBody(f"a batch has 1 to {entries_max} entries, not {count}", BATCH_CODE)
        entries = [(str(_id(entry).id), bytes(entry)) for entry in _batch(body).entries]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"Bad Request: {unrecognized(one_line(str(error)))}") from error
    if not entries:
        raise InvalidBody(f"a batch has 1 to {entries_max} entries, not 0", BATCH_CODE)
    for name, _ in entries:
        if not re.fullmatch(r"[0-9a-zA-Z_-]{1,80}", name):
            raise InvalidBody(
                f"entry id {name[:80]!r} is not 1 to 80 letters, digits, - or _", BATCH_CODE
            )
    if len({name for name, _ in entries}) < len(entries):
        raise InvalidBody("the entries' ids are not distinct", BATCH_CODE)
    return entries


def _decoded(data: _Data | None) -> bytes | None:
    if data is None:
        return None
    if data.type in _SCHEMA_TYPES or (data.type is None and _names_schema(data)):
        raise NoSchemaRegistry("no schema registry: use the types BINARY, JSON or STRING")
    if data.type == "JSON":
        octets = octets_of_raw(data.data)
        try:
            check_numbers(octets or b"")
        except NumberTooLarge as error:
            raise InvalidBody(f"Bad Request: {error}") from error
        return octets
    if data.type == "BINARY":
        return _from_base64(data.data)
    if data.type != "STRING":
        raise BadBody(f"Bad Request: type {str(data.type)[:80]!r} is not BINARY, JSON or STRING")
    try:
        text = _string(data.data) if bytes(data.data) else None
    except msgspec.ValidationError as error:
        raise BadBody("Bad Request: data of type STRING is not a string") from error
    return None if text is None else text.encode()


def _names_schema(data: _Data) -> bool:
    fields = (data.subject, data.schema_id, data.schema_version, data.schema)
    return any(field is not None for field in fields)


def _from_base64(raw: Raw) -> bytes | None:
    try:
        return _octets(raw) if bytes(raw) else None
    except msgspec.ValidationError as error:
        raise BadBody(f"Bad Request: {not_base64(raw)}") from error


def _decoded_headers(raw: Raw) -> Headers:
    check_headers(excess_objects(bytes(raw), 1, HEADERS_MAX))
    try:
        headers = _headers(raw) or []
    except msgspec.ValidationError as error:
        message = one_line(str(error)).replace("`$", "`$.headers")
        raise BadBody(f"Bad Request: {unrecognized(message)}") from error
    check_headers(len(headers))
    return [(header.name, _from_base64(header.value)) for header in headers]


def _is_json(data: _Data | None, octets: bytes | None) -> bool:
    return octets is None or (data is not None and data.type == "JSON")


def _shown(data: _Data | None, octets: bytes | None) -> ShownValue | None:
    return None if data is None else ShownValue(data.type or "", len(octets or b""))


def milliseconds(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadBody(f"Bad Request: timestamp {text[:80]!r} is not an ISO instant") from error
    if moment.tzinfo is None:
        raise BadBody(f"Bad Request: timestamp {text[:80]!r} has no time zone")
    stamp = (moment - _EPOCH) // timedelta(milliseconds=1)
    if not 0 <= stamp <= TIMESTAMP_MS_MAX:
        raise InvalidBody(f"timestamp {text[:80]!r} is not between 1970 and 9999")
    return stamp


# --- concatenated objects

_BRACELESS = rb'(?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+'
# All bytes up to the next brace that is outside of strings, in one match.
_TO_BRACE = re.compile(_BRACELESS + rb"([{}])", re.DOTALL)
# The same inside of an object: whole objects without braces are bytes before the brace.
_OVER_OBJECTS = re.compile(rb"(?:%b\{%b\})*+%b([{}])" % ((_BRACELESS,) * 3), re.DOTALL)
# A whole string, or the start of a string that does not end in these bytes (group 1 is then empty).
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)


class ObjectStream:
    """Splitter of one request's bytes into JSON objects as they arrive.

    Owned by the request, used by one task. The decoder checks the inside of an object; between
    objects only white space is allowed. Each byte is processed a few times at most.
    """

    def __init__(self, *, object_bytes_max: int = OBJECT_BYTES_MAX) -> None:
        self._bytes_max = object_bytes_max
        self._buffer = bytearray()
        self._start = 0  # of the current object
        self._at = 0  # the bytes before this position are scanned
        self._depth = 0
        self._in_string = False
        self._refused: InvalidRequest | None = None

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes of the request, and return the objects that end in them.

        Raises BadBody for bytes that cannot begin an object, and RecordTooLarge for an object over
        the limit. If objects precede the error, this call returns them and the next call raises.
        """
        self._raise_refused()
        self._buffer += piece
        objects: list[bytes] = []
        try:
            self._scan(objects)
        except InvalidRequest as error:
            self._refused = error
            if not objects:
                raise
        del self._buffer[: self._start]
        self._at -= self._start
        self._start = 0
        return objects

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of the object that has not ended."""
        return len(self._buffer)

    def finish(self) -> None:
        """Check the end of the request. Raises BadBody if the request ends inside an object."""
        self._raise_refused()
        if self._buffer.strip():
            raise BadBody("Bad Request: the stream ends inside an object")

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise self._refused

    def _scan(self, objects: list[bytes]) -> None:
        while self._in_string or self._depth or self._begin():
            if self._in_string and not self._skip_string():
                break
            to_brace = _OVER_OBJECTS if self._depth else _TO_BRACE
            brace = to_brace.match(self._buffer, self._at)
            if brace is None:
                self._scan_tail()
                break
            self._at = brace.end()
            self._depth += 1 if brace[1] == b"{" else -1
            if not self._depth:
                self._check_bounds()
                objects.append(bytes(self._buffer[self._start : self._at]))
                self._start = self._at
            elif self._depth > DEPTH_MAX:
                raise BadBody(f"Bad Request: nested deeper than {DEPTH_MAX}")
        self._check_bounds()

    def _begin(self) -> bool:
        """Skip white space before the next object. Return False at the end of the bytes."""
        match = _NO_SPACE.search(self._buffer, self._at)
        self._start = self._at = len(self._buffer) if match is None else match.start()
        if match is not None and match[0] != b"{":
            raise BadBody("Bad Request: expected a JSON object")
        return match is not None

    def _scan_tail(self) -> None:
        """Scan bytes without a further brace, and detect whether they end inside a string."""
        while string := _STRING.search(self._buffer, self._at):
            self._at = string.end()
            if not string[1]:
                self._in_string = True
                return
        self._at = len(self._buffer)

    def _skip_string(self) -> bool:
        string_end = _REST_OF_STRING.match(self._buffer, self._at)
        assert string_end is not None
        self._at = string_end.end()
        self._in_string = not string_end[1]
        return not self._in_string

    def _check_bounds(self) -> None:
        if self._at - self._start > self._bytes_max:
            raise RecordTooLarge(f"an object of the stream is over {self._bytes_max} bytes")
