"""Bodies of produce requests and answers of fetches as Arrow IPC streams: columns in, columns out.

What comes in is hostile until proven otherwise: sizes are read from the messages' metadata before
Arrow unpacks anything, every batch is validated in full, and whatever can grow when it is cast
(dictionaries, views, columns of nothing) is counted first. A body is records or one of our
refusals, never a crash and never more than its bound of memory (I10).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from service.wire_in import TIMESTAMP_MS_MAX, InvalidBody, Produced, one_line
from storage.chunk import (
    CHUNK_SCHEMA,
    HEADERS_TYPE,
    RECORD_SCHEMA,
    TIMESTAMP_TYPE,
    US_PER_MS,
    concat,
    no_headers,
    same_timestamps,
    timestamps_us,
)
from storage.errors import InvalidRequest, RecordTooLarge

Column: TypeAlias = "pa.Array[Any]"

ROW_BYTES = 24
"""What a row without a byte of content takes as columns: a timestamp, offsets, validity."""

MERGE_ROWS = 1000
"""Answers of batches smaller than this on average are merged: readers pay per batch."""

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
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_NOT_ARROW = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)


def decode_arrow(body: bytes, now_ms: int, *, bytes_max: int) -> Produced:
    """The records of a stream of batches with a column `value`, and perhaps `key`, `timestamp`
    (any unit, or int ms), `headers`, `partition` (int); `offset` is ignored, so that what was
    fetched can be produced. Strings, dictionaries, large and view columns are taken.

    Missing and null timestamps become `now_ms`. Raises InvalidBody, or RecordTooLarge when more
    than `bytes_max` of memory would be needed. Without compression the columns are the body's
    own bytes, which live as long as they do.
    """
    budget = _Budget(bytes_max)
    try:
        _weigh_messages(body, budget)
        with pa.ipc.open_stream(pa.py_buffer(body), options=_OPTIONS) as reader:
            names = _names(reader.schema)
            is_exact = all(reader.schema.field(name).type == _TYPES[name] for name in names)
            read = [
                _read(batch.select(names), now_ms, budget, is_exact=is_exact)
                for batch in reader
                if batch.num_rows
            ]
        if not read:
            raise InvalidBody("the stream has no records")
        rows = concat([batch for batch, _ in read])
        return Produced(rows, _partitions(read), False, rows.num_rows)
    except (InvalidBody, RecordTooLarge):
        raise
    except InvalidRequest as error:
        raise InvalidBody(one_line(str(error))) from error
    except (*_NOT_ARROW, struct.error) as error:
        why = one_line(str(error))
        raise InvalidBody(f"the body is not an Arrow stream of records: {why}") from error


def encode_arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    """A stream of RECORD_SCHEMA with the rows of `batches`, in order."""
    if len(batches) > 1 and sum(map(len, batches)) < MERGE_ROWS * len(batches):
        batches = [concat(batches)]
    messages: Any = (batch.serialize() for batch in batches)
    return b"".join((_SCHEMA_MESSAGE, *messages, _END_OF_STREAM))


def encode_arrow_of_many(parts: Iterable[tuple[str, int, Sequence[pa.RecordBatch]]]) -> bytes:
    """The same of several partitions, each in order, with a column `topic` and one `partition`."""
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
    messages: Any = (batch.serialize() for batch in batches)
    return b"".join((_PLACED_SCHEMA.serialize().to_pybytes(), *messages, _END_OF_STREAM))


class _Budget:
    """The memory that one request may still take."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._left = bytes_max

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise RecordTooLarge(f"the body unpacks to more than {self._bytes_max} bytes")


# --- batches


def _names(schema: pa.Schema) -> list[str]:
    """The columns that count; raises InvalidBody for a wrong set."""
    names = schema.names
    if len(set(names)) < len(names):
        raise InvalidBody("two columns have one name")
    if "value" not in names:
        raise InvalidBody("there is no column 'value'")
    if unknown := sorted(set(names) - {*_TYPES, "offset"}):
        raise InvalidBody(f"unknown column {unknown[0][:100]!r}")
    return [name for name in names if name != "offset"]


def _read(
    batch: pa.RecordBatch, now_ms: int, budget: _Budget, *, is_exact: bool
) -> "tuple[pa.RecordBatch, Column | None]":
    """A batch as CHUNK_SCHEMA with all timestamps, and its `partition` column."""
    rows = batch.num_rows
    budget.take(rows * ROW_BYTES)
    batch.validate(full=True)  # these bytes come from outside
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not is_exact:
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


def _cast(column: Column, name: str, budget: _Budget) -> Column:
    """A column of any type, validated, as the type that its name asks for."""
    if column.type == _TYPES[name]:
        return column
    if name == "partition":
        return _integers(column, name)
    if name == "timestamp":
        return _timestamps(column)
    if name == "headers":
        return _headers(column, budget)
    octets: Column = _octets(column, budget).cast(pa.binary())
    return octets


