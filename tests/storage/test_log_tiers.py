"""The two tiers of a log: times, splits, seals beside readers, objects that are damaged (I7)."""

import asyncio
import random
from functools import partial

import pytest

from tests.support import logs
from tests.support.faults import Fault, Gate, Script
from tests.support.logs import (
    COLD,
    MANUAL,
    append,
    closing,
    made,
    opened,
    read_table,
    read_values,
    rewrite,
    segments_of,
    store_of,
)
from tests.support.records import TIME_MS
from tests.support.views import AGE_S
from tidelog.storage.broker import Broker
from tidelog.storage.codec import segment as segments
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import LoseRecords, MoveLogStart, Sealed
from tidelog.storage.core.errors import Corrupt, OffsetOutOfRange, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks, SegmentFile
from tidelog.storage.records import FetchResult
from tidelog.storage.seal.sealer import SealerSettings
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import Table, maintenance_app_id
from tidelog.storage.write.requests import AppendRequest

with_topic = partial(logs.with_topic, partitions=2)


def stamps_of(table) -> list[int]:
    return [int(stamp.timestamp() * 1000) for stamp in table.column("timestamp").to_pylist()]


# -- times


@pytest.mark.parametrize("seed", range(4))
async def test_the_first_offset_of_a_time_is_found_as_by_a_scan(seed: int) -> None:
    """Timestamps of producers go back and forth; segments, chunks and the tail hold any of them."""
    draws = random.Random(seed)
    inner = MemoryStore()
    log = await with_topic(inner, draws.choice([MANUAL, COLD]))
    stamps: list[int] = []
    async with closing(log):
        for _ in range(25):
            timestamps = [draws.randrange(1000) for _ in range(draws.randrange(1, 6))]
            await append(log, *map(str, timestamps), timestamps=timestamps)
            stamps += timestamps
            if draws.random() < 0.2:
                await log.records.seal("t")
        for time_ms in [*range(-1, 1002, 13), *sorted(stamps)[-5:]]:
            naive = next((offset for offset, stamp in enumerate(stamps) if stamp >= time_ms), None)
            assert await log.records.offset_for_timestamp("t", 0, time_ms) == naive
        assert await log.records.offset_for_timestamp("t", 1, 0) is None


@pytest.mark.parametrize("settings", [MANUAL, COLD], ids=["warm", "cold"])
async def test_append_time_is_alike_in_tiers(inner: MemoryStore, settings: LogSettings) -> None:
    log = await with_topic(inner, settings, configs={"message.timestamp.type": "LogAppendTime"})
    async with closing(log):
        for _ in range(3):
            await append(log, "a", "b", timestamps=[5, 1])
            await asyncio.sleep(1)
        old_stamps = stamps_of(await read_table(log))
        assert old_stamps == [TIME_MS + delay_ms for delay_ms in (0, 0, 1000, 1000, 2000, 2000)]
        for time_ms, offset in [(0, 0), (TIME_MS + 1, 2), (TIME_MS + 2000, 4)]:
            assert await log.records.offset_for_timestamp("t", 0, time_ms) == offset
        await log.records.seal("t", [0])
        assert stamps_of(await read_table(log)) == old_stamps
        for time_ms, offset in [(0, 0), (TIME_MS + 1, 2), (TIME_MS + 2000, 4)]:
            assert await log.records.offset_for_timestamp("t", 0, time_ms) == offset
        assert await log.records.offset_for_timestamp("t", 0, TIME_MS + 2001) is None
        async with closing(await opened(inner, COLD)) as reader:
            assert stamps_of(await read_table(reader)) == old_stamps


@pytest.mark.parametrize("reads", range(1, 6))
async def test_i7_seal_during_search_by_time_hides_nothing(inner: MemoryStore, reads: int) -> None:
    """The tail is trimmed under the search, between any two of its reads."""
    async with closing(await with_topic(inner, COLD)) as log:
        for i in range(6):
            await append(log, str(i), timestamps=[i])
        store = store_of(log)
        keys_read = [object_keys.wal(2 + i) for i in range(6)]
        # All chunks look promising by their bounds; the last alone has the record.
        for run_ in log.state.partition("t", 0).tail:
            run_.timestamp_max = 100
        gate = store.hold("get_range", keys_read[reads - 1])
        topic = log.state.topic("t")
        search = asyncio.create_task(log._log.reader.offset_for_timestamp(topic, 0, 5))
        await gate.reached.wait()
        seal = AppendRequest((), 0, actions=[Sealed(topic.topic_id, 0, 4)])
        await log._log.writer.append(seal, Acks.ALL)
        gate.opened.set()
        assert await search == 5


