"""Arrow IPC streams: decoding of produce requests, encoding of fetch answers; columns in and out.

Input may be malicious. This module checks the columns' types before Arrow reads any column, and
accepts a type only if it can check all buffers of the type. It reads sizes from the messages'
metadata before Arrow decompresses (arrow_memory), and validates every batch in full. Lengths of
columns are no bound of bytes: a column of nulls has none. Before each step that takes memory for a
length, this module takes that memory from a budget. The rows of all batches are converted at once,
and a dictionary once for all its batches. A body becomes records, InvalidBody or RecordTooLarge. It
never crashes the broker, and decoding never takes more memory than its bound (I10).
"""

import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.service.formats.arrow_memory import (
    BUFFER_BYTES,
    MESSAGES_MAX,
    DecodeBudget,
    Octets,
    UnpackedTooLarge,
    cached_by_schema,
    check_messages,
)
from tidelog.service.formats.json_in import (
    TIMESTAMP_MS_MAX,
    InvalidBody,
    Produced,
    check_count,
    one_line,
)
from tidelog.storage.codec.chunk import RECORD_BYTES, timestamps_us, weight
from tidelog.storage.codec.partitioner import Column
from tidelog.storage.codec.record_columns import (
    CHUNK_SCHEMA,
    HEADERS_TYPE,
    RECORD_SCHEMA,
    TIMESTAMP_TYPE,
    US_PER_MS,
    concat,
    no_headers,
    same_timestamps,
)
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge

__all__ = [
    "MESSAGES_MAX",
    "UnpackedTooLarge",
    "decode_arrow",
    "encode_arrow",
    "encode_arrow_of_many",
]

HEADERS_MAX = 2_000_000
"""Bound of the headers in a request (I10)."""
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


def decode_arrow(
    body: bytes, now_ms: int, *, bytes_max: int, messages_max: int = MESSAGES_MAX
) -> Produced:
    """Decode a stream of batches of records; missing and null timestamps become `now_ms`.

    A batch has a column `value` and the optional columns `key`, `timestamp` (any unit, or int ms),
    `headers` and `partition` (int). `offset` is ignored, so that clients can produce the records
    that they fetched. Strings, dictionaries, large and view columns are accepted.

    Raises InvalidBody, RecordTooLarge for too many records, headers or messages, or
    UnpackedTooLarge if decoding would need more than `bytes_max` of memory, or if the stream has
    more than `messages_max` messages. The columns of a stream without compression refer to the
    bytes of the body, so the body stays in memory.
    """
    budget = DecodeBudget(bytes_max)
    try:
        columns = _columns_of(body[: check_messages(body, budget, messages_max)])
        with pa.ipc.open_stream(pa.py_buffer(body), options=_READ_OPTIONS) as reader:
            batches = [batch.select(columns.names) for batch in reader if batch.num_rows]
        if not batches:
            raise InvalidBody("the stream has no records")
        rows, partitions = _conformed(batches, columns, now_ms, budget)
        # `nbytes` also counts bytes of null values, which the request keeps in memory.
        size = max(weight(rows), rows.nbytes)
        return Produced(rows, partitions, False, rows.num_rows, size, "timestamp" in columns.names)
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
    for topic, partition, partition_batches in parts:
        batch = concat(list(partition_batches))
        place_columns: list[Any] = [
            pa.repeat(pa.scalar(topic, pa.string()), len(batch)),
            pa.repeat(pa.scalar(partition, pa.int32()), len(batch)),
        ]
        columns = [*batch.columns, *place_columns]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=_PLACED_SCHEMA))
    if len(batches) > 1 and sum(map(len, batches)) < MERGE_ROWS * len(batches):
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return _stream(_PLACED_SCHEMA.serialize().to_pybytes(), batches)


def _stream(schema: bytes, batches: Iterable[pa.RecordBatch]) -> bytes:
    messages: Any = (batch.serialize() for batch in batches)
    return b"".join((schema, *messages, _END_OF_STREAM))


# --- batches


class _Columns(NamedTuple):
    """The columns of a stream to decode. `is_plain`: none has dictionaries or views."""

    names: list[str]
    is_plain: bool


