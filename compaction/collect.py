"""Collection: list the store, find the objects that nothing can name any more, and delete them.

compaction/garbage.py has the rules. A run lists the objects of a topic before it reads the topic's
table. If the run does not know the topic, it also reads the WAL after the listing. So the run sees
a commit that named a listed object meanwhile. At its end, the run reads the WAL once more to find
holds, because nothing is garbage while a hold is in force. A backup that takes its hold later also
reads the tables and the WAL later. By then, the tables and the WAL do not name the objects of the
plan. A hold also keeps the log of a table, because tidelog cleans up this log only by collection,
not when it commits.

A run lists all of `wal/` each time. It does not start at the number up to which the last run
deleted, because a suspended process may have created an entry with a deleted number again.

**On a crash**: nothing needs repair, because the next run lists again. Deletes are in batches. The
first batch that fails ends the run, and the rest stays garbage for the next run.
"""

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from tidelog.compaction import garbage
from tidelog.compaction.garbage import Garbage, Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import ForgetTopic
from tidelog.storage.core.errors import Corrupt, LogError, ObjectNotFound
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.collection_holds import Hold
from tidelog.storage.state.topic import DeletedTopic, Topic
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables import iceberg
from tidelog.storage.tables.manifest import Removal, Table

log = logging.getLogger("tidelog.collect")

BATCH = 1000
"""Keys in one delete request; S3 accepts no more."""
OBJECTS_MAX = 1_000_000
"""Objects in one plan (I10). Each takes about 200 bytes of memory. The next run finds the rest."""
CHECKPOINTS_PER_GRACE = 4
"""A run writes a checkpoint if the newest one is at least as old as the grace divided by this
number."""


class CollectionPlan(NamedTuple):
    """The objects that a run would delete, and the deleted topics that then have no object left.

    `kept_from` is the number of the checkpoint from which the WAL is kept, 0 if there is none yet.
    `waiting` is the size of the unnamed objects whose grace has not passed, in bytes. `holds` are
    the holds in force. If there is one, the plan has no garbage.
    """

    garbage: Sequence[Garbage]
    emptied: Sequence[DeletedTopic]
    kept_from: int
    now_ms: int
    waiting: int = 0
    holds: Sequence[Hold] = ()

    @property
    def size(self) -> int:
        return sum(garbage_object.size for garbage_object in self.garbage)

    @property
    def oldest_ms(self) -> int:
        """Return the age of the oldest garbage."""
        return max(
            (self.now_ms - garbage_object.modified_ms for garbage_object in self.garbage), default=0
        )


async def plan(
    cluster: MaintenanceSession,
    grace: Grace,
    *,
    takes_unknown: bool = False,
    clean_topics: dict[str, bytes] | None = None,
) -> CollectionPlan:
    """List the whole store; return its garbage.

    Raises Unavailable; Corrupt if the WAL is damaged. If the table of a topic is damaged, in doubt
    or not readable, the plan has no garbage of this topic, and `cluster.skipped` names the topic.

    Writes a checkpoint if the newest one is old, because an entry is garbage only after a
    checkpoint covers it. `takes_unknown` adds folders of topics of which the cluster has no record.
    An upload that ended after its topic was deleted leaves such a folder. But if a cluster lost its
    WAL and was created again, all its data is in such folders, so only an operator may request
    this.

    A topic without a file that could become garbage is noted in `clean_topics`, with a hash of its
    keys. While the keys are the same, the next runs with this dict do not open its table.
    """
    # Read the time before the refresh. If a bound is raised after the refresh, this run uses the
    # old value, but deletes only objects that were garbage by the old value before the raise.
    now_ms = await cluster.store_now_ms()
    await cluster.refresh()
    grace = grace.obeying(cluster.state.bounds.now)
    search = _GarbageSearch(cluster, now_ms, grace, {} if clean_topics is None else clean_topics)
    checkpoints = [info async for info in cluster.store.list(object_keys.CHECKPOINTS)]
    base = await _base(cluster, checkpoints, search.now_ms, grace)
    await _checkpoint(cluster, checkpoints, search.now_ms, grace)
    emptied: list[DeletedTopic] = []
    if base is not None:
        await search.chain(checkpoints, base)
        emptied = [
            topic
            for topic in cluster.state.deleted
            if garbage.is_gone(topic, base, search.now_ms, grace)
        ]
    await search.topics({topic.topic_id for topic in emptied}, takes_unknown=takes_unknown)
    waiting = max(search.unnamed - sum(garbage_object.size for garbage_object in search.found), 0)
    search.take(garbage.of_probes(await _listed(cluster, object_keys.PROBE), search.now_ms, grace))
    kept_from = 0 if base is None else base.seq
    if holds := await _holds(cluster):  # after the tables were read (see the module)
        return CollectionPlan((), (), kept_from, search.now_ms, search.unnamed, holds)
    return CollectionPlan(search.found, emptied, kept_from, search.now_ms, waiting)


