"""Collection deletes only unreachable objects, also when processes crash or pause (I9)."""

import asyncio
import json
import os
import re
import time
from pathlib import Path

import deltalake
import pytest

from tests.compaction.test_backup import backed_up, damage_of, on, records, restored
from tests.compaction.test_compact import Overtaken
from tests.support.broker import tidelog
from tests.support.broker_log import BrokerLog
from tests.support.clock import ManualClock
from tests.support.faults import Fault, FaultyStore, Script
from tests.support.logs import COLD, MANUAL, append, closing, opened, read_values, store_of
from tests.support.maintenance import caring, log_with, way_of
from tests.support.records import TIME_MS
from tests.support.vloop import run
from tidelog.compaction import garbage
from tidelog.compaction.collect import CollectionPlan, collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import LOG_RETENTION_MS, Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import ReleaseHold, TakeHold
from tidelog.storage.core.errors import CommitUnknown, Unavailable
from tidelog.storage.core.log_settings import IcebergSettings
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.records import FetchResult
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectInfo, ObjectStore
from tidelog.storage.tables import delta, iceberg
from tidelog.storage.tables.manifest import Table

HOUR_MS = 3_600_000
GRACE = Grace(wal_ms=HOUR_MS, table_ms=4 * HOUR_MS)
SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"]]
VALUES = [value for values in SEGMENTS for value in values]


async def listed(inner: MemoryStore, prefix: str = "") -> list[str]:
    return [info.key async for info in inner.list(prefix)]


async def numbers(inner: MemoryStore, prefix: str = object_keys.WAL) -> list[int]:
    return [object_keys.seq_of(key) or 0 for key in await listed(inner, prefix)]


async def run_once(inner: MemoryStore) -> CollectionPlan:
    async with caring(inner) as cluster:
        planned = await plan(cluster, GRACE)
        assert await collect(cluster, planned) == len(planned.garbage)
        return planned


async def runs(inner: MemoryStore, count: int = 4, *, hours: float = 1.0) -> list[CollectionPlan]:
    """One after the other, some hours apart."""
    plans = []
    for _ in range(count):
        plans.append(await run_once(inner))
        inner.now_ms += int(hours * HOUR_MS)
    return plans


async def test_table_without_changes_is_opened_once(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_names: list[str] = []
    real = MaintenanceSession.checked_table

    async def checked_table(self: MaintenanceSession, topic: Topic) -> Table:
        opened_names.append(topic.name)
        return await real(self, topic)

    monkeypatch.setattr(MaintenanceSession, "checked_table", checked_table)
    clean: dict[str, bytes] = {}

    async def opens() -> bool:
        opened_names.clear()
        async with caring(inner) as cluster:
            await plan(cluster, GRACE, clean_topics=clean)
        return bool(opened_names)

    async with closing(await log_with(inner, SEGMENTS)) as log:
        assert await opens()
        assert not await opens()
        await append(log, "g")
        await log.records.seal("t")
        assert await opens(), "a new version"
        assert not await opens()
        key = f"{log.state.topic('t').prefix}/partition=0/{'0' * 20}-{'0' * 19}1-{'1' * 32}.parquet"
        await inner.put(key, [b"a segment that no version names"])
        assert await opens()
        assert await opens(), "it becomes garbage some day"
        await inner.delete([key])
        await log.topics.delete("t")
        await opens()
        assert not clean


async def assert_whole(inner: MemoryStore, expected: list[str], start: int = 0) -> None:
    """A broker that starts now, from what is left, serves all of it."""
    async with closing(await opened(inner, COLD)) as log:
        assert await read_values(log, offset=start) == expected[start:]


async def test_i9_wal_is_kept_from_an_old_checkpoint_on(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS)) as log:
        last = log.state.seq
        assert await numbers(inner) == list(range(1, last + 1))
        planned = await run_once(inner)
        assert (planned.garbage, planned.kept_from) == ([], 0)
        assert await numbers(inner, object_keys.CHECKPOINTS) == [last]
        # It is the newest, so it does not count yet, however old it gets.
        inner.now_ms += 2 * HOUR_MS
        assert (await run_once(inner)).garbage == []
        await append(log, "g")
        planned = await run_once(inner)
        assert await numbers(inner, object_keys.CHECKPOINTS) == [last, last + 1]
        assert planned.garbage == []
        inner.now_ms += HOUR_MS
        planned = await run_once(inner)
        assert planned.kept_from == last
        assert await numbers(inner) == [last + 1]
        assert planned.oldest_ms >= 3 * HOUR_MS
        assert planned.size == sum(garbage_object.size for garbage_object in planned.garbage) > 0
        await assert_whole(inner, [*VALUES, "g"])


