"""Merging small segments, and key compaction: in process, one segment at a time.

Both plan upon a version of the table, write new segments beside the old ones, and commit one
replacement under the care lock of the partition: of two that work on one partition, and of one that
meets a retention, the slower is refused, takes its uploads back and says so. What it planned upon
is gone by then, so it does not try again; the next run does.

And if we die here? Before the commit: segments that no version names, for collection. After it:
it counts. A merge commits each output by itself; a compaction commits a partition at once, because
a tombstone must not go before what it deletes has.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from compaction import plan
from compaction.cluster import Cluster
from compaction.latest import Latest
from compaction.plan import clean_app_id
from compaction.rewrite import Rewrite, pump, rewrite, whole
from storage.errors import LogError, NotFound, Unavailable
from storage.manifest import ManifestConflict, SegmentIndex, Table, care_app_id
from storage.model import SegmentFile
from storage.segment import Cleaned
from storage.slices import Fetched, decode, fetch
from storage.state import Topic
from storage.topics import TopicConfig

log = logging.getLogger("tidelog.compact")

UPLOAD_AGE_MAX_S = 6 * 3600.0
"""From the first upload to the commit; a fourth of the grace after which collection takes what no
version names."""
HISTORY_MAX = 1000
"""Cleanings that a segment remembers (I10): those within `delete.retention.ms`, and one more."""

MERGE = "merge"
COMPACT = "compact"


class Compacted(NamedTuple):
    """What is done to one partition. `rows_after` and `size_after` are -1 in a plan that would have
    to read records to know; `is_lost`: somebody else was faster, and what they did counts."""

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
    on_rows: Callable[[int], None] = lambda _: None,
) -> list[Compacted]:
    """Merge and compact the topics (all when None). `is_forced`: whatever the dirty ratio.

    Raises UnknownTopic, Unavailable, Corrupt, CommitUnknown: run it again.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    run = _Run(cluster, now_ms, on_rows, is_dry=is_dry)
    found: list[Compacted] = []
    for topic in cluster.topics(names):
        config = cluster.state.config(topic)
        for number in range(len(topic.partitions)):
            is_cleaned: list[Compacted] = []
            if "compact" in config.cleanup_policy:
                is_cleaned = await run.clean(topic, number, config, is_forced=is_forced)
            found += is_cleaned
            if not (is_cleaned and is_dry):  # what it leaves is not known then
                found += await run.merge(topic, number, config)
    return found


