"""Arrow IPC streams: decoding of produce requests, encoding of fetch answers; columns in and out.

Input may be malicious. This module checks the columns' types before Arrow reads any column, and
accepts a type only if it can check all buffers of the type. It reads sizes from the messages'
metadata before Arrow decompresses, and validates every batch in full. Before a cast that can make a
column larger (dictionaries, views, columns of nulls) it counts the memory. A body becomes records,
InvalidBody or RecordTooLarge. It never crashes the broker, and decoding never takes more memory
than its bound (I10).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.service.formats.json_in import (
    TIMESTAMP_MS_MAX,
    InvalidBody,
    Produced,
    check_count,
    one_line,
)
from tidelog.storage.core.chunk import (
    CHUNK_SCHEMA,
    HEADERS_TYPE,
    RECORD_BYTES,
    RECORD_SCHEMA,
    TIMESTAMP_TYPE,
    US_PER_MS,
    concat,
    no_headers,
    same_timestamps,
    timestamps_us,
    weight,
)
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge
from tidelog.storage.core.partitioner import Column

MERGE_ROWS = 1000
"""If the batches of an answer have fewer rows than this on average, they are merged, because each
batch costs a reader time."""

_TYPES: dict[str, Any] = {
    **{field.name: field.type for field in CHUNK_SCHEMA},
    "partition": pa.int64(),
}
_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)
_PLACED_SCHEMA = pa.schema(
    [
        *RECORD_SCHEMA,
        pa.field("topic", pa.string(), False),
        pa.field("partition", pa.int32(), False),
    ]
)
_SCHEMA_MESSAGE = RECORD_SCHEMA.serialize().to_pybytes()
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_NOT_ARROW = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)


class UnpackedTooLarge(RecordTooLarge):
    """Decoding the body would need more memory than its bound."""


def decode_arrow(body: bytes, now_ms: int, *, bytes_max: int) -> Produced:
    """Decode a stream of batches with a column `value` and the optional columns `key`, `timestamp`
    (any unit, or int ms), `headers` and `partition` (int). `offset` is ignored, so that clients can
    produce the records that they fetched. Strings, dictionaries, large and view columns are
    accepted.

    Missing and null timestamps become `now_ms`. Raises InvalidBody, RecordTooLarge for too many
    records, or UnpackedTooLarge if decoding would need more than `bytes_max` of memory. The columns
    of a stream without compression refer to the bytes of the body, so the body stays in memory.
    """
    budget = _DecodeBudget(bytes_max)
    try:
        _weigh_messages(body, budget)
        with pa.ipc.open_stream(pa.py_buffer(body), options=_READ_OPTIONS) as reader:
            names = _names(reader.schema)
            has_timestamps = "timestamp" in names
            is_exact = all(reader.schema.field(name).type == _TYPES[name] for name in names)
            read = [
                _read(batch.select(names), now_ms, budget, is_exact=is_exact)
                for batch in reader
                if batch.num_rows
            ]
        if not read:
            raise InvalidBody("the stream has no records")
        rows = concat([batch for batch, _ in read])
        # `nbytes` also counts bytes of null values, which the request keeps in memory.
        size = max(weight(rows), rows.nbytes)
        return Produced(rows, _partitions(read), False, rows.num_rows, size, has_timestamps)
    except (InvalidBody, RecordTooLarge):
        raise
    except InvalidRequest as error:
        raise InvalidBody(one_line(str(error))) from error
    except (*_NOT_ARROW, struct.error) as error:
        why = one_line(str(error))
        raise InvalidBody(f"the body is not an Arrow stream of records: {why}") from error


def encode_arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Encode the rows of `batches`, in order, as a stream of RECORD_SCHEMA."""
    if len(batches) > 1 and sum(map(len, batches)) < MERGE_ROWS * len(batches):
        batches = [concat(batches)]
    return _stream(_SCHEMA_MESSAGE, batches)


