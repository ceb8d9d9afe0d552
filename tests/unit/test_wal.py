"""The WAL's commit and view: the three outcomes of a PUT, races, zombies, checkpoints (I1 to I6).

Stores are in memory behind a `FaultyStore` per broker; time is virtual; every schedule is seeded.
"""

import asyncio
import itertools
import random

import pytest

from storage import entry as entries
from storage import keys
from storage.errors import CommitUnknown, Corrupt, StoreRefused, StoreUnfit, Unavailable
from storage.objectstore import MemoryStore
from storage.state import ClusterState
from storage.wal import Wal, WalSettings
from tests.support.clock import ManualClock
from tests.support.faults import Fault, FaultyStore, Plan, Script, Seeded
from tests.support.records import creating, draft, fold, request, rows, tail_values
from tests.support.vloop import run

CLUSTER_ID = "c0ffee"
AGE_S = 600.0
HOUR_S = 3600.0
_numbers = itertools.count(1)


def wal_on(
    inner: MemoryStore,
    plan: Plan = lambda _: None,
    *,
    latency=None,
    settings: WalSettings | None = None,
) -> Wal:
    """A broker's view over its own faulty way to the shared store; its clock is the loop's."""
    clock = ManualClock(next(_numbers), loop_time=asyncio.get_running_loop().time)
    store = FaultyStore(inner, plan, latency=latency)
    return Wal(store, clock, f"b{clock.name}", settings or WalSettings())


async def opened(inner: MemoryStore, plan: Plan = lambda _: None, **options) -> Wal:
    wal = wal_on(inner, plan, **options)
    await wal.open(CLUSTER_ID)
    return wal


async def with_topic(inner: MemoryStore) -> Wal:
    wal = await opened(inner)
    await wal.commit(creating(wal.clock, partitions=2))
    return wal


def one(wal: Wal, *values: str):
    """A draft of one request of these values."""
    return draft(request(wal.clock, {0: rows(*values)}))


def store_of(wal: Wal) -> FaultyStore:
    assert isinstance(wal.store, FaultyStore)
    return wal.store


async def sleep_machine(wal: Wal, seconds: float) -> None:
    """This broker's machine is suspended; the others' time and the store's go on by themselves."""
    assert isinstance(wal.clock, ManualClock)
    wal.clock.advance(seconds)


async def checkpoint_and_collect(wal: Wal, inner: MemoryStore) -> None:
    """What the collector does after the retention: of the WAL only the newest entry is kept."""
    newest = await wal.checkpoint()
    await inner.delete([keys.wal(seq) for seq in range(1, newest)])


async def values_of(inner: MemoryStore) -> list[str]:
    state, _ = await fold(inner, CLUSTER_ID)
    return [str(value, "ascii") for value in await tail_values(inner, state, "t", 0)]


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
def test_i1_a_commit_is_in_the_wal_once_whatever_the_store_says(faults, puts) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).plan = Script("create", keys.WAL, faults)
        before = wal.counters.puts
        (outcome,) = await wal.commit(one(wal, "a", "b"))
        assert outcome.refusal is None
        assert outcome.placements == [("t", 0, 0, 2)]
        if puts is not None:
            assert wal.counters.puts - before == puts
        await store_of(wal).land()
        assert await values_of(inner) == ["a", "b"]
        assert (await fold(inner, CLUSTER_ID))[0].encode() == wal.state.encode()

    run(main)


def test_i6_a_refusal_before_anything_was_under_way_is_a_definite_no() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).plan = Script("create", keys.WAL, [Fault.REFUSED])
        with pytest.raises(StoreRefused):
            await wal.commit(one(wal, "never"))
        await wal.commit(one(wal, "later"))
        assert wal.state.seq == 2
        assert await values_of(inner) == ["later"]

    run(main)


def test_i6_a_refusal_after_a_lost_number_is_a_definite_no_too() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        other = await opened(inner)
        await other.commit(one(other, "theirs"))
        store_of(wal).plan = Script("create", keys.WAL, [None, Fault.REFUSED])
        with pytest.raises(StoreRefused):
            await wal.commit(one(wal, "never"))
        assert await values_of(inner) == ["theirs"]
        assert wal.counters.lost == 1

    run(main)


