"""Live brokers: by questions to peers, else by objects in the store; the sequencer among them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import ManualClock
from tests.support.cluster import Cluster
from tests.support.properties import examples
from tidelog.storage.cluster.entry_announcer import Announcer
from tidelog.storage.cluster.liveness import (
    KafkaListener,
    LivenessTracker,
    Member,
    MembershipSettings,
    first_trusted,
    ranked,
)
from tidelog.storage.cluster.membership import ANSWER_S, Membership
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    ForwardRefused,
    decode_announcements,
    encode_announcements,
)
from tidelog.storage.cluster.peer_beats import BEAT_S, PeerBeats
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectInfo

STEP_S = 0.01
RARELY = MembershipSettings(heartbeat_interval_s=5.0, member_timeout_s=15.0)


class Entries:
    """A view of a WAL: the newest number that it knows, and those that beats named."""

    def __init__(self) -> None:
        self.seq = 0
        self.newer: list[int] = []

    def on_newer(self, seq: int) -> None:
        self.newer.append(seq)


class Peers:
    """A transport to peers that answer, refuse, or are silent."""

    def __init__(self) -> None:
        self.refusing: set[str] = set()
        self.silent: set[str] = set()
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        self.in_flight = self.in_flight_max = 0

    async def forward(self, peer: Member, message: bytes) -> bytes:
        raise AssertionError("no draft")

    async def announce(self, peer: Member, message: bytes) -> bytes:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            if peer.name in self.refusing:
                raise ForwardRefused(f"{peer.address} cannot be reached")
            if peer.name in self.silent:
                await asyncio.Event().wait()
            return b"".join(
                self.answers[peer.name](entry.body) for entry in decode_announcements(message)
            )
        finally:
            self.in_flight -= 1


class Asker:
    """A broker's membership and its beats."""

    def __init__(self, name: str, number: int, store: MemoryStore, peers: Peers) -> None:
        clock = ManualClock(number, loop_time=asyncio.get_running_loop().time)
        self.entries = Entries()
        self.membership = Membership(store, clock, name, "c", RARELY, peers)
        self.beats = PeerBeats(self.membership, clock, peers, self.entries)
        peers.answers[name] = self.beats.on_beat
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.membership.join(f"http://{self.membership.me.name}", 0)
        self.tasks.append(asyncio.create_task(self.beats.run()))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Pair:
    """Broker `a` and broker `b`, in one store; `a` asks `b`, and `b` asks `a`."""

    def __init__(self) -> None:
        self.store, self.peers = MemoryStore(), Peers()
        self.askers = [Asker(name, n, self.store, self.peers) for n, name in enumerate("ab")]
        self.a, self.b = (asker.membership for asker in self.askers)

    async def start(self) -> None:
        for asker in reversed(self.askers):
            await asker.start()
        await asyncio.sleep(STEP_S)

    async def stop(self) -> None:
        for asker in self.askers:
            await asker.stop()

    @property
    def reached(self) -> list[str]:
        return [member.name for member in self.a.reached]

    async def look(self, *, has_beaten: bool) -> None:
        await asyncio.sleep(RARELY.heartbeat_interval_s)
        if has_beaten:
            await self.b.beat()
        await self.a.look()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.stop()


async def test_a_killed_peer_is_out_at_the_next_question_and_in_when_it_answers(pair: Pair) -> None:
    assert pair.reached == ["b"]
    pair.peers.refusing.add("b")
    await asyncio.sleep(BEAT_S)
    assert pair.reached == []
    assert pair.a.reached_ids() == []
    assert [member.name for member in pair.a.others] == ["b"], "the store still has it"
    pair.peers.refusing.clear()
    await asyncio.sleep(BEAT_S)
    assert pair.reached == ["b"]


async def test_silent_peer_is_out_within_its_time(pair: Pair) -> None:
    pair.peers.silent.add("b")
    await asyncio.sleep(BEAT_S + ANSWER_S)
    assert pair.reached == []
    await asyncio.sleep(10 * (BEAT_S + ANSWER_S))
    assert pair.peers.in_flight_max == 1, "one question at a time"


async def test_the_store_decides_where_peers_are_cut_off(pair: Pair) -> None:
    await pair.look(has_beaten=True)
    pair.peers.refusing.add("b")
    await asyncio.sleep(BEAT_S)
    await pair.look(has_beaten=True)
    assert pair.reached == [], "this heartbeat may be from before"
    await pair.look(has_beaten=False)
    assert pair.reached == []
    await pair.look(has_beaten=True)
    assert pair.reached == ["b"], "it writes, so it lives, although it does not answer"
    for _ in range(4):
        await pair.look(has_beaten=False)
    assert pair.a.others == pair.a.reached == []


async def test_a_suspended_observer_declares_no_peer_silent(pair: Pair) -> None:
    pair.peers.silent.add("b")
    await asyncio.sleep(BEAT_S)
    clock = pair.a.clock
    assert isinstance(clock, ManualClock)
    clock.advance(60.0)
    await asyncio.sleep(ANSWER_S + STEP_S)
    assert pair.reached == ["b"]


async def test_a_broker_that_is_about_to_stop_refuses_the_question_alone() -> None:
    async with Cluster() as cluster:
        broker = await cluster.start()
        broker.cluster.peer_api.on_announcements(encode_announcements([]))
        broker.drain()
        broker.cluster.peer_api.on_announcements(encode_announcements([EntryAnnouncement(0)]))
        with pytest.raises(ForwardRefused, match="about to stop"):
            broker.cluster.peer_api.on_announcements(encode_announcements([]))


PEER = Member("p", "peer", "http://peer", "token", 1)


async def test_a_closed_announcer_begins_no_task() -> None:
    membership: Any = SimpleNamespace(me=PEER, others=[PEER])
    announcer = Announcer(membership, SystemClock(), transport=None, timeout_s=1.0)  # type: ignore[arg-type]
    await announcer.close()
    old_tasks = asyncio.all_tasks()
    announcer.announce(EntryAnnouncement(1))
    announcer.suspect(PEER, "no answer")
    assert asyncio.all_tasks() == old_tasks


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
        remaining_members = [peer for peer in members if peer is not lost_peer]
        assert ranked("cluster", remaining_members) == [
            peer for peer in order if peer is not lost_peer
        ]
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
    running = asyncio.create_task(membership.run(lambda: False))
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
