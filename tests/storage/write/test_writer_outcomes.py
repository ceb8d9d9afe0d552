"""A writer gives one answer per Idempotency-Key, and commits every record of acks=1 (I4).

Hot logs are real files; a crash leaves them as they are and the store as it is.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.faults import Fault, Script, Seeded
from tests.support.hotlogs import failing, names, requests_in, values
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
from tests.support.writers import append, ended, say, started, writing
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import IdempotencyMismatch, Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write import hot_log
from tidelog.storage.write.hot_log_file import discard, recover
from tidelog.storage.write.writer import Writer

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


async def test_acks_1_is_answered_before_the_commit_and_committed_soon(tmp_path: Path) -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=5.0, hot_dir=tmp_path)
    assert await append(writer, "a", acks=Acks.LOCAL) is None
    assert asyncio.get_running_loop().time() < 0.1
    assert values(requests_in(tmp_path)) == []  # held by a living process
    assert await append(writer, "b") == [("t", 0, 1, 1)]
    await ended(writer)
    assert await values_of(inner) == ["a", "b"]
    assert names(tmp_path, "*") == []


async def test_i6_a_refused_flush_keeps_what_was_acked_in_its_order(tmp_path: Path) -> None:
    inner = MemoryStore()
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
async def test_i4_what_was_acked_is_in_the_log_once_after_any_number_of_crashes(
    inner: MemoryStore, tmp_path: Path, seed: int
) -> None:
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
async def test_i4_put_of_a_crashed_process_may_land_late(tmp_path: Path, lands_first: bool) -> None:
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


async def test_i4_request_of_unknown_outcome_is_committed_again_once(tmp_path: Path) -> None:
    """The writer was suspended, and the proof that its entry was committed is collected."""

    inner = MemoryStore()
    writer = await started(inner, hot_dir=tmp_path)
    other = await opened(inner)
    gate = store_of(writer.wal).hold("create", object_keys.wal(2), is_after=True)
    await append(writer, "acked", acks=Acks.LOCAL)
    await gate.reached.wait()
    asked = asyncio.create_task(append(writer, "asked meanwhile"))
    for i in range(3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    suspend(writer.wal, 10 * AGE_S)
    gate.opened.set()
    assert await asked == [("t", 0, 4, 1)]
    await ended(writer)
    await other.refresh()
    assert other.state.partition("t", 0).high_watermark == 5
    assert other.state.hot_logs == {writer.hot_log.log_id: 0}


async def test_acked_while_closing_is_committed_before_its_file_goes(tmp_path: Path) -> None:
    inner = MemoryStore()
    writer = await started(inner, latency_s=0.05, hot_dir=tmp_path)
    asked = [asyncio.create_task(append(writer, str(i), acks=Acks.LOCAL)) for i in range(10)]
    await asyncio.sleep(0)
    await ended(writer)
    assert await asyncio.gather(*asked) == [None] * 10
    assert await values_of(inner) == [str(i) for i in range(10)]
    assert names(tmp_path, "*") == []


async def test_closing_on_a_store_that_refuses_leaves_acked_records_in_their_file(
    inner: MemoryStore,
    tmp_path: Path,
) -> None:
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
        asked = [asyncio.create_task(append(writer, "refused", acks=Acks.LOCAL)) for _ in range(5)]
        await asyncio.sleep(0)
        asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers[1:]] == [Unavailable] * 4
    await append(writer, "b", acks=Acks.LOCAL)
    await ended(writer)
    assert await values_of(inner) == ["a", "b"]


async def test_a_keyed_retry_after_a_crash_finds_the_first_answer(tmp_path: Path) -> None:
    inner = MemoryStore()
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
