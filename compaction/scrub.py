"""Scrub: the invariants, checked on what lies in the store, and on nothing else.

The WAL first, then what it says: each partition's table and tail are [log_start_offset,
high_watermark) with no offset twice and none missing (I2, I7), every byte of them verifies, and the
manifest's statistics are true. What nobody names is listed, and is no damage. May run beside
brokers and beside all the others here: a table that is ahead of the WAL that was read is no
finding, and what is collected meanwhile was not named any more. Writes nothing but its look at the
clock.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from compaction import checks
from compaction.checks import Finding, Kind
from compaction.cluster import Cluster
from compaction.garbage import MANIFEST, Grace, topic_of
from compaction.plan import clean_app_id
from compaction.scrub_wal import Place, scrub_wal
from storage import keys
from storage import segment as segments
from storage.errors import Corrupt, NotFound
from storage.manifest import SegmentIndex, seal_app_id
from storage.model import SegmentFile
from storage.objectstore import ObjectInfo
from storage.partition import Run
from storage.state import ClusterState, Topic

SEGMENTS_AT_ONCE = 4
RUNS_AT_ONCE = 16
FINDINGS_MAX = 10_000
"""Of one run (I10); a log with more has one reason."""


@dataclass
class Report:
    """What was looked at, and what is wrong with it."""

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
        """Whether the log is: garbage and foreign files do not count."""
        return not any(finding.is_damage for finding in self.findings)


async def scrub(
    cluster: Cluster,
    names: Sequence[str] | None,
    grace: Grace,
    *,
    is_quick: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Report:
    """Look at the WAL and at these topics (all when None); a quick one reads no records of tables.

    Raises Unavailable where the store does not answer, UnknownTopic.
    """
    report = Report()

    def count(size: int) -> None:
        report.size += size
        on_bytes(report.size)

    now_ms = await cluster.store_now_ms()
    chain = await scrub_wal(cluster, report.findings, count)
    report.entries, report.checkpoints = chain.entries, chain.checkpoints
    state = chain.state
    if state is None:
        report.findings.append(Finding(Kind.WAL, keys.WAL, "no state can be read"))
        return report
    work = _Scrub(cluster, state, report, count, is_quick=is_quick)
    for topic in _wanted(state, names):
        await work.topic(topic, now_ms, grace)
        await work.tails(topic, chain.verified)
    if names is None:
        await work.others(now_ms, grace)
    del report.findings[FINDINGS_MAX:]
    return report


def _wanted(state: ClusterState, names: Sequence[str] | None) -> list[Topic]:
    if names is None:
        return [state.topics[name] for name in sorted(state.topics)]
    return [state.topic(name) for name in names]


class _Scrub:
    """One run over tables and tails."""

    def __init__(
        self,
        cluster: Cluster,
        state: ClusterState,
        report: Report,
        count: Callable[[int], None],
        *,
        is_quick: bool,
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._report = report
        self._count = count
        self._is_quick = is_quick
        self._segments = asyncio.Semaphore(SEGMENTS_AT_ONCE)
        self._runs = asyncio.Semaphore(RUNS_AT_ONCE)

    async def _newest_state(self) -> ClusterState:
        """Of the WAL as it is now; where it is damaged, that of its readable beginning."""
        try:
            await self._cluster.refresh()
        except Corrupt:
            return self._state
        return self._cluster.state

    def _find(self, kind: str, where: str, what: str) -> None:
        self._report.findings.append(Finding(kind, where, what))

    async def topic(self, topic: Topic, now_ms: int, grace: Grace) -> None:
        """Its table: ranges, objects, and every segment that readers may come to."""
        self._report.topics += 1
        listed = {info.key: info async for info in self._cluster.store.list(f"{topic.prefix}/")}
        table = await self._cluster.table(topic)
        # A seal is in the table before it is in the WAL, which was read before; a log start is in
        # the WAL before segments leave the table, so it is that of the WAL as it is now.
        current = (await self._newest_state()).topic_of_id(topic.topic_id)
        if current is None:
            return  # deleted meanwhile
        files: list[SegmentFile] = []
        for number, held in enumerate(topic.partitions):
            start = current.partitions[number].log_start_offset
            partition = msgspec.structs.replace(held, log_start_offset=start)
            self._report.partitions += 1
            where = f"{topic.name}-{number}"
            try:
                index: SegmentIndex = await table.segments(number)
            except Corrupt as error:
                self._find(Kind.TABLE, where, str(error))
                continue
            sealed_to = await table.transaction_version(seal_app_id(number)) or 0
            clean_end = await table.transaction_version(clean_app_id(number)) or 0
            for what in checks.ranges(
                index.columns, partition, sealed_to=sealed_to, clean_end=clean_end
            ):
                self._find(Kind.TABLE, where, what)
            files += index
        named = await table.paths() | await table.removed_since(now_ms - grace.table_ms + 1)
        for info in listed.values():
            self._judge(topic, info, named, now_ms, grace)
        await _together(
            self._segment(topic, file, listed.get(f"{topic.prefix}/{file.path}")) for file in files
        )

    def _judge(
        self, topic: Topic, info: ObjectInfo, named: set[str], now_ms: int, grace: Grace
    ) -> None:
        """An object below the topic's prefix that may be nobody's."""
        path = info.key.removeprefix(f"{topic.prefix}/")
        if path.startswith(MANIFEST) or path in named:
            return
        if keys.parse_segment(path) is None:
            what, kind = "is no file of ours", Kind.FOREIGN
        elif now_ms - info.modified_ms < grace.table_ms:
            return  # an upload under way
        else:
            what, kind = "no version of the table names it", Kind.ORPHAN
        self._report.findings.append(Finding(kind, info.key, what, is_damage=False, size=info.size))

    async def _segment(self, topic: Topic, file: SegmentFile, info: ObjectInfo | None) -> None:
        key = f"{topic.prefix}/{file.path}"
        async with self._segments:
            self._report.segments += 1
            if info is not None and info.size != file.size:
                what = f"has {info.size} bytes, the manifest says {file.size}"
                self._find(Kind.SEGMENT, key, what)
                return
            try:
                await self._read_segment(key, file)
            except NotFound:
                if await self._is_named(topic, file):
                    self._find(Kind.MISSING, key, "is named by the table and does not exist")
            except Corrupt as error:
                self._find(Kind.SEGMENT, key, str(error))

    async def _is_named(self, topic: Topic, file: SegmentFile) -> bool:
        return file.path in await (await self._cluster.table(topic)).paths()

    async def _read_segment(self, key: str, file: SegmentFile) -> None:
        store = self._cluster.store
        want = min(file.size, segments.FOOTER_READ_BYTES)
        end = await store.get_range(key, file.size - want, want)
        needed = min(segments.footer_length(end, key), file.size)
        if needed > len(end):
            end = await store.get_range(key, file.size - needed, needed)
        footer = segments.read_footer(end, file.size, key)
        self._count(len(end))
        for what in checks.segment(file, footer.groups):
            self._find(Kind.SEGMENT, key, what)
        for held in () if self._is_quick else footer.groups:
            data = await store.get_range(key, held.start, held.length)
            batch = await asyncio.to_thread(footer.decode_group, held.index, data, key)
            for what in checks.group(held, batch):
                self._find(Kind.SEGMENT, key, what)
            self._report.rows += batch.num_rows
            self._count(len(data))

    async def tails(self, topic: Topic, verified: frozenset[Place]) -> None:
        """Its tails: without a hole, and every chunk verifies. Those of entries that were read in
        the chain have been."""
        left: list[Run] = []
        for number, partition in enumerate(topic.partitions):
            for what in checks.tail(partition):
                self._find(Kind.TAIL, f"{topic.name}-{number}", what)
            for run in partition.tail:
                self._report.runs += 1
                self._report.rows += run.count
                if (run.object_key, run.position) not in verified:
                    left.append(run)
        await _together(self._run(run) for run in left)

    async def _run(self, run: Run) -> None:
        async with self._runs:
            try:
                body = await self._cluster.store.get_range(run.object_key, run.position, run.size)
                run.decode(body)
                self._count(len(body))
            except NotFound:
                self._find(Kind.MISSING, run.object_key, "a tail lies in it, and it is not there")
            except Corrupt as error:
                self._find(Kind.TAIL, run.object_key, str(error))

    async def others(self, now_ms: int, grace: Grace) -> None:
        """What lies beside it: folders of topics that nobody knows, files that are none of ours."""
        state = await self._newest_state()
        known = {topic.topic_id for topic in state.topics.values()}
        known |= {gone.topic_id for gone in state.deleted}
        ours = (keys.WAL, keys.CHECKPOINTS, keys.DATA, keys.TOPICS, keys.BROKERS, keys.PROBE)
        async for info in self._cluster.store.list(""):
            of = topic_of(info.key) if info.key.startswith(keys.TOPICS) else None
            if of is not None and of[1] not in known:
                kind, what = Kind.ORPHAN, "of a topic that nobody knows"
                if now_ms - info.modified_ms < grace.table_ms:
                    continue
            elif info.key not in (keys.CLUSTER, keys.SECRET) and not info.key.startswith(ours):
                kind, what = Kind.FOREIGN, "is no object of a log"
            elif info.key.startswith(keys.TOPICS) and of is None:
                kind, what = Kind.FOREIGN, "is no object of a topic"
            else:
                continue
            self._report.findings.append(
                Finding(kind, info.key, what, is_damage=False, size=info.size)
            )


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it; the first failure, by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
