"""Assignments: every able member reads, no partition is read twice, none moves without need."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state.assignors import ASSIGNORS, Assignment

TOPICS = ("a", "b", "c", "d")
subscriptions = st.dictionaries(
    st.sampled_from([f"m{number}" for number in range(8)]),
    st.lists(st.sampled_from([*TOPICS, "missing"]), max_size=5),
    min_size=1,
)
partitions = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 9))


def check(subscribed, counts, assigned: Assignment) -> None:
    """Every subscribed partition has one owner, which subscribes to it (I8)."""
    assert sorted(assigned) == sorted(subscribed)
    owners = Counter(
        partition for owned_partitions in assigned.values() for partition in owned_partitions
    )
    subscribed_topics = {
        topic for topics in subscribed.values() for topic in topics if topic in counts
    }
    assert set(owners) == {
        TopicIdPartition(topic, n) for topic in subscribed_topics for n in range(counts[topic])
    }
    assert set(owners.values()) <= {1}
    for member, owned_partitions in assigned.items():
        assert {partition.topic_id for partition in owned_partitions} <= set(subscribed[member])


def is_even(subscribed, assigned: Assignment) -> bool:
    """No member has two more than another that could own one of them."""
    return not any(
        len(partitions) >= len(fewer) + 2
        and any(partition.topic_id in subscribed[poor] for partition in partitions)
        for partitions in assigned.values()
        for poor, fewer in assigned.items()
    )


def moved(old_assignment: Assignment, new_assignment: Assignment) -> int:
    """Partitions that had an owner and have another one."""
    owner = {
        partition: member
        for member, owned_partitions in old_assignment.items()
        for partition in owned_partitions
    }
    return sum(
        owner[partition] != member
        for member, owned_partitions in new_assignment.items()
        for partition in owned_partitions
        if partition in owner
    )


@pytest.mark.parametrize("name", ASSIGNORS)
@given(subscriptions, partitions, st.randoms())
@examples(150)
def test_i8_every_partition_has_one_owner(name: str, subscribed, counts, draw) -> None:
    assign = ASSIGNORS[name]
    first = assign(subscribed, counts, {})
    check(subscribed, counts, first)
    shuffled = list(subscribed.items())
    draw.shuffle(shuffled)
    backwards = dict(reversed(counts.items()))
    assert assign(dict(shuffled), backwards, {}) == first  # the same on every broker (I4)


@given(subscriptions, partitions, subscriptions, partitions)
@examples(300)
def test_sticky_is_even_and_stays_even(old_topics, counts, new_topics, counts_after) -> None:
    assign = ASSIGNORS["sticky"]
    first = assign(old_topics, counts, {})
    assert is_even(old_topics, first)
    second = assign(new_topics, counts_after, first)
    check(new_topics, counts_after, second)
    assert is_even(new_topics, second)
    assert assign(new_topics, counts_after, second) == second  # nothing moves without a reason


@given(subscriptions, partitions, subscriptions)
@examples(200)
def test_claims_of_the_same_partition_leave_one_owner(subscribed, counts, claims) -> None:
    claimed_partitions = {
        member: [TopicIdPartition(topic, n) for topic in topics for n in range(12)]
        for member, topics in claims.items()
    }
    assigned = ASSIGNORS["sticky"](subscribed, counts, claimed_partitions)
    check(subscribed, counts, assigned)
    assert is_even(subscribed, assigned)


@pytest.mark.parametrize("members", [1, 2, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 99, 1000])
def test_one_comes_and_one_goes_with_no_move_too_many(members: int, count: int) -> None:
    assign = ASSIGNORS["sticky"]
    group = {f"m{number:03d}": ["a"] for number in range(members)}
    first = assign(group, {"a": count}, {})
    sizes = sorted(map(len, first.values()))
    assert sizes[-1] - sizes[0] <= 1
    joined = assign({**group, "new": ["a"]}, {"a": count}, first)
    assert moved(first, joined) == len(joined["new"]) == count // (members + 1)
    if members > 1:
        leaver, *staying_members = group
        new_assignment = assign({member: ["a"] for member in staying_members}, {"a": count}, first)
        assert moved(first, new_assignment) == len(first[leaver])  # its own, and no other


def test_added_partitions_go_to_the_member_with_fewest() -> None:
    assign = ASSIGNORS["sticky"]
    group = {"x": ["a"], "y": ["a"], "z": ["a"]}
    first = assign(group, {"a": 4}, {})
    second = assign(group, {"a": 6}, first)
    assert moved(first, second) == 0
    assert {len(owned_partitions) for owned_partitions in second.values()} == {2}


def test_sticky_over_a_life_of_comings_and_goings() -> None:
    draw = random.Random(7)
    assign = ASSIGNORS["sticky"]
    group = {"m000": TOPICS}
    counts = dict.fromkeys(TOPICS, 12)
    assignment = assign(group, counts, {})
    for number in range(1, 200):
        if len(group) > 1 and draw.random() < 0.5:
            del group[draw.choice(sorted(group))]
        else:
            group[f"m{number:03d}"] = TOPICS
        new_assignment = assign(group, counts, assignment)
        check(group, counts, new_assignment)
        sizes = sorted(map(len, new_assignment.values()))
        assert sizes[-1] - sizes[0] <= 1
        stayed = {
            member: owned_partitions
            for member, owned_partitions in assignment.items()
            if member in group
        }
        # Those who stay lose what brings them down to their share, and nothing else.
        assert moved(stayed, new_assignment) <= sum(
            max(0, len(h) - sizes[0]) for h in stayed.values()
        )
        assignment = new_assignment


def test_ranges_of_topics_of_one_size_meet() -> None:
    assigned = ASSIGNORS["range"]({"y": ["a", "b"], "x": ["b", "a"]}, {"a": 3, "b": 3}, {})
    assert assigned["x"] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert assigned["y"] == [("a", 2), ("b", 2)]


def test_round_robin_goes_on_from_topic_to_topic() -> None:
    assigned = ASSIGNORS["roundrobin"]({"x": ["a", "b"], "y": ["a", "b"]}, {"a": 3, "b": 3}, {})
    assert assigned == {"x": [("a", 0), ("a", 2), ("b", 1)], "y": [("a", 1), ("b", 0), ("b", 2)]}


def test_more_members_than_partitions_idle() -> None:
    for assign in ASSIGNORS.values():
        assigned = assign({f"m{n}": ["a"] for n in range(5)}, {"a": 2}, {})
        assert sorted(map(len, assigned.values())) == [0, 0, 0, 1, 1]
