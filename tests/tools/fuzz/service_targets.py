"""Decoders of service/: bodies of requests in all dialects, and values on their way into answers.

An input is refused with a 4xx, or is decoded to records that come back unchanged from a second
round trip.
"""

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from tests.golden.make import rows_of_flights, rows_of_json
from tests.service.conftest import arrow_of
from tests.tools.fuzz.target import Target
from tidelog.service.formats import (
    arrow,
    consumers,
    events,
    json_in,
    json_out,
    transactions,
    v3_records,
)
from tidelog.service.formats.json_in import Format, Produced
from tidelog.service.formats.json_text import ReadFormat, SchemaFormat, Undecodable
from tidelog.service.formats.record_pages import ON_ERROR, OnError, check_first, encode_page
from tidelog.service.formats.schema_refusals import schema_error
from tidelog.service.peers import forwarding
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import InvalidRequest, LogError, RecordTooLarge
from tidelog.storage.core.model import OFFSET_MAX, TopicPartition

NOW_MS = 1_700_000_000_000
BYTES_MAX = 1024 * 1024
FORMATS: tuple[Format, ...] = ("json", "binary", "text")
SCHEMA_FORMATS: tuple[SchemaFormat, ...] = ("avro", "jsonschema", "protobuf")


def _texts(*bodies: str) -> list[bytes]:
    return [body.encode() for body in bodies]


def _refused(call: Callable[[], object]) -> bool:
    """Whether it was, as a request is."""
    try:
        call()
    except InvalidRequest as error:
        _check_refusal(error)
        return True
    return False


def _check_refusal(error: LogError) -> None:
    """One line for a client, with a status of its own fault."""
    status = getattr(error, "status", 400)
    assert 400 <= status < 500
    assert str(error)


def _columns(produced: Produced) -> pa.RecordBatch:
    rows = produced.rows
    batch = record_columns.batch_of_rows([rows]) if isinstance(rows, Rows) else rows
    batch.validate(full=True)
    assert batch.num_rows == produced.count
    assert batch.column(0).null_count == 0
    assert batch.schema.equals(record_columns.CHUNK_SCHEMA)
    return batch


# -- v2, JSON


def _v2() -> list[bytes]:
    records = [
        '{"key":"N14228","value":{"delay":2,"x":[1.5e9,null,true,"\\u00e9\\ud83d\\ude00"]}}',
        '{"key":null,"value":"AAEC","partition":0,"timestamp":1700000000000}',
        '{"value":"c3Rvcm0=","headers":[{"key":"a","value":"AA=="},{"key":"b"}],"partition":"1"}',
    ]
    return _texts(
        f'{{"records":[{records[0]}]}}',
        f'{{"records":[{",".join(records)}],"key_schema_id":null,"value_schema":"x"}}',
        f'{{"records":[{",".join([records[1]] * 70)}]}}',
        f'{{"records":[{",".join([records[2]] * 70)}]}}',
    )


def _check_v2(fmt: Format) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        try:
            produced = json_in.decode_json(data, fmt, NOW_MS)
        except InvalidRequest as error:
            _check_refusal(error)
            return
        batch = _columns(produced)
        again = json_in.decode_json(_body_of(batch, fmt), fmt, NOW_MS)
        assert _columns(again).equals(batch)
        if produced.partitions is not None:
            assert len(produced.partitions) == produced.count

    return check


def _body_of(batch: pa.RecordBatch, fmt: Format) -> bytes:
    """The records as a request, as plainly as can be."""
    records = []
    for row in batch.to_pylist():
        record = {name: _shown(row[name], fmt) for name in ("key", "value")}
        record["timestamp"] = b"%d" % round(row["timestamp"].timestamp() * 1000)
        if row["headers"]:
            pairs = (
                {"key": header["key"], "value": _encoded(header["value"])}
                for header in row["headers"]
            )
            record["headers"] = msgspec.json.encode(list(pairs))
        records.append(b",".join(b'"%s":%s' % (name.encode(), v) for name, v in record.items()))
    return b'{"records":[' + b",".join(b"{%s}" % record for record in records) + b"]}"


def _shown(octets: bytes | None, fmt: Format) -> bytes:
    if octets is None:
        return b"null"
    if fmt == "json":
        json.loads(octets, parse_int=str)  # it is one JSON text, or the answer would be none
        return octets
    return msgspec.json.encode(_encoded(octets) if fmt == "binary" else octets.decode())


