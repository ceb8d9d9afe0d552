"""Membership: this broker's liveness object, and the live peers.

A broker overwrites its object and lists the others every few seconds while it is in doubt: a peer
does not answer, or cannot, or knows other brokers. While all is quiet (cluster.peer_beats), it
writes rarely, and only the first in rank lists. So an object is no evidence of death: a broker that
finds an old one asks the object's broker.

Membership is soft state: it does not decide what is in the log. **On a crash** at any moment: the
liveness object stays, without new heartbeats. Each other broker measures the time without a
heartbeat or an answer. After `sweep_after_s`, any broker deletes the object.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable

import msgspec

from tidelog.storage.cluster.liveness import (
    PROTOCOL,
    KafkaListener,
    LivenessTracker,
    Member,
    ranked,
)
from tidelog.storage.cluster.messages import QUESTION, Notice
from tidelog.storage.cluster.peer_transport import NO_PEERS, PeerTransport
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import LogError, ObjectNotFound
from tidelog.storage.core.log_settings import MembershipSettings
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.store.object_store import ObjectStore

log = logging.getLogger("tidelog.members")

HEARTBEATS_OF_SILENT = 2
"""A peer that does not answer this broker counts as reached again after so many heartbeats in the
store. The first one may have been written before the peer stopped."""
ANSWER_S = 1.0
"""Longest wait for a peer's answer to a question, with the connection."""


