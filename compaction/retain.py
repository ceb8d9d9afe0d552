"""Retention and delete-records: log starts move, and what lies below them leaves the table.

Two steps, in this order: a WAL action moves `log_start_offset`, so that whoever reads below it is
told the valid range; then one commit of the table removes the segments that lie below whole. Their
objects stay for readers under way until collection finds that no version names them (I9).

And if we die between the two? Readers are right already, and the next run removes the segments:
that step asks the state what lies below, not who put it there. Two that run at once move a log
start to the further of both; of two commits to the table one is refused, and looks again.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from compaction.cluster import Cluster
from compaction.plan import Cut, below, retention
from storage.entry import MoveLogStart
from storage.errors import OffsetOutOfRange, UnknownPartition
from storage.manifest import ManifestConflict, Table, care_app_id
from storage.model import SegmentFile
from storage.partition import Partition
from storage.state import Topic

HIGH_WATERMARK = -1
"""As the offset of a delete-records: everything that is committed by now."""
TRIES = 5
DELETED = "delete-records"


class Retained(NamedTuple):
    """One partition: where its log start is moved to, and what leaves its table by that.

    `why` names the configs whose limit was passed, or what moved the log start before.
    """

    topic: str
    partition: int
    why: str
    was: int
    log_start_offset: int
    segments: int
    rows: int
    size: int


async def retain(cluster: Cluster, names: Sequence[str] | None, *, is_dry: bool) -> list[Retained]:
    """What retention does now to the topics (all when None), done unless it is dry.

    Raises UnknownTopic, Unavailable, CommitUnknown: run it again. ManifestConflict when others
    were faster five times in a row: what they did counts.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    found: list[Retained] = []
    for topic in cluster.topics(names):
        table = await cluster.table(topic)
        cuts: dict[int, Cut] = {}
        config = cluster.state.config(topic)
        for number, partition in enumerate(topic.partitions):
            index = await table.segments(number)
            cut = retention(index.columns, partition, config, now_ms)
            if cut is not None:
                cuts[number] = cut
        found += await _cut(cluster, topic, table, cuts, is_dry=is_dry)
    return found


async def delete_records(
    cluster: Cluster, name: str, offsets: Mapping[int, int], *, is_dry: bool
) -> list[Retained]:
    """Move log starts up to these offsets, by partition; HIGH_WATERMARK takes all there is.

    Kafka's DeleteRecords: at or below the log start nothing happens, beyond the high watermark it
    is OffsetOutOfRange. Raises UnknownTopic, UnknownPartition, and as `retain`.
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
    return await _cut(cluster, topic, await cluster.table(topic), cuts, is_dry=is_dry)


async def _cut(
    cluster: Cluster, topic: Topic, table: Table, cuts: Mapping[int, Cut], *, is_dry: bool
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


async def _below(
    table: Table, number: int, partition: Partition, log_start_offset: int
) -> list[SegmentFile]:
    index = await table.segments(number)
    return list(islice(index, below(index.columns, partition, log_start_offset)))


async def _remove(cluster: Cluster, topic: Topic, numbers: Sequence[int]) -> None:
    """Take what lies below the log starts out of the table. The topic's state is that after the
    log starts have moved: `Wal.commit` returns when its entry is applied."""
    for attempt in range(1, TRIES + 1):
        current = cluster.state.topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile: collection takes all of it
        table = await cluster.table(current)
        removed: list[SegmentFile] = []
        transactions: dict[str, int] = {}
        for number in numbers:
            partition = current.partitions[number]
            files = await _below(table, number, partition, partition.log_start_offset)
            if files:
                app_id = care_app_id(number)
                removed += files
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
