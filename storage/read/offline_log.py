"""The log as of one moment, for readers without a broker. Nothing is written to the store.

The WAL is read to its end first, then the manifests. So a manifest may be newer than the cluster
state but never older. A seal is in the table before it is in the WAL (DESIGN 8), so the table has
all records that the state calls sealed. If the table has records beyond `sealed_end`, they are
still in the tail, and the plan reads them there (I7). Segments that retention removes between the
two reads are absent, as in a later snapshot. Any other hole is a loss of records and raises an
error, so a snapshot never lacks records silently.
"""

import datetime as dt
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec

from tidelog.storage.core.errors import InvalidRequest, TableInDoubt
from tidelog.storage.core.log_settings import WalSettings
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot, PartitionSnapshot, TopicSnapshot
from tidelog.storage.read.plan import OffsetRange, ReadFilter, Slice, segment_slices, tail_slices
from tidelog.storage.read.spark_kafka_options import Found, OffsetSpan, TopicSelection, resolve
from tidelog.storage.read.split_reader import SliceReader
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.foreign_commits import blamed, hole
from tidelog.storage.tables.manifest import (
    SegmentIndex,
    Table,
    in_no_segment,
    segments_to,
)
from tidelog.storage.wal.view import WalView

log = logging.getLogger("tidelog.read")

Topics = Sequence[str] | re.Pattern[str] | None
"""Names of topics, a pattern that must match the whole name, or None for all topics."""

_NEVER = sys.maxsize
_READING = WalSettings(checkpoint_entries=_NEVER, checkpoint_entries_max=_NEVER)
"""A reader writes no checkpoints."""


async def open_snapshot(
    store: ObjectStore, clock: Clock, topics: Topics, at_ms: int | None = None
) -> LogSnapshot:
    """Take a snapshot of the log now, or as of a time (`OfflineLog.snapshot_at`).

    Raises UnknownTopic, Corrupt, Unavailable. If the store has no cluster, raises StoreUnfit.
    """
    view = await OfflineLog.open(store, clock)
    try:
        return await (view.snapshot(topics) if at_ms is None else view.snapshot_at(topics, at_ms))
    finally:
        await view.close()


