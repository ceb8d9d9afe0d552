"""One broker of a cluster: its log, its peers and its groups. Commits may go through a sequencer.

Only `Broker.open` composes these parts. A serving process, the tests and the simulator call it. It
constructs parts in the order in which they receive applied entries: sequencer, log, consumer
groups. Nothing is assigned to a part after its construction.

**On a crash** at any moment: the store has the committed requests, the hot log has the requests
that were acknowledged with acks=1. The next `open` in the same folder commits the requests of the
hot log that are not committed yet.

`BrokerStats` has the counters and gauges of the parts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidelog.storage.cluster.announcer import NO_PEERS, AnnouncerCounters, PeerTransport
from tidelog.storage.cluster.liveness import KafkaListener, Member, MembershipSettings
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import Notice, announced_notice
from tidelog.storage.cluster.secret import cluster_secret
from tidelog.storage.cluster.sequencer import Sequencer, SequencerCounters, SequencerSettings
from tidelog.storage.cluster_access import ClusterAccess
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core.actions import RetireHotLog
from tidelog.storage.core.errors import (
    InvalidRequest,
    LogError,
    SetAside,
    Unavailable,
    UnknownTopic,
)
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.groups.coordinator import Coordinator
from tidelog.storage.groups.coordinator_choice import Rendezvous
from tidelog.storage.groups.kafka_groups import KafkaGroups
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.kafka_log import KafkaLog
from tidelog.storage.log import Log, LogSettings
from tidelog.storage.read.cache import Cache
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.observer import NO_OBSERVER, Observer
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.seal.sealer import BACKGROUND_STOP_S, SealerCounters, SealerSettings
from tidelog.storage.state.access import TopicFilter, all_topics
from tidelog.storage.store.metered import MeteredStore, StoreCounters
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.start_retry import StartRetry
from tidelog.storage.stored_objects import StoredObjects
from tidelog.storage.wal.announced import AnnouncedChunks
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalCounters, WalObjects, WalSettings
from tidelog.storage.write import hot_log_copies, hot_log_file
from tidelog.storage.write.writer import WriterCounters, WriterSettings


class CacheStats(NamedTuple):
    """The state of one cache. `hits` and `misses` count since the process started."""

    bytes: int
    bytes_max: int
    hits: int = 0
    misses: int = 0


class BrokerStats(NamedTuple):
    """All counters of a broker's parts since the process started, and their current gauges. The
    counters still change: read them before the next await. `store` is None if the store is not
    metered."""

    writer: WriterCounters
    wal: WalCounters
    sequencer: SequencerCounters
    announcer: AnnouncerCounters
    sealer: SealerCounters
    store: StoreCounters | None
    caches: Mapping[str, CacheStats]
    cold_reads: int
    buffered_bytes: int
    buffered_bytes_max: int
    view_age_s: float
    set_aside: int
    """Number of requests of the hot log that the store refuses."""
    failing_seals: list[tuple[str, int]]
    """The due partitions whose last seal failed, by topic id and number."""
    gone: list[Member]
    """The brokers whose heartbeats ended without a clean stop."""


def cache_stats(cache: Cache[Any, Any]) -> CacheStats:
    return CacheStats(cache.bytes, cache.bytes_max, cache.hits, cache.misses)


__all__ = [  # includes the settings of a broker's parts
    "BACKGROUND_STOP_S",
    "NO_OBSERVER",
    "NO_PEERS",
    "Broker",
    "BrokerStats",
    "LogSettings",
    "Members",
    "MembershipSettings",
    "Observer",
    "PeerTransport",
    "ReaderSettings",
    "SealerSettings",
    "SequencerSettings",
    "WalSettings",
    "WriterSettings",
]

log = logging.getLogger("tidelog.log")

READY_WAIT_S = 1.0
CHECKPOINT_STOP_S = 5.0
"""Longest wait for the checkpoint at a stop. Without a checkpoint, the next start reads more."""
READY_GRACE_S = 10.0
"""A broker stays ready for this time while the store does not answer."""
NOTICE_S = 1.0


class Members(NamedTuple):
    """The live brokers that are not leaving: `peers` answer this broker, `live` has all others."""

    me: Member
    peers: list[Member]
    sequencer: Member
    live: list[Member]

    @property
    def is_sequencer(self) -> bool:
        return self.sequencer.id == self.me.id


class Broker(Log):
    """A broker of a cluster, from `open` to `close`, owned by one event loop.

    It inherits from `Log`, because delegation would add a call to each append and fetch.
    """

    def __init__(
        self,
        wal: WalView,
        settings: LogSettings,
        name: str,
        hot_dir: Path | None,
        peers: PeerTransport,
        observer: Observer,
        may_describe: TopicFilter,
    ) -> None:
        """Use `open`."""
        announced = AnnouncedChunks()
        self.membership = Membership(
            wal.store, wal.clock, name, wal.cluster.cluster_id, settings.membership
        )
        self.sequencer = Sequencer(wal, self.membership, peers, announced, settings.sequencer)
        super().__init__(
            wal,
            settings,
            committer=self.sequencer,
            announced=announced,
            owns=self.membership.is_first_for,
            hot_dir=hot_dir,
            observer=observer,
        )
        cluster = self.membership
        coordinators = Rendezvous(
            cluster.me.id, cluster.reached_ids, lambda: cluster.is_leaving, cluster.has_released
        )
        self.coordinator = Coordinator(self, coordinators)
        commits = OffsetCommits(self)
        self.rest_groups = RestGroups(self, self.coordinator, commits, may_describe)
        self.kafka_groups = KafkaGroups(self, self.coordinator, commits, settings.group_delay_s)
        self.kafka = KafkaLog(self)
        self.access = ClusterAccess(self)
        self.stored = StoredObjects(self)
        self.name = name
        self._has_peers = peers is not NO_PEERS
        self._retry = StartRetry(wal.clock, settings.start_retry_s)
        self._fresh_s: float | None = None
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- life

    @classmethod
    async def open(  # noqa: PLR0913 - the only composition
        cls,
        store: ObjectStore,
        settings: LogSettings,
        *,
        clock: Clock,
        name: str = "",
        cluster_id: str | None = None,
        hot_dir: Path | None = None,
        peers: PeerTransport = NO_PEERS,
        observer: Observer = NO_OBSERVER,
        may_describe: TopicFilter = all_topics,
    ) -> "Broker":
        """Open the cluster in `store`, or create it. Then commit the requests in the hot log that
        a crashed process left in `hot_dir`. With `peers`, call `join` next.

        Raises StoreUnfit (also if the cluster's id is not `cluster_id`), Corrupt or Unavailable.
        """
        objects = WalObjects(store, clock)
        retry = StartRetry(clock, settings.start_retry_s)
        cluster = await retry.until_done(
            lambda: objects.open_cluster(cluster_id, is_creating=True, bounds=settings.wal.bounds)
        )
        process = clock.new_id().hex()
        name = name or process[:12]
        # Several processes may use `name` in turn; the WAL needs a name of this process alone.
        wal = WalView(objects, cluster, f"{name}-{process}", settings.wal)
        broker = cls(wal, settings, name, hot_dir, peers, observer, may_describe)
        try:
            await broker._start(hot_dir)
        except (Exception, asyncio.CancelledError):
            await broker.release()
            raise
        return broker

    async def _start(self, hot_dir: Path | None) -> None:
        await self._retry.until_done(self.wal.load)
        bounds = self.state.bounds
        if bounds.is_test:
            log.warning("the cluster has bounds for tests: %s", bounds.now)
        elif bounds.now != self.settings.wal.bounds:
            log.info("the cluster's bounds are in effect, not this broker's: %s", bounds.now)
        left: list[hot_log_file.Recovered] = []
        if hot_dir is not None:
            cluster_id = self.identity.cluster_id
            left = await asyncio.to_thread(hot_log_file.recover, hot_dir, cluster_id)
        self.writer.start()
        await self._recommit(left)
        self._tasks.append(asyncio.create_task(self.poll(), name="tidelog-poll"))
        self.wal.begin_checkpoint()
        if self.settings.is_sealing:
            run = self.sealer.run(lambda: self.wal.state)
            self._tasks.append(asyncio.create_task(run, name="tidelog-sealer"))
        if not self._has_peers:
            self._start_groups()

    async def _recommit(self, files: list[hot_log_file.Recovered]) -> None:
        files = await hot_log_copies.settled(self.wal, files)
        kept_files = [file for file in files if file.is_kept and file.requests]
        files = [file for file in files if file not in kept_files]
        requests = [request for file in files for request in file.requests]
        for waiter in self.writer.recover(requests):
            # A refusal is a final outcome, for example because the topic was deleted since. A
            # request that is set aside is in another file.
            with contextlib.suppress(UnknownTopic, InvalidRequest, SetAside):
                await waiter
        if requests:
            log.info("hot log: recovered %d requests of a crashed process", len(requests))
        # All requests have an outcome. Only now delete the files, and then retire their marks.
        await self.writer.retire(await asyncio.to_thread(hot_log_file.discard, files))
        # Not before `files` are deleted, because they may contain the same requests as
        # `kept_files`.
        if kept_files:
            self.writer.adopt(kept_files)

    async def join(
        self, address: str, port: int = 0, kafka: tuple[KafkaListener, ...] = ()
    ) -> None:
        """Register as a broker of the cluster. From now on, peers must be able to reach this broker
        at `address`, and clients at `port` and `kafka`. Without `join`, a broker commits alone."""
        await self.membership.join(address, port, kafka)
        self.sequencer.announcer.announce(announced_notice(Notice(self.membership.me.id)))
        self._tasks.append(asyncio.create_task(self.membership.run(), name="tidelog-members"))
        if kafka:
            self._tasks.append(asyncio.create_task(self.sequencer.beats.run()))
        if self._has_peers:
            self._start_groups()  # only now: without its peers it would take over their groups

    def _start_groups(self) -> None:
        if self.settings.is_coordinating:
            run = self.coordinator.run(self.rest_groups.do_duties)
            self._tasks.append(asyncio.create_task(run, name="tidelog-groups"))

    async def run_until_failed(self) -> None:
        """Wait until a background task fails (a bug), or until a copy of this process writes to the
        log (Fenced). Then raise the exception."""
        fenced = asyncio.create_task(self.wal.copy_fence.until_fenced(), name="tidelog-fence")
        tasks = [fenced, self.writer.task, *self._tasks]
        running = [task for task in tasks if task is not None]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            fenced.cancel()

    async def hand_over(self) -> None:
        """Be not ready from now on, but serve all requests. End the long polls under way. Give the
        roles of sequencer and coordinator to live peers, if there are any; then requests of groups
        must go there. Takes at most 5 s. Call `drain` later.

        **On a crash**: peers without the notice take the roles when they miss this broker."""
        self._is_stopping = True
        if self._has_peers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_S):
                    await self.membership.look_again()  # a broker may have joined just now
        if not self.membership.reached:
            self.end_waits()
            return
        requests = self.rest_groups.requests
        requests.begin_release()
        self.end_waits()
        try:
            is_idle = await requests.finish(self.rest_groups.commit_delivered)
            self.rest_groups.release()
            self.membership.begin_leaving()
            notice = Notice(self.membership.me.id, is_leaving=True, has_released=is_idle)
            await self.sequencer.announcer.notify(notice, NOTICE_S)
        finally:
            self.kafka_groups.release()
            requests.end_release()

    def drain(self) -> None:
        """Prepare `close`: flush without delay, end all waits, refuse drafts of peers."""
        self._is_stopping = True
        self.sequencer.refuse()
        self.writer.flush_without_delay()
        self.kafka_groups.release()
        self.end_waits(is_last=True)

    async def close(self) -> None:
        """Flush all requests, stop the tasks, free files and threads. Acknowledged records are safe
        without this call, too."""
        self.kafka_groups.release()
        with contextlib.suppress(LogError):
            await self.rest_groups.commit_delivered()
        await self.coordinator.close()
        for task in self._tasks:
            task.cancel()
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.wait([ended], timeout=BACKGROUND_STOP_S)
        await self.writer.close()
        await self.sequencer.close()
        if self.membership.me.address:
            await self.membership.leave()
        await self._retire_hot_log()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECKPOINT_STOP_S):
                await self.wal.checkpoint_at_end()
        await self.wal.close()
        self.sealer.close()
        self.reader.close()

    async def _retire_hot_log(self) -> None:
        """Retire the mark of this process's hot log if the log has no file left, because then all
        its requests are committed.

        **On a crash** before the commit, the mark stays in the state: fifty bytes."""
        hot_log = self.writer.hot_log
        if hot_log is None or hot_log.log_id not in self.state.hot_logs:
            return
        left = await asyncio.to_thread(list, hot_log.directory.glob(f"{hot_log.log_id}-*.hot"))
        if not left:
            commit = Commit(self.clock.new_id(), [RetireHotLog(hot_log.log_id)])
            with surviving(log, "retiring the mark of the hot log"):
                await self.wal.commit(Draft([commit], [], []))

    async def release(self) -> None:
        """Free tasks, threads and file locks without a flush, as the end of a process does."""
        tasks = [*self._tasks, *self.coordinator.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.writer.release_files()
        await self.wal.close()
        self.sealer.close()
        self.reader.close()

    async def check_ready(self) -> None:
        """Raise Unavailable, with the reason, unless this broker can serve requests.

        It read the WAL to its end within READY_GRACE_S, can write, and its clock is right."""
        if why := self.why_not_writing():
            raise Unavailable(why)
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self.refresh()
        except (LogError, TimeoutError) as error:
            age_s = self.clock.boot_s() - (self._fresh_s or 0.0)
            if self._fresh_s is None or age_s > READY_GRACE_S:
                why = str(error) or f"no answer within {READY_WAIT_S:.0f} s"
                raise Unavailable(f"the WAL cannot be read: {why}") from error
        else:
            self._fresh_s = self.clock.boot_s()
        if why := self.store_time.why_wrong():
            raise Unavailable(why)

    def why_not_writing(self) -> str:
        """Return why this broker cannot write, as far as it knows, or ""."""
        if self._is_stopping or self.writer.task is None or self.writer.task.done():
            return "this broker is shutting down"
        why = self.writer.why_failing() or self.membership.why_failing()
        return why and f"the store does not accept writes: {why}"

    @property
    def set_aside(self) -> int:
        """The number of requests that were acknowledged with acks=1 and that the store refuses."""
        return 0 if self.writer.hot_log is None else len(self.writer.hot_log.kept)

    # -- the cluster

    def members(self) -> Members:
        membership, me = self.membership, self.membership.me
        return Members(me, membership.reached, self.sequencer.target or me, membership.others)

    @property
    def peer_api(self) -> Sequencer:
        """The handler of messages from peers, which prove that they can read the store."""
        return self.sequencer

    async def secret(self) -> bytes:
        """Return the cluster's secret: 32 bytes, the same on every broker. Raises StoreUnfit."""
        return await self._retry.until_done(lambda: cluster_secret(self.store, self.clock))

    def doubts(self) -> dict[str, str]:
        """Return the reason for each table that this broker found in doubt, by topic name."""
        doubts, topic_of = self.tables.doubts, self.state.topic_of_id
        topic_doubts = ((topic_of(topic_id), error) for topic_id, error in doubts.items())
        return {topic.name: str(error) for topic, error in topic_doubts if topic is not None}

    def damaged_tails(self) -> dict[TopicPartition, str]:
        """Return the reason for each partition whose tail this broker could not seal, because an
        object is damaged."""
        tails = (
            (self.state.topic_of_id(topic_id), number, error)
            for (topic_id, number), error in self.sealer.damaged.items()
        )
        return {
            TopicPartition(topic.name, number): str(error)
            for topic, number, error in tails
            if topic is not None
        }

    def stats(self) -> BrokerStats:
        reader, tail, writer = self.reader, self.tail, self.writer
        return BrokerStats(
            writer=writer.counters,
            wal=self.wal.counters,
            sequencer=self.sequencer.counters,
            announcer=self.sequencer.announcer.counters,
            sealer=self.sealer.counters,
            store=self.store.counters if isinstance(self.store, MeteredStore) else None,
            caches={
                "tail": CacheStats(tail.bytes, tail.bytes_max),
                "chunk": cache_stats(reader.chunk_cache),
                "segment": cache_stats(reader.segments.groups),
                "footer": cache_stats(reader.segments.footers),
            },
            cold_reads=reader.segments.cold_reads,
            buffered_bytes=writer.buffered_bytes,
            buffered_bytes_max=writer.settings.buffer_bytes_max,
            view_age_s=self.wal.view_age_s,
            set_aside=self.set_aside,
            failing_seals=self.sealer.failing,
            gone=self.membership.gone,
        )
