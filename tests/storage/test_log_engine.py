"""The log as one: what is appended is read, by everyone, in one dense run over both tiers."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable

import pytest

from tests.support.logs import (
    COLD,
    MANUAL,
    append,
    closing,
    opened,
    read_table,
    read_values,
    store_of,
)
from tests.support.records import TIME_MS, rows
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import (
    IdempotencyMismatch,
    InvalidConfig,
    InvalidRequest,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.store.memory import MemoryStore

MIXED = LogSettings(
    is_sealing=False,
    tail_cache_bytes=3000,
    reader=ReaderSettings(chunk_cache_bytes=3000, segment_cache_bytes=20_000),
)
"""A little of everything is in memory, and never what is asked for."""


@contextlib.asynccontextmanager
async def brokers(count: int, settings: LogSettings = MANUAL, *, partitions: int = 3):
    """Brokers on one store in memory; the first creates the topic "t" unless `partitions` is 0."""
    inner = MemoryStore()
    logs = [await opened(inner, settings)]
    if partitions:
        await logs[0].topics.create("t", partitions, {})
    logs += [await opened(inner, settings) for _ in range(count - 1)]
    async with closing(*logs):
        yield logs


# -- one run over both tiers


@pytest.mark.parametrize("settings", [MANUAL, COLD, MIXED], ids=["warm", "cold", "mixed"])
@pytest.mark.parametrize("seed", range(3))
async def test_i2_i7_two_tiers_read_as_one_dense_run(seed: int, settings: LogSettings) -> None:
    """Appends, seals and reads at random, on two brokers, against a list for each partition."""
    draws = random.Random(seed)
    model: list[list[str]] = [[], [], []]
    async with brokers(2, settings) as logs:
        for step in range(120):
            log = draws.choice(logs)
            number = draws.randrange(3)
            match draws.choice(["append"] * 4 + ["seal", "read", "read", "read", "read"]):
                case "append":
                    new_values = [f"{step}.{i}" * draws.choice([1, 30]) for i in range(3)]
                    new_values = new_values[: draws.randrange(1, 4)]
                    placed = await append(log, *new_values, partition=number)
                    assert placed == [("t", number, len(model[number]), len(new_values))]
                    model[number] += new_values
                case "seal":
                    await log._log.wal.refresh()
                    await log.records.seal("t", draws.choice([None, [number], [0, 1]]))
                case "read":
                    offset = draws.randrange(len(model[number]) + 1)
                    bytes_max = draws.choice([1, 50, 1000, 1 << 20])
                    values = await read_values(
                        log, partition=number, offset=offset, bytes_max=bytes_max
                    )
                    assert values == model[number][offset:]
        for log in logs:
            await log._log.wal.refresh()
            for number in range(3):
                assert await read_values(log, partition=number) == model[number]
        assert logs[0].state.encode() == logs[1].state.encode()
        sealed = [partition.sealed_end for _, _, partition in logs[0].state.partitions()]
        assert max(sealed) > 0


async def test_an_answer_is_about_as_large_as_asked_for_and_has_a_record() -> None:
    async with brokers(1) as (log,):
        await append(log, *["x" * 100] * 10)
        await log.records.seal("t")
        await append(log, *["y" * 100] * 10)
        for bytes_max, count in [(0, 0), (1, 1), (123, 1), (124, 1), (250, 2), (1860, 15)]:
            fetched = await log.records.fetch("t", 0, 0, bytes_max=bytes_max)
            assert sum(piece.batch.num_rows for piece in fetched.pieces) == count
            assert fetched.next_offset == count
            assert (fetched.log_start_offset, fetched.high_watermark) == (0, 20)


async def test_records_come_back_as_they_were_given() -> None:
    sent_rows = Rows(
        [TIME_MS, TIME_MS - 5, 0],
        [b"k", None, b""],
        [b"\x00\xff", b"", None],
        [[("h", b"1"), ("h", None)], None, []],
    )
    async with brokers(1) as (log,):
        await log.records.append(log.state.topic("t"), [(1, sent_rows)], size=10, is_json=False)
        for _ in range(2):
            for settings in (MANUAL, COLD):
                async with closing(await opened(store_of(log).inner, settings)) as reader:
                    (row, *other_rows) = (await read_table(reader, partition=1)).to_pylist()
                assert row["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
                assert [row["key"], *(other["key"] for other in other_rows)] == sent_rows.keys
                assert [row["value"], *(other["value"] for other in other_rows)] == sent_rows.values
                stamps = [
                    int(record["timestamp"].timestamp() * 1000) for record in (row, *other_rows)
                ]
                assert stamps == sent_rows.timestamps
                assert [other["headers"] for other in other_rows] == [None, []]
            await log.records.seal("t")


async def test_i3_right_after_the_ack_every_broker_reads_it() -> None:
    async with brokers(2) as (first, second):
        for i in range(5):
            await append(first, str(i))
            fetched = await second.records.fetch("t", 0, i, bytes_max=100)
            assert fetched.high_watermark == i + 1
            offsets = await first.records.offsets("t", 0)
            assert offsets.high_watermark == i + 1
            await append(second, "other", partition=1)
            assert (await first.records.offsets("t", 1)).high_watermark == i + 1


async def test_i3_a_topic_and_its_growth_are_known_to_every_broker_at_once() -> None:
    async with brokers(2, partitions=0) as (first, second):
        await first.topics.create("t", 1, {})
        await append(first, "a")
        assert (await second.records.fetch("t", 0, 0, bytes_max=100)).next_offset == 1
        await first.topics.add_partitions("t", 2)
        await append(first, "b", partition=1)
        assert (await second.records.fetch("t", 1, 0, bytes_max=100)).next_offset == 1
        with pytest.raises(UnknownTopic):
            await second.records.fetch("u", 0, 0, bytes_max=1)
        with pytest.raises(UnknownPartition):
            await second.records.fetch("t", 2, 0, bytes_max=1)
        await first.topics.create("u", 1, {})
        await second.topics.alter("u", {"segment.ms": "500"})
        await first.topics.create("v", 1, {})
        await second.topics.add_partitions("v", 3)
        await first.topics.create("w", 1, {})
        await second.topics.delete("w")
        await first.topics.create("w", 2, {})


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("offset", [-1, 4, 10**18])
async def test_an_offset_out_of_range_error_has_the_range(offset: int, sealed: bool) -> None:
    async with brokers(1) as (log,):
        await append(log, "a", "b", "c")
        if sealed:
            await log.records.seal("t")
        with pytest.raises(OffsetOutOfRange) as caught:
            await log.records.fetch("t", 0, offset, bytes_max=100, wait_s=10)
        assert (caught.value.log_start_offset, caught.value.high_watermark) == (0, 3)
        assert asyncio.get_running_loop().time() < 1


# -- long polls


async def test_a_long_poll_wakes_at_once_and_only_for_its_partition() -> None:
    loop = asyncio.get_running_loop()
    async with brokers(1) as (log,):
        polls = [
            asyncio.create_task(log.records.fetch("t", number, 0, bytes_max=100, wait_s=60))
            for number in (0, 0, 1)
        ]
        await asyncio.sleep(7)
        await append(log, "a")
        for poll in polls[:2]:
            fetched = await poll
            assert fetched.pieces[0].batch.column("value").to_pylist() == [b"a"]
        assert loop.time() == pytest.approx(7)
        assert not polls[2].done()
        empty = await polls[2]
        assert loop.time() == pytest.approx(60)
        assert (empty.pieces, empty.next_offset) == ([], 0)
        assert not log._log.waiting


async def test_a_long_poll_sees_what_another_broker_commits() -> None:
    async with brokers(2) as (first, second):
        poll = asyncio.create_task(second.records.fetch("t", 0, 0, bytes_max=100, wait_s=60))
        await asyncio.sleep(7)
        await append(first, "a")
        assert (await poll).next_offset == 1
        assert asyncio.get_running_loop().time() <= 8.1  # the poll interval


async def test_a_poller_that_goes_away_leaves_nothing() -> None:
    async with brokers(1) as (log,):
        poll = asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=100, wait_s=60))
        await asyncio.sleep(1)
        poll.cancel()
        await asyncio.sleep(1)
        assert not log._log.waiting


async def test_i3_reloaded_view_sends_no_poller_out_of_range() -> None:
    """A consumer would begin at the other end of the log."""
    async with brokers(2) as (log, other):
        await log._log.wal.checkpoint()
        for i in range(40):
            await append(log, str(i))
        poll = asyncio.create_task(log.records.fetch("t", 0, 40, bytes_max=100, wait_s=60))
        await asyncio.sleep(0.5)
        store_of(log).latency = lambda _: 0.1
        log.clock.advance(700)
        for _ in range(30):
            fetched = await log.records.fetch("t", 0, 40, bytes_max=100)
            assert fetched.high_watermark == 40
        assert log._log.wal.counters.void >= 1
        fetched = await poll
        assert fetched.high_watermark == 40
        await append(other, "after")
        assert await read_values(log, offset=40) == ["after"]


async def test_a_reader_of_a_topic_waits_for_a_change_of_it() -> None:
    async with brokers(2) as (log, other):
        loop, changes = asyncio.get_running_loop(), log.records.changes_of("t")

        async def change_after(work: Awaitable[object]) -> list[int] | None:
            count, began_s = changes.count, loop.time()
            waiting = asyncio.create_task(log.records.wait_for_changes("t", changes, count, 60))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await work
            await waiting
            assert loop.time() - began_s < 2
            return changes.since(count)

        assert await change_after(append(log, "a", partition=2)) == [2]
        assert await change_after(append(other, "a", partition=1)) == [1]
        assert await change_after(log.topics.add_partitions("t", 4)) is None
        began_s, count = loop.time(), changes.count
        await log.topics.create("u", 1, {})
        await log.topics.add_partitions("u", 2)
        await append(log, "a", topic="u")
        await log.records.wait_for_changes("t", changes, count, 5)
        assert loop.time() - began_s >= 5
        assert changes.count == count
        with pytest.raises(UnknownTopic):
            await change_after(log.topics.delete("t"))
        assert not log._log.waiting


async def test_a_stop_ends_long_polls_without_records() -> None:
    async with brokers(1) as (log,):
        loop = asyncio.get_running_loop()
        poll = asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=100, wait_s=60))
        await asyncio.sleep(1)
        await log.hand_over()
        assert (await poll).pieces == []
        assert loop.time() < 2
        with pytest.raises(Unavailable, match="shutting down"):
            await log.check_ready()
        later = asyncio.create_task(log.records.fetch("t", 0, 0, bytes_max=100, wait_s=60))
        await asyncio.sleep(1)
        assert not later.done(), "until the port closes, polls may wait"
        await append(log, "a")
        assert (await later).records == 1
        log.drain()
        assert (await log.records.fetch("t", 0, 1, bytes_max=100, wait_s=60)).pieces == []
        with pytest.raises(Unavailable, match="continue at another broker"):
            log.records.check_serving()
        assert loop.time() < 3


async def test_a_topic_that_is_deleted_is_unknown_to_all_and_another_may_have_its_name() -> None:
    async with brokers(2) as (first, second):
        await append(first, "a", "b")
        await first.records.seal("t")
        await append(first, "c")
        poll = asyncio.create_task(second.records.fetch("t", 0, 3, bytes_max=100, wait_s=5))
        await asyncio.sleep(0.1)
        await first.topics.delete("t")
        with pytest.raises(UnknownTopic):
            await first.records.fetch("t", 0, 0, bytes_max=100)
        with pytest.raises(UnknownTopic):
            await poll
        assert first._log.tail.bytes == 0
        await first.topics.create("t", 1, {})
        await append(first, "new")
        await second._log.wal.refresh()
        for log in (first, second):
            assert await read_values(log) == ["new"]


# -- requests


async def test_i4_keyed_request_is_stored_once_at_any_broker() -> None:
    key = IdempotencyKey("k", b"f", 3)
    async with brokers(2) as logs:
        for log in (*logs, *logs):
            await log._log.wal.refresh()
            parts = [(2, rows("a")), (0, rows("b", "c"))]
            placed = await log.records.append(
                log.state.topic("t"), parts, size=3, is_json=False, key=key
            )
            assert placed == [("t", 2, 0, 1), ("t", 0, 0, 2)]
        other = IdempotencyKey("k", b"g", 3)
        with pytest.raises(IdempotencyMismatch):
            await logs[0].records.append(
                logs[0].state.topic("t"), parts, size=3, is_json=False, key=other
            )
        assert await read_values(logs[1]) == ["b", "c"]


async def test_an_invalid_request_is_refused_without_harm_to_others() -> None:
    """It fails no other request's flush, and not the writer."""
    empty = record_columns.batch_of_rows([rows("x")]).slice(0, 0)
    async with brokers(1) as (log,):
        topic = log.state.topic("t")
        for parts, error in [
            ([(3, rows("x"))], UnknownPartition),
            ([(-1, rows("x"))], UnknownPartition),
            ([(0, rows())], InvalidRequest),
            ([(0, rows("x")), (1, empty)], InvalidRequest),
        ]:
            beside = asyncio.create_task(append(log, "beside", partition=2))
            with pytest.raises(error):
                await log.records.append(topic, parts, size=1, is_json=False)
            await beside
        assert await read_values(log, partition=2) == ["beside"] * 4


