"""Parquet segments: the bytes of one immutable file of one partition, and reading it by ranges.

A segment is an ordinary Parquet file of RECORD_SCHEMA, sorted by offset, in row groups of about
10,000 rows, the unit of a cold read. `partition` is no column of it: it is in the path (DESIGN 10).
Pure: whoever calls does the IO, and fetches the end of the file once and then one range a group.

Parquet has checksums for pages, not for page headers or the footer, and verifying them is up to the
reader. So the footer's key-value metadata holds CRC-32Cs (`tidelog.crc32c`): of each row group's
bytes, and of the footer itself with that number read as zeros. No bit of what is decoded escapes,
at 31 GB/s; page checksums are written as well, for other engines. What is not covered is the page
index between the last group and the footer: this module does not read it.

Decoding releases the GIL but for a few tens of microseconds. A `Footer` never changes: any number
of threads may decode groups of one at once.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.chunk import RECORD_SCHEMA, US_PER_MS, concat, crc32c, sizes, timestamp_range
from storage.errors import Corrupt
from storage.objectstore import Part

FORMAT = 1

GROUP_ROWS = 10_000
"""A group is decoded whole to serve any of its rows: this many take about a millisecond."""
GROUP_BYTES_MAX = 8 * 1024 * 1024
"""Keys, values and headers of a group, raw; a larger record is a group of its own."""

FOOTER_READ_BYTES = 64 * 1024
"""How much of a file's end to fetch first: a footer of ~100 groups, a million records, fits."""
FOOTER_BYTES_MAX = 64 * 1024 * 1024
"""A footer that says it is larger is not believed (I10)."""

_CODECS = {"producer": "zstd", "uncompressed": "none"}
"""Values of `compression.type` that Parquet calls otherwise."""
_LEVELS = {"zstd": 1}
"""zstd 3 and up cost more than they save."""

