"""Types of a consumer group in the cluster state.

A group is of one of two kinds. The log assigns partitions to the members of REST's groups: `apply`
runs the assignor. Kafka's clients assign partitions themselves (the classic protocol): one member,
the leader, computes the assignments of all, and the coordinator commits them with `SettleGroup`.
The log stores metadata and assignments of such members as opaque bytes. A group without members may
change its kind.

Pure. Only storage.state.group_members changes values of these types; other modules read them.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, cast

import msgspec

from tidelog.storage.codec import consumer_protocol
from tidelog.storage.core.actions import (
    CommitOffsets,
    MemberConfig,
    SeekPosition,
    SettledMember,
    SettleGroup,
)
from tidelog.storage.core.errors import (
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequest,
    LogError,
    UnknownMember,
)
from tidelog.storage.core.model import TopicIdPartition

NO_GENERATION = -1
NAME_BYTES_MAX = 255
"""Bound of a member id, and of the `group.instance.id` of a static member."""
MEMBERS_OF_GROUP_MAX = 1_000
GROUP_BYTES_MAX = 1024 * 1024
"""Bound of the metadata and assignments of one group that clients assign; in Kafka, the largest
record of the topic that stores groups has the same bound."""
GENERATION_MAX = 2**31 - 1
KAFKA_DIALECT = "kafka"

DEFAULT_ASSIGNOR = "sticky"
"""The sticky assignor moves the fewest partitions. A move costs time, because the new owner reads
all records after the last commit again."""


class TopicLike(Protocol):
    """The attributes of a topic that groups use."""

    @property
    def topic_id(self) -> str: ...

    @property
    def partitions(self) -> Sized: ...


Catalog: TypeAlias = Mapping[str, TopicLike]


PLACE_BYTES = 100
"""A partition of an assignment, or a position, in memory."""
NAME_BYTES = 60
"""The name of a topic in a subscription, without its characters."""


def subscription_size(topics: Collection[str]) -> int:
    return sum(map(len, topics)) + NAME_BYTES * len(topics)


class GroupMember(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One member of a group.

    `owned` is its assignment in the group's generation, or its manual assignment. `sought` has the
    positions of its seeks.
    """

    member_id: str
    joined_ms: int
    config: MemberConfig
    instance_id: str = ""
    topics: list[str] = []
    pattern: str = ""
    is_by_hand: bool = False
    owned: list[TopicIdPartition] = []
    sought: list[SeekPosition] = []

    @property
    def is_subscribed(self) -> bool:
        return bool(self.topics or self.pattern)

    @property
    def size(self) -> int:
        """Return about the bytes that the member needs in memory and in a checkpoint.

        These are of the subscription, the assignment and the positions.
        """
        places = len(self.owned) + len(self.sought)
        return len(self.pattern) + subscription_size(self.topics) + PLACE_BYTES * places

    @property
    def key(self) -> str:
        """Return the member's id for assignors. A static member that joins again keeps this id."""
        return f"s:{self.instance_id}" if self.instance_id else f"m:{self.member_id}"

    def owns(self, topic_id: str, partition: int) -> bool:
        """Return whether the member owns the partition (10 comparisons for 1,000 partitions)."""
        topic_partition = TopicIdPartition(topic_id, partition)
        index = bisect_left(self.owned, topic_partition)
        return index < len(self.owned) and self.owned[index] == topic_partition

    def position(self, topic_partition: TopicIdPartition) -> int | None:
        offsets = (
            seek.offset
            for seek in self.sought
            if (seek.topic_id, seek.partition) == topic_partition
        )
        return next(offsets, None)

    def forget_lost(self) -> None:
        if self.sought:
            owned_partitions = cast(set[tuple[str, int]], set(self.owned))
            self.sought = [
                seek for seek in self.sought if (seek.topic_id, seek.partition) in owned_partitions
            ]


class ClientMember(GroupMember, array_like=True, forbid_unknown_fields=True):
    """One member of a group that clients assign.

    `config.max_poll_interval_ms` is its rebalance timeout. `topics`, `pattern` and `owned` are
    empty, because the log does not interpret `metadata` and `assignment`.
    """

    host: str = ""
    metadata: bytes = b""
    assignment: bytes = b""

    @classmethod
    def of(cls, settled: SettledMember, joined_ms: int) -> "ClientMember":
        config = MemberConfig(
            auto_commit=False,
            session_timeout_ms=settled.session_timeout_ms,
            max_poll_interval_ms=settled.rebalance_timeout_ms,
            dialect=KAFKA_DIALECT,
            client_id=settled.client_id,
            principal=settled.principal,
        )
        return cls(
            settled.member_id,
            joined_ms,
            config,
            settled.instance_id,
            host=settled.host,
            metadata=settled.metadata,
            assignment=settled.assignment,
        )

    @property
    def settled(self) -> SettledMember:
        """Return the member as in the action that made it."""
        return SettledMember(
            self.member_id,
            self.instance_id,
            self.config.client_id,
            self.host,
            self.config.session_timeout_ms,
            self.config.max_poll_interval_ms,
            self.metadata,
            self.assignment,
            self.config.principal,
        )


