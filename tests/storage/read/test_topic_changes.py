"""Changes of a topic: a reader gets the partitions that changed since it looked, and no other."""

import random

import pytest

from tidelog.storage.read.long_polls import NO_CHANGE, LongPolls, TopicChanges

PARTITIONS = 20


@pytest.mark.parametrize("seed", range(20))
def test_readers_get_what_changed_since_they_looked(seed: int) -> None:
    draw, changes = random.Random(seed), TopicChanges()
    counts = [NO_CHANGE] * 3
    expected: list[dict[int, None] | None] = [None] * 3
    for _ in range(500):
        kind = draw.random()
        if kind < 0.6:
            partition = draw.randrange(PARTITIONS)
            changes.add(partition)
            for changed in expected:
                if changed is not None:
                    changed.pop(partition, None)
                    changed[partition] = None
        elif kind < 0.62:
            changes.add_all()
            expected = [None] * 3
        else:
            reader = draw.randrange(3)
            changed = expected[reader]
            assert changes.since(counts[reader]) == (None if changed is None else list(changed))
            counts[reader], expected[reader] = changes.count, {}


def test_readers_of_a_topic_share_its_changes_and_leave_nothing() -> None:
    polls = LongPolls()
    assert not polls.has_readers
    changes = polls.changes_of("t")
    assert polls.changes_of("t") is changes
    assert polls.has_readers
    for partition in (2, 1, 2):
        polls.wake_reads("t", partition)
        polls.wake_reads("u", partition)
    assert changes.since(0) == [1, 2]
    count = changes.count
    polls.wake_all("u")
    assert changes.count == count
    polls.wake_all()
    assert changes.since(count) is None
    del changes
    assert not polls.has_readers
