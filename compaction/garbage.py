"""Rules of what may be deleted: listings and states in, garbage out. Pure.

The only question is whether anything can still name an object (I9). All ages are by the store's
clock. First a durable record says that nothing names the object; then its grace begins; a run
after the grace deletes it. The record is

- for entries and `data/`: a checkpoint whose tails no longer name their chunks (FORMAT rule 7)
- for the log of a table: a later checkpoint of that log (`of_log`)
- for files of a table: the commit that removed them. If no version ever named a file, its grace
  begins when the file is created, and no setting makes this grace shorter than `UNNAMED_MS_MIN`
- for manifests of Iceberg: a manifest list of a later version that does not name them
- for all objects of a deleted topic: the topic's record in `ClusterState.deleted`

`base` is the newest checkpoint that verifies, is at least as old as the grace, and has a newer one
that verifies. Everything after the base is kept. If the tails of the base do not name an object
that is older than the base, nothing after the base names this object either.

Garbage stays garbage, so any process may delete the objects of a plan at any later time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.storage.core import object_keys
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.topic import DeletedTopic
from tidelog.storage.state.topic_checks import is_topic_name
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables import iceberg
from tidelog.storage.tables.iceberg_tail import is_tail_object
from tidelog.storage.tables.manifest import Removal

TOPIC_ID_CHARS = 32
MANIFEST = "_delta_log/"
UNNAMED_MS_MIN = 86_400_000
"""Least time for which a file stays that no version has named (FORMAT rule 8). A process that
uploads a file commits it within a fourth of this time. All processes rely on this bound, so it is
not a setting."""


LOG_RETENTION_MS = 7 * 86_400_000
"""Least time for which a version can be loaded from the log of a table after a newer version
replaced that version. It is longer than any file grace, because collection finds in the log which
files were removed, and when."""


class Grace(NamedTuple):
    """Milliseconds for which objects stay after the record that nothing names them.

    A process may choose longer times than the cluster's bounds (see `obeying`).
    """

    wal_ms: int = 0
    """For entries, `data/` and checkpoints: several times the view age (DESIGN 5)."""
    table_ms: int = 0
    """For files that a commit removed from a table. It must be longer than the longest job that
    reads the files, and shorter than LOG_RETENTION_MS."""

    def obeying(self, bounds: Bounds) -> "Grace":
        """Return this grace, lengthened where it is shorter than the bounds of the cluster."""
        return Grace(
            max(self.wal_ms, bounds.wal_retention_ms), max(self.table_ms, bounds.file_grace_ms)
        )

    @property
    def unnamed_ms(self) -> int:
        """Return the grace of files that no version has named.

        A commit may still name such a file.
        """
        return max(self.table_ms, UNNAMED_MS_MIN)


class Garbage(NamedTuple):
    """One object to delete, and the reason."""

    key: str
    why: str
    size: int
    modified_ms: int


def live_objects(state: ClusterState) -> frozenset[str]:
    """Return the objects that contain chunks of tails."""
    return frozenset(
        run.object_key
        for _, _, partition in state.partitions()
        for run in partition.tail
        if not run.is_lost
    )


def of_wal(
    infos: Sequence[ObjectInfo],
    base: ClusterState,
    live: Collection[str],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Find entries that the base covers, also those that a suspended process wrote again.

    It did so after collection. The newest listed entry is never garbage, because a process that
    loads the WAL finds the end of the WAL by this entry.
    """
    covered = (info for info in _up_to(base.seq, infos[:-1]) if info.key not in live)
    return _old(covered, "sealed", now_ms, grace.wal_ms)


def of_checkpoints(
    infos: Sequence[ObjectInfo], base: ClusterState, now_ms: int, grace: Grace
) -> Iterator[Garbage]:
    """Find checkpoints before the base."""
    return _old(_up_to(base.seq - 1, infos), "superseded", now_ms, grace.wal_ms)


