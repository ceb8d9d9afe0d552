"""Parquet segments: encoding of one immutable file of one partition, and decoding by ranges.

A segment is an ordinary Parquet file of RECORD_SCHEMA, sorted by offset. A row group has about
10,000 rows and is the unit of a cold read. The partition is in the path, not in a column
(FORMAT.md). Pure: the caller does the IO. The caller fetches the file's end once, and then one
range per row group.

Parquet has checksums for pages, but not for page headers or the footer, and readers need not verify
them. So the footer's key-value metadata holds CRC-32Cs (`tidelog.crc32c`): one of each row group,
and one of the footer. Zeros replace the footer's own checksum when it is computed. The checksums
cover each bit that is decoded; they are computed at 31 GB/s. Page checksums are written too, for
other engines. The page index between the last row group and the footer is not covered: this module
does not read it.

Decoding releases the GIL except for a few tens of microseconds. A `Footer` is immutable: several
threads may decode row groups of one footer at once.
"""

import contextlib
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.chunk import headers_before, octets_before, timestamp_range
from tidelog.storage.codec.record_columns import RECORD_SCHEMA, TIMESTAMP_TYPE, US_PER_MS, concat
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import Part

FORMAT = 1

GROUP_ROWS = 10_000
"""Rows of a row group. A group is always decoded whole; this takes about a millisecond."""
GROUP_BYTES_MAX = 8 * 1024 * 1024
"""Raw bytes of a row group's keys, values and headers; a larger record has its own group."""

FOOTER_READ_BYTES = 64 * 1024
"""Size of the first read from a file's end: the footer of ~100 row groups, a million records."""
FOOTER_BYTES_MAX = 64 * 1024 * 1024
"""Limit for a footer's length field (I10)."""

_CODECS = {"producer": "zstd", "uncompressed": "none"}
"""Values of `compression.type` that have another name in Parquet."""
_LEVELS = {"zstd": 1}
"""Level 3 and above cost more CPU than the smaller files save."""