async def test_i9_entries_of_a_tail_are_kept(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS[:1])) as log:
        await append(log, "c")
        lies_in = log.state.seq
        for _ in range(4):
            await log.topics.alter("t", {"segment.ms": "5000"})
            await runs(inner, 1, hours=2)
        assert (await numbers(inner))[0] == lies_in
        assert len(await numbers(inner)) < log.state.seq - lies_in
        await assert_whole(inner, ["a", "b", "c"])
        await log.refresh()  # the store's clock is hours ahead of what this broker has seen
        await log.records.seal("t")
        # Sealed, but a reader that planned a read before that has an hour.
        await log.topics.alter("t", {"segment.ms": "5000"})
        await runs(inner, 1, hours=0.9)
        assert (await numbers(inner))[0] == lies_in
        await log.topics.alter("t", {"segment.ms": "5000"})
        await runs(inner, 3, hours=2)
        assert (await numbers(inner))[0] > lies_in
        await assert_whole(inner, ["a", "b", "c"])


@pytest.mark.parametrize("damage", ["flipped", "not whole"])
async def test_damaged_checkpoint_does_not_count(inner: MemoryStore, damage: str) -> None:
    async with closing(await log_with(inner, SEGMENTS)) as log:
        await runs(inner, 1, hours=2)
        await append(log, "g")
        await runs(inner, 1, hours=2)
        _, second = await listed(inner, object_keys.CHECKPOINTS)
        body = await inner.get(second)
        bad = body[:-1] if damage == "not whole" else body[:-1] + bytes([body[-1] ^ 1])
        await inner.put(second, [bad])
        inner.now_ms += 2 * HOUR_MS
        assert (await run_once(inner)).garbage == []
        assert (await numbers(inner))[0] == 1
        await assert_whole(inner, [*VALUES, "g"])


async def test_i9_removed_files_wait_for_the_grace_and_orphans_too(inner: MemoryStore) -> None:
    log = await log_with(inner, SEGMENTS)
    prefix = log.state.topic("t").prefix
    async with closing(log), caring(inner) as cluster:
        files = await listed(inner, object_keys.TOPICS)
        orphan = f"{prefix}/{object_keys.segment(0, 6, 9, 'ab12')}"
        foreign = f"{prefix}/partition=0/notes.txt"
        inner.now_ms += 10 * HOUR_MS
        for key in (orphan, foreign):
            await inner.create(key, [b"x"])
        await delete_records(cluster, "t", {0: 4}, is_dry=False)
        inner.now_ms += GRACE.table_ms - 1
        assert (await run_once(inner)).garbage == []
        inner.now_ms += 1
        planned = await run_once(inner)
        assert sorted(garbage_object.key for garbage_object in planned.garbage) == sorted(files[:2])
        inner.now_ms += GRACE.unnamed_ms - GRACE.table_ms - 1
        assert (await run_once(inner)).garbage == []
        inner.now_ms += 1
        planned = await run_once(inner)
        assert [garbage_object.key for garbage_object in planned.garbage] == [orphan]
        assert await listed(inner, object_keys.TOPICS) == sorted([files[2], foreign])
        await assert_whole(inner, VALUES, start=4)