async def test_topics_are_checked_before_anything_is_written() -> None:
    async with brokers(1) as (log,):
        seq = log.state.seq
        for name, partitions, configs, error in [
            ("t", 1, {}, TopicExists),
            ("..", 1, {}, InvalidRequest),
            ("a b", 1, {}, InvalidRequest),
            ("u", 0, {}, InvalidRequest),
            ("u", 10_001, {}, InvalidRequest),
            ("u", 1, {"retention": "1"}, InvalidConfig),
            ("u", 1, {"retention.ms": "soon"}, InvalidConfig),
        ]:
            with pytest.raises(error):
                await log.topics.create(name, partitions, configs)
        with pytest.raises(InvalidRequest):
            await log.topics.add_partitions("t", 2)
        assert await log.topics.create("u", 1, {}, validate_only=True) is None
        assert "u" not in log.state.topics
        assert log.state.seq - seq <= 1
        await log.topics.alter("t", {"segment.ms": "500"})
        assert log.state.topic("t").config.segment_ms == 500
        await log.topics.alter("t", {"segment.ms": None})
        assert log.state.topic("t").configs == {}


async def test_two_callers_set_defaults_of_all_topics_and_lose_no_change() -> None:
    async with brokers(2) as (first, second):
        await asyncio.gather(
            first.topics.set_defaults({"log.roll.ms": "700", "num.partitions": " 4"[1:]}),
            second.topics.set_defaults({"log.cleanup.policy": "compact , delete"}),
        )
        for log in (first, second):
            await log.refresh()
            set_values = {
                "log.roll.ms": "700",
                "num.partitions": "4",
                "log.cleanup.policy": "compact,delete",
            }
            assert log.state.defaults.values == set_values
            config = log.state.topic("t").config
            assert (config.segment_ms, len(config.cleanup_policy)) == (700, 2)
        await second.topics.alter("t", {"segment.ms": "500"})
        await second.topics.set_defaults({"log.roll.ms": None})
        await first.refresh()
        assert first.state.topic("t").config.segment_ms == 500
        seq = first.state.seq
        for name, value, why in [
            ("log.roll.ms", "soon", "for the default log.roll.ms: must be a whole number"),
            ("log.roll.ms", "", "must be a whole number"),
            ("num.partitions", "10001", "must be 1 to 10000"),
            ("auto.create.topics.enable", "yes", "must be one of true, false"),
            ("log.cleanup.policy", "delete," * 200, "has 1400 characters"),
            ("segment.ms", "1000", "use the name log.roll.ms"),
            ("segment.ms", None, "use the name log.roll.ms"),
            ("preallocate", "true", "cannot have a default: it has no effect here"),
            ("log.retention.hours", "1", "unknown default 'log.retention.hours': known are"),
        ]:
            with pytest.raises(InvalidConfig, match=why):
                await first.topics.set_defaults({name: value})
        assert first.state.seq == seq


