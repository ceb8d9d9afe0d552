"""Live brokers as one observer sees them, and the sequencer among them."""

import asyncio
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.cluster.liveness import (
    KafkaListener,
    LivenessTracker,
    Member,
    MembershipSettings,
    first_trusted,
    ranked,
)
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectInfo

SETTINGS = MembershipSettings(heartbeat_interval_s=5, member_timeout_s=15, sweep_after_s=100)


def line(key: str, modified_ms: int, size: int = 100) -> ObjectInfo:
    return ObjectInfo(key, size, modified_ms)


def member(name: str) -> Member:
    return Member(name, name, "", "", 0)


def test_a_beat_is_a_line_that_changes_and_silence_is_the_observers() -> None:
    view = LivenessTracker(SETTINGS)
    # b's clock, and the store's, may be anywhere: only that its line changes counts.
    for step in range(8):
        at_s = 1000.0 + 5 * step
        view.look(at_s, [line("a", 10**12 + step), line("b", 10**12)])
        assert ("b" in view.live) is (5 * step < 15)
        assert "a" in view.live
    view.look(1040.0, [line("a", 1), line("b", 1)])
    assert view.live == ["a", "b"], "it is back, though its time went backwards"
    view.look(1045.0, [line("a", 2)])
    assert view.live == ["a"], "it has left"


def test_who_was_silent_before_we_looked_is_not_taken_for_alive() -> None:
    view = LivenessTracker(SETTINGS)
    view.look(0.0, [line("me", 100_000), line("dead", 80_000), line("young", 90_000)])
    assert view.live == ["me", "young"]


def test_suspended_or_failing_observer_declares_no_broker_dead() -> None:
    view = LivenessTracker(SETTINGS)
    view.look(0.0, [line("a", 1), line("b", 1)])
    view.look(10_000.0, [line("a", 2), line("b", 1)])
    assert view.live == ["a", "b"]
    view.look(10_005.0, [line("a", 3), line("b", 1)])
    assert view.live == ["a"]


def test_only_what_is_silent_for_long_is_swept() -> None:
    view = LivenessTracker(SETTINGS)
    for step in range(25):
        view.look(5.0 * step, [line("a", step), line("b", 0)])
        assert view.forgotten == (["b"] if step >= 20 else [])


@examples(200)
@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=12))
def test_when_one_goes_the_others_keep_their_order(names: set[str]) -> None:
    members = [member(name) for name in sorted(names)]
    order = ranked("cluster", members)
    assert ranked("cluster", reversed(members)) == order
    for lost_peer in members:
        rest = [peer for peer in members if peer is not lost_peer]
        assert ranked("cluster", rest) == [peer for peer in order if peer is not lost_peer]
    assert first_trusted(order, {}) == order[0]
    assert first_trusted(order, {order[0].id: 1.0}) == (order[1] if len(order) > 1 else None)


def test_clusters_choose_differently() -> None:
    members = [member(str(number)) for number in range(10)]
    firsts = {ranked(f"cluster-{number}", members)[0].id for number in range(100)}
    assert len(firsts) == 10


class Threaded(MemoryStore):
    """A put goes on when its caller waits no longer, as one in a thread or at a server does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        async def work() -> None:
            self.begun.set()
            await self.goes_on.wait()
            await super(Threaded, self).put(key, parts)

        await asyncio.shield(asyncio.create_task(work()))


async def test_who_leaves_in_the_middle_of_a_beat_leaves_nothing() -> None:
    store = Threaded()
    often = MembershipSettings(heartbeat_interval_s=0.0)
    membership = Membership(store, SystemClock(), "a", "c", often)
    running = asyncio.create_task(membership.run())
    await store.begun.wait()
    running.cancel()
    await asyncio.wait([running])
    leaving = asyncio.create_task(membership.leave())
    await asyncio.wait([leaving], timeout=0.01)
    store.goes_on.set()
    await leaving
    for _ in range(3):  # of the put, if it is late
        await asyncio.sleep(0)
    assert [info.key async for info in store.list(object_keys.BROKERS)] == []


def test_the_listener_for_kafka_clients_is_in_the_liveness_object() -> None:
    listener = KafkaListener("h", 9092, 7, "eu-1a")
    member = Member("a" * 32, "n", "http://h:1", "token", 5, kafka=(listener,))
    stored = msgspec.json.encode(member)
    assert b'"kafka":[["h",9092,7,"eu-1a"]]' in stored
    assert msgspec.json.decode(stored, type=Member) == member
    # A version without the field ignores it, and this version reads what that one wrote.
    older = msgspec.json.decode(stored)
    del older["kafka"]
    assert msgspec.json.decode(msgspec.json.encode(older), type=Member).kafka == ()