def partitions_of(member: GroupMember, catalog: Catalog) -> Sequence[TopicIdPartition]:
    """Return the partitions that a member reads, sorted.

    A member that a client assigned reads the existing partitions of its assignment, or none if its
    assignment is not in the format of Kafka's consumers. In this case, the time is ~1 us for each
    partition.
    """
    if not isinstance(member, ClientMember):
        return member.owned
    return sorted(
        {
            TopicIdPartition(topic.topic_id, number)
            for name, numbers in consumer_protocol.assigned(member.assignment)
            if (topic := catalog.get(name)) is not None
            for number in numbers
            if 0 <= number < len(topic.partitions)
        }
    )


class GroupCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    group_id: str
    generation: int
    assignor: str
    coordinator: str
    term: int
    emptied_ms: int
    members: list[GroupMember]


class ClientGroupCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A group that clients assign, in a checkpoint."""

    group_id: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    coordinator: str
    term: int
    emptied_ms: int
    is_preparing: bool
    members: list[ClientMember]


class MembersCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All groups that the log assigns, in a checkpoint.

    The generations of new groups begin at `generation_floor`.
    """

    generation_floor: int
    groups: list[GroupCheckpoint]


class Inputs(NamedTuple):
    """Input of an assignor, except the previous owners.

    Topic ids by the member's `key`, and number of partitions by topic id.
    """

    subscriptions: dict[str, list[str]]
    partitions: dict[str, int]