def encode_arrow_of_many(parts: Iterable[tuple[str, int, Sequence[pa.RecordBatch]]]) -> bytes:
    """Encode several partitions, each in order, with columns `topic` and `partition`."""
    batches = []
    for topic, partition, found in parts:
        batch = concat(list(found))
        where: list[Any] = [
            pa.repeat(pa.scalar(topic, pa.string()), len(batch)),
            pa.repeat(pa.scalar(partition, pa.int32()), len(batch)),
        ]
        columns = [*batch.columns, *where]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=_PLACED_SCHEMA))
    if len(batches) > 1 and sum(map(len, batches)) < MERGE_ROWS * len(batches):
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return _stream(_PLACED_SCHEMA.serialize().to_pybytes(), batches)


def _stream(schema: bytes, batches: Iterable[pa.RecordBatch]) -> bytes:
    messages: Any = (batch.serialize() for batch in batches)
    return b"".join((schema, *messages, _END_OF_STREAM))


class _DecodeBudget:
    """The memory that one request may still take."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._left = bytes_max
        self._records = 0

    def take_records(self, count: int) -> None:
        self._records += count
        check_count(self._records)
        self.take(count * RECORD_BYTES)

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise UnpackedTooLarge(f"the body decompresses to more than {self._bytes_max} bytes")


# --- batches


def _names(schema: pa.Schema) -> list[str]:
    """Return the names of the columns to decode. Raises InvalidBody for a wrong name or type."""
    names = schema.names
    if len(set(names)) < len(names):
        raise InvalidBody("two columns have the same name")
    if "value" not in names:
        raise InvalidBody("there is no column 'value'")
    if unknown := sorted(set(names) - {*_TYPES, "offset"}):
        raise InvalidBody(f"unknown column {unknown[0][:100]!r}")
    for name in names:
        _check_type(name, schema.field(name).type)
    return [name for name in names if name != "offset"]


def _read(
    batch: pa.RecordBatch, now_ms: int, budget: _DecodeBudget, *, is_exact: bool
) -> "tuple[pa.RecordBatch, Column | None]":
    """Return the batch in CHUNK_SCHEMA with all timestamps, and its `partition` column."""
    rows = batch.num_rows
    budget.take_records(rows)
    batch.validate(full=True)  # untrusted bytes
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not is_exact:
        for column in columns.values():
            _check_views(column)
        columns = {name: _cast(column, name, budget) for name, column in columns.items()}
    stamps, key, headers = map(columns.get, ("timestamp", "key", "headers"))
    if headers is not None:
        _check_headers(headers)
    conformed = pa.RecordBatch.from_arrays(
        [
            same_timestamps(now_ms, rows) if stamps is None else _stamped(stamps, now_ms),
            pa.nulls(rows, pa.binary()) if key is None else key,
            columns["value"],
            no_headers(rows) if headers is None else headers,
        ],
        schema=CHUNK_SCHEMA,
    )
    return conformed, columns.get("partition")


def _cast(column: Column, name: str, budget: _DecodeBudget) -> Column:
    """Cast a validated column of any type to the type that its name requires."""
    if column.type == _TYPES[name]:
        return column
    if name == "partition":
        return column.cast(pa.int64())
    if name == "timestamp":
        return _timestamps(column)
    if name == "headers":
        return _headers(column, budget)
    octets: Column = _octets(column, budget).cast(pa.binary())
    return octets


def _timestamps(column: Column) -> Column:
    if not pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    # Nanoseconds are truncated. A coarser unit may overflow, and then the cast must raise.
    return column.cast(TIMESTAMP_TYPE, safe=column.type.unit != "ns")


def _stamped(column: Column, now_ms: int) -> Column:
    if column.null_count:
        column = column.fill_null(pa.scalar(now_ms * US_PER_MS, pa.int64()).cast(TIMESTAMP_TYPE))
    stamps = timestamps_us(column)
    if stamps.min() < 0 or stamps.max() // US_PER_MS > TIMESTAMP_MS_MAX:
        raise InvalidBody(f"a timestamp is not between 0 and {TIMESTAMP_MS_MAX} ms")
    return column


def _headers(column: Column, budget: _DecodeBudget) -> Column:
    """Convert lists of pairs (key, value), whose types may be any string and binary types."""
    lists: Any = column
    if pa.types.is_null(lists.type):
        return no_headers(len(column))
    flat = lists.flatten()
    if flat.null_count:
        raise InvalidBody("a header is null")
    pairs = pa.StructArray.from_arrays(
        [
            _octets(flat.field("key"), budget).cast(pa.string()),
            _octets(flat.field("value"), budget).cast(pa.binary()),
        ],
        fields=list(HEADERS_TYPE.value_type),
    )
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    offsets: Any = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
    built: Column = pa.ListArray.from_arrays(
        offsets, pairs, type=HEADERS_TYPE, mask=lists.is_null()
    )
    return built


def _check_headers(column: Any) -> None:
    """Check that each header has a key. As in Kafka, the value of a header may be null."""
    if column.null_count < len(column):
        flat = column.flatten()
        if flat.null_count or flat.field("key").null_count:
            raise InvalidBody("a header has no key")


def _octets(column: Any, budget: _DecodeBudget) -> Any:
    """Return the values in a form that Arrow can cast to strings or binary. Take the memory of the
    cast from the budget first."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _octets(column.storage, budget)
    if pa.types.is_dictionary(kind):
        return _looked_up(column, budget)
    if _is_view(kind):  # many views may share the same bytes
        budget.take(int(_views(column)[:, 0].sum(dtype=np.int64)))
    return column


