"""The coordinator of groups: it tracks the heartbeats of members and expires silent members.
`Instance` is its soft state of one member.

Each group has one coordinator, a broker, which holds soft state: each member's last heartbeat and
its instance's positions (groups.positions). The cluster state names the coordinator and its term.
Brokers may disagree on which brokers are live, but only one can act as coordinator. The reason is
that `ExpireMember` carries the term, and that a broker drops its soft state of an older term.
Heartbeats never reach the WAL.

Session timeouts use the coordinator's boot clock and pause while its process is suspended, so a
resumed broker does not expire members at once. **On a crash**: another broker takes the group
(`TakeGroup`) on the next request, or within a tick after it sees the coordinator gone. Session
timers start again. A broker that stops releases its groups before (groups.release), so the next
coordinator does not wait for HANDOVER_S.

A live coordinator that was replaced learns of its successor at its next refresh of the WAL. Until
then, both could serve a member, from different positions. A client could then get records again
whose offsets are committed, and commit the results of these records in a second transaction. So a
coordinator returns records only if its view of the WAL is younger than `VIEW_AGE_MAX_S`, and its
successor reads a member's position only `HANDOVER_S` after it took the group. (Rejected: a refresh
of the WAL at each read, because it costs a GET and the time of the GET. Rejected: a new generation
for each new coordinator, because after a crash of a broker all commits under way would be refused.)
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.storage.codec.entry import Entry
from tidelog.storage.core.actions import AnyAction, ExpireMember, TakeGroup
from tidelog.storage.core.errors import (
    BoundReached,
    CommitUnknown,
    Corrupt,
    LogError,
    StoreUnfit,
    Throttled,
    Unavailable,
    UnknownMember,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.join_limit import (
    SILENT_S,
    ClientId,
    HeldMember,
    Life,
    ShortLives,
    refusal,
)
from tidelog.storage.groups.portions import SentRead
from tidelog.storage.groups.positions import Positions
from tidelog.storage.groups.rebalance_counts import Rebalances
from tidelog.storage.groups.rendezvous import Coordinators
from tidelog.storage.log import Log
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.state.cluster_state import Applied
from tidelog.storage.state.group_types import ConsumerGroup, GroupMember

log = logging.getLogger("tidelog.groups")

VIEW_AGE_MAX_S = 1.5
"""Above the default of `poll_interval_ms`, so while the store answers, the check causes no
refresh."""
HANDOVER_S = 2.0
"""Exceeds VIEW_AGE_MAX_S by more than the clocks of two brokers drift apart in that time. Members
wait for HANDOVER_S when their coordinator is replaced."""


@dataclass(slots=True, eq=False)
class Instance:
    """A coordinator's soft state of a member. `lock` serialises reads, `finding` serialises
    searches for start positions. `sending` is done when the last response is sent or lost. `sent`
    is the last response with records until its arrival is decided (groups.deliveries). A result of
    `waiter` makes a waiting read look for records again. From `alone_s` on, no other broker serves
    the member. `damaged` are the partitions whose last read found damage. `client` is
    None if this broker did not take the join. `is_awaited` is True if the member has not read since
    the last rebalance."""

    heard_s: float
    polled_s: float
    client: ClientId | None = None
    joined_s: float = 0.0
    subscribed_s: float = 0.0
    has_subscribed: bool = False
    is_awaited: bool = False
    alone_s: float = 0.0
    under_way: int = 0
    turn: int = 0
    damaged: set[TopicIdPartition] = field(default_factory=set)
    positions: Positions = field(default_factory=Positions)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    finding: asyncio.Lock = field(default_factory=asyncio.Lock)
    sending: "asyncio.Future[None] | None" = None
    sent: SentRead | None = None
    waiter: "asyncio.Future[None] | None" = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(slots=True, eq=False)
class CoordinatedGroup:
    """A group that this broker coordinates, in one term. From `alone_s` on, no other broker serves
    its members. No session can end before `look_s`; the expiry check skips the group until
    then."""

    term: int
    since_s: float
    alone_s: float
    rebalances: Rebalances
    short_lives: ShortLives = field(default_factory=ShortLives)
    look_s: float = 0.0
    instances: dict[str, Instance] = field(default_factory=dict)


class MemberSession(NamedTuple):
    """A member after its heartbeat, in a term of its group."""

    group: ConsumerGroup
    member: GroupMember
    instance: Instance
    term: int


class Coordinator:
    """The groups that this broker coordinates; owned by the log's event loop. A call takes the
    group over from another coordinator, so callers ask `coordinators` first."""

    def __init__(self, broker: Log, coordinators: Coordinators) -> None:
        self.coordinators = coordinators
        self.led: dict[str, CoordinatedGroup] = {}
        self._log = broker
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._is_released = False
        # By group: the term in which no other broker serves members, if this broker begins it.
        self._handed_over: dict[str, int] = {}
        broker.wal.subscribers.append(self)

    async def heartbeat(self, group_id: str, member_id: str) -> MemberSession:
        """Record a heartbeat of the member. Raises UnknownMember."""
        session = self._known(group_id, member_id)
        if session is not None:
            return session
        member = self._log.state.members.member(group_id, member_id)
        if member is None:
            await self._log.wal.refresh()  # another broker may have just created the member (I3)
        self.look(group_id, member_id)
        led = await self.coordinate(group_id)
        group, member = self.look(group_id, member_id)
        instance = led.instances.get(member_id)
        if instance is None:
            instance = led.instances[member_id] = self.new_instance()
            instance.is_awaited = member_id in led.rebalances.waiting
            instance.alone_s = led.alone_s
        instance.heard_s = self._log.clock.boot_s()
        return MemberSession(group, member, instance, led.term)

    def _known(self, group_id: str, member_id: str) -> MemberSession | None:
        """If the member is known in this term (the usual case), record its heartbeat. If not,
        return None."""
        group, led = self._log.state.members.get(group_id), self.led.get(group_id)
        if group is None or led is None or group.term != led.term:
            return None
        member, instance = group.members.get(member_id), led.instances.get(member_id)
        if member is None or instance is None or group.coordinator != self.coordinators.me:
            return None
        instance.heard_s = self._log.clock.boot_s()
        return MemberSession(group, member, instance, led.term)

    def look(self, group_id: str, member_id: str) -> tuple[ConsumerGroup, GroupMember]:
        group = self._log.state.members.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None or group.is_assigned_by_clients:
            raise UnknownMember(f"group {group_id!r} has no member {member_id!r}")
        return group, member

    def revalidate(self, session: MemberSession) -> MemberSession:
        """Return the member's current state. Raises UnknownMember, or Unavailable if the group has
        moved to another coordinator."""
        group, member = self.look(session.group.group_id, session.member.member_id)
        if group.term != session.term or self._is_released:
            raise _another(group.group_id)
        return session._replace(group=group, member=member)

    async def wait_for_exclusive(self, session: MemberSession) -> MemberSession:
        """Wait until no other broker serves the member. The state then has all offsets that the
        member committed before. Raises the errors of `revalidate`."""
        left_s = session.instance.alone_s - self._log.clock.boot_s()
        if left_s > 0:
            await asyncio.sleep(left_s)
        await self._log.wal.refresh()
        return self.revalidate(session)

    async def refresh(self, session: MemberSession) -> MemberSession:
        """Return the member, from a view that is at most VIEW_AGE_MAX_S old. Raises the errors of
        `revalidate`, and Unavailable if the store answers too slowly."""
        if self._log.wal.view_age_s > VIEW_AGE_MAX_S:
            await self._log.wal.refresh()
            if self._log.wal.view_age_s > VIEW_AGE_MAX_S:
                raise Unavailable("the store answers too slowly: retry")
        return self.revalidate(session)

    def new_instance(self, client: ClientId | None = None) -> Instance:
        now_s = self._log.clock.boot_s()
        return Instance(now_s, now_s, client, now_s)

    def admit(self, group_id: str, member_id: str, client: ClientId) -> None:
        """Accept a join. Raises MemberHeld if the client had too many short lives. In a group
        without other members, every join is accepted. Takes ~0.1 us for each member of the
        group."""
        led, group = self.led.get(group_id), self._log.state.members.get(group_id)
        if led is None or group is None:
            return
        now_s = self._log.clock.boot_s()
        silent = sum(_is_gone(instance, client, now_s) for instance in led.instances.values())
        if len(group.members) == silent:
            return
        held_member = led.short_lives.hold(client, member_id, now_s, silent=silent)
        if held_member is None:
            return
        error = refusal(held_member, group_id)
        if led.short_lives.is_to_be_named(client, now_s):
            log.warning("%s", error)
        raise error

    def admit_change(self, session: MemberSession, topics: Sequence[str], pattern: str) -> None:
        """Accept a subscription. If the member changes a subscription after less than LIFE_S, the
        change counts as a short life, because a change also rebalances the other members. Raises
        MemberHeld."""
        group, member, instance, _ = session
        client, led = instance.client, self.led.get(group.group_id)
        if client is None or led is None:
            return
        now_s = self._log.clock.boot_s()
        if instance.has_subscribed:
            if (sorted(set(topics)), pattern) == (member.topics, member.pattern):
                return
            self.admit(group.group_id, member.member_id, client)
            led.short_lives.ended(client, Life(instance.subscribed_s, now_s))
        instance.has_subscribed, instance.subscribed_s = True, now_s

    def held(self, group_id: str) -> list[HeldMember]:
        """Return the clients whose joins to a group of this broker must wait."""
        led = self.led.get(group_id)
        return [] if led is None else led.short_lives.held(self._log.clock.boot_s())

    async def coordinate(self, group_id: str) -> CoordinatedGroup:
        """Make this broker the group's coordinator, unless it already is."""
        self.check_serving()
        group = self._log.state.members.get(group_id)
        if group is not None and group.coordinator != self.coordinators.me:
            await self.take(group_id)
            group = self._log.state.members.get(group_id)
        if group is None:
            raise UnknownMember(f"group {group_id!r} has no members")
        if group.coordinator != self.coordinators.me:
            raise _another(group_id)
        led = self.led.get(group_id)
        if led is None or led.term != group.term:
            rebalances, now_s = Rebalances(group.inputs, group.generation), self._log.clock.boot_s()
            # In the first term, no other coordinator served the members before.
            is_alone = group.term in (1, self._handed_over.pop(group_id, 1))
            alone_s = now_s if is_alone else now_s + HANDOVER_S
            led = CoordinatedGroup(group.term, now_s, alone_s, rebalances)
            self.led[group_id] = led
        return led

    async def take(self, group_id: str) -> None:
        """Commit that this broker coordinates the group from now on."""
        taking = self._taking.get(group_id)
        if taking is None:
            before = self._log.state.members.get(group_id)
            if before is not None and self.coordinators.has_released(before.coordinator):
                # The former coordinator never takes a group again. If the next term is this
                # broker's, no other broker had a term between the two.
                self._handed_over[group_id] = before.term + 1
            take = TakeGroup(group_id, self.coordinators.me)
            taking = asyncio.create_task(self._log.submit(take))
            self._taking[group_id] = taking
            taking.add_done_callback(lambda _: self._taking.pop(group_id, None))
            taking.add_done_callback(retrieve_exception)
        await asyncio.shield(taking)

    def release(self) -> None:
        """Drop all groups. From now on, this broker serves no member."""
        self._is_released = True
        for led in self.led.values():
            for instance in led.instances.values():
                instance.wake()
        self.led.clear()

    def check_serving(self) -> None:
        """Raise Unavailable after `release`."""
        if self._is_released:
            raise Unavailable("this broker is shutting down: retry at another broker")

    def drop(self, group_id: str, member_id: str) -> None:
        led = self.led.get(group_id)
        instance = None if led is None else led.instances.pop(member_id, None)
        if instance is not None:
            instance.wake()

    def ours(self) -> list[tuple[ConsumerGroup, CoordinatedGroup]]:
        """Return the groups that this broker has taken and still coordinates."""
        groups = []
        for group_id, led in list(self.led.items()):
            group = self._log.state.members.get(group_id)
            if (
                group is None
                or group.is_assigned_by_clients
                or (group.coordinator, group.term) != (self.coordinators.me, led.term)
            ):
                for instance in self.led.pop(group_id).instances.values():
                    instance.wake()
            else:
                groups.append((group, led))
        return groups

    # -- background work

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        actions_by_group: dict[str, list[AnyAction]] = {
            group_id: [] for group_id in applied.groups if group_id in self.led
        }
        if actions_by_group:
            for commit in entry.commits:
                for action in commit.actions:
                    of = actions_by_group.get(getattr(action, "group_id", ""))
                    if of is not None:
                        of.append(action)
        for group_id, actions in actions_by_group.items():
            self._follow(group_id, actions)

    def on_reset(self) -> None:
        for group_id in list(self.led):
            self._follow(group_id, [])

    def _follow(self, group_id: str, actions: Sequence[AnyAction]) -> None:
        """Drop the state of removed members and of partitions that members lost. Wake the reads.
        `actions` are the entry's actions on the group."""
        led, group = self.led[group_id], self._log.state.members.get(group_id)
        led.look_s = 0.0
        now_s = self._log.clock.boot_s()
        if group is not None:
            subscribed = (
                member.member_id for member in group.members.values() if member.is_subscribed
            )
            led.rebalances.see(group.inputs, group.generation, subscribed, actions, now_s)
        for member_id, instance in list(led.instances.items()):
            member = None if group is None else group.members.get(member_id)
            if member is None:
                del led.instances[member_id]
                _count_life(led.short_lives, group, instance)
            else:
                instance.positions.retain(member.owned)
                instance.is_awaited = member_id in led.rebalances.waiting
            instance.wake()

    def has_read(self, session: MemberSession) -> None:
        """Note the first read of the member after a rebalance."""
        session.instance.is_awaited = False
        led = self.led.get(session.group.group_id)
        if led is not None:
            led.rebalances.has_read(session.member.member_id, self._log.clock.boot_s())

    def restart_session_timers(self, now_s: float) -> None:
        for led in self.led.values():
            led.since_s = now_s
            for instance in led.instances.values():
                instance.heard_s = instance.polled_s = now_s

    async def adopt_groups(self) -> None:
        """Take groups whose coordinator is gone and that this broker should coordinate."""
        if self._is_released:
            return
        me = self.coordinators.me
        orphans = [
            self.coordinate(group.group_id)
            for group in self._log.state.members
            if group.members
            and not group.is_assigned_by_clients
            and self.coordinators.of(group.group_id, group.coordinator) == me
            and (group.coordinator != me or group.group_id not in self.led)
        ]
        await all_of(orphans)

    async def expire(self, now_s: float) -> None:
        silent = []
        for group, led in self.ours():
            if now_s < led.look_s:
                continue
            ends = {
                member.member_id: _silent_at(member, led, now_s)
                for member in group.members.values()
            }
            led.look_s = min(ends.values(), default=0.0)
            silent += [
                (group, led, group.members[who]) for who, end_s in ends.items() if end_s < now_s
            ]
        for group, _, member in silent:
            log.info("member %s of group %s has expired", member.member_id, group.group_id)
        await all_of(
            [
                self._log.submit(ExpireMember(group.group_id, member.member_id, led.term))
                for group, led, member in silent
            ]
        )


