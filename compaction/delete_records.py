"""Deletion of the records below given offsets, as in Kafka: also inside a segment."""

from collections.abc import Mapping

from tidelog.compaction.log_starts import DELETED, Retained, move_log_starts
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.plan import Cut
from tidelog.storage.core.errors import OffsetOutOfRange, UnknownPartition

HIGH_WATERMARK = -1
"""This offset in `delete_records` stands for the current high watermark."""


async def delete_records(
    cluster: MaintenanceSession, name: str, offsets: Mapping[int, int], *, is_dry: bool
) -> list[Retained]:
    """Move log starts up to these offsets, by partition; HIGH_WATERMARK deletes all records.

    As in Kafka's DeleteRecords, an offset at or below the log start has no effect, and an offset
    above the high watermark raises OffsetOutOfRange. Raises UnknownTopic, UnknownPartition,
    TableInDoubt, Corrupt, Unavailable, CommitUnknown and ManifestConflict.
    """
    await cluster.refresh()
    topic = cluster.state.topic(name)
    cuts: dict[int, Cut] = {}
    for number, offset in offsets.items():
        if not 0 <= number < len(topic.partitions):
            raise UnknownPartition(name, number, len(topic.partitions))
        partition = topic.partitions[number]
        end = partition.high_watermark if offset == HIGH_WATERMARK else offset
        if not 0 <= end <= partition.high_watermark:
            raise OffsetOutOfRange(
                name,
                number,
                offset,
                log_start_offset=partition.log_start_offset,
                high_watermark=partition.high_watermark,
            )
        cuts[number] = Cut(end, DELETED)
    return await move_log_starts(
        cluster, topic, await cluster.checked_table(topic), cuts, is_dry=is_dry
    )
