"""Consume, transform, produce over brokers that die anywhere: exactly once (I4, I6).

The store is in memory and fails as it likes, time is virtual, every schedule is seeded. After every
death, and at the end, the WAL is folded by the plainest reader: results and offsets are of one
commit each, so at any moment the results are those of exactly what the group has read.
"""

import asyncio
import random

import pytest

from tests.support.logs import (
    CHECKPOINTING,
    append,
    closing,
    kill,
    opened,
    read_values,
    spoil,
    store_of,
)
from tests.support.records import fold, rows, tail_values
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import (
    CommitUnknown,
    IdempotencyMismatch,
    LogError,
    Unavailable,
)
from tidelog.storage.core.model import Acks, AppendedRange, TopicPartition
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore

CLUSTER_ID = "c0ffee"
GROUP = "g"
RECORDS = 60
SOURCE = TopicPartition("source", 0)


async def prepared(inner: MemoryStore) -> None:
    """A topic with records to read, and two empty ones for what is made of them."""
    async with closing(await opened(inner)) as log:
        for name, partitions in (("source", 1), ("even", 2), ("odd", 1)):
            await log.create_topic(name, partitions, {})
        await append(log, *map(str, range(RECORDS)), topic="source")


async def commit(log: Log, start: int, values: list[str]) -> list[AppendedRange]:
    """One batch from `source`: its even numbers here, its odd ones there, and how far it went."""
    placed = [(topic, number, mine) for topic, number, mine in _sorted(values) if mine]
    offset = GroupOffset(log.state.topic("source").topic_id, 0, start + len(values))
    return await log.transact(
        [(log.state.topic(topic), places, rows(*mine)) for topic, places, mine in placed],
        [CommitOffsets(GROUP, -1, [offset])],
        size=sum(map(len, values)),
        is_json=False,
        key=IdempotencyKey(f"{GROUP}-{start}", ",".join(values).encode(), [2, 1]),
    )


