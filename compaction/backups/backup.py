"""Backup of a running cluster into another store (DESIGN 8).

1. Take a hold. From its entry on, collection deletes nothing. A task renews the hold regularly.
2. Read the newest version of each table, then renew the hold. The entry of this renewal is M, the
   moment of the backup. The tables were read before M, so all rows of these versions come from
   entries before M. If a topic was sealed between this read and M, take the oldest later version of
   its table that has all rows below the sealed end at M. The sealer committed that later version
   before the entry of its seal, and that entry is before M. So its rows come from entries before M.
3. For each table, copy its log up to that version, then its files. Because of the hold, collection
   keeps both. Copy the log first, because other engines, which obey no hold, may clean it up.
4. Copy the WAL entries after the base, which is the checkpoint that `copied_base` returns. Also
   copy this checkpoint, the objects that hold its tails, and the objects in `data/` that the
   entries name.
5. Renew the hold, write the manifest, and renew the hold again. If the hold has ended, delete the
   manifest, and end with an error.
6. If the caller asked for it, remove old backups (backups/prune.py). Release the hold.

The hold does not decide which objects are copied. It only keeps these objects until they are
copied. If an object that the backup needs is gone nevertheless, the backup ends with an error: that
the hold is over, or else that the object is damaged.
While the hold is in force, no other backup deletes objects in the place. A hold may end early
(storage/state/collection_holds.py), but then no later renewal succeeds.

**On a crash** before the manifest is written, there is no backup, and the hold expires. The next
backup into the place uses the objects that were copied.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidelog.compaction.backups.place import (
    FORM,
    OBJECTS,
    BackupManifest,
    BackupObject,
    BackupTable,
    Pace,
    backups_in,
    batches,
    check_place,
    encode,
    is_sealed,
    is_unique,
    read_manifest,
    read_object,
    store_once,
)
from tidelog.compaction.backups.prune import Pruned, finish, is_unfinished, prune
from tidelog.compaction.collect import copied_base
from tidelog.compaction.garbage import live_objects
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import ReleaseHold, RenewHold, TakeHold
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    InvalidRequest,
    LogError,
    ObjectNotFound,
    Unavailable,
)
from tidelog.storage.core.object_keys import log_version
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectInfo, ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.delta_json import removed_of
from tidelog.storage.tables.delta_log import transactions_at
from tidelog.storage.tables.foreign_commits import doubt_of
from tidelog.storage.tables.manifest import ManifestVersion, seal_app_id
from tidelog.storage.wal.wal_objects import empty_state

T = TypeVar("T")

log = logging.getLogger("tidelog.backup")

HOLD_MS = 900_000
RENEWALS = 5
"""Number of renewals in HOLD_MS. So the hold does not expire if the store does not answer for up to
twelve minutes."""
RELEASE_S = 30.0
TRIES = 3
WITHDRAW_PAUSES_S = (0, 1, 2, 4, 8, 16, 32)
"""Pauses before the tries to delete a manifest."""
OVERWRITTEN = "/_delta_log/_last_checkpoint"
"""The only object of a table that engines overwrite. If it is missing, engines list the log."""

Progress = Callable[[int], None]


class BackedUp(NamedTuple):
    """A complete backup, with the objects that this run copied and the old backups it removed.

    If old backups are left, `prune_problem` says why.
    """

    manifest: BackupManifest
    copied_objects: int
    copied_bytes: int
    pruned: Pruned = Pruned()
    prune_problem: str = ""

    @property
    def doubts(self) -> list[str]:
        """Return why tables are in doubt or damaged; these tables were copied as they are."""
        return [f"{table.prefix}: {table.doubt}" for table in self.manifest.tables if table.doubt]


async def backup(
    cluster: MaintenanceSession,
    place: ObjectStore,
    *,
    is_verified: bool = False,
    keep: int | None = None,
    bytes_per_s: int | None = None,
    on_bytes: Progress = lambda _: None,
) -> BackedUp:
    """Copy the cluster into the place, beside the backups that are there.

    If `is_verified`, read the whole copy again. If `keep` is given, remove all backups but the
    `keep` newest ones afterwards. `bytes_per_s` bounds the average rate at which objects are read.

    A table that is damaged or in doubt is copied as it is, and named in the result. Raises
    InvalidRequest if the cluster's level has no holds, if there are too many holds, if the backup's
    hold expired, or if the place belongs to another cluster or history. Raises StoreUnfit if the
    place is a cluster, or inside of this one. Raises Corrupt and Unavailable; Unavailable also if
    another backup may be removing old backups from the place.
    """
    await cluster.refresh()
    if cluster.state.level == format_levels.FIRST:
        raise InvalidRequest(
            "a backup beside running brokers needs level 2 of the format, the cluster has level 1: "
            "run `tidelog upgrade` first"
        )
    await check_place(place, cluster.store)
    hold = _Hold(cluster)
    async with hold:
        if await is_unfinished(place):
            await hold.refuse_others(
                f"old backups in {place.url} are partly removed; no backup begins"
            )
            try:
                await hold.during(finish(place, hold.confirm))
            except Corrupt as error:
                log.error("old backups were not removed: %s", error)
        copy = _Copy(cluster, place, hold, Pace(cluster.clock, bytes_per_s), on_bytes)
        try:
            result = await hold.during(copy.run(is_verified=is_verified))
        except Corrupt:
            # If the hold is over, collection may have deleted the object: nothing is damaged.
            with contextlib.suppress(Unavailable, CommitUnknown):
                await hold.renew()
            raise
        if keep is None:
            return result

        async def alone() -> None:
            await hold.refuse_others("no backup is removed")

        try:
            await alone()
            return result._replace(
                pruned=await hold.during(prune(place, keep, hold.confirm, alone))
            )
        except LogError as error:
            return result._replace(prune_problem=str(error))


class _Hold:
    """The hold of a backup: an async context that takes the hold and releases it.

    Owned by one backup.
    """

    def __init__(self, cluster: MaintenanceSession) -> None:
        self._cluster = cluster
        self._id = f"backup-{cluster.clock.new_id().hex()}"

    async def __aenter__(self) -> None:
        await self._cluster.commit([TakeHold(self._id, HOLD_MS)])

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(LogError, TimeoutError):  # if this fails, the hold expires
            async with asyncio.timeout(RELEASE_S):
                await self._cluster.commit([ReleaseHold(self._id)])

    async def renew(self) -> None:
        """Renew the hold. Raises InvalidRequest if it has expired."""
        await self._cluster.commit([RenewHold(self._id, HOLD_MS)])

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work and renew the hold meanwhile.

        If the hold expires, cancel the work and raise InvalidRequest.
        """
        working = asyncio.create_task(work)
        renewing = asyncio.create_task(self._renew_often())
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():  # work that is done has confirmed the hold at its end
                renewing.result()
            return working.result()
        finally:
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)

    async def confirm(self) -> None:
        """Renew the hold.

        When this returns, the hold was in force without a break up to the entry of the renewal, and
        the renewal began at most half of HOLD_MS ago. Raises InvalidRequest if the hold has
        expired, Unavailable if each of TRIES renewals takes longer.
        """
        for _ in range(TRIES):
            begun_s = self._cluster.clock.boot_s()
            await self.renew()
            if (self._cluster.clock.boot_s() - begun_s) * 1000 <= HOLD_MS / 2:
                return
        raise Unavailable("the hold of the backup was not renewed in time: run the backup again")

    async def refuse_others(self, refusal: str) -> None:
        """Raise Unavailable if another hold is in force at the WAL's end.

        `refusal` is the part of the message that says what the caller does not do because of that
        hold.
        """
        await self._cluster.refresh()
        if any(hold.hold_id != self._id for hold in self._cluster.state.holds):
            raise Unavailable(
                f"{refusal} while another backup runs, or while the hold of a crashed one is in "
                "force: run this backup later"
            )

    async def _renew_often(self) -> None:
        while True:
            await asyncio.sleep(HOLD_MS / 1000 / RENEWALS)
            try:
                await self.renew()
            except InvalidRequest:
                raise  # the hold has expired
            except LogError as error:
                log.warning("the hold of the backup was not renewed, retrying: %s", error)


