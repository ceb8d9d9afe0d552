"""One group of Kafka's classic protocol, as its coordinator holds it between two commits.

A rebalance has two phases. In the join phase, all members send JoinGroup; at its end each member
gets the next generation, and one member, the leader, gets the list of all members. In the sync
phase, the leader sends the assignments of all members with SyncGroup. The coordinator commits them
(`SettleGroup`), and only then answers the SyncGroup of each member. Before that commit, the WAL has
nothing of a rebalance: not the members that joined, not their votes for an assignor, not the member
ids that wait for their first JoinGroup.

ClassicGroup is a state machine. It takes requests and the time. It answers each request through the
callback of the request, now or later. It puts the actions that its owner must commit into
`actions`. The owner calls `settled` with the result of each SettleGroup, and `tick` when the time
in `wake_s` has come. Times are seconds of a clock that never goes back. Pure.

The answers are those of Kafka's GroupMetadataManager, with one exception: a member that changes its
assignors is compared with the other members only, and not with its own last assignors.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tidelog.storage.core.actions import ExpireMember, LeaveGroup, SettleGroup
from tidelog.storage.groups.kafka_requests import (
    GroupCode,
    GroupPhase,
    Identity,
    Joined,
    JoinedMember,
    JoinRequest,
    OnJoined,
    OnSynced,
    Synced,
    SyncRequest,
)
from tidelog.storage.groups.kafka_roster import Roster, RosterMember
from tidelog.storage.state.group_state import (
    GROUP_BYTES_MAX,
    MEMBERS_OF_GROUP_MAX,
    NAME_BYTES_MAX,
    ClientMember,
    ConsumerGroup,
    check_name,
)

SESSION_MS_MIN, SESSION_MS_MAX = 6_000, 1_800_000
"""Kafka's `group.min.session.timeout.ms` and `group.max.session.timeout.ms`."""
PROTOCOL_BYTES_MAX = 4 * GROUP_BYTES_MAX
"""Bound of the metadata for all assignors of all members (I10). Only those for one assignor are
committed."""
MEMBER_ID_S = 5.0
"""A new member must join again with its new id within this time, because the others wait for it."""
STATIC_WAIT_S = 1.0
"""If only absent static members are left, the join phase goes on for at least this time."""

GroupChange: TypeAlias = SettleGroup | LeaveGroup | ExpireMember


@dataclass(slots=True, eq=False)
class _Replacement:
    """A static member that joined again. `reply` gets the answer when the new id is committed."""

    action: SettleGroup
    answer: Joined
    reply: OnJoined


