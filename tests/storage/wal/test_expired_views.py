"""Brokers that were suspended, anywhere, while others went on, checkpointed and collected (I5).

DESIGN 5. `suspend` moves one broker's clock; the hour that the WAL is kept passes for it alone.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from tests.support.faults import Call, Fault, Gate, Script, Seeded
from tests.support.records import TOPIC_ID, draft, fold, request, rows, tail_values
from tests.support.views import (
    AGE_S,
    CLUSTER_ID,
    HOUR_S,
    checkpoint_and_collect,
    one,
    opened,
    store_of,
    suspend,
    values_of,
    wal_on,
    with_topic,
)
from tidelog.storage.codec.entry import Draft, HotMark
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, StoreRefused, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalSettings


async def held_commit(
    wal: WalView, draft: Draft, *, is_after: bool = False
) -> tuple[Gate, asyncio.Task[list[Outcome]]]:
    """Begin a commit whose PUT of number 2 is held before the store has it, or after."""
    gate = store_of(wal).hold("create", object_keys.wal(2), is_after=is_after)
    commit = asyncio.create_task(wal.commit(draft))
    await gate.reached.wait()
    return gate, commit


async def commit_three(wal: WalView) -> None:
    for i in range(3):
        await wal.commit(one(wal, str(i)))


async def test_i3_refresh_suspended_in_its_get_discards_the_result(inner: MemoryStore) -> None:
    """The GET of the next number reaches the store after that number was collected."""
    zombie = await with_topic(inner)
    other = await opened(inner)
    gate = store_of(zombie).hold("get_range", object_keys.wal(2))
    refresh = asyncio.create_task(zombie.refresh())
    await gate.reached.wait()
    await commit_three(other)
    await checkpoint_and_collect(other, inner)
    suspend(zombie, 2 * HOUR_S)
    gate.opened.set()
    await refresh
    assert zombie.state.encode() == other.state.encode()


async def test_i5_expired_view_is_loaded_again_before_use(inner: MemoryStore) -> None:
    zombie = await with_topic(inner)
    other = await opened(inner)
    await commit_three(other)
    await checkpoint_and_collect(other, inner)
    suspend(zombie, AGE_S + 1)
    (outcome,) = await zombie.commit(one(zombie, "mine"))
    assert outcome.placements[0].base_offset == 3
    assert zombie.counters.void == 1
    await other.refresh()
    assert other.state.encode() == zombie.state.encode()


@pytest.mark.parametrize("age_s", [AGE_S - 1, AGE_S + 1])
async def test_ensure_view_loads_only_what_is_too_old(inner: MemoryStore, age_s: float) -> None:
    wal = await with_topic(inner)
    await wal.refresh()
    suspend(wal, age_s)
    old_count = len(store_of(wal).answered)
    await wal.ensure_view()
    assert (len(store_of(wal).answered) > old_count) is (age_s > AGE_S)


async def test_i5_put_after_its_number_was_collected_is_unknown(inner: MemoryStore) -> None:
    """Suspended in its PUT while others went on, checkpointed and collected.

    The entry that it makes lies below the beginning of the chain. With all that followed gone, it
    might as well have arrived before: unknown. A broker that commits it again (by its mark) adds it
    once.
    """
    zombie = await with_topic(inner)
    other = await opened(inner)
    mine = draft(request(zombie.clock, {0: rows("mine")}, hot=HotMark("hot", 0)))
    gate, commit = await held_commit(zombie, mine)
    await commit_three(other)
    await checkpoint_and_collect(other, inner)
    suspend(zombie, 2 * HOUR_S)
    gate.opened.set()
    with pytest.raises(CommitUnknown):
        await commit
    (outcome,) = await zombie.commit(mine)
    assert outcome.placements == [("t", 0, 3, 1)]
    (outcome,) = await zombie.commit(mine)
    assert outcome.is_duplicate
    await other.refresh()
    assert other.state.partition("t", 0).high_watermark == 4
    assert other.state.encode() == zombie.state.encode()
    # The entry of the expired view is there, and no starting broker reads it.
    await inner.get(object_keys.wal(2))
    assert (await opened(inner)).state.encode() == other.state.encode()


async def test_i5_put_after_its_number_was_collected_is_committed_again(inner: MemoryStore) -> None:
    """As above, but the entry after the collected one is still there.

    It names another before it, so the PUT is void for certain, and committed again at a new number.
    """
    zombie = await with_topic(inner)
    other = await opened(inner)
    gate, commit = await held_commit(zombie, one(zombie, "mine"))
    await commit_three(other)
    await other.checkpoint()
    await inner.delete([object_keys.wal(1), object_keys.wal(2)])
    suspend(zombie, 2 * HOUR_S)
    gate.opened.set()
    (outcome,) = await commit
    assert outcome.placements == [("t", 0, 3, 1)]
    assert zombie.counters.void == 1
    await other.refresh()
    assert other.state.partition("t", 0).high_watermark == 4
    assert other.state.encode() == zombie.state.encode()


@pytest.mark.parametrize("fault", [None, Fault.STORED, Fault.OWN_412])
async def test_i1_entry_of_suspended_writer_stays_committed(inner: MemoryStore, fault) -> None:
    """Suspended after its PUT was done; others went on *after* it. Not void: once in the log."""
    suspended = await with_topic(inner)
    other = await opened(inner)
    store_of(suspended).plan = Script("create", object_keys.WAL, [fault])
    gate, commit = await held_commit(suspended, one(suspended, "mine"), is_after=True)
    await commit_three(other)
    suspend(suspended, AGE_S + 60)
    gate.opened.set()
    (outcome,) = await commit
    assert outcome.placements == [("t", 0, 0, 1)]
    await suspended.refresh()
    assert await values_of(inner) == ["mine", "0", "1", "2"]
    assert suspended.state.encode() == other.state.encode()


async def test_i1_idle_cluster_keeps_the_entry_of_a_suspended_writer(inner: MemoryStore) -> None:
    suspended = await with_topic(inner)
    gate, commit = await held_commit(suspended, one(suspended, "mine"), is_after=True)
    suspend(suspended, 2 * HOUR_S)
    gate.opened.set()
    (outcome,) = await commit
    assert outcome.placements == [("t", 0, 0, 1)]
    assert await values_of(inner) == ["mine"]


@pytest.mark.parametrize("fault", [None, Fault.STORED])
async def test_i6_collected_entry_of_suspended_writer_is_unknown(inner: MemoryStore, fault) -> None:
    """Its PUT was in time, but the proof is gone: neither acked, nor failed, nor written again."""
    suspended = await with_topic(inner)
    other = await opened(inner)
    store_of(suspended).plan = Script("create", object_keys.WAL, [fault])
    gate, commit = await held_commit(suspended, one(suspended, "mine"), is_after=True)
    await commit_three(other)
    await checkpoint_and_collect(other, inner)
    suspend(suspended, 2 * HOUR_S)
    inner.now_ms += int(2 * HOUR_S * 1000)
    if fault is Fault.STORED:
        # Read back: absent, so the same bytes go to the same number again: of a chain that has
        # gone on, and later than what follows.
        store_of(suspended).plan = lambda _: None
    gate.opened.set()
    with pytest.raises(CommitUnknown):
        await commit
    # Afterwards it lives on, with a new view.
    await suspended.commit(one(suspended, "next"))
    await other.refresh()
    assert other.state.encode() == suspended.state.encode()
    assert other.state.partition("t", 0).high_watermark == 5


async def test_i6_number_that_was_taken_and_is_gone_is_unknown(inner: MemoryStore) -> None:
    """412, and then nothing to read back: it may have been one's own."""
    suspended = await with_topic(inner)
    other = await opened(inner)
    store_of(suspended).plan = Script("create", object_keys.WAL, [Fault.OWN_412])
    gate, commit = await held_commit(suspended, one(suspended, "mine"), is_after=True)
    await other.commit(one(other, "theirs"))
    await checkpoint_and_collect(other, inner)
    suspend(suspended, 2 * HOUR_S)
    gate.opened.set()
    with pytest.raises(CommitUnknown):
        await commit
    await suspended.commit(one(suspended, "next"))
    assert suspended.state.partition("t", 0).high_watermark == 3


