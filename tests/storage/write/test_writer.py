"""The write path: batching, order, answers, bounds (I1, I3, I4, I6, I10).

Stores are in memory behind a `FaultyStore`; time is virtual, so a flush interval costs nothing.
"""

import asyncio
import contextlib
import random

import pytest

from tests.support.faults import Fault, Script, Seeded
from tests.support.records import TOPIC_ID, fold, rows, tail_values
from tests.support.views import (
    AGE_S,
    CLUSTER_ID,
    checkpoint_and_collect,
    one,
    opened,
    store_of,
    suspend,
    values_of,
)
from tests.support.writers import append, ended, puts, say, started
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import CreateTopic, DeleteTopic
from tidelog.storage.core.errors import (
    CommitUnknown,
    IdempotencyMismatch,
    StoreRefused,
    Throttled,
    Unavailable,
    UnknownTopic,
)
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.requests import AppendRequest, TopicRecords
from tidelog.storage.write.writer import WriterSettings

OTHER_ID = "b2" * 16


# -- batching


async def test_an_idle_writer_flushes_at_once_with_one_request_to_the_store() -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.1)
    store_of(writer.wal).answered.clear()
    assert await append(writer, "a", "b") == [("t", 0, 0, 2)]
    assert asyncio.get_running_loop().time() == pytest.approx(0.1)
    assert store_of(writer.wal).answered == [(("create", object_keys.wal(2)), "done")]
    await ended(writer)