@dataclass
class _Copy:
    """One run of a backup, and what it has copied so far."""

    cluster: MaintenanceSession
    place: ObjectStore
    hold: _Hold
    pace: Pace
    on_bytes: Progress
    copied_objects: int = 0
    copied_bytes: int = 0
    objects: dict[str, BackupObject] = field(default_factory=dict)
    """The objects of this backup, by key."""
    _known: dict[str, BackupObject] = field(default_factory=dict)  # objects of the previous backup
    _there: dict[str, int] = field(default_factory=dict)  # sizes of the objects in the place

    async def run(self, *, is_verified: bool) -> BackedUp:
        cluster, place = self.cluster, self.place
        if earlier := await backups_in(place):
            try:
                old_manifest = await read_manifest(place, earlier[-1])
            except Corrupt as error:  # then this run reads and compares all objects
                log.error("the previous backup is damaged: %s", error)
            else:
                self._check_cluster(old_manifest.cluster.cluster_id)
                self._known = {
                    backup_object.key: backup_object for backup_object in old_manifest.objects
                }
        start = len(OBJECTS)
        self._there = {info.key[start:]: info.size async for info in place.list(OBJECTS)}
        base = await copied_base(cluster)
        loaded = await self._load_tables()
        await self.hold.renew()  # its entry is the moment M
        moment = cluster.state.encode()
        state = ClusterState.decode(moment, object_keys.CHECKPOINTS, cluster.wal.cluster.bounds)
        since_ms = 0 if base is None else base.time_ms
        tables = [
            await self._table(topic, loaded.get(topic.topic_id), since_ms)
            for topic in state.topics.values()
            if is_sealed(topic)
        ]
        manifest = await self._wal(base, state, tables)
        if is_verified:
            for infos in batches(
                ObjectInfo(backup_object.key, backup_object.size, 0)
                for backup_object in manifest.objects
            ):
                await together(*(self._verified(self.objects[info.key]) for info in infos))
        await self.hold.confirm()
        try:
            await store_once(place, manifest.name.key, [encode(manifest)])
            await self.hold.confirm()
        except BaseException:  # also if the task is cancelled, because the hold has expired
            # Another backup may have deleted objects of this backup, so its manifest must not stay.
            # The key of the manifest has the number of M, so no other backup has this key.
            withdrawing = asyncio.create_task(self._withdraw(manifest.name.key))
            while not withdrawing.done():  # a cancellation does not end it
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(withdrawing)
            raise
        return BackedUp(manifest, self.copied_objects, self.copied_bytes)

    async def _withdraw(self, manifest_key: str) -> None:
        """Delete a manifest. If the store does not delete it, say who has to."""
        for pause_s in WITHDRAW_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self.place.delete([manifest_key])
            except LogError as error:
                log.warning("the manifest %s was not deleted: %s", manifest_key, error)
            else:
                return
        log.error(
            "delete %s in %s: its backup may lack objects, because its hold ended early",
            manifest_key,
            self.place.url,
        )

    def _check_cluster(self, cluster_id: str) -> None:
        """Raise InvalidRequest if the place has backups of another cluster, `cluster_id`.

        A restored cluster is another one: its entry 9 may differ from the old cluster's entry 9.
        """
        own = self.cluster.wal.cluster.cluster_id
        if cluster_id != own:
            raise InvalidRequest(
                f"{self.place.url} has backups of cluster {cluster_id}, this is cluster {own}: "
                "use a place of its own for each cluster, also for a restored one"
            )

    async def _load_tables(self) -> dict[str, ManifestVersion]:
        """Return the newest version of each table, by topic id. Leave out damaged tables."""
        versions: dict[str, ManifestVersion] = {}
        for topic in list(self.cluster.state.topics.values()):
            if is_sealed(topic):
                with contextlib.suppress(Corrupt):
                    table = open_table(self.cluster.store, topic.prefix, topic.name)
                    versions[topic.topic_id] = await table.newest()
        return versions

    # -- the WAL

    async def _wal(
        self,
        base: ClusterState | None,
        state: ClusterState,
        tables: list[BackupTable],
    ) -> BackupManifest:
        """Copy the WAL after `base` up to `state`, and return the manifest.

        Raises Corrupt if the entries do not lead to this state.
        """
        cluster, store = self.cluster, self.cluster.store
        identity = cluster.wal.cluster
        applied = empty_state(identity)
        first = 0
        if base is not None:
            applied, first = base, base.seq
            key = object_keys.checkpoint(first)
            await self._take([info async for info in store.list(key)])
        named = set(live_objects(applied))
        keys = {object_keys.wal(seq) for seq in range(first + 1, state.seq + 1)}
        keys |= {key for key in named if key.startswith(object_keys.WAL)}
        infos = [info async for info in store.list(object_keys.WAL) if info.key in keys]
        if missing_keys := keys - {info.key for info in infos}:
            raise Corrupt(min(missing_keys), "is gone: it was deleted before it was copied")
        times: list[int] = []
        for batch in batches(infos):
            for info, body in zip(batch, await self._take(batch), strict=True):
                seq = object_keys.seq_of(info.key)
                if seq is None or seq <= first:
                    continue
                decoded = entries.decode(body, info.key, seq=seq, previous=applied.hash)
                applied.apply(decoded, info.key)
                named |= {chunk.data for chunk in decoded.entry.chunks if chunk.data}
                times.append(decoded.entry.time_ms)
        if not applied.equals(state):
            raise Corrupt(
                object_keys.wal(state.seq), "leads to another state than the brokers have"
            )
        data = {key for key in named if key.startswith(object_keys.DATA)}
        await self._take_all(
            [info async for info in store.list(object_keys.DATA) if info.key in data]
        )
        if missing_keys := data - self.objects.keys():
            raise Corrupt(min(missing_keys), "is gone: it was deleted before it was copied")
        return BackupManifest(
            FORM,
            identity,
            first,
            state.seq,
            state.hash,
            times[0],
            max(times),
            list(self.objects.values()),
            tables,
        )

    # -- tables

    async def _table(
        self, topic: Topic, loaded: ManifestVersion | None, since_ms: int
    ) -> BackupTable:
        """Copy the version of a table that `_version` returns.

        Copy also the files of its versions since `since_ms`, if these files still exist. A table
        that is damaged or in doubt is copied as it is.
        """
        listed = self.cluster.store.list(f"{topic.prefix}/")
        infos = [info async for info in listed]
        try:
            version = await self._version(topic, loaded)
            infos, oldest, removed = await self._log(topic.prefix, infos, version, since_ms)
            paths = {f"{topic.prefix}/{path}" for path in version.paths()}
            if missing_keys := paths - {info.key for info in infos}:
                raise Corrupt(min(missing_keys), "is gone, but the table names it")
        except Corrupt as error:
            log.error("topic %s is copied as it is: %s", topic.name, error)
            lasting = [info for info in infos if not info.key.endswith(OVERWRITTEN)]
            await self._take_all(lasting, is_optional=True)
            return BackupTable(topic.prefix, -1, -1, str(error))
        await self._take_all(info for info in infos if info.key in paths)
        older = {f"{topic.prefix}/{path}" for path in removed} - paths
        await self._take_all((info for info in infos if info.key in older), is_optional=True)
        return BackupTable(topic.prefix, version.version, oldest)

    async def _version(self, topic: Topic, loaded: ManifestVersion | None) -> ManifestVersion:
        """Return the oldest version from the loaded one on that is one of the moment M.

        It is not in doubt at M and has each seal before M. Raises Corrupt if there is none.
        """
        why = "it has no version"
        if loaded is not None:
            why = await self._fault(topic, loaded)
            if not why:
                return loaded
        table = open_table(self.cluster.store, topic.prefix, topic.name)
        newest = await table.newest()
        first = 0 if loaded is None else loaded.version + 1
        for number in range(first, newest.version + 1):
            columns = await table.files_at(number)
            if columns is not None:
                version = ManifestVersion(number, topic.prefix, columns)
                why = await self._fault(topic, version)
                if not why:
                    return version
        raise Corrupt(topic.prefix, why)

    async def _fault(self, topic: Topic, version: ManifestVersion) -> str:
        """Return why a version is not one of the moment M, or an empty text.

        The rows of a version show its seals, unless all rows below the sealed end are deleted. Then
        its transactions show them. A restored cluster without the transaction of a seal would not
        seal the partition any more.
        """
        sealed_ends = [partition.sealed_end for partition in topic.partitions]
        if why := doubt_of(version, topic.partitions, sealed_ends):
            return why
        spans = version.spans()
        unseen = {
            number: end
            for number, end in enumerate(sealed_ends)
            if end and (number not in spans or spans[number][1] < end)
        }
        if not unseen:
            return ""
        store = self.cluster.store
        result = await transactions_at(store, topic.prefix, version.version)
        if result is None:
            return ""  # another engine wrote the log: the rows must do
        transactions, _ = result
        for number, end in unseen.items():
            if (table_end := transactions.get(seal_app_id(number), 0)) < end:
                return f"partition {number} is sealed to {end}, the table only to {table_end}"
        return ""

    async def _log(
        self, prefix: str, infos: list[ObjectInfo], version: ManifestVersion, since_ms: int
    ) -> tuple[list[ObjectInfo], int, set[str]]:
        """Call `_log_of`, and return the listing too.

        If a file is gone, another engine cleaned up the log, and left a checkpoint for the deleted
        files. So list the topic again.
        """
        for _ in range(TRIES):
            try:
                return infos, *await self._log_of(infos, version, since_ms)
            except ObjectNotFound:
                infos = [info async for info in self.cluster.store.list(f"{prefix}/")]
        raise Unavailable(f"the log of {prefix} is being cleaned up: run the backup again")

    async def _log_of(
        self, infos: Sequence[ObjectInfo], version: ManifestVersion, since_ms: int
    ) -> tuple[int, set[str]]:
        """Copy the log up to the version.

        Return the version that was current at `since_ms`, or the oldest later one that the log
        still has, and the paths removed after the returned version. Raises ObjectNotFound if a file
        is gone, Corrupt if the copied log does not give the version.
        """
        commits = {
            number: info
            for info in infos
            if (number := log_version(info.key, "json")) is not None and number <= version.version
        }
        recent = [number for number, info in commits.items() if info.modified_ms >= since_ms]
        oldest = max(min([*recent, version.version + 1]) - 1, 0)
        starts = [log_version(info.key, "checkpoint.parquet") for info in infos]
        start = max(
            (number for number in starts if number is not None and number <= oldest), default=0
        )
        if start == 0 and 0 not in commits:
            able = [number for number in starts if number is not None and number <= version.version]
            start = oldest = min(able, default=0)
        log_infos = [
            info
            for info in infos
            if (number := log_version(info.key)) is not None and start <= number <= version.version
        ]
        removed: set[str] = set()
        for batch in batches(log_infos):
            for info, body in zip(batch, await self._take(batch), strict=True):
                number = log_version(info.key, "json")
                if number is not None and number > oldest:
                    try:
                        removed |= removed_of(body)
                    except msgspec.DecodeError as error:
                        raise Corrupt(info.key, f"is not a commit: {error}") from error
        copied = open_table(self.place, f"{OBJECTS}{version.prefix}", "")
        columns = await copied.files_at(version.version)
        if columns is None or (
            ManifestVersion(0, version.prefix, columns).paths() != version.paths()
        ):
            raise Corrupt(version.prefix, f"its log does not give version {version.version}")
        return oldest, removed

    # -- objects

    async def _take_all(self, infos: Iterable[ObjectInfo], *, is_optional: bool = False) -> None:
        """Copy objects.

        Do not read an object with a unique key if the previous backup and the place have it with
        the same size.
        """
        for batch in batches(list(infos)):
            await together(*(self._copied(info, is_optional=is_optional) for info in batch))

    async def _copied(self, info: ObjectInfo, *, is_optional: bool) -> None:
        backup_object = self._known.get(info.key)
        if (
            backup_object is not None
            and is_unique(info.key)
            and backup_object.size == info.size == self._there.get(info.key)
        ):
            self.objects[info.key] = backup_object
            return
        try:
            await self._one(info)
        except ObjectNotFound:
            if not is_optional:
                raise Corrupt(info.key, "is gone: it was deleted before it was copied") from None

    async def _take(self, infos: Sequence[ObjectInfo]) -> list[bytes]:
        """Copy objects, and return their bytes. Raises ObjectNotFound."""
        return await together(*map(self._one, infos))

    async def _verified(self, backup_object: BackupObject) -> None:
        await self.pace.wait(backup_object.size)
        await read_object(self.place, backup_object)

    async def _one(self, info: ObjectInfo) -> bytes:
        await self.pace.wait(info.size)
        body = await self.cluster.store.get(info.key)
        backup_object = BackupObject(info.key, len(body), crc32c(body))
        if (
            self._known.get(info.key) != backup_object
            or self._there.get(info.key) != backup_object.size
        ):
            is_new = await store_once(self.place, f"{OBJECTS}{info.key}", [body])
            self.copied_objects += is_new
            self.copied_bytes += backup_object.size * is_new
            self.on_bytes(self.copied_bytes)
        self.objects[info.key] = backup_object
        return body
