"""Backups of a cluster under load: each is restored and compared with the acknowledgements.

Meanwhile the log is sealed, merged, compacted, retained and collected, and its brokers are killed
and stopped.

The property: each record that was acknowledged before a backup began is in it at its offset, unless
retention or compaction took it; the offsets have no hole; a scrub finds nothing. A backup that
fails, or whose process is killed, leaves no manifest. Producers of the cluster continue at the
restored one as tests.sim.forks says.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import tidelog.compaction.backups.backup
from tests.sim import history, machine
from tests.sim.clients import TOPIC, Idempotent, Newcomers
from tests.sim.crashes import CrashRun, Scenario
from tests.sim.crashes import plan_of as crash_plan
from tests.sim.forks import Fork
from tests.sim.history import Place
from tests.sim.plans import Plan, plan_of
from tests.sim.runs import Result, Run, simulated
from tests.sim.stores import Bucket, Commit, MemoryDelta, Tables, Way, Weather
from tests.sim.world import World
from tidelog.compaction.backups.backup import backup
from tidelog.compaction.backups.place import BackupManifest, backups_in, read_manifest
from tidelog.compaction.backups.restore import restore
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.scrub import scrub
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import Corrupt, InvalidRequest, LogError
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.tables.delta_json import commit_of
from tidelog.storage.tables.manifest import SegmentColumns

SLEEPERS = 1  # the kind of world whose times are short: seed % 5
GRACE = Grace(wal_ms=4000, table_ms=3000)
HOLD_MS = 6000
BACKUPS_MAX = 8
"""Of one run; most of them are into the same place."""


REPAIRED = 0.3
"""How many restored clusters lose an entry later."""
NEWCOMERS_S = 3.0
"""Mean time from one new idempotent producer to the next."""


class CopiedDelta(MemoryDelta):
    """A DeltaTable in a bucket that has only copied objects."""

    @property
    def _commits(self) -> list[Commit]:
        bucket, prefix = self._tables.bucket, f"{self._prefix}/_delta_log/"
        if self._prefix not in bucket.tables:
            files: dict[str, Any] = {}
            commits: list[Commit] = []
            for info in bucket.infos(prefix, ""):
                read = commit_of(bucket.read(info.key), len(commits))
                assert info.key == f"{prefix}{len(commits):020d}.json"
                files |= {file.path: file for file in read.added}
                removed = [files[path] for path in read.removed]
                commits.append(Commit(read.added, removed, dict(read.transactions)))
            return commits
        return bucket.tables[self._prefix]

    def files_at(self, version: int, prefix: str, options: object) -> SegmentColumns | None:  # type: ignore[override]
        return super().files_at(version, prefix, options) if version < len(self._commits) else None


class CopyTables(Tables):
    """The world's tables, and those in buckets with copies; `<name>:<key>` is a table there."""

    def __init__(self, world: World) -> None:
        super().__init__(world.bucket, world.draws, lambda: world.weather, world.note)
        self.copies: dict[str, Tables] = {}
        # `CopiedDelta` reads commits alone.
        self.properties = self.properties._replace(checkpoint_interval=10**6)

    def at(self, uri: str, name: str, clock: object) -> MemoryDelta:
        bucket, colon, key = uri.partition(":")
        return CopiedDelta(self.copies[bucket], key) if colon else super().at(uri, name, clock)


