"""Sealing: a partition's tail becomes a Parquet segment of its topic's table.

Three steps, each of which may be repeated (DESIGN 7): upload the segments under names of their own;
one Delta commit that adds them together with the application transaction (app id = the partition's
seal, version = end offset); a WAL action that trims the tail. The application transaction is the
lock: of two sealers one is refused by the manifest and starts again from what it finds there.

And if we die here? After the upload: files that nothing names, for the collector. After the Delta
commit: the table holds more than the WAL says is sealed; readers still use the tail (I7), and
the next sealer finds the transaction ahead of `sealed_end` and only repeats the WAL action.

And if we sleep here? Collection takes files that no version names after a day. Who took longer than
`UPLOAD_AGE_MAX_S` from the first upload on commits nothing; and before a tail goes for files that
were committed late, or by somebody else, they are looked for.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from storage import keys, topics
from storage import segment as segments
from storage.clock import Clock
from storage.entry import AnyAction, Sealed
from storage.errors import Corrupt, LogError, NotFound, Unavailable
from storage.hot import Request
from storage.manifest import ManifestConflict, Table, seal_app_id
from storage.model import SegmentFile
from storage.objectstore import Created, ObjectStore
from storage.partition import Partition
from storage.reader import Reader
from storage.state import ClusterState, Topic
from storage.writer import Acks, Writer

log = logging.getLogger("tidelog.sealer")

LOWEST_PRIORITY = 19
PATIENCE = 2
"""Tails so many times as large or old as they should be are sealed by whoever sees them: whose they
are does not. Until then all the brokers but one would encode and upload in vain."""
DUTIES_END_S = 1.0
"""How long a broker's end waits for a seal, or for retention and collection: their threads, of the
lowest priority, may not get a turn on a busy machine, and they may be cut off anywhere."""
UPLOAD_AGE_MAX_S = 3600.0
"""From a segment's upload to its commit; collection waits several times as long."""


class SealerSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    check_interval_s: float = 1.0
    tail_runs_max: int = 10_000
    """A tail of more pieces is sealed whatever its size: each run costs ~200 bytes on every
    broker."""


class SealerCounters:
    """Since the process started."""

    def __init__(self) -> None:
        self.segments = 0
        self.rows = 0
        self.bytes = 0
        self.conflicts = 0
        self.failures = 0