class _Run:
    def __init__(
        self, cluster: Cluster, now_ms: int, on_rows: Callable[[int], None], *, is_dry: bool
    ) -> None:
        self._cluster = cluster
        self._now_ms = now_ms
        self._on_rows = on_rows
        self._is_dry = is_dry

    async def _look(self, topic: Topic, number: int, config: TopicConfig) -> tuple[Table, _Work]:
        table = await self._cluster.table(topic)
        care = await table.transaction_version(care_app_id(number)) or 0
        clean_end = await table.transaction_version(clean_app_id(number)) or 0
        index = await table.segments(number)
        return table, _Work(topic, number, config, index, care, clean_end)

    # -- merging

    async def merge(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        table, work = await self._look(topic, number, config)
        partition = topic.partitions[number]
        target = config.target_segment_bytes
        done: list[Compacted] = []
        wanted = list(plan.merges(work.segments.columns, partition, target, work.clean_end))
        for turn, positions in enumerate(wanted):
            files = [work.segments[at] for at in positions]
            told = _told(work, MERGE, f"small, {len(files)} neighbours", files)
            if not self._is_dry:
                task = Rewrite(topic.prefix, files, config.compression_type, told.rows)
                care = work.care + turn
                told = await self._replace(
                    table, work._replace(care=care), [task], told, {}, data_change=False
                )
            done.append(told)
            if told.is_lost:
                break
        return done

    # -- key compaction

    async def clean(
        self, topic: Topic, number: int, config: TopicConfig, *, is_forced: bool
    ) -> list[Compacted]:
        table, work = await self._look(topic, number, config)
        could = plan.cleanable(
            work.segments.columns, topic.partitions[number], config, work.clean_end, self._now_ms
        )
        is_due = could.dirty_ratio >= config.min_cleanable_dirty_ratio
        if could.dirty >= could.last or not (is_due or is_forced):
            return []
        files = [work.segments[at] for at in range(could.first, could.last)]
        told = _told(work, COMPACT, f"dirty ratio {could.dirty_ratio:.2f}", files)
        if self._is_dry:
            return [told]
        history = await self._history(work)
        kept = await self._newest(topic, files, history, config)
        tasks = self._tasks(work, files, kept, self._extended(history, files, config))
        end = {clean_app_id(number): files[-1].end_offset}
        untouched = len(files) - sum(len(task.inputs) for task in tasks)
        told = await self._replace(table, work, tasks, told, end, data_change=True)
        return [
            told
            if told.is_lost
            else told._replace(rows_after=len(kept), segments_after=told.segments_after + untouched)
        ]

    async def _history(self, work: _Work) -> Sequence[Cleaned]:
        """When compaction came how far: the segment up to which it came last knows."""
        file = work.segments.at_or_after(max(work.clean_end - 1, 0))
        if work.clean_end == 0 or file is None:
            return ()
        fetched = await fetch(self._cluster.store, whole(work.topic.prefix, file), groups_max=0)
        return () if fetched.footer is None else fetched.footer.cleaned

    def _extended(
        self, history: Sequence[Cleaned], files: Sequence[SegmentFile], config: TopicConfig
    ) -> list[Cleaned]:
        old = [each for each in history if self._is_expired(each, config)][-1:]
        young = [each for each in history if not self._is_expired(each, config)]
        now = Cleaned(files[-1].end_offset, self._now_ms)
        return [*old, *young[1 - HISTORY_MAX :], now]

    def _is_expired(self, cleaned: Cleaned, config: TopicConfig) -> bool:
        return self._now_ms - cleaned.at_ms >= config.delete_retention_ms

    async def _newest(
        self,
        topic: Topic,
        files: Sequence[SegmentFile],
        history: Sequence[Cleaned],
        config: TopicConfig,
    ) -> np.ndarray:
        """The offsets that stay. A tombstone goes when `delete.retention.ms` have passed since it
        was first compacted: until then whoever began to read before that comes to it."""
        ends = [each.end_offset for each in history if self._is_expired(each, config)]
        expires = max(ends, default=0)
        latest = Latest()

        def decoded(file: SegmentFile, fetched: Fetched) -> Iterator[pa.RecordBatch]:
            names = ["offset", "key", *(["value"] if file.base_offset < expires else [])]
            return decode(whole(topic.prefix, file), fetched, names)

        def feed(batches: Sequence[pa.RecordBatch]) -> None:
            for batch in batches:
                latest.add(batch, expires=expires)

        store = self._cluster.store
        await pump(store, topic.prefix, files, decoded, feed, self._on_rows)
        return await asyncio.to_thread(latest.kept)

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
        told: Compacted,
        transactions: dict[str, int],
        *,
        data_change: bool,
    ) -> Compacted:
        cluster, prefix = self._cluster, work.topic.prefix
        started_s = cluster.clock.boot_s()
        removed = [file for task in tasks for file in task.inputs]
        added: list[SegmentFile] = []
        care = {care_app_id(work.number): work.care + 1}
        try:
            for task in tasks:
                unique = cluster.clock.new_id().hex()
                added.append(await rewrite(cluster.store, task, unique, self._on_rows))
            if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
                raise Unavailable(f"{told.topic}-{told.partition} took too long: run it again")
            await table.replace(removed, added, care | transactions, data_change=data_change)
        except (ManifestConflict, NotFound) as conflict:
            log.info("somebody was faster on %s-%d: %s", told.topic, told.partition, conflict)
            with contextlib.suppress(LogError):  # definitely not in the table: collection would
                await cluster.store.delete([f"{prefix}/{file.path}" for file in added])
            return told._replace(is_lost=True)
        if cluster.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
            await self._check_there(table, work, removed, added)
        return told._replace(
            segments_after=len(added),
            rows_after=sum(file.rows for file in added),
            size_after=told.size - sum(file.size for file in removed) + sum(f.size for f in added),
        )

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