class Copies:
    """The buckets of one world that have copies, and ways to them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = CopyTables(world)
        world.tables = self._tables
        self._count = 0
        self.producers: list[Idempotent] = []
        """Of the cluster. They continue at restored clusters."""

    def bucket(self) -> tuple[str, Bucket]:
        self._count += 1
        name, bucket = f"copy{self._count}", Bucket(is_copy=True)
        self._tables.copies[name] = Tables(bucket, self._world.draws, Weather, self._world.note)
        return name, bucket

    def way(self, to: tuple[str, Bucket], weather: Weather) -> Way:
        name, bucket = to
        way = Way(bucket, self._world.draws, lambda: weather, self._world.note, self._world)
        way.table_uri = lambda key: f"{name}:{key}"  # type: ignore[method-assign]
        return way

    async def judge(
        self, place: tuple[str, Bucket], begun: dict[int, float], at_ms: int | None
    ) -> str:
        """Restore, and report what is wrong as a bug; return what was done."""
        world, new = self._world, self.bucket()
        way = self.way(new, Weather(median_s=0.001))
        try:
            result = await restore(
                self.way(place, Weather(median_s=0.001)), way, world.clock(), at_ms=at_ms
            )
        except InvalidRequest as error:
            if at_ms is None:
                world.bug(f"a backup cannot be restored: {error}")
            return "not of that time"
        except LogError as error:
            world.bug(f"a backup cannot be restored: {error!r}")
            return "failed"
        cluster = await MaintenanceSession.open(way, world.clock())
        report = await scrub(cluster, None, Grace())
        await cluster.close()
        if not report.is_whole:
            world.bug(f"a restored cluster is damaged: {report.findings[:3]}")
        try:
            value_by_place = await self._records(way)
        except LogError as error:
            world.bug(f"a restored cluster cannot be read: {error!r}")
            return "failed"
        before_s = begun[result.seq] if at_ms is None else -1.0
        self._compare(value_by_place, before_s)
        if self.producers and any(place.topic == TOPIC for place in value_by_place):
            await self._continue(new)
        return "restored" if at_ms is None else "restored at a time"

    async def _continue(self, place: tuple[str, Bucket]) -> None:
        """Let producers go on at a restored cluster, and again after a repair of its WAL."""
        name, bucket = place
        fork = Fork(self._world, name, bucket, lambda: self.way(place, Weather(median_s=0.001)))
        producers = await fork.produce(self.producers)
        if self._world.draws.random() < REPAIRED:
            await fork.lose_entries()
            await fork.produce(producers)

    async def _records(self, way: Way) -> dict[Place, str]:
        """Return all records of the topic, after a look for holes."""
        world = self._world
        settings = LogSettings(is_sealing=False, is_coordinating=False)
        log = await LogBroker.open(way, settings, clock=world.clock(), name="restored")
        value_by_place: dict[Place, str] = {}
        if TOPIC in log.state.topics:
            topic = log.state.topic(TOPIC)
            is_compacted = "compact" in topic.configs.get("cleanup.policy", "")
            for number, partition in enumerate(topic.partitions):
                offset = partition.log_start_offset
                offsets: list[int] = []
                while (
                    fetched := await log.records.fetch(TOPIC, number, offset, bytes_max=1 << 20)
                ).pieces:
                    for piece in fetched.pieces:
                        for row in piece.batch.to_pylist():
                            offsets.append(row["offset"])
                            value = str(row["value"] or b"", "utf-8")
                            value_by_place[Place(TOPIC, number, row["offset"])] = value
                    offset = fetched.next_offset
                if not is_compacted and offsets != [
                    *range(partition.log_start_offset, partition.high_watermark)
                ]:
                    world.bug(f"a restored partition has a hole: {partition} {offsets}")
        await log.close()
        return value_by_place

    def _compare(self, value_by_place: dict[Place, str], before_s: float) -> None:
        """Compare with the acknowledgements, each of which before `before_s` must be there."""
        world = self._world
        sent = {
            event.op: event for event in world.recorder.events if isinstance(event, history.Append)
        }
        starts: dict[int, int] = {}
        for place in value_by_place:
            starts[place.partition] = min(place.offset, starts.get(place.partition, place.offset))
        compacted = any(
            isinstance(event, history.Topic) and event.is_compacted
            for event in world.recorder.events
        )
        held_count = 0
        for event in world.recorder.events:
            if not isinstance(event, history.Acked) or not event.places or event.op not in sent:
                continue
            for record, place in zip(sent[event.op].records, event.places, strict=True):
                if place.topic != TOPIC or record.is_tombstone:
                    continue
                there = value_by_place.get(place)
                held_count += there is not None
                is_due = (
                    event.at < before_s
                    and not compacted
                    and place.offset >= starts.get(place.partition, place.offset + 1)
                )
                if there != record.value and (there is not None or is_due):
                    world.bug(
                        f"{place} is {there!r} in the copy, acknowledged was {record.value!r}"
                    )
        world.counts["held"] = world.counts.get("held", 0) + held_count


class BackupRun(Run):
    """A world whose processes make backups at any moment, some of them slowly."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        super().__init__(seed, plan, world)
        self.copies = Copies(world)
        self.place = self.copies.bucket()
        self.begun: dict[int, float] = {}
        """When the backup of an entry began."""

    async def main(self) -> None:
        world, plan = self.world, self.plan
        await self._begin()
        newcomers = Newcomers(world, "k", plan.load, NEWCOMERS_S)
        self.copies.producers = newcomers.producers
        self._client(newcomers)
        for _ in range(plan.carers):
            self._care()
        ending = asyncio.get_running_loop().create_task(self._back_up())
        while not ending.done():
            await asyncio.sleep(self.draws.expovariate(1 / plan.trouble_s))
            self._trouble(self.draws.choice(plan.troubles))
            world.check_states()
        ending.result()
        self.is_over = True
        for process in world.processes:
            process.kill()

    async def _back_up(self) -> None:
        world, draws = self.world, self.draws
        for _ in range(BACKUPS_MAX):
            await asyncio.sleep(draws.expovariate(1 / 2.0))
            old_names = await self._names()
            slow = Weather(median_s=draws.choice([0.01, 0.05, 0.8]), lost=draws.choice([0.0, 0.2]))
            process = world.process("backup")
            working = process.spawn(self._one(slow))
            if draws.random() < 0.2:
                _ = world.later(draws.expovariate(1.0), process.kill)
            while not working.done() and not process.is_dead:  # noqa: ASYNC110 - polling is free
                await asyncio.sleep(0.1)
            begun_seqs = self.begun.keys() - old_names
            names = await self._names()
            if working.done() and not process.is_dead and names - old_names != begun_seqs:
                world.bug(
                    f"the backups {names - old_names} are in the place, {begun_seqs} were made"
                )
            if names - old_names:
                world.count("kept")
                self.begun |= dict.fromkeys(names - old_names - self.begun.keys(), 0.0)
                verdict = await self.copies.judge(self.place, self.begun, None)
                world.count(verdict)
                manifest = await self._manifest()
                at_ms = draws.randint(manifest.from_ms, manifest.to_ms)
                world.count(await self.copies.judge(self.place, self.begun, at_ms))

    async def _one(self, slow: Weather) -> None:
        world = self.world
        begun_s = world.now_s
        try:
            way = world.way_of()
            way.weather = lambda: world.weather._replace(failed=0.0, refused=0.0)
            cluster = await MaintenanceSession.open(way, world.clock())
            result = await backup(cluster, self.copies.way(self.place, slow))
            self.begun[result.manifest.seq] = begun_s
            world.count("backups")
            if world.now_s - begun_s > 3 * GRACE.table_ms / 1000:
                world.count("slow backups")
            if result.doubts:
                world.bug(f"a backup doubts tables: {result.doubts}")
            await cluster.close()
        except Corrupt as error:
            world.bug(f"a backup fails: {error!r}")
        except LogError as error:
            world.note(f"backup: {error}")
            world.count("failed backups")

    async def _names(self) -> set[int]:
        calm = self.copies.way(self.place, Weather(median_s=0.001))
        return {name.seq for name in await backups_in(calm)}

    async def _manifest(self) -> BackupManifest:
        calm = self.copies.way(self.place, Weather(median_s=0.001))
        return await read_manifest(calm, (await backups_in(calm))[-1])


