"""Backups on folders, with tables of Delta: their content, repetition, restore, refusals."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.broker_log import BrokerLog, Record
from tests.support.foreign_engines import caring as on
from tests.support.logs import COLD, append, closing, opened, read_values, with_topic
from tests.support.maintenance import caring, log_with
from tests.support.records import TIME_MS
from tidelog.compaction.backups.backup import HOLD_MS, BackedUp, _Copy, backup
from tidelog.compaction.backups.place import BACKUPS, OBJECTS, PRUNED
from tidelog.compaction.backups.restore import Restored, restore
from tidelog.compaction.change_time_bounds import change_bounds
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import ReleaseHold, SetBounds, TakeHold
from tidelog.storage.core.errors import Corrupt, InvalidRequest, LogError, StoreUnfit, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.state.elapsed_time import STEP_MS_MAX
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.tables.manifest import ManifestVersion, Table
from tidelog.storage.wal.wal_objects import WalSettings

GRACE = Grace(wal_ms=3_600_000, table_ms=4 * 3_600_000)


def backed_up(root: Path, place: Path, *, is_verified: bool = False) -> BackedUp:
    async def work(cluster: MaintenanceSession) -> BackedUp:
        return await backup(cluster, FolderStore(place), is_verified=is_verified)

    return on(root, work)


def restored(
    place: Path, target: Path, *, at_ms: int | None = None, cluster_id: str | None = None
) -> Restored:
    return asyncio.run(
        restore(
            FolderStore(place),
            FolderStore(target),
            SystemClock(),
            at_ms=at_ms,
            cluster_id=cluster_id,
        )
    )


def damage_of(root: Path) -> list[str]:
    report = on(root, lambda cluster: scrub(cluster, None, Grace()))
    return [str(finding) for finding in report.findings if finding.is_damage]


def records(root: Path, *topics: str) -> list[Record]:
    with BrokerLog(root) as broker:
        return [record for topic in topics for record in broker.records(topic)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two topics: `t` with two segments and a tail in each partition, `u` with a tail."""
    with BrokerLog(tmp_path / "log") as broker:
        broker.create("t", 2)
        broker.create("u", 1)
        for number in range(3):
            broker.append("t", {0: [b"a%d" % number], 1: [b"b%d" % number] * 2})
            if number < 2:
                broker.seal("t")
        broker.append("u", {0: [b"tail"]})
    return tmp_path / "log"


