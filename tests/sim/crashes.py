"""A crash at every await: a scenario runs again and again, each time with a later crash.

Its victim crashes a step later each time.

A step is what a process does from one await to the next, so that every await of every path of the
scenario is a crash point, with the store's calls among them. Nothing else goes wrong. After the
crash the others continue, a new process replaces the victim, and the history is judged.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from tests.sim import machine
from tests.sim.clients import TOPIC, Load, Producer, Reader
from tests.sim.finish import finish
from tests.sim.history import Written
from tests.sim.members import Member
from tests.sim.network import Air, Refusal, Silence
from tests.sim.plans import Plan
from tests.sim.runs import Result, Run, simulated
from tests.sim.stores import Weather
from tests.sim.world import Broker, World
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.wal.wal_objects import WalSettings
from tidelog.storage.write.writer import WriterSettings

STEPS_MAX = 3000
_LOAD = Load(partitions=2, pause_s=0.05, producers=0.0)
_GRACE = Grace(wal_ms=8500, table_ms=10_000)
_SETTINGS = LogSettings(
    wal=WalSettings(Bounds(2000, *_GRACE), checkpoint_entries=4, checkpoint_interval_s=0.0),
    writer=WriterSettings(answer_timeout_s=4.0),
    membership=MembershipSettings(heartbeat_interval_s=0.5, member_timeout_s=1.5),
    sequencer=SequencerSettings(
        handover_timeout_s=0.3, handover_bytes_max=200, alone_bytes_max=200, upload_bytes=1
    ),
    is_sealing=False,
)


class Scenario(NamedTuple):
    """`work` begins when all is set up; it names its victim and then does what it does."""

    name: str
    brokers: int
    has_disks: bool
    work: Callable[["CrashRun"], Awaitable[None]]


class CrashRun(Run):
    """A scenario whose victim crashes at one step; never if that is -1."""

    def __init__(self, world: World, scenario: Scenario, step: int) -> None:
        super().__init__(0, plan_of(scenario), world)
        self.scenario = scenario
        self.at = step
        self.steps = 0
        """That the victim made, of those that were counted."""

    async def main(self) -> None:
        for slot in range(self.plan.brokers):
            self.world.start(slot, self.plan.settings)
        await self._make_topic()
        self.world.weather, self.world.air = self.plan.weather, self.plan.air
        await asyncio.sleep(1.2)  # all see each other
        await self.scenario.work(self)
        await asyncio.sleep(0.5)
        self.is_over = True
        await finish(self)

    def condemn(self, process: machine.Process, on_death: Callable[[], None]) -> Callable[[], None]:
        """The victim, from now on until the answer is called."""
        first = process.steps
        process.on_death = on_death
        process.dies_at = first + self.at

        def count() -> None:
            process.dies_at = -1
            self.steps = process.steps - first

        return count

    def condemn_broker(self, broker: Broker) -> Callable[[], None]:
        return self.condemn(broker.process, lambda: self.world.kill(broker))

    def producer(self) -> Producer:
        return Producer(self.world, f"p{self.world.recorder.next_op()}", _LOAD)

    async def write(self, *brokers: Broker) -> None:
        """Send two requests to each, with a key and without; retry a key at any live broker.

        The second request follows the first.
        """
        for turn in range(2):
            for broker in brokers:
                producer = self.producer()
                records = [Written(TOPIC, f"{producer.name}/{turn}.{i}", i % 2) for i in range(3)]
                key = f"{producer.name}/{turn}" if turn else None
                if not await producer.once(records, key=key, broker=broker) and key is not None:
                    for other in self.world.ready():
                        if await producer.once(records, key=key, broker=other):
                            break

    async def do(self, broker: Broker, call: Callable[[Broker], Awaitable[object]]) -> None:
        try:
            await self.world.ask(broker.address, call, timeout_s=8.0)
        except (LogError, Refusal, Silence) as error:
            self.world.note(repr(error))


def plan_of(scenario: Scenario) -> Plan:
    return Plan(
        kind=scenario.name,
        brokers=scenario.brokers,
        run_s=60.0,
        settings=_SETTINGS,
        grace=_GRACE,
        weather=Weather(median_s=0.02, spread=0.0),
        air=Air(),
        load=_LOAD,
        configs={"target.segment.bytes": "100000"},
        producers=0,
        readers=0,
        members=0,
        has_disks=scenario.has_disks,
        carers=0,
        trouble_s=1.0,
        stop_s=1.0,
        troubles=(),
    )


# -- victims


async def _sequencer_of_others(run: CrashRun) -> None:
    brokers = run.world.ready()
    first = brokers[0].log._membership.ranking[0].id
    victim = next(broker for broker in brokers if broker.log._membership.me.id == first)
    release = run.condemn_broker(victim)
    other_brokers = [broker for broker in brokers if broker is not victim]
    await asyncio.gather(run.write(*other_brokers), run.write(victim))
    release()


async def _who_hands_over(run: CrashRun) -> None:
    brokers = run.world.ready()
    first = brokers[0].log._membership.ranking[0].id
    victim = next(broker for broker in brokers if broker.log._membership.me.id != first)
    release = run.condemn_broker(victim)
    await asyncio.gather(*(run.write(broker) for broker in brokers))
    release()


async def _promises_on_a_disk(run: CrashRun) -> None:
    (victim,) = run.world.ready()
    release = run.condemn_broker(victim)
    producer = run.producer()
    for number in range(3):
        records = [Written(TOPIC, f"{producer.name}/{number}", 0)]
        await producer.once(records, is_local=True, broker=victim)
    await run.write(victim)
    release()


async def _recovery_of_a_disk(run: CrashRun) -> None:
    (broker,) = run.world.ready()
    producer = run.producer()
    run.world.weather = run.plan.weather._replace(lost=1.0)  # nothing is committed for a while
    for number in range(3):
        records = [Written(TOPIC, f"{producer.name}/{number}", 0)]
        await producer.once(records, is_local=True, broker=broker)
    run.world.kill(broker)
    run.world.weather = run.plan.weather
    victim = run.world.start(0, run.plan.settings)
    release = run.condemn_broker(victim)
    await asyncio.sleep(1.0)
    release()


async def _sealer(run: CrashRun) -> None:
    victim, other = run.world.ready()
    await run.write(victim)
    await run.do(victim, lambda broker: broker.log.records.seal(TOPIC))
    await run.write(other)
    release = run.condemn_broker(victim)
    reader = Reader(run.world, "r", _LOAD)
    await asyncio.gather(
        run.do(victim, lambda broker: broker.log.records.seal(TOPIC)),
        run.write(other),
        reader.fetch(0, 0, ""),
    )
    await reader.fetch(1, 0, "")
    release()
    await run.do(other, lambda broker: broker.log.records.seal(TOPIC))


async def _carer(run: CrashRun) -> None:
    (broker,) = run.world.ready()
    for _ in range(5):
        await run.write(broker)
        await run.do(broker, lambda broker: broker.log.records.seal(TOPIC))
    await asyncio.sleep(_GRACE.table_ms / 1000 + 1)
    await run.write(broker)
    await asyncio.sleep(_GRACE.wal_ms / 1000 + 1)
    await run.write(broker)
    process = run.world.process("carer")
    release = run.condemn(process, process.kill)
    working = process.spawn(_care(run))
    await asyncio.wait([working], timeout=20.0)
    assert working.done() or process.is_dead
    release()


async def _care(run: CrashRun) -> None:
    cluster = await run.world.cluster()
    partition = cluster.state.topic(TOPIC).partitions[0]
    await delete_records(cluster, TOPIC, {0: partition.log_start_offset + 2}, is_dry=False)
    compacted = await compact(cluster, None, is_dry=False)
    collected = await collect(cluster, await plan(cluster, _GRACE))
    assert compacted, "nothing was merged"
    assert collected, "nothing was collected"


async def _coordinator(run: CrashRun) -> None:
    brokers = run.world.ready()
    await run.write(*brokers)
    member = Member(run.world, "m", _LOAD, "g")
    victim = brokers[0]
    release = run.condemn_broker(victim)
    run.clients.append(member)
    _ = run.world.spawn("m", member.live())
    await asyncio.sleep(1.0)
    await run.write(brokers[1])
    await asyncio.sleep(1.0)
    release()


SCENARIOS = (
    Scenario("the sequencer of others", 2, False, _sequencer_of_others),
    Scenario("who hands over", 2, False, _who_hands_over),
    Scenario("promises on a disk", 1, True, _promises_on_a_disk),
    Scenario("the recovery of a disk", 1, True, _recovery_of_a_disk),
    Scenario("a sealer", 2, False, _sealer),
    Scenario("retention, compaction, collection", 1, False, _carer),
    Scenario("the coordinator of a group", 2, False, _coordinator),
)


def crashed(scenario: Scenario, step: int, lines: list[str] | None = None) -> tuple[Result, int]:
    """Run with a crash of the victim at `step`; return the judgement and the number of steps."""
    runs: list[CrashRun] = []

    def made(seed: int, plan: Plan, world: World) -> Run:
        runs.append(CrashRun(world, scenario, step))
        return runs[0]

    with machine.quietly():
        result = simulated(0, plan_of(scenario), made, lines)
        steps = runs[0].steps
        runs.clear()  # here, where what its destructors do is not logged
    return result, steps


def all_of(scenario: Scenario, *, points_max: int = STEPS_MAX) -> Iterator[tuple[int, Result]]:
    """Each step at which the victim can die, or so many of them, and what came of it."""
    _, steps = crashed(scenario, -1)
    assert 0 < steps < STEPS_MAX, f"{steps} steps"
    for step in range(1, steps + 1, max(1, math.ceil(steps / points_max))):
        yield step, crashed(scenario, step)[0]