async def test_a_deleted_topic_goes_with_all_that_is_below_its_prefix(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS, partitions=2)) as log:
        old = log.state.topic("t").prefix
        await inner.create(f"{old}/_delta_log/00000000000000000000.json", [b"{}"])
        await log.topics.delete("t")
        await log.topics.create("t", 1, {})
        await append(log, "anew")
        await log.records.seal("t")
        for hours in range(4):
            await log.topics.alter("t", {"segment.ms": "5000"})
            await runs(inner, 1)
            if hours < 3:
                await log._log.wal.refresh()
                assert len(log.state.deleted) == 1
                assert len(await listed(inner, f"{old}/")) == 7
        inner.now_ms = max(inner.now_ms, log.clock.now_ms() + 5 * HOUR_MS)
        await runs(inner, 2)
        await log._log.wal.refresh()
        assert await listed(inner, f"{old}/") == []
        assert log.state.deleted == []
        assert await read_values(log) == ["anew"]
        # A suspended broker uploads a segment for the deleted topic: no topic owns it.
        late = f"{old}/{object_keys.segment(0, 0, 6, 'ab12')}"
        await inner.create(late, [b"x"])
        await runs(inner, 6, hours=5)
        assert late in await listed(inner), "unless a person says so"
        async with caring(inner) as cluster:
            inner.now_ms -= 7 * HOUR_MS
            assert (await plan(cluster, GRACE, takes_unknown=True)).garbage == []
            inner.now_ms += 7 * HOUR_MS
            planned = await plan(cluster, GRACE, takes_unknown=True)
            assert [garbage_object.key for garbage_object in planned.garbage] == [late]
            await collect(cluster, planned)
        assert late not in await listed(inner)
        assert await read_values(log) == ["anew"]


async def test_number_that_is_created_again_is_collected_again(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS)) as log:
        await runs(inner, 1, hours=2)
        await append(log, "g")
        await runs(inner, 2, hours=2)
        assert 3 not in await numbers(inner)
        await inner.create(object_keys.wal(3), [b"void"])
        await runs(inner, 1, hours=1)
        assert 3 in await numbers(inner)
        await runs(inner, 1)
        assert 3 not in await numbers(inner)


@pytest.mark.parametrize("is_by_time", [False, True])
async def test_i9_suspended_read_has_current_segments(inner: MemoryStore, is_by_time: bool) -> None:
    async with closing(await log_with(inner, SEGMENTS[:1])) as log:
        await append(log, "c", timestamps=[TIME_MS + HOUR_MS])
        lies_in = object_keys.wal(log.state.seq)
        async with closing(await opened(inner, COLD)) as sleeper:
            gate = store_of(sleeper).hold("get_range", lies_in)
            reading: asyncio.Task[FetchResult] | asyncio.Task[int | None]
            if is_by_time:
                reading = asyncio.create_task(
                    sleeper.records.offset_for_timestamp("t", 0, TIME_MS + HOUR_MS)
                )
            else:
                reading = asyncio.create_task(sleeper.records.fetch("t", 0, 2, bytes_max=1000))
            await gate.reached.wait()
            await log.records.seal("t")
            while lies_in in await listed(inner):
                await append(log, "later")
                await runs(inner, 1, hours=2)
            sleeper.clock.advance(HOUR_MS)
            gate.opened.set()
            result = await reading
            if isinstance(result, FetchResult):
                assert result.pieces[0].batch.column("value")[0].as_py() == b"c"
            else:
                assert result == 2


async def test_data_that_no_tail_names_goes_once_it_is_covered(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS)) as log:
        key = object_keys.data("ab12", log.state.elapsed_ms + HOUR_MS)
        await inner.create(key, [b"never committed"])
        foreign = f"{object_keys.DATA}ab/notes"
        await inner.create(foreign, [b"of somebody else"])
        for hours in range(6):
            assert key in await listed(inner), hours
            for _ in range(6):
                log.clock.advance(600)  # an entry adds ten minutes to the elapsed time at most
                await append(log, str(hours))
            await runs(inner, 1)
            if key not in await listed(inner):
                break
        assert hours >= 3
        assert key not in await listed(inner)
        assert foreign in await listed(inner)


async def test_what_a_probe_left_goes() -> None:
    inner = MemoryStore(now_ms=TIME_MS)
    async with closing(await log_with(inner, SEGMENTS)):
        await inner.create(f"{object_keys.PROBE}dead/race-1", [b"x"])
        await runs(inner, 4, hours=6)
        assert len(await listed(inner, object_keys.PROBE)) == 1
        await runs(inner, 1)
        assert await listed(inner, object_keys.PROBE) == []


