"""Merges by the broker itself: small segments become large ones.

A trickle of records makes a small segment at each seal, so a topic would have thousands of them in
a year, and each read of them a request. The broker that owns a topic's seals merges its segments:
it has the table open, so it sees without a request whether there is something to merge. It looks at
a topic an hour after its start, and then if the topic was sealed since the last look. So an idle
topic costs nothing. The others look rarely: the owner may be one that merges nothing.

Merges take a bounded share of one core. They run one after the other, at the lowest priority, and
after each of them the broker waits until the CPU time of the merge is within the share. Partitions
take turns, a merge each. A merge is bounded in size, which bounds its memory. `tidelog compact`
merges up to `target.segment.bytes`.

Two brokers may merge the same segments, if they disagree about the owner: the maintenance lock of
the partition refuses one of them. **On a crash** a merge is done or not (compaction.merge).
"""

import asyncio
import itertools
import logging
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidelog.compaction.commit_rewrites import Work, load_work
from tidelog.compaction.engine import OnRows, Rewriter
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.merge import merge, planned_merges
from tidelog.compaction.rewrite import Rewrite
from tidelog.service.server.maintenance import REWRITE_BYTES_MAX
from tidelog.service.server.open_for_maintenance import opened_store
from tidelog.service.server.retention_looks import sealed_ends_of
from tidelog.service.settings.maintenance import MaintenanceSettings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import TableInDoubt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import TASK_ENDS, surviving
from tidelog.storage.runtime.threads import CpuTime, LoopThread, lower_priority
from tidelog.storage.state.topic import Topic

log = logging.getLogger("tidelog.care")

CHECK_S = 60.0
"""Mean time between two checks of the state for topics that are due."""
CHECKS = 4
"""Checks, at least, in the time after which a topic is due."""
OTHERS_FACTOR = 24
"""A broker that does not own a topic looks at it after this many times the owner's time."""
INPUT_CPU_S = 0.004
"""CPU time that the requests to the store take for an input: two GETs through the S3 SDK."""
PLAN_SEGMENTS_MAX = 2000
"""A plan of more segments is made in a thread."""


async def run_merges(
    settings: MaintenanceSettings, broker: Broker, counters: MaintenanceCounters
) -> None:
    """Merge in the topics that are due. If merges are off, return at once."""
    share = settings.merge_cpu_percent / 100
    if not share or settings.is_in_memory or not settings.seal_enabled:
        return
    after_s = settings.merge_after_ms / 1000
    rewriter = BackgroundRewriter(settings, broker)
    merges = Merges(broker, rewriter, counters, after_s=after_s, cpu_share=share)
    draws = random.Random(broker.clock.new_id())
    try:
        while True:
            await asyncio.sleep(min(CHECK_S, after_s / CHECKS) * draws.uniform(0.5, 1.5))
            is_more = True
            while is_more:
                is_more = False
                with surviving(log, "merging small segments"):
                    is_more = await merges.merge_due()
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
            self._thread = LoopThread(self._opened, name="tidelog-merges")
            try:
                await self._thread.open()
            except BaseException:
                await self.close()
                raise

        async def write(rewriter: Rewriter) -> list[SegmentFile]:
            began_s = time.thread_time()
            try:
                return await rewriter.write(tasks, on_rows)
            finally:
                self.cpu_time.add(time.thread_time() - began_s)  # of the thread's loop

        return await self._thread.run(write)

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


