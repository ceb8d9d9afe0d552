"""What may be deleted for good: listings and states in, garbage out. Pure.

Nothing here asks who left an object, only whether anything can still name it (I9). Age is the
store's clock, on both sides. Each kind is recorded as garbage by something durable before the
grace begins, and deleted by a later run than the one that made it garbage:

- entries and `data/`: a checkpoint, whose tails do not name their chunks any more (FORMAT rule 7)
- files of a table: the commit that removed them; for a file that no version ever named, its age
- all of a topic: its tombstone

`base` is the checkpoint from which on everything is kept: a verified one that is not the newest, as
old as the grace at least. What its tails do not name has not been named since.

What is garbage stays garbage, so it does not matter how old a plan is when it is carried out, nor
how many carry it out at once.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from storage import keys
from storage.objectstore import ObjectInfo
from storage.state import ClusterState, DeletedTopic

TOPIC_ID_CHARS = 32
MANIFEST = "_delta_log/"


class Grace(NamedTuple):
    """How long objects are kept after nothing names them any more; milliseconds."""

    wal_ms: int = 3_600_000
    """For entries, `data/` and checkpoints: several times `wal.view.max.age` (DESIGN 5)."""
    table_ms: int = 86_400_000
    """For files of tables: longer than the longest job that reads them, and than any upload takes
    from its beginning to its commit. Less than the seven days for which Delta's log is kept."""


class Garbage(NamedTuple):
    """One object to delete, and why."""

    key: str
    why: str
    size: int
    modified_ms: int


def live_objects(state: ClusterState) -> frozenset[str]:
    """The objects in which tails lie."""
    return frozenset(
        run.object_key for _, _, partition in state.partitions() for run in partition.tail
    )


def of_wal(
    infos: Iterable[ObjectInfo],
    base: ClusterState,
    live: Collection[str],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Entries that the base covers; also such as a sleeper made anew at a number that was collected
    before. The newest that is listed is none, whatever it is: a loader finds the end by it."""
    before: ObjectInfo | None = None
    for info in infos:
        if before is not None:
            yield from _entry(before, base, live, now_ms, grace)
        before = info


def _entry(
    info: ObjectInfo, base: ClusterState, live: Collection[str], now_ms: int, grace: Grace
) -> Iterator[Garbage]:
    seq = keys.seq_of(info.key)
    is_covered = seq is not None and seq <= base.seq
    if is_covered and info.key not in live and _is_old(info, now_ms, grace.wal_ms):
        yield _garbage(info, "sealed")


def of_checkpoints(
    infos: Iterable[ObjectInfo], base: ClusterState, now_ms: int, grace: Grace
) -> Iterator[Garbage]:
    """Those before the base."""
    for info in infos:
        seq = keys.seq_of(info.key)
        if seq is not None and seq < base.seq and _is_old(info, now_ms, grace.wal_ms):
            yield _garbage(info, "superseded")


def of_data(
    infos: Iterable[ObjectInfo],
    base: ClusterState,
    live: Collection[str],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Flushes that no tail names, and whose time was over in the base: the entry which names them,
    if there ever was one, is covered by it, and a PUT that is still on its way has lost its number.
    """
    for info in infos:
        end_ms = keys.data_not_after_ms(info.key)
        is_over = end_ms is not None and end_ms < base.time_ms
        if is_over and info.key not in live and _is_old(info, now_ms, grace.wal_ms):
            yield _garbage(info, "sealed or never committed")


def of_table(
    infos: Iterable[ObjectInfo],
    prefix: str,
    named: Collection[str],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Files of a topic that lives which no version younger than the grace names. `infos` were
    listed before `named` was read. Other people's files are left alone."""
    for info in unnamed(infos, prefix, named):
        if _is_old(info, now_ms, grace.table_ms):
            yield _garbage(info, "no version names it")


def unnamed(
    infos: Iterable[ObjectInfo], prefix: str, named: Collection[str]
) -> Iterator[ObjectInfo]:
    """Segments below a topic's prefix that are none of these, however young."""
    for info in infos:
        path = info.key.removeprefix(f"{prefix}/")
        if keys.parse_segment(path) is not None and path not in named:
            yield info


def is_gone(topic: DeletedTopic, base: ClusterState, now_ms: int, grace: Grace) -> bool:
    """Whether a deleted topic has been deleted for so long that nobody reads it any more."""
    is_recorded = any(gone.topic_id == topic.topic_id for gone in base.deleted)
    return is_recorded and now_ms - topic.deleted_ms >= grace.table_ms


def of_topic(infos: Iterable[ObjectInfo]) -> Iterator[Garbage]:
    """Everything of a topic that is gone."""
    for info in infos:
        yield _garbage(info, "topic deleted")


def of_unknown(infos: Iterable[ObjectInfo], now_ms: int, grace: Grace) -> Iterator[Garbage]:
    """What was uploaded for a topic after nothing of it was left."""
    for info in infos:
        if _is_old(info, now_ms, grace.table_ms):
            yield _garbage(info, "topic forgotten")


def of_probes(infos: Iterable[ObjectInfo], now_ms: int, grace: Grace) -> Iterator[Garbage]:
    """What brokers that died while they tried the store left there."""
    for info in infos:
        if _is_old(info, now_ms, grace.table_ms):
            yield _garbage(info, "left by a probe")


def topic_of(key: str) -> tuple[str, str] | None:
    """Prefix and topic id that a key below `topics/` belongs to; None when it is none of ours."""
    folder, slash, _ = key.removeprefix(keys.TOPICS).partition("/")
    name, dash, topic_id = folder.rpartition("-")
    is_id = len(topic_id) == TOPIC_ID_CHARS and not set(topic_id) - set("0123456789abcdef")
    if not (slash and dash and is_id and keys.is_topic_name(name)):
        return None
    return f"{keys.TOPICS}{folder}", topic_id


def _is_old(info: ObjectInfo, now_ms: int, age_ms: int) -> bool:
    return now_ms - info.modified_ms >= age_ms


def _garbage(info: ObjectInfo, why: str) -> Garbage:
    return Garbage(info.key, why, info.size, info.modified_ms)
