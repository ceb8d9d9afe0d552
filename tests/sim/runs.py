"""One seed, one run: what kind of world it is, what goes wrong in it, and the judgement.

`simulate(seed)` is the whole of it, and the same each time. The plan of a seed is drawn first
(swarm testing: each world has some of the faults and some of the features, and much of those), then
everything else in the order in which it happens.
"""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.sim import history, machine
from tests.sim.checker import Violation
from tests.sim.clients import TOPIC, Client, Load, Producer, Reader, Witness
from tests.sim.finish import finish, scan
from tests.sim.groupcheck import check_all
from tests.sim.members import RESULTS, Asker, Gardener, Habits, Member, Worker
from tests.sim.network import Air
from tests.sim.stores import Weather
from tests.sim.world import Broker, World
from tests.support.clock import ManualClock
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.garbage import Grace
from tidelog.compaction.retention import delete_records, retain
from tidelog.compaction.scrub import scrub
from tidelog.compaction.upgrade import change_bounds, upgrade
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core import levels
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.bounds import Bounds
from tidelog.storage.core.errors import (
    CommitUnknown,
    InvalidRequest,
    LogError,
    OffsetOutOfRange,
    Unavailable,
)
from tidelog.storage.log import LogSettings
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.tables.manifest import ManifestConflict
from tidelog.storage.wal.wal_objects import WalSettings
from tidelog.storage.write.sealer import SealerSettings
from tidelog.storage.write.writer import WriterSettings

SKEW_MS_MAX = 1_000_000
"""A broker that is an hour ahead makes all forget idempotency keys an hour sooner."""

FEATURES = ("static", "seeks", "workers", "garden")
"""Of worlds of groups: members that come again in their own place; that read again what they have
read; that produce what they make of records; topics that come, grow and go."""

FIRST_LEVEL = 0.25
"""How many worlds begin at level 1. Some of them are raised, at any moment."""

WRONG_CLOCKS = 0.5
"""How many worlds have clocks that jump by days, and guests whose boot time misses a pause. Those
of level 1 have no jumps: it forgets by the greatest time of any clock."""
YEAR_MS = 365 * 86_400_000

HASTY = 0.3
"""How many worlds have maintenance commands whose own WAL retention is 0. There, a view
outlives most stops."""
HASTY_BOUNDS = Bounds(4000, 16_000, 5000)
OTHER_BOUNDS = (SetBounds(400, 1600), SetBounds(12_000, 48_000))
"""To which hasty worlds with suspended processes change them, if no clock of theirs jumps: a jump
is hours, and what is lowered waits for minutes here."""

KINDS = ("brokers", "sleepers", "tables", "groups", "disks")


class Plan(NamedTuple):
    """The plan of one seed: faults, features, sizes."""

    kind: str
    brokers: int
    run_s: float
    settings: LogSettings
    grace: Grace
    weather: Weather
    air: Air
    load: Load
    configs: dict[str, str]
    producers: int
    readers: int
    members: int
    has_disks: bool
    carers: int
    trouble_s: float
    """Mean time from one trouble to the next."""
    stop_s: float
    """Mean length of a stop."""
    troubles: tuple[str, ...]
    features: frozenset[str] = frozenset()
    """Of groups."""
    level: int = levels.NEWEST
    """Of the format, at which the cluster begins."""
    command_grace: Grace | None = None
    """The grace of maintenance commands; None: that of the cluster."""
    has_guests: bool = False
    """A stop is a pause of the broker's machine, which its boot time misses."""


class Result(NamedTuple):
    seed: int
    kind: str
    violations: list[Violation]
    trace: str
    counts: dict[str, int]
    events: list[history.Event]