def _sorted(values: list[str]) -> list[tuple[str, list[int] | int, list[str]]]:
    even = [value for value in values if not int(value) % 2]
    odd = [value for value in values if int(value) % 2]
    return [("even", [int(value) // 2 % 2 for value in even], even), ("odd", 0, odd)]


async def check(inner: MemoryStore) -> int:
    """How far the group has read, and that the results are exactly those of that."""
    state, _ = await fold(inner, CLUSTER_ID)
    committed = state.committed_offsets.of_group(GROUP).get(state.topic("source").topic_id, {})
    offset = committed[0].offset if committed else 0
    values_by_partition = {
        (topic, number): [
            int(value or b"") for value in await tail_values(inner, state, topic, number)
        ]
        for topic, number in (("even", 0), ("even", 1), ("odd", 0))
    }
    read = range(offset)
    assert values_by_partition["even", 0] == [value for value in read if value % 4 == 0]
    assert values_by_partition["even", 1] == [value for value in read if value % 4 == 2]
    assert values_by_partition["odd", 0] == [value for value in read if value % 2]
    return offset


class Worker:
    """Reads records and commits its results through any live broker. Workers do not coordinate:
    several of them do the same work, as zombies would."""

    def __init__(self, brokers: list[Log], seed: int) -> None:
        self._brokers = brokers
        self._draw = random.Random(seed)
        self.commits = self.unknown = self.beaten = 0

    async def run(self) -> None:
        while (start := self._where(log := self._broker())) < RECORDS:
            reading = log.fetch("source", 0, start, bytes_max=self._draw.randrange(1, 300))
            fetched = await asyncio.wait_for(reading, 3.0)
            values = [row for piece in fetched.pieces for row in piece.batch["value"].to_pylist()]
            await self._commit(start, [str(value, "ascii") for value in values])

    async def _commit(self, start: int, values: list[str]) -> None:
        while True:
            try:
                await asyncio.wait_for(commit(self._broker(), start, values), 3.0)
                self.commits += 1
                return
            except IdempotencyMismatch:
                self.beaten += 1  # another has committed from here, less or more
                return
            except (TimeoutError, CommitUnknown):  # the broker is gone, or its answer
                self.unknown += 1
            except Unavailable:
                await asyncio.sleep(0.1)

    def _broker(self) -> Log:
        return self._draw.choice(self._brokers)

    def _where(self, log: Log) -> int:
        committed = log.committed_offsets(GROUP).get(SOURCE)
        return 0 if committed is None else committed.offset


async def patiently(worker: Worker) -> None:
    while True:
        try:
            return await worker.run()
        except (LogError, TimeoutError):  # of a read: the broker is gone, or does not answer
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("seed", range(12))
async def test_exactly_once_through_any_crash(inner: MemoryStore, seed: int) -> None:
    draw = random.Random(seed)
    await prepared(inner)
    brokers = [await opened(inner, CHECKPOINTING) for _ in range(2)]
    spoil(brokers[0], draw)
    spoil(brokers[1], draw)
    workers = [Worker(brokers, seed * 10 + number) for number in range(2)]
    tasks = [asyncio.create_task(patiently(worker)) for worker in workers]
    deaths = 0
    seen = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(draw.random())
        victim = draw.randrange(2)
        dying = brokers[victim]
        heir = await opened(inner, CHECKPOINTING)
        spoil(heir, draw)
        brokers[victim] = heir
        await kill(dying)
        deaths += 1
        offset = await check(inner)
        assert offset >= seen
        seen = offset
        assert deaths < 1000, "no progress"
    for task in tasks:
        task.result()
    for broker in brokers:
        store_of(broker).plan = lambda _: None
        await store_of(broker).land()
    assert await check(inner) == RECORDS
    async with closing(*brokers):
        await brokers[0].wal.refresh()
        assert await read_values(brokers[0], topic="odd") == [
            str(value) for value in range(1, RECORDS, 2)
        ]
    assert deaths > 1
    assert sum(worker.unknown for worker in workers)
    assert sum(worker.beaten for worker in workers)


@pytest.mark.parametrize("is_after", [False, True], ids=["before the PUT", "after the PUT"])
@pytest.mark.parametrize("is_retried", [False, True])
async def test_a_broker_that_crashes_at_its_put(is_after: bool, is_retried: bool) -> None:
    inner = MemoryStore()
    await prepared(inner)
    log = await opened(inner)
    await commit(log, 0, ["0", "1", "2"])
    gate = store_of(log).hold("create", object_keys.wal(log.state.seq + 1), is_after=is_after)
    asking = asyncio.create_task(commit(log, 3, ["3", "4"]))
    await gate.reached.wait()
    await kill(log)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await check(inner) == (5 if is_after else 3)
    async with closing(await opened(inner)) as heir:
        if is_retried:
            placed = await commit(heir, 3, ["3", "4"])
            assert placed == [AppendedRange("even", 0, 1, 1), AppendedRange("odd", 0, 1, 1)]
            assert await check(inner) == 5
            with pytest.raises(IdempotencyMismatch):
                await commit(heir, 3, ["3"])
        assert await check(inner) == (5 if is_after or is_retried else 3)


async def test_i4_what_rides_in_the_same_flush_is_decided_by_itself(inner: MemoryStore) -> None:
    """A refused transaction fails no other request, and the requests around it do not fail it."""

    await prepared(inner)
    async with closing(await opened(inner)) as log:
        source = log.state.topic("source").topic_id
        stale = CommitOffsets(GROUP, 4, [GroupOffset(source, 0, 9)])
        odd = (log.state.topic("odd"), 0, rows("1"))
        seq = log.state.seq
        first, *others = await asyncio.gather(
            append(log, "a", topic="even"),
            log.transact([odd], [stale], size=1, is_json=False),
            commit(log, 0, ["0", "1"]),
            append(log, "b", topic="even", acks=Acks.ALL),
            return_exceptions=True,
        )
        assert log.state.seq == seq + 1
        assert first == [AppendedRange("even", 0, 0, 1)]
        assert isinstance(others[0], LogError)
        assert others[1:] == [
            [AppendedRange("even", 0, 1, 1), AppendedRange("odd", 0, 0, 1)],
            [AppendedRange("even", 0, 2, 1)],
        ]
        assert await read_values(log, topic="even") == ["a", "0", "b"]
        assert await read_values(log, topic="odd") == ["1"]
        assert log.committed_offsets(GROUP)[SOURCE].offset == 2
