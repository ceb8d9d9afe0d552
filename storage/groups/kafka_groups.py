"""The groups of Kafka's classic protocol that this broker coordinates.

`kafka_rebalance` is the protocol of one group. This module takes a group over (`TakeGroup`), sets
its timers, commits its actions one after the other, and lets requests wait for their answers.

**On a crash** of the coordinator: another broker takes the group and continues from the cluster
state: the same generation, members and assignments, a whole session for each member. A rebalance in
progress is lost: members whose JoinGroup or SyncGroup waited lose their connection, ask for the
coordinator and join again. No member got assignments that were not committed.

A coordinator may be replaced before it has the entry that says so. It cannot commit assignments
then, because `apply` refuses its term. `apply` also refuses offsets of an older generation that
such a broker accepts.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from tidelog.storage.codec.entry import Entry
from tidelog.storage.core import levels
from tidelog.storage.core.actions import (
    CommitOffsets,
    DeleteOffsets,
    ExpireMember,
    GroupOffset,
    LeaveGroup,
    SettleGroup,
)
from tidelog.storage.core.errors import (
    BoundReached,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequest,
    LogError,
    StaleCommit,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.coordinator import all_of
from tidelog.storage.groups.kafka_rebalance import ClassicGroup
from tidelog.storage.groups.kafka_requests import (
    DescribedMember,
    Description,
    GroupCode,
    GroupPhase,
    Identity,
    Joined,
    JoinRequest,
    Synced,
    SyncRequest,
)
from tidelog.storage.groups.kafka_roster import Roster
from tidelog.storage.groups.rest_groups import Instances
from tidelog.storage.log import Log
from tidelog.storage.runtime.tasks import TASK_ENDS, surviving
from tidelog.storage.state.cluster_state import Applied
from tidelog.storage.state.group_members import CLIENT_BYTES_MAX, MEMBERS_MAX
from tidelog.storage.state.group_types import NO_GENERATION, ClientMember, ConsumerGroup
from tidelog.storage.state.shares import CLIENT_BYTES, MEMBERS, WITHOUT_SHARE, Shares

log = logging.getLogger("tidelog.groups")

A = TypeVar("A")
Gone: TypeAlias = Sequence[TopicIdPartition]
"""Partitions whose committed offsets are deleted."""

TICK_S = 0.25
"""Period of the background task. Also the shortest time until a group whose members have changed
looks for sessions that have ended."""
ADOPT_TICKS = 4
"""After this number of ticks, the broker takes the groups whose coordinator is gone."""
ADOPTS_AT_ONCE = 1_000
"""Groups that the broker compares with its own in one step of the event loop."""
AWAKE_S = 5.0
"""If two rounds of the background task are further apart, the process was suspended: all sessions
begin again."""
TIMER_S = 0.001
"""The shortest timer. Timers of 0 s would occupy the loop if its clock is ahead of `boot_s`."""
RETRY_S = 1.0
"""Time until a failed removal of members is committed again."""
PROTOCOL_BYTES_MAX = 4 * CLIENT_BYTES_MAX
"""Bound of the metadata that the members of all groups sent (I10). A principal adds metadata or
members only while it then has at most as much as is free, so a new principal always finds room."""
TICKS_AT_ONCE = 50
"""Groups that have their timers in one step of the event loop."""


@dataclass(slots=True, eq=False)
class _Held:
    """A group, the task that commits its actions, and its timer, which ends at `wake_s`. A future
    in `removals` is done when the broker has tried to commit the removals of members that were
    requested before it."""

    group: ClassicGroup
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    wake_s: float = math.inf
    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    """Members and their bytes by principal that this broker has counted."""
    removals: list["asyncio.Future[None]"] = field(default_factory=list)


class ClassicGroups:
    """The classic groups of one broker. Owned by the log's event loop. `run` is its background
    task; requests also work without it."""

    def __init__(self, broker: Log, instances: Instances, delay_s: float) -> None:
        """`instances` are the REST groups. Groups of both kinds have the same coordinators."""
        self._log = broker
        self._coordinator = instances.coordinator
        self._commits = instances.commits
        self._delay_s = delay_s
        self._held: dict[str, _Held] = {}
        self._is_draining = False
        self._used = Shares()
        """All members, and the bytes of their metadata, by principal."""
        self._due: deque[_Held] = deque()
        self._looked_s = math.inf
        """When `run` looked at the clock last."""
        self._awake_s = -math.inf
        """When the process was awake again after it was suspended."""
        broker.wal.subscribers.append(self)

    # -- requests

    async def join(
        self, group_id: str, request: JoinRequest, on_counted: Callable[[], object] | None = None
    ) -> Joined:
        """Handle JoinGroup. Returns at the end of the join phase. `on_counted` is called when the
        request is counted among the bytes of members, if it then waits."""
        held_group = await self._hold(group_id, is_new=True)
        if isinstance(held_group, GroupCode):
            return Joined(held_group, request.who.member_id)
        if not self._has_room(held_group.group.members, request):
            self._follow_up(held_group)  # to release a group that is new
            return Joined(GroupCode.GROUP_MAX_SIZE_REACHED, request.who.member_id)
        return await self._reply(held_group, partial(held_group.group.join, request), on_counted)

    def _has_room(self, roster: Roster, request: JoinRequest) -> bool:
        members, size = roster.growth(request)
        return self._has_free(MEMBERS, request.principal, members, MEMBERS_MAX) and (
            self._has_free(CLIENT_BYTES, request.principal, size, PROTOCOL_BYTES_MAX)
        )

    def _has_free(self, bound: str, principal: str, more: int, maximum: int) -> bool:
        used = 0 if principal in WITHOUT_SHARE else self._used.used(bound, principal)
        return more <= 0 or used + more <= maximum - self._used.total(bound)

    async def sync(self, group_id: str, request: SyncRequest) -> Synced:
        """Handle SyncGroup. Returns when the assignments are committed."""
        held_group = await self._hold(group_id)
        if isinstance(held_group, GroupCode):
            return Synced(held_group)
        return await self._reply(held_group, partial(held_group.group.sync, request))

    async def _reply(
        self,
        held_group: _Held,
        handle: Callable[[Callable[[A], None], float], None],
        on_counted: Callable[[], object] | None = None,
    ) -> A:
        """Let the group handle a request, and wait for its reply. If the caller is cancelled, the
        group drops the reply."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        reply = partial(_answer, answer)
        handle(reply, self._now_s)
        self._follow_up(held_group)
        try:
            if on_counted is not None and not answer.done():
                on_counted()
            return await answer
        except asyncio.CancelledError:
            held_group.group.lose(reply, self._now_s)
            self._follow_up(held_group)
            raise

    async def heartbeat(self, group_id: str, who: Identity, generation: int) -> GroupCode:
        held_group = await self._hold(group_id)
        if isinstance(held_group, GroupCode):
            return held_group
        return held_group.group.heartbeat(who, generation, self._now_s)

    async def leave(
        self, group_id: str, members: Sequence[Identity]
    ) -> list[GroupCode] | GroupCode:
        """Handle LeaveGroup. Returns a code for each member, or one for the request."""
        held_group = await self._hold(group_id)
        if isinstance(held_group, GroupCode):
            return (
                [held_group] * len(members)
                if held_group is GroupCode.UNKNOWN_MEMBER_ID
                else held_group
            )
        codes = [held_group.group.leave(who, self._now_s) for who in members]
        held_group.removals.append(removal := asyncio.get_running_loop().create_future())
        self._follow_up(held_group)
        if held_group.task is not None:
            await removal
        return codes

    async def commit_offsets(
        self,
        group_id: str,
        who: Identity,
        generation: int,
        offsets: list[GroupOffset],
        gone_partitions: Gone,
    ) -> GroupCode:
        """Commit offsets of a member, or of any client while the group has no members, and delete
        those of `gone_partitions`. Raises the errors of a commit."""
        members = self._log.state.members
        held_group: _Held | GroupCode | None = self._held.get(group_id)
        if held_group is None and generation < 0 and not members.has_members(group_id):
            code = GroupCode.NONE if self.is_coordinator(group_id) else GroupCode.NOT_COORDINATOR
        elif isinstance(held_group := await self._hold(group_id), _Held):
            code = held_group.group.check_commit(who, generation, self._now_s)
        elif held_group is GroupCode.UNKNOWN_MEMBER_ID and members.get(group_id) is None:
            code = GroupCode.ILLEGAL_GENERATION
        else:
            code = held_group
        if code is not GroupCode.NONE or not (offsets or gone_partitions):
            return code
        member_id = who.member_id if generation >= 0 else ""
        try:
            commit = CommitOffsets(group_id, max(generation, NO_GENERATION), offsets, member_id)
            if gone_partitions:  # one commit: `apply` refuses both actions of an older generation
                await self._log.submit(commit, DeleteOffsets(group_id, list(gone_partitions)))
            else:
                await self._commits.add(commit)
        except GroupNotEmpty:
            return GroupCode.UNKNOWN_MEMBER_ID
        return GroupCode.NONE

    async def delete(self, group_id: str) -> None:
        """Delete a group. Raises GroupNotEmpty."""
        held_group = self._held.get(group_id)
        if held_group is not None and held_group.group.members:
            raise GroupNotEmpty(f"group {group_id!r} has members")
        await self._log.delete_group(group_id)

    # -- reading

    def describe(self, group_id: str) -> Description | None:
        """Return the group, or None if this broker has no member of the group and the cluster state
        has no client group of this name."""
        held_group, group = self._held.get(group_id), self._log.state.members.get(group_id)
        if held_group is not None and held_group.group.members:
            own = held_group.group
            settled = own.members.settled(
                own.protocol, {member.member_id: member.assignment for member in own.members}
            )
            phase, protocol_type, protocol = own.phase, own.protocol_type, own.protocol
        elif group is not None and group.is_assigned_by_clients:
            settled = [
                member.settled
                for member in group.members.values()
                if isinstance(member, ClientMember)
            ]
            protocol_type, protocol = group.protocol_type, group.protocol
            phase = GroupPhase.PREPARING if group.is_preparing else GroupPhase.STABLE
            phase = phase if settled else GroupPhase.EMPTY
        else:
            return None
        members = [
            DescribedMember(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.host,
                member.metadata,
                member.assignment if phase is GroupPhase.STABLE else b"",
            )
            for member in settled
        ]
        return Description(phase, protocol_type, protocol, members)

    def ids(self) -> list[str]:
        """Return the ids of the groups that have members on this broker."""
        return [group_id for group_id, held_group in self._held.items() if held_group.group.members]

    def is_coordinator(self, group_id: str) -> bool:
        """Return whether this broker is, or would become, the coordinator of the group."""
        group = self._log.state.members.get(group_id)
        holder = "" if group is None else group.coordinator
        coordinators = self._coordinator.coordinators
        return not self._is_draining and coordinators.of(group_id, holder) == coordinators.me

    # -- the groups of this broker

    @property
    def _now_s(self) -> float:
        return self._log.clock.boot_s()

    async def _hold(self, group_id: str, *, is_new: bool = False) -> "_Held | GroupCode":
        """Return the group, after this broker has become its coordinator. Without `is_new`, return
        UNKNOWN_MEMBER_ID for a group without members."""
        if not self.is_coordinator(group_id):
            return GroupCode.NOT_COORDINATOR
        held_group = self._held.get(group_id)
        if held_group is not None:
            return held_group
        group = self._log.state.members.get(group_id)
        me = self._coordinator.coordinators.me
        if not is_new and (group is None or not group.members):
            await self._log.wal.refresh()  # another broker may have just settled the group (I3)
            group = self._log.state.members.get(group_id)
        if not is_new and (group is None or not group.members):
            return GroupCode.UNKNOWN_MEMBER_ID
        if group is not None and group.coordinator != me:
            try:
                await self._coordinator.take(group_id)
            except LogError as error:
                log.info("group %s cannot be taken: %s", group_id, error)
                return GroupCode.COORDINATOR_NOT_AVAILABLE
            group = self._log.state.members.get(group_id)
            if group is not None and group.coordinator != me:
                return GroupCode.NOT_COORDINATOR
        if group is not None and group.members and not group.is_assigned_by_clients:
            return GroupCode.INCONSISTENT_GROUP_PROTOCOL if is_new else GroupCode.UNKNOWN_MEMBER_ID
        if self._log.state.level < levels.KAFKA:
            return GroupCode.UNSUPPORTED_VERSION
        return self._held.get(group_id) or self._open(group_id, group)

    def _open(self, group_id: str, group: ConsumerGroup | None) -> _Held:
        if group is None:
            me, floor = self._coordinator.coordinators.me, self._log.state.members.generation_floor
            made = ClassicGroup(group_id, me, 0, floor, self._new_id, self._delay_s)
        else:
            made = ClassicGroup.restored(group, self._new_id, self._delay_s, self._now_s)
        held_group = self._held[group_id] = _Held(made)
        if made.members:
            self._follow_up(held_group)
        return held_group

    def _new_id(self) -> str:
        return self._log.clock.new_id().hex()

    def _follow_up(self, held_group: _Held) -> None:
        """Do what the last event of the group requires: commits and timers."""
        group = held_group.group
        if self._held.get(group.group_id) is not held_group:
            return  # another broker has the group
        self._count(held_group, group.members.counts, group.members.sizes)
        if group.actions and held_group.task is None:
            held_group.task = asyncio.create_task(
                self._commit(held_group), name="tidelog-classic-group"
            )
        if group.is_idle and held_group.task is None:
            self._release(held_group)
        else:
            self._set_timer(held_group)

    def _count(self, held_group: _Held, counts: Counter[str], sizes: Counter[str]) -> None:
        """Count the members of a group, and their bytes, by principal."""
        changes = (MEMBERS, held_group.counts, counts), (CLIENT_BYTES, held_group.sizes, sizes)
        for bound, before, after in changes:
            if before != after:
                self._used.change(bound, before, after)
                before.clear()
                before.update(after)

    def _set_timer(self, held_group: _Held) -> None:
        """Let the group tick when a phase ends, and when a session may end. If its timer ends
        before, it is set again then."""
        now_s = self._now_s
        wake_s = min(held_group.group.wake_s, max(held_group.group.look_s, now_s + TICK_S))
        if wake_s >= held_group.wake_s:
            return
        if held_group.timer is not None:
            held_group.timer.cancel()
        held_group.wake_s = wake_s
        delay_s = max(wake_s - now_s, TIMER_S)
        held_group.timer = asyncio.get_running_loop().call_later(delay_s, self._add_due, held_group)

    def _add_due(self, held_group: _Held) -> None:
        self._due.append(held_group)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._tick_due)

    def _tick_due(self) -> None:
        """Let some groups tick whose timers have ended. Clients can let many end at one time."""
        if self._now_s - self._looked_s > AWAKE_S:
            self._awake_s = self._now_s
        for held_group in [self._due.popleft() for _ in range(min(TICKS_AT_ONCE, len(self._due)))]:
            with surviving(log, "the timer of a group"):
                self._tick(held_group)
        if self._due:
            asyncio.get_running_loop().call_soon(self._tick_due)

    def _tick(self, held_group: _Held) -> None:
        if self._held.get(held_group.group.group_id) is not held_group:
            return
        held_group.wake_s = math.inf
        held_group.group.restart_sessions(self._awake_s)
        held_group.group.tick(self._now_s)
        self._follow_up(held_group)

    def _release(self, held_group: _Held, code: GroupCode | None = None) -> None:
        """Forget the group. If there is a code, answer the waiting requests with it."""
        if self._held.get(held_group.group.group_id) is held_group:
            del self._held[held_group.group.group_id]
            self._count(held_group, Counter(), Counter())
        if held_group.timer is not None:
            held_group.timer.cancel()
        held_group.group.actions.clear()
        if code is not None:
            held_group.group.close(code)
        self._end_removals(held_group)

    # -- commits

    async def _commit(self, held_group: _Held) -> None:
        """Commit the group's actions in their order, until there are none.

        **On a crash** before a SettleGroup: the members got no assignments and join again. Before
        a removal: the members' sessions end at the next coordinator."""
        actions = held_group.group.actions
        try:
            while actions:
                first = actions[0]
                if isinstance(first, SettleGroup):
                    del actions[0]
                    await self._settle(held_group, first)
                else:
                    await self._remove(held_group)
        except TASK_ENDS:
            raise
        except BaseException as error:  # without an answer, the members would wait forever
            log.critical("bug in the group %s", held_group.group.group_id, exc_info=error)
            self._release(held_group, GroupCode.COORDINATOR_NOT_AVAILABLE)
        finally:
            held_group.task = None
            self._end_removals(held_group)
        self._follow_up(held_group)

    async def _settle(self, held_group: _Held, action: SettleGroup) -> None:
        code = GroupCode.NONE
        try:  # the group may have got its term since the action was made, by the commit before
            await self._log.submit(msgspec.structs.replace(action, term=held_group.group.term))
        except LogError as error:
            code = _code_of(error)
            log.info("generation %d of group %s: %s", action.generation, action.group_id, error)
        members = self._log.state.members
        if code is GroupCode.NOT_COORDINATOR and members.get(action.group_id) is None:
            # The group is new, and a deleted group had this generation: take a greater one.
            held_group.group.generation_floor = members.generation_floor
            code = GroupCode.REBALANCE_IN_PROGRESS
        if code is GroupCode.NOT_COORDINATOR:
            self._release(held_group, code)
            return
        held_group.group.settled(action, code, self._now_s)
        self._follow_up(held_group)

    async def _remove(self, held_group: _Held) -> None:
        """Commit the removals up to the next SettleGroup."""
        group, actions = held_group.group, held_group.group.actions
        removals = [
            removal
            for removal in itertools.takewhile(
                lambda action: not isinstance(action, SettleGroup), actions
            )
            if isinstance(removal, LeaveGroup | ExpireMember)
        ]
        waiting = len(held_group.removals)
        try:
            in_state = self._log.state.members.get(group.group_id)
            members = {} if in_state is None else in_state.members
            left = {
                removal.member_id: removal for removal in removals if removal.member_id in members
            }
            for removal in left.values():
                log.info("member %s of group %s leaves", removal.member_id, group.group_id)
            if left:
                await self._log.submit(*left.values())
        except StaleCommit as error:  # another broker has the group, or has removed a member
            log.info("members of group %s: %s", group.group_id, error)
        except LogError as error:
            log.info("members of group %s are not removed yet: %s", group.group_id, error)
            if len(actions) == len(removals):  # else the next SettleGroup removes them too
                self._end_removals(held_group, waiting)
                await asyncio.sleep(RETRY_S)
                return
        self._end_removals(held_group, waiting)
        del actions[: len(removals)]

    def _end_removals(self, held_group: _Held, count: int | None = None) -> None:
        ended, held_group.removals = (
            held_group.removals[:count],
            held_group.removals[len(held_group.removals[:count]) :],
        )
        for removal in ended:
            _answer(removal, None)

    # -- events of the log

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        for group_id in applied.groups:
            held_group = self._held.get(group_id)
            if held_group is not None:
                self._check(held_group)

    def on_reset(self) -> None:
        for held_group in list(self._held.values()):
            self._check(held_group)

    def _check(self, held_group: _Held) -> None:
        """Release the group if another broker coordinates it now."""
        own = held_group.group
        group = self._log.state.members.get(own.group_id)
        if group is None:
            own.term = 0
        elif group.coordinator == own.coordinator and own.term in (0, group.term):
            own.term = group.term
        else:
            self._release(held_group, GroupCode.NOT_COORDINATOR)

    # -- background work

    async def run(self) -> None:
        """Take groups whose coordinator is gone, and note whether the process was suspended."""
        self._looked_s = self._now_s
        for number in itertools.count(1):
            await asyncio.sleep(TICK_S)
            now_s = self._now_s
            if now_s - self._looked_s > AWAKE_S:
                self._awake_s = now_s
            self._looked_s = now_s
            if number % ADOPT_TICKS == 0:
                with surviving(log, "the takeover of groups"):
                    await self._adopt()

    async def _adopt(self) -> None:
        groups = list(self._log.state.members)
        for first in range(0, len(groups), ADOPTS_AT_ONCE):
            orphans = [
                self._hold(group.group_id)
                for group in groups[first : first + ADOPTS_AT_ONCE]
                if group.is_assigned_by_clients
                and group.members
                and group.group_id not in self._held
                and self.is_coordinator(group.group_id)
            ]
            with surviving(log, "the takeover of some groups"):
                await all_of(orphans)
            await asyncio.sleep(0)

    def drain(self) -> None:
        """Answer all waiting requests, and refuse new ones, so that clients go to another
        broker."""
        self._is_draining = True
        for held_group in list(self._held.values()):
            self._release(held_group, GroupCode.NOT_COORDINATOR)

    async def close(self) -> None:
        """Drain, and stop the commits under way."""
        await asyncio.gather(*self.stop(), return_exceptions=True)

    def stop(self) -> list[asyncio.Task[None]]:
        """Drain. Cancel the commits under way, and return their tasks."""
        tasks = [
            held_group.task for held_group in self._held.values() if held_group.task is not None
        ]
        self.drain()
        for task in tasks:
            task.cancel()
        return tasks


def _answer(future: "asyncio.Future[A]", answer: A) -> None:
    if not future.done():
        future.set_result(answer)


def _code_of(error: LogError) -> GroupCode:
    """Return the answer to members whose assignments were not committed."""
    codes: dict[type[LogError], GroupCode] = {
        IllegalGeneration: GroupCode.NOT_COORDINATOR,
        InconsistentGroupProtocol: GroupCode.INCONSISTENT_GROUP_PROTOCOL,
        InvalidRequest: GroupCode.INVALID_REQUEST,
        BoundReached: GroupCode.GROUP_MAX_SIZE_REACHED,
    }
    kinds = (code for kind, code in codes.items() if isinstance(error, kind))
    return next(kinds, GroupCode.COORDINATOR_NOT_AVAILABLE)