_ENCODINGS = {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"}
"""Dense numbers cost 0.5 bytes a record like this, 2.4 as plain zstd: 8 % of a file of events."""

_KEYS_PER_DISTINCT_MIN = 4
"""A dictionary of keys pays when each occurs this often; of distinct ones it takes half more."""

_MAGIC = b"PAR1"
_END_BYTES = 8  # the footer's length and the magic
_MARK = b"tidelog-crc32c:"
_HEX_DIGITS = 8


class Written(NamedTuple):
    """A finished segment. `end_offset` is that of its last record plus one; timestamps are ms."""

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
    """Key compaction came to `end_offset` for the first time at `at_ms`, by the store's clock."""

    end_offset: int
    at_ms: int


class Group(NamedTuple):
    """One row group: bytes [start, start + length) of the file. Timestamps are ms."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    start: int
    length: int
    crc32c: int
    rows: int
    base_offset: int
    end_offset: int
    timestamp_min: int
    timestamp_max: int
    raw_bytes: int
    """Before compression."""


def write(batches: Iterable[pa.RecordBatch], *, codec: str, is_json: bool) -> Written:
    """The segment of these records: RECORD_SCHEMA, offsets ascending, at least one of them.

    `codec` is a value of `compression.type`; `is_json` promises that every key and value is null or
    JSON text. The same batches give the same bytes, however they are cut. Works on one core.
    """
    writer = SegmentWriter(codec)
    for batch in batches:
        writer.add(batch)
    return writer.finish(is_json=is_json)


class SegmentWriter:
    """`write` for records that come bit by bit. Holds the encoded segment and one row group."""

    def __init__(self, codec: str) -> None:
        self._codec = _CODECS.get(codec, codec)
        self._sink = pa.BufferOutputStream()
        self._writer: pq.ParquetWriter | None = None
        self._cut = _Cut()
        self._rows = self._base_offset = self._end_offset = self._groups = 0
        self._stamps: list[int] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """The next records."""
        for group in self._cut.add(batch):
            self._write(group)

    def finish(self, *, is_json: bool, cleaned: Sequence[Cleaned] = ()) -> Written:
        """The segment; nothing can be added any more."""
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
            self._writer = _writer(self._sink, self._codec, has_few_keys=_has_few_keys(batch))
            self._base_offset = int(offsets[0])
        self._writer.write_batch(batch, row_group_size=batch.num_rows)
        self._end_offset = int(offsets[-1]) + 1
        self._rows += batch.num_rows
        self._stamps += timestamp_range(batch)
        self._groups += 1


def footer_length(tail: Part, key: str) -> int:
    """How many of the file's last bytes `read_footer` needs; `tail` is some of them.

    May be more than the file has when these are damaged: pass the whole then, it does not verify.
    """
    if len(tail) < _END_BYTES or bytes(tail[-len(_MAGIC) :]) != _MAGIC:
        raise Corrupt(key, "does not end as a Parquet file")
    length = int.from_bytes(tail[-_END_BYTES : -len(_MAGIC)], "little")
    if length > FOOTER_BYTES_MAX:
        raise Corrupt(key, f"footer of {length} bytes is over the limit of {FOOTER_BYTES_MAX}")
    return length + _END_BYTES


def read_footer(tail: Part, size: int, key: str) -> "Footer":
    """The footer of a file of `size` bytes that ends with `tail`, at least `footer_length` of it.

    Raises Corrupt when a bit of it is wrong, or when it is no segment of a format known here.
    """
    needed = footer_length(tail, key)
    if needed > len(tail):
        raise Corrupt(key, f"footer takes {needed} bytes, the file has {len(tail)}")
    raw = bytes(tail[-needed:])
    slot = raw.rfind(_MARK) + len(_MARK)
    digits = raw[slot : slot + _HEX_DIGITS]
    if slot < len(_MARK) or _footer_checksum(raw, slot) != digits:
        raise Corrupt(key, "checksum of the footer differs, or it is no segment")
    try:
        metadata = pq.read_metadata(pa.BufferReader(raw))
        return Footer(metadata, size)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:  # msgspec's, too
        raise Corrupt(key, f"footer does not decode: {error}") from error


class Footer:
    """What the end of a segment says of it: immutable, shared by threads, kept in a cache.

    `nbytes` is an estimate of its memory. Groups are in offset order and never overlap.
    """

    __slots__ = ("_ends", "_size", "cleaned", "groups", "is_json", "metadata", "nbytes")

    def __init__(self, metadata: pq.FileMetaData, size: int) -> None:
        pairs = metadata.metadata or {}
        if pairs[b"tidelog.format"] != str(FORMAT).encode():
            raise ValueError(f"segment format {pairs[b'tidelog.format']!r}, known is {FORMAT}")
        digits = pairs[b"tidelog.crc32c"][len(_MARK) + _HEX_DIGITS :]
        checksums = np.frombuffer(bytes.fromhex(digits.decode()), dtype=">u4").tolist()
        self.is_json: bool = pairs[b"tidelog.json"] == b"true"
        self.cleaned: Sequence[Cleaned] = msgspec.json.decode(
            pairs.get(b"tidelog.cleaned", b"[]"), type=list[Cleaned]
        )
        self.groups: Sequence[Group] = tuple(
            _group(index, metadata.row_group(index), checksums[index])
            for index in range(metadata.num_row_groups)
        )
        self.nbytes: int = metadata.serialized_size * 6 + len(self.groups) * 500
        self.metadata = metadata
        self._size = size
        self._ends = [group.end_offset for group in self.groups]

    def groups_between(self, first_offset: int, end_offset: int) -> Sequence[Group]:
        """The groups that may hold records of [first_offset, end_offset), in order."""
        first = bisect_right(self._ends, first_offset)
        last = first
        while last < len(self.groups) and self.groups[last].base_offset < end_offset:
            last += 1
        return self.groups[first:last]

    def group_for_timestamp(self, timestamp: int) -> Group | None:
        """The first group with a record at or after `timestamp` (ms)."""
        return next((group for group in self.groups if group.timestamp_max >= timestamp), None)

    def decode_group(self, index: int, data: Part, key: str) -> pa.RecordBatch:
        """The records of group `index`, RECORD_SCHEMA; `data` is its range of the file.

        Raises Corrupt when a bit is wrong: the checksum decides, and only then Parquet reads.
        """
        group = self.groups[index]
        if len(data) != group.length or crc32c(data) != group.crc32c:
            raise Corrupt(key, f"checksum of row group {index} differs")
        try:
            window: Any = _Window(data, group.start, self._size)
            file = pq.ParquetFile(pa.PythonFile(window, mode="r"), metadata=self.metadata)
            columns: list[Any] = file.read_row_group(index, use_threads=False).columns
            return pa.RecordBatch.from_arrays(
                [one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for one in columns],
                schema=RECORD_SCHEMA,
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Corrupt(key, f"row group {index} does not decode: {error}") from error


class _Window:
    """A file of `size` bytes of which [start, start + len(data)) can be read: what Arrow asks for.

    Reading anything else is an error, so that nobody decodes more than was fetched unseen.
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
        """Without a copy; Arrow calls this instead of `read` where it can."""
        first = self._at - self._start
        if first < 0 or first + count > self._data.size:
            raise OSError(f"read of {count} bytes at {self._at}, outside of the row group")
        self._at += count
        return self._data.slice(first, count)

    def read(self, count: int) -> bytes:
        return self.read_buffer(count).to_pybytes()

    def close(self) -> None:
        """The data is the caller's."""


def _writer(sink: pa.BufferOutputStream, codec: str, *, has_few_keys: bool) -> pq.ParquetWriter:
    settings: dict[str, Any] = {
        "compression": codec,
        "compression_level": _LEVELS.get(codec),
        "use_dictionary": ["key"] if has_few_keys else False,
        "column_encoding": _ENCODINGS,
        # Of keys they would only grow the footer, 30 bytes a group: keys lie in no order.
        "write_statistics": ["offset", "timestamp"],
        "write_page_index": True,
        "write_page_checksum": True,
        "store_schema": False,  # a kilobyte that only Arrow reads, and that says nothing new
    }
    return pq.ParquetWriter(sink, RECORD_SCHEMA, **settings)


def _has_few_keys(batch: pa.RecordBatch) -> bool:
    return bool(
        pc.count_distinct(batch.column("key"), mode="all").as_py() * _KEYS_PER_DISTINCT_MIN
        <= batch.num_rows
    )


class _Cut:
    """The same records, one batch a row group."""

    def __init__(self) -> None:
        self._group: list[pa.RecordBatch] = []
        self._rows = self._used = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The row groups that are full with this batch."""
        ends = np.cumsum(sizes(batch)) + _header_bytes(batch)
        first = before = 0
        while first < batch.num_rows:
            room = before + GROUP_BYTES_MAX - self._used
            fitting = int(np.searchsorted(ends, room, side="right"))
            last = max(fitting, first if self._rows else first + 1)  # a group has one row at least
            last = min(last, first + GROUP_ROWS - self._rows)
            if last > first:
                self._group.append(batch.slice(first, last - first))
                self._rows += last - first
                self._used += int(ends[last - 1]) - before
                first, before = last, int(ends[last - 1])
            if first < batch.num_rows or self._rows == GROUP_ROWS:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is left, if anything is."""
        if self._group:
            group = concat(self._group)
            self._group, self._rows, self._used = [], 0, 0
            yield group


def _header_bytes(batch: pa.RecordBatch) -> np.ndarray | int:
    """Bytes of headers up to and with each row."""
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return 0
    parts = pc.list_flatten(headers)
    total = np.zeros(len(parts) + 1, dtype=np.int64)
    for name in ("key", "value"):
        lengths = pc.fill_null(pc.binary_length(pc.struct_field(parts, name)), 0)
        total[1:] += np.cumsum(lengths.to_numpy(zero_copy_only=False))
    counts = pc.fill_null(pc.list_value_length(headers), 0)
    return total[np.cumsum(counts.to_numpy(zero_copy_only=False))]


def _group(index: int, row_group: pq.RowGroupMetaData, checksum: int) -> Group:
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    # A dictionary page comes before the data pages; None or 0 when there is none.
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    start = min(starts)
    lengths = [column.total_compressed_size for column in columns]
    end = max(map(operator.add, starts, lengths))
    offsets: Any = columns[0].statistics
    stamps: Any = columns[1].statistics
    return Group(
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
    """Put the checksums where `write` left zeros; in place, for a copy would be of megabytes."""
    view = memoryview(body).cast("B")
    metadata = pq.read_metadata(pa.BufferReader(body))
    footer = view[-metadata.serialized_size - _END_BYTES :]
    slot = bytes(footer).rfind(_MARK) + len(_MARK)
    for index in range(metadata.num_row_groups):
        group = _group(index, metadata.row_group(index), 0)
        at = slot + _HEX_DIGITS * (1 + index)
        data = view[group.start : group.start + group.length]
        footer[at : at + _HEX_DIGITS] = b"%08x" % crc32c(data)
    footer[slot : slot + _HEX_DIGITS] = _footer_checksum(bytes(footer), slot)


def _footer_checksum(raw: bytes, slot: int) -> bytes:
    zeros = b"0" * _HEX_DIGITS
    return b"%08x" % crc32c(raw[:slot] + zeros + raw[slot + _HEX_DIGITS :])
