"""Brokers, maintenance and readers on one log, for minutes of virtual time: I1, I7, I9.

Some are slow, some are killed.

Every reader sees written records in order at any moment. At the end all acked records are there
that retention and compaction keep, and a scrub finds the log whole.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from tests.support.faults import FaultyStore, Seeded
from tests.support.logs import closing, kill, opened, with_topic
from tests.support.maintenance import cluster_on, way_of
from tests.support.records import TIME_MS
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, OffsetOutOfRange, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import ManifestConflict
from tidelog.storage.wal.wal_objects import WalSettings

WAL = WalSettings(Bounds(3000, 12_000, 12_000), checkpoint_entries=20, checkpoint_interval_s=1.0)
GRACE = Grace(wal_ms=12_000, table_ms=12_000)
COLD = LogSettings(
    wal=WAL,
    is_sealing=False,
    tail_cache_bytes=0,
    reader=ReaderSettings(0, 0, 0, 0),
)
WARM = COLD._replace(tail_cache_bytes=1 << 20, reader=ReaderSettings())
LIFE_S = 120.0
KEYS = 6
WORK = ("read", "retain", "compact", "collect", "delete", "scrub")


class Clocked(MemoryStore):
    """A store whose clock is the loop's."""

    @property
    def now_ms(self) -> int:
        return TIME_MS + int(asyncio.get_running_loop().time() * 1000)

    @now_ms.setter
    def now_ms(self, _: int) -> None:
        """The loop's it stays."""


class World:
    """Attempted and acked records."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.inner = Clocked()
        self.tried: dict[bytes, bytes] = {}
        self.acked: dict[int, bytes] = {}
        self.done: dict[str, int] = {}
        self.end_s = 0.0

    def count(self, name: str) -> None:
        self.done[name] = self.done.get(name, 0) + 1

    def slow(self, way: FaultyStore, seed: int) -> None:
        writes, reads = Seeded(seed, 0.03), Seeded(seed, 0.001)
        way.plan = lambda call: (writes if call.verb == "create" else reads)(call)
        way.latency = lambda _: self.draws.choice([0.001, 0.001, 0.01, 0.1])

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self.end_s

    # -- who does what

    async def write(self, log: Broker, name: str) -> None:
        number = 0
        while not self.is_over:
            await asyncio.sleep(self.draws.uniform(0.05, 0.5))
            number += 1
            value, key = f"{name}/{number}".encode(), b"k%d" % self.draws.randrange(KEYS)
            self.tried[value] = key
            stored = value if self.draws.random() > 0.1 else None
            stamp = self.inner.now_ms
            rows = Rows([stamp], [key], [stored], [[("id", value)]])
            with contextlib.suppress(Unavailable, CommitUnknown):
                placed = await log.records.append(
                    log.state.topic("t"), [(0, rows)], size=10, is_json=False
                )
                assert placed is not None
                self.acked[placed[0].base_offset] = value

    async def seal(self, log: Broker) -> None:
        while not self.is_over:
            await asyncio.sleep(self.draws.uniform(0.2, 2.0))
            with contextlib.suppress(Unavailable, CommitUnknown):
                await log.records.seal("t")

    async def read(self, log: Broker) -> None:
        while not self.is_over:
            await asyncio.sleep(self.draws.uniform(0.1, 1.0))
            with contextlib.suppress(Unavailable, OffsetOutOfRange):
                self.check(await self.everything(log, self.draws.randint(1, 4000)))
                self.count("read")

    async def everything(self, log: Broker, bytes_max: int = 1 << 20) -> list[tuple[int, bytes]]:
        """Offsets and ids of all records from the log start on, fetch by fetch."""
        offset = (await log.records.offsets("t", 0)).log_start_offset
        records: list[tuple[int, bytes]] = []
        while True:
            fetched = await log.records.fetch("t", 0, offset, bytes_max=bytes_max)
            if not fetched.pieces:
                return records
            for piece in fetched.pieces:
                offsets = piece.batch.column("offset").to_pylist()
                ids = [headers[0]["value"] for headers in piece.batch.column("headers").to_pylist()]
                records += zip(offsets, ids, strict=True)
            assert fetched.next_offset > offset
            offset = fetched.next_offset

    def check(self, records: list[tuple[int, bytes]]) -> None:
        offsets = [offset for offset, _ in records]
        assert offsets == sorted(set(offsets))
        for offset, value in records:
            assert value in self.tried
            assert self.acked.get(offset, value) == value

    async def care(self, cluster: MaintenanceSession) -> None:
        while not self.is_over:
            await asyncio.sleep(self.draws.uniform(0.2, 3.0))
            name = self.draws.choice(self.works())
            with contextlib.suppress(Unavailable, CommitUnknown, ManifestConflict):
                await self.care_once(cluster, name)
                self.count(name)

    def works(self) -> Sequence[str]:
        """Return the works to draw from.

        In the second half of the time these are works that were not done twice yet, because threads
        decide how much is done.
        """
        rare = [name for name in WORK[1:] if self.done.get(name, 0) < 2]
        is_late = asyncio.get_running_loop().time() > self.end_s / 2
        return rare if is_late and rare else WORK[1:]

    async def care_once(self, cluster: MaintenanceSession, name: str) -> None:
        match name:
            case "retain":
                await retain(cluster, None, is_dry=False)
            case "compact":
                await compact(cluster, None, is_dry=False)
            case "collect":
                planned = await plan(cluster, GRACE)
                await asyncio.sleep(self.draws.choice([0, 0, 8]))
                await collect(cluster, planned)
            case "delete":
                partition = cluster.state.topic("t").partitions[0]
                offset = partition.log_start_offset + self.draws.randrange(3)
                if offset <= partition.high_watermark:
                    await delete_records(cluster, "t", {0: offset}, is_dry=False)
            case "scrub":
                report = await scrub(cluster, None, GRACE)
                assert [finding for finding in report.findings if finding.is_damage] == []

    # -- lives

    async def broker(self, life: int) -> None:
        """One after the other, each killed."""
        while not self.is_over:
            log = await opened(self.inner, self.draws.choice([COLD, WARM]))
            self.slow(log._log.store, life)
            tasks = [
                asyncio.create_task(self.write(log, f"{life}/{log.clock.name}")),
                asyncio.create_task(self.seal(log)),
                asyncio.create_task(self.read(log)),
            ]
            await self.live(tasks)
            await kill(log)
            await ended(tasks)
            await log._log.store.land()

    async def carer(self, life: int) -> None:
        while not self.is_over:
            cluster = await cluster_on(self.inner)
            self.slow(way_of(cluster), life)
            tasks = [asyncio.create_task(self.care(cluster))]
            await self.live(tasks)
            way_of(cluster).kill()
            await ended(tasks)
            await way_of(cluster).land()

    async def live(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until the life is over, or a task of it failed."""
        span_s = self.draws.uniform(3.0, 15.0)
        left_s = self.end_s - asyncio.get_running_loop().time()
        await asyncio.wait(
            tasks, timeout=min(span_s, left_s + 5.0), return_when=asyncio.FIRST_EXCEPTION
        )


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if result is not None and not isinstance(result, asyncio.CancelledError):
            raise result


