"""Retention: log starts move to the end of the last segment that is too old or too much."""

import asyncio
import math
from collections.abc import Callable, Sequence

from tidelog.compaction.log_starts import ANY_SIZE, Retained, move_log_starts
from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.plan import Cut, expiry_ms, retention
from tidelog.storage.state.topic import Topic


async def retain(
    cluster: MaintenanceSession,
    names: Sequence[str] | None,
    *,
    is_dry: bool,
    rewrite_bytes_max: int = ANY_SIZE,
    is_due: Callable[[Topic], bool] = lambda _: True,
    on_nothing_due: Callable[[Topic, float], object] = lambda _, __: None,
) -> list[Retained]:
    """Apply retention to the topics (all if None); a dry run only reports.

    Also rewrite each segment of at most `rewrite_bytes_max` bytes that an earlier `delete_records`
    cut. Topics for which `is_due` is false are left out. `on_nothing_due` gets each other topic in
    which there was nothing to do, and the time in ms at which its oldest segment expires (inf:
    never).

    A topic whose table is damaged or in doubt is left as it is (`cluster.skipped`). Raises
    UnknownTopic. If a topic fails with Unavailable, CommitUnknown or ManifestConflict, raises the
    first such error after the last topic. Then run again. ManifestConflict means that other runs
    committed first in each of TRIES tries.
    """
    await cluster.refresh()
    topics: list[Topic] = []
    for topic in topics_of(cluster.state, names):
        if is_due(topic):
            topics.append(topic)
        await asyncio.sleep(0)  # a broker serves requests meanwhile
    if not topics:
        return []
    now_ms = await cluster.store_now_ms()
    results: list[Retained] = []

    async def retain_one(topic: Topic) -> None:
        table = await cluster.checked_table(topic)
        current = cluster.state.topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile
        cuts: dict[int, Cut] = {}
        config = current.config
        due_ms = math.inf
        for number, partition in enumerate(current.partitions):
            index = await table.segments(number)
            cut = retention(index.columns, partition, config, now_ms)
            if cut is not None:
                cuts[number] = cut
            due_ms = min(due_ms, expiry_ms(index.columns, partition, config, now_ms))
        topic_results = await move_log_starts(
            cluster, current, table, cuts, is_dry=is_dry, rewrite_bytes_max=rewrite_bytes_max
        )
        results.extend(topic_results)
        if not topic_results:
            on_nothing_due(current, due_ms)

    await cluster.for_each(topics, retain_one)
    return results
