"""The deep interface of tidelog: append, fetch, offsets, topics, seal, on one object store.

A `Log` is one broker's whole memory of a cluster. Everything it holds can be lost at any moment:
the store has what is committed, the hot log what acks=1 promised. Invariants: I1 to I7 and I10 by
the modules it composes; this one adds waiting (long polls), ages the view and recovers the hot log.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from storage import hotlog, keys, topics
from storage.access_changes import AccessChanges
from storage.chunk import Rows
from storage.clock import Clock
from storage.entry import (
    AddPartitions,
    AlterTopic,
    AnyAction,
    Commit,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    Draft,
    IdempotencyKey,
    RetireHotLog,
)
from storage.errors import (
    InvalidRequest,
    LogError,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from storage.exactly_once import ExactlyOnce
from storage.groups import CommittedOffset
from storage.hot import ClosedSegment, Encoded, Request, part_rows
from storage.manifest import Table
from storage.members import MembershipSettings
from storage.membership import Membership
from storage.model import Placement, TopicPartition
from storage.objectstore import ObjectStore
from storage.partition import Partition
from storage.partitioner import Places
from storage.reader import Piece, Reader, ReaderSettings, read_awake
from storage.sealer import DUTIES_END_S, Sealer, SealerSettings
from storage.sequencer import Sequencer, SequencerSettings
from storage.state import PARTITIONS_MAX, ClusterState, Outcome, Topic
from storage.table import open_table
from storage.tail import TailCache
from storage.wakeups import NoPeers, PeerTransport
from storage.wal import Wal, WalSettings
from storage.writer import Acks, Writer, WriterSettings

log = logging.getLogger("tidelog.log")


class LogSettings(NamedTuple):
    """Values of all parts; the service reads them from its settings."""

    wal: WalSettings = WalSettings()
    writer: WriterSettings = WriterSettings()
    reader: ReaderSettings = ReaderSettings()
    sealer: SealerSettings = SealerSettings()
    membership: MembershipSettings = MembershipSettings()
    sequencer: SequencerSettings = SequencerSettings()
    tail_cache_bytes: int = 256 * 1024 * 1024
    poll_interval_s: float = 1.0
    """How often an idle broker looks for entries of others; keeps its view fresh, too."""
    is_sealing: bool = True


class Fetched(NamedTuple):
    """An answer to a fetch. `next_offset` is where to go on; pieces may be empty at the end."""

    pieces: list[Piece]
    next_offset: int
    log_start_offset: int
    high_watermark: int


class Log:
    """One broker's log. Made by `open_log`; owned by one event loop; `close` drains it."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        broker_id: str,
        settings: LogSettings,
        hot_dir: Path | None,
        *,
        peers: PeerTransport | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.hot_dir = hot_dir
        self.wal = Wal(store, clock, broker_id, settings.wal)
        self.tail = TailCache(settings.tail_cache_bytes)
        self.reader = Reader(store, self.tail, self.table_of, settings.reader)
        self.writer = Writer(self.wal, clock, settings.writer, self._on_committed)
        self.exactly_once = ExactlyOnce(self.writer, clock)
        self.access = AccessChanges(self.writer, clock)
        self.membership = Membership(store, clock, broker_id, settings.membership)
        self.sequencer = Sequencer(
            self.wal, clock, self.membership, peers or NoPeers(), settings.sequencer
        )
        self.writer.committer = self.sequencer
        self.reader.told = self.sequencer.told_bodies
        self.sealer = Sealer(store, clock, self.reader, self.writer, self.table_of, settings.sealer)
        self.sealer.is_mine = lambda topic: self.membership.is_first_for(topic.topic_id)
        self._tables: dict[str, asyncio.Future[Table]] = {}
        self.listeners: list[Callable[[], None]] = []
        """Called after every entry that was folded in, and when the view was loaded anew."""
        self._waiting: dict[tuple[str, int], set[asyncio.Future[None]]] = {}
        self._deleted_seen = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False

    # -- life

    async def open(self, cluster_id: str | None = None) -> None:
        """Load the cluster, commit what a dead process left in the hot log, start the duties.

        Raises StoreUnfit, Corrupt or Unavailable: a broker that cannot do this must not serve.
        """
        await self.wal.open(cluster_id)
        self.wal.listener = self
        left: list[hotlog.Recovered] = []
        if self.hot_dir is not None:
            log_id = self.clock.new_id().hex()
            identity = self.wal.cluster.cluster_id
            left = await asyncio.to_thread(hotlog.recover, self.hot_dir, identity)
            self.writer.hot_log = hotlog.HotLog(
                self.hot_dir,
                identity,
                log_id,
                self.writer.enqueue_durable,
                self.writer.release,
            )
        self.writer.start()
        await self._recommit(left)
        self._tasks.append(asyncio.create_task(self._poll(), name="tidelog-poll"))
        if self.settings.is_sealing:
            run = self.sealer.run(lambda: self.wal.state)
            self._tasks.append(asyncio.create_task(run, name="tidelog-sealer"))

    async def _recommit(self, files: list[hotlog.Recovered]) -> None:
        requests = [request for file in files for request in file.requests]
        for waiter in self.writer.recover(requests):
            # Refused for good, because its topic was deleted meanwhile, is as decided as applied.
            with contextlib.suppress(UnknownTopic, InvalidRequest):
                await waiter
        if requests:
            log.info("hot log: %d requests of a dead broker are in the WAL", len(requests))
        # All of them are applied or known: only now may the files go, and then the marks.
        finished = await asyncio.to_thread(hotlog.discard, files)
        retired = [RetireHotLog(log_id) for log_id in sorted(finished)]
        if retired:  # not waited for: it only frees memory, and a flush may be a minute away
            request = Request(self.clock.new_id(), (), 0, actions=retired)
            await self.writer.append(request, Acks.NONE)

    async def join(self, address: str, port: int = 0) -> None:
        """Be one of the cluster's brokers, reached by its peers at `address`, which must answer
        from now on, and by clients at `port`. A broker that never joins commits for itself, which
        is as correct."""
        await self.membership.join(self.wal.cluster.cluster_id, address, port)
        self._tasks.append(asyncio.create_task(self.membership.run(), name="tidelog-members"))

    def drain(self) -> None:
        """The end is near: flushes wait for no interval, and nobody waits here for new records."""
        self._is_draining = True
        self.sequencer.refuse()
        self.writer.hurry()
        for key in list(self._waiting):
            self._wake(key)

    async def close(self) -> None:
        """Flush, stop, release. Acked records are safe whether or not this is ever called."""
        for task in self._tasks:
            task.cancel()
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.wait([ended], timeout=DUTIES_END_S)
        await self.writer.close()
        await self.sequencer.close()
        if self.membership.me.address:
            await self.membership.leave()
        await self._retire_hot_log()
        await self.wal.close()
        self.sealer.close()
        self.reader.close()
        for table in self._tables.values():
            if table.done() and table.exception() is None:
                table.result().close()

    async def _retire_hot_log(self) -> None:
        """All that was in it is committed and its files are gone: nobody will look for its mark.
        Dying before leaves a mark of fifty bytes."""
        hot_log = self.writer.hot_log
        if hot_log is None or hot_log.log_id not in self.state.hot_logs:
            return
        left = await asyncio.to_thread(list, hot_log.directory.glob(f"{hot_log.log_id}-*.hot"))
        if not left:
            commit = Commit(self.clock.new_id(), [RetireHotLog(hot_log.log_id)])
            with contextlib.suppress(LogError):
                await self.wal.commit(Draft([commit], [], []))

    async def run_until_failed(self) -> None:
        """Returns never; raises when one of the log's own tasks has died, which is a bug."""
        writer = self.writer.task
        assert writer is not None, "run_until_failed before open"
        done, _ = await asyncio.wait([writer, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll_interval_s)
            try:
                await self.wal.refresh()
            except LogError as error:
                log.warning("cannot read the WAL: %s", error)

    @property
    def state(self) -> ClusterState:
        """The newest state this broker knows: look, do not touch."""
        return self.wal.state

    # -- topics

    async def create_topic(
        self, name: str, partitions: int, configs: dict[str, str], *, validate_only: bool = False
    ) -> Topic | None:
        """Raises TopicExists, InvalidConfig, InvalidRequest; None when only validated."""
        for config, value in configs.items():
            topics.check(config, value)
        if not keys.is_topic_name(name):
            raise InvalidRequest(
                f"topic name {name!r} is illegal: 1 to 249 of a-z A-Z 0-9 . _ - and not . or .."
            )
        _check_partitions(partitions)
        if name in self.state.topics:
            await self.wal.refresh()  # another broker may just have deleted it
        if name in self.state.topics:
            raise TopicExists(f"Topic '{name}' already exists.")
        if validate_only:
            return None
        await self._submit([CreateTopic(name, self.clock.new_id().hex(), partitions, configs)])
        return self.state.topic(name)

    async def delete_topic(self, name: str) -> None:
        topic = await self._topic(name)
        await self._submit([DeleteTopic(topic.topic_id)])
        self.tail.forget_topic(topic.topic_id)
        self._tables.pop(topic.topic_id, None)

    async def alter_topic(self, name: str, configs: dict[str, str | None]) -> None:
        """Set configs; None returns one to its default."""
        for config, value in configs.items():
            if value is not None or config not in topics.CONFIGS:
                topics.check(config, value or "")
        await self._submit([AlterTopic((await self._topic(name)).topic_id, configs)])

    async def add_partitions(self, name: str, partitions: int) -> None:
        """Grow the topic to so many partitions; raises InvalidRequest if that is no growth."""
        _check_partitions(partitions)
        await self._submit([AddPartitions((await self._topic(name)).topic_id, partitions)])

    async def _topic(self, name: str) -> Topic:
        """The topic; before it is said not to exist, the WAL is asked (I3)."""
        if name not in self.state.topics:
            await self.wal.refresh()
        return self.state.topic(name)

    async def _submit(self, actions: Sequence[AnyAction]) -> None:
        await self.writer.append(Request(self.clock.new_id(), (), 0, actions=actions), Acks.ALL)

    # -- records

    async def append(
        self,
        topic: Topic,
        parts: Sequence[tuple[Places, Rows | pa.RecordBatch]],
        *,
        size: int,
        is_json: bool,
        acks: Acks = Acks.ALL,
        key: IdempotencyKey | None = None,
    ) -> list[Placement] | None:
        """Append one request's records, atomically: `parts` are (where to, rows); `size` is their
        bytes. Placements in order of `parts`, and within one by partition; None for acks 0 and 1.

        Raises UnknownPartition, Throttled, Unavailable, CommitUnknown, IdempotencyMismatch.
        """
        request = Request(
            self.clock.new_id(),
            [part_rows(topic, places, rows) for places, rows in parts],
            size,
            is_json=is_json,
            key=key,
            topic_id=topic.topic_id,
        )
        return await self.writer.append(request, acks)

    async def delete_group(self, group_id: str) -> None:
        """With all that it committed; raises GroupNotEmpty."""
        await self._submit([DeleteGroup(group_id)])

    def committed_offsets(self, group_id: str) -> dict[TopicPartition, CommittedOffset]:
        """Of the group, sorted; empty when it has none."""
        found = {}
        for topic_id, partitions in self.state.groups.offsets(group_id).items():
            topic = self.state.topic_of_id(topic_id)
            assert topic is not None, "offsets go with their topic"
            for number, committed in partitions.items():
                found[TopicPartition(topic.name, number)] = committed
        return dict(sorted(found.items()))

    async def fetch(
        self, topic: str, partition: int, offset: int, *, bytes_max: int, wait_s: float = 0.0
    ) -> Fetched:
        """Records from `offset` on, of both tiers; at the end, waits up to `wait_s` for the first.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, Corrupt, Unavailable.
        """
        read = partial(self._fetch, topic, partition, offset, bytes_max, wait_s)
        return await read_awake(self.clock, self.settings.wal.view_age_max_s, read)

    async def _fetch(
        self, topic: str, partition: int, offset: int, bytes_max: int, wait_s: float
    ) -> Fetched:
        await self.wal.ensure_view()
        held = await self._partition(topic, partition)
        if offset >= held.high_watermark:
            # What we know may be old: whoever was acked before this call must be seen (I3).
            await self.wal.refresh()
            held = self.state.partition(topic, partition)
        self._check_range(topic, partition, offset, held)
        if offset == held.high_watermark and wait_s > 0:
            await self._wait_for_records(self.state.topic(topic), partition, offset, wait_s)
            held = self.state.partition(topic, partition)
            self._check_range(topic, partition, offset, held)
        if offset == held.high_watermark:
            return Fetched([], offset, held.log_start_offset, held.high_watermark)
        taken = await self.reader.read(self.state.topic(topic), partition, offset, bytes_max)
        return Fetched(taken.pieces, taken.next_offset, held.log_start_offset, held.high_watermark)

    async def _partition(self, topic: str, partition: int) -> Partition:
        """The partition; before it is said not to exist, the WAL is asked (I3)."""
        with contextlib.suppress(UnknownTopic, UnknownPartition):
            return self.state.partition(topic, partition)
        await self.wal.refresh()
        return self.state.partition(topic, partition)

    def _check_range(self, topic: str, number: int, offset: int, partition: Partition) -> None:
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
                return  # deleted, or the view was loaded anew: the caller looks again

    async def wait_any(
        self,
        partitions: Iterable[tuple[str, int]],
        waiter: "asyncio.Future[None]",
        deadline: float,
    ) -> bool:
        """Wait until one of the partitions has more, or anybody sets `waiter`; False when the
        loop's time came to `deadline` first. What was there before the call is not waited for."""
        if self._is_draining:
            raise Unavailable("this broker is shutting down: read on from another")
        keys = list(partitions)
        for key in keys:
            self._waiting.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            for key in keys:
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.discard(waiter)
                    if not waiting:
                        del self._waiting[key]
        return True

    async def offsets(self, topic: str, partition: int) -> Partition:
        """The partition as of now on every broker (I3): its log start and high watermark."""
        await self.wal.refresh()
        return self.state.partition(topic, partition)

    async def offset_for_timestamp(self, topic: str, partition: int, timestamp: int) -> int | None:
        """The first offset stamped at or after `timestamp` (ms), None when there is none yet."""

        async def search() -> int | None:
            await self.wal.refresh()
            self.state.partition(topic, partition)
            found = self.state.topic(topic)
            return await self.reader.offset_for_timestamp(found, partition, timestamp)

        return await read_awake(self.clock, self.settings.wal.view_age_max_s, search)

    async def seal(self, topic: str, partitions: Sequence[int] | None = None) -> int:
        """Seal now, whatever `segment.ms` and `segment.bytes` say; returns records sealed."""
        return await self.sealer.seal(await self._topic(topic), partitions)

    # -- what follows from commits

    def on_applied(self, outcomes: list[Outcome]) -> None:
        """An entry was folded in: wake who waits for its partitions."""
        for listener in self.listeners:
            listener()
        if not self._waiting:
            return
        if len(self.state.deleted) != self._deleted_seen:
            self._deleted_seen = len(self.state.deleted)
            for key in [key for key in self._waiting if key[0] not in self.state.topics]:
                self._wake(key)
        for outcome in outcomes:
            if not outcome.is_duplicate:
                for placement in outcome.placements:
                    self._wake((placement.topic, placement.partition))

    def on_reset(self) -> None:
        """The view was void: nothing that was derived from it may be served."""
        self.tail.clear()
        for listener in self.listeners:
            listener()
        for key in list(self._waiting):
            self._wake(key)

    def _wake(self, key: tuple[str, int]) -> None:
        for waiter in self._waiting.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _on_committed(
        self, segment: ClosedSegment, encoded: Encoded, outcomes: Sequence[Outcome]
    ) -> None:
        """Keep the records of an own commit: most reads want what was just written."""
        for number, first, count, placement in segment.applied_runs(outcomes):
            chunk = encoded.draft.chunks[number]
            if (topic := self.state.topic_of_id(chunk.topic_id)) is None:
                continue
            partition = topic.partitions[placement.partition]
            if (at := partition.run_at(placement.base_offset)) < 0:
                continue  # sealed since
            self.reader.close_gap(topic, placement.partition, placement.base_offset)
            run = partition.tail[at]
            batch = encoded.batches[number].slice(first, count)
            self.tail.add(
                (topic.topic_id, placement.partition),
                placement.base_offset,
                batch,
                is_json=chunk.is_json,
                nbytes=chunk.raw_size * count // chunk.rows,
                append_ms=run.append_ms,
            )

    async def table_of(self, topic: Topic) -> Table:
        """The topic's manifest, opened once."""
        opening = self._tables.get(topic.topic_id)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = asyncio.ensure_future(open_table(self.store, topic.prefix, topic.name))
            self._tables[topic.topic_id] = opening
        try:
            return await asyncio.shield(opening)
        except OSError as error:
            raise Unavailable(f"table of {topic.name} cannot be opened: {error}") from error


def _check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidRequest(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