@pytest.mark.parametrize("fault", [None, Fault.ABSENT, Fault.LATE])
def test_i5_a_number_that_another_took_is_lost_and_the_next_one_is_tried(fault) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        other = await opened(inner)
        store_of(wal).plan = Script("create", keys.WAL, [fault])
        gate = store_of(wal).hold("create", keys.wal(2), is_after=True)
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

    run(main)


def test_reading_back_goes_on_until_the_store_answers() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        creates = Script("create", keys.WAL, [Fault.STORED])
        reads = Script("get_range", keys.WAL, [Fault.UNAVAILABLE] * 5)
        store_of(wal).plan = lambda call: creates(call) or reads(call)
        await wal.commit(one(wal, "a"))
        assert wal.counters.unknown == 1
        assert await values_of(inner) == ["a"]

    run(main)


def test_i6_a_store_that_cannot_be_read_after_a_lost_number_is_a_definite_no() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        other = await opened(inner)
        await other.commit(one(other, "theirs"))
        # Read back answers (the number is another's), catching up does not.
        store_of(wal).plan = Script("get_range", keys.WAL, [None, Fault.UNAVAILABLE])
        with pytest.raises(Unavailable):
            await wal.commit(one(wal, "never"))
        await wal.commit(one(wal, "later"))
        assert await values_of(inner) == ["theirs", "later"]

    run(main)


def test_what_the_store_has_under_our_number_and_cannot_be_read_ends_the_commit() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await inner.create(keys.wal(2), [b"not an entry at all"])
        with pytest.raises(Corrupt, match=keys.wal(2)):
            await wal.commit(one(wal, "x"))

    run(main)


# -- races


@pytest.mark.parametrize("seed", range(6))
def test_i1_i4_i5_racing_writers_agree_and_lose_nothing(seed: int) -> None:
    """Hundreds of commits over stores that fail as they please: every commit that was answered is
    in the log once, in its writer's order, none that was refused is, all states are one."""

    async def main() -> None:
        writers = 2 + seed % 2
        inner = MemoryStore()
        await with_topic(inner)
        draws = random.Random(seed)

        def latency(_) -> float:
            return draws.choice([0.001, 0.02, 0.05, 0.3])

        wals = [await opened(inner, Seeded(seed * 10 + i, 0.2)) for i in range(writers)]
        for wal in wals:
            store_of(wal).latency = latency
        answered: list[list[str]] = [[] for _ in wals]
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
                held = wal.state.partition("t", 0)
                assert outcome.placements[0].end_offset <= held.high_watermark
                answered[number].append(label)

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
        for number, labels in enumerate(answered):
            assert [value for value in values if value.startswith(f"{number}-")] == labels
        assert len(refused) > 0
        assert sum(wal.counters.unknown for wal in wals) > 0
        assert sum(wal.counters.lost for wal in wals) > 0

    run(main)


def test_two_tasks_of_one_broker_take_turns() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).latency = lambda _: 0.05
        await asyncio.gather(*(wal.commit(one(wal, str(i))) for i in range(20)))
        assert await values_of(inner) == [str(i) for i in range(20)]
        assert wal.counters.lost == 0

    run(main)


# -- refresh


def test_i3_refresh_shows_what_was_committed_before_it_was_called() -> None:
    """Many readers, many writers, slow reads: a refresh that began after an ack holds that record,
    and those who ask meanwhile share GETs."""

    async def main() -> None:
        inner = MemoryStore()
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
                known = acked
                await reader.refresh()
                refreshes += 1
                assert reader.state.partition("t", 0).high_watermark >= known
                await asyncio.sleep(draws.random() * 0.02)

        await asyncio.gather(write(), *map(read, range(20)))
        assert refreshes > 100
        assert reader.counters.gets < 10 * 60

    run(main)


