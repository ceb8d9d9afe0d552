"""The announcer of committed entries to the peers; it finds whether suspected peers answer again.

Each peer has one sender, with at most one message in flight. Entries that are committed meanwhile
go into the next message, so a slow peer costs bounded memory (I10). A lost message has no effect on
results, because the peer then reads the WAL.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    Notice,
    announced_notice,
    encode_announcements,
)
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import TASK_ENDS

log = logging.getLogger("tidelog.members")

SUSPECT_S_MAX = 30.0
"""Longest time for which a peer stays suspected although it answers again."""
OUTBOX_MAX = 64
"""Largest number of announcements that wait for one peer. If there are more, the announcer drops
the oldest."""


@dataclass
class AnnouncerCounters:
    """Counters of an announcer since the process started."""

    sent: int = 0
    failed: int = 0
    received: int = 0
    useful: int = 0
    suspected: int = 0


@dataclass(eq=False)
class _Sender:
    peer: Member
    outbox: deque[EntryAnnouncement] = field(default_factory=lambda: deque(maxlen=OUTBOX_MAX))
    task: asyncio.Task[None] | None = None


class Announcer:
    """The senders of one broker, owned by one event loop. `close` ends their tasks."""

    def __init__(
        self, membership: Membership, clock: Clock, transport: PeerTransport, timeout_s: float
    ) -> None:
        self.membership = membership
        self.clock = clock
        self.transport = transport
        self.timeout_s = timeout_s
        self.counters = AnnouncerCounters()
        self.suspects: dict[str, float] = {}
        """The suspected peers, by id: the boot time until which a peer stays suspected, even if it
        answers before."""
        self._failures: dict[str, int] = {}
        self._senders: dict[str, _Sender] = {}
        self._is_closed = False

    def announce(self, entry: EntryAnnouncement, *, but: Collection[str] = ()) -> None:
        """Announce the entry to every live peer whose id is not in `but`. Do not wait."""
        zone = self.membership.me.zone_name
        if len(self._senders) > len(self.membership.others):
            self._forget_stopped()
        for peer in self.membership.others:
            if peer.id not in but:
                self.send(peer, entry.to_zone(is_near=peer.zone_name == zone))

    def send(self, peer: Member, entry: EntryAnnouncement) -> None:
        """Send an announcement to one peer. Do not wait."""
        sender = self._sender(peer)
        sender.outbox.append(entry)
        self._start(sender)

    async def notify(self, notice: Notice, timeout_s: float) -> None:
        """Send the notice to every live peer now.

        Return when each peer has answered or failed, at the latest after `timeout_s`. A peer
        without the notice learns the news by itself, later.
        """
        message = encode_announcements([announced_notice(notice)])

        async def send(peer: Member) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.transport.announce(peer, message)
            except (LogError, TimeoutError) as error:
                why = str(error) or f"no answer within {timeout_s:g} s"
                log.warning("broker %s did not get a notice: %s", peer.name, why)

        await asyncio.gather(*map(send, self.membership.others))

    def suspect(self, peer: Member, why: str) -> None:
        """Suspect the peer for a time, and then until it answers.

        Each failure doubles the time of the next suspicion, until the peer takes a draft (`trust`).
        """
        self.counters.suspected += 1
        if peer.id not in self.suspects:
            log.warning("broker %s is suspected: %s", peer.name, why)
        failures = self._failures[peer.id] = self._failures.get(peer.id, 0) + 1
        pause_s = min(self.timeout_s * 2 ** min(failures - 1, 10), SUSPECT_S_MAX)
        self.suspects[peer.id] = self.clock.boot_s() + pause_s
        self._start(self._sender(peer))

    def trust(self, peer: Member) -> None:
        """Record that the peer took a draft, and that the draft is in the chain."""
        self._failures.pop(peer.id, None)

    async def close(self) -> None:
        """End all senders.

        From now on `announce` and `suspect` begin no task, because no later call would end that
        task.
        """
        self._is_closed = True
        tasks = [sender.task for sender in self._senders.values() if sender.task is not None]
        self._senders.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sender(self, peer: Member) -> _Sender:
        return self._senders.setdefault(peer.id, _Sender(peer))

    def _start(self, sender: _Sender) -> None:
        if not self._is_closed and (sender.task is None or sender.task.done()):
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

    def _forget_stopped(self) -> None:
        """Drop senders of stopped peers. A sender with a running task drops itself."""
        live = {peer.id for peer in self.membership.others}
        for peer_id, sender in list(self._senders.items()):
            if peer_id not in live and (sender.task is None or sender.task.done()):
                self._forget(peer_id)

    def _forget(self, peer_id: str) -> None:
        self.suspects.pop(peer_id, None)
        self._failures.pop(peer_id, None)
        self._senders.pop(peer_id, None)

    async def _deliver(self, sender: _Sender) -> bool:
        """Send all waiting announcements in one message. An empty message tests the peer."""
        waiting = list(sender.outbox)
        sender.outbox.clear()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.transport.announce(sender.peer, encode_announcements(waiting))
        except TASK_ENDS:
            raise
        except BaseException as error:  # no caller handles it
            if not isinstance(error, (LogError, TimeoutError)):
                log.critical("bug in a message to a peer", exc_info=error)
            self.counters.failed += 1
            if sender.peer.id not in self.suspects:
                self.suspect(sender.peer, str(error) or f"no answer within {self.timeout_s:g} s")
            return False
        self.counters.sent += 1
        return True

    def _is_live(self, peer: Member) -> bool:
        return any(other.id == peer.id for other in self.membership.others)
