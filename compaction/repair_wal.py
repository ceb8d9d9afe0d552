"""Repair of the WAL: entries that cannot be read, strays, and damaged records of tails.

- *drop*: no reader can apply an entry after a damaged or missing entry. A drop gives up all entries
  from the damage on. The WAL continues after a checkpoint of the state before the damage. If a
  backup has the objects, restore these objects instead, because this loses nothing.
- *lost records*: a damaged chunk loses only its own records. The WAL names their offsets, and
  readers and seals pass over them.
- *strays*: objects in `wal/` that are no entries and are far beyond the chain.

A drop overwrites and deletes nothing. First it creates an empty entry at each free number, up to a
number that is higher than all others. A suspended broker may have a state from after the damage.
This broker then finds, at its next number, an entry that does not follow its newest entry, and
stops. Last, the drop writes a checkpoint at the highest number, and the WAL begins there.
**On a crash** before the checkpoint, the WAL is as damaged as before. Run the command again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.upgrade import live_brokers
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Entry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import Append, LoseRecords
from tidelog.storage.core.errors import Corrupt, InvalidRequest, ObjectNotFound, Unavailable
from tidelog.storage.core.log_settings import MembershipSettings
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.partition import TailChunk
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.wal.entry_put import EntryPut
from tidelog.storage.wal.view_age import Freshness

READS = 2
"""Number of reads of a chunk. If all of them fail, the chunk is damaged."""
READS_AT_ONCE = 16


class LostRange(NamedTuple):
    """Records [offset, end_offset) of a partition that cannot be read."""

    topic: str
    partition: int
    offset: int
    end_offset: int
    why: str


class WalDamage(NamedTuple):
    """Damage of the WAL: why the entries after `readable_to` cannot be applied.

    `lost` is an upper bound of the records that these entries contain, computed from their headers.
    `unread` are the numbers of entries whose content is not known.
    """

    readable_to: int
    newest: int
    why: str
    lost: Sequence[LostRange]
    unread: Sequence[int]


async def strays(cluster: MaintenanceSession) -> list[ObjectInfo]:
    """Return the objects in `wal/` that are no entries and are far beyond the chain."""
    infos = {
        seq: info
        async for info in cluster.store.list(object_keys.WAL)
        if (seq := object_keys.seq_of(info.key)) is not None
    }
    checkpoints = [info.key async for info in cluster.store.list(object_keys.CHECKPOINTS)]
    first = max((object_keys.seq_of(key) or 0 for key in checkpoints), default=0)
    numbers = [first, *(seq for seq in sorted(infos) if seq > first)]
    return [infos[seq] for seq in await cluster.wal.objects.strays(numbers)]


async def delete_strays(cluster: MaintenanceSession, infos: Sequence[ObjectInfo]) -> None:
    """Delete the strays. Nothing names them, because they are no entries. Raises Unavailable."""
    await cluster.store.delete([info.key for info in infos])


# -- drop


async def damage_of(cluster: MaintenanceSession) -> WalDamage | None:
    """Return where the WAL is damaged.

    If it can be read to its end, return None. Raises NewerLevel, StoreUnfit, Unavailable.
    """
    result = await _damage(cluster)
    return None if result is None else result[0]


async def drop_after(
    cluster: MaintenanceSession, number: int, settings: MembershipSettings
) -> WalDamage:
    """Give up all entries after `number`, the last entry that can be read.

    Return the damage. Raises InvalidRequest if `number` is not that last entry, or if the WAL is
    not damaged. Raises Unavailable if brokers are live by `settings`, or if an entry appears
    meanwhile.
    """
    live = await live_brokers(cluster, settings)
    if live:
        quiet_s = settings.quiet_interval_s + settings.member_timeout_s
        raise Unavailable(
            f"brokers are live: stop them first: {', '.join(live)}; one that was killed counts as "
            f"live until its object in {object_keys.BROKERS} is {quiet_s:.0f} s old, or deleted"
        )
    result = await _damage(cluster)
    if result is None:
        raise InvalidRequest("the WAL can be read to its end: there is no entry to drop")
    damage, state, numbers = result
    if number != damage.readable_to:
        raise InvalidRequest(
            f"the last entry that can be read is {damage.readable_to}, not {number}: "
            f"--drop-after {damage.readable_to}"
        )
    last = max([*numbers, *await _checkpoint_numbers(cluster)]) + 1
    previous = state.hash
    for seq in range(damage.readable_to + 1, last):
        if seq not in numbers:  # a process with a newer state could commit there
            await _take(cluster, state, seq, cluster.clock.new_id() + cluster.clock.new_id())
    state.hash = await _take(cluster, state, last, previous)
    state.seq = last
    state.producers.rebase(cluster.clock.new_id())
    await cluster.wal.objects.write_checkpoint(last, state.encode())
    try:
        await cluster.checkpoint(object_keys.checkpoint(last))
    except ObjectNotFound:
        raise Unavailable(f"{object_keys.checkpoint(last)} was not stored: run again") from None
    return damage


async def _damage(
    cluster: MaintenanceSession,
) -> tuple[WalDamage, ClusterState, frozenset[int]] | None:
    """Return the damage, the state before it, and the numbers of all entries after that state.

    If there is no damage, return None.
    """
    objects = cluster.wal.objects
    state = await objects.newest_checkpoint(cluster.wal.cluster)
    began_at = state.seq
    listed = await objects.numbers_after(state.seq)
    why = "is missing, but later entries exist"
    try:
        while True:
            decoded = await objects.read(state.seq + 1)
            if decoded.entry.previous != state.hash:
                why = "does not name the entry before it"
                break
            state.apply(decoded, object_keys.wal(decoded.entry.seq))
    except ObjectNotFound:
        pass
    except Corrupt as error:
        why = error.why
    later_seqs = [seq for seq in listed if seq > state.seq]
    beyond = await objects.strays([state.seq, *later_seqs])
    later_seqs = later_seqs[: len(later_seqs) - len(beyond)]
    if not later_seqs:
        return None
    # If a newer checkpoint exists now, collection may have deleted the entries, so look again.
    if (await objects.newest_checkpoint(cluster.wal.cluster)).seq != began_at:
        return await _damage(cluster)
    lost: dict[tuple[str, int], LostRange] = {}
    unread: list[int] = []
    for seq in later_seqs:
        try:
            entry = (await objects.read(seq)).entry
        except (Corrupt, ObjectNotFound):
            unread.append(seq)
        else:
            _count(entry, state, lost)
    why = f"object {object_keys.wal(state.seq + 1)} {why}"
    damage = WalDamage(state.seq, later_seqs[-1], why, list(lost.values()), unread)
    return damage, state, frozenset(later_seqs)


def _count(entry: Entry, state: ClusterState, lost: dict[tuple[str, int], LostRange]) -> None:
    for commit in entry.commits:
        for action in commit.actions:
            if not isinstance(action, Append) or not 0 <= action.chunk < len(entry.chunks):
                continue
            chunk = entry.chunks[action.chunk]
            topic_partition = chunk.topic_id, chunk.partition
            lost_range = lost.get(topic_partition)
            if lost_range is None:
                topic = state.topic_of_id(chunk.topic_id)
                is_known = topic is not None and chunk.partition < len(topic.partitions)
                name = topic.name if topic else f"topic id {chunk.topic_id}"
                offset = (
                    topic.partitions[chunk.partition].high_watermark if topic and is_known else 0
                )
                lost_range = LostRange(name, chunk.partition, offset, offset, "dropped")
            lost[topic_partition] = lost_range._replace(
                end_offset=lost_range.end_offset + action.count
            )


async def _checkpoint_numbers(cluster: MaintenanceSession) -> list[int]:
    seqs = [
        object_keys.seq_of(info.key) async for info in cluster.store.list(object_keys.CHECKPOINTS)
    ]
    return [seq for seq in seqs if seq is not None]


async def _take(
    cluster: MaintenanceSession, state: ClusterState, seq: int, previous: bytes
) -> bytes:
    """Create an empty entry at the number, and return the entry's hash."""
    wal, now_ms = cluster.wal, cluster.clock.now_ms()
    entry = Entry(
        level=state.level,
        seq=seq,
        previous=previous,
        entry_id=cluster.clock.new_id(),
        writer=wal.writer,
        at_ms=max(state.time_ms, now_ms) if state.level == format_levels.FIRST else now_ms,
        chunks=[],
        commits=[],
        store_ms=0 if state.level == format_levels.FIRST else cluster.store.seen_ms,
    )
    header, entry_hash = entries.encode_header(entry)
    parts = [header, *entries.copy_of(entry, header)]
    put = EntryPut(wal.objects, Freshness(cluster.store, cluster.clock), wal.settings.retry_s)
    if not await put.put(object_keys.wal(seq), parts, entry, entry_hash):
        raise Unavailable(
            f"{object_keys.wal(seq)} was created meanwhile: stop all brokers, then run again"
        )
    return entry_hash


