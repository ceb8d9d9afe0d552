"""Records, and their bytes in requests and responses. Pure.

Keys and values are bytes. Requests and responses have them in base64 (the format `binary` of the
dialects), because base64 can represent every record. A producer with format `json` sends JSON
values instead. The broker then stores their JSON text, and knows that it is JSON.
"""

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from tidelog.service.client.errors import BadArgument
from tidelog.storage.core.model import TopicPartition

ProduceFormat: TypeAlias = Literal["binary", "json"]
Headers: TypeAlias = Iterable[tuple[str, bytes | str | None]]
JSON_V2 = "application/vnd.kafka.json.v2+json"
BINARY_V2 = "application/vnd.kafka.binary.v2+json"
ARROW = "application/vnd.apache.arrow.stream"
MEDIA_TYPES: dict[ProduceFormat, str] = {"binary": BINARY_V2, "json": JSON_V2}
ON_ERROR = "raw"
"""The `on_error` of reads: the broker also sends the records that do not decode in the format of
the read, and the client handles them."""
RECORD_BYTES = 64
"""The size of a record in a buffer is the length of its text plus this number."""


def headers_of_write(
    content_type: str, idempotency_key: str, flush_ms: float | None
) -> dict[str, str]:
    """Return the HTTP headers of a request that commits records.

    `flush_ms` is how long the broker may hold it to commit it with others; None: as the topics say.
    """
    headers = {"content-type": content_type, "idempotency-key": f'"{idempotency_key}"'}
    return headers if flush_ms is None else {**headers, "linger": f"{flush_ms / 1000:.3f}"}


class Header(msgspec.Struct, frozen=True):
    """A header of a record."""

    key: str
    value: bytes | None = None


class Record(msgspec.Struct):
    """A record of a topic.

    `key` and `value` are bytes, or None for null; with `decode_key` or `decode_value` of the
    consumer, they are what these functions return. `timestamp_ms` is in milliseconds since the
    epoch.
    """

    topic: str
    partition: int
    offset: int
    key: Any = None
    value: Any = None
    timestamp_ms: int | None = msgspec.field(name="timestamp", default=None)
    headers: Sequence[Header] = ()

    @property
    def where(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


_BinaryRecord = msgspec.defstruct(
    "Record", [("key", bytes | None, None), ("value", bytes | None, None)], bases=(Record,)
)
"""A Record whose key and value are base64 in JSON."""


class PartitionPage(NamedTuple):
    """Records of one partition from a response, by offset, and where its next read begins.

    A record has the fields topic, partition and offset.
    """

    where: TopicPartition
    records: list[Any]
    next_offset: int


class ReadFormat(NamedTuple):
    """How a consumer asks for records, and how it decodes a response into a list of records.

    `name` is the format of an instance. `accept` and `decode_fetch` are for reads of one partition,
    `decode_array` is for reads of an instance, whose responses are JSON arrays.
    """

    name: str
    accept: str
    decode_fetch: Callable[[bytes], list[Any]]
    decode_array: Callable[[bytes], list[Any]]


_decode_binary: Callable[[bytes], list[Any]] = msgspec.json.Decoder(
    list[_BinaryRecord]  # type: ignore[valid-type]
).decode
BINARY = ReadFormat("binary", BINARY_V2, _decode_binary, _decode_binary)


def pages(records: Iterable[Any]) -> list[PartitionPage]:
    """Return the records of an instance's response as one page for each partition."""
    records_by_partition: dict[TopicPartition, list[Any]] = {}
    for record in records:
        records_by_partition.setdefault(TopicPartition(record.topic, record.partition), []).append(
            record
        )
    return [
        PartitionPage(partition, partition_records, partition_records[-1].offset + 1)
        for partition, partition_records in records_by_partition.items()
    ]


# -- requests


class _OutBinary(msgspec.Struct, omit_defaults=True):
    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    timestamp: int | None = None
    headers: tuple[Header, ...] = ()


class _OutJson(msgspec.Struct, omit_defaults=True):
    value: Any
    key: Any = None
    partition: int | None = None
    timestamp: int | None = None
    headers: tuple[Header, ...] = ()


class JsonRecord(NamedTuple):
    """A record of a produce request: JSON object, bytes of its key, and perhaps partition.

    The object is without the braces and without `partition`. The key chooses the partition, unless
    the caller names one.
    """

    members: bytes
    key: bytes | None
    partition: int | None


_encode = msgspec.json.Encoder().encode


def encoded(
    fmt: ProduceFormat,
    value: Any,
    key: Any = None,
    headers: Headers = (),
    partition: int | None = None,
    timestamp_ms: int | None = None,
) -> JsonRecord:
    """Encode a record of a produce request; raises BadArgument.

    In format binary, key and value are bytes, str (UTF-8) or None. In format json they are anything
    that msgspec encodes.
    """
    if partition is not None and partition < 0:
        raise BadArgument(f"partition {partition} is negative")
    record_headers = header_values(headers)
    out: _OutBinary | _OutJson
    if fmt == "binary":
        key_bytes = as_bytes("key", key)
        out = _OutBinary(as_bytes("value", value), key_bytes, None, timestamp_ms, record_headers)
        return JsonRecord(_encode(out)[1:-1], key_bytes, partition)
    try:
        text = None if key is None else _encode(key)
        out = _OutJson(value, key, None, timestamp_ms, record_headers)
        return JsonRecord(_encode(out)[1:-1], text, partition)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadArgument(f"the record cannot be JSON: {error}") from None


def as_bytes(name: str, value: Any) -> bytes | None:
    """Return bytes, or the UTF-8 of a str. Raises BadArgument for other types."""
    match value:
        case None | bytes():
            return value
        case str():
            return value.encode()
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            raise BadArgument(
                f"{name}: {type(value).__name__} is not bytes, str or None: encode it, or use "
                "format='json'"
            )


def header_values(headers: Headers) -> tuple[Header, ...]:
    """Return headers with values as bytes. Raises BadArgument."""
    if isinstance(headers, Mapping):
        raise BadArgument("headers: a dict is no list of pairs: give headers=list(d.items())")
    values = []
    for pair in headers:
        match pair:
            case (str() as name, value):
                values.append(Header(name, as_bytes(f"header {name!r}", value)))
            case _:
                raise BadArgument(
                    f"headers: {pair!r:.100} is not a pair of a name (str) and a value: give "
                    "headers=[('name', b'value')]"
                )
    return tuple(values)


def v3_record(
    fmt: ProduceFormat,
    value: Any,
    key: Any = None,
    headers: Headers = (),
    partition: int | None = None,
    timestamp_ms: int | None = None,
) -> dict[str, Any]:
    """Return a record in the form of the route of transactions. Raises BadArgument."""
    record: dict[str, Any] = {}
    if partition is not None:
        record["partition_id"] = partition
    for name, data in (("key", key), ("value", value)):
        if data is not None and fmt == "json":
            record[name] = {"type": "JSON", "data": data}
        elif data is not None:
            record[name] = {"type": "BINARY", "data": as_bytes(name, data)}
    record_headers = [
        {"name": header.key, "value": header.value} for header in header_values(headers)
    ]
    if record_headers:
        record["headers"] = record_headers
    if timestamp_ms is not None:
        stamp = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=timestamp_ms)
        record["timestamp"] = stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return record
