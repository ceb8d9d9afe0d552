"""One seed, one run: the world of its plan, what goes wrong in it, and the judgement.

`simulate(seed)` is the whole of it, and the same each time. The plan of a seed is drawn first
(tests/sim/plans.py), then everything else in the order in which it happens.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.sim import history, machine
from tests.sim.checker import Violation
from tests.sim.clients import TOPIC, Client, Deleter, Producer, Reader, Witness
from tests.sim.finish import finish, scan
from tests.sim.groupcheck import check_all
from tests.sim.members import RESULTS, Asker, Gardener, Habits, Member, Worker
from tests.sim.plans import LOWER_BOUNDS, RAISED_BOUNDS, SKEW_MS_MAX, YEAR_MS, Plan, plan_of
from tests.sim.world import Broker, World
from tests.support.clock import ManualClock
from tidelog.compaction.change_time_bounds import change_bounds
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import scrub
from tidelog.compaction.upgrade import upgrade
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.errors import (
    CommitUnknown,
    InvalidRequest,
    LogError,
    OffsetOutOfRange,
    Unavailable,
)
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.tables.manifest import ManifestConflict


class Result(NamedTuple):
    seed: int
    kind: str
    violations: list[Violation]
    trace: str
    counts: dict[str, int]
    events: list[history.Event]


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
        world.merge_after_s = plan.merge_after_s

    async def main(self) -> None:
        world, plan = self.world, self.plan
        await self._begin()
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

    async def _begin(self, other_topic: str = "") -> None:
        """Start the brokers, make the topics, then let the faults and the producers begin."""
        world, plan = self.world, self.plan
        if plan.level != format_levels.NEWEST:
            world.found()
        for slot in range(plan.brokers):
            world.start(slot, self._settings())
        await self._make_topic()
        if other_topic:
            await world.ask(
                world.ready()[0].address,
                lambda broker: broker.log.topics.create(other_topic, 1, {"segment.ms": "700"}),
            )
            world.record(history.Topic(world.now_s, other_topic, 1))
            for broker in world.ready():
                await world.ask(broker.address, lambda broker: broker.log._log.wal.refresh())
        world.weather, world.air = plan.weather, plan.air
        for number in range(plan.producers):
            self._client(Producer(world, f"p{number}", plan.load))

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
            await broker.log.topics.create(TOPIC, partitions, self.plan.configs)

        await world.ask(world.ready()[0].address, make)
        if "workers" in self.plan.features:
            await world.ask(
                world.ready()[0].address, lambda broker: broker.log.topics.create(RESULTS, 1, {})
            )
            world.record(history.Topic(world.now_s, RESULTS, 1))
        is_compacted = self.plan.load.is_compacted
        world.record(history.Topic(world.now_s, TOPIC, partitions, is_compacted))
        for broker in world.ready():
            await world.ask(broker.address, lambda broker: broker.log._log.wal.refresh())

    def _client(self, client: Client) -> None:
        self.clients.append(client)
        self.world.spawn(client.name, client.live())

    # -- what goes wrong

    def _trouble(self, trouble: str) -> None:
        world, draws = self.world, self.draws
        broker = draws.choice(list(world.brokers.values())) if world.brokers else None
        world.count(trouble)
        match trouble:
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
            case "uploaded" if broker is not None:
                process, clock = broker.process, broker.clock
                broker.way.on_upload = lambda: self._stop_alone(process, clock)
            case "half uploaded" if broker is not None:
                broker.way.on_upload = lambda: self._kill_soon(broker)
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
            case "raised":
                _ = world.spawn("change", self._change_bounds(RAISED_BOUNDS))
            case "lowered" if broker is not None:
                process, clock = broker.process, broker.clock
                broker.way.on_put = lambda: self._lower_bounds_unseen(process, clock)
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

    def _restart(self, broker: Broker) -> None:
        slot = int(broker.name[1:].partition(".")[0])
        _ = self.world.later(self.draws.expovariate(1.0), self._start, slot)

    def _kill_soon(self, broker: Broker) -> None:
        """Not at once: this is a step of the broker's process."""

        def kill() -> None:
            if not broker.process.is_dead:
                self.world.kill(broker)
                self._restart(broker)

        _ = self.world.later(0.0, kill)

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

    def _stop_alone(self, process: machine.Process, clock: ManualClock) -> None:
        """Unless another is stopped: the WAL goes on without this one."""
        if not any(broker.process.is_stopped for broker in self.world.brokers.values()):
            self._stop(process, clock)

    def _lower_bounds_unseen(self, process: machine.Process, clock: ManualClock) -> None:
        self._stop_alone(process, clock)
        _ = self.world.spawn("change", self._change_bounds(LOWER_BOUNDS))

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
        except LogError as error:
            if not self.world.expects(error):
                raise

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
                if self.plan.is_deleted and draws.random() < 0.3:
                    self._client(Deleter(world, "d", self.plan.load))
                await retain(cluster, None, is_dry=False)
                if draws.random() < 0.1:
                    partition = cluster.state.topic(TOPIC).partitions[0]
                    offset = min(
                        partition.log_start_offset + draws.randrange(4), partition.high_watermark
                    )
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
                    damage = [finding for finding in report.findings if finding.is_damage]
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
    violations: list[Violation] = []
    world = World(seed, plan.settings, scratch, plan.level)
    world.lines = lines
    run = run_of(seed, plan, world)
    try:
        with world.standing_in(plan.grace):
            machine.run(
                run.main,
                thread_s=lambda: world.draws.random() * 0.01,
                end_s=plan.run_s + 800,
            )
    except (machine.Stuck, AssertionError) as error:
        violations.append(Violation("stuck", repr(error)))
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    violations += [Violation("bug", bug) for bug in world.bugs]
    violations += check_all(world.recorder.events)
    trace = world.trace.hexdigest()
    return Result(seed, plan.kind, violations, trace, world.counts, world.recorder.events)


def _memory() -> str | None:
    """Where files cost nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
