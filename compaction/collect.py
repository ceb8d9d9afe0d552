"""Collection: what nothing can name any more is found by listing, and deleted.

The rules are in compaction/garbage.py; here they get their listings, in the order that makes them
true: a table or the WAL is read after the listing that it judges, so that whatever was listed and
is committed meanwhile is seen to be named. Found by listing and not by counting, because a sleeper
may have made a number of the WAL again after it was collected.

And if we die anywhere? Nothing needs to be finished: the next run lists again. Deleting is in
batches; one that fails ends the run, and what it did not delete is garbage still (house rule 9).
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from compaction import garbage
from compaction.cluster import Cluster
from compaction.garbage import Garbage, Grace
from storage import keys
from storage.entry import ForgetTopic
from storage.errors import Corrupt, NotFound
from storage.objectstore import ObjectInfo
from storage.state import ClusterState, DeletedTopic, Topic

log = logging.getLogger("tidelog.collect")

BATCH = 1000
"""Keys of one delete; S3 takes no more."""
OBJECTS_MAX = 1_000_000
"""Of one run (I10): ~200 bytes of memory each. What is beyond is found by the next."""
CHECKPOINTS_PER_GRACE = 4
"""A run leaves a checkpoint unless there is a younger one: later runs stand on them."""


class Plan(NamedTuple):
    """What a run would delete, and the tombstones of which nothing would be left.

    `kept_from` is the checkpoint that history is kept back to, 0 when there is none yet. `waiting`
    are the bytes of what nothing names any more either, but not for long enough.
    """

    garbage: Sequence[Garbage]
    emptied: Sequence[DeletedTopic]
    kept_from: int
    now_ms: int
    waiting: int = 0

    @property
    def size(self) -> int:
        return sum(each.size for each in self.garbage)

    @property
    def oldest_ms(self) -> int:
        """Age of the oldest garbage."""
        return max((self.now_ms - each.modified_ms for each in self.garbage), default=0)


async def plan(cluster: Cluster, grace: Grace, *, takes_unknown: bool = False) -> Plan:
    """Look at everything in the store. Writes one checkpoint where the newest is old, because what
    is not recorded as garbage never becomes any. Raises Unavailable, Corrupt.

    `takes_unknown`: also folders of topics of which the cluster has no record. Uploads that came
    after a topic's end are such; but so is all that was saved of a cluster that lost its WAL and
    was founded anew, so that nobody takes them unless a person says so.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    found: list[Garbage] = []
    unnamed = 0
    checkpoints = [info async for info in cluster.store.list(keys.CHECKPOINTS)]
    base = await _base(cluster, checkpoints, now_ms, grace)
    await _checkpoint(cluster, checkpoints, now_ms, grace)
    emptied: list[DeletedTopic] = []
    if base is not None:
        live = garbage.live_objects(base)
        wal = await _listed(cluster, keys.WAL)
        data = await _listed(cluster, keys.DATA)
        named = garbage.live_objects(cluster.state)
        unnamed += _size(info for info in [*wal[:-1], *data] if info.key not in named)
        unnamed += _size(info for info in checkpoints if (keys.seq_of(info.key) or 0) < base.seq)
        live |= named
        _take(found, garbage.of_wal(wal, base, live, now_ms, grace))
        _take(found, garbage.of_data(data, base, live, now_ms, grace))
        _take(found, garbage.of_checkpoints(checkpoints, base, now_ms, grace))
        emptied = [
            gone for gone in cluster.state.deleted if garbage.is_gone(gone, base, now_ms, grace)
        ]
    gone_ids = {gone.topic_id for gone in emptied}
    async for some, size in _of_topics(
        cluster, gone_ids, now_ms, grace, takes_unknown=takes_unknown
    ):
        _take(found, some)
        unnamed += size
    waiting = max(unnamed - sum(each.size for each in found), 0)
    _take(found, garbage.of_probes(await _listed(cluster, keys.PROBE), now_ms, grace))
    return Plan(found, emptied, 0 if base is None else base.seq, now_ms, waiting)


async def collect(
    cluster: Cluster, planned: Plan, on_progress: Callable[[int], None] = lambda _: None
) -> int:
    """Delete what was planned, however long ago; returns the number of objects.

    Raises Unavailable: what was reported to `on_progress` is deleted, the rest is for the next run.
    """
    done = 0
    while done < len(planned.garbage):
        batch = [each.key for each in planned.garbage[done : done + BATCH]]
        await cluster.store.delete(batch)
        done += len(batch)
        on_progress(done)
    forgotten = [
        ForgetTopic(gone.topic_id)
        for gone in planned.emptied
        if not await _listed(cluster, f"{keys.topic(gone.name, gone.topic_id)}/", at_most=1)
    ]
    await cluster.refresh()
    still = {gone.topic_id for gone in cluster.state.deleted}
    await cluster.commit([each for each in forgotten if each.topic_id in still])
    return done


