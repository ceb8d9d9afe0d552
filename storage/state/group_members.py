"""Members of consumer groups: their subscriptions, assignments and generations.

Pure, changed by `apply` (I4). A group has members and a generation. The group's assignor gives each
partition of the subscribed topics one owner among the subscribed members (I8). A new assignment
begins a new generation. If an entry changed a member, a subscription or a topic, `apply` computes
the assignment at the end of the entry. So a hundred members that join in one entry cost one
assignment. A member with a manual assignment reads the partitions that it named and shares none.

`apply` does not evaluate patterns, because regular expression engines differ between versions, but
an entry must always have the same result. `Subscribe` contains the names that match the pattern.
After topics are created or deleted, the group's coordinator commits another `Subscribe`
(storage.groups.rest_groups).

`apply` does not know which members are alive. The group's coordinator receives their heartbeats and
commits `ExpireMember` with its term. `apply` refuses `ExpireMember` with an older term. The
generation of a group id never decreases, because a new group begins at the highest generation of
all dropped groups.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from tidelog.storage.core.actions import (
    AnyAction,
    AssignByHand,
    Chunk,
    CommitOffsets,
    DeleteGroup,
    ExpireMember,
    GroupAction,
    JoinGroup,
    LeaveGroup,
    Seek,
    SeekPosition,
    SettleGroup,
    Subscribe,
    TakeGroup,
)
from tidelog.storage.core.errors import (
    AssignedOtherwise,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequest,
    LogError,
    MemberExists,
    NotAssigned,
    Throttled,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.assignors import ASSIGNORS
from tidelog.storage.state.group_state import (
    MEMBERS_OF_GROUP_MAX,
    NO_GENERATION,
    PLACE_BYTES,
    Catalog,
    ClientGroupCheckpoint,
    ClientMember,
    ConsumerGroup,
    GroupMember,
    Inputs,
    MembersCheckpoint,
    check_name,
    no_such_member,
    partitions_of,
    subscription_size,
)
from tidelog.storage.state.principal_shares import Need, Shares

PATTERN_CHARS_MAX = 1000
MEMBERS_MAX = 50_000
"""Bound of all groups' members (I10); ~1 KiB in memory and 200 bytes in a checkpoint each."""
CLIENT_BYTES_MAX = 64 * 1024 * 1024
"""Bound of the metadata and assignments of all groups that clients assign (I10)."""
MEMBER_BYTES_MAX = 256 * 1024 * 1024
"""Bound of the subscriptions, assignments and positions of all members that the log assigns
(shares.DERIVED)."""
GROUP_TOPICS_MAX = 1_000
"""Bound of the topics that a member subscribes to by name or by pattern."""
GROUP_PARTITIONS_MAX = 20_000
"""Bound of a group's shared partitions, which are all assigned at each change. Also the bound of
the partitions in a manual assignment."""
RETRY_AFTER_MS = 60_000