def test_a_backup_is_restored_with_each_record_at_its_offset(root: Path, tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "new"
    result = backed_up(root, place, is_verified=True)
    assert result.doubts == []
    assert result.copied_objects == len(result.manifest.objects)
    restore_result = restored(place, target)
    assert restore_result.seq == result.manifest.seq
    assert damage_of(target) == []
    assert records(target, "t", "u") == records(root, "t", "u")
    assert on(root, _holds) == on(target, _holds) == []


async def _holds(cluster: MaintenanceSession) -> list[object]:
    return list(cluster.state.holds)


def test_the_restored_cluster_goes_on_and_is_another_one(root: Path, tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "new"
    backed_up(root, place)
    restore_result = restored(place, target)
    with BrokerLog(target) as broker:
        assert broker.log._log.wal.cluster.cluster_id == restore_result.cluster_id
        broker.append("t", {0: [b"later"]})
        broker.seal("t")
        broker.create("v", 1)
        values = [record.value for record in broker.records("t") if record.partition == 0]
    assert values == [b"a0", b"a1", b"a2", b"later"]
    assert damage_of(target) == []
    assert on(root, _identity) != restore_result.cluster_id
    same = restored(place, tmp_path / "same", cluster_id=on(root, _identity))
    assert on(tmp_path / "same", _identity) == same.cluster_id == on(root, _identity)


def test_restored_clusters_give_no_producer_id_of_the_original(root: Path, tmp_path: Path) -> None:
    """A producer that lives on has an id that the original gave after the backup (I11)."""
    place = tmp_path / "place"
    old_ids = _producer_ids(root, 2)
    backed_up(root, place)
    ids = [*old_ids, *_producer_ids(root, 3)]
    targets = [tmp_path / "first", tmp_path / "second"]
    for target in targets:
        restored(place, target)
        ids += _producer_ids(target, 3)
    backed_up(targets[0], tmp_path / "next place")
    restored(tmp_path / "next place", tmp_path / "third")
    ids += _producer_ids(tmp_path / "third", 3)
    assert len(set(ids)) == len(ids)
    assert all(0 <= producer_id < 2**63 for producer_id in ids)
    assert damage_of(targets[0]) == []


def test_a_cluster_restored_at_its_first_entry_is_backed_up(tmp_path: Path) -> None:
    """It has all entries of the WAL, but they do not lead to the state that it began with."""
    root, place, target = tmp_path / "root", tmp_path / "place", tmp_path / "target"
    ids = _producer_ids(root, 1)
    begun_ms = on(root, _time_ms)
    time.sleep(0.002)  # no other entry has this time
    shutil.rmtree(root / "checkpoints", ignore_errors=True)  # the backup begins at entry 1
    backed_up(root, place)
    ids += _producer_ids(root, 1)
    assert restored(place, target, at_ms=begun_ms).seq == 1
    assert damage_of(target) == []
    ids += _producer_ids(target, 1)
    backed_up(target, tmp_path / "next place", is_verified=True)
    restored(tmp_path / "next place", tmp_path / "third")
    assert damage_of(tmp_path / "third") == []
    ids += _producer_ids(tmp_path / "third", 1)
    assert len(set(ids)) == 4


def _producer_ids(root: Path, count: int) -> list[int]:
    with BrokerLog(root) as broker:
        return [broker._runner.run(broker.log.kafka.reserve_producer_id()) for _ in range(count)]


async def _time_ms(cluster: MaintenanceSession) -> int:
    return cluster.state.time_ms


async def _identity(cluster: MaintenanceSession) -> str:
    return cluster.wal.cluster.cluster_id


def test_a_second_backup_copies_only_what_is_new(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = backed_up(root, place)
    old_times = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    with BrokerLog(root) as broker:
        broker.append("u", {0: [b"new"]})
    second = backed_up(root, place)
    old = {backup_object.key for backup_object in first.manifest.objects}
    new = [
        backup_object for backup_object in second.manifest.objects if backup_object.key not in old
    ]
    assert all(backup_object.key.startswith(object_keys.WAL) for backup_object in new)
    assert second.copied_objects == len(new)
    assert second.copied_bytes == sum(backup_object.size for backup_object in new)
    assert {path: path.stat().st_mtime_ns for path in old_times} == old_times
    restored(place, tmp_path / "new")
    assert records(tmp_path / "new", "u") == records(root, "u")


def four_segments(root: Path) -> BrokerLog:
    """Topic `t` with four segments of one record each."""
    broker = BrokerLog(root)
    broker.create("t", 1)
    for number in range(4):
        broker.append("t", {0: [b"%d" % number]})
        broker.seal("t")
    return broker


def test_a_restore_at_a_time_ends_before_the_first_later_entry(tmp_path: Path) -> None:
    """A seal, a merge and a deletion came after that time."""
    root, place = tmp_path / "log", tmp_path / "place"
    broker = four_segments(root)
    broker.append("t", {0: [b"tail"]})
    expected, at_ms = broker.records("t"), broker.log.state.time_ms
    while SystemClock().now_ms() <= at_ms:
        pass
    broker.append("t", {0: [b"too late"]})
    broker.seal("t")
    broker.close()
    on(root, lambda cluster: compact(cluster, None, is_dry=False, is_forced=True))
    result = backed_up(root, place)
    restore_result = restored(place, tmp_path / "new", at_ms=at_ms)
    assert restore_result.seq < result.manifest.seq
    assert restore_result.time_ms <= at_ms
    assert records(tmp_path / "new", "t") == expected
    assert damage_of(tmp_path / "new") == []
    for wrong in (0, result.manifest.from_ms - 1, result.manifest.to_ms + 1):
        with pytest.raises(InvalidRequest, match="no backup in "):
            restored(place, tmp_path / "none", at_ms=wrong)
    assert not list((tmp_path / "none").glob("[a-z]*"))


def test_a_table_that_reaches_back_to_a_checkpoint_of_delta(tmp_path: Path) -> None:
    """Delta cleaned up the commits before it, and the newest version is a commit after it."""
    root = tmp_path / "log"
    with BrokerLog(root) as broker:
        broker.create("t", 1)
        for number in range(53):
            broker.append("t", {0: [b"%d" % number]})
            broker.seal("t")
    (log,) = (root / "topics").glob("t-*/_delta_log")
    assert list(log.glob("*.checkpoint.parquet"))
    for version in range(48):
        (log / f"{version:020}.json").unlink()
    assert backed_up(root, tmp_path / "place").doubts == []
    restored(tmp_path / "place", tmp_path / "new")
    assert records(tmp_path / "new", "t") == records(root, "t")


def test_target_that_is_not_empty_is_refused(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    with pytest.raises(StoreUnfit, match="no place for backups"):
        backed_up(root, root)
    with pytest.raises(StoreUnfit, match="is inside of the cluster's store"):
        backed_up(root, root / "backups")
    with pytest.raises(StoreUnfit, match="no backup that is complete"):
        restored(place, tmp_path / "new")
    backed_up(root, place)
    with pytest.raises(StoreUnfit, match="empty"):
        restored(place, root)
    restored(place, tmp_path / "new")
    with pytest.raises(StoreUnfit, match="empty"):
        restored(place, tmp_path / "new")


@pytest.mark.parametrize("how", ["a wrong byte", "gone"])
def test_a_damaged_object_of_a_backup_is_named(root: Path, tmp_path: Path, how: str) -> None:
    place = tmp_path / "place"
    backed_up(root, place)
    for number, path in enumerate(sorted((place / OBJECTS).rglob("partition=*/*.parquet"))[:2]):
        body = path.read_bytes()
        path.unlink()
        if how == "a wrong byte":
            path.write_bytes(bytes([body[0] ^ 1]) + body[1:])
        with pytest.raises(Corrupt, match=path.name):
            restored(place, tmp_path / f"new{number}")
        assert not (tmp_path / f"new{number}" / object_keys.CLUSTER).exists()
        path.write_bytes(body)
    (manifest,) = (place / BACKUPS).iterdir()
    body = manifest.read_bytes()
    manifest.write_bytes(body[:40] + bytes([body[40] ^ 1]) + body[41:])
    with pytest.raises(Corrupt, match="manifest"):
        restored(place, tmp_path / "new")
    assert backed_up(root, place).doubts == []  # beside the damaged one
    restored(place, tmp_path / "again")


def test_another_history_of_the_cluster_is_refused(root: Path, tmp_path: Path) -> None:
    place, copy = tmp_path / "place", tmp_path / "copy"
    shutil.copytree(root, copy)
    for number, folder in enumerate((root, copy)):
        with BrokerLog(folder) as broker:
            broker.append("u", {0: [b"history %d" % number]})
    backed_up(root, place)
    with pytest.raises(InvalidRequest, match="another history"):
        backed_up(copy, place)
    restored(place, tmp_path / "new")
    assert records(tmp_path / "new", "u") == records(root, "u")


def test_a_place_of_another_cluster_is_refused(root: Path, tmp_path: Path) -> None:
    """Also a restored cluster is another one: `restore` would take the newest number of both."""
    place = tmp_path / "place"
    first = backed_up(root, place)
    restored(place, tmp_path / "new")
    with pytest.raises(InvalidRequest, match=first.manifest.cluster.cluster_id):
        backed_up(tmp_path / "new", place)


def test_a_restored_cluster_is_backed_up(root: Path, tmp_path: Path) -> None:
    """It has one checkpoint, and no entry before it."""
    new, place = tmp_path / "new", tmp_path / "other"
    backed_up(root, tmp_path / "place")
    restored(tmp_path / "place", new)
    backed_up(new, place)
    restored(place, tmp_path / "again")
    assert records(tmp_path / "again", "t", "u") == records(root, "t", "u")
    with BrokerLog(new) as broker:
        broker.append("u", {0: [b"since then"]})
    backed_up(new, place)
    restored(place, tmp_path / "later")
    assert records(tmp_path / "later", "u") == records(new, "u")


def test_a_table_in_doubt_is_copied_as_it_is_and_named(root: Path, tmp_path: Path) -> None:
    (log,) = (root / "topics").glob("t-*/_delta_log")
    newest = max(log.glob("*.json"))
    newest.write_bytes(b"{")
    result = backed_up(root, tmp_path / "place")
    (doubt,) = result.doubts
    assert newest.name in doubt
    (log / "_last_checkpoint").write_bytes(b"{}")
    assert backed_up(root, tmp_path / "place").doubts == [doubt]
    (log / "_last_checkpoint").write_bytes(b"overwritten")
    assert backed_up(root, tmp_path / "place").doubts == [doubt]
    restore_result = restored(tmp_path / "place", tmp_path / "new")
    assert restore_result.doubts == [doubt]
    assert records(tmp_path / "new", "u") == records(root, "u")


def test_backup_has_deleted_seal(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the backup has looked at the tables, `u` is sealed and its records are deleted.

    The version before the seal has all rows that are left, but not the seal.
    """
    real = _Copy._load_tables

    async def loaded(self: _Copy) -> dict[str, ManifestVersion]:
        versions = await real(self)

        async def deleted(cluster: MaintenanceSession) -> None:
            await delete_records(cluster, "u", {0: 3}, is_dry=False)

        def delete() -> None:
            with BrokerLog(root) as broker:
                broker.append("u", {0: [b"second"]})
                broker.seal("u")
            on(root, deleted)

        await asyncio.to_thread(delete)
        return versions

    with BrokerLog(root) as broker:
        broker.append("u", {0: [b"first"]})
        broker.seal("u")
    monkeypatch.setattr(_Copy, "_load_tables", loaded)
    assert not backed_up(root, tmp_path / "place").doubts
    restored(tmp_path / "place", tmp_path / "new")
    assert damage_of(tmp_path / "new") == []
    with BrokerLog(tmp_path / "new") as broker:
        broker.append("u", {0: [b"third"]})
        assert broker.seal("u") == 1


async def log_with_garbage(inner: MemoryStore) -> Broker:
    log = await log_with(inner, [["a"], ["b"], ["c"]])
    for _ in range(2):  # the base is the older of two checkpoints
        async with caring(inner) as cluster:
            await plan(cluster, GRACE)
        inner.now_ms += 2 * GRACE.wal_ms
        await append(log, "tail")
    return log


async def test_collection_deletes_nothing_while_a_hold_is_in_force(inner: MemoryStore) -> None:
    async with closing(await log_with_garbage(inner)), caring(inner) as cluster:
        await cluster.commit([TakeHold("h", 1000)])
        held_plan = await plan(cluster, GRACE)
        assert [hold.hold_id for hold in held_plan.holds] == ["h"]
        assert await collect(cluster, held_plan) == 0
        await cluster.commit([ReleaseHold("h")])
        free_plan = await plan(cluster, GRACE)
        assert await collect(cluster, free_plan) == len(free_plan.garbage)
        assert not held_plan.garbage
        assert len(free_plan.garbage) > 2
        assert held_plan.waiting > 0


async def test_a_hold_that_is_taken_while_a_collection_plans_counts(inner: MemoryStore) -> None:
    """The plan may have read the tables after the backup did."""
    log = await log_with_garbage(inner)
    async with closing(log), caring(inner) as cluster, caring(inner) as other:
        checked_table = cluster.checked_table

        async def meanwhile(topic: Topic) -> Table:
            await other.commit([TakeHold("h", 1000)])
            return await checked_table(topic)

        cluster.checked_table = meanwhile  # type: ignore[method-assign]
        held_plan = await plan(cluster, GRACE)
        cluster.checked_table = checked_table  # type: ignore[method-assign]
        await other.commit([ReleaseHold("h")])
        assert not held_plan.garbage
        assert (await plan(cluster, GRACE)).garbage


def test_a_cluster_of_level_1_needs_an_upgrade(tmp_path: Path) -> None:
    root = tmp_path / "log"
    root.mkdir()
    (root / object_keys.CLUSTER).write_text(
        '{"format": 1, "cluster_id": "c0ffee", "created_ms": 1}'
    )
    with pytest.raises(InvalidRequest, match="tidelog upgrade"):
        backed_up(root, tmp_path / "place")
    assert not list((tmp_path / "place").glob("[a-z]*"))


@pytest.mark.parametrize(("first_h", "then_h"), [(24, 1), (1, 24)])
async def test_backup_begins_by_bounds_in_effect(first_h: int, then_h: int) -> None:
    """Not by the first bounds, and also if a raised retention is longer than the WAL left."""
    inner, place, target = MemoryStore(), MemoryStore(), MemoryStore()
    hour_ms = 3_600_000
    first = Bounds(wal_retention_ms=first_h * hour_ms)
    inner.now_ms = TIME_MS
    log = await with_topic(inner, COLD._replace(wal=WalSettings(first)))
    await append(log, "a", "b")  # this entry is kept: its records are in a tail
    async with closing(log), caring(inner) as cluster:

        async def pass_hours(hours: int) -> None:
            for number in range(hours * 6):
                inner.now_ms += STEP_MS_MAX
                log.clock.advance(STEP_MS_MAX / 1000)
                await log.topics.alter("t", {"segment.ms": "5000"})
                if number % 6 == 0:
                    await collect(cluster, await plan(cluster, Grace()))

        if then_h < first_h:
            await change_bounds(cluster, SetBounds(wal_retention_ms=hour_ms), is_dry=False)
        await pass_hours(2 * first_h + 4)
        if then_h > first_h:
            raised = SetBounds(wal_retention_ms=then_h * hour_ms)
            await change_bounds(cluster, raised, is_dry=False)
        assert [info async for info in inner.list(object_keys.wal(1))] == []
        await append(log, "c")
        await backup(cluster, place)
    await restore(place, target, SystemClock(), cluster_id="c0ffee")
    async with closing(await opened(target, COLD)) as new:
        assert await read_values(new) == ["a", "b", "c"]


# -- a hold that ends early


Jump = Callable[[], Awaitable[None]]


class Place(MemoryStore):
    """A place for backups.

    `jump` is called once: before the first create of a key that begins with `created`, or after the
    first delete of a key that begins with `deleted`.
    """

    def __init__(self, created: str = "none", deleted: str = "none") -> None:
        super().__init__()
        self._created = created
        self._deleted = deleted
        self.jump: Jump | None = None

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if key.startswith(self._created):
            await self._jump()
        return await super().create(key, parts)

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        await super().delete(keys)
        if any(key.startswith(self._deleted) for key in keys):
            await self._jump()

    async def _jump(self) -> None:
        jump, self.jump = self.jump, None
        if jump is not None:
            await jump()

    async def keys(self, prefix: str) -> list[str]:
        return [info.key async for info in self.list(prefix)]


async def jumps(log: Broker, count: int) -> None:
    """The clock of a broker jumps, and after each jump the broker commits an entry."""
    await append(log, "before", topic="u")
    for _ in range(count):
        log.clock.skew_ms += STEP_MS_MAX
        await append(log, "after", topic="u")


async def backed_up_with_jumps(
    place: Place, count: int, keep: int | None = None, removed: str = ""
) -> BackedUp:
    """Make a backup during which a broker's clock jumps so often, and an object is removed.

    If `keep` is given, make one backup before, without jumps, and delete an object that only this
    backup has.
    """
    inner = MemoryStore()
    log = await log_with(inner, [["a"], ["b"]])
    try:
        await log.topics.create("u", 1, {})
        async with caring(inner) as cluster:
            if keep is not None:
                await backup(cluster, place)
                await log.topics.delete("t")
                inner.now_ms += 100 * 3_600_000
                await collect(cluster, await plan(cluster, Grace(wal_ms=0, table_ms=0)))

            async def jump() -> None:
                await jumps(log, count)
                await inner.delete([removed] if removed else [])

            place.jump = jump
            result = await backup(cluster, place, keep=keep)
            assert place.jump is None, "the clock has jumped"
            assert not list(cluster.state.holds)
            return result
    finally:
        await log.close()


@pytest.mark.parametrize("when", [OBJECTS, BACKUPS], ids=["while it copies", "at its manifest"])
async def test_a_backup_whose_hold_ended_early_fails_and_leaves_no_manifest(when: str) -> None:
    place = Place(created=when)
    with pytest.raises(InvalidRequest, match=r"hold 'backup-.* is over.*run the backup again"):
        await backed_up_with_jumps(place, 2)
    assert place.jump is None, "the clock has jumped"
    assert await place.keys(BACKUPS) == []


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [(2, InvalidRequest, "hold 'backup-.* is over"), (0, Corrupt, "is gone: it was deleted")],
)
async def test_gone_object_is_damage(count: int, error: type[LogError], words: str) -> None:
    with pytest.raises(error, match=words):
        await backed_up_with_jumps(Place(created=OBJECTS), count, removed=object_keys.wal(2))


async def test_manifest_is_deleted_after_two_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(created=BACKUPS)
    delete, refusals = place.delete, iter(range(2))

    async def refused_twice(keys: Iterable[str]) -> None:
        if next(refusals, None) is not None:
            raise Unavailable("no answer")
        await delete(keys)

    monkeypatch.setattr(place, "delete", refused_twice)
    with pytest.raises(InvalidRequest, match="is over"):
        await backed_up_with_jumps(place, 2)
    assert next(refusals, None) is None, "it was tried"
    assert await place.keys(BACKUPS) == []


async def test_manifest_of_cancelled_backup_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewal of the hold fails and cancels the work, while the manifest is deleted."""
    place = Place(created=BACKUPS)
    delete = place.delete

    async def deleted_late(keys: Iterable[str]) -> None:
        await asyncio.sleep(HOLD_MS / 1000)
        await delete(keys)

    monkeypatch.setattr(place, "delete", deleted_late)
    with pytest.raises(InvalidRequest, match="is over"):
        await backed_up_with_jumps(place, 2)
    assert await place.keys(BACKUPS) == []


@pytest.mark.parametrize("when", [OBJECTS, BACKUPS], ids=["while it copies", "at its manifest"])
async def test_one_jump_ends_no_hold(when: str) -> None:
    place = Place(created=when)
    await backed_up_with_jumps(place, 1)
    assert len(await place.keys(BACKUPS)) == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_removal_whose_hold_ended_early_deletes_no_object(count: int) -> None:
    """Another backup may rely on the objects then."""
    place = Place(deleted=BACKUPS)
    result = await backed_up_with_jumps(place, count, keep=1)
    objects = {key.removeprefix(OBJECTS) for key in await place.keys(OBJECTS)}
    needed = {backup_object.key for backup_object in result.manifest.objects}
    assert len(await place.keys(BACKUPS)) == 1
    if count == 1:
        assert (result.prune_problem, objects) == ("", needed)
    else:
        assert "is over" in result.prune_problem
        assert objects > needed
        assert await place.keys(PRUNED)