# -- sealing


async def test_a_large_tail_becomes_segments_of_their_size(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, configs={"segment.bytes": "2000"})) as log:
        for i in range(50):
            await append(log, *(f"{i}-{j}".rjust(100, ".") for j in range(3)))
        old_values = await read_values(log)
        assert await log.records.seal("t") == 150
        files = await segments_of(log)
        assert len(files) == 10
        assert [file.base_offset for file in files] == [
            0,
            *(file.end_offset for file in files[:-1]),
        ]
        assert files[-1].end_offset == 150
        assert sum(file.rows for file in files) == 150
        assert log.state.partition("t", 0).tail == []
        async with closing(await opened(inner, COLD)) as cold:
            assert await read_values(cold) == old_values
            assert await read_values(cold, offset=77, bytes_max=333) == old_values[77:]


async def test_sealing_nothing_does_nothing(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner)) as log:
        seq = log.state.seq
        assert await log.records.seal("t") == 0
        await append(log, "a", partition=1)
        assert await log.records.seal("t") == 1
        assert await log.records.seal("t") == 0
        assert await log.records.seal("t", [0]) == 0
        assert log.state.seq == seq + 2
        assert len(await segments_of(log, 1)) == 1


async def test_what_is_appended_during_a_seal_stays_in_the_tail(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner)) as log:
        await append(log, "a", "b")
        store_of(log).latency = lambda call: 5.0 if call.key.startswith("topics/") else 0.01
        seal = asyncio.create_task(log.records.seal("t"))
        await asyncio.sleep(1)
        await append(log, "c", "d")
        assert await seal == 2
        partition = log.state.partition("t", 0)
        assert (partition.sealed_end, partition.high_watermark) == (2, 4)
        assert await read_values(log) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("configs", "sealer"),
    [
        ({"segment.ms": "5000"}, SealerSettings(sealed_wait_s=0.0)),
        ({"segment.bytes": "4000"}, SealerSettings()),
        ({}, SealerSettings(tail_chunks_max=5)),
        ({}, SealerSettings(topic_chunks_max=5)),
    ],
    ids=["age", "size", "runs", "runs of the topic"],
)
async def test_a_tail_that_is_old_large_or_in_many_pieces_is_sealed_by_itself(
    inner: MemoryStore, configs: dict[str, str], sealer: SealerSettings
) -> None:
    settings = LogSettings(sealer=sealer)
    async with closing(await with_topic(inner, settings, configs=configs)) as log:
        for i in range(4):
            await append(log, str(i) * 10)
        await asyncio.sleep(3)
        assert log.state.partition("t", 0).sealed_end == 0
        for i in range(3):
            await append(log, str(i) * 2000)
        await asyncio.sleep(3.5)
        partition = log.state.partition("t", 0)
        assert (partition.sealed_end, partition.tail) == (7, [])
        await append(log, "new")
        await asyncio.sleep(2)
        assert partition.sealed_end == 7


async def test_i7_sealers_that_race_seal_each_record_once(inner: MemoryStore) -> None:
    logs = [await with_topic(inner, partitions=4), await opened(inner), await opened(inner)]
    draws = random.Random(5)
    async with closing(*logs):
        for log in logs:
            store_of(log).latency = lambda _: draws.choice([0.01, 0.1, 0.5])
        model: list[list[str]] = [[], [], [], []]
        for step in range(12):
            for number in range(4):
                value = f"{step}-{number}"
                await append(draws.choice(logs), value, partition=number)
                model[number].append(value)
            await asyncio.gather(*(log.records.seal("t") for log in logs))
        await asyncio.sleep(2)
        for log in logs:
            await log.records.seal("t")
            for number in range(4):
                assert await read_values(log, partition=number) == model[number]
        for number in range(4):
            files = await segments_of(logs[0], number)
            assert sum(file.rows for file in files) == len(model[number])
        assert sum(log._log.sealer.counters.conflicts for log in logs) > 0


