"""Retention and delete-records: move log starts; remove from the table the segments below them.

First, an action in the WAL moves `log_start_offset`: from then on a reader below it gets
OffsetOutOfRange with the valid range. Then one commit of the table removes the segments that lie
entirely below. Their objects stay for readers until collection deletes them (I9).

**On a crash** between the two: readers are correct already. The next run removes the segments,
because that step depends only on the state. If two runs race, the log start becomes the higher of
both; the table refuses one of two commits, and that run retries.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.compaction.plan import Cut, below, retention
from tidelog.compaction.session import MaintenanceSession, topics_of
from tidelog.storage.core.actions import MoveLogStart
from tidelog.storage.core.errors import OffsetOutOfRange, UnknownPartition
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.tables.manifest import ManifestConflict, Table, maintenance_app_id

HIGH_WATERMARK = -1
"""This offset in `delete_records` stands for the current high watermark."""
TRIES = 5
DELETED = "delete-records"


class Retained(NamedTuple):
    """One partition: its old (`was`) and new log start, and the segments, rows and bytes that leave
    its table.

    `why` names the configs whose limit was passed, or the command that moved the log start.
    """

    topic: str
    partition: int
    why: str
    was: int
    log_start_offset: int
    segments: int
    rows: int
    size: int


async def retain(
    cluster: MaintenanceSession, names: Sequence[str] | None, *, is_dry: bool
) -> list[Retained]:
    """Apply retention to the topics (all if None); a dry run only reports.

    A topic whose table is damaged or in doubt is left as it is (`cluster.skipped`). Raises
    UnknownTopic. If a topic fails with Unavailable, CommitUnknown or ManifestConflict, raises the
    first such error after the last topic: run again. ManifestConflict means that other runs
    committed first in each of TRIES tries.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    found: list[Retained] = []

    async def retain_one(topic: Topic) -> None:
        table = await cluster.checked_table(topic)
        current = cluster.state.topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile
        cuts: dict[int, Cut] = {}
        config = cluster.state.config(current)
        for number, partition in enumerate(current.partitions):
            index = await table.segments(number)
            cut = retention(index.columns, partition, config, now_ms)
            if cut is not None:
                cuts[number] = cut
        found.extend(await _cut(cluster, current, table, cuts, is_dry=is_dry))

    await cluster.for_each(topics_of(cluster.state, names), retain_one)
    return found


async def delete_records(
    cluster: MaintenanceSession, name: str, offsets: Mapping[int, int], *, is_dry: bool
) -> list[Retained]:
    """Move log starts up to these offsets, by partition; HIGH_WATERMARK deletes all records.

    As Kafka's DeleteRecords: an offset at or below the log start has no effect; one above the high
    watermark raises OffsetOutOfRange. Raises UnknownTopic, UnknownPartition, TableInDoubt, and as
    `retain`.
    """
    await cluster.refresh()
    topic = cluster.state.topic(name)
    cuts: dict[int, Cut] = {}
    for number, offset in offsets.items():
        if not 0 <= number < len(topic.partitions):
            raise UnknownPartition(name, number, len(topic.partitions))
        held = topic.partitions[number]
        end = held.high_watermark if offset == HIGH_WATERMARK else offset
        if not 0 <= end <= held.high_watermark:
            raise OffsetOutOfRange(
                name,
                number,
                offset,
                log_start_offset=held.log_start_offset,
                high_watermark=held.high_watermark,
            )
        cuts[number] = Cut(end, DELETED)
    return await _cut(cluster, topic, await cluster.checked_table(topic), cuts, is_dry=is_dry)


async def _cut(
    cluster: MaintenanceSession,
    topic: Topic,
    table: Table,
    cuts: Mapping[int, Cut],
    *,
    is_dry: bool,
) -> list[Retained]:
    found: list[Retained] = []
    for number, partition in enumerate(topic.partitions):
        cut = cuts.get(number) or Cut(partition.log_start_offset, DELETED)
        start = max(cut.log_start_offset, partition.log_start_offset)
        columns = (await table.segments(number)).columns
        count = below(columns, partition, start)
        if count or start > partition.log_start_offset:
            found.append(
                Retained(
                    topic.name,
                    number,
                    cut.why,
                    partition.log_start_offset,
                    start,
                    count,
                    int(columns.rows[:count].sum()),
                    int(columns.size[:count].sum()),
                )
            )
    if found and not is_dry:
        moved = [each for each in found if each.log_start_offset > each.was]
        await cluster.commit(
            [MoveLogStart(topic.topic_id, each.partition, each.log_start_offset) for each in moved]
        )
        await _remove(cluster, topic, [each.partition for each in found])
    return found


async def _remove(cluster: MaintenanceSession, topic: Topic, numbers: Sequence[int]) -> None:
    """Remove from the table the segments below the log starts. The state has the new log starts:
    `WalView.commit` returns after its entry is applied."""
    for attempt in range(1, TRIES + 1):
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
                removed += [index[at] for at in range(count)]
                transactions[app_id] = (await table.transaction_version(app_id) or 0) + 1
        if not removed:
            return
        try:
            await table.replace(removed, [], transactions, data_change=True)
        except ManifestConflict:
            if attempt == TRIES:
                raise
        else:
            return