def test_refreshes_that_wait_for_the_same_answer_cost_one_get() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).latency = lambda _: 0.05
        before = wal.counters.gets
        await asyncio.gather(*(wal.refresh() for _ in range(100)))
        assert wal.counters.gets - before == 1
        first = asyncio.create_task(wal.refresh())
        await asyncio.sleep(0.01)
        # The probe of `first` began before these calls: it proves nothing to them.
        before = wal.counters.gets
        await asyncio.gather(*(wal.refresh() for _ in range(100)))
        await first
        assert wal.counters.gets - before == 1

    run(main)


def test_refresh_ends_while_others_commit_faster_than_a_get_takes() -> None:
    async def main() -> None:
        inner = MemoryStore()
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

    run(main)


def test_a_reader_that_goes_away_disturbs_nobody() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).latency = lambda _: 0.05
        gone = asyncio.create_task(wal.refresh())
        stays = asyncio.create_task(wal.refresh())
        await asyncio.sleep(0.01)
        gone.cancel()
        await stays

    run(main)


def test_refresh_tells_that_the_store_does_not_answer_and_recovers() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).plan = Script("get_range", keys.WAL, [Fault.UNAVAILABLE])
        with pytest.raises(Unavailable):
            await wal.refresh()
        await wal.refresh()

    run(main)


def test_i3_a_refresh_that_was_suspended_in_its_get_does_not_believe_it() -> None:
    """The GET of the next number reaches the store after that number was collected."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        gate = store_of(zombie).hold("get_range", keys.wal(2))
        refresh = asyncio.create_task(zombie.refresh())
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(zombie, 2 * HOUR_S)
        gate.opened.set()
        await refresh
        assert zombie.state.encode() == other.state.encode()

    run(main)


# -- zombies


def test_i5_a_void_view_is_loaded_anew_before_it_is_used() -> None:
    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(zombie, AGE_S + 1)
        (outcome,) = await zombie.commit(one(zombie, "mine"))
        assert outcome.placements[0].base_offset == 3
        assert zombie.counters.void == 1
        await other.refresh()
        assert other.state.encode() == zombie.state.encode()

    run(main)


@pytest.mark.parametrize("age_s", [AGE_S - 1, AGE_S + 1])
def test_ensure_view_loads_only_what_is_too_old(age_s: float) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.refresh()
        await sleep_machine(wal, age_s)
        before = len(store_of(wal).answered)
        await wal.ensure_view()
        assert (len(store_of(wal).answered) > before) is (age_s > AGE_S)

    run(main)


def test_i5_a_put_that_arrives_after_its_number_was_collected_is_void() -> None:
    """Suspended in its PUT while others went on, checkpointed and collected: the entry that it
    makes lies below the beginning of the chain, and is committed again, once."""

    async def main() -> None:
        inner = MemoryStore(now_ms=1_000)
        zombie = await with_topic(inner)
        other = await opened(inner)
        gate = store_of(zombie).hold("create", keys.wal(2))
        commit = asyncio.create_task(zombie.commit(one(zombie, "mine")))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(zombie, 2 * HOUR_S)
        inner.now_ms += int(2 * HOUR_S * 1000)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 3, 1)]
        assert zombie.counters.void == 1
        await other.refresh()
        assert other.state.partition("t", 0).high_watermark == 4
        assert other.state.encode() == zombie.state.encode()
        # The void entry is there, and nobody who starts now reads it.
        await inner.get(keys.wal(2))
        assert (await opened(inner)).state.encode() == other.state.encode()

    run(main)


def test_i5_a_void_entry_shows_by_its_follower_too() -> None:
    """As above, but the entry after the collected one is still there, of another chain."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        gate = store_of(zombie).hold("create", keys.wal(2))
        commit = asyncio.create_task(zombie.commit(one(zombie, "mine")))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await other.checkpoint()
        await inner.delete([keys.wal(1), keys.wal(2)])
        await sleep_machine(zombie, 2 * HOUR_S)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 3, 1)]

    run(main)


