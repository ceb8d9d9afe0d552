"""The input of `tidelog produce`: options, lines as records, and the count of acknowledged ones."""

import binascii
import contextlib
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Raw
from typer import Option

from tidelog.service.cli.broker_requests import RETRY_FOR_S, RetryOption
from tidelog.service.cli.errors import BadUsage, CommandError
from tidelog.service.cli.output import plural
from tidelog.service.client.producer import Delivered, ProducerOptions
from tidelog.service.client.records import JsonRecord
from tidelog.service.secret_files import why_not_read

INPUT_READ_BYTES = 256 * 1024
IDLE_S = 0.2
"""Maximum time that a read of input blocks, because an interrupt must wait for the read."""
SHOWN_CHARS = 80


class BadLine(CommandError):
    """A line of input that cannot be parsed."""


class Parser(NamedTuple):
    """Parser of lines.

    `record` returns None for a blank line of JSON input. `form` is the text of all options that
    change the records: with an equal `form`, a line gives the same record.
    """

    embedded: str
    record: Callable[[bytes], JsonRecord | None]
    form: str

    @property
    def media_type(self) -> str:
        """The media type of a request with these records."""
        return f"application/vnd.kafka.{self.embedded}.v2+json"


def text_parser(key_separator: str | None, *, is_crlf: bool = False) -> Parser:
    """Return a parser of lines: each is a value, or, with `key_separator`, a key and a value.

    All bytes are valid. With `is_crlf`, a carriage return at the end of a line is not part of it.
    """
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
    """Return a parser of lines: each is a record as JSON, or, with `is_values`, a JSON value.

    Without `has_partitions`, the partition in a record is ignored.
    """
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


class ProduceOptions(NamedTuple):
    """The form of the lines, and of the requests that send them."""

    line_format: Annotated[
        Literal["text", "ndjson"],
        Option(
            "--format",
            "-f",
            help="text: a line is a value, byte for byte; ndjson: a line is a JSON object with "
            "key, value, partition, timestamp (ms), headers: an object of texts, or a list as "
            "`consume --json` prints it, with values in base64",
        ),
    ] = "text"
    values: Annotated[
        bool, Option("--values", help="with ndjson: a line is only a value, of any JSON type")
    ] = False
    embedded: Annotated[
        Literal["json", "text", "binary"],
        Option(help="with ndjson: form of keys and values (binary: base64)"),
    ] = "json"
    key_separator: Annotated[
        str | None, Option(metavar="TEXT", help="with text: separator of key and value")
    ] = None
    partition: Annotated[
        int | None,
        Option("--partition", "-p", min=0, help="partition for records without a partition"),
    ] = None
    ignore_partition: Annotated[
        bool,
        Option(
            "--ignore-partition",
            help="with ndjson: ignore the partition in a line, so that --partition or the key "
            "chooses it, for example for a copy to a topic with another number of partitions",
        ),
    ] = False
    acks: Annotated[
        Literal["all", "1", "0"],
        Option(
            help="the broker answers when the records are in the object store (all), are on the "
            "broker's disk (1), or are validated (0)"
        ),
    ] = "all"
    batch_records: Annotated[
        int, Option(min=1, max=1_000_000, help="maximum records of a request")
    ] = 10_000
    batch_bytes: Annotated[int, Option(min=1, help="approximate maximum bytes of a request")] = (
        1024 * 1024
    )
    in_flight: Annotated[
        int,
        Option(min=1, max=256, help="maximum requests in flight; no two have the same partition"),
    ] = 4
    linger_ms: Annotated[
        int, Option(min=0, max=60_000, help="how many ms a batch waits for more lines")
    ] = 50
    flush_ms: Annotated[
        int | None,
        Option(
            min=0,
            help="how many ms a broker may hold a request to commit it with others, which saves "
            "requests to the store; without it, as the topic's flush.ms says",
        ),
    ] = None
    crlf: Annotated[
        bool, Option("--crlf", help="with text: remove a carriage return at a line's end")
    ] = False
    state: Annotated[
        Path | None,
        Option(
            "--state",
            metavar="FILE",
            help="store in this file how many lines are in the topic, and begin after them: each "
            "line is produced once, also if this command is killed and run again with the same "
            "input. Sends one request at a time",
        ),
    ] = None
    retry_s: RetryOption = None

    def parser(self) -> Parser:
        """Return the parser of lines. Raises BadUsage if an option contradicts the format."""
        for name, is_given, line_format in (
            ("--ignore-partition", self.ignore_partition, "ndjson"),
            ("--values", self.values, "ndjson"),
            ("--key-separator", self.key_separator is not None, "text"),
            ("--crlf", self.crlf, "text"),
            ("--embedded", self.embedded != "json", "ndjson"),
        ):
            if is_given and line_format != self.line_format:
                raise BadUsage(f"{name} needs --format {line_format}")
        if self.state is not None and self.acks == "0":
            raise BadUsage(
                "--state needs --acks all or 1: with 0, no line is known to be in the topic"
            )
        if self.key_separator == "":
            raise BadUsage("--key-separator is empty")
        if self.line_format == "text":
            return text_parser(self.key_separator, is_crlf=self.crlf)
        return json_parser(
            self.embedded, is_values=self.values, has_partitions=not self.ignore_partition
        )

    def of_producer(self, parser: Parser) -> ProducerOptions:
        return ProducerOptions(
            media_type=parser.media_type,
            acks=self.acks,
            linger_ms=self.linger_ms,
            flush_ms=self.flush_ms,
            batch_records=self.batch_records,
            batch_bytes=self.batch_bytes,
            in_flight=self.in_flight,
            # Each lane has a batch in flight, and fills the next one meanwhile.
            buffer_bytes=max(2 * self.in_flight, 4) * max(self.batch_bytes, 1024 * 1024),
            delivery_s=RETRY_FOR_S if self.retry_s is None else self.retry_s,
        )


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


class LineInput(NamedTuple):
    """The lines that one run produces. `parser` is that of the options."""

    topic: str
    source: LineSource
    options: ProduceOptions
    parser: Parser


class ProduceSummary:
    """Counts of acknowledged records of one run."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.input_bytes = 0
        self.batches = 0
        self.retries = 0
        self.seconds = 0.0
        self.ranges: dict[int, tuple[int, int]] = {}
        """First offset and exclusive end offset by partition. It is empty unless `acks` is all."""

    def add(self, placed: Sequence[Delivered], input_bytes: int) -> None:
        """Count one acknowledged request."""
        self.records += len(placed)
        self.input_bytes += input_bytes
        self.batches += 1
        for place in placed:
            if place.offset is not None:
                first, end = self.ranges.get(place.partition, (place.offset, 0))
                wider = (min(first, place.offset), max(end, place.offset + 1))
                self.ranges[place.partition] = wider

    def as_json(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "records": self.records,
            "input_bytes": self.input_bytes,
            "requests": self.batches,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
            "offsets": {
                str(number): {"first": first, "end": end}
                for number, (first, end) in sorted(self.ranges.items())
            },
        }

    def as_text(self) -> str:
        rate = self.records / self.seconds if self.seconds else 0
        again = f", {self.retries} retried" if self.retries else ""
        return (
            f"produced {plural(self.records, 'record')} to {self.topic} in {self.seconds:.1f} s "
            f"({rate:,.0f}/s, {plural(self.batches, 'request')}{again})"
        )
