"""Merges by the broker itself: small segments of the topics whose tails it seals become large ones.

A trickle of records makes a small segment at each seal, so a topic would have thousands of them in
a year, and each read of them a request. The broker that owns a topic's seals merges its segments:
it has the table open, so it sees without a request whether there is something to merge. A topic is
looked at if it was sealed since the last look. So an idle topic costs nothing, and after a restart
its next seal is the reason for a look.

Merges take a bounded share of one core. They run one after the other, at the lowest priority, and
after each of them the broker waits until the CPU time of the merge is within the share. A merge is
bounded in size (BYTES_MAX), which bounds its memory. `tidelog compact` merges up to
`target.segment.bytes`.

Two brokers may merge the same segments, if they disagree about the owner: the maintenance lock of
the partition refuses one of them. **On a crash** a merge is done or not (compaction.merge).
"""

import asyncio
import itertools
import logging
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from tidelog.compaction.commit_rewrites import Work, load_work
from tidelog.compaction.engine import OnRows, Rewriter
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.merge import merge, planned_merges
from tidelog.compaction.rewrite import Rewrite
from tidelog.service.server.open_for_maintenance import opened_store
from tidelog.service.settings.maintenance import MaintenanceSettings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.runtime.threads import CpuTime, LoopThread, lower_priority
from tidelog.storage.state.topic import Topic

log = logging.getLogger("tidelog.care")

BYTES_MAX = 128 * 1024 * 1024
"""Upper bound of the size of a segment that a broker makes by a merge: twice the default of
`segment.bytes`."""
CHECK_S = 60.0
"""Mean time between two checks of the state for topics that are due."""
CHECKS = 4
"""Checks, at least, in the time after which a topic is due."""


async def run_merges(
    settings: MaintenanceSettings, broker: Broker, counters: MaintenanceCounters
) -> None:
    """Merge in the topics that are due. If merges are off, return at once."""
    share = settings.merge_cpu_percent / 100
    if not share or settings.is_in_memory or not settings.seal_enabled:
        return
    counters.is_merging = True
    after_s = settings.merge_after_ms / 1000
    rewriter = BackgroundRewriter(settings, broker)
    merges = Merges(broker, rewriter, counters, after_s=after_s, cpu_share=share)
    draws = random.Random(broker.clock.new_id())
    try:
        while True:
            await asyncio.sleep(min(CHECK_S, after_s / CHECKS) * draws.uniform(0.5, 1.5))
            with surviving(log, "merging small segments"):
                await merges.merge_due()
            await rewriter.close()
    finally:
        await rewriter.close()


class BackgroundRewriter:
    """A rewriter on a thread of the lowest priority, with its own connections to the store.

    The thread starts with the first rewrite, and ends with `close`.
    """

    def __init__(self, settings: MaintenanceSettings, broker: Broker) -> None:
        self._settings = settings
        self._broker = broker
        self._thread: LoopThread[Rewriter] | None = None
        self.cpu_time = CpuTime()

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        if self._thread is None:
            thread = LoopThread(self._opened, name="tidelog-merges")
            await thread.open()
            self._thread = thread
        return await self._thread.run(lambda rewriter: rewriter.write(tasks, on_rows))

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Rewriter]:
        lower_priority()
        counters = self._broker.stats().store
        async with opened_store(self._settings, counters=counters) as store:
            yield InProcess(store, SystemClock(), cpu_time=self.cpu_time)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close()


class _MergeLook(NamedTuple):
    """The last look at a topic."""

    sealed_ends: "array[int]"
    at_s: float