@pytest.mark.parametrize("fault", [None, Fault.STORED, Fault.OWN_412])
def test_i1_an_entry_that_arrived_in_time_stays_committed_though_its_writer_slept(fault) -> None:
    """Suspended after its PUT was done; others went on *after* it. Not void: once in the log."""

    async def main() -> None:
        inner = MemoryStore()
        sleeper = await with_topic(inner)
        other = await opened(inner)
        store_of(sleeper).plan = Script("create", keys.WAL, [fault])
        gate = store_of(sleeper).hold("create", keys.wal(2), is_after=True)
        commit = asyncio.create_task(sleeper.commit(one(sleeper, "mine")))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await sleep_machine(sleeper, AGE_S + 60)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 0, 1)]
        await sleeper.refresh()
        assert await values_of(inner) == ["mine", "0", "1", "2"]
        assert sleeper.state.encode() == other.state.encode()

    run(main)


def test_i1_an_idle_cluster_keeps_the_entry_of_a_writer_that_slept() -> None:
    async def main() -> None:
        inner = MemoryStore()
        sleeper = await with_topic(inner)
        gate = store_of(sleeper).hold("create", keys.wal(2), is_after=True)
        commit = asyncio.create_task(sleeper.commit(one(sleeper, "mine")))
        await gate.reached.wait()
        await sleep_machine(sleeper, 2 * HOUR_S)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 0, 1)]
        assert await values_of(inner) == ["mine"]

    run(main)


@pytest.mark.parametrize("fault", [None, Fault.STORED])
def test_i6_nothing_is_said_of_an_entry_that_was_collected_before_its_writer_woke(fault) -> None:
    """Its PUT was in time, but the proof is gone: neither acked, nor failed, nor written again."""

    async def main() -> None:
        inner = MemoryStore()
        sleeper = await with_topic(inner)
        other = await opened(inner)
        store_of(sleeper).plan = Script("create", keys.WAL, [fault])
        gate = store_of(sleeper).hold("create", keys.wal(2), is_after=True)
        commit = asyncio.create_task(sleeper.commit(one(sleeper, "mine")))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(sleeper, 2 * HOUR_S)
        inner.now_ms += int(2 * HOUR_S * 1000)
        if fault is Fault.STORED:
            # Read back: absent, so the same bytes go to the same number again: of a chain that has
            # gone on, and later than what follows.
            store_of(sleeper).plan = lambda _: None
        gate.opened.set()
        with pytest.raises(CommitUnknown):
            await commit
        # Afterwards it lives on, with a new view.
        await sleeper.commit(one(sleeper, "next"))
        await other.refresh()
        assert other.state.encode() == sleeper.state.encode()
        assert other.state.partition("t", 0).high_watermark == 5

    run(main)


def test_i6_nothing_is_said_of_a_number_that_was_taken_and_is_gone() -> None:
    """412, and then nothing to read back: it may have been one's own."""

    async def main() -> None:
        inner = MemoryStore()
        sleeper = await with_topic(inner)
        other = await opened(inner)
        store_of(sleeper).plan = Script("create", keys.WAL, [Fault.OWN_412])
        gate = store_of(sleeper).hold("create", keys.wal(2), is_after=True)
        commit = asyncio.create_task(sleeper.commit(one(sleeper, "mine")))
        await gate.reached.wait()
        await other.commit(one(other, "theirs"))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(sleeper, 2 * HOUR_S)
        gate.opened.set()
        with pytest.raises(CommitUnknown):
            await commit
        await sleeper.commit(one(sleeper, "next"))
        assert sleeper.state.partition("t", 0).high_watermark == 3

    run(main)


