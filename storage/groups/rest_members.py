"""The members of REST groups at the coordinator of their groups.

It tracks their heartbeats and expires silent members. `Instance` is its soft state of one member.

A live coordinator that was replaced learns of its successor at its next refresh of the WAL. Until
then, both could serve a member, from different positions. A client could then get records again
whose offsets are committed, and commit the results of these records in a second transaction. So a
coordinator returns records only if its view of the WAL is younger than `VIEW_AGE_MAX_S`, and its
successor reads a member's position only `HANDOVER_S` after it took the group. A broker that stops
releases its groups before (groups.group_release), so the next coordinator does not wait.
(Rejected: a refresh of the WAL at each read: it costs a GET and the time of the GET. Rejected: a
new generation for each new coordinator, because after a crash of a broker all commits under way
would be refused.)
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.storage.core.actions import AnyAction, ExpireMember
from tidelog.storage.core.errors import Unavailable, UnknownMember
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.coordinator import (
    RETRY_S,
    CoordinatedGroup,
    Coordinator,
    all_of,
    moved,
)
from tidelog.storage.groups.join_backoff import (
    SILENT_S,
    ClientId,
    HeldMember,
    Life,
    ShortLives,
    refusal,
)
from tidelog.storage.groups.positions import Positions
from tidelog.storage.groups.read_result import SentRead
from tidelog.storage.groups.rebalance_counts import Rebalances
from tidelog.storage.log_engine import Log
from tidelog.storage.runtime.tasks import surviving
from tidelog.storage.state.group_state import ConsumerGroup, GroupMember

log = logging.getLogger("tidelog.groups")

VIEW_AGE_MAX_S = 1.5
"""A read that has records refreshes an older view. So an idle group causes no refresh, and a busy
one a GET in this time."""
REFRESHES_MAX = 2
"""After a time without requests, the first refresh only tells what time it is at the store: until
then, the view may be as old as that time."""
HANDOVER_S = 2.0
"""Exceeds VIEW_AGE_MAX_S by more than the clocks of two brokers drift apart in that time. Members
wait for HANDOVER_S when their coordinator is replaced."""


@dataclass(slots=True, eq=False)
class Instance:
    """A coordinator's soft state of a member.

    `lock` serialises reads, `finding` serialises searches for start positions. `sending` is done
    when the last response is sent or lost. `sent` is the last response with records until its
    arrival is decided (groups.delivery_outcome). A result of `waiter` makes a waiting read look for
    records again. From `alone_s` on, no other broker serves the member. `damaged` are the
    partitions whose last read found damage. `client` is None if this broker did not take the join.
    `is_awaited` is True if the member has not read since the last rebalance.
    """

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


class RestGroup(CoordinatedGroup):
    """A REST group at its coordinator. From `alone_s` on, no other broker serves its members."""

    def __init__(
        self,
        log: Log,
        coordinator: Coordinator,
        kind: "RestMembers",
        group: ConsumerGroup,
        *,
        is_alone: bool,
    ) -> None:
        super().__init__(group.group_id, kind)
        self.rebalances = Rebalances(group.inputs, group.generation)
        self.short_lives = ShortLives()
        self.instances: dict[str, Instance] = {}
        self._log = log
        self._coordinator = coordinator
        self._term = group.term
        self._since_s = log.clock.boot_s()
        self.alone_s = self._since_s + (0.0 if is_alone else HANDOVER_S)
        self._look_s = 0.0
        self._is_expiring = False

    @property
    def term(self) -> int:
        return self._term

    @property
    def look_s(self) -> float:
        return self._look_s

    @property
    def is_idle(self) -> bool:
        return self._log.state.members.get(self.group_id) is None

    def tick(self, now_s: float) -> None:
        group = self._log.state.members.get(self.group_id)
        if group is None or now_s < self._look_s:
            return
        ends_s = {
            member.member_id: self._silent_at(member, now_s) for member in group.members.values()
        }
        silent = [member_id for member_id, end_s in ends_s.items() if end_s < now_s]
        self._look_s = min(ends_s.values(), default=math.inf)
        if silent:
            self._look_s = now_s + RETRY_S
            if not self._is_expiring:
                self._is_expiring = True
                self._coordinator.start(self._expire(silent))

    async def _expire(self, member_ids: Sequence[str]) -> None:
        """**On a crash** before the commit: the next coordinator expires the members."""
        for member_id in member_ids:
            log.info("member %s of group %s has expired", member_id, self.group_id)
        expiries = [ExpireMember(self.group_id, member_id, self.term) for member_id in member_ids]
        try:
            with surviving(log, "the expiry of members"):
                await all_of([self._log.submit(expiry) for expiry in expiries])
        finally:
            self._is_expiring = False

    def _silent_at(self, member: GroupMember, now_s: float) -> float:
        """Return the boot time at which the member's session ends if no heartbeat arrives."""
        instance = self.instances.get(member.member_id)
        if instance is None:
            heard_s = polled_s = self._since_s
        elif instance.under_way:
            heard_s = polled_s = now_s
        else:
            heard_s, polled_s = instance.heard_s, instance.polled_s
        end_s = heard_s + member.config.session_timeout_ms / 1000
        if member.is_subscribed:
            end_s = min(end_s, polled_s + member.config.max_poll_interval_ms / 1000)
        return end_s

    def restart_sessions(self, began_s: float) -> None:
        self._since_s = max(self._since_s, began_s)
        for instance in self.instances.values():
            instance.heard_s = max(instance.heard_s, began_s)
            instance.polled_s = max(instance.polled_s, began_s)

    def follow(self, group: ConsumerGroup | None, actions: Sequence[AnyAction]) -> None:
        """Drop the state of removed members and of partitions that members lost. Wake the reads."""
        self._look_s = 0.0
        now_s = self._log.clock.boot_s()
        if group is not None:
            subscribed = (
                member.member_id for member in group.members.values() if member.is_subscribed
            )
            self.rebalances.see(group.inputs, group.generation, subscribed, actions, now_s)
        for member_id, instance in list(self.instances.items()):
            member = None if group is None else group.members.get(member_id)
            if member is None:
                del self.instances[member_id]
                _count_life(self.short_lives, group, instance)
            else:
                instance.positions.retain(member.owned)
                instance.is_awaited = member_id in self.rebalances.waiting
            instance.wake()

    def close(self) -> None:
        for instance in self.instances.values():
            instance.wake()