def plan_of(seed: int) -> Plan:
    draws = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    is_sleepy, has_tables = kind == "sleepers", kind in {"tables", "sleepers"}
    view_s = 1.0 if is_sleepy else draws.choice([5.0, 60.0])
    grace = Grace(wal_ms=int(view_s * 4000) + 500, table_ms=int(view_s * 5000))
    cold = ReaderSettings(chunk_cache_bytes=0, segment_cache_bytes=0, footer_cache_bytes=0)
    # A client that waits this long gets the answer of a broker that was suspended.
    patience_s = draws.choice([8.0, 200.0, 200.0]) if is_sleepy else draws.choice([2.0, 8.0])
    settings = LogSettings(
        wal=WalSettings(
            Bounds(int(view_s * 1000), *grace),
            checkpoint_entries=draws.choice([3, 10, 50]),
            checkpoint_interval_s=0.5,
        ),
        writer=WriterSettings(answer_timeout_s=patience_s / 2),
        reader=draws.choice([cold, ReaderSettings()]),
        sealer=SealerSettings(check_interval_s=0.5),
        membership=MembershipSettings(heartbeat_interval_s=1.0, member_timeout_s=3.0),
        sequencer=SequencerSettings(
            handover_timeout_s=0.3,
            handover_bytes_max=draws.choice([100, 512 * 1024]),
        ),
        tail_cache_bytes=draws.choice([0, 1 << 20]),
        poll_interval_s=draws.choice([0.3, 1.0]),
        is_sealing=has_tables or draws.random() < 0.3,
    )
    rate = draws.choice([0.0, 0.02, 0.1, 0.25])
    weather = Weather(
        lost=rate,
        refused=draws.choice([0.0, rate / 4]),
        failed=draws.choice([0.0, 0.02, rate / 2]),
        median_s=draws.choice([0.005, 0.02, 0.1]),
        spread=draws.choice([0.3, 1.0]),
        late_s=draws.choice([0.2, 2.0]),
    )
    loss = draws.choice([0.0, 0.02, 0.15])
    is_compacted = kind == "tables" and draws.random() < 0.3
    seal_ms = draws.choice(["700", "2500", "700", "30000"] if is_sleepy else ["700", "2500"])
    configs = {"segment.ms": seal_ms} if settings.is_sealing else {}
    if has_tables and draws.random() < 0.5:
        configs["retention.ms"] = draws.choice(["4000", "9000"])
        configs["message.timestamp.type"] = "LogAppendTime"
    if is_compacted:
        configs |= {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}
        configs |= {"delete.retention.ms": "1000"}
        configs.pop("retention.ms", None)
    troubles: tuple[str, ...] = (
        "kill",
        "end",
        "stop",
        "kill",
        "skew",
        "weather",
        "air",
        "carer",
        "full",
    )
    if is_sleepy:
        troubles = ("half sent", "half sent", "stop", "kill", "carer", "weather", "air", "end")
    plan = Plan(
        kind,
        brokers=1 if kind == "disks" else draws.choice([2, 3] if is_sleepy else [1, 2, 3, 3, 4]),
        run_s=draws.uniform(25.0, 40.0) if is_sleepy else draws.uniform(6.0, 18.0),
        settings=settings,
        grace=grace,
        weather=weather,
        air=Air(loss, loss / 2, loss / 2, draws.choice([0.001, 0.01])),
        load=Load(
            partitions=draws.choice([1, 2, 3]),
            pause_s=draws.choice([0.15, 0.4]) * (2 if is_sleepy else 1),
            local=0.7 if kind == "disks" else 0.0,
            is_compacted=is_compacted,
            patience_s=patience_s,
        ),
        configs=configs,
        producers=draws.choice([1, 2, 3]),
        readers=draws.choice([1, 2]),
        members=draws.choice([2, 3]) if kind == "groups" else 0,
        has_disks=kind == "disks",
        carers=draws.choice([1, 1, 2]) if has_tables else 0,
        trouble_s=draws.choice([2.0, 4.0] if is_sleepy else [0.7, 2.0, 4.0]),
        stop_s=draws.choice([3.0, 10.0, 15.0]) if is_sleepy else draws.choice([0.3, 2.0]),
        troubles=troubles[: draws.choice([4, 9])],
    )
    # Dice of its own: worlds that begin at the newest level are as they were without this.
    if random.Random(f"level {seed}").random() < FIRST_LEVEL:
        plan = plan._replace(level=levels.FIRST, troubles=(*plan.troubles, "upgrade"))
    own = random.Random(f"{seed} exceptions")  # older seeds stay what they were
    raises, refused_part = own.choice([0.0, 0.0, 0.03]), own.choice([b"", b"3."])
    odd = plan.weather._replace(raises=raises, refused_part=refused_part)
    plan = plan._replace(weather=odd)
    clocks = random.Random(f"clocks {seed}")
    if clocks.random() < WRONG_CLOCKS:
        jumps = () if plan.level == levels.FIRST else ("days",)
        plan = plan._replace(troubles=(*plan.troubles, *jumps), has_guests=True)
    if clocks.random() < HASTY:
        settings = settings._replace(wal=settings.wal._replace(bounds=HASTY_BOUNDS))
        plan = plan._replace(command_grace=grace._replace(wal_ms=0), settings=settings)
        if is_sleepy and "days" not in plan.troubles:
            plan = plan._replace(troubles=(*plan.troubles, *["bounds"] * 4), stop_s=6.0)
    if kind != "groups":
        return plan
    return plan._replace(features=frozenset(each for each in FEATURES if draws.random() < 0.4))


