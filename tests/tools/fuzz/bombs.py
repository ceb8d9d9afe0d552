"""Small bodies that would like to be large, and what each takes.

Run as `python -m tests.tools.fuzz.bombs`. Each is decoded in a fork of its own, whose peak is its
own; a line of JSON says what it came to.
"""

import json
import os
import resource
import struct
import sys
import traceback
from collections.abc import Callable

import pyarrow as pa

from tests.service.conftest import arrow, arrow_of
from tests.tools.fuzz.arrow_bodies import shared_metadata
from tidelog.service.formats import arrow as wire_arrow
from tidelog.service.formats import json_in, transactions, v3_records
from tidelog.service.formats.schema_refusals import schema_error
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core.errors import InvalidRequest

BODY_BYTES = 8 * 1024 * 1024
NOW_MS = 1_700_000_000_000
MIB = 1024 * 1024


def _filled(prefix: bytes, piece: bytes, suffix: bytes, count: int = sys.maxsize) -> bytes:
    """As many pieces as fit into a body, with commas between them."""
    count = min(BODY_BYTES // (len(piece) + 1), count)
    return prefix + b",".join([piece] * count) + suffix


def _v2(
    fmt: json_in.Format, piece: bytes, count: int = sys.maxsize, first: bytes = b""
) -> Callable[[], object]:
    body = _filled(b'{"records":[' + first, piece, b"]}", count)
    return lambda: json_in.decode_json(body, fmt, NOW_MS).count


def _headers(records: int) -> Callable[[], object]:
    count = BODY_BYTES // 11 // records
    record = b'{"headers":[%b]}' % b",".join([b'{"key":""}'] * count)
    body = b'{"records":[%b]}' % b",".join([record] * records)
    return lambda: json_in.decode_json(body, "json", NOW_MS).count


def _value() -> Callable[[], object]:
    """One value of many objects."""
    body = _filled(b'{"records":[{"value":[', b"{}", b"]}]}")
    return lambda: json_in.decode_json(body, "json", NOW_MS).count


def _schema_records() -> Callable[[], object]:
    body = _filled(b'{"records":[', b"{}", b"]}")
    return lambda: schema_error(body)


def _keys() -> Callable[[], object]:
    pieces = (b'"%x":1' % number for number in range(BODY_BYTES // 9))
    body = b"{" + b",".join(pieces) + b"}"
    return lambda: schema_error(body)


def _transaction(piece: bytes, prefix: bytes = b"", suffix: bytes = b"") -> Callable[[], object]:
    prefix = b'{"topics":[{"topic_name":"t","records":[' + prefix
    body = _filled(prefix, piece, suffix + b"]}]}")
    return lambda: transactions.decode_transaction(body, NOW_MS).records


def _batch(piece: bytes) -> Callable[[], object]:
    body = _filled(b'{"entries":[', piece, b"]}")
    return lambda: len(v3_records.decode_v3_batch(body))


def _v3_headers() -> Callable[[], object]:
    body = _filled(b'{"headers":[', b'{"name":""}', b"]}")
    return lambda: len(v3_records.decode_v3_record(body, NOW_MS).rows)


def _nested() -> Callable[[], object]:
    body = b'{"records":' + b"[" * BODY_BYTES
    return lambda: json_in.decode_json(body, "json", NOW_MS)


def _arrow(body: bytes) -> Callable[[], object]:
    return lambda: wire_arrow.decode_arrow(body, NOW_MS, bytes_max=BODY_BYTES).count


def _zeros() -> bytes:
    batch = pa.record_batch({"value": pa.array([bytes(256 * MIB)])})
    return arrow_of(batch, compression="zstd")


def _words() -> bytes:
    indices = pa.array([0] * 1000, pa.int8())
    return arrow(value=pa.DictionaryArray.from_arrays(indices, pa.array([bytes(MIB)])))


def _views() -> bytes:
    """A thousand views of one value."""
    rows = 1000
    views = struct.pack("<i4sii", MIB, bytes(4), 0, 0) * rows
    buffers = [None, pa.py_buffer(views), pa.py_buffer(bytes(MIB))]
    return arrow(value=pa.Array.from_buffers(pa.binary_view(), rows, buffers))


def _nothing() -> bytes:
    return arrow(value=pa.nulls(500_000_000))


BOMBS: dict[str, Callable[[], Callable[[], object]]] = {
    "v2 records of nothing": lambda: _v2("json", b"{}"),
    "v2 records of little": lambda: _v2("json", b'{"value":1}'),
    "v2 as many records as may be": lambda: _v2("json", b'{"value":1}', RECORDS_MAX),
    "v2 text": lambda: _v2("text", b'{"value":""}'),
    "v2 a character of four bytes": lambda: _v2(
        "json", b'{"value":"%b"}' % bytes(1000).hex().encode(), first='{"value":"😀"},'.encode()
    ),
    "v2 one record of headers": lambda: _headers(1),
    "v2 records of headers": lambda: _headers(100),
    "v2 a value of objects": _value,
    "v2 records in a format with schemas": _schema_records,
    "v2 keys of a body with a schema": _keys,
    "v2 nested": _nested,
    "transaction of numbers": lambda: _transaction(b"1"),
    "transaction of records": lambda: _transaction(b"{}"),
    "transaction of topics": lambda: _transaction(
        b'{"topic_name":"t","records":[]}', b"]},", b",{" + b'"topic_name":"t","records":['
    ),
    "transaction of headers": lambda: _transaction(b'{"name":""}', b'{"headers":[', b"]}"),
    "v3 batch of numbers": lambda: _batch(b"1"),
    "v3 batch of entries": lambda: _batch(b'{"id":1}'),
    "v3 record of headers": _v3_headers,
    "arrow zeros": lambda: _arrow(_zeros()),
    "arrow words": lambda: _arrow(_words()),
    "arrow views": lambda: _arrow(_views()),
    "arrow nothing": lambda: _arrow(_nothing()),
    "arrow metadata": lambda: _arrow(shared_metadata()),
}


def main() -> None:
    for name, make in BOMBS.items():
        _in_a_fork(lambda name=name, make=make: _make(name, make))


def _make(name: str, make: Callable[[], Callable[[], object]]) -> None:
    """Make the body first: memory for making it does not count as memory for decoding it."""
    call = make()
    _in_a_fork(lambda: _explode(name, call))


def _explode(name: str, call: Callable[[], object]) -> None:
    prefix = _peak()
    try:
        answer = str(call())
    except InvalidRequest as error:
        answer = f"{type(error).__name__}: {error}"
    took = (_peak() - prefix) / 1024
    print(json.dumps({"name": name, "mib": round(took), "said": answer[:200]}), flush=True)


def _in_a_fork(call: Callable[[], None]) -> None:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)
        return
    status = 1
    try:
        call()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def _peak() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