async def test_another_sealer_that_goes_ahead_of_ours_is_no_damage(inner: MemoryStore) -> None:
    """Before ours comes to a partition, another has sealed that, and our view knows already.

    Ours has read the manifest before.
    """
    ours = await with_topic(inner)
    other = await opened(inner)
    async with closing(ours, other):
        await append(ours, "a", partition=0)
        await append(ours, "b", partition=1)
        store = store_of(ours)
        store.latency = lambda call: 60.0 if call.key.startswith("topics/") else 0.0
        seal = asyncio.create_task(ours.records.seal("t"))
        await asyncio.sleep(5)  # it uploads partition 0
        await other._log.wal.refresh()
        await other.records.seal("t", [1])
        await asyncio.sleep(5)
        assert ours.state.partition("t", 1).sealed_end == 1
        await seal
        store.latency = None
        await ours.records.seal("t")
        for number, value in enumerate("ab"):
            assert ours.state.partition("t", number).tail == []
            assert await read_values(ours, partition=number) == [value]


async def test_topic_deleted_during_seal_stops_no_sealer(inner: MemoryStore) -> None:
    log = await with_topic(inner, LogSettings(sealer=SealerSettings(check_interval_s=0.5)))
    await log.topics.create("u", 1, {"segment.ms": "100"})
    async with closing(log):
        await log.topics.alter("t", {"segment.ms": "100"})
        await append(log, "a")
        await append(log, "b", partition=1)
        store_of(log).latency = lambda call: 1.0 if call.key.startswith("topics/") else 0.0
        await asyncio.sleep(1.2)  # partition 0 is being uploaded
        await log.topics.delete("t")
        await append(log, "c", topic="u")
        await asyncio.sleep(5)
        assert log.state.partition("u", 0).sealed_end == 1
        assert log._log.sealer.counters.failures <= 1
        assert not any(task.done() for task in log._tasks)


async def test_a_table_that_is_behind_the_wal_is_damage(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner)) as log:
        await append(log, "a", "b")
        await log.records.seal("t")
        await append(log, "c")
        del store_of(log).tables[log.state.topic("t").prefix][1:]
        with pytest.raises(Corrupt, match="_delta_log"):
            await log.records.seal("t")
        async with closing(await opened(inner, COLD)) as cold:
            with pytest.raises(Corrupt, match="_delta_log"):
                await cold.records.fetch("t", 0, 0, bytes_max=100)
            assert await read_values(cold, offset=2) == ["c"]


# -- gaps, as key compaction leaves them


@pytest.mark.parametrize("kept_offsets", [[0, 1, 2], [5], [0, 3, 4, 7], [8, 9], [0, 9]])
@pytest.mark.parametrize("has_tail", [False, True])
async def test_a_reader_passes_over_what_compaction_took(
    inner: MemoryStore, kept_offsets: list[int], has_tail: bool
) -> None:
    """At the sealed end too: a reader that is sent there again would never get further."""
    async with closing(await with_topic(inner, COLD)) as log:
        await append(log, *map(str, range(10)))
        await log.records.seal("t")
        topic = log.state.topic("t")
        await rewrite(log, kept_offsets)
        if has_tail:
            await append(log, "10")
        expected = [*kept_offsets, 10] if has_tail else kept_offsets
        for offset in range(10):
            offsets = (await read_table(log, offset=offset)).column("offset").to_pylist()
            assert offsets == [
                expected_offset for expected_offset in expected if expected_offset >= offset
            ]
        assert log.state.topic("t") is topic


# -- damage


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
@pytest.mark.parametrize("sealed", [False, True])
async def test_damage_fails_one_partition(inner: MemoryStore, damage: str, sealed: bool) -> None:
    async with closing(await with_topic(inner)) as log:
        for number in (0, 1):
            await append(log, f"{number}a", partition=number)
            if sealed:
                await log.records.seal("t", [number])
            await append(log, f"{number}b", partition=number)
    partition = log.state.partition("t", 0)
    topic = log.state.topic("t")
    if sealed:
        table = store_of(log).tables[topic.prefix]
        (path,) = [file.path for commit in table for file in commit.files if file.partition == 0]
        key, position, size = f"{topic.prefix}/{path}", 20, 100
    else:
        first = partition.tail[0]
        key, position = first.object_key, first.position + first.size // 2
        size = position
    body = await inner.get(key)
    match damage:
        case "bit":
            await inner.put(
                key, [body[:position], bytes([body[position] ^ 1]), body[position + 1 :]]
            )
        case "cut":
            await inner.put(key, [body[:size]])
        case "gone":
            await inner.delete([key])
    # A new broker, from a checkpoint: it need not read the entry itself.
    await log._log.wal.checkpoint()
    async with closing(await opened(inner, COLD)) as cold:
        for _ in range(2):
            with pytest.raises(Corrupt) as caught:
                await cold.records.fetch("t", 0, 0, bytes_max=100)
            assert caught.value.key == key
        assert await read_values(cold, partition=1) == ["1a", "1b"]
        assert await read_values(cold, partition=0, offset=1) == ["0b"]
        # Corrupt is not remembered: what is restored is read.
        await inner.put(key, [body])
        assert await read_values(cold) == ["0a", "0b"]


