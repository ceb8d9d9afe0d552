"""Kafka's partitioner to its published vectors, and parts that lose nothing and keep the order."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.codec.reference import WAYS, use
from tests.support.properties import examples
from tidelog.storage.codec import byte_loops
from tidelog.storage.codec.key_partition import partition_of
from tidelog.storage.codec.partitioner import (
    NoSuchPartition,
    Partitions,
    RecordPartitions,
    Sticky,
    part,
    partitions_of,
    place,
    tally,
)
from tidelog.storage.codec.record_columns import Rows, batch_of_rows
from tidelog.storage.core.errors import InvalidRequest

# org.apache.kafka.common.utils.UtilsTest.testMurmur2
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}

lengths = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 100, 129, 300])
keys = st.one_of(st.none(), st.binary(max_size=40), lengths.map(lambda n: bytes(range(7, 256)) * 2))
columns = st.lists(keys, max_size=80)
quick = examples(150)


@pytest.fixture(autouse=True, scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hash keys in C, then in Python."""
    with pytest.MonkeyPatch.context() as patch:
        use(request.param, patch)
        yield


def murmur2(key: bytes) -> int:
    """Kafka's `Utils.murmur2`: signed."""
    unsigned = byte_loops.murmur2(key)
    return unsigned - (1 << 32) if unsigned >> 31 else unsigned


def test_all_ways_hash_alike() -> None:
    keys = [bytes((i * 31 + j * 7) % 256 for j in range(i)) for i in range(300)]
    assert byte_loops.murmur2(b"21") == VECTORS[b"21"] & 0xFFFFFFFF
    hashes = [murmur2(key) & 0xFFFFFFFF for key in keys]
    for way in WAYS.values():
        assert hashes == [way.murmur2(key) for key in keys]


@pytest.mark.parametrize(("key", "expected"), VECTORS.items())
def test_murmur2_is_kafkas(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected


def test_columns_hash_as_single_keys() -> None:
    column: Any = pa.array([*VECTORS, None], pa.binary())
    expected = [(hashed & 0x7FFFFFFF) % 1000 for hashed in VECTORS.values()]
    assert partitions_of(column, 1000).tolist() == [*expected, -1]


@quick
@given(columns, st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 2, 7, 100, 70_000]))
def test_any_column_and_slice(
    record_keys: list[bytes | None], skip: int, drop: int, count: int
) -> None:
    sliced: Any = pa.array(record_keys, pa.binary())[skip : max(skip, len(record_keys) - drop)]
    expected = [-1 if key is None else partition_of(key, count) for key in sliced.to_pylist()]
    assert partitions_of(sliced, count).tolist() == expected


@pytest.mark.parametrize("length", [*range(18), 63, 64, 65, 127, 130, 255, 256, 257, 4097])
def test_keys_of_one_length(length: int) -> None:
    record_keys = [bytes((i * 31 + j * 7) % 256 for j in range(length)) for i in range(50)]
    column = pa.array([b"before", *record_keys], pa.binary())[1:]
    assert partitions_of(column, 97).tolist() == [partition_of(key, 97) for key in record_keys]


def test_few_long_keys_among_many_short_ones() -> None:
    record_keys = [bytes([i % 251]) * (i % 23) for i in range(128)]
    record_keys[5] = b"long" * 5000 + b"!"
    record_keys[77] = b"longer" * 7000
    column = pa.array(record_keys, pa.binary())
    assert partitions_of(column, 31).tolist() == [partition_of(key, 31) for key in record_keys]


def test_nulls_with_bytes_beneath() -> None:
    # Arrow lets a null keep its bytes; they must not count.
    beneath = pa.array([b"aa", b"bbbb", b"cc"], pa.binary())
    _, offsets, data = beneath.buffers()
    validity = pa.py_buffer(bytes([0b101]))
    column: Any = pa.Array.from_buffers(pa.binary(), 3, [validity, offsets, data])
    assert partitions_of(column, 9).tolist() == [partition_of(b"aa", 9), -1, partition_of(b"cc", 9)]


# --- place, tally, part


def rows_of(record_keys: list[bytes | None], headers: bool = False) -> Rows:
    count = len(record_keys)
    return Rows(
        list(range(count)),
        record_keys,
        [b"%d" % row for row in range(count)],
        [[("row", b"%d" % row)] for row in range(count)] if headers else None,
    )


def contents(part: Rows | pa.RecordBatch) -> list[tuple[object, ...]]:
    if isinstance(part, Rows):
        part = batch_of_rows([part])
    return [tuple(map(str, row.values())) for row in part.to_pylist()]


