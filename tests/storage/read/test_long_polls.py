"""Waiting reads, woken once and in order, and the changes of a topic that a reader gets."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidelog.storage.read.long_polls import (
    ANY_PARTITION,
    NO_CHANGE,
    WOKEN_AT_ONCE,
    LongPolls,
    TopicChanges,
)

HOUR_S = 3600.0
COUNT = 5 * WOKEN_AT_ONCE


class Reads:
    """Reads that wait, each for its partitions.

    `ended` has the numbers and results of those that have ended, in order.
    """

    def __init__(self) -> None:
        self.polls = LongPolls()
        self.ended: list[tuple[int, bool]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, *keys: tuple[str, int], wait_s: float = HOUR_S) -> None:
        self.tasks.append(asyncio.create_task(self._wait(len(self.tasks), keys, wait_s)))
        await asyncio.sleep(0)

    async def _wait(self, number: int, keys: tuple[tuple[str, int], ...], wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        is_woken = await self.polls.wait(keys, loop.create_future(), loop.time() + wait_s)
        self.ended.append((number, is_woken))

    async def numbers_by_turn(self) -> list[list[int]]:
        """Let all woken reads end. Return their numbers by turn of the event loop."""
        turns: list[list[int]] = []
        for _ in range(COUNT):
            await asyncio.sleep(0)
            turns.append([number for number, _ in self.ended])
            self.ended.clear()
        return [turn for turn in turns if turn]


@contextmanager
def all_ended(reads: Reads) -> Iterator[None]:
    yield
    assert all(task.done() for task in reads.tasks)
    assert not reads.polls
    assert not reads.polls._queue


async def test_one_turn_wakes_a_few_reads_the_first_ones_first() -> None:
    for partitions in (1, COUNT):  # one key of all reads, and a key of each
        reads = Reads()
        for number in range(COUNT):
            await reads.begin(("t", number % partitions))
        with all_ended(reads):
            for partition in range(partitions):
                reads.polls.wake_reads("t", partition)
            turns = await reads.numbers_by_turn()
            assert [len(turn) for turn in turns] == [WOKEN_AT_ONCE] * 5
            assert [number for turn in turns for number in turn] == list(range(COUNT))


async def test_a_commit_to_many_partitions_wakes_a_read_of_all_once() -> None:
    reads = Reads()
    await reads.begin(("t", ANY_PARTITION))
    await reads.begin(*[("t", partition) for partition in range(COUNT)])
    with all_ended(reads):
        for partition in range(COUNT):
            reads.polls.wake_reads("t", partition)
        assert await reads.numbers_by_turn() == [[1, 0]]


async def test_a_read_that_waits_again_is_behind_those_in_the_queue() -> None:
    reads = Reads()
    for _ in range(COUNT):
        await reads.begin(("t", 0))
    reads.polls.wake_reads("t", 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await reads.begin(("t", 0))
    with all_ended(reads):
        reads.polls.wake_reads("t", 0)
        turns = await reads.numbers_by_turn()
        assert turns[-1][-1] == COUNT


async def test_reads_that_leave_or_end_meanwhile_lose_no_wake_of_others() -> None:
    reads = Reads()
    for _ in range(COUNT):
        await reads.begin(("t", 0), ("u", 0))
    await reads.begin(("u", 1), wait_s=1)
    reads.polls.wake_reads("t", 0)
    for task in reads.tasks[: COUNT // 2]:
        task.cancel()
    await reads.numbers_by_turn()
    await asyncio.sleep(2)
    assert reads.ended == [(COUNT, False)]  # not woken
    assert all(task.done() for task in reads.tasks)
    assert not reads.polls
    assert not reads.polls._queue
    await reads.begin(("t", 0))
    reads.polls.wake_reads("t", 0)
    await reads.tasks[-1]
    assert reads.ended[-1] == (COUNT + 1, True)


async def test_the_end_of_all_waits_ends_reads_in_the_queue_without_records() -> None:
    reads = Reads()
    for _ in range(COUNT):
        await reads.begin(("t", 0))
    reads.polls.wake_reads("t", 0)
    reads.polls.end_all(is_last=True)
    await asyncio.gather(*reads.tasks)
    assert {number for number, _ in reads.ended} == set(range(COUNT))
    assert not reads.ended[-1][1]
    await reads.begin(("t", 0))
    assert reads.ended[-1] == (COUNT, False)


async def test_a_turn_is_behind_the_woken_reads_and_immediate_without_them() -> None:
    reads = Reads()
    turn = asyncio.create_task(reads.polls.turn())
    await asyncio.sleep(0)
    assert turn.done()
    for _ in range(COUNT):
        await reads.begin(("t", 0))
    with all_ended(reads):
        reads.polls.wake_reads("t", 0)
        await reads.polls.turn()
        assert len(reads.ended) >= COUNT - WOKEN_AT_ONCE
        await asyncio.gather(*reads.tasks)


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
