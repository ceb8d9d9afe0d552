"""Maintenance by the broker itself: periodic retention and collection, while it serves requests.

A broker does the same work as `tidelog retain` and `tidelog collect`, with the same guarantees: any
number of brokers may do it at once, and may crash meanwhile. Retention uses the broker's view, so a
round does not load the cluster again. Collection runs on its own thread, with its own view and
connections, at the lowest priority, because a listing of 100,000 objects must not delay a fetch.

A broker merges by itself within a share of a core (service.server.merges), but it does not compact,
because a compaction reads and writes all data of a topic many times. `tidelog compact` compacts, on
a machine with free capacity. A broker compacts if a client asks it (`tidelog compact --server`):
one topic at a time, on a thread like that of collection. By itself, a broker rewrites only small
segments in which `delete-records` deleted a part of the records, and each of them once.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import Compacted, compact
from tidelog.compaction.garbage import Grace
from tidelog.compaction.in_process_engine import KEYS_PART, InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.repair_tables import undo_rearrangement
from tidelog.compaction.retention import retain
from tidelog.service.operations.compaction_jobs import Compact, CompactionJob, no_store
from tidelog.service.server.collection_schedule import CollectionSchedule
from tidelog.service.server.open_for_maintenance import opened_cluster
from tidelog.service.server.retention_looks import RetentionLooks
from tidelog.service.settings.maintenance import MaintenanceSettings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.maintenance_results import Kind, result
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError, TableInDoubt
from tidelog.storage.runtime.tasks import TASK_ENDS, begin_duty
from tidelog.storage.runtime.threads import LoopThread, lower_priority
from tidelog.storage.state.topic import Topic

log = logging.getLogger("tidelog.care")

WorkResult = TypeVar("WorkResult")

REWRITE_BYTES_MAX = 128 * 1024 * 1024
"""Size of the largest segment that a broker rewrites after `delete-records`: twice the default of
`segment.bytes`. The commands `retain` and `delete-records` rewrite larger segments."""


async def run_maintenance(
    settings: MaintenanceSettings, broker: Broker, counters: MaintenanceCounters
) -> None:
    """Run a round about every `retention_check_interval_ms`.

    If this setting is 0, return at once. If a round fails, the next round does its work.
    """
    interval_s = settings.retention_check_interval_ms / 1000
    if not interval_s or settings.is_in_memory:
        return  # data in memory ends with the process
    counters.is_running = True
    looks, collections = RetentionLooks(broker), CollectionSchedule(broker, interval_s)
    draws = random.Random(broker.clock.new_id())
    while True:
        # Jitter, so that brokers that started together do not run every round together.
        await asyncio.sleep(interval_s * draws.uniform(0.5, 1.5))
        counters.rounds += 1
        try:
            await maintain_once(
                settings,
                broker,
                counters,
                is_collecting=collections.begin_if_due(),
                looks=looks,
                clean_topics=collections.clean_topics,
            )
        except (LogError, OSError) as error:
            counters.failures += 1
            log.warning("retention and collection failed and will be retried: %s", error)
        except TASK_ENDS:
            raise
        except BaseException:  # no caller handles it: log a bug, or a panic of deltalake
            counters.failures += 1
            log.exception("retention and collection failed")


async def check_tables(broker: Broker) -> None:
    """Check the tables of all topics once, when a broker starts.

    The first reader or seal of a topic may come much later. The result is logged and shown
    (`StoredObjects.doubts`).
    """
    session = MaintenanceSession.of_broker(broker)

    async def look(topic: Topic) -> None:
        if any(partition.sealed_end for partition in topic.partitions):
            await session.checked_table(topic)

    try:
        await session.for_each(topics_of(session.state, None), look)
    except LogError as error:
        log.warning("not all tables could be checked at the start: %s", error)
    finally:
        _note_doubts(broker, session, [*broker.state.topics])
        await session.close()


async def maintain_once(
    settings: MaintenanceSettings,
    broker: Broker,
    counters: MaintenanceCounters,
    *,
    is_collecting: bool = True,
    looks: RetentionLooks | None = None,
    clean_topics: dict[str, bytes] | None = None,
) -> None:
    """Run retention once, then collection. Raises LogError.

    Retention leaves out topics in which nothing is due, as `looks` remembers from earlier rounds,
    and collection leaves out the tables of `clean_topics` (see `compaction.collect.plan`).
    """
    session = MaintenanceSession.of_broker(broker)
    looks = looks or RetentionLooks(broker)
    try:
        with _noted(broker, counters, "retain"):
            await _retain(session, counters, looks)
            await _undo_rearrangements(session)
    finally:
        _note_doubts(broker, session, looks.end_round())
        await session.close()
        if is_collecting:  # also after a failure, because one topic must not stop collection
            with _noted(broker, counters, "collect"):
                clean = {} if clean_topics is None else clean_topics
                collecting = _apart(
                    settings, "tidelog-care", lambda own: _collect(own, counters, clean), broker
                )
                for name, error in (await begin_duty("collection", collecting)).items():
                    if name in broker.state.topics and isinstance(error, TableInDoubt):
                        broker.stored.note_doubt(broker.state.topic(name), error)


@contextlib.contextmanager
def _noted(broker: Broker, counters: MaintenanceCounters, kind: Kind) -> Iterator[None]:
    """Note the result of the block, unless the broker stops meanwhile."""
    try:
        yield
    except TASK_ENDS:
        raise
    except BaseException as error:
        failure = str(error) or type(error).__name__
        counters.note(result(kind, broker.clock.now_ms(), failure))
        raise
    counters.note(result(kind, broker.clock.now_ms()))


async def _apart(
    settings: MaintenanceSettings,
    name: str,
    work: Callable[[MaintenanceSession], Coroutine[Any, Any, WorkResult]],
    broker: Broker,
) -> WorkResult:
    """Do the work on a thread with its own view and connections, at the lowest priority.

    The broker's counters count its requests to the store, too.
    """
    counters = broker.stats().store

    def resource() -> AbstractAsyncContextManager[MaintenanceSession]:
        lower_priority()  # of the thread that the work runs on
        return opened_cluster(settings, counters=counters)

    lane = LoopThread(resource, name=name)
    try:
        await lane.open()
        return await lane.run(work)
    finally:
        await lane.close()


def compactor(settings: MaintenanceSettings, broker: Broker) -> Compact:
    """Return the work of compactions that clients start."""
    if settings.is_in_memory:
        return no_store

    async def work(job: CompactionJob, on_rows: Callable[[int], None]) -> Sequence[dict[str, Any]]:
        async def run(cluster: MaintenanceSession) -> list[Compacted]:
            engine = InProcess(
                cluster.store, cluster.clock, settings.compact_memory_bytes // KEYS_PART
            )
            return await compact(
                cluster,
                [job.topic],
                is_dry=job.is_dry_run,
                is_forced=job.is_forced,
                engine=engine,
                on_rows=on_rows,
            )

        compacting = _apart(settings, "tidelog-compaction", run, broker)
        return [outcome._asdict() for outcome in await begin_duty("compaction", compacting)]

    return work


def _note_doubts(broker: Broker, session: MaintenanceSession, names: Sequence[str]) -> None:
    """Tell the broker what a round over these topics found about their tables."""
    for name in names:
        topic = broker.state.topics.get(name)
        if topic is not None:
            error = session.skipped.get(name)
            broker.stored.note_doubt(topic, error if isinstance(error, TableInDoubt) else None)


async def _retain(
    cluster: MaintenanceSession, counters: MaintenanceCounters, looks: RetentionLooks
) -> None:
    for outcome in await retain(
        cluster,
        None,
        is_dry=False,
        rewrite_bytes_max=REWRITE_BYTES_MAX,
        is_due=looks.begin_if_due,
        on_nothing_due=looks.note,
    ):
        counters.retentions += 1
        log.info(
            "%s-%d: log start offset is now %d: %s",
            outcome.topic,
            outcome.partition,
            outcome.log_start_offset,
            outcome.why,
        )


async def _undo_rearrangements(cluster: MaintenanceSession) -> None:
    """If another engine rearranged a table (OPTIMIZE), put the old segments back into it.

    The rows are the same. A table that is in doubt for another reason waits for an operator.
    """

    async def undo(topic: Topic) -> None:
        error = cluster.skipped.get(topic.name)
        if isinstance(error, TableInDoubt) and await undo_rearrangement(cluster, topic):
            del cluster.skipped[topic.name]
            log.warning("topic %s: undid an OPTIMIZE, its rows are the same: %s", topic.name, error)

    skipped = [name for name in cluster.skipped if name in cluster.state.topics]
    await cluster.for_each(topics_of(cluster.state, skipped), undo)


async def _collect(
    cluster: MaintenanceSession, counters: MaintenanceCounters, clean_topics: dict[str, bytes]
) -> dict[str, LogError]:
    """Collect; return the topics that were left out, by name, and why."""
    planned = await plan(cluster, Grace(), clean_topics=clean_topics)
    counters.waiting_bytes = planned.waiting
    counters.due_bytes, counters.oldest_s = planned.size, planned.oldest_ms / 1000
    for hold in planned.holds:
        log.info("nothing is collected while a backup runs: %s", hold.hold_id)
    collected_count = 0

    def count(objects: int) -> None:
        nonlocal collected_count
        size = sum(
            garbage_object.size for garbage_object in planned.garbage[collected_count:objects]
        )
        counters.collected_objects += objects - collected_count
        counters.collected_bytes += size
        counters.due_bytes -= size
        collected_count = objects

    if planned.garbage or planned.emptied:
        await collect(cluster, planned, count)
        oldest_s = planned.oldest_ms // 1000
        log.info(
            "collected %d objects, %d bytes, the oldest %d s old",
            collected_count,
            planned.size,
            oldest_s,
        )
    counters.oldest_s = 0.0
    return cluster.skipped
