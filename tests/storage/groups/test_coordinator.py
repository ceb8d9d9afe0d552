"""Coordinators that die, or only seem to: what their groups see of it. In virtual time."""

import asyncio

import pytest

from tests.support.clock import ManualClock
from tests.support.instances import (
    BY_HAND,
    CONFIG,
    Chosen,
    SingleBroker,
    joined,
    members_of,
    read,
    started,
    virtual,
)
from tests.support.logs import MANUAL, append, closing, kill, opened
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import Entry
from tidelog.storage.core.actions import CommitOffsets, ExpireMember, GroupOffset, LeaveGroup
from tidelog.storage.core.errors import IllegalGeneration, Unavailable
from tidelog.storage.groups.coordinator import ADOPT_S, Coordinator
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.groups.rest_members import HANDOVER_S, VIEW_AGE_MAX_S
from tidelog.storage.state.cluster_state import Applied
from tidelog.storage.store.memory import MemoryStore


@virtual
async def test_members_keep_session_and_positions_when_the_coordinator_crashes() -> None:
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(second):
        await first.topics.create("t", 1, {})
        live = ["b1", "b2"]
        first_consumers = await started(first, Chosen("b1", live))
        second_consumers = await started(second, Chosen("b2", live))
        await joined(first_consumers, "x", "y")
        await append(first, "a", "b", "c", "d")
        await second._log.wal.refresh()
        owner = next(m for m in "xy" if first.state.members.member("g", m).owned)  # type: ignore[union-attr]
        assert await read(first_consumers, owner, bytes_max=1) == ["a"]
        assert await read(first_consumers, owner, bytes_max=1) == ["b"]
        await asyncio.sleep(2 * ADOPT_S)  # a is committed; b was returned, and may be lost
        assert first_consumers.task is not None
        first_consumers.task.cancel()
        await kill(first)
        live.remove("b1")
        await asyncio.sleep(9)
        assert members_of(second) == {"x", "y"}
        assert await read(second_consumers, owner, bytes_max=1) == ["b"]
        await asyncio.sleep(4)
        assert members_of(second) == {owner}
        assert await read(second_consumers, owner) == ["c", "d"]
        await second_consumers.close()


@virtual
async def test_a_coordinator_that_was_replaced_neither_expires_nor_serves() -> None:
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        first_consumers = await started(first, Chosen("b1", ["b1"]))
        await joined(first_consumers, "x")
        term = first.state.members.get("g").term  # type: ignore[union-attr]
        await second._log.wal.refresh()
        waiting = asyncio.create_task(read(first_consumers, "x", wait_s=20))
        await asyncio.sleep(0.1)
        second_consumers = await started(second, Chosen("b2", ["b2"]))
        await second_consumers.heartbeat("g", "x")
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(IllegalGeneration):
            await first_consumers._log.submit(ExpireMember("g", "x", term))
        await first_consumers.close()
        await second_consumers.close()


@virtual
async def test_sessions_end_while_a_duty_waits_for_the_store() -> None:
    """A slow duty is no suspension of the process."""
    log = await opened(MemoryStore())
    async with closing(log):
        await log.topics.create("t", 1, {})
        coordinator = Coordinator(log._log, SingleBroker("b1"))
        log._log.wal.subscribers.append(coordinator)
        groups = RestGroups(log._log, log.records, coordinator, OffsetCommits(log._log))
        running = asyncio.create_task(coordinator.run(lambda: asyncio.sleep(600)))
        await joined(groups, "x", "y")
        for _ in range(12):
            await asyncio.sleep(1)
            await groups.heartbeat("g", "y")
        assert members_of(log) == {"y"}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await coordinator.close()


SLOW = MANUAL._replace(poll_interval_s=600.0)
"""A broker that polls so rarely that it learns nothing by itself."""


async def committed(log: Broker, partition: int, offset: int) -> None:
    """x commits, at a broker that need not be its coordinator."""
    group = log.state.members.get("g")
    assert group is not None
    rows = [GroupOffset(log.state.topic("t").topic_id, partition, offset)]
    commit = CommitOffsets("g", group.generation, rows, "x")
    await log.records.transact([], [commit], size=1, is_json=False)