def plan_of_backups(seed: int) -> Plan:
    number = seed * 5 + SLEEPERS
    plan = plan_of(number)
    bounds = Bounds(1000, GRACE.wal_ms)
    settings = plan.settings._replace(
        wal=plan.settings.wal._replace(bounds=bounds), is_sealing=True
    )
    return plan._replace(
        grace=GRACE,
        settings=settings,
        level=format_levels.NEWEST,
        troubles=("kill", "stop", "weather", "air", "carer", "end"),
        weather=plan.weather._replace(raises=0.0, refused_part=b""),
        configs=plan.configs | {"segment.ms": "700"},
        command_grace=None,
        has_guests=False,
        carers=2,
        run_s=400.0,
        trouble_s=4.0,
        stop_s=1.0,
    )


@contextlib.contextmanager
def short_holds() -> Iterator[None]:
    held_ms = tidelog.compaction.backups.backup.HOLD_MS
    tidelog.compaction.backups.backup.HOLD_MS = HOLD_MS
    try:
        yield
    finally:
        tidelog.compaction.backups.backup.HOLD_MS = held_ms


def simulate_backups(seed: int, lines: list[str] | None = None) -> Result:
    """A run with backups."""
    with machine.quietly(), short_holds():
        return simulated(seed * 5 + SLEEPERS, plan_of_backups(seed), BackupRun, lines)


