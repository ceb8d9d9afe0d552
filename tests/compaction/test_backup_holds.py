"""The hold of a backup ends early, because a clock jumps twice by the most that one entry adds."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import pytest

from tests.support.clock import ManualClock
from tests.support.logs import append
from tests.support.maintenance import caring, log_with
from tests.support.vloop import run
from tidelog.compaction.backups.backup import HOLD_MS, BackedUp, backup
from tidelog.compaction.backups.place import BACKUPS, OBJECTS, PRUNED
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, InvalidRequest, LogError, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.log import Log
from tidelog.storage.state.elapsed import STEP_MS_MAX
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created

Jump = Callable[[], Awaitable[None]]


class Place(MemoryStore):
    """A place for backups. `jump` is called once: before the first create of a key that begins with
    `created`, or after the first delete of a key that begins with `deleted`."""

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


async def jumps(log: Log, count: int) -> None:
    """The clock of a broker jumps, and after each jump the broker commits an entry."""
    assert isinstance(log.clock, ManualClock)
    await append(log, "before", topic="u")
    for _ in range(count):
        log.clock.skew_ms += STEP_MS_MAX
        await append(log, "after", topic="u")


async def backed_up(
    place: Place, count: int, keep: int | None = None, removed: str = ""
) -> BackedUp:
    """Make a backup during which a broker's clock jumps so often, and an object is removed. If
    `keep` is given, make one backup before, without jumps, and delete an object that only this
    backup has."""
    inner = MemoryStore()
    log = await log_with(inner, [["a"], ["b"]])
    try:
        await log.create_topic("u", 1, {})
        async with caring(inner) as cluster:
            if keep is not None:
                await backup(cluster, place)
                await log.delete_topic("t")
                inner.now_ms += 100 * 3_600_000
                await collect(cluster, await plan(cluster, Grace(wal_ms=0, table_ms=0)))

            async def jump() -> None:
                await jumps(log, count)
                await inner.delete([removed] if removed else [])

            place.jump = jump
            done = await backup(cluster, place, keep=keep)
            assert place.jump is None, "the clock has jumped"
            assert not list(cluster.state.holds)
            return done
    finally:
        await log.close()


@pytest.mark.parametrize("when", [OBJECTS, BACKUPS], ids=["while it copies", "at its manifest"])
def test_a_backup_whose_hold_ended_early_fails_and_leaves_no_manifest(when: str) -> None:
    async def story() -> list[str]:
        place = Place(created=when)
        with pytest.raises(InvalidRequest, match=r"hold 'backup-.* is over.*run the backup again"):
            await backed_up(place, 2)
        assert place.jump is None, "the clock has jumped"
        return await place.keys(BACKUPS)

    assert run(story) == []


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [(2, InvalidRequest, "hold 'backup-.* is over"), (0, Corrupt, "is gone: it was deleted")],
)
def test_an_object_that_is_gone_is_damage_only_while_the_hold_is_in_force(
    count: int, error: type[LogError], words: str
) -> None:
    async def story() -> None:
        with pytest.raises(error, match=words):
            await backed_up(Place(created=OBJECTS), count, removed=object_keys.wal(2))

    run(story)


def test_a_manifest_is_deleted_although_the_store_refuses_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> list[str]:
        place = Place(created=BACKUPS)
        delete, refusals = place.delete, iter(range(2))

        async def refused_twice(keys: Iterable[str]) -> None:
            if next(refusals, None) is not None:
                raise Unavailable("no answer")
            await delete(keys)

        monkeypatch.setattr(place, "delete", refused_twice)
        with pytest.raises(InvalidRequest, match="is over"):
            await backed_up(place, 2)
        assert next(refusals, None) is None, "it was tried"
        return await place.keys(BACKUPS)

    assert run(story) == []


def test_a_manifest_is_deleted_although_the_backup_is_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The periodic renewal of the hold fails, and cancels the work, while the manifest is
    deleted."""

    async def story() -> list[str]:
        place = Place(created=BACKUPS)
        delete = place.delete

        async def deleted_late(keys: Iterable[str]) -> None:
            await asyncio.sleep(HOLD_MS / 1000)
            await delete(keys)

        monkeypatch.setattr(place, "delete", deleted_late)
        with pytest.raises(InvalidRequest, match="is over"):
            await backed_up(place, 2)
        return await place.keys(BACKUPS)

    assert run(story) == []


@pytest.mark.parametrize("when", [OBJECTS, BACKUPS], ids=["while it copies", "at its manifest"])
def test_one_jump_ends_no_hold(when: str) -> None:
    async def story() -> int:
        place = Place(created=when)
        await backed_up(place, 1)
        return len(await place.keys(BACKUPS))

    assert run(story) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_removal_whose_hold_ended_early_deletes_no_object(count: int) -> None:
    """Another backup may rely on the objects then."""

    async def story() -> None:
        place = Place(deleted=BACKUPS)
        done = await backed_up(place, count, keep=1)
        objects = {key.removeprefix(OBJECTS) for key in await place.keys(OBJECTS)}
        needed = {backup_object.key for backup_object in done.manifest.objects}
        assert len(await place.keys(BACKUPS)) == 1
        if count == 1:
            assert (done.prune_problem, objects) == ("", needed)
        else:
            assert "is over" in done.prune_problem
            assert objects > needed
            assert await place.keys(PRUNED)

    run(story)