def check(places: RecordPartitions, rows: Rows | pa.RecordBatch) -> list[int]:
    """Nothing lost by parting, order kept, the tally true; returns each record's partition."""
    batch = batch_of_rows([rows]) if isinstance(rows, Rows) else rows
    whole = contents(batch)
    placed = [places] * len(whole) if isinstance(places, int) else list(map(int, places))
    parts = part(batch, places)
    if isinstance(places, int):
        assert parts == [(places, batch)]
        assert parts[0][1] is batch
    else:
        assert len(set(placed)) > 1
    counts = [(partition, placed.count(partition)) for partition in sorted(set(placed))]
    assert tally(places, len(whole)) == counts
    assert [
        (partition, rows_of_partition.num_rows) for partition, rows_of_partition in parts
    ] == counts
    for partition, rows_of_partition in parts:
        own = [
            row
            for row, placed_partition in zip(whole, placed, strict=True)
            if placed_partition == partition
        ]
        assert contents(rows_of_partition) == own
    return placed


said = st.one_of(st.none(), st.integers(0, 4), st.lists(st.none() | st.integers(0, 4), min_size=80))


@quick
@given(
    st.lists(st.none() | st.sampled_from([b"", b"a", b"b", b"ccccc"]), min_size=1, max_size=80),
    said,
    st.none() | st.integers(0, 4),
    st.booleans(),
)
def test_parting_keeps_everything_and_the_order(
    record_keys: list[bytes | None],
    requested: list[int | None] | int | None,
    otherwise: int | None,
    headers: bool,
) -> None:
    if isinstance(requested, list):
        requested = requested[: len(record_keys)]
    rows = rows_of(record_keys, headers)
    batch = batch_of_rows([rows])
    placed = check(place(rows, requested, 5, Sticky(7), otherwise=otherwise), rows)
    assert check(place(batch, requested, 5, Sticky(7), otherwise=otherwise), batch) == placed
    if isinstance(requested, list):
        column = pa.array(requested, pa.int32())
        assert check(place(batch, column, 5, Sticky(7), otherwise=otherwise), batch) == placed
        assert check(place(rows, column, 5, Sticky(7), otherwise=otherwise), rows) == placed
    everyone = requested if isinstance(requested, int) else otherwise
    asked_partitions = requested if isinstance(requested, list) else [None] * len(record_keys)
    for key, own, partition in zip(record_keys, asked_partitions, placed, strict=True):
        if own is not None:
            assert partition == own
        elif everyone is not None:
            assert partition == everyone
        elif key is not None:
            assert partition == partition_of(key, 5)


@pytest.mark.parametrize("wrong", [-1, 3, 1 << 40, 1 << 63, -(1 << 70)])
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_partition_out_of_range_is_named(wrong: int, as_batch: bool) -> None:
    rows = rows_of([None] * 5)
    given_rows = batch_of_rows([rows]) if as_batch else rows
    with pytest.raises(NoSuchPartition, match=f"record 3 names partition {wrong}") as refused:
        place(given_rows, [0, None, 2, wrong, 9], 3, Sticky(1))
    assert isinstance(refused.value, InvalidRequest)
    assert (refused.value.row, refused.value.partition, refused.value.count) == (3, wrong, 3)


@pytest.mark.parametrize("partition", [3, -1])
def test_one_partition_for_all_out_of_range(partition: int) -> None:
    for how in ({"partitions": partition}, {"partitions": None, "otherwise": partition}):
        options: dict[str, Partitions] = how  # type: ignore[assignment]
        with pytest.raises(NoSuchPartition):
            place(rows_of([None]), count=3, sticky=Sticky(1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("column", [pa.array([1, 0], pa.uint64()), pa.array([1, 0], pa.int8())])
def test_any_integer_column_names_partitions(column: pa.Array) -> None:
    batch = batch_of_rows([rows_of([b"a", b"b"])])
    assert check(place(batch, column, 2, Sticky(1)), batch) == [1, 0]


# --- sticky


def keyless(count: int, size: int) -> pa.RecordBatch:
    return batch_of_rows([Rows([0] * count, [None] * count, [b"x" * size] * count)])


def test_keyless_records_stay_for_16_kib() -> None:
    batch = keyless(100, 1024)
    placed = check(place(batch, None, 50, Sticky(3)), batch)
    runs = [partition for i, partition in enumerate(placed) if not i or partition != placed[i - 1]]
    assert len(runs) == len(set(runs)) == 7
    assert placed.count(runs[0]) == 16


def test_each_request_begins_at_another_draw_and_all_get_their_share() -> None:
    sticky = Sticky(11)
    rows = rows_of([None])
    first = [place(rows, None, 8, sticky) for _ in range(8000)]
    assert all(800 < first.count(partition) < 1200 for partition in range(8))
    again = Sticky(11)
    assert [place(rows, None, 8, again) for _ in range(8000)] == first
    other = Sticky(12)
    assert [place(rows, None, 8, other) for _ in range(8000)] != first


def test_more_runs_than_partitions() -> None:
    batch = keyless(100, 3000)
    assert set(check(place(batch, None, 3, Sticky(5)), batch)) == {0, 1, 2}


def test_a_tombstone_without_a_key_has_no_size() -> None:
    rows = Rows([0, 0], [None, None], [None, None])
    assert len(set(check(place(rows, None, 9, Sticky(2)), rows))) == 1