@cached_by_schema
def _columns_of(schema_message: Octets) -> _Columns:
    """Raises InvalidBody for a wrong name or type."""
    schema = pa.ipc.read_schema(pa.py_buffer(schema_message))
    names = _names(schema)
    return _Columns(names, all(_is_plain(schema.field(name).type) for name in names))


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


def _conformed(
    batches: Sequence[pa.RecordBatch], columns: _Columns, now_ms: int, budget: DecodeBudget
) -> "tuple[pa.RecordBatch, Column | None]":
    """Return all rows in CHUNK_SCHEMA with all timestamps, and their `partition` column.

    The rows of all batches are converted at once, because each conversion costs ~10 us.
    """
    rows = sum(batch.num_rows for batch in batches)
    check_count(rows)
    budget.take(rows * RECORD_BYTES)
    for batch in batches:  # untrusted bytes
        batch.validate(full=columns.is_plain)
        if not columns.is_plain:
            for column in batch.columns:
                _validate(column)
    joined = {
        name: _column(name, [batch.column(number) for batch in batches], budget)
        for number, name in enumerate(columns.names)
    }
    stamps, key, headers = map(joined.get, ("timestamp", "key", "headers"))
    if headers is not None:
        _check_headers(headers, budget)
    conformed = pa.RecordBatch.from_arrays(
        [
            same_timestamps(now_ms, rows) if stamps is None else _stamped(stamps, now_ms),
            pa.nulls(rows, pa.binary()) if key is None else key,
            joined["value"],
            no_headers(rows) if headers is None else headers,
        ],
        schema=CHUNK_SCHEMA,
    )
    partitions = joined.get("partition")
    if partitions is not None and partitions.null_count == rows:
        partitions = None
    return conformed, partitions


def _column(name: str, chunks: Sequence[Any], budget: DecodeBudget) -> Column:
    """Return validated chunks of any type as one column of the type that its name requires."""
    if chunks[0].type == _TYPES[name]:
        return _joined(chunks, budget)
    if name == "headers":
        return _headers(chunks, budget)
    if name not in ("timestamp", "partition"):
        octets: Column = _octets(chunks, budget).cast(pa.binary())
        return octets
    column = _joined(chunks, budget)
    budget.take(_CAST_BYTES * len(column))
    return column.cast(pa.int64()) if name == "partition" else _timestamps(column)


_CAST_BYTES = 32
"""Memory of a time or an integer in all steps of its conversion, each of 8 bytes."""


def _joined(chunks: Sequence[Any], budget: DecodeBudget) -> Any:
    """Return the chunks as one array. A single chunk is not copied."""
    if len(chunks) == 1:
        return chunks[0]
    if _is_view(chunks[0].type):  # the values themselves are not copied
        budget.take(_VIEW_BYTES * sum(map(len, chunks)))
    else:
        budget.take(pa.chunked_array(chunks).nbytes)
    return pa.concat_arrays(chunks)


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


# --- headers


def _headers(chunks: Sequence[Any], budget: DecodeBudget) -> Column:
    """Convert lists of pairs (key, value), whose types may be any string and binary types."""
    rows = sum(map(len, chunks))
    if pa.types.is_null(chunks[0].type):
        return no_headers(rows)
    budget.take(_CAST_BYTES * rows)
    if _is_plain(chunks[0].type):
        chunks = [_joined(chunks, budget)]
    lengths = [
        pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False) for chunk in chunks
    ]
    pairs = [
        _pairs(chunk, int(own.sum(dtype=np.int64)), budget)
        for chunk, own in zip(chunks, lengths, strict=True)
    ]
    _check_header_count(sum(map(len, pairs)))
    if any(chunk.null_count for chunk in pairs):
        raise InvalidBody("a header is null")
    columns: list[Any] = [
        _octets([chunk.field(name) for chunk in pairs], budget).cast(pa.binary()).cast(kind)
        for name, kind in (("key", pa.string()), ("value", pa.binary()))
    ]
    ends = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.concatenate(lengths), out=ends[1:])
    offsets: Any = pa.array(ends)
    built: Column = pa.ListArray.from_arrays(
        offsets,
        pa.StructArray.from_arrays(columns, fields=list(HEADERS_TYPE.value_type)),
        type=HEADERS_TYPE,
        mask=_joined([chunk.is_null() for chunk in chunks], budget),
    )
    return built


