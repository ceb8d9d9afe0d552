"""Entries that peers announce: applied when they fit, and no proof of the WAL's end."""

import asyncio

import pytest

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
from tidelog.storage.codec import entry as entries
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.announced import ANNOUNCED_ENTRIES_MAX
from tidelog.storage.wal.view import TURN_WAIT_S, WalView


async def header_of(inner: MemoryStore, seq: int) -> bytes:
    body = await inner.get(object_keys.wal(seq))
    return body[: entries.header_length(body, "it")]


def gets(wal: WalView) -> int:
    return store_of(wal).count("get_range", object_keys.WAL)


async def test_announced_entries_cost_no_request_in_any_order(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    second = await opened(inner)
    for i in range(3):
        await first.commit(one(first, str(i)))
    old_gets = gets(second)
    for seq in (2, 3, 4, 3, 1):
        second.on_announced(seq, await header_of(inner, seq))
    assert second.state.encode() == first.state.encode()
    assert gets(second) == old_gets


async def test_a_gap_is_read_and_what_was_offered_beyond_it_is_kept(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    second = await opened(inner)
    for i in range(3):
        await first.commit(one(first, str(i)))
    second.on_announced(4, await header_of(inner, 4))
    await asyncio.sleep(0.1)
    assert second.state.encode() == first.state.encode()
    await first.commit(one(first, "large"))
    second.on_announced(5, b"")  # its header was too large to announce
    await asyncio.sleep(0.1)
    assert second.state.encode() == first.state.encode()
    for seq in range(100, 100 + 2 * ANNOUNCED_ENTRIES_MAX):
        second.on_announced(seq, b"x")
    assert len(second._offers) <= ANNOUNCED_ENTRIES_MAX


async def test_what_is_not_in_the_chain_is_not_taken() -> None:
    inner, other = MemoryStore(), MemoryStore()
    first = await with_topic(inner)
    second = await opened(inner)
    stranger = await with_topic(other)
    await stranger.commit(one(stranger, "another chain"))
    await first.commit(one(first, "a"))
    second.on_announced(2, await header_of(other, 2))
    second.on_announced(2, b"nonsense")
    second.on_announced(10**9, b"nonsense")
    await asyncio.sleep(0.1)
    assert second.state.encode() == first.state.encode()
    await second.refresh()
    assert not second._offers.numbers()


async def test_an_offer_during_an_own_put_waits_for_its_outcome(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    second = await opened(inner)
    gate = store_of(second).hold("create", object_keys.wal(2))
    own = asyncio.create_task(second.commit(one(second, "mine")))
    await gate.reached.wait()
    await first.commit(one(first, "theirs"))
    second.on_announced(2, await header_of(inner, 2))
    assert second.state.seq == 1
    gate.opened.set()
    (outcome,) = await own
    assert outcome.placements[0].base_offset == 1
    assert second.counters.lost == 1


async def test_i5_offers_make_a_view_no_fresher(inner: MemoryStore) -> None:
    """A broker with all announcements, but a stalled store, must not take `absent` for the end."""
    first = await with_topic(inner)
    second = await opened(inner)
    for i in range(4):
        suspend(second, AGE_S / 3)
        await first.commit(one(first, str(i)))
        second.on_announced(i + 2, await header_of(inner, i + 2))
    assert second.state.seq == 4, "the last one came to a void view"
    await checkpoint_and_collect(first, inner)
    await second.commit(one(second, "mine"))
    assert second.counters.void == 1
    await first.refresh()
    assert first.state.encode() == second.state.encode()


async def test_reader_of_expired_view_gets_error_of_stuck_commit(inner: MemoryStore) -> None:
    """The outcome of a PUT is unknown for longer than the view may be old.

    Readers get an error instead of waiting with it.
    """
    wal = await with_topic(inner)
    store_of(wal).plan = lambda call: Fault.ABSENT if call.verb == "create" else Fault.UNAVAILABLE
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


async def test_announcements_during_own_put_are_applied_at_once(inner: MemoryStore) -> None:
    """The entries after it too: one with an announced header, and one that was too large."""
    first = await with_topic(inner)
    second = await opened(inner)
    gate = store_of(second).hold("create", object_keys.wal(2), is_after=True)
    own = asyncio.create_task(second.commit(one(second, "mine")))
    await gate.reached.wait()
    await first.commit(one(first, "3"))
    await first.commit(one(first, "4"))
    second.on_announced(3, await header_of(inner, 3))
    second.on_announced(4, b"")
    gate.opened.set()
    await own
    await asyncio.sleep(0.1)
    assert second.state.encode() == first.state.encode()
