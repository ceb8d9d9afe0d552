"""A process knows its own entries from those of a copy, also those that its view never read."""

import pytest

from tests.storage.state.test_access import apply
from tests.support.views import AGE_S, checkpoint_and_collect, one, opened, suspend, with_topic
from tidelog.storage.codec.entry import GENESIS, Entry
from tidelog.storage.core.errors import Fenced
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.clone_fence import CloneFence


def own_entry(seq: int, at_ms: int) -> Entry:
    return Entry(4, seq, GENESIS, b"e", "w", at_ms, [], [])


def state_with_an_entry_at(at_ms: int) -> ClusterState:
    """A state whose last entry under the name `w` has this time."""
    state = ClusterState("c")
    apply(state, [], at_ms=at_ms)
    return state


@pytest.mark.parametrize(
    ("puts_ms", "loaded_ms", "is_fenced"),
    [
        ([1000], 1000, False),
        ([1000, 2000], 1000, False),  # a PUT without an answer, that the chain does not have
        ([1000], 1001, True),
        ([1001], 1000, True),
        ([], 1000, True),
    ],
)
def test_unknown_time_is_fenced(puts_ms: list[int], loaded_ms: int, is_fenced: bool) -> None:
    fence = CloneFence("w")
    for seq, at_ms in enumerate(puts_ms):
        fence.add(b"hash %d" % seq, own_entry(seq, at_ms))
    fence.check_loaded(state_with_an_entry_at(loaded_ms))
    if is_fenced:
        with pytest.raises(Fenced, match="entry 1"):
            fence.check_fence()
    else:
        fence.check_fence()


def test_check_loaded_of_a_state_without_an_entry_of_the_writer_fences_nothing() -> None:
    fence = CloneFence("another writer")
    fence.add(b"hash", own_entry(1, 5000))
    fence.check_loaded(state_with_an_entry_at(1000))
    fence.check_fence()


@pytest.mark.parametrize("is_copy", [True, False])
async def test_view_past_entries_of_copy_is_fenced(inner: MemoryStore, is_copy: bool) -> None:
    """No entry of the copy is left to be read: the checkpoint covers them, and they are gone."""
    live = await with_topic(inner)
    other = await opened(inner)
    neighbour = await opened(inner)
    if is_copy:
        other.writer = other.clone_fence.writer = live.writer
        other.clock.advance(1.0)
    await other.commit(one(other, "a"))
    await neighbour.commit(one(neighbour, "b"))
    await checkpoint_and_collect(neighbour, inner)
    suspend(live, AGE_S + 1)
    await live.ensure_view()
    assert live.state.seq == neighbour.state.seq
    if is_copy:
        with pytest.raises(Fenced):
            live.clone_fence.check_fence()
    else:
        live.clone_fence.check_fence()
