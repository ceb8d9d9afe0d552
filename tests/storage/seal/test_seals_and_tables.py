"""A seal does not trust a table, and several sealers seal a topic once (I7)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.logs import (
    COLD,
    MANUAL,
    append,
    closing,
    kill_while_sealing,
    opened,
    read_table,
    read_values,
    with_topic,
)
from tests.support.maintenance import caring
from tests.support.records import TIME_MS
from tests.support.views import AGE_S
from tidelog.compaction.delete_records import delete_records
from tidelog.storage.broker import Broker
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.record_columns import RECORD_SCHEMA
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import LoseRecords, Sealed
from tidelog.storage.core.errors import Corrupt, TableInDoubt, Unavailable
from tidelog.storage.core.model import Acks, SegmentFile
from tidelog.storage.seal import tables_ahead_of_wal, uploads
from tidelog.storage.seal.sealer import TAKEOVER_FACTOR
from tidelog.storage.seal.uploads import Start, Uploader
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import Table, clean_app_id, lost_app_id, seal_app_id
from tidelog.storage.tables.memory import MemoryCommit, MemoryManifest
from tidelog.storage.write.requests import AppendRequest


async def with_tail(inner: MemoryStore) -> Broker:
    """`t`-0: two sealed records, two in the tail."""
    log = await with_topic(inner, COLD)
    await append(log, "a", "b")
    await log.records.seal("t")
    await append(log, "c", "d")
    return log


async def put_ahead(
    log: Broker, values: Sequence[bytes], base: int = 2, **transactions: int
) -> None:
    """Another sealer's commit of these values, from an offset on, before the WAL says so."""
    end = base + len(values)
    rows = await read_table(log)
    offsets = rows.column("offset").to_numpy()
    rows = rows.filter(pa.array((offsets >= base) & (offsets < end))).combine_chunks()
    rows = rows.set_column(2 + 1, RECORD_SCHEMA.field("value"), [list(values)])
    written = segments.write(rows.cast(RECORD_SCHEMA).to_batches(), codec="none", is_json=False)
    path = object_keys.segment(0, base, end, "ab")
    topic = log.state.topic("t")
    await log._log.store.create(f"{topic.prefix}/{path}", [memoryview(written.body)])
    stamps = written.timestamp_min, written.timestamp_max
    file = SegmentFile(path, 0, base, end, written.size, len(values), *stamps)
    table = await log._log.tables.of(topic)
    await table.refresh()
    await table.add([file], {seal_app_id(0): end} | transactions)


async def test_i7_a_table_ahead_is_not_read_beyond_the_sealed_end() -> None:
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"x", b"y"])
        for offset, values in ((0, ["a", "b", "c", "d"]), (1, ["b", "c", "d"])):
            assert await read_values(log, offset=offset) == values


@pytest.mark.parametrize(
    ("values", "transactions", "is_sealed"),
    [
        ([b"c", b"d"], {}, True),
        ([b"c", b"x"], {}, False),
        ([b"c", b"d"], {clean_app_id(0): 4}, False),
    ],
)
async def test_i1_a_table_ahead_is_sealed_only_with_the_records_of_the_tail(
    values: list[bytes], transactions: dict[str, int], is_sealed: bool
) -> None:
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, values, **transactions)
        if is_sealed:
            await log.records.seal("t")
        else:
            with pytest.raises(TableInDoubt, match="partition 0"):
                await log.records.seal("t")
            assert log._log.tables.doubts
        assert bool(log.state.partition("t", 0).tail) != is_sealed
        assert await read_values(log) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("log_start", [2, 3])