class Run:
    """One run of one seed."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        self.seed = seed
        self.plan = plan
        self.world = world
        self.draws = world.draws
        self.clients: list[Client] = []
        self.carers: list[machine.Process] = []
        self.is_over = False
        world.on_exit = self._restart

    async def main(self) -> None:
        world, plan = self.world, self.plan
        if plan.level != levels.NEWEST:
            world.found()
        for slot in range(plan.brokers):
            world.start(slot, self._settings())
        await self._make_topic()
        world.weather, world.air = plan.weather, plan.air
        for number in range(plan.producers):
            self._client(Producer(world, f"p{number}", plan.load))
        for number in range(plan.readers):
            self._client(Reader(world, f"r{number}", plan.load))
        self._client(Witness(world, "w", plan.load))
        if plan.members:
            self._groups()
        for _ in range(plan.carers):
            self._care()
        while world.now_s < plan.run_s:
            await asyncio.sleep(self.draws.expovariate(1 / plan.trouble_s))
            self._trouble(self.draws.choice(plan.troubles))
            world.check_states()
            if plan.carers:
                scan(world)
        self.is_over = True
        await finish(self)

    def _groups(self) -> None:
        world, load, features = self.world, self.plan.load, self.plan.features
        habits = Habits(is_static="static" in features, is_seeking="seeks" in features)
        for number in range(self.plan.members):
            self._client(Member(world, f"m{number}", load, "g", habits))
        self._client(Asker(world, "a", load, "g"))
        auto = habits._replace(is_auto=True)
        if "garden" in features:
            self._client(Gardener(world, "gardener", load))
            auto = auto._replace(pattern=f"{TOPIC}[0-9]*")
        for number in range(2):
            self._client(Member(world, f"n{number}", load, "auto", auto))
        if "workers" in features:
            for number in range(2):
                steady = habits._replace(is_seeking=False)
                self._client(Worker(world, f"w{number}", load, "once", steady))

    def _settings(self) -> LogSettings:
        return self.plan.settings

    async def _make_topic(self) -> None:
        world, partitions = self.world, self.plan.load.partitions
        while len(world.ready()) < self.plan.brokers:  # noqa: ASYNC110 - polling is free
            await asyncio.sleep(0.05)

        async def make(broker: Broker) -> None:
            await broker.log.create_topic(TOPIC, partitions, self.plan.configs)

        await world.ask(world.ready()[0].address, make)
        if "workers" in self.plan.features:
            await world.ask(
                world.ready()[0].address, lambda broker: broker.log.create_topic(RESULTS, 1, {})
            )
            world.record(history.Topic(world.now_s, RESULTS, 1))
        is_compacted = self.plan.load.is_compacted
        world.record(history.Topic(world.now_s, TOPIC, partitions, is_compacted))
        for broker in world.ready():
            await world.ask(broker.address, lambda broker: broker.log.wal.refresh())

    def _client(self, client: Client) -> None:
        self.clients.append(client)
        self.world.spawn(client.name, client.live())

    # -- what goes wrong

    def _trouble(self, what: str) -> None:
        world, draws = self.world, self.draws
        broker = draws.choice(list(world.brokers.values())) if world.brokers else None
        world.count(what)
        match what:
            case "kill" if broker is not None:
                world.kill(broker)
                self._restart(broker)
            case "end" if broker is not None:
                world.end(broker)
            case "full":
                world.full = draws.choice([0.1, 1.0])
                _ = world.later(draws.expovariate(1.0), self._calm)
            case "stop" if broker is not None:
                self._stop(broker.process, broker.clock)
            case "half sent" if broker is not None:
                process, clock = broker.process, broker.clock
                broker.way.on_put = lambda: self._stop(process, clock)
            case "skew" if broker is not None:
                skew_ms = draws.choice([3000, 3000, 3000, SKEW_MS_MAX])
                broker.clock.skew_ms = draws.randrange(-skew_ms, skew_ms)
            case "days" if broker is not None:
                self._jump(broker.clock, 3)
            case "weather":
                lost, failed = draws.choice([(0.0, 0.0), (0.4, 0.1), (0.7, 0.9)])
                world.weather = self.plan.weather._replace(
                    lost=lost, failed=failed, refused_part=b""
                )
                _ = world.later(draws.expovariate(1.0), self._calm)
            case "air":
                world.air = self.plan.air._replace(lost=draws.choice([0.0, 0.5, 1.0]))
                _ = world.later(draws.expovariate(1.0), self._calm)
            case "upgrade":
                self._raise_level()
            case "bounds":
                _ = world.spawn("change", self._change_bounds(draws.choice(OTHER_BOUNDS)))
            case "carer" if self.carers:
                carer = draws.choice(self.carers)
                if draws.random() < 0.5:
                    self._stop(carer)
                else:
                    carer.kill()
                    self.carers.remove(carer)
                    self._care()
            case _:
                pass

    def _jump(self, clock: ManualClock, times: int) -> None:
        """Few times: each may make all forget ten minutes early, and keys are kept for an hour."""
        clock.skew_ms = self.draws.randrange(-YEAR_MS, YEAR_MS)
        if times > 1:
            _ = self.world.later(self.draws.expovariate(3.0), self._jump, clock, times - 1)

    def _calm(self) -> None:
        self.world.full = 0.0
        if not self.is_over:
            self.world.weather, self.world.air = self.plan.weather, self.plan.air

    def _restart(self, gone: Broker) -> None:
        slot = int(gone.name[1:].partition(".")[0])
        _ = self.world.later(self.draws.expovariate(1.0), self._start, slot)

    def _start(self, slot: int) -> None:
        """Unless one is there."""
        if not any(broker.name.startswith(f"b{slot}.") for broker in self.world.brokers.values()):
            self.world.start(slot, self._settings())

    def _stop(self, process: machine.Process, clock: ManualClock | None = None) -> None:
        """`clock`: of the process' machine, if it may be paused with it."""
        if process.is_stopped or self.is_over:
            return
        self.world.note(f"stop {process.name}")
        process.stop()
        stopped_s = self.draws.expovariate(1 / self.plan.stop_s)

        def go_on() -> None:
            if clock is not None and self.plan.has_guests:
                clock.miss(stopped_s)
            process.go_on()

        _ = self.world.later(stopped_s, go_on)

    # -- the level of the format

    def _raise_level(self) -> None:
        """By one command or two at once, of which some are killed."""
        for _ in range(self.draws.choice([1, 2])):
            process = self.world.spawn("upgrade", self._upgrade())
            if self.draws.random() < 0.3:
                _ = self.world.later(self.draws.expovariate(3.0), process.kill)

    async def _upgrade(self) -> None:
        settings = self.plan.settings
        try:
            cluster = await self.world.cluster()
            _ = await upgrade(cluster, is_dry=False, settings=settings.membership)
            await cluster.close()
        except (Unavailable, CommitUnknown) as error:
            self.world.note(f"upgrade: {error}")

    async def _change_bounds(self, change: SetBounds) -> None:
        try:
            cluster = await self.world.cluster()
            _ = await change_bounds(cluster, change, is_dry=False)
            await cluster.close()
        except (InvalidRequest, Unavailable, CommitUnknown) as error:  # invalid: at level 1
            self.world.note(f"bounds: {error}")

    # -- care

    def _care(self) -> None:
        if not self.is_over:
            carer = self.world.process("carer")
            self.carers.append(carer)
            _ = carer.spawn(self.world.rooted("carer", self._care_for_ever()))

    async def _care_for_ever(self) -> None:
        world, draws, grace = self.world, self.draws, self.plan.grace
        while True:
            await asyncio.sleep(draws.expovariate(1.0))
            try:
                cluster = await world.cluster()
                await retain(cluster, None, is_dry=False)
                if draws.random() < 0.1:
                    held = cluster.state.topic(TOPIC).partitions[0]
                    offset = min(held.log_start_offset + draws.randrange(4), held.high_watermark)
                    await delete_records(cluster, TOPIC, {0: offset}, is_dry=False)
                await compact(cluster, None, is_dry=False)
                planned = await plan(cluster, self.plan.command_grace or grace)
                if draws.random() < 0.3:
                    await asyncio.sleep(draws.expovariate(0.3))
                world.counts["collected"] = world.counts.get("collected", 0) + await collect(
                    cluster, planned
                )
                if draws.random() < 0.2:
                    report = await scrub(cluster, None, grace)
                    damage = [each for each in report.findings if each.is_damage]
                    if damage and not world.has_damage:
                        world.bug(f"scrub finds {damage}")
                await cluster.close()
            except (Unavailable, CommitUnknown, ManifestConflict, OffsetOutOfRange) as error:
                world.note(f"care: {error}")
            except (InvalidRequest, LogError) as error:
                if not world.expects(error):
                    world.bug(f"care fails: {error!r}")


