"""The interface to records and topics: append, fetch, offsets, topics, seal, on one object store.

A `Log` is a broker's in-memory state of a cluster. A broker can rebuild it from the store at any
time. The modules that a `Log` uses keep I1 to I7 and I10; this module adds long polls.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from tidelog.storage.codec.chunk import RECORDS_MAX, Rows
from tidelog.storage.codec.entry import Entry, IdempotencyKey
from tidelog.storage.codec.partitioner import RecordPartitions
from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    AnyAction,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    InitProducer,
    LoseRecords,
    MoveLogStart,
    ReserveProducers,
    SetTopicDefaults,
)
from tidelog.storage.core.errors import (
    CommitUnknown,
    OffsetOutOfRange,
    TableInDoubt,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import OFFSET_MAX, Acks, AppendedRange, ReadBounds, TopicPartition
from tidelog.storage.read.long_polls import ANY_PARTITION, LongPolls, TopicChanges
from tidelog.storage.read.reader import FetchResult, Reader
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.runtime.observer import Observer
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.state.cluster_state import Applied, ClusterState, Topic
from tidelog.storage.state.committed_offsets import CommittedOffset
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.state.topic_checks import check_new_name, check_partitions
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.announced import AnnouncedChunks
from tidelog.storage.wal.view import Committer, WalView
from tidelog.storage.write.committed_tail import CommittedTail
from tidelog.storage.write.requests import AppendRequest, part_rows
from tidelog.storage.write.writer import Writer

__all__ = ["FetchResult", "Log", "LogSettings"]

T = TypeVar("T")

log = logging.getLogger("tidelog.log")


class Log:
    """A log without peers and groups; the subclass `storage.broker.Broker` adds them. Owned by one
    event loop, between `Broker.open` and `Broker.close`."""

    def __init__(
        self,
        wal: WalView,
        settings: LogSettings,
        *,
        committer: Committer,
        announced: AnnouncedChunks,
        owns: Callable[[str], bool],
        hot_dir: Path | None,
        observer: Observer,
    ) -> None:
        self.wal = wal
        self.identity = wal.cluster
        self.store = wal.store
        self.store_url = wal.store.url
        self.clock = wal.clock
        self.store_time = wal.store_time
        self.settings = settings
        self.tail = TailCache(settings.tail_cache_bytes)
        self.tables = OpenTables(wal.store, self._topic_of_id, wal.refresh)
        self.reader = Reader(wal.store, self.tail, announced, self.tables, settings.reader)
        self.writer = Writer(
            wal,
            settings.writer,
            CommittedTail(self.reader, lambda: wal.state).add,
            committer=committer,
            hot_dir=hot_dir,
            observer=observer,
        )
        self.sealer = Sealer(self.reader, self.writer, self.tables, settings.sealer, owns)
        self._waiting = LongPolls()
        self.losses = 0
        """How often records of this broker's view were given up, or its whole view."""
        wal.subscribers.append(self)

    # -- the cluster

    @property
    def state(self) -> ClusterState:
        """The newest state that this broker knows. Only the WAL view changes it."""
        return self.wal.state

    async def refresh(self, since_s: float = math.inf) -> None:
        """Apply all entries that were committed before this call (I3), or before `since_s` of the
        boot clock, if that is earlier."""
        await self.wal.refresh(since_s)

    async def ensure_view(self) -> None:
        """Reload the state if it is too old for reads; cheap otherwise. Raises Unavailable."""
        await self.wal.ensure_view()

    async def poll(self) -> None:
        """Apply other brokers' entries, also if no request comes, until the task is cancelled."""
        while True:
            await asyncio.sleep(self.settings.poll_interval_s)
            with surviving(log, "reading the WAL"):
                await self.wal.refresh()

    def end_waits(self, *, is_last: bool = False) -> None:
        """End the long polls under way, also without records; if `is_last`, all later ones too."""
        self._waiting.end_all(is_last=is_last)

    def check_serving(self) -> None:
        """Raise Unavailable after the last `end_waits`: a stream ends, because it cannot wait."""
        self._waiting.check_open()

    def _topic_of_id(self, topic_id: str) -> Topic | None:
        return self.state.topic_of_id(topic_id)

    # -- topics

    async def create_topic(
        self, name: str, partitions: int, configs: dict[str, str], *, validate_only: bool = False
    ) -> Topic | None:
        """Create and return a topic. If `validate_only`, only check the request and return None.
        Raises TopicExists, InvalidTopicName, InvalidPartitions, InvalidConfig."""
        check_new_name(name)
        check_partitions(partitions)
        configs = {
            key: topic_configs.canonical(key, value, self.state.level)
            for key, value in configs.items()
        }
        if name in self.state.topics:
            await self.wal.refresh()  # another broker may have just deleted it
        if name in self.state.topics:
            raise TopicExists(f"Topic '{name}' already exists.")
        if validate_only:
            return None
        await self.submit(CreateTopic(name, self.clock.new_id().hex(), partitions, configs))
        return self.state.topic(name)

    async def delete_topic(self, name: str) -> None:
        topic = await self._topic(name)
        await self.submit(DeleteTopic(topic.topic_id))

    async def alter_topic(self, name: str, configs: dict[str, str | None]) -> None:
        changes = topic_configs.canonical_changes(configs, self.state.level)
        await self.submit(AlterTopic((await self._topic(name)).topic_id, changes))

    async def set_topic_defaults(self, values: dict[str, str | None]) -> None:
        """Set defaults of topics, by the names of `topic_configs.DEFAULTS`. None removes a default.
        Other defaults stay, so two callers at once lose no change. Raises InvalidConfig."""
        changes = topic_configs.canonical_defaults(values, self.state.level)
        if changes:
            await self.submit(SetTopicDefaults(changes))

    async def add_partitions(self, name: str, partitions: int) -> None:
        """Grow the topic to `partitions`. Raises InvalidPartitions if it has that many or more."""
        check_partitions(partitions)
        await self.submit(AddPartitions((await self._topic(name)).topic_id, partitions))

    async def _topic(self, name: str) -> Topic:
        """Return the topic. If it is unknown, refresh the view before raising UnknownTopic (I3)."""
        if name not in self.state.topics:
            await self.wal.refresh()
        return self.state.topic(name)

    async def delete_records(self, topic: str, number: int, offset: int) -> int:
        """Move the log start of a partition up to `offset`, -1 for the high watermark. Return the
        log start. Retention removes the records below it from the table later.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, and the errors of `append`. After
        CommitUnknown the call may be repeated, because a log start never moves back.
        """
        await self.wal.refresh()  # -1 stands for all records acknowledged before this call (I3)
        partition = self.state.partition(topic, number)
        end = partition.high_watermark if offset == -1 else offset
        if not 0 <= end <= partition.log_start_offset:
            self.check_range(topic, number, end, partition)
            await self.submit(MoveLogStart(self.state.topic(topic).topic_id, number, end))
        return max(end, partition.log_start_offset)

    # -- records

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
    ) -> list[AppendedRange] | None:
        """Append one request's records, all or nothing. `size` is their weight in bytes, or more if
        the request takes more memory. Return the appended ranges, by part and then by partition. If
        they are not known yet (acks 0, or acks 1 with a hot log), return None. If `has_timestamps`
        is False, the broker has set all timestamps, and the writer does not check them.

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
        )
        return await self.writer.append(request, acks)

    async def transact(
        self,
        parts: Sequence[tuple[Topic, RecordPartitions, Rows | pa.RecordBatch]],
        offsets: Sequence[CommitOffsets],
        *,
        size: int,
        is_json: bool,
        key: IdempotencyKey | None = None,
    ) -> list[AppendedRange]:
        """Append records to several topics and commit offsets of groups, all or nothing (I4).

        Each topic occurs once. `size` is as in `append`. Returns the appended ranges in the order
        of `parts`, then by partition. Raises the errors of `append`, and IllegalGeneration.
        """
        request = AppendRequest(
            [part_rows(topic, places, rows) for topic, places, rows in parts],
            size,
            is_json=is_json,
            actions=offsets,
            key=key,
        )
        return await self._append(request)

    async def init_producer(self, producer_id: int = -1, epoch: int = -1) -> ProducerEpoch:
        """Return a new producer id, or the next epoch of a known id, which fences older epochs.
        `epoch` is the producer's current epoch, or -1 if unknown. Raises ProducerFenced.

        **On a crash** before the answer: a new id is never used. If a call with the current epoch
        is repeated, it returns the epoch of the first call.
        """
        action = InitProducer(producer_id, epoch)
        request = AppendRequest((), 0, actions=[action])
        await self._append(request)
        if request.producer is None:
            raise CommitUnknown("the new producer id is unknown: retry")
        return request.producer

    async def reserve_producers(self, count: int) -> int:
        """Reserve `count` producer ids for this broker and return the first. Raises InvalidRequest
        below level 4.

        **On a crash** before the answer: the ids are never used."""
        request = AppendRequest((), 0, actions=[ReserveProducers(count)])
        await self._append(request)
        if request.producer is None:
            raise CommitUnknown("the reserved producer ids are unknown: retry")
        return request.producer.producer_id

    async def submit(self, *actions: AnyAction) -> None:
        """Commit all actions or none (I4). Raises a refusal of `apply`, or an error of `append`;
        BoundReached, before the commit, for an action above a share that `apply` does not check."""
        with self.state.admitted(actions):
            await self._append(AppendRequest((), 0, actions=actions))

    async def _append(self, request: AppendRequest) -> list[AppendedRange]:
        placements = await self.writer.append(request, Acks.ALL)
        assert placements is not None, "acks=all returns the appended ranges"
        return placements

    # -- groups

    async def delete_group(self, group_id: str) -> None:
        """Delete the group with its committed offsets. Raises GroupNotEmpty."""
        await self.submit(DeleteGroup(group_id))

    def committed_offsets(self, group_id: str) -> dict[TopicPartition, CommittedOffset]:
        """Return the group's committed offsets, sorted by topic and partition."""
        offsets = {}
        for topic_id, partitions in self.state.committed_offsets.of_group(group_id).items():
            topic = self.state.topic_of_id(topic_id)
            assert topic is not None, "offsets go with their topic"
            for number, committed in partitions.items():
                offsets[TopicPartition(topic.name, number)] = committed
        return dict(sorted(offsets.items()))

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
        """Return records of [offset, offset_end). At the high watermark, wait up to `wait_s` for
        one. If `bytes_max` is 0, return the partition's offsets after the wait, but no records.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, Corrupt, Unavailable.
        """
        bounds = ReadBounds(bytes_max, records_max, offset_end)
        read = partial(self._fetch, topic, partition, offset, bounds, wait_s)
        return await self.wal.retry_after_suspend(read)

    async def _fetch(
        self, topic: str, partition: int, offset: int, bounds: ReadBounds, wait_s: float
    ) -> FetchResult:
        await self.wal.ensure_view()
        partition_state = await self._partition(topic, partition)
        if offset >= partition_state.high_watermark:
            await self.wal.refresh()  # records acknowledged before this call must be visible (I3)
            partition_state = self.state.partition(topic, partition)
        self.check_range(topic, partition, offset, partition_state)
        if offset == partition_state.high_watermark and wait_s > 0:
            await self._wait_for_records(self.state.topic(topic), partition, offset, wait_s)
            partition_state = self.state.partition(topic, partition)
            self.check_range(topic, partition, offset, partition_state)
        if offset == partition_state.high_watermark or not bounds.bytes_max:
            return FetchResult(
                [], offset, partition_state.log_start_offset, partition_state.high_watermark
            )
        read = partial(self.reader.read, self.state.topic(topic), partition, offset, bounds)
        result = await self.unless_removed(topic, partition, offset, read)
        start, end = partition_state.log_start_offset, partition_state.high_watermark
        return FetchResult(result.pieces, result.next_offset, start, end, result.weight)

    async def unless_removed(
        self, topic: str, partition: int, offset: int, read: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the result of a read from `offset` on. If the read finds the table in doubt,
        remember the doubt, unless a newer retention has removed the records: then raise
        OffsetOutOfRange."""
        try:
            return await read()
        except TableInDoubt as error:
            await self.wal.refresh()
            self.check_range(topic, partition, offset, self.state.partition(topic, partition))
            self.tables.doubt(self.state.topic(topic), error)
            raise

    async def _partition(self, topic: str, partition: int) -> Partition:
        """Return the partition. If it is unknown, refresh the view, then look again (I3)."""
        with contextlib.suppress(UnknownTopic, UnknownPartition):
            return self.state.partition(topic, partition)
        await self.wal.refresh()
        return self.state.partition(topic, partition)

    def check_range(self, topic: str, number: int, offset: int, partition: Partition) -> None:
        """Raise OffsetOutOfRange unless the offset is one of the partition, or its end."""
        if not partition.log_start_offset <= offset <= partition.high_watermark:
            raise OffsetOutOfRange(
                topic,
                number,
                offset,
                log_start_offset=partition.log_start_offset,
                high_watermark=partition.high_watermark,
            )

    async def _wait_for_records(
        self, topic: Topic, number: int, offset: int, wait_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        key = (topic.name, number)
        while topic.partitions[number].high_watermark <= offset and loop.time() < deadline:
            if not await self.wait_any([key], loop.create_future(), deadline):
                return
            if self.state.topics.get(topic.name) is not topic:
                return  # deleted, or the view was reloaded; the caller checks

    async def wait_any(
        self, partitions: Iterable[tuple[str, int]], waiter: "asyncio.Future[None]", deadline: float
    ) -> bool:
        """Wait until one of the partitions gets records, or a caller sets `waiter`. Return False if
        the loop's time reaches `deadline`, or at `end_waits`. Call while no records are new."""
        return await self._waiting.wait(list(partitions), waiter, deadline)

    async def turn(self) -> None:
        """Wait for a turn, as a read that a commit wakes: between two pages of many readers, other
        requests are served."""
        await self._waiting.turn()

    def changes_of(self, topic: str) -> TopicChanges:
        """Return the changes of the topic's partitions, for `wait_for_changes`."""
        return self._waiting.changes_of(topic)

    async def wait_for_changes(
        self, name: str, changes: TopicChanges, count: int, wait_s: float
    ) -> Topic:
        """Return the topic as soon as it has more changes than `count`, or after `wait_s`.

        This broker applies entries of other brokers when they are announced, or at the next `poll`.
        Raises UnknownTopic, Unavailable.
        """
        await self.wal.ensure_view()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        topic = await self._topic(name)
        while changes.count == count and loop.time() < deadline:
            if not await self.wait_any([(name, ANY_PARTITION)], loop.create_future(), deadline):
                break
            topic = self.state.topic(name)
        return topic

    async def offsets(self, topic: str, partition: int) -> Partition:
        """Refresh (I3), then return the partition: log start offset and high watermark."""
        await self.wal.refresh()
        return self.state.partition(topic, partition)

    async def offset_for_timestamp(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the first offset whose record has this timestamp (ms) or a later one, or None."""

        async def search() -> int | None:
            await self.wal.refresh()
            self.state.partition(topic, partition)
            topic_state = self.state.topic(topic)
            start = topic_state.partitions[partition].log_start_offset
            try:
                return await self.reader.offset_for_timestamp(topic_state, partition, timestamp)
            except TableInDoubt:
                await self.wal.refresh()  # a retention may be newer than the view
                if self.state.partition(topic, partition).log_start_offset == start:
                    raise
            return await self.reader.offset_for_timestamp(
                self.state.topic(topic), partition, timestamp
            )

        return await self.wal.retry_after_suspend(search)

    async def seal(self, topic: str, partitions: Sequence[int] | None = None) -> int:
        """Seal before `segment.ms` or `segment.bytes` is reached; return the number of rows."""
        return await self.sealer.seal(await self._topic(topic), partitions)

    def note_doubt(self, topic: Topic, error: TableInDoubt | None) -> None:
        """Remember the doubt that a check of the topic's table found, or None if it found none."""
        self.tables.doubt(topic, error)

    # -- what follows from commits

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        """Drop data of deleted topics and lost records; wake fetches of changed partitions."""
        for commit in entry.commits:
            if commit.hot is not None:
                marks = {commit.hot.log_id: commit.hot.seq}
                self.writer.check_marks(marks, entry.seq, is_reset=False)
            for action in commit.actions:
                if isinstance(action, LoseRecords):  # from a repair; do not serve them
                    self.losses += 1
                    self.tail.forget(action.topic_id, action.partition)
                elif isinstance(action, AddPartitions):
                    grown = self._topic_of_id(action.topic_id)
                    if grown is not None:
                        self._waiting.wake_all(grown.name)  # for `wait_for_changes`
        for topic in applied.deleted:
            self.tail.forget_topic(topic.topic_id)
            self.tables.forget(topic.topic_id)
            self._waiting.wake_all(topic.name)
        if not self._waiting.has_readers:
            return
        for outcome in applied.outcomes:
            if not outcome.is_duplicate:
                for placement in outcome.placements:
                    self._waiting.wake_reads(placement.topic, placement.partition)

    def on_reset(self) -> None:
        """Drop the data that was derived from an expired view; wake all fetches."""
        self.writer.check_marks(self.wal.state.hot_logs, self.wal.state.seq, is_reset=True)
        self.losses += 1
        self.tail.clear()
        self.tables.forget_unknown()
        self._waiting.wake_all()
