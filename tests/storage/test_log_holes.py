"""Reads while segments go away under the reader: merged, retained, collected (I7, I9)."""

import asyncio

import pytest

from tests.support.logs import COLD, append, closing, opened, read_table, read_values
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import MoveLogStart
from tidelog.storage.core.errors import Corrupt, OffsetOutOfRange, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import Table, maintenance_app_id

VALUES = [str(number) for number in range(12)]


async def sealed(inner: MemoryStore) -> Log:
    """`t`-0 with twelve records in three segments."""
    log = await opened(inner, COLD)
    await log.create_topic("t", 1, {})
    for first in (0, 4, 8):
        await append(log, *VALUES[first : first + 4])
        await log.seal("t")
    return log


async def table_of(log: Log) -> tuple[Table, list[SegmentFile]]:
    table = await log.tables.of(log.state.topic("t"))
    await table.refresh()
    return table, list(await table.segments(0))


async def remove(log: Log, files: list[SegmentFile], added: list[SegmentFile]) -> None:
    """Out of the table, and the objects are gone at once: later than any grace."""
    table, _ = await table_of(log)
    care = (await table.transaction_version(maintenance_app_id(0)) or 0) + 1
    await table.replace(files, added, {maintenance_app_id(0): care}, data_change=not added)
    prefix = log.state.topic("t").prefix
    await log.store.delete([f"{prefix}/{file.path}" for file in files])


async def merge(log: Log, unique: str) -> None:
    _, files = await table_of(log)
    prefix, end = log.state.topic("t").prefix, files[-1].end_offset
    batches = (await read_table(log)).to_batches()
    written = segments.write(batches, codec="zstd", is_json=False)
    path = object_keys.segment(0, 0, end, unique)
    await log.store.create(f"{prefix}/{path}", [memoryview(written.body)])
    stamps = (files[0].timestamp_min, files[-1].timestamp_max)
    await remove(log, files, [SegmentFile(path, 0, 0, end, written.size, end, *stamps)])


async def move_log_start(log: Log, offset: int) -> None:
    action = MoveLogStart(log.state.topic("t").topic_id, 0, offset)
    (outcome,) = await log.wal.commit(Draft([Commit(log.clock.new_id(), [action])], [], []))
    assert outcome.refusal is None


async def test_i7_manifest_with_merged_segments_is_read_again(inner: MemoryStore) -> None:
    log = await sealed(inner)
    stale = await opened(inner, COLD)
    async with closing(log, stale):
        assert await read_values(stale) == VALUES
        assert await stale.offset_for_timestamp("t", 0, 0) == 0
        for unique in ("aa", "ab", "ac"):
            await merge(log, unique)
            assert await read_values(stale, offset=5) == VALUES[5:]
            await merge(log, f"{unique}b")
            assert await stale.offset_for_timestamp("t", 0, 0) == 0


async def test_i7_segments_merged_under_a_read_are_read_once(inner: MemoryStore) -> None:
    log = await sealed(inner)
    reader = await opened(inner, COLD)
    async with closing(log, reader):
        _, files = await table_of(log)
        second = f"{log.state.topic('t').prefix}/{files[1].path}"
        gate = reader.store.hold("get_range", second)
        reading = asyncio.create_task(read_values(reader))
        await gate.reached.wait()
        await merge(log, "aa")
        gate.opened.set()
        assert await reading == VALUES


async def test_a_segment_that_the_newest_manifest_names_must_be_there(inner: MemoryStore) -> None:
    async with closing(await sealed(inner)) as log:
        _, files = await table_of(log)
        key = f"{log.state.topic('t').prefix}/{files[0].path}"
        await inner.delete([key])
        with pytest.raises(Corrupt, match=key):
            await read_values(log)
        with pytest.raises(Corrupt, match=key):
            await log.offset_for_timestamp("t", 0, 1_700_000_000_000)


@pytest.mark.parametrize("removed_count", [1, 2, 3])
async def test_error_below_a_new_log_start_has_the_valid_range(removed_count: int) -> None:
    """By brokers that know of it, and by such whose view is older than the table."""

    inner = MemoryStore()
    log = await sealed(inner)
    unaware = await opened(inner, COLD)
    async with closing(log, unaware):
        assert await read_values(unaware) == VALUES
        start = 4 * removed_count
        _, files = await table_of(log)
        await move_log_start(log, start)
        await remove(log, files[:removed_count], [])
        for broker in (log, unaware):
            with pytest.raises(OffsetOutOfRange) as refused:
                await broker.fetch("t", 0, start - 1, bytes_max=100)
            told = refused.value
            assert (told.log_start_offset, told.high_watermark) == (start, 12)
            assert await read_values(broker, offset=start) == VALUES[start:]
        assert await log.offset_for_timestamp("t", 0, 0) == (None if removed_count == 3 else start)
        await append(log, "12")
        await log.seal("t")
        await unaware.wal.refresh()
        for broker in (log, unaware):
            assert await read_values(broker, offset=start) == [*VALUES, "12"][start:]


