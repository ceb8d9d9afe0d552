"""The tail cache against the plainest model: what it holds is what was added, within its bound."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.support.records import rows
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_columns
from tidelog.storage.read.tail_cache import (
    MERGE_BYTES_MAX,
    MERGE_ROWS_MAX,
    OLD_ELEMENTS_MAX,
    PIECE_OVERHEAD,
    CachedBatch,
    TailCache,
)

KEYS = [("a" * 32, 0), ("a" * 32, 1), ("b" * 32, 0)]


def batch_of(base_offset: int, count: int, *, width: int = 4) -> pa.RecordBatch:
    """Each value says which offset it has."""
    labels = [f"{offset:0{width}}" for offset in range(base_offset, base_offset + count)]
    return record_columns.batch_of_rows([rows(*labels)])


def add(cache: TailCache, key: tuple[str, int], base: int, count: int, **options) -> None:
    batch = batch_of(base, count, width=options.pop("width", 4))
    cache.add(
        key, base, batch, is_json=options.pop("is_json", True), nbytes=batch.nbytes, **options
    )


def offsets(pieces: list[CachedBatch]) -> list[int]:
    """The offsets of the records; each must match the range of its batch."""
    record_offsets: list[int] = []
    for piece in pieces:
        values = [int(value) for value in piece.decoded().column("value").to_pylist()]
        assert values == list(range(piece.base_offset, piece.end_offset))
        record_offsets += values
    return record_offsets


def held_bytes(cache: TailCache) -> int:
    return sum(piece.nbytes for pieces in cache._pieces.values() for piece in pieces)


adds = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from([0, 0, 0, 0, 0, 0, 1, 7]),  # the gap before it
    st.integers(1, 40),
    st.booleans(),
)


@given(st.lists(adds, max_size=60), st.integers(0, 60_000))
@examples(60)
def test_i3_what_is_held_is_what_was_added_and_runs_to_the_end(added, bytes_max: int) -> None:
    cache = TailCache(bytes_max)
    ends = dict.fromkeys(KEYS, 0)
    since_gap = dict.fromkeys(KEYS, 0)
    all_json = dict.fromkeys(KEYS, True)
    for key, gap, count, is_json in added:
        if gap:
            since_gap[key] = ends[key] + gap
        base = ends[key] + gap
        all_json[key] = (all_json[key] or gap > 0) and is_json
        add(cache, key, base, count, is_json=is_json)
        ends[key] = base + count
        assert 0 <= cache.bytes <= bytes_max
        assert cache.bytes == held_bytes(cache)
        for other in KEYS:
            first = None
            for offset in range(max(ends[other] - 60, 0), ends[other] + 2, 3):
                pieces = cache.read(other, offset)
                if not pieces:
                    assert first is None or offset >= ends[other]
                    continue
                assert since_gap[other] <= offset < ends[other]
                first = offset if first is None else first
                record_offsets = offsets(pieces)
                assert pieces[0].base_offset <= offset < pieces[0].end_offset
                assert record_offsets[-1] == ends[other] - 1
            if all_json[other]:
                assert all(piece.is_json for piece in cache.read(other, ends[other] - 1))


def test_nothing_is_evicted_while_there_is_room() -> None:
    cache = TailCache(10_000_000)
    for base in range(3000):
        add(cache, KEYS[0], base, 1)
    assert offsets(cache.read(KEYS[0], 0)) == list(range(3000))


def test_small_pieces_are_joined_and_each_record_copied_a_few_times() -> None:
    cache = TailCache(100_000_000)
    copied = 0
    merge = cache._merge

    def counting(pieces: list[CachedBatch]) -> None:
        nonlocal copied
        merge(pieces)
        copied += pieces[-1].records.num_rows

    cache._merge = counting  # type: ignore[method-assign]
    for base in range(8192):
        add(cache, KEYS[0], base, 1)
    pieces = cache.read(KEYS[0], 0)
    assert len(pieces) <= 2 * 8192 // MERGE_ROWS_MAX + 12
    assert copied <= 8192 * 16


def test_large_pieces_are_left_as_they_are() -> None:
    cache = TailCache(100_000_000)
    for base in range(0, 4 * MERGE_ROWS_MAX, MERGE_ROWS_MAX):
        add(cache, KEYS[0], base, MERGE_ROWS_MAX)
    assert len(cache.read(KEYS[0], 0)) == 4


def test_the_oldest_pieces_go_first_whosever_they_are() -> None:
    size = MERGE_BYTES_MAX  # too large to be merged
    cache = TailCache(8 * (size + PIECE_OVERHEAD))
    for number in range(20):
        cache.add(KEYS[number % 2], number // 2, batch_of(number, 1), is_json=True, nbytes=size)
    births = [piece.born for pieces in cache._pieces.values() for piece in pieces]
    assert sorted(births) == [number * (size + PIECE_OVERHEAD) for number in range(12, 20)]


def test_i10_a_piece_over_the_bound_is_not_held() -> None:
    cache = TailCache(1000)
    add(cache, KEYS[0], 0, 1, width=5000)
    assert cache.read(KEYS[0], 0) == []
    assert cache.bytes == 0
    assert not cache._pieces
    add(cache, KEYS[0], 1, 1)
    assert offsets(cache.read(KEYS[0], 1)) == [1]


@pytest.mark.parametrize("base", [0, 3, 9, 11, 50])
def test_what_does_not_follow_drops_what_was_held(base: int) -> None:
    cache = TailCache(1_000_000)
    add(cache, KEYS[0], 0, 10)
    add(cache, KEYS[1], 0, 10)
    add(cache, KEYS[0], base, 2)
    assert offsets(cache.read(KEYS[0], base)) == [base, base + 1]
    assert cache.read(KEYS[0], base + 2) == []
    assert cache.read(KEYS[0], (base + 5) % 10) == []
    assert offsets(cache.read(KEYS[1], 0)) == list(range(10))
    assert cache.bytes == held_bytes(cache)


def test_log_append_time_is_what_readers_see() -> None:
    cache = TailCache(1_000_000)
    add(cache, KEYS[0], 0, 3, append_ms=77)
    add(cache, KEYS[0], 3, 3)
    batch = pa.concat_batches([piece.decoded() for piece in cache.read(KEYS[0], 0)])
    stamps = (chunks.timestamps_us(batch.column("timestamp")) // 1000).tolist()
    assert stamps[:3] == [77] * 3
    assert 77 not in stamps[3:]


def test_a_topic_is_forgotten_with_all_its_partitions() -> None:
    cache = TailCache(1_000_000)
    for key in KEYS:
        add(cache, key, 0, 5)
    cache.forget_topic("a" * 32)
    assert [bool(cache.read(key, 0)) for key in KEYS] == [False, False, True]
    assert cache.bytes == held_bytes(cache)
    cache.clear()
    assert cache.bytes == 0
    assert cache.read(KEYS[2], 0) == []


def test_passed_is_the_distance_to_eviction() -> None:
    rows_each, size = MERGE_ROWS_MAX, 1000 + PIECE_OVERHEAD
    cache = TailCache(10 * size)
    batch = batch_of(0, rows_each)
    assert cache.passed(KEYS[0], 0) == 0
    for number in range(5):
        for key in KEYS[:2]:
            cache.add(key, rows_each * number, batch, is_json=True, nbytes=1000)
    offsets = (0, rows_each - 1, rows_each, 5 * rows_each - 1, 5 * rows_each)
    distances = [cache.passed(KEYS[0], offset) for offset in offsets]
    assert distances == [10 * size, 10 * size, 8 * size, 2 * size, 0]
    cache.add(KEYS[1], 5 * rows_each, batch, is_json=True, nbytes=1000)
    assert cache.read(KEYS[0], 0) == []
    assert cache.passed(KEYS[0], 0) == 9 * size  # of the first record that is left


def test_the_heap_of_first_pieces_does_not_grow_with_gaps() -> None:
    cache = TailCache(1_000_000)
    for number in range(1000):
        add(cache, KEYS[number % 3], 10 * number, 2)
    assert len(cache._oldest) <= 2 * len(KEYS) + OLD_ELEMENTS_MAX + 1