@dataclass(eq=False)
class ConsumerGroup:
    """One group and its members. GroupMembers owns it; other modules only read it.

    If clients assign the group, `protocol_type` is not empty, all members are ClientMembers,
    `protocol` is the assignor's name, and `leader` the member that assigned. `is_preparing` is True
    from the removal of a member until the next `SettleGroup`.
    """

    group_id: str
    generation: int
    assignor: str = DEFAULT_ASSIGNOR
    coordinator: str = ""
    term: int = 0
    emptied_ms: int = 0
    members: dict[str, GroupMember] = field(default_factory=dict)
    inputs: Inputs = Inputs({}, {})
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    is_preparing: bool = False

    @property
    def is_active(self) -> bool:
        """Return whether members share partitions. If they do, only members may commit offsets."""
        if self.is_assigned_by_clients:
            return bool(self.members)
        return bool(self.inputs.subscriptions) or any(
            member.is_subscribed for member in self.members.values()
        )

    @property
    def is_assigned_by_clients(self) -> bool:
        return bool(self.protocol_type)

    def member_of_instance(self, instance_id: str) -> GroupMember | None:
        return next(
            (member for member in self.members.values() if member.instance_id == instance_id), None
        )

    def check_commit(
        self, commit: CommitOffsets, name_of: Callable[[str], str], is_unsettled: bool
    ) -> LogError | None:
        """Return why the group refuses the commit, or None.

        `name_of` returns the name of a topic id. `is_unsettled` is True if the entry has changed
        members, but not yet the assignment.
        """
        member = self.members.get(commit.member_id)
        if member is None and commit.member_id:
            return no_such_member(self.group_id, commit.member_id)
        if self.members and self.is_assigned_by_clients:
            if member is None:
                return GroupNotEmpty(f"group {self.group_id!r} has members: only they may commit")
            return self._check_generation(commit)
        if member is None or not member.is_subscribed:
            return self._check_simple(commit, is_unsettled)
        refusal = self._check_generation(commit)
        for group_offset in commit.offsets:
            if refusal is None and not member.owns(group_offset.topic_id, group_offset.partition):
                refusal = IllegalGeneration(
                    f"{name_of(group_offset.topic_id)}-{group_offset.partition} is not assigned to "
                    f"{commit.member_id!r} in generation {self.generation} of group "
                    f"{commit.group_id!r}"
                )
        return refusal

    def _check_generation(self, commit: CommitOffsets) -> IllegalGeneration | None:
        if commit.generation == self.generation:
            return None
        return IllegalGeneration(
            f"generation {commit.generation} is not valid: group {commit.group_id!r} has "
            f"generation {self.generation}"
        )

    def _check_simple(self, commit: CommitOffsets, is_unsettled: bool) -> LogError | None:
        if self.inputs.subscriptions or (is_unsettled and self.is_active):
            return GroupNotEmpty(
                f"group {commit.group_id!r} has subscribed members: only they may commit"
            )
        if commit.generation != NO_GENERATION:
            return IllegalGeneration(
                f"generation {commit.generation} is not valid: group {commit.group_id!r} "
                "has no subscribed members"
            )
        return None

    # -- groups that clients assign

    def check_settled(self, action: SettleGroup) -> LogError | None:
        """Return why the group cannot have this result of a rebalance, or None.

        A group that the cluster does not have yet is checked as one of term 0 without members.
        """
        if self.members and not self.is_assigned_by_clients:
            return InconsistentGroupProtocol(
                f"group {self.group_id!r} has members that the log assigns: stop them first"
            )
        if (action.term, action.coordinator) != (self.term, self.coordinator):
            return IllegalGeneration(
                f"group {self.group_id!r} has a newer coordinator: this term is over"
            )
        least = self.generation + (not self.members)
        if not least <= action.generation <= GENERATION_MAX:
            return IllegalGeneration(
                f"generation {action.generation} is not valid: group {self.group_id!r} has "
                f"generation {self.generation}"
            )
        return _check_members(action)

    def settle(self, action: SettleGroup, now_ms: int) -> None:
        """Make the action's members the members of the group."""
        old_members = self.members
        self.generation = action.generation
        self.protocol_type, self.protocol = action.protocol_type, action.protocol
        self.leader, self.is_preparing = action.leader, False
        self.assignor = DEFAULT_ASSIGNOR  # a checkpoint of such a group has no assignor of the log
        self.inputs = Inputs({}, {})
        self.members = {}
        for settled_member in action.members:
            member = old_members.get(settled_member.member_id)
            joined_ms = now_ms if member is None else member.joined_ms
            self.members[settled_member.member_id] = ClientMember.of(settled_member, joined_ms)

    def become_assigned_by_log(self) -> None:
        """Change the kind of the group, which must not have members."""
        self.protocol_type = self.protocol = self.leader = ""
        self.is_preparing = False

    # -- checkpoints

    def kept(self) -> GroupCheckpoint:
        return GroupCheckpoint(
            self.group_id,
            self.generation,
            self.assignor,
            self.coordinator,
            self.term,
            self.emptied_ms,
            list(self.members.values()),
        )

    def kept_of_clients(self) -> ClientGroupCheckpoint:
        return ClientGroupCheckpoint(
            self.group_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            self.coordinator,
            self.term,
            self.emptied_ms,
            self.is_preparing,
            [member for member in self.members.values() if isinstance(member, ClientMember)],
        )

    @classmethod
    def restored(cls, checkpoint: GroupCheckpoint | ClientGroupCheckpoint) -> "ConsumerGroup":
        group = cls(
            checkpoint.group_id,
            checkpoint.generation,
            coordinator=checkpoint.coordinator,
            term=checkpoint.term,
            emptied_ms=checkpoint.emptied_ms,
            members={member.member_id: member for member in checkpoint.members},
        )
        if isinstance(checkpoint, GroupCheckpoint):
            group.assignor = checkpoint.assignor
        else:
            group.protocol_type, group.protocol = checkpoint.protocol_type, checkpoint.protocol
            group.leader, group.is_preparing = checkpoint.leader, checkpoint.is_preparing
        return group


def _check_members(action: SettleGroup) -> InvalidRequest | None:
    members = action.members
    ids = {member.member_id for member in members}
    places = [member.instance_id for member in members if member.instance_id]
    if len(ids) < len(members) or len(set(places)) < len(places):
        return InvalidRequest(f"group {action.group_id!r} would have a member twice")
    if action.leader not in ids or not action.protocol_type:
        return InvalidRequest(
            f"group {action.group_id!r} needs a protocol type, and a leader that is a member"
        )
    for name in (*ids, *places):
        if (refusal := check_name(name)) is not None:
            return refusal
    size = sum(member.size for member in members)
    size += len(action.protocol_type.encode()) + len(action.protocol.encode())
    if len(members) > MEMBERS_OF_GROUP_MAX or size > GROUP_BYTES_MAX:
        return InvalidRequest(
            f"group {action.group_id!r} would have {len(members)} members with {size} bytes of "
            f"metadata and assignments: the maximum is {MEMBERS_OF_GROUP_MAX} members and "
            f"{GROUP_BYTES_MAX} bytes"
        )
    return None


def check_name(name: str) -> InvalidRequest | None:
    """Return why this cannot be a member id or an instance id, or None."""
    if 1 <= len(name.encode()) <= NAME_BYTES_MAX and name.isprintable():
        return None
    return InvalidRequest(
        f"a member id and an instance id have 1 to {NAME_BYTES_MAX} bytes of printable "
        f"characters, not {name[:NAME_BYTES_MAX]!r}"
    )


def no_such_member(group_id: str, member_id: str) -> UnknownMember:
    return UnknownMember(f"group {group_id!r} has no member {member_id!r}")
