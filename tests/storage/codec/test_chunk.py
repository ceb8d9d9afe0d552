"""tidelog.storage.codec.chunk: columns of the records of small requests."""

import pyarrow as pa
import pytest

from tidelog.storage.codec.chunk import CHUNK_SCHEMA, Headers, Rows, batch_of_rows


@pytest.mark.parametrize(
    "headers",
    [[], [None], [[]], [[("a", b"1"), ("b", None)]], [None, [("a", b"1")], [], None] * 3],
    ids=str,
)
def test_a_batch_has_the_headers_of_its_rows(headers: list[Headers | None]) -> None:
    count = len(headers)
    batch = batch_of_rows([Rows([1] * count, [None] * count, [b"v"] * count, headers)])
    batch.validate(full=True)
    assert batch.schema == CHUNK_SCHEMA
    pairs = [
        None if row is None else [(pair["key"], pair["value"]) for pair in row]
        for row in batch.column("headers").to_pylist()
    ]
    assert pairs == headers


def test_rows_without_headers_and_rows_with_them_become_one_batch() -> None:
    parts = [
        Rows([1], [None], [b"x"]),
        Rows([2], [b"k"], [None], [[("a", b"1")]]),
        Rows([], [], []),
    ]
    assert batch_of_rows(parts).column("headers").is_null().to_pylist() == [True, False]


@pytest.mark.parametrize("nulls", [[], [0], [1, 3], [4]])
def test_long_items_are_copied_once(nulls: list[int]) -> None:
    items = [None if row in nulls else bytes([row]) * (row * 300_000) for row in range(5)]
    before = pa.total_allocated_bytes()
    batch = batch_of_rows([Rows([1] * 5, items, items[::-1])])
    assert pa.total_allocated_bytes() - before < 10_000, "the items are outside of Arrow's pool"
    batch.validate(full=True)
    assert batch.column("key").to_pylist() == items
    assert batch.column("value").equals(pa.array(items[::-1], pa.binary()))
