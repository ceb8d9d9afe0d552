"""Members of consumer groups: who is there, what they read, and which generation that is.

Pure, folded by `apply` (I4). A group is its members and a generation. Members that subscribed share
the partitions of their topics by the group's assignor, each partition with one owner (I8); what
they share changes only together with the generation, once at the end of each entry that changed a
member, a subscription or a topic, so that a hundred members that come in one entry cost one
assignment. Members that were assigned by hand read what they named and share nothing.

A pattern is never looked at here: engines differ between versions, and an entry must mean the same
for ever. Whoever subscribes brings the names that it found, and the group's coordinator brings new
ones as topics come (storage.consumers).

Who lives is not known here. A group's coordinator hears its members, softly, and says who is gone
(`ExpireMember`); its term is in the state, so that one which was replaced expires nobody.
Generations of a group's name never go back: a group that was forgotten leaves its last one behind.
"""

from collections.abc import Iterator

import msgspec

from storage.assignors import ASSIGNORS, Owned
from storage.entry import (
    AssignByHand,
    CommitOffsets,
    DeleteGroup,
    ExpireMember,
    GroupAction,
    JoinGroup,
    LeaveGroup,
    Seek,
    Sought,
    Subscribe,
    TakeGroup,
)
from storage.errors import (
    AssignedOtherwise,
    GroupNotEmpty,
    IllegalGeneration,
    InvalidRequest,
    LogError,
    MemberExists,
    NotAssigned,
    Throttled,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from storage.group import Catalog, Group, GroupMember, Inputs, KeptGroup, KeptMembers

NO_GENERATION = -1
NAME_BYTES_MAX = 255
"""Of groups, members and static instances."""
PATTERN_CHARS_MAX = 1000
MEMBERS_MAX = 50_000
"""Of all groups together (I10); ~1 KiB of state and 200 bytes of checkpoint each."""
MEMBERS_OF_GROUP_MAX = 1_000
TOPICS_MAX = 1_000
"""That a member subscribes to, or that its pattern finds."""
PARTITIONS_MAX = 20_000
"""That a group shares, or a member is assigned by hand: `apply` assigns anew at each change."""
RETRY_AFTER_MS = 60_000


class GroupMembers:
    """Part of the cluster state, owned by it. `catalog` is the state's topics, by name."""

    def __init__(self, catalog: Catalog) -> None:
        self.changed: set[str] = set()
        """Groups whose members, assignment or positions changed: for whoever watches to take."""
        self._catalog = catalog
        self._groups: dict[str, Group] = {}
        self._generation_floor = 0
        self._count = 0
        self._unsettled: set[str] = set()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def count(self) -> int:
        """Members of all groups."""
        return self._count

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def member(self, group_id: str, member_id: str) -> GroupMember | None:
        group = self._groups.get(group_id)
        return None if group is None else group.members.get(member_id)

    def has_members(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and bool(group.members)

    # -- checks

    def check(self, action: GroupAction) -> LogError | None:
        """Why the action cannot be done."""
        if isinstance(action, JoinGroup):
            return self._check_join(action)
        group = self._groups.get(action.group_id)
        if isinstance(action, DeleteGroup):
            if group is not None and group.members:
                return GroupNotEmpty(f"group {action.group_id!r} has members")
            return None
        if group is None:
            return UnknownMember(f"group {action.group_id!r} has no members")
        if isinstance(action, TakeGroup):
            return None
        member = group.members.get(action.member_id)
        if member is None:
            return _no_such_member(action.group_id, action.member_id)
        match action:
            case Subscribe():
                return self._check_subscription(group, member, action)
            case AssignByHand(partitions=partitions):
                return self._check_by_hand(member, partitions)
            case Seek(positions=positions):
                return self._check_seek(member, positions)
            case ExpireMember(term=term) if term != group.term:
                return IllegalGeneration(
                    f"another coordinator hears group {action.group_id!r} since then"
                )
            case _:
                return None

    def _check_join(self, action: JoinGroup) -> LogError | None:
        for what, name in (("member id", action.member_id), ("instance id", action.instance_id)):
            if (name or what == "member id") and not _is_name(name):
                return InvalidRequest(
                    f"a {what} is 1 to {NAME_BYTES_MAX} bytes of printable characters, "
                    f"not {name[:NAME_BYTES_MAX]!r}"
                )
        if action.assignor and action.assignor not in ASSIGNORS:
            known = ", ".join(ASSIGNORS)
            return InvalidRequest(f"assignor {action.assignor!r} is none of {known}")
        group = self._groups.get(action.group_id)
        if group is not None and action.member_id in group.members:
            return MemberExists(
                f"Consumer with specified consumer ID already exists in the specified consumer "
                f"group: {action.member_id!r} in {action.group_id!r}"
            )
        if group is not None and group.members and action.assignor not in ("", group.assignor):
            return InvalidRequest(
                f"the members of group {action.group_id!r} share by {group.assignor!r}, "
                f"not by {action.assignor!r}"
            )
        held = 0 if group is None else len(group.members)
        if held >= MEMBERS_OF_GROUP_MAX or self._count >= MEMBERS_MAX:
            return Throttled(
                f"the group has {held} members, all groups {self._count}: the bounds are "
                f"{MEMBERS_OF_GROUP_MAX} and {MEMBERS_MAX}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return None

    def _check_subscription(
        self, group: Group, member: GroupMember, action: Subscribe
    ) -> LogError | None:
        if member.is_by_hand and (action.topics or action.pattern):
            return AssignedOtherwise()
        if len(action.topics) > TOPICS_MAX or len(action.pattern) > PATTERN_CHARS_MAX:
            return InvalidRequest(
                f"a subscription is {TOPICS_MAX} topics and a pattern of {PATTERN_CHARS_MAX} "
                "characters at most"
            )
        named = set(action.topics)
        for other in group.members.values():
            if other is not member and not other.is_by_hand:
                named.update(other.topics)
        shared = sum(len(self._catalog[name].partitions) for name in named & self._catalog.keys())
        if shared > PARTITIONS_MAX:
            return InvalidRequest(
                f"group {group.group_id!r} would share {shared} partitions, {PARTITIONS_MAX} is "
                "the most"
            )
        return None

    def _check_by_hand(self, member: GroupMember, partitions: list[Owned]) -> LogError | None:
        if member.is_subscribed and partitions:
            return AssignedOtherwise()
        if len(partitions) > PARTITIONS_MAX:
            return InvalidRequest(f"{len(partitions)} partitions: {PARTITIONS_MAX} at most")
        counts = {
            topic.topic_id: (name, len(topic.partitions)) for name, topic in self._catalog.items()
        }
        for topic_id, number in partitions:
            if topic_id not in counts:
                return UnknownTopic(topic_id)
            name, count = counts[topic_id]
            if not 0 <= number < count:
                return UnknownPartition(name, number, count)
        return None

    def _check_seek(self, member: GroupMember, positions: list[Sought]) -> LogError | None:
        owned = set(member.owned)
        for topic_id, number, offset in positions:
            if Owned(topic_id, number) not in owned:
                return NotAssigned(
                    f"No current assignment for partition {self._name_of(topic_id)}-{number}"
                )
            if offset < 0:
                return InvalidRequest(f"an offset is 0 or more, not {offset}")
        return None

    def check_commit(self, commit: CommitOffsets) -> LogError | None:
        """Why this committer may not, as Kafka's ClassicGroup decides it; and, what Kafka leaves to
        its clients, a partition that is another member's now."""
        group = self._groups.get(commit.group_id)
        if not commit.member_id:
            return self._check_simple(commit, group)
        member = None if group is None else group.members.get(commit.member_id)
        if group is None or member is None:
            return _no_such_member(commit.group_id, commit.member_id)
        if not member.is_subscribed:
            return self._check_simple(commit, group)
        if commit.generation != group.generation:
            return IllegalGeneration(
                f"generation {commit.generation} is not that of group {commit.group_id!r}, which "
                f"is {group.generation}"
            )
        for each in commit.offsets:
            if not member.owns(each.topic_id, each.partition):
                return IllegalGeneration(
                    f"{self._name_of(each.topic_id)}-{each.partition} is not assigned to "
                    f"{commit.member_id!r} in generation {group.generation} of group "
                    f"{commit.group_id!r}"
                )
        return None

    def _check_simple(self, commit: CommitOffsets, group: Group | None) -> LogError | None:
        if group is not None and (
            group.inputs.subscriptions or (group.group_id in self._unsettled and group.is_active)
        ):
            return GroupNotEmpty(
                f"group {commit.group_id!r} has members that share partitions: only they commit"
            )
        if commit.generation != NO_GENERATION:
            return IllegalGeneration(
                f"generation {commit.generation} is not that of group {commit.group_id!r}, which "
                "has no members"
            )
        return None

    def _name_of(self, topic_id: str) -> str:
        names = (name for name, topic in self._catalog.items() if topic.topic_id == topic_id)
        return next(names, topic_id)

    # -- changes

    def do(self, action: GroupAction, now_ms: int) -> None:
        """Checked against the state before its commit, of which it may not be the only action: what
        another one took away is not missed."""
        if isinstance(action, JoinGroup):
            self._join(action, now_ms)
            return
        if isinstance(action, DeleteGroup):
            self._drop(action.group_id)
            return
        group = self._groups.get(action.group_id)
        if group is None:
            return
        self.changed.add(action.group_id)
        if isinstance(action, TakeGroup):
            self._take(group, action.coordinator)
            return
        member = group.members.get(action.member_id)
        if member is None:
            return
        match action:
            case Subscribe(topics=topics, pattern=pattern):
                member.topics, member.pattern = sorted(set(topics)), pattern
                if member.is_by_hand:
                    member.is_by_hand, member.owned, member.sought = False, [], []
            case AssignByHand(partitions=partitions):
                member.is_by_hand = bool(partitions)
                member.owned = sorted(set(partitions))
                member.forget_lost()
            case Seek(positions=positions):
                moved = {(each.topic_id, each.partition) for each in positions}
                kept = [one for one in member.sought if (one.topic_id, one.partition) not in moved]
                last = {(each.topic_id, each.partition): each for each in positions}
                member.sought = sorted([*kept, *last.values()])
            case LeaveGroup() | ExpireMember():
                self._remove(group, member, now_ms)
        self._unsettled.add(group.group_id)

    def committed(self, commit: CommitOffsets) -> None:
        """Where the member committed, it goes on from there."""
        member = self.member(commit.group_id, commit.member_id)
        if member is not None and member.sought:
            done = {(each.topic_id, each.partition) for each in commit.offsets}
            member.sought = [
                one for one in member.sought if (one.topic_id, one.partition) not in done
            ]

    def topic_changed(self, name: str, topic_id: str) -> None:
        """The topic was made, has grown or is gone."""
        for group in self._groups.values():
            is_concerned = False
            for member in group.members.values():
                if name in member.topics:
                    is_concerned = True
                elif member.is_by_hand and name not in self._catalog:
                    member.owned = [one for one in member.owned if one.topic != topic_id]
                    member.forget_lost()
            if is_concerned:
                self._unsettled.add(group.group_id)

    def settle(self) -> None:
        """The entry is folded in: assign anew where anything changed."""
        if self._unsettled:
            for group_id in sorted(self._unsettled):
                group = self._groups.get(group_id)
                if group is not None:
                    self._assign(group)
            self._unsettled.clear()

    def _join(self, action: JoinGroup, now_ms: int) -> None:
        group = self._groups.get(action.group_id)
        if group is None:
            group = self._groups[action.group_id] = Group(action.group_id, self._generation_floor)
        if action.member_id in group.members:
            return  # twice in one commit
        if action.assignor and not group.members:
            group.assignor = action.assignor
        if group.coordinator != action.coordinator:
            self._take(group, action.coordinator)
        member = GroupMember(action.member_id, now_ms, action.config, action.instance_id)
        replaced = group.member_of_instance(action.instance_id) if action.instance_id else None
        if replaced is not None:
            # The place stays as it is, and so does the generation; the old id is nobody's now.
            del group.members[replaced.member_id]
            member = msgspec.structs.replace(
                replaced, member_id=action.member_id, joined_ms=now_ms, config=action.config
            )
        else:
            self._count += 1
        group.members[action.member_id] = member
        self.changed.add(action.group_id)
        self._unsettled.add(action.group_id)

    def _take(self, group: Group, coordinator: str) -> None:
        group.coordinator = coordinator
        group.term += 1

    def _remove(self, group: Group, member: GroupMember, now_ms: int) -> None:
        del group.members[member.member_id]
        self._count -= 1
        if not group.members:
            group.emptied_ms = now_ms

    def _assign(self, group: Group) -> None:
        inputs = self._inputs_of(group)
        if inputs == group.inputs:
            return
        members = {one.key: one for one in group.members.values() if one.is_subscribed}
        owned = {key: member.owned for key, member in members.items()}
        shares = ASSIGNORS[group.assignor](inputs.subscriptions, inputs.partitions, owned)
        group.inputs = inputs
        group.generation += 1
        for member in group.members.values():
            if not member.is_by_hand:
                member.owned = shares.get(member.key, [])
                member.forget_lost()
        self.changed.add(group.group_id)

    def _inputs_of(self, group: Group) -> Inputs:
        subscriptions: dict[str, list[str]] = {}
        partitions: dict[str, int] = {}
        for member in group.members.values():
            if member.is_subscribed:
                found = [self._catalog[name] for name in member.topics if name in self._catalog]
                subscriptions[member.key] = [topic.topic_id for topic in found]
                partitions |= {topic.topic_id: len(topic.partitions) for topic in found}
        return Inputs(subscriptions, partitions)

    def forget(self, group_id: str) -> None:
        """Nothing of the group is left but its name: unless it has members, it is as if it had
        never been."""
        if not self.has_members(group_id):
            self._drop(group_id)

    def _drop(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._generation_floor = max(self._generation_floor, group.generation)
            self.changed.add(group_id)

    # -- checkpoints

    def kept(self) -> KeptMembers | None:
        """All of it; None when there never was a member."""
        if not (self._groups or self._generation_floor):
            return None
        return KeptMembers(
            self._generation_floor,
            [
                KeptGroup(
                    group.group_id,
                    group.generation,
                    group.assignor,
                    group.coordinator,
                    group.term,
                    group.emptied_ms,
                    list(group.members.values()),
                )
                for group in self._groups.values()
            ],
        )

    def load(self, kept: KeptMembers | None) -> None:
        """Take what a checkpoint carries; the catalog has its topics already."""
        if kept is None:
            return
        self._generation_floor = kept.generation_floor
        for each in kept.groups:
            group = Group(each.group_id, each.generation)
            group.assignor = each.assignor
            group.coordinator = each.coordinator
            group.term = each.term
            group.emptied_ms = each.emptied_ms
            group.members = {member.member_id: member for member in each.members}
            group.inputs = self._inputs_of(group)
            self._groups[each.group_id] = group
            self._count += len(group.members)


def _is_name(name: str) -> bool:
    return 1 <= len(name.encode()) <= NAME_BYTES_MAX and name.isprintable()


def _no_such_member(group_id: str, member_id: str) -> UnknownMember:
    return UnknownMember(f"group {group_id!r} has no member {member_id!r}")
