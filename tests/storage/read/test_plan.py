"""Plans of a reader without a broker: ranges from options, splits from ranges. No Spark."""

import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.core.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import SegmentFile, TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot, PartitionSnapshot, TopicSnapshot
from tidelog.storage.read.plan import (
    OPEN_BYTES,
    SPLIT_BYTES_MIN,
    OffsetRange,
    ReadFilter,
    SegmentRange,
    Split,
    TailRange,
    limit_offsets,
    plan,
)
from tidelog.storage.read.spark_kafka_options import (
    TopicSelection,
    flag,
    number,
    resolve,
    selection_of,
    span_of,
)
from tidelog.storage.state.partition import TailChunk

KIB = 1024
MIB = 1024 * KIB


def segment(
    base: int, end: int, *, size: int = MIB, at_ms: tuple[int, int] = (0, 0)
) -> SegmentFile:
    path = f"partition=0/{base:020}-{end:020}-aa.parquet"
    return SegmentFile(path, 0, base, end, size, end - base, *at_ms)


def run(base: int, end: int, *, at_ms: tuple[int, int] = (0, 0), append_ms: int = -1) -> TailChunk:
    count = end - base
    return TailChunk(
        base, count, 0, f"wal/{base:020}", 0, 1000, 0, count, *at_ms, 0, append_ms, False, "", 1000
    )


def view(
    number: int,
    *,
    log_start: int = 0,
    sealed: Iterable[SegmentFile] = (),
    tail: Iterable[TailChunk] = (),
    sealed_end: int | None = None,
) -> PartitionSnapshot:
    segments, runs = list(sealed), list(tail)
    if sealed_end is None:
        sealed_end = segments[-1].end_offset if segments else 0
    end = runs[-1].end_offset if runs else sealed_end
    return PartitionSnapshot(number, log_start, sealed_end, max(end, sealed_end), segments, runs)


def snapshot_of(**topics: list[PartitionSnapshot]) -> LogSnapshot:
    views = {
        name: TopicSnapshot(name, "ab", f"topics/{name}-ab", False, partitions)
        for name, partitions in topics.items()
    }
    return LogSnapshot("cluster", 7, views)