class Merges:
    """The merges of one broker. Owned by its event loop."""

    def __init__(
        self,
        broker: Broker,
        rewriter: "BackgroundRewriter | InProcess",
        counters: MaintenanceCounters,
        *,
        after_s: float,
        cpu_share: float,
    ) -> None:
        """`after_s` is the least time between two looks at a topic."""
        self._broker = broker
        self._rewriter = rewriter
        self._counters = counters
        self._after_s = after_s
        self._cpu_share = cpu_share
        self._free_s = 0.0
        """When the next merge may begin, in seconds of the event loop."""
        self._looks: dict[str, _MergeLook] = {}

    async def merge_due(self) -> None:
        """Merge in the topics that were sealed since the last look at them.

        After the last topic, raise the first LogError.
        """
        session = MaintenanceSession.of_broker(self._broker, has_brokers_tables=True)
        await session.for_each(self._due(), partial(self._merge_topic, session))

    def _due(self) -> list[Topic]:
        now_s, owns = self._broker.clock.boot_s(), self._broker.cluster.owns
        topics = [topic for topic in self._broker.state.topics.values() if owns(topic.topic_id)]
        self._looks = {
            topic.topic_id: self._looks.get(topic.topic_id)
            or _MergeLook(_sealed_ends(topic), now_s)
            for topic in topics
        }
        due = []
        for topic in topics:
            look = self._looks[topic.topic_id]
            if now_s >= look.at_s + self._after_s and look.sealed_ends != _sealed_ends(topic):
                due.append(topic)
        return due

    async def _merge_topic(self, session: MaintenanceSession, topic: Topic) -> None:
        sealed_ends = _sealed_ends(topic)
        ends = zip(sealed_ends, self._looks[topic.topic_id].sealed_ends, strict=False)
        is_sealed = [new != old for new, old in ends]
        is_sealed += [True] * (len(sealed_ends) - len(is_sealed))  # new partitions
        for number in itertools.compress(itertools.count(), is_sealed):
            await self._merge_partition(session, topic.topic_id, number)
        self._looks[topic.topic_id] = _MergeLook(sealed_ends, self._broker.clock.boot_s())

    async def _merge_partition(
        self, session: MaintenanceSession, topic_id: str, number: int
    ) -> None:
        """Merge until nothing is left to merge, or another broker is the owner."""
        while (topic := self._topic(topic_id)) is not None:
            work = await load_work(session, topic, number, is_newest=False)
            if not self._merges(work):
                return
            await self._wait()
            await self._broker.stored.open_tables.checked(topic)  # at its newest version
            work = await load_work(session, topic, number, is_newest=False)
            merges = self._merges(work)
            if merges and not await self._merge(session, work, merges[0]):
                return

    def _topic(self, topic_id: str) -> Topic | None:
        """Return the topic, if it exists and this broker still merges its segments."""
        is_own = self._broker.cluster.owns(topic_id)
        return self._broker.state.topic_of_id(topic_id) if is_own else None

    def _merges(self, work: Work) -> list[list[SegmentFile]]:
        config = work.config
        target_bytes = min(config.segment_bytes, config.target_segment_bytes, BYTES_MAX)
        return planned_merges(work, target_bytes, self._broker.store_time.now_ms())

    async def _wait(self) -> None:
        """Wait until the CPU time of the last merge is within the share."""
        await asyncio.sleep(self._free_s - asyncio.get_running_loop().time())

    async def _merge(
        self, session: MaintenanceSession, work: Work, inputs: Sequence[SegmentFile]
    ) -> bool:
        """Merge the inputs; return False if another broker was first."""
        loop, cpu_time = asyncio.get_running_loop(), self._rewriter.cpu_time
        began_s, used_s = loop.time(), cpu_time.seconds
        try:
            added = await merge(session, self._rewriter, work, [inputs])
        finally:
            merge_s = cpu_time.seconds - used_s
            self._free_s = began_s + merge_s / self._cpu_share
            self._counters.merge_cpu_s += merge_s
        if added is None:
            return False
        self._counters.merges += 1
        self._counters.merged_segments += len(inputs)
        self._counters.merged_bytes += sum(file.size for file in inputs)
        name = f"{work.topic.name}-{work.number}"
        log.debug("%s: merged %d segments into %s", name, len(inputs), added[0].path)
        return True


def _sealed_ends(topic: Topic) -> "array[int]":
    return array("q", [partition.sealed_end for partition in topic.partitions])
