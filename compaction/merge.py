"""Merges: small neighbouring segments of a partition become one segment, with all rows.

`tidelog compact` and brokers merge. A merge changes no row, so its commit has the mark of Delta
that streaming readers skip (`data_change`).

**On a crash** before the commit, a segment that no version names remains for collection. After it,
the merge is complete, and the inputs stay for active readers until collection.
"""

import math
from collections.abc import Iterator, Sequence

from tidelog.compaction import plan
from tidelog.compaction.commit_rewrites import Work, write_and_commit
from tidelog.compaction.engine import OnRows, Rewriter
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.rewrite import Rewrite
from tidelog.storage.core.model import SegmentFile


def planned_merges(work: Work, target_bytes: int, now_ms: int) -> Iterator[list[SegmentFile]]:
    """Yield the inputs of each merge of a partition, in order of offsets."""
    merge_bounds = plan.MergeBounds.of(work.config, target_bytes)
    columns, partition = work.segments.columns, work.topic.partitions[work.number]
    for positions in plan.merges(columns, partition, merge_bounds, work.clean_end, now_ms):
        yield [work.segments[position] for position in positions]


async def merge(
    cluster: MaintenanceSession,
    rewriter: Rewriter,
    work: Work,
    merges: Sequence[Sequence[SegmentFile]],
    on_rows: OnRows = lambda _: None,
    *,
    bytes_max: float = math.inf,
) -> list[SegmentFile] | None:
    """Merge the inputs of each merge, all in one commit; return the new segments.

    Return None if another run committed first: then nothing has changed. Raises RewriteTooLarge if
    a new segment would have more than `bytes_max`; Corrupt, Unavailable, CommitUnknown.
    """
    prefix, codec, level = work.topic.prefix, work.config.compression_type, cluster.state.level
    tasks = [
        Rewrite(
            prefix,
            inputs,
            codec,
            sum(file.rows for file in inputs),
            level=level,
            bytes_max=bytes_max,
        )
        for inputs in merges
    ]
    basis = [file for inputs in merges for file in inputs]
    return await write_and_commit(
        cluster, rewriter, work, tasks, basis, {}, data_change=False, on_rows=on_rows
    )
