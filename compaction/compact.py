"""Merging small segments, and key compaction: what is planned, handed to an engine, and committed.

Both plan upon segments of the table, have new ones written beside them, and commit one replacement
under the care lock of the partition. Who finds the lock moved looks whether all that it planned
upon is still there: a retention of other segments costs nobody's work. If it is not, the slower of
the two takes its uploads back and says so; the next run goes on.

And if we die here? Before the commit: segments that no version names, for collection. After it:
it counts. Merges are committed a few at a time, as the engine has them; a compaction commits a
partition at once, because a tombstone must not go before what it deletes has.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from compaction import plan
from compaction.cluster import Cluster
from compaction.engine import Engine, InProcess, KeyScan, OnRows
from compaction.plan import clean_app_id
from compaction.rewrite import Rewrite, whole
from storage.errors import Corrupt, LogError, NotFound, Unavailable
from storage.manifest import ManifestConflict, SegmentIndex, Table, care_app_id
from storage.model import SegmentFile
from storage.segment import Cleaned
from storage.slices import fetch_footer
from storage.state import Topic
from storage.topics import TopicConfig

log = logging.getLogger("tidelog.compact")

UPLOAD_AGE_MAX_S = 6 * 3600.0
"""From the first upload to the commit; a fourth of the grace after which collection takes what no
version names."""
COMMIT_TRIES = 5
"""While others move the care lock and leave our segments alone."""
HISTORY_MAX = 1000
"""Cleanings that a segment remembers (I10): those within `delete.retention.ms`, and one more."""

MERGE = "merge"
COMPACT = "compact"
SKIP = "skip"


class Compacted(NamedTuple):
    """What is done to one partition. `rows_after` and `size_after` are -1 in a plan that would have
    to read records to know; `is_lost`: somebody else was faster, and what they did counts;
    `is_damaged`: `why` says which object, and nothing more was done to the partition."""

    topic: str
    partition: int
    what: str
    why: str
    segments: int
    rows: int
    size: int
    segments_after: int = -1
    rows_after: int = -1
    size_after: int = -1
    is_lost: bool = False
    is_damaged: bool = False


class _Work(NamedTuple):
    """A partition as it was planned upon."""

    topic: Topic
    number: int
    config: TopicConfig
    segments: SegmentIndex
    care: int
    clean_end: int


async def compact(
    cluster: Cluster,
    names: Sequence[str] | None,
    *,
    is_dry: bool,
    is_forced: bool = False,
    engine: Engine | None = None,
    on_rows: OnRows = lambda _: None,
) -> list[Compacted]:
    """Merge and compact the topics (all when None). `is_forced`: whatever the dirty ratio.

    A partition with damage keeps no other from its turn: it is told of. Raises UnknownTopic,
    Unavailable, CommitUnknown: run it again; Corrupt where it is the WAL that is damaged.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    if engine is None:
        engine = InProcess(cluster.store, cluster.clock)
    run = _Run(cluster, engine, now_ms, on_rows, is_dry=is_dry, is_forced=is_forced)
    turns = asyncio.Semaphore(engine.partitions_max)

    async def in_turn(topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        async with turns:
            try:
                return await run.partition(topic, number, config)
            except Corrupt as error:
                why = f"{error}: see tidelog scrub"
                return [Compacted(topic.name, number, SKIP, why, 0, 0, 0, is_damaged=True)]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(in_turn(topic, number, cluster.state.config(topic)))
                for topic in cluster.topics(names)
                for number in range(len(topic.partitions))
            ]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [each for task in tasks for each in task.result()]


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        engine: Engine,
        now_ms: int,
        on_rows: OnRows,
        *,
        is_dry: bool,
        is_forced: bool,
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._now_ms = now_ms
        self._on_rows = on_rows
        self._is_dry = is_dry
        self._is_forced = is_forced

    async def partition(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        cleaned: list[Compacted] = []
        if "compact" in config.cleanup_policy:
            cleaned = await self._clean(topic, number, config)
        if cleaned and self._is_dry:  # what it leaves is not known then
            return cleaned
        return [*cleaned, *await self._merge(topic, number, config)]

    async def _look(self, topic: Topic, number: int, config: TopicConfig) -> tuple[Table, _Work]:
        table = await self._cluster.table(topic)
        care = await table.transaction_version(care_app_id(number)) or 0
        clean_end = await table.transaction_version(clean_app_id(number)) or 0
        index = await table.segments(number)
        return table, _Work(topic, number, config, index, care, clean_end)

    # -- merging

    async def _merge(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        table, work = await self._look(topic, number, config)
        partition = topic.partitions[number]
        target = config.target_segment_bytes
        wanted = list(plan.merges(work.segments.columns, partition, target, work.clean_end))
        files = [[work.segments[at] for at in positions] for positions in wanted]
        told = [_told(work, MERGE, f"small, {len(some)} neighbours", some) for some in files]
        if self._is_dry:
            return told
        tasks = [
            Rewrite(topic.prefix, some, config.compression_type, each.rows)
            for some, each in zip(files, told, strict=True)
        ]
        done: list[Compacted] = []
        step = self._engine.merges_max
        for turn, first in enumerate(range(0, len(tasks), step)):
            turned = work._replace(care=work.care + turn)
            some, asked = tasks[first : first + step], told[first : first + step]
            basis = [file for task in some for file in task.inputs]
            added = await self._replace(table, turned, some, basis, {}, data_change=False)
            if added is None:
                return done + [each._replace(is_lost=True) for each in asked]
            done += [_becomes(each, [file]) for each, file in zip(asked, added, strict=True)]
        return done

    # -- key compaction

    async def _clean(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        table, work = await self._look(topic, number, config)
        could = plan.cleanable(
            work.segments.columns, topic.partitions[number], config, work.clean_end, self._now_ms
        )
        is_due = could.dirty_ratio >= config.min_cleanable_dirty_ratio
        if could.dirty >= could.last or not (is_due or self._is_forced):
            return []
        files = [work.segments[at] for at in range(could.first, could.last)]
        told = _told(work, COMPACT, f"dirty ratio {could.dirty_ratio:.2f}", files)
        if self._is_dry:
            return [told]
        history = await self._history(work)
        scan = KeyScan(topic.prefix, files, self._expires(history, config))
        kept = await self._engine.newest(scan, self._on_rows)
        tasks = self._tasks(work, files, kept, self._extended(history, files, config))
        end = {clean_app_id(number): files[-1].end_offset}
        added = await self._replace(table, work, tasks, files, end, data_change=True)
        if added is None:
            return [told._replace(is_lost=True)]
        written = {file.path for task in tasks for file in task.inputs}
        return [_becomes(told, [*added, *(file for file in files if file.path not in written)])]

    async def _history(self, work: _Work) -> Sequence[Cleaned]:
        """When compaction came how far: the segment up to which it came last knows."""
        file = work.segments.at_or_after(max(work.clean_end - 1, 0))
        if work.clean_end == 0 or file is None:
            return ()
        footer = await fetch_footer(self._cluster.store, whole(work.topic.prefix, file))
        return footer.cleaned

    def _expires(self, history: Sequence[Cleaned], config: TopicConfig) -> int:
        """Up to where tombstones go: `delete.retention.ms` have passed since they were first
        compacted. Until then whoever began to read before that comes to them."""
        ends = [each.end_offset for each in history if self._is_expired(each, config)]
        return max(ends, default=0)

    def _extended(
        self, history: Sequence[Cleaned], files: Sequence[SegmentFile], config: TopicConfig
    ) -> list[Cleaned]:
        old = [each for each in history if self._is_expired(each, config)][-1:]
        young = [each for each in history if not self._is_expired(each, config)]
        now = Cleaned(files[-1].end_offset, self._now_ms)
        return [*old, *young[1 - HISTORY_MAX :], now]

    def _is_expired(self, cleaned: Cleaned, config: TopicConfig) -> bool:
        return self._now_ms - cleaned.at_ms >= config.delete_retention_ms

    def _tasks(
        self,
        work: _Work,
        files: Sequence[SegmentFile],
        kept: np.ndarray,
        history: Sequence[Cleaned],
    ) -> list[Rewrite]:
        """What has to be written: segments that lose rows, or are too small; and always the last,
        which carries the history."""
        starts = [file.base_offset for file in files]
        at = np.searchsorted(kept, [*starts, files[-1].end_offset]).tolist()
        stays = [after - before for before, after in itertools.pairwise(at)]
        target = work.config.target_segment_bytes
        groups = plan.groups(
            [file.size for file in files], [file.rows for file in files], stays, target
        )
        return [
            Rewrite(
                work.topic.prefix,
                [files[number] for number in group],
                work.config.compression_type,
                sum(stays[number] for number in group),
                kept[at[group.start] : at[group.stop]],
                history,
            )
            for group, is_changed in groups
            if is_changed or group.stop == len(files)
        ]

    # -- both

    async def _replace(
        self,
        table: Table,
        work: _Work,
        tasks: Sequence[Rewrite],
        basis: Sequence[SegmentFile],
        transactions: dict[str, int],
        *,
        data_change: bool,
    ) -> list[SegmentFile] | None:
        """The segments that were written, now in the table; None: somebody was faster. `basis` is
        what this was planned upon."""
        cluster, prefix = self._cluster, work.topic.prefix
        where = f"{work.topic.name}-{work.number}"
        started_s = cluster.clock.boot_s()
        removed = [file for task in tasks for file in task.inputs]
        added = await self._engine.write(tasks, self._on_rows)
        if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
            raise Unavailable(f"{where} took too long: run it again")
        change = partial(table.replace, removed, added, data_change=data_change)
        try:
            care = await self._commit(change, table, work, basis, transactions)
        except ManifestConflict as conflict:
            log.info("somebody was faster on %s: %s", where, conflict)
            with contextlib.suppress(LogError):  # definitely not in the table: collection would
                await cluster.store.delete([f"{prefix}/{file.path}" for file in added])
            return None
        if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
            await self._check_there(table, work._replace(care=care), removed, added)
        return added

    async def _commit(
        self,
        change: Callable[[dict[str, int]], Awaitable[None]],
        table: Table,
        work: _Work,
        basis: Sequence[SegmentFile],
        transactions: dict[str, int],
    ) -> int:
        """Under the care lock; the version of it that this went upon. Raises ManifestConflict."""
        app_id, care = care_app_id(work.number), work.care
        for left in reversed(range(COMMIT_TRIES)):
            try:
                await change({app_id: care + 1} | transactions)
                break
            except ManifestConflict:
                await table.refresh()
                there = await table.paths()
                if not left or not all(file.path in there for file in basis):
                    raise
                care = await table.transaction_version(app_id) or 0
        return care

    async def _check_there(
        self,
        table: Table,
        work: _Work,
        removed: Sequence[SegmentFile],
        added: Sequence[SegmentFile],
    ) -> None:
        """After a sleep before the commit: what it names may have been collected. The inputs have
        their grace from the commit on, so they can come back."""
        try:
            for file in added:
                await self._cluster.store.get_range(f"{work.topic.prefix}/{file.path}", 0, 1)
        except NotFound as error:
            care = {care_app_id(work.number): work.care + 2}
            await table.replace(added, removed, care, data_change=True)
            raise Unavailable(
                f"{error}: it was collected while this slept; run it again"
            ) from error


def _told(work: _Work, what: str, why: str, files: Sequence[SegmentFile]) -> Compacted:
    return Compacted(
        work.topic.name,
        work.number,
        what,
        why,
        len(files),
        sum(file.rows for file in files),
        sum(file.size for file in files),
    )


def _becomes(told: Compacted, files: Sequence[SegmentFile]) -> Compacted:
    return told._replace(
        segments_after=len(files),
        rows_after=sum(file.rows for file in files),
        size_after=sum(file.size for file in files),
    )
