"""One broker of a cluster: its log, its peers and its groups. Commits may go through a sequencer.

Only `Broker.open` composes these parts. A serving process, the tests and the simulator call it. The
parts are private. Clients of a broker use its facets, each of which does one kind of work with the
parts: topics, records, groups, the cluster. Nothing is assigned to a part after its construction.

**On a crash** at any moment: the store has the committed requests, the hot log has the requests
that were acknowledged with acks=1. The next `open` in the same folder commits the requests of the
hot log that are not committed yet.

`BrokerStats` has the counters and gauges of the parts.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidelog.storage.access_changes import ClusterAccess
from tidelog.storage.cluster.cluster import Cluster, Members
from tidelog.storage.cluster.entry_announcer import AnnouncerCounters
from tidelog.storage.cluster.liveness import KafkaListener, Member, MembershipSettings
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import Notice, announced_notice
from tidelog.storage.cluster.peer_transport import NO_PEERS, PeerTransport
from tidelog.storage.cluster.sequencer import Sequencer, SequencerCounters, SequencerSettings
from tidelog.storage.cluster.zone_objects import ZoneObjects
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core.actions import RetireHotLog
from tidelog.storage.core.errors import (
    InvalidRequest,
    LogError,
    SetAside,
    Unavailable,
    UnknownTopic,
)
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.groups.coordinator import Coordinator
from tidelog.storage.groups.coordinator_choice import Rendezvous
from tidelog.storage.groups.groups import ClusterGroups
from tidelog.storage.iceberg_tables import IcebergTables
from tidelog.storage.kafka_log import KafkaLog
from tidelog.storage.log_engine import Log, SharedParts
from tidelog.storage.read.cache import Cache
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.records import ClusterRecords
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import begin_duty, retrieve_exception, surviving
from tidelog.storage.runtime.tracer_interface import NO_OBSERVER, Observer
from tidelog.storage.seal.sealer import BACKGROUND_STOP_S, SealerCounters, SealerSettings
from tidelog.storage.state.access import TopicFilter, all_topics
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.metered import MeteredStore, StoreCounters
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.start_retry import StartRetry
from tidelog.storage.stored_objects import StoredObjects
from tidelog.storage.topics import ClusterTopics
from tidelog.storage.wal.tail_objects import TailObjectCounters, TailObjects
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalCounters, WalObjects, WalSettings
from tidelog.storage.write import hot_log_file, recovered_requests
from tidelog.storage.write.waiters import Waiter
from tidelog.storage.write.writer import WriterCounters, WriterSettings


class CacheStats(NamedTuple):
    """The state of one cache. `hits` and `misses` count since the process started."""

    bytes: int
    bytes_max: int
    hits: int = 0
    misses: int = 0


class BrokerStats(NamedTuple):
    """All counters of a broker's parts since the process started, and their current gauges.

    The counters still change: read them before the next await. `store` is None if the store is not
    metered.
    """

    writer: WriterCounters
    wal: WalCounters
    sequencer: SequencerCounters
    announcer: AnnouncerCounters
    sealer: SealerCounters
    store: StoreCounters | None
    caches: Mapping[str, CacheStats]
    tail_objects: TailObjectCounters
    cold_reads: int
    buffered_bytes: int
    buffered_bytes_max: int
    commit_tokens: float
    """Entries that the budget of commits has left; -1 without a budget."""
    early_entries: int
    """Entries of this broker that began before the pace permitted one."""
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
READY_GRACE_S = 15.0
"""A broker stays ready for this time while the store does not answer. So probes cost a GET in this
time, however many come."""
READY_WRITE_S = 300.0
"""A broker that is probed writes at least this often. If the store does not take the write, the
broker is not ready (`Membership.why_failing`)."""
NOTICE_S = 1.0


class Broker:
    """A broker of a cluster, from `open` to `close`, owned by one event loop.

    Its facets are `topics`, `records`, `kafka` (record batches), `groups`, `cluster`, `access`,
    `stored` and `iceberg`.
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
        self.name = name
        self.identity = wal.cluster
        self.clock = wal.clock
        self.store_time = wal.store_time
        self.store_url = wal.store.url
        self._membership = membership = Membership(
            wal.store, wal.clock, name, wal.cluster.cluster_id, settings.membership, peers
        )
        tail_objects = TailObjects(
            wal.store,
            settings.reader.object_cache_bytes,
            ZoneObjects(membership, wal.clock, peers),
        )
        self._sequencer = Sequencer(
            wal, membership, peers, tail_objects, settings.sequencer, settings.pace
        )
        sequencer = self._sequencer
        shared = SharedParts(
            committer=sequencer,
            pace=sequencer.pace,
            uploads=sequencer.uploads,
            tail_objects=tail_objects,
            agreement=sequencer.beats,
            owns=membership.is_first_for,
        )
        self._log = Log(
            wal,
            settings,
            shared,
            hot_dir=hot_dir,
            observer=observer,
        )
        coordinators = Rendezvous(
            membership.me.id,
            membership.reached_ids,
            lambda: membership.is_leaving,
            membership.has_released,
        )
        self._coordinator = Coordinator(self._log, coordinators)
        self._retry = StartRetry(wal.clock, settings.start_retry_s)
        self.topics = ClusterTopics(self._log)
        self.records = ClusterRecords(self._log)
        self.kafka = KafkaLog(self._log, self.records)
        self.groups = ClusterGroups(
            self._log, self.records, self._coordinator, may_describe, settings.group_delay_s
        )
        self.cluster = Cluster(membership, self._sequencer, tail_objects, self._retry)
        self.access = ClusterAccess(self._log)
        self.stored = StoredObjects(self._log)
        self.iceberg = IcebergTables(self._log, settings.iceberg)
        self._settings = settings
        self._has_peers = peers is not NO_PEERS
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- the view

    @property
    def state(self) -> ClusterState:
        """The newest state that this broker knows. Only the WAL view changes it."""
        return self._log.wal.state

    async def refresh(self, since_s: float = math.inf) -> None:
        """Apply all entries that were committed before this call (I3).

        If `since_s` of the boot clock is earlier, apply those that were committed before it.
        """
        await self._log.wal.refresh(since_s)

    async def refresh_to_wait(self) -> None:
        """Refresh the view for a read that waits, unless it is young enough (I3)."""
        await self._log.refresh_to_wait()

    async def ensure_view(self) -> None:
        """Reload the state if it is too old for reads; cheap otherwise. Raises Unavailable."""
        await self._log.wal.ensure_view()

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
        """Open the cluster in `store`, or create it.

        Then commit the requests in the hot log that a crashed process left in `hot_dir`. With
        `peers`, call `join` next.

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
        # In this order, parts receive applied entries.
        subscribers = (self._sequencer, self._log, self._coordinator)
        tail_objects = self._log.reader.tail_objects
        await self._retry.until_done(lambda: self._log.wal.load(subscribers, tail_objects))
        bounds = self.state.bounds
        if bounds.is_test:
            log.warning("the cluster has bounds for tests: %s", bounds.now)
        elif bounds.now != self._settings.wal.bounds:
            log.info("the cluster's bounds are in effect, not this broker's: %s", bounds.now)
        recovered: list[hot_log_file.Recovered] = []
        if hot_dir is not None:
            cluster_id = self.identity.cluster_id
            recovered = await asyncio.to_thread(hot_log_file.recover, hot_dir, cluster_id)
        self._log.writer.start()
        await self._recommit(recovered)
        self._tasks.append(begin_duty("poll", self._log.poll()))
        self._log.wal.begin_checkpoint()
        if self._settings.is_sealing:
            run = self._log.sealer.run(lambda: self.state)
            self._tasks.append(begin_duty("seal", run))
        if not self._has_peers:
            self._start_groups()

    async def _recommit(self, all_files: list[hot_log_file.Recovered]) -> None:
        try:
            files = await recovered_requests.settled(self._log.wal, all_files)
            kept_files = [file for file in files if file.is_kept and file.requests]
            files = [file for file in files if file not in kept_files]
            requests = [request for file in files for request in file.requests]
            if requests:
                self._log.writer.begin_recovery(requests)
                await self._until_committed(self._log.writer.recover(requests))
                log.info("hot log: recovered %d requests of a crashed process", len(requests))
            self._log.writer.end_recovery()
        except BaseException:
            # A flush may still be under way. The next recovery of these files gives the requests
            # the same marks, of which `apply` accepts each once.
            hot_log_file.release(all_files)
            raise
        # All requests have an outcome. Only now delete the files, and then retire their marks.
        await self._log.writer.retire(await asyncio.to_thread(hot_log_file.discard, files))
        # Not before `files` are deleted, because they may contain the same requests as
        # `kept_files`.
        if kept_files:
            self._log.writer.adopt(kept_files)

    async def _until_committed(self, waiters: Sequence[Waiter]) -> None:
        """Wait until recovered requests have an outcome.

        Raises Unavailable if another process has committed some of them: it has a copy of the file.
        **On a crash**, and then: the next start reads the WAL back again.
        """
        fence = asyncio.create_task(self._log.wal.clone_fence.until_fenced(), name="tidelog-fence")
        try:
            for waiter in waiters:
                await asyncio.wait((waiter, fence), return_when=asyncio.FIRST_COMPLETED)
                self._log.wal.clone_fence.check_fence()
                # A refusal is a final outcome, for example because the topic was deleted since. A
                # request that is set aside is in another file.
                with contextlib.suppress(UnknownTopic, InvalidRequest, SetAside):
                    await waiter
        finally:
            fence.cancel()
            await asyncio.gather(fence, return_exceptions=True)
            for waiter in waiters:
                waiter.add_done_callback(retrieve_exception)

    async def join(
        self, address: str, port: int = 0, kafka: tuple[KafkaListener, ...] = (), zone: str = ""
    ) -> None:
        """Register as a broker of the cluster.

        From now on, peers must be able to reach this broker at `address`, and clients at `port` and
        `kafka`. Brokers with the same `zone` read each object of other brokers once, for all of
        them. Without `join`, a broker commits alone.
        """
        await self._membership.join(address, port, kafka, zone)
        self._sequencer.announcer.announce(announced_notice(Notice(self._membership.me.id)))
        beats = self._sequencer.beats
        self._tasks.append(begin_duty("liveness", self._membership.run(beats.is_quiet)))
        if self._has_peers:
            self._tasks.append(asyncio.create_task(beats.run()))
            self._start_groups()  # only now: without its peers it would take over their groups

    def _start_groups(self) -> None:
        if self._settings.is_coordinating:
            run = self._coordinator.run(self.groups.rest.do_duties)
            self._tasks.append(begin_duty("groups", run))

    async def run_until_failed(self) -> None:
        """Wait until a background task fails, and raise its exception.

        That is a bug, or Fenced: a copy of this process writes to the log.
        """
        fenced = asyncio.create_task(self._log.wal.clone_fence.until_fenced(), name="tidelog-fence")
        tasks = [fenced, self._log.writer.task, *self._tasks]
        running = [task for task in tasks if task is not None]
        try:
            finished_tasks, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished_tasks:
                task.result()
        finally:
            fenced.cancel()

    async def hand_over(self) -> None:
        """Be not ready from now on, but serve all requests.

        End the long polls under way. Give the roles of sequencer and coordinator to live peers, if
        there are any; then requests of groups must go there. Takes at most 5 s. Call `drain` later.

        **On a crash**: peers without the notice take the roles when they miss this broker.
        """
        self._is_stopping = True
        if self._has_peers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_S):
                    await self._membership.look_again()  # a broker may have joined just now
        if not self._membership.reached:
            self._log.waiting.end_all(is_last=False)
            return
        requests = self.groups.rest.requests
        requests.begin_release()
        self._log.waiting.end_all(is_last=False)
        try:
            is_idle = await requests.finish(self.groups.rest.commit_delivered)
            self.groups.rest.release()
            self._membership.begin_leaving()
            notice = Notice(self._membership.me.id, is_leaving=True, has_released=is_idle)
            await self._sequencer.announcer.notify(notice, NOTICE_S)
        finally:
            self.groups.kafka.release()
            requests.end_release()

    def drain(self) -> None:
        """Prepare `close`: flush without delay, end all waits, refuse drafts of peers."""
        self._is_stopping = True
        self._sequencer.refuse()
        self._log.writer.flush_without_delay()
        self.groups.kafka.release()
        self._log.waiting.end_all(is_last=True)

    async def close(self) -> None:
        """Flush all requests, stop the tasks, free files and threads.

        Acknowledged records are safe without this call, too.
        """
        self.groups.kafka.release()
        with contextlib.suppress(LogError):
            await self.groups.rest.commit_delivered()
        await self._coordinator.close()
        for task in self._tasks:
            task.cancel()
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.wait([ended], timeout=BACKGROUND_STOP_S)
        await self._log.writer.close()
        await self._sequencer.close()
        if self._membership.me.address:
            await self._membership.leave()
        await self._retire_hot_log()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECKPOINT_STOP_S):
                await self._log.wal.checkpoint_at_end()
        await self._log.wal.close()
        self._log.sealer.close()
        self._log.reader.close()

    async def _retire_hot_log(self) -> None:
        """Retire the mark of this process's hot log if the log has no file left.

        Then all its requests are committed. **On a crash** before the commit, the mark stays in the
        state: fifty bytes.
        """
        hot_log = self._log.writer.hot_log
        if hot_log is None or hot_log.log_id not in self.state.hot_logs:
            return
        files = await asyncio.to_thread(list, hot_log.directory.glob(f"{hot_log.log_id}-*.hot"))
        if not files:
            commit = Commit(self.clock.new_id(), [RetireHotLog(hot_log.log_id)])
            with surviving(log, "retiring the mark of the hot log"):
                await self._log.wal.commit(Draft([commit], [], []))

    async def release(self) -> None:
        """Free tasks, threads and file locks without a flush, as the end of a process does."""
        tasks = [*self._tasks, *self._coordinator.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._log.writer.release_files()
        await self._log.wal.close()
        self._log.sealer.close()
        self._log.reader.close()

    async def check_ready(self) -> None:
        """Raise Unavailable, with the reason, unless this broker can serve requests.

        It read the WAL to its end within READY_GRACE_S, can write, and its clock is right. A view
        that young costs no request to the store, however often clients ask.
        """
        self._membership.test_writing(READY_WRITE_S)
        if why := self.why_not_writing():
            raise Unavailable(why)
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self.refresh(self.clock.boot_s() - READY_GRACE_S)
        except (LogError, TimeoutError) as error:
            why = str(error) or f"no answer within {READY_WAIT_S:.0f} s"
            raise Unavailable(f"the WAL cannot be read: {why}") from error
        if why := self.store_time.why_wrong():
            raise Unavailable(why)

    def why_not_writing(self) -> str:
        """Return why this broker cannot write, as far as it knows, or ""."""
        if self._is_stopping or self._log.writer.task is None or self._log.writer.task.done():
            return "this broker is shutting down"
        why = self._log.writer.why_failing() or self._membership.why_failing()
        return why and f"the store does not accept writes: {why}"

    @property
    def set_aside(self) -> int:
        """The number of requests that were acknowledged with acks=1 and that the store refuses."""
        return 0 if self._log.writer.hot_log is None else len(self._log.writer.hot_log.kept)

    def stats(self) -> BrokerStats:
        engine, sequencer = self._log, self._sequencer
        reader, tail, writer = engine.reader, engine.tail, engine.writer
        objects = reader.tail_objects
        return BrokerStats(
            writer=writer.counters,
            wal=engine.wal.counters,
            sequencer=sequencer.counters,
            announcer=sequencer.announcer.counters,
            sealer=engine.sealer.counters,
            store=engine.store.counters if isinstance(engine.store, MeteredStore) else None,
            caches={
                "tail": CacheStats(tail.bytes, tail.bytes_max),
                "chunk": cache_stats(reader.chunk_cache),
                "tail object": CacheStats(
                    objects.bytes, objects.bytes_max, objects.counters.hits, objects.counters.misses
                ),
                "segment": cache_stats(reader.segments.groups),
                "footer": cache_stats(reader.segments.footers),
            },
            tail_objects=objects.counters,
            cold_reads=reader.segments.cold_reads,
            buffered_bytes=writer.buffered_bytes,
            buffered_bytes_max=writer.settings.buffer_bytes_max,
            commit_tokens=sequencer.pace.tokens,
            early_entries=sequencer.pace.early_entries,
            view_age_s=engine.wal.view_age_s,
            set_aside=self.set_aside,
            failing_seals=engine.sealer.failing,
            gone=self._membership.gone,
        )