def _pairs(lists: Any, count: int, budget: DecodeBudget) -> Any:
    """Return the `count` pairs of the lists.

    Null lists may have pairs, too, which are omitted. (Arrow's `flatten` would then compare the
    dictionaries again for each list.)
    """
    starts = lists.offsets.to_numpy()
    pairs = lists.values.slice(starts[0], starts[-1] - starts[0])
    if len(pairs) > count:
        budget.take(pairs.nbytes + _CAST_BYTES * len(pairs))
        is_shown = lists.is_valid().to_numpy(zero_copy_only=False)
        pairs = pairs.filter(pa.array(np.repeat(is_shown, np.diff(starts))))
    return pairs


def _check_headers(column: Any, budget: DecodeBudget) -> None:
    """Check that each header has a key. As in Kafka, the value of a header may be null."""
    if column.null_count < len(column):
        if column.null_count:  # Arrow may copy the headers beside the nulls
            budget.take(column.nbytes)
        flat = column.flatten()
        _check_header_count(len(flat))
        budget.take(_CAST_BYTES * len(flat))  # their weight is computed
        if flat.null_count or flat.field("key").null_count:
            raise InvalidBody("a header has no key")


def _check_header_count(count: int) -> None:
    if count > HEADERS_MAX:
        raise RecordTooLarge(
            f"the request has {count} headers, the limit is {HEADERS_MAX}: send it in several "
            "requests"
        )


# --- strings and binary


def _octets(chunks: Sequence[Any], budget: DecodeBudget) -> Any:
    """Return the values of the chunks in a form that Arrow can cast to strings or binary.

    Take the memory of the cast from the budget first.
    """
    kind = chunks[0].type
    if isinstance(kind, pa.BaseExtensionType):
        return _octets([chunk.storage for chunk in chunks], budget)
    if pa.types.is_dictionary(kind):
        groups = itertools.groupby(chunks, functools.partial(_dictionary_identity, budget))
        return _joined([_looked_up(list(group), budget) for _, group in groups], budget)
    column = _joined(chunks, budget)
    if kind not in (pa.string(), pa.binary()):
        budget.take(_OFFSET_BYTES * len(column))
    if _is_view(kind):  # many views may share the same bytes
        budget.take(int(_views(column)[:, 0].sum(dtype=np.int64)))
    return column


_OFFSET_BYTES = 8
"""Memory of the end of a value and its bit of validity, of 32 bits or more."""


def _dictionary_identity(budget: DecodeBudget, chunk: Any) -> object:
    """Return an equal object for chunks that share one dictionary."""
    words = chunk.dictionary
    buffers = words.buffers()
    budget.take(BUFFER_BYTES * len(buffers))
    return len(words), words.offset, [buffer and buffer.address for buffer in buffers]


def _looked_up(chunks: Sequence[Any], budget: DecodeBudget) -> Any:
    """Return the values of chunks that share one dictionary, as views of its words.

    Take their size from the budget.
    """
    dictionary = chunks[0].dictionary
    _validate(dictionary)
    words = _octets([dictionary], budget).cast(pa.binary())
    positions = _joined([chunk.indices for chunk in chunks], budget)
    rows = len(positions)
    budget.take(_CAST_BYTES * len(words) + _LOOKUP_BYTES * rows)
    if positions.null_count == rows:
        return pa.nulls(rows, pa.binary_view())
    views = words.cast(pa.binary_view())
    nulls = None
    if positions.null_count:  # the index of a null may be invalid
        nulls = positions.is_null().to_numpy(zero_copy_only=False)
        positions = positions.fill_null(0)
    indices = positions.cast(pa.int64()).to_numpy()
    if indices.min() < 0:
        raise InvalidBody("an index of a dictionary is negative")
    picked = _views(views).take(indices, axis=0)
    if words.null_count:
        of_words = words.is_null().to_numpy(zero_copy_only=False)[indices]
        nulls = of_words if nulls is None else nulls | of_words
    valid = None
    if nulls is not None:
        picked[nulls] = 0
        valid = pa.py_buffer(np.packbits(~nulls, bitorder="little").data)
    budget.take(int(picked[:, 0].sum(dtype=np.int64)))
    buffers = [valid, pa.py_buffer(picked.data), *views.buffers()[2:]]
    return pa.Array.from_buffers(pa.binary_view(), rows, buffers)