_ENCODINGS = {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"}
"""With this encoding dense numbers take 0.5 bytes a record; plain values with zstd take 2.4. A file
of events is 8 % smaller."""

_KEYS_PER_DISTINCT_MIN = 4
"""A dictionary of keys saves space if each distinct key has at least this many rows. With unique
keys it takes 50 % more space."""

_MAGIC = b"PAR1"
_END_BYTES = 8  # the footer's length and the magic
_MARK = b"tidelog-crc32c:"
_HEX_DIGITS = 8


def _numbered(name: str, data_type: Any, number: int) -> Any:
    return pa.field(name, data_type, metadata={b"PARQUET:field_id": str(number).encode()})


_HEADER = pa.struct([_numbered("key", pa.string(), 7), _numbered("value", pa.binary(), 8)])
NUMBERED_SCHEMA = pa.schema(
    [
        _numbered("offset", pa.int64(), 1),
        _numbered("timestamp", TIMESTAMP_TYPE, 2),
        _numbered("key", pa.binary(), 3),
        _numbered("value", pa.binary(), 4),
        _numbered("headers", pa.list_(_numbered("item", _HEADER, 6)), 5),
    ]
)
"""RECORD_SCHEMA with field ids: a reader that finds columns by id also finds a renamed column. The
ids never change. Id 9 is `partition`, which is not in the file."""


class Written(NamedTuple):
    """A finished segment. `end_offset` is its last record's offset plus one; timestamps are ms."""

    body: pa.Buffer
    rows: int
    base_offset: int
    end_offset: int
    timestamp_min: int
    timestamp_max: int
    groups: int

    @property
    def size(self) -> int:
        return int(self.body.size)


class Cleaned(NamedTuple):
    """The first time, `at_ms` by the store's clock, that key compaction reached `end_offset`."""

    end_offset: int
    at_ms: int


class RowGroup(NamedTuple):
    """One row group: bytes [start, start + length) of the file. Timestamps are ms."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    start: int
    length: int
    crc32c: int
    rows: int
    base_offset: int
    end_offset: int
    timestamp_min: int
    timestamp_max: int
    raw_bytes: int
    """Size before compression."""


def write(
    batches: Iterable[pa.RecordBatch],
    *,
    codec: str,
    is_json: bool,
    level: int = format_levels.NEWEST,
) -> Written:
    """Encode one or more records (RECORD_SCHEMA, ascending offsets) as a segment.

    `codec` is a value of `compression.type`. `is_json`: each key and value is null or JSON text.
    `level` is the level of the cluster: columns have field ids from level 2 on. Equal records give
    equal bytes, however they are split into batches. Uses one core.
    """
    writer = SegmentWriter(codec, level)
    for batch in batches:
        writer.add(batch)
    return writer.finish(is_json=is_json)


class SegmentWriter:
    """An incremental `write`. Holds the encoded segment and one row group in memory."""

    def __init__(self, codec: str, level: int = format_levels.NEWEST) -> None:
        self._schema = RECORD_SCHEMA if level == format_levels.FIRST else NUMBERED_SCHEMA
        self._codec = _CODECS.get(codec, codec)
        self._sink = pa.BufferOutputStream()
        self._writer: pq.ParquetWriter | None = None
        self._cut = _Cut()
        self._rows = self._base_offset = self._end_offset = self._groups = 0
        self._stamps: list[int] = []

    @property
    def size(self) -> int:
        """Return the bytes that are encoded so far."""
        return int(self._sink.tell())

    def add(self, batch: pa.RecordBatch, nbytes: int | None = None) -> None:
        """Add the next records. `nbytes` estimates their memory; without it, it is measured."""
        for group in self._cut.add(batch, batch.nbytes if nbytes is None else nbytes):
            self._write(group)

    def finish(self, *, is_json: bool, cleaned: Sequence[Cleaned] = ()) -> Written:
        """Finish and return the segment; `add` must not be called afterwards."""
        for group in self._cut.rest():
            self._write(group)
        writer = self._writer
        assert writer is not None, "a segment has at least one record"
        history = {"tidelog.cleaned": msgspec.json.encode(list(cleaned)).decode()}
        writer.add_key_value_metadata(
            {
                "tidelog.format": str(FORMAT),
                "tidelog.json": str(is_json).lower(),
                **(history if cleaned else {}),
                "tidelog.crc32c": _MARK.decode() + "0" * _HEX_DIGITS * (1 + self._groups),
            }
        )
        writer.close()
        body = self._sink.getvalue()
        _fill_checksums(body)
        return Written(
            body,
            self._rows,
            self._base_offset,
            self._end_offset,
            min(self._stamps),
            max(self._stamps),
            self._groups,
        )

    def _write(self, batch: pa.RecordBatch) -> None:
        offsets = batch.column(0).to_numpy()
        ascending = np.diff(offsets, prepend=self._end_offset - 1) > 0
        assert ascending.all(), "offsets must ascend"
        if self._writer is None:
            has_few_keys = _has_few_keys(batch)
            self._writer = _writer(self._sink, self._schema, self._codec, has_few_keys=has_few_keys)
            self._base_offset = int(offsets[0])
        self._writer.write_batch(batch, row_group_size=batch.num_rows)
        self._end_offset = int(offsets[-1]) + 1
        self._rows += batch.num_rows
        self._stamps += timestamp_range(batch)
        self._groups += 1


def footer_length(tail: Part, key: str) -> int:
    """Return how many of the file's last bytes `read_footer` needs; `tail` holds some of them.

    If `tail` is damaged, the result may exceed the file's size. Then pass the whole file to
    `read_footer`, which raises Corrupt.
    """
    if len(tail) < _END_BYTES or bytes(tail[-len(_MAGIC) :]) != _MAGIC:
        raise Corrupt(key, "does not end as a Parquet file")
    length = int.from_bytes(tail[-_END_BYTES : -len(_MAGIC)], "little")
    if length > FOOTER_BYTES_MAX:
        raise Corrupt(key, f"footer of {length} bytes is over the limit of {FOOTER_BYTES_MAX}")
    return length + _END_BYTES


def read_footer(tail: Part, size: int, key: str) -> "Footer":
    """Decode the footer of a file of `size` bytes from its last bytes, `footer_length` or more.

    Raises Corrupt if a bit is wrong, or if the file is not a segment of a supported format.
    """
    needed = footer_length(tail, key)
    if needed > len(tail):
        raise Corrupt(key, f"footer takes {needed} bytes, the file has {len(tail)}")
    raw = bytes(tail[-needed:])
    slot = raw.rfind(_MARK) + len(_MARK)
    digits = raw[slot : slot + _HEX_DIGITS]
    if slot < len(_MARK) or _footer_checksum(raw, slot) != digits:
        raise Corrupt(key, "checksum of the footer differs, or the file is not a segment")
    try:
        metadata = pq.read_metadata(pa.BufferReader(raw))
        return Footer(metadata, size)
    # An error of msgspec is a ValueError.
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise Corrupt(key, f"footer does not decode: {error}") from error


class Footer:
    """The decoded footer of a segment: immutable, shared by threads, kept in a cache.

    `nbytes` is an estimate of its memory. Row groups are in offset order and never overlap.
    """

    __slots__ = ("_ends", "_size", "cleaned", "groups", "is_json", "metadata", "nbytes")

    def __init__(self, metadata: pq.FileMetaData, size: int) -> None:
        pairs = metadata.metadata or {}
        if pairs[b"tidelog.format"] != str(FORMAT).encode():
            raise ValueError(f"segment format {pairs[b'tidelog.format']!r}, supported is {FORMAT}")
        digits = pairs[b"tidelog.crc32c"][len(_MARK) + _HEX_DIGITS :]
        checksums = np.frombuffer(bytes.fromhex(digits.decode()), dtype=">u4").tolist()
        self.is_json: bool = pairs[b"tidelog.json"] == b"true"
        self.cleaned: Sequence[Cleaned] = msgspec.json.decode(
            pairs.get(b"tidelog.cleaned", b"[]"), type=list[Cleaned]
        )
        self.groups: Sequence[RowGroup] = tuple(
            _group(index, metadata.row_group(index), checksums[index])
            for index in range(metadata.num_row_groups)
        )
        self.nbytes: int = metadata.serialized_size * 6 + len(self.groups) * 500
        self.metadata = metadata
        self._size = size
        self._ends = [group.end_offset for group in self.groups]

    def groups_between(self, first_offset: int, end_offset: int) -> Sequence[RowGroup]:
        """Return the row groups that may hold records of [first_offset, end_offset), in order."""
        first = bisect_right(self._ends, first_offset)
        last = first
        while last < len(self.groups) and self.groups[last].base_offset < end_offset:
            last += 1
        return self.groups[first:last]

    def decode_group(self, index: int, data: Part, key: str) -> pa.RecordBatch:
        """Decode row group `index` to RECORD_SCHEMA; `data` is its range of the file.

        Raises Corrupt if a bit is wrong: the checksum is verified before Parquet decodes.
        """
        group = self.groups[index]
        _verify(group, data, key)
        with _decoding(key):
            window: Any = _Window(data, group.start, self._size)
            file = pq.ParquetFile(pa.PythonFile(window, mode="r"), metadata=self.metadata)
            columns: list[Any] = file.read_row_group(index, use_threads=False).columns
            return pa.RecordBatch.from_arrays(
                [
                    column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
                    for column in columns
                ],
                schema=RECORD_SCHEMA,
            )

    @contextlib.contextmanager
    def verified(
        self, body: pa.Buffer, groups: Iterable[RowGroup], key: str
    ) -> Iterator[pq.ParquetFile]:
        """Verify these row groups, then open the segment to decode some of their columns.

        `body` is as long as the segment and holds at least these row groups. Arrow decodes from
        `body` without calls of Python; `decode_group` takes some calls per column. Raises Corrupt.
        """
        for group in groups:
            _verify(group, memoryview(body.slice(group.start, group.length)), key)
        with _decoding(key):
            yield pq.ParquetFile(pa.BufferReader(body), metadata=self.metadata)


def _verify(group: RowGroup, data: Part, key: str) -> None:
    if len(data) != group.length or crc32c(data) != group.crc32c:
        raise Corrupt(key, f"checksum of row group {group.index} differs")


@contextlib.contextmanager
def _decoding(key: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(key, f"row groups do not decode: {error}") from error


class _Window:
    """A file object of `size` bytes for Arrow, with data only in [start, start + len(data)).

    A read of other bytes raises OSError, so decoding cannot use bytes that were not fetched.
    """

    closed = False

    def __init__(self, data: Part, start: int, size: int) -> None:
        self._data = pa.py_buffer(data)
        self._start = start
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read_buffer(self, count: int) -> pa.Buffer:
        """Read without a copy; Arrow prefers this to `read`."""
        first = self._at - self._start
        if first < 0 or first + count > self._data.size:
            raise OSError(f"read of {count} bytes at {self._at}, outside of the row group")
        self._at += count
        return self._data.slice(first, count)

    def read(self, count: int) -> bytes:
        return self.read_buffer(count).to_pybytes()

    def close(self) -> None:
        """Do nothing: the data belongs to the caller."""


def _writer(
    sink: pa.BufferOutputStream, schema: pa.Schema, codec: str, *, has_few_keys: bool
) -> pq.ParquetWriter:
    settings: dict[str, Any] = {
        "compression": codec,
        "compression_level": _LEVELS.get(codec),
        "use_dictionary": ["key"] if has_few_keys else False,
        "column_encoding": _ENCODINGS,
        # Keys are not sorted: their statistics would add 30 bytes a row group without any use.
        "write_statistics": ["offset", "timestamp"],
        "write_page_index": True,
        "write_page_checksum": True,
        "store_schema": False,  # a kilobyte that only Arrow reads; Parquet's schema is enough
    }
    return pq.ParquetWriter(sink, schema, **settings)


def _has_few_keys(batch: pa.RecordBatch) -> bool:
    return bool(
        pc.count_distinct(batch.column("key"), mode="all").as_py() * _KEYS_PER_DISTINCT_MIN
        <= batch.num_rows
    )


class _Cut:
    """A splitter of record batches into one batch per row group.

    It joins thousands of small batches at once: to measure and join each batch alone would take
    longer than to encode it.
    """

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch, nbytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the row groups that are full. `nbytes` estimates the size of `batch`."""
        self._parts.append(batch)
        self._rows += batch.num_rows
        self._bytes += nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES_MAX:
            yield from self._full(is_last=False)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the last row groups, if any."""
        if self._rows:
            yield from self._full(is_last=True)

    def _full(self, *, is_last: bool) -> Iterator[pa.RecordBatch]:
        whole = concat(self._parts)
        content_bytes = _content_before(whole)
        first, rows = 0, whole.num_rows
        while first < rows:
            room = content_bytes[first] + GROUP_BYTES_MAX
            # A group has at least one row.
            fitting = max(int(np.searchsorted(content_bytes, room, side="right")) - 1, first + 1)
            last = min(fitting, first + GROUP_ROWS, rows)
            if last == rows and last - first < GROUP_ROWS and not is_last:
                break  # more rows may fit
            yield whole.slice(first, last - first)
            first = last
        self._parts = [whole.slice(first)] if first < rows else []
        self._rows, self._bytes = rows - first, int(content_bytes[rows] - content_bytes[first])


def _content_before(batch: pa.RecordBatch) -> np.ndarray:
    """Return the bytes of keys, values and headers before each row.

    GROUP_ROWS bounds the bytes of the other columns.
    """
    return (
        octets_before(batch.column("key"))
        + octets_before(batch.column("value"))
        + headers_before(batch.column("headers"))
    )


def _group(index: int, row_group: pq.RowGroupMetaData, checksum: int) -> RowGroup:
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    # A dictionary page is before the data pages; None or 0 if there is none.
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    start = min(starts)
    lengths = [column.total_compressed_size for column in columns]
    end = max(map(operator.add, starts, lengths))
    offsets: Any = columns[0].statistics
    stamps: Any = columns[1].statistics
    return RowGroup(
        index=index,
        start=start,
        length=end - start,
        crc32c=checksum,
        rows=row_group.num_rows,
        base_offset=offsets.min_raw,
        end_offset=offsets.max_raw + 1,
        timestamp_min=stamps.min_raw // US_PER_MS,
        timestamp_max=stamps.max_raw // US_PER_MS,
        raw_bytes=row_group.total_byte_size,
    )


def _fill_checksums(body: pa.Buffer) -> None:
    """Write the checksums over the zeros that `write` left.

    In place: a copy of the body would take megabytes.
    """
    view = memoryview(body).cast("B")
    metadata = pq.read_metadata(pa.BufferReader(body))
    footer = view[-metadata.serialized_size - _END_BYTES :]
    slot = bytes(footer).rfind(_MARK) + len(_MARK)
    for index in range(metadata.num_row_groups):
        group = _group(index, metadata.row_group(index), 0)
        position = slot + _HEX_DIGITS * (1 + index)
        data = view[group.start : group.start + group.length]
        footer[position : position + _HEX_DIGITS] = b"%08x" % crc32c(data)
    footer[slot : slot + _HEX_DIGITS] = _footer_checksum(bytes(footer), slot)


def _footer_checksum(raw: bytes, slot: int) -> bytes:
    zeros = b"0" * _HEX_DIGITS
    return b"%08x" % crc32c(raw[:slot] + zeros + raw[slot + _HEX_DIGITS :])
