"""Call a build of native.c with changed bytes and with wrong sizes: `FILE COUNT`.

It is for a build with sanitizers, which end the process at a read or write outside of a buffer. So
each argument has its own buffer of exact size.
"""

import importlib.util
import itertools
import random
import struct
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.storage.codec.reference import sent
from tests.storage.codec.test_record_batch import drawn, mutated
from tidelog.storage.codec import plain_byte_loops
from tidelog.storage.codec.batch_header import HEADER_SIZE

MOVED = [0] * 20 + [1, 99, sys.maxsize - 100]


def alone(data: Any) -> Any:
    """A copy that begins at an odd address, as a chunk may."""
    copy = np.empty(len(data) + 1, dtype=np.uint8)
    copy[1:] = np.frombuffer(data, dtype=np.uint8)
    return copy[1:]


def alone_or_none(data: Any) -> Any:
    return None if data is None else alone(data)


def read(native: Any, raw: bytes, original: bytes, rng: random.Random) -> bool:
    (count,) = struct.unpack_from(">i", original, 57)
    claimed = rng.choice([0, -1, 1 << 31, count + 1]) if rng.random() < 0.1 else count
    start = rng.choice([0, 0, 0, 1, len(raw), len(raw) + 1])
    headers_max = rng.choice([100_000, 100_000, 1])
    walked = native.walk(alone(raw), start, claimed, headers_max)
    assert walked == plain_byte_loops.walk(raw, start, claimed, headers_max)
    is_accepted = len(walked) == 5
    pieces = [raw, *[original[HEADER_SIZE:]] * rng.choice([1, 10]), raw][: rng.choice([1, 2, 12])]
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.array([0, *ends[:-1]])
    counts = np.full(len(pieces), count)
    rows = int(counts.sum())
    if rng.random() < 0.2:
        array = rng.choice([starts, ends, counts])
        array[rng.randrange(len(array))] += rng.choice([-1, 1, 5, 2**40, 2**62])
    rows += rng.choice([0, 0, 0, 1, -1])
    deltas, places = np.empty(max(rows, 0), np.int64), np.empty((7, max(rows, 0)), np.int32)
    joined = alone(b"".join(pieces))
    refusal = native.fields(deltas, places, joined, starts, ends, counts)
    oracle = np.empty_like(deltas), np.empty_like(places)
    plain = plain_byte_loops.fields(*oracle, joined, starts, ends, counts)
    assert refusal == plain, (refusal, plain)
    if refusal is None:
        assert (deltas == oracle[0]).all()
        assert (places == oracle[1]).all()
        read_headers(native, joined, places, rng)
    return is_accepted


def read_headers(native: Any, raw: Any, fields: np.ndarray, rng: random.Random) -> None:
    spans = [column.copy() for column in fields[4:]]
    total = max(int(spans[1].sum()) + rng.choice([0, 0, 0, 1, -1]), 0)
    if rng.random() < 0.2:
        array = rng.choice(spans)
        array[rng.randrange(len(array))] += rng.choice([-1, 1, 5, 2**30])
    places, oracle = np.empty((4, total), np.int32), np.empty((4, total), np.int32)
    refusal = native.headers(places, raw, *spans)
    assert refusal == plain_byte_loops.headers(oracle, raw, *spans)
    if refusal is None:
        assert (places == oracle).all()


def write(native: Any, rng: random.Random) -> None:
    rows = rng.choice([rng.randrange(1, 30), 700])
    sliced = rng.randrange(min(rows, 30))
    octets = [None, b"", b"k" * rng.randrange(300)]
    headers = [b"\0", b"h" * 9]
    columns = [
        pa.array(rng.choices(drawn_from, k=rows), pa.binary()).slice(sliced)
        for drawn_from in (octets, octets, headers)
    ]
    stamps = [rng.choice([0, -1, 2**62, -(2**63), 2**63 - 1]) for _ in range(rows - sliced)]
    offsets = [rng.choice([0, rng.getrandbits(31), -(2**63)]) for _ in stamps]
    content = sum(len(item) for column in columns for item in column.to_pylist() if item)
    size = 36 * len(stamps) + content + rng.choice([0, 0, 0, -5, -9 * len(stamps), -content])
    out = np.empty(max(size, 0), np.uint8)
    bounds = np.empty(len(stamps) + 1 + rng.choice([0, 0, 0, 1]), np.int32)
    parts = [
        (*map(alone_or_none, array.buffers()), array.offset + rng.choice(MOVED))
        for array in columns
    ]
    behind = rng.choice([None, parts[2]])
    results = []
    for way in (native, plain_byte_loops):
        out[:], bounds[:] = 0, 0
        try:
            written = way.write(
                out, bounds, np.array(stamps), np.array(offsets), *parts[:2], behind
            )
            results.append((out[:written].tobytes(), bounds.tolist()))
        except ValueError as error:
            results.append((str(error), None))
    assert results[0] == results[1]


def hash_keys(native: Any, rng: random.Random) -> None:
    data = rng.randbytes(rng.randrange(40))
    bounds = np.array(sorted(rng.choices(range(len(data) + 1), k=rng.randrange(1, 9))), np.int32)
    if rng.random() < 0.3:
        bounds[rng.randrange(len(bounds))] += rng.choice([-1, 1, 2**31 - 50, -(2**31)])
    hashes = np.empty(max(len(bounds) - 1 + rng.choice([0, 0, 0, 1, -1]), 0), np.uint32)
    try:
        native.murmur2_column(hashes, bounds, alone(data))
    except ValueError:
        with pytest.raises(ValueError, match="bounds of the keys"):
            plain_byte_loops.murmur2_column(hashes, bounds, alone(data))
        return
    keys = [data[start:end] for start, end in itertools.pairwise(bounds.tolist())]
    assert hashes.tolist() == [native.murmur2(alone(key)) for key in keys]


def main(file: str, count: int) -> None:
    spec = importlib.util.spec_from_file_location("_native", file)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    rng = random.Random(9)
    accepted = 0
    originals: list[bytes] = []
    for number in range(count):
        if number % 50 == 0:
            originals = [sent(drawn(rng)) for _ in range(4)]
        original = rng.choice(originals)
        raw = mutated(original[HEADER_SIZE:], rng)
        accepted += read(native, raw, original, rng)
        if number % 10 == 0:
            write(native, rng)
            hash_keys(native, rng)
    assert 0 < accepted < count
    print(f"{count} calls, {accepted} accepted")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