async def test_store_without_answer_fails_read_and_not_log(inner: MemoryStore) -> None:
    writer = await with_topic(inner)
    cold = await opened(inner, COLD)
    async with closing(writer, cold):
        await append(writer, "a")
        await cold._log.wal.refresh()
        store_of(cold).plan = Script("get_range", object_keys.WAL, [Fault.UNAVAILABLE])
        with pytest.raises(Unavailable):
            await cold.records.fetch("t", 0, 0, bytes_max=100)
        assert await read_values(cold) == ["a"]


async def test_i5_a_zombies_tail_is_not_served(inner: MemoryStore) -> None:
    """Its view is void: what it knows of may be trimmed, deleted, collected."""
    zombie = await with_topic(inner)
    other = await opened(inner)
    async with closing(zombie, other):
        await append(zombie, "a")
        await other._log.wal.refresh()
        await other.topics.delete("t")
        await other.topics.create("t", 1, {})
        await append(other, "b")
        zombie.clock.advance(700)
        assert await read_values(zombie) == ["b"]


async def test_a_read_that_the_end_of_its_broker_overtakes_is_not_done(inner: MemoryStore) -> None:
    """The threads that decode have ended, for example because a copy of the process runs."""
    async with closing(await with_topic(inner, COLD)) as log:
        await append(log, "1", "2")
        await log.records.seal("t")
        log._log.reader.close()
        with pytest.raises(Unavailable, match="the broker stops"):
            await read_values(log)


@pytest.mark.parametrize("cache_bytes", [0, 4_000, 1 << 20])
async def test_a_read_of_another_brokers_tail_fetches_each_chunk_once(cache_bytes: int) -> None:
    """The chunks that are read ahead stay in a cache of any size until the read needs them."""
    inner, values = MemoryStore(), [f"{number:0500}" for number in range(40)]
    async with closing(await with_topic(inner)) as writer:
        for value in values:
            await append(writer, value)
        unopened = made(
            inner, COLD._replace(reader=COLD.reader._replace(chunk_cache_bytes=cache_bytes))
        )
        unopened.store.latency = lambda _: 0.01
        async with closing(await unopened.open("c0ffee")) as reader:
            old_count = unopened.store.count("get_range", outcome="ok")
            assert await read_values(reader) == values
            fetches = unopened.store.count("get_range", outcome="ok") - old_count
            assert fetches == len(values)


# -- reads on which a seal moves (I2)


def offsets(fetched: FetchResult) -> list[int]:
    return [
        offset for piece in fetched.pieces for offset in piece.batch.column("offset").to_pylist()
    ]


async def test_i2_read_of_table_continues_after_another_seal(inner: MemoryStore) -> None:
    async with closing(await logs.with_topic(inner, COLD)) as log:
        await append(log, "a", "b", "c")
        await log.records.seal("t")
        await append(log, "d", "e")
        (segment,) = [info.key async for info in inner.list("topics/")]
        gate = store_of(log).hold("get_range", segment)
        reading = asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=1000))
        await gate.reached.wait()
        await log.records.seal("t")
        await append(log, "f")
        gate.opened.set()
        fetched = await reading
        read = offsets(fetched)
        assert read == list(range(len(read)))
        assert fetched.next_offset == len(read)
        later_fetched = await log.records.fetch("t", 0, fetched.next_offset, bytes_max=1000)
        assert [*read, *offsets(later_fetched)] == [0, 1, 2, 3, 4, 5]


