"""Scrub: verify the invariants on the stored data alone.

A scrub verifies first the WAL, then the tables and tails. A partition's table and tail must
together cover each offset of [log_start_offset, high_watermark) once (I2, I7). Every byte must
verify, and the manifest's statistics must be correct. An object that nothing names is a finding,
but no damage.

A scrub may run beside brokers and other maintenance. A table ahead of `sealed_end` is no finding if
it has the records of the tail. A table ahead of the high watermark is a finding, because the table
and the WAL are from different moments. If collection deletes an object during the scrub, this is no
finding, because no table names the object. If the session is for reading only, the scrub writes
nothing. If not, the scrub writes one object, to read the store's clock.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tidelog.compaction import scrub_checks
from tidelog.compaction.garbage import MANIFEST, Grace, topic_of
from tidelog.compaction.maintenance_session import MaintenanceSession, topics_of
from tidelog.compaction.repair_tables import differs
from tidelog.compaction.scrub_checks import Finding, FindingKind
from tidelog.compaction.scrub_wal import Place, scrub_wal
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, ObjectNotFound, TableInDoubt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.segment_reader import SegmentReader, StoreRanges
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.partition import Partition, TailChunk
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables import iceberg
from tidelog.storage.tables.iceberg_tail import is_tail_object
from tidelog.storage.tables.manifest import (
    SegmentIndex,
    clean_app_id,
    lost_app_id,
    removed_paths,
    sealed_to,
)

SEGMENTS_AT_ONCE = 4
RUNS_AT_ONCE = 16
FINDINGS_MAX = 10_000
"""Upper bound of the findings of one run (I10): more findings than this have a common cause."""


@dataclass
class ScrubReport:
    """Counts of what was verified, and the findings."""

    findings: list[Finding] = field(default_factory=list)
    entries: int = 0
    checkpoints: int = 0
    topics: int = 0
    partitions: int = 0
    segments: int = 0
    runs: int = 0
    rows: int = 0
    size: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the log has no damage; garbage and foreign files do not count."""
        return not any(finding.is_damage for finding in self.findings)