def test_i5_a_writer_that_slept_between_losing_and_catching_up_is_a_zombie_too() -> None:
    """It knows that its number is taken; asleep, the number is collected; then it must not take
    `absent` for `the end of the chain`, and the number for free."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        await other.commit(one(other, "0"))
        store = store_of(zombie)
        read_back = store.hold("get_range", keys.wal(2))
        commit = asyncio.create_task(zombie.commit(one(zombie, "mine")))
        await read_back.reached.wait()
        catching_up = store.hold("get_range", keys.wal(2))
        read_back.opened.set()
        await catching_up.reached.wait()
        for i in range(1, 3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await sleep_machine(zombie, 2 * HOUR_S)
        catching_up.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 3, 1)]
        await other.refresh()
        assert other.state.encode() == zombie.state.encode()

    run(main)


@pytest.mark.parametrize("verb", ["list", "get", "get_range"])
def test_i5_a_broker_that_slept_while_it_loaded_its_view_is_a_zombie_too(verb: str) -> None:
    """The newest checkpoint is read; asleep, the chain goes on, is checkpointed and collected."""

    async def main() -> None:
        inner = MemoryStore()
        other = await with_topic(inner)
        first = await other.checkpoint()
        zombie = wal_on(inner)
        key = {
            "list": keys.CHECKPOINTS,
            "get": keys.checkpoint(first),
            "get_range": keys.wal(first + 1),
        }[verb]
        gate = store_of(zombie).hold(verb, key, is_after=verb != "get_range")
        opening = asyncio.create_task(zombie.open(CLUSTER_ID))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        await inner.delete([keys.checkpoint(first)])
        await sleep_machine(zombie, 2 * HOUR_S)
        gate.opened.set()
        await opening
        assert zombie.state.encode() == other.state.encode()
        (outcome,) = await zombie.commit(one(zombie, "mine"))
        assert outcome.placements == [("t", 0, 3, 1)]

    run(main)


def test_a_broker_is_never_seen_with_half_a_view() -> None:
    """While a void view is loaded, nobody sees the state go back in time."""

    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.checkpoint()
        for i in range(30):
            await wal.commit(one(wal, str(i)))
        await sleep_machine(wal, AGE_S + 1)
        store_of(wal).latency = lambda _: 0.05
        loading = asyncio.create_task(wal.ensure_view())
        while not loading.done():
            assert wal.state.partition("t", 0).high_watermark == 30
            await asyncio.sleep(0.01)

    run(main)


# -- loading


class Watching:
    """A listener that writes down what it hears."""

    def __init__(self, wal: Wal) -> None:
        self.wal = wal
        self.seqs: list[int] = []
        self.resets = 0

    def on_applied(self, outcomes) -> None:
        self.seqs.append(self.wal.state.seq)

    def on_reset(self) -> None:
        self.resets += 1


def test_the_listener_hears_of_every_entry_once_in_order() -> None:
    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        watching = Watching(second)
        second.listener = watching
        for i in range(40):
            await (first if i % 3 else second).commit(one(first, str(i)))
        await second.refresh()
        assert watching.seqs == list(range(2, 42))
        assert watching.resets == 0
        await sleep_machine(second, AGE_S + 1)
        await second.ensure_view()
        assert watching.resets == 1

    run(main)


def test_a_broker_starts_from_the_newest_checkpoint_and_reads_on() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        for i in range(150):
            await wal.commit(one(wal, str(i)))
            if i in (40, 100):
                await wal.checkpoint()
        late = await opened(inner)
        assert late.state.encode() == wal.state.encode()
        assert late.counters.entries_applied == 49
        fresh = MemoryStore()
        for info in [info async for info in inner.list("wal/")]:
            await fresh.create(info.key, [await inner.get(info.key)])
        await fresh.create(keys.CLUSTER, [await inner.get(keys.CLUSTER)])
        folded = await opened(fresh, latency=lambda _: 0.06)
        assert folded.state.encode() == wal.state.encode()
        assert asyncio.get_running_loop().time() < 2.0  # entries are read many at once

    run(main)


def test_a_chain_that_takes_longer_to_read_than_a_view_lasts_is_loaded() -> (
    None
):
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        for i in range(100):
            await wal.commit(one(wal, str(i)))
        slow = wal_on(inner, latency=lambda _: 20.0, settings=WalSettings(view_age_max_s=100.0))
        await slow.open(CLUSTER_ID)
        assert slow.state.encode() == wal.state.encode()

    run(main)


def test_checkpoints_are_written_when_due_and_not_more_often() -> None:
    async def main() -> None:
        inner = MemoryStore()
        settings = WalSettings(
            checkpoint_entries=10, checkpoint_interval_s=5.0, checkpoint_entries_max=50
        )
        wal = await opened(inner, settings=settings)
        await wal.commit(creating(wal.clock))
        for i in range(45):
            await wal.commit(one(wal, str(i)))
        await asyncio.sleep(0)
        assert wal.counters.checkpoints == 0  # not rested yet
        for i in range(10):
            await wal.commit(one(wal, str(i)))
        await asyncio.sleep(0.1)
        assert wal.counters.checkpoints == 1  # rested or not, the bound is reached
        await asyncio.sleep(6)
        for i in range(10):
            await wal.commit(one(wal, str(i)))
        await asyncio.sleep(0.1)
        assert wal.counters.checkpoints == 2
        await wal.close()
        found = [info.key async for info in inner.list(keys.CHECKPOINTS)]
        for key in found:
            body = await inner.get(key)
            assert ClusterState.decode(body[12:], key).seq == keys.seq_of(key)

    run(main)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ABSENT])
def test_a_checkpoint_that_is_not_stored_stops_nothing(fault: Fault) -> None:
    async def main() -> None:
        inner = MemoryStore()
        settings = WalSettings(checkpoint_entries=5, checkpoint_interval_s=0.0)
        wal = await opened(inner, Script("create", keys.CHECKPOINTS, [fault]), settings=settings)
        await wal.commit(creating(wal.clock))
        for i in range(20):
            await wal.commit(one(wal, str(i)))
            await asyncio.sleep(0.01)
        assert [info async for info in inner.list(keys.CHECKPOINTS)]

    run(main)


def test_two_brokers_write_the_same_checkpoint() -> None:
    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        assert await first.checkpoint() == 1
        body = await inner.get(keys.checkpoint(1))
        await inner.delete([keys.checkpoint(1)])
        assert await second.checkpoint() == 1
        assert await inner.get(keys.checkpoint(1)) == body

    run(main)


def flip(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]


@pytest.mark.parametrize("damage", ["magic", "checksum", "payload", "cut", "empty", "foreign"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(damage: str) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.checkpoint()
        await wal.commit(one(wal, "a"))
        newest = await wal.checkpoint()
        await wal.commit(one(wal, "b"))
        key = keys.checkpoint(newest)
        body = await inner.get(key)
        other = Wal(MemoryStore(), ManualClock(next(_numbers)), "x")
        await other.open("another-cluster")
        await other.checkpoint()
        damaged = {
            "magic": flip(body, 0),
            "checksum": flip(body, 9),
            "payload": flip(body, len(body) - 1),
            "cut": body[: len(body) // 2],
            "empty": b"",
            "foreign": await other.store.get(keys.checkpoint(0)),
        }[damage]
        await inner.put(key, [damaged])
        assert (await opened(inner)).state.encode() == wal.state.encode()

    run(main)


def test_i5_an_older_checkpoint_whose_entries_are_collected_is_not_taken_for_the_end() -> None:
    """The newest checkpoint is damaged and what it covers was collected: the cluster is damaged,
    and to go on from the older one would commit numbers twice."""

    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.checkpoint()
        for i in range(3):
            await wal.commit(one(wal, str(i)))
        newest = await wal.checkpoint()
        await wal.commit(one(wal, "after"))
        await inner.delete([keys.wal(seq) for seq in range(1, newest + 1)])
        body = await inner.get(keys.checkpoint(newest))
        await inner.put(keys.checkpoint(newest), [flip(body, 20)])
        with pytest.raises(Corrupt, match=keys.wal(2)):
            await opened(inner)

    run(main)


def test_a_checkpoint_that_is_collected_while_it_is_looked_at_is_looked_for_again() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        first = await wal.checkpoint()
        late = wal_on(inner)
        gate = store_of(late).hold("get", keys.checkpoint(first))
        opening = asyncio.create_task(late.open(CLUSTER_ID))
        await gate.reached.wait()
        await wal.commit(one(wal, "a"))
        await checkpoint_and_collect(wal, inner)
        await inner.delete([keys.checkpoint(first)])
        gate.opened.set()
        await opening
        assert late.state.encode() == wal.state.encode()

    run(main)


def test_strange_keys_among_ours_are_passed_over() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.checkpoint()
        await inner.create("checkpoints/zzz", [b"?"])
        await inner.create("wal/zzz", [b"?"])
        await wal.commit(one(wal, "a"))
        assert (await opened(inner)).state.encode() == wal.state.encode()
        gate = store_of(wal).hold("create", keys.wal(3), is_after=True)
        commit = asyncio.create_task(wal.commit(one(wal, "b")))
        await gate.reached.wait()
        await sleep_machine(wal, AGE_S + 1)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 1, 1)]

    run(main)


# -- stores that are not fit, chains that are broken


def test_a_wal_without_its_cluster_is_refused() -> None:
    async def main() -> None:
        inner = MemoryStore()
        await with_topic(inner)
        await inner.delete([keys.CLUSTER])
        with pytest.raises(StoreUnfit, match=r"cluster\.json"):
            await opened(inner)

    run(main)


def test_a_wal_that_begins_late_without_a_checkpoint_is_refused() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        await wal.commit(one(wal, "a"))
        await inner.delete([keys.wal(1)])
        with pytest.raises(StoreUnfit, match=keys.wal(2)):
            await opened(inner)

    run(main)


def test_another_cluster_is_refused_and_left_alone() -> None:
    async def main() -> None:
        inner = MemoryStore()
        await with_topic(inner)
        wal = wal_on(inner)
        with pytest.raises(StoreUnfit, match="belongs to cluster c0ffee, not to tea"):
            await wal.open("tea")
        await wal_on(inner).open()  # whoever does not ask takes what is there

    run(main)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff", b'{"format":1}'])
def test_a_cluster_file_that_is_not_ours_is_refused(body: bytes) -> None:
    async def main() -> None:
        inner = MemoryStore()
        await inner.create(keys.CLUSTER, [body])
        with pytest.raises(StoreUnfit):
            await opened(inner)

    run(main)


def test_a_newer_format_is_refused() -> None:
    async def main() -> None:
        inner = MemoryStore()
        body = b'{"format":2,"cluster_id":"c0ffee","created_ms":1}'
        await inner.create(keys.CLUSTER, [body])
        with pytest.raises(StoreUnfit, match="format 2"):
            await opened(inner)

    run(main)


@pytest.mark.parametrize(
    "faults",
    [[Fault.ABSENT], [Fault.STORED], [Fault.OWN_412], [Fault.LATE], [Fault.ABSENT, Fault.LATE]],
)
def test_brokers_that_found_a_cluster_at_once_found_one(faults) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wals = [
            wal_on(inner, Script("create", keys.CLUSTER, faults), latency=lambda _: 0.02)
            for _ in range(3)
        ]
        await asyncio.gather(*(wal.open() for wal in wals))
        assert len({wal.cluster.cluster_id for wal in wals}) == 1
        for wal in wals:
            await store_of(wal).land()

    run(main)


def test_a_refused_founding_is_unavailable() -> None:
    async def main() -> None:
        wal = wal_on(MemoryStore(), Script("create", keys.CLUSTER, [Fault.REFUSED]))
        with pytest.raises(StoreRefused):
            await wal.open()

    run(main)


@pytest.mark.parametrize("how", ["swapped", "damaged", "other chain", "hole"])
def test_i2_a_broken_chain_is_not_read_past(how: str) -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        for i in range(6):
            await wal.commit(one(wal, str(i)))
        key = keys.wal(4)
        body = await inner.get(key)
        if how == "swapped":
            await inner.put(key, [await inner.get(keys.wal(5))])
        elif how == "damaged":
            await inner.put(key, [flip(body, 30)])
        elif how == "hole":
            await inner.delete([key])
        else:
            entry = entries.decode(body, key, seq=4, previous=None).entry
            forged = entries.Entry(entry.format, 4, bytes(32), b"id", "evil", entry.at_ms, [], [])
            await inner.put(key, [entries.encode_header(forged)[0]])
        with pytest.raises(Corrupt, match=key):
            await opened(inner)

    run(main)


def test_closing_waits_for_nothing_that_matters() -> None:
    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).latency = lambda _: 1000.0
        asking = asyncio.create_task(wal.refresh())
        await asyncio.sleep(0.01)
        await wal.close()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await (await opened(inner)).close()

    run(main)