async def _base(
    cluster: Cluster, checkpoints: Sequence[ObjectInfo], now_ms: int, grace: Grace
) -> ClusterState | None:
    """The newest verified checkpoint, but the very newest, that is as old as the grace."""
    verified = 0
    for info in reversed(checkpoints):
        if keys.seq_of(info.key) is None:
            continue
        if verified and now_ms - info.modified_ms < grace.wal_ms:
            continue  # young ones need not be read: one verified above is enough
        try:
            state = await cluster.checkpoint(info.key)
        except NotFound:
            continue
        except Corrupt as error:
            log.error("%s: it does not count", error)
            continue
        if verified and now_ms - info.modified_ms >= grace.wal_ms:
            return state
        verified += 1
    return None


async def _checkpoint(
    cluster: Cluster, checkpoints: Sequence[ObjectInfo], now_ms: int, grace: Grace
) -> None:
    known = [
        (seq, info.modified_ms)
        for info in checkpoints
        if (seq := keys.seq_of(info.key)) is not None
    ]
    seq, modified_ms = max(known, default=(0, 0))
    if cluster.state.seq > seq and now_ms - modified_ms >= grace.wal_ms // CHECKPOINTS_PER_GRACE:
        await cluster.wal.checkpoint()  # whatever the outcome: it counts once it can be read


async def _of_topics(
    cluster: Cluster, gone: set[str], now_ms: int, grace: Grace, *, takes_unknown: bool
) -> AsyncIterator[tuple[Iterator[Garbage], int]]:
    """Topic by topic, as they are listed; and the bytes of all that nothing names."""
    async for topic_id, infos in _by_topic(cluster.store.list(keys.TOPICS)):
        topic = cluster.state.topic_of_id(topic_id)
        if topic is None and not _is_deleted(cluster, topic_id):
            # It may have been made since we looked; what exists was committed before.
            await cluster.refresh()
            topic = cluster.state.topic_of_id(topic_id)
        if topic is not None:
            yield await _of_table(cluster, topic, infos, now_ms, grace)
        elif topic_id in gone:
            yield garbage.of_topic(infos), _size(infos)
        elif _is_deleted(cluster, topic_id):
            yield iter(()), _size(infos)
        elif takes_unknown:
            yield garbage.of_unknown(infos, now_ms, grace), _size(infos)


def _is_deleted(cluster: Cluster, topic_id: str) -> bool:
    return any(gone.topic_id == topic_id for gone in cluster.state.deleted)


async def _of_table(
    cluster: Cluster, topic: Topic, infos: Sequence[ObjectInfo], now_ms: int, grace: Grace
) -> tuple[Iterator[Garbage], int]:
    """What neither the newest version names nor one younger than the grace."""
    table = await cluster.table(topic)
    named = await table.paths()
    unnamed = _size(garbage.unnamed(infos, topic.prefix, named))
    if any(garbage.of_table(infos, topic.prefix, named, now_ms, grace)):
        # Asked only now: it reads every commit of a day.
        named |= await table.removed_since(now_ms - grace.table_ms + 1)
    return garbage.of_table(infos, topic.prefix, named, now_ms, grace), unnamed


async def _by_topic(
    listing: AsyncIterator[ObjectInfo],
) -> AsyncIterator[tuple[str, list[ObjectInfo]]]:
    """Topic id and objects of each topic's folder; what is in none is passed over."""
    held: tuple[str, str] | None = None
    infos: list[ObjectInfo] = []
    async for info in listing:
        of = garbage.topic_of(info.key)
        if of != held:
            if held is not None:
                yield held[1], infos
            held, infos = of, []
        if of is not None:
            infos.append(info)
    if held is not None:
        yield held[1], infos


async def _listed(cluster: Cluster, prefix: str, *, at_most: int | None = None) -> list[ObjectInfo]:
    found: list[ObjectInfo] = []
    async for info in cluster.store.list(prefix):
        found.append(info)
        if at_most is not None and len(found) >= at_most:
            break
    return found


def _size(infos: Iterable[ObjectInfo]) -> int:
    return sum(info.size for info in infos)


def _take(found: list[Garbage], more: Iterable[Garbage]) -> None:
    for each in more:
        if len(found) >= OBJECTS_MAX:
            return
        found.append(each)
