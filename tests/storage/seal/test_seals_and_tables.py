"""A seal does not trust a table: on a store in memory."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from tests.support.logs import COLD, append, closing, opened, read_table, read_values
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.chunk import RECORD_SCHEMA
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import LoseRecords, Sealed
from tidelog.storage.core.errors import Corrupt, TableInDoubt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.log import Log
from tidelog.storage.seal import tables_ahead
from tidelog.storage.seal.uploads import Start, Uploader
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import clean_app_id, lost_app_id, seal_app_id
from tidelog.storage.tables.memory import MemoryCommit, MemoryManifest


async def with_tail(inner: MemoryStore) -> Log:
    """`t`-0: two sealed records, two in the tail."""
    log = await opened(inner, COLD)
    await log.create_topic("t", 1, {})
    await append(log, "a", "b")
    await log.seal("t")
    await append(log, "c", "d")
    return log


async def put_ahead(log: Log, values: Sequence[bytes], base: int = 2, **transactions: int) -> None:
    """Another sealer's commit of these values, from an offset on, before the WAL says so."""
    end = base + len(values)
    rows = await read_table(log)
    offsets = rows.column("offset").to_numpy()
    rows = rows.filter(pa.array((offsets >= base) & (offsets < end))).combine_chunks()
    rows = rows.set_column(2 + 1, RECORD_SCHEMA.field("value"), [list(values)])
    written = segments.write(rows.cast(RECORD_SCHEMA).to_batches(), codec="none", is_json=False)
    path = object_keys.segment(0, base, end, "ab")
    topic = log.state.topic("t")
    await log.store.create(f"{topic.prefix}/{path}", [memoryview(written.body)])
    stamps = written.timestamp_min, written.timestamp_max
    file = SegmentFile(path, 0, base, end, written.size, len(values), *stamps)
    table = await log.tables.of(topic)
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
            await log.seal("t")
        else:
            with pytest.raises(TableInDoubt, match="partition 0"):
                await log.seal("t")
            assert log.tables.doubts
        assert bool(log.state.partition("t", 0).tail) != is_sealed
        assert await read_values(log) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("log_start", [2, 3])
async def test_a_segment_ahead_with_lost_records_is_replaced_from_the_log_start_on(
    log_start: int,
) -> None:
    """A sealer crashed before its action in the WAL; then records of its segment were given up, and
    others deleted. No segment stays below the log start: behind it would be a hole."""

    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e")
        await append(log, "f")
        await put_ahead(log, [b"c", b"d", b"e", b"f"])
        topic = log.state.topic("t")
        await log.submit(LoseRecords(topic.topic_id, 0, 4, 5))
        await log.delete_records("t", 0, log_start)
        await log.seal("t")
        assert not log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 6
        rows = await read_table(log, offset=log_start)
        assert rows.column("offset").to_pylist() == [2, 3, 5][log_start - 2 :]
        table = await log.tables.checked(log.state.topic("t"))
        segment_file = list(await table.segments(0))[-1]
        assert segment_file.base_offset == log_start
        assert (segment_file.end_offset, segment_file.rows) == (6, 5 - log_start)


async def spans(log: Log) -> list[tuple[int, int, int]]:
    """Base, end and rows of each segment of `t`-0."""
    table = await log.tables.checked(log.state.topic("t"))
    return [(file.base_offset, file.end_offset, file.rows) for file in await table.segments(0)]


@pytest.mark.parametrize("has_more", [True, False])
async def test_a_segment_ahead_whose_records_are_all_lost_is_sealed_with_the_next_record(
    *, has_more: bool
) -> None:
    """A segment has at least one record, and no segment may be left out: behind it would be a
    hole."""

    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        await log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        if not has_more:
            assert await log.seal("t") == 0
            assert log.state.partition("t", 0).sealed_end == 2
        await append(log, "e", "f")
        await append(log, "g")
        await log.seal("t")
        await log.seal("t")
        assert not log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 7
        assert (await read_table(log)).column("offset").to_pylist() == [0, 1, 4, 5, 6]
        assert await spans(log) == [(0, 2, 2), (2, 6, 2), (6, 7, 1)]
        table = await log.tables.checked(log.state.topic("t"))
        assert await table.transaction_version(lost_app_id(0)) == 4


@pytest.mark.parametrize("log_start", [4, 5])
async def test_a_table_ahead_below_the_log_start_is_sealed(log_start: int) -> None:
    """A sealer crashed before its action in the WAL, then all records of its segment, and more,
    were deleted."""

    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e", "f")
        await put_ahead(log, [b"c", b"d"])
        await log.delete_records("t", 0, log_start)
        await log.seal("t")
        await log.seal("t")
        assert log.state.partition("t", 0).sealed_end == 6
        assert await read_values(log, offset=log_start) == ["e", "f"][log_start - 4 :]


