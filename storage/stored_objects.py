"""The objects of a cluster in its store, and the doubts and damage that this broker knows of.

They are segments, entries of the WAL, checkpoints, results of maintenance.
"""

from typing import NamedTuple

from tidelog.storage.codec.entry import Entry
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, ObjectNotFound, TableInDoubt
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.log_engine import Log
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.manifest import SegmentColumns, Table, clean_app_id, seal_app_id

LAYOUT_AGE_MAX_S = 30.0


class PartitionFiles(NamedTuple):
    """A partition's sealed segments.

    `live` are the segments with offsets in [log start, sealed end). `hot_start` is the first offset
    in this broker's memory. If no record of the partition is in memory, `hot_start` is the high
    watermark. Key compaction has run up to `clean_end`. If the table is damaged, there are no
    segments, and `damage` is the error.
    """

    segments: SegmentColumns
    live: SegmentColumns
    clean_end: int
    hot_start: int
    damage: Corrupt | None = None


class StoredObjects:
    """The objects of a cluster. The methods raise the errors of the store."""

    def __init__(self, log: Log) -> None:
        self.wal = log.wal
        """For maintenance in this process (compaction.maintenance_session), as `open_tables`."""
        self.open_tables = log.tables
        self._log = log

    def open_table(self, topic: Topic) -> Table:
        """Return the topic's manifest, opened for the caller alone: the broker does not keep it."""
        return open_table(self._log.store, topic.prefix, topic.name, self._log.clock)

    async def partition_files(self, topic: Topic, number: int) -> PartitionFiles:
        """Return the partition's files, from a manifest that is at most LAYOUT_AGE_MAX_S old.

        Raises Unavailable.
        """
        segments, clean_end, damage = SegmentColumns.of([]), 0, None
        try:
            table = await self._log.tables.of(topic, age_max_s=LAYOUT_AGE_MAX_S)
            sealed = await table.transaction_version(seal_app_id(number)) or 0
            if sealed < topic.partitions[number].sealed_end:
                await table.refresh()
            segments = (await table.segments(number)).columns
            clean_end = await table.transaction_version(clean_app_id(number)) or 0
        except Corrupt as error:
            segments, damage = SegmentColumns.of([]), error
        partition = topic.partitions[number]
        live = segments.of_offsets(partition.log_start_offset, partition.sealed_end)
        hot = self._log.tail.start((topic.topic_id, number))
        hot = partition.high_watermark if hot is None else max(hot, partition.log_start_offset)
        return PartitionFiles(segments, live, clean_end, hot, damage)

    async def list_entries(self, seq: int) -> list[ObjectInfo]:
        """Return the WAL's objects with a number above `seq`, ascending."""
        first = object_keys.wal(seq)
        listed = self._log.store.list(object_keys.WAL, start_after=first)
        return [info async for info in listed]

    async def read_entry(self, seq: int) -> Entry | None:
        """Return the WAL entry. If it was collected, return None."""
        try:
            return (await self._log.wal.objects.read(seq)).entry
        except ObjectNotFound:
            return None

    async def read_maintenance(self, kind: str) -> bytes | None:
        """Return the stored result of the last maintenance of this kind, or None."""
        try:
            return await self._log.store.get(object_keys.maintenance(kind))
        except ObjectNotFound:
            return None

    async def list_checkpoints(self) -> list[ObjectInfo]:
        return [info async for info in self._log.store.list(object_keys.CHECKPOINTS)]

    # -- doubts and damage

    def note_doubt(self, topic: Topic, error: TableInDoubt | None) -> None:
        """Remember the doubt that a check of the topic's table found, or None if it found none."""
        self._log.tables.doubt(topic, error)

    def doubts(self) -> dict[str, str]:
        """Return the reason for each table that this broker found in doubt, by topic name."""
        doubts, topic_of = self._log.tables.doubts, self._log.state.topic_of_id
        topic_doubts = ((topic_of(topic_id), error) for topic_id, error in doubts.items())
        return {topic.name: str(error) for topic, error in topic_doubts if topic is not None}

    def damaged_tails(self) -> dict[TopicPartition, str]:
        """Return why an object is damaged, for each partition whose tail could not be sealed."""
        topic_of = self._log.state.topic_of_id
        tails = (
            (topic_of(topic_id), number, error)
            for (topic_id, number), error in self._log.sealer.damaged.items()
        )
        return {
            TopicPartition(topic.name, number): str(error)
            for topic, number, error in tails
            if topic is not None
        }