def _looked_up(column: Any, budget: _DecodeBudget) -> Any:
    """Return the values of a dictionary column, after taking their size from the budget."""
    words = _octets(column.dictionary, budget).cast(pa.binary())
    if not len(words):
        return pa.nulls(len(column), pa.binary())
    lengths = pc.binary_length(words).fill_null(0).to_numpy(zero_copy_only=False)
    nulls = column.indices.is_null().to_numpy(zero_copy_only=False)
    indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    budget.take(int(lengths.astype(np.int64)[indices].sum()))
    # The index of a null may be invalid, so it was replaced by 0.
    return words.take(pa.array(indices, mask=nulls))


def _partitions(read: "list[tuple[pa.RecordBatch, Column | None]]") -> "Column | None":
    columns = [column for _, column in read if column is not None]
    if all(column.null_count == len(column) for column in columns):
        return None
    return pa.concat_arrays(columns)


# --- accepted types, and checks that Arrow's validation omits


def _check_type(name: str, kind: pa.DataType) -> None:
    """Raise InvalidBody for a type that is not known to be safe. Ignored columns are checked too,
    because Arrow reads all columns."""
    if name == "headers":
        is_taken, wanted = _is_pairs(kind), "a list of key and value, strings or binary"
    elif name == "timestamp":
        is_taken, wanted = _is_integer(kind) or pa.types.is_timestamp(kind), "a time or an integer"
    elif name in ("partition", "offset"):
        is_taken, wanted = _is_integer(kind), "an integer"
    else:
        is_taken, wanted = _is_octets(kind), "strings or binary"
    if not is_taken:
        raise InvalidBody(f"column {name!r} is {one_line(str(kind))[:100]}, not {wanted}")


def _is_integer(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_null(kind)


def _is_pairs(kind: Any) -> bool:
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return pa.types.is_null(kind)
    pair = kind.value_type
    return (
        pa.types.is_struct(pair)
        and sorted(field.name for field in pair) == ["key", "value"]
        and all(_is_octets(field.type) for field in pair)
    )


def _is_octets(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return _is_view(kind) or any(is_octets(kind) for is_octets in _OCTET_TYPES)


_OCTET_TYPES = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
    pa.types.is_fixed_size_binary,
    pa.types.is_null,
)


def _is_view(kind: pa.DataType) -> bool:
    return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)


_VIEW_INTS = 4
"""A view has four integers: the length of the value, its first four bytes, the number of a buffer,
and the position of the value in that buffer."""
_INLINE_BYTES_MAX = 12
"""A value up to this size is in the view itself, in place of the last three integers."""