async def test_segment_ahead_with_lost_records_is_replaced(log_start: int) -> None:
    """A sealer crashed before its action in the WAL; then some of its records were given up.

    Others were deleted. No segment stays below the log start: behind it would be a hole.
    """
    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e")
        await append(log, "f")
        await put_ahead(log, [b"c", b"d", b"e", b"f"])
        topic = log.state.topic("t")
        await log._log.submit(LoseRecords(topic.topic_id, 0, 4, 5))
        await log.topics.delete_records("t", 0, log_start)
        await log.records.seal("t")
        assert not log._log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 6
        rows = await read_table(log, offset=log_start)
        assert rows.column("offset").to_pylist() == [2, 3, 5][log_start - 2 :]
        table = await log._log.tables.checked(log.state.topic("t"))
        segment_file = list(await table.segments(0))[-1]
        assert segment_file.base_offset == log_start
        assert (segment_file.end_offset, segment_file.rows) == (6, 5 - log_start)


async def spans(log: Broker) -> list[tuple[int, int, int]]:
    """Base, end and rows of each segment of `t`-0."""
    table = await log._log.tables.checked(log.state.topic("t"))
    return [(file.base_offset, file.end_offset, file.rows) for file in await table.segments(0)]


@pytest.mark.parametrize("has_more", [True, False])
async def test_a_segment_ahead_whose_records_are_all_lost_is_sealed_with_the_next_record(
    *, has_more: bool
) -> None:
    """A segment has at least one record, and without the segment there would be a hole."""
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        if not has_more:
            assert await log.records.seal("t") == 0
            assert log.state.partition("t", 0).sealed_end == 2
        await append(log, "e", "f")
        await append(log, "g")
        await log.records.seal("t")
        await log.records.seal("t")
        assert not log._log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 7
        assert (await read_table(log)).column("offset").to_pylist() == [0, 1, 4, 5, 6]
        assert await spans(log) == [(0, 2, 2), (2, 6, 2), (6, 7, 1)]
        table = await log._log.tables.checked(log.state.topic("t"))
        assert await table.transaction_version(lost_app_id(0)) == 4


@pytest.mark.parametrize("log_start", [4, 5])
async def test_a_table_ahead_below_the_log_start_is_sealed(log_start: int) -> None:
    """A sealer crashed before its action in the WAL, then its records and more were deleted."""
    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e", "f")
        await put_ahead(log, [b"c", b"d"])
        await log.topics.delete_records("t", 0, log_start)
        await log.records.seal("t")
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 6
        assert await read_values(log, offset=log_start) == ["e", "f"][log_start - 4 :]


async def test_lost_segments_ahead_are_replaced_with_next_segment() -> None:
    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e", "f")
        await put_ahead(log, [b"c"])
        await put_ahead(log, [b"d"], base=3)
        await put_ahead(log, [b"e", b"f"], base=4)
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        await log.records.seal("t")
        assert not log._log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 6
        assert await spans(log) == [(0, 2, 2), (2, 6, 2)]
        assert (await read_table(log)).column("offset").to_pylist() == [0, 1, 4, 5]


async def test_segments_ahead_before_lost_ones_at_the_end_of_the_tail_are_sealed() -> None:
    """The lost ones wait for the next record, and are not read again and again."""
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c"])
        await put_ahead(log, [b"d"], base=3)
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 3, 4))
        await log.records.seal("t")
        partition = log.state.partition("t", 0)
        assert partition.sealed_end == 3
        assert [(chunk.base_offset, chunk.is_lost) for chunk in partition.tail] == [(3, True)]
        assert log._log.sealer.due(log.state) == {}
        await append(log, "e")
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 5
        assert await spans(log) == [(0, 2, 2), (2, 3, 1), (3, 5, 1)]


