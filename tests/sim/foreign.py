"""Other engines commit to the table of a topic while brokers and maintenance work on it.

The property: nothing acknowledged is lost, whatever they did; the other topic is sealed as always;
and after a repair the log is whole. The hands do not delete objects: no log survives that.
"""

import asyncio
import contextlib

from tests.sim.clients import TOPIC, Producer, Reader, Witness
from tests.sim.finish import finish
from tests.sim.history import Written
from tests.sim.network import Refusal, Silence
from tests.sim.plans import Plan, plan_of
from tests.sim.runs import Result, Run, simulated
from tests.sim.stores import Commit, files_at
from tests.sim.world import World
from tidelog.compaction.repair_tables import repair
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import LogError, TableInDoubt
from tidelog.storage.core.model import SegmentFile

OTHER = "u"
HANDS = ("rewrite", "optimize", "remove", "append")
TABLES = 2  # the kind of world in which tables are cared for: seed % 5
REPAIRS_MAX = 50


class ForeignRun(Run):
    """A world of tables with foreign hands on one of them."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        super().__init__(seed, plan, world)
        self._files = 0
        world.has_damage = True
        world.expects = lambda error: world.has_damage and isinstance(error, TableInDoubt)

    async def main(self) -> None:
        world, plan = self.world, self.plan
        await self._begin(OTHER)
        self._client(Reader(world, "r", plan.load))
        self._client(Witness(world, "w", plan.load))
        for _ in range(plan.carers):
            self._care()
        while world.now_s < plan.run_s:
            await asyncio.sleep(self.draws.expovariate(1 / plan.trouble_s))
            if self.draws.random() < 0.6:
                self._touch(self.draws.choice(HANDS))
            else:
                self._trouble(self.draws.choice(plan.troubles))
            await self._write_other()
            world.check_states()
        self.is_over = True  # no more troubles
        await self._other_is_sealed()
        await self._repair()
        for carer in self.carers:  # its scrub may have begun before the repair
            carer.kill()
        world.has_damage = False
        await finish(self)

    def _touch(self, operation: str) -> None:
        """Commit to the table at this moment, as an engine does that knows nothing of the log."""
        world = self.world
        if TOPIC not in world.truth.topics:
            return  # the world has not begun
        prefix = world.truth.topic(TOPIC).prefix
        commits = world.bucket.tables.get(prefix, [])
        files = files_at(commits, len(commits) - 1)
        if not files:
            return
        world.count(f"foreign {operation}")
        chosen = [file for file in files if self.draws.random() < 0.5] or files[:1]
        if operation == "remove":
            world.tables.write(prefix, Commit((), chosen, {}))
            return
        self._files += 1
        of = chosen[0].partition
        path = f"partition={of}/part-{self._files:05d}-c000.parquet"
        world.bucket.write(f"{prefix}/{path}", world.bucket.read(f"{prefix}/{chosen[0].path}"))
        new_file = SegmentFile(path, of, -1, -1, chosen[0].size, chosen[0].rows, 0, 0)
        removed_files = (
            [] if operation == "append" else [file for file in chosen if file.partition == of]
        )
        world.tables.write(
            prefix, Commit([new_file], removed_files, {}, data_change=operation != "optimize")
        )

    async def _write_other(self) -> None:
        self._files += 1
        producer = Producer(self.world, f"o{self._files}", self.plan.load)
        await producer.once([Written(OTHER, f"other/{self._files}", 0)])

    async def _other_is_sealed(self) -> None:
        world = self.world
        world.weather, world.air = (
            world.weather._replace(lost=0.0, refused=0.0, failed=0.0),
            world.air,
        )
        for process in world.processes:
            if process.is_stopped and not process.is_dead:
                process.go_on()
        until_s = world.now_s + 60.0
        while world.now_s < until_s:
            (partition,) = world.truth.topic(OTHER).partitions
            if partition.sealed_end == partition.high_watermark:
                return
            await asyncio.sleep(0.5)
            if self.plan.level == format_levels.FIRST and world.ready():
                # Its records may have the time of a wrong clock, and be due in half an hour only.
                with contextlib.suppress(LogError, Silence, Refusal):
                    await world.ask(
                        world.ready()[0].address,
                        lambda broker: broker.log.records.seal(OTHER),
                        timeout_s=5.0,  # the request or its answer may be lost
                    )
        world.bug("the other topic is not sealed any more")

    async def _repair(self) -> None:
        world = self.world
        for _ in range(REPAIRS_MAX):
            try:
                cluster = await world.cluster()
                await repair(cluster, None, is_dry=False)
                remaining_repairs = await repair(cluster, None, is_dry=True)
                await cluster.close()
                if not remaining_repairs and not cluster.skipped:
                    return
                world.note(f"repair: {remaining_repairs} {cluster.skipped}")
            except LogError as error:
                world.note(f"repair: {error}")
            await asyncio.sleep(0.5)
        world.bug("the tables stay in doubt")


def simulate_foreign(seed: int, lines: list[str] | None = None) -> Result:
    """The run of the nth world of tables, with foreign hands."""
    number = seed * 5 + TABLES
    return simulated(number, plan_of(number), ForeignRun, lines)
