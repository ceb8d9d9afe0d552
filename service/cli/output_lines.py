"""Lines of output from the records that a broker sends, and their output by a thread; `--on-error`.

The broker converts keys and values to the format of the output. If a key or value does not decode,
the broker sends its bytes in base64, in a field of another name (`on_error=raw`). So such a record
stops no other record: this module does with it what `--on-error` says.

If the reader of the pipe blocks, only the thread waits: the command sends the heartbeats of its
group, and SIGTERM ends it. The thread is a daemon and writes by `os.write`, so the process can end
during a write.
"""

import asyncio
import binascii
import io
import json
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Raw

from tidelog.service.cli.errors import CommandError
from tidelog.service.cli.output import output_error, warn
from tidelog.service.client.consumer import DeadLetters
from tidelog.service.client.errors import UndecodableRecord
from tidelog.service.client.records import Header, PartitionPage, ReadFormat, Record

LAST_WRITE_S = 0.1
Job: TypeAlias = tuple[bytes, asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class LineForm(NamedTuple):
    """The form of a line: JSON of the record, or its key, a separator and its value.

    `embedded` is the form of keys and values: json, text or binary.
    """

    embedded: str
    is_ndjson: bool = False
    key_separator: str | None = None


class _RecordFields(msgspec.Struct):
    topic: str
    partition: int
    offset: int
    key: Raw = Raw(b"null")
    value: Raw = Raw(b"null")
    timestamp: int | None = None
    headers: list[Header] = []
    key_base64: bytes | None = None
    value_base64: bytes | None = None


class Line(_RecordFields):
    """A record as a broker sends it.

    `key_base64` has the bytes of a key that does not decode, `value_base64` those of a value.
    `text` is the JSON of the whole record, on one line.
    """

    text: bytes = b""

    @property
    def is_undecodable(self) -> bool:
        return self.key_base64 is not None or self.value_base64 is not None


_decode = msgspec.json.Decoder(Line).decode
_split = msgspec.json.Decoder(list[Raw]).decode


def _line(text: bytes) -> Line:
    line = _decode(text)
    line.text = text
    return line


def _lines(body: bytes) -> list[Line]:
    return [_line(text) for text in body.removesuffix(b"\n").split(b"\n")] if body else []


def _array(body: bytes) -> list[Line]:
    return [_line(_on_one_line(bytes(text))) for text in _split(body)]


def _on_one_line(record: bytes) -> bytes:
    """Remove line breaks that a producer may have sent between the tokens of a record's JSON."""
    return msgspec.json.format(record, indent=-1) if b"\n" in record or b"\r" in record else record


def read_format(embedded: str) -> ReadFormat:
    """Return the format of reads for an output format: json, text or binary."""
    return ReadFormat(embedded, "application/x-ndjson", _lines, _array)


class UndecodableLine(CommandError):
    """A record does not decode, and `--on-error stop` ends its partition."""


class ShownLines(NamedTuple):
    """Lines to print, and the offset after those that are done.

    `failure` is the error of the record at that offset.
    """

    lines: list[bytes]
    next_offset: int
    failure: UndecodableLine | None


class LinePrinter:
    """Turns pages into lines of output, by the options of the command. Counts skipped records."""

    def __init__(
        self, form: LineForm, on_error: str, dead_letters: DeadLetters | None = None
    ) -> None:
        self._embedded = form.embedded
        self._is_ndjson = form.is_ndjson
        self._separator = None if form.key_separator is None else form.key_separator.encode()
        self._on_error = on_error
        self._dead_letters = dead_letters
        self.skipped = 0
        self._first = ""

    async def shown(
        self, page: PartitionPage, count_max: int | None, end: int | None = None
    ) -> ShownLines:
        """Return the lines of at most `count_max` records of a page, below offset `end`.

        Send dead letters; they are acknowledged when this returns. Raises ClientError.
        """
        lines: list[bytes] = []
        for record in page.records:
            if end is not None and record.offset >= end:
                return ShownLines(lines, end, None)
            if count_max is not None and len(lines) >= count_max:
                return ShownLines(lines, record.offset, None)
            if not record.is_undecodable or self._on_error == "raw":
                lines.append(self._text(record))
            elif self._on_error == "escape":
                lines.append(self._text(_escaped(record)))
            elif self._on_error == "stop":
                return ShownLines(lines, record.offset, self._failure(record))
            else:
                if self._dead_letters is not None:
                    await self._dead_letters(*self._dead_letter(record))
                self.skipped += 1
                name = f"{record.topic}-{record.partition}@{record.offset}"
                self._first = self._first or name
        return ShownLines(lines, page.next_offset, None)

    def show_skipped(self) -> None:
        """If records were skipped, print their number and the first one on stderr."""
        if self._dead_letters is not None and self.skipped:
            topic = self._dead_letters.topic
            subject = "records that do not decode"
            warn(f"{subject}, sent to topic {topic}: {self.skipped}, first {self._first}")
        elif self.skipped:
            warn(f"skipped records that do not decode: {self.skipped}, first {self._first}")

    def _text(self, line: Line) -> bytes:
        if self._is_ndjson:
            return line.text
        value = self._part(line.value, line.value_base64)
        if self._separator is None:
            return value
        return self._part(line.key, line.key_base64) + self._separator + value

    def _part(self, text: Raw, octets: bytes | None) -> bytes:
        if octets is not None:
            return binascii.b2a_base64(octets, newline=False)
        return _PARTS[self._embedded](text)

    def _failure(self, line: Line) -> UndecodableLine:
        other = "binary" if self._embedded == "text" else "text or binary"
        return UndecodableLine(
            f"partition {line.topic}-{line.partition}, offset {line.offset}: {self._why(line)} "
            f"(try --format {other}, --on-error skip, raw or escape, or --dead-letter TOPIC)"
        )

    def _why(self, line: Line) -> str:
        part = "value" if line.value_base64 is not None else "key"
        return f"the {part} is not {'UTF-8 text' if self._embedded == 'text' else 'JSON'}"

    def _dead_letter(self, line: Line) -> tuple[Record, UndecodableRecord]:
        place = line.topic, line.partition, line.offset
        record = Record(
            *place,
            key=_octets(self._embedded, line.key, line.key_base64),
            value=_octets(self._embedded, line.value, line.value_base64),
            timestamp_ms=line.timestamp,
            headers=line.headers,
        )
        return record, UndecodableRecord(*place, self._why(line))


def _octets(embedded: str, text: Raw, octets: bytes | None) -> bytes | None:
    """Return the bytes of a key or value as they are in the log."""
    if octets is not None:
        return octets
    if bytes(text) == b"null":
        return None
    if embedded == "text" or (embedded == "json" and bytes(text).startswith(b'"')):
        return msgspec.json.decode(text, type=str).encode()
    return bytes(text)


def _escaped(line: Line) -> Line:
    """Return the record with escapes such as \\xff in place of the bytes that are not UTF-8."""
    fields = json.loads(line.text)
    for part in ("key", "value"):
        octets = fields.pop(f"{part}_base64", None)
        if octets is not None:
            decoded = binascii.a2b_base64(octets).decode("utf-8", "backslashreplace")
            fields[part] = decoded
    return _line(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())


def _unquoted(text: Raw) -> bytes:
    """Return the text of a JSON string; null is `null`."""
    content = msgspec.json.decode(text, type=str | None)
    return b"null" if content is None else content.encode()


_PARTS: dict[str, Callable[[Raw], bytes]] = {
    "json": bytes,
    "text": _unquoted,
    "binary": _unquoted,  # base64 needs no escapes
}


def joined(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


class LineOutput:
    """stdout of one command. `is_written` means that the last write is complete."""

    def __init__(self) -> None:
        self.is_written = True
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def write(self, octets: bytes) -> None:
        """Write all bytes.

        Raises BrokenOutput, CommandError. If the task is cancelled, wait LAST_WRITE_S for the
        write, so that the caller knows whether the records are printed.
        """
        if not octets:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidelog-output", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._jobs.put((octets, loop, written))
        self.is_written = False
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait({written}, timeout=LAST_WRITE_S)
            self.is_written = written.done() and written.exception() is None
            raise
        self.is_written = True

    def _run(self) -> None:
        while True:
            octets, loop, written = self._jobs.get()
            error: Exception | None = None
            try:
                _write(octets)
            except OSError as failed:
                error = output_error(failed)
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(_settle, written, error)


def _write(octets: bytes) -> None:
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:  # an embedding program has replaced stdout
        sys.stdout.buffer.write(octets)
        return
    remaining_octets = memoryview(octets)
    while remaining_octets:
        try:
            remaining_octets = remaining_octets[os.write(descriptor, remaining_octets) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [descriptor], [])


def _settle(written: "asyncio.Future[None]", error: Exception | None) -> None:
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