@dataclass(eq=False)
class ClassicGroup:
    """A group in one term of its coordinator.

    `term` is 0 until the cluster state has the group. `settled_generation` is the generation in the
    cluster state. `new_id` makes unique texts. The first rebalance of an empty group waits
    `delay_s` for more members. Each new generation is also greater than `generation_floor`.
    """

    group_id: str
    coordinator: str
    term: int
    generation: int
    new_id: Callable[[], str]
    delay_s: float
    settled_generation: int = 0
    generation_floor: int = 0
    phase: GroupPhase = GroupPhase.EMPTY
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: Roster = field(default_factory=Roster)
    actions: list[GroupChange] = field(default_factory=list)
    _unsynced: set[str] = field(default_factory=set)  # joined, but sent no SyncGroup yet
    _in_state: set[str] = field(default_factory=set)  # members in the cluster state
    _settling: SettleGroup | None = None
    _replacements: list[_Replacement] = field(default_factory=list)
    _join_ends_s: float = math.inf
    _delay_ends_s: float = math.inf
    _sync_ends_s: float = math.inf
    _look_s: float = 0.0  # no session ends before this time

    @classmethod
    def restored(
        cls, group: ConsumerGroup, new_id: Callable[[], str], delay_s: float, now_s: float
    ) -> "ClassicGroup":
        """Continue a group of the cluster state.

        Each session begins again. Only a group that `is_preparing` begins a rebalance.
        """
        classic_group = cls(
            group.group_id, group.coordinator, group.term, group.generation, new_id, delay_s
        )
        classic_group.settled_generation = group.generation
        members = [member for member in group.members.values() if isinstance(member, ClientMember)]
        if not members:
            return classic_group
        classic_group.protocol_type, classic_group.protocol = group.protocol_type, group.protocol
        classic_group.leader = (
            group.leader if group.leader in group.members else members[0].member_id
        )
        for member in members:
            classic_group.members.put(RosterMember.restored(member, group, now_s))
        classic_group._in_state = set(group.members)
        classic_group.phase = GroupPhase.STABLE
        if group.is_preparing:
            classic_group._rebalance(now_s)
        return classic_group

    # -- requests

    def join(self, request: JoinRequest, reply: OnJoined, now_s: float) -> None:
        """Handle JoinGroup. `reply` gets the answer, now or at the end of the join phase."""
        identity = request.who
        is_promised = identity.member_id in self.members.promised and not identity.instance_id
        code = self._check_join(request)
        if code is GroupCode.NONE and identity.member_id and not is_promised:
            code = self.members.check(identity)
        if code is not GroupCode.NONE:
            reply(Joined(code, identity.member_id))
            return
        member = self.members.find(identity)
        if member is not None and identity.member_id:
            self._join_again(member, request, reply, now_s)
        elif member is not None:
            self._replace(member, request, reply, now_s)
        elif is_promised or identity.instance_id or not request.needs_member_id:
            self.members.end_promise(identity.member_id)
            self._add(identity.member_id or self._name(request), request, reply, now_s)
        else:
            member_id = self._name(request)
            self.members.promise(member_id, request.principal, now_s + MEMBER_ID_S)
            self._look_s = 0.0
            reply(Joined(GroupCode.MEMBER_ID_REQUIRED, member_id))

    def sync(self, request: SyncRequest, reply: OnSynced, now_s: float) -> None:
        """Handle SyncGroup. `reply` gets the answer, now or when the assignments are committed."""
        code = self._check(request.who, request.generation)
        is_same = request.protocol_type in {None, self.protocol_type} and (
            request.protocol in {None, self.protocol}
        )
        if code is GroupCode.NONE and not is_same:
            code = GroupCode.INCONSISTENT_GROUP_PROTOCOL
        elif code is GroupCode.NONE and self.phase is GroupPhase.PREPARING:
            code = GroupCode.REBALANCE_IN_PROGRESS
        if code is not GroupCode.NONE:
            reply(Synced(code))
            return
        member = self.members[request.who.member_id]
        member.heard_s = now_s
        self._unsynced.discard(member.member_id)
        if self.phase is GroupPhase.STABLE:
            reply(Synced(GroupCode.NONE, self.protocol_type, self.protocol, member.assignment))
            return
        member.answer_sync(
            Synced(GroupCode.REBALANCE_IN_PROGRESS)
        )  # the member's earlier SyncGroup
        member.syncing = reply
        if member.member_id == self.leader and self._settling is None:
            self._settling = self._settlement(request.assignments)

    def heartbeat(self, identity: Identity, generation: int, now_s: float) -> GroupCode:
        code = self._check(identity, generation)
        if code is GroupCode.NONE:
            self.members[identity.member_id].heard_s = now_s
            if self.phase is GroupPhase.PREPARING:
                return GroupCode.REBALANCE_IN_PROGRESS
        return code

    def leave(self, identity: Identity, now_s: float) -> GroupCode:
        """Remove a member, which may be named by its instance id alone."""
        if self.members.end_promise(identity.member_id):
            self._complete_if_joined(now_s)
            return GroupCode.NONE
        member = self.members.find(identity)
        if member is None:
            return GroupCode.UNKNOWN_MEMBER_ID
        code = self.members.check(identity._replace(member_id=member.member_id))
        if code is GroupCode.NONE:
            self.actions.append(LeaveGroup(self.group_id, member.member_id))
            self._remove(member, now_s)
        return code

    def check_commit(self, identity: Identity, generation: int, now_s: float) -> GroupCode:
        """Return NONE if this member may commit offsets now, else the error.

        A commit counts as a heartbeat. While the group is empty, every client may commit without a
        generation.
        """
        if generation < 0 and not self.members:
            return GroupCode.NONE
        code = self._check(identity, generation)
        if code is not GroupCode.NONE:
            return code
        self.members[identity.member_id].heard_s = now_s
        if self.phase is GroupPhase.COMPLETING or self.generation != self.settled_generation:
            return GroupCode.REBALANCE_IN_PROGRESS
        return GroupCode.NONE

    # -- other events

    @property
    def wake_s(self) -> float:
        """The time at which a phase of a rebalance ends, even if no request comes."""
        ends_s = self._sync_ends_s if self._unsynced else math.inf
        return min(ends_s, self._join_ends_s if self.phase is GroupPhase.PREPARING else math.inf)

    @property
    def look_s(self) -> float:
        """No session ends before this time. Requests may move the first end to a later time."""
        return self._look_s if self.members or self.members.promised else math.inf

    @property
    def is_idle(self) -> bool:
        """Whether the group has neither members nor open work, so that its owner may release it."""
        members = self.members
        return not (members or members.promised or self.actions or self._replacements)

    def tick(self, now_s: float) -> None:
        """End the sessions and the phases of a rebalance whose time is over."""
        if now_s >= self._look_s:
            self._expire(now_s)
        if self._unsynced and now_s >= self._sync_ends_s:
            silent = [self.members[member_id] for member_id in sorted(self._unsynced)]
            self._drop(silent, now_s)
        if self.phase is GroupPhase.PREPARING and now_s >= self._join_ends_s:
            self._complete(now_s)

    def settled(self, action: SettleGroup, code: GroupCode, now_s: float) -> None:
        """Note the result of a commit of SettleGroup.

        If the commit failed, `code` is the answer to the members, and they join again.
        """
        if code is GroupCode.NONE:
            self.term = max(self.term, 1)
            self.settled_generation = action.generation
            self._in_state = {member.member_id for member in action.members}
            if self.phase is GroupPhase.EMPTY:  # the members left meanwhile
                self._empty_state()
        for replacement in [
            replacement for replacement in self._replacements if replacement.action is action
        ]:
            self._replacements.remove(replacement)
            replacement.reply(
                replacement.answer
                if code is GroupCode.NONE
                else Joined(code, replacement.answer.member_id)
            )
        if self._settling is not action:
            return
        self._settling = None
        if self.phase is not GroupPhase.COMPLETING or action.generation != self.generation:
            return  # another rebalance has begun
        if code is not GroupCode.NONE:
            self._rebalance(now_s, code)
            return
        self.phase = GroupPhase.STABLE
        assignments = {member.member_id: member.assignment for member in action.members}
        for member in self.members:
            member.assignment = assignments.get(member.member_id, b"")
            if member.syncing is not None:
                member.heard_s = now_s
                answer = Synced(
                    GroupCode.NONE, self.protocol_type, self.protocol, member.assignment
                )
                member.answer_sync(answer)
        self._look_s = 0.0

    def lose(self, reply: OnJoined | OnSynced, now_s: float) -> None:
        """Remove a waiting request whose client is gone.

        If the client sends no other request, the session of its member ends.
        """
        for member in self.members:
            if reply in (member.joining, member.syncing):
                member.joining = member.syncing = None
                member.heard_s, self._look_s = now_s, 0.0

    def restart_sessions(self, began_s: float) -> None:
        """Let each session begin at `began_s`, unless its member sent a request later."""
        for member in self.members:
            member.heard_s = max(member.heard_s, began_s)

    def close(self, code: GroupCode) -> None:
        """Answer all waiting requests, because another broker coordinates the group."""
        for member in self.members:
            member.refuse(code)
        replaced, self._replacements = self._replacements, []
        for replacement in replaced:
            replacement.reply(Joined(code, replacement.answer.member_id))

    # -- joining

    def _check_join(self, request: JoinRequest) -> GroupCode:
        identity = request.who
        if not SESSION_MS_MIN <= request.session_timeout_ms <= SESSION_MS_MAX:
            return GroupCode.INVALID_SESSION_TIMEOUT
        if request.rebalance_timeout_ms < 0 or (
            identity.instance_id and check_name(identity.instance_id) is not None
        ):
            return GroupCode.INVALID_REQUEST
        if not request.protocols or not request.protocol_type:
            return GroupCode.INCONSISTENT_GROUP_PROTOCOL
        own = self.members.find(identity)
        if len(self.members) > (own is not None) and (
            request.protocol_type != self.protocol_type
            or not self.members.is_compatible(request, own)
        ):
            return GroupCode.INCONSISTENT_GROUP_PROTOCOL
        size = self.members.size + request.size - (0 if own is None else own.request.size)
        count = len(self.members) + len(self.members.promised)
        is_new = own is None and identity.member_id not in self.members.promised
        if (is_new and count >= MEMBERS_OF_GROUP_MAX) or size > PROTOCOL_BYTES_MAX:
            return GroupCode.GROUP_MAX_SIZE_REACHED
        return GroupCode.NONE

    def _check(self, identity: Identity, generation: int) -> GroupCode:
        code = self.members.check(identity)
        if code is GroupCode.NONE and generation != self.generation:
            return GroupCode.ILLEGAL_GENERATION
        return code

    def _name(self, request: JoinRequest) -> str:
        """Return a new member id.

        It begins with the instance id or the client id, so that people recognise the member.
        """
        start = request.who.instance_id or request.client_id
        start = "".join(character if character.isprintable() else "_" for character in start)
        unique = self.new_id()
        room = NAME_BYTES_MAX - len(unique) - 1
        return f"{start.encode()[:room].decode(errors='ignore')}-{unique}"

    def _add(self, member_id: str, request: JoinRequest, reply: OnJoined, now_s: float) -> None:
        if not self.members:
            self.protocol_type, self.leader = request.protocol_type, member_id
        self.members.put(RosterMember(member_id, request, now_s, joining=reply))
        if self.phase is GroupPhase.PREPARING and self._delay_ends_s < math.inf:
            self._join_ends_s = min(now_s + self.delay_s, self._delay_ends_s)
        self._rebalance(now_s)

    def _join_again(
        self, member: RosterMember, request: JoinRequest, reply: OnJoined, now_s: float
    ) -> None:
        is_same = list(member.request.protocols) == list(request.protocols)
        is_leader = member.member_id == self.leader
        member.heard_s = now_s
        if is_same and (
            self.phase is GroupPhase.COMPLETING
            or (self.phase is GroupPhase.STABLE and not is_leader)
        ):
            reply(self._joined(member))  # the member did not get the first answer
            return
        member.answer_join(Joined(GroupCode.REBALANCE_IN_PROGRESS, member.member_id))
        self._change(member, request)
        member.joining = reply
        self._rebalance(now_s)

    def _replace(
        self, member: RosterMember, request: JoinRequest, reply: OnJoined, now_s: float
    ) -> None:
        """Give a static member that was restarted a new id. The old id is fenced."""
        old_id, metadata = member.member_id, member.metadata(self.protocol)
        was_leader = old_id == self.leader
        member.refuse(GroupCode.FENCED_INSTANCE_ID)
        self._unsynced.discard(old_id)
        self.members.rename(member, self._name(request))
        member.heard_s = now_s
        if was_leader:
            self.leader = member.member_id
        self._change(member, request)
        is_same = (
            self.members.elect() == self.protocol and member.metadata(self.protocol) == metadata
        )
        if self.phase is not GroupPhase.STABLE or not is_same:
            member.joining = reply
            self._rebalance(now_s)
            return
        answer = self._joined(member)
        if was_leader and request.may_skip:
            answer = answer._replace(skip_assignment=True)
        elif was_leader:  # no member may compute assignments: name the old id as leader
            answer = answer._replace(leader=old_id, members=())
        assignments = {
            group_member.member_id: group_member.assignment for group_member in self.members
        }
        self._replacements.append(_Replacement(self._settlement(assignments), answer, reply))

    def _change(self, member: RosterMember, request: JoinRequest) -> None:
        self.members.change(member, request)
        if len(self.members) == 1:
            self.protocol_type = request.protocol_type
        self._look_s = 0.0

    # -- rebalances

    def _rebalance(self, now_s: float, code: GroupCode = GroupCode.REBALANCE_IN_PROGRESS) -> None:
        """Begin the join phase, unless it has begun. SyncGroups that wait are answered `code`."""
        if self.phase is not GroupPhase.PREPARING:
            for member in self.members:
                member.answer_sync(Synced(code))
            self._unsynced.clear()
            self._join_ends_s = now_s + self.members.rebalance_timeout_s
            self._delay_ends_s = math.inf
            if self.phase is GroupPhase.EMPTY and self.delay_s:
                self._delay_ends_s = self._join_ends_s
                self._join_ends_s = min(now_s + self.delay_s, self._delay_ends_s)
            self.phase = GroupPhase.PREPARING
        self._look_s = 0.0
        self._complete_if_joined(now_s)

    def _complete_if_joined(self, now_s: float) -> None:
        is_delayed = self._delay_ends_s < math.inf and bool(self.members)
        if self.phase is not GroupPhase.PREPARING or self.members.promised or is_delayed:
            return
        if self.members.have_all_joined:
            self._complete(now_s)

    def _complete(self, now_s: float) -> None:
        """End the join phase. Dynamic members that did not join again are out of the group."""
        for member in self.members:
            if member.joining is None and not member.instance_id:
                self._forget(member)
        if not self.members:
            self._become_empty()
            return
        joined = [member for member in self.members if member.joining is not None]
        if not joined:  # static members, whose sessions have not ended
            self._join_ends_s = now_s + max(self.members.rebalance_timeout_s, STATIC_WAIT_S)
            return
        if self.leader not in self.members or self.members[self.leader].joining is None:
            self.leader = joined[0].member_id
        self._delay_ends_s = math.inf
        self.generation = max(self.generation, self.generation_floor) + 1
        self.protocol = self.members.elect()
        self.phase, self._settling = GroupPhase.COMPLETING, None
        self._unsynced = {member.member_id for member in joined}
        self._sync_ends_s = now_s + self.members.rebalance_timeout_s
        for member in joined:
            member.heard_s = now_s
            member.answer_join(self._joined(member))
        self._look_s = 0.0

    def _joined(self, member: RosterMember) -> Joined:
        members: list[JoinedMember] = []
        if member.member_id == self.leader:
            members = [
                JoinedMember(
                    group_member.member_id,
                    group_member.instance_id,
                    group_member.metadata(self.protocol),
                )
                for group_member in self.members
            ]
        return Joined(
            GroupCode.NONE,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            members=members,
        )

    def _settlement(self, assignments: Mapping[str, bytes]) -> SettleGroup:
        """Add the action that commits the generation, its members and these assignments."""
        action = SettleGroup(
            self.group_id,
            self.coordinator,
            self.term,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            self.members.settled(self.protocol, assignments),
        )
        self.actions.append(action)
        return action

    # -- members that go

    def _expire(self, now_s: float) -> None:
        promised = self.members.promised
        for member_id in [
            member_id for member_id, promise in promised.items() if promise.ends_s <= now_s
        ]:
            self.members.end_promise(member_id)
        self._drop([member for member in self.members if member.ends_s <= now_s], now_s)
        ends = [promise.ends_s for promise in promised.values()] + [
            member.ends_s for member in self.members
        ]
        self._look_s = min(ends, default=math.inf)
        self._complete_if_joined(now_s)

    def _drop(self, members: Iterable[RosterMember], now_s: float) -> None:
        for member in members:
            if member.member_id in self.members:  # the drop of another one may have removed it
                self._expel([member.member_id])
                self._remove(member, now_s)

    def _expel(self, member_ids: Iterable[str]) -> None:
        term = max(self.term, 1)  # the first SettleGroup begins term 1
        self.actions += [ExpireMember(self.group_id, member_id, term) for member_id in member_ids]

    def _remove(self, member: RosterMember, now_s: float) -> None:
        self._forget(member)
        if self.phase is GroupPhase.PREPARING and not self.members:
            self._become_empty()
        else:
            self._rebalance(now_s)

    def _forget(self, member: RosterMember) -> None:
        self.members.remove(member)
        self._unsynced.discard(member.member_id)
        member.refuse(GroupCode.UNKNOWN_MEMBER_ID)
        if self.leader == member.member_id:
            self.leader = next((group_member.member_id for group_member in self.members), "")

    def _become_empty(self) -> None:
        self.phase, self.leader, self.protocol = GroupPhase.EMPTY, "", ""
        self._delay_ends_s = math.inf
        self._unsynced.clear()
        self._empty_state()

    def _empty_state(self) -> None:
        """Remove all members from the cluster state."""
        self._expel(sorted(self._in_state))
        self._in_state.clear()
