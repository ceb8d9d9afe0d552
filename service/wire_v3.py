"""Records of Confluent's v3 API: concatenated JSON objects, and batches of them, to rows.

A v3 request may stay open for a day and hold any number of objects, so it is cut up as its bytes
arrive (ObjectStream), in time linear in them however small the pieces; each object is then decoded
by itself and fails by itself. Pure.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
from msgspec import Raw

from service.wire_in import (
    TIMESTAMP_MS_MAX,
    BadBody,
    InvalidBody,
    check_objects,
    not_base64,
    octets_of_raw,
    one_line,
)
from storage.chunk import Headers, Rows
from storage.errors import InvalidRequest, RecordTooLarge

OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""One object of a stream is refused above this (I10)."""

ENTRIES_MAX = 10
"""Confluent's bound of a batch."""

HEADERS_MAX = 10_000
"""Of a record (I10): each takes 100 bytes however short it is."""

DEPTH_MAX = 1000
"""Objects in objects; the decoder's own bound is about there."""

BATCH_CODE = 42208

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA_TYPES = ("AVRO", "JSONSCHEMA", "PROTOBUF")


class NoSchemaRegistry(InvalidRequest):
    """Data with a schema: there is nobody to look it up."""

    status = 408
    code = 40801


class Shown(NamedTuple):
    """What a report says of a key or value: its type as it was given, its size in bytes."""

    type: str
    size: int


class V3Record(NamedTuple):
    """One record; `rows` holds it alone. `key` and `value` are None when they were not given."""

    rows: Rows
    partition: int | None
    is_json: bool
    key: Shown | None
    value: Shown | None


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    data: Raw = Raw(b"")
    type: str | None = None
    subject: str | None = None
    subject_name_strategy: str | None = None
    schema_id: int | None = None
    schema_version: int | None = None
    schema: str | None = None


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: Raw = Raw(b"")


class Said(msgspec.Struct, forbid_unknown_fields=True):
    """A record as it is sent, its data not looked at yet."""

    id: str | int | None = None  # of a batch's entry
    partition_id: int | None = None
    headers: list[_Header] | None = None
    key: _Data | None = None
    value: _Data | None = None
    timestamp: str | None = None


class _Id(msgspec.Struct):
    id: str | int


class _Ids(msgspec.Struct):
    entries: list[_Id]


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    entries: list[Raw]


_record = msgspec.json.Decoder(Said).decode
_ids = msgspec.json.Decoder(_Ids).decode
_batch = msgspec.json.Decoder(_Batch).decode
_id = msgspec.json.Decoder(_Id).decode
_string = msgspec.json.Decoder(str | None).decode
_octets = msgspec.json.Decoder(bytes | None).decode


def decode_v3_record(obj: bytes, now_ms: int) -> V3Record:
    """One object of a stream or entry of a batch; without a timestamp it gets `now_ms`.

    Raises BadBody, InvalidBody or NoSchemaRegistry, in Confluent's words where it has any.
    """
    try:
        if not obj.isascii():
            str(obj, "utf-8")
        record = _record(obj)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"Bad Request: {one_line(str(error))}") from error
    return v3_record(record, now_ms)


def v3_record(record: Said, now_ms: int) -> V3Record:
    """The record that was said; raises as `decode_v3_record` does."""
    if len(record.headers or ()) > HEADERS_MAX:
        raise InvalidBody(f"a record has {HEADERS_MAX} headers at most")
    key, value = _decoded(record.key), _decoded(record.value)
    stamp = now_ms if record.timestamp is None else milliseconds(record.timestamp)
    return V3Record(
        Rows([stamp], [key], [value], [_headers(record.headers)] if record.headers else None),
        record.partition_id,
        _is_json(record.key, key) and _is_json(record.value, value),
        _shown(record.key, key),
        _shown(record.value, value),
    )


