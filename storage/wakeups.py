"""Telling peers of what was committed, and finding out whether those who are suspected answer.

One sender a peer, at most one message under way to each: what is committed meanwhile rides in the
next, so a slow peer costs memory that has a bound and nothing else (I10). Nothing depends on a
message arriving: a peer that misses one reads the WAL.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from storage.clock import Clock
from storage.errors import LogError
from storage.handover import NotTaken, Told, encode_told
from storage.members import Member
from storage.membership import Membership

log = logging.getLogger("tidelog.members")

SUSPECT_S_MAX = 30.0
"""How long a peer is left out at most before it is tried again; twice as long each time."""
OUTBOX_MAX = 64
"""Entries that one peer has not been told of yet; the oldest are left out."""


class PeerTransport(Protocol):
    """The way to other brokers. Both raise LogError when there is none."""

    async def hand_over(self, peer: Member, message: bytes) -> bytes:
        """Its answer. Raises NotTaken where it is certain that the peer has not taken it, and
        NoAnswer where it is not."""
        ...

    async def tell(self, peer: Member, message: bytes) -> None:
        """Entries that are in the chain."""
        ...


@dataclass
class WakeupCounters:
    """Since the process started."""

    sent: int = 0
    failed: int = 0
    received: int = 0
    useful: int = 0
    suspected: int = 0


@dataclass(eq=False)
class _Sender:
    peer: Member
    outbox: deque[Told] = field(default_factory=lambda: deque(maxlen=OUTBOX_MAX))
    task: asyncio.Task[None] | None = None


class Wakeups:
    """Owned by one event loop; `close` ends its tasks."""

    def __init__(
        self, membership: Membership, clock: Clock, transport: PeerTransport, timeout_s: float
    ) -> None:
        self.membership = membership
        self.clock = clock
        self.transport = transport
        self.timeout_s = timeout_s
        self.counters = WakeupCounters()
        self.suspects: dict[str, float] = {}
        """Peers that did not answer, or not well, and until when they are left out at least."""
        self._failures: dict[str, int] = {}
        self._senders: dict[str, _Sender] = {}

    def tell(self, told: Told, *, but: Collection[str] = ()) -> None:
        """Tell every live peer, soon, except those who know."""
        if len(self._senders) > len(self.membership.others):
            self._forget_the_dead()
        for peer in self.membership.others:
            if peer.id not in but:
                self._sender(peer).outbox.append(told)
                self._start(self._sender(peer))

    def suspect(self, peer: Member, why: str) -> None:
        """Leave it out for a while, twice as long each time, and until it answers a message."""
        self.counters.suspected += 1
        if peer.id not in self.suspects:
            log.warning("broker %s is left out for now: %s", peer.name, why)
        failures = self._failures[peer.id] = self._failures.get(peer.id, 0) + 1
        pause_s = min(self.timeout_s * 2 ** min(failures - 1, 10), SUSPECT_S_MAX)
        self.suspects[peer.id] = self.clock.boot_s() + pause_s
        self._start(self._sender(peer))

    def trust(self, peer: Member) -> None:
        """It did what it was asked."""
        self._failures.pop(peer.id, None)

    async def close(self) -> None:
        tasks = [sender.task for sender in self._senders.values() if sender.task is not None]
        self._senders.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sender(self, peer: Member) -> _Sender:
        return self._senders.setdefault(peer.id, _Sender(peer))

    def _start(self, sender: _Sender) -> None:
        if sender.task is None or sender.task.done():
            sender.task = asyncio.create_task(self._send(sender))

    async def _send(self, sender: _Sender) -> None:
        peer = sender.peer
        while (sender.outbox or peer.id in self.suspects) and self._is_live(peer):
            started_s = self.clock.boot_s()
            if not sender.outbox and started_s < (until_s := self.suspects[peer.id]):
                await asyncio.sleep(until_s - started_s)
                continue
            if not await self._deliver(sender):
                await asyncio.sleep(self.timeout_s)
            elif self.suspects.get(peer.id, math.inf) <= started_s:
                log.info("broker %s answers again", peer.name)
                del self.suspects[peer.id]
        if not self._is_live(peer):
            self._forget(peer.id)

    def _forget_the_dead(self) -> None:
        """Those whose senders are at work find out by themselves."""
        live = {peer.id for peer in self.membership.others}
        for peer_id, sender in list(self._senders.items()):
            if peer_id not in live and (sender.task is None or sender.task.done()):
                self._forget(peer_id)

    def _forget(self, peer_id: str) -> None:
        self.suspects.pop(peer_id, None)
        self._failures.pop(peer_id, None)
        self._senders.pop(peer_id, None)

    async def _deliver(self, sender: _Sender) -> bool:
        """Whatever waits, in one message; an empty one asks whether the peer is there."""
        told = list(sender.outbox)
        sender.outbox.clear()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.transport.tell(sender.peer, encode_told(told))
        except (LogError, TimeoutError) as error:
            self.counters.failed += 1
            if sender.peer.id not in self.suspects:
                self.suspect(sender.peer, str(error) or f"no answer within {self.timeout_s:g} s")
            return False
        self.counters.sent += 1
        return True

    def _is_live(self, peer: Member) -> bool:
        return any(other.id == peer.id for other in self.membership.others)


class NoPeers:
    """The transport of a broker that has none."""

    async def hand_over(self, peer: Member, message: bytes) -> bytes:
        raise NotTaken("there are no peers")

    async def tell(self, peer: Member, message: bytes) -> None:
        raise NotTaken("there are no peers")
