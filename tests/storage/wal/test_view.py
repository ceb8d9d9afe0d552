"""The WAL's commit and refresh: the three outcomes of a PUT, races, freshness (I1 to I6).

Stores are in memory behind a `FaultyStore` per broker; time is virtual; every schedule is seeded.
"""

import asyncio
import random

import pytest

from tests.support.faults import Fault, Script, Seeded
from tests.support.records import fold
from tests.support.views import CLUSTER_ID, one, opened, store_of, values_of, with_topic
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, LogError, StoreRefused, Unavailable
from tidelog.storage.store.memory import MemoryStore

# -- the outcomes of a conditional PUT


@pytest.mark.parametrize(
    ("faults", "puts"),
    [
        ([], 1),
        ([Fault.OWN_412], 1),
        ([Fault.STORED], 1),
        ([Fault.ABSENT], 2),
        ([Fault.ABSENT, Fault.ABSENT, Fault.ABSENT], 4),
        ([Fault.ABSENT, Fault.STORED], 2),
        ([Fault.ABSENT, Fault.OWN_412], 2),
        ([Fault.LATE], 2),
        ([Fault.LATE, Fault.ABSENT, Fault.ABSENT, Fault.ABSENT, Fault.ABSENT, Fault.ABSENT], None),
        ([Fault.ABSENT, Fault.REFUSED], 3),
        ([Fault.ABSENT, Fault.REFUSED, Fault.REFUSED, Fault.STORED], 4),
        ([Fault.LATE, Fault.REFUSED, Fault.REFUSED, Fault.REFUSED, Fault.REFUSED], None),
    ],
)
async def test_i1_commit_with_any_answers_is_stored_once(inner: MemoryStore, faults, puts) -> None:
    wal = await with_topic(inner)
    store_of(wal).plan = Script("create", object_keys.WAL, faults)
    old_puts = wal.counters.puts
    (outcome,) = await wal.commit(one(wal, "a", "b"))
    assert outcome.refusal is None
    assert outcome.placements == [("t", 0, 0, 2)]
    if puts is not None:
        assert wal.counters.puts - old_puts == puts
    await store_of(wal).land()
    assert await values_of(inner) == ["a", "b"]
    assert (await fold(inner, CLUSTER_ID))[0].encode() == wal.state.encode()


@pytest.mark.parametrize(
    ("verb", "faults", "other_values", "error"),
    [
        ("create", [Fault.REFUSED], [], StoreRefused),
        ("create", [None, Fault.REFUSED], ["theirs"], StoreRefused),
        # Read back answers (the number is another's), catching up does not.
        ("get_range", [None, Fault.UNAVAILABLE], ["theirs"], Unavailable),
    ],
)
async def test_i6_refusal_of_a_free_number_is_definite(
    inner: MemoryStore, verb: str, faults, other_values: list[str], error: type[LogError]
) -> None:
    wal = await with_topic(inner)
    other = await opened(inner)
    for value in other_values:
        await other.commit(one(other, value))
    store_of(wal).plan = Script(verb, object_keys.WAL, faults)
    with pytest.raises(error):
        await wal.commit(one(wal, "never"))
    assert await values_of(inner) == other_values
    assert wal.counters.lost == len(other_values)
    await wal.commit(one(wal, "later"))
    assert wal.state.seq == 2 + len(other_values)
    assert await values_of(inner) == [*other_values, "later"]


@pytest.mark.parametrize("fault", [None, Fault.ABSENT, Fault.LATE])
async def test_i5_taken_number_is_lost_and_next_one_tried(inner: MemoryStore, fault) -> None:
    wal = await with_topic(inner)
    other = await opened(inner)
    store_of(wal).plan = Script("create", object_keys.WAL, [fault])
    gate = store_of(wal).hold("create", object_keys.wal(2), is_after=True)
    if fault is None:
        gate.is_after = False
    commit = asyncio.create_task(wal.commit(one(wal, "mine")))
    await gate.reached.wait()
    await other.commit(one(other, "theirs"))
    gate.opened.set()
    (outcome,) = await commit
    assert outcome.placements[0].base_offset == 1
    await store_of(wal).land()
    assert await values_of(inner) == ["theirs", "mine"]


