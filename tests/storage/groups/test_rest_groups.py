"""Instances over virtual time: expiry, undelivered records, a crash of the coordinator.

A silent member expires, undelivered records are not committed, and the crash costs time only.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict

import pytest

from tests.support import vloop
from tests.support.clock import ManualClock
from tests.support.instances import (
    BY_HAND,
    CONFIG,
    group_of,
    joined,
    members_of,
    read,
    virtual,
)
from tests.support.logs import append
from tests.support.records import rows
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import (
    GroupNotEmpty,
    IllegalGeneration,
    NotAssigned,
    StaleCommit,
    UnknownMember,
)
from tidelog.storage.core.model import ReadBounds, TopicPartition
from tidelog.storage.groups.coordinator import ADOPT_S
from tidelog.storage.groups.delivery_outcome import SENDING_S
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.records import FetchResult


def values_of(fetched: FetchResult) -> list[str]:
    return [
        value.decode()
        for piece in fetched.pieces
        for value in piece.batch.column("value").to_pylist()
    ]


@virtual
async def test_who_is_silent_for_a_session_goes_and_the_others_read_on() -> None:
    async with group_of(2, "x", "y") as (log, consumers):
        await append(log, "a", partition=0)
        await append(log, "b", partition=1)
        values = []
        for _ in range(4):
            await asyncio.sleep(3)
            values += await read(consumers, "x")
        assert members_of(log) == {"x"}
        assert sorted(values) == ["a", "b"]
        with pytest.raises(UnknownMember):
            await read(consumers, "y")
        with pytest.raises(UnknownMember):
            await consumers.commit(await consumers.heartbeat("g", "y"))


@virtual
async def test_a_long_read_is_a_sign_of_life() -> None:
    async with group_of(1, "x") as (log, consumers):
        assert await read(consumers, "x", wait_s=60) == []
        assert members_of(log) == {"x"}


@virtual
async def test_who_speaks_and_does_not_read_goes_after_the_poll_interval() -> None:
    async with group_of(1, "x") as (log, consumers):
        await consumers.join("g", "idle", CONFIG)
        for _ in range(7):
            await asyncio.sleep(5)
            for member in members_of(log):
                await consumers.heartbeat("g", member)
        assert members_of(log) == {"idle"}  # it has nothing to read


@virtual
async def test_resumed_broker_expires_no_member() -> None:
    async with group_of(1, "x") as (log, _):
        assert isinstance(log.clock, ManualClock)
        log.clock.advance(60)
        await asyncio.sleep(5)
        assert members_of(log) == {"x"}
        await asyncio.sleep(9)
        assert members_of(log) == set()


@virtual
async def test_what_was_not_sent_is_returned_again_and_not_committed() -> None:
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await _lose_an_answer(consumers)
        await consumers.commit(await consumers.heartbeat("g", "x"))
        assert log.groups.committed_offsets("g") == {}
        assert await read(consumers, "x") == ["a", "b"]
        await asyncio.sleep(3 * ADOPT_S)
        assert log.groups.committed_offsets("g") == {}
        await read(consumers, "x")
        await asyncio.sleep(2 * ADOPT_S)
        assert log.groups.committed_offsets("g")[TopicPartition("t", 0)].offset == 2


async def _lose_an_answer(consumers: RestGroups) -> None:
    async with consumers.reading("g", "x", bounds=ReadBounds(100), wait_s=0) as result:
        assert result.portions
        raise ConnectionError


@virtual
async def test_the_last_records_are_committed_though_the_next_read_waits_for_nothing() -> None:
    """The client reads on, before its coordinator has the acknowledgement of its answer.

    Another broker is between them.
    """
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a", "b")
        async with consumers.reading("g", "x", bounds=ReadBounds(100), wait_s=0) as result:
            assert result.portions
            reading_on = asyncio.create_task(read(consumers, "x", wait_s=0))
            await asyncio.sleep(3)
            assert not reading_on.done()
        assert await reading_on == []
        await asyncio.sleep(2 * ADOPT_S)
        assert log.groups.committed_offsets("g")[TopicPartition("t", 0)].offset == 2


@virtual
async def test_i10_a_client_that_takes_nothing_is_not_waited_for_for_ever() -> None:
    async with group_of(1, "x") as (log, consumers):
        await append(log, "a")
        async with consumers.reading("g", "x", bounds=ReadBounds(100), wait_s=0):
            began_s = asyncio.get_running_loop().time()
            assert await read(consumers, "x", wait_s=2) == []
            await consumers.commit(await consumers.heartbeat("g", "x"))
            assert asyncio.get_running_loop().time() - began_s < 2 * SENDING_S + 1
            assert log.groups.committed_offsets("g") == {}


@virtual
async def test_a_read_waits_for_another_until_its_own_timeout() -> None:
    async with group_of(1, "x") as (_, consumers):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        waiting = [asyncio.create_task(read(consumers, "x", wait_s=20)) for _ in range(2)]
        await asyncio.sleep(1)
        assert await read(consumers, "x", wait_s=5) == []
        assert loop.time() - began_s == pytest.approx(6)
        assert await asyncio.gather(*waiting) == [[], []]
        assert loop.time() - began_s == pytest.approx(20, abs=0.1)


@virtual
async def test_retention_moves_a_position_that_was_left_behind() -> None:
    async with group_of() as (log, consumers):
        await append(log, *"abcd")
        await joined(consumers, "x")
        await consumers.seek("g", "x", {TopicPartition("t", 0): 99})
        assert await read(consumers, "x") == list("abcd")  # earliest, as its config has it


@virtual
async def test_many_commit_in_one_flush() -> None:
    async with group_of(50) as (log, consumers):
        names = [f"m{n}" for n in range(50)]
        await asyncio.gather(*(consumers.join("g", name, CONFIG) for name in names))
        await asyncio.gather(*(consumers.subscribe("g", name, ["t"]) for name in names))
        for n in range(50):
            await append(log, "v", partition=n)
        for name in names:
            assert await read(consumers, name) == ["v"]
            assert await read(consumers, name) == []
        old_count = log._log.wal.counters.entries_committed
        await consumers.commit_delivered()
        assert log._log.wal.counters.entries_committed <= old_count + 2
        assert len(log.groups.committed_offsets("g")) == 50


@pytest.mark.parametrize("seed", range(12))
def test_i8_everything_is_read_at_least_once_and_by_one_owner_of_a_generation(seed: int) -> None:
    vloop.run(lambda: _churn(seed))


async def _churn(seed: int) -> None:
    """Members that come, read, commit now and then, fall silent or leave, while records come."""
    draw = random.Random(seed)
    async with group_of(12) as (log, consumers):
        value_counts: Counter[str] = Counter()
        owners: dict[tuple[int, int], set[str]] = defaultdict(set)
        produced: list[str] = []
        is_over = False

        async def consume(name: str, lives: int) -> None:
            await consumers.join("g", name, CONFIG)
            await consumers.subscribe("g", name, ["t"])
            while lives > 0 or is_over:
                lives -= 1
                reading = consumers.reading(
                    "g", name, bounds=ReadBounds(draw.choice([1, 60, 999])), wait_s=1
                )
                async with reading as result:
                    if draw.random() < 0.1:
                        raise ConnectionError  # its answer is lost
                    for portion in result.portions:
                        generation_and_partition = result.generation, portion.where.partition
                        owners[generation_and_partition].add(name)
                        value_counts.update(values_of(portion.fetched))
                if is_over and value_counts.keys() == set(produced):
                    return
                if draw.random() < 0.2:
                    with contextlib.suppress(IllegalGeneration):  # another came at that moment
                        await consumers.commit(await consumers.heartbeat("g", name))
                await asyncio.sleep(draw.choice([0, 0.1, 2]))
            if draw.random() < 0.5:
                await consumers.leave("g", name)

        async def life(name: str, lives: int) -> None:
            try:
                await consume(name, lives)
            except (ConnectionError, UnknownMember):
                if is_over:
                    await life(name + "'", lives)

        async def produce() -> None:
            for n in range(150):
                value = f"{n}"
                produced.append(value)
                await append(log, value, partition=draw.randrange(12))
                await asyncio.sleep(draw.choice([0, 0.3]))
                if n == 70:
                    await log.topics.add_partitions("t", 13)

        async with asyncio.TaskGroup() as group:
            producing = group.create_task(produce())
            for n in range(25):
                group.create_task(life(f"m{n}", draw.randrange(1, 20)))
                await asyncio.sleep(draw.uniform(0, 2))
            await producing
            is_over = True
            await asyncio.wait_for(life("last", 1), 600)
        assert value_counts.keys() == set(produced)
        assert all(len(names) == 1 for names in owners.values())


@pytest.mark.parametrize("seed", range(8))
def test_i8_results_and_offsets_in_one_request_are_exactly_once(seed: int) -> None:
    vloop.run(lambda: _transactions(seed))


async def _transactions(seed: int) -> None:
    """Workers that come, pause beyond their session and go; each result is there once."""
    draw = random.Random(seed)
    async with group_of(12) as (log, consumers):
        await log.topics.create("results", 1, {})
        for n in range(60):
            await append(log, f"{n}", partition=n % 12)
        refused = 0

        def is_done() -> bool:
            committed = log.groups.committed_offsets("g")
            return sum(committed_offset.offset for committed_offset in committed.values()) == 60

        async def work(name: str, *, is_steady: bool = False) -> None:
            nonlocal refused
            await consumers.join("g", name, BY_HAND)
            await consumers.subscribe("g", name, ["t"])
            for _ in range(40):
                if is_done():
                    return
                async with consumers.reading("g", name, bounds=ReadBounds(60), wait_s=1) as result:
                    pass
                if draw.random() < 0.15 and not is_steady:
                    await asyncio.sleep(draw.choice([1, 25]))
                for portion in result.portions:
                    offset = GroupOffset(
                        portion.where.topic_id, portion.where.partition, portion.fetched.next_offset
                    )
                    commit = CommitOffsets("g", result.generation, [offset], name)
                    try:
                        await _transact(log, values_of(portion.fetched), commit)
                    except StaleCommit:
                        refused += 1
                        back = TopicPartition(portion.topic, portion.where.partition)
                        committed = log.groups.committed_offsets("g").get(back)
                        next_offset = 0 if committed is None else committed.offset
                        await consumers.seek("g", name, {back: next_offset})

        async def life(name: str, **options) -> None:
            with contextlib.suppress(UnknownMember, NotAssigned):
                await work(name, **options)

        async with asyncio.TaskGroup() as group:
            for n in range(6):
                group.create_task(life(f"m{n}"))
                await asyncio.sleep(draw.uniform(0, 3))
        for n in range(20):
            if not is_done():
                await asyncio.sleep(12)
                await life(f"steady{n}", is_steady=True)
        assert is_done()
        fetched = await log.records.fetch("results", 0, 0, bytes_max=1 << 20)
        assert Counter(values_of(fetched)) == Counter(f"{n}" for n in range(60))


async def _transact(log: Broker, values: list[str], commit: CommitOffsets) -> None:
    topic = log.state.topic("results")
    await log.records.transact([(topic, 0, rows(*values))], [commit], size=10, is_json=False)


@virtual
async def test_a_simple_committer_is_kept_off_while_members_share() -> None:
    async with group_of(1, "x") as (log, consumers):
        topic_id = log.state.topic("t").topic_id
        simple = CommitOffsets("g", -1, [GroupOffset(topic_id, 0, 1)])
        with pytest.raises(GroupNotEmpty):
            await consumers._log.submit(simple)
        await consumers.leave("g", "x")
        await consumers._log.submit(simple)
