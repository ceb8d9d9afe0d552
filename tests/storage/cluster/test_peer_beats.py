"""Peers that do not answer are not reached: by questions, else by the store."""

import asyncio

import pytest

from tests.support.clock import ManualClock
from tests.support.cluster import Cluster
from tidelog.storage.cluster.liveness import Member, MembershipSettings
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import EntryAnnouncement, ForwardRefused, encode_announcements
from tidelog.storage.cluster.peer_beats import ANSWER_S, BEAT_S, PeerBeats
from tidelog.storage.store.memory import MemoryStore

STEP_S = 0.01
RARELY = MembershipSettings(heartbeat_interval_s=5.0, member_timeout_s=15.0)


class Peers:
    """A transport to peers that answer, refuse, or are silent."""

    def __init__(self) -> None:
        self.refusing: set[str] = set()
        self.silent: set[str] = set()
        self.in_flight = self.in_flight_max = 0

    async def forward(self, peer: Member, message: bytes) -> bytes:
        raise AssertionError("no draft")

    async def announce(self, peer: Member, message: bytes) -> None:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await self._answer(peer)
        finally:
            self.in_flight -= 1

    async def _answer(self, peer: Member) -> None:
        if peer.name in self.refusing:
            raise ForwardRefused(f"{peer.address} cannot be reached")
        if peer.name in self.silent:
            await asyncio.Event().wait()


class Pair:
    """The membership of broker `a` and that of broker `b`, in one store; `a` asks `b`."""

    def __init__(self) -> None:
        store, now_s = MemoryStore(), asyncio.get_running_loop().time
        self.peers = Peers()
        self.a, self.b = (
            Membership(store, ManualClock(number, loop_time=now_s), name, "c", RARELY)
            for number, name in enumerate("ab")
        )
        self.beats = PeerBeats(self.a, self.a.clock, self.peers)
        self.asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.b.join("http://b", 0)
        await self.a.join("http://a", 0)
        self.asking = asyncio.create_task(self.beats.run())
        await asyncio.sleep(STEP_S)

    async def stop(self) -> None:
        assert self.asking is not None
        self.asking.cancel()
        await asyncio.gather(self.asking, return_exceptions=True)

    @property
    def reached(self) -> list[str]:
        return [member.name for member in self.a.reached]

    async def look(self, *, has_beaten: bool) -> None:
        await asyncio.sleep(RARELY.heartbeat_interval_s)
        if has_beaten:
            await self.b.beat()
        await self.a.look()


async def test_a_killed_peer_is_out_at_the_next_question_and_in_when_it_answers() -> None:
    pair = Pair()
    await pair.start()
    assert pair.reached == ["b"]
    pair.peers.refusing.add("b")
    await asyncio.sleep(BEAT_S)
    assert pair.reached == []
    assert pair.a.reached_ids() == []
    assert [member.name for member in pair.a.others] == ["b"], "the store still has it"
    pair.peers.refusing.clear()
    await asyncio.sleep(BEAT_S)
    assert pair.reached == ["b"]
    await pair.stop()


async def test_a_peer_that_takes_the_question_and_is_silent_is_out_within_its_time() -> None:
    pair = Pair()
    await pair.start()
    pair.peers.silent.add("b")
    await asyncio.sleep(BEAT_S + ANSWER_S)
    assert pair.reached == []
    await asyncio.sleep(10 * (BEAT_S + ANSWER_S))
    assert pair.peers.in_flight_max == 1, "one question at a time"
    await pair.stop()


async def test_the_store_decides_where_peers_are_cut_off() -> None:
    pair = Pair()
    await pair.start()
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
    await pair.stop()


async def test_a_suspended_observer_declares_no_peer_silent() -> None:
    pair = Pair()
    await pair.start()
    pair.peers.silent.add("b")
    await asyncio.sleep(BEAT_S)
    clock = pair.a.clock
    assert isinstance(clock, ManualClock)
    clock.advance(60.0)
    await asyncio.sleep(ANSWER_S + STEP_S)
    assert pair.reached == ["b"]
    await pair.stop()


async def test_a_broker_that_is_about_to_stop_refuses_the_question_alone() -> None:
    async with Cluster() as cluster:
        broker = await cluster.start()
        broker.peer_api.on_announcements(encode_announcements([]))
        broker.drain()
        broker.peer_api.on_announcements(encode_announcements([EntryAnnouncement(0)]))
        with pytest.raises(ForwardRefused, match="about to stop"):
            broker.peer_api.on_announcements(encode_announcements([]))
