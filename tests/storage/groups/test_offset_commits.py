"""Commits of many members as few of the log, in virtual time.

They are fast for few, shared by many, and a mistake of one member does not stop the commits of
others.
"""

import asyncio
import random
from collections.abc import Iterable

import pytest

from tests.support import vloop
from tests.support.instances import RunningGroups, SingleBroker, joined, virtual
from tests.support.logs import append, closing, opened, store_of
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import (
    LeaveGroup,
    MemberAction,
    MemberConfig,
    SetQuotas,
    Subscribe,
)
from tidelog.storage.core.errors import (
    IllegalGeneration,
    OffsetMetadataTooLarge,
    Throttled,
    UnknownMember,
)
from tidelog.storage.core.model import ReadBounds, TopicPartition
from tidelog.storage.groups import offset_commits
from tidelog.storage.groups.offset_commits import BUSY_MEMBERS, PAUSE_S
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.store.memory import MemoryStore

BY_HAND = MemberConfig(auto_commit=False)


async def _started(log: Broker, partitions: int) -> RunningGroups:
    await log.topics.create("t", partitions, {})
    return RunningGroups(log, SingleBroker("me"))


async def _members(
    consumers: RunningGroups, count: int, config: MemberConfig = BY_HAND
) -> list[str]:
    """Members of groups of their own, each with one partition."""
    names = [f"m{n}" for n in range(count)]
    await asyncio.gather(*(consumers.join(name, name, config) for name in names))
    for n, name in enumerate(names):
        await consumers.assign(name, name, [TopicPartition("t", n)])
    return names


async def _commit(consumers: RunningGroups, name: str, partition: int, offset: int, note: str = ""):
    session = await consumers.heartbeat(name, name)
    await consumers.commit(session, {TopicPartition("t", partition): (offset, note)})


def committed(log: Broker, name: str, partition: int = 0) -> int | None:
    committed_offset = log.groups.committed_offsets(name).get(TopicPartition("t", partition))
    return None if committed_offset is None else committed_offset.offset


@virtual
async def test_a_single_commit_does_not_wait() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 1)
        (name,) = await _members(consumers, 1)
        started_s = asyncio.get_running_loop().time()
        for offset in range(200):
            await _commit(consumers, name, 0, offset)
            assert committed(log, name) == offset
        assert asyncio.get_running_loop().time() - started_s < PAUSE_S
        await consumers.close()


@virtual
async def test_very_many_share_flushes_and_wait_a_moment_at_most() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        count, rounds = 2 * BUSY_MEMBERS, 40
        consumers = await _started(log, count)
        names = await _members(consumers, count)
        loop, draw = asyncio.get_running_loop(), random.Random(1)
        waits: list[float] = []

        async def life(number: int) -> None:
            await asyncio.sleep(draw.uniform(0, 0.05))
            for offset in range(rounds):
                started_s = loop.time()
                await _commit(consumers, names[number], number, offset)
                waits.append(loop.time() - started_s)
                await asyncio.sleep(0.05)

        old_count, started_s = log._log.wal.counters.entries_committed, loop.time()
        await asyncio.gather(*map(life, range(count)))
        took_s = loop.time() - started_s
        flushes = log._log.wal.counters.entries_committed - old_count
        assert len(waits) == count * rounds
        assert flushes <= 1.1 * took_s / PAUSE_S + 200, "the first window is not busy yet"
        assert max(waits) <= PAUSE_S + 0.001
        for number, name in enumerate(names):
            assert committed(log, name, number) == rounds - 1
        await consumers.close()


@virtual
async def test_who_is_known_to_be_wrong_goes_alone() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 2)
        good, wrong = await _members(consumers, 2)
        old_count = log._log.writer.counters.requests
        outcomes = await asyncio.gather(
            _commit(consumers, good, 0, 7),
            _commit(consumers, wrong, 1, 7, note="x" * 5000),
            return_exceptions=True,
        )
        assert outcomes[0] is None
        assert isinstance(outcomes[1], OffsetMetadataTooLarge)
        assert (committed(log, good), committed(log, wrong, 1)) == (7, None)
        assert log._log.writer.counters.requests == old_count + 2
        await consumers.close()


