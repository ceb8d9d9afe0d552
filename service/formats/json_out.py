"""Encoding of answers: records as JSON arrays, NDJSON, server-sent events; and produce reports.

Arrow joins whole columns at once. This takes 100 to 200 ns a record, and makes no Python objects.
But a join takes at least ~50 us. So records of a small batch are encoded one by one, to the same
bytes. Pure.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.service.formats import json_text
from tidelog.service.formats.json_in import Format
from tidelog.service.formats.json_text import EMPTY, decimal, scalar
from tidelog.storage.codec.chunk import timestamps_us, weight, weight_before
from tidelog.storage.codec.partitioner import RecordPartitions, tally
from tidelog.storage.codec.record_columns import US_PER_MS, concat
from tidelog.storage.core.model import AppendedRange, TopicPartition

FEW = 12
"""If a batch has at most this number of records, they are encoded one by one. Measured: both ways
take equal time at ~20 records."""

PART_BYTES = 512 * 1024
"""Weight of texts that are encoded at a time."""

FEW_REPORTS = 64
"""Up to this number, produce reports of several partitions are encoded one by one."""
FEW_OFFSETS = 3000
"""Up to this number of consecutive offsets, a join without Arrow is faster: 9 us instead of 35 us
for 1,000."""


class _Frame(NamedTuple):
    """The text around and between records.

    If `is_lines`, a line break ends a record, so a record must contain none. If `has_id`, the
    offset comes first, as the event's id.
    """

    opening: str
    before: str
    after: str
    closing: str
    is_lines: bool
    has_id: bool = False


_FRAMES = {
    "array": _Frame("[", "", ",", "]", is_lines=False),
    "ndjson": _Frame("", "", "\n", "", is_lines=True),
    "sse": _Frame("", "\ndata: ", "\n\n", "", is_lines=True, has_id=True),
}
Framing: TypeAlias = Literal["array", "ndjson", "sse"]


def encode_records(
    batches: Sequence[pa.RecordBatch],
    topic: str,
    partition: int,
    fmt: Format,
    *,
    is_json: Sequence[bool],
    framing: Framing = "array",
    extra: Any = None,
) -> bytes:
    """Encode each record as `{"topic","key","value","partition","offset","timestamp"}`.

    The timestamp is in ms. `framing`: array is one JSON array; ndjson is a line for each record;
    sse is a server-sent event for each record, with the offset as its id.

    Only records with headers have `headers`, with the values in base64 in every format. Batches
    have RECORD_SCHEMA. `is_json` tells for each batch whether its keys and values are known to be
    JSON text; format json checks the other batches. If `extra` is given, there is one batch, and
    `extra` has a text for each of its records: more fields, such as `,"name":1`, or an empty text.
    Raises Undecodable if a key or value does not decode; then service.formats.record_pages encodes
    the page.
    """
    fixed = _fixed(_FRAMES[framing], topic, partition, fmt)
    frame = fixed.frame
    page = io.BytesIO()  # a list of pieces would need their bytes twice
    page.write(frame.opening.encode())
    for batch, checked in _merged(batches, is_json):
        for part, extra_texts in _parts(batch, extra) if fmt == "text" else ((batch, extra),):
            encode = _one_by_one if part.num_rows <= FEW else _joined
            page.write(encode(fixed, part, checked, extra_texts))
    if frame.closing and page.tell() > len(frame.opening):
        page.seek(-1, io.SEEK_END)  # the comma after the last record
    page.write(frame.closing.encode())
    body = page.getvalue()
    return _without_unicode_breaks(body) if frame.is_lines else body


def encode_placements(
    places: RecordPartitions, placements: Sequence[AppendedRange] | None, count: int
) -> bytes:
    """Encode the v2 answer to a produce request: partition and offset of `count` records.

    `placements` has one range for each partition in `places`. It is None if the offsets are not
    known yet (acks=1 and 0).
    """
    bases = {placed.partition: placed.base_offset for placed in placements or ()}
    reports: tuple[bytes | memoryview, ...]
    if isinstance(places, int):
        reports = _run_of_reports(places, bases.get(places), count)
    elif count <= FEW_REPORTS:
        reports = _few_reports(places, bases)
    else:
        reports = _mixed_reports(np.asarray(places), bases)
    # Join once, because each copy of a large answer makes the system allocate new pages.
    return b"".join((b'{"offsets":[', *reports, b'],"key_schema_id":null,"value_schema_id":null}'))


# --- records


class _Fixed(NamedTuple):
    """The texts between the fields of one partition's records.

    `encode` encodes a column of keys or values. It raises NotDecodable.
    """

    where: TopicPartition
    fmt: Format
    frame: _Frame
    texts: tuple[str, str, str]
    scalars: tuple[Any, Any, Any]
    end: Any
    encode: Callable[[Any, bool], Any]

    def shown(self, batch: pa.RecordBatch, part: json_text.RecordPart, is_json: bool) -> Any:
        """Encode the batch's keys or values. Raises Undecodable."""
        try:
            return self.encode(batch.column(part), is_json)
        except json_text.NotDecodable as error:
            offset = batch.column("offset")[error.row].as_py()
            raise json_text.Undecodable(self.where, self.fmt, part, offset, str(error)) from None


