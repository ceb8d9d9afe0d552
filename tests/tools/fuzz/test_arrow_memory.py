"""I10: what a body of Arrow may make a broker take, whatever its schema and metadata declare."""

import os
import random
import tracemalloc

import pyarrow as pa
import pytest

from tests.tools.fuzz.arrow_bodies import BODIES, random_body
from tidelog.service.formats.arrow import decode_arrow
from tidelog.storage.core.errors import InvalidRequest

BOUNDS = (1 << 18, 1 << 20, 1 << 23)
FREE_BYTES = 320 * 1024
"""Memory that does not count: views that are checked at once, and the objects of a stream."""
COUNT = int(os.environ.get("TIDELOG_MUTATIONS", "300"))
NOW_MS = 1_700_000_000_000


def outcome(body: bytes, bytes_max: int) -> str:
    try:
        produced = decode_arrow(body, NOW_MS, bytes_max=bytes_max)
    except InvalidRequest as error:
        return type(error).__name__
    rows = produced.rows
    assert isinstance(rows, pa.RecordBatch)
    rows.validate(full=True)
    return "taken"


def taken_bytes(body: bytes, bytes_max: int) -> tuple[str, int]:
    """Return the outcome, and the most bytes that Arrow and Python had at a time."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        name = outcome(body, bytes_max)
        return name, (pool.max_memory() or 0) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


def test_no_stream_takes_more_than_its_bound() -> None:
    rng = random.Random(7)
    outcomes = set()
    for number in range(COUNT):
        body, bytes_max = random_body(rng), rng.choice(BOUNDS)
        name, used_bytes = taken_bytes(body, bytes_max)
        outcomes.add(name)
        assert used_bytes <= bytes_max + FREE_BYTES, (number, name, used_bytes, bytes_max)
    assert outcomes == {"taken", "InvalidBody", "RecordTooLarge", "UnpackedTooLarge"}


@pytest.mark.parametrize("name", BODIES)
def test_no_small_body_takes_more_than_its_bound(name: str) -> None:
    """The `bombs` of this package have what neither Arrow's pool nor Python counts."""
    outcome, used_bytes = taken_bytes(BODIES[name](), BOUNDS[-1])
    assert outcome != "taken"
    assert used_bytes <= BOUNDS[-1] + FREE_BYTES
