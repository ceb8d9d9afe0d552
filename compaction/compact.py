"""Merging of small segments, and key compaction: plan, let an engine write, commit.

Both make a plan from the segments of the table, write new segments, and commit one replacement
under the partition's maintenance lock. If the lock changed and the table still names all planned
inputs, the run commits again. So no work is lost if retention removed other segments meanwhile. If
an input is gone, the run deletes its uploads and reports that another run was first; the next run
continues. **On a crash** before the commit, new segments that no version names remain for
collection. After the commit, the result is complete.

Merges are committed in small groups, as the engine finishes them. A compaction commits a whole
partition at once, because a version of the table that lacks a tombstone must not have the records
that this tombstone deletes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tidelog.compaction import plan
from tidelog.compaction.commit_rewrites import Work, load_work, write_and_commit
from tidelog.compaction.engine import Engine, KeyScan, OnRows
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.merge import merge, planned_merges
from tidelog.compaction.rewrite import Rewrite
from tidelog.storage.codec.segment import Cleaned
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.read.segment_reader import SegmentReader, StoreRanges
from tidelog.storage.read.split_reader import gone_is_unavailable
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import clean_app_id

HISTORY_MAX = 1000
"""Upper bound of the compactions that a segment records (I10). These are the compactions within
`delete.retention.ms`, and the last one before them."""

MERGE = "merge"
COMPACT = "compact"
SKIP = "skip"


class Compacted(NamedTuple):
    """Result of one merge or compaction.

    The `_after` fields are -1 after a dry run, if `is_lost`, and if `is_damaged`. If `is_lost`,
    another run committed first, and the result of that run counts. If `is_damaged`, `why` names the
    damaged object, and the run leaves the partition as it is.
    """

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


async def compact(
    cluster: MaintenanceSession,
    names: Sequence[str] | None,
    *,
    is_dry: bool,
    is_forced: bool = False,
    engine: Engine | None = None,
    on_rows: OnRows = lambda _: None,
) -> list[Compacted]:
    """Merge and compact the topics (all if None). `is_forced` ignores the dirty ratio.

    Damage in one partition is reported and does not stop the others. Raises UnknownTopic; Corrupt
    if the WAL is damaged. After Unavailable or CommitUnknown, run again.
    """
    await cluster.refresh()
    now_ms = await cluster.store_now_ms()
    if engine is None:
        engine = InProcess(cluster.store, cluster.clock)
    run = _Compaction(cluster, engine, now_ms, on_rows, is_dry=is_dry, is_forced=is_forced)
    await cluster.for_each(topics_of(cluster.state, names), run.check)

    async def compacted(topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        try:
            if (error := cluster.skipped.get(topic.name)) is None:
                return await run.partition(topic, number, config)
        except Corrupt as damage:
            error = damage
        why = f"{error}: see tidelog scrub"
        return [Compacted(topic.name, number, SKIP, why, 0, 0, 0, is_damaged=True)]

    result_lists = await together(
        *(
            compacted(topic, number, topic.config)
            for topic in topics_of(cluster.state, names)
            for number in range(len(topic.partitions))
        ),
        at_once=engine.partitions_max,
    )
    return list(itertools.chain(*result_lists))


@dataclass(frozen=True)
class _Compaction:
    cluster: MaintenanceSession
    engine: Engine
    now_ms: int
    on_rows: OnRows
    is_dry: bool
    is_forced: bool

    async def check(self, topic: Topic) -> None:
        """Raise TableInDoubt if the topic's table is in doubt.

        A rewrite would make a loss look like a compaction.
        """
        self.cluster.skipped.pop(topic.name, None)
        await self.cluster.checked_table(topic)

    async def partition(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        cleaned: list[Compacted] = []
        if "compact" in config.cleanup_policy:
            cleaned = await self._clean(topic, number, config)
        if cleaned and self.is_dry:  # merges depend on the result, which a dry run does not have
            return cleaned
        return [*cleaned, *await self._merge(topic, number, config)]

    # -- merging

    async def _merge(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        work = await load_work(self.cluster, topic, number)
        merges = list(planned_merges(work, config.target_segment_bytes, self.now_ms))
        planned = [
            _planned(work, MERGE, f"small, {len(inputs)} neighbours", inputs) for inputs in merges
        ]
        if self.is_dry:
            return planned
        compacted: list[Compacted] = []
        step = self.engine.merges_max
        for turn, first in enumerate(range(0, len(merges), step)):
            turned = work._replace(lock=work.lock + turn)
            batch, results = merges[first : first + step], planned[first : first + step]
            added = await merge(self.cluster, self.engine, turned, batch, self.on_rows)
            if added is None:
                return compacted + [result._replace(is_lost=True) for result in results]
            compacted += [
                _becomes(result, [file]) for result, file in zip(results, added, strict=True)
            ]
        return compacted

    # -- key compaction

    async def _clean(self, topic: Topic, number: int, config: TopicConfig) -> list[Compacted]:
        work = await load_work(self.cluster, topic, number)
        could = plan.cleanable(
            work.segments.columns, topic.partitions[number], config, work.clean_end, self.now_ms
        )
        is_due = could.is_due(config) or self.is_forced
        if could.dirty >= could.last or not is_due:
            return []
        files = [work.segments[position] for position in range(could.first, could.last)]
        planned = _planned(work, COMPACT, f"dirty ratio {could.dirty_ratio:.2f}", files)
        if self.is_dry:
            return [planned]
        history = await self._history(work)
        scan = KeyScan(topic.prefix, files, self._expires(history, config))
        kept_offsets = await self.engine.newest(scan, self.on_rows)
        tasks = self._tasks(work, files, kept_offsets, self._extended(history, files, config))
        end = {clean_app_id(number): files[-1].end_offset}
        added = await write_and_commit(
            self.cluster,
            self.engine,
            work,
            tasks,
            files,
            end,
            data_change=True,
            on_rows=self.on_rows,
        )
        if added is None:
            return [planned._replace(is_lost=True)]
        written = {file.path for task in tasks for file in task.inputs}
        return [_becomes(planned, [*added, *(file for file in files if file.path not in written)])]

    async def _history(self, work: Work) -> Sequence[Cleaned]:
        """Return the past compactions, which the segment at the end of the last one records."""
        file = work.segments.at_or_after(max(work.clean_end - 1, 0))
        if work.clean_end == 0 or file is None:
            return ()
        reader = SegmentReader(StoreRanges(self.cluster.store))
        with gone_is_unavailable():
            footer = await reader.footer(f"{work.topic.prefix}/{file.path}", file.size)
        return footer.cleaned

    def _expires(self, history: Sequence[Cleaned], config: TopicConfig) -> int:
        """Return the offset below which compaction removes tombstones.

        Their first compaction was at least `delete.retention.ms` ago. Until now they stayed for
        readers that had read the deleted records before that first compaction.
        """
        ends = [cleaning.end_offset for cleaning in history if self._is_expired(cleaning, config)]
        return max(ends, default=0)

    def _extended(
        self, history: Sequence[Cleaned], files: Sequence[SegmentFile], config: TopicConfig
    ) -> list[Cleaned]:
        old = [cleaning for cleaning in history if self._is_expired(cleaning, config)][-1:]
        valid_cleanings = [
            cleaning for cleaning in history if not self._is_expired(cleaning, config)
        ]
        now = Cleaned(files[-1].end_offset, self.now_ms)
        return [*old, *valid_cleanings[1 - HISTORY_MAX :], now]

    def _is_expired(self, cleaned: Cleaned, config: TopicConfig) -> bool:
        return self.now_ms - cleaned.at_ms >= config.delete_retention_ms

    def _tasks(
        self,
        work: Work,
        files: Sequence[SegmentFile],
        kept_offsets: np.ndarray,
        history: Sequence[Cleaned],
    ) -> list[Rewrite]:
        """Plan the rewrites of segments that lose rows or are too small.

        Always rewrite the last segment, because it stores the history.
        """
        starts = [file.base_offset for file in files]
        positions = np.searchsorted(kept_offsets, [*starts, files[-1].end_offset]).tolist()
        stays = [end - first for first, end in itertools.pairwise(positions)]
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
                kept_offsets[positions[group.start] : positions[group.stop]],
                history,
                self.cluster.state.level,
            )
            for group, is_changed in groups
            if is_changed or group.stop == len(files)
        ]


def _planned(work: Work, kind: str, why: str, files: Sequence[SegmentFile]) -> Compacted:
    return Compacted(
        work.topic.name,
        work.number,
        kind,
        why,
        len(files),
        sum(file.rows for file in files),
        sum(file.size for file in files),
    )


def _becomes(planned: Compacted, files: Sequence[SegmentFile]) -> Compacted:
    return planned._replace(
        segments_after=len(files),
        rows_after=sum(file.rows for file in files),
        size_after=sum(file.size for file in files),
    )