async def test_lost_segments_are_not_sealed_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has sealed the next records of the tail, which a replacement would have, too."""
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        await append(log, "e")
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        real = tables_ahead_of_wal._transactions

        async def late(*arguments: Any) -> dict[str, int]:
            monkeypatch.setattr(tables_ahead_of_wal, "_transactions", real)
            await put_ahead(log, [b"e"], base=4)
            return await real(*arguments)

        monkeypatch.setattr(tables_ahead_of_wal, "_transactions", late)
        assert await log.records.seal("t") == 0
        assert log._log.sealer.counters.conflicts == 1
        await log.records.seal("t")
        assert not log._log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 5
        assert await spans(log) == [(0, 2, 2), (2, 5, 1)]


async def test_segment_of_trimmed_tail_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records may be served from the table since: none may vanish."""
    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        topic = log.state.topic("t")
        await log._log.submit(LoseRecords(topic.topic_id, 0, 3, 4))
        real = Uploader.uploading

        @contextlib.asynccontextmanager
        async def uploading(self: Uploader, *arguments: Any) -> AsyncIterator[Start]:
            async with real(self, *arguments) as start:
                yield start
            await log._log.submit(Sealed(topic.topic_id, 0, 4))

        monkeypatch.setattr(Uploader, "uploading", uploading)
        assert await log.records.seal("t") == 0
        assert log._log.sealer.counters.conflicts == 1
        assert await spans(log) == [(0, 2, 2), (2, 4, 2)]
        await log.records.seal("t")
        assert await read_values(log) == ["a", "b", "c", "d"]


async def test_i7_seal_compares_what_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = segments.SegmentWriter.add

    def short(writer: segments.SegmentWriter, batch: pa.RecordBatch, nbytes: int) -> None:
        real(writer, batch.slice(0, batch.num_rows - 1), nbytes)

    async with closing(await with_tail(MemoryStore())) as log:
        with monkeypatch.context() as patch:
            patch.setattr(segments.SegmentWriter, "add", short)
            with pytest.raises(Corrupt, match=r"has 1 records of \[2, 3\)"):
                await log.records.seal("t")
        assert await read_values(log) == ["a", "b", "c", "d"]
        assert await log.records.seal("t") == 2
        assert await read_values(log) == ["a", "b", "c", "d"]


async def test_one_topic_in_doubt_does_not_keep_others_from_being_sealed() -> None:
    async with closing(await with_tail(MemoryStore())) as log:
        await log.topics.create("u", 1, {})
        await append(log, "e", topic="u")
        table = await log._log.tables.of(log.state.topic("t"))
        assert isinstance(table, MemoryManifest)
        commits = table._catalog[log.state.topic("t").prefix]
        (file,) = commits[-1].files
        commits.append(MemoryCommit((), {}, frozenset([file.path])))
        with pytest.raises(TableInDoubt, match="offsets 0 to 1 are in no segment; version 2"):
            await log.records.seal("t")
        assert await log.records.seal("u") == 1
        assert list(log._log.tables.doubts) == [log.state.topic("t").topic_id]
        with pytest.raises(TableInDoubt, match="offsets 0 to 1"):
            await log.records.fetch("t", 0, 0, bytes_max=100)
        assert await read_values(log, offset=2) == ["c", "d"]  # the tail goes on
        commits.pop()
        await table.refresh()
        assert await log.records.seal("t") == 2
        assert not log._log.tables.doubts


# -- brokers that seal one topic


@contextlib.asynccontextmanager
async def ahead_and_behind(inner: MemoryStore) -> AsyncIterator[tuple[Broker, Broker]]:
    """Two brokers that know the first record of `t`."""
    ahead, behind = await opened(inner), await opened(inner)
    async with closing(ahead, behind):
        await ahead.topics.create("t", 1, {})
        await append(ahead, "a")
        await behind.refresh()
        yield ahead, behind


async def seal_without_the_action(log: Broker) -> None:
    """The broker stops between its commit to the table and its action in the WAL."""
    real = log._log.writer.append

    async def stops(request: AppendRequest, acks: Acks) -> Any:
        if request.actions:
            raise asyncio.CancelledError
        return await real(request, acks)

    log._log.writer.append = stops  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await log.records.seal("t")
    log._log.writer.append = real  # type: ignore[method-assign]