def planned(splits: list[Split]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(start, end) by partition, in the plan's order; a segment's first share stands for it."""
    spans_by_partition: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for split in splits:
        for record_slice in split.slices:
            if isinstance(record_slice, TailRange) or record_slice.share == 0:
                spans_by_partition.setdefault(
                    (record_slice.topic, record_slice.partition), []
                ).append((record_slice.start, record_slice.end))
    return spans_by_partition


def ranges_of(snapshot: LogSnapshot, **options: str) -> list[tuple[int, int]]:
    lowered = {name.lower(): value for name, value in options.items()}
    partitions = selection_of({"topic": "logs"} | lowered).partitions(snapshot)
    span = span_of(lowered, is_streaming=False)
    # Offsets are times here.
    offset_by_time = {(of, time): time for of, time in span.times(partitions)}
    return [(r.start, r.end) for r in resolve(snapshot, partitions, span, offset_by_time)]


TWO_TIERS = snapshot_of(
    logs=[
        view(0, sealed=[segment(0, 100), segment(100, 200)], tail=[run(200, 210), run(210, 230)]),
        view(1, tail=[run(0, 5)]),
    ]
)
WHOLE = [OffsetRange("logs", 0, 0, 230), OffsetRange("logs", 1, 0, 5)]


# -- plan


def test_both_tiers_are_planned_once_and_the_tail_first() -> None:
    splits = plan(TWO_TIERS, WHOLE)
    assert planned(splits) == {
        ("logs", 0): [(200, 210), (210, 230), (0, 100), (100, 200)],
        ("logs", 1): [(0, 5)],
    }
    assert isinstance(splits[0].slices[0], TailRange)
    assert pickle.loads(pickle.dumps(splits)) == splits


def test_a_manifest_newer_than_the_entry_is_cut_at_the_sealed_end() -> None:
    # I7: the table holds [0, 300) already, the entry says 150: the rest comes from the tail.
    snapshot = snapshot_of(
        logs=[
            view(
                0,
                sealed=[segment(0, 100), segment(100, 300)],
                tail=[run(140, 160), run(160, 180)],
                sealed_end=150,
            )
        ]
    )
    assert planned(plan(snapshot, [OffsetRange("logs", 0, 0, 180)])) == {
        ("logs", 0): [(150, 160), (160, 180), (0, 100), (100, 150)]
    }


def test_a_range_and_the_log_start_cut_slices() -> None:
    snapshot = snapshot_of(
        logs=[view(0, log_start=40, sealed=[segment(0, 100), segment(100, 200)])]
    )
    assert planned(plan(snapshot, [OffsetRange("logs", 0, 0, 120)])) == {
        ("logs", 0): [(40, 100), (100, 120)]
    }


def test_offsets_topics_and_partitions_prune() -> None:
    def left(read_filter: ReadFilter) -> dict[tuple[str, int], list[tuple[int, int]]]:
        return planned(plan(TWO_TIERS, WHOLE, read_filter))

    assert left(ReadFilter(offset_min=205)) == {("logs", 0): [(205, 210), (210, 230)]}
    assert left(ReadFilter(offset_max=3)) == {("logs", 0): [(0, 4)], ("logs", 1): [(0, 4)]}
    assert left(ReadFilter(partitions=frozenset({1}))) == {("logs", 1): [(0, 5)]}
    assert left(ReadFilter(topics=frozenset({"other"}))) == {}


def test_times_prune_segments_and_runs() -> None:
    snapshot = snapshot_of(
        logs=[
            view(
                0,
                sealed=[segment(0, 10, at_ms=(0, 100)), segment(10, 20, at_ms=(90, 200))],
                tail=[run(20, 30, at_ms=(150, 300)), run(30, 40, at_ms=(0, 0), append_ms=400)],
            )
        ]
    )
    everything = [OffsetRange("logs", 0, 0, 40)]

    def left(**bounds: int) -> list[tuple[int, int]]:
        spans_by_partition = planned(plan(snapshot, everything, ReadFilter(**bounds)))
        return sorted(spans_by_partition.get(("logs", 0), []))

    assert left(timestamp_min=101) == [(10, 20), (20, 30), (30, 40)]
    assert left(timestamp_max=95) == [(0, 10), (10, 20)]
    assert left(timestamp_min=400, timestamp_max=400) == [(30, 40)]
    assert left(timestamp_min=401) == []


def test_a_large_segment_is_shared_and_small_ones_are_packed() -> None:
    large = snapshot_of(logs=[view(0, sealed=[segment(0, 100, size=100 * MIB)])])
    splits = plan(large, [OffsetRange("logs", 0, 0, 100)], split_bytes=25 * MIB)
    assert [(s.slices[0].share, s.slices[0].shares) for s in splits] == [  # type: ignore[union-attr]
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
    ]
    files = [segment(n, n + 1, size=MIB) for n in range(64)]
    small = snapshot_of(logs=[view(0, sealed=files)])
    splits = plan(small, [OffsetRange("logs", 0, 0, 64)], split_bytes=16 * MIB)
    assert len(splits) == 5  # 64 MiB and what opening costs
    assert planned(splits)[("logs", 0)] == [(n, n + 1) for n in range(64)]


def test_a_narrow_range_of_a_large_segment_is_one_split() -> None:
    large = snapshot_of(logs=[view(0, sealed=[segment(0, 1_000_000, size=1024 * MIB)])])
    assert len(plan(large, [OffsetRange("logs", 0, 5, 10)])) == 1


def test_a_wanted_number_of_splits_is_met() -> None:
    large = snapshot_of(logs=[view(0, sealed=[segment(0, 100, size=8 * MIB)])])
    assert len(plan(large, [OffsetRange("logs", 0, 0, 100)])) == 1
    assert len(plan(large, [OffsetRange("logs", 0, 0, 100)], splits_min=8)) >= 8


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 500 * KIB)), max_size=30),
    tail=st.lists(st.integers(1, 20), max_size=30),
    cut=st.tuples(st.integers(0, 900), st.integers(0, 900)),
    split_bytes=st.integers(SPLIT_BYTES_MIN, 2 * MIB),
)
def test_a_plan_has_every_record_of_the_range_once(
    sizes: list[tuple[int, int]], tail: list[int], cut: tuple[int, int], split_bytes: int
) -> None:
    files, runs, next_offset = [], [], 0
    for rows, size in sizes:
        files.append(segment(next_offset, next_offset + rows, size=size))
        next_offset += rows
    for rows in tail:
        runs.append(run(next_offset, next_offset + rows))
        next_offset += rows
    snapshot = snapshot_of(logs=[view(0, sealed=files, tail=runs)])
    start, end = min(cut), min(max(cut), next_offset)
    splits = plan(snapshot, [OffsetRange("logs", 0, start, end)], split_bytes=split_bytes)
    offsets = [o for spans in planned(splits).values() for span in spans for o in range(*span)]
    assert sorted(offsets) == list(range(start, end))
    shares: dict[str, list[int]] = {}
    for record_slice in [record_slice for split in splits for record_slice in split.slices]:
        if isinstance(record_slice, SegmentRange):
            shares.setdefault(record_slice.key, []).append(record_slice.share)
            assert record_slice.shares == max(
                1, round(files_cost(record_slice, files) / split_bytes)
            )
    assert all(parts == list(range(len(parts))) for parts in shares.values())
    for split in splits:
        if len(split.slices) > 1:
            assert (
                sum(record_slice.cost + OPEN_BYTES for record_slice in split.slices)
                <= split_bytes + OPEN_BYTES
            )


def files_cost(segment_range: SegmentRange, files: list[SegmentFile]) -> int:
    file = next(file for file in files if segment_range.key.endswith(file.path))
    return (
        file.size
        * (segment_range.end - segment_range.start)
        // (file.end_offset - file.base_offset)
    )


# -- offsets


def test_a_batch_reads_everything_by_default() -> None:
    assert ranges_of(TWO_TIERS) == [(0, 230), (0, 5)]


def test_offsets_are_given_per_partition() -> None:
    offset_ranges = ranges_of(
        TWO_TIERS,
        startingOffsets='{"logs":{"0":23,"1":-2}}',
        endingOffsets='{"logs":{"0":200,"1":-1}}',
    )
    assert offset_ranges == [(23, 200), (0, 5)]


def test_timestamps_resolve_to_the_offsets_that_were_found() -> None:
    assert ranges_of(TWO_TIERS, startingTimestamp="3", endingTimestamp="4") == [(3, 4), (3, 4)]
    by_time = '{"logs":{"0":9,"1":2}}'
    assert ranges_of(TWO_TIERS, startingOffsetsByTimestamp=by_time) == [(9, 230), (2, 5)]


def test_a_start_without_a_match_is_an_error_or_the_end() -> None:
    partitions = TWO_TIERS.all_partitions()
    options = {"startingtimestamp": "99"}
    offset_by_time = {(of, 99): None for of in partitions}
    with pytest.raises(InvalidRequest, match="no record at or after timestamp 99"):
        resolve(TWO_TIERS, partitions, span_of(options, is_streaming=False), offset_by_time)
    options["startingoffsetsbytimestampstrategy"] = "latest"
    ranges = resolve(TWO_TIERS, partitions, span_of(options, is_streaming=False), offset_by_time)
    assert [(r.start, r.end) for r in ranges] == [(230, 230), (5, 5)]


def test_a_stream_starts_at_the_latest_and_has_no_end() -> None:
    partitions = TWO_TIERS.all_partitions()
    ranges = resolve(TWO_TIERS, partitions, span_of({}, is_streaming=True), {})
    assert [r.start for r in ranges] == [230, 5]
    with pytest.raises(InvalidRequest, match="a stream has no end"):
        span_of({"endingoffsets": "latest"}, is_streaming=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"startingOffsets": "{"}, InvalidRequest, "option startingOffsets: expected earliest"),
        ({"startingOffsets": '{"logs":{"x":1}}'}, InvalidRequest, "option startingOffsets"),
        ({"startingOffsets": '{"logs":{"0":"1"}}'}, InvalidRequest, "option startingOffsets"),
        ({"startingOffsets": '{"logs":{"0":-3,"1":0}}'}, InvalidRequest, "-3 for logs-0"),
        ({"startingOffsets": '{"logs":{"0":1}}'}, InvalidRequest, "logs-1 is missing"),
        ({"startingOffsets": '{"logs":{"0":1,"1":1,"2":1}}'}, UnknownPartition, "no partition 2"),
        ({"startingOffsets": '{"x":{"0":1}}'}, UnknownTopic, "topic 'x' does not exist"),
        ({"startingOffsets": "latest"}, InvalidRequest, "cannot start at the latest"),
        ({"startingOffsets": '{"logs":{"0":-1,"1":0}}'}, InvalidRequest, "cannot start at"),
        ({"endingOffsets": "earliest"}, InvalidRequest, "cannot end at the earliest"),
        (
            {"startingOffsets": '{"logs":{"0":231,"1":0}}'},
            OffsetOutOfRange,
            "offset 231 is out of range for logs-0: valid offsets are 0 to 230",
        ),
        (
            {
                "startingOffsets": '{"logs":{"0":20,"1":0}}',
                "endingOffsets": '{"logs":{"0":10,"1":5}}',
            },
            InvalidRequest,
            "logs-0 starts at offset 20, after its end 10",
        ),
        ({"startingTimestamp": "soon"}, InvalidRequest, "option startingTimestamp"),
        ({"startingOffsetsByTimestampStrategy": "x"}, InvalidRequest, "must be error or latest"),
        ({"failOnDataLoss": "perhaps"}, InvalidRequest, "option failOnDataLoss"),
    ],
)
def test_wrong_options_named(options: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ranges_of(TWO_TIERS, **options)


def test_retained_offsets_are_an_error_by_default() -> None:
    snapshot = snapshot_of(logs=[view(0, log_start=50, sealed=[segment(0, 100)])])
    start = '{"logs":{"0":10}}'
    with pytest.raises(OffsetOutOfRange, match="valid offsets are 50 to 100"):
        ranges_of(snapshot, startingOffsets=start)
    assert ranges_of(snapshot, startingOffsets=start, failOnDataLoss="false") == [(50, 100)]


# -- selection


def test_a_selection_is_one_of_three() -> None:
    assert selection_of({"topic": "a"}) == TopicSelection(names=["a"])
    assert selection_of({"subscribe": "b, a,,b"}) == TopicSelection(names=["a", "b"])
    assert selection_of({"subscribepattern": "a.*"}).pattern == "a.*"
    chosen = selection_of({"assign": '{"logs":[1]}'})
    assert chosen.partitions(TWO_TIERS) == [TopicPartition("logs", 1)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topic": "a", "subscribe": "b"},
        {"subscribe": " , "},
        {"assign": "[1]"},
        {"subscribepattern": "("},
    ],
)
def test_a_wrong_selection_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="option"):
        selection_of(options)


def test_an_assigned_partition_must_exist() -> None:
    with pytest.raises(UnknownPartition):
        selection_of({"assign": '{"logs":[2]}'}).partitions(TWO_TIERS)


def test_flags_and_numbers() -> None:
    assert flag({"x": "TRUE"}, "X", default=False)
    assert number({"x": "12"}, "X") == 12
    assert number({}, "X") is None
    for wrong in ("0", "-1", "a", ""):
        with pytest.raises(InvalidRequest, match="option X"):
            number({"x": wrong}, "X")


# -- take


A, B, C = (TopicPartition("logs", number) for number in range(3))


def test_a_trigger_takes_in_proportion() -> None:
    assert limit_offsets({A: 0, B: 0}, {A: 300, B: 100}, 40) == {A: 30, B: 10}
    assert limit_offsets({A: 5}, {A: 10, B: 3}, 100) == {A: 10, B: 3}


def test_a_trigger_does_not_starve_a_small_partition() -> None:
    end_offsets = limit_offsets({A: 0, B: 0, C: 0}, {A: 10**6, B: 10**6, C: 1}, 10)
    assert end_offsets[C] == 1
    assert sum(end_offsets.values()) == 10


@given(
    st.dictionaries(st.sampled_from([A, B, C]), st.tuples(st.integers(0, 99), st.integers(0, 99))),
    st.integers(1, 120),
)
def test_trigger_takes_its_most(
    given_: dict[TopicPartition, tuple[int, int]], rows_max: int
) -> None:
    start = {of: low for of, (low, _) in given_.items()}
    end = {of: low + count for of, (low, count) in given_.items()}
    end_offsets = limit_offsets(start, end, rows_max)
    assert end_offsets.keys() == end.keys()
    assert all(start[of] <= end_offsets[of] <= end[of] for of in end)
    total = sum(end.values()) - sum(start.values())
    assert sum(end_offsets.values()) - sum(start.values()) == min(total, rows_max)
