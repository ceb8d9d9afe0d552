"""Brokers that were suspended, anywhere, while others went on, checkpointed and collected (I5).

DESIGN 5. `suspend` moves one broker's clock; the hour that the WAL is kept passes for it alone.
"""

import asyncio

import pytest

from storage import keys
from storage.entry import HotMark
from storage.errors import CommitUnknown
from storage.objectstore import MemoryStore
from tests.support.faults import Fault, Script
from tests.support.records import draft, request, rows
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
from tests.support.vloop import run


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
        suspend(zombie, 2 * HOUR_S)
        gate.opened.set()
        await refresh
        assert zombie.state.encode() == other.state.encode()

    run(main)


def test_i5_a_void_view_is_loaded_anew_before_it_is_used() -> None:
    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        for i in range(3):
            await other.commit(one(other, str(i)))
        await checkpoint_and_collect(other, inner)
        suspend(zombie, AGE_S + 1)
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
        suspend(wal, age_s)
        before = len(store_of(wal).answered)
        await wal.ensure_view()
        assert (len(store_of(wal).answered) > before) is (age_s > AGE_S)

    run(main)


def test_i5_a_put_that_arrives_after_its_number_was_collected_is_not_believed() -> None:
    """Suspended in its PUT while others went on, checkpointed and collected: the entry that it
    makes lies below the beginning of the chain. With all that followed gone, it might as well have
    arrived before: unknown, and whoever commits it again (by its mark) has it in the log once."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        mine = draft(request(zombie.clock, {0: rows("mine")}, hot=HotMark("hot", 0)))
        gate = store_of(zombie).hold("create", keys.wal(2))
        commit = asyncio.create_task(zombie.commit(mine))
        await gate.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
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
        # The void entry is there, and nobody who starts now reads it.
        await inner.get(keys.wal(2))
        assert (await opened(inner)).state.encode() == other.state.encode()

    run(main)


def test_i5_a_put_that_arrives_after_its_number_was_collected_is_void() -> None:
    """As above, but the entry after the collected one is still there, and names another before it:
    void for certain, and committed again at a new number."""

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
        suspend(zombie, 2 * HOUR_S)
        gate.opened.set()
        (outcome,) = await commit
        assert outcome.placements == [("t", 0, 3, 1)]
        assert zombie.counters.void == 1
        await other.refresh()
        assert other.state.partition("t", 0).high_watermark == 4
        assert other.state.encode() == zombie.state.encode()

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
        suspend(sleeper, AGE_S + 60)
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
        suspend(sleeper, 2 * HOUR_S)
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
        suspend(sleeper, 2 * HOUR_S)
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
        suspend(sleeper, 2 * HOUR_S)
        gate.opened.set()
        with pytest.raises(CommitUnknown):
            await commit
        await sleeper.commit(one(sleeper, "next"))
        assert sleeper.state.partition("t", 0).high_watermark == 3

    run(main)


@pytest.mark.parametrize("has_begun", [True, False])
def test_i5_a_writer_that_slept_between_losing_and_catching_up_is_a_zombie(has_begun) -> None:
    """It knows that its number is taken; asleep, the number is collected; then it must not take
    `absent` for `the end of the chain`, and the number for free."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        other = await opened(inner)
        await other.commit(one(other, "0"))
        store = store_of(zombie)
        asleep = read_back = store.hold("get_range", keys.wal(2), is_after=True)
        commit = asyncio.create_task(zombie.commit(one(zombie, "mine")))
        await read_back.reached.wait()
        if has_begun:
            asleep = store.hold("get_range", keys.wal(2))
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
        suspend(zombie, 2 * HOUR_S)
        gate.opened.set()
        await opening
        assert zombie.state.encode() == other.state.encode()
        (outcome,) = await zombie.commit(one(zombie, "mine"))
        assert outcome.placements == [("t", 0, 3, 1)]

    run(main)


def test_i5_a_sleeper_that_reads_another_sleepers_void_entry_does_not_take_it() -> None:
    """Two slept at one view. One made the collected number again; the other reads that: it fits on
    what it knows, and is no part of the log. Neither its readers nor its pollers may see it."""

    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second, other = await opened(inner), await opened(inner)
        put = store_of(first).hold("create", keys.wal(2))
        commit = asyncio.create_task(first.commit(one(first, "void")))
        await put.reached.wait()
        await other.commit(one(other, "0"))
        probe, read = (store_of(second).hold("get_range", keys.wal(2)) for _ in range(2))
        refresh = asyncio.create_task(second.refresh())
        probe.opened.set()  # there is something; it falls asleep when it goes to take it
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
            def on_applied(self, outcomes) -> None:
                heard.append(second.state.partition("t", 0).high_watermark)

            def on_reset(self) -> None:
                assert second.state.encode() == other.state.encode()

        second.listener = Listening()
        read.opened.set()
        await refresh
        assert heard == []
        assert second.state.encode() == other.state.encode()

    run(main)


def test_i5_a_void_entry_before_true_ones_is_no_broken_chain_for_a_new_view() -> None:
    """Whoever loads from an older checkpoint, asleep for a while, meets it: the newest one leads
    past it."""

    async def main() -> None:
        inner = MemoryStore()
        zombie = await with_topic(inner)
        await zombie.checkpoint()
        other, late = await opened(inner), wal_on(inner)
        put = store_of(zombie).hold("create", keys.wal(2))
        commit = asyncio.create_task(zombie.commit(one(zombie, "void")))
        listed = store_of(late).hold("list", keys.CHECKPOINTS, is_after=True)
        opening = asyncio.create_task(late.open(CLUSTER_ID))
        await put.reached.wait()
        await listed.reached.wait()
        for i in range(3):
            await other.commit(one(other, str(i)))
        await other.checkpoint()
        await inner.delete([keys.wal(1), keys.wal(2)])
        suspend(zombie, 2 * HOUR_S)
        put.opened.set()
        await commit  # made again at a new number
        listed.opened.set()
        await opening
        assert late.state.encode() == zombie.state.encode()

    run(main)


def test_a_broker_is_never_seen_with_half_a_view() -> None:
    """While a void view is loaded, nobody sees the state go back in time."""

    async def main() -> None:
        inner = MemoryStore()
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

    run(main)