@pytest.mark.parametrize("has_begun", [True, False])
async def test_i5_writer_suspended_after_lost_put_reloads(inner: MemoryStore, has_begun) -> None:
    """It has read that its number is taken.

    While it is suspended, the number is collected. Then it must not take `absent` for the end of
    the chain, and the number for free.
    """
    zombie = await with_topic(inner)
    other = await opened(inner)
    await other.commit(one(other, "0"))
    store = store_of(zombie)
    asleep = read_back = store.hold("get_range", object_keys.wal(2), is_after=True)
    commit = asyncio.create_task(zombie.commit(one(zombie, "mine")))
    await read_back.reached.wait()
    if has_begun:
        asleep = store.hold("get_range", object_keys.wal(2))
        read_back.opened.set()
        await asleep.reached.wait()
    for i in range(1, 3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    suspend(zombie, 2 * HOUR_S)
    asleep.opened.set()
    (outcome,) = await commit
    assert outcome.placements == [("t", 0, 3, 1)]
    await other.refresh()
    assert other.state.encode() == zombie.state.encode()


@pytest.mark.parametrize("verb", ["list", "get", "get_range"])
async def test_i5_broker_suspended_during_load_loads_again(inner: MemoryStore, verb: str) -> None:
    """The newest checkpoint is read; then the chain grows, is checkpointed, collected."""
    other = await with_topic(inner)
    first = await other.checkpoint()
    zombie = wal_on(inner)
    key = {
        "list": object_keys.CHECKPOINTS,
        "get": object_keys.checkpoint(first),
        "get_range": object_keys.wal(first + 1),
    }[verb]
    gate = store_of(zombie).hold(verb, key, is_after=verb != "get_range")
    opening = asyncio.create_task(zombie.open(CLUSTER_ID))
    await gate.reached.wait()
    await commit_three(other)
    await checkpoint_and_collect(other, inner)
    await inner.delete([object_keys.checkpoint(first)])
    suspend(zombie, 2 * HOUR_S)
    gate.opened.set()
    opened_late = await opening
    assert opened_late.state.encode() == other.state.encode()
    (outcome,) = await opened_late.commit(one(opened_late, "mine"))
    assert outcome.placements == [("t", 0, 3, 1)]


async def test_i5_entry_of_another_expired_view_is_ignored(inner: MemoryStore) -> None:
    """Two brokers were suspended with the same view.

    One created the collected number again; the other reads that entry: it fits its view, and is no
    part of the log. Readers must not see it.
    """
    first = await with_topic(inner)
    second, other = await opened(inner), await opened(inner)
    put = store_of(first).hold("create", object_keys.wal(2))
    commit = asyncio.create_task(first.commit(one(first, "void")))
    await put.reached.wait()
    await other.commit(one(other, "0"))
    probe, read = (store_of(second).hold("get_range", object_keys.wal(2)) for _ in range(2))
    refresh = asyncio.create_task(second.refresh())
    probe.opened.set()  # there is an entry; the broker is suspended when it reads it
    await read.reached.wait()
    for i in range(1, 3):
        await other.commit(one(other, str(i)))
    await checkpoint_and_collect(other, inner)
    for wal in (first, second):
        suspend(wal, 2 * HOUR_S)
    put.opened.set()
    with pytest.raises(CommitUnknown):
        await commit
    heard: list[int] = []

    class Listening:
        def on_applied(self, entry, applied) -> None:
            heard.append(second.state.partition("t", 0).high_watermark)

        def on_reset(self) -> None:
            assert second.state.encode() == other.state.encode()

    second.subscribers.append(Listening())
    read.opened.set()
    await refresh
    assert heard == []
    assert second.state.encode() == other.state.encode()


async def test_i5_entry_of_an_expired_view_breaks_no_new_view(inner: MemoryStore) -> None:
    """A broker that loads from an older checkpoint and is suspended reads it.

    The newest checkpoint leads past it.
    """
    zombie = await with_topic(inner)
    await zombie.checkpoint()
    other, late = await opened(inner), wal_on(inner)
    put = store_of(zombie).hold("create", object_keys.wal(2))
    commit = asyncio.create_task(zombie.commit(one(zombie, "void")))
    listed = store_of(late).hold("list", object_keys.CHECKPOINTS, is_after=True)
    opening = asyncio.create_task(late.open(CLUSTER_ID))
    await put.reached.wait()
    await listed.reached.wait()
    await commit_three(other)
    await other.checkpoint()
    await inner.delete([object_keys.wal(1), object_keys.wal(2)])
    suspend(zombie, 2 * HOUR_S)
    put.opened.set()
    await commit  # made again at a new number
    listed.opened.set()
    assert (await opening).state.encode() == zombie.state.encode()


async def test_a_broker_is_never_seen_with_half_a_view(inner: MemoryStore) -> None:
    """While an expired view is loaded again, no reader sees the state go back in time."""
    wal = await with_topic(inner)
    await wal.checkpoint()
    for i in range(30):
        await wal.commit(one(wal, str(i)))
    suspend(wal, AGE_S + 1)
    store_of(wal).latency = lambda _: 0.05
    loading = asyncio.create_task(wal.ensure_view())
    while not loading.done():
        assert wal.state.partition("t", 0).high_watermark == 30
        await asyncio.sleep(0.01)


# -- days of suspensions


DAYS = 4
BROKERS = 5
SLEEPERS = {2, 3, 4}
SETTINGS = WalSettings(checkpoint_entries=25, checkpoint_interval_s=60.0)


class Archive(MemoryStore):
    """A store whose clock is the loop's, and that remembers what was first under each number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MemoryStore()
        self.second_times: list[str] = []

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        self.now_ms = int(asyncio.get_running_loop().time() * 1000)
        outcome = await super().create(key, parts)
        if outcome is Created.DONE and await self.first.create(key, parts) is Created.EXISTS:
            self.second_times.append(key)
        return outcome

    async def collect(self) -> None:
        """WAL entries that a checkpoint covers, an hour after they were made; the newest stays."""
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        covered = [info.key async for info in self.list(object_keys.CHECKPOINTS)]
        entries = [info async for info in self.list(object_keys.WAL)]
        if covered:
            await self.delete(
                info.key
                for info in entries[:-1]
                if object_keys.seq_of(info.key) <= object_keys.seq_of(covered[-1])  # type: ignore[operator]
                and info.modified_ms < now_ms - HOUR_S * 1000
            )
            await self.delete(covered[:-1])


@pytest.mark.parametrize("seed", range(2))
async def test_i1_i5_days_of_suspensions_and_collection_lose_and_double_nothing(seed: int) -> None:
    draws = random.Random(seed)
    inner = Archive()
    await with_topic(inner)
    end_s = DAYS * 24 * HOUR_S
    loop = asyncio.get_running_loop()
    acked: list[str] = []
    never: list[str] = []
    unknown: list[str] = []

    def awake(_: Call) -> float:
        return draws.uniform(0.01, 1.0)

    def sleepy(call: Call) -> float:
        """Asked once for each way."""
        kind = draws.random() * (1 if call.verb == "create" else 10)
        if kind < 0.05:
            return draws.uniform(2.5 * HOUR_S, 12 * HOUR_S)
        return draws.uniform(600, 3000) if kind < 0.1 else draws.uniform(0.01, 1.0)

    async def collector() -> None:
        while True:
            await asyncio.sleep(600)
            await inner.collect()

    async def broker(number: int) -> None:
        wal = await opened(inner, settings=SETTINGS)
        store = store_of(wal)
        store.plan = Seeded(seed * 10 + number, 0.05)
        store.latency = sleepy if number in SLEEPERS else awake
        store.late_s = draws.choice([1.0, 100.0])
        count = 0
        while loop.time() < end_s:
            await asyncio.sleep(draws.choice([0, 1, 60, 600, 1800]))
            if draws.random() < 0.3:
                with contextlib.suppress(Unavailable):
                    await wal.refresh()
                continue
            label = f"{number}-{count}"
            count += 1
            try:
                (outcome,) = await wal.commit(one(wal, label))
            except (StoreRefused, Unavailable):
                never.append(label)
            except CommitUnknown:
                unknown.append(label)
            else:
                assert outcome.refusal is None
                acked.append(label)
        store.plan, store.latency = (lambda _: None), None
        await store.land()
        await wal.refresh()
        truth, _ = await fold(inner.first, CLUSTER_ID)
        assert wal.state.seq <= truth.seq
        await wal.close()

    collecting = asyncio.create_task(collector())
    await asyncio.gather(*map(broker, range(BROKERS)))
    collecting.cancel()
    last = await opened(inner)
    truth, _ = await fold(inner.first, CLUSTER_ID)
    assert last.state.encode() == truth.encode()
    assert truth.topics["t"].topic_id == TOPIC_ID
    values = [str(v, "ascii") for v in await tail_values(inner.first, truth, "t", 0) if v]
    assert len(values) == len(set(values))
    assert set(acked) <= set(values)
    assert not set(never) & set(values)
    assert len(acked) > 200
    assert len([info async for info in inner.list(object_keys.WAL)]) < truth.seq / 2
    assert len(inner.second_times) > 0
