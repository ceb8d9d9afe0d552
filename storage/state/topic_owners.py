"""The owners of topics: the principals that created their partitions. Pure."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tidelog.storage.core.actions import (
    AddPartitions,
    AnyAction,
    Chunk,
    CreateTopic,
)
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.principal_shares import Need, Shares
from tidelog.storage.state.topic import Topic

PartitionsOf: TypeAlias = list[tuple[str, int]]
"""Principals and the number of partitions that each added, in the order of the actions: the first
principal created the topic."""


class TopicOwners:
    """The principals that created topics and partitions.

    Owned by the cluster state, whose topics it reads.
    """

    def __init__(self, topics: Mapping[str, Topic], shares: Shares) -> None:
        self._topics = topics
        self._shares = shares
        self.by_id: dict[str, PartitionsOf] = {}
        """By topic id. A topic is left out if no principal created it or one of its partitions."""

    def needs(self, action: AnyAction, principal: str, _: Sequence[Chunk]) -> list[Need]:
        """Return what the action adds to the principal's use of bounds. Call the checks before."""
        if isinstance(action, AddPartitions):
            added_partitions = action.partitions - len(self._topics[action.topic_id].partitions)
            return [Need(rules.PARTITIONS, principal, added_partitions, rules.PARTITIONS_MAX)]
        if isinstance(action, CreateTopic):
            return [
                Need(rules.TOPICS, principal, 1, rules.TOPICS_MAX),
                Need(rules.PARTITIONS, principal, action.partitions, rules.PARTITIONS_MAX),
            ]
        return []

    def owner(self, topic_id: str) -> str:
        """Return the principal that created a topic; empty if there is none."""
        owners = self.by_id.get(topic_id)
        return owners[0][0] if owners else ""

    def created(self, topic_id: str, principal: str) -> None:
        """Count a new topic for the principal. The state must have the topic already."""
        if principal:
            self.by_id[topic_id] = [(principal, len(self._topics[topic_id].partitions))]
        self._count(topic_id, 1)

    def grown(self, topic_id: str, added_count: int, principal: str) -> None:
        """Count new partitions for the principal. The topic must have them already."""
        if principal or topic_id in self.by_id:
            old_count = len(self._topics[topic_id].partitions) - added_count
            self.by_id[topic_id] = [
                *self.by_id.get(topic_id, [("", old_count)]),
                (principal, added_count),
            ]
        self._shares.add(rules.PARTITIONS, principal, added_count)

    def removed(self, topic_id: str) -> None:
        """Stop counting a topic. Call this while the state still has the topic."""
        self._count(topic_id, -1)
        self.by_id.pop(topic_id, None)

    def load(self, owners_by_id: Mapping[str, PartitionsOf]) -> None:
        """Restore the owners from a checkpoint. Call this after its topics are loaded."""
        self.by_id = {
            topic_id: owners
            for topic_id, owners in owners_by_id.items()
            if topic_id in self._topics
        }
        for topic_id in self._topics:
            self._count(topic_id, 1)

    def _count(self, topic_id: str, sign: int) -> None:
        owners = self.by_id.get(topic_id)
        if owners is None:
            owners = [("", len(self._topics[topic_id].partitions))]
        self._shares.add(rules.TOPICS, self.owner(topic_id), sign)
        for principal, count in owners:
            self._shares.add(rules.PARTITIONS, principal, sign * count)
