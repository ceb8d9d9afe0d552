"""Pages of an answer: the encoded records of one partition, also if some do not decode.

`encode_page` encodes each page in the format of the answer.

A client can always read past a record that does not decode. The `on_error` of a request decides
which records the page contains:

    stop   the records before the record that does not decode. The next read begins there and fails.
    skip   all records that decode. The answer has the number of skipped records.
    raw    all records. A key or value that does not decode is null, and a field has its base64.

In format json, a key that is text but not JSON is no error. It becomes a JSON string, and the
record's `key_format` is `text`. Most keys of Kafka's clients are such texts.

In formats avro, jsonschema and protobuf, a value decodes only with a schema registry, which tidelog
does not have. So only null decodes. A key without the registry's framing is no error. It becomes
base64, as in Karapace's answers. Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.service.formats import json_out, json_text
from tidelog.service.formats.json_in import Format
from tidelog.service.formats.json_text import ReadFormat, RecordPart, Undecodable
from tidelog.service.http.media_types import SCHEMA_FORMATS
from tidelog.storage.codec.record_columns import concat
from tidelog.storage.core.model import TopicPartition

OnError: TypeAlias = Literal["stop", "skip", "raw"]
ON_ERROR: tuple[OnError, ...] = get_args(OnError)

_TEXT_KEY = b',"key_format":"text"'
_FRAMING_MAGIC = b"\x00"
_FRAMING_BYTES = 5
"""The registry's framing: one byte of magic and four bytes of the schema's id, before the data."""


class RecordPage(msgspec.Struct, frozen=True, gc=False):
    """Encoded records of one partition.

    `stopped` is the error of the record before which the page ends, because that record does not
    decode. `wrong` is the number of records that do not decode, and `first_wrong` is the offset of
    the first of these records. With `stop`, `wrong` is at most 1.
    """

    topic: str
    partition: int
    body: bytes
    records: int
    on_error: OnError = "stop"
    stopped: Undecodable | None = None
    wrong: int = 0
    first_wrong: int = 0

    def end(self, next_offset: int) -> int:
        """Return the offset at which the next read begins.

        If the page stopped before a record, it is the offset of this record, else `next_offset`.
        """
        return next_offset if self.stopped is None else self.stopped.offset

    @property
    def skipped(self) -> int:
        """Return the number of records that the page skips."""
        return self.wrong if self.on_error == "skip" else 0


def encode_page(
    batches: Sequence[pa.RecordBatch],
    topic: str,
    partition: int,
    fmt: ReadFormat,
    *,
    is_json: Sequence[bool],
    framing: json_out.Framing = "array",
    on_error: OnError = "stop",
) -> RecordPage:
    """Encode records as `json_out.encode_records` does.

    `on_error` decides about records that do not decode. A page with such a record, or in a format
    with schemas, costs 1 to 2 us more for each of its records.
    """
    records = sum(map(len, batches))
    if fmt not in SCHEMA_FORMATS or not records:
        try:
            body = json_out.encode_records(
                batches, topic, partition, _written(fmt), is_json=is_json, framing=framing
            )
            return RecordPage(topic, partition, body, records)
        except Undecodable:
            pass
    mixed_records = _Mixed(batches, is_json, TopicPartition(topic, partition), fmt, on_error)
    return mixed_records.page(framing)


def _written(fmt: ReadFormat) -> Format:
    """Return the format in which json_out writes.

    Keys and values in a format with schemas become null and base64, which are JSON.
    """
    return "json" if fmt in SCHEMA_FORMATS else cast("Format", fmt)


def check_first(
    batches: Iterable[pa.RecordBatch],
    partition: TopicPartition,
    fmt: ReadFormat,
    *,
    is_json: Iterable[bool],
) -> None:
    """Raise Undecodable if a page of these records would stop before its first record."""
    if fmt == "binary":
        return
    for batch, is_checked in zip(batches, is_json, strict=True):
        if not batch.num_rows:
            continue
        if fmt == "json" and is_checked:
            return
        key, value = (batch.column(part)[0].as_py() for part in ("key", "value"))
        is_wrong_key = json_text.why_not(fmt, key) and _other_key(fmt, key) is None
        if is_wrong_key or json_text.why_not(fmt, value):
            raise _Mixed([batch.slice(0, 1)], [False], partition, fmt, "stop").error()
        return


def headers_of(
    pages: Iterable[RecordPage], failure: Exception | None = None
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of an answer with these pages.

    They name the number of skipped records, the first skipped record, and the first record at which
    a page stopped. `failure` is the error of a partition without a page.
    """
    skipped, first_skipped = 0, ""
    stopped = failure if isinstance(failure, Undecodable) else None
    for page in pages:
        if page.skipped and not skipped:
            first_skipped = f"{page.topic}-{page.partition}@{page.first_wrong}"
        skipped += page.skipped
        stopped = stopped or page.stopped
    headers: list[tuple[bytes, bytes]] = []
    if skipped:
        headers.append((b"tidelog-skipped", b"%d" % skipped))
        headers.append((b"tidelog-first-skipped", first_skipped.encode()))
    if stopped is not None:
        headers.append((b"tidelog-undecodable", f"{stopped.where}@{stopped.offset}".encode()))
    return tuple(headers)


