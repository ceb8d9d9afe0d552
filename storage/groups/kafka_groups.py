"""The groups of Kafka's classic protocol that this broker coordinates.

`classic_protocol` is the protocol of one group, `coordinator` takes groups over and calls their
timers. This module commits the actions of a group one after the other, and lets requests wait for
their answers.

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
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import (
    AnyAction,
    CommitOffsets,
    DeleteGroup,
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
    UnknownMember,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.classic_protocol import ClassicGroup
from tidelog.storage.groups.coordinator import RETRY_S, CoordinatedGroup, Coordinator
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
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.log_engine import Log
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.state.group_members import CLIENT_BYTES_MAX, MEMBERS_MAX
from tidelog.storage.state.group_state import NO_GENERATION, ClientMember, ConsumerGroup
from tidelog.storage.state.principal_shares import CLIENT_BYTES, MEMBERS, WITHOUT_SHARE, Shares

log = logging.getLogger("tidelog.groups")

A = TypeVar("A")
Gone: TypeAlias = Sequence[TopicIdPartition]
"""Partitions whose committed offsets are deleted."""

PROTOCOL_BYTES_MAX = 4 * CLIENT_BYTES_MAX
"""Bound of the metadata that the members of all groups sent (I10). A principal adds metadata or
members only while it then has at most as much as is free, so a new principal always finds room."""


class KafkaGroup(CoordinatedGroup):
    """A classic group at its coordinator.

    It commits the actions of `classic`, one after the other, and counts the members. `go_on`
    follows each event.
    """

    def __init__(self, log: Log, groups: "KafkaGroups", classic: ClassicGroup) -> None:
        super().__init__(classic.group_id, groups)
        self.classic = classic
        self._groups = groups
        self._log = log
        self._is_committing = False
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        """Members and their bytes by principal that `groups` has counted."""
        self._removals: list[asyncio.Future[None]] = []
        """Each is done when the broker has tried to commit the removals of members that were
        requested before it."""

    @property
    def term(self) -> int:
        return self.classic.term

    @property
    def wake_s(self) -> float:
        return self.classic.wake_s

    @property
    def look_s(self) -> float:
        return self.classic.look_s

    @property
    def is_idle(self) -> bool:
        return self.classic.is_idle and not self._is_committing

    def tick(self, now_s: float) -> None:
        self.classic.tick(now_s)
        self._take_up()

    def restart_sessions(self, began_s: float) -> None:
        self.classic.restart_sessions(began_s)

    def follow(self, group: ConsumerGroup | None, actions: Sequence[AnyAction]) -> None:
        self.classic.term = 0 if group is None else group.term

    def close(self) -> None:
        self.close_with(GroupCode.NOT_COORDINATOR)

    def close_with(self, code: GroupCode) -> None:
        """Answer the waiting requests with this code."""
        self._count(Counter(), Counter())
        self.classic.actions.clear()
        self.classic.close(code)
        self._end_removals()

    def go_on(self) -> None:
        """Do what the last event of the group requires: commits and timers."""
        self._take_up()
        self._groups.coordinator.go_on(self)

    def _take_up(self) -> None:
        if not self._groups.coordinator.has(self):
            return  # another broker has the group
        self._count(self.classic.members.counts, self.classic.members.sizes)
        if self.classic.actions and not self._is_committing:
            self._is_committing = True
            self._groups.coordinator.start(self._commit())

    def _count(self, counts: Counter[str], sizes: Counter[str]) -> None:
        """Count the members, and their bytes, by principal."""
        changes = (MEMBERS, self._counts, counts), (CLIENT_BYTES, self._sizes, sizes)
        for bound, old_counts, new_counts in changes:
            if old_counts != new_counts:
                self._groups.used.change(bound, old_counts, new_counts)
                old_counts.clear()
                old_counts.update(new_counts)

    # -- requests

    async def reply(
        self,
        handle: Callable[[Callable[[A], None], float], None],
        on_counted: Callable[[], object] | None = None,
    ) -> A:
        """Let the group handle a request, and wait for its reply.

        If the caller is cancelled, the group drops the reply.
        """
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        reply = partial(_answer, answer)
        handle(reply, self._log.clock.boot_s())
        self.go_on()
        try:
            if on_counted is not None and not answer.done():
                on_counted()
            return await answer
        except asyncio.CancelledError:
            self.classic.lose(reply, self._log.clock.boot_s())
            self.go_on()
            raise

    async def leave(self, members: Sequence[Identity]) -> list[GroupCode]:
        codes = [self.classic.leave(identity, self._log.clock.boot_s()) for identity in members]
        self._removals.append(removal := asyncio.get_running_loop().create_future())
        self.go_on()
        if self._is_committing:
            await removal
        return codes

    # -- commits

    async def _commit(self) -> None:
        """Commit the group's actions in their order, until there are none.

        **On a crash** before a SettleGroup: the members got no assignments and join again. Before
        a removal: the members' sessions end at the next coordinator.
        """
        actions = self.classic.actions
        try:
            while actions:
                first = actions[0]
                if isinstance(first, SettleGroup):
                    del actions[0]
                    await self._settle(first)
                else:
                    await self._remove()
        except TASK_ENDS:
            raise
        except BaseException as error:  # without an answer, the members would wait forever
            log.critical("bug in the group %s", self.group_id, exc_info=error)
            self.close_with(GroupCode.COORDINATOR_NOT_AVAILABLE)
            self._groups.coordinator.drop(self)
        finally:
            self._is_committing = False
            self._end_removals()
        self.go_on()

    async def _settle(self, action: SettleGroup) -> None:
        code = GroupCode.NONE
        try:  # the group may have got its term since the action was made, by the commit before
            await self._log.submit(msgspec.structs.replace(action, term=self.term))
        except LogError as error:
            code = _code_of(error)
            log.info("generation %d of group %s: %s", action.generation, action.group_id, error)
        members = self._log.state.members
        if code is GroupCode.NOT_COORDINATOR and members.get(action.group_id) is None:
            # The group is new, and a deleted group had this generation: take a greater one.
            self.classic.generation_floor = members.generation_floor
            code = GroupCode.REBALANCE_IN_PROGRESS
        if code is GroupCode.NOT_COORDINATOR:
            self._groups.coordinator.drop(self)
            return
        self.classic.settled(action, code, self._log.clock.boot_s())
        self.go_on()

    async def _remove(self) -> None:
        """Commit the removals up to the next SettleGroup."""
        actions = self.classic.actions
        removals = [
            removal
            for removal in itertools.takewhile(
                lambda action: not isinstance(action, SettleGroup), actions
            )
            if isinstance(removal, LeaveGroup | ExpireMember)
        ]
        waiting = len(self._removals)
        try:
            in_state = self._log.state.members.get(self.group_id)
            members = {} if in_state is None else in_state.members
            removal_by_id = {
                removal.member_id: removal for removal in removals if removal.member_id in members
            }
            for removal in removal_by_id.values():
                log.info("member %s of group %s leaves", removal.member_id, self.group_id)
            if removal_by_id:
                await self._log.submit(*removal_by_id.values())
        except StaleCommit as error:  # another broker has the group, or has removed a member
            log.info("members of group %s: %s", self.group_id, error)
        except LogError as error:
            log.info("members of group %s are not removed yet: %s", self.group_id, error)
            if len(actions) == len(removals):  # else the next SettleGroup removes them too
                self._end_removals(waiting)
                await asyncio.sleep(RETRY_S)
                return
        self._end_removals(waiting)
        del actions[: len(removals)]

    def _end_removals(self, count: int | None = None) -> None:
        ended = self._removals[:count]
        del self._removals[: len(ended)]
        for removal in ended:
            _answer(removal, None)


class KafkaGroups:
    """The classic groups that this broker coordinates: a kind of groups.

    Owned by the log's event loop.
    """

    def __init__(
        self, log: Log, coordinator: Coordinator, commits: OffsetCommits, delay_s: float
    ) -> None:
        """The first rebalance of an empty group waits `delay_s` for more members."""
        self._log = log
        self.coordinator = coordinator
        self.used = Shares()
        """All members, and the bytes of their metadata, by principal."""
        self._commits = commits
        self._delay_s = delay_s
        coordinator.add_kind(self)

    def serves(self, group: ConsumerGroup) -> bool:
        return group.is_assigned_by_clients

    def open(self, group_id: str, group: ConsumerGroup | None, *, is_alone: bool) -> KafkaGroup:
        if group is None:
            me, floor = self.coordinator.coordinators.me, self._log.state.members.generation_floor
            classic = ClassicGroup(group_id, me, 0, floor, self._new_id, self._delay_s)
        else:
            now_s = self._log.clock.boot_s()
            classic = ClassicGroup.restored(group, self._new_id, self._delay_s, now_s)
        return KafkaGroup(self._log, self, classic)

    def _new_id(self) -> str:
        return self._log.clock.new_id().hex()

    def release(self) -> None:
        """Answer all waiting requests and refuse new ones, so that clients go elsewhere."""
        self.coordinator.release(self)

    # -- requests

    async def join(
        self, group_id: str, request: JoinRequest, on_counted: Callable[[], object] | None = None
    ) -> Joined:
        """Handle JoinGroup.

        Returns at the end of the join phase. `on_counted` is called when the request is counted
        among the bytes of members, if it then waits.
        """
        group = await self._coordinate(group_id, is_new=True)
        if isinstance(group, GroupCode):
            return Joined(group, request.who.member_id)
        if not self._has_room(group.classic.members, request):
            group.go_on()  # to drop a group that is new
            return Joined(GroupCode.GROUP_MAX_SIZE_REACHED, request.who.member_id)
        return await group.reply(partial(group.classic.join, request), on_counted)

    def _has_room(self, roster: Roster, request: JoinRequest) -> bool:
        members, size = roster.growth(request)
        return self._has_free(MEMBERS, request.principal, members, MEMBERS_MAX) and (
            self._has_free(CLIENT_BYTES, request.principal, size, PROTOCOL_BYTES_MAX)
        )

    def _has_free(self, bound: str, principal: str, added_count: int, maximum: int) -> bool:
        used = 0 if principal in WITHOUT_SHARE else self.used.used(bound, principal)
        return added_count <= 0 or used + added_count <= maximum - self.used.total(bound)

    async def sync(self, group_id: str, request: SyncRequest) -> Synced:
        """Handle SyncGroup. Returns when the assignments are committed."""
        group = await self._coordinate(group_id)
        if isinstance(group, GroupCode):
            return Synced(group)
        return await group.reply(partial(group.classic.sync, request))

    async def heartbeat(self, group_id: str, identity: Identity, generation: int) -> GroupCode:
        group = await self._coordinate(group_id)
        if isinstance(group, GroupCode):
            return group
        return group.classic.heartbeat(identity, generation, self._log.clock.boot_s())

    async def leave(
        self, group_id: str, members: Sequence[Identity]
    ) -> list[GroupCode] | GroupCode:
        """Handle LeaveGroup. Returns a code for each member, or one for the request."""
        group = await self._coordinate(group_id)
        if isinstance(group, GroupCode):
            return [group] * len(members) if group is GroupCode.UNKNOWN_MEMBER_ID else group
        return await group.leave(members)

    async def commit_offsets(
        self,
        group_id: str,
        identity: Identity,
        generation: int,
        offsets: list[GroupOffset],
        gone_partitions: Gone,
    ) -> GroupCode:
        """Commit offsets of a member, or of any client while the group has no members.

        Delete the offsets of `gone_partitions`. Raises the errors of a commit.
        """
        code = await self._check_commit(group_id, identity, generation)
        if code is not GroupCode.NONE or not (offsets or gone_partitions):
            return code
        member_id = identity.member_id if generation >= 0 else ""
        try:
            commit = CommitOffsets(group_id, max(generation, NO_GENERATION), offsets, member_id)
            if gone_partitions:  # one commit: `apply` refuses both actions of an older generation
                await self._log.submit(commit, DeleteOffsets(group_id, list(gone_partitions)))
            else:
                await self._commits.add(commit)
        except GroupNotEmpty:
            return GroupCode.UNKNOWN_MEMBER_ID
        return GroupCode.NONE

    async def _check_commit(self, group_id: str, identity: Identity, generation: int) -> GroupCode:
        members = self._log.state.members
        if generation < 0 and self.group(group_id) is None and not members.has_members(group_id):
            return GroupCode.NONE if self.is_coordinator(group_id) else GroupCode.NOT_COORDINATOR
        group = await self._coordinate(group_id)
        if isinstance(group, KafkaGroup):
            return group.classic.check_commit(identity, generation, self._log.clock.boot_s())
        if group is GroupCode.UNKNOWN_MEMBER_ID and members.get(group_id) is None:
            return GroupCode.ILLEGAL_GENERATION
        return group

    async def delete(self, group_id: str) -> None:
        """Delete a group. Raises GroupNotEmpty."""
        group = self.group(group_id)
        if group is not None and group.classic.members:
            raise GroupNotEmpty(f"group {group_id!r} has members")
        await self._log.submit(DeleteGroup(group_id))

    # -- reading

    def describe(self, group_id: str) -> Description | None:
        """Return the group, or None.

        There is none if this broker has no member of it and the cluster state has no client group
        of this name.
        """
        kafka_group, group = self.group(group_id), self._log.state.members.get(group_id)
        if kafka_group is not None and kafka_group.classic.members:
            own = kafka_group.classic
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
        return [
            group_id
            for group_id, group in self.coordinator.groups.items()
            if isinstance(group, KafkaGroup) and group.classic.members
        ]

    def group(self, group_id: str) -> KafkaGroup | None:
        """Return the group if this broker coordinates it."""
        group = self.coordinator.groups.get(group_id)
        return group if isinstance(group, KafkaGroup) else None

    def is_coordinator(self, group_id: str) -> bool:
        """Return whether this broker is, or would become, the coordinator of the group."""
        if self.coordinator.is_released(self):
            return False
        return self.coordinator.other_broker_of(group_id) is None

    async def _coordinate(self, group_id: str, *, is_new: bool = False) -> KafkaGroup | GroupCode:
        """Return the group, after this broker has become its coordinator.

        Without `is_new`, return UNKNOWN_MEMBER_ID for a group without members.
        """
        if not self.is_coordinator(group_id):
            return GroupCode.NOT_COORDINATOR
        if (kafka_group := self.group(group_id)) is not None:
            return kafka_group
        if not is_new and not self._log.state.members.has_members(group_id):
            await self._log.wal.refresh()  # another broker may have just settled the group (I3)
            if not self._log.state.members.has_members(group_id):
                return GroupCode.UNKNOWN_MEMBER_ID
        if self._log.state.level < format_levels.KAFKA:
            return GroupCode.UNSUPPORTED_VERSION
        try:
            group = await self.coordinator.coordinate(group_id, self)
        except UnknownMember:
            return GroupCode.INCONSISTENT_GROUP_PROTOCOL if is_new else GroupCode.UNKNOWN_MEMBER_ID
        except LogError as error:
            log.info("group %s cannot be taken: %s", group_id, error)
            is_here = self.is_coordinator(group_id)
            return GroupCode.COORDINATOR_NOT_AVAILABLE if is_here else GroupCode.NOT_COORDINATOR
        assert isinstance(group, KafkaGroup)
        return group


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
