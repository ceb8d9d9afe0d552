"""The write path: batching, order, answers, bounds (I1, I3, I4, I6, I10).

Stores are in memory behind a `FaultyStore`; time is virtual, so a flush interval costs nothing.
"""

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from tests.support.faults import Fault, Script, Seeded
from tests.support.hotlogs import failing, names, requests_in, values
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
from tests.support.writers import append, ended, puts, say, started, writing
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
from tidelog.storage.core.log_settings import PaceSettings
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write import hot_log
from tidelog.storage.write.hot_log_file import discard, recover
from tidelog.storage.write.requests import AppendRequest, TopicRecords
from tidelog.storage.write.writer import Writer, WriterSettings

OTHER_ID = "b2" * 16


# -- batching


async def test_idle_writer_flushes_at_once_with_one_put(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    store_of(writer.wal).answered.clear()
    assert await append(writer, "a", "b") == [("t", 0, 0, 2)]
    assert asyncio.get_running_loop().time() == pytest.approx(0.1)
    ((call, outcome),) = store_of(writer.wal).answered
    assert (call.verb, call.key, outcome) == ("create", object_keys.wal(2), "done")
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
    store_calls = store_of(writer.wal).answered
    assert [call.verb for call, _ in store_calls] == ["create"] * 22  # 1.0 requests a flush
    values = await values_of(inner)
    assert len(values) == 1000
    for number in range(50):
        own = [value for value in values if value.startswith(f"{number}-")]
        assert own == [f"{number}-{i}" for i in range(20)]
    await ended(writer)


async def test_the_interval_spaces_flushes(inner: MemoryStore) -> None:
    pace = PaceSettings(flush_interval_ms=250)
    writer = await started(inner, pace=pace, latency_s=0.05)
    loop = asyncio.get_running_loop()
    old_puts = puts(writer)
    while loop.time() < 10.0:
        await append(writer, "x", acks=Acks.NONE)
        await asyncio.sleep(0.01)
    assert 39 <= puts(writer) - old_puts <= 41
    await ended(writer)


async def test_record_after_pause_does_not_wait_for_interval(inner: MemoryStore) -> None:
    pace = PaceSettings(flush_interval_ms=250)
    writer = await started(inner, pace=pace, latency_s=0.05)
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
    pace = PaceSettings(flush_interval_ms=60_000)
    writer = await started(inner, WriterSettings(flush_bytes=1000), pace=pace, latency_s=0.05)
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
    old_puts = puts(writer)
    sizes = [100, 4000, 4000, 900, 200, 9000, 10]
    await asyncio.gather(*(append(writer, "x" * size) for size in sizes))
    assert [len(value) for value in await values_of(inner)] == sizes
    # 100 4000 | 4000 900 | 200 | 9000 | 10: one that is too large alone goes alone.
    assert puts(writer) - old_puts == 5
    await ended(writer)


async def test_i10_no_entry_has_an_unreadable_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute without a store, a million small keyed requests make readable entries.

    The bound is on requests and parts, not on bytes alone.
    """
    monkeypatch.setattr("tidelog.storage.write.writer.FLUSH_PARTS_MAX", 10)
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.05)
    keyed = [say(writer, str(i), key=IdempotencyKey(str(i), b"f")) for i in range(50)]
    await asyncio.gather(*(writer.append(request, Acks.ALL) for request in keyed))
    _, outcomes = await fold(inner, CLUSTER_ID)
    assert max(map(len, outcomes)) == 5
    assert await values_of(inner) == [str(i) for i in range(50)]
    await ended(writer)


async def test_large_segment_is_encoded_in_a_thread(inner: MemoryStore) -> None:
    writer = await started(inner)
    value = random.Random(1).randbytes(200_000).hex()
    assert await append(writer, value) == [("t", 0, 0, 1)]
    assert await values_of(inner) == [value]
    await ended(writer)


# -- atomic requests


async def test_i4_request_over_topics_is_whole_or_refused(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.05)
    append_request = AppendRequest((), 0, actions=[CreateTopic("u", OTHER_ID, 1, {})])
    await writer.append(append_request, Acks.ALL)

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


async def test_i10_tiny_requests_are_bounded_by_memory(inner: MemoryStore) -> None:
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
async def test_i10_accounts_are_even_after_all_failures(inner: MemoryStore, acks: Acks) -> None:
    writer = await started(inner, latency_s=0.02)
    store_of(writer.wal).plan = Seeded(7, 0.4)
    draws = random.Random(7)
    acked = set[str]()

    async def client(number: int) -> None:
        for i in range(30):
            key = IdempotencyKey(f"{number}-{i // 2}", b"f%d" % draws.choice([1, 1, 2]))
            key_or_none = draws.choice([None, key])
            append_request = say(writer, f"{number}-{i}", key=key_or_none)
            refusals = (TimeoutError, Unavailable, IdempotencyMismatch)
            with contextlib.suppress(*refusals):
                async with asyncio.timeout(draws.choice([0.01, 10])):
                    await writer.append(append_request, acks)
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


async def test_i1_records_of_cancelled_caller_are_committed(inner: MemoryStore) -> None:
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


async def test_lost_outcome_is_unknown_and_writer_continues(inner: MemoryStore) -> None:
    writer = await started(inner)
    other = await opened(inner)
    gate = store_of(writer.wal).hold("create", object_keys.wal(2), is_after=True)
    task = asyncio.create_task(append(writer, "perhaps"))
    await gate.reached.wait()
    for i in range(3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    suspend(writer.wal, 10 * AGE_S)
    gate.opened.set()
    with pytest.raises(CommitUnknown):
        await task
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


async def test_timed_out_request_is_answered_and_withdrawn(inner: MemoryStore) -> None:
    writer = await started(inner, WriterSettings(answer_timeout_s=10.0))
    gate = store_of(writer.wal).hold("create", object_keys.wal(2))
    under_way = asyncio.create_task(append(writer, "under way"))
    await gate.reached.wait()
    waiting = [asyncio.create_task(append(writer, f"waiting {i}")) for i in range(3)]
    unasked = await append(writer, "waiting 3", acks=Acks.NONE)
    assert unasked is None
    await asyncio.sleep(5)
    later_task = asyncio.create_task(append(writer, "young"))
    await asyncio.sleep(8)
    with pytest.raises(CommitUnknown):
        await under_way
    for task in waiting:
        with pytest.raises(Unavailable):
            await task
    gate.opened.set()
    assert await later_task == [("t", 0, 1, 1)]
    assert await values_of(inner) == ["under way", "young"]
    await ended(writer)


async def test_closing_flushes_and_refuses_later_requests(inner: MemoryStore) -> None:
    pace = PaceSettings(flush_interval_ms=60_000)
    writer = await started(inner, pace=pace, latency_s=0.1)
    await append(writer, "first")
    tasks = [asyncio.create_task(append(writer, str(i))) for i in range(3)]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(ended(writer))
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="shutting down"):
        await append(writer, "too late")
    await closing
    assert [answer[0].base_offset for answer in await asyncio.gather(*tasks)] == [1, 2, 3]
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


# -- idempotency


async def test_a_retry_while_the_first_is_under_way_shares_its_answer(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    key = IdempotencyKey("k", b"f")
    first = asyncio.create_task(writer.append(say(writer, "once", key=key), Acks.ALL))
    await asyncio.sleep(0.01)
    retries = [
        asyncio.create_task(writer.append(say(writer, "once", key=key), Acks.ALL)) for _ in range(5)
    ]
    await asyncio.sleep(0.01)
    first.cancel()  # the client has gone, its retries have not
    assert [await retry for retry in retries] == [[("t", 0, 0, 1)]] * 5
    late = await writer.append(say(writer, "once", key=key), Acks.ALL)
    assert late == [("t", 0, 0, 1)]
    assert await values_of(inner) == ["once"]
    await ended(writer)


async def test_a_key_for_another_body_is_refused_whenever_it_comes(inner: MemoryStore) -> None:
    writer = await started(inner, latency_s=0.1)
    first, other = IdempotencyKey("k", b"f"), IdempotencyKey("k", b"g")
    answers = await asyncio.gather(
        writer.append(say(writer, "first", key=first), Acks.ALL),
        writer.append(say(writer, "other", key=other), Acks.ALL),
        return_exceptions=True,
    )
    assert answers[0] == [("t", 0, 0, 1)]
    assert isinstance(answers[1], IdempotencyMismatch)
    with pytest.raises(IdempotencyMismatch):
        await writer.append(say(writer, "other", key=other), Acks.ALL)
    assert await values_of(inner) == ["first"]
    await ended(writer)


async def test_a_retry_on_another_broker_gets_the_first_answer(inner: MemoryStore) -> None:
    first = await started(inner, latency_s=0.1)
    second = writing(await opened(inner))
    key = IdempotencyKey("k", b"f")
    answers = await asyncio.gather(
        first.append(say(first, "once", key=key), Acks.ALL),
        second.append(say(second, "once", key=key), Acks.ALL),
    )
    assert answers == [[("t", 0, 0, 1)]] * 2
    assert await values_of(inner) == ["once"]
    await asyncio.gather(ended(first), ended(second))


# -- acks=1


async def crash(writer: Writer) -> None:
    """The process is gone: nothing of it goes on but what its PUTs have begun."""
    assert writer.task is not None
    assert writer.hot_log is not None
    store_of(writer.wal).kill()
    for task in (writer.task, writer._watch):
        task.cancel()
    await asyncio.gather(writer.task, writer._watch, return_exceptions=True)
    await writer.hot_log.close(is_drained=False)


async def restart(inner: MemoryStore, directory: Path) -> Writer:
    """The next process: adopts, commits and discards what it finds."""
    writer = writing(await opened(inner), hot_dir=directory)
    files = recover(directory, CLUSTER_ID)
    await asyncio.gather(*writer.recover([request for file in files for request in file.requests]))
    discard(files)
    return writer


async def test_acks_1_is_answered_before_commit(inner: MemoryStore, tmp_path: Path) -> None:
    writer = await started(inner, latency_s=5.0, hot_dir=tmp_path)
    assert await append(writer, "a", acks=Acks.LOCAL) is None
    assert asyncio.get_running_loop().time() < 0.1
    assert values(requests_in(tmp_path)) == []  # held by a living process
    assert await append(writer, "b") == [("t", 0, 1, 1)]
    await ended(writer)
    assert await values_of(inner) == ["a", "b"]
    assert names(tmp_path, "*") == []


async def test_i6_refused_flush_keeps_acked_in_order(inner: MemoryStore, tmp_path: Path) -> None:
    writer = await started(inner, latency_s=0.05, hot_dir=tmp_path)
    store_of(writer.wal).plan = Script("create", object_keys.WAL, [Fault.REFUSED] * 3)
    refused = 0
    for i in range(30):
        if i % 3 == 2:
            try:
                await append(writer, f"all {i}")
            except Unavailable:
                refused += 1
        else:
            await append(writer, f"one {i}", acks=Acks.LOCAL)
    await ended(writer)
    log_values = await values_of(inner)
    assert [value for value in log_values if value.startswith("one")] == [
        f"one {i}" for i in range(30) if i % 3 != 2
    ]
    assert len(log_values) == 30 - refused
    assert refused > 0
    assert names(tmp_path, "*") == []


@pytest.mark.parametrize("seed", range(8))
async def test_i4_acked_survive_crashes(inner: MemoryStore, tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    acked: list[str] = []
    stores = []
    for life in range(5):
        # A new process; the store's faults begin when it serves.
        starting = started(inner, hot_dir=tmp_path) if life == 0 else restart(inner, tmp_path)
        writer = await starting
        store = store_of(writer.wal)
        stores.append(store)
        store.plan = Seeded(seed * 10 + life, 0.5)
        store.latency = lambda _: draws.choice([0.001, 0.05])
        store.late_s = draws.choice([0.01, 10.0])  # lands in this life or in a later one
        for i in range(draws.randrange(1, 25)):
            label = f"{life}-{i}"
            await append(writer, label, acks=Acks.LOCAL)
            acked.append(label)
            await asyncio.sleep(draws.choice([0, 0, 0.02]))
        await crash(writer)
        if draws.random() < 0.5:
            await asyncio.sleep(20)
    writer = await restart(inner, tmp_path)
    await ended(writer)
    for store in stores:
        await store.land()
    assert await values_of(inner) == acked
    assert names(tmp_path, "*") == []


@pytest.mark.parametrize("lands_first", [True, False])
async def test_i4_late_put_is_one_entry(tmp_path: Path, lands_first: bool) -> None:
    inner = MemoryStore()
    writer = await started(inner, hot_dir=tmp_path)
    store = store_of(writer.wal)
    store.plan = Script("create", object_keys.WAL, [Fault.LATE])
    store.late_s = 1.0
    await append(writer, "a", "b", acks=Acks.LOCAL)
    await append(writer, "c", acks=Acks.LOCAL)
    await crash(writer)
    if lands_first:
        await store.land()
    await ended(await restart(inner, tmp_path))
    await store.land()
    assert await values_of(inner) == ["a", "b", "c"]


async def test_i4_unknown_request_is_committed_once(inner: MemoryStore, tmp_path: Path) -> None:
    """The writer was suspended, and the proof that its entry was committed is collected."""
    writer = await started(inner, hot_dir=tmp_path)
    other = await opened(inner)
    gate = store_of(writer.wal).hold("create", object_keys.wal(2), is_after=True)
    await append(writer, "acked", acks=Acks.LOCAL)
    await gate.reached.wait()
    task = asyncio.create_task(append(writer, "asked meanwhile"))
    for i in range(3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    suspend(writer.wal, 10 * AGE_S)
    gate.opened.set()
    assert await task == [("t", 0, 4, 1)]
    await ended(writer)
    await other.refresh()
    assert other.state.partition("t", 0).high_watermark == 5
    assert other.state.hot_logs == {writer.hot_log.log_id: 0}


async def test_request_acked_during_close_is_committed(inner: MemoryStore, tmp_path: Path) -> None:
    writer = await started(inner, latency_s=0.05, hot_dir=tmp_path)
    tasks = [asyncio.create_task(append(writer, str(i), acks=Acks.LOCAL)) for i in range(10)]
    await asyncio.sleep(0)
    await ended(writer)
    assert await asyncio.gather(*tasks) == [None] * 10
    assert await values_of(inner) == [str(i) for i in range(10)]
    assert names(tmp_path, "*") == []


async def test_close_on_refusal_leaves_acked_in_file(inner: MemoryStore, tmp_path: Path) -> None:
    writer = await started(inner, latency_s=0.05, hot_dir=tmp_path)
    store_of(writer.wal).plan = Script("create", object_keys.WAL, [Fault.REFUSED] * 9)
    await append(writer, "a", acks=Acks.LOCAL)
    await append(writer, "b", acks=Acks.LOCAL)
    await writer.close()
    assert values(requests_in(tmp_path)) == ["a", "b"]
    await ended(await restart(inner, tmp_path))
    assert await values_of(inner) == ["a", "b"]


async def test_i10_accounts_are_even_when_the_disk_fails_and_callers_go(
    inner: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await started(inner, hot_dir=tmp_path)
    await append(writer, "a", acks=Acks.LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(hot_log.os, "fdatasync", failing)
        tasks = [asyncio.create_task(append(writer, "refused", acks=Acks.LOCAL)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers[1:]] == [Unavailable] * 4
    await append(writer, "b", acks=Acks.LOCAL)
    await ended(writer)
    assert await values_of(inner) == ["a", "b"]


async def test_keyed_retry_after_crash_is_answered(inner: MemoryStore, tmp_path: Path) -> None:
    writer = await started(inner, hot_dir=tmp_path)
    key = IdempotencyKey("k", b"f")
    store_of(writer.wal).plan = Script("create", object_keys.WAL, [Fault.ABSENT] * 100)
    assert await writer.append(say(writer, "once", key=key), Acks.LOCAL) is None
    assert await writer.append(say(writer, "once", key=key), Acks.LOCAL) is None
    await crash(writer)
    writer = await restart(inner, tmp_path)
    placed = await writer.append(say(writer, "once", key=key), Acks.ALL)
    assert placed == [("t", 0, 0, 1)]
    await ended(writer)
    assert await values_of(inner) == ["once"]
