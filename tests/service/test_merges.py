"""Merges as a duty of brokers: which topics, what they cost, what another broker or damage does."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.service.conftest import QUIET, append
from tests.service.test_health import MovedClock
from tests.support.foreign_engines import delete_one, table
from tests.support.logs import read_table
from tidelog.compaction.engine import OnRows
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.rewrite import Rewrite, RewriteTooLarge
from tidelog.service.server import merges
from tidelog.service.server.merges import (
    INPUT_CPU_S,
    OTHERS_FACTOR,
    BackgroundRewriter,
    Merges,
)
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import TableInDoubt, Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.threads import CpuTime
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.metered import MeteredStore

AFTER_S = 3600.0


class Rewrites(InProcess):
    """An engine whose rewrites cost a given CPU time; `before` runs before each."""

    def __init__(self, store: MeteredStore) -> None:
        super().__init__(store, SystemClock(), cpu_time=CpuTime())
        self.cost_s = 0.0
        self.began_s: list[float] = []

    async def before(self) -> None:
        pass

    def restore(self) -> None:
        del self.before

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        self.began_s.append(asyncio.get_running_loop().time())
        await self.before()
        files = await super().write(tasks, on_rows)
        self.cpu_time.seconds += self.cost_s
        return files


class Owner:
    """A broker that owns the topic `t`, and its merges."""

    def __init__(self, broker: Broker, store: MeteredStore, clock: MovedClock) -> None:
        self.broker = broker
        self.store = store
        self.clock = clock
        self.limits = {"after_s": AFTER_S, "cpu_share": 1.0}
        self.rewrites = Rewrites(store)
        self.counters = MaintenanceCounters()
        self.merges = self.restarted()

    def restarted(self) -> Merges:
        return Merges(self.broker, self.rewrites, self.counters, **self.limits)

    async def seal(self, count: int, *, partition: int = 0) -> None:
        for _ in range(count):
            await append(self.broker, b"v", partition=partition)
            await self.broker.records.seal("t")

    async def look(self, merges: Merges | None = None) -> int:
        """An hour later, merge what is due; return the number of merges."""
        self.clock.skipped_s += AFTER_S
        await self.broker.refresh()
        before = self.counters.merges
        while await (merges or self.merges).merge_due():
            pass
        return self.counters.merges - before

    async def files(self, partition: int = 0) -> list[tuple[int, int]]:
        topic = self.broker.state.topic("t")
        columns = (await self.broker.stored.partition_files(topic, partition)).segments
        return list(zip(columns.base_offset.tolist(), columns.end_offset.tolist(), strict=True))

    def requests(self) -> int:
        counters = self.broker.stats().store
        assert counters is not None
        return sum(counters.requests.values())


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    clock, folder = MovedClock(), tmp_path / "store"
    store = MeteredStore(FolderStore(folder), clock)
    broker = await Broker.open(store, QUIET, clock=clock, name="broker-1")
    await broker.topics.create("t", 2, {"retention.ms": "-1"})
    owner = Owner(broker, store, clock)
    await owner.merges.merge_due()
    yield owner
    await broker.close()
    await store.close()


async def test_small_segments_become_one_with_the_same_records(owner: Owner) -> None:
    await owner.seal(6)
    await owner.seal(2, partition=1)
    before = await read_table(owner.broker)
    assert await owner.look() == 1
    assert await owner.files() == [(0, 6)]
    assert await owner.files(1) == [(0, 1), (1, 2)], "too few to be worth a merge"
    assert await read_table(owner.broker) == before
    assert owner.counters.merged_segments == 6
    assert owner.counters.merge_cpu_s > 0


async def test_merges_leave_the_sealer_its_version_of_the_table(owner: Owner) -> None:
    await owner.seal(6)
    assert await owner.look() == 1
    conflicts = owner.broker.stats().sealer.conflicts
    await owner.seal(1)
    assert owner.broker.stats().sealer.conflicts == conflicts
    assert await owner.files() == [(0, 6), (6, 7)]


async def test_look_at_topic_with_nothing_to_merge_costs_no_request(owner: Owner) -> None:
    await owner.seal(3)
    owner.clock.skipped_s += AFTER_S
    await owner.broker.refresh()
    before = owner.requests()
    await owner.merges.merge_due()
    assert owner.requests() == before
    assert not owner.rewrites.began_s


async def test_topic_is_looked_at_once_in_the_time_after_its_seals(owner: Owner) -> None:
    await owner.seal(6)
    await owner.merges.merge_due()
    assert not owner.counters.merges, "the time is not over"
    assert await owner.look() == 1
    await owner.seal(8)
    await owner.merges.merge_due()
    assert owner.counters.merges == 1
    assert await owner.look() == 1


async def test_broker_looks_once_after_its_start_and_then_after_seals(owner: Owner) -> None:
    await owner.seal(6)
    merges = owner.restarted()
    await merges.merge_due()
    assert not owner.counters.merges, "the time since the start is not over"
    assert await owner.look(merges) == 1
    owner.clock.skipped_s += AFTER_S
    await owner.broker.refresh()
    before = owner.requests()
    assert not await merges.merge_due()
    assert owner.requests() == before, "an idle topic costs nothing"
    await owner.seal(6)
    assert await owner.look(merges) == 1


async def test_broker_that_does_not_own_the_topic_looks_rarely(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.seal(6)
    monkeypatch.setattr(owner.broker.cluster, "owns", lambda _: False)
    assert await owner.look() == 0
    owner.clock.skipped_s += (OTHERS_FACTOR - 2) * AFTER_S
    assert await owner.look() == 1


async def test_segments_are_merged_up_to_segment_bytes(owner: Owner) -> None:
    await owner.broker.topics.alter("t", {"segment.bytes": "8192"})
    await owner.seal(20)
    assert await owner.look() > 1
    topic = owner.broker.state.topic("t")
    sizes = (await owner.broker.stored.partition_files(topic, 0)).segments.size.tolist()
    assert len(sizes) < 10
    assert max(sizes) <= 8192


async def test_merge_whose_segment_would_be_too_large_is_given_up(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merges, "REWRITE_BYTES_MAX", 100_000)
    await owner.broker.topics.alter("t", {"compression.type": "zstd"})
    for number in range(6):
        await append(owner.broker, b"%d" % number + b"v" * 100_000)
        await owner.broker.records.seal("t")
    await owner.broker.topics.alter("t", {"compression.type": "uncompressed"})
    with pytest.raises(RewriteTooLarge, match=r"partition=0/0.* exceeds 100000 bytes"):
        await owner.look()
    assert len(await owner.files()) == 6


async def test_broker_that_was_overtaken_leaves_the_result_of_the_other(owner: Owner) -> None:
    await owner.seal(6)
    other_counters = MaintenanceCounters()
    other = Merges(
        owner.broker, InProcess(owner.store, SystemClock()), other_counters, **owner.limits
    )
    await other.merge_due()

    async def be_overtaken() -> None:
        await other.merge_due()

    owner.rewrites.before = be_overtaken  # type: ignore[method-assign]
    assert await owner.look() == 0
    assert other_counters.merges == 1
    assert await owner.files() == [(0, 6)]
    assert (await read_table(owner.broker)).num_rows == 6
    assert not owner.counters.merge_failures


class Failure(Exception):
    """A bug, which is no LogError."""


@pytest.mark.parametrize("error", [Unavailable("the store is away"), Failure("a bug")])
async def test_failed_merge_stops_no_other_and_waits_for_the_next_look(
    owner: Owner, error: Exception
) -> None:
    await owner.seal(6)
    await owner.seal(6, partition=1)

    async def fail() -> None:
        owner.rewrites.restore()
        raise error

    owner.rewrites.before = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        await owner.look()
    assert len(await owner.files()) == 6
    assert await owner.files(1) == [(0, 6)]
    assert not owner.counters.is_merging
    assert owner.counters.merge_failures == 1
    await owner.merges.merge_due()
    assert len(await owner.files()) == 6, "it is not tried again and again"
    assert await owner.look() == 1
    assert await owner.files() == [(0, 6)]
    assert owner.counters.is_merging


async def test_topic_that_is_deleted_while_a_merge_waits_is_left(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.seal(6)

    async def wait() -> None:
        await owner.broker.topics.delete("t")

    monkeypatch.setattr(owner.merges, "_wait", wait)
    assert await owner.look() == 0
    assert not owner.rewrites.began_s


async def test_partitions_take_turns(owner: Owner) -> None:
    await owner.broker.topics.alter("t", {"segment.bytes": "8192"})
    await owner.seal(20)
    await owner.seal(20, partition=1)
    owner.clock.skipped_s += AFTER_S
    await owner.broker.refresh()
    assert await owner.merges.merge_due(), "there is more"
    assert owner.counters.merges == 2
    assert len(await owner.files()) == len(await owner.files(1)) < 20


async def test_table_in_doubt_is_left_as_it_is(owner: Owner, tmp_path: Path) -> None:
    await owner.seal(6)
    delete_one(table(tmp_path / "store"))
    with pytest.raises(TableInDoubt):
        await owner.look()
    assert "t" in owner.broker.stored.doubts()


async def test_merges_take_their_share_of_a_core(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of 2 s of CPU time at 5 % is 40 s before the next."""
    waits: list[float] = []
    owner.limits["cpu_share"] = 0.05
    owner.rewrites.cost_s = 2.0
    merges = owner.restarted()

    async def wait() -> None:
        waits.append(merges._free_s - asyncio.get_running_loop().time())

    monkeypatch.setattr(merges, "_wait", wait)
    await owner.seal(6)
    await owner.seal(6, partition=1)
    await merges.merge_due()
    assert await owner.look(merges) == 2
    assert waits[0] <= 0
    assert 35 < waits[1] < 42


@pytest.mark.parametrize(("segments", "rows"), [(5, 50_000), (200, 1)])
async def test_background_rewriter_counts_the_cpu_time_of_its_rewrites(
    owner: Owner, tmp_path: Path, segments: int, rows: int
) -> None:
    settings = Settings(store=(tmp_path / "store").as_uri())
    rewriter = BackgroundRewriter(settings, owner.broker)
    merges = Merges(owner.broker, rewriter, owner.counters, **owner.limits)
    await merges.merge_due()
    for _ in range(segments):
        await append(owner.broker, *[b"%d" % number * 40 for number in range(rows)])
        await owner.broker.records.seal("t")
    began_s = time.process_time()
    assert await owner.look(merges) == 1
    used_s = time.process_time() - began_s
    await rewriter.close()
    requests_s = INPUT_CPU_S * segments
    assert used_s / 2 < owner.counters.merge_cpu_s < used_s + requests_s
