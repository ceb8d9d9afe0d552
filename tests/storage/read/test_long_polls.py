"""Waiting reads: each is woken once, in order, and a few in each turn of the event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.storage.read.long_polls import ANY_PARTITION, WOKEN_AT_ONCE, LongPolls

HOUR_S = 3600.0
COUNT = 5 * WOKEN_AT_ONCE


class Reads:
    """Reads that wait, each for its partitions; `ended` has the numbers and results of those that
    have ended, in order."""

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
