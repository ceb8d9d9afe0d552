"""A group's coordinator: which broker hears its members, and who of them is silent.

Soft state on one broker at a time: when each member was last heard of, and what else only that
broker knows of an instance (storage.consumers). The cluster state names the coordinator and its
term, so that brokers which disagree on who lives cannot both act on what they heard: `ExpireMember`
carries the term, and what was known in an older term is dropped.

And if it dies? Another takes the group (`TakeGroup`) when a request comes, or within a tick of
seeing it dead, and gives each member a whole session from then on. Silence is counted by its own
boot clock, and only while it looks: a broker that slept blames nobody. Heartbeats never reach the
WAL.

And if it only seemed dead? It learns of its successor when it next looks into the WAL. Until then
both would serve a member, each from where the member stands by what that one knows: records whose
offsets are committed already would be returned once more, to somebody who may produce from them in
a transaction that is taken. So a coordinator returns records with a view of the WAL that is not
older than `VIEW_AGE_MAX_S`, and its successor looks up where a member stands when `HANDOVER_S` have
passed. (Rejected: to ask the WAL at each read, a GET and its time; a generation for each
coordinator, which would refuse the work in hand whenever a broker dies.)
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from storage.entry import AnyAction, ExpireMember, TakeGroup
from storage.errors import StaleCommit, Unavailable, UnknownMember
from storage.group import Group, GroupMember
from storage.hot import Request
from storage.log import Log
from storage.positions import Positions
from storage.writer import Acks

log = logging.getLogger("tidelog.groups")

VIEW_AGE_MAX_S = 1.5
"""More than `poll.interval.ms`, so that it costs nothing while the store answers."""
HANDOVER_S = 2.0
"""More than that, by what two clocks may differ in such a time and more. Members wait for it when
their coordinator is replaced."""


class Coordinators(Protocol):
    """Which broker hears a group's members."""

    @property
    def me(self) -> str:
        """This process, by a name that none has had before."""
        ...

    def of(self, group_id: str, holder: str) -> str:
        """Who should: `holder`, whom the state names, for as long as it lives."""
        ...


class Alone(NamedTuple):
    """The only broker there is."""

    me: str

    def of(self, group_id: str, holder: str) -> str:
        return self.me


class Rendezvous:
    """Several brokers: the holder stays while it lives; else each group has a first choice among
    those who do, so that brokers which see the same agree, and the groups of a dead one spread."""

    def __init__(self, me: str, live: Callable[[], Iterable[str]]) -> None:
        self.me = me
        self._live = live

    def of(self, group_id: str, holder: str) -> str:
        if holder == self.me:
            return holder
        live = {*self._live(), self.me}
        return holder if holder in live else max(live, key=lambda one: _weight(group_id, one))


