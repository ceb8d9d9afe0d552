"""Attacks by Produce requests whose batches cost far more than their bytes.

Each attack is run by clients with different rights: a client that has not logged in, a principal
without rights, one that may write to another topic, and one that may write to the topic.
"""

import functools
import struct
from collections.abc import Callable
from typing import Literal

import pyarrow as pa

from tests.service.kafka.wire import framed
from tests.storage.codec.reference import varint, with_header
from tests.storage.codec.test_decompression import gzip
from tests.tools.attack.brokers import BIG, Principal, SecuredBroker
from tests.tools.attack.kafka_client import sent
from tests.tools.attack.measure import MIB, VICTIM, Attack, scaled
from tidelog.service.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.storage.codec import decompression
from tidelog.storage.codec.batch_header import HEADER, HEADER_SIZE, MAGIC
from tidelog.storage.runtime.clock import SystemClock

COMPACTED = "compacted"
NOBODY, STRANGER, OTHER_WRITER, WRITER = "nobody", "stranger", "other-writer", "writer"
RIGHTS = {OTHER_WRITER: (BIG,), WRITER: (VICTIM, COMPACTED)}
"""By user: the topics that it may write to."""
HEADERS = 100_000
KEYLESS = 80_000
"""Records in less than `max.message.bytes`."""
ZSTD_HEAD = b"\x28\xb5\x2f\xfd\x00\x58"
"""The head of a frame with a window of 2 MiB and without a size."""
RUN_BYTES = 128 << 10
Packer = Literal["snappy", "lz4", "zstd"]


def batch_of(body: bytes, count: int = 1, codec: int = decompression.NONE) -> bytes:
    """Return a batch with a right header."""
    now_ms = SystemClock().now_ms()
    length = HEADER_SIZE - 12 + len(body)
    fields = (codec, count - 1, now_ms, now_ms, -1, -1, -1, count)
    return with_header(HEADER.pack(0, length, 0, MAGIC, 0, *fields) + body)


def record(number: int, headers: int = 0, pad: int = 0) -> bytes:
    """Return a record without key and value, and with headers without content.

    `pad` is the number of superfluous bytes of the count of headers.
    """
    body = b"\0\0" + varint(number) + b"\x01\x01" + varint(headers, pad) + b"\0\x01" * headers
    return varint(len(body)) + body


def packed(name: Packer, body: bytes) -> bytes:
    packed_bytes: bytes = pa.Codec(name).compress(body, asbytes=True)
    return packed_bytes


def runs() -> bytes:
    """Return a batch of zstd that has 16 MiB of zeros in 578 bytes."""
    run = struct.pack("<I", RUN_BYTES << 3 | 2)[:3] + b"\0"
    return batch_of(ZSTD_HEAD + run * 127 + b"\x01\0\0", codec=decompression.ZSTD)


def members(size: int) -> bytes:
    """Return a batch of gzip with many members that are empty, and then `size` bytes."""
    return batch_of(gzip(b"") * 9_999 + bytes(range(256)) * (size // 256), codec=decompression.GZIP)


def zeros(name: Packer, size: int) -> bytes:
    return batch_of(packed(name, bytes(size)), codec=decompression.NAMES.index(name))


def many_headers(pad: int, codec: int) -> bytes:
    """Return a batch of one record with many headers, packed by zstd or not."""
    body = record(0, HEADERS, pad)
    return batch_of(packed("zstd", body) if codec else body, codec=codec)


def without_keys(codec: int) -> bytes:
    body = b"".join(record(number) for number in range(KEYLESS))
    return batch_of(packed("zstd", body) if codec else body, KEYLESS, codec)


BATCHES: dict[str, tuple[Callable[[], bytes], int, int]] = {
    "runs of zstd": (runs, 250, 4),
    "a few runs of zstd": (runs, 50, 20),
    "members of gzip": (lambda: members(5 * MIB), 1, 8),
    "zeros in snappy": (lambda: zeros("snappy", 200 * MIB), 1, 6),
    "zeros in snappy, many parts": (lambda: zeros("snappy", 200 * MIB), 7, 1),
    "zeros in lz4": (lambda: zeros("lz4", 15 * MIB), 100, 2),
    "zeros in gzip": (lambda: batch_of(gzip(bytes(15 * MIB)), codec=decompression.GZIP), 100, 2),
    "headers": (lambda: many_headers(0, decompression.NONE), 40, 4),
    "headers in zstd": (lambda: many_headers(0, decompression.ZSTD), 190, 20),
    "a long count of headers in zstd": (lambda: many_headers(4, decompression.ZSTD), 190, 8),
    "a long count of headers in gzip": (
        lambda: batch_of(gzip(record(0, HEADERS, 4)), codec=decompression.GZIP),
        100,
        4,
    ),
}
"""By name: the batch, the parts of a request, and the requests."""


def produced(topic: str, batch: bytes, parts: int, acks: int = -1) -> bytes:
    part = PartitionProduceData(index=0, records=memoryview(batch))
    data = [TopicProduceData(name=topic, partition_data=[part] * parts)]
    return framed(ProduceRequest(acks=acks, timeout_ms=1000, topic_data=data), 9)


def principal_of(broker: SecuredBroker, user: str) -> Principal | None:
    """Return the principal with its rights; None for a client that does not log in."""
    if user == NOBODY:
        return None
    principal = broker.principal(user)
    for topic in RIGHTS.get(user, ()):
        broker.allow(user, "WRITE", "TOPIC", topic)
    return principal


def heavy_batches(name: str, user: str, scale: float, broker: SecuredBroker) -> str:
    """Send the requests on a few connections at once."""
    make, parts, count = BATCHES[name]
    request = produced(VICTIM, make(), scaled(parts, scale, 1))
    return sent(broker, [request] * scaled(count, scale, 1), 4, principal_of(broker, user))


def unanswered_batches(scale: float, broker: SecuredBroker) -> str:
    """Send batches that unpack to much with acks=0, which a broker does not answer."""
    request = produced(VICTIM, runs(), scaled(250, scale, 1), acks=0)
    return sent(broker, [request] * scaled(8, scale, 1), 4, principal_of(broker, STRANGER))


def records_without_keys(codec: int, scale: float, broker: SecuredBroker) -> str:
    """Send records without keys to a topic that is compacted by key."""
    if COMPACTED not in broker.asked("GET", "/topics").json():
        broker.create_topic(COMPACTED, cleanup_policy="compact")
    request = produced(COMPACTED, without_keys(codec), scaled(100, scale, 1))
    return sent(broker, [request] * 2, 2, principal_of(broker, WRITER))


def produce_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    table: dict[str, Attack] = {
        f"produce: {name}, {user}": functools.partial(heavy_batches, name, user, scale)
        for name in BATCHES
        for user in (STRANGER, WRITER)
    }
    for user in (NOBODY, OTHER_WRITER):
        for name in ("runs of zstd", "headers in zstd"):
            attack = functools.partial(heavy_batches, name, user, scale)
            table[f"produce: {name}, {user}"] = attack
    table["produce: runs of zstd, acks=0"] = functools.partial(unanswered_batches, scale)
    for codec in (decompression.NONE, decompression.ZSTD):
        name = f"produce: records without keys, {decompression.NAMES[codec]}"
        table[name] = functools.partial(records_without_keys, codec, scale)
    return table