@lru_cache(maxsize=1024)
def _fixed(frame: _Frame, topic: str, partition: int, fmt: Format) -> _Fixed:
    # The base64 texts already end with a comma, see json_text.base64.
    comma = "" if fmt == "binary" else ","
    texts = (
        f'{frame.before}{{"topic":{json_text.to_json(topic).decode()},"key":',
        f'{comma}"value":',
        f'{comma}"partition":{partition},"offset":',
    )
    encode = {"json": _json, "binary": _base64, "text": _text}[fmt]
    if fmt == "json" and frame.is_lines:
        encode = _json_lines
    topic_partition = TopicPartition(topic, partition)
    first, second, third = map(scalar, texts)
    end = scalar("}" + frame.after)
    return _Fixed(topic_partition, fmt, frame, texts, (first, second, third), end, encode)


def _json(column: Any, is_json: bool) -> Any:
    if not is_json:
        json_text.require_json(column)
    return column


def _json_lines(column: Any, is_json: bool) -> Any:
    return json_text.on_one_line(_json(column, is_json))


def _base64(column: Any, _is_json: bool) -> Any:
    return json_text.base64(column)


def _text(column: Any, _is_json: bool) -> Any:
    return json_text.quoted(column)


_UNICODE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def _without_unicode_breaks(body: bytes) -> bytes:
    """Escape line breaks of Python's splitlines, which some clients use.

    In JSON these characters occur only inside of strings, and never after a lone backslash.
    """
    if not body.isascii():
        for char, escape in _UNICODE_BREAKS.items():
            body = body.replace(char, escape)
    return body


