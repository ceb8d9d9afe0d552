"""Log starts that move: an action in the WAL, then a commit of the table without the records below.

First, an action in the WAL moves `log_start_offset`: from then on a reader below it gets
OffsetOutOfRange with the valid range. Then one commit of the table removes the segments that lie
entirely below the log start. `delete-records` may move it into a segment. Then a rewrite replaces
this segment by a new one that begins at the log start, so that other engines do not see the deleted
records either. The old objects stay for readers until collection deletes them (I9).

**On a crash** between the steps: readers of the log get the right records already. The next run
removes the segments below the log start and rewrites the segment that the log start cuts, because
these steps depend only on the state and the table. If two runs race, the higher of their two log
starts counts. The table refuses the commit of one of the runs, and that run retries. A run looks at
the table again after its commit (`_remove`).
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tidelog.compaction.commit_rewrites import load_work, write_and_commit
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.plan import Cut, below, cut_by
from tidelog.compaction.rewrite import Rewrite
from tidelog.storage.core.actions import MoveLogStart
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.segment_reader import SegmentReader, StoreRanges
from tidelog.storage.read.split_reader import gone_is_unavailable
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import ManifestConflict, Table, maintenance_app_id

log = logging.getLogger("tidelog.retention")
TRIES = 5
ANY_SIZE = sys.maxsize
DELETED = "delete-records"


class Retained(NamedTuple):
    """One partition: its old (`was`) and new log start, and the segments and rows that leave.

    `size` is their bytes; all leave the partition's table.

    `why` names the configs whose limit was passed, or the command that moved the log start.
    `rewritten` is the size in bytes of the segment that the log start cuts; 0 if the log start cuts
    no segment, or if that segment is too large for this run. `rows` does not count the rows of this
    segment. If the segment has no record from the log start on, because key compaction removed
    them, the log start moves on to the segment's end; `log_start_offset` does not show this.
    """

    topic: str
    partition: int
    why: str
    was: int
    log_start_offset: int
    segments: int
    rows: int
    size: int
    rewritten: int = 0


async def move_log_starts(
    cluster: MaintenanceSession,
    topic: Topic,
    table: Table,
    cuts: Mapping[int, Cut],
    *,
    is_dry: bool,
    rewrite_bytes_max: int = ANY_SIZE,
) -> list[Retained]:
    results: list[Retained] = []
    for number, partition in enumerate(topic.partitions):
        cut = cuts.get(number) or Cut(partition.log_start_offset, DELETED)
        start = max(cut.log_start_offset, partition.log_start_offset)
        columns = (await table.segments(number)).columns
        count = below(columns, partition, start)
        position = cut_by(columns, partition, start)
        rewritten = 0 if position is None else int(columns.size[position])
        if rewritten > rewrite_bytes_max:
            log.warning(
                "%s-%d: a segment of %d bytes has deleted records that other engines see: run "
                "`tidelog retain %s --yes`",
                topic.name,
                number,
                rewritten,
                topic.name,
            )
            rewritten = 0
        if count or rewritten or start > partition.log_start_offset:
            results.append(
                Retained(
                    topic.name,
                    number,
                    cut.why,
                    partition.log_start_offset,
                    start,
                    count,
                    int(columns.rows[:count].sum()),
                    int(columns.size[:count].sum()),
                    rewritten,
                )
            )
    if results and not is_dry:
        moved = [result for result in results if result.log_start_offset > result.was]
        await cluster.commit(
            [
                MoveLogStart(topic.topic_id, result.partition, result.log_start_offset)
                for result in moved
            ]
        )
        await _remove(cluster, topic, [result.partition for result in results])
        for result in results:
            if result.rewritten:
                await _rewrite(cluster, topic, result.partition)
    return results


async def _remove(cluster: MaintenanceSession, topic: Topic, numbers: Sequence[int]) -> None:
    """Remove from the table the segments below the log starts, until there are none.

    The state has the new log starts already, because `WalView.commit` returns after its entry is
    applied.

    A commit that is done is looked at again: another run may have replaced the segments by others
    that are below the log starts too. If these stayed, a rewrite of the segment that the log start
    cuts would leave a hole between them and the rewritten segment.
    """
    conflict: ManifestConflict | None = None
    for attempt in range(TRIES + 1):
        current = cluster.state.topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile: collection deletes all of it
        table = await cluster.checked_table(current)
        removed: list[SegmentFile] = []
        transactions: dict[str, int] = {}
        for number in numbers:
            partition = current.partitions[number]
            index = await table.segments(number)
            count = below(index.columns, partition, partition.log_start_offset)
            if count:
                app_id = maintenance_app_id(number)
                removed += [index[position] for position in range(count)]
                transactions[app_id] = (await table.transaction_version(app_id) or 0) + 1
        if not removed:
            return
        if attempt == TRIES:
            break
        try:
            await table.replace(removed, [], transactions, data_change=True)
        except ManifestConflict as error:
            conflict = error
    raise _changed_too_often(topic) from conflict


def _changed_too_often(topic: Topic) -> ManifestConflict:
    return ManifestConflict(f"other runs changed {topic.name} {TRIES} times: run again")


async def _rewrite(cluster: MaintenanceSession, topic: Topic, number: int) -> None:
    """Replace the segment that the log start cuts by one that begins at the log start.

    Segments entirely below the log start are removed before: a client may have moved the log start
    since `_remove`, and they would lie before a hole.
    """
    for _ in range(TRIES):
        current = cluster.state.topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile
        await cluster.checked_table(current)
        work = await load_work(cluster, current, number)
        start = current.partitions[number].log_start_offset
        position = cut_by(work.segments.columns, current.partitions[number], start)
        if position is None:
            return  # another run was faster
        if position:
            await _remove(cluster, current, [number])
            continue
        file = work.segments[position]
        rows = await _rows_from(cluster, f"{topic.prefix}/{file.path}", file.size, start)
        if not rows:  # no segment may be empty, so remove it
            await cluster.commit([MoveLogStart(topic.topic_id, number, file.end_offset)])
            await _remove(cluster, current, [number])
            return
        codec, level = work.config.compression_type, cluster.state.level
        task = Rewrite(topic.prefix, [file], codec, rows, level=level, start=start)
        engine = InProcess(cluster.store, cluster.clock)
        added = await write_and_commit(cluster, engine, work, [task], [file], {}, data_change=True)
        if added is not None:
            return
    raise _changed_too_often(topic)


async def _rows_from(cluster: MaintenanceSession, key: str, size: int, start: int) -> int:
    """Return the number of a segment's records from offset `start` on.

    Reads at most one row group.
    """
    reader = SegmentReader(StoreRanges(cluster.store))
    rows = 0
    with gone_is_unavailable():
        footer = await reader.footer(key, size)
        for group in footer.groups:
            if group.base_offset >= start:
                rows += group.rows
            elif group.end_offset > start:
                batch = await reader.group(key, footer, group)
                rows += int(np.count_nonzero(batch.column("offset").to_numpy() >= start))
    return rows