def _other_key(fmt: ReadFormat, octets: bytes) -> bytes | None:
    """Return the JSON string of a key that does not decode in this format, if that is no error.

    If it is an error, return None.
    """
    if fmt in SCHEMA_FORMATS:
        is_framed = octets.startswith(_FRAMING_MAGIC) and len(octets) >= _FRAMING_BYTES
        return None if is_framed else json_text.to_json(octets)  # base64
    return None if json_text.why_not("text", octets) else json_text.to_json(octets.decode())


class _Mixed:
    """One batch of records, some of which may not decode.

    `wrong` has an item for each row that does not decode. It maps the number of the row to the part
    that does not decode: `value`, or `key` if the key or both do not decode.
    """

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        is_json: Sequence[bool],
        partition: TopicPartition,
        fmt: ReadFormat,
        on_error: OnError,
    ) -> None:
        self._batch = concat(list(batches))
        self._on_error = on_error
        self._where = partition
        self._fmt = fmt
        self._extra = [b""] * self._batch.num_rows
        self.wrong: dict[int, RecordPart] = {}
        unchecked = np.ones(self._batch.num_rows, bool)
        if fmt == "json":
            unchecked = ~np.repeat(np.array(is_json, bool), list(map(len, batches)))
        rows: list[int] = np.flatnonzero(unchecked).tolist()
        columns = [
            self._part(name, rows) if name in ("key", "value") else self._batch.column(name)
            for name in self._batch.schema.names
        ]
        self._decodable = pa.RecordBatch.from_arrays(columns, schema=self._batch.schema)

    def _part(self, part: Any, rows: list[int]) -> Any:
        """Return the keys or values as a column.

        `rows` are the rows to check. There, a value that does not decode becomes null, and a key
        that does not decode becomes the result of `_other_key`.
        """
        column = self._batch.column(part)
        if json_text.all_decode(self._fmt, column):
            return column
        octets: list[bytes | None] = column.to_pylist()
        for row in rows:
            item = octets[row]
            try:
                if item is not None:
                    json_text.check(self._fmt, item)
            except json_text.NOT_DECODED:
                assert item is not None, "null decodes in every format"
                octets[row] = _other_key(self._fmt, item) if part == "key" else None
                if octets[row] is not None:
                    self._extra[row] += _TEXT_KEY if self._fmt == "json" else b""
                    continue
                if self._on_error == "raw":
                    self._extra[row] += b',"%b_base64":%b' % (
                        part.encode(),
                        json_text.to_json(item),
                    )
                self.wrong.setdefault(row, part)
        return pa.array(octets, pa.binary())

    def error(self) -> Undecodable:
        """Return the error for the first record that does not decode."""
        row = min(self.wrong)
        part = self.wrong[row]
        why = json_text.why_not(self._fmt, self._batch.column(part)[row].as_py())
        return Undecodable(self._where, self._fmt, part, self._offset(row), why)

    def _offset(self, row: int) -> int:
        offset: int = self._batch.column("offset")[row].as_py()
        return offset

    def page(self, framing: json_out.Framing) -> RecordPage:
        """Encode the records, as `on_error` says."""
        on_error = self._on_error
        batch, extra = self._decodable, pa.array(self._extra, pa.binary())
        first = min(self.wrong, default=batch.num_rows)
        stopped = None
        if self.wrong and on_error == "stop":
            batch, extra, stopped = batch.slice(0, first), extra[:first], self.error()
        elif self.wrong and on_error == "skip":
            mask = np.ones(batch.num_rows, bool)
            mask[list(self.wrong)] = False
            batch, extra = batch.filter(pa.array(mask)), extra.filter(pa.array(mask))
        body = json_out.encode_records(
            [batch],
            *(self._where.topic, self._where.partition, _written(self._fmt)),
            is_json=[True],
            framing=framing,
            extra=extra,
        )
        wrong = len(self.wrong) if stopped is None else 1
        first_wrong = self._offset(first) if wrong else 0
        return RecordPage(*self._where, body, batch.num_rows, on_error, stopped, wrong, first_wrong)