def of_data(
    infos: Iterable[ObjectInfo],
    base: ClusterState,
    live: Collection[str],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Find flushed objects that no tail names, whose keys have times before the base's time.

    The base's time is elapsed time. The base covers each entry that may be the first to name such
    an object (FORMAT rule 8). If the PUT of such an entry is still under way, this PUT fails,
    because another entry has the number.
    """

    def is_over(info: ObjectInfo) -> bool:
        not_after_ms = object_keys.data_not_after_ms(info.key)
        return not_after_ms is not None and not_after_ms < base.elapsed_ms

    over = (info for info in infos if is_over(info) and info.key not in live)
    return _old(over, "sealed or never committed", now_ms, grace.wal_ms)


def of_table(
    infos: Sequence[ObjectInfo],
    prefix: str,
    named: Collection[str],
    removals: Iterable[Removal],
    now_ms: int,
    grace: Grace,
) -> Iterator[Garbage]:
    """Find files of an existing topic that no version younger than the grace names.

    `infos` must be listed before `named` is read; `removals` are the commits of the last
    `unnamed_ms` that removed files. Foreign files stay.

    A file is garbage `table_ms` after a commit removed it, if no later commit can name it again. A
    rewrite that took too long names its inputs again if collection deleted its output before the
    commit. If the output is listed and younger than `UNNAMED_MS_MIN`, no collection deleted it, so
    the removal is final.
    """
    modified_ms = {info.key.removeprefix(f"{prefix}/"): info.modified_ms for info in infos}

    def is_final(removal: Removal) -> bool:
        ages = (now_ms - modified_ms.get(path, 0) for path in removal.added)
        return all(age < UNNAMED_MS_MIN for age in ages)

    kept_paths: set[str] = set()
    freed: set[str] = set()
    for removal in removals:
        is_over = now_ms - removal.at_ms >= grace.table_ms and is_final(removal)
        (freed if is_over else kept_paths).update(removal.removed)
    for info in unnamed(infos, prefix, named):
        path = info.key.removeprefix(f"{prefix}/")
        is_free = path in freed or _is_old(info, now_ms, grace.unnamed_ms)
        if is_free and path not in kept_paths:
            yield _garbage(info, "no version names it")


def unnamed(
    infos: Iterable[ObjectInfo], prefix: str, named: Collection[str]
) -> Iterator[ObjectInfo]:
    """Find segments of any age under a topic's prefix that are not in `named`."""
    for info in infos:
        path = info.key.removeprefix(f"{prefix}/")
        if object_keys.parse_segment(path) is not None and path not in named:
            yield info


def iceberg_lists_to_obey(infos: Sequence[ObjectInfo], prefix: str, now_ms: int) -> list[str]:
    """Return the keys of the manifest lists whose history is needed.

    They are those of the newest version that has one, and of the newest version whose list is old
    enough for collection: a client may have loaded what only this one names until lately.
    """
    objects = _iceberg_objects(infos, prefix)
    lists = {info.key: name.version for info, name in objects if name.is_list}
    needed = max(lists.values(), default=-1), _obeyed_version(objects, now_ms)
    return [key for key, version in lists.items() if version in needed]


def of_iceberg(
    infos: Sequence[ObjectInfo], prefix: str, named: Collection[str], now_ms: int
) -> Iterator[Garbage]:
    """Find objects of Iceberg that the newest snapshots of a topic do not need.

    `named` are the names of the objects that the manifest lists to obey name. An object of the
    version that has been listed for UNNAMED_MS_MIN, or of a later one, stays: a client may have
    loaded it lately, or a snapshot that names it may be on its way. Objects of a tail have half a
    day after the last load that names them.
    """
    folder = iceberg.folder(prefix)
    objects = _iceberg_objects(infos, prefix)
    obeyed = _obeyed_version(objects, now_ms)
    for info, name in objects:
        is_needed = name.version >= obeyed or info.key.removeprefix(folder) in named
        if not is_needed and _is_old(info, now_ms, UNNAMED_MS_MIN):
            yield _garbage(info, "no recent Iceberg snapshot names it")
    for info in infos:
        is_of_tail = is_tail_object(info.key.removeprefix(f"{prefix}/"))
        if is_of_tail and _is_old(info, now_ms, UNNAMED_MS_MIN):
            yield _garbage(info, "the Iceberg snapshot of a tail, a day later")


_IcebergObject = tuple[ObjectInfo, iceberg.ObjectName]


def _obeyed_version(objects: Iterable[_IcebergObject], now_ms: int) -> int:
    """Return the newest version with a manifest list of UNNAMED_MS_MIN or older; -1 if none."""
    return max(
        (
            name.version
            for info, name in objects
            if name.is_list and _is_old(info, now_ms, UNNAMED_MS_MIN)
        ),
        default=-1,
    )


def _iceberg_objects(infos: Iterable[ObjectInfo], prefix: str) -> list[_IcebergObject]:
    """Return the objects of snapshots without a tail, with their parsed names."""
    folder = iceberg.folder(prefix)
    parsed = (
        (info, iceberg.parse_name(info.key.removeprefix(folder)))
        for info in infos
        if info.key.startswith(folder)
    )
    return [(info, name) for info, name in parsed if name is not None]


def of_log(
    infos: Sequence[ObjectInfo], now_ms: int, retention_ms: int
) -> tuple[int, list[Garbage]]:
    """Return the checkpoint that begins the kept part of a table's log, and the garbage before.

    The garbage is commits and checkpoints before this version. Each version that was the newest at
    some time within the retention can be loaded from the kept part. The caller must check that the
    checkpoint can be read. Other files of the log stay.
    """
    ages = {
        number: now_ms - info.modified_ms
        for info in infos
        if (number := object_keys.log_version(info.key, "json")) is not None
    }
    young_versions = [number for number, age_ms in ages.items() if age_ms < retention_ms]
    # The version before the oldest young commit was the newest version `retention_ms` ago.
    needed = min(young_versions) - 1 if young_versions else max(ages, default=-1)
    checkpoints = [object_keys.log_version(info.key, "checkpoint.parquet") for info in infos]
    base = max(
        (number for number in checkpoints if number is not None and number <= needed), default=-1
    )
    replaced = [
        info
        for info in infos
        if (version := object_keys.log_version(info.key)) is not None and version < base
    ]
    return base, list(_old(replaced, "a checkpoint replaces it", now_ms, retention_ms))


def is_gone(topic: DeletedTopic, base: ClusterState, now_ms: int, grace: Grace) -> bool:
    """Return whether the base records that the topic is deleted, and its grace has passed."""
    is_recorded = any(deleted_topic.topic_id == topic.topic_id for deleted_topic in base.deleted)
    return is_recorded and now_ms - topic.deleted_ms >= grace.table_ms


def of_topic(infos: Iterable[ObjectInfo]) -> Iterator[Garbage]:
    """Return all objects of a deleted topic."""
    for info in infos:
        yield _garbage(info, "topic deleted")


def of_unknown(infos: Iterable[ObjectInfo], now_ms: int, grace: Grace) -> Iterator[Garbage]:
    """Find objects that were uploaded for a topic after `ForgetTopic` removed its record."""
    return _old(infos, "topic forgotten", now_ms, grace.unnamed_ms)


def of_probes(infos: Iterable[ObjectInfo], now_ms: int, grace: Grace) -> Iterator[Garbage]:
    """Find objects of brokers that crashed during the store probe."""
    return _old(infos, "left by a probe", now_ms, grace.unnamed_ms)


def topic_of(key: str) -> tuple[str, str] | None:
    """Return prefix and topic id of a key under `topics/`. If the key is foreign, return None."""
    folder, slash, _ = key.removeprefix(object_keys.TOPICS).partition("/")
    name, dash, topic_id = folder.rpartition("-")
    is_id = len(topic_id) == TOPIC_ID_CHARS and not set(topic_id) - set("0123456789abcdef")
    if not (slash and dash and is_id and is_topic_name(name)):
        return None
    return f"{object_keys.TOPICS}{folder}", topic_id


def _up_to(seq: int, infos: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    """Yield the entries or checkpoints with this number or a lower one; skip foreign objects."""
    for info in infos:
        number = object_keys.seq_of(info.key)
        if number is not None and number <= seq:
            yield info


def _old(infos: Iterable[ObjectInfo], why: str, now_ms: int, age_ms: int) -> Iterator[Garbage]:
    return (_garbage(info, why) for info in infos if _is_old(info, now_ms, age_ms))


def _is_old(info: ObjectInfo, now_ms: int, age_ms: int) -> bool:
    return now_ms - info.modified_ms >= age_ms


def _garbage(info: ObjectInfo, why: str) -> Garbage:
    return Garbage(info.key, why, info.size, info.modified_ms)
