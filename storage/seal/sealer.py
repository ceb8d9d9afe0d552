"""Sealing: a partition's tail becomes a Parquet segment of its topic's table.

Each of the three steps may be repeated (DESIGN 8):

1. Upload the segments under unique names (encode, uploads).
2. Add them in one Delta commit, together with the application transaction (app id = the partition's
   seal, version = end offset).
3. Trim the tail by an action in the WAL.

The application transaction is the lock. The manifest refuses one of two sealers, and the refused
sealer starts again from the manifest's content.

**On a crash**: after the upload, files that nothing names are left for collection. After the Delta
commit, the table has more records than the WAL calls sealed. Readers still use the tail (I7). The
next sealer finds the transaction ahead of `sealed_end`, verifies the segments and repeats the WAL
action.

**If a seal takes long**: after a day, collection deletes a file that no version names. So when half
of `UPLOAD_AGE_MAX_S` has passed since the first upload began, a sealer stops its reads and uploads,
commits the segments that it has uploaded, and seals the rest in another commit. The time before the
first upload does not count, and the first upload is never stopped. So each commit has at least one
segment, however slow the store is.

**If the process is suspended**, more than `UPLOAD_AGE_MAX_S` may pass: then the sealer commits
nothing. If it finds this only after the commit, it does not trim the tail. A sealer that finds the
table ahead (tables_ahead_of_wal) replaces segments of that age by new ones with the same records,
and then trims the tail. It does not only remove them: another sealer may have verified them, and
may trim the tail at any later time.

`DueTails` chooses the tails that a broker seals now: large, old, or about to leave its memory.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import AnyAction, Sealed
from tidelog.storage.core.errors import Corrupt, LogError, TableInDoubt
from tidelog.storage.core.log_settings import SealerSettings
from tidelog.storage.core.model import SKEW_MS_MAX, SegmentFile
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.runtime.tasks import TASK_ENDS, surviving
from tidelog.storage.seal.encode import TailSegments
from tidelog.storage.seal.sealed_actions import SealedActions
from tidelog.storage.seal.tables_ahead_of_wal import TablesAhead
from tidelog.storage.seal.uploads import CommitUploads, Uploader
from tidelog.storage.state import idle_tails
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.moments import Moment
from tidelog.storage.tables.manifest import ManifestConflict, Table, lost_app_id, seal_app_id
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.view_age import Freshness
from tidelog.storage.write.writer import Writer

TAKEOVER_FACTOR = 2
"""Any broker seals a tail that exceeds its limit by this factor, because the broker that owns the
seals of the topic did not seal it. Below this factor only that broker seals it: others would encode
and upload segments that the manifest refuses."""
ALONG_PART = 4
"""If a tail of a topic is due, the topic's other tails that are older than this part of
`segment.ms` are sealed in the same commit. So a topic of many partitions has few commits."""
EVICTION_PART = 2
"""A tail is due if this part of the tail cache was added since its first record in the cache. A
seal that begins later may read the records from the store again."""
EVICTION_BYTES_MIN = 4 * 1024 * 1024
"""A tail of fewer stored bytes is not sealed before it leaves the tail cache. To read it again is
cheaper: at S3's prices, a PUT for each MiB costs more than the CPU time of the reads."""
FULLNESS, TAKEOVER_FULLNESS = 1 / 2, 3 / 4
"""If a principal's topics have more than this part of its share of all chunks, the largest of them
are sealed: by the broker that owns the seals, or by any broker. The same holds for all topics and
the bound. At the whole share brokers refuse records (storage.state.tail_chunk_counts)."""


