"""Assignors of partitions to the members of a group: Kafka's range, round robin and sticky.

A topic's partitions go to members that subscribe to the topic. The result does not depend on the
order of elements in the arguments, so `apply` computes the same assignment on every broker (I4).
No partition gets two owners (I8). If there are too few partitions, some members get none.
The functions are pure. They must not depend on generations, heartbeats or the WAL.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import TypeAlias

from tidelog.storage.core.model import TopicIdPartition

Subscriptions: TypeAlias = Mapping[str, Collection[str]]
"""Topics by member id. The order of ids decides ties, so a static member must keep its id after a
restart."""
Partitions: TypeAlias = Mapping[str, int]
"""Number of partitions by topic, for existing topics only."""
Assignment: TypeAlias = dict[str, list[TopicIdPartition]]
"""Sorted partitions by member. All members are keys."""
Owned: TypeAlias = Mapping[str, Collection[TopicIdPartition]]
"""Partitions by previous owner."""
Assignor: TypeAlias = Callable[[Subscriptions, Partitions, Owned], Assignment]
"""A function of subscriptions, partitions and previous owners that returns the new assignment."""


def assign_range(subscriptions: Subscriptions, partitions: Partitions, _: Owned) -> Assignment:
    """Split each topic separately into consecutive ranges (Kafka's RangeAssignor).

    If two topics have the same members and the same number of partitions, a member gets the same
    partition numbers of both topics.
    """
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    for topic, members in _members_of(subscriptions, partitions).items():
        share, remainder = divmod(partitions[topic], len(members))
        first = 0
        for index, member in enumerate(members):
            end = first + share + (index < remainder)
            assigned[member] += [TopicIdPartition(topic, number) for number in range(first, end)]
            first = end
    return assigned


def assign_round_robin(
    subscriptions: Subscriptions, partitions: Partitions, _: Owned
) -> Assignment:
    """Give the partitions of all topics to members in turn (Kafka's RoundRobinAssignor).

    Skip members that do not subscribe to the topic.
    """
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    turns = _RoundRobin(list(assigned))
    for topic, members in _members_of(subscriptions, partitions).items():
        subscribed = set(members)
        for number in range(partitions[topic]):
            assigned[turns.next_of(subscribed)].append(TopicIdPartition(topic, number))
    return assigned


def assign_sticky(
    subscriptions: Subscriptions, partitions: Partitions, owned_partitions: Owned
) -> Assignment:
    """Balance the assignment with as few moves of owned partitions as possible.

    Balance is defined as in Kafka's StickyAssignor. If member A could own a partition of member B,
    A has at most one partition fewer than B. If two members owned a partition, the member with the
    smaller id keeps it.
    """
    sticky = _Sticky(subscriptions, partitions, owned_partitions)
    sticky.give_the_rest()
    sticky.level()
    return {member: share.sorted() for member, share in sorted(sticky.held.items())}


ASSIGNORS: Mapping[str, Assignor] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
    "cooperative-sticky": assign_sticky,
}
"""Assignors by their names in Kafka's `partition.assignment.strategy`. The last two compute equal
assignments. They have two names because Kafka's clients revoke partitions differently for each."""


class _RoundRobin:
    """An endless round robin over the members."""

    def __init__(self, members: list[str]) -> None:
        self._members = members
        self._at = 0

    def next_of(self, members: Collection[str]) -> str:
        """Return the next member that is in `members`. At least one member must be in it."""
        while True:
            member = self._members[self._at % len(self._members)]
            self._at += 1
            if member in members:
                return member


class _PartitionShare:
    """The partitions of one member, as sorted numbers by topic.

    So a move does not scan all partitions: it takes ~40 ms, not 7 s, to balance 10,000 partitions
    between two members.
    """

    def __init__(self) -> None:
        self.count = 0
        self.numbers: dict[str, list[int]] = {}

    def add(self, partition: TopicIdPartition) -> None:
        insort(self.numbers.setdefault(partition.topic_id, []), partition.partition)
        self.count += 1

    def take_last(self, topic: str) -> TopicIdPartition:
        numbers = self.numbers[topic]
        number = numbers.pop()
        if not numbers:
            del self.numbers[topic]
        self.count -= 1
        return TopicIdPartition(topic, number)

    def sorted(self) -> list[TopicIdPartition]:
        return [
            TopicIdPartition(topic, number)
            for topic, numbers in sorted(self.numbers.items())
            for number in numbers
        ]


class _Sticky:
    """A sticky assignment during its computation. It starts from the previous assignment."""

    def __init__(
        self, subscriptions: Subscriptions, partitions: Partitions, owned_partitions: Owned
    ) -> None:
        self._members_of = _members_of(subscriptions, partitions)
        self._topics = {member: set(topics) for member, topics in subscriptions.items()}
        self._free = {
            TopicIdPartition(topic, number)
            for topic in self._members_of
            for number in range(partitions[topic])
        }
        self.held = {member: _PartitionShare() for member in sorted(subscriptions)}
        for member, share in self.held.items():
            for partition in owned_partitions.get(member, ()):
                if partition in self._free and partition.topic_id in self._topics[member]:
                    self._free.discard(partition)
                    share.add(partition)

    def give_the_rest(self) -> None:
        """Give each free partition to the subscribed member that has the fewest partitions.

        Begin with the partitions of topics that have the fewest subscribed members.
        """
        choices = {topic: len(members) for topic, members in self._members_of.items()}
        free = sorted(
            self._free,
            key=lambda partition: (
                choices[partition.topic_id],
                partition.partition,
                partition.topic_id,
            ),
        )
        # One heap of counts per topic. A count in a heap may be too low, so the count at the top
        # is compared with the member's current count.
        heaps = {
            topic: [(self.held[member].count, member) for member in members]
            for topic, members in self._members_of.items()
        }
        for heap in heaps.values():
            heapify(heap)
        for partition in free:
            heap = heaps[partition.topic_id]
            while heap[0][0] != (count := self.held[heap[0][1]].count):
                heapreplace(heap, (count, heap[0][1]))
            count, member = heap[0]
            self.held[member].add(partition)
            heapreplace(heap, (count + 1, member))
        self._free.clear()

    def level(self) -> None:
        """While possible, move a partition to a member with at least two partitions fewer.

        Each move makes the sum of the squared counts smaller, so the loop ends.
        """
        while (move := next(self._moves(), None)) is not None:
            giver, taker, topic = move
            self.held[taker].add(self.held[giver].take_last(topic))

    def _moves(self) -> Iterator[tuple[str, str, str]]:
        """Yield possible moves.

        First comes a move from the fullest to the emptiest member, because this order needs the
        fewest moves.
        """
        order = sorted(self.held, key=lambda member: (self.held[member].count, member))
        for giver in reversed(order):
            numbers = self.held[giver].numbers
            for taker in order:
                if self.held[taker].count + 2 > self.held[giver].count:
                    break
                shared = numbers.keys() & self._topics[taker]
                if shared:
                    # From the giver's largest topic, so that each topic stays spread out.
                    topic = max(shared, key=lambda topic: (len(numbers[topic]), topic))
                    yield giver, taker, topic


def _members_of(subscriptions: Subscriptions, partitions: Partitions) -> dict[str, list[str]]:
    """Return the members of each existing topic. Topics and members are sorted."""
    members_by_topic: dict[str, list[str]] = {}
    for member in sorted(subscriptions):
        for topic in set(subscriptions[member]):
            if topic in partitions:
                members_by_topic.setdefault(topic, []).append(member)
    return dict(sorted(members_by_topic.items()))