def _encoded(octets: bytes | None) -> str | None:
    return None if octets is None else base64.b64encode(octets).decode()


def check_schema_error(data: bytes) -> None:
    """Formats with schemas are refused, whatever the body says."""
    _check_refusal(schema_error(data))


# -- Arrow


def _streams() -> list[bytes]:
    batch = record_columns.batch_of_rows([rows_of_flights(), rows_of_json("1", "2")])
    bare = pa.record_batch({"value": pa.array(["a", None, "b"])})
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    wide = pa.record_batch(
        {
            "key": words,
            "value": pa.array([b"1", b"2", None], pa.large_binary()),
            "timestamp": pa.array([1, 2, None], pa.timestamp("s")),
            "partition": pa.array([0, None, 1], pa.int8()),
        }
    )
    return [
        arrow_of(batch, batch),
        arrow_of(bare),
        arrow_of(wide),
        arrow_of(batch, compression="zstd"),
        arrow_of(wide, compression="lz4"),
        *(arrow_of(views) for values in _VIEWED for views in _views(values)),
    ]


_VIEWED: list[list[str | None]] = [
    ["short", "longer than twelve", ""],
    ["short", None, "longer than twelve"],
]
"""Without a null and with one: what a null hides is not validated by Arrow."""


def _views(values: list[str | None]) -> Iterator[pa.RecordBatch]:
    """View columns in each place where a body may have them."""
    plain = pa.array([b"v"] * len(values))
    offsets = pa.array([0, 2, 2, 3], pa.int32())
    for kind in (pa.string_view(), pa.binary_view()):
        views = pa.array(values, kind)
        words = pa.DictionaryArray.from_arrays(pa.array([2, None, 0], pa.int8()), views)
        names = pa.array(["longer than twelve", "b", "c"], kind)
        pairs = pa.StructArray.from_arrays([names, views], ["key", "value"])
        yield pa.record_batch({"value": views, "key": views})
        yield pa.record_batch({"value": words})
        headers: pa.Array = pa.ListArray.from_arrays(offsets, pairs)
        yield pa.record_batch({"value": plain, "headers": headers})


def check_arrow(data: bytes) -> None:
    try:
        produced = arrow.decode_arrow(data, NOW_MS, bytes_max=BYTES_MAX)
    except InvalidRequest as error:
        _check_refusal(error)
        return
    batch = _columns(produced)
    assert batch.nbytes <= 2 * BYTES_MAX + len(data)
    sent = arrow.encode_arrow([chunks.with_offsets(batch, 7)])
    again = arrow.decode_arrow(sent, NOW_MS, bytes_max=64 * BYTES_MAX)
    assert _columns(again).equals(batch)


# -- v3


def _v3() -> list[bytes]:
    record = '{"partition_id":0,"key":{"type":"STRING","data":"k"},"value":{"type":"JSON","data":'
    return _texts(
        record + '{"a":[1,{"b":"}\\"{"}]}}}\n' + record + "1}}",
        '{"value":{"type":"BINARY","data":"AAEC"},"headers":[{"name":"h","value":"AA=="}],'
        '"timestamp":"2026-01-01T00:00:00.123Z"} '
        '{"id":"x","value":{"type":"STRING","data":"\\u00e9"}}',
    )


def check_v3_stream(data: bytes) -> None:
    """The same objects whole and in pieces; each is a record, or is refused."""
    objects, refusal = _cut(data, [len(data)])
    steps = [1 + (byte & 7) for byte in data[:64]] or [1]
    assert _cut(data, steps) == (objects, refusal)
    for obj in objects:
        try:
            record = v3_records.decode_v3_record(obj, NOW_MS)
        except InvalidRequest as error:
            _check_refusal(error)
            continue
        batch = record_columns.batch_of_rows([record.rows])
        batch.validate(full=True)
        if record.is_json:
            for column in ("key", "value"):
                for octets in batch.column(column).drop_null().to_pylist():
                    json.loads(octets, parse_int=str)