def _weight(group_id: str, broker: str) -> bytes:
    return hashlib.blake2b(f"{group_id}/{broker}".encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Instance:
    """What its coordinator knows of a member, softly. `lock`: one read at a time; `finding`: one
    task at a time finds where the member starts; `sending`: its
    answer is on the way, done when it has arrived or never will; `waiter`: set to make a read look
    again; `alone_s`: from when on no other broker serves it."""

    heard_s: float
    polled_s: float
    alone_s: float = 0.0
    under_way: int = 0
    turn: int = 0
    positions: Positions = field(default_factory=Positions)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    finding: asyncio.Lock = field(default_factory=asyncio.Lock)
    sending: "asyncio.Future[None] | None" = None
    waiter: "asyncio.Future[None] | None" = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Led:
    """A group that this broker coordinates, in one term of it. Before `look_s` nobody in it can
    have been silent for too long."""

    term: int
    since_s: float
    look_s: float = 0.0
    instances: dict[str, Instance] = field(default_factory=dict)


class Heard(NamedTuple):
    """A member that has just made itself heard, in a term of its group."""

    group: Group
    member: GroupMember
    instance: Instance
    term: int


class Coordinator:
    """The groups that this broker hears. Owned by the log's event loop. Whoever calls for a group
    of another coordinator takes it over: ask `coordinators` first."""

    def __init__(self, broker: Log, coordinators: Coordinators) -> None:
        self.coordinators = coordinators
        self.led: dict[str, Led] = {}
        self._log = broker
        self._taking: dict[str, asyncio.Task[None]] = {}

    async def hear(self, group_id: str, member_id: str) -> Heard:
        """The member says something, and so lives. Raises UnknownMember."""
        heard = self._known(group_id, member_id)
        if heard is not None:
            return heard
        member = self._log.state.members.member(group_id, member_id)
        if member is None:
            await self._log.wal.refresh()  # another broker may just have made it (I3)
        led = await self.lead(group_id)
        group, member = self.look(group_id, member_id)
        instance = led.instances.get(member_id)
        if instance is None:
            instance = led.instances[member_id] = self.new_instance()
            if led.term > 1:  # whom another coordinator knew
                instance.alone_s = led.since_s + HANDOVER_S
        instance.heard_s = self._log.clock.boot_s()
        return Heard(group, member, instance, led.term)

    def _known(self, group_id: str, member_id: str) -> Heard | None:
        """The same for a member that was heard here before in this term: nearly always."""
        group, led = self._log.state.members.get(group_id), self.led.get(group_id)
        if group is None or led is None or group.term != led.term:
            return None
        member, instance = group.members.get(member_id), led.instances.get(member_id)
        if member is None or instance is None or group.coordinator != self.coordinators.me:
            return None
        instance.heard_s = self._log.clock.boot_s()
        return Heard(group, member, instance, led.term)

    def look(self, group_id: str, member_id: str) -> tuple[Group, GroupMember]:
        group = self._log.state.members.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None:
            raise UnknownMember(f"group {group_id!r} has no member {member_id!r}")
        return group, member

    def still(self, heard: Heard) -> Heard:
        """The member as of now. Raises Unavailable if what is known of it here is another's to say
        by now, UnknownMember."""
        group, member = self.look(heard.group.group_id, heard.member.member_id)
        if group.term != heard.term:
            raise _another(group.group_id)
        return heard._replace(group=group, member=member)

    async def alone(self, heard: Heard) -> Heard:
        """Afterwards no other broker serves the member, and the state has all that it committed
        before. Raises as `still`."""
        left_s = heard.instance.alone_s - self._log.clock.boot_s()
        if left_s > 0:
            await asyncio.sleep(left_s)
        await self._log.wal.refresh()
        return self.still(heard)

    async def fresh(self, heard: Heard) -> Heard:
        """The member as of a moment ago on every broker. Raises as `still`."""
        if self._log.wal.view_age_s > VIEW_AGE_MAX_S:
            await self._log.wal.refresh()
            if self._log.wal.view_age_s > VIEW_AGE_MAX_S:
                raise Unavailable("the store takes too long to answer: try again")
        return self.still(heard)

    def new_instance(self) -> Instance:
        now_s = self._log.clock.boot_s()
        return Instance(now_s, now_s)

    async def lead(self, group_id: str) -> Led:
        """This broker as the group's coordinator, from now on if it was not."""
        group = self._log.state.members.get(group_id)
        if group is not None and group.coordinator != self.coordinators.me:
            taking = self._taking.get(group_id)
            if taking is None:
                taking = asyncio.create_task(self._take(group_id))
                self._taking[group_id] = taking
                taking.add_done_callback(lambda _: self._taking.pop(group_id, None))
                taking.add_done_callback(lambda one: one.cancelled() or one.exception())
            await asyncio.shield(taking)
            group = self._log.state.members.get(group_id)
        if group is None:
            raise UnknownMember(f"group {group_id!r} has no members")
        if group.coordinator != self.coordinators.me:
            raise _another(group_id)
        led = self.led.get(group_id)
        if led is None or led.term != group.term:
            led = self.led[group_id] = Led(group.term, self._log.clock.boot_s())
        return led

    async def _take(self, group_id: str) -> None:
        await self.submit(TakeGroup(group_id, self.coordinators.me))

    def drop(self, group_id: str, member_id: str) -> None:
        led = self.led.get(group_id)
        gone = None if led is None else led.instances.pop(member_id, None)
        if gone is not None:
            gone.wake()

    def ours(self) -> list[tuple[Group, Led]]:
        """The groups that this broker coordinates, as far as it has taken them."""
        found = []
        for group_id, led in list(self.led.items()):
            group = self._log.state.members.get(group_id)
            if group is None or (group.coordinator, group.term) != (self.coordinators.me, led.term):
                for instance in self.led.pop(group_id).instances.values():
                    instance.wake()
            else:
                found.append((group, led))
        return found

    # -- what happens by itself

    def on_applied(self) -> None:
        """Members, assignments or positions have changed, here or by another broker."""
        members = self._log.state.members
        changed, members.changed = members.changed, set()
        for group_id in changed:
            led, group = self.led.get(group_id), members.get(group_id)
            if led is None:
                continue
            led.look_s = 0.0
            for member_id, instance in list(led.instances.items()):
                member = None if group is None else group.members.get(member_id)
                if member is None:
                    del led.instances[member_id]
                else:
                    instance.positions.retain(member.owned)
                instance.wake()

    def forgive(self, now_s: float) -> None:
        for led in self.led.values():
            led.since_s = now_s
            for instance in led.instances.values():
                instance.heard_s = instance.polled_s = now_s

    async def take_orphans(self) -> None:
        """Groups whose coordinator is gone, and that fall to this broker."""
        me = self.coordinators.me
        orphans = [
            self.lead(group.group_id)
            for group in self._log.state.members
            if group.members
            and self.coordinators.of(group.group_id, group.coordinator) == me
            and (group.coordinator != me or group.group_id not in self.led)
        ]
        await all_of(orphans)

    async def expire(self, now_s: float) -> None:
        silent = []
        for group, led in self.ours():
            if now_s < led.look_s:
                continue
            ends = {one.member_id: _silent_at(one, led, now_s) for one in group.members.values()}
            led.look_s = min(ends.values(), default=0.0)
            silent += [(group, led, group.members[who]) for who, at in ends.items() if at < now_s]
        for group, _, member in silent:
            log.info("member %s of group %s has expired", member.member_id, group.group_id)
        await all_of(
            [
                self.submit(ExpireMember(group.group_id, member.member_id, led.term))
                for group, led, member in silent
            ]
        )

    async def submit(self, action: AnyAction) -> None:
        request = Request(self._log.clock.new_id(), (), 0, actions=[action])
        await self._log.writer.append(request, Acks.ALL)


def _another(group_id: str) -> Unavailable:
    return Unavailable(f"another broker coordinates group {group_id!r}: try again")


async def all_of(duties: Sequence[Awaitable[object]]) -> None:
    """Together, so that one flush does for all; what one is refused does not keep the others."""
    for failed in await asyncio.gather(*duties, return_exceptions=True):
        if isinstance(failed, StaleCommit):
            log.info("a group has gone on: %s", failed)  # as it may at any moment
        elif isinstance(failed, BaseException):
            raise failed


def _silent_at(member: GroupMember, led: Led, now_s: float) -> float:
    """When the member will have been silent for too long, unless it is heard before."""
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
