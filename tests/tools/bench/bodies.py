"""Produce bodies of the benchmarks: 12-byte keys, 100-byte values, as in DESIGN 12.2."""

import base64
import functools
import json
import random
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

VALUE_BYTES = 100
EVENTS = 600_000
"""Distinct records of a sustained load: at 10,000 requests/s, no JSON body repeats in a minute."""
ARROW_BODIES = 256
WORDS = ("delivered", "returned", "in transit", "at customs", "lost", "refused", "sorted", "new")


def rows(count: int, seed: int) -> list[tuple[bytes, bytes]]:
    """Keys and JSON values of exactly VALUE_BYTES."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        key = f"key-{draw.randrange(10**8):08d}"
        head = f'{{"id":{draw.randrange(10**9):09d},"pad":"'.replace(":0", ":1")
        value = head + "x" * (VALUE_BYTES - len(head) - 2) + '"}'
        pairs.append((json.dumps(key).encode(), value.encode()))
    return pairs


def json_body(pairs: list[tuple[bytes, bytes]]) -> bytes:
    records = b",".join(b'{"key":%s,"value":%s}' % row for row in pairs)
    return b'{"records":[' + records + b"]}"


def binary_body(pairs: list[tuple[bytes, bytes]]) -> bytes:
    records = b",".join(
        b'{"key":"%s","value":"%s"}' % (base64.b64encode(key), base64.b64encode(value))
        for key, value in pairs
    )
    return b'{"records":[' + records + b"]}"


def arrow_body(pairs: list[tuple[bytes, bytes]]) -> bytes:
    batch = pa.record_batch(
        {
            "key": pa.array([key for key, _ in pairs], pa.binary()),
            "value": pa.array([value for _, value in pairs], pa.binary()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def events(first: int, count: int) -> list[tuple[bytes, bytes]]:
    """Keys of 12 bytes, and JSON values of exactly VALUE_BYTES; no two values are the same.

    A fifth of a value is random.
    """
    draw = random.Random(first)
    pairs = []
    for number in range(first, first + count):
        key = f"key-{draw.randrange(10**8):08d}"
        drawn = draw.getrandbits(120)
        value = (
            f'{{"id":{10**8 + number},"user":"user-{drawn % 900_000 + 100_000}",'
            f'"amount":{drawn % 9000 + 1000}.{drawn % 90 + 10},"code":"{drawn >> 40:020x}",'
            f'"is":"{WORDS[drawn % 8]:9.9}"}}'
        )
        pairs.append((b'"%s"' % key.encode(), value.encode()))
    return pairs


class Pool(NamedTuple):
    """Bodies of `count` records, cut out of one text of units: unit after unit, all of one size."""

    media_type: str
    units: bytes
    unit_bytes: int
    of_body: int
    """Units of a body."""
    prefix: bytes = b""
    suffix: bytes = b""
    cut: int = 0
    """Bytes of a body's last unit that the body does not have: the comma."""

    @property
    def distinct(self) -> int:
        """Return the number of bodies; then they repeat."""
        return len(self.units) // self.unit_bytes - self.of_body + 1

    def body(self, number: int) -> bytes:
        start = number * self.of_body % self.distinct * self.unit_bytes
        end = start + self.of_body * self.unit_bytes - self.cut
        return self.prefix + self.units[start:end] + self.suffix


@functools.lru_cache(maxsize=2)
def _json_units(count: int) -> tuple[bytes, int]:
    records = [b'{"key":%s,"value":%s},' % row for row in events(0, count)]
    assert len({len(record) for record in records}) == 1, "records differ in size"
    return b"".join(records), len(records[0])


def pool(kind: str, count: int, distinct: int = EVENTS) -> Pool:
    """Bodies of `count` records as `json` or `arrow`, of so many distinct records."""
    if kind == "json":
        units, size = _json_units(max(distinct, count))
        media_type = "application/vnd.kafka.json.v2+json"
        return Pool(media_type, units, size, count, b'{"records":[', b"]}", 1)
    bodies = [
        arrow_body(events(number * count, count))
        for number in range(min(ARROW_BODIES, max(distinct // count, 1)))
    ]
    assert len({len(body) for body in bodies}) == 1, "bodies differ in size"
    return Pool("application/vnd.apache.arrow.stream", b"".join(bodies), len(bodies[0]), 1)


class Requests(Sequence[bytes]):
    """The requests of a pool, each made when it is sent."""

    def __init__(self, head: bytes, body_pool: Pool) -> None:
        self._head = head
        self._pool = body_pool

    def __len__(self) -> int:
        return self._pool.distinct

    def __getitem__(self, number: int) -> bytes:  # type: ignore[override]
        return self._head + self._pool.body(number)