class Sealer:
    """Owned by one event loop. Any number of them may work on one cluster."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        reader: Reader,
        writer: Writer,
        table_of: Callable[[Topic], Awaitable[Table]],
        settings: SealerSettings,
    ) -> None:
        self.store = store
        self.clock = clock
        self.reader = reader
        self.writer = writer
        self.settings = settings
        self.counters = SealerCounters()
        self.is_mine: Callable[[Topic], bool] = lambda _: True
        """Whether a topic's tails are this broker's to seal as soon as they are due."""
        self._table_of = table_of
        self._threads = ThreadPoolExecutor(1, "tidelog-seal", initializer=lower_priority)
        self._turn = asyncio.Lock()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, state_of: Callable[[], ClusterState]) -> None:
        """Seal what is due, for ever. A topic that fails is tried again at the next round."""
        while True:
            await asyncio.sleep(self.settings.check_interval_s)
            state = state_of()
            for topic_id, numbers in self.due(state).items():
                topic = state.topic_of_id(topic_id)
                if topic is None:
                    continue
                try:
                    await self.seal(topic, numbers)
                except (LogError, OSError, pa.ArrowException) as error:
                    self.counters.failures += 1
                    log.warning("sealing %s failed, will try again: %s", topic.name, error)

    def due(self, state: ClusterState) -> dict[str, list[int]]:
        """Partitions whose tail is large or old enough, by topic id."""
        now_ms = self.clock.now_ms()
        found: dict[str, list[int]] = {}
        for topic, number, partition in state.partitions():
            if self._is_due(state, topic, partition, now_ms) and (
                self.is_mine(topic) or self._is_due(state, topic, partition, now_ms, PATIENCE)
            ):
                found.setdefault(topic.topic_id, []).append(number)
        return found

    def _is_due(
        self,
        state: ClusterState,
        topic: Topic,
        partition: Partition,
        now_ms: int,
        patience: int = 1,
    ) -> bool:
        if not partition.tail:
            return False
        config = state.config(topic)
        return (
            partition.tail_bytes >= patience * config.segment_bytes
            or now_ms - partition.tail[0].committed_ms >= patience * config.segment_ms
            or len(partition.tail) >= patience * self.settings.tail_runs_max
        )

    async def seal(self, topic: Topic, numbers: Sequence[int] | None = None) -> int:
        """Move the tails of these partitions (all when None), as they are now, into the table.

        Returns the number of records sealed. Raises Unavailable, Corrupt; a conflict with another
        sealer is not an error: its work counts, the rest is left for the next round.
        """
        async with self._turn:
            table = await self._table_of(topic)
            wanted = range(len(topic.partitions)) if numbers is None else numbers
            # Before the table is read: what another sealer does after that, and our view hears of
            # while we write, must not look like a table that has lost a seal.
            started_s = self.clock.boot_s()
            bases = [topic.partitions[number].sealed_end for number in wanted]
            await table.refresh()
            files: list[SegmentFile] = []
            transactions: dict[str, int] = {}
            actions: list[AnyAction] = []
            try:
                for number, base in zip(wanted, bases, strict=True):
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
                            actions.append(Sealed(topic.topic_id, number, done))
                    elif partition.high_watermark > base:
                        end = partition.high_watermark
                        await self._write(topic, number, base, end, files)
                        transactions[seal_app_id(number)] = end
                        actions.append(Sealed(topic.topic_id, number, end))
            except LogError:
                await self._remove(topic, files)
                raise
            if files:
                try:
                    await self._add(topic, table, files, transactions, started_s)
                except ManifestConflict as conflict:
                    self.counters.conflicts += 1
                    log.info("another sealer was faster on %s: %s", topic.name, conflict)
                    return 0
            if actions:
                await self.writer.append(
                    Request(self.clock.new_id(), (), 0, actions=actions), Acks.ALL
                )
            rows = sum(file.rows for file in files)
            self.counters.segments += len(files)
            self.counters.rows += rows
            self.counters.bytes += sum(file.size for file in files)
            return rows

    async def _write(
        self, topic: Topic, number: int, base: int, end: int, files: list[SegmentFile]
    ) -> None:
        """Upload [base, end) as one or more segments, add them to `files` one by one; the table
        does not know them yet."""
        config = topics.effective(topic.configs)  # the state forgets a topic that is deleted
        while base < end:
            taken = await self.reader.read(topic, number, base, config.segment_bytes)
            batches = [piece.batch for piece in taken.pieces]
            surplus = max(taken.next_offset - end, 0)  # committed since we looked
            if surplus:
                batches = _without_last(batches, surplus)
            upto = taken.next_offset - surplus
            is_json = all(piece.is_json for piece in taken.pieces)
            written = await asyncio.get_running_loop().run_in_executor(
                self._threads, _encode, batches, config.compression_type, is_json
            )
            if (written.base_offset, written.end_offset, written.rows) != (base, upto, upto - base):
                found = f"{written.rows} records of [{written.base_offset}, {written.end_offset})"
                raise Corrupt(f"{topic.prefix} partition {number}", f"[{base}, {upto}) has {found}")
            path = keys.segment(number, base, upto, self.clock.new_id().hex())
            await self._upload(f"{topic.prefix}/{path}", written.body)
            files.append(
                SegmentFile(
                    path,
                    number,
                    base,
                    upto,
                    written.body.size,
                    written.rows,
                    written.timestamp_min,
                    written.timestamp_max,
                )
            )
            base = upto

    async def _add(
        self,
        topic: Topic,
        table: Table,
        files: Sequence[SegmentFile],
        transactions: Mapping[str, int],
        started_s: float,
    ) -> None:
        if self.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
            raise Unavailable(f"sealing {topic.name} took too long: its files may be gone")
        await table.add(files, transactions)
        if self.clock.boot_s() - started_s > UPLOAD_AGE_MAX_S:
            for file in files:
                await self._look_for(topic, file)

    async def _check_there(
        self, topic: Topic, table: Table, number: int, base: int, end: int
    ) -> None:
        """That the table holds [base, end), which somebody else committed, with its objects."""
        for file in await table.segments(number):
            if file.end_offset > base and file.base_offset < end:
                await self._look_for(topic, file)

    async def _look_for(self, topic: Topic, file: SegmentFile) -> None:
        key = f"{topic.prefix}/{file.path}"
        try:
            await self.store.get_range(key, 0, 1)
        except NotFound as error:
            why = "was committed to its table after it was collected; its records are in the tail"
            raise Corrupt(key, why) from error

    async def _remove(self, topic: Topic, files: Sequence[SegmentFile]) -> None:
        """Take back what no commit was even tried with: each retry would leave as much again, on
        the very disk that is full."""
        with contextlib.suppress(LogError):
            await self.store.delete([f"{topic.prefix}/{file.path}" for file in files])

    async def _upload(self, key: str, body: pa.Buffer) -> None:
        pause_s = 0.05
        while await self.store.create(key, [memoryview(body)]) is Created.UNKNOWN:
            # The name is ours alone, so EXISTS at the next try means that this one arrived.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)


def _encode(batches: list[pa.RecordBatch], codec: str, is_json: bool) -> segments.Written:
    return segments.write(batches, codec=codec, is_json=is_json)


def _without_last(batches: list[pa.RecordBatch], surplus: int) -> list[pa.RecordBatch]:
    """All but the last `surplus` rows; offsets of a tail are dense, so rows are offsets."""
    while surplus and batches:
        last = batches.pop()
        if last.num_rows > surplus:
            batches.append(last.slice(0, last.num_rows - surplus))
            break
        surplus -= last.num_rows
    return batches


def lower_priority() -> None:
    """Parquet threads at normal priority cost producers 27 to 43 % of their throughput (NUMBERS
    2)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
