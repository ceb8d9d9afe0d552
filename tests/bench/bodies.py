"""Produce bodies of the benchmarks: 12-byte keys, 100-byte values, as those of the
prototype in DESIGN 12.2."""

import base64
import json
import random

import pyarrow as pa

VALUE_BYTES = 100


def rows(count: int, seed: int) -> list[tuple[bytes, bytes]]:
    """Keys and JSON values of exactly VALUE_BYTES."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        key = f"key-{draw.randrange(10**8):08d}"
        head = f'{{"id":{draw.randrange(10**9):09d},"pad":"'.replace(":0", ":1")
        value = head + "x" * (VALUE_BYTES - len(head) - 2) + '"}'
        made.append((json.dumps(key).encode(), value.encode()))
    return made


def json_body(made: list[tuple[bytes, bytes]]) -> bytes:
    records = b",".join(b'{"key":%s,"value":%s}' % row for row in made)
    return b'{"records":[' + records + b"]}"


def binary_body(made: list[tuple[bytes, bytes]]) -> bytes:
    records = b",".join(
        b'{"key":"%s","value":"%s"}' % (base64.b64encode(key), base64.b64encode(value))
        for key, value in made
    )
    return b'{"records":[' + records + b"]}"


def arrow_body(made: list[tuple[bytes, bytes]]) -> bytes:
    batch = pa.record_batch(
        {
            "key": pa.array([key for key, _ in made], pa.binary()),
            "value": pa.array([value for _, value in made], pa.binary()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