@dataclass
class _MergeLook:
    """The last look at a topic. `failed` are the partitions whose merge has failed since."""

    at_s: float
    sealed_ends: "array[int]" = field(default_factory=lambda: array("q"))
    failed: set[int] = field(default_factory=set)

    def due(self, sealed_ends: "array[int]") -> list[int]:
        """Return the partitions that were sealed since, or whose merge failed."""
        old_ends = itertools.chain(self.sealed_ends, itertools.repeat(0))
        ends = enumerate(zip(sealed_ends, old_ends, strict=False))
        return [number for number, (new, old) in ends if new != old or number in self.failed]


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
        # Partitions that are looked at, by topic id and number, in this order.
        self._pending: dict[tuple[str, int], None] = {}

    async def merge_due(self) -> bool:
        """Merge once in each partition that is due; return whether there is more to merge.

        A partition whose merge fails is due at the next look at its topic. After the last
        partition, raise the first error.
        """
        self._add_due()
        failure: BaseException | None = None
        session = MaintenanceSession.of_broker(self._broker, has_brokers_tables=True)
        for topic_id, number in list(self._pending):
            try:
                is_more = await self._merge_next(session, topic_id, number)
            except TASK_ENDS:
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, when the others are done
                self._note_failure(topic_id, number)
                failure, is_more = failure or error, False
            if not is_more:
                del self._pending[topic_id, number]
            await asyncio.sleep(0)  # a topic may have 10,000 partitions
        self._counters.is_merging = failure is None
        if failure is not None:
            raise failure
        return bool(self._pending)

    def _add_due(self) -> None:
        now_s, owns = self._broker.clock.boot_s(), self._broker.cluster.owns
        looks: dict[str, _MergeLook] = {}
        for topic in self._broker.state.topics.values():
            look = self._looks.get(topic.topic_id) or _MergeLook(now_s)
            looks[topic.topic_id] = look
            factor = 1 if owns(topic.topic_id) else OTHERS_FACTOR
            if now_s < look.at_s + factor * self._after_s:
                continue
            sealed_ends = sealed_ends_of(topic)
            if numbers := look.due(sealed_ends):
                self._pending |= dict.fromkeys((topic.topic_id, number) for number in numbers)
                looks[topic.topic_id] = _MergeLook(now_s, sealed_ends)
        self._looks = looks

    def _note_failure(self, topic_id: str, number: int) -> None:
        self._counters.merge_failures += 1
        if (look := self._looks.get(topic_id)) is not None:
            look.failed.add(number)

    async def _merge_next(self, session: MaintenanceSession, topic_id: str, number: int) -> bool:
        """Do one merge in a partition. Return False if there is none, or another run was first."""
        if (topic := self._topic(topic_id)) is None:
            return False
        # This plan is free if the table is open. It may be of an old version.
        if not await self._inputs(await load_work(session, topic, number, is_newest=False)):
            return False
        await self._wait()
        if (topic := self._topic(topic_id)) is None:
            return False
        try:
            await session.checked_table(topic)
        except TableInDoubt as error:
            self._broker.stored.note_doubt(topic, error)
            raise
        if (topic := self._topic(topic_id)) is None:
            return False
        work = await load_work(session, topic, number, is_newest=False)
        inputs = await self._inputs(work)
        return bool(inputs) and await self._merge(session, work, inputs)

    def _topic(self, topic_id: str) -> Topic | None:
        """Return the topic of the broker's state as it is now: a view may be loaded again."""
        return self._broker.state.topic_of_id(topic_id)

    async def _inputs(self, work: Work) -> Sequence[SegmentFile]:
        """Return the inputs of the partition's first merge; empty if there is none."""
        config = work.config
        target_bytes = min(config.segment_bytes, config.target_segment_bytes, REWRITE_BYTES_MAX)
        merges = planned_merges(work, target_bytes, self._broker.store_time.now_ms())
        if len(work.segments.columns.path) <= PLAN_SEGMENTS_MAX:
            return next(merges, [])
        return await asyncio.to_thread(next, merges, [])

    async def _wait(self) -> None:
        """Wait until the CPU time of the last merge is within the share."""
        await asyncio.sleep(self._free_s - asyncio.get_running_loop().time())

    async def _merge(
        self, session: MaintenanceSession, work: Work, inputs: Sequence[SegmentFile]
    ) -> bool:
        """Merge the inputs; return False if another run was first, whose result then counts."""
        loop, cpu_time = asyncio.get_running_loop(), self._rewriter.cpu_time
        began_s, used_s = loop.time(), cpu_time.seconds
        try:
            added = await merge(
                session, self._rewriter, work, [inputs], bytes_max=REWRITE_BYTES_MAX
            )
        finally:
            merge_s = cpu_time.seconds - used_s + INPUT_CPU_S * len(inputs)
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