async def test_retention_under_a_read_ends_it_where_it_is(inner: MemoryStore) -> None:
    log = await sealed(inner)
    reader = await opened(inner, COLD)
    async with closing(log, reader):
        _, files = await table_of(log)
        second = f"{log.state.topic('t').prefix}/{files[1].path}"
        gate = reader.store.hold("get_range", second)
        reading = asyncio.create_task(reader.fetch("t", 0, 0, bytes_max=1 << 20))
        await gate.reached.wait()
        await move_log_start(log, 8)
        await remove(log, files[:2], [])
        gate.opened.set()
        fetched = await reading
        assert fetched.next_offset == 4
        assert sum(piece.batch.num_rows for piece in fetched.pieces) == 4
        with pytest.raises(OffsetOutOfRange):
            await reader.fetch("t", 0, 4, bytes_max=100)


async def test_a_log_start_within_the_tail_is_sealed_over(inner: MemoryStore) -> None:
    async with closing(await sealed(inner)) as log:
        await append(log, "a", "b", "c")
        await move_log_start(log, 14)
        assert await read_values(log, offset=14) == ["c"]
        assert await log.offset_for_timestamp("t", 0, 0) == 14
        await log.seal("t")
        assert await read_values(log, offset=14) == ["c"]
        assert await log.offset_for_timestamp("t", 0, 0) == 14
        with pytest.raises(OffsetOutOfRange):
            await log.fetch("t", 0, 13, bytes_max=100)


# -- sealers that sleep, and what collection takes from them meanwhile


async def held_at_add(log: Log) -> tuple[asyncio.Task[int], asyncio.Event, asyncio.Event]:
    """A seal that has uploaded, and waits before its commit until it is let go."""
    table, _ = await table_of(log)
    reached, go_on = asyncio.Event(), asyncio.Event()
    real = table.add

    async def add(*args) -> None:
        reached.set()
        await go_on.wait()
        await real(*args)

    table.add = add
    task = asyncio.create_task(log.seal("t"))
    await reached.wait()
    return task, reached, go_on


@pytest.mark.parametrize("is_collected", [False, True])
async def test_i7_a_tail_is_kept_until_its_late_segment_is_known_to_be_there(
    inner: MemoryStore,
    is_collected: bool,
) -> None:
    log = await sealed(inner)
    other = await opened(inner, COLD)
    async with closing(log, other):
        await append(log, "12")
        task, _, go_on = await held_at_add(log)
        files = [
            info.key async for info in inner.list(object_keys.TOPICS) if f"/{12:020d}-" in info.key
        ]
        if is_collected:
            await inner.delete(files)
        log.clock.advance(7 * 3600)
        go_on.set()
        with pytest.raises(Unavailable, match="took too long"):
            await task
        await other.wal.refresh()
        assert await read_values(other) == [*VALUES, "12"]
        assert other.state.partition("t", 0).sealed_end < 13
        # The next sealer replaces the segment, or finds it young.
        await other.seal("t")
        await other.wal.refresh()
        assert await read_values(other) == [*VALUES, "12"]
        assert other.state.partition("t", 0).sealed_end == 13


async def test_a_seal_whose_upload_took_too_long_is_not_committed(inner: MemoryStore) -> None:
    async with closing(await sealed(inner)) as log:
        await append(log, "12")
        gates: asyncio.Queue = asyncio.Queue()

        def plan(call):
            if call.verb == "create" and call.key.startswith(object_keys.TOPICS):
                log.store.plan = lambda _: None
                gates.put_nowait(log.store.hold("create", call.key))

        log.store.plan = plan
        task = asyncio.create_task(log.seal("t"))
        gate = await gates.get()
        await gate.reached.wait()
        log.clock.advance(2 * 3600)
        gate.opened.set()
        with pytest.raises(Unavailable, match="too long"):
            await task
        assert len((await table_of(log))[1]) == 3
        await log.wal.refresh()
        assert await log.seal("t") == 1
        assert await read_values(log) == [*VALUES, "12"]
