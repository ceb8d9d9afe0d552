"""Sealing: a partition's tail becomes a Parquet segment of its topic's table.

Each of the three steps may be repeated (DESIGN 8):

1. Upload the segments under unique names.
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
table ahead replaces segments of that age by new ones with the same records, and then trims the
tail. It does not only remove them: another sealer may have verified them, and may trim the tail at
any later time.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.storage.core import levels
from tidelog.storage.core.actions import AnyAction, Sealed
from tidelog.storage.core.errors import (
    Corrupt,
    LogError,
    TableInDoubt,
    Unavailable,
)
from tidelog.storage.core.model import SKEW_MS_MAX, Acks, ReadBounds, SegmentFile
from tidelog.storage.io.object_store import upload
from tidelog.storage.io.tasks import TASK_ENDS, surviving
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.segment_reader import between
from tidelog.storage.state.cluster_state import ClusterState, Topic
from tidelog.storage.state.partition import Partition
from tidelog.storage.tables.doubt import hole
from tidelog.storage.tables.manifest import (
    ManifestConflict,
    Table,
    clean_app_id,
    in_no_segment,
    lost_app_id,
    maintenance_app_id,
    seal_app_id,
)
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.freshness import NEVER, Freshness, Moment
from tidelog.storage.write.requests import AppendRequest
from tidelog.storage.write.tail_segments import EncodedSegment, TailSegments
from tidelog.storage.write.writer import Writer

log = logging.getLogger("tidelog.sealer")

ROUNDS_MAX = 64
"""A partition whose seals fail waits for twice as many rounds of `run` each time, up to this
number. Each failed seal costs the encoding of a tail and a log line."""
TAKEOVER_FACTOR = 2
"""Any broker seals a tail that exceeds its limit by this factor, because the broker that owns the
seals of the topic did not seal it. Below this factor only that broker seals it: others would encode
and upload segments that the manifest refuses."""
BACKGROUND_STOP_S = 1.0
"""Maximum wait for a seal, or for retention and collection, when a broker stops. Their threads have
the lowest priority and may get no CPU on a busy machine. It is safe to interrupt this work at any
point."""
COMPARED_BYTES = 4 * 1024 * 1024
"""Bytes of the tail that are in memory at once while the tail is compared with a segment."""
UPLOAD_AGE_MAX_S = 3600.0
"""Maximum time from a segment's upload to its commit. The grace of collection is several times as
long. One upload and one commit must take less than half of this time."""


class SealerSettings(NamedTuple):
    """Settings of the sealer; the service sets them."""

    check_interval_s: float = 1.0
    tail_chunks_max: int = 10_000
    """A tail of more chunks is sealed whatever its size: each chunk takes ~200 bytes of memory on
    every broker."""


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
    """The work of one commit: uploaded segments, the transactions of the commit to the table, and
    the WAL actions after it."""

    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends the reads and uploads of a seal when its segments must be committed."""
    started: Moment = NEVER
    started_s: float = 0.0
    """The moment before the first upload; `started_s` is the same moment by the loop's time."""
    files: list[SegmentFile] = field(default_factory=list)
    transactions: dict[str, int] = field(default_factory=dict)
    actions: list[AnyAction] = field(default_factory=list)