class OfflineLog:
    """A reader of a cluster's log without a broker. It follows the WAL and takes snapshots.

    Owned by one event loop.
    """

    def __init__(self, store: ObjectStore, wal: WalView) -> None:
        """Use `open`."""
        self._store = store
        self._wal = wal
        self._slices = SliceReader(store)
        self._tables: dict[str, Table] = {}

    @classmethod
    async def open(cls, store: ObjectStore, clock: Clock) -> "OfflineLog":
        return cls(store, await WalView.open(store, clock, "reader", _READING, is_creating=False))

    async def refresh(self) -> None:
        """Read the WAL to its end.

        Later snapshots have all commits that finished before this call (I3).
        """
        await self._wal.refresh()

    def offsets(self, topics: Topics) -> LogSnapshot:
        """Return the known offsets, without a request to the store.

        The result has no segments and no tail chunks, so no read can be planned from it. Raises
        UnknownTopic for an unknown name.
        """
        return self._copy(topics, has_tail=False)

    async def snapshot(
        self,
        topics: Topics,
        since: Mapping[TopicPartition, int] | None = None,
        *,
        fail_on_data_loss: bool = True,
    ) -> LogSnapshot:
        """Return a snapshot from which reads can be planned.

        Raises UnknownTopic for an unknown name.

        If `since` is at or after a partition's sealed end, omit this partition's segments, so that
        a reader of only the tail loads no manifest. If sealed offsets are in no segment, raise
        TableInDoubt; without `fail_on_data_loss`, log a warning and leave these offsets out.
        """
        snapshot = self._copy(topics, has_tail=True)
        topics_now = [
            await self._with_segments(topic, since or {}, fail_on_data_loss=fail_on_data_loss)
            for topic in snapshot.topics.values()
        ]
        return snapshot._replace(topics={topic.name: topic for topic in topics_now})

    async def snapshot_at(self, topics: Topics, time_ms: int) -> LogSnapshot:
        """Return a snapshot with the records that the log had at `time_ms`, and no others.

        This is the log before the first entry that was written after this time. It is known while
        the entries of that time are in the WAL, for an hour or longer, and while the topics still
        have all records of that time. Else raise InvalidRequest. Raises UnknownTopic.
        """
        then = await self._wal.objects.state_at(self._wal.cluster, time_ms)
        if then is None:
            raise InvalidRequest(
                f"the log as of {_iso(time_ms)} is not known: the WAL no longer has the entries of "
                "that time, and older records do not say when they came"
            )
        snapshot = await self.snapshot(topics)
        topics_then = {
            name: _as_of(topic, then.topic_of_id(topic.topic_id), time_ms)
            for name, topic in snapshot.topics.items()
        }
        return LogSnapshot(snapshot.cluster_id, then.seq, topics_then)

    async def find(
        self, snapshot: LogSnapshot, times: Iterable[tuple[TopicPartition, int]]
    ) -> Found:
        """Find the first offset at or after each time (ms) in the snapshot."""
        return {(of, time): await self._find(snapshot, of, time) for of, time in times}

    async def resolve(
        self, selection: TopicSelection, span: OffsetSpan
    ) -> tuple[LogSnapshot, list[OffsetRange]]:
        """Return a snapshot of the selected topics, and the offsets of the span in it."""
        snapshot = await self.snapshot(selection.topics(), fail_on_data_loss=span.fail_on_data_loss)
        partitions = selection.partitions(snapshot)
        offsets = await self.find(snapshot, span.times(partitions))
        return snapshot, resolve(snapshot, partitions, span, offsets)

    async def close(self) -> None:
        await self._wal.close()

    def _copy(self, topics: Topics, *, has_tail: bool) -> LogSnapshot:
        # No await in this method, because the state could change during an await.
        state = self._wal.state
        if topics is None or isinstance(topics, re.Pattern):
            names = [name for name in state.topics if topics is None or topics.fullmatch(name)]
        else:
            names = list(topics)
        snapshots = {
            name: _topic_snapshot(state, name, has_tail=has_tail) for name in sorted(set(names))
        }
        return LogSnapshot(state.cluster_id, state.seq, snapshots)

    async def _with_segments(
        self,
        topic: TopicSnapshot,
        since: Mapping[TopicPartition, int],
        *,
        fail_on_data_loss: bool,
    ) -> TopicSnapshot:
        """Add the segments that the manifest names now.

        A topic that was never sealed has no table.
        """
        table: Table | None = None
        partitions = list(topic.partitions)
        for part in topic.partitions:
            start = since.get(TopicPartition(topic.name, part.number), part.log_start_offset)
            if max(start, part.log_start_offset) < part.sealed_end:
                table = table or await self._table(topic)
                index = await segments_to(table, part.number, part.sealed_end, topic.prefix)
                partition = await self._checked(topic, part, table, index, start, fail_on_data_loss)
                segments = index.between(partition.log_start_offset, part.sealed_end)
                partitions[part.number] = partition._replace(segments=segments)
        return topic._replace(partitions=partitions)

    async def _checked(
        self,
        topic: TopicSnapshot,
        part: PartitionSnapshot,
        table: Table,
        index: SegmentIndex,
        start: int,
        fail_on_data_loss: bool,
    ) -> PartitionSnapshot:
        """Verify that the segments have all offsets from `start` to the sealed end.

        If retention ran between the reads of the WAL and the table, move the log start of the
        snapshot.
        """
        start, end = max(start, part.log_start_offset), part.sealed_end
        if hole(index, start, end) is None:
            return part
        await self._wal.refresh()
        current = self._wal.state.topic_of_id(topic.topic_id)
        if current is not None:
            moved = min(current.partitions[part.number].log_start_offset, end)
            part = part._replace(log_start_offset=max(part.log_start_offset, moved))
        start = max(start, part.log_start_offset)
        while (missing_span := hole(index, start, end)) is not None:
            problem = f"partition {part.number}: {in_no_segment(*missing_span)}"
            doubt = TableInDoubt(topic.prefix, table.version, await blamed(table, problem))
            if fail_on_data_loss:
                raise doubt
            count = missing_span[1] - missing_span[0]
            log.warning("%s-%d: %d records are left out: %s", topic.name, part.number, count, doubt)
            start = missing_span[1]
        return part

    async def _table(self, topic: TopicSnapshot) -> Table:
        table = self._tables.get(topic.topic_id)
        if table is None:
            table = self._tables[topic.topic_id] = open_table(self._store, topic.prefix, topic.name)
        else:
            await table.refresh()
        return table

    async def _find(self, snapshot: LogSnapshot, of: TopicPartition, time: int) -> int | None:
        part = snapshot.partition(of)
        whole = OffsetRange(*of, part.log_start_offset, part.high_watermark)
        read_filter = ReadFilter(timestamp_min=time)
        for record_slice in chain[Slice](
            segment_slices(snapshot, whole, read_filter), tail_slices(snapshot, whole, read_filter)
        ):
            offset = await self._slices.first_at(record_slice, time)
            if offset is not None:
                return offset
        return None


