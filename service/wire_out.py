"""Records to the bodies of answers: JSON arrays, NDJSON, server-sent events; and produce reports.

Whole columns are joined at once by Arrow: a record costs 100 to 200 ns and no Python object. Below
a few records the ~50 us that this takes however little there is would be most of a fetch, so those
are written one by one, to the same bytes. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from service import wire_text
from service.wire_in import Format
from service.wire_text import EMPTY, decimal, scalar
from storage.chunk import US_PER_MS, concat, timestamps_us
from storage.model import Placement
from storage.partitioner import Places, tally

FEW = 12
"""Up to this many records are written one by one; measured, the two ways meet at ~20."""

FEW_REPORTS = 64
"""The same for produce reports."""


class _Frame(NamedTuple):
    """What stands around records and between them.

    `is_lines`: a line break inside a record would end it too early. `has_id`: the offset comes
    first, as the event's id.
    """

    opening: str
    before: str
    after: str
    closing: str
    is_lines: bool
    has_id: bool = False


_ARRAY = _Frame("[", "", ",", "]", is_lines=False)
_NDJSON = _Frame("", "", "\n", "", is_lines=True)
_EVENTS = _Frame("", "\ndata: ", "\n\n", "", is_lines=True, has_id=True)


def encode_records(
    batches: Sequence[pa.RecordBatch],
    topic: str,
    partition: int,
    fmt: Format,
    *,
    is_json: Sequence[bool],
) -> bytes:
    """`[{"topic","key","value","partition","offset","timestamp"}, ...]`, timestamps in ms.

    `headers` only on records that have any, their values in base64 whatever the format. Batches
    are of RECORD_SCHEMA; `is_json` says of each that its keys and values are known to be JSON
    text; those of others are checked if the format is json. Raises Undecodable.
    """
    return _encode(_fixed(_ARRAY, topic, partition, fmt), batches, is_json)


def encode_ndjson(
    batches: Sequence[pa.RecordBatch],
    topic: str,
    partition: int,
    fmt: Format,
    *,
    is_json: Sequence[bool],
) -> bytes:
    """The objects of `encode_records`, one a line."""
    return _encode(_fixed(_NDJSON, topic, partition, fmt), batches, is_json)


def encode_sse(
    batches: Sequence[pa.RecordBatch],
    topic: str,
    partition: int,
    fmt: Format,
    *,
    is_json: Sequence[bool],
) -> bytes:
    """The objects of `encode_records` as server-sent events; an event's id is its offset."""
    return _encode(_fixed(_EVENTS, topic, partition, fmt), batches, is_json)


def encode_placements(places: Places, placements: Sequence[Placement] | None, count: int) -> bytes:
    """The v2 answer to a produce: where each of `count` records came to lie, in request order.

    `placements` is one for each partition that `places` names; None while offsets are not known
    (acks=1, 0).
    """
    bases = {placed.partition: placed.base_offset for placed in placements or ()}
    reports: tuple[bytes | memoryview, ...]
    if isinstance(places, int):
        reports = _run_of_reports(places, bases.get(places), count)
    elif count <= FEW_REPORTS:
        reports = _few_reports(places, bases)
    else:
        reports = _mixed_reports(np.asarray(places), bases)
    # One join: each copy of a large answer is fresh pages from the system.
    return b"".join((b'{"offsets":[', *reports, b'],"key_schema_id":null,"value_schema_id":null}'))


# --- records


class _Fixed(NamedTuple):
    """The texts between the fields of one partition's records, and how to show its values."""

    frame: _Frame
    texts: tuple[str, str, str]
    scalars: tuple[Any, Any, Any]
    end: Any
    shown: Callable[[Any, Any, bool], Any]


@lru_cache(maxsize=1024)
def _fixed(frame: _Frame, topic: str, partition: int, fmt: Format) -> _Fixed:
    # The base64 texts bring their commas along, see wire_text.base64.
    comma = "" if fmt == "binary" else ","
    texts = (
        f'{frame.before}{{"topic":{wire_text.to_json(topic).decode()},"key":',
        f'{comma}"value":',
        f'{comma}"partition":{partition},"offset":',
    )
    shown = {"json": _json, "binary": _base64, "text": _text}[fmt]
    if fmt == "json" and frame.is_lines:
        shown = _json_lines
    first, second, third = map(scalar, texts)
    return _Fixed(frame, texts, (first, second, third), scalar("}" + frame.after), shown)


def _json(column: Any, offsets: Any, is_json: bool) -> Any:
    if not is_json:
        wire_text.require_json(column, offsets)
    return column


def _json_lines(column: Any, offsets: Any, is_json: bool) -> Any:
    return wire_text.on_one_line(_json(column, offsets, is_json))


def _base64(column: Any, _offsets: Any, _is_json: bool) -> Any:
    return wire_text.base64(column)


def _text(column: Any, offsets: Any, _is_json: bool) -> Any:
    return wire_text.quoted(column, offsets)


def _encode(fixed: _Fixed, batches: Sequence[pa.RecordBatch], is_json: Sequence[bool]) -> bytes:
    pieces: list[bytes | memoryview] = [
        (_one_by_one if batch.num_rows <= FEW else _joined)(fixed, batch, checked)
        for batch, checked in _merged(batches, is_json)
    ]
    frame = fixed.frame
    if frame.closing and pieces:
        pieces[-1] = pieces[-1][:-1]  # the comma after the last record
    body = b"".join((frame.opening.encode(), *pieces, frame.closing.encode()))
    return _without_unicode_breaks(body) if frame.is_lines else body