class MemberSession(NamedTuple):
    """A member after its heartbeat, in a term of its group."""

    group: ConsumerGroup
    member: GroupMember
    instance: Instance
    term: int


class RestMembers:
    """The members of the REST groups that this broker coordinates: a kind of groups.

    A call takes the group over from another coordinator.
    """

    def __init__(self, log: Log, coordinator: Coordinator) -> None:
        self._log = log
        self._coordinator = coordinator
        coordinator.add_kind(self)

    def serves(self, group: ConsumerGroup) -> bool:
        return not group.is_assigned_by_clients

    def open(self, group_id: str, group: ConsumerGroup | None, *, is_alone: bool) -> RestGroup:
        if group is None:
            raise UnknownMember(f"group {group_id!r} has no members")
        return RestGroup(self._log, self._coordinator, self, group, is_alone=is_alone)

    # -- heartbeats

    async def heartbeat(self, group_id: str, member_id: str) -> MemberSession:
        """Record a heartbeat of the member. Raises UnknownMember."""
        session = self._known(group_id, member_id)
        if session is not None:
            return session
        member = self._log.state.members.member(group_id, member_id)
        if member is None:
            await self._log.wal.refresh()  # another broker may have just created the member (I3)
        self.look(group_id, member_id)
        rest_group = await self.coordinate(group_id)
        group, member = self.look(group_id, member_id)
        instance = rest_group.instances.get(member_id)
        if instance is None:
            instance = rest_group.instances[member_id] = self.new_instance()
            instance.is_awaited = member_id in rest_group.rebalances.waiting
            instance.alone_s = rest_group.alone_s
        instance.heard_s = self._log.clock.boot_s()
        return MemberSession(group, member, instance, rest_group.term)

    def _known(self, group_id: str, member_id: str) -> MemberSession | None:
        """If the member is known in this term (the usual case), record its heartbeat.

        If not, return None.
        """
        group, rest_group = self._log.state.members.get(group_id), self.group(group_id)
        if group is None or rest_group is None:
            return None
        member, instance = group.members.get(member_id), rest_group.instances.get(member_id)
        if member is None or instance is None:
            return None
        instance.heard_s = self._log.clock.boot_s()
        return MemberSession(group, member, instance, rest_group.term)

    def look(self, group_id: str, member_id: str) -> tuple[ConsumerGroup, GroupMember]:
        group = self._log.state.members.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None or group.is_assigned_by_clients:
            raise UnknownMember(f"group {group_id!r} has no member {member_id!r}")
        return group, member

    def revalidate(self, session: MemberSession) -> MemberSession:
        """Return the member's current state.

        Raises UnknownMember, or Unavailable if the group has moved to another coordinator.
        """
        group, member = self.look(session.group.group_id, session.member.member_id)
        if group.term != session.term or self._coordinator.is_released(self):
            raise moved(group.group_id)
        return session._replace(group=group, member=member)

    async def wait_for_exclusive(self, session: MemberSession) -> MemberSession:
        """Wait until no other broker serves the member.

        The state then has all offsets that the member committed before. Raises the errors of
        `revalidate`.
        """
        left_s = session.instance.alone_s - self._log.clock.boot_s()
        if left_s > 0:
            await asyncio.sleep(left_s)
        await self._log.wal.refresh()
        return self.revalidate(session)

    async def refresh(self, session: MemberSession) -> MemberSession:
        """Return the member, from a view that is at most VIEW_AGE_MAX_S old.

        Raises the errors of `revalidate`, and Unavailable if the store answers too slowly.
        """
        for _ in range(REFRESHES_MAX):
            if self._log.wal.view_age_s <= VIEW_AGE_MAX_S:
                return self.revalidate(session)
            await self._log.wal.refresh()
        if self._log.wal.view_age_s > VIEW_AGE_MAX_S:
            raise Unavailable("the store answers too slowly: retry")
        return self.revalidate(session)

    def has_read(self, session: MemberSession) -> None:
        """Note the first read of the member after a rebalance."""
        session.instance.is_awaited = False
        rest_group = self.group(session.group.group_id)
        if rest_group is not None:
            rest_group.rebalances.has_read(session.member.member_id, self._log.clock.boot_s())

    # -- joins

    def new_instance(self, client: ClientId | None = None) -> Instance:
        now_s = self._log.clock.boot_s()
        return Instance(now_s, now_s, client, now_s)

    def admit(self, group_id: str, member_id: str, client: ClientId | None) -> None:
        """Accept a join, of no client's if `client` is None.

        Raises Unavailable after the release, and MemberHeld if the client had too many short lives.
        In a group without other members, every join is accepted. Takes ~0.1 us for each member of
        the group.
        """
        self._coordinator.check_serving(self)
        rest_group, group = self.group(group_id), self._log.state.members.get(group_id)
        if client is None or rest_group is None or group is None:
            return
        now_s = self._log.clock.boot_s()
        silent = sum(
            _is_gone(instance, client, now_s) for instance in rest_group.instances.values()
        )
        if len(group.members) == silent:
            return
        held_member = rest_group.short_lives.hold(client, member_id, now_s, silent=silent)
        if held_member is None:
            return
        error = refusal(held_member, group_id)
        if rest_group.short_lives.is_to_be_named(client, now_s):
            log.warning("%s", error)
        raise error

    def admit_change(self, session: MemberSession, topics: Sequence[str], pattern: str) -> None:
        """Accept a subscription.

        If the member changes a subscription after less than LIFE_S, the change counts as a short
        life, because a change also rebalances the other members. Raises MemberHeld.
        """
        group, member, instance, _ = session
        client, rest_group = instance.client, self.group(group.group_id)
        if client is None or rest_group is None:
            return
        now_s = self._log.clock.boot_s()
        if instance.has_subscribed:
            if (sorted(set(topics)), pattern) == (member.topics, member.pattern):
                return
            self.admit(group.group_id, member.member_id, client)
            rest_group.short_lives.ended(client, Life(instance.subscribed_s, now_s))
        instance.has_subscribed, instance.subscribed_s = True, now_s

    def held(self, group_id: str) -> list[HeldMember]:
        """Return the clients whose joins to a group of this broker must wait."""
        rest_group = self.group(group_id)
        return [] if rest_group is None else rest_group.short_lives.held(self._log.clock.boot_s())

    # -- the groups of this broker

    async def coordinate(self, group_id: str) -> RestGroup:
        """Return the group, after this broker has become its coordinator.

        Raises UnknownMember if there is no such group, and Unavailable.
        """
        rest_group = await self._coordinator.coordinate(group_id, self)
        assert isinstance(rest_group, RestGroup)
        return rest_group

    def group(self, group_id: str) -> RestGroup | None:
        """Return the group if this broker coordinates it."""
        rest_group = self._coordinator.groups.get(group_id)
        return rest_group if isinstance(rest_group, RestGroup) else None

    def groups(self) -> list[tuple[ConsumerGroup, RestGroup]]:
        """Return the groups that this broker coordinates, each with its state in the cluster."""
        return [
            (group, rest_group)
            for group_id, rest_group in self._coordinator.groups.items()
            if isinstance(rest_group, RestGroup)
            and (group := self._log.state.members.get(group_id)) is not None
        ]


def _is_gone(instance: Instance, client: ClientId, now_s: float) -> bool:
    """Return whether this client's instance had a short life and is silent for SILENT_S."""
    return (
        instance.client == client
        and now_s - instance.heard_s > SILENT_S
        and not instance.under_way
        and Life(instance.joined_s, instance.heard_s).is_short
    )


def _count_life(lives: ShortLives, group: ConsumerGroup | None, instance: Instance) -> None:
    """Count the life of a removed member.

    A static member that another member replaced is not counted, because the group was not
    rebalanced.
    """
    client = instance.client
    if client is None or not instance.has_subscribed:
        return
    place = client.instance_id
    if group is None or not place or group.member_of_instance(place) is None:
        lives.ended(client, Life(instance.joined_s, instance.heard_s))