def _views(column: Any) -> Any:
    """Return the views of a column, one view in each row."""
    ints = np.frombuffer(
        column.buffers()[1] or b"",
        np.int32,
        count=_VIEW_INTS * len(column),
        offset=_VIEW_INTS * np.int32().itemsize * column.offset,
    )
    return ints.reshape(-1, _VIEW_INTS)


def _check_views(column: Any) -> None:
    """Raise InvalidBody if a view of a column, or of a child column, lies outside the buffers of
    this column. Arrow's validation skips the views of null values, but its casts read these views.
    A negative length in such a view crashes the process.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _check_views(column.storage)
    elif pa.types.is_dictionary(kind):
        _check_views(column.dictionary)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_views(column.values)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _check_views(column.field(number))
    elif _is_view(kind) and len(column):
        lengths, _, numbers, starts = _views(column).T.astype(np.int64)
        sizes = [0 if data is None else data.size for data in column.buffers()[2:]]
        is_near = (lengths >= 0) & (lengths <= _INLINE_BYTES_MAX)
        is_far = (lengths > _INLINE_BYTES_MAX) & (numbers >= 0) & (numbers < len(sizes))
        rooms = np.array([*sizes, 0])[np.where(is_far, numbers, -1)]
        if not (is_near | (is_far & (starts >= 0) & (starts + lengths <= rooms))).all():
            raise InvalidBody(f"a value of a column of {kind} lies outside the column")


# --- decompressed size of a message, from its metadata (Arrow's Message.fbs, RecordBatch)

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_I32 = struct.Struct("<i").unpack_from
_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I64 = struct.Struct("<q").unpack_from
_SPAN = struct.Struct("<qq")


def _weigh_messages(body: bytes, budget: _DecodeBudget) -> None:
    """Take the decompressed sizes of all compressed buffers from the budget.

    A buffer's first eight bytes are its decompressed size. Arrow allocates this size before it
    decompresses. If this function misreads damaged metadata, Arrow's own verifier refuses the
    metadata afterwards.
    """
    for message in _messages(pa.ipc.MessageReader.open_stream(pa.py_buffer(body))):
        for size in _unpacked_sizes(message):
            budget.take(size)


def _messages(reader: pa.ipc.MessageReader) -> Iterator[pa.ipc.Message]:
    try:
        while True:
            yield reader.read_next_message()
    except StopIteration:
        return


def _unpacked_sizes(message: pa.ipc.Message) -> Iterator[int]:
    meta = memoryview(message.metadata)
    top = _Table(meta, _U32(meta, 0)[0])
    at = top.field(1)
    kind = meta[at] if at else 0
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return
    batch = top.table(2)
    if kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    if not batch.field(3):  # no compression
        return
    body = memoryview(message.body or b"")
    buffers = batch.indirect(2)
    for number in range(_U32(meta, buffers)[0]):
        offset, length = _SPAN.unpack_from(meta, buffers + 4 + number * _SPAN.size)
        if not length:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise InvalidBody("a buffer of the stream lies outside its message")
        size = _I64(body, offset)[0]
        if size < -1:
            raise InvalidBody("a buffer of the stream has a negative size")
        if size > 0:  # -1: this buffer is not compressed
            yield size


class _Table(NamedTuple):
    """A FlatBuffers table at a position of `meta`, whose vtable has the positions of its fields."""

    meta: memoryview
    position: int

    def field(self, number: int) -> int:
        """Return the position of the field's value, or 0 if the field is missing."""
        vtable = self.position - _I32(self.meta, self.position)[0]
        slot = 4 + 2 * number
        if slot >= _U16(self.meta, vtable)[0]:
            return 0
        offset = _U16(self.meta, vtable + slot)[0]
        return self.position + int(offset) if offset else 0

    def indirect(self, number: int) -> int:
        """Return the position of a vector or table that the field refers to."""
        at = self.field(number)
        if not at:
            raise InvalidBody("a message of the stream lacks a field")
        return at + int(_U32(self.meta, at)[0])

    def table(self, number: int) -> "_Table":
        return _Table(self.meta, self.indirect(number))
