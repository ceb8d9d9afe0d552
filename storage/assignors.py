"""Which member of a consumer group reads which partition: Kafka's range, round robin and sticky.

Members come with the topics that they subscribed to; a topic's partitions go to those members
alone. All three are functions of their arguments, whatever the order those come in, so that `apply`
gives every broker the same assignment (I4) and no partition two owners (I8). A member that nothing
is left for idles. Pure; knows nothing of generations, heartbeats or the WAL.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple, TypeAlias


class Owned(NamedTuple):
    """A partition as groups name it: topics by id, so that a topic made anew is another one."""

    topic: str
    partition: int


Subscriptions: TypeAlias = Mapping[str, Collection[str]]
"""The topics of each member, by its id. The ids' order decides where numbers are equal: give static
members ids that stay the same over restarts."""
Partitions: TypeAlias = Mapping[str, int]
"""How many partitions each topic has; topics that do not exist are missing."""
Assignment: TypeAlias = dict[str, list[Owned]]
"""The partitions of each member, in order; every member is named."""
Assignor: TypeAlias = Callable[
    [Subscriptions, Partitions, Mapping[str, Collection[Owned]]], Assignment
]
"""Subscriptions, partitions, and who owns what so far, to who owns what from now on."""


def assign_range(
    subscriptions: Subscriptions, partitions: Partitions, _: Mapping[str, Collection[Owned]]
) -> Assignment:
    """Each topic by itself, in consecutive pieces: the same numbers of two topics of one size meet
    in one member (Kafka's RangeAssignor)."""
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    for topic, members in _members_of(subscriptions, partitions).items():
        share, more = divmod(partitions[topic], len(members))
        first = 0
        for index, member in enumerate(members):
            end = first + share + (index < more)
            assigned[member] += [Owned(topic, number) for number in range(first, end)]
            first = end
    return assigned


def assign_round_robin(
    subscriptions: Subscriptions, partitions: Partitions, _: Mapping[str, Collection[Owned]]
) -> Assignment:
    """All partitions of all topics in turn, passing over who did not subscribe to the topic
    (Kafka's RoundRobinAssignor)."""
    assigned: Assignment = {member: [] for member in sorted(subscriptions)}
    turns = _Turns(list(assigned))
    for topic, members in _members_of(subscriptions, partitions).items():
        subscribed = set(members)
        for number in range(partitions[topic]):
            assigned[turns.next_of(subscribed)].append(Owned(topic, number))
    return assigned


def assign_sticky(
    subscriptions: Subscriptions,
    partitions: Partitions,
    owned: Mapping[str, Collection[Owned]],
) -> Assignment:
    """As even as can be, and of what is owned no more moves than that takes.

    Even: no member has two partitions more than another one that could have one of them (the rule
    of Kafka's StickyAssignor). What two members claim to own stays with the one of the smaller id.
    """
    sticky = _Sticky(subscriptions, partitions, owned)
    sticky.give_the_rest()
    sticky.level()
    return {member: share.sorted() for member, share in sorted(sticky.held.items())}


ASSIGNORS: Mapping[str, Assignor] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
    "cooperative-sticky": assign_sticky,
}
"""By the names of Kafka's `partition.assignment.strategy`. The last two differ in how a client
gives up what it loses, not in who gets what."""


class _Turns:
    """Members in a circle."""

    def __init__(self, members: list[str]) -> None:
        self._members = members
        self._at = 0

    def next_of(self, wanted: Collection[str]) -> str:
        """The next one that is wanted; there is one."""
        while True:
            member = self._members[self._at % len(self._members)]
            self._at += 1
            if member in wanted:
                return member


class _Share:
    """What one member holds: numbers in order, by topic, so that a move costs no look at the rest
    (10,000 partitions are levelled between two members in ~40 ms, not in 7 s)."""

    def __init__(self) -> None:
        self.count = 0
        self.numbers: dict[str, list[int]] = {}

    def add(self, one: Owned) -> None:
        insort(self.numbers.setdefault(one.topic, []), one.partition)
        self.count += 1

    def take_last(self, topic: str) -> Owned:
        numbers = self.numbers[topic]
        number = numbers.pop()
        if not numbers:
            del self.numbers[topic]
        self.count -= 1
        return Owned(topic, number)

    def sorted(self) -> list[Owned]:
        return [
            Owned(topic, number)
            for topic, numbers in sorted(self.numbers.items())
            for number in numbers
        ]


class _Sticky:
    """An assignment that grows from what is owned."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        partitions: Partitions,
        owned: Mapping[str, Collection[Owned]],
    ) -> None:
        self._members_of = _members_of(subscriptions, partitions)
        self._topics = {member: set(topics) for member, topics in subscriptions.items()}
        self._free = {
            Owned(topic, number)
            for topic in self._members_of
            for number in range(partitions[topic])
        }
        self.held = {member: _Share() for member in sorted(subscriptions)}
        for member, share in self.held.items():
            for one in owned.get(member, ()):
                if one in self._free and one.topic in self._topics[member]:
                    self._free.discard(one)
                    share.add(one)

    def give_the_rest(self) -> None:
        """Each free partition to who has the fewest of those that may have it; first the ones with
        the least choice."""
        choices = {topic: len(members) for topic, members in self._members_of.items()}
        free = sorted(self._free, key=lambda one: (choices[one.topic], one.partition, one.topic))
        # A heap for each topic, of counts that may have grown since: looked at again when they come
        # up.
        heaps = {
            topic: [(self.held[member].count, member) for member in members]
            for topic, members in self._members_of.items()
        }
        for heap in heaps.values():
            heapify(heap)
        for one in free:
            heap = heaps[one.topic]
            while heap[0][0] != (count := self.held[heap[0][1]].count):
                heapreplace(heap, (count, heap[0][1]))
            count, member = heap[0]
            self.held[member].add(one)
            heapreplace(heap, (count + 1, member))
        self._free.clear()

    def level(self) -> None:
        """Move one at a time from who has more to who has at least two fewer, until nobody can.

        Each move makes the sum of squares smaller, so it ends.
        """
        while (move := next(self._moves(), None)) is not None:
            giver, taker, topic = move
            self.held[taker].add(self.held[giver].take_last(topic))

    def _moves(self) -> Iterator[tuple[str, str, str]]:
        """From the fullest to the emptiest first: that takes the fewest."""
        order = sorted(self.held, key=lambda member: (self.held[member].count, member))
        for giver in reversed(order):
            numbers = self.held[giver].numbers
            for taker in order:
                if self.held[taker].count + 2 > self.held[giver].count:
                    break
                shared = numbers.keys() & self._topics[taker]
                if shared:
                    # Of the topic that the giver has most of, so that topics stay spread.
                    topic = max(shared, key=lambda topic: (len(numbers[topic]), topic))
                    yield giver, taker, topic


def _members_of(subscriptions: Subscriptions, partitions: Partitions) -> dict[str, list[str]]:
    """The members of each topic that exists, both in order."""
    found: dict[str, list[str]] = {}
    for member in sorted(subscriptions):
        for topic in set(subscriptions[member]):
            if topic in partitions:
                found.setdefault(topic, []).append(member)
    return dict(sorted(found.items()))