class DueTails(NamedTuple):
    """The rules of one broker about when a tail is due.

    `owns` returns whether this broker seals the tails of a topic id as soon as they are due.
    `topic_chunks_max` bounds the chunks of all tails of a topic together.
    """

    now_ms: Callable[[], int]
    tail_chunks_max: int
    topic_chunks_max: int
    owns: Callable[[str], bool]
    cache: TailCache

    def of(self, state: ClusterState) -> Iterator[tuple[Topic, list[int]]]:
        """Yield each topic, and its partitions whose tails are due.

        The caller may await between two topics.
        """
        now_ms = self.now_ms()
        quota = state.access.quota
        own = state.tail_chunks.crowded(FULLNESS, quota)
        takeover_limits = state.tail_chunks.crowded(TAKEOVER_FULLNESS, quota)
        for topic in list(state.topics.values()):
            if state.topic_of_id(topic.topic_id) is not None:  # else deleted during an await
                is_own = self.owns(topic.topic_id)
                chunks_max = self._chunks_max(
                    state, topic, own if is_own else takeover_limits, is_own
                )
                yield topic, self._of_topic(state, topic, now_ms, chunks_max, is_own)

    def _chunks_max(
        self, state: ClusterState, topic: Topic, crowded: Mapping[str, float], is_own: bool
    ) -> float:
        """Return the number of chunks at which a tail of the topic is due."""
        factor = 1 if is_own else TAKEOVER_FACTOR
        tail_max, topic_max = factor * self.tail_chunks_max, float(factor * self.topic_chunks_max)
        count = state.tail_chunks.of_topic(topic.topic_id)
        if crowded:
            owner = state.tail_chunks.owner(topic.topic_id)
            topic_max = min(topic_max, crowded.get(owner, math.inf))
        if not count or count < topic_max:
            return tail_max
        # Tails of half of the mean have together at least half of the chunks.
        tails = sum([1 for partition in topic.partitions if partition.tail])
        return min(tail_max, count / tails / 2)

    def _of_topic(
        self, state: ClusterState, topic: Topic, now_ms: int, chunks_max: float, is_own: bool
    ) -> list[int]:
        # One loop without calls: a topic may have 10,000 partitions.
        config = topic.config
        factor = 1 if is_own else TAKEOVER_FACTOR
        bytes_max = factor * config.segment_bytes
        before_ms = now_ms - factor * config.segment_ms
        idle_before_ms = now_ms - factor * idle_tails.idle_ms(topic)
        along_ms = now_ms - config.segment_ms / ALONG_PART
        # A writer's clock was ahead of this one. At level 1 this is no reason: there all later
        # entries have at least the time of that writer.
        after_ms = now_ms + SKEW_MS_MAX if state.level > format_levels.FIRST else math.inf
        numbers: list[int] = []
        is_any_due = False
        for number, partition in enumerate(topic.partitions):
            if not (tail := partition.tail):
                continue
            time_ms, nbytes = tail[0].committed_ms, partition.tail_bytes
            is_old = time_ms <= before_ms and (
                time_ms <= idle_before_ms or not idle_tails.is_idle(partition)
            )
            is_due = (
                nbytes >= bytes_max
                or is_old
                or time_ms > after_ms
                or len(tail) >= chunks_max
                or (
                    is_own
                    and nbytes >= EVICTION_BYTES_MIN
                    and self._leaves_memory(topic.topic_id, number, partition)
                )
            )
            if not is_due and time_ms > along_ms:
                continue
            if tail[0].is_lost and all(chunk.is_lost for chunk in tail):
                continue  # lost records are sealed with the next ones
            is_any_due = is_any_due or is_due
            numbers.append(number)
        return numbers if is_any_due else []

    def _leaves_memory(self, topic_id: str, number: int, partition: Partition) -> bool:
        passed = self.cache.passed((topic_id, number), partition.sealed_end)
        return passed > self.cache.bytes_max // EVICTION_PART


__all__ = ["Sealer", "SealerCounters", "SealerSettings"]

log = logging.getLogger("tidelog.sealer")

ROUNDS_MAX = 64
"""A partition whose seals fail waits for twice as many rounds of `run` each time, up to this
number. Each failed seal costs the encoding of a tail and a log line."""
BACKGROUND_STOP_S = 1.0
"""Maximum wait for a seal, or for retention and collection, when a broker stops. Their threads have
the lowest priority and may get no CPU on a busy machine. It is safe to interrupt this work at any
point."""
TOPICS_MAX = 16
"""Topics that a broker seals at the same time. Most of a small seal is waiting for the store."""
PARTITIONS_A_SLICE = 5000
"""Partitions that are checked at once, in ~0.5 us each, before the event loop runs other work."""


@dataclass
class SealerCounters:
    """Counters since the process started."""

    segments: int = 0
    rows: int = 0
    bytes: int = 0
    conflicts: int = 0
    failures: int = 0


@dataclass
class _Commit:
    """The work of one commit: offset ranges [base, end) by partition, uploads, actions.

    The WAL gets the actions after the commit to the table.
    """

    uploads: CommitUploads
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    actions: list[AnyAction] = field(default_factory=list)