@pytest.mark.parametrize("suspended_s", [0.0, AGE_S + 1])
async def test_reload_during_seal_makes_no_doubt(inner: MemoryStore, suspended_s: float) -> None:
    """The table is ahead, and has records that the sealer's view does not have yet."""
    async with ahead_and_behind(inner) as (ahead, behind):
        await append(ahead, "b")
        await seal_without_the_action(ahead)
        behind.clock.advance(suspended_s)
        loaded = behind.state
        await behind.records.seal("t")
        assert (behind.state is not loaded) == (suspended_s > 0)
        assert not behind._log.tables.doubts
        assert behind.state.partition("t", 0).sealed_end == 2
        assert await read_values(behind) == ["a", "b"]


async def test_records_that_expire_before_reload_make_no_doubt(inner: MemoryStore) -> None:
    """The sealed end that the sealer read first is below them, and the table is ahead."""
    async with ahead_and_behind(inner) as (ahead, behind):
        assert await ahead.records.seal("t") == 1
        await append(ahead, "b")
        await seal_without_the_action(ahead)
        async with caring(inner) as cluster:
            await delete_records(cluster, "t", {0: 1}, is_dry=False)
        behind.clock.advance(AGE_S + 1)
        await behind.records.seal("t")
        assert not behind._log.tables.doubts
        assert behind.state.partition("t", 0).sealed_end == 2
        assert await read_values(behind, offset=1) == ["b"]


async def test_other_seal_after_table_was_read_is_no_damage(inner: MemoryStore) -> None:
    """The view applies that seal before the sealer has planned its own."""
    log_a, log_b = await opened(inner, MANUAL), await opened(inner, MANUAL)
    async with closing(log_a, log_b):
        await log_a.topics.create("t", 1, {})
        await append(log_a, "a", "b")
        await log_b.refresh()
        real = log_a._log.tables.checked

        async def then_another_seals(topic: Any, **named: bool) -> Table:
            table = await real(topic, **named)
            log_a._log.tables.checked = real  # type: ignore[method-assign]
            assert await log_b.records.seal("t") == 2
            await log_a.refresh()
            return table

        log_a._log.tables.checked = then_another_seals  # type: ignore[method-assign]
        assert await log_a.records.seal("t") == 0
        assert not log_a._log.sealer.damaged
        assert log_a.state.partition("t", 0).sealed_end == 2


SEALING = SETTINGS._replace(is_sealing=True, sealer=SETTINGS.sealer._replace(check_interval_s=0.5))
TOPICS = 12
SEGMENT_S = 10.0


async def never(*_: object) -> None:
    """A round of a sealer that seals nothing."""


async def test_each_topic_is_sealed_by_one_broker_and_by_another_when_that_one_does_not() -> None:
    async with Cluster(SEALING, latency=lambda _: 0.01) as cluster:
        for _ in range(3):
            await cluster.start()
        await cluster.settled()
        configs = {"segment.ms": str(int(SEGMENT_S * 1000))}
        for number in range(TOPICS):
            await cluster.logs[0].topics.create(f"t{number}", 1, configs)
            await logs.append(cluster.logs[0], "a", topic=f"t{number}")
        for log in cluster.logs:
            await log._log.wal.refresh()
        counters = [log._log.sealer.counters for log in cluster.logs]
        lazy = cluster.logs[2]
        lazy._log.sealer._begin_due = never  # type: ignore[method-assign]
        mine = sum(
            lazy._membership.is_first_for(topic.topic_id) for topic in lazy.state.topics.values()
        )
        assert 0 < mine < TOPICS
        await asyncio.sleep(SEGMENT_S + 3)
        assert sum(sealer_counters.segments for sealer_counters in counters) == TOPICS - mine
        assert not any(sealer_counters.conflicts for sealer_counters in counters)
        await asyncio.sleep(TAKEOVER_FACTOR * SEGMENT_S)
        assert counters[2].segments == 0
        for number in range(TOPICS):
            assert await read_values(cluster.logs[1], topic=f"t{number}") == ["a"]
        for log in cluster.logs:
            await log._log.wal.refresh()
            assert not any(partition.tail for _, _, partition in log.state.partitions())