def _topic_snapshot(state: ClusterState, name: str, *, has_tail: bool) -> TopicSnapshot:
    topic = state.topic(name)
    return TopicSnapshot(
        topic.name,
        topic.topic_id,
        topic.prefix,
        topic.config.is_log_append_time,
        [
            _partition_snapshot(number, partition, has_tail=has_tail)
            for number, partition in enumerate(topic.partitions)
        ],
    )


def _as_of(topic: TopicSnapshot, then: Topic | None, time_ms: int) -> TopicSnapshot:
    """Return the topic with the records of `then`, its state at `time_ms`.

    Raises InvalidRequest if the topic was not there, or some of the records are gone.
    """
    if then is None:
        raise InvalidRequest(f"topic {topic.name!r} did not exist at {_iso(time_ms)}")
    ends = [partition.high_watermark for partition in then.partitions]
    ends += [0] * (len(topic.partitions) - len(ends))
    for part, partition in zip(topic.partitions, then.partitions, strict=False):
        end = partition.high_watermark
        removed_to = min(part.log_start_offset, end)
        are_gone = removed_to > partition.log_start_offset or any(
            file.rows != file.end_offset - file.base_offset
            for file in part.segments
            if file.base_offset < end
        )
        if are_gone:
            raise InvalidRequest(
                f"the log as of {_iso(time_ms)} is not known: partition {topic.name}-{part.number} "
                "has lost records of that time, to retention, delete-records or compaction"
            )
    return topic._replace(
        partitions=[
            part._replace(sealed_end=min(part.sealed_end, end), high_watermark=end)
            if end > part.log_start_offset
            else part._replace(
                sealed_end=part.log_start_offset,
                high_watermark=part.log_start_offset,
                segments=[],
                tail=[],
            )
            for part, end in zip(topic.partitions, ends, strict=True)
        ]
    )


def _iso(time_ms: int) -> str:
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC).isoformat(timespec="milliseconds")


def _partition_snapshot(number: int, partition: Partition, *, has_tail: bool) -> PartitionSnapshot:
    # Copy the elements: the newest element of a tail may still grow.
    tail = [msgspec.structs.replace(chunk) for chunk in partition.tail] if has_tail else []
    return PartitionSnapshot(
        number,
        partition.log_start_offset,
        partition.sealed_end,
        partition.high_watermark,
        segments=[],
        tail=tail,
    )
