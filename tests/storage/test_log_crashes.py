"""Processes that end anywhere: what was acked is there, what is begun is finished by others.

A killed broker's calls have no effect any more; those that reached the store have had theirs (I1,
I4, I7). The store is in memory, time is virtual, every schedule is seeded.
"""

import asyncio
import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import logs
from tests.support.faults import Call, Fault, Script, Seeded
from tests.support.hotlogs import names
from tests.support.logs import (
    CHECKPOINTING,
    COLD,
    MANUAL,
    append,
    closing,
    kill,
    made,
    opened,
    read_values,
    spoil,
    store_of,
)
from tests.support.records import fold, rows, tail_values
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import CommitUnknown, IdempotencyMismatch, LogError, Unavailable
from tidelog.storage.core.model import Acks, AppendedRange, TopicPartition
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore

with_topic = partial(logs.with_topic, partitions=2)


# -- the steps of a seal


async def hold(log: Broker, step: str, seq: int) -> asyncio.Event:
    """Stop the log's seal at this step; the event is set when it gets there."""
    topic = log.state.topic("t")
    when = "after" in step
    if "commit" in step:
        table = await log._log.tables.of(topic)
        add, reached = table.add, asyncio.Event()

        async def stopping(*args: Any) -> None:
            if when:
                await add(*args)
            reached.set()
            await asyncio.Event().wait()

        table.add = stopping
        return reached
    if "entry" in step:
        return store_of(log).hold("create", object_keys.wal(seq), is_after=when).reached
    reached = asyncio.Event()
    count = 1 if "first" in step else 2

    def plan(call: Call) -> Fault | None:
        nonlocal count
        if call.verb == "create" and call.key.startswith(object_keys.TOPICS):
            count -= 1
            if count == 0:
                store_of(log).hold("create", call.key, is_after=when)
                reached.set()
        return None

    store_of(log).plan = plan
    return reached


STEPS = [
    "before the first upload",
    "after the first upload",
    "before the second upload",
    "after the second upload",
    "before the commit",
    "after the commit",
    "before the entry",
    "after the entry",
]


@pytest.mark.parametrize("step", STEPS)
async def test_i7_next_seal_finishes_crashed_seal(inner: MemoryStore, step: str) -> None:
    log = await with_topic(inner)
    model: list[list[str]] = [[], []]
    for i in range(4):
        for number in (0, 1):
            await append(log, f"{number}-{i}", partition=number)
            model[number].append(f"{number}-{i}")
        if i == 1:
            await log.records.seal("t")
    reached = await hold(log, step, log.state.seq + 1)
    seal = asyncio.create_task(log.records.seal("t"))
    await reached.wait()
    await asyncio.sleep(0.1)
    assert not seal.done()
    # Readers do not mind while it stands there, nor when it is dead.
    reader = await opened(inner, COLD)
    for number in (0, 1):
        assert await read_values(reader, partition=number) == model[number]
    await kill(log)
    seal.cancel()
    await asyncio.gather(seal, return_exceptions=True)
    heir = await opened(inner, COLD)
    async with closing(reader, heir):
        for number in (0, 1):
            assert await read_values(heir, partition=number) == model[number]
        await append(heir, "late", partition=1)
        model[1].append("late")
        await heir.records.seal("t")
        # A table that was ahead is caught up with first; what is left goes the next time.
        await heir.records.seal("t")
        for number in (0, 1):
            partition = heir.state.partition("t", number)
            assert (partition.sealed_end, partition.tail) == (partition.high_watermark, [])
            for broker in (heir, reader):
                await broker._log.wal.refresh()
                assert await read_values(broker, partition=number) == model[number]
            table = await heir._log.tables.of(heir.state.topic("t"))
            files = list(await table.segments(number))
            assert sum(file.rows for file in files) == len(model[number])


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ABSENT, Fault.STORED, Fault.OWN_412])
@pytest.mark.parametrize("prefix", [object_keys.TOPICS, object_keys.WAL])
async def test_i7_failed_seal_is_tried_again(inner: MemoryStore, prefix: str, fault: Fault) -> None:
    async with closing(await with_topic(inner)) as log:
        await append(log, "a", "b")
        store_of(log).plan = Script("create", prefix, [fault])
        if fault is Fault.REFUSED:
            with pytest.raises(Unavailable):
                await log.records.seal("t")
            assert await read_values(log) == ["a", "b"]
        await log.records.seal("t")
        assert log.state.partition("t", 0).tail == []
        async with closing(await opened(inner, COLD)) as cold:
            assert await read_values(cold) == ["a", "b"]


