"""Entries that peers tell of: taken when they fit, and never believed for more than they say."""

import asyncio

import pytest

from storage import entry as entries
from storage import keys
from storage.errors import Unavailable
from storage.objectstore import MemoryStore
from storage.offers import OFFERED_MAX
from storage.wal import TURN_WAIT_S, Wal
from tests.support.faults import Fault
from tests.support.views import (
    AGE_S,
    HOUR_S,
    checkpoint_and_collect,
    one,
    opened,
    store_of,
    suspend,
    with_topic,
)
from tests.support.vloop import run


async def header_of(inner: MemoryStore, seq: int) -> bytes:
    body = await inner.get(keys.wal(seq))
    return body[: entries.header_length(body, "it")]


def gets(wal: Wal) -> int:
    return store_of(wal).count("get_range", keys.WAL)


def test_entries_that_are_offered_cost_no_request_in_whatever_order() -> None:
    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        for i in range(3):
            await first.commit(one(first, str(i)))
        before = gets(second)
        for seq in (2, 3, 4, 3, 1):
            second.offer(seq, await header_of(inner, seq))
        assert second.state.encode() == first.state.encode()
        assert gets(second) == before

    run(main)


def test_a_gap_is_read_and_what_was_offered_beyond_it_is_kept() -> None:
    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        for i in range(3):
            await first.commit(one(first, str(i)))
        second.offer(4, await header_of(inner, 4))
        await asyncio.sleep(0.1)
        assert second.state.encode() == first.state.encode()
        await first.commit(one(first, "large"))
        second.offer(5, b"")  # its header was too large to be told
        await asyncio.sleep(0.1)
        assert second.state.encode() == first.state.encode()
        for seq in range(100, 100 + 2 * OFFERED_MAX):
            second.offer(seq, b"x")
        assert len(second._offers) <= OFFERED_MAX

    run(main)


def test_what_is_not_in_the_chain_is_not_taken() -> None:
    async def main() -> None:
        inner, other = MemoryStore(), MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        stranger = await with_topic(other)
        await stranger.commit(one(stranger, "another chain"))
        await first.commit(one(first, "a"))
        second.offer(2, await header_of(other, 2))
        second.offer(2, b"nonsense")
        second.offer(10**9, b"nonsense")
        await asyncio.sleep(0.1)
        assert second.state.encode() == first.state.encode()
        await second.refresh()
        assert not second._offers.numbers()

    run(main)


def test_an_offer_during_an_own_put_waits_for_its_outcome() -> None:
    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        gate = store_of(second).hold("create", keys.wal(2))
        own = asyncio.create_task(second.commit(one(second, "mine")))
        await gate.reached.wait()
        await first.commit(one(first, "theirs"))
        second.offer(2, await header_of(inner, 2))
        assert second.state.seq == 1
        gate.opened.set()
        (outcome,) = await own
        assert outcome.placements[0].base_offset == 1
        assert second.counters.lost == 1

    run(main)


def test_i5_offers_make_a_view_no_fresher() -> None:
    """Told of everything but asleep to the store, it must not take `absent` for the end."""

    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        for i in range(4):
            suspend(second, AGE_S / 3)
            await first.commit(one(first, str(i)))
            second.offer(i + 2, await header_of(inner, i + 2))
        assert second.state.seq == 4, "the last one came to a void view"
        await checkpoint_and_collect(first, inner)
        await second.commit(one(second, "mine"))
        assert second.counters.void == 1
        await first.refresh()
        assert first.state.encode() == second.state.encode()

    run(main)


def test_a_reader_with_a_void_view_is_told_of_a_commit_that_is_stuck() -> None:
    """The store does not say what became of a PUT, for longer than the view may be old: readers
    are told so instead of waiting with it."""

    async def main() -> None:
        inner = MemoryStore()
        wal = await with_topic(inner)
        store_of(wal).plan = lambda call: (
            Fault.ABSENT if call.verb == "create" else Fault.UNAVAILABLE
        )
        stuck = asyncio.create_task(wal.commit(one(wal, "stuck")))
        await asyncio.sleep(1.0)
        suspend(wal, HOUR_S)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(Unavailable, match="a commit waits"):
            await wal.ensure_view()
        assert loop.time() - started_s <= TURN_WAIT_S
        store_of(wal).plan = lambda _: None
        await stuck
        await wal.ensure_view()
        assert wal.state.seq == 2

    run(main)


def test_what_is_told_during_an_own_put_is_not_left_to_the_poller() -> None:
    """Of the entries after it, too: one whose header was told, and one that was too large."""

    async def main() -> None:
        inner = MemoryStore()
        first = await with_topic(inner)
        second = await opened(inner)
        gate = store_of(second).hold("create", keys.wal(2), is_after=True)
        own = asyncio.create_task(second.commit(one(second, "mine")))
        await gate.reached.wait()
        await first.commit(one(first, "3"))
        await first.commit(one(first, "4"))
        second.offer(3, await header_of(inner, 3))
        second.offer(4, b"")
        gate.opened.set()
        await own
        await asyncio.sleep(0.1)
        assert second.state.encode() == first.state.encode()

    run(main)
