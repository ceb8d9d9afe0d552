"""The loops over bytes, in Python and in C, refuse places and sizes that do not fit each other.

Callers check most of this before. So no batch of a client shows that a check is missing.
"""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.storage.codec.reference import WAYS
from tidelog.storage.codec.plain_byte_loops import CUT_OFF, STRAY

RECORDS = b"\x0c\0\0\0\x01\x01\0" + b"\x0c\0\0\x02\x01\x01\0"
"""Two records without key, value and headers: the offset deltas are 0 and 1."""
HEADER = b"\x02n\0"
"""The name n, and an empty value."""
MISFIT = "columns and buffers do not fit each other"


@pytest.fixture(params=WAYS)
def loops(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = WAYS[request.param]
    return module


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (15, 2), (0, 0), (0, -1)])
def test_walk_stays_within_bytes(loops: ModuleType, start: int, count: int) -> None:
    assert loops.walk(RECORDS, 0, 2, 0) == (0, 0, 0, 0, True)
    assert loops.walk(RECORDS, start, count, 0) == (CUT_OFF, 0)


@pytest.mark.parametrize(
    ("start", "end", "count", "rows", "number"),
    [
        pytest.param(-1, 14, 2, 2, 0, id="before the bytes"),
        pytest.param(14, 0, 2, 2, 0, id="the end before the start"),
        pytest.param(0, 15, 2, 2, 0, id="behind the bytes"),
        pytest.param(0, 14, 0, 2, 0, id="no records"),
        pytest.param(0, 14, 2, 1, 0, id="fewer rows than records"),
        pytest.param(0, 14, 2, 3, 2, id="more rows than records"),
    ],
)
def test_fields_stay_within_bytes_and_rows(
    loops: ModuleType, start: int, end: int, count: int, rows: int, number: int
) -> None:
    def refusal(start: int, end: int, count: int, rows: int) -> tuple[int, int] | None:
        deltas, places = np.empty(rows, np.int64), np.empty((7, rows), np.int32)
        spans = (np.array([item], np.int64) for item in (start, end, count))
        result: tuple[int, int] | None = loops.fields(deltas, places, RECORDS, *spans)
        return result

    assert refusal(0, 14, 2, 2) is None
    assert refusal(0, 14, 1, 1) == (STRAY, 1)
    assert refusal(start, end, count, rows) == (CUT_OFF, number)


@pytest.mark.parametrize(
    ("start", "count", "end", "rows", "number"),
    [
        pytest.param(-1, 1, 3, 1, 0, id="before the bytes"),
        pytest.param(3, 0, 2, 0, 0, id="the end before the start"),
        pytest.param(0, 1, 4, 1, 0, id="behind the bytes"),
        pytest.param(0, -1, 3, 0, 0, id="a negative count"),
        pytest.param(0, 1, 3, 0, 0, id="fewer rows than headers"),
        pytest.param(0, 1, 3, 2, 1, id="more rows than headers"),
    ],
)
def test_headers_stay_within_bytes_and_rows(
    loops: ModuleType, start: int, count: int, end: int, rows: int, number: int
) -> None:
    def refusal(start: int, count: int, end: int, rows: int) -> tuple[int, int] | None:
        places = np.empty((4, rows), np.int32)
        spans = (np.array([item], np.int32) for item in (start, count, end))
        result: tuple[int, int] | None = loops.headers(places, HEADER, *spans)
        return result

    assert refusal(0, 1, 3, 1) is None
    assert refusal(start, count, end, rows) == (CUT_OFF, number)


def column(bounds: list[int], first: int = 0, valid: bytes | None = None) -> tuple[Any, ...]:
    """Return the buffers of a column whose data are one byte."""
    return valid, np.array(bounds, np.int32), b"k", first


GOOD = column([0, 1])


def written(
    loops: ModuleType,
    key_column: tuple[Any, ...] = GOOD,
    headers: tuple[Any, ...] | None = None,
    *,
    out_bytes: int = 64,
    bounds: int = 2,
    offset_deltas: int = 1,
) -> bytes:
    """Return one record as `write` writes it, with no value."""
    out, places = np.empty(out_bytes, np.uint8), np.empty(bounds, np.int32)
    deltas, null = np.zeros(offset_deltas, np.int64), column([0, 0], valid=b"\0")
    size = loops.write(out, places, np.zeros(1, np.int64), deltas, key_column, null, headers)
    return out[:size].tobytes()


@pytest.mark.parametrize(
    "sizes",
    [{"out_bytes": 37}, {"bounds": 1}, {"bounds": 3}, {"bounds": 3, "offset_deltas": 2}],
    ids=str,
)
def test_write_stays_within_buffers(loops: ModuleType, sizes: dict[str, int]) -> None:
    """The record needs 38 bytes, because no number is measured before."""
    assert written(loops, out_bytes=38) == b"\x0e\0\0\0\x02k\x01\0"
    with pytest.raises(ValueError, match=MISFIT):
        written(loops, **sizes)


@pytest.mark.parametrize(
    ("forged", "error"),
    [
        pytest.param(column([-1, 1]), MISFIT, id="before the data"),
        pytest.param(column([1, 0]), MISFIT, id="the end before the start"),
        pytest.param(column([0, 2]), MISFIT, id="behind the data"),
        pytest.param(column([0, 1], 1), MISFIT, id="no end"),
        pytest.param(column([0, 1], valid=b""), MISFIT, id="no validity"),
        pytest.param(column([0, 1], 2), "no bounds for its first row", id="no start"),
        pytest.param(column([0, 1], -1), "no bounds for its first row", id="a negative row"),
    ],
)
def test_write_stays_within_columns(loops: ModuleType, forged: tuple[Any, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        written(loops, forged)


def test_written_headers_have_their_number(loops: ModuleType) -> None:
    assert written(loops, headers=GOOD).endswith(b"k")
    for empty in (column([0, 0]), column([0, 1], valid=b"\0")):
        with pytest.raises(ValueError, match=MISFIT):
            written(loops, headers=empty)


@pytest.mark.parametrize("bounds", [[0], [0, 1, 1], [-1, 1], [1, 0], [0, 2]], ids=str)
def test_hashes_of_keys_stay_within_data(loops: ModuleType, bounds: list[int]) -> None:
    hashes = np.empty(1, np.uint32)
    loops.murmur2_column(hashes, np.array([0, 1], np.int32), b"k")
    assert hashes[0] == loops.murmur2(b"k")
    with pytest.raises(ValueError, match="the bounds of the keys are not those of the data"):
        loops.murmur2_column(hashes, np.array(bounds, np.int32), b"k")