# -- segments that are named late


LATE_S = uploads.UPLOAD_AGE_MAX_S + 1


class Moved:
    """A log with two records in its tail, whose clock and store move together."""

    def __init__(self, inner: MemoryStore, log: Broker) -> None:
        self.inner = inner
        self.log = log
        self.clock = log.clock
        inner.now_ms = self.clock.now_ms()

    @classmethod
    async def opened(cls) -> "Moved":
        inner = MemoryStore(now_ms=TIME_MS)
        log = await with_topic(inner, COLD)
        await append(log, "a", "b")
        return cls(inner, log)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.inner.now_ms = self.clock.now_ms()

    async def files(self) -> list[SegmentFile]:
        table: Table = await self.log._log.tables.of(self.log.state.topic("t"))
        await table.refresh()
        return list(await table.segments(0))

    def key(self, file: SegmentFile) -> str:
        return f"{self.log.state.topic('t').prefix}/{file.path}"


async def added_late(
    moved: Moved, patch: pytest.MonkeyPatch, effect: Callable[[], None]
) -> SegmentFile:
    """The segment of a sealer that was suspended between its check of the age and its commit."""
    real = MemoryManifest.add

    async def add(self: MemoryManifest, files: object, transactions: object) -> None:
        effect()
        await real(self, files, transactions)  # type: ignore[arg-type]

    with patch.context() as patched:
        patched.setattr(MemoryManifest, "add", add)
        with pytest.raises(Unavailable, match="took too long"):
            await moved.log.records.seal("t")
    (file,) = await moved.files()
    return file


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_i7_i9_segment_named_late_is_replaced(
    monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):
        late = await added_late(moved, monkeypatch, lambda: moved.pass_time(LATE_S))
        if is_deleted:
            await moved.inner.delete([moved.key(late)])
        assert moved.log.state.partition("t", 0).sealed_end == 0
        assert await read_values(moved.log) == ["a", "b"]
        await moved.log.records.seal("t")
        (file,) = await moved.files()
        assert (file.base_offset, file.end_offset, file.rows) == (0, 2, 2)
        assert file.path != late.path
        assert moved.log.state.partition("t", 0).sealed_end == 2
        await moved.inner.delete([moved.key(late)])  # a plan of collection from before
        assert await read_values(moved.log) == ["a", "b"]
        assert (await read_table(moved.log)).num_rows == 2


async def test_a_young_segment_of_another_sealer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):
        await kill_while_sealing(moved.log)
        old_files = await moved.files()
        moved.pass_time(LATE_S - 100)
        await moved.log.records.seal("t")
        assert await moved.files() == old_files
        assert moved.log.state.partition("t", 0).sealed_end == 2


async def test_two_sealers_replace_one_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = await Moved.opened()
    async with closing(moved.log):
        await added_late(moved, monkeypatch, lambda: moved.pass_time(LATE_S))
        async with closing(await opened(moved.inner, COLD)) as other:
            other_clock = other.clock
            other_clock.advance(LATE_S)
            real = MemoryManifest.replace

            async def replace(self: MemoryManifest, *arguments: object, **named: object) -> None:
                monkeypatch.setattr(MemoryManifest, "replace", real)
                await other.records.seal("t")
                await real(self, *arguments, **named)  # type: ignore[arg-type]

            monkeypatch.setattr(MemoryManifest, "replace", replace)
            assert await moved.log.records.seal("t") == 0
            assert moved.log._log.sealer.counters.conflicts == 1
            await moved.log.records.seal("t")
            assert len(await moved.files()) == 1
            assert await read_values(moved.log) == ["a", "b"]