async def test_segments_ahead_whose_records_are_all_lost_are_replaced_with_the_next_segment() -> (
    None
):
    async with closing(await with_tail(MemoryStore())) as log:
        await append(log, "e", "f")
        await put_ahead(log, [b"c"])
        await put_ahead(log, [b"d"], base=3)
        await put_ahead(log, [b"e", b"f"], base=4)
        await log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        await log.seal("t")
        assert not log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 6
        assert await spans(log) == [(0, 2, 2), (2, 6, 2)]
        assert (await read_table(log)).column("offset").to_pylist() == [0, 1, 4, 5]


async def test_segments_ahead_before_lost_ones_at_the_end_of_the_tail_are_sealed() -> None:
    """The lost ones wait for the next record, and are not read again and again."""

    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c"])
        await put_ahead(log, [b"d"], base=3)
        await log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 3, 4))
        await log.seal("t")
        partition = log.state.partition("t", 0)
        assert partition.sealed_end == 3
        assert [(chunk.base_offset, chunk.is_lost) for chunk in partition.tail] == [(3, True)]
        assert log.sealer.due(log.state) == {}
        await append(log, "e")
        await log.seal("t")
        assert log.state.partition("t", 0).sealed_end == 5
        assert await spans(log) == [(0, 2, 2), (2, 3, 1), (3, 5, 1)]


async def test_lost_segments_are_not_sealed_over_the_segment_of_another_sealer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has sealed the next records of the tail, which a replacement would have, too."""

    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        await append(log, "e")
        await log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 2, 4))
        real = tables_ahead._transactions

        async def late(*arguments: Any) -> dict[str, int]:
            monkeypatch.setattr(tables_ahead, "_transactions", real)
            await put_ahead(log, [b"e"], base=4)
            return await real(*arguments)

        monkeypatch.setattr(tables_ahead, "_transactions", late)
        assert await log.seal("t") == 0
        assert log.sealer.counters.conflicts == 1
        await log.seal("t")
        assert not log.tables.doubts
        assert log.state.partition("t", 0).sealed_end == 5
        assert await spans(log) == [(0, 2, 2), (2, 5, 1)]


async def test_a_segment_is_not_replaced_when_another_sealer_has_trimmed_its_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its records may be served from the table since: none may vanish."""

    async with closing(await with_tail(MemoryStore())) as log:
        await put_ahead(log, [b"c", b"d"])
        topic = log.state.topic("t")
        await log.submit(LoseRecords(topic.topic_id, 0, 3, 4))
        real = Uploader.uploading

        @contextlib.asynccontextmanager
        async def uploading(self: Uploader, *arguments: Any) -> AsyncIterator[Start]:
            async with real(self, *arguments) as start:
                yield start
            await log.submit(Sealed(topic.topic_id, 0, 4))

        monkeypatch.setattr(Uploader, "uploading", uploading)
        assert await log.seal("t") == 0
        assert log.sealer.counters.conflicts == 1
        assert await spans(log) == [(0, 2, 2), (2, 4, 2)]
        await log.seal("t")
        assert await read_values(log) == ["a", "b", "c", "d"]


async def test_i7_what_a_seal_has_written_is_compared_with_what_it_should_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = segments.SegmentWriter.add

    def short(writer: segments.SegmentWriter, batch: pa.RecordBatch, nbytes: int) -> None:
        real(writer, batch.slice(0, batch.num_rows - 1), nbytes)

    async with closing(await with_tail(MemoryStore())) as log:
        with monkeypatch.context() as patch:
            patch.setattr(segments.SegmentWriter, "add", short)
            with pytest.raises(Corrupt, match=r"has 1 records of \[2, 3\)"):
                await log.seal("t")
        assert await read_values(log) == ["a", "b", "c", "d"]
        assert await log.seal("t") == 2
        assert await read_values(log) == ["a", "b", "c", "d"]


async def test_one_topic_in_doubt_does_not_keep_others_from_being_sealed() -> None:
    async with closing(await with_tail(MemoryStore())) as log:
        await log.create_topic("u", 1, {})
        await append(log, "e", topic="u")
        table = await log.tables.of(log.state.topic("t"))
        assert isinstance(table, MemoryManifest)
        commits = table._catalog[log.state.topic("t").prefix]
        (file,) = commits[-1].files
        commits.append(MemoryCommit((), {}, frozenset([file.path])))
        with pytest.raises(TableInDoubt, match="offsets 0 to 1 are in no segment; version 2"):
            await log.seal("t")
        assert await log.seal("u") == 1
        assert list(log.tables.doubts) == [log.state.topic("t").topic_id]
        with pytest.raises(TableInDoubt, match="offsets 0 to 1"):
            await log.fetch("t", 0, 0, bytes_max=100)
        assert await read_values(log, offset=2) == ["c", "d"]  # the tail goes on
        commits.pop()
        await table.refresh()
        assert await log.seal("t") == 2
        assert not log.tables.doubts