async def test_i10_nothing_is_held_of_topics_that_another_broker_deleted() -> None:
    """H1: manifests and cached records of each topic that this broker had read."""
    async with brokers(2, partitions=0) as (first, second):
        for i in range(6):
            configs = {"cleanup.policy": "compact"} if i % 2 else {}
            topic = await first.topics.create(f"t{i}", 1, configs)
            assert topic is not None
            await append(first, "a", topic=topic.name)
            await first.records.seal(topic.name)
            await append(first, "b", topic=topic.name)
            assert await read_values(second, topic=topic.name) == ["a", "b"]
            assert len(second._log.tables) == 1
            await first.topics.delete(topic.name)
            await second._log.wal.refresh()
            assert not second._log.tail.bytes
            for log in (first, second):
                assert not len(log._log.tables)
                await log._log.tables.of(topic)  # a seal or a fetch that began before
                assert not len(log._log.tables)


async def test_i10_nothing_is_held_of_topics_deleted_while_the_view_was_expired() -> None:
    async with brokers(2, partitions=0) as (first, second):
        for name in ("t", "kept"):
            await first.topics.create(name, 1, {})
            await append(first, "a", topic=name)
            await first.records.seal(name)
            assert await read_values(second, topic=name) == ["a"]
        await first.topics.delete("t")
        await first._log.wal.checkpoint()
        second.clock.advance(second._log.wal.view_age_max_s + 1)
        await second._log.wal.ensure_view()
        assert len(second._log.tables) == 1