async def collect(
    cluster: MaintenanceSession,
    planned: CollectionPlan,
    on_progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Delete the objects of a plan.

    The plan may be of any age. Return the number of deleted objects.

    Raises Unavailable. Then the objects that `on_progress` counted are deleted, and the next run
    deletes the rest.
    """
    deleted_count = 0
    while deleted_count < len(planned.garbage):
        batch = [
            garbage_object.key
            for garbage_object in planned.garbage[deleted_count : deleted_count + BATCH]
        ]
        await cluster.store.delete(batch)
        deleted_count += len(batch)
        on_progress(deleted_count)
    forgotten = [
        ForgetTopic(topic.topic_id)
        for topic in planned.emptied
        if not await _listed(
            cluster, f"{object_keys.topic(topic.name, topic.topic_id)}/", at_most=1
        )
    ]
    await cluster.refresh()
    still = {topic.topic_id for topic in cluster.state.deleted}
    await cluster.commit([action for action in forgotten if action.topic_id in still])
    return deleted_count


async def _holds(cluster: MaintenanceSession) -> list[Hold]:
    """Return the holds in force at the WAL's end."""
    await cluster.refresh()
    return list(cluster.state.holds)


async def copied_base(cluster: MaintenanceSession) -> ClusterState | None:
    """Return the checkpoint after which a copy of the WAL begins, or None for the whole WAL.

    A collection that begins now has the same base, and keeps all entries after it. Raises
    Unavailable.

    If the WAL retention was raised, all checkpoints may be younger than the new retention, although
    earlier collections have deleted entries. Then return the second-newest checkpoint that
    verifies, because no collection has deleted entries after it. A restored cluster has only one
    checkpoint, to which no entries lead, even if it is the one after entry 1. Then return this
    checkpoint.
    """
    grace = Grace().obeying(cluster.state.bounds.now)
    checkpoints = [info async for info in cluster.store.list(object_keys.CHECKPOINTS)]
    now_ms = await cluster.store_now_ms()
    base = await _base(cluster, checkpoints, now_ms, grace)
    is_begun_by_restore = any(object_keys.seq_of(info.key) == 1 for info in checkpoints)
    if base is not None or (not is_begun_by_restore and await _is_whole(cluster)):
        return base
    if (base := await _base(cluster, checkpoints, now_ms, Grace())) is not None:
        return base
    for info in reversed(checkpoints):
        with contextlib.suppress(ObjectNotFound, Corrupt):
            return await cluster.checkpoint(info.key)
    return None


async def _is_whole(cluster: MaintenanceSession) -> bool:
    """Return whether the store has all entries of the WAL, from the first on."""
    listed = await _listed(cluster, object_keys.WAL)
    numbers = {object_keys.seq_of(info.key) for info in listed}
    return all(seq in numbers for seq in range(1, cluster.state.seq + 1))


async def _base(
    cluster: MaintenanceSession, checkpoints: Sequence[ObjectInfo], now_ms: int, grace: Grace
) -> ClusterState | None:
    """Return the newest checkpoint that verifies and is as old as the grace, or None.

    A newer checkpoint must verify, too.
    """
    is_newer_verified = False
    for info in reversed(checkpoints):
        if object_keys.seq_of(info.key) is None:
            continue
        if is_newer_verified and now_ms - info.modified_ms < grace.wal_ms:
            continue  # too young to be the base
        try:
            state = await cluster.checkpoint(info.key)
        except ObjectNotFound:
            continue
        except Corrupt as error:
            log.error("%s: checkpoint ignored", error)
            continue
        if is_newer_verified:
            return state
        is_newer_verified = True
    return None


async def _checkpoint(
    cluster: MaintenanceSession, checkpoints: Sequence[ObjectInfo], now_ms: int, grace: Grace
) -> None:
    checkpoint_times = [
        (seq, info.modified_ms)
        for info in checkpoints
        if (seq := object_keys.seq_of(info.key)) is not None
    ]
    seq, modified_ms = max(checkpoint_times, default=(0, 0))
    if cluster.state.seq > seq and now_ms - modified_ms >= grace.wal_ms // CHECKPOINTS_PER_GRACE:
        # The outcome does not matter: a later run checks whether the checkpoint can be read.
        await cluster.wal.checkpoint()


class _GarbageSearch:
    """The garbage that a run has found so far."""

    def __init__(
        self,
        cluster: MaintenanceSession,
        now_ms: int,
        grace: Grace,
        clean_topics: dict[str, bytes],
    ) -> None:
        self.now_ms = now_ms
        self._clean_topics = clean_topics
        self.found: list[Garbage] = []
        self.unnamed = 0  # bytes of the objects that nothing names, of any age
        self._cluster = cluster
        self._grace = grace

    def take(self, garbage_objects: Iterable[Garbage], unnamed: Iterable[ObjectInfo] = ()) -> None:
        self.found += islice(garbage_objects, OBJECTS_MAX - len(self.found))
        self.unnamed += sum(info.size for info in unnamed)

    async def chain(self, checkpoints: Sequence[ObjectInfo], base: ClusterState) -> None:
        """Search `wal/`, `data/` and `checkpoints/`."""
        wal = await _listed(self._cluster, object_keys.WAL)
        data = await _listed(self._cluster, object_keys.DATA)
        named = garbage.live_objects(self._cluster.state)
        live = garbage.live_objects(base) | named
        rules = (self.now_ms, self._grace)
        unnamed = [info for info in [*wal[:-1], *data] if info.key not in named]
        unnamed += [info for info in checkpoints if (object_keys.seq_of(info.key) or 0) < base.seq]
        self.take(garbage.of_wal(wal, base, live, *rules), unnamed)
        self.take(garbage.of_data(data, base, live, *rules))
        self.take(garbage.of_checkpoints(checkpoints, base, *rules))

    async def topics(self, deleted_topic_ids: set[str], *, takes_unknown: bool) -> None:
        """Search the folders of topics.

        `deleted_topic_ids` are the ids of deleted topics whose objects are garbage.
        """
        cluster = self._cluster
        for topic_id in list(self._clean_topics):
            if cluster.state.topic_of_id(topic_id) is None:
                del self._clean_topics[topic_id]
        async for topic_id, infos in _by_topic(cluster.store.list(object_keys.TOPICS)):
            topic = cluster.state.topic_of_id(topic_id)
            if topic is None and not _is_deleted(cluster, topic_id):
                # The topic may be new since the last refresh. A topic is committed before its first
                # object is created, so a refresh now finds it.
                await cluster.refresh()
                topic = cluster.state.topic_of_id(topic_id)
            if topic is not None:
                await self._table(topic, infos)
            elif topic_id in deleted_topic_ids:
                self.take(garbage.of_topic(infos), infos)
            elif _is_deleted(cluster, topic_id):
                self.take((), infos)
            elif takes_unknown:
                self.take(garbage.of_unknown(infos, self.now_ms, self._grace), infos)

    async def _table(self, topic: Topic, infos: Sequence[ObjectInfo]) -> None:
        """Take as garbage the files that no version younger than the grace names, nor the newest.

        A table in doubt is not reliable, so no file of its topic is garbage.
        """
        if self._is_clean(topic, infos):
            return
        removals: list[Removal] = []
        logs: list[Garbage] = []
        try:
            table = await self._cluster.checked_table(topic)
            named = await table.paths()
            unnamed = list(garbage.unnamed(infos, topic.prefix, named))
            if any(self.now_ms - info.modified_ms >= self._grace.table_ms for info in unnamed):
                # Read the removals only if needed, because this reads every commit of a day or
                # more.
                removals = await table.removed_since(self.now_ms - self._grace.unnamed_ms + 1)
            logs = await self._log(table, infos)
            logs += await self._iceberg(topic, infos)
        except LogError as error:
            self._cluster.skip(topic, error)
            return
        if not unnamed and not logs:
            self._clean_topics[topic.topic_id] = _hash_of_keys(infos)
        self.take(
            garbage.of_table(infos, topic.prefix, named, removals, self.now_ms, self._grace),
            unnamed,
        )
        self.take(
            logs,
            [
                ObjectInfo(garbage_object.key, garbage_object.size, garbage_object.modified_ms)
                for garbage_object in logs
            ],
        )

    def _is_clean(self, topic: Topic, infos: Sequence[ObjectInfo]) -> bool:
        """Return whether the topic has the objects that had no garbage, and its log has none now.

        A segment becomes garbage only by a commit, and a commit is an object more.
        """
        if self._clean_topics.pop(topic.topic_id, None) != (keys := _hash_of_keys(infos)):
            return False
        _, log_garbage = garbage.of_log(infos, self.now_ms, garbage.LOG_RETENTION_MS)
        old_manifests = garbage.of_iceberg(infos, topic.prefix, (), self.now_ms)
        is_clean = not log_garbage and next(old_manifests, None) is None
        if is_clean:
            self._clean_topics[topic.topic_id] = keys
        return is_clean

    async def _iceberg(self, topic: Topic, infos: Sequence[ObjectInfo]) -> list[Garbage]:
        """Return the garbage among a topic's objects of Iceberg.

        If the newest manifest list cannot be read, return no garbage.
        """
        rules = infos, topic.prefix
        if next(garbage.of_iceberg(*rules, (), self.now_ms), None) is None:
            return []
        named: set[str] = set()
        try:
            for key in garbage.iceberg_lists_to_obey(*rules, self.now_ms):
                history, _ = iceberg.history_of(await self._cluster.store.get(key), key)
                named |= iceberg.named_objects(history)
        except (ObjectNotFound, Corrupt) as error:
            log.warning("topic %s: its old Iceberg snapshots stay: %s", topic.name, error)
            return []
        return list(garbage.of_iceberg(*rules, named, self.now_ms))

    async def _log(self, table: Table, infos: Sequence[ObjectInfo]) -> list[Garbage]:
        """Return the garbage of a table's log.

        If the log's retention cannot be parsed, or the checkpoint that replaces the garbage cannot
        be read, return no garbage.
        """
        base, log_garbage = garbage.of_log(infos, self.now_ms, garbage.LOG_RETENTION_MS)
        if not log_garbage:
            return []
        kept_ms = await table.log_retention_ms()
        if kept_ms is None:
            return []
        if kept_ms > garbage.LOG_RETENTION_MS:
            base, log_garbage = garbage.of_log(infos, self.now_ms, kept_ms)
        return log_garbage if log_garbage and await table.files_at(base) is not None else []


def _hash_of_keys(infos: Sequence[ObjectInfo]) -> bytes:
    keys = hashlib.blake2b(digest_size=16)
    for info in infos:
        keys.update(f"{info.key}\n".encode())
    return keys.digest()


def _is_deleted(cluster: MaintenanceSession, topic_id: str) -> bool:
    return any(topic.topic_id == topic_id for topic in cluster.state.deleted)


async def _by_topic(
    listing: AsyncIterator[ObjectInfo],
) -> AsyncIterator[tuple[str, list[ObjectInfo]]]:
    """Yield the topic id and the objects of each topic's folder; skip all other objects."""
    folder: tuple[str, str] | None = None
    infos: list[ObjectInfo] = []
    async for info in listing:
        of = garbage.topic_of(info.key)
        if of != folder:
            if folder is not None:
                yield folder[1], infos
            folder, infos = of, []
        if of is not None:
            infos.append(info)
    if folder is not None:
        yield folder[1], infos


async def _listed(
    cluster: MaintenanceSession, prefix: str, *, at_most: int | None = None
) -> list[ObjectInfo]:
    infos: list[ObjectInfo] = []
    async for info in cluster.store.list(prefix):
        infos.append(info)
        if at_most is not None and len(infos) >= at_most:
            break
    return infos
