"""Restore of a backup: a new cluster, in an empty store, from the state after an entry.

The restore applies the copied WAL up to that entry. The new cluster gets a checkpoint of the state,
the entry itself, the objects that the tails name, and the tables. Each object is verified.

The new cluster has an id of its own, unless an operator gives the old id. So a broker with a hot
log (acks=1) of the old cluster keeps this hot log for the old cluster. If the ids were equal, the
broker would commit the records of the hot log into the new cluster, and then delete the hot log,
although the old cluster does not have these records.

**On a crash**: an entry is written first, and `cluster.json` last. No broker starts on a store with
an entry and without `cluster.json`. Empty the store and run the command again.
"""

import datetime as dt
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tidelog.compaction.backups.place import (
    OBJECTS,
    BackupManifest,
    BackupName,
    BackupObject,
    BackupTable,
    backups_in,
    batches,
    is_sealed,
    read_manifest,
    read_object,
    store_once,
)
from tidelog.compaction.garbage import live_objects
from tidelog.storage.codec import entry as entries
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, InvalidRequest, StoreUnfit
from tidelog.storage.core.object_keys import log_version
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.collection_holds import Holds
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectInfo, ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.foreign_commits import doubt_of
from tidelog.storage.tables.manifest import ManifestVersion
from tidelog.storage.wal.wal_objects import decode_checkpoint, empty_state, encode_checkpoint

Progress = Callable[[int], None]


class Restored(NamedTuple):
    """A new cluster: its id, its newest entry's number and time, and the objects copied.

    `doubts` says why tables are in doubt or damaged; these tables were copied as they are.
    """

    cluster_id: str
    seq: int
    time_ms: int
    objects: int
    size: int
    doubts: list[str]


async def restore(
    place: ObjectStore,
    target: ObjectStore,
    clock: Clock,
    *,
    at_ms: int | None = None,
    cluster_id: str | None = None,
    on_bytes: Progress = lambda _: None,
) -> Restored:
    """Make a cluster in the empty `target` from a backup in the place.

    If `at_ms` is None, restore the moment of the newest backup. Otherwise take the oldest backup
    whose times include `at_ms`, and stop before the first entry that is later than `at_ms`. If
    `cluster_id` is None, the cluster gets a new id.

    Raises StoreUnfit if the target is not empty or the place has no backup, InvalidRequest if no
    backup has that time, Corrupt if the backup is damaged, Unavailable.
    """
    async for info in target.list(""):
        raise StoreUnfit(f"{target.url} has {info.key}: restore into an empty folder or prefix")
    manifest = await read_manifest(place, _chosen(place, await backups_in(place), at_ms))
    work = _Restore(place, target, manifest, on_bytes)
    return await work.run(clock, at_ms, cluster_id or clock.new_id().hex())


def _chosen(place: ObjectStore, names: list[BackupName], at_ms: int | None) -> BackupName:
    if not names:
        raise StoreUnfit(f"{place.url} has no backup that is complete")
    if at_ms is None:
        return names[-1]
    able = [name for name in names if name.from_ms <= at_ms <= name.to_ms]
    if not able:
        periods = ", ".join(f"{_time(name.from_ms)} to {_time(name.to_ms)}" for name in names[-10:])
        raise InvalidRequest(
            f"no backup in {place.url} has the time {_time(at_ms)}; "
            f"the newest backups have {periods}"
        )
    return able[0]


def _time(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="milliseconds")


