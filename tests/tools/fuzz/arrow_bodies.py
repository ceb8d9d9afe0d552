"""Bodies of Arrow that declare much in few bytes: some with a name, and any number at random."""

import random
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tests.service.conftest import arrow, arrow_of
from tidelog.service.formats import arrow_memory

MIB = 1 << 20
_DICTIONARY = 2
"""The kind of a message that has a dictionary."""
WORDS = 60_000_000
HEADERS = 20_000_000
MANY = 100_000
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = range(4)
"""Numbers of the fields of a record batch."""
_PAIR_BYTES = 16
"""Bytes of a node (a column or its part) and of a buffer: two integers."""


# --- bodies with a name


def words_without_bytes() -> bytes:
    """A dictionary of 60 million nulls."""
    words = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.nulls(WORDS))
    return arrow(value=words)


def headers_without_bytes() -> bytes:
    """A record with 20 million headers whose names and values have no bytes."""
    empty = pa.Array.from_buffers(pa.binary(0), HEADERS, [None, pa.py_buffer(b"")])
    return arrow(value=pa.array(["v"]), headers=listed(empty, empty))


def headers_of_nulls() -> bytes:
    nulls = pa.nulls(HEADERS)
    return arrow(value=pa.array(["v"]), headers=listed(nulls, nulls))


def listed(keys: Any, values: Any) -> Any:
    """One list of all these headers."""
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array([0, len(pairs)], pa.int32()), pairs)


def one_dictionary(words: int = 150_000, batches: int = 2_400) -> bytes:
    """Many batches of one row that share a dictionary."""
    column = pa.DictionaryArray.from_arrays(
        pa.array([0], pa.int32()), pa.array([b"%x" % number for number in range(words)])
    )
    return arrow_of(*[pa.record_batch({"value": column})] * batches)


def growing_dictionary(words: int = 150_000, deltas: int = 100) -> bytes:
    """A dictionary that grows by one word for each batch of one row."""
    texts = pa.array([b"%x" % number for number in range(words + deltas)])
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(
        sink, pa.schema([("value", pa.dictionary(pa.int32(), pa.binary()))]), options=options
    ) as writer:
        for number in range(deltas):
            column = pa.DictionaryArray.from_arrays(
                pa.array([0], pa.int32()), texts.slice(0, words + number)
            )
            writer.write_batch(pa.record_batch({"value": column}))
    return sink.getvalue().to_pybytes()


def one_row_batches(batches: int = 1_817) -> bytes:
    pairs = [[{"key": "a", "value": "1"}]]
    row = pa.record_batch({"key": ["k"], "value": ["v"], "headers": pairs, "timestamp": [1]})
    return arrow_of(*[row] * batches)


def shared_metadata(count: int = 900, size: int = 1 << 19) -> bytes:
    """Entries of the schema's metadata that all are the same long text."""
    entries = {f"{number:04}": "x" for number in range(count)} | {"long": "x" * size}
    schema = pa.schema([("value", pa.string())], entries)
    body = bytearray(arrow_of(pa.record_batch([pa.array(["v"])], schema=schema)))
    top = messages_of(body)[0]
    vector = top.table(2).indirect(2)
    start = position_of(body, top) + vector + 4
    tables = {pair.count(1): pair.position for pair in top.table(2).tables(2)}
    for number in range(count):
        offset = tables[size] - vector - 4 - 4 * number
        struct.pack_into("<I", body, start + 4 * number, offset)
    return bytes(body)


def shared_fields(width: int = 10_000) -> bytes:
    """A column that has the same part many times."""
    kind = pa.struct([(f"{number}", pa.int8()) for number in range(width)])
    body = bytearray(arrow(value=pa.nulls(1, kind)))
    top = messages_of(body)[0]
    (column,) = top.table(2).tables(1)
    vector = column.indirect(5)
    first = next(column.tables(5)).position
    start = position_of(body, top) + vector + 4
    for number in range(width):
        struct.pack_into("<I", body, start + 4 * number, first - vector - 4 - 4 * number)
    return bytes(body)