class Sealer:
    """A broker's sealer.

    Owned by one event loop. Any number of sealers may work on one cluster. `owns` returns whether
    this broker seals the tails of a topic id as soon as they are due.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        tables: OpenTables,
        settings: SealerSettings,
        owns: Callable[[str], bool],
    ) -> None:
        self.writer = writer
        self.settings = settings
        self.counters = SealerCounters()
        self._tables = tables
        clock = writer.clock
        self._due = DueTails(
            clock.now_ms, settings.tail_chunks_max, settings.topic_chunks_max, owns, reader.tail
        )
        self._segments = TailSegments(reader, clock, lambda: writer.wal.state.level)
        self._uploader = Uploader(reader.store, Freshness(reader.store, clock))
        self._ahead = TablesAhead(reader, clock, tables, self._segments, self._uploader)
        # By topic id: one seal of a topic at a time.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._topics = asyncio.Semaphore(TOPICS_MAX)
        self._under_way: set[str] = set()
        self._actions = SealedActions(writer, settings.sealed_wait_s)
        self.damaged: dict[tuple[str, int], Corrupt] = {}
        """Why the tail of a partition cannot be sealed, by topic id and partition, as the last seal
        found. The partition stays here until a seal succeeds, or until its tail is not due."""
        # By topic id and partition: failures, rounds left.
        self._set_aside: dict[tuple[str, int], tuple[int, int]] = {}

    def close(self) -> None:
        self._segments.close()

    @property
    def failing(self) -> list[tuple[str, int]]:
        """The due partitions whose last seal failed, by topic id and number."""
        return list(self._set_aside)

    async def run(self, state_of: Callable[[], ClusterState]) -> None:
        """Seal the partitions that are due.

        Does not return. Topics are sealed side by side, and no topic waits for another. A partition
        whose seal fails, for whatever reason, waits for some rounds; the others are sealed.
        """
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.settings.check_interval_s)
                with surviving(log, "looking for tails to seal"):
                    await self._begin_due(state_of(), tasks)
        except asyncio.CancelledError:
            self._actions.send()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _begin_due(self, state: ClusterState, tasks: set[asyncio.Task[None]]) -> None:
        due: dict[str, list[int]] = {}
        partition_count = 0
        for topic, numbers in self._due.of(state):
            if numbers:
                due[topic.topic_id] = numbers
            partition_count += len(topic.partitions)
            if partition_count >= PARTITIONS_A_SLICE:
                partition_count = 0
                await asyncio.sleep(0)
        for partitions in (self._set_aside, self.damaged):
            for key in [key for key in partitions if key[1] not in due.get(key[0], ())]:
                del partitions[key]
        for topic_id, numbers in due.items():
            current = self._tables.topic_of_id(topic_id)
            if current is None or topic_id in self._under_way:
                continue
            ready = numbers
            if self._set_aside:
                ready = [number for number in numbers if self._is_turn(topic_id, number)]
            if ready:
                self._under_way.add(topic_id)
                task = asyncio.create_task(self._try(current, ready))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    def _is_turn(self, topic_id: str, number: int) -> bool:
        failures, rounds = self._set_aside.get((topic_id, number), (0, 0))
        if rounds:
            self._set_aside[topic_id, number] = failures, rounds - 1
        return not rounds

    async def _try(self, topic: Topic, numbers: Sequence[int]) -> None:
        failed: dict[int, BaseException] = {}
        try:
            failed.update((await self._seal(topic, numbers, is_patient=True))[1])
        except TASK_ENDS:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of deltalake; logged below
            failed = dict.fromkeys(numbers, error)
        finally:
            self._under_way.discard(topic.topic_id)
        self._note(topic, numbers, failed)

    def _note(
        self, topic: Topic, numbers: Sequence[int], failed: Mapping[int, BaseException]
    ) -> None:
        """Set the partitions aside whose seal failed, and log why."""
        self.counters.failures += bool(failed)
        logged: set[str] = set()
        for number in numbers:
            failures, _ = self._set_aside.pop((topic.topic_id, number), (0, 0))
            if (why := failed.get(number)) is None:
                continue
            self._set_aside[topic.topic_id, number] = failures + 1, min(2**failures, ROUNDS_MAX) - 1
            if str(why) in logged:  # a failure of the whole topic is logged once
                continue
            logged.add(str(why))
            is_known = isinstance(why, (LogError, OSError, pa.ArrowException))
            log.warning(
                "sealing %s-%d failed %d times and will be retried: %s",
                topic.name,
                number,
                failures + 1,
                why,
                exc_info=None if is_known else why,
            )

    def due(self, state: ClusterState) -> dict[str, list[int]]:
        """Return the partitions that the next round would seal, by topic id."""
        return {topic.topic_id: numbers for topic, numbers in self._due.of(state) if numbers}

    async def seal(self, topic: Topic, numbers: Sequence[int] | None = None) -> int:
        """Move the tails of these partitions (None: all), as they are now, into the table.

        Returns the number of records sealed. Raises Unavailable, Corrupt, TableInDoubt. Damage of
        one partition does not stop the others, and is raised when the others are sealed. A conflict
        with another sealer is not an error: that sealer's commit stays, and the next round seals
        the rest.
        """
        partition_numbers = range(len(topic.partitions)) if numbers is None else numbers
        rows, damage = await self._seal(topic, partition_numbers, is_patient=False)
        for error in damage.values():
            raise error
        return rows

    async def _seal(
        self, topic: Topic, numbers: Sequence[int], *, is_patient: bool
    ) -> tuple[int, dict[int, Corrupt]]:
        """Seal each partition up to its end or to damage, in one or more commits.

        If `is_patient`, no caller waits for it. Return the number of records sealed,
        and the damage by partition. Raises the errors of the whole topic.
        """
        rows, damage = 0, dict[int, Corrupt]()
        turn = self._turns.setdefault(topic.topic_id, asyncio.Lock())
        async with turn, self._topics:
            ends = {number: topic.partitions[number].high_watermark for number in numbers}
            while ends:  # each turn commits at least one segment, or finishes all partitions
                topic = self._tables.topic_of_id(topic.topic_id) or topic
                rows += await self._seal_some(topic, ends, damage, is_patient)
        for number in numbers:
            self.damaged.pop((topic.topic_id, number), None)
        self.damaged.update({(topic.topic_id, number): why for number, why in damage.items()})
        return rows, damage

    async def _seal_some(
        self,
        topic: Topic,
        ends: dict[int, int],
        damage: dict[int, Corrupt],
        is_patient: bool,
    ) -> int:
        """Seal the partitions of `ends` up to the offsets there, in one commit.

        Remove them from `ends`. If the segments must be committed before all are sealed (see the
        module docstring), the others stay in `ends`. Return the number of records sealed.
        """
        # Read the sealed ends before the table. In between, the view may apply the seal of another
        # sealer. A table that was read before it would look as if it had lost that seal.
        bases = {number: topic.partitions[number].sealed_end for number in ends}
        table = await self._table(topic, bases)
        # `checked` may load the view again. `topic` is then of the old view, without the records
        # that came since, and a table that has them would seem to have other records than the WAL.
        topic = self._tables.topic_of_id(topic.topic_id) or topic
        limit = asyncio.timeout(None)
        work = _Commit(CommitUploads(limit))
        damage_by_number: dict[int, Corrupt] = {}
        try:
            async with self._preparing(topic, work.uploads, limit):
                await self._plan(topic, table, bases, ends, work, damage_by_number)
                await self._upload(topic, work, damage_by_number)
            files = await self._commit(topic, table, work, is_patient)
        except ManifestConflict as conflict:
            self.counters.conflicts += 1
            log.info("another commit was faster on %s: %s", topic.name, conflict)
            ends.clear()
            await self._tables.checked(topic)  # it may have been another program's
            return 0
        reached = {file.partition: file.end_offset for file in files}
        for number, base in bases.items():
            end = reached.get(number, base)
            if number in damage_by_number and await self._is_tail(topic, number, end):
                damage[number] = damage_by_number[number]
            is_done = number not in work.ranges or end == ends[number]
            if is_done or number in damage_by_number or not limit.expired():
                del ends[number]
        rows = sum(file.rows for file in files)
        self.counters.segments += len(files)
        self.counters.rows += rows
        self.counters.bytes += sum(file.size for file in files)
        return rows

    async def _table(self, topic: Topic, bases: Mapping[int, int]) -> Table:
        """Return the topic's table, checked.

        Its loaded version will do if it is at the sealed ends: the commit above it fails if it is
        not the newest, so a seal needs no look at the store before its commit.
        """
        table = await self._tables.checked(topic, is_newest=False)
        app_ids = {seal_app_id(number): base for number, base in bases.items()}
        versions = await table.transaction_versions(list(app_ids))
        if all((versions[app_id] or 0) == base for app_id, base in app_ids.items()):
            return table
        return await self._tables.checked(topic)

    @contextlib.asynccontextmanager
    async def _preparing(
        self, topic: Topic, uploads: CommitUploads, limit: asyncio.Timeout
    ) -> AsyncIterator[None]:
        """End the uploads when `limit` ends. After an error, delete them."""
        try:
            async with limit:
                yield
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                await self._uploader.remove(topic, uploads.files())
                raise

    async def _commit(
        self, topic: Topic, table: Table, work: _Commit, is_patient: bool
    ) -> list[SegmentFile]:
        """Commit the uploaded segments to the table, then the actions to the WAL.

        Delete uploads that the commit does not name. Return the segments. Raises ManifestConflict.
        """
        uploaded = work.uploads.take_done()
        files = [upload.file for upload in uploaded]
        await self._uploader.remove(topic, work.uploads.files())
        reached = {file.partition: file.end_offset for file in files}
        if files:
            transactions = {seal_app_id(number): end for number, end in reached.items()}
            for upload in uploaded:
                if upload.lost_end:
                    transactions[lost_app_id(upload.file.partition)] = upload.lost_end
            await self._add(topic, table, files, transactions, work.uploads.started)
        actions = [*work.actions]
        actions += [Sealed(topic.topic_id, number, end) for number, end in reached.items()]
        await self._actions.commit(actions, is_patient=is_patient)
        return files

    async def _plan(
        self,
        topic: Topic,
        table: Table,
        bases: Mapping[int, int],
        ends: Mapping[int, int],
        work: _Commit,
        damage: dict[int, Corrupt],
    ) -> None:
        """Put the ranges that are to be sealed into `work`.

        If the table is ahead of the WAL, put the missing action there instead. Damage of a
        partition goes into `damage`.
        """
        app_ids = {number: seal_app_id(number) for number in bases}
        done_to = await table.transaction_versions(list(app_ids.values()))
        for number, base in bases.items():
            table_end = done_to[app_ids[number]] or 0
            try:
                if table_end < base:
                    raise Corrupt(
                        f"{topic.prefix}/_delta_log",
                        f"partition {number} is sealed to {base}, its table only to {table_end}",
                    )
                if table_end == base < ends[number]:
                    work.ranges[number] = base, ends[number]
                elif table_end > (partition := topic.partitions[number]).sealed_end:
                    # Not `base`: it may be of an older view, and maintenance may have removed
                    # records from the table since.
                    start = max(partition.sealed_end, partition.log_start_offset)
                    reached = await self._ahead.check(topic, table, number, start, table_end)
                    if reached is not None:
                        work.actions.append(Sealed(topic.topic_id, number, reached))
            except TableInDoubt:
                raise
            except Corrupt as error:
                damage[number] = error

    async def _upload(self, topic: Topic, work: _Commit, damage: dict[int, Corrupt]) -> None:
        """Encode and upload the ranges of `work`.

        Damage of a partition goes into `damage`; `work` then has the part before the damage.
        """
        if not work.ranges:
            return
        encoded = self._segments.encoded(topic, work.ranges, damage)
        uploading = self._uploader.uploading(topic, work.uploads)
        async with uploading as start, contextlib.aclosing(encoded):
            async for segment in encoded:
                await start(segment)

    async def _add(
        self,
        topic: Topic,
        table: Table,
        files: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        started: Moment,
    ) -> None:
        """Commit the files. After Unavailable they may be in the table: see TablesAhead."""
        self._uploader.check_age(topic, started)
        await table.add(files, transactions)
        self._uploader.check_age(topic, started)

    async def _is_tail(self, topic: Topic, number: int, base: int) -> bool:
        """Return whether the records from `base` on are still in the tail.

        If another sealer has sealed them while this process was suspended, their chunks may be
        deleted.
        """
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        return current is not None and current.partitions[number].sealed_end <= base
