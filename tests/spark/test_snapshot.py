"""Snapshots and slices without Spark: on every kind of store, pruned, verified, and read only."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.spark.conftest import History
from tests.support.broker_log import TIME_MS, BrokerLog, Record, open_log, records_in, records_of
from tidelog.storage.core.errors import Corrupt, StoreRefused, StoreUnfit, Unavailable, UnknownTopic
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot
from tidelog.storage.read.offline_log import OfflineLog, open_snapshot
from tidelog.storage.read.plan import NO_FILTER, OffsetRange, ReadFilter, SegmentRange, plan
from tidelog.storage.read.segment_reader import FetchedGroups
from tidelog.storage.read.spark_kafka_options import (
    Boundary,
    OffsetSpan,
    TopicSelection,
    selection_of,
)
from tidelog.storage.read.split_reader import SliceReader, read_split
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.read_only import ReadOnlyFolder

COLUMNS = ["offset", "timestamp", "key", "value", "headers"]


def whole(snapshot: LogSnapshot) -> list[OffsetRange]:
    return [
        OffsetRange(
            *of, snapshot.partition(of).log_start_offset, snapshot.partition(of).high_watermark
        )
        for of in snapshot.all_partitions()
    ]


async def read(
    store: ObjectStore, snapshot: LogSnapshot, read_filter: ReadFilter = NO_FILTER
) -> list[Record]:
    records = []
    for split in plan(snapshot, whole(snapshot), read_filter, splits_min=3):
        for record_slice in split.slices:
            for batch in (await SliceReader(store).fetch(record_slice, read_filter)).batches(
                COLUMNS
            ):
                records += records_in(batch.to_pylist(), record_slice.topic, record_slice.partition)
    return sorted(records, key=lambda record: record[:3])


async def test_a_snapshot_reads_back_the_log(store: ObjectStore) -> None:
    from tidelog.storage.codec.record_columns import Rows

    log = await open_log(store)
    topic = await log.topics.create("t", 2, {})
    assert topic is not None
    for first in (0, 15_000):
        for number in (0, 1):
            values: list[bytes | None] = [b"v%d" % n for n in range(first, first + 15_000)]
            stamps = list(range(TIME_MS + first, TIME_MS + first + 15_000))
            rows = Rows(stamps, [None] * 15_000, values)
            await log.records.append(topic, [(number, rows)], size=1 << 17, is_json=False)
        if not first:
            await log.records.seal("t", [0])
    expected = await records_of(log, "t")
    clock = SystemClock()
    snapshot = await open_snapshot(store, clock, ["t"])
    await log.records.seal("t")  # the manifest moves on, the snapshot does not
    assert [len(part.segments) for part in snapshot.topics["t"].partitions] == [1, 0]
    assert await read(store, snapshot) == expected
    view = await OfflineLog.open(store, clock)
    later = await view.snapshot(None)
    assert await read(store, later) == expected
    time_ms = TIME_MS + 12_345
    offset_by_partition = await view.find(
        later, [(TopicPartition("t", 1), time_ms), (TopicPartition("t", 0), 2 * time_ms)]
    )
    assert list(offset_by_partition.values()) == [12_345, None]
    await view.close()
    await log.close()


@pytest.fixture(scope="module")
def opened_store(history: History) -> Iterator[OpenedStore]:
    with OpenedStore(history.url) as opened_store:
        yield opened_store


@pytest.fixture(scope="module")
def snapshot(opened_store: OpenedStore) -> LogSnapshot:
    return opened_store.run(open_snapshot(opened_store.store, SystemClock(), ["events"]))


def test_blocking_calls_work_inside_a_running_loop(history: History) -> None:
    import asyncio

    async def inside() -> int:
        with OpenedStore(history.url) as opened_store:
            return opened_store.run(open_snapshot(opened_store.store, SystemClock(), None)).seq

    assert asyncio.run(inside()) > 0


def test_topics_are_chosen_by_name_pattern_or_all(opened_store: OpenedStore) -> None:
    import re

    view = opened_store.run(OfflineLog.open(opened_store.store, SystemClock()))
    assert list(view.offsets(None).topics) == ["empty", "events", "fresh", "stamped"]
    assert list(view.offsets(re.compile("e.*")).topics) == ["empty", "events"]
    assert list(view.offsets(["fresh", "empty"]).topics) == ["empty", "fresh"]
    with pytest.raises(UnknownTopic):
        view.offsets(["fresh", "e.*"])
    opened_store.run(view.close())


def test_who_reads_the_tail_alone_asks_no_manifest(opened_store: OpenedStore) -> None:
    view = opened_store.run(OfflineLog.open(opened_store.store, SystemClock()))
    ends = {TopicPartition("events", number): 300 for number in range(3)}
    snapshot = opened_store.run(view.snapshot(["events"], ends))
    assert [len(part.segments) for part in snapshot.topics["events"].partitions] == [0, 0, 0]
    assert [len(part.tail) for part in snapshot.topics["events"].partitions] == [1, 2, 0]
    opened_store.run(view.close())


def test_a_prefix_without_a_cluster_is_an_error_and_stays_so(tmp_path: Path) -> None:
    with (
        OpenedStore(str(tmp_path)) as opened_store,
        pytest.raises(StoreUnfit, match=r"there is no cluster\.json"),
    ):
        opened_store.run(open_snapshot(opened_store.store, SystemClock(), None))
    assert not list(tmp_path.iterdir())


async def test_a_store_opened_to_read_refuses_to_write(tmp_path: Path) -> None:
    store = ReadOnlyFolder(tmp_path)
    with pytest.raises(StoreRefused):
        await store.create("a", [b"x"])
    with pytest.raises(StoreRefused):
        await store.put("a", [b"x"])
    with pytest.raises(StoreRefused):
        await store.delete(["a"])
    with pytest.raises(StoreUnfit, match="memory://"):
        OpenedStore("memory://")


def test_pruning_leaves_out_objects_and_groups(
    opened_store: OpenedStore, snapshot: LogSnapshot
) -> None:
    def keys(read_filter: ReadFilter) -> list[tuple[int, int]]:
        splits = plan(snapshot, whole(snapshot), read_filter)
        return sorted(
            (record_slice.partition, record_slice.start)
            for split in splits
            for record_slice in split.slices
        )

    everything = [(0, 0), (0, 100), (0, 200), (1, 0), (1, 100), (1, 200), (2, 0)]
    assert keys(NO_FILTER) == everything
    assert keys(ReadFilter(timestamp_min=TIME_MS + 200)) == [(0, 200), (1, 200)]
    assert keys(ReadFilter(timestamp_max=TIME_MS)) == [(0, 0), (1, 0), (2, 0)]
    assert keys(ReadFilter(offset_min=150, partitions=frozenset({0}))) == [(0, 150), (0, 200)]


async def test_row_groups_are_pruned_and_shared(tmp_path: Path) -> None:
    segment = await large_segment(tmp_path)
    store = ReadOnlyFolder(tmp_path)

    async def groups(segment_range: SegmentRange, read_filter: ReadFilter = NO_FILTER) -> list[int]:
        fetched = await SliceReader(store).fetch(segment_range, read_filter)
        assert isinstance(fetched, FetchedGroups)
        return [group.index for group in fetched.groups]

    assert await groups(segment) == [0, 1, 2, 3, 4]
    assert await groups(segment._replace(start=19_999, end=20_001)) == [1, 2]
    assert await groups(segment, ReadFilter(timestamp_min=TIME_MS + 45_000)) == [4]
    shares = [await groups(segment._replace(share=share, shares=3)) for share in range(3)]
    assert shares == [[0], [1, 2], [3, 4]]
    three = segment._replace(start=19_990, end=19_993)
    (narrow,) = (await SliceReader(store).fetch(three)).batches(["value"])
    assert narrow.to_pydict() == {"value": [b"19990", b"19991", b"19992"]}


@pytest.mark.parametrize("damage", ["group", "footer", "cut", "gone"])
async def test_bytes_that_do_not_verify_are_refused(tmp_path: Path, damage: str) -> None:
    segment = await large_segment(tmp_path)
    path = tmp_path / segment.key
    body = bytearray(path.read_bytes())
    match damage:
        case "group":
            body[len(body) // 3] ^= 1
        case "footer":
            body[-200] ^= 1
        case "cut":
            del body[-1]
    path.write_bytes(body)
    if damage == "gone":
        path.unlink()
    store = ReadOnlyFolder(tmp_path)
    error, message = (Unavailable, "read again") if damage == "gone" else (Corrupt, segment.key)
    with pytest.raises(error, match=message):
        list((await SliceReader(store).fetch(segment)).batches(["offset"]))


async def large_segment(root: Path) -> SegmentRange:
    """50,000 records in five row groups, as one slice."""
    import pyarrow as pa

    from tidelog.storage.codec import segment
    from tidelog.storage.codec.record_columns import HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE

    count = 50_000
    stamps = (TIME_MS + np.arange(count, dtype=np.int64)) * 1000
    columns = [
        pa.array(np.arange(count, dtype=np.int64)),
        pa.array(stamps).view(TIMESTAMP_TYPE),
        pa.nulls(count, pa.binary()),
        pa.array([b"%d" % n for n in range(count)], pa.binary()),
        pa.nulls(count, HEADERS_TYPE),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
    written = segment.write([batch], codec="zstd", is_json=True)
    (root / "segment.parquet").write_bytes(written.body)
    size = written.body.size
    return SegmentRange("t", 0, False, "segment.parquet", size, 0, count, size)


def test_a_tail_of_many_small_runs_is_read_ahead(tmp_path: Path) -> None:
    broker = BrokerLog(tmp_path)
    broker.create("t", 1)
    for number in range(100):
        broker.append("t", {0: [b"%d" % number]})
    broker.close()
    with OpenedStore(str(tmp_path)) as opened_store:
        snapshot = opened_store.run(open_snapshot(opened_store.store, SystemClock(), ["t"]))
        (split,) = plan(snapshot, whole(snapshot))
        values = [
            value
            for _, batch in read_split(opened_store, split, ["value"])
            for value in batch.column("value").to_pylist()
        ]
        assert values == [b"%d" % number for number in range(100)]
        stopped = read_split(opened_store, split, ["value"])
        next(stopped)
        stopped.close()  # what was read ahead goes with it


async def test_a_span_resolves_over_both_tiers(history: History) -> None:
    store = ReadOnlyFolder(history.root)
    view = await OfflineLog.open(store, SystemClock())
    span = OffsetSpan(Boundary(timestamp=TIME_MS + 150), Boundary(timestamp=TIME_MS + 250))
    _, ranges = await view.resolve(selection_of({"assign": '{"events":[0,1]}'}), span)
    assert ranges == [OffsetRange("events", 0, 150, 250), OffsetRange("events", 1, 150, 250)]
    with pytest.raises(UnknownTopic):
        await view.resolve(TopicSelection(["absent"]), span)
    await view.close()


async def test_a_time_is_looked_up_after_the_log_start(history: History) -> None:
    store = ReadOnlyFolder(history.root)
    view = await OfflineLog.open(store, SystemClock())
    snapshot = await view.snapshot(["events"])
    topic = snapshot.topics["events"]
    cut = [part._replace(log_start_offset=95) for part in topic.partitions]
    later = snapshot._replace(topics={"events": topic._replace(partitions=cut)})
    of = TopicPartition("events", 0)
    times = [(of, TIME_MS + 50), (of, TIME_MS + 99), (of, TIME_MS + 100), (of, TIME_MS + 300)]
    assert list((await view.find(later, times)).values()) == [95, 99, 100, None]
    await view.close()