def codec_in_metadata(size: int = 32 * MIB) -> bytes:
    """A batch that Arrow 0.17 has compressed: the codec is in the message's metadata."""
    batch = pa.record_batch({"value": pa.array([bytes(size)])})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "ZSTD"})
    body = bytearray(sink.getvalue().to_pybytes())
    top = messages_of(body)[1]
    start, packed = position_of(body, top), top.table(2)
    struct.pack_into("<h", body, start + top.field(0), 3)  # the version
    vtable = packed.position - struct.unpack_from("<i", top.meta, packed.position)[0]
    struct.pack_into("<H", body, start + vtable + 4 + 2 * _COMPRESSION, 0)  # no compression
    return bytes(body)


BODIES: dict[str, Callable[[], bytes]] = {
    "words without bytes": words_without_bytes,
    "headers without bytes": headers_without_bytes,
    "headers of nulls": headers_of_nulls,
    "one dictionary in many batches": one_dictionary,
    "a dictionary that grows": growing_dictionary,
    "batches of one row": one_row_batches,
    "one text as all metadata": shared_metadata,
    "one part as many": shared_fields,
    "a codec in the metadata": codec_in_metadata,
}


def messages_of(body: bytes | bytearray) -> list[Any]:
    """Return the metadata of each message."""
    return [top for top, _, _ in arrow_memory._messages(bytes(body))]


def position_of(body: bytes | bytearray, top: Any) -> int:
    """Return the position of a message's metadata in the body."""
    return bytes(body).index(bytes(top.meta))


# --- bodies at random

