"""Lines of input become records of a request's body: bytes in, bytes out, and each record's key."""

import binascii
import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw

from service.cli_results import BadUsage, CommandError

READ_BYTES = 256 * 1024
SHOWN_CHARS = 80


class Record(NamedTuple):
    """One record: the members of its JSON object but `partition`, and what decides on that."""

    members: bytes
    key: bytes | None
    partition: int | None


class BadLine(CommandError):
    """A line of input that is no record."""


class Parser(NamedTuple):
    """Makes records of lines; None for a line that is none (blank, in JSON)."""

    embedded: str
    record: Callable[[bytes], Record | None]


def text_parser(key_separator: str | None) -> Parser:
    """A line is a value, or a key and a value. Bytes are kept as they are, whatever they encode."""
    separator = None if key_separator is None else key_separator.encode()

    def record(line: bytes) -> Record:
        line = line.removesuffix(b"\r")
        if separator is None:
            return Record(b'"value":"%b"' % _base64(line), None, None)
        key, found, value = line.partition(separator)
        if not found:
            raise BadLine(f"no {key_separator!r} in {_shown(line)}")
        return Record(b'"key":"%b","value":"%b"' % (_base64(key), _base64(value)), key, None)

    return Parser("binary", record)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A record as `consume --json` prints it; topic and offset are of the log it came from."""

    key: Raw = Raw(b"")
    value: Raw = Raw(b"")
    partition: int | None = None
    timestamp: int | None = None
    headers: Raw = Raw(b"")
    topic: Raw = Raw(b"")
    offset: Raw = Raw(b"")


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_value = msgspec.json.Decoder(Raw).decode


def json_parser(embedded: str, *, is_values: bool) -> Parser:
    """A line is a record's JSON object or, with `is_values`, a JSON value."""
    return Parser(embedded, _json_value if is_values else _json_record(_KEYS[embedded]))


def _json_value(line: bytes) -> Record | None:
    if not line.strip():
        return None
    try:
        return Record(b'"value":%b' % bytes(_decode_value(line)), None, None)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}: {_shown(line)}") from None


def _json_record(octets: Callable[[bytes], bytes]) -> Callable[[bytes], Record | None]:
    def record(line: bytes) -> Record | None:
        if not line.strip():
            return None
        try:
            said = _decode_line(line)
            key_text = bytes(said.key)
            key = None if key_text in {b"", b"null"} else octets(key_text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadLine(f"not a record: {error}: {_shown(line)}") from None
        members = [b'"key":' + key_text] if key_text else []
        members.append(b'"value":' + (bytes(said.value) or b"null"))
        if said.timestamp is not None:
            members.append(b'"timestamp":%d' % said.timestamp)
        if said.headers:
            members.append(b'"headers":' + bytes(said.headers))
        return Record(b",".join(members), key, said.partition)

    return record


_KEYS: dict[str, Callable[[bytes], bytes]] = {
    "json": lambda text: text,
    "text": lambda text: msgspec.json.decode(text, type=str).encode(),
    "binary": lambda text: msgspec.json.decode(text, type=bytes),
}
"""The octets of a key, which is what partitions are chosen by, from its JSON."""


def _base64(octets: bytes) -> bytes:
    return binascii.b2a_base64(octets, newline=False)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


class Source(NamedTuple):
    """Where lines come from; `size` is None when nobody knows before the end."""

    descriptor: int
    size: int | None

    def read(self, wait_s: float) -> bytes | None:
        """What is there; None when nothing comes in time, empty at the end."""
        ready, _, _ = select.select([self.descriptor], [], [], wait_s)
        return os.read(self.descriptor, READ_BYTES) if ready else None


@contextlib.contextmanager
def opened(file: str) -> Iterator[Source]:
    """The file, or stdin for `-`."""
    if file == "-":
        yield Source(sys.stdin.fileno(), None)
        return
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise BadUsage(f"cannot read {file}: {error.strerror}") from None
    try:
        yield Source(descriptor, os.fstat(descriptor).st_size or None)
    finally:
        os.close(descriptor)