async def test_reading_back_goes_on_until_the_store_answers(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    creates = Script("create", object_keys.WAL, [Fault.STORED])
    reads = Script("get_range", object_keys.WAL, [Fault.UNAVAILABLE] * 5)
    store_of(wal).plan = lambda call: creates(call) or reads(call)
    await wal.commit(one(wal, "a"))
    assert wal.counters.unknown == 1
    assert await values_of(inner) == ["a"]


async def test_unreadable_object_at_own_number_ends_commit(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    await inner.create(object_keys.wal(2), [b"not an entry at all"])
    with pytest.raises(Corrupt, match=object_keys.wal(2)):
        await wal.commit(one(wal, "x"))


# -- races


@pytest.mark.parametrize("seed", range(6))
async def test_i1_i4_i5_racing_writers_agree_and_lose_nothing(seed: int) -> None:
    """Hundreds of commits over stores that fail as they please.

    Every commit that was answered is in the log once, in its writer's order, none that was refused
    is, all states are one.
    """
    writers = 2 + seed % 2
    inner = MemoryStore()
    await with_topic(inner)
    draws = random.Random(seed)

    def latency(_) -> float:
        return draws.choice([0.001, 0.02, 0.05, 0.3])

    wals = [await opened(inner) for _ in range(writers)]
    for i, wal in enumerate(wals):
        store_of(wal).plan = Seeded(seed * 10 + i, 0.2)
        store_of(wal).latency = latency
    acked_labels: list[list[str]] = [[] for _ in wals]
    refused: list[str] = []

    async def write(number: int) -> None:
        wal = wals[number]
        for i in range(100):
            label = f"{number}-{i}"
            try:
                (outcome,) = await wal.commit(one(wal, label))
            except (StoreRefused, Unavailable):
                refused.append(label)
                continue
            assert outcome.refusal is None
            partition = wal.state.partition("t", 0)
            assert outcome.placements[0].end_offset <= partition.high_watermark
            acked_labels[number].append(label)

    await asyncio.gather(*map(write, range(writers)))
    for wal in wals:
        store_of(wal).plan = lambda _: None
        await store_of(wal).land()
        await wal.refresh()
    state, _ = await fold(inner, CLUSTER_ID)
    assert {wal.state.encode() for wal in wals} == {state.encode()}
    values = await values_of(inner)
    assert len(values) == len(set(values))
    assert not set(refused) & set(values)
    for number, labels in enumerate(acked_labels):
        assert [value for value in values if value.startswith(f"{number}-")] == labels
    assert len(refused) > 0
    assert sum(wal.counters.unknown for wal in wals) > 0
    assert sum(wal.counters.lost for wal in wals) > 0


async def test_two_tasks_of_one_broker_take_turns(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    store_of(wal).latency = lambda _: 0.05
    await asyncio.gather(*(wal.commit(one(wal, str(i))) for i in range(20)))
    assert await values_of(inner) == [str(i) for i in range(20)]
    assert wal.counters.lost == 0


# -- refresh


async def test_i3_refresh_shows_what_was_committed_before_it_was_called(inner: MemoryStore) -> None:
    """Many readers, many writers, slow reads: a refresh that began after an ack has the record.

    Refreshes at the same time share GETs.
    """
    first = await with_topic(inner)
    reader = await opened(inner, latency=lambda _: 0.06)
    acked = 0
    is_over = False

    async def write() -> None:
        nonlocal acked, is_over
        for i in range(60):
            (outcome,) = await first.commit(one(first, str(i)))
            acked = outcome.placements[0].end_offset
            await asyncio.sleep(0.017)
        is_over = True

    refreshes = 0

    async def read(number: int) -> None:
        nonlocal refreshes
        draws = random.Random(number)
        while not is_over:
            acked_end = acked
            await reader.refresh()
            refreshes += 1
            assert reader.state.partition("t", 0).high_watermark >= acked_end
            await asyncio.sleep(draws.random() * 0.02)

    await asyncio.gather(write(), *map(read, range(20)))
    assert refreshes >= 50
    assert reader.counters.gets < 150


async def test_refreshes_that_wait_for_the_same_answer_cost_one_get(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    store_of(wal).latency = lambda _: 0.05
    old_gets = wal.counters.gets
    await asyncio.gather(*(wal.refresh() for _ in range(100)))
    assert wal.counters.gets - old_gets == 1
    first = asyncio.create_task(wal.refresh())
    await asyncio.sleep(0.01)
    # The probe of `first` began before these calls: it proves nothing to them.
    old_gets = wal.counters.gets
    await asyncio.gather(*(wal.refresh() for _ in range(100)))
    await first
    assert wal.counters.gets - old_gets == 1


async def test_refresh_ends_while_others_commit_faster_than_a_get_takes(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    reader = await opened(inner, latency=lambda _: 0.06)

    async def write() -> None:
        while True:
            await first.commit(one(first, "x"))
            await asyncio.sleep(0.02)

    writing = asyncio.create_task(write())
    async with asyncio.timeout(1.0):
        await reader.refresh()
        # The turn is free again: a commit need only win a number.
    writing.cancel()
    assert reader.state.seq > 1
    assert reader.state.topic("t").name == "t"


async def test_a_cancelled_refresh_disturbs_no_other(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    store_of(wal).latency = lambda _: 0.05
    cancelled_task = asyncio.create_task(wal.refresh())
    stays = asyncio.create_task(wal.refresh())
    await asyncio.sleep(0.01)
    cancelled_task.cancel()
    await stays
    store_of(wal).plan = Script("get_range", object_keys.WAL, [Fault.UNAVAILABLE])
    only = asyncio.create_task(wal.refresh())
    await asyncio.sleep(0.01)
    only.cancel()
    await asyncio.sleep(0.1)  # its probe fails: no caller is left to receive the error
    assert cancelled_task.cancelled()
    assert only.cancelled()
    (outcome,) = await wal.commit(one(wal, "a"))
    assert outcome.refusal is None
    assert await values_of(inner) == ["a"]


async def test_refresh_without_answer_raises_and_recovers(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    store_of(wal).plan = Script("get_range", object_keys.WAL, [Fault.UNAVAILABLE])
    with pytest.raises(Unavailable):
        await wal.refresh()
    await wal.refresh()