@virtual
async def test_what_is_refused_together_is_tried_one_by_one() -> None:
    """All three may commit when they are asked; before they are applied, one is no member."""
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 3)
        names = await _members(consumers, 3)
        sessions = [await consumers.heartbeat(name, name) for name in names]
        leaving = asyncio.create_task(consumers._log.submit(LeaveGroup(names[1], names[1])))
        await asyncio.sleep(0)
        old_count = log._log.writer.counters.requests
        outcomes = await asyncio.gather(
            *(
                consumers.commit(session, {TopicPartition("t", n): (5, "")})
                for n, session in enumerate(sessions)
            ),
            return_exceptions=True,
        )
        await leaving
        assert (outcomes[0], outcomes[2]) == (None, None)
        assert isinstance(outcomes[1], UnknownMember)
        assert log._log.writer.counters.requests == old_count + 4, "together, and then each"
        assert (committed(log, names[0], 0), committed(log, names[2], 2)) == (5, 5)
        await consumers.close()


async def _overtaken(
    log: Broker, consumers: RunningGroups, change: MemberAction, partitions: Iterable[int]
) -> None:
    """Commit offset 5 for member "a" while the WAL entry of `change` is under way.

    `change` begins the next generation of the group "g".
    """
    session = await consumers.heartbeat("g", "a")
    generation = session.group.generation
    gate = store_of(log).hold("create", object_keys.wal(log.state.seq + 1))
    changing = asyncio.create_task(log._log.submit(change))
    await gate.reached.wait()
    offsets = {TopicPartition("t", number): (5, "") for number in partitions}
    committing = asyncio.create_task(consumers.commit(session, offsets))
    await asyncio.sleep(0.001)
    gate.opened.set()
    await changing
    assert session.group.generation == generation + 1
    await committing


@virtual
async def test_a_commit_that_a_rebalance_overtakes_succeeds_for_partitions_that_stay() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 2)
        await joined(consumers, "a", "b", config=BY_HAND)
        (topic_partition,) = (await consumers.heartbeat("g", "a")).member.owned
        await _overtaken(log, consumers, LeaveGroup("g", "b"), [topic_partition.partition])
        assert committed(log, "g", topic_partition.partition) == 5
        await consumers.close()


@virtual
async def test_a_commit_that_a_rebalance_overtakes_is_refused_for_a_moved_partition() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 2)
        await joined(consumers, "a", config=BY_HAND)
        await consumers.join("g", "b", BY_HAND)
        with pytest.raises(IllegalGeneration):
            await _overtaken(log, consumers, Subscribe("g", "b", ["t"]), range(2))
        assert [committed(log, "g", number) for number in range(2)] == [None, None]
        await consumers.close()


@virtual
async def test_a_group_above_its_owners_share_does_not_stop_the_other_groups() -> None:
    """One client commits for both groups; all its share of the offsets is used."""
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 2)
        full, growing = await _members(consumers, 2)
        await log._log.submit(SetQuotas("User:a", {"offsets": 1}))
        token = PRINCIPAL.set("User:a")
        try:
            await _commit(consumers, full, 0, 1)
            outcomes = await asyncio.gather(
                _commit(consumers, full, 0, 2),
                _commit(consumers, growing, 1, 7),
                return_exceptions=True,
            )
        finally:
            PRINCIPAL.reset(token)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], Throttled)
        assert (committed(log, full), committed(log, growing, 1)) == (2, None)
        await consumers.close()