class Sealer:
    """A broker's sealer. Owned by one event loop. Any number of sealers may work on one cluster.
    `owns` returns whether this broker seals the tails of a topic id as soon as they are due."""

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        tables: OpenTables,
        settings: SealerSettings,
        owns: Callable[[str], bool],
    ) -> None:
        self.store = reader.store
        self.clock = writer.clock
        self.reader = reader
        self.writer = writer
        self.settings = settings
        self.counters = SealerCounters()
        self._freshness = Freshness(self.store, self.clock)
        self._owns = owns
        self._tables = tables
        self._segments = TailSegments(reader, writer.clock, lambda: writer.wal.state.level)
        self._turn = asyncio.Lock()
        self.damaged: dict[tuple[str, int], Corrupt] = {}
        """Why the tail of a partition cannot be sealed, by topic id and partition, as the last seal
        found. The partition stays here until a seal succeeds, or until its tail is not due."""
        # By topic id and partition: failures, rounds left.
        self._set_aside: dict[tuple[str, int], tuple[int, int]] = {}

    def close(self) -> None:
        self._segments.close()

    async def run(self, state_of: Callable[[], ClusterState]) -> None:
        """Seal the partitions that are due. Does not return. A partition whose seal fails, for
        whatever reason, waits for some rounds; the others are sealed."""
        while True:
            await asyncio.sleep(self.settings.check_interval_s)
            with surviving(log, "looking for tails to seal"):
                await self._seal_due(state_of())

    async def _seal_due(self, state: ClusterState) -> None:
        due = self.due(state)
        for kept in (self._set_aside, self.damaged):
            for key in [key for key in kept if key[1] not in due.get(key[0], ())]:
                del kept[key]
        for topic_id, numbers in due.items():
            topic = state.topic_of_id(topic_id)
            ready = [number for number in numbers if self._is_turn(topic_id, number)]
            if ready and topic is not None:
                await self._try(topic, ready)

    def _is_turn(self, topic_id: str, number: int) -> bool:
        failures, rounds = self._set_aside.get((topic_id, number), (0, 0))
        if rounds:
            self._set_aside[topic_id, number] = failures, rounds - 1
        return not rounds

    async def _try(self, topic: Topic, numbers: Sequence[int]) -> None:
        failed: dict[int, BaseException] = {}
        try:
            failed.update((await self._seal(topic, numbers))[1])
        except TASK_ENDS:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of deltalake; logged below
            failed = dict.fromkeys(numbers, error)
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
        """Return the partitions whose tail is large or old enough, by topic id."""
        now_ms = self.clock.now_ms()
        found: dict[str, list[int]] = {}
        for topic, number, partition in state.partitions():
            if self._is_due(state, topic, partition, now_ms) and (
                self._owns(topic.topic_id)
                or self._is_due(state, topic, partition, now_ms, TAKEOVER_FACTOR)
            ):
                found.setdefault(topic.topic_id, []).append(number)
        return found

    def _is_due(
        self, state: ClusterState, topic: Topic, partition: Partition, now_ms: int, factor: int = 1
    ) -> bool:
        if all(chunk.is_lost for chunk in partition.tail):
            return False  # lost records are sealed with the next ones
        config = state.config(topic)
        age_ms = now_ms - partition.tail[0].committed_ms
        return (
            partition.tail_bytes >= factor * config.segment_bytes
            or age_ms >= factor * config.segment_ms
            # The writer's clock was ahead of this one. Not at level 1: there all later entries
            # have at least the time of that writer.
            or (age_ms < -SKEW_MS_MAX and state.level > levels.FIRST)
            or len(partition.tail) >= factor * self.settings.tail_chunks_max
        )

    async def seal(self, topic: Topic, numbers: Sequence[int] | None = None) -> int:
        """Move the tails of these partitions (None: all), as they are now, into the table.

        Returns the number of records sealed. Raises Unavailable, Corrupt, TableInDoubt. Damage of
        one partition does not stop the others, and is raised when the others are sealed. A conflict
        with another sealer is not an error: that sealer's commit stays, and the next round seals
        the rest.
        """
        wanted = range(len(topic.partitions)) if numbers is None else numbers
        rows, damage = await self._seal(topic, wanted)
        for error in damage.values():
            raise error
        return rows

    async def _seal(self, topic: Topic, wanted: Sequence[int]) -> tuple[int, dict[int, Corrupt]]:
        """Seal each partition up to its end or to damage, in one or more commits. Return the number
        of records sealed, and the damage by partition. Raises the errors of the whole topic."""
        rows, damage = 0, dict[int, Corrupt]()
        async with self._turn:
            left = {number: topic.partitions[number].high_watermark for number in wanted}
            while left:  # each turn commits at least one segment, or finishes all partitions
                topic = self._tables.topic_of_id(topic.topic_id) or topic
                rows += await self._seal_some(topic, left, damage)
        for number in wanted:
            self.damaged.pop((topic.topic_id, number), None)
        self.damaged.update({(topic.topic_id, number): why for number, why in damage.items()})
        return rows, damage

    async def _seal_some(
        self, topic: Topic, left: dict[int, int], damage: dict[int, Corrupt]
    ) -> int:
        """Seal the partitions of `left` up to the offsets there, in one commit; remove them from
        `left`. If the segments must be committed before all are sealed (see the module docstring),
        the others stay in `left`. Return the number of records sealed."""
        # Read the sealed ends before the table. In between, the view may apply the seal of another
        # sealer. A table that was read before it would look as if it had lost that seal.
        bases = {number: topic.partitions[number].sealed_end for number in left}
        table = await self._tables.checked(topic)
        work = _Commit()
        try:
            async with work.limit:
                for number, base in bases.items():
                    try:
                        await self._partition(topic, table, number, base, left[number], work)
                    except TableInDoubt:
                        raise
                    except Corrupt as error:
                        if await self._is_tail(topic, number, base):
                            damage[number] = error
                    del left[number]
        except Exception as error:
            if not (isinstance(error, TimeoutError) and work.limit.expired()):
                await self._remove(topic, work.files)
                raise
        if work.files:
            try:
                await self._add(topic, table, work.files, work.transactions, work.started)
            except ManifestConflict as conflict:
                self.counters.conflicts += 1
                log.info("another sealer was faster on %s: %s", topic.name, conflict)
                left.clear()
                return 0
        if work.actions:
            await self.writer.append(AppendRequest((), 0, actions=work.actions), Acks.ALL)
        rows = sum(file.rows for file in work.files)
        self.counters.segments += len(work.files)
        self.counters.rows += rows
        self.counters.bytes += sum(file.size for file in work.files)
        return rows

    async def _is_tail(self, topic: Topic, number: int, base: int) -> bool:
        """Return whether the records from `base` on are still in the tail. If another sealer has
        sealed them while this process was suspended, their chunks may be deleted."""
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        return current is not None and current.partitions[number].sealed_end <= base

    async def _partition(
        self, topic: Topic, table: Table, number: int, base: int, upto: int, work: _Commit
    ) -> None:
        """Upload the partition's tail [base, upto); add the files, transactions and actions to
        `work`. Raises Corrupt if the tail is damaged; `work` then has the part before the
        damage."""
        partition = topic.partitions[number]
        done = await table.transaction_version(seal_app_id(number)) or 0
        if done < base:
            raise Corrupt(
                f"{topic.prefix}/_delta_log",
                f"partition {number} is sealed to {base}, its table only to {done}",
            )
        if done > base:
            if done > partition.sealed_end:
                await self._check_there(topic, table, number, base, done)
                work.actions.append(Sealed(topic.topic_id, number, done))
            return
        end = base
        try:
            async for segment in self._segments.encoded(topic, number, base, upto):
                await self._upload(topic, segment, work)
                end = segment.file.end_offset
                if work.limit.when() is None:
                    work.limit.reschedule(work.started_s + UPLOAD_AGE_MAX_S / 2)
        finally:
            if end > base:
                work.transactions[seal_app_id(number)] = end
                if lost := partition.lost(base, end):
                    work.transactions[lost_app_id(number)] = lost[-1][1]
                work.actions.append(Sealed(topic.topic_id, number, end))

    async def _upload(self, topic: Topic, segment: EncodedSegment, work: _Commit) -> None:
        if not work.files:
            work.started = self._freshness.now()
            work.started_s = asyncio.get_running_loop().time()
        await upload(self.store, f"{topic.prefix}/{segment.file.path}", [segment.body])
        work.files.append(segment.file)

    async def _add(
        self,
        topic: Topic,
        table: Table,
        files: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        started: Moment,
    ) -> None:
        """Commit the files. After Unavailable they may be in the table: see `_check_there`."""
        self._check_age(topic, started)
        await table.add(files, transactions)
        self._check_age(topic, started)

    def _check_age(self, topic: Topic, started: Moment) -> None:
        """Raise Unavailable if collection may delete files that were uploaded since `started`."""
        if self._freshness.age_s(started) > UPLOAD_AGE_MAX_S:
            raise Unavailable(f"sealing {topic.name} took too long: its files may be deleted")

    async def _check_there(
        self, topic: Topic, table: Table, number: int, base: int, end: int
    ) -> None:
        """Verify [base, end), which the table has and the WAL does not call sealed. If another
        sealer, or a sealer that crashed, put these records there, they equal the tail. If the table
        is from another moment than the WAL, they differ. Replace old segments (see the module
        docstring)."""
        index = await table.segments(number)
        gone = hole(index, base, end)
        why = None if gone is None else in_no_segment(*gone)
        cleaned = await table.transaction_version(clean_app_id(number)) or 0
        if cleaned > base:  # compacted at a later moment than that of this WAL
            why = f"key compaction ran up to {cleaned}, the WAL is sealed to {base}"
        old: list[SegmentFile] = []
        for file in index:
            if why is not None or file.end_offset <= base or file.base_offset >= end:
                continue
            age_ms = await self._age_ms(topic, file)
            is_deleted = age_ms == math.inf
            has_lost = False
            if not is_deleted:
                is_equal, has_lost = await self._compared(topic, number, file, base)
                if not is_equal:
                    why = f"{file.path} has other records than the WAL at these offsets"
                    continue
            if (has_lost or age_ms > UPLOAD_AGE_MAX_S * 1000) and file.base_offset >= base:
                old.append(file)
            elif is_deleted:
                why = f"{file.path} was deleted, and has records below offset {base}"
            elif has_lost:
                why = f"{file.path} has lost records, and records below offset {base}"
        if why is None:
            await self._renew(topic, table, number, old)
            return
        await self._tables.refresh()
        current = self._tables.topic_of_id(topic.topic_id)
        if current is None or current.partitions[number].sealed_end >= end:
            return  # `Sealed` was written meanwhile: they may be compacted or removed since
        doubt = TableInDoubt(topic.prefix, table.version, f"partition {number}: {why}")
        self._tables.doubt(topic, doubt)
        raise doubt

    async def _compared(
        self, topic: Topic, number: int, file: SegmentFile, base: int
    ) -> tuple[bool, bool]:
        """Return whether a segment's records from `base` on equal the records of the log, and
        whether the segment also has lost records. It has them if an operator gave them up after
        their upload."""
        partition = topic.partitions[number]
        at, has_lost = max(file.base_offset, base), False
        async for batch in self.reader.read_segment(topic, file):
            rows = between(batch, at, file.end_offset)
            kept = _without(rows, partition.lost(at, file.end_offset))
            has_lost = has_lost or kept.num_rows < rows.num_rows
            rows = kept
            while rows.num_rows:
                first = int(rows.column("offset")[0].as_py())
                if not partition.is_gone(at, first):
                    return False, has_lost
                taken = await self.reader.read(topic, number, first, ReadBounds(COMPARED_BYTES))
                if not taken.pieces:
                    return False, has_lost
                for piece in taken.pieces:
                    count = min(rows.num_rows, piece.batch.num_rows)
                    if not rows.slice(0, count).equals(piece.batch.slice(0, count)):
                        return False, has_lost
                    if count:
                        at = int(rows.column("offset")[count - 1].as_py()) + 1
                        rows = rows.slice(count)
        return partition.is_gone(at, file.end_offset), has_lost

    async def _age_ms(self, topic: Topic, file: SegmentFile) -> float:
        """Return the age of a segment's object by this machine's clock or the store's, whichever is
        later. If there is no object, return infinity."""
        key = f"{topic.prefix}/{file.path}"
        async for info in self.store.list(key):
            return max(self.clock.now_ms(), self.store.seen_ms) - info.modified_ms
        log.warning("%s was deleted before its table named it; its records are in the tail", key)
        return math.inf

    async def _renew(
        self, topic: Topic, table: Table, number: int, old: Sequence[SegmentFile]
    ) -> None:
        """In the table, replace segments of the tail's records by new ones. **On a crash** before
        the commit, files that nothing names are left. After it, the next sealer finds young
        segments."""
        app_id = maintenance_app_id(number)
        for file in old:  # one commit each: no upload gets old while the next segment is read
            work = _Commit()
            encoded = self._segments.encoded(topic, number, file.base_offset, file.end_offset)
            for segment in [each async for each in encoded]:
                await self._upload(topic, segment, work)
            if not work.files or work.files[-1].end_offset != file.end_offset:
                raise Corrupt(
                    f"{topic.prefix}/{file.path}",
                    "has records that an operator has given up since (tidelog repair --lost)",
                )
            self._check_age(topic, work.started)
            locked = {app_id: (await table.transaction_version(app_id) or 0) + 1}
            lost = topic.partitions[number].lost(file.base_offset, file.end_offset)
            if lost and lost[-1][1] > (await table.transaction_version(lost_app_id(number)) or 0):
                locked[lost_app_id(number)] = lost[-1][1]
            try:
                await table.replace([file], work.files, locked, data_change=False)
            except ManifestConflict as conflict:
                raise Unavailable(f"sealing {topic.name}: {conflict}: retry") from conflict
            self._check_age(topic, work.started)

    async def _remove(self, topic: Topic, files: Sequence[SegmentFile]) -> None:
        """Delete the uploads of a seal that failed before its commit. Otherwise each retry would
        leave as many again, on a disk that may be full."""
        with contextlib.suppress(LogError):
            await self.store.delete([f"{topic.prefix}/{file.path}" for file in files])


def _without(rows: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Return the rows whose offsets are in none of the ranges."""
    if not ranges:
        return rows
    offsets = rows.column("offset").to_numpy()
    is_kept = np.ones(len(offsets), dtype=bool)
    for first, end in ranges:
        is_kept &= (offsets < first) | (offsets >= end)
    return rows if is_kept.all() else rows.filter(pa.array(is_kept))