def decode_v3_batch(body: bytes, *, entries_max: int = ENTRIES_MAX) -> list[tuple[str, bytes]]:
    """(id, bytes for `decode_v3_record`) of each entry of `{"entries": [...]}`.

    A batch that is wrong as a whole raises BadBody, or InvalidBody with code 42208.
    """
    check_objects(body)
    try:
        if not body.isascii():
            str(body, "utf-8")
        # Entries that are no objects end this one at once, and a list of all there are does not.
        if (count := len(_ids(body).entries)) > entries_max:
            raise InvalidBody(f"a batch has 1 to {entries_max} entries, not {count}", BATCH_CODE)
        entries = [(str(_id(entry).id), bytes(entry)) for entry in _batch(body).entries]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"Bad Request: {one_line(str(error))}") from error
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
        return octets_of_raw(data.data)
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
    given = (data.subject, data.schema_id, data.schema_version, data.schema)
    return any(each is not None for each in given)


def _from_base64(raw: Raw) -> bytes | None:
    try:
        return _octets(raw) if bytes(raw) else None
    except msgspec.ValidationError as error:
        raise BadBody(f"Bad Request: {not_base64(raw)}") from error


def _headers(headers: list[_Header]) -> Headers:
    return [(header.name, _from_base64(header.value)) for header in headers]


def _is_json(data: _Data | None, octets: bytes | None) -> bool:
    return octets is None or (data is not None and data.type == "JSON")


def _shown(data: _Data | None, octets: bytes | None) -> Shown | None:
    return None if data is None else Shown(data.type or "", len(octets or b""))


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

# Everything up to a brace outside of strings, in one match.
_TO_BRACE = re.compile(rb'(?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+([{}])', re.DOTALL)
# A string whole, or up to where the bytes end: then group 1 is empty.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)


class ObjectStream:
    """Cuts the bytes of one request into JSON objects as they arrive.

    Owned by the request, lives as long, one task. Whether an object is JSON inside is for its
    decoder; what stands between objects must be white space. Every byte is looked at once.
    """

    def __init__(self, *, object_bytes_max: int = OBJECT_BYTES_MAX) -> None:
        self._bytes_max = object_bytes_max
        self._buffer = bytearray()
        self._start = 0  # of the object at hand
        self._at = 0  # everything before is seen
        self._depth = 0
        self._in_string = False
        self._refused: InvalidRequest | None = None

    def feed(self, piece: bytes) -> list[bytes]:
        """The objects that end in `piece`.

        Raises BadBody at what cannot begin an object, RecordTooLarge at one that is over the bound;
        if there are objects before it, they are returned and the next call raises.
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

    def finish(self) -> None:
        """The request has ended; raises BadBody if it did so inside an object."""
        self._raise_refused()
        if self._buffer.strip():
            raise BadBody("Bad Request: the stream ends inside an object")

    @property
    def rest(self) -> bytes:
        """What has come of an object that is not complete."""
        return bytes(self._buffer)

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise self._refused

    def _scan(self, objects: list[bytes]) -> None:
        while self._in_string or self._depth or self._begin():
            if self._in_string and not self._skip_string():
                break
            brace = _TO_BRACE.match(self._buffer, self._at)
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
        """Skip white space to where an object begins; False if there is no more."""
        found = _NO_SPACE.search(self._buffer, self._at)
        self._start = self._at = len(self._buffer) if found is None else found.start()
        if found is not None and found[0] != b"{":
            raise BadBody("Bad Request: expected a JSON object")
        return found is not None

    def _scan_tail(self) -> None:
        """No brace is left: are we in a string where the bytes end?"""
        while string := _STRING.search(self._buffer, self._at):
            self._at = string.end()
            if not string[1]:
                self._in_string = True
                return
        self._at = len(self._buffer)

    def _skip_string(self) -> bool:
        rest = _REST_OF_STRING.match(self._buffer, self._at)
        assert rest is not None
        self._at = rest.end()
        self._in_string = not rest[1]
        return not self._in_string

    def _check_bounds(self) -> None:
        if self._at - self._start > self._bytes_max:
            raise RecordTooLarge(f"an object of the stream is over {self._bytes_max} bytes")


def split_v3_stream(
    buffer: bytes, *, object_bytes_max: int = OBJECT_BYTES_MAX
) -> tuple[list[bytes], bytes]:
    """The complete objects of a body that is all there, and what follows the last of them.

    A body that arrives in pieces is for ObjectStream, which does not begin again with each.
    """
    stream = ObjectStream(object_bytes_max=object_bytes_max)
    objects = stream.feed(buffer)
    return objects, stream.rest