async def test_i2_a_read_of_the_tail_ends_where_it_is_sealed_meanwhile(inner: MemoryStore) -> None:
    async with closing(await logs.with_topic(inner, COLD)) as log:
        for value in "abc":
            await append(log, value)
        entry = [info.key async for info in inner.list("wal/")][1]
        gate = store_of(log).hold("get_range", entry)
        reading = asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=1000))
        await gate.reached.wait()
        await append(log, "d")
        sealing = asyncio.create_task(log.records.seal("t"))
        await asyncio.sleep(1)
        gate.opened.set()
        fetched = await reading
        await sealing
        read = offsets(fetched)
        later_fetched = await log.records.fetch("t", 0, fetched.next_offset, bytes_max=1000)
        assert [*read, *offsets(later_fetched)] == [0, 1, 2, 3]


async def test_i1_reload_drops_lost_records_from_tail_cache(inner: MemoryStore) -> None:
    """An operator gives the records up while this broker is suspended.

    The broker loads the state after that, and applies no entry that has the action.
    """
    log, other = await opened(inner), await opened(inner)
    async with closing(log, other):
        await log.topics.create("t", 1, {})
        await append(log, "a", "b")
        await append(log, "c")
        assert await read_values(log) == ["a", "b", "c"]
        assert log._log.tail.bytes > 0
        await other.refresh()
        await other._log.submit(LoseRecords(other.state.topic("t").topic_id, 0, 0, 2))
        await other._log.wal.checkpoint()
        log.clock.advance(AGE_S + 1)
        for broker in (other, log):
            table = await read_table(broker)
            assert table.column("offset").to_pylist() == [2]
            assert table.column("value").to_pylist() == [b"c"]


# -- segments that go away under a reader


VALUES = [str(number) for number in range(12)]


async def sealed(inner: MemoryStore) -> Broker:
    """`t`-0 with twelve records in three segments."""
    log = await logs.with_topic(inner, COLD)
    for first in (0, 4, 8):
        await append(log, *VALUES[first : first + 4])
        await log.records.seal("t")
    return log


async def table_of(log: Broker) -> tuple[Table, list[SegmentFile]]:
    table = await log._log.tables.of(log.state.topic("t"))
    await table.refresh()
    return table, list(await table.segments(0))


async def held_at_second_segment(log: Broker, reader: Broker) -> tuple[list[SegmentFile], Gate]:
    _, files = await table_of(log)
    second = f"{log.state.topic('t').prefix}/{files[1].path}"
    return files, reader._log.store.hold("get_range", second)


async def remove(log: Broker, files: list[SegmentFile], added: list[SegmentFile]) -> None:
    """Out of the table, and the objects are gone at once: later than any grace."""
    table, _ = await table_of(log)
    care = (await table.transaction_version(maintenance_app_id(0)) or 0) + 1
    await table.replace(files, added, {maintenance_app_id(0): care}, data_change=not added)
    prefix = log.state.topic("t").prefix
    await log._log.store.delete([f"{prefix}/{file.path}" for file in files])


async def merge(log: Broker, unique: str) -> None:
    _, files = await table_of(log)
    prefix, end = log.state.topic("t").prefix, files[-1].end_offset
    batches = (await read_table(log)).to_batches()
    written = segments.write(batches, codec="zstd", is_json=False)
    path = object_keys.segment(0, 0, end, unique)
    await log._log.store.create(f"{prefix}/{path}", [memoryview(written.body)])
    stamps = (files[0].timestamp_min, files[-1].timestamp_max)
    await remove(log, files, [SegmentFile(path, 0, 0, end, written.size, end, *stamps)])


async def move_log_start(log: Broker, offset: int) -> None:
    action = MoveLogStart(log.state.topic("t").topic_id, 0, offset)
    (outcome,) = await log._log.wal.commit(Draft([Commit(log.clock.new_id(), [action])], [], []))
    assert outcome.refusal is None


async def test_i7_manifest_with_merged_segments_is_read_again(inner: MemoryStore) -> None:
    log = await sealed(inner)
    stale = await opened(inner, COLD)
    async with closing(log, stale):
        assert await read_values(stale) == VALUES
        assert await stale.records.offset_for_timestamp("t", 0, 0) == 0
        for unique in ("aa", "ab", "ac"):
            await merge(log, unique)
            assert await read_values(stale, offset=5) == VALUES[5:]
            await merge(log, f"{unique}b")
            assert await stale.records.offset_for_timestamp("t", 0, 0) == 0


async def test_i7_segments_merged_under_a_read_are_read_once(inner: MemoryStore) -> None:
    log = await sealed(inner)
    reader = await opened(inner, COLD)
    async with closing(log, reader):
        _, gate = await held_at_second_segment(log, reader)
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
            await log.records.offset_for_timestamp("t", 0, 1_700_000_000_000)