async def at_the_end(world: World) -> None:
    async with closing(first := await opened(world.inner, COLD)):
        for _ in range(2):
            await first.records.seal("t")
        cluster = await cluster_on(world.inner)
        await compact(cluster, None, is_dry=False, is_forced=True)
        report = await scrub(cluster, None, GRACE)
        assert [finding for finding in report.findings if finding.is_damage] == []
        assert [info async for info in world.inner.list(object_keys.wal(1))] == [], (
            "nothing collected"
        )
        async with closing(await opened(world.inner, COLD)) as second:
            await second._log.wal.refresh()
            await first._log.wal.refresh()
            assert first.state.encode() == second.state.encode()
            records = await world.everything(second)
        await cluster.close()
    world.check(records)
    there = dict(records)
    start = second.state.partition("t", 0).log_start_offset
    newest: dict[bytes, int] = {}
    for offset, value in world.acked.items():
        key = world.tried[value]
        newest[key] = max(newest.get(key, -1), offset)
    for key, offset in newest.items():
        is_superseded = any(
            later_offset > offset and world.tried[value] == key
            for later_offset, value in there.items()
        )
        assert offset < start or is_superseded or there.get(offset) == world.acked[offset]


@pytest.mark.parametrize("seed", range(3))
async def test_i1_i7_i9_a_log_that_is_cared_for_is_the_log(seed: int) -> None:
    world = World(seed)
    world.end_s = LIFE_S
    configs = {
        "cleanup.policy": "compact,delete",
        "min.cleanable.dirty.ratio": "0.1",
        "retention.ms": "30000",
        "delete.retention.ms": "5000",
        "target.segment.bytes": world.draws.choice(["4000", "40000"]),
    }
    log = await with_topic(world.inner, COLD, configs=configs)
    await log.close()
    async with asyncio.TaskGroup() as group:
        for life in range(2):
            group.create_task(world.broker(seed * 10 + life))
        for life in range(2):
            group.create_task(world.carer(seed * 10 + 5 + life))
    await at_the_end(world)
    assert len(world.acked) > 100
    assert min(world.done.get(name, 0) for name in WORK) > 1