def _merged(
    batches: Sequence[pa.RecordBatch], is_json: Sequence[bool]
) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Merge adjacent batches with equal flags: one costs as much as some hundred records."""
    if len(batches) == 1:
        if batches[0].num_rows:
            yield batches[0], is_json[0]
        return
    flagged = zip(batches, is_json, strict=True)
    for checked, group in groupby(flagged, key=lambda pair: pair[1]):
        merged = concat([batch for batch, _ in group])
        if merged.num_rows:
            yield merged, checked


def _parts(batch: pa.RecordBatch, extra: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
    """Divide a large batch of texts.

    Texts that are escaped become Python objects, then columns, each of up to six times their bytes.
    """
    heavy = weight(batch)
    if heavy <= PART_BYTES:
        yield batch, extra
        return
    weights = weight_before(batch)
    limits = np.arange(PART_BYTES, heavy, PART_BYTES)
    rows = np.unique(np.concatenate(([0], weights.searchsorted(limits), [batch.num_rows])))
    for first, last in pairwise(rows.tolist()):
        yield batch[first:last], None if extra is None else extra[first:last]


def _joined(fixed: _Fixed, batch: pa.RecordBatch, is_json: bool, extra: Any) -> memoryview:
    key, value, offset = fixed.scalars
    numbers: Any = batch.column("offset")
    offsets = decimal(numbers)
    records: Any = pc.binary_join_element_wise(
        *((scalar("id: "), offsets) if fixed.frame.has_id else ()),
        *(key, fixed.shown(batch, "key", is_json)),
        *(value, fixed.shown(batch, "value", is_json)),
        *(offset, offsets),
        *_timestamp_texts(batch),
        *json_text.headers(batch.column("headers")),
        *(() if extra is None else (extra,)),
        *(fixed.end, EMPTY),
        null_handling="replace",
        null_replacement="null",
    )
    return _content(records)


_TIMESTAMP = scalar(',"timestamp":')


def _timestamp_texts(batch: pa.RecordBatch) -> list[Any]:
    stamps = timestamps_us(batch.column("timestamp")) // US_PER_MS
    first = int(stamps[0])
    if (stamps == first).all():  # the records of a request without timestamps
        return [scalar(f',"timestamp":{first}')]
    return [_TIMESTAMP, decimal(pa.array(stamps))]


def _content(texts: Any) -> memoryview:
    """Return the bytes of all texts of a new array, one after the other."""
    _, _, data = texts.buffers()
    return memoryview(data)


def _one_by_one(fixed: _Fixed, batch: pa.RecordBatch, is_json: bool, extra: Any) -> bytes:
    key, value, offset = (text.encode() for text in fixed.texts)
    suffix = b"}" + fixed.frame.after.encode()
    numbers: Any = batch.column("offset")
    pieces: list[bytes] = []
    for number, k, v, stamp, headers, extra_text in zip(
        numbers.to_pylist(),
        fixed.shown(batch, "key", is_json).to_pylist(),
        fixed.shown(batch, "value", is_json).to_pylist(),
        (timestamps_us(batch.column("timestamp")) // US_PER_MS).tolist(),
        _header_list(batch),
        [b""] * batch.num_rows if extra is None else extra.to_pylist(),
        strict=True,
    ):
        if fixed.frame.has_id:
            pieces.append(b"id: %d" % number)
        pieces += key, k or b"null", value, v or b"null", offset
        pieces += b'%d,"timestamp":%d' % (number, stamp), headers, extra_text, suffix
    return b"".join(pieces)


def _header_list(batch: pa.RecordBatch) -> list[bytes]:
    texts = json_text.headers(batch.column("headers"))
    listed: list[bytes] = texts[0].to_pylist() if texts else [b""] * batch.num_rows
    return listed


# --- produce reports


_REPORT_END = ',"error_code":null,"error":null}'
_LAST_DIGITS = [b"%03d" % number for number in range(1000)]
_BELOW_1000 = [b"%d" % number for number in range(1000)]


def _run_of_reports(partition: int, base: int | None, count: int) -> tuple[bytes | memoryview, ...]:
    begin = f'{{"partition":{partition},"offset":'
    if base is None:
        return (",".join([f"{begin}null{_REPORT_END}"] * count).encode(),)
    if count == 1:
        return (f"{begin}{base}{_REPORT_END}".encode(),)
    between = f"{_REPORT_END},{begin}".encode()
    if count <= FEW_OFFSETS:
        return (begin.encode(), *_decimals(base, base + count, between), _REPORT_END.encode())
    texts = pa.array(np.arange(base, base + count)).cast(pa.string())
    rows: Any = pa.array([0, count], pa.int32())
    offsets = _content(pc.binary_join(pa.ListArray.from_arrays(rows, texts), between.decode()))
    return begin.encode(), offsets, _REPORT_END.encode()


def _decimals(start: int, end: int, between: bytes) -> list[bytes]:
    """Return the numbers [start, end) in decimal, separated by `between`, as pieces to join.

    The numbers 5000 to 5999 have the same digits before the last three. So one join of the
    last three digits encodes all these numbers, with `between` and the same digits as the
    separator. A number takes ~9 ns.
    """
    pieces = []
    while start < end:
        thousands, remainder = divmod(start, 1000)
        stop = min(remainder + end - start, 1000)
        first, texts = b"", _BELOW_1000
        if thousands:
            first, texts = b"%d" % thousands, _LAST_DIGITS
        pieces += [first, (between + first).join(texts[remainder:stop]), between]
        start += stop - remainder
    return pieces[:-1]


def _few_reports(places: Iterable[int], bases: dict[int, int]) -> tuple[bytes]:
    reports = []
    following = dict(bases)
    for partition in places:
        offset: int | str = "null"
        if partition in following:
            offset = following[partition]
            following[partition] += 1
        reports.append(f'{{"partition":{partition},"offset":{offset}{_REPORT_END}')
    return (",".join(reports).encode(),)


def _mixed_reports(places: npt.NDArray[np.int64], bases: dict[int, int]) -> tuple[bytes]:
    """A partition's offsets are consecutive, so `_decimals` encodes them at once.

    Then each record takes the next text of its partition, in calls without Python code: ~80 ns a
    record.
    """
    following: dict[int, Iterator[bytes]] = {}
    for partition, rows in tally(places, len(places)):
        begin, end = b'{"partition":%d,"offset":' % partition, f"{_REPORT_END},|".encode()
        numbers = [(b"null" + end + begin) * (rows - 1), b"null"]
        if (base := bases.get(partition)) is not None:
            numbers = _decimals(base, base + rows, end + begin)
        following[partition] = iter(b"".join((begin, *numbers, end)).split(b"|"))
    return (b"".join(map(next, map(following.__getitem__, places.tolist())))[:-1],)