@virtual
async def test_auto_commits_above_a_share_stop_no_other_duty() -> None:
    """Neither the search for the topics of patterns nor a subscription in the same group."""
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 2)
        config = MemberConfig(auto_offset_reset="earliest", principal="User:a")
        await log._log.submit(SetQuotas("User:a", {"offsets": 1}))
        names = await _members(consumers, 2, config)
        for n, name in enumerate(names):
            await append(log, "v", partition=n)
            for _ in range(2):
                async with consumers.reading(name, name, bounds=ReadBounds(99), wait_s=0):
                    pass
        await consumers.join("other", "p", MemberConfig())
        await consumers.subscribe("other", "p", [], "new.*")
        await log.topics.create("new-topic", 1, {})
        await asyncio.sleep(5)
        assert [committed(log, name, n) for n, name in enumerate(names)].count(1) == 1
        member = log.state.members.member("other", "p")
        assert member is not None
        assert member.topics == ["new-topic"]
        for name in names:
            await consumers.join(name, "later", MemberConfig())
            await consumers.subscribe(name, "later", topics=["new-topic"])
        await consumers.close()


@virtual
async def test_delivered_offsets_of_a_deleted_topic_stop_no_other_duty() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 1)
        config = MemberConfig(auto_offset_reset="earliest")
        (name,) = await _members(consumers, 1, config)
        await consumers.join("other", "p", MemberConfig())
        await consumers.subscribe("other", "p", [], "new.*")
        await append(log, "v")
        for _ in range(2):
            async with consumers.reading(name, name, bounds=ReadBounds(99), wait_s=0):
                pass
        await log.topics.delete("t")
        await log.topics.create("new-topic", 1, {})
        await asyncio.sleep(5)
        member = log.state.members.member("other", "p")
        assert member is not None
        assert member.topics == ["new-topic"]
        await consumers.close()


@virtual
async def test_what_an_instance_commits_itself_stands_until_it_has_got_more() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        consumers = await _started(log, 1)
        config = MemberConfig(auto_offset_reset="earliest")
        (name,) = await _members(consumers, 1, config)

        async def read() -> int:
            async with consumers.reading(name, name, bounds=ReadBounds(1), wait_s=0) as result:
                return sum(len(portion.fetched.pieces) for portion in result.portions)

        await append(log, *"abcd")
        assert [await read(), await read()] == [1, 1]  # it has 1, and perhaps 2
        await _commit(consumers, name, 0, 4)
        await asyncio.sleep(3)
        assert committed(log, name) == 4
        await read()  # it has 2
        await asyncio.sleep(3)
        assert committed(log, name) == 2
        await consumers.close()


@virtual
async def test_commits_are_spread_over_ticks_and_each_member_has_a_turn() -> None:
    log = await opened(MemoryStore())
    async with closing(log):
        count = 30
        consumers = await _started(log, count)
        names = await _members(consumers, count, MemberConfig(auto_offset_reset="earliest"))
        for n, name in enumerate(names):
            await append(log, "v", partition=n)
            for _ in range(2):
                async with consumers.reading(name, name, bounds=ReadBounds(99), wait_s=0):
                    pass
        turns = []
        for _ in range(3):
            await consumers.commits.commit_delivered(consumers.members.groups(), 10)
            turns.append(sum(committed(log, name, n) == 1 for n, name in enumerate(names)))
        assert turns == [10, 20, 30]
        await consumers.close()


def test_i10_one_commit_of_the_log_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_commits, "TOGETHER_MAX", 4)

    async def main() -> None:
        log = await opened(MemoryStore())
        async with closing(log):
            consumers = await _started(log, 10)
            names = await _members(consumers, 10)
            old_count = log._log.writer.counters.requests
            await asyncio.gather(*(_commit(consumers, f"m{n}", n, 3) for n in range(10)))
            assert log._log.writer.counters.requests - old_count == 3
            assert [committed(log, name, n) for n, name in enumerate(names)] == [3] * 10
            await consumers.close()

    vloop.run(main)