# -- records of tails


async def lost_records(
    cluster: MaintenanceSession, names: Sequence[str] | None, *, is_dry: bool
) -> list[LostRange]:
    """Read the tails of these topics (all if None), and return the ranges that cannot be read.

    Unless `is_dry`, give these ranges up, so that readers and seals pass over them.

    Raises UnknownTopic, Unavailable; InvalidRequest if the cluster's level has no action for this.
    """
    await cluster.refresh()
    lost_ranges: list[LostRange] = []
    actions: list[LoseRecords] = []

    async def read(name: str, topic_id: str, number: int, first: int, run: TailChunk) -> None:
        if (why := await _why_unreadable(cluster, run)) is not None:
            lost_ranges.append(LostRange(name, number, first, run.end_offset, why))
            actions.append(LoseRecords(topic_id, number, first, run.end_offset))

    reads = [
        read(topic.name, topic.topic_id, number, max(run.base_offset, partition.sealed_end), run)
        for topic in topics_of(cluster.state, names)
        for number, partition in enumerate(topic.partitions)
        for run in list(partition.tail)
        if not run.is_lost
    ]
    await together(*reads, at_once=READS_AT_ONCE)
    if actions and not is_dry:
        if cluster.state.level == format_levels.FIRST:
            raise InvalidRequest(
                "giving up records needs level 2 of the format: run `tidelog upgrade` first"
            )
        await cluster.commit(actions)
    return sorted(lost_ranges)


async def _why_unreadable(cluster: MaintenanceSession, run: TailChunk) -> str | None:
    why = None
    for _ in range(READS):
        try:
            run.decode(await cluster.store.get_range(run.object_key, run.position, run.size))
        except Corrupt as error:
            why = str(error)
        except ObjectNotFound as error:
            why = str(error)
        else:
            return None
    return why
