"""Plans of retention, merging and compaction, and the rules of garbage, against plain models."""

import math
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.compaction import garbage, plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.plan import MergeBounds
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import effective
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.partition import Partition
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables.manifest import SegmentColumns

NOW_MS = 1_700_000_000_000


def files_of(shapes: Sequence[tuple[int, int, int]], first: int = 0) -> list[SegmentFile]:
    """Segments one after the other; a shape is offsets, bytes, age of the newest record."""
    files = []
    for count, size, age_ms in shapes:
        path = object_keys.segment(0, first, first + count, f"{first:x}")
        stamps = (NOW_MS - age_ms - 5, NOW_MS - age_ms)
        files.append(SegmentFile(path, 0, first, first + count, size, count, *stamps))
        first += count
    return files


shapes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 1000), st.integers(-50, 1000)), max_size=12
)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[SegmentFile], Partition]:
    """A partition's segments and what the WAL says of it: the table may be ahead."""
    files = files_of(draw(shapes), draw(st.sampled_from([0, 7])))
    ends = [0, *(file.end_offset for file in files)]
    sealed_end = draw(st.sampled_from(ends))
    start = draw(st.integers(0, sealed_end + 3))
    tail_bytes = draw(st.integers(0, 500))
    return files, Partition(start, sealed_end, max(sealed_end + 3, start), tail_bytes)


@examples(300)
@given(partitions(), st.integers(-1, 1000), st.integers(-1, 6000))
def test_retention_takes_the_oldest_segments_that_kafka_would(
    files_and_partition: tuple[list[SegmentFile], Partition],
    retention_ms: int,
    retention_bytes: int,
) -> None:
    files, partition = files_and_partition
    config = effective({"retention.ms": str(retention_ms), "retention.bytes": str(retention_bytes)})
    live = [
        file
        for file in files
        if partition.log_start_offset < file.end_offset <= partition.sealed_end
    ]
    start = partition.log_start_offset
    total = sum(file.size for file in live) + partition.tail_bytes
    for file in live:
        is_old = retention_ms >= 0 and file.timestamp_max < NOW_MS - retention_ms
        is_large = retention_bytes >= 0 and total - file.size >= retention_bytes
        if not (is_old or is_large):
            break
        total -= file.size
        start = file.end_offset
    cut = plan.retention(SegmentColumns.of(files), partition, config, NOW_MS)
    log_start_offset = partition.log_start_offset if cut is None else cut.log_start_offset
    assert log_start_offset == start
    assert cut is None or cut.why
    # Afterwards there is nothing left to do.
    moved = Partition(
        log_start_offset, partition.sealed_end, partition.high_watermark, partition.tail_bytes
    )
    assert plan.retention(SegmentColumns.of(files), moved, config, NOW_MS) is None
    below = plan.below(SegmentColumns.of(files), moved, log_start_offset)
    assert below == sum(
        file.end_offset <= min(log_start_offset, partition.sealed_end) for file in files
    )


@examples(300)
@given(partitions(), st.integers(-1, 1000), st.integers(0, 3000))
def test_nothing_expires_before_its_time(
    files_and_partition: tuple[list[SegmentFile], Partition], retention_ms: int, later_ms: int
) -> None:
    """So a table need not be looked at before; at that time, there is something to remove."""
    files, partition = files_and_partition
    columns = SegmentColumns.of(files)
    config = effective({"retention.ms": str(retention_ms)})
    expiry_ms = plan.expiry_ms(columns, partition, config, NOW_MS)
    if NOW_MS + later_ms < expiry_ms:
        assert plan.retention(columns, partition, config, NOW_MS + later_ms) is None
    elif all(file.timestamp_max <= NOW_MS for file in files):
        assert plan.retention(columns, partition, config, NOW_MS + later_ms) is not None
    compacted = effective({"retention.ms": str(retention_ms), "cleanup.policy": "compact"})
    assert plan.expiry_ms(columns, partition, compacted, NOW_MS) == math.inf