class _Restore:
    def __init__(
        self,
        place: ObjectStore,
        target: ObjectStore,
        manifest: BackupManifest,
        on_bytes: Progress,
    ) -> None:
        self._place = place
        self._target = target
        self._manifest = manifest
        self._on_bytes = on_bytes
        self._named = {backup_object.key: backup_object for backup_object in manifest.objects}
        self._count = self._size = 0

    async def run(self, clock: Clock, at_ms: int | None, cluster_id: str) -> Restored:
        state = await self._state(at_ms)
        time_ms, newest = state.time_ms, object_keys.wal(state.seq)
        chosen = [await self._table(topic) for topic in state.topics.values() if is_sealed(topic)]
        # Copy the entry first, so that no broker mistakes a part of a restore for an empty store.
        if not await self._copy_one(self._object(newest)):
            raise StoreUnfit(f"{self._target.url} is not empty: another restore runs there")
        await self._copy(self._object(key) for key in live_objects(state) - {newest})
        for table, files in chosen:
            await self._copy(files)
            if not table.doubt:
                await self._check(table, files)
        state.cluster_id, state.holds = cluster_id, Holds()
        state.producers.rebase(clock.new_id())
        checkpoint = encode_checkpoint(state.encode())
        await store_once(self._target, object_keys.checkpoint(state.seq), checkpoint)
        identity = msgspec.structs.replace(
            self._manifest.cluster, cluster_id=cluster_id, created_ms=clock.now_ms()
        )
        await store_once(self._target, object_keys.CLUSTER, [msgspec.json.encode(identity)])
        doubts = [f"{table.prefix}: {table.doubt}" for table, _ in chosen if table.doubt]
        return Restored(cluster_id, state.seq, time_ms, self._count, self._size, doubts)

    async def _state(self, at_ms: int | None) -> ClusterState:
        """Return the state before the first entry that is later than `at_ms`.

        If `at_ms` is None, return the state at the moment of the backup.
        """
        manifest = self._manifest
        identity = manifest.cluster
        state = empty_state(identity)
        if manifest.base:
            key = object_keys.checkpoint(manifest.base)
            body = await read_object(self._place, self._object(key))
            state = decode_checkpoint(body, key, identity.cluster_id, identity.bounds)
        entry_objects = [
            self._object(object_keys.wal(seq)) for seq in range(state.seq + 1, manifest.seq + 1)
        ]
        for infos in batches(
            ObjectInfo(backup_object.key, backup_object.size, 0) for backup_object in entry_objects
        ):
            bodies = await together(
                *(read_object(self._place, self._named[info.key]) for info in infos)
            )
            for info, body in zip(infos, bodies, strict=True):
                decoded = entries.decode(body, info.key, seq=state.seq + 1, previous=state.hash)
                if at_ms is not None and decoded.entry.time_ms > at_ms:
                    return state
                state.apply(decoded, info.key)
        if state.hash != manifest.hash:
            raise Corrupt(object_keys.wal(state.seq), "is not the entry of the backup's moment")
        return state

    async def _table(self, topic: Topic) -> tuple[BackupTable, list[BackupObject]]:
        """Return a topic's table at the version to restore, and its objects.

        Take the newest version without records beyond the sealed end. If all versions have such
        records, take the newest of them. A version may have such records because a sealer commits
        to the table before the WAL.
        """
        tables = {table.prefix: table for table in self._manifest.tables}
        table = tables.get(topic.prefix)
        if table is None:
            why = f"topic {topic.name} was deleted after that time, and the backup lacks its table"
            raise InvalidRequest(f"{why}: take an earlier backup")
        if table.doubt:
            objects = [
                backup_object
                for key, backup_object in self._named.items()
                if key.startswith(f"{topic.prefix}/")
            ]
            return table, objects
        copied = open_table(self._place, f"{OBJECTS}{topic.prefix}", topic.name)
        sealed_ends = [partition.sealed_end for partition in topic.partitions]
        ahead: tuple[BackupTable, list[BackupObject]] | None = None
        for number in range(table.version, table.oldest - 1, -1):
            columns = await copied.files_at(number)
            if columns is None:
                break
            version = ManifestVersion(number, topic.prefix, columns)
            files = [f"{topic.prefix}/{path}" for path in version.paths()]
            if doubt_of(version, topic.partitions, sealed_ends) or not self._has(files):
                continue
            logged = self._log(topic.prefix, number)
            chosen = (
                msgspec.structs.replace(table, version=number),
                [*logged, *map(self._object, files)],
            )
            ends = {partition: span[1] for partition, span in version.spans().items()}
            if all(end <= sealed_ends[partition] for partition, end in ends.items()):
                return chosen
            ahead = ahead or chosen
        if ahead is None:
            raise InvalidRequest(
                f"topic {topic.name}: no version of its table in the backup is of that time; take "
                "a later time, or an earlier backup"
            )
        return ahead

    def _log(self, prefix: str, version: int) -> list[BackupObject]:
        """Return the files of a table's log from the newest checkpoint up to the version."""
        numbers = {key: log_version(key) for key in self._named if key.startswith(f"{prefix}/_")}
        starts = [
            number
            for key, number in numbers.items()
            if number is not None and number <= version and log_version(key, "json") is None
        ]
        start = max(starts, default=0)
        return [
            self._object(key)
            for key, number in numbers.items()
            if number is not None and start <= number <= version
        ]

    async def _check(self, table: BackupTable, files: Iterable[BackupObject]) -> None:
        """Raise Corrupt if the restored table is not the version that was chosen."""
        newest = await open_table(self._target, table.prefix, "").newest()
        paths = {f"{table.prefix}/{path}" for path in newest.paths()}
        expected_paths = {
            backup_object.key for backup_object in files if log_version(backup_object.key) is None
        }
        if newest.version != table.version or paths != expected_paths:
            why = f"was restored as version {newest.version}, not as version {table.version}"
            raise Corrupt(table.prefix, why)

    def _has(self, keys: Iterable[str]) -> bool:
        return all(key in self._named for key in keys)

    def _object(self, key: str) -> BackupObject:
        try:
            return self._named[key]
        except KeyError:
            raise Corrupt(key, "is not in the backup, but the backup needs it") from None

    async def _copy(self, backup_objects: Iterable[BackupObject]) -> None:
        for infos in batches(
            ObjectInfo(backup_object.key, backup_object.size, 0)
            for backup_object in list(backup_objects)
        ):
            await together(*(self._copy_one(self._named[info.key]) for info in infos))

    async def _copy_one(self, backup_object: BackupObject) -> bool:
        """Copy and verify one object. Return whether this call created it."""
        body = await read_object(self._place, backup_object)
        is_new = await store_once(self._target, backup_object.key, [body])
        self._count += 1
        self._size += backup_object.size
        self._on_bytes(self._size)
        return is_new