async def due(inner: MemoryStore) -> Broker:
    """A log with garbage of every kind to collect, all old enough."""
    log = await log_with(inner, SEGMENTS)
    await log.topics.create("gone", 1, {})
    await append(log, "x", topic="gone")
    await log.records.seal("gone")
    await log.topics.delete("gone")
    async with caring(inner) as cluster:
        await delete_records(cluster, "t", {0: 2}, is_dry=False)
    inner.now_ms = log.clock.now_ms()
    for text in "ghi":
        await append(log, text)
        async with caring(inner) as cluster:
            await plan(cluster, GRACE)
        inner.now_ms += 5 * HOUR_MS
    await append(log, "j")
    return log


EXPECTED = [*VALUES, "g", "h", "i", "j"]


async def settled(inner: MemoryStore) -> list[str]:
    await run_once(inner)
    await run_once(inner)
    keys = [key for key in await listed(inner) if not key.startswith(object_keys.PROBE)]
    return [re.sub("[0-9a-f]{32}", "id", key) for key in keys]


def test_i9_next_run_finishes_crashed_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.compaction.collect.BATCH", 2)

    async def whole() -> tuple[list[str], int]:
        inner = MemoryStore()
        async with closing(await due(inner)):
            async with caring(inner) as cluster:
                way = way_of(cluster)
                old_count = len(way.answered)
                planned = await plan(cluster, GRACE)
                await collect(cluster, planned)
                calls = len(way.answered) - old_count
            assert len(planned.garbage) > 6
            assert {garbage_object.key.split("/")[0] for garbage_object in planned.garbage} == {
                "wal",
                "checkpoints",
                "topics",
            }
            assert len(planned.emptied) == 1
            return await settled(inner), calls

    expected, calls = run(whole)

    async def dying(call_number: int) -> None:
        inner = MemoryStore()
        async with closing(await due(inner)):
            async with caring(inner) as cluster:
                way = way_of(cluster)
                remaining_calls = call_number

                def plan_of(_: object) -> Fault | None:
                    nonlocal remaining_calls
                    remaining_calls -= 1
                    if remaining_calls < 0:
                        way.kill()
                    return None

                way.plan = plan_of

                async def once() -> None:
                    await collect(cluster, await plan(cluster, GRACE))

                task = asyncio.create_task(once())
                await asyncio.wait([task], timeout=60)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await assert_whole(inner, EXPECTED, start=2)
            assert await settled(inner) == expected
            await assert_whole(inner, EXPECTED, start=2)

    for call_number in range(calls):
        run(lambda call_number=call_number: dying(call_number))


async def test_i9_a_store_that_fails_ends_the_run_and_loses_nothing(inner: MemoryStore) -> None:
    log = await due(inner)
    async with closing(log), caring(inner) as cluster:
        planned = await plan(cluster, GRACE)
        way_of(cluster).plan = Script("delete", "", [Fault.UNAVAILABLE])
        old_keys = await listed(inner)
        with pytest.raises(Unavailable):
            await collect(cluster, planned)
        assert await listed(inner) == old_keys
        assert await collect(cluster, planned) == len(planned.garbage)
        await assert_whole(inner, EXPECTED, start=2)


async def test_i9_suspended_collector_deletes_no_live_object(inner: MemoryStore) -> None:
    log = await due(inner)
    async with closing(log), caring(inner) as sleeper, caring(inner) as other:
        planned = await plan(sleeper, GRACE)
        await collect(other, await plan(other, GRACE))
        for text in "klm":
            await append(log, text)
            await log.records.seal("t")
            await runs(inner, 3)
        await collect(sleeper, planned)
        await assert_whole(inner, [*EXPECTED, "k", "l", "m"], start=2)


async def test_two_collectors_at_once_come_to_one_result(inner: MemoryStore) -> None:
    log = await due(inner)
    async with closing(log), caring(inner) as session, caring(inner) as other:

        async def once(cluster: MaintenanceSession) -> None:
            way_of(cluster).latency = lambda _: 0.01
            await collect(cluster, await plan(cluster, GRACE))

        await asyncio.gather(once(session), once(other))
        await log._log.wal.refresh()
        assert log.state.deleted == []
        await assert_whole(inner, EXPECTED, start=2)