# -- whole processes


@pytest.mark.parametrize("seed", range(4))
async def test_i1_killed_log_opens_again_as_it_was(inner: MemoryStore, seed: int) -> None:
    """Writers, sealers and checkpoints on brokers that are killed one after the other.

    Whatever was acked keeps its offset, nothing is there twice, and what was not acked is there
    once or not.
    """
    draws = random.Random(seed)
    await (await with_topic(inner)).close()
    acked: dict[tuple[int, int], str] = {}
    tried: list[str] = []
    for life in range(6):
        log = await opened(inner, draws.choice([CHECKPOINTING, COLD]))
        store = store_of(log)
        store.plan = Seeded(seed * 10 + life, 0.1)
        store.latency = lambda _: draws.choice([0.001, 0.02, 0.1])
        end_s = asyncio.get_running_loop().time() + draws.uniform(0.1, 3.0)

        async def write(client: int, log: Broker = log, end_s: float = end_s) -> None:
            count = 0
            while asyncio.get_running_loop().time() < end_s:
                number = draws.randrange(2)
                label = f"{asyncio.get_running_loop().time():.3f}/{client}/{count}"
                count += 1
                tried.append(label)
                try:
                    placed = await append(log, label, partition=number)
                except Unavailable:
                    tried.remove(label)
                    continue
                except CommitUnknown:
                    continue
                assert placed is not None
                acked[number, placed[0].base_offset] = label

        async def seal(log: Broker = log) -> None:
            while True:
                await asyncio.sleep(draws.uniform(0.1, 0.7))
                with contextlib.suppress(Unavailable, CommitUnknown):
                    await log.records.seal("t")

        tasks = [asyncio.create_task(write(client)) for client in range(3)]
        tasks.append(asyncio.create_task(seal()))
        await asyncio.sleep(end_s - asyncio.get_running_loop().time())
        await kill(log)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        await store.land()
    first, second = await opened(inner), await opened(inner, COLD)
    async with closing(first, second):
        assert first.state.encode() == second.state.encode()
        values_of_partitions = [await read_values(second, partition=number) for number in (0, 1)]
        assert [
            await read_values(first, partition=number) for number in (0, 1)
        ] == values_of_partitions
        for (number, offset), label in acked.items():
            assert values_of_partitions[number][offset] == label
        everything = [*values_of_partitions[0], *values_of_partitions[1]]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(tried)
        await first.records.seal("t")
        await first.records.seal("t")
        await second._log.wal.refresh()
        assert [
            await read_values(second, partition=number) for number in (0, 1)
        ] == values_of_partitions
    assert len(acked) > 20


