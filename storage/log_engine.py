"""The engine of a broker: the parts that keep the log, and what follows from each commit.

A `Log` is a broker's in-memory state of a cluster. A broker can rebuild it from the store at any
time. The parts keep I1 to I7 and I10; this module adds long polls. Clients of a broker use the
facets of `storage.broker.Broker`, which use the parts of its `Log`.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidelog.storage.codec.entry import Entry
from tidelog.storage.core.actions import AddPartitions, AnyAction, LoseRecords
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks, AppendedRange
from tidelog.storage.read.long_polls import LongPolls
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.runtime.tracer_interface import Observer
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.state.cluster_state import Applied, ClusterState
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.chunk_uploads import ChunkUploads
from tidelog.storage.wal.commit_pace import CommitPace
from tidelog.storage.wal.poll_pace import Agreement, PollPace
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.wal.view import Committer, WalView
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.tail_cache_fill import CommittedTail
from tidelog.storage.write.writer import Writer

log = logging.getLogger("tidelog.log")


class SharedParts(NamedTuple):
    """The parts of a log that work with the brokers of its cluster."""

    committer: Committer
    pace: CommitPace
    uploads: ChunkUploads
    tail_objects: TailObjects
    agreement: Agreement
    owns: Callable[[str], bool]
    """Returns whether this broker does a task (`Cluster.owns`)."""


class Log:
    """The parts of a log without peers and groups. A broker owns it; so does its event loop."""

    def __init__(
        self,
        wal: WalView,
        settings: LogSettings,
        shared: SharedParts,
        *,
        hot_dir: Path | None,
        observer: Observer,
    ) -> None:
        self.wal = wal
        self.store = wal.store
        self.clock = wal.clock
        self.tail = TailCache(settings.tail_cache_bytes)
        self.tables = OpenTables(wal.store, self._topic_of_id, wal.refresh, wal.clock)
        self.reader = Reader(
            wal.store, self.tail, shared.tail_objects, self.tables, settings.reader
        )
        self.writer = Writer(
            wal,
            settings.writer,
            CommittedTail(self.reader, lambda: wal.state).add,
            committer=shared.committer,
            pace=shared.pace,
            uploads=shared.uploads,
            hot_dir=hot_dir,
            observer=observer,
        )
        self.sealer = Sealer(self.reader, self.writer, self.tables, settings.sealer, shared.owns)
        self.waiting = LongPolls()
        self.losses = 0
        """How often records of this broker's view were given up, or its whole view."""
        self._poll_interval_s = settings.poll_interval_s
        self._read_freshness_s = settings.read_freshness_s
        self._agreement = shared.agreement
        self._poll_pace = PollPace(
            wal, settings.poll_interval_s, settings.quiet_poll_s, shared.agreement
        )

    @property
    def state(self) -> ClusterState:
        """The newest state that this broker knows. Only the WAL view changes it."""
        return self.wal.state

    async def topic(self, name: str) -> Topic:
        """Return the topic. If it is unknown, refresh the view before raising UnknownTopic (I3)."""
        if name not in self.state.topics:
            await self.wal.refresh()
        return self.state.topic(name)

    def _topic_of_id(self, topic_id: str) -> Topic | None:
        return self.state.topic_of_id(topic_id)

    async def poll(self) -> None:
        """Apply other brokers' entries, also if no request comes, until the task is cancelled."""
        while True:
            await asyncio.sleep(self._poll_interval_s)
            with surviving(log, "reading the WAL"):
                await self.wal.refresh(self._poll_pace.needed_s())

    async def refresh_to_wait(self) -> None:
        """Refresh the view for a read that waits for records (I3).

        A view that was fresh within `read_freshness_s` costs no request, nor one on which all live
        brokers agreed within this time.
        """
        since_s = self.clock.boot_s() - self._read_freshness_s
        if self._agreement.agreed_s() > since_s:
            await self.wal.ensure_view()
        else:
            await self.wal.refresh(since_s)

    # -- commits

    async def submit(self, *actions: AnyAction) -> None:
        """Commit all actions or none (I4).

        Raises a refusal of `apply`, or an error of `append`; BoundReached, before the commit, for
        an action above a share that `apply` does not check.
        """
        with self.state.admitted(actions):
            await self.append(AppendRequest((), 0, actions=actions))

    async def append(self, request: AppendRequest) -> list[AppendedRange]:
        """Commit the request, and return its appended ranges.

        Raises Throttled, Unavailable, CommitUnknown, and the refusals of `apply`.
        """
        placements = await self.writer.append(request, Acks.ALL)
        assert placements is not None, "acks=all returns the appended ranges"
        return placements

    # -- what follows from commits

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        """Drop data of deleted topics and lost records; wake fetches of changed partitions."""
        for commit, outcome in zip(entry.commits, applied.outcomes, strict=True):
            if commit.hot is not None:
                marks = {commit.hot.log_id: commit.hot.seq}
                self.writer.check_marks(marks, entry.seq, is_reset=False)
                if entry.writer != self.wal.writer and not outcome.is_duplicate:
                    self.writer.check_recovered(commit.commit_id, entry.seq)
            for action in commit.actions:
                if isinstance(action, LoseRecords):  # from a repair; do not serve them
                    self.losses += 1
                    self.tail.forget(action.topic_id, action.partition)
                elif isinstance(action, AddPartitions):
                    grown = self._topic_of_id(action.topic_id)
                    if grown is not None:
                        self.waiting.wake_all(grown.name)  # for `ClusterRecords.wait_for_changes`
        for topic in applied.deleted:
            self.tail.forget_topic(topic.topic_id)
            self.tables.forget(topic.topic_id)
            self.waiting.wake_all(topic.name)
        if not self.waiting.has_readers:
            return
        for outcome in applied.outcomes:
            if not outcome.is_duplicate:
                for placement in outcome.placements:
                    self.waiting.wake_reads(placement.topic, placement.partition)

    def on_reset(self) -> None:
        """Drop the data that was derived from an expired view; wake all fetches."""
        self.writer.check_marks(self.wal.state.hot_logs, self.wal.state.seq, is_reset=True)
        self.losses += 1
        self.tail.clear()
        self.tables.forget_unknown()
        self.waiting.wake_all()
