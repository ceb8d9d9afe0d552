"""`Engine`, the interface of engines that run rewrites; `InProcess`; `write_and_commit`.

`InProcess` is the engine in this process; compaction/spark_engine.py has the other.
`write_and_commit` runs an engine and commits the segments that it wrote.

An engine reads segments and writes segments. compaction/compact.py and compaction/retention.py make
the plans, and `write_and_commit` commits the result. So engines differ only in speed.

**On a crash** before the commit, segments that no version names remain for collection. After the
commit, the result is complete.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.newest_per_key import UNLIMITED, Kept, Latest, Seen, TooManyKeys, of_shares
from tidelog.compaction.rewrite import Rewrite, pieces, pump, rewrite
from tidelog.storage.core.errors import LogError, ObjectNotFound, TableInDoubt, Unavailable
from tidelog.storage.core.log_settings import COMPACT_MEMORY_BYTES
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.read.segment_reader import FetchedGroups
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.manifest import (
    ManifestConflict,
    SegmentIndex,
    Table,
    clean_app_id,
    maintenance_app_id,
)

log = logging.getLogger("tidelog.compact")

OnRows = Callable[[int], None]

KEYS_PART = 4
"""Divisor of `compact_memory_bytes`. A pass has the known keys, the new keys and their union in
memory. The known keys may take one part, the new keys one part, and the union two parts."""
KEYS_BYTES_MAX = COMPACT_MEMORY_BYTES // KEYS_PART
"""Memory for keys and offsets. To group new rows with the known rows takes about four times this
memory."""
MORE_SHARES = 4
"""Factor by which the number of shares grows after TooManyKeys. A share is a part of the keys, by
their murmur2. For each share, `newest` reads the segments once."""
SHARES_MAX = 256
"""From this number of shares on, memory is not bounded. If the keys of one share do not fit even
then, a client chose the keys by their murmur2."""

UPLOAD_AGE_MAX_S = 6 * 3600.0
"""Longest time from the start of the uploads to the commit. It is a fourth of the grace after which
collection deletes files that no version names."""
COMMIT_TRIES = 5
"""Tries of one commit, if other runs change the maintenance lock but not the inputs."""


class KeyScan(NamedTuple):
    """Neighbouring segments of a partition.

    Tombstones below offset `expires` are older than `delete.retention.ms`, so compaction removes
    them.
    """

    prefix: str
    files: Sequence[SegmentFile]
    expires: int


class Engine(Protocol):
    """Writer of segments; concurrent calls are allowed. Raises Unavailable, Corrupt."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    @property
    def partitions_max(self) -> int:
        """Number of partitions that a run works on at once."""
        ...

    @property
    def merges_max(self) -> int:
        """Upper bound of the merges that one commit has."""
        ...

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        """Return the offsets that key compaction keeps: ascending int64, at least one."""
        ...

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        """Write one segment for each task, in their order; no table names the segments yet."""
        ...


class InProcess:
    """Engine that writes one segment after the other.

    Its memory is about four times `keys_bytes_max`, one encoded output, and 8 bytes for the offset
    of each kept record and of each expired tombstone.
    """

    name = "in-process"
    partitions_max = 1
    merges_max = 1

    def __init__(
        self, store: ObjectStore, clock: Clock, keys_bytes_max: int = KEYS_BYTES_MAX
    ) -> None:
        self._store = store
        self._clock = clock
        self._keys_bytes_max = keys_bytes_max

    async def newest(self, scan: KeyScan, on_rows: OnRows) -> np.ndarray:
        shares = 1
        while True:
            try:
                results = [await self._share(scan, n, shares, on_rows) for n in range(shares)]
                return await asyncio.to_thread(of_shares, results)
            except TooManyKeys:
                shares *= MORE_SHARES

    async def _share(self, scan: KeyScan, share: int, shares: int, on_rows: OnRows) -> Kept:
        bytes_max = self._keys_bytes_max if shares < SHARES_MAX else UNLIMITED
        latest = Latest(scan.expires, bytes_max=bytes_max, share=share, shares=shares)

        def seen(block: FetchedGroups) -> Seen:
            return latest.see(block.batch(latest.columns(block.of.start)))

        await pump(self._store, pieces(scan.prefix, scan.files), seen, latest.add, on_rows)
        return await asyncio.to_thread(latest.kept)

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        return [
            await rewrite(self._store, task, self._clock.new_id().hex(), on_rows) for task in tasks
        ]


