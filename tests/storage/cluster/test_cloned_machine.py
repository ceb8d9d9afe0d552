"""Two processes continue from one copy of memory (DESIGN 11): one is fenced, none loses records."""

import asyncio
import copy
from typing import Any

import msgspec
import pytest

from tests.storage.cluster.test_sequencer import three
from tests.support.clock import ManualClock
from tests.support.cluster import Cluster
from tests.support.logs import append, read_values
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
from tidelog.storage.core.errors import CommitUnknown, Fenced, LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore

CLOCKS = ["system", "manual"]


def made(kind: str, name: int) -> SystemClock | ManualClock:
    return SystemClock() if kind == "system" else loop_clock(name)


def clone(log: Broker, of: Broker) -> None:
    """Give a broker the memory of another: its name in the WAL and its own PUTs.

    Also the state of its source of ids, if that has one.
    """
    log._log.wal.writer = of._log.wal.writer
    log._log.wal.clone_fence.writer = of._log.wal.writer
    log._log.wal.clone_fence._puts = copy.copy(of._log.wal.clone_fence._puts)
    for name in ("name", "_ids"):
        if hasattr(of.clock, name):
            setattr(log.clock, name, copy.copy(getattr(of.clock, name)))


async def two_clones(store: MemoryStore, kind: str) -> tuple[Broker, Broker]:
    original = await broker(store, made(kind, 1))
    await original.topics.create("t", 1, {})
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
        await original._log.wal.refresh()
        assert (await served(original))[1] == "X"


def twin_of(twin: Broker, of: Broker) -> None:
    """Give a broker the id of another, under which it forwards drafts, and its next number."""
    twin._membership.me = msgspec.structs.replace(twin._membership.me, id=of._membership.me.id)
    twin._sequencer._number = of._sequencer._number


async def test_a_clone_that_hands_over_never_acknowledges_a_lost_record(cluster: Cluster) -> None:
    _, original, twin = await three(cluster)
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
        await twin._log.wal.refresh()
        with pytest.raises(Fenced, match="a copy of the process runs"):
            await running
        with pytest.raises(LogError, match="a copy of the process runs"):
            await append(twin, "Y")
        await produce(original, "Z", acked)
        assert await held(store, SystemClock()) == {0: "first"} | acked


async def test_idle_clone_is_fenced_by_drafts_of_the_other(cluster: Cluster) -> None:
    _, original, twin = await three(cluster)
    await produce(original, "before", {})
    twin_of(twin, original)
    running = asyncio.ensure_future(twin.run_until_failed())
    await produce(original, "X", {})
    await twin._log.wal.refresh()
    with pytest.raises(Fenced):
        await running


async def test_own_entries_that_come_back_fence_nobody() -> None:
    """A view that expired loads own entries again, and those of the process before by this name."""
    store = MemoryStore()
    original = await broker(store, loop_clock(1))
    await original.topics.create("t", 1, {})
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


# -- drafts that the sequencer commits


async def test_i1_a_fenced_broker_forwards_no_draft(cluster: Cluster) -> None:
    """Its number may be taken: `apply` would pass over the draft, and the records would be lost."""
    _, broker_a, broker_b = await three(cluster)
    await append(broker_a, "before")
    end = broker_a.state.partition("t", 0).high_watermark
    broker_a._log.wal.clone_fence.fence(broker_a.state.seq)
    with pytest.raises(CommitUnknown, match="a copy of the process runs"):
        await append(broker_a, "X")
    assert (await broker_b.records.offsets("t", 0)).high_watermark == end


async def test_a_view_that_passed_over_drafts_of_a_copy_is_fenced(cluster: Cluster) -> None:
    _, broker_a, _ = await three(cluster)
    for value in ("before", "after"):
        await append(broker_a, value)
    broker_a._sequencer._number -= 1  # a snapshot of before the second draft
    broker_a._log.wal._freshness.expire()
    await broker_a._log.wal.ensure_view()
    with pytest.raises(Fenced):
        broker_a._log.wal.clone_fence.check_fence()


async def test_own_refused_draft_is_kept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequencer refuses the draft, so its broker commits it.

    The entry is in the WAL, but `apply` fails: the view is loaded again, with a draft number that
    this process has used.
    """
    real = ClusterState._append
    errors = [MemoryError("a bug")]

    def fails_once(self: ClusterState, *arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(self, *arguments)

    _, broker_a, broker_b = await three(cluster)
    await append(broker_a, "before")
    for other in cluster.logs:
        other._sequencer._is_closing = other is not broker_a
    monkeypatch.setattr(ClusterState, "_append", fails_once)
    with pytest.raises(CommitUnknown):
        await append(broker_a, "X")
    assert not errors
    broker_a._log.wal.clone_fence.check_fence()
    await append(broker_a, "after")
    assert await read_values(broker_b) == ["before", "X", "after"]
