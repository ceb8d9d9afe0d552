"""The memory of a stream of Arrow, by its messages' metadata, before Arrow reads them.

A few bytes of metadata may make Arrow allocate much: a compressed buffer declares the size that it
unpacks to, several entries of metadata may refer to the same text, which Arrow copies for each, and
a dictionary that grows by deltas is copied for each delta. This module counts all of this. It reads
frames and FlatBuffers itself (Arrow's Message.fbs and Schema.fbs). If it misreads damaged metadata,
Arrow's own verifier refuses the metadata afterwards.
"""

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from tidelog.service.formats.json_in import InvalidBody
from tidelog.storage.core.errors import RecordTooLarge

MESSAGES_MAX = 10_000
"""Bound of the messages of a stream (batches and dictionaries). Each costs ~50 us of CPU."""
FIELDS_MAX = 32
"""Bound of the columns of a stream and their parts."""
FREE_BYTES = 64 * 1024
"""Memory of a decoding that does not count."""
MESSAGE_BYTES = 3072
COLUMN_BYTES = 1536
"""Memory of the objects of a batch, and of each of its columns and their parts."""
BUFFER_BYTES = 256
"""Memory of the objects of a buffer in C++ and in Python."""
TEXTS_MAX = 1000
"""Bound of the entries of one metadata."""
TEXT_BYTES = 256
"""Memory of an entry of metadata beside its texts."""

_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
_VERSION_5 = 4
_CONTINUES = -1
_BOOL = struct.Struct("<?").unpack_from
_U8 = struct.Struct("<B").unpack_from
_I16 = struct.Struct("<h").unpack_from
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I64 = struct.Struct("<q").unpack_from
_SPAN = struct.Struct("<qq")
_VTABLES = [struct.Struct(f"<{size}H").unpack_from for size in range(10)]
"""By the number of 16-bit words of a vtable: two sizes, and the positions of at most seven fields
that this module reads."""
_SCHEMAS_CACHED = 64
_CACHED_BYTES_MAX = 4096

T = TypeVar("T")
Octets: TypeAlias = bytes | memoryview


class UnpackedTooLarge(RecordTooLarge):
    """Decoding the body would need more memory, or more work, than its bound."""


class DecodeBudget:
    """The memory that one request may still take: `bytes_max` and FREE_BYTES."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._left = bytes_max + FREE_BYTES

    def take(self, size: int) -> None:
        """Raises UnpackedTooLarge if less is left."""
        self._left -= size
        if self._left < 0:
            raise UnpackedTooLarge(
                f"the body takes more than {self._bytes_max} bytes of memory to decode: send fewer "
                "records in a request, or larger batches"
            )


def check_messages(body: bytes, budget: DecodeBudget, messages_max: int = MESSAGES_MAX) -> int:
    """Take what the stream declares from the budget; return the size of the schema, in bytes.

    The stream declares unpacked buffers, texts of metadata, copies of dictionaries, and the objects
    of messages and buffers. The schema is the first message.

    Raises InvalidBody for a stream that no client sends, RecordTooLarge for more than MESSAGES_MAX
    messages, and UnpackedTooLarge for more than `messages_max`. A damaged stream may also raise
    struct.error, IndexError or ValueError.
    """
    dictionaries: dict[int, int] = {}
    schema_end = 0
    for number, (top, content, end) in enumerate(_messages(body)):
        if number >= messages_max:
            _refuse_messages(messages_max)
        if not number:
            schema_end = end - len(content)
            budget.take(_schema_bytes(top.meta))
            continue
        kind = top.scalar(1, _U8)
        if kind == _RECORD_BATCH:
            _weigh(top, top.table(2), content, budget)
        elif kind == _DICTIONARY_BATCH:
            _weigh_dictionary(top, content, budget, dictionaries)
        else:
            raise InvalidBody("the stream is not a schema followed by batches and dictionaries")
    return schema_end


def _refuse_messages(messages_max: int) -> None:
    if messages_max < MESSAGES_MAX:
        raise UnpackedTooLarge(f"the stream has more than {messages_max} messages")
    raise RecordTooLarge(
        f"the stream has more than {MESSAGES_MAX} batches and dictionaries: send larger batches"
    )


# --- messages


class _Table:
    """A FlatBuffers table at a position of `meta`, whose vtable has the positions of its fields."""

    __slots__ = ("_slots", "meta", "position")

    def __init__(self, meta: memoryview, position: int) -> None:
        self.meta = meta
        self.position = position
        vtable = position - _I32(meta, position)[0]
        size = _U16(meta, vtable)[0] // 2
        self._slots = _VTABLES[min(size, len(_VTABLES) - 1)](meta, vtable)

    def field(self, number: int) -> int:
        """Return the position of the field's value, or 0 if the field is missing."""
        slots = self._slots
        if number + 2 >= len(slots) or not (offset := slots[number + 2]):
            return 0
        return self.position + int(offset)

    def scalar(self, number: int, unpack: Callable[[memoryview, int], tuple[Any, ...]]) -> int:
        """Return the field's value, or 0 if the field is missing."""
        position = self.field(number)
        return int(unpack(self.meta, position)[0]) if position else 0

    def indirect(self, number: int) -> int:
        """Return the position of a vector or table that the field refers to."""
        position = self.field(number)
        if not position:
            raise InvalidBody("a message of the stream lacks a field")
        return position + int(_U32(self.meta, position)[0])

    def table(self, number: int) -> "_Table":
        return _Table(self.meta, self.indirect(number))

    def count(self, number: int) -> int:
        """Return the number of elements of a vector; 0 if the field is missing."""
        return int(_U32(self.meta, self.indirect(number))[0]) if self.field(number) else 0

    def tables(self, number: int) -> "Iterator[_Table]":
        """Yield the tables of a vector."""
        start = self.indirect(number) + 4 if self.field(number) else 0
        for position in range(start, start + 4 * self.count(number), 4):
            yield _Table(self.meta, position + _U32(self.meta, position)[0])


