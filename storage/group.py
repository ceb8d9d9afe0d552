"""A consumer group as the cluster state holds it: the nouns of storage.group_members.

Pure. Changed by that machine alone; everybody else looks.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sized
from typing import NamedTuple, Protocol, TypeAlias, cast

import msgspec

from storage.assignors import Owned
from storage.entry import MemberConfig, Sought

DEFAULT_ASSIGNOR = "sticky"
"""The one that moves least: what a member of ours loses is read again from the last commit."""


class TopicLike(Protocol):
    """What of a topic is looked at."""

    @property
    def topic_id(self) -> str: ...

    @property
    def partitions(self) -> Sized: ...


Catalog: TypeAlias = Mapping[str, TopicLike]


class GroupMember(msgspec.Struct, array_like=True):
    """One member. `owned` is its share in the group's generation, or what it was assigned by hand;
    `sought` where it said to go on."""

    member_id: str
    joined_ms: int
    config: MemberConfig
    instance_id: str = ""
    topics: list[str] = []
    pattern: str = ""
    is_by_hand: bool = False
    owned: list[Owned] = []
    sought: list[Sought] = []

    @property
    def is_subscribed(self) -> bool:
        return bool(self.topics or self.pattern)

    @property
    def key(self) -> str:
        """What assignors know it by: a static member's stays the same when it comes again."""
        return f"s:{self.instance_id}" if self.instance_id else f"m:{self.member_id}"

    def owns(self, topic_id: str, partition: int) -> bool:
        """Shares are in order: a commit of one of a thousand partitions looks at ten."""
        where = Owned(topic_id, partition)
        at = bisect_left(self.owned, where)
        return at < len(self.owned) and self.owned[at] == where

    def position(self, where: Owned) -> int | None:
        """Where it said to go on."""
        held = (each.offset for each in self.sought if (each.topic_id, each.partition) == where)
        return next(held, None)

    def forget_lost(self) -> None:
        """What it sought in partitions that are no longer its own."""
        if self.sought:
            owned = cast(set[tuple[str, int]], set(self.owned))
            self.sought = [one for one in self.sought if (one.topic_id, one.partition) in owned]


class KeptGroup(msgspec.Struct, array_like=True):
    """A group as checkpoints carry it."""

    group_id: str
    generation: int
    assignor: str
    coordinator: str
    term: int
    emptied_ms: int
    members: list[GroupMember]


class KeptMembers(msgspec.Struct, array_like=True):
    """All of it as checkpoints carry it. `generation_floor` is where new groups begin."""

    generation_floor: int
    groups: list[KeptGroup]


class Inputs(NamedTuple):
    """What an assignment follows from, beside who owned what before."""

    subscriptions: dict[str, list[str]]
    partitions: dict[str, int]


class Group:
    """One group with its members; look, do not touch."""

    def __init__(self, group_id: str, generation: int) -> None:
        self.group_id = group_id
        self.generation = generation
        self.assignor = DEFAULT_ASSIGNOR
        self.coordinator = ""
        self.term = 0
        self.emptied_ms = 0
        self.members: dict[str, GroupMember] = {}
        self.inputs = Inputs({}, {})

    @property
    def is_active(self) -> bool:
        """Whether members share partitions: then only they commit."""
        return bool(self.inputs.subscriptions) or any(
            member.is_subscribed for member in self.members.values()
        )

    def member_of_instance(self, instance_id: str) -> GroupMember | None:
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)