async def test_i5_i9_a_broker_that_was_paused_through_it_goes_on(inner: MemoryStore) -> None:
    """Its view is void when it wakes: it commits what waited, and nothing twice."""
    log = await log_with(inner, SEGMENTS)
    paused = await opened(inner, COLD)
    way = paused._log.store
    assert isinstance(way, FaultyStore)
    gate = way.hold("create", object_keys.wal(paused.state.seq + 1))
    waiting = asyncio.create_task(append(paused, "late"))
    await gate.reached.wait()
    for text in "gh":
        await append(log, text)
        await log.records.seal("t")
        await runs(inner, 2, hours=3)
    await append(log, "i")
    await runs(inner, 1, hours=3)
    paused.clock.advance(12 * 3600)
    gate.opened.set()
    # Its PUT created a collected number again: the entry that was there is unknown.
    with pytest.raises(CommitUnknown):
        await waiting
    await append(paused, "awake")
    expected = [*VALUES, "g", "h", "i", "awake"]
    assert await read_values(paused) == expected
    async with closing(log, paused):
        await assert_whole(inner, expected)
        first, second = await opened(inner), await opened(inner)
        async with closing(first, second):
            assert first.state.encode() == second.state.encode()


# -- graces that processes choose


DAY_MS = 24 * HOUR_MS
FOUR_SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
FOUR_VALUES = [value for values in FOUR_SEGMENTS for value in values]
GRACES = [-DAY_MS, 0, 1, HOUR_MS]


async def collected(store: ObjectStore, table_ms: int) -> list[str]:
    """Another process collects now, with a grace of its own."""
    async with caring(store) as other:
        planned = await plan(other, Grace(table_ms=table_ms))
        await collect(other, planned)
        return [garbage.key for garbage in planned.garbage]


@pytest.mark.parametrize("table_ms", GRACES)
async def test_collection_beside_seal_leaves_segments(inner: MemoryStore, table_ms: int) -> None:
    log = await log_with(inner, FOUR_SEGMENTS)
    await append(log, "i")
    table = await log._log.tables.of(log.state.topic("t"))
    add = table.add

    async def late(*args: object) -> None:
        inner.now_ms += 2 * HOUR_MS
        assert await collected(inner, table_ms) == []
        await add(*args)

    table.add = late
    assert await log.records.seal("t") == 1
    fresh = await opened(inner, COLD)
    async with closing(log, fresh):
        assert await read_values(fresh) == [*FOUR_VALUES, "i"]


@pytest.mark.parametrize("table_ms", GRACES)
async def test_collection_beside_rewrite_leaves_output(inner: MemoryStore, table_ms: int) -> None:
    log = await log_with(inner, FOUR_SEGMENTS)

    async def meanwhile() -> None:
        inner.now_ms += 2 * HOUR_MS
        assert await collected(inner, table_ms) == []

    async with caring(inner) as cluster:
        engine = Overtaken(cluster, meanwhile)
        (result,) = await compact(cluster, None, is_dry=False, engine=engine)
        assert (result.segments, result.segments_after) == (4, 1)
    fresh = await opened(inner, COLD)
    async with closing(log, fresh):
        assert await read_values(fresh) == FOUR_VALUES
        # The inputs are the option's to give: the commit that removed them is final.
        removed = await collected(inner, 0)
        assert len(removed) == len(FOUR_SEGMENTS)
        assert await read_values(fresh) == FOUR_VALUES


async def sealed_on(folder: Path) -> tuple[FolderStore, Broker]:
    store = FolderStore(folder)
    log = await Broker.open(store, COLD, clock=SystemClock(), name="b")
    await log.topics.create("t", 1, {})
    for values in FOUR_SEGMENTS:
        await append(log, *values)
        await log.records.seal("t")
    return store, log