_LOOKUP_BYTES = 48
"""Memory of a position in a dictionary, its view and so on while it is looked up."""


# --- accepted types, and checks that Arrow's validation omits


def _check_type(name: str, kind: pa.DataType) -> None:
    """Raise InvalidBody for a type that is not known to be safe.

    Ignored columns are checked too, because Arrow reads all columns.
    """
    if name == "headers":
        is_taken, expected_type = _is_pairs(kind), "a list of key and value, strings or binary"
    elif name == "timestamp":
        is_taken, expected_type = (
            _is_integer(kind) or pa.types.is_timestamp(kind),
            "a time or an integer",
        )
    elif name in ("partition", "offset"):
        is_taken, expected_type = _is_integer(kind), "an integer"
    else:
        is_taken, expected_type = _is_octets(kind), "strings or binary"
    if not is_taken:
        raise InvalidBody(f"column {name!r} is {one_line(str(kind))[:100]}, not {expected_type}")


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
    if pa.types.is_fixed_size_binary(kind):  # values without bytes would cost no bytes in a body
        return bool(kind.byte_width > 0)
    return _is_view(kind) or any(is_octets(kind) for is_octets in _OCTET_TYPES)


_OCTET_TYPES = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
    pa.types.is_null,
)


def _is_plain(kind: Any) -> bool:
    """Return whether the type, which `_check_type` has accepted, has no dictionaries and views."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_plain(kind.storage_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return all(_is_plain(field.type) for field in kind.value_type)
    return not pa.types.is_dictionary(kind) and not _is_view(kind)


def _is_view(kind: pa.DataType) -> bool:
    return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)


_VIEW_INTS = 4
"""A view has four integers: the length of the value, its first four bytes, the number of a buffer,
and the position of the value in that buffer."""
_VIEW_BYTES = 16
_INLINE_BYTES_MAX = 12
"""A value up to this size is in the view itself, in place of the last three integers."""


def _views(column: Any) -> Any:
    """Return the views of a column, one view in each row."""
    ints = np.frombuffer(
        column.buffers()[1] or b"",
        np.int32,
        count=_VIEW_INTS * len(column),
        offset=_VIEW_BYTES * column.offset,
    )
    return ints.reshape(-1, _VIEW_INTS)


def _validate(column: Any) -> None:
    """Validate a column of untrusted bytes in full, but not the words of a dictionary.

    Many batches may have the same words. The buffers have been validated (`RecordBatch.validate`).
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _validate(column.storage)
    elif pa.types.is_dictionary(kind):
        column.indices.validate(full=True)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _lists_of_nulls(column).validate(full=True)
        for number in range(kind.value_type.num_fields):
            _validate(column.values.field(number))
    else:
        column.validate(full=True)
        if _is_view(kind):
            for start in range(0, len(column), _VIEWS_AT_ONCE):
                _check_views(column.slice(start, _VIEWS_AT_ONCE))


def _lists_of_nulls(column: Any) -> pa.Array:
    """Return the lists with nulls as their values."""
    listed = pa.list_ if pa.types.is_list(column.type) else pa.large_list
    return pa.Array.from_buffers(
        listed(pa.null()),
        len(column),
        column.buffers()[:2],
        column.null_count,
        column.offset,
        [pa.Array.from_buffers(pa.null(), len(column.values), [None])],
    )


_VIEWS_AT_ONCE = 4096


def _check_views(column: Any) -> None:
    """Raise InvalidBody if a view of a column lies outside the buffers of this column.

    Arrow's validation skips the views of null values, but its casts read these views. A negative
    length in such a view crashes the process.
    """
    lengths, _, numbers, starts = _views(column).T.astype(np.int64)
    sizes = [0 if data is None else data.size for data in column.buffers()[2:]]
    is_near = (lengths >= 0) & (lengths <= _INLINE_BYTES_MAX)
    is_far = (lengths > _INLINE_BYTES_MAX) & (numbers >= 0) & (numbers < len(sizes))
    rooms = np.array([*sizes, 0])[np.where(is_far, numbers, -1)]
    if not (is_near | (is_far & (starts >= 0) & (starts + lengths <= rooms))).all():
        raise InvalidBody(f"a value of a column of {column.type} lies outside the column")