def _cut(data: bytes, steps: Sequence[int]) -> tuple[list[bytes], str]:
    stream = v3_records.ObjectStream(object_bytes_max=4096)
    objects: list[bytes] = []
    start = turn = 0
    try:
        while start < len(data):
            objects += stream.feed(data[start : start + steps[turn % len(steps)]])
            stream.feed(b"")
            start += steps[turn % len(steps)]
            turn += 1
        stream.finish()
    except (json_in.BadBody, RecordTooLarge) as error:
        return objects, str(error)
    return objects, ""


def _batches() -> list[bytes]:
    entry = '"value":{"type":"JSON","data":{"a":1}}'
    return _texts(f'{{"entries":[{{"id":"1",{entry}}},{{"id":2,{entry},"partition_id":0}}]}}')


def check_v3_batch(data: bytes) -> None:
    try:
        entries = v3_records.decode_v3_batch(data)
    except InvalidRequest as error:
        _check_refusal(error)
        return
    assert 1 <= len(entries) <= v3_records.ENTRIES_MAX
    assert len({name for name, _ in entries}) == len(entries)
    for _, obj in entries:
        _refused(lambda obj=obj: v3_records.decode_v3_record(obj, NOW_MS))


# -- transactions and consumer instances


def _transactions() -> list[bytes]:
    return _texts(
        '{"topics":[{"topic_name":"a","records":[{"value":{"type":"JSON","data":{"x":1}}},'
        '{"partition_id":1,"key":{"type":"BINARY","data":"AA=="},"value":null,'
        '"headers":[{"name":"h"}]}]}],"consumer_groups":[{"consumer_group_id":"g",'
        '"generation":-1,"offsets":[{"topic_name":"a","partition_id":0,"offset":42,'
        '"metadata":"why"}],"consumer_id":"c"}]}'
    )


def check_transaction(data: bytes) -> None:
    try:
        transaction = transactions.decode_transaction(data, NOW_MS)
    except InvalidRequest as error:
        _check_refusal(error)
        return
    assert transaction.records <= transactions.RECORDS_MAX
    for topic in transaction.topics:
        _columns(topic.produced)


def _consumers() -> list[bytes]:
    partition = '"topic":"t","partition":0'
    return _texts(
        '{"name":"c","format":"json","auto.offset.reset":"earliest","auto.commit.enable":"false",'
        '"fetch.min.bytes":"1","consumer.request.timeout.ms":1000,"session.timeout.ms":"5000"}',
        '{"topics":["a","b"]}',
        '{"topic_pattern":"a.*"}',
        f'{{"partitions":[{{{partition}}}]}}',
        f'{{"offsets":[{{{partition},"offset":5,"metadata":"m"}}]}}',
        f'{{"timestamps":[{{{partition},"timestamp":"2026-01-01T00:00:00Z"}}],"offsets":[]}}',
    )


def check_consumer_bodies(data: bytes) -> None:
    decoders: list[Callable[[], object]] = [
        lambda: consumers.decode_creation(data, 300_000),
        lambda: consumers.decode_subscription(data),
        lambda: consumers.decode_partitions(data),
        lambda: consumers.decode_commit(data, ""),
        lambda: consumers.decode_commit(data, consumers.STRIMZI),
        lambda: consumers.decode_positions(data),
    ]
    for decode in decoders:
        _refused(decode)


# -- from a peer: requests of consumer instances


def _forwarded() -> list[bytes]:
    request = forwarding._Request(
        "GET",
        "/consumers/g/instances/c/records",
        b"timeout=0",
        [(b"accept", b"application/json")],
        "http",
        ("10.0.0.1", 8082),
        b"{}",
    )
    return [msgspec.msgpack.encode(request)]


def check_forwarded(data: bytes) -> None:
    async def serve(call):
        call.query()
        await call.body(1024)

    async def take() -> None:
        forwarded = forwarding.Forwarded(serve)
        with contextlib.suppress(msgspec.MsgspecError, LogError):
            await forwarded.take(data, b"t")

    asyncio.run(take())


# -- stored values on their way into answers

_LENGTHS = struct.Struct("<HH")


def _stored() -> list[bytes]:
    pairs = [
        (b'"k"', b'{"a":1}'),
        (b"", b"\xff\xfe"),
        (b'"\x1f"', b"1,2"),
        (b"1}", b"\n\xe2\x80\xa8"),
    ]
    records = [_LENGTHS.pack(len(key), len(value)) + key + value for key, value in pairs]
    return [*records, b"".join(records * 4)]