def _another(group_id: str) -> Unavailable:
    return Unavailable(f"group {group_id!r} has moved to another coordinator: retry")


async def all_of(duties: Sequence[Awaitable[object]]) -> None:
    """Run all duties concurrently, so one flush serves all. If a duty is refused, the others
    continue."""
    for failed in await asyncio.gather(*duties, return_exceptions=True):
        if isinstance(failed, LogError) and not is_of_all(failed):
            log.info("a duty of a group is refused: %s", failed)  # normal: the state has changed
        elif isinstance(failed, BaseException):
            raise failed


def is_of_all(error: LogError) -> bool:
    """Return whether an error concerns all duties, and not only the one that raised it."""
    if isinstance(error, BoundReached):  # another commit may need no more of the bound
        return False
    return isinstance(error, (Unavailable, CommitUnknown, Throttled, Corrupt, StoreUnfit))


def _is_gone(instance: Instance, client: ClientId, now_s: float) -> bool:
    """Return whether the instance's member, created by this client, had a short life and has sent
    no request for SILENT_S."""
    return (
        instance.client == client
        and now_s - instance.heard_s > SILENT_S
        and not instance.under_way
        and Life(instance.joined_s, instance.heard_s).is_short
    )


def _count_life(lives: ShortLives, group: ConsumerGroup | None, instance: Instance) -> None:
    """Count the life of a removed member. A static member that another member replaced is not
    counted, because the group was not rebalanced."""
    client = instance.client
    if client is None or not instance.has_subscribed:
        return
    place = client.instance_id
    if group is None or not place or group.member_of_instance(place) is None:
        lives.ended(client, Life(instance.joined_s, instance.heard_s))


def _silent_at(member: GroupMember, led: CoordinatedGroup, now_s: float) -> float:
    """Return the boot time at which the member's session ends if no heartbeat arrives."""
    instance = led.instances.get(member.member_id)
    if instance is None:
        heard_s = polled_s = led.since_s
    elif instance.under_way:
        heard_s = polled_s = now_s
    else:
        heard_s, polled_s = instance.heard_s, instance.polled_s
    at_s = heard_s + member.config.session_timeout_ms / 1000
    if member.is_subscribed:
        at_s = min(at_s, polled_s + member.config.max_poll_interval_ms / 1000)
    return at_s