@pytest.mark.parametrize("removed_count", [1, 2, 3])
async def test_error_below_log_start_has_range(inner: MemoryStore, removed_count: int) -> None:
    """By brokers that know of it, and by such whose view is older than the table."""
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
                await broker.records.fetch("t", 0, start - 1, bytes_max=100)
            told = refused.value
            assert (told.log_start_offset, told.high_watermark) == (start, 12)
            assert await read_values(broker, offset=start) == VALUES[start:]
        assert await log.records.offset_for_timestamp("t", 0, 0) == (
            None if removed_count == 3 else start
        )
        await append(log, "12")
        await log.records.seal("t")
        await unaware._log.wal.refresh()
        for broker in (log, unaware):
            assert await read_values(broker, offset=start) == [*VALUES, "12"][start:]


async def test_retention_under_a_read_ends_it_where_it_is(inner: MemoryStore) -> None:
    log = await sealed(inner)
    reader = await opened(inner, COLD)
    async with closing(log, reader):
        files, gate = await held_at_second_segment(log, reader)
        reading = asyncio.create_task(reader.records.fetch("t", 0, 0, bytes_max=1 << 20))
        await gate.reached.wait()
        await move_log_start(log, 8)
        await remove(log, files[:2], [])
        gate.opened.set()
        fetched = await reading
        assert fetched.next_offset == 4
        assert sum(piece.batch.num_rows for piece in fetched.pieces) == 4
        with pytest.raises(OffsetOutOfRange):
            await reader.records.fetch("t", 0, 4, bytes_max=100)


async def test_a_log_start_within_the_tail_is_sealed_over(inner: MemoryStore) -> None:
    async with closing(await sealed(inner)) as log:
        await append(log, "a", "b", "c")
        await move_log_start(log, 14)
        assert await read_values(log, offset=14) == ["c"]
        assert await log.records.offset_for_timestamp("t", 0, 0) == 14
        await log.records.seal("t")
        assert await read_values(log, offset=14) == ["c"]
        assert await log.records.offset_for_timestamp("t", 0, 0) == 14
        with pytest.raises(OffsetOutOfRange):
            await log.records.fetch("t", 0, 13, bytes_max=100)


# -- sealers that sleep, and what collection takes from them meanwhile


async def held_at_add(log: Broker) -> tuple[asyncio.Task[int], asyncio.Event, asyncio.Event]:
    """A seal that has uploaded, and waits before its commit until it is let go."""
    table, _ = await table_of(log)
    reached, go_on = asyncio.Event(), asyncio.Event()
    real = table.add

    async def add(*args) -> None:
        reached.set()
        await go_on.wait()
        await real(*args)

    table.add = add
    task = asyncio.create_task(log.records.seal("t"))
    await reached.wait()
    return task, reached, go_on


@pytest.mark.parametrize("is_collected", [False, True])
async def test_i7_tail_stays_until_late_segment_is(inner: MemoryStore, is_collected: bool) -> None:
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
        await other._log.wal.refresh()
        assert await read_values(other) == [*VALUES, "12"]
        assert other.state.partition("t", 0).sealed_end < 13
        # The next sealer replaces the segment, or finds it young.
        await other.records.seal("t")
        await other._log.wal.refresh()
        assert await read_values(other) == [*VALUES, "12"]
        assert other.state.partition("t", 0).sealed_end == 13


async def test_a_seal_whose_upload_took_too_long_is_not_committed(inner: MemoryStore) -> None:
    async with closing(await sealed(inner)) as log:
        await append(log, "12")
        gates: asyncio.Queue = asyncio.Queue()

        def plan(call):
            if call.verb == "create" and call.key.startswith(object_keys.TOPICS):
                log._log.store.plan = lambda _: None
                gates.put_nowait(log._log.store.hold("create", call.key))

        log._log.store.plan = plan
        task = asyncio.create_task(log.records.seal("t"))
        gate = await gates.get()
        await gate.reached.wait()
        log.clock.advance(2 * 3600)
        gate.opened.set()
        with pytest.raises(Unavailable, match="too long"):
            await task
        assert len((await table_of(log))[1]) == 3
        await log._log.wal.refresh()
        assert await log.records.seal("t") == 1
        assert await read_values(log) == [*VALUES, "12"]