def simulate(seed: int, *, lines: list[str] | None = None) -> Result:
    """The run of this seed, judged. `lines` gets everything that happens."""
    with machine.quietly():
        return simulated(seed, plan_of(seed), Run, lines)


def simulated(
    seed: int,
    plan: Plan,
    run_of: Callable[[int, Plan, World], Run],
    lines: list[str] | None = None,
) -> Result:
    """The run that is made by `run_of`, judged. Use it `quietly`."""
    scratch = (
        Path(tempfile.mkdtemp(prefix="tidelog-sim-", dir=_memory())) if plan.has_disks else None
    )
    found: list[Violation] = []
    world = World(seed, plan.settings, scratch, plan.level)
    world.lines = lines
    run = run_of(seed, plan, world)
    try:
        with world.standing_in(plan.grace):
            machine.run(
                run.main,
                thread_s=lambda: world.draws.random() * 0.01,
                end_s=plan.run_s + 400,
            )
    except (machine.Stuck, AssertionError) as error:
        found.append(Violation("stuck", repr(error)))
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    found += [Violation("bug", each) for each in world.bugs]
    found += check_all(world.recorder.events)
    trace = world.trace.hexdigest()
    return Result(seed, plan.kind, found, trace, world.counts, world.recorder.events)


def _memory() -> str | None:
    """Where files cost nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