class GroupMembers:
    """The groups that have or had members.

    Owned by the cluster state. `catalog` has the state's topics by name.
    """

    def __init__(self, catalog: Catalog, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._changed: set[str] = set()  # since the last `settle`
        self._catalog = catalog
        self._groups: dict[str, ConsumerGroup] = {}
        self.generation_floor = 0
        self._unsettled: set[str] = set()
        self._resized: set[str] = set()  # groups whose sizes may have changed, as `_changed`
        self._sizes: dict[str, Counter[str]] = {}
        """By group: the bytes of members by principal that are counted."""

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(self._groups.values())

    def get(self, group_id: str) -> ConsumerGroup | None:
        return self._groups.get(group_id)

    def member(self, group_id: str, member_id: str) -> GroupMember | None:
        group = self._groups.get(group_id)
        return None if group is None else group.members.get(member_id)

    @property
    def count(self) -> int:
        """Return the number of members of all groups."""
        return self._shares.total(rules.MEMBERS)

    def partitions_of(self, member: GroupMember) -> Sequence[TopicIdPartition]:
        """Return the partitions that the member reads, sorted."""
        return partitions_of(member, self._catalog)

    def has_members(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and bool(group.members)

    # -- checks

    def check(self, action: GroupAction) -> LogError | None:
        if isinstance(action, JoinGroup):
            return self._check_join(action)
        group = self._groups.get(action.group_id)
        if isinstance(action, SettleGroup):
            unknown = ConsumerGroup(
                action.group_id, self.generation_floor, coordinator=action.coordinator
            )
            return (group or unknown).check_settled(action)
        if isinstance(action, DeleteGroup):
            if group is not None and group.members:
                return GroupNotEmpty(f"group {action.group_id!r} has members")
            return None
        if group is None:
            return UnknownMember(f"group {action.group_id!r} has no members")
        if isinstance(action, TakeGroup):
            return None
        member = group.members.get(action.member_id)
        if member is None or (
            isinstance(member, ClientMember) and not isinstance(action, LeaveGroup | ExpireMember)
        ):
            return no_such_member(action.group_id, action.member_id)
        match action:
            case Subscribe():
                return self._check_subscription(group, member, action)
            case AssignByHand(partitions=partitions):
                return self._check_by_hand(member, partitions)
            case Seek(positions=positions):
                return self._check_seek(member, positions)
            case ExpireMember(term=term) if term != group.term:
                return IllegalGeneration(
                    f"group {action.group_id!r} has a newer coordinator: this term is over"
                )
            case _:
                return None

    def needs(self, action: AnyAction, _: str, __: Sequence[Chunk]) -> list[Need]:
        """Return what the action adds to the use of a bound by the member's principal.

        The principal is that of its config. The commit's principal does not count, because brokers
        also commit Subscribe without a client. Call `check` before.
        """
        if not isinstance(action, JoinGroup | Subscribe | SettleGroup):
            return []
        group = self._groups.get(action.group_id)
        if isinstance(action, SettleGroup):
            return _needs_of_clients(group, action)
        if isinstance(action, JoinGroup):
            principal = action.config.principal
            replaced = None
            if group is not None and action.instance_id:
                replaced = group.member_of_instance(action.instance_id)
            if replaced is not None and replaced.config.principal == principal:
                return []
            needs = [Need(rules.MEMBERS, principal, 1, MEMBERS_MAX)]
            if replaced is not None and replaced.pattern:
                needs.append(Need(rules.PATTERNS, principal, 1, rules.PATTERNS_MAX))
            return needs
        member = None if group is None else group.members.get(action.member_id)
        if not action.pattern or member is None or member.pattern:
            return []
        return [Need(rules.PATTERNS, member.config.principal, 1, rules.PATTERNS_MAX)]

    def growth(self, action: AnyAction) -> list[Need]:
        """Return what the action adds to the bytes of a principal's members.

        `apply` does not check this bound, see `ClusterState.admitted`.
        """
        if not isinstance(action, Subscribe | AssignByHand | Seek):
            return []
        group = self._groups.get(action.group_id)
        member = None if group is None else group.members.get(action.member_id)
        if group is None or member is None:
            return []  # `apply` refuses it
        if isinstance(action, AssignByHand):
            added_bytes = PLACE_BYTES * (len(action.partitions) - len(member.owned))
        elif isinstance(action, Seek):
            sought = {(seek.topic_id, seek.partition) for seek in member.sought}
            moved = {(seek.topic_id, seek.partition) for seek in action.positions}
            added_bytes = PLACE_BYTES * len(moved - sought)
        else:
            added_bytes = self._growth_of(group, member, action)
        return [
            Need(rules.MEMBER_BYTES, member.config.principal, max(added_bytes, 0), MEMBER_BYTES_MAX)
        ]

    def _growth_of(self, group: ConsumerGroup, member: GroupMember, action: Subscribe) -> int:
        """Return how many bytes a subscription adds to its group.

        A topic that does not exist counts as one partition.
        """
        other_topics: set[str] = set()
        for other in group.members.values():
            if other is not member:
                other_topics.update(other.topics)
        old_topics = set(member.topics) - other_topics
        new_topics = set(action.topics) - other_topics
        places = sum(self._places(name) for name in new_topics - old_topics)
        places -= sum(self._places(name) for name in old_topics - new_topics)
        size = subscription_size(action.topics) - subscription_size(member.topics)
        return size + len(action.pattern) - len(member.pattern) + PLACE_BYTES * places

    def _places(self, name: str) -> int:
        topic = self._catalog.get(name)
        return 1 if topic is None else len(topic.partitions)

    def _resize(self, group_id: str) -> None:
        """Count the bytes of a group's members, by principal."""
        group, sizes = self._groups.get(group_id), Counter[str]()
        if group is not None and not group.is_assigned_by_clients:
            for member in group.members.values():
                sizes[member.config.principal] += member.size
        old_sizes = self._sizes.pop(group_id, Counter())
        if sizes:
            self._sizes[group_id] = sizes
        self._shares.change(rules.MEMBER_BYTES, old_sizes, sizes)

    def _count(self, member: GroupMember, count: int) -> None:
        self._shares.add(rules.MEMBERS, member.config.principal, count)
        if member.pattern:
            self._shares.add(rules.PATTERNS, member.config.principal, count)
        if isinstance(member, ClientMember):
            size = member.settled.size
            self._shares.add(rules.CLIENT_BYTES, member.config.principal, count * size)

    def _check_join(self, action: JoinGroup) -> LogError | None:
        for name in (action.member_id, *filter(None, [action.instance_id])):
            if (refusal := check_name(name)) is not None:
                return refusal
        if action.assignor and action.assignor not in ASSIGNORS:
            names = ", ".join(ASSIGNORS)
            return InvalidRequest(f"assignor {action.assignor!r} is none of {names}")
        group = self._groups.get(action.group_id)
        if group is not None and group.members and group.is_assigned_by_clients:
            return InconsistentGroupProtocol(
                f"group {action.group_id!r} has members of Kafka's clients: stop them first"
            )
        if group is not None and action.member_id in group.members:
            return MemberExists(
                f"Consumer with specified consumer ID already exists in the specified consumer "
                f"group: {action.member_id!r} in {action.group_id!r}"
            )
        if group is not None and group.members and action.assignor not in ("", group.assignor):
            return InvalidRequest(
                f"the members of group {action.group_id!r} use assignor {group.assignor!r}, "
                f"not {action.assignor!r}"
            )
        member_count = 0 if group is None else len(group.members)
        if member_count >= MEMBERS_OF_GROUP_MAX or self.count >= MEMBERS_MAX:
            return Throttled(
                f"the group has {member_count} members and all groups have {self.count}: the "
                f"maximum is {MEMBERS_OF_GROUP_MAX} for a group and {MEMBERS_MAX} for all groups",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return None

    def _check_subscription(
        self, group: ConsumerGroup, member: GroupMember, action: Subscribe
    ) -> LogError | None:
        if member.is_by_hand and (action.topics or action.pattern):
            return AssignedOtherwise()
        if len(action.topics) > GROUP_TOPICS_MAX or len(action.pattern) > PATTERN_CHARS_MAX:
            return InvalidRequest(
                f"a subscription has at most {GROUP_TOPICS_MAX} topics, and a pattern at most "
                f"{PATTERN_CHARS_MAX} characters"
            )
        named = set(action.topics)
        for other in group.members.values():
            if other is not member and not other.is_by_hand:
                named.update(other.topics)
        shared = sum(len(self._catalog[name].partitions) for name in named & self._catalog.keys())
        if shared > GROUP_PARTITIONS_MAX:
            return InvalidRequest(
                f"group {group.group_id!r} would share {shared} partitions, "
                f"but the maximum is {GROUP_PARTITIONS_MAX}"
            )
        return None

    def _check_by_hand(
        self, member: GroupMember, partitions: list[TopicIdPartition]
    ) -> LogError | None:
        if member.is_subscribed and partitions:
            return AssignedOtherwise()
        if len(partitions) > GROUP_PARTITIONS_MAX:
            return InvalidRequest(f"{len(partitions)} partitions: {GROUP_PARTITIONS_MAX} at most")
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

    def _check_seek(self, member: GroupMember, positions: list[SeekPosition]) -> LogError | None:
        owned_partitions = set(member.owned)
        for topic_id, number, offset in positions:
            if TopicIdPartition(topic_id, number) not in owned_partitions:
                return NotAssigned(
                    f"No current assignment for partition {self._name_of(topic_id)}-{number}"
                )
            if offset < 0:
                return InvalidRequest(f"an offset is 0 or more, not {offset}")
        return None

    def check_commit(self, commit: CommitOffsets) -> LogError | None:
        """Return the reason to refuse the commit, or None.

        The rules are as in Kafka's ClassicGroup. One more rule: a subscribed member must own the
        partitions.
        """
        group = self._groups.get(commit.group_id) or ConsumerGroup(commit.group_id, NO_GENERATION)
        return group.check_commit(commit, self._name_of, commit.group_id in self._unsettled)

    def _name_of(self, topic_id: str) -> str:
        names = (name for name, topic in self._catalog.items() if topic.topic_id == topic_id)
        return next(names, topic_id)

    # -- changes

    def do(self, action: GroupAction, now_ms: int) -> None:
        """Apply an action, unless an earlier one of the commit removed the group or the member.

        `check` saw only the state before the commit.
        """
        if isinstance(action, JoinGroup):
            self._join(action, now_ms)
            return
        if isinstance(action, SettleGroup):
            self._settle_group(action, now_ms)
            return
        if isinstance(action, DeleteGroup):
            self._drop(action.group_id)
            return
        group = self._groups.get(action.group_id)
        if group is None:
            return
        self._changed.add(action.group_id)
        if isinstance(action, TakeGroup):
            self._take(group, action.coordinator)
            return
        member = group.members.get(action.member_id)
        if member is None:
            return
        match action:
            case Subscribe(topics=topics, pattern=pattern):
                added_patterns = bool(pattern) - bool(member.pattern)
                if added_patterns:
                    self._shares.add(rules.PATTERNS, member.config.principal, added_patterns)
                member.topics, member.pattern = sorted(set(topics)), pattern
                if member.is_by_hand:
                    member.is_by_hand, member.owned, member.sought = False, [], []
            case AssignByHand(partitions=partitions):
                member.is_by_hand = bool(partitions)
                member.owned = sorted(set(partitions))
                member.forget_lost()
            case Seek(positions=positions):
                moved = {(seek.topic_id, seek.partition) for seek in positions}
                kept_seeks = [
                    seek for seek in member.sought if (seek.topic_id, seek.partition) not in moved
                ]
                last = {(seek.topic_id, seek.partition): seek for seek in positions}
                member.sought = sorted([*kept_seeks, *last.values()])
            case LeaveGroup() | ExpireMember():
                self._remove(group, member, now_ms)
        self._unsettled.add(group.group_id)

    def committed(self, commit: CommitOffsets) -> None:
        """Drop the member's seek positions in the partitions of its commit."""
        member = self.member(commit.group_id, commit.member_id)
        if member is not None and member.sought:
            committed_partitions = {
                (group_offset.topic_id, group_offset.partition) for group_offset in commit.offsets
            }
            member.sought = [
                seek
                for seek in member.sought
                if (seek.topic_id, seek.partition) not in committed_partitions
            ]
            self._resized.add(commit.group_id)

    def topic_changed(self, name: str, topic_id: str) -> None:
        """Update groups after a topic was created, grown or deleted."""
        for group in self._groups.values():
            is_concerned = False
            for member in group.members.values():
                if name in member.topics:
                    is_concerned = True
                elif member.is_by_hand and name not in self._catalog:
                    member.owned = [
                        partition for partition in member.owned if partition.topic_id != topic_id
                    ]
                    member.forget_lost()
                    self._resized.add(group.group_id)
            if is_concerned:
                self._unsettled.add(group.group_id)

    def settle(self) -> set[str]:
        """Compute new assignments of changed groups, at the end of each entry.

        Return the ids of groups whose members, assignments or positions changed since the last
        call.
        """
        if self._unsettled:
            for group_id in sorted(self._unsettled):
                group = self._groups.get(group_id)
                if group is not None:
                    self._assign(group)
            self._unsettled.clear()
        changed, self._changed = self._changed, set()
        for group_id in changed | self._resized:
            self._resize(group_id)
        self._resized.clear()
        return changed

    def _join(self, action: JoinGroup, now_ms: int) -> None:
        group = self._groups.get(action.group_id) or self._new(action.group_id)
        if action.member_id in group.members or (group.members and group.is_assigned_by_clients):
            return  # an earlier action of the commit added the member, or settled the group
        if not group.members:
            group.assignor = action.assignor or group.assignor
            if group.is_assigned_by_clients:
                group.become_assigned_by_log()
                self._groups[group.group_id] = self._groups.pop(group.group_id)
        if group.coordinator != action.coordinator:
            self._take(group, action.coordinator)
        member = GroupMember(action.member_id, now_ms, action.config, action.instance_id)
        replaced = group.member_of_instance(action.instance_id) if action.instance_id else None
        if replaced is not None:
            # The new id takes the assignment. The old id is invalid now; the generation stays.
            del group.members[replaced.member_id]
            self._count(replaced, -1)
            member = msgspec.structs.replace(
                replaced, member_id=action.member_id, joined_ms=now_ms, config=action.config
            )
        self._count(member, 1)
        group.members[action.member_id] = member
        self._changed.add(action.group_id)
        self._unsettled.add(action.group_id)

    def _settle_group(self, action: SettleGroup, now_ms: int) -> None:
        group = self._groups.get(action.group_id)
        if group is None:
            group = self._new(action.group_id)
            self._take(group, action.coordinator)
        if group.members and not group.is_assigned_by_clients:
            return  # an earlier action of the commit added a member
        for member in group.members.values():
            self._count(member, -1)
        if not group.is_assigned_by_clients:
            # The last of its new kind, as after `load`, which reads one kind after the other.
            self._groups[group.group_id] = self._groups.pop(group.group_id)
        group.settle(action, now_ms)
        for member in group.members.values():
            self._count(member, 1)
        self._changed.add(action.group_id)

    def _new(self, group_id: str) -> ConsumerGroup:
        return self._groups.setdefault(group_id, ConsumerGroup(group_id, self.generation_floor))

    def _take(self, group: ConsumerGroup, coordinator: str) -> None:
        group.coordinator = coordinator
        group.term += 1

    def _remove(self, group: ConsumerGroup, member: GroupMember, now_ms: int) -> None:
        del group.members[member.member_id]
        self._count(member, -1)
        group.is_preparing = group.is_assigned_by_clients and bool(group.members)
        if not group.members:
            group.emptied_ms = now_ms

    def _assign(self, group: ConsumerGroup) -> None:
        inputs = self._inputs_of(group)
        if inputs == group.inputs:
            return
        members = {member.key: member for member in group.members.values() if member.is_subscribed}
        owned_partitions = {key: member.owned for key, member in members.items()}
        shares = ASSIGNORS[group.assignor](
            inputs.subscriptions, inputs.partitions, owned_partitions
        )
        group.inputs = inputs
        group.generation += 1
        for member in group.members.values():
            if not member.is_by_hand:
                member.owned = shares.get(member.key, [])
                member.forget_lost()
        self._changed.add(group.group_id)

    def _inputs_of(self, group: ConsumerGroup) -> Inputs:
        subscriptions: dict[str, list[str]] = {}
        partitions: dict[str, int] = {}
        for member in group.members.values():
            if member.is_subscribed:
                topics = [self._catalog[name] for name in member.topics if name in self._catalog]
                subscriptions[member.key] = [topic.topic_id for topic in topics]
                partitions |= {topic.topic_id: len(topic.partitions) for topic in topics}
        return Inputs(subscriptions, partitions)

    def forget(self, group_id: str) -> None:
        """Drop a group that has no committed offsets any more, unless it has members."""
        if not self.has_members(group_id):
            self._drop(group_id)

    def _drop(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            for member in group.members.values():  # they joined earlier in the same commit
                self._count(member, -1)
            self.generation_floor = max(self.generation_floor, group.generation)
            self._changed.add(group_id)

    # -- checkpoints

    def kept(self) -> MembersCheckpoint | None:
        """Return the groups as part of a checkpoint, or None if there is nothing to store."""
        if not (self._groups or self.generation_floor):
            return None
        groups = [
            group.kept() for group in self._groups.values() if not group.is_assigned_by_clients
        ]
        return MembersCheckpoint(self.generation_floor, groups)

    def kept_of_clients(self) -> list[ClientGroupCheckpoint]:
        """Return the groups that clients assign as part of a checkpoint."""
        groups = self._groups.values()
        return [group.kept_of_clients() for group in groups if group.is_assigned_by_clients]

    def load(
        self, checkpoint: MembersCheckpoint | None, of_clients: Sequence[ClientGroupCheckpoint] = ()
    ) -> None:
        """Restore from a checkpoint. The catalog must have the checkpoint's topics already."""
        self.generation_floor = 0 if checkpoint is None else checkpoint.generation_floor
        for group_checkpoint in (*(() if checkpoint is None else checkpoint.groups), *of_clients):
            group = ConsumerGroup.restored(group_checkpoint)
            group.inputs = self._inputs_of(group)
            self._groups[group_checkpoint.group_id] = group
            for member in group.members.values():
                self._count(member, 1)
            self._resize(group_checkpoint.group_id)


def _needs_of_clients(group: ConsumerGroup | None, action: SettleGroup) -> list[Need]:
    """Return what the result of a rebalance adds, by the principal of each member."""
    members: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for member in action.members:
        members[member.principal] += 1
        sizes[member.principal] += member.size
    for old_member in () if group is None else group.members.values():
        if isinstance(old_member, ClientMember):
            members[old_member.config.principal] -= 1
            sizes[old_member.config.principal] -= old_member.settled.size
    return [
        *(
            Need(rules.MEMBERS, principal, growth, MEMBERS_MAX)
            for principal, growth in members.items()
        ),
        *(
            Need(rules.CLIENT_BYTES, principal, growth, CLIENT_BYTES_MAX)
            for principal, growth in sizes.items()
        ),
    ]