class Work(NamedTuple):
    """A partition as of the table version from which a run makes its plan.

    `lock` is the version of the partition's maintenance lock. Key compaction has run up to offset
    `clean_end`.
    """

    topic: Topic
    number: int
    config: TopicConfig
    table: Table
    segments: SegmentIndex
    lock: int
    clean_end: int


async def load_work(cluster: MaintenanceSession, topic: Topic, number: int) -> Work:
    """Load a partition from the newest version of its table.

    Raises TableInDoubt if a segment does not begin where the one before it ends. Raises Corrupt,
    Unavailable.
    """
    table = await cluster.table(topic)
    lock = await table.transaction_version(maintenance_app_id(number)) or 0
    clean_end = await table.transaction_version(clean_app_id(number)) or 0
    index = await table.segments(number)
    columns = index.columns
    if (columns.base_offset[1:] != columns.end_offset[:-1]).any():
        why = f"partition {number} has offsets in no segment"
        raise TableInDoubt(topic.prefix, table.version, why)
    config = topic.config
    return Work(topic, number, config, table, index, lock, clean_end)


async def write_and_commit(
    cluster: MaintenanceSession,
    engine: Engine,
    work: Work,
    tasks: Sequence[Rewrite],
    basis: Sequence[SegmentFile],
    transactions: Mapping[str, int],
    *,
    data_change: bool,
    on_rows: OnRows = lambda _: None,
) -> list[SegmentFile] | None:
    """Write the segments of the tasks, commit them in place of their inputs, and return them.

    If another run committed first, return None. `basis` are the segments from which the plan was
    made. As long as the table names all of them, the run commits, even if the lock has changed. The
    commit also contains `transactions`.

    Raises Corrupt, Unavailable, CommitUnknown.
    """
    partition_name = f"{work.topic.name}-{work.number}"
    started_s = cluster.clock.boot_s()
    removed = [file for task in tasks for file in task.inputs]
    added = await engine.write(tasks, on_rows)
    if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
        raise Unavailable(f"{partition_name} took more than 6 hours to commit: run again")
    app_id, lock = maintenance_app_id(work.number), work.lock
    for remaining_tries in reversed(range(COMMIT_TRIES)):
        locked = {app_id: lock + 1, **transactions}
        try:
            await work.table.replace(removed, added, locked, data_change=data_change)
            break
        except ManifestConflict as conflict:
            await work.table.refresh()
            there = await work.table.paths()
            if remaining_tries and all(file.path in there for file in basis):
                lock = await work.table.transaction_version(app_id) or 0
                continue
            log.info("another run committed first on %s: %s", partition_name, conflict)
        with contextlib.suppress(LogError):  # if this fails, collection deletes the objects
            await cluster.store.delete([f"{work.topic.prefix}/{file.path}" for file in added])
        return None
    if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
        await _check_there(cluster, work, removed, added, lock + 2)
    return added


async def _check_there(
    cluster: MaintenanceSession,
    work: Work,
    removed: Sequence[SegmentFile],
    added: Sequence[SegmentFile],
    lock: int,
) -> None:
    """Check that the added files exist, or put the inputs back into the table.

    Collection may have deleted the files while the process was suspended. The inputs still exist,
    because their grace began only at the commit. `lock` is the version of the maintenance lock for
    this change.
    """
    try:
        for file in added:
            await cluster.store.get_range(f"{work.topic.prefix}/{file.path}", 0, 1)
    except ObjectNotFound as error:
        locked = {maintenance_app_id(work.number): lock}
        await work.table.replace(added, removed, locked, data_change=True)
        raise Unavailable(f"{error}: deleted while the process was suspended; run again") from error
