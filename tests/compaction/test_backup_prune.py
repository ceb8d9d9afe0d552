"""Old backups are removed from a place, and each backup that is kept stays whole (FORMAT 9)."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest

from tests.compaction.test_backup import backed_up, damage_of, four_segments, on, records, restored
from tests.support.broker_log import BrokerLog, Record
from tests.support.clock import ManualClock
from tidelog.compaction.backups import prune as pruning
from tidelog.compaction.backups.backup import BackedUp, backup
from tidelog.compaction.backups.place import (
    OBJECTS,
    PRUNED,
    BackupName,
    Pace,
    backups_in,
    read_manifest,
    read_object,
)
from tidelog.compaction.backups.prune import prune
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core.actions import ReleaseHold, TakeHold
from tidelog.storage.core.errors import Corrupt, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import Created, ObjectInfo


class DyingStore(FolderStore):
    """A folder whose process is killed before its call number `calls_left`."""

    def __init__(self, root: Path, calls_left: int) -> None:
        super().__init__(root)
        self.calls_left = calls_left

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Unavailable("killed")

    async def get(self, key: str) -> bytes:
        self.count()
        return await super().get(key)

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        self.count()
        return await super().create(key, parts)

    async def delete(self, keys: Iterable[str]) -> None:
        self.count()
        await super().delete(keys)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        self.count()
        async for info in super().list(prefix, start_after=start_after):
            yield info


class NoObjectGoes(FolderStore):
    """A folder whose process is killed before the first delete of an object of a backup."""

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if any(key.startswith(OBJECTS) for key in keys):
            raise Unavailable("killed")
        await super().delete(keys)


async def always() -> None:
    """The hold is in force."""


async def alone() -> None:
    """No other hold is in force."""


def names_in(place: Path) -> list[BackupName]:
    return asyncio.run(backups_in(FolderStore(place)))


def files_in(place: Path, folder: str) -> set[str]:
    root = place / folder
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def named_in(place: Path) -> set[str]:
    """The keys that the place's backups name. Each object is there and verifies."""

    async def read() -> set[str]:
        store, keys = FolderStore(place), set()
        for name in await backups_in(store):
            for backup_object in (await read_manifest(store, name)).objects:
                await read_object(store, backup_object)
                keys.add(backup_object.key)
        return keys

    return asyncio.run(read())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Topic `t` and three backups in `place`.

    After the first one, its segments were merged and collected.
    """
    root, place = tmp_path / "log", tmp_path / "place"
    broker = four_segments(root)
    broker.close()
    backed_up(root, place)
    on(root, merged_and_collected)
    backed_up(root, place)
    with BrokerLog(root) as broker:
        broker.append("t", {0: [b"tail"]})
    backed_up(root, place)
    assert len(names_in(place)) == 3
    return root


async def merged_and_collected(cluster: MaintenanceSession) -> None:
    assert await compact(cluster, None, is_dry=False)
    planned = await plan(cluster, Grace())
    assert len([item for item in planned.garbage if item.key.endswith(".parquet")]) == 4
    await collect(cluster, planned)


def kept(root: Path, place: Path, keep: int) -> BackedUp:
    async def work(cluster: MaintenanceSession) -> BackedUp:
        return await backup(cluster, FolderStore(place), keep=keep)

    return on(root, work)


def all_records(root: Path) -> list[Record]:
    return records(root, "t")


def test_newest_backups_keep_their_objects(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    old_names = names_in(place)
    result = kept(root, place, 3)
    assert names_in(place) == [*old_names[1:], result.manifest.name]
    assert (result.pruned.backups, result.pruned.objects > 3, result.prune_problem) == (1, True, "")
    assert named_in(place) == files_in(place, OBJECTS)
    assert files_in(place, PRUNED) == set()
    result = kept(root, place, 1)
    assert names_in(place) == [result.manifest.name]
    assert named_in(place) == files_in(place, OBJECTS)
    restored(place, tmp_path / "new")
    assert all_records(tmp_path / "new") == all_records(root)
    assert damage_of(tmp_path / "new") == []


def test_crash_keeps_backups(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "DELETE_BATCH", 1)
    place = tmp_path / "place"
    old_names = names_in(place)
    for call_number in range(1000):
        copy = tmp_path / f"copy{call_number}"
        shutil.copytree(place, copy)
        try:
            asyncio.run(prune(DyingStore(copy, call_number), 1, always, alone))
        except Unavailable:
            assert set(names_in(copy)) >= {old_names[-1]}
            named_in(copy)
            asyncio.run(pruning.finish(FolderStore(copy), always))
            assert named_in(copy) == files_in(copy, OBJECTS) or len(names_in(copy)) > 1
            asyncio.run(prune(FolderStore(copy), 1, always, alone))
        else:
            break
        assert names_in(copy) == old_names[-1:]
        assert named_in(copy) == files_in(copy, OBJECTS)
        assert files_in(copy, PRUNED) == set()
        shutil.rmtree(copy)
    assert call_number > 15


def test_the_next_backup_continues_a_pruning(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    (oldest, *_) = names_in(place)
    with pytest.raises(Unavailable):
        asyncio.run(prune(NoObjectGoes(place), 2, always, alone))
    assert files_in(place, PRUNED)
    assert oldest not in names_in(place)

    async def hold(cluster: MaintenanceSession) -> None:
        await cluster.commit([TakeHold("backup-2", 60_000)])

    async def release(cluster: MaintenanceSession) -> None:
        await cluster.commit([ReleaseHold("backup-2")])

    on(root, hold)
    with pytest.raises(Unavailable, match="another backup runs"):
        backed_up(root, place)
    on(root, release)
    backed_up(root, place)
    assert files_in(place, PRUNED) == set()
    assert named_in(place) == files_in(place, OBJECTS)


def test_no_backup_is_removed_while_another_one_runs(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    old_names = names_in(place)

    async def work(cluster: MaintenanceSession) -> BackedUp:
        await cluster.commit([TakeHold("backup-2", 60_000)])
        return await backup(cluster, FolderStore(place), keep=1)

    result = on(root, work)
    assert "another backup runs" in result.prune_problem
    assert names_in(place) == [*old_names, result.manifest.name]
    named_in(place)


def test_a_backup_that_begins_when_a_pruning_begins_stops_it(root: Path, tmp_path: Path) -> None:
    """It looked at the place before the pruning had written there."""
    place = tmp_path / "place"
    objects = files_in(place, OBJECTS)

    class Late(FolderStore):
        """A folder where another backup takes its hold before the first write to `pruned/`."""

        async def create(self, key: str, parts: Sequence[Part]) -> Created:
            if key.startswith(PRUNED) and not files_in(place, PRUNED):
                await other.commit([TakeHold("backup-2", 60_000)])
            return await super().create(key, parts)

    async def work(cluster: MaintenanceSession) -> BackedUp:
        nonlocal other
        other = await MaintenanceSession.open(cluster.store, SystemClock())
        try:
            return await backup(cluster, Late(place), keep=1)
        finally:
            await other.close()

    other: MaintenanceSession
    result = on(root, work)
    assert "another backup runs" in result.prune_problem
    assert files_in(place, OBJECTS) >= objects
    assert len(names_in(place)) == 4
    named_in(place)


def test_nothing_is_deleted_if_a_manifest_is_damaged(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    objects = files_in(place, OBJECTS)
    manifest = place / names_in(place)[1].key
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="manifest"):
        asyncio.run(prune(FolderStore(place), 2, always, alone))
    assert files_in(place, OBJECTS) == objects
    assert len(names_in(place)) == 3
    result = kept(root, place, 1)
    assert manifest.name in result.prune_problem


def test_a_damaged_manifest_does_not_stop_the_next_backup(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    with pytest.raises(Unavailable):
        asyncio.run(prune(NoObjectGoes(place), 2, always, alone))
    manifest = place / names_in(place)[0].key
    manifest.write_bytes(manifest.read_bytes()[:-1])
    result = backed_up(root, place)
    manifest.unlink()
    assert files_in(place, PRUNED)
    assert kept(root, place, 2).prune_problem == ""
    assert result.manifest.name in names_in(place)
    assert files_in(place, PRUNED) == set()
    assert named_in(place) <= files_in(place, OBJECTS)


def test_a_hold_that_may_be_over_ends_the_pruning(root: Path, tmp_path: Path) -> None:
    async def over() -> None:
        raise Unavailable("the hold")

    place = tmp_path / "place"
    old_names, objects = names_in(place), files_in(place, OBJECTS)
    with pytest.raises(Unavailable, match="the hold"):
        asyncio.run(prune(FolderStore(place), 1, over, alone))
    assert (names_in(place), files_in(place, OBJECTS)) == (old_names, objects)


@pytest.mark.parametrize(("rate", "at_s"), [(None, [0, 0, 0]), (1000, [0, 0.5, 2.5])])
async def test_a_rate_spreads_the_objects(rate: int | None, at_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    pace = Pace(ManualClock(1, loop_time=loop.time), rate)

    async def read(size: int) -> float:
        await pace.wait(size)
        return round(loop.time() - start, 3)

    assert list(await asyncio.gather(read(500), read(2000), read(1))) == at_s
