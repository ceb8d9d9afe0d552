"""The broker's own care for its log: retention and collection, now and then, beside serving.

What `tidelog retain` and `tidelog collect` do, with the same promises: any number of brokers may do
it at once, and be killed while they do. It runs on a thread, a view and connections of its own, at
the lowest priority: listings of 100,000 objects must not hold a fetch. Merging and compaction read
and write what is there many times over, and are left to `tidelog compact` where there is room.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from compaction.cluster import Cluster
from compaction.collect import collect, plan
from compaction.garbage import Grace
from compaction.retain import retain
from service.settings import Settings
from service.telemetry import CareCounters
from storage.clock import SystemClock
from storage.errors import LogError
from storage.loop_thread import LoopThread
from storage.sealer import lower_priority
from storage.stores import open_store

log = logging.getLogger("tidelog.care")

COLLECTED_EVERY = 12
"""Rounds from one collection to the next, an hour: it lists all that there is, and reads the
commits of a day where something was removed."""


async def care_for_ever(settings: Settings, counters: CareCounters | None = None) -> None:
    """A round about every `retention_check_interval_ms`, and never where that is 0. A round that
    fails is made up for by the next."""
    interval_s = settings.retention_check_interval_ms / 1000
    if not interval_s or settings.store.startswith("memory:"):
        return  # what is in memory is gone before it is old
    counters = counters or CareCounters()
    draws = random.Random(SystemClock().new_id())
    for number in itertools.count():
        # Brokers that were started together should not meet at every round.
        await asyncio.sleep(interval_s * draws.uniform(0.5, 1.5))
        counters.rounds += 1
        try:
            is_collecting = number % COLLECTED_EVERY == 0
            await care_once(settings, counters, is_collecting=is_collecting)
        except (LogError, OSError) as error:
            counters.failures += 1
            log.warning("retention and collection will be tried again: %s", error)
        except Exception:  # the root of a task: a bug here must not end the duty, nor go unseen
            counters.failures += 1
            log.exception("retention and collection failed")


async def care_once(
    settings: Settings, counters: CareCounters | None = None, *, is_collecting: bool = True
) -> None:
    """Retention, then collection. Raises LogError."""
    grace = Grace(wal_ms=settings.wal_retention_ms) if is_collecting else None
    counters = counters or CareCounters()
    lane = LoopThread(lambda: _cluster(settings), name="tidelog-care")
    try:
        await lane.open()
        await lane.run(lambda cluster: _round(cluster, grace, counters))
    finally:
        await lane.close()


@asynccontextmanager
async def _cluster(settings: Settings) -> AsyncIterator[Cluster]:
    lower_priority()
    store = await open_store(settings.store, s3=settings.s3)
    try:
        cluster = await Cluster.open(store, SystemClock())
        try:
            yield cluster
        finally:
            await cluster.close()
    finally:
        await store.close()


async def _round(cluster: Cluster, grace: Grace | None, counters: CareCounters) -> None:
    for each in await retain(cluster, None, is_dry=False):
        counters.retentions += 1
        log.info(
            "%s-%d begins at %d now: %s",
            each.topic,
            each.partition,
            each.log_start_offset,
            each.why,
        )
    if grace is not None:
        await _collect(cluster, grace, counters)


async def _collect(cluster: Cluster, grace: Grace, counters: CareCounters) -> None:
    planned = await plan(cluster, grace)
    counters.waiting_bytes = planned.waiting
    counters.due_bytes, counters.oldest_s = planned.size, planned.oldest_ms / 1000
    done = 0

    def count(objects: int) -> None:
        nonlocal done
        size = sum(each.size for each in planned.garbage[done:objects])
        counters.collected_objects += objects - done
        counters.collected_bytes += size
        counters.due_bytes -= size
        done = objects

    if planned.garbage or planned.emptied:
        await collect(cluster, planned, count)
        oldest_s = planned.oldest_ms // 1000
        log.info("collected %d objects, %d bytes, %d s old", done, planned.size, oldest_s)
    counters.oldest_s = 0.0