def test_retention_of_100_000_segments_is_planned_in_under_a_second() -> None:
    count = 100_000
    base = np.arange(count, dtype=np.int64) * 10
    columns = SegmentColumns(
        pa.array([""] * count),
        np.zeros(count, np.int64),
        base,
        base + 10,
        np.full(count, 1000, np.int64),
        np.full(count, 10, np.int64),
        base,
        base + 9,
        base,
    )
    partition = Partition(0, 10 * count, 10 * count)
    config = effective({"retention.ms": "1000", "retention.bytes": "5000000"})
    started = time.process_time()
    cut = plan.retention(columns, partition, config, 10 * count)
    merged = list(plan.merges(columns, partition, MergeBounds(100_000), 0, 10 * count))
    assert time.process_time() - started < 1.0
    assert cut is not None
    assert cut.log_start_offset == 10 * (count - 100)
    assert cut.why == "retention.ms and retention.bytes"
    assert sum(map(len, merged)) == count


@examples(300)
@given(
    partitions(),
    st.builds(MergeBounds, st.integers(1, 3000), st.just(math.inf) | st.integers(0, 1000)),
    st.integers(0, 80),
)
def test_merges_are_of_small_neighbours_and_come_to_an_end(
    files_and_partition: tuple[list[SegmentFile], Partition],
    merge_bounds: MergeBounds,
    clean_end: int,
) -> None:
    files, partition = files_and_partition
    rounds = 0
    while True:
        columns = SegmentColumns.of(files)
        groups = list(plan.merges(columns, partition, merge_bounds, clean_end, NOW_MS + 50))
        if not groups:
            break
        rounds += 1
        assert rounds < 12
        indexes = [index for group in groups for index in group]
        assert indexes == sorted(set(indexes))
        for group in groups:
            assert len(group) > 1
            inputs = [files[index] for index in group]
            assert sum(file.size for file in inputs) <= merge_bounds.target_bytes
            assert len(inputs) <= plan.MERGE_FILES_MAX
            oldest_ms = min(file.timestamp_min for file in inputs)
            assert max(file.timestamp_max for file in inputs) - oldest_ms <= merge_bounds.span_ms
            assert inputs[0].end_offset > partition.log_start_offset
            assert inputs[-1].end_offset <= partition.sealed_end
            sides = {file.end_offset <= clean_end for file in inputs}
            assert len(sides) == 1 or min(clean_end, partition.sealed_end) != clean_end
        merge_all(files, groups)


def merge_all(files: list[SegmentFile], groups: list[range]) -> int:
    """Replace each group by one segment; return the bytes that this writes."""
    written = 0
    for group in reversed(groups):
        inputs = [files[index] for index in group]
        size = sum(file.size for file in inputs)
        written += size
        files[group.start : group.stop] = [
            inputs[0]._replace(
                end_offset=inputs[-1].end_offset,
                size=size,
                rows=sum(file.rows for file in inputs),
                timestamp_min=min(file.timestamp_min for file in inputs),
                timestamp_max=max(file.timestamp_max for file in inputs),
            )
        ]
    return written


def test_small_segments_that_come_one_by_one_are_not_written_again_and_again() -> None:
    files: list[SegmentFile] = []
    written = 0
    for number in range(512):
        files += files_of([(10, 1000, 0)], 10 * number)
        partition = Partition(0, 10 * number + 10, 10 * number + 10)
        columns = SegmentColumns.of(files)
        written += merge_all(
            files, list(plan.merges(columns, partition, MergeBounds(10**6), 0, NOW_MS))
        )
    assert len(files) < 20
    assert written < 12 * 512 * 1000


MINUTE_MS, DAY_MS = 60_000, 86_400_000


class SealedTopic:
    """A topic of a record each second, sealed each 10 minutes, retained and merged at each look."""

    def __init__(self, retention_ms: int) -> None:
        self._config = effective({"retention.ms": str(retention_ms)})
        self._bounds = MergeBounds.of(self._config, self._config.segment_bytes)
        self._log_start = self._end = 0
        self.now_ms = NOW_MS
        self.files: list[SegmentFile] = []
        self.written = 0

    def seal(self, size: int) -> None:
        self.now_ms += 10 * MINUTE_MS
        (file,) = files_of([(600, size, NOW_MS - self.now_ms)], self._end)
        self.files.append(file._replace(timestamp_min=self.now_ms - 10 * MINUTE_MS))
        self._end += 600

    def look(self) -> None:
        partition = Partition(self._log_start, self._end, self._end)
        columns = SegmentColumns.of(self.files)
        cut = plan.retention(columns, partition, self._config, self.now_ms)
        if cut is not None:
            self._log_start = cut.log_start_offset
            self.files = [file for file in self.files if file.end_offset > self._log_start]
            columns = SegmentColumns.of(self.files)
            partition = Partition(self._log_start, self._end, self._end)
        merges = list(plan.merges(columns, partition, self._bounds, 0, self.now_ms))
        self.written += merge_all(self.files, merges)