def _integers(column: Column, name: str) -> Column:
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise InvalidBody(f"column {name!r} is {column.type}, not an integer")
    return column.cast(pa.int64())


def _timestamps(column: Column) -> Column:
    if not pa.types.is_timestamp(column.type):
        column = _integers(column, "timestamp").cast(pa.timestamp("ms", tz="UTC"))
    # Finer units are cut off; a coarser one may overflow, and then the cast must say so.
    return column.cast(TIMESTAMP_TYPE, safe=column.type.unit != "ns")


def _stamped(column: Column, now_ms: int) -> Column:
    if column.null_count:
        column = column.fill_null(pa.scalar(now_ms * US_PER_MS, pa.int64()).cast(TIMESTAMP_TYPE))
    stamps = timestamps_us(column)
    if stamps.min() < 0 or stamps.max() // US_PER_MS > TIMESTAMP_MS_MAX:
        raise InvalidBody(f"a timestamp is not between 0 and {TIMESTAMP_MS_MAX} ms")
    return column


def _headers(column: Column, budget: _Budget) -> Column:
    """Lists of (key, value) of any string and binary types."""
    lists: Any = column
    if pa.types.is_null(lists.type):
        return no_headers(len(column))
    is_list = pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)
    pair = lists.type.value_type if is_list else pa.null()
    if not pa.types.is_struct(pair) or sorted(field.name for field in pair) != ["key", "value"]:
        raise InvalidBody(f"column 'headers' is {column.type}, not a list of key and value")
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
    """Kafka's headers may lack a value, not a key."""
    if column.null_count < len(column):
        flat = column.flatten()
        if flat.null_count or flat.field("key").null_count:
            raise InvalidBody("a header has no key")


def _octets(column: Any, budget: _Budget) -> Any:
    """A column that a plain cast turns into strings or binary without growing."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _octets(column.storage, budget)
    if pa.types.is_dictionary(kind):
        return _looked_up(column, budget)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # A view: its length in its first four bytes of sixteen; many may show the same bytes.
        views = np.frombuffer(memoryview(column.buffers()[1]), dtype=np.int32)
        lengths = views[4 * column.offset : 4 * (column.offset + len(column)) : 4]
        budget.take(int(lengths.sum(dtype=np.int64, where=lengths > 0)))
        return column
    if not any(is_octets(kind) for is_octets in _OCTETS):
        raise InvalidBody(f"a column of {kind} is neither strings nor binary")
    return column


_OCTETS = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
    pa.types.is_fixed_size_binary,
    pa.types.is_null,
)


def _looked_up(column: Any, budget: _Budget) -> Any:
    """A dictionary column written out, after counting what that takes."""
    words = _octets(column.dictionary, budget).cast(pa.binary())
    if not len(words):
        return pa.nulls(len(column), pa.binary())
    lengths = pc.binary_length(words).fill_null(0).to_numpy(zero_copy_only=False)
    indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    budget.take(int(lengths.astype(np.int64)[indices].sum()))
    return words.take(column.indices)


def _partitions(read: "list[tuple[pa.RecordBatch, Column | None]]") -> "Column | None":
    said = [column for _, column in read if column is not None]
    if all(column.null_count == len(column) for column in said):
        return None
    return pa.concat_arrays(said)


# --- what a message will unpack to, from its metadata (Arrow's Message.fbs, RecordBatch)

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_I32 = struct.Struct("<i").unpack_from
_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I64 = struct.Struct("<q").unpack_from
_SPAN = struct.Struct("<qq")


def _weigh_messages(body: bytes, budget: _Budget) -> None:
    """Take the unpacked sizes of all compressed buffers from the budget.

    Arrow allocates what the first eight bytes of a buffer claim before it unpacks it. Metadata that
    this reading gets wrong is refused by Arrow's own verifier afterwards.
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
        if size > 0:  # -1: this one is not compressed
            yield size


class _Table(NamedTuple):
    """A FlatBuffers table: its position, and fields found through its vtable."""

    meta: memoryview
    position: int

    def field(self, number: int) -> int:
        """Where the field's value lies; 0 when it is not given."""
        vtable = self.position - _I32(self.meta, self.position)[0]
        slot = 4 + 2 * number
        if slot >= _U16(self.meta, vtable)[0]:
            return 0
        offset = _U16(self.meta, vtable + slot)[0]
        return self.position + int(offset) if offset else 0

    def indirect(self, number: int) -> int:
        """Where a vector or table lies that the field refers to."""
        at = self.field(number)
        if not at:
            raise InvalidBody("a message of the stream lacks a field")
        return at + int(_U32(self.meta, at)[0])

    def table(self, number: int) -> "_Table":
        return _Table(self.meta, self.indirect(number))