_UNICODE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def _without_unicode_breaks(body: bytes) -> bytes:
    """Escape what Python's splitlines, and so some clients, take for line breaks.

    In JSON these can only stand inside of strings, and never after a lone backslash.
    """
    if not body.isascii():
        for char, escape in _UNICODE_BREAKS.items():
            body = body.replace(char, escape)
    return body


def _merged(
    batches: Sequence[pa.RecordBatch], is_json: Sequence[bool]
) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Neighbours of one kind as one batch: a batch costs as much as a few hundred records."""
    flagged = zip(batches, is_json, strict=True)
    for checked, group in groupby(flagged, key=lambda each: each[1]):
        merged = concat([batch for batch, _ in group])
        if merged.num_rows:
            yield merged, checked


def _joined(fixed: _Fixed, batch: pa.RecordBatch, is_json: bool) -> memoryview:
    key, value, offset = fixed.scalars
    numbers: Any = batch.column("offset")
    offsets = decimal(numbers)
    records: Any = pc.binary_join_element_wise(
        *((scalar("id: "), offsets) if fixed.frame.has_id else ()),
        *(key, fixed.shown(batch.column("key"), numbers, is_json)),
        *(value, fixed.shown(batch.column("value"), numbers, is_json)),
        *(offset, offsets),
        *_timestamp_texts(batch),
        *wire_text.headers(batch.column("headers")),
        *(fixed.end, EMPTY),
        null_handling="replace",
        null_replacement="null",
    )
    return _content(records)


_TIMESTAMP = scalar(',"timestamp":')


def _timestamp_texts(batch: pa.RecordBatch) -> list[Any]:
    stamps = timestamps_us(batch.column("timestamp")) // US_PER_MS
    first = int(stamps[0])
    if (stamps == first).all():  # as a request without timestamps has
        return [scalar(f',"timestamp":{first}')]
    return [_TIMESTAMP, decimal(pa.array(stamps))]


def _content(texts: Any) -> memoryview:
    """The bytes of an array just made, all its texts in a row."""
    _, _, data = texts.buffers()
    return memoryview(data)


def _one_by_one(fixed: _Fixed, batch: pa.RecordBatch, is_json: bool) -> bytes:
    key, value, offset = (text.encode() for text in fixed.texts)
    after = b"}" + fixed.frame.after.encode()
    numbers: Any = batch.column("offset")
    pieces: list[bytes] = []
    for number, k, v, stamp, headers in zip(
        numbers.to_pylist(),
        fixed.shown(batch.column("key"), numbers, is_json).to_pylist(),
        fixed.shown(batch.column("value"), numbers, is_json).to_pylist(),
        (timestamps_us(batch.column("timestamp")) // US_PER_MS).tolist(),
        _header_list(batch),
        strict=True,
    ):
        if fixed.frame.has_id:
            pieces.append(b"id: %d" % number)
        pieces += key, k or b"null", value, v or b"null", offset
        pieces += b'%d,"timestamp":%d' % (number, stamp), headers, after
    return b"".join(pieces)


def _header_list(batch: pa.RecordBatch) -> list[bytes]:
    texts = wire_text.headers(batch.column("headers"))
    listed: list[bytes] = texts[0].to_pylist() if texts else [b""] * batch.num_rows
    return listed


# --- produce reports


_REPORT_END = ',"error_code":null,"error":null}'


def _run_of_reports(partition: int, base: int | None, count: int) -> tuple[bytes | memoryview, ...]:
    begin = f'{{"partition":{partition},"offset":'
    if base is None:
        return (",".join([f"{begin}null{_REPORT_END}"] * count).encode(),)
    between = f"{_REPORT_END},{begin}"
    offsets: bytes | memoryview
    if count <= FEW_REPORTS:
        offsets = between.join(map(str, range(base, base + count))).encode()
    else:
        texts = pa.array(np.arange(base, base + count)).cast(pa.string())
        rows: Any = pa.array([0, count], pa.int32())
        offsets = _content(pc.binary_join(pa.ListArray.from_arrays(rows, texts), between))
    return begin.encode(), offsets, _REPORT_END.encode()


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


def _mixed_reports(places: npt.NDArray[np.int64], bases: dict[int, int]) -> tuple[memoryview]:
    counts = tally(places, len(places))
    begins: Any = pa.array([f'{{"partition":{partition},"offset":' for partition, _ in counts])
    index = np.searchsorted([partition for partition, _ in counts], places)
    offsets: Any = pa.scalar("null")
    if bases:
        runs = [np.arange(bases[which], bases[which] + rows) for which, rows in counts]
        numbers = np.empty(len(places), dtype=np.int64)
        numbers[np.argsort(index, kind="stable")] = np.concatenate(runs)
        offsets = pa.array(numbers).cast(pa.string())
    reports = pc.binary_join_element_wise(
        begins.take(pa.array(index)), offsets, _REPORT_END + ",", ""
    )
    return (_content(reports)[:-1],)
