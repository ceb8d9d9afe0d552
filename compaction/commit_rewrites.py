"""Rewrites until their commit: a rewriter writes the segments, and a version names them.

**On a crash** before the commit, segments that no version names remain for collection. After the
commit, the result is complete.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.compaction.engine import OnRows, Rewriter
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.rewrite import Rewrite
from tidelog.storage.core.errors import LogError, ObjectNotFound, TableInDoubt, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import (
    ManifestConflict,
    SegmentIndex,
    Table,
    clean_app_id,
    maintenance_app_id,
)

log = logging.getLogger("tidelog.compact")
UPLOAD_AGE_MAX_S = 6 * 3600.0
"""Longest time from the start of the uploads to the commit. It is a fourth of the grace after which
collection deletes files that no version names."""
COMMIT_TRIES = 5
"""Tries of one commit, if other runs change the maintenance lock but not the inputs."""


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


async def load_work(
    cluster: MaintenanceSession, topic: Topic, number: int, *, is_newest: bool = True
) -> Work:
    """Load a partition from the newest version of its table, or from the loaded one.

    Raises TableInDoubt if a segment does not begin where the one before it ends. Raises Corrupt,
    Unavailable.
    """
    table = await cluster.table(topic, is_newest=is_newest)
    lock = await table.transaction_version(maintenance_app_id(number)) or 0
    index = await table.segments(number)
    # After the segments: if a compaction comes in between, its commit has removed some of them.
    clean_end = await table.transaction_version(clean_app_id(number)) or 0
    columns = index.columns
    if (columns.base_offset[1:] != columns.end_offset[:-1]).any():
        why = f"partition {number} has offsets in no segment"
        raise TableInDoubt(topic.prefix, table.version, why)
    config = topic.config
    return Work(topic, number, config, table, index, lock, clean_end)


async def write_and_commit(
    cluster: MaintenanceSession,
    rewriter: Rewriter,
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
    added = await rewriter.write(tasks, on_rows)
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