async def test_a_collection_leaves_the_inputs_that_a_late_rewrite_puts_back(tmp_path: Path) -> None:
    store, log = await sealed_on(tmp_path)
    prefix = log.state.topic("t").prefix
    await log.close()
    clock = ManualClock(1, start_ms=time.time_ns() // 1_000_000)
    cluster = await MaintenanceSession.open(store, clock)
    table = await cluster.table(cluster.state.topic("t"))
    replace = table.replace

    async def late(
        removed: list[SegmentFile], added: list[SegmentFile], *args: object, **named: object
    ) -> None:
        """The process stands still for a day: a collection that ends now takes the output."""
        table.replace = replace
        days_ago = time.time() - 2 * DAY_MS / 1000
        for file in added:
            os.utime(tmp_path / prefix / file.path, (days_ago, days_ago))
        await replace(removed, added, *args, **named)
        other = await MaintenanceSession.open(store, SystemClock())
        beside = await plan(other, Grace(table_ms=0))
        await store.delete([f"{prefix}/{file.path}" for file in added])
        await collect(other, beside)
        await other.close()
        clock.advance(2 * DAY_MS / 1000)

    table.replace = late
    with pytest.raises(Unavailable, match="run again"):
        await compact(cluster, None, is_dry=False)
    fresh = await Broker.open(store, COLD, clock=SystemClock(), name="fresh")
    assert await read_values(fresh) == FOUR_VALUES
    await fresh.close()
    await cluster.close()
    await store.close()


def test_no_value_of_the_option_takes_a_file_that_no_commit_named(tmp_path: Path) -> None:
    async def prepared() -> str:
        store, log = await sealed_on(tmp_path)
        prefix = log.state.topic("t").prefix
        await log.close()
        uploaded = f"{prefix}/{object_keys.segment(0, 8, 9, 'ab12')}"
        await store.create(uploaded, [b"a seal under way"])
        await store.close()
        return uploaded

    uploaded = asyncio.run(prepared())
    for command in ("collect", "maintain"):
        arguments = (command, "--yes", "--json", "--file-grace-ms", "0", "--store", str(tmp_path))
        collection = json.loads(tidelog(*arguments).stdout)["collected"]
        assert uploaded not in [garbage["key"] for garbage in collection["garbage"]]
    assert collection["deleted"] == len(FOUR_SEGMENTS), (
        "maintain merged them, and the merge is final"
    )
    assert (tmp_path / uploaded).exists()


# -- the logs of tables


LOG = "topics/t-1/_delta_log/"


def log_infos(commits: dict[int, int], checkpoints: list[int]) -> list[ObjectInfo]:
    """The files of a log by version. `commits` has the age of each commit in days, at day 100."""
    at_ms = {version: (100 - age) * DAY_MS for version, age in commits.items()}
    return [
        *(ObjectInfo(f"{LOG}{version:020}.json", 1, time_ms) for version, time_ms in at_ms.items()),
        *(
            ObjectInfo(f"{LOG}{version:020}.checkpoint.parquet", 1, at_ms[version])
            for version in checkpoints
        ),
        ObjectInfo(f"{LOG}_last_checkpoint", 1, 0),
        ObjectInfo(f"{LOG}{0:020}.crc", 1, 0),
    ]


@pytest.mark.parametrize(
    ("ages", "checkpoints", "base", "deleted"),
    [
        ([20, 19, 18, 17], [], -1, 0),
        ([20, 19, 18, 17], [2], 2, 2),  # the newest version is 3, however old it is
        ([20, 19, 18, 17], [1, 3], 3, 4),
        ([20, 19, 18, 6], [2], 2, 2),  # seven days ago, version 2 was the newest
        ([20, 19, 6, 5], [2], -1, 0),  # ... version 1
        ([20, 19, 6, 5], [1, 3], 1, 1),
        ([6, 5, 4, 3], [0, 2], -1, 0),
        ([6, 20, 20, 20], [3], -1, 0),  # the store's clock went back
    ],
)
def test_versions_of_seven_days_can_be_read(
    ages: list[int], checkpoints: list[int], base: int, deleted: int
) -> None:
    infos = log_infos(dict(enumerate(ages)), checkpoints)
    result = garbage.of_log(infos, 100 * DAY_MS, LOG_RETENTION_MS)
    assert result[0] == base
    assert len(result[1]) == deleted
    names = [garbage_object.key.removeprefix(LOG) for garbage_object in result[1]]
    assert all(int(name[:20]) < base for name in names)
    assert not [name for name in names if name.endswith(".crc")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A topic with 12 commits and seals, a checkpoint after five, and a log a month old.

    Another commit with a checkpoint follows.
    """
    monkeypatch.setattr(delta, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(delta._PROPERTIES, "delta.checkpointInterval", "5")
    with BrokerLog(tmp_path / "log") as broker:
        broker.create("t", 1)
        for number in range(12):
            sealed(broker, number)
        for path in log_of(tmp_path / "log").iterdir():
            at_s = path.stat().st_mtime - 30 * 86_400
            os.utime(path, (at_s, at_s))
    return tmp_path / "log"


def sealed(broker: BrokerLog, number: int) -> None:
    broker.append("t", {0: [b"%d" % number]})
    broker.seal("t")


def log_of(root: Path) -> Path:
    (folder,) = (root / "topics").glob("t-*/_delta_log")
    return folder


def versions(root: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in log_of(root).glob("*.json"))


async def collected_tables(cluster: MaintenanceSession) -> CollectionPlan:
    planned = await plan(cluster, Grace())
    await collect(cluster, planned)
    return planned


def test_a_hold_keeps_the_log_of_a_table_also_from_the_commits_of_brokers(root: Path) -> None:
    """A backup that takes long names versions that a commit of a broker must not clean up."""

    async def hold(cluster: MaintenanceSession) -> None:
        await cluster.commit([TakeHold("backup-1", 3_600_000)])

    async def release(cluster: MaintenanceSession) -> None:
        await cluster.commit([ReleaseHold("backup-1")])

    on(root, hold)
    old_versions = versions(root)
    with BrokerLog(root) as broker:
        for number in range(12, 18):  # with a checkpoint
            sealed(broker, number)
        expected = broker.records("t")
    assert not on(root, collected_tables).garbage
    assert set(old_versions) < set(versions(root))
    on(root, release)
    on(root, collected_tables)
    assert versions(root) == list(range(9, 19))
    assert records(root, "t") == expected
    assert damage_of(root) == []
    assert deltalake.DeltaTable(log_of(root).parent).version() == 18
    assert not on(root, collected_tables).garbage


def test_the_log_stays_if_the_checkpoint_that_replaces_it_cannot_be_read(root: Path) -> None:
    with BrokerLog(root) as broker:
        sealed(broker, 12)
    old_versions = versions(root)
    checkpoint = max(log_of(root).glob("*.checkpoint.parquet"))
    body = checkpoint.read_bytes()
    stat = checkpoint.stat()
    checkpoint.write_bytes(body[: len(body) // 2])
    os.utime(checkpoint, (stat.st_mtime, stat.st_mtime))
    on(root, collected_tables)
    assert versions(root) == old_versions
    checkpoint.write_bytes(body)
    os.utime(checkpoint, (stat.st_mtime, stat.st_mtime))
    on(root, collected_tables)
    assert len(versions(root)) < len(old_versions)
    assert damage_of(root) == []


def test_a_longer_retention_of_the_table_counts(root: Path) -> None:
    table = deltalake.DeltaTable(log_of(root).parent)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    old_versions = versions(root)
    on(root, collected_tables)
    assert versions(root) == old_versions
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 day"})
    on(root, collected_tables)
    assert len(versions(root)) < len(old_versions)


def test_a_backup_of_a_table_with_a_collected_log(root: Path, tmp_path: Path) -> None:
    on(root, collected_tables)
    assert backed_up(root, tmp_path / "place").doubts == []
    restored(tmp_path / "place", tmp_path / "new")
    assert records(tmp_path / "new", "t") == records(root, "t")


EAGER = MANUAL._replace(iceberg=IcebergSettings(refresh_s=0))
DAY_MS = 24 * HOUR_MS


async def load_iceberg(log: Broker) -> set[str]:
    """Load the Iceberg table of `t`; return the names of the objects that its snapshots need."""
    await asyncio.sleep(1)
    topic = log.state.topic("t")
    await log.iceberg.load(topic)
    return iceberg.named_objects(log.iceberg._tables[topic.topic_id].history)


async def iceberg_names(inner: MemoryStore) -> set[str]:
    keys = await listed(inner, object_keys.TOPICS)
    return {key.rpartition("/")[2] for key in keys if "/iceberg/" in key}


async def test_manifests_of_recent_snapshots_are_kept_and_others_are_not(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", 2)
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        for value in "ghijk":
            await append(log, value)
            await log.records.seal("t")
            named = await load_iceberg(log)
        whole = await iceberg_names(inner)
        assert named < whole
        await run_once(inner)
        assert await iceberg_names(inner) == whole, "they are not a day old"
        inner.now_ms += DAY_MS
        clean: dict[str, bytes] = {}
        async with caring(inner) as cluster:
            planned = await plan(cluster, GRACE, clean_topics=clean)
            await collect(cluster, planned)
        assert await iceberg_names(inner) == named
        assert await load_iceberg(log) == named
        assert all(
            "iceberg" in one.why.lower() for one in planned.garbage if "/iceberg/" in one.key
        )
        await run_once(inner)
        assert await iceberg_names(inner) == named


async def test_manifests_of_newest_version_are_never_garbage(inner: MemoryStore) -> None:
    """A broker crashed before the manifest list: it may come yet, under the same names."""
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        await load_iceberg(log)
        prefix = log.state.topic("t").prefix
        for version, name in ((3, "manifest"), (4, "manifest"), (4, "other"), (2, "manifest")):
            await inner.put(f"{prefix}/iceberg/{name}-{version:020d}-{'a' * 16}.avro", [b"x"])
        inner.now_ms += DAY_MS
        before = await iceberg_names(inner)
        await run_once(inner)
        assert before - await iceberg_names(inner) == {f"manifest-{2:020d}-{'a' * 16}.avro"}


async def test_unreadable_manifest_list_keeps_all_manifests(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        await load_iceberg(log)
        await append(log, "g")
        await log.records.seal("t")
        await load_iceberg(log)
        newest = max(key for key in await listed(inner, object_keys.TOPICS) if "/snap-" in key)
        await inner.put(newest, [b"damaged"])
        inner.now_ms += 8 * DAY_MS
        before = await iceberg_names(inner)
        await run_once(inner)
        assert await iceberg_names(inner) == before


async def test_deleted_topic_takes_its_manifests_along(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        await load_iceberg(log)
        await log.topics.delete("t")
        for number in range(3):
            await log.topics.create(f"u{number}", 1, {})
            await runs(inner, 1, hours=5)
            await log.refresh()
        await run_once(inner)
        assert await iceberg_names(inner) == set()


async def test_scrub_passes_over_manifests(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        await load_iceberg(log)
        async with caring(inner) as cluster:
            report = await scrub(cluster, None, GRACE)
        assert report.findings == []


async def test_iceberg_snapshot_that_a_client_has_just_loaded_stays(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if so many snapshots follow at once that the newest history does not name it."""
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", 3)
    async with closing(await log_with(inner, SEGMENTS, settings=EAGER)) as log:
        await load_iceberg(log)
        inner.now_ms += 2 * DAY_MS
        named = await load_iceberg(log)
        for value in "hijk":
            await append(log, value)
            await log.records.seal("t")
            await load_iceberg(log)
        await run_once(inner)
        assert named <= await iceberg_names(inner)
        inner.now_ms += 2 * DAY_MS
        await run_once(inner)
        assert not named <= await iceberg_names(inner)


async def test_tail_of_iceberg_is_collected_day_later(inner: MemoryStore) -> None:
    settings = MANUAL._replace(iceberg=IcebergSettings(refresh_s=0, has_tail=True))
    async with closing(await log_with(inner, SEGMENTS, settings=settings)) as log:
        await append(log, "g")
        await load_iceberg(log)
        named = await iceberg_names(inner)
        tail = {name for name in named if name.startswith("tail-")}
        assert len(tail) == 3
        inner.now_ms += DAY_MS - 1
        await run_once(inner)
        assert await iceberg_names(inner) == named
        async with caring(inner) as cluster:
            assert (await scrub(cluster, None, GRACE)).findings == []
        inner.now_ms += 1
        await run_once(inner)
        assert await iceberg_names(inner) == named - tail
