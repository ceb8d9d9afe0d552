"""Parse lines of input into records of a produce request."""

import binascii
import contextlib
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw

from tidelog.service.cli.results import BadUsage, CommandError
from tidelog.service.client.records import JsonRecord
from tidelog.service.secret_files import why_not_read

INPUT_READ_BYTES = 256 * 1024
SHOWN_CHARS = 80


class BadLine(CommandError):
    """A line of input that cannot be parsed."""


class Parser(NamedTuple):
    """Parser of lines. `record` returns None for a blank line of JSON input. `form` is the text of
    all options that change the records: with an equal `form`, a line gives the same record."""

    embedded: str
    record: Callable[[bytes], JsonRecord | None]
    form: str


def text_parser(key_separator: str | None, *, is_crlf: bool = False) -> Parser:
    """Return a parser of lines. A line is a value, or, with `key_separator`, a key and a value. All
    bytes are valid. With `is_crlf`, a carriage return at the end of a line is not part of it."""
    separator = None if key_separator is None else key_separator.encode()

    def record(line: bytes) -> JsonRecord:
        if is_crlf:
            line = line.removesuffix(b"\r")
        if separator is None:
            return JsonRecord(b'"value":"%b"' % _base64(line), None, None)
        key, delimiter, value = line.partition(separator)
        if not delimiter:
            raise BadLine(f"no key separator {key_separator!r} in {_shown(line)}")
        return JsonRecord(b'"key":"%b","value":"%b"' % (_base64(key), _base64(value)), key, None)

    return Parser("binary", record, f"text {key_separator!r} {is_crlf}")


class _LineHeader(msgspec.Struct, forbid_unknown_fields=True):
    """A header of a record. The value is base64."""

    key: str
    value: bytes | None = None


class _InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """A record as `consume --json` prints it; `topic` and `offset` are ignored."""

    key: Raw = Raw(b"")
    value: Raw = Raw(b"")
    partition: int | None = None
    timestamp: int | None = None
    headers: Raw = Raw(b"")
    topic: Raw = Raw(b"")
    offset: Raw = Raw(b"")


_decode_line = msgspec.json.Decoder(_InputLine).decode
_decode_headers = msgspec.json.Decoder(list[_LineHeader] | dict[str, str | None] | None).decode
_decode_value = msgspec.json.Decoder(Raw).decode


def json_parser(embedded: str, *, is_values: bool, has_partitions: bool = True) -> Parser:
    """Return a parser of lines. A line is a record as JSON, or, with `is_values`, a JSON value.
    Without `has_partitions`, the partition in a record is ignored."""
    record = _json_value if is_values else _json_record(_KEYS[embedded], has_partitions)
    form = f"ndjson {embedded} {is_values}" + ("" if has_partitions else " without partitions")
    return Parser(embedded, record, form)


def _json_value(line: bytes) -> JsonRecord | None:
    if not line.strip():
        return None
    try:
        return JsonRecord(b'"value":%b' % bytes(_decode_value(line)), None, None)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}: {_shown(line)}") from None


def _json_record(
    octets: Callable[[bytes], bytes], has_partitions: bool
) -> Callable[[bytes], JsonRecord | None]:
    def record(line: bytes) -> JsonRecord | None:
        if not line.strip():
            return None
        try:
            parsed = _decode_line(line)
            key_text = bytes(parsed.key)
            key = None if key_text in {b"", b"null"} else octets(key_text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadLine(f"not a record: {error}: {_shown(line)}") from None
        members = [b'"key":' + key_text] if key_text else []
        members.append(b'"value":' + (bytes(parsed.value) or b"null"))
        if parsed.timestamp is not None:
            members.append(b'"timestamp":%d' % parsed.timestamp)
        if parsed.headers:
            members.append(b'"headers":' + _headers(parsed.headers, line))
        return JsonRecord(b",".join(members), key, parsed.partition if has_partitions else None)

    return record


def _headers(headers: Raw, line: bytes) -> bytes:
    """Return the headers of a record as the broker takes them."""
    try:
        decoded_headers = _decode_headers(headers)
    except (msgspec.MsgspecError, RecursionError):
        raise BadLine(
            "not a record: headers are an object of texts, or have the form "
            f'[{{"key": NAME, "value": BASE64}}]: {_shown(line)}'
        ) from None
    if not isinstance(decoded_headers, dict):
        return bytes(headers)
    return msgspec.json.encode(
        [
            _LineHeader(name, None if value is None else value.encode())
            for name, value in decoded_headers.items()
        ]
    )


_KEYS: dict[str, Callable[[bytes], bytes]] = {
    "json": lambda text: text,
    "text": lambda text: msgspec.json.decode(text, type=str).encode(),
    "binary": lambda text: msgspec.json.decode(text, type=bytes),
}
"""Functions from the JSON of a key to its bytes; the hash of the bytes selects the partition."""


def _base64(octets: bytes) -> bytes:
    return binascii.b2a_base64(octets, newline=False)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


class LineSource(NamedTuple):
    """An open input; `size` is None if it is unknown before the end."""

    descriptor: int
    size: int | None

    def read(self, wait_s: float) -> bytes | None:
        """Read the available bytes. Return None after `wait_s` without input, `b""` at the end."""
        ready, _, _ = select.select([self.descriptor], [], [], wait_s)
        try:
            return os.read(self.descriptor, INPUT_READ_BYTES) if ready else None
        except OSError as error:
            raise CommandError(f"the input cannot be read: {why_not_read(error)}") from None


@contextlib.contextmanager
def opened(file: str) -> Iterator[LineSource]:
    """Open the file, or stdin for `-`."""
    if file == "-":
        yield LineSource(sys.stdin.fileno(), None)
        return
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise BadUsage(f"cannot read {file}: {why_not_read(error)}") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):  # a folder can be opened, but not read
            raise BadUsage(f"cannot read {file}: it is a folder")
        yield LineSource(descriptor, status.st_size or None)
    finally:
        os.close(descriptor)