async def scrub(
    cluster: MaintenanceSession,
    names: Sequence[str] | None,
    grace: Grace,
    *,
    is_quick: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ScrubReport:
    """Verify the WAL and these topics (all if None); a quick scrub reads no records of tables.

    Raises UnknownTopic, and Unavailable if the store does not answer.
    """
    report = ScrubReport()

    def count(size: int) -> None:
        report.size += size
        on_bytes(report.size)

    now_ms = await cluster.store_now_ms()
    chain = await scrub_wal(cluster, report.findings, count)
    report.entries, report.checkpoints = chain.entries, chain.checkpoints
    state = chain.state
    if state is None:
        report.findings.append(
            Finding(FindingKind.WAL, object_keys.WAL, "no cluster state can be read")
        )
        return report
    settled_ms = now_ms - grace.obeying(state.bounds.now).unnamed_ms
    work = _Scrub(cluster, state, report, count, settled_ms, is_quick=is_quick)
    for topic in topics_of(state, names):
        await work.topic(topic)
        await work.tails(topic, chain.verified)
    if names is None:
        await work.others()
    del report.findings[FINDINGS_MAX:]
    return report


class _Scrub:
    """One run over tables and tails.

    An object that nothing names may be an upload under way if it was created after `settled_ms`.
    """

    def __init__(
        self,
        cluster: MaintenanceSession,
        state: ClusterState,
        report: ScrubReport,
        count: Callable[[int], None],
        settled_ms: int,
        *,
        is_quick: bool,
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._report = report
        self._settled_ms = settled_ms
        self._is_quick = is_quick
        self._ahead: dict[str, Partition] = {}  # key: path of a segment beyond the sealed end
        # StoreRanges does not map files, so a damaged disk gives an error and not a signal.
        self._ranges = StoreRanges(cluster.store, on_read=count)
        self._reader = SegmentReader(self._ranges, footer_bytes=0)
        self._segments = asyncio.Semaphore(SEGMENTS_AT_ONCE)
        self._runs = asyncio.Semaphore(RUNS_AT_ONCE)

    async def _newest_state(self) -> ClusterState:
        """Return the state at the WAL's end; if the WAL is damaged, the state that was verified."""
        try:
            await self._cluster.refresh()
        except Corrupt:
            return self._state
        return self._cluster.state

    def _find(self, kind: str, name: str, violation: str) -> None:
        self._report.findings.append(Finding(kind, name, violation))

    def _find_unnamed(self, kind: str, info: ObjectInfo, violation: str) -> None:
        self._report.findings.append(
            Finding(kind, info.key, violation, is_damage=False, size=info.size)
        )

    async def topic(self, topic: Topic) -> None:
        """Verify a topic's table: ranges, objects, and every segment that readers may read."""
        self._report.topics += 1
        try:
            await self._table(topic)
        except Corrupt as error:
            self._find(FindingKind.TABLE, topic.name, str(error))

    async def _table(self, topic: Topic) -> None:
        listed = {info.key: info async for info in self._cluster.store.list(f"{topic.prefix}/")}
        table = await self._cluster.table(topic)
        await self._doubt(topic)
        # The scrub read the WAL before the table, and a sealer commits to the table before the WAL,
        # so the table may be ahead. Retention commits a log start to the WAL before it removes
        # segments from the table, so take the log start from the WAL as it is now.
        current = (await self._newest_state()).topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile
        files: list[SegmentFile] = []
        for number, earlier_partition in enumerate(topic.partitions):
            start = current.partitions[number].log_start_offset
            partition = msgspec.structs.replace(earlier_partition, log_start_offset=start)
            self._report.partitions += 1
            partition_name = f"{topic.name}-{number}"
            try:
                index: SegmentIndex = await table.segments(number)
            except Corrupt as error:
                self._find(FindingKind.TABLE, partition_name, str(error))
                continue
            seal_end = await sealed_to(table, number)
            clean_end = await table.transaction_version(clean_app_id(number)) or 0
            lost_end = await table.transaction_version(lost_app_id(number)) or 0
            for violation in scrub_checks.ranges(
                index.columns,
                partition,
                sealed_to=seal_end,
                clean_end=clean_end,
                lost_end=lost_end,
            ):
                self._find(FindingKind.TABLE, partition_name, violation)
            files += index
            # Compaction and merge take only segments below the sealed end, and this state is newer
            # than the table. So a segment beyond this state's sealed end is as a sealer wrote it,
            # and must have the records of the tail.
            now = current.partitions[number]
            self._ahead.update(
                {file.path: now for file in index if file.end_offset > now.sealed_end}
            )
        removals = await table.removed_since(self._settled_ms + 1)
        named = await table.paths() | removed_paths(removals)
        for info in listed.values():
            path = info.key.removeprefix(f"{topic.prefix}/")
            if path.startswith(MANIFEST) or path in named:
                continue
            if iceberg.is_object(path) or is_tail_object(path):
                continue
            if object_keys.parse_segment(path) is None:
                self._find_unnamed(FindingKind.FOREIGN, info, "is not a file of this table")
            elif info.modified_ms <= self._settled_ms:
                self._find_unnamed(FindingKind.ORPHAN, info, "no version of the table names it")
        checks = [
            self._segment(topic, file, listed.get(f"{topic.prefix}/{file.path}")) for file in files
        ]
        await together(*checks)

    async def _doubt(self, topic: Topic) -> None:
        """Report a table in doubt.

        Ignore damage of the WAL, because the scrub has reported it already.
        """
        try:
            await self._cluster.checked_table(topic)
        except TableInDoubt as error:
            self._find(FindingKind.TABLE, topic.name, str(error))
        except Corrupt as error:
            if not error.key.startswith(object_keys.WAL):
                raise

    async def _segment(self, topic: Topic, file: SegmentFile, info: ObjectInfo | None) -> None:
        key = f"{topic.prefix}/{file.path}"
        async with self._segments:
            self._report.segments += 1
            if info is not None and info.size != file.size:
                violation = f"has {info.size} bytes, the manifest has {file.size}"
                self._find(FindingKind.SEGMENT, key, violation)
                return
            try:
                await self._read_segment(key, file)
                partition = self._ahead.get(file.path)
                if partition is not None and not self._is_quick:
                    other = await differs(self._cluster.store, topic.prefix, partition, file)
                    if other is not None:
                        self._find(FindingKind.SEGMENT, key, other)
            except ObjectNotFound:
                if file.path in await (await self._cluster.table(topic)).paths():
                    self._find(FindingKind.MISSING, key, "is named by the table but does not exist")
            except Corrupt as error:  # in the segment, or in the tail at its offsets
                kind = FindingKind.SEGMENT if error.key == key else FindingKind.TAIL
                self._find(kind, error.key, str(error))

    async def _read_segment(self, key: str, file: SegmentFile) -> None:
        footer = await self._reader.footer(key, file.size)
        for violation in scrub_checks.segment(file, footer.groups):
            self._find(FindingKind.SEGMENT, key, violation)
        groups = () if self._is_quick else footer.groups
        async for group, batch in self._reader.batches(key, footer, groups):
            for violation in scrub_checks.group(group, batch):
                self._find(FindingKind.SEGMENT, key, violation)
            self._report.rows += batch.num_rows

    async def tails(self, topic: Topic, verified: frozenset[Place]) -> None:
        """Verify a topic's tails: no hole, every chunk intact.

        Skip chunks that were verified with their WAL entries.
        """
        unverified_runs: list[tuple[int, TailChunk]] = []
        for number, partition in enumerate(topic.partitions):
            for violation in scrub_checks.tail(partition):
                self._find(FindingKind.TAIL, f"{topic.name}-{number}", violation)
            for run in partition.tail:
                self._report.runs += 1
                if run.is_lost:
                    self._find_lost(f"{topic.name}-{number}", run)
                    continue
                self._report.rows += run.count
                if (run.object_key, run.position) not in verified:
                    unverified_runs.append((number, run))
        await together(*(self._run(topic, number, run) for number, run in unverified_runs))

    def _find_lost(self, name: str, run: TailChunk) -> None:
        violation = f"records {run.base_offset} to {run.end_offset - 1} were given up by a repair"
        self._report.findings.append(Finding(FindingKind.LOST, name, violation, is_damage=False))

    async def _run(self, topic: Topic, number: int, run: TailChunk) -> None:
        async with self._runs:
            try:
                run.decode(await self._ranges.read(run.object_key, run.position, run.size))
            except ObjectNotFound:
                # It may have been sealed, and collected, since this scrub began.
                current = (await self._newest_state()).topic_of_id(topic.topic_id)
                tail = () if current is None else current.partitions[number].tail
                if any(chunk.object_key == run.object_key for chunk in tail):
                    violation = "has chunks of a tail but does not exist"
                    self._find(FindingKind.MISSING, run.object_key, violation)
            except Corrupt as error:
                self._find(FindingKind.TAIL, run.object_key, str(error))

    async def others(self) -> None:
        """Report objects of unknown topics, and foreign files."""
        state = await self._newest_state()
        topic_ids = {topic.topic_id for topic in state.topics.values()}
        topic_ids |= {topic.topic_id for topic in state.deleted}
        ours = (
            object_keys.WAL,
            object_keys.CHECKPOINTS,
            object_keys.DATA,
            object_keys.TOPICS,
            object_keys.BROKERS,
            object_keys.PROBE,
            object_keys.MAINTENANCE,
        )
        async for info in self._cluster.store.list(""):
            of = topic_of(info.key) if info.key.startswith(object_keys.TOPICS) else None
            if of is not None:
                if of[1] not in topic_ids and info.modified_ms <= self._settled_ms:
                    self._find_unnamed(FindingKind.ORPHAN, info, "belongs to an unknown topic")
            elif info.key.startswith(object_keys.TOPICS):
                self._find_unnamed(FindingKind.FOREIGN, info, "is not an object of a topic")
            elif info.key not in (
                object_keys.CLUSTER,
                object_keys.SECRET,
            ) and not info.key.startswith(ours):
                self._find_unnamed(FindingKind.FOREIGN, info, "is not an object of this cluster")