def _messages(body: bytes) -> Iterator[tuple[_Table, memoryview, int]]:
    """Yield each message up to the end of the stream: its metadata, its body and where it ends."""
    data, end = memoryview(body), 0
    while len(data) - end >= 4:
        size = _I32(data, end)[0]
        start = end + 4
        if size == _CONTINUES:  # since Arrow 0.15
            size = _I32(data, start)[0]
            start += 4
        if not size:
            return
        meta = data[start : start + size]
        top = _Table(meta, _U32(meta, 0)[0])
        start += size
        end = start + top.scalar(3, _I64)
        if not 0 < size == len(meta) or not start <= end <= len(data):
            raise InvalidBody("a message of the stream is cut off")
        yield top, data[start:end], end


# --- what they take


def cached_by_schema(function: Callable[[Octets], T]) -> Callable[[Octets], T]:
    """Keep the results for small schemas: clients send the same few schemas again and again."""
    cached = lru_cache(_SCHEMAS_CACHED)(function)

    def called(schema: Octets) -> T:
        return cached(bytes(schema)) if len(schema) <= _CACHED_BYTES_MAX else function(schema)

    return called


@cached_by_schema
def _schema_bytes(meta: Octets) -> int:
    """Return the memory of a schema.

    Raises InvalidBody for too many fields, or for another order of bytes.
    """
    view = memoryview(meta)
    top = _Table(view, _U32(view, 0)[0])
    if top.scalar(1, _U8) != _SCHEMA:
        raise InvalidBody("the stream does not begin with a schema")
    schema = top.table(2)
    if schema.scalar(0, _I16):
        raise InvalidBody("the stream is big-endian: send a little-endian stream")
    size = _texts_bytes(top, 4) + _texts_bytes(schema, 2)
    waiting = [schema.tables(1)]
    fields = 0
    while waiting:
        for field in waiting.pop():
            fields += 1
            if fields > FIELDS_MAX:
                raise InvalidBody(f"the stream has more than {FIELDS_MAX} columns and their parts")
            # The field's name, time zone and so on may be those of other fields, too.
            size += len(top.meta) + _texts_bytes(field, 6)
            waiting.append(field.tables(5))
    return size


def _texts_bytes(table: _Table, number: int) -> int:
    """Return the memory of metadata, which is a vector of pairs of texts."""
    if not (count := table.count(number)):
        return 0
    if count > TEXTS_MAX:
        raise InvalidBody(f"the metadata of the stream has more than {TEXTS_MAX} entries")
    lengths = (pair.count(text) for pair in table.tables(number) for text in (0, 1))
    return count * TEXT_BYTES + sum(lengths)


def _weigh(top: _Table, batch: _Table, body: memoryview, budget: DecodeBudget) -> int:
    """Take the memory of a batch from the budget. Return the bytes of its buffers."""
    budget.take(MESSAGE_BYTES + COLUMN_BYTES * batch.count(1) + BUFFER_BYTES * batch.count(2))
    if top.field(4):
        if top.scalar(0, _I16) < _VERSION_5:  # Arrow could take the codec from the metadata
            raise InvalidBody("a message with metadata is of Arrow 0.17 or before: use a later one")
        budget.take(_texts_bytes(top, 4))
    if not batch.field(3):  # no compression
        return len(body)
    unpacked_bytes = 0
    for size in _unpacked_sizes(batch, body):
        budget.take(size)
        unpacked_bytes += size
    return max(unpacked_bytes, len(body))


def _unpacked_sizes(batch: _Table, body: memoryview) -> Iterator[int]:
    """Yield the sizes of the compressed buffers: the first eight bytes of each.

    Arrow allocates this size before it decompresses.
    """
    buffers = batch.indirect(2)
    for number in range(batch.count(2)):
        offset, length = _SPAN.unpack_from(batch.meta, buffers + 4 + number * _SPAN.size)
        if not length:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise InvalidBody("a buffer of the stream lies outside its message")
        size = _I64(body, offset)[0]
        if size < -1:
            raise InvalidBody("a buffer of the stream has a negative size")
        if size > 0:  # -1: this buffer is not compressed
            yield size


def _weigh_dictionary(
    top: _Table, body: memoryview, budget: DecodeBudget, dictionaries: dict[int, int]
) -> None:
    """Take the memory of a dictionary from the budget; `dictionaries` has the bytes of each.

    Arrow appends a delta to a copy of the dictionary.
    """
    dictionary = top.table(2)
    size = _weigh(top, dictionary.table(1), body, budget)
    identifier = dictionary.scalar(0, _I64)
    if dictionary.scalar(2, _BOOL):
        size += dictionaries.get(identifier, 0)
        budget.take(size)
    dictionaries[identifier] = size
