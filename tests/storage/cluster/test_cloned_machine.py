"""Two processes continue from one copy of memory, and both have the same random numbers."""

import asyncio
import copy

import msgspec
import pytest

from tests.support.clock import ManualClock
from tests.support.cluster import Cluster
from tests.support.logs import append
from tests.support.loop_brokers import (
    Acked,
    assert_kept,
    broker,
    ending,
    held,
    loop_clock,
    produce,
    served,
)
from tests.support.records import fold, tail_values
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import Fenced, LogError
from tidelog.storage.log import Log
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore

CLOCKS = ["system", "manual"]


def made(kind: str, name: int) -> SystemClock | ManualClock:
    return SystemClock() if kind == "system" else loop_clock(name)


def clone(log: Log, of: Log) -> None:
    """Give a broker the memory of another: its name in the WAL, the PUTs that it knows as its own,
    and the state of its source of ids, if that has one."""
    log.wal.writer = of.wal.writer
    log.wal.copy_fence.writer = of.wal.writer
    log.wal.copy_fence._puts = copy.copy(of.wal.copy_fence._puts)
    for name in ("name", "_ids"):
        if hasattr(of.clock, name):
            setattr(log.clock, name, copy.copy(getattr(of.clock, name)))


async def two_clones(store: MemoryStore, kind: str) -> tuple[Log, Log]:
    original = await broker(store, made(kind, 1))
    await original.create_topic("t", 1, {})
    await produce(original, "first", {})
    twin = await broker(store, made(kind, 2))
    clone(twin, original)
    return original, twin


@pytest.mark.parametrize("kind", CLOCKS)
async def test_a_clone_never_acknowledges_a_lost_record(kind: str) -> None:
    store = MemoryStore()
    original, twin = await two_clones(store, kind)
    async with ending(original, twin):
        of_original: Acked = {}
        of_twin: Acked = {}
        await produce(original, "X", of_original)
        await produce(twin, "Y", of_twin)
        records = await held(store, SystemClock())
        assert_kept(of_original, records)
        assert_kept(of_twin, records)


@pytest.mark.parametrize("kind", CLOCKS)
async def test_a_clone_never_breaks_the_chain(kind: str) -> None:
    store = MemoryStore()
    original, twin = await two_clones(store, kind)
    async with ending(original, twin):
        await produce(original, "X", {})
        await produce(twin, "Y", {})
        await produce(twin, "Z", {})
        assert (await held(store, SystemClock()))[1] == "X"
        await original.wal.refresh()
        assert (await served(original))[1] == "X"


async def three_brokers(cluster: Cluster) -> list[Broker]:
    """Start three brokers with topic `t`; return those that are not the sequencer."""
    for _ in range(3):
        await cluster.start()
    await cluster.settled()
    await cluster.sequencer().create_topic("t", 1, {})
    for log in cluster.logs:
        await log.wal.refresh()
    return cluster.others()


def twin_of(twin: Broker, of: Broker) -> None:
    """Give a broker the id of another, under which it forwards drafts, and its next number."""
    twin.membership.me = msgspec.structs.replace(twin.membership.me, id=of.membership.me.id)
    twin.sequencer._number = of.sequencer._number


async def test_a_clone_that_hands_over_never_acknowledges_a_lost_record() -> None:
    async with Cluster(latency=lambda _: 0.02) as cluster:
        original, twin = await three_brokers(cluster)
        await produce(original, "before", {})
        twin_of(twin, original)
        of_original: Acked = {}
        of_twin: Acked = {}
        await asyncio.gather(produce(original, "X", of_original), produce(twin, "Y", of_twin))
        state, _ = await fold(cluster.store, "c0ffee")
        values = await tail_values(cluster.store, state, "t", 0)
        records = {offset: str(value or b"", "utf-8") for offset, value in enumerate(values)}
        assert_kept(of_original, records)
        assert_kept(of_twin, records)


@pytest.mark.parametrize("kind", CLOCKS)
async def test_one_of_two_clones_stops_and_the_other_goes_on(kind: str) -> None:
    store = MemoryStore()
    original, twin = await two_clones(store, kind)
    async with ending(original, twin):
        running = asyncio.ensure_future(twin.run_until_failed())
        acked: Acked = {}
        await produce(original, "X", acked)
        await twin.wal.refresh()
        with pytest.raises(Fenced, match="a copy of the process runs"):
            await running
        with pytest.raises(LogError, match="a copy of the process runs"):
            await append(twin, "Y")
        await produce(original, "Z", acked)
        assert await held(store, SystemClock()) == {0: "first"} | acked


async def test_a_clone_without_a_draft_under_way_sees_the_drafts_of_the_other() -> None:
    async with Cluster(latency=lambda _: 0.02) as cluster:
        original, twin = await three_brokers(cluster)
        await produce(original, "before", {})
        twin_of(twin, original)
        running = asyncio.ensure_future(twin.run_until_failed())
        await produce(original, "X", {})
        await twin.wal.refresh()
        with pytest.raises(Fenced):
            await running


async def test_own_entries_that_come_back_fence_nobody() -> None:
    """A view that expired loads own entries again, and those of the process before by this name."""

    store = MemoryStore()
    original = await broker(store, loop_clock(1))
    await original.create_topic("t", 1, {})
    await produce(original, "first", {})
    again = await broker(store, loop_clock(2))
    async with ending(original, again):
        await produce(again, "second", {})
        await asyncio.sleep(700)
        await produce(original, "third", {})
        await produce(again, "fourth", {})
        assert list((await held(store, SystemClock())).values()) == [
            "first",
            "second",
            "third",
            "fourth",
        ]