def test_a_record_each_second_for_a_year_makes_few_segments() -> None:
    """Of 52,560 seals, whose content fills 47 segments."""
    topic, size = SealedTopic(retention_ms=-1), 60_000
    for number in range(365 * 24 * 6):
        topic.seal(size)
        if number % 36 == 0:
            topic.look()
    assert len(topic.files) < 130
    assert topic.written < 11 * 365 * 24 * 6 * size


@pytest.mark.parametrize(("growth_a_day", "files_max"), [(1.0, 60), (1.3, 60), (2.0, 400)])
def test_merges_keep_records_a_part_of_retention_longer_at_most(
    growth_a_day: float, files_max: int
) -> None:
    topic = SealedTopic(retention_ms=7 * DAY_MS)
    for number in range(20 * 24 * 6):
        topic.seal(round(100 * growth_a_day ** (number / 144)))
        if number % 6 == 0:
            topic.look()
            age_ms = topic.now_ms - topic.files[0].timestamp_min
            assert age_ms <= 7 * DAY_MS * (1 + 1 / plan.SPAN_PART) + 70 * MINUTE_MS
    assert len(topic.files) < files_max


def test_merges_keep_a_part_of_retention_bytes_at_most() -> None:
    config = effective({"retention.bytes": "8000000"})
    assert MergeBounds.of(config, 10**9).target_bytes == 1_000_000


def test_merges_do_not_make_records_of_a_compacted_topic_younger() -> None:
    config = effective({"cleanup.policy": "compact", "min.compaction.lag.ms": "5000"})
    assert MergeBounds.of(config, 10**9) == (10**9, 5000)


@examples(300)
@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 20), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 2000),
)
def test_groups_cover_all_segments(segments: list[tuple[int, int, int]], target: int) -> None:
    sizes = [size for size, _, _ in segments]
    rows = [count for _, count, _ in segments]
    kept_rows = [min(stays, count) for _, count, stays in segments]
    groups = plan.groups(sizes, rows, kept_rows, target)
    if not sum(kept_rows):
        assert groups == []
        return
    assert [index for group, _ in groups for index in group] == list(range(len(segments)))
    for group, is_changed in groups:
        assert sum(kept_rows[index] for index in group) > 0
        is_whole = len(group) == 1 and kept_rows[group.start] == rows[group.start]
        assert is_changed is not is_whole


# -- garbage


HOUR_MS = 3_600_000
GRACE = Grace(wal_ms=HOUR_MS, table_ms=4 * HOUR_MS)


@examples(200)
@given(
    st.dictionaries(st.integers(1, 40), st.integers(0, 9), max_size=30),
    st.integers(0, 30),
    st.sets(st.integers(1, 40)),
)
def test_i9_covered_old_entries_go(ages: dict[int, int], base_seq: int, tails: set[int]) -> None:
    infos = [
        ObjectInfo(object_keys.wal(seq), 10, NOW_MS - ages[seq] * HOUR_MS // 3)
        for seq in sorted(ages)
    ]
    base = ClusterState("c")
    base.seq = base_seq
    live = {object_keys.wal(seq) for seq in tails}
    keys = {
        garbage_object.key for garbage_object in garbage.of_wal(infos, base, live, NOW_MS, GRACE)
    }
    expected = {
        object_keys.wal(seq)
        for seq, age in ages.items()
        if seq <= base_seq and age >= 3 and seq not in tails and seq != max(ages)
    }
    assert keys == expected


def test_a_key_below_topics_has_its_topic() -> None:
    topic_id = "0af3" * 8
    for name in ("a", "a-b", "a.b_c", f"x-{topic_id}"):
        prefix = object_keys.topic(name, topic_id)
        for path in ("_delta_log/x.json", object_keys.segment(0, 0, 1, "ab")):
            assert garbage.topic_of(f"{prefix}/{path}") == (prefix, topic_id)
    for key in ("topics/x", f"topics/{topic_id}/x", f"topics/a-{topic_id}", "topics/a-0af3/x"):
        assert garbage.topic_of(key) is None