@pytest.mark.parametrize("seed", range(3))
async def test_i4_acks_1_is_stored_once(inner: MemoryStore, seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    await (await with_topic(inner)).close()
    acked: list[str] = []
    for life in range(5):
        log = await opened(inner, hot_dir=tmp_path)
        store = store_of(log)
        store.plan = Seeded(seed * 10 + life, 0.3)
        store.latency = lambda _: draws.choice([0.001, 0.05])
        for i in range(draws.randrange(1, 40)):
            label = f"{life}-{i}"
            await append(log, label, acks=Acks.LOCAL)
            acked.append(label)
            await asyncio.sleep(draws.choice([0, 0, 0, 0.03]))
        await kill(log)
        if draws.random() < 0.3:
            # The next broker crashes too, while it recovers.
            heir = await asyncio.wait_for(opened(inner, hot_dir=tmp_path), 60)
            await kill(heir)
    async with closing(await opened(inner, hot_dir=tmp_path)) as log:
        assert await read_values(log) == acked
    assert names(tmp_path, "*") == []


async def test_i4_recovery_is_repeated(tmp_path: Path) -> None:
    inner = MemoryStore()
    log = await with_topic(inner)
    await log.close()
    log = await opened(inner, hot_dir=tmp_path)
    gate = store_of(log).hold("create", object_keys.wal(log.state.seq + 1))
    for i in range(5):
        await append(log, str(i), acks=Acks.LOCAL)
    await gate.reached.wait()
    await kill(log)
    seq = ClusterState.decode((await checkpointed(inner)), "x").seq
    for step in range(4):  # before and after its commit, then before and after it is known
        await stopped_recovery(inner, tmp_path, seq + 1 + step // 2, is_after=step % 2 == 1)
    assert names(tmp_path) != []
    async with closing(await opened(inner, hot_dir=tmp_path)) as log:
        assert await read_values(log) == ["0", "1", "2", "3", "4"]


async def checkpointed(inner: MemoryStore) -> bytes:
    """The state of the WAL as it is."""
    async with closing(await opened(inner, MANUAL)) as log:
        return log.state.encode()


async def stopped_recovery(inner: MemoryStore, hot_dir: Path, seq: int, *, is_after: bool) -> None:
    """A process that crashes before or after the PUT of that entry, or after its recovery."""
    log = made(inner, hot_dir=hot_dir)
    gate = store_of(log).hold("create", object_keys.wal(seq), is_after=is_after)
    opening = asyncio.create_task(log.open("c0ffee"))
    reached = asyncio.create_task(gate.reached.wait())
    await asyncio.wait([opening, reached], return_when=asyncio.FIRST_COMPLETED)
    store_of(log).kill()
    for task in (opening, reached):
        task.cancel()
    await asyncio.gather(opening, reached, return_exceptions=True)
    if not opening.cancelled():
        await kill(opening.result())


# -- consume, transform, produce: exactly once


CLUSTER_ID = "c0ffee"
GROUP = "g"
RECORDS = 60
SOURCE = TopicPartition("source", 0)


async def prepared(inner: MemoryStore) -> None:
    """A topic with records to read, and two empty ones for what is made of them."""
    async with closing(await opened(inner)) as log:
        for name, partitions in (("source", 1), ("even", 2), ("odd", 1)):
            await log.topics.create(name, partitions, {})
        await append(log, *map(str, range(RECORDS)), topic="source")


async def commit(log: Broker, start: int, values: list[str]) -> list[AppendedRange]:
    """One batch from `source`: its even numbers here, its odd ones there, and how far it went."""
    placed = [(topic, number, mine) for topic, number, mine in _sorted(values) if mine]
    offset = GroupOffset(log.state.topic("source").topic_id, 0, start + len(values))
    return await log.records.transact(
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
    """Reads records and commits its results through any live broker.

    Workers do not coordinate: several of them do the same work, as zombies would.
    """

    def __init__(self, brokers: list[Broker], seed: int) -> None:
        self._brokers = brokers
        self._draw = random.Random(seed)
        self.commits = self.unknown = self.beaten = 0

    async def run(self) -> None:
        while (start := self._where(log := self._broker())) < RECORDS:
            reading = log.records.fetch("source", 0, start, bytes_max=self._draw.randrange(1, 300))
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

    def _broker(self) -> Broker:
        return self._draw.choice(self._brokers)

    def _where(self, log: Broker) -> int:
        committed = log.groups.committed_offsets(GROUP).get(SOURCE)
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
    newest_offset = 0
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
        assert offset >= newest_offset
        newest_offset = offset
        assert deaths < 1000, "no progress"
    for task in tasks:
        task.result()
    for broker in brokers:
        store_of(broker).plan = lambda _: None
        await store_of(broker).land()
    assert await check(inner) == RECORDS
    async with closing(*brokers):
        await brokers[0]._log.wal.refresh()
        assert await read_values(brokers[0], topic="odd") == [
            str(value) for value in range(1, RECORDS, 2)
        ]
    assert deaths > 1
    assert sum(worker.unknown for worker in workers)
    assert sum(worker.beaten for worker in workers)


@pytest.mark.parametrize("is_after", [False, True], ids=["before the PUT", "after the PUT"])
@pytest.mark.parametrize("is_retried", [False, True])
async def test_crash_at_put_is_atomic(inner: MemoryStore, is_after: bool, is_retried: bool) -> None:
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
        first, *other_results = await asyncio.gather(
            append(log, "a", topic="even"),
            log.records.transact([odd], [stale], size=1, is_json=False),
            commit(log, 0, ["0", "1"]),
            append(log, "b", topic="even", acks=Acks.ALL),
            return_exceptions=True,
        )
        assert log.state.seq == seq + 1
        assert first == [AppendedRange("even", 0, 0, 1)]
        assert isinstance(other_results[0], LogError)
        assert other_results[1:] == [
            [AppendedRange("even", 0, 1, 1), AppendedRange("odd", 0, 0, 1)],
            [AppendedRange("even", 0, 2, 1)],
        ]
        assert await read_values(log, topic="even") == ["a", "0", "b"]
        assert await read_values(log, topic="odd") == ["1"]
        assert log.groups.committed_offsets(GROUP)[SOURCE].offset == 2