class Membership:
    """One broker's membership, owned by one event loop. Until `join` the broker has no peers."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        name: str,
        cluster_id: str,
        settings: MembershipSettings,
        transport: PeerTransport = NO_PEERS,
    ) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.me = Member(
            clock.new_id().hex(),
            name,
            "",
            clock.new_id().hex(),
            clock.now_ms(),
            level=format_levels.NEWEST,
            writes_rarely=True,
        )
        self._transport = transport
        self.cluster_id = cluster_id
        self.others: list[Member] = []
        """Live peers, by their answers and their heartbeats in the store."""
        self.gone: list[Member] = []
        """Brokers whose heartbeats ended without a clean stop, until `sweep_after_s`."""
        self.ranking: list[Member] = [self.me]
        """The live peers and this broker, the sequencer first."""
        self._members_hash = _hash_of([self.me.id])
        self._view = LivenessTracker(settings)
        self._known: dict[str, Member | None] = {}
        # By the id of a silent peer: the number of its heartbeats when it did not answer.
        self._silent: dict[str, int] = {}
        # By the id of a broker that said it is leaving: whether it has released its REST groups.
        self._leavers: dict[str, bool] = {}
        self._is_leaving = False
        self._has_news = asyncio.Event()
        self._wrote_s = -math.inf
        """Boot time of the last heartbeat that was written."""
        self._is_looked_up = False
        """Whether the last listing succeeded."""
        self._is_write_due = self._was_quiet = False
        self._beat: asyncio.Task[None] | None = None
        # Boot time at which the first heartbeat after the last successful one began. None if there
        # was none after it.
        self._failing_s: float | None = None
        self._failure = ""

    async def join(
        self, address: str, port: int, kafka: tuple[KafkaListener, ...] = (), zone: str = ""
    ) -> None:
        """Write this broker's liveness object, and find the peers; then the caller must call `run`.

        `address` is for peers; `port` and `kafka` are for clients.
        """
        self.me = msgspec.structs.replace(
            self.me, address=address, port=port, kafka=kafka, zone=zone
        )
        await self._try_beat()
        await self.look_again()

    async def run(self, is_quiet: Callable[[], bool]) -> None:
        """Write heartbeats and list the peers, rarely while `is_quiet`. Does not return."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self.settings.heartbeat_interval_s
        while True:
            try:
                async with asyncio.timeout_at(next_s):
                    await self._has_news.wait()
            except TimeoutError:
                await self._do_due(is_quiet=is_quiet())
                next_s = loop.time() + self.settings.heartbeat_interval_s
            else:
                await self.look_again()
                self._has_news.clear()

    async def _do_due(self, *, is_quiet: bool) -> None:
        settings, now_s = self.settings, self.clock.boot_s()
        is_late = now_s >= self._wrote_s + settings.quiet_interval_s
        if not is_quiet or is_late or self._is_write_due or self._failing_s is not None:
            await self._try_beat()
        is_first = self.ranking[0].id == self.me.id
        is_late = is_first and now_s >= self._view.looked_s + settings.quiet_look_s
        if not is_quiet or is_late or not self._is_looked_up:
            await self.look_again()
        self._was_quiet = is_quiet

    def why_failing(self) -> str:
        """Return why no heartbeat reached the store for `member_timeout_s`, or "" if one did.

        The time begins with the first heartbeat that failed.
        """
        failing_s = 0.0 if self._failing_s is None else self.clock.boot_s() - self._failing_s
        if failing_s <= self.settings.member_timeout_s:
            return ""
        return f"no heartbeat was written for {failing_s:.0f} s: {self._failure}"

    def test_writing(self, age_max_s: float) -> None:
        """Write a heartbeat soon, if the last one is older than this: `why_failing` then knows."""
        self._is_write_due = self.clock.boot_s() > self._wrote_s + age_max_s

    # -- brokers that join or stop

    def on_notice(self, notice: Notice) -> None:
        """Handle the news of a peer. A peer that joined is looked up soon."""
        if notice.is_leaving:
            self._leavers[notice.broker_id] = notice.has_released
            self._set(self.others)
        elif all(member.id != notice.broker_id for member in self.others):
            self._has_news.set()

    def on_beat(self, broker_id: str) -> None:
        """Handle a beat of a peer: it lives. A peer that is not known is looked up soon."""
        key = object_keys.broker(broker_id)
        if self._known.get(key) is not None:
            self._hear(key)
        else:
            self.look_soon()

    def look_soon(self) -> None:
        """List the brokers now, unless they were listed within an interval of heartbeats."""
        if self.clock.boot_s() >= self._view.looked_s + self.settings.heartbeat_interval_s:
            self._has_news.set()

    @property
    def members_hash(self) -> bytes:
        """A hash of the ids of the live brokers, this one included."""
        return self._members_hash

    @property
    def may_miss_brokers(self) -> bool:
        """Whether a broker may live that needs heartbeats.

        It has an older version, which knows no beats. Or it does not answer: it is dead or cut off,
        and no broker knows which, until its object is swept. Or the last listing failed.
        """
        if not self._is_looked_up:
            return True
        members = self._known.values()
        return bool(self.gone) or any(
            peer is not None and not peer.writes_rarely for peer in members
        )

    def begin_leaving(self) -> None:
        """Give this broker's duties to the next in rank, as far as this broker decides it.

        The peers must get a Notice.
        """
        self._is_leaving = True
        self._set(self.others)

    @property
    def is_leaving(self) -> bool:
        return self._is_leaving

    def has_released(self, broker_id: str) -> bool:
        """Return whether a leaving peer said that it serves no member of a REST group any more."""
        return self._leavers.get(broker_id, False)

    async def look_again(self) -> None:
        """Find the live peers now, before the next heartbeat. Logs an error of the store."""
        with surviving(log, "listing the live brokers"):
            await self.look()

    def is_first_for(self, task: str) -> bool:
        """Return whether this broker does the task. Brokers may disagree for a while."""
        return ranked(f"{self.cluster_id}/{task}", self.ranking)[0].id == self.me.id

    def is_silent(self, peer: Member, why: str) -> None:
        """Record that the peer does not answer this broker."""
        if peer.id not in self._silent:
            log.warning("broker %s does not answer: %s", peer.name, why)
            self._silent[peer.id] = self._view.changes(object_keys.broker(peer.id))

    def answers(self, peer: Member) -> None:
        """Record that the peer answers this broker."""
        self._hear(object_keys.broker(peer.id))
        if self._silent.pop(peer.id, None) is not None:
            log.info("broker %s answers", peer.name)

    def reached_ids(self) -> list[str]:
        return [member.id for member in self.reached]

    @property
    def reached(self) -> list[Member]:
        """The live peers that are not leaving and that answer this broker.

        A peer that did not answer counts again after its next heartbeat.
        """
        silent = self._silent
        return [
            member
            for member in self.others
            if member.id not in self._leavers
            and (
                member.id not in silent
                or self._view.changes(object_keys.broker(member.id))
                >= silent[member.id] + HEARTBEATS_OF_SILENT
            )
        ]

    async def leave(self) -> None:
        """Delete this broker's liveness object; call after `run` has ended."""
        self.others, self.ranking = [], [self.me]
        if self._beat is not None:  # a PUT in flight could be stored after the delete
            await asyncio.wait([self._beat])
        with surviving(log, "deleting the liveness object"):  # if it stays, it has no heartbeats
            await self.store.delete([object_keys.broker(self.me.id)])

    async def _try_beat(self) -> None:
        if self._failing_s is None:
            self._failing_s, self._failure = self.clock.boot_s(), "no answer"
        with surviving(log, "writing the liveness object"):
            try:
                await self.beat()
            except Exception as error:
                self._failure = str(error)
                raise
            self._failing_s = None

    async def beat(self) -> None:
        self.me = msgspec.structs.replace(self.me, beat=self.me.beat + 1)
        # Every second heartbeat is a byte longer. Its line in the listing then differs from the
        # line before, even if the store rounds times to seconds.
        body = msgspec.json.encode(self.me) + b" " * (self.me.beat % 2)
        put = self.store.put(object_keys.broker(self.me.id), [body])
        self._beat = asyncio.create_task(put, name="tidelog-beat")
        started_s = self.clock.boot_s()
        await asyncio.shield(self._beat)
        self._wrote_s, self._is_write_due = started_s, False

    async def look(self) -> None:
        """Find the live peers: one LIST, one GET for each new broker, questions to the old ones."""
        now_s = self.clock.boot_s()
        self._is_looked_up = False
        infos = [info async for info in self.store.list(object_keys.BROKERS)]
        pause_s = self.settings.quiet_look_s if self._was_quiet else 0.0
        self._view.look(now_s, infos, store_ms=self.store.seen_ms, pause_s=pause_s)
        mine = object_keys.broker(self.me.id)
        listed = [key for key in self._view.listed if key != mine]
        old = {key: self._known[key] for key in listed if key in self._known}
        self._known = {key: old[key] if key in old else await self._read(key) for key in listed}
        live = set(self._view.live)
        self._rank()
        await asyncio.gather(
            *(
                self._ask(peer)
                for key, peer in self._known.items()
                if peer is not None and peer.writes_rarely and not (key in old and key in live)
            )
        )
        self._is_looked_up = True
        self._rank()
        if forgotten := [key for key in self._view.forgotten if key != mine]:
            log.info("deleting %d liveness objects of stopped brokers", len(forgotten))
            await self.store.delete(forgotten)

    async def _ask(self, peer: Member) -> None:
        """Ask a broker that is new here, or silent, whether it answers."""
        # Heartbeats wait for the answer.
        wait_s = min(ANSWER_S, self.settings.heartbeat_interval_s / 2)
        try:
            async with asyncio.timeout(wait_s):
                await self._transport.announce(peer, QUESTION)
        except (LogError, TimeoutError) as error:
            log.info("broker %s does not answer yet: %s", peer.name, str(error) or "silence")
        else:
            self._view.hear(object_keys.broker(peer.id))

    def _hear(self, key: str) -> None:
        self._view.hear(key)
        peer = self._known.get(key)
        if peer is not None and all(member.id != peer.id for member in self.others):
            self._rank()

    def _rank(self) -> None:
        """Set the live peers, by what the tracker knows."""
        live = set(self._view.live)
        peers = [(key in live, peer) for key, peer in self._known.items() if peer is not None]
        self._set([member for is_live, member in peers if is_live])
        self.gone = self._not_replaced([member for is_live, member in peers if not is_live])

    def _not_replaced(self, silent: list[Member]) -> list[Member]:
        """Return the brokers without a live one of their name or address that started later."""
        live = [self.me, *self.others]
        return [
            member
            for member in silent
            if not any(
                member.started_ms <= other.started_ms
                and (member.name == other.name or member.address == other.address)
                for other in live
            )
        ]

    async def _read(self, key: str) -> Member | None:
        try:
            member = msgspec.json.decode(await self.store.get(key), type=Member)
        except ObjectNotFound:
            return None  # deleted since the listing
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s is not a valid liveness object: %s", key, error)
            return None
        if member.protocol != PROTOCOL or object_keys.broker(member.id) != key:
            why = f"version {member.protocol} of the messages, this broker has {PROTOCOL}"
            log.warning("%s has the id %s and %s: it is no peer", key, member.id, why)
            return None
        return member

    def _set(self, other_members: list[Member]) -> None:
        old_ids, was = {member.id for member in self.others}, self.ranking[0]
        self.others = other_members
        member_ids = {member.id for member in other_members}
        self._members_hash = _hash_of([self.me.id, *member_ids])
        self._silent = {
            member_id: beats for member_id, beats in self._silent.items() if member_id in member_ids
        }
        for member_id in old_ids - member_ids:
            self._leavers.pop(member_id, None)
        staying = [member for member in other_members if member.id not in self._leavers]
        mine = [] if self._is_leaving and staying else [self.me]
        self.ranking = ranked(self.cluster_id, [*mine, *staying])
        if member_ids != old_ids or was.id != self.ranking[0].id:
            first = self.ranking[0]
            sequencer_name = "this broker" if first.id == self.me.id else f"broker {first.name}"
            log.info("%d live brokers; the sequencer is %s", len(other_members) + 1, sequencer_name)


def _hash_of(broker_ids: list[str]) -> bytes:
    return hashlib.blake2b("/".join(sorted(broker_ids)).encode(), digest_size=8).digest()