# -- a crash at each await


class CrashedBackup(CrashRun):
    """The process of a backup crashes at one step; never if that is -1."""

    def __init__(self, world: World, step: int) -> None:
        super().__init__(world, Scenario("a backup", 1, False, _crash), step)
        self.copies = Copies(world)
        self.place = self.copies.bucket()
        self.begun: dict[int, float] = {}

    async def one(self) -> None:
        begun_s = self.world.now_s
        cluster = await self.world.cluster()
        way = self.copies.way(self.place, Weather(median_s=0.01))
        result = await backup(cluster, way)
        self.begun[result.manifest.seq] = begun_s
        await cluster.close()

    async def judged(self) -> int:
        """Restore the newest backup, if there is one; return how many there are."""
        way = self.copies.way(self.place, Weather(median_s=0.001))
        names = await backups_in(way)
        if names:
            self.begun.setdefault(names[-1].seq, 0.0)
            await self.copies.judge(self.place, self.begun, None)
        return len(names)


async def _crash(run: CrashRun) -> None:
    assert isinstance(run, CrashedBackup)
    world = run.world
    (broker,) = world.ready()
    for _ in range(2):
        await run.write(broker)
        await run.do(broker, lambda broker: broker.log.records.seal(TOPIC))
    await run.write(broker)
    process = world.process("backup")
    release = run.condemn(process, process.kill)
    working = process.spawn(run.one())
    await asyncio.wait([working], timeout=20.0)
    assert working.done() or process.is_dead
    release()
    count = await run.judged()
    if not process.is_dead:
        working.result()
        if count != 1 or len(world.truth.holds):
            world.bug(f"{count} backups, {len(world.truth.holds)} holds after a backup")
    for _ in range(2 * HOLD_MS // 1000):
        await run.write(broker)
        await asyncio.sleep(1.0)
    if len(world.truth.holds):
        world.bug("the hold of a killed backup does not expire")
    await run.one()
    if await run.judged() != count + 1:
        world.bug("the next backup is not there")


def crashed_backup(step: int) -> tuple[Result, int]:
    """Run with a crash at `step`; return the judgement and the number of steps."""
    runs: list[CrashedBackup] = []

    def made(seed: int, plan: Plan, world: World) -> Run:
        runs.append(CrashedBackup(world, step))
        return runs[0]

    plan = crash_plan(Scenario("a backup", 1, False, _crash))
    with machine.quietly(), short_holds():
        result = simulated(0, plan, made)
        steps = runs[0].steps
        runs.clear()  # here, where what its destructors do is not logged
    return result, steps
