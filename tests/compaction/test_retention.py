"""Retention and delete-records on whole logs: Kafka's meanings, races, and previews."""

import asyncio
import random

import pytest

from tests.support.faults import Fault, Script
from tests.support.logs import COLD, append, closing, opened, read_values
from tests.support.maintenance import caring, log_with, way_of
from tests.support.records import TIME_MS
from tidelog.compaction import plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import HIGH_WATERMARK, delete_records
from tidelog.compaction.log_starts import Retained
from tidelog.compaction.retention import retain
from tidelog.compaction.retention_preview import Expiry, expiries
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import (
    OffsetOutOfRange,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import effective
from tidelog.storage.state.partition import Partition
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import SegmentColumns

HOUR_MS = 3_600_000
SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"]]
VALUES = [value for values in SEGMENTS for value in values]


async def bases(log: Broker, number: int = 0) -> list[int]:
    table = await log._log.tables.of(log.state.topic("t"))
    await table.refresh()
    return [file.base_offset for file in await table.segments(number)]


async def starts(log: Broker) -> list[int]:
    await log._log.wal.refresh()
    return [partition.log_start_offset for partition in log.state.topic("t").partitions]


async def retained(inner: MemoryStore, *, is_dry: bool = False) -> list[Retained]:
    async with caring(inner) as cluster:
        return await retain(cluster, None, is_dry=is_dry)


@pytest.mark.parametrize(
    ("hours", "start"), [(0.0, 0), (0.99, 0), (1.01, 0), (2.01, 2), (3.01, 4), (99, 6)]
)
async def test_older_records_are_deleted(inner: MemoryStore, hours: float, start: int) -> None:
    """By the newest record of each segment, and by the store's clock; the tail stays."""
    log = await log_with(inner, SEGMENTS, partitions=2, retention_ms=str(2 * HOUR_MS))
    async with closing(log):
        await append(log, "tail", partition=1)
        inner.now_ms = TIME_MS + int(hours * HOUR_MS)
        planned = await retained(inner, is_dry=True)
        assert await starts(log) == [0, 0]
        assert await bases(log) == [0, 2, 4]
        assert await retained(inner) == planned
        assert await starts(log) == [start, start]
        assert await bases(log) == [base for base in (0, 2, 4) if base >= start]
        for number, tail in ((0, []), (1, ["tail"])):
            expected = [*VALUES, *tail][start:]
            assert await read_values(log, partition=number, offset=start) == expected
        for cut in planned:
            assert cut.why == "retention.ms"
            assert (cut.was, cut.log_start_offset, cut.rows) == (0, start, start)
            assert cut.segments == start // 2
            assert cut.size > 0
        assert len(planned) == (2 if start else 0)
        assert await retained(inner) == []


@pytest.mark.parametrize("kept_segments", [0, 1, 2, 3])
async def test_what_is_beyond_retention_bytes_goes(inner: MemoryStore, kept_segments: int) -> None:
    async with closing(await log_with(inner, SEGMENTS, retention_ms="-1")) as log:
        table = await log._log.tables.of(log.state.topic("t"))
        sizes = [file.size for file in await table.segments(0)]
        limit = sum(sizes[len(sizes) - kept_segments :])
        await log.topics.alter("t", {"retention.bytes": str(limit)})
        cuts = await retained(inner)
        assert await bases(log) == [0, 2, 4][3 - kept_segments :]
        assert await starts(log) == [2 * (3 - kept_segments)]
        assert [cut.why for cut in cuts] == ([] if kept_segments == 3 else ["retention.bytes"])


@pytest.mark.parametrize(
    "configs", [{"retention_ms": "-1"}, {"retention_ms": "1", "cleanup_policy": "compact"}]
)
async def test_what_is_kept_for_ever_stays(inner: MemoryStore, configs: dict[str, str]) -> None:
    async with closing(await log_with(inner, SEGMENTS, **configs)) as log:
        inner.now_ms = 2**42
        assert await retained(inner) == []
        assert await bases(log) == [0, 2, 4]


@pytest.mark.parametrize(
    ("offset", "start", "remaining_bases"),
    [
        (0, 0, [0, 2, 4]),
        (1, 1, [1, 2, 4]),
        (2, 2, [2, 4]),
        (5, 5, [5]),
        (7, 7, []),
        (HIGH_WATERMARK, 8, []),
    ],
)
async def test_records_are_deleted_up_to_an_offset(
    inner: MemoryStore, offset: int, start: int, remaining_bases: list[int]
) -> None:
    log = await log_with(inner, SEGMENTS)
    async with closing(log), caring(inner) as cluster:
        await append(log, "g", "h")
        await delete_records(cluster, "t", {0: offset}, is_dry=False)
        assert await starts(log) == [start]
        assert await bases(log) == remaining_bases
        assert await read_values(log, offset=start) == [*VALUES, "g", "h"][start:]
        # Records of the tail are removed once they are sealed.
        await log.records.seal("t")
        await retained(inner)
        assert await bases(log) == [*remaining_bases, *([max(start, 6)] if start < 8 else [])]


async def test_a_segment_that_the_log_start_cuts_is_rewritten_once(inner: MemoryStore) -> None:
    """The next run finds nothing to do. The old object stays for readers."""
    log = await log_with(inner, [["a", "b", "c", "d"]])
    async with closing(log), caring(inner) as cluster:
        table = await log._log.tables.of(log.state.topic("t"))
        (old,) = await table.segments(0)
        (planned,) = await delete_records(cluster, "t", {0: 3}, is_dry=True)
        assert await bases(log) == [0]
        assert await delete_records(cluster, "t", {0: 3}, is_dry=False) == [planned]
        assert (planned.segments, planned.rows, planned.rewritten) == (0, 0, old.size)
        await table.refresh()
        (new,) = await table.segments(0)
        assert (new.base_offset, new.end_offset, new.rows) == (3, 4, 1)
        assert await delete_records(cluster, "t", {0: 3}, is_dry=False) == []
        assert await retained(inner) == []
        assert await inner.get(f"{log.state.topic('t').prefix}/{old.path}")
        assert await read_values(log, offset=3) == ["d"]


@pytest.mark.parametrize(("offset", "remaining_bases"), [(2, [2, 4]), (3, [3, 4]), (-1, [])])
async def test_cut_records_leave_table(
    inner: MemoryStore, offset: int, remaining_bases: list[int]
) -> None:
    """`delete_records` moves the log start; the next retention removes and rewrites."""
    async with closing(await log_with(inner, SEGMENTS, retention_ms="-1")) as log:
        start = await log.topics.delete_records("t", 0, offset)
        assert await bases(log) == [0, 2, 4]
        assert await read_values(log, offset=start) == VALUES[start:]
        await retained(inner)
        assert await bases(log) == remaining_bases
        assert await starts(log) == [start]
        assert await read_values(log, offset=start) == VALUES[start:]
        assert await retained(inner) == []


async def test_large_cut_for_command(inner: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    log = await log_with(inner, [], retention_ms="-1")
    async with closing(log), caring(inner) as cluster:
        await append(log, "a", "b")
        await delete_records(cluster, "t", {0: 1}, is_dry=False)
        await log.records.seal("t")
        assert await bases(log) == [0]
        assert await retain(cluster, None, is_dry=False, rewrite_bytes_max=10) == []
        assert "run `tidelog retain t --yes`" in caplog.text
        assert await bases(log) == [0]
        (result,) = await retain(cluster, None, is_dry=False)
        assert (result.was, result.log_start_offset, result.rewritten > 10) == (1, 1, True)
        assert await bases(log) == [1]


async def test_a_cut_in_a_range_without_records_removes_the_segment(inner: MemoryStore) -> None:
    """Key compaction removed the last records of the first segment."""
    log = await log_with(inner, [], cleanup_policy="compact", min_cleanable_dirty_ratio="0")
    async with closing(log), caring(inner) as cluster:
        large = random.Random(1).randbytes(700_000)  # so the two segments are not merged
        await log.topics.alter("t", {"target.segment.bytes": "1048576"})
        for first, second in (((b"x", large), (b"k", b"1")), ((b"k", b"2"), (b"z", large))):
            rows = Rows([TIME_MS] * 2, [first[0], second[0]], [first[1], second[1]])
            await log.records.append(log.state.topic("t"), [(0, rows)], size=9, is_json=False)
            await log.records.seal("t")
        await cluster.refresh()
        await compact(cluster, None, is_dry=False)
        assert await bases(log) == [0, 2]
        await delete_records(cluster, "t", {0: 1}, is_dry=False)
        assert await bases(log) == [2]
        assert await starts(log) == [2]
        assert await retained(inner) == []


async def test_records_that_are_not_there_cannot_be_deleted(inner: MemoryStore) -> None:
    log = await log_with(inner, SEGMENTS)
    async with closing(log), caring(inner) as cluster:
        with pytest.raises(OffsetOutOfRange, match="0 to 6"):
            await delete_records(cluster, "t", {0: 7}, is_dry=False)
        with pytest.raises(UnknownPartition):
            await delete_records(cluster, "t", {1: 0}, is_dry=False)
        with pytest.raises(UnknownTopic):
            await delete_records(cluster, "u", {0: 0}, is_dry=False)
        assert await starts(log) == [0]


async def test_two_that_run_at_once_come_to_one_result(inner: MemoryStore) -> None:
    log = await log_with(inner, SEGMENTS, partitions=2, retention_ms=str(HOUR_MS // 2))
    inner.now_ms += HOUR_MS // 4
    async with caring(inner) as session, caring(inner) as other, closing(log):
        for cluster in (session, other):
            way_of(cluster).latency = lambda _: 0.01
        results = await asyncio.gather(*(retain(e, None, is_dry=False) for e in (session, other)))
        assert results[0] == results[1]
        assert await starts(log) == [4, 4]
        assert await bases(log) == [4]
        assert await read_values(log, offset=4) == VALUES[4:]


async def test_rewrite_of_another_run_leaves_no_hole(inner: MemoryStore) -> None:
    """A run that removes a segment finds that another run has replaced it by a rewritten one.

    The rewritten one is below the log start too. Its own removal would count as done, because the
    segment is gone.
    """
    log = await log_with(inner, SEGMENTS)
    async with closing(log), caring(inner) as first, caring(inner) as second:
        first_table = await first.table(first.state.topic("t"))
        second_table = await second.table(second.state.topic("t"))
        rewrite, remove = first_table.replace, second_table.replace
        has_rewritten, is_planned = asyncio.Event(), asyncio.Event()

        async def replace_late(*args, **named) -> None:
            has_rewritten.set()
            await is_planned.wait()
            await rewrite(*args, **named)

        async def remove_late(*args, **named) -> None:
            second_table.replace = remove
            is_planned.set()
            await rewriting
            await remove(*args, **named)

        first_table.replace, second_table.replace = replace_late, remove_late
        rewriting = asyncio.create_task(delete_records(first, "t", {0: 1}, is_dry=False))
        await has_rewritten.wait()
        await delete_records(second, "t", {0: 3}, is_dry=False)
        assert await starts(log) == [3]
        assert await bases(log) == [3, 4]
        assert await read_values(log, offset=3) == VALUES[3:]
        await log._log.tables.checked(log.state.topic("t"))


async def test_a_log_start_that_a_client_moves_meanwhile_leaves_no_hole(inner: MemoryStore) -> None:
    """After the segments below the log start are removed, a client deletes more records.

    The segment that is cut now is not the first one.
    """
    log = await log_with(inner, SEGMENTS)
    async with closing(log), caring(inner) as cluster:
        await log.topics.delete_records("t", 0, 1)
        table = await cluster.table(cluster.state.topic("t"))
        transaction_version = table.transaction_version

        async def with_a_client(app_id: str) -> int | None:
            table.transaction_version = transaction_version
            await log.topics.delete_records("t", 0, 5)
            await cluster.refresh()
            return await transaction_version(app_id)

        table.transaction_version = with_a_client  # `_rewrite` calls it, as it loads its work
        await retain(cluster, None, is_dry=False)
        assert await starts(log) == [5]
        assert await bases(log) == [5]
        await log._log.tables.checked(log.state.topic("t"))
        assert await read_values(log, offset=5) == VALUES[5:]


@pytest.mark.parametrize("fault", [Fault.ABSENT, Fault.STORED, Fault.OWN_412, Fault.LATE])
async def test_an_unknown_outcome_is_waited_for(inner: MemoryStore, fault: Fault) -> None:
    log = await log_with(inner, SEGMENTS, retention_ms=str(HOUR_MS // 2))
    inner.now_ms += HOUR_MS // 4
    async with caring(inner) as cluster, closing(log):
        way_of(cluster).plan = Script("create", object_keys.WAL, [fault])
        await retain(cluster, ["t"], is_dry=False)
        assert await starts(log) == [4]
        assert await bases(log) == [4]
        way_of(cluster).plan = Script("create", object_keys.PROBE, [Fault.ABSENT] * 3)
        with pytest.raises(Unavailable, match="clock"):
            await retain(cluster, ["t"], is_dry=False)


async def test_a_topic_deleted_meanwhile_is_left_alone(inner: MemoryStore) -> None:
    log = await log_with(inner, SEGMENTS, retention_ms=str(HOUR_MS // 2))
    async with caring(inner) as cluster:
        gate = way_of(cluster).hold("create", object_keys.wal(cluster.state.seq + 1))
        task = asyncio.create_task(retain(cluster, None, is_dry=False))
        await gate.reached.wait()
        await log.topics.delete("t")
        gate.opened.set()
        await task
        assert cluster.state.topics == {}
    await log.close()
    await (await opened(inner)).close()


# -- records of the future


YEAR_9999_MS = 253_402_300_799_999


async def test_retention_goes_on_behind_a_record_of_the_year_9999() -> None:
    inner = MemoryStore(now_ms=TIME_MS)
    async with closing(await opened(inner, COLD)) as log:
        configs = {"retention.ms": str(HOUR_MS), "message.timestamp.after.max.ms": str(2**63 - 1)}
        await log.topics.create("t", 1, configs)
        await append(log, "future", timestamps=[YEAR_9999_MS])
        await log.records.seal("t")
        for _ in range(3):
            await append(log, "old", timestamps=[TIME_MS - 1000 * HOUR_MS])
            await log.records.seal("t")
        async with caring(inner) as cluster:
            for wait_ms, start in ((0, 0), (HOUR_MS // 2, 0), (HOUR_MS, 4)):
                inner.now_ms += wait_ms
                await retain(cluster, None, is_dry=False)
                await cluster.refresh()
                assert cluster.state.partition("t", 0).log_start_offset == start


@pytest.mark.parametrize(
    ("committed_ms", "start"), [(TIME_MS - HOUR_MS, 10), (TIME_MS - 10, 0), (None, 0)]
)
def test_future_segment_counts_by_its_commit(committed_ms: int | None, start: int) -> None:
    path = object_keys.segment(0, 0, 10, "a")
    file = SegmentFile(path, 0, 0, 10, 1000, 10, TIME_MS, TIME_MS + 10 * HOUR_MS)
    commit_times_ms = None if committed_ms is None else [committed_ms]
    config = effective({"retention.ms": str(HOUR_MS // 2)})
    cut = plan.retention(
        SegmentColumns.of([file], commit_times_ms), Partition(0, 10, 10), config, TIME_MS
    )
    assert (0 if cut is None else cut.log_start_offset) == start


def test_compaction_goes_on_behind_a_record_of_the_future() -> None:
    files = [
        SegmentFile(object_keys.segment(0, 0, 10, "a"), 0, 0, 10, 1000, 10, TIME_MS, YEAR_9999_MS),
        SegmentFile(
            object_keys.segment(0, 10, 20, "b"), 0, 10, 20, 1000, 10, 0, TIME_MS - 2 * HOUR_MS
        ),
    ]
    columns = SegmentColumns.of(files, [TIME_MS - 2 * HOUR_MS] * 2)
    config = effective({"cleanup.policy": "compact", "min.compaction.lag.ms": str(HOUR_MS)})
    cleanable_range = plan.cleanable(columns, Partition(0, 20, 20), config, 0, TIME_MS)
    assert (cleanable_range.first, cleanable_range.last) == (0, 2)


# -- previews


async def expired(log: Broker, **changes: str | None) -> list[Expiry]:
    topic = log.state.topic("t")
    named = {name.replace("_", "."): value for name, value in changes.items()}
    return await expiries(log, topic, topic.config_after(named))


async def log_of_three_hours(inner: MemoryStore, **configs: str) -> Broker:
    """Three segments, an hour apart, in each of two partitions, and a tail; now is hour three."""
    log = await log_with(inner, SEGMENTS, partitions=2, **configs)
    await append(log, "tail", partition=1, timestamps=[inner.now_ms])
    inner.now_ms = TIME_MS + 3 * HOUR_MS
    log.clock.advance((inner.now_ms - log.clock.now_ms()) / 1000)
    return log


@pytest.mark.parametrize("hours", [0.5, 1.5, 2.5, 4])
async def test_preview_has_records_that_retention_deletes(inner: MemoryStore, hours: float) -> None:
    async with closing(await log_of_three_hours(inner)) as log:
        retention_ms = str(int(hours * HOUR_MS))
        preview = await expired(log, retention_ms=retention_ms)
        assert await starts(log) == [0, 0]
        await log.topics.alter("t", {"retention.ms": retention_ms})
        await log.records.seal("t")
        cut_by_partition = {cut.partition: cut for cut in await retained(inner)}
        assert {expiry.partition for expiry in preview} == cut_by_partition.keys()
        for expiry in preview:
            assert (expiry.start, expiry.end) == (
                0,
                cut_by_partition[expiry.partition].log_start_offset,
            )
            assert expiry.records == cut_by_partition[expiry.partition].rows
            assert expiry.size > 0


async def test_a_change_counts_only_what_it_adds(inner: MemoryStore) -> None:
    two_hours, one_hour = str(5 * HOUR_MS // 2), str(3 * HOUR_MS // 2)
    async with closing(await log_of_three_hours(inner, retention_ms=two_hours)) as log:
        assert [expiry[:4] for expiry in await expired(log, retention_ms=one_hour)] == [
            (0, 2, 4, 2),
            (1, 2, 4, 2),
        ]
        assert await expired(log, retention_ms=two_hours) == []
        assert await expired(log, retention_ms=str(9 * HOUR_MS)) == []
        assert await expired(log, segment_ms="60000") == []
        assert await expired(log, retention_ms="1", cleanup_policy="compact") == []
        await log.topics.delete_records("t", 0, 3)
        assert [expiry[:4] for expiry in await expired(log, retention_ms=one_hour)] == [
            (0, 3, 4, 1),
            (1, 2, 4, 2),
        ]


async def test_records_that_only_the_policy_kept(inner: MemoryStore) -> None:
    log = await log_of_three_hours(inner, cleanup_policy="compact", retention_ms="1")
    async with closing(log):
        preview = await expired(log, cleanup_policy="compact,delete")
        assert [(expiry.partition, expiry.records) for expiry in preview] == [(0, 6), (1, 7)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_lower_size_of_a_partition(inner: MemoryStore, seed: int) -> None:
    """The tail counts as if it was sealed.

    Its segment differs a little from its bytes in the WAL, so only partitions without a tail are
    compared exactly.
    """
    draw = random.Random(seed)
    async with closing(await log_of_three_hours(inner)) as log:
        table = await log._log.tables.of(log.state.topic("t"))
        sizes = (await table.segments(0)).columns.size
        retention_bytes = draw.randrange(1 + int(sizes.sum()))
        preview = {
            expiry.partition: expiry
            for expiry in await expired(log, retention_bytes=str(retention_bytes))
        }
        await log.topics.alter("t", {"retention.bytes": str(retention_bytes)})
        cut_by_partition = {cut.partition: cut for cut in await retained(inner)}
        if 0 in cut_by_partition:
            assert preview[0].records == cut_by_partition[0].rows
            assert preview[0].size == cut_by_partition[0].size
        else:
            assert 0 not in preview