@virtual
async def test_i8_replaced_coordinator_returns_no_records() -> None:
    """Else x would get records again that it committed since, and its transaction be accepted."""
    store = MemoryStore()
    first, second = await opened(store, SLOW), await opened(store, SLOW)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        first_consumers = await started(first, Chosen("b1", ["b1"]))
        await joined(first_consumers, "x", config=BY_HAND)
        await append(first, "a", "b", "c")
        assert await read(first_consumers, "x", bytes_max=1) == ["a"]
        await second._log.wal.refresh()
        await committed(second, 0, 1)
        second_consumers = await started(second, Chosen("b2", ["b2"]))
        assert await read(second_consumers, "x", bytes_max=1) == ["b"]
        await committed(second, 0, 2)
        assert first.state.members.get("g").coordinator == "b1"  # type: ignore[union-attr]
        with pytest.raises(Unavailable):
            await read(first_consumers, "x", bytes_max=1)
        assert await read(second_consumers, "x", bytes_max=1) == ["c"]
        await first_consumers.close()
        await second_consumers.close()


@virtual
async def test_reads_are_refused_until_commits_elsewhere_are_seen() -> None:
    """x has a partition more, its coordinator was replaced, and knows nothing of either."""
    store = MemoryStore()
    first, second = await opened(store, SLOW), await opened(store, SLOW)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        first_consumers = await started(first, Chosen("b1", ["b1", "b2"]))
        await joined(first_consumers, "x", config=BY_HAND)
        await first.topics.add_partitions("t", 2)
        await append(first, "a", "b", partition=1)
        await second._log.wal.refresh()
        second_consumers = await started(second, Chosen("b2", ["b2"]))
        await second_consumers.heartbeat("g", "x")
        await committed(second, 1, 1)
        with pytest.raises(Unavailable):
            await read(first_consumers, "x")
        assert await read(second_consumers, "x") == ["b"]
        await first_consumers.close()
        await second_consumers.close()


@virtual
async def test_a_successor_waits_until_it_is_alone() -> None:
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        await append(first, "a")
        first_consumers = await started(first, Chosen("b1", ["b1"]))
        await joined(first_consumers, "x")
        await second._log.wal.refresh()
        loop = asyncio.get_running_loop()
        second_consumers = await started(second, Chosen("b2", ["b2"]))
        began_s = loop.time()
        assert await read(second_consumers, "x") == ["a"]
        assert loop.time() - began_s >= HANDOVER_S > VIEW_AGE_MAX_S
        began_s = loop.time()
        await second_consumers.join("g", "y", CONFIG)  # a member that no other coordinator had
        await second_consumers.subscribe("g", "y", ["t"])
        assert await read(second_consumers, "y") == []
        assert loop.time() - began_s < HANDOVER_S / 2
        await first_consumers.close()
        await second_consumers.close()


@virtual
async def test_a_member_that_left_while_the_view_was_expired_is_forgotten() -> None:
    """H4: the coordinator follows all its groups after a reload, which skips entries."""
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        consumers = await started(first, Chosen("b1", ["b1"]))
        await joined(consumers, "x", "y")
        await second.refresh()
        await second._log.submit(LeaveGroup("g", "x"))
        await second._log.wal.checkpoint()
        assert set(consumers.members.group("g").instances) == {"x", "y"}
        assert isinstance(first.clock, ManualClock)
        first.clock.advance(first._log.wal.view_age_max_s + 1)
        await first._log.wal.ensure_view()
        assert set(consumers.members.group("g").instances) == {"y"}
        await consumers.close()


@virtual
async def test_i4_the_groups_that_an_entry_changed_are_part_of_its_result() -> None:
    """H4: nothing but `apply` writes the state, and nothing grows where no group is served."""
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(first, second):
        await first.topics.create("t", 1, {})
        consumers = await started(first, Chosen("b1", ["b1"]))
        changed: list[set[str]] = []

        class Watching:
            def on_applied(self, entry: Entry, applied: Applied) -> None:
                changed.append(applied.groups)

            def on_reset(self) -> None:
                pass

        await second.refresh()
        second._log.wal.subscribers.append(Watching())
        await joined(consumers, "x")
        await append(first, "a")
        await second.refresh()
        assert changed == [{"g"}, {"g"}, set()]
        assert second.state.members.settle() == set()
        await consumers.close()