async def test_what_arrives_during_a_flush_rides_in_the_next_one(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    store_of(writer.wal).answered.clear()

    async def client(number: int) -> None:
        await asyncio.sleep(number * 0.003)
        for i in range(20):
            await append(writer, f"{number}-{i}")

    await asyncio.gather(*map(client, range(50)))
    # One client's record, the records that arrived during its flush, and then all at once:
    # a client that was just answered shares a flush with those that waited.
    assert writer.counters.flushes == 2 + 20
    answered = store_of(writer.wal).answered
    assert [call.verb for call, _ in answered] == ["create"] * 22  # 1.0 requests a flush
    values = await values_of(inner)
    assert len(values) == 1000
    for number in range(50):
        own = [value for value in values if value.startswith(f"{number}-")]
        assert own == [f"{number}-{i}" for i in range(20)]
    await ended(writer)


async def test_the_interval_spaces_flushes(inner: MemoryStore) -> None:
    settings = WriterSettings(flush_interval_ms=250)
    writer = await started(inner, settings, latency_s=0.05)
    loop = asyncio.get_running_loop()
    before = puts(writer)
    while loop.time() < 10.0:
        await append(writer, "x", acks=Acks.NONE)
        await asyncio.sleep(0.01)
    assert 39 <= puts(writer) - before <= 41
    await ended(writer)


async def test_the_first_record_after_a_pause_does_not_wait_for_the_interval() -> None:
    inner = MemoryStore()
    writer = await started(inner, WriterSettings(flush_interval_ms=250), latency_s=0.05)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        await asyncio.sleep(1)
        begun = loop.time()
        await append(writer, "x")
        assert loop.time() - begun == pytest.approx(0.05)
        await append(writer, "y")  # but the one right behind it does
        assert loop.time() - begun == pytest.approx(0.25 + 0.05)
    await ended(writer)


async def test_a_full_segment_does_not_wait_for_the_interval(inner: MemoryStore) -> None:
    settings = WriterSettings(flush_interval_ms=60_000, flush_bytes=1000)
    writer = await started(inner, settings, latency_s=0.05)
    loop = asyncio.get_running_loop()
    await append(writer, "first")
    small = asyncio.create_task(append(writer, "x"))
    await asyncio.sleep(1.0)
    assert not small.done()
    await append(writer, "y" * 1000)
    assert loop.time() < 2.0
    assert (await small) == [("t", 0, 1, 1)]
    await ended(writer)


async def test_no_entry_is_larger_than_it_may_be(inner: MemoryStore) -> None:
    writer = await started(inner, WriterSettings(flush_bytes_max=5000), latency_s=0.05)
    before = puts(writer)
    sizes = [100, 4000, 4000, 900, 200, 9000, 10]
    await asyncio.gather(*(append(writer, "x" * size) for size in sizes))
    assert [len(value) for value in await values_of(inner)] == sizes
    # 100 4000 | 4000 900 | 200 | 9000 | 10: one that is too large alone goes alone.
    assert puts(writer) - before == 5
    await ended(writer)


async def test_i10_no_entry_has_an_unreadable_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute without a store, and a million small keyed requests: still entries that can be read
    back. The bound is on requests and parts, not on bytes alone."""
    monkeypatch.setattr("tidelog.storage.write.writer.FLUSH_PARTS_MAX", 10)

    inner = MemoryStore()
    writer = await started(inner, latency_s=0.05)
    keyed = [say(writer, str(i), key=IdempotencyKey(str(i), b"f")) for i in range(50)]
    await asyncio.gather(*(writer.append(request, Acks.ALL) for request in keyed))
    _, outcomes = await fold(inner, CLUSTER_ID)
    assert max(map(len, outcomes)) == 5
    assert await values_of(inner) == [str(i) for i in range(50)]
    await ended(writer)


async def test_a_large_segment_is_encoded_in_a_thread_while_the_loop_goes_on() -> None:
    inner = MemoryStore()
    writer = await started(inner)
    value = random.Random(1).randbytes(200_000).hex()
    assert await append(writer, value) == [("t", 0, 0, 1)]
    assert await values_of(inner) == [value]
    await ended(writer)


# -- atomic requests


async def test_i4_a_request_over_partitions_and_topics_is_whole_or_refused() -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.05)
    made = AppendRequest((), 0, actions=[CreateTopic("u", OTHER_ID, 1, {})])
    await writer.append(made, Acks.ALL)

    def both(value: str) -> AppendRequest:
        parts = [
            TopicRecords(topic_id, partition, rows(value))
            for topic_id, partition in ((TOPIC_ID, 1), (OTHER_ID, 0), (TOPIC_ID, 0))
        ]
        return AppendRequest(parts, 3)

    placed = await writer.append(both("first"), Acks.ALL)
    assert placed == [("t", 1, 0, 1), ("u", 0, 0, 1), ("t", 0, 0, 1)]
    answers = await asyncio.gather(
        append(writer, "before"),
        writer.append(AppendRequest((), 0, actions=[DeleteTopic(OTHER_ID)]), Acks.ALL),
        writer.append(both("never"), Acks.ALL),
        append(writer, "after"),
        return_exceptions=True,
    )
    assert isinstance(answers[2], UnknownTopic)
    assert await values_of(inner) == ["first", "before", "after"]
    state, _ = await fold(inner, CLUSTER_ID)
    assert await tail_values(inner, state, "t", 1) == [b"first"]
    await ended(writer)


# -- bounds


async def test_i10_callers_are_throttled_at_the_bound_and_nothing_leaks(inner: MemoryStore) -> None:
    writer = await started(inner, WriterSettings(buffer_bytes_max=20_000), latency_s=0.05)
    answers = await asyncio.gather(
        *(append(writer, "x" * 2000) for _ in range(20)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, Throttled)]
    assert all(error.retry_after_ms > 0 for error in refused)
    assert writer.counters.throttled == len(refused)
    assert 5 <= len(answers) - len(refused) <= 10
    assert writer.buffered_bytes == 0
    assert len(await values_of(inner)) == 20 - len(refused)
    assert await append(writer, "again")
    await ended(writer)


async def test_i10_tiny_requests_are_bounded_by_what_they_cost_in_memory() -> None:
    inner = MemoryStore()
    writer = await started(inner, WriterSettings(buffer_bytes_max=1024 * 1024))
    gate = store_of(writer.wal).hold("create", object_keys.wal(2))
    await append(writer, "first", acks=Acks.NONE)
    await gate.reached.wait()
    taken_count = 0
    while writer.counters.throttled == 0:
        with contextlib.suppress(Throttled):
            await append(writer, "x", acks=Acks.NONE)
            taken_count += 1
    assert taken_count < 2000
    gate.opened.set()
    await ended(writer)
    assert len(await values_of(inner)) == taken_count + 1


@pytest.mark.parametrize("acks", [Acks.NONE, Acks.ALL])
async def test_i10_accounts_are_even_after_failures_of_every_kind(acks: Acks) -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.02)
    store_of(writer.wal).plan = Seeded(7, 0.4)
    draws = random.Random(7)
    acked = set[str]()

    async def client(number: int) -> None:
        for i in range(30):
            key = IdempotencyKey(f"{number}-{i // 2}", b"f%d" % draws.choice([1, 1, 2]))
            key_or_none = draws.choice([None, key])
            asked = say(writer, f"{number}-{i}", key=key_or_none)
            refusals = (TimeoutError, Unavailable, IdempotencyMismatch)
            with contextlib.suppress(*refusals):
                async with asyncio.timeout(draws.choice([0.01, 10])):
                    await writer.append(asked, acks)
                    if acks is Acks.ALL and key_or_none is None:
                        acked.add(f"{number}-{i}")

    await asyncio.gather(*map(client, range(10)))
    store_of(writer.wal).plan = lambda _: None
    await ended(writer)  # asserts that the accounts are at zero
    stored = await values_of(inner)
    assert stored
    assert acked <= set(stored)
    assert acked or acks is not Acks.ALL


# -- callers and failures


async def test_i1_a_caller_that_goes_away_does_not_take_its_records_with_it() -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.1)
    callers = [asyncio.create_task(append(writer, str(i))) for i in range(10)]
    await asyncio.sleep(0.01)
    for caller in callers[::2]:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await ended(writer)
    assert await values_of(inner) == [str(i) for i in range(10)]


async def test_i6_refused_flush_fails_all_waiters_and_is_never_stored(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    store_of(writer.wal).plan = Script("create", object_keys.WAL, [Fault.REFUSED])
    answers = await asyncio.gather(
        *(append(writer, str(i)) for i in range(5)), return_exceptions=True
    )
    assert all(isinstance(answer, StoreRefused) for answer in answers)
    assert writer.counters.flushes_failed == 1
    assert await append(writer, "later") == [("t", 0, 0, 1)]
    assert await values_of(inner) == ["later"]
    await ended(writer)


async def test_a_lost_outcome_is_reported_as_unknown_and_the_writer_continues() -> None:
    inner = MemoryStore()
    writer = await started(inner)
    other = await opened(inner)
    gate = store_of(writer.wal).hold("create", object_keys.wal(2), is_after=True)
    asked = asyncio.create_task(append(writer, "perhaps"))
    await gate.reached.wait()
    for i in range(3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    suspend(writer.wal, 10 * AGE_S)
    gate.opened.set()
    with pytest.raises(CommitUnknown):
        await asked
    assert await append(writer, "next") == [("t", 0, 4, 1)]
    await ended(writer)


async def test_a_chain_that_cannot_be_continued_is_reported_as_unknown(inner: MemoryStore) -> None:
    writer = await started(inner)
    await inner.create(object_keys.wal(2), [b"no entry"])
    with pytest.raises(CommitUnknown, match="cannot be continued"):
        await append(writer, "x")
    await inner.delete([object_keys.wal(2)])
    assert await append(writer, "y") == [("t", 0, 0, 1)]
    await ended(writer)


async def test_timed_out_request_is_answered_and_withdrawn_if_not_under_way() -> None:
    inner = MemoryStore()
    writer = await started(inner, WriterSettings(answer_timeout_s=10.0))
    gate = store_of(writer.wal).hold("create", object_keys.wal(2))
    under_way = asyncio.create_task(append(writer, "under way"))
    await gate.reached.wait()
    waiting = [asyncio.create_task(append(writer, f"waiting {i}")) for i in range(3)]
    unasked = await append(writer, "waiting 3", acks=Acks.NONE)
    assert unasked is None
    await asyncio.sleep(5)
    young = asyncio.create_task(append(writer, "young"))
    await asyncio.sleep(8)
    with pytest.raises(CommitUnknown):
        await under_way
    for task in waiting:
        with pytest.raises(Unavailable):
            await task
    gate.opened.set()
    assert await young == [("t", 0, 1, 1)]
    assert await values_of(inner) == ["under way", "young"]
    await ended(writer)


async def test_closing_flushes_what_is_open_and_refuses_what_comes_after() -> None:
    inner = MemoryStore()
    writer = await started(inner, WriterSettings(flush_interval_ms=60_000), latency_s=0.1)
    await append(writer, "first")
    asked = [asyncio.create_task(append(writer, str(i))) for i in range(3)]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(ended(writer))
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="shutting down"):
        await append(writer, "too late")
    await closing
    assert [answer[0].base_offset for answer in await asyncio.gather(*asked)] == [1, 2, 3]
    assert asyncio.get_running_loop().time() < 1.0


async def test_closing_on_a_refusing_store_answers_every_caller(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    store_of(writer.wal).plan = Script("create", object_keys.WAL, [Fault.REFUSED] * 9)
    first = asyncio.create_task(append(writer, "first"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(append(writer, "second"))
    await asyncio.sleep(0.01)
    await ended(writer)
    for task in (first, second):
        with pytest.raises(Unavailable):
            async with asyncio.timeout(1):
                await task
    assert await values_of(inner) == []