_OCTETS: tuple[Any, ...] = (
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.binary(2),
    pa.binary(0),
    pa.null(),
    pa.uuid(),
    pa.json_(),
)
_INTEGERS: tuple[Any, ...] = (
    pa.null(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint64(),
)
_TIMES: tuple[Any, ...] = (
    pa.timestamp("s"),
    pa.timestamp("ms", "Europe/Berlin"),
    pa.timestamp("us", "UTC"),
    pa.timestamp("ns"),
)
_OTHERS: tuple[Any, ...] = (
    pa.bool_(),
    pa.float16(),
    pa.float64(),
    pa.date32(),
    pa.date64(),
    pa.time32("s"),
    pa.time64("us"),
    pa.duration("ms"),
    pa.month_day_nano_interval(),
    pa.decimal128(5),
    pa.decimal256(50),
    pa.list_(pa.null()),
    pa.list_(pa.null(), 0),
    pa.list_(pa.null(), 2),
    pa.large_list(pa.binary(0)),
    pa.list_view(pa.null()),
    pa.large_list_view(pa.int8()),
    pa.map_(pa.string(), pa.null()),
    pa.struct([]),
    pa.struct([("key", pa.null()), ("value", pa.binary(0))]),
    pa.sparse_union([pa.field("a", pa.null())]),
    pa.dense_union([pa.field("a", pa.null())]),
    pa.run_end_encoded(pa.int32(), pa.null()),
    pa.dictionary(pa.int8(), pa.int64()),
    pa.bool8(),
)
_COLUMNS: dict[str, tuple[Any, ...]] = {
    "timestamp": (*_INTEGERS, *_TIMES),
    "partition": _INTEGERS,
    "offset": _INTEGERS,
}


def random_body(rng: random.Random) -> bytes:
    """Return a stream whose columns have types that a broker takes, or not.

    The lengths in its metadata are those of its buffers, or not.
    """
    rows = rng.choice([1, 1, 3, 100, 3000])
    columns = {"value": _octets(rows, rng)}
    if rng.random() < 0.3:
        columns["key"] = _octets(rows, rng)
    for name, kinds in _COLUMNS.items():
        if rng.random() < 0.3:
            columns[name] = _fixed(rows, rng.choice(kinds), rng)
    if rng.random() < 0.5:
        columns["headers"] = _headers(rows, rng)
    if rng.random() < 0.05:
        columns[rng.choice(list(columns))] = pa.nulls(rows, rng.choice(_OTHERS))
    batches = [pa.record_batch(columns)] * rng.choice([1, 1, 1, 2, 5, 100])
    if rng.random() < 0.2:
        batches = [batch.slice(rng.randrange(rows)) for batch in batches]
    body = bytearray(arrow_of(*batches, compression=rng.choice([None, None, "lz4", "zstd"])))
    if rng.random() < 0.3:
        _change_lengths(body, rng)
    return bytes(body)


def _octets(rows: int, rng: random.Random, depth: int = 0) -> Any:
    if rows > MANY:
        return _nothing(rows, rng)
    if depth == 0 and rng.random() < 0.4:
        words = _octets(_count(rng), rng, depth=1)
        highest = min(len(words) - 1, 127)
        picked = [rng.choice([0, highest, None]) for _ in range(50)]
        indices = pa.array((picked * (rows // len(picked) + 1))[:rows], pa.int8())
        return pa.DictionaryArray.from_arrays(indices, words, safe=False)
    kind = rng.choice(_OCTETS)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.nulls(rows, kind.storage_type))
    if kind in (pa.null(), pa.binary(0)):
        return _nothing(rows, rng)
    if kind == pa.binary(2):
        return pa.array([b"ab"] * rows, kind)
    sizes = [rng.choice([0, 1, 5, 20, rng.choice([10, 300_000 // max(rows, 1)])]) for _ in range(7)]
    texts = ["x" * size for size in sizes] + [None]
    return pa.array((texts * (rows // len(texts) + 1))[:rows], pa.string()).cast(kind)


def _nothing(rows: int, rng: random.Random) -> Any:
    """Return values without bytes."""
    if rng.random() < 0.3:
        return pa.Array.from_buffers(pa.binary(0), rows, [None, pa.py_buffer(b"")])
    return pa.Array.from_buffers(pa.null(), rows, [None])


def _count(rng: random.Random) -> int:
    return rng.choice([1, 2, 100, 5000, 1_000_000, WORDS, (1 << 31) - 1])


def _fixed(rows: int, kind: Any, rng: random.Random) -> Any:
    if pa.types.is_null(kind) or rng.random() < 0.2:
        return pa.nulls(rows, kind)
    return pa.array([rng.randrange(100), None, 0, 1] * rows, pa.int64()).cast(kind).slice(0, rows)


def _headers(rows: int, rng: random.Random) -> Any:
    count = _count(rng) if rng.random() < 0.4 else rng.choice([0, rows, 10 * rows])
    count -= count % rows
    parts = [_octets(count, rng, rng.randrange(2)) for _ in range(2)]
    pairs = pa.StructArray.from_arrays(parts, ["key", "value"])
    offsets = pa.array([count // rows * row for row in range(rows + 1)], pa.int64())
    mask = pa.array([rng.random() < 0.3 for _ in range(rows)]) if rng.random() < 0.4 else None
    if rng.random() < 0.3:
        return pa.LargeListArray.from_arrays(offsets, pairs, mask=mask)
    return pa.ListArray.from_arrays(offsets.cast(pa.int32()), pairs, mask=mask)


def _change_lengths(body: bytearray, rng: random.Random) -> None:
    """Let the metadata of a batch declare other lengths, and perhaps no buffers."""
    top = rng.choice(messages_of(body)[1:])
    start, batch = position_of(body, top), top.table(2)
    if top.meta[top.field(1)] == _DICTIONARY:
        batch = batch.table(1)
    length = rng.choice([0, 1, 1000, MANY, WORDS, 1 << 31, 1 << 40])
    positions = _pairs_at(batch, _NODES)
    if batch.field(_LENGTH):
        positions.append(batch.field(_LENGTH))
    for position in positions:
        if rng.random() < 0.6:
            struct.pack_into("<q", body, start + position, length)
    for position in _pairs_at(batch, _BUFFERS):
        if rng.random() < 0.3:
            struct.pack_into("<qq", body, start + position, 0, 0)


def _pairs_at(batch: Any, field: int) -> list[int]:
    first = batch.indirect(field) + 4
    return [first + _PAIR_BYTES * number for number in range(batch.count(field))]
