"""The records of a cluster: append, transact and fetch them, wait for them, and seal them.

The modules below (writer, WAL view, reader, sealer) keep the guarantees. This module looks again in
the newest state before it reports an unknown partition or the end of a partition (I3).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.partitioner import RecordPartitions
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import CommitOffsets, InitProducer, ReserveProducers
from tidelog.storage.core.errors import (
    CommitUnknown,
    TableInDoubt,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import OFFSET_MAX, Acks, AppendedRange, ReadBounds
from tidelog.storage.log_engine import Log
from tidelog.storage.read.long_polls import ANY_PARTITION, TopicChanges
from tidelog.storage.read.reader import FetchResult
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.state.topic import Topic
from tidelog.storage.write.requests import AppendRequest, part_rows

__all__ = ["ClusterRecords", "FetchResult"]

T = TypeVar("T")


class ClusterRecords:
    """Appends, reads and waits through one broker. Owned by its event loop."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def losses(self) -> int:
        """How often records of this broker's view were given up, or its whole view."""
        return self._log.losses

    def check_serving(self) -> None:
        """Raise Unavailable after the last wait has ended, because a stream cannot wait then."""
        self._log.waiting.check_open()

    async def append(
        self,
        topic: Topic,
        parts: Sequence[tuple[RecordPartitions, Rows | pa.RecordBatch]],
        *,
        size: int,
        is_json: bool,
        acks: Acks = Acks.ALL,
        key: IdempotencyKey | None = None,
        has_timestamps: bool = True,
        linger_s: float | None = None,
    ) -> list[AppendedRange] | None:
        """Append one request's records, all or nothing.

        `size` is their weight in bytes, or more if the request takes more memory. The commit begins
        within `linger_s`; None leaves it to the topic, or to the cluster's pace. Return the
        appended ranges, by part and then by partition. If they are not known yet (acks 0, or acks 1
        with a hot log), return None. If `has_timestamps` is False, the broker has set all
        timestamps, and the writer does not check them.

        Raises UnknownPartition, InvalidTimestamp, Throttled, Unavailable, CommitUnknown,
        IdempotencyMismatch.
        """
        request = AppendRequest(
            [part_rows(topic, places, rows) for places, rows in parts],
            size,
            is_json=is_json,
            key=key,
            topic_id=topic.topic_id,
            has_timestamps=has_timestamps,
            linger_s=linger_s,
        )
        return await self._log.writer.append(request, acks)

    async def transact(
        self,
        parts: Sequence[tuple[Topic, RecordPartitions, Rows | pa.RecordBatch]],
        offsets: Sequence[CommitOffsets],
        *,
        size: int,
        is_json: bool,
        key: IdempotencyKey | None = None,
        linger_s: float | None = None,
    ) -> list[AppendedRange]:
        """Append records to several topics and commit offsets of groups, all or nothing (I4).

        Each topic occurs once. `size` and `linger_s` are as in `append`. Returns the
        appended ranges in the order of `parts`, then by partition. Raises the errors of `append`,
        and IllegalGeneration.
        """
        request = AppendRequest(
            [part_rows(topic, places, rows) for topic, places, rows in parts],
            size,
            is_json=is_json,
            actions=offsets,
            key=key,
            linger_s=linger_s,
        )
        return await self._log.append(request)

    async def init_producer(self, producer_id: int = -1, epoch: int = -1) -> ProducerEpoch:
        """Return a new producer id, or the next epoch of a known id, which fences older epochs.

        `epoch` is the producer's current epoch, or -1 if unknown. Raises ProducerFenced.

        **On a crash** before the answer: a new id is never used. If a call with the current epoch
        is repeated, it returns the epoch of the first call.
        """
        action = InitProducer(producer_id, epoch)
        request = AppendRequest((), 0, actions=[action])
        await self._log.append(request)
        if request.producer is None:
            raise CommitUnknown("the new producer id is unknown: retry")
        return request.producer

    async def reserve_producers(self, count: int) -> int:
        """Reserve `count` producer ids for this broker and return the first.

        Raises InvalidRequest below level 4.

        **On a crash** before the answer: the ids are never used.
        """
        request = AppendRequest((), 0, actions=[ReserveProducers(count)])
        await self._log.append(request)
        if request.producer is None:
            raise CommitUnknown("the reserved producer ids are unknown: retry")
        return request.producer.producer_id

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int,
        records_max: int = RECORDS_MAX,
        offset_end: int = OFFSET_MAX,
        wait_s: float = 0.0,
    ) -> FetchResult:
        """Return records of [offset, offset_end).

        At the high watermark, wait up to `wait_s` for one. Such a read may miss records that were
        acknowledged within the last `read_freshness_s` before its end (I3). If `bytes_max` is 0,
        return the partition's offsets after the wait, but no records.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, Corrupt, Unavailable.
        """
        bounds = ReadBounds(bytes_max, records_max, offset_end)
        read = partial(self._fetch, topic, partition, offset, bounds, wait_s)
        return await self._log.wal.retry_after_suspend(read)

    async def _fetch(
        self, topic: str, partition: int, offset: int, bounds: ReadBounds, wait_s: float
    ) -> FetchResult:
        log = self._log
        await log.wal.ensure_view()
        partition_state = await self._partition(topic, partition)
        if offset >= partition_state.high_watermark:
            if offset == partition_state.high_watermark and wait_s > 0:
                await log.refresh_to_wait()
            else:  # records acknowledged before this call must be visible (I3)
                await log.wal.refresh()
            partition_state = log.state.partition(topic, partition)
        partition_state.check_range(topic, partition, offset)
        if offset == partition_state.high_watermark and wait_s > 0:
            await self._wait_for_records(log.state.topic(topic), partition, offset, wait_s)
            if log.state.partition(topic, partition).high_watermark == offset:
                await log.refresh_to_wait()
            partition_state = log.state.partition(topic, partition)
            partition_state.check_range(topic, partition, offset)
        if offset == partition_state.high_watermark or not bounds.bytes_max:
            return FetchResult(
                [], offset, partition_state.log_start_offset, partition_state.high_watermark
            )
        read = partial(log.reader.read, log.state.topic(topic), partition, offset, bounds)
        result = await self.unless_removed(topic, partition, offset, read)
        start, end = partition_state.log_start_offset, partition_state.high_watermark
        return FetchResult(result.pieces, result.next_offset, start, end, result.weight)

    async def unless_removed(
        self, topic: str, partition: int, offset: int, read: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the result of a read from `offset` on.

        If the read finds the table in doubt, remember the doubt, unless a newer retention has
        removed the records: then raise OffsetOutOfRange.
        """
        log = self._log
        try:
            return await read()
        except TableInDoubt as error:
            await log.wal.refresh()
            log.state.partition(topic, partition).check_range(topic, partition, offset)
            log.tables.doubt(log.state.topic(topic), error)
            raise

    async def _partition(self, topic: str, partition: int) -> Partition:
        """Return the partition. If it is unknown, refresh the view, then look again (I3)."""
        with contextlib.suppress(UnknownTopic, UnknownPartition):
            return self._log.state.partition(topic, partition)
        await self._log.wal.refresh()
        return self._log.state.partition(topic, partition)

    async def _wait_for_records(
        self, topic: Topic, number: int, offset: int, wait_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        key = (topic.name, number)
        while topic.partitions[number].high_watermark <= offset and loop.time() < deadline:
            if not await self.wait_any([key], loop.create_future(), deadline):
                return
            if self._log.state.topics.get(topic.name) is not topic:
                return  # deleted, or the view was reloaded; the caller checks

    async def wait_any(
        self, partitions: Iterable[tuple[str, int]], waiter: "asyncio.Future[None]", deadline: float
    ) -> bool:
        """Wait until one of the partitions gets records, or a caller sets `waiter`.

        Return False if the loop's time reaches `deadline`, or if this broker ends all waits. Call
        while no records are new.
        """
        return await self._log.waiting.wait(list(partitions), waiter, deadline)

    async def turn(self) -> None:
        """Wait for a turn, as a read that a commit wakes.

        Between two pages of many readers, other requests are served.
        """
        await self._log.waiting.turn()

    def changes_of(self, topic: str) -> TopicChanges:
        """Return the changes of the topic's partitions, for `wait_for_changes`."""
        return self._log.waiting.changes_of(topic)

    async def wait_for_changes(
        self, name: str, changes: TopicChanges, count: int, wait_s: float
    ) -> Topic:
        """Return the topic as soon as it has more changes than `count`, or after `wait_s`.

        This broker applies entries of other brokers when they are announced, or at the next
        `Log.poll`. Raises UnknownTopic, Unavailable.
        """
        log = self._log
        await log.wal.ensure_view()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        topic = await log.topic(name)
        while changes.count == count and loop.time() < deadline:
            if not await self.wait_any([(name, ANY_PARTITION)], loop.create_future(), deadline):
                break
            topic = log.state.topic(name)
        return topic

    async def offsets(self, topic: str, partition: int) -> Partition:
        """Refresh (I3), then return the partition: log start offset and high watermark."""
        await self._log.wal.refresh()
        return self._log.state.partition(topic, partition)

    async def offset_for_timestamp(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the first offset whose record has this timestamp (ms) or a later one, or None."""
        log = self._log

        async def search() -> int | None:
            await log.wal.refresh()
            log.state.partition(topic, partition)
            topic_state = log.state.topic(topic)
            start = topic_state.partitions[partition].log_start_offset
            try:
                return await log.reader.offset_for_timestamp(topic_state, partition, timestamp)
            except TableInDoubt:
                await log.wal.refresh()  # a retention may be newer than the view
                if log.state.partition(topic, partition).log_start_offset == start:
                    raise
            return await log.reader.offset_for_timestamp(
                log.state.topic(topic), partition, timestamp
            )

        return await log.wal.retry_after_suspend(search)

    async def seal(self, topic: str, partitions: Sequence[int] | None = None) -> int:
        """Seal before `segment.ms` or `segment.bytes` is reached; return the number of rows."""
        return await self._log.sealer.seal(await self._log.topic(topic), partitions)