def _read_page(batch: Any, fmt: ReadFormat, on_error: OnError) -> list[Any]:
    page = encode_page([batch], "t", 0, fmt, is_json=[False], on_error=on_error)
    records: list[Any] = json.loads(page.body, parse_int=int if fmt != "json" else str)
    assert len(records) == page.records
    for record in records:
        record["offset"] = int(record["offset"])
    return records


def check_answers(data: bytes) -> None:
    """Whatever is stored, an answer is JSON that says so, or a refusal that names the record."""
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    position = 0
    while len(data) - position >= _LENGTHS.size and len(keys) < 40:
        key, value = (size & 0x3FF for size in _LENGTHS.unpack_from(data, position))
        position += _LENGTHS.size
        keys.append(data[position : position + key])
        values.append(data[position + key : position + key + value] if value != 0x3FF else None)
        position += key + value
    if not keys:
        return
    rows = Rows([NOW_MS] * len(keys), keys, values, [[("h", key)] for key in keys])
    batch = chunks.with_offsets(record_columns.batch_of_rows([rows]), 0)
    for read_format in (*FORMATS, *SCHEMA_FORMATS):
        pages = {mode: _read_page(batch, read_format, mode) for mode in ON_ERROR}
        offsets = {
            mode: [record["offset"] for record in records] for mode, records in pages.items()
        }
        assert offsets["raw"] == list(range(len(keys)))
        assert offsets["skip"] == [
            offset for offset in offsets["raw"] if offset in set(offsets["skip"])
        ]
        assert offsets["stop"] == offsets["skip"][: len(offsets["stop"])]
        assert offsets["stop"] == list(range(len(offsets["stop"])))
        at_first = partial(check_first, [batch], TopicPartition("t", 0), is_json=[False])
        assert _refused(partial(at_first, read_format)) == (not offsets["stop"])
        for record in pages["raw"] if read_format in SCHEMA_FORMATS else []:
            offset = record["offset"]
            for part, octets in (("key", keys[offset]), ("value", values[offset])):
                shown = record[part] or record.get(f"{part}_base64")
                assert base64.b64decode(shown or "") == (octets or b"")
    for fmt in FORMATS:
        try:
            body = json_out.encode_records([batch], "t", 0, fmt, is_json=[False])
        except Undecodable as error:
            _check_refusal(error)
            assert fmt != "binary"
            continue
        records = json.loads(body, parse_int=int if fmt != "json" else str)
        assert len(records) == len(keys)
        if fmt == "binary":
            assert [base64.b64decode(record["key"]) for record in records] == keys
        if fmt == "text":
            assert [record["key"].encode() for record in records] == keys
        lines = (
            json_out.encode_records([batch], "t", 0, fmt, is_json=[False], framing="ndjson")
            .decode()
            .splitlines()
        )
        assert len(lines) == len(keys)


# -- event ids


def _event_ids() -> list[bytes]:
    vectors = ([0], [1, 0, 8], [OFFSET_MAX] * events.VECTOR_PARTITIONS_MAX)
    return [events.vector(offsets) for offsets in vectors]


def check_event_id(data: bytes) -> None:
    """A vector names each partition once, and vectors of all these offsets are parsed again."""
    vector = events.parse_vector(data.decode("latin-1"))
    if vector is None:
        return
    assert vector
    assert all(0 <= offset <= OFFSET_MAX for offset in vector.values())
    if max(vector) < events.VECTOR_PARTITIONS_MAX:
        offsets = [vector.get(number, 0) for number in range(max(vector) + 1)]
        again = events.parse_vector(events.vector(offsets).decode())
        assert again == dict(enumerate(offsets))


TARGETS = [
    *(Target(f"v2-{fmt}", _v2, _check_v2(fmt)) for fmt in FORMATS),
    Target("v2-schema", _v2, check_schema_error, 30),
    Target("arrow", _streams, check_arrow, 120),
    Target("v3-stream", _v3, check_v3_stream),
    Target("v3-batch", _batches, check_v3_batch),
    Target("transaction", _transactions, check_transaction),
    Target("consumer-bodies", _consumers, check_consumer_bodies),
    Target("forwarded", _forwarded, check_forwarded),
    Target("answers", _stored, check_answers),
    Target("event-ids", _event_ids, check_event_id),
]
