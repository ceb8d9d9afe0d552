"""Objects of the store are damaged while brokers and maintenance work.

Entries, their copies, chunks, uploads, checkpoints, segments, commits of tables, strays in `wal/`.

The property: one damaged thing costs itself (DESIGN 8). Brokers stay, commit, and serve all other
records; an error names the damaged object and no more offsets than it has; nothing wrong is served;
each duty goes on; a scrub names all damage; nothing that is named is deleted. After the procedures
of deploy/README.md ("An object is damaged") the log is whole, but for the records given up.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from tests.sim import history, machine
from tests.sim.clients import TOPIC, Producer, Reader, Witness, reads_of
from tests.sim.damage_deeds import DEEDS, Damaged, Objects, Range, version_of
from tests.sim.finish import finish
from tests.sim.history import Read, Written
from tests.sim.network import Refusal, Silence
from tests.sim.plans import Plan, plan_of
from tests.sim.runs import Result, Run, simulated
from tests.sim.stores import files_at
from tests.sim.world import Broker, World
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.garbage import live_objects
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.repair_wal import delete_strays, lost_records, strays
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import scrub
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import (
    Corrupt,
    DamagedRecords,
    LogError,
    OffsetOutOfRange,
    StoreUnfit,
    TableInDoubt,
    Unavailable,
)
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.manifest import seal_app_id

T = TypeVar("T")

OTHER = "u"
KINDS = (1, 2)  # worlds whose times are short, and of tables: seed % 5
DEEDS_MAX = 12
CALM_S = 60.0
OUTAGE_S = 4.0
"""Mean time until an operator restores what no broker can work without."""

COSTLESS = frozenset({"header", "copy", "checkpoint", "far stray"})
"""Damage that no reader may notice."""
OUTAGES = frozenset({"emptied", "near stray"})
"""Damage that the WAL cannot be read through: an operator restores or deletes the object."""


class Follower(Reader):
    """A reader that passes over damage as its error says."""

    jump: int | None = None

    async def ask(
        self, op: int, broker: Broker, call: Callable[[Broker], Awaitable[T]]
    ) -> T | None:
        async def noting(broker: Broker) -> T:
            try:
                return await call(broker)
            except DamagedRecords as error:
                self.jump = error.end_offset
                raise
            except Corrupt as error:
                segment = object_keys.parse_segment("/".join(error.key.split("/")[-2:]))
                self.jump = None if segment is None else segment.end_offset
                raise

        return await super().ask(op, broker, noting)

    async def run(self) -> None:
        life = 0
        while not self.is_over:
            life += 1
            await self._follow(f"{self.name}.{life}")

    async def _follow(self, stream: str) -> None:
        """Follow until damage, then return; the next life begins behind it."""
        number = self.world.draws.randrange(self.load.partitions)
        offset = max(self.jump or 0, 0)
        self.jump = None
        with contextlib.suppress(LogError):  # out of range
            while not self.is_over and self.jump is None:
                await self.pause()
                next_offset = await self.fetch(number, offset, stream)
                offset = offset if next_offset is None else next_offset


class DamageRun(Run):
    """A world in which objects of one topic and of the WAL are damaged now and then."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        super().__init__(seed, plan, world)
        self._count = 0
        self.objects = Objects(world)
        self.damaged, self.ever = self.objects.now, self.objects.ever
        self._given_up: set[Range] = set()
        world.has_damage = True
        world.expects = self._expects
        self._fold, world.bucket.on_created = world.bucket.on_created, self._created
        self._remove, world.bucket.remove = world.bucket.remove, self._removed  # type: ignore[method-assign]

    # -- what must hold at every moment

    def _expects(self, error: LogError) -> bool:
        """Whether the error names damage that was done, and no records that it does not cost."""
        ever = self.ever
        if isinstance(error, TableInDoubt):
            return any(damage.what == "commit" for damage in ever.values())
        if isinstance(error, StoreUnfit) or not isinstance(error, Corrupt):
            return False
        if "is missing, but later entries exist" in error.why or "not an entry" in error.why:
            return any(damage.what == "near stray" for damage in ever.values())
        damage = ever.get(error.key)
        if damage is None or damage.what in COSTLESS:
            return False
        if not isinstance(error, DamagedRecords):
            return True
        partition = (error.topic, error.partition)
        return any(
            lost_range[:2] == partition
            and lost_range.offset <= error.offset
            and error.end_offset <= lost_range.end_offset
            for lost_range in damage.ranges
        )

    def _created(self, key: str, body: bytes) -> None:
        """Note what a repair gives up: only records of damaged chunks."""
        self._fold(key, body)
        for topic, number, partition in self.world.truth.partitions():
            for run in partition.tail:
                lost = Range(topic.name, number, run.base_offset, run.end_offset)
                if not run.is_lost or lost in self._given_up:
                    continue
                self._given_up.add(lost)
                self.world.record(history.GivenUp(self.world.now_s, *lost))
                if not any(_has(damage.ranges, lost) for damage in self.ever.values()):
                    self.world.bug(f"a repair gave up {lost}, which is whole")

    def _removed(self, keys: Iterable[str]) -> None:
        """I9: nothing that a reader may name is deleted."""
        keys = list(keys)
        truth, bucket = self.world.truth, self.world.bucket
        named = set(live_objects(truth)) | {object_keys.wal(truth.seq)}
        for topic in truth.topics.values():
            commits = bucket.tables.get(topic.prefix, [])
            files = files_at(commits, len(commits) - 1)
            named |= {f"{topic.prefix}/{file.path}" for file in files}
        if live_keys := named.intersection(keys):
            self.world.bug(f"I9: {sorted(live_keys)} are deleted, and named")
        self._remove(keys)
        for key in keys:
            self.damaged.pop(key, None)

    # -- the run

    async def main(self) -> None:
        world, plan = self.world, self.plan
        await self._begin(OTHER)
        for number in range(plan.readers):
            self._client(Follower(world, f"r{number}", plan.load))
        self._client(Witness(world, "w", plan.load))
        for _ in range(plan.carers):
            self._care()
        while world.now_s < plan.run_s:
            await asyncio.sleep(self.draws.expovariate(1 / plan.trouble_s))
            if len(self.ever) < DEEDS_MAX and self.draws.random() < 0.6:
                self._damage_one()
            elif self.draws.random() < 0.15:
                _ = world.spawn("operator", self._give_up())
            else:
                self._trouble(self.draws.choice(plan.troubles))
            await self._write_other()
            world.check_states()
        self.is_over = True  # no more troubles
        try:
            await self._all_others_go_on()
            await self._repair()
        except LogError as error:
            world.bug(f"a command fails beside damage: {error!r}")
            for process in world.processes:
                process.kill()
            return
        for carer in self.carers:  # its scrub may have begun before the repair
            carer.kill()
        world.has_damage = False
        await finish(self)

    async def _write_other(self) -> None:
        self._count += 1
        producer = Producer(self.world, f"o{self._count}", self.plan.load)
        await producer.once([Written(OTHER, f"other/{self._count}", 0)])

    # -- what is damaged

    def _damage_one(self) -> None:
        """Damage an object in the first way of these of which there is one without damage."""
        for deed in self.draws.sample(tuple(DEEDS), len(DEEDS)):
            if (damage := DEEDS[deed](self.objects)) is not None:
                self._damage(deed, damage)
                return

    def _damage(self, deed: str, damage: Damaged) -> None:
        self.damaged[damage.key] = self.ever[damage.key] = damage
        self.world.count(f"damaged {deed}")
        self.world.note(f"damage {deed} {damage.key} {damage.ranges}")
        if deed in OUTAGES:
            delay_s = self.draws.expovariate(1 / OUTAGE_S)
            _ = self.world.later(delay_s, self._restore, damage)

    def _restore(self, damage: Damaged) -> None:
        """As an operator does with a copy of the object, or without one: a stray is deleted."""
        bucket = self.world.bucket
        if self.damaged.pop(damage.key, None) is None:
            return  # collected since
        self.world.note(f"restore {damage.key}")
        if damage.what == "commit":
            prefix, version = version_of(damage.key)
            self.world.tables.damaged.discard((prefix, version))
        if damage.before is None:
            bucket._objects.pop(damage.key, None)
        elif damage.key in bucket._objects:
            bucket.write(damage.key, damage.before)

    # -- before any repair

    async def _all_others_go_on(self) -> None:
        """Nothing else fails any more: all that is not damaged must come right beside damage."""
        world = self.world
        world.calm()
        for damage in list(self.damaged.values()):
            if damage.what in OUTAGES:
                self._restore(damage)
        for slot in range(self.plan.brokers):
            self._start(slot)
        until_s = world.now_s + CALM_S
        for broker in await self._all_ready(until_s):
            for topic in (OTHER, TOPIC):
                await self._accepts(broker, topic, until_s)
        await self._until_sealed(until_s + CALM_S)
        await self._duties()
        fresh = world.start(98, self.plan.settings._replace(is_sealing=False))
        while not fresh.is_ready and not fresh.process.is_dead:  # noqa: ASYNC110 - polling is free
            await asyncio.sleep(0.2)
        for truth_topic, number, _ in list(world.truth.partitions()):
            await self._read(fresh, truth_topic.name, number)
        world.kill(fresh)
        await self._scrub()

    async def _all_ready(self, until_s: float) -> list[Broker]:
        world = self.world
        while len(world.ready()) < self.plan.brokers:
            await asyncio.sleep(0.2)
            if world.now_s > until_s:
                world.bug(f"only {[broker.name for broker in world.ready()]} run beside damage")
                break
        return world.ready()

    async def _accepts(self, broker: Broker, topic: str, until_s: float) -> None:
        world = self.world
        producer = Producer(world, f"beside{broker.name}", self.plan.load)
        while world.now_s < until_s:
            self._count += 1
            record = Written(topic, f"beside/{self._count}", 0, "beside")
            if await producer.once([record], broker=broker):
                return
            await asyncio.sleep(0.5)
        world.bug(f"{broker.name} takes no record of {topic} beside damage")

    async def _until_sealed(self, until_s: float) -> None:
        """Wait until each partition with a readable table is sealed up to damage or its end now.

        Producers continue, so a later end may never be sealed.
        """
        world = self.world
        ends = {
            (topic.name, number): partition.high_watermark
            for topic, number, partition in world.truth.partitions()
        }
        unsealed = self._unsealed(ends)
        while unsealed and world.now_s < until_s:
            await asyncio.sleep(0.5)
            for name in {name for name, _ in unsealed}:
                if world.ready():
                    with contextlib.suppress(LogError, Silence, Refusal):
                        await world.ask(world.ready()[0].address, partial(_seal, name))
            unsealed = self._unsealed(ends)
        if unsealed:
            world.bug(f"{unsealed} are not sealed beside damage")

    def _unsealed(self, ends: dict[tuple[str, int], int]) -> list[tuple[str, int]]:
        partitions = []
        for topic, number, partition in self.world.truth.partitions():
            if (
                any(damage.what == "commit" for damage in self.damaged.values())
                and topic.name == TOPIC
            ):
                continue
            run = partition.tail[0] if partition.tail else None
            if run is None or all(run.is_lost for run in partition.tail):
                continue
            if run.base_offset >= ends[topic.name, number]:
                continue
            tail_range = Range(topic.name, number, run.base_offset, run.end_offset)
            if run.is_lost or any(
                _has(damage.ranges, tail_range) for damage in self.damaged.values()
            ):
                continue
            # A sealer crashed between its two commits: the table is verified as a whole.
            ahead = Range(topic.name, number, partition.sealed_end, self._sealed_to(topic, number))
            if not any(
                _has([ahead], lost_range)
                for damage in self.damaged.values()
                for lost_range in damage.ranges
            ):
                partitions.append((topic.name, number))
        return partitions

    def _sealed_to(self, topic: Topic, number: int) -> int:
        """The offset to which the table of the topic has the partition."""
        commits = self.world.bucket.tables.get(topic.prefix, [])
        return max(
            (commit.transactions.get(seal_app_id(number), 0) for commit in commits), default=0
        )

    async def _duties(self) -> None:
        """Each duty goes on for whatever is whole; in the end nothing of it raises."""
        cluster = await self.world.cluster()
        for duty in (
            lambda: retain(cluster, None, is_dry=False),
            lambda: compact(cluster, None, is_dry=False),
            lambda: _collect(cluster, self.plan),
        ):
            try:
                await duty()
            except Unavailable as error:  # it lost a race against a broker
                self.world.note(f"duty: {error}")
            except LogError as error:
                self.world.bug(f"a duty fails beside damage: {error!r}")
        if OTHER in cluster.skipped:
            self.world.bug(f"duties skip the other topic: {cluster.skipped[OTHER]}")
        await cluster.close()

    async def _read(self, fresh: Broker, topic: str, number: int) -> None:
        """All that is whole can be read."""
        world = self.world
        partition = world.truth.topic(topic).partitions[number]
        offset = partition.log_start_offset
        while offset < partition.high_watermark:
            op = world.recorder.next_op()
            world.record(
                history.Fetch(world.now_s, op, "beside", topic, number, offset, fresh.name)
            )
            try:
                fetched = await fresh.log.records.fetch(topic, number, offset, bytes_max=1 << 20)
            except OffsetOutOfRange as error:  # a client has moved the log start meanwhile
                world.record(history.Refused(world.now_s, op, str(error)))
                if error.log_start_offset <= offset:
                    world.bug(f"{topic}-{number} at {offset} beside damage: {error!r}")
                    return
                offset = error.log_start_offset
                continue
            except LogError as error:
                beyond = self._costs(topic, number, offset, partition.sealed_end)
                world.record(history.Refused(world.now_s, op, str(error)))
                if not self._expects(error) or beyond is None:
                    world.bug(f"{topic}-{number} at {offset} beside damage: {error!r}")
                    return
                offset = beyond
                continue
            reads: list[Read] = reads_of(fetched)
            start, end = fetched.log_start_offset, fetched.high_watermark
            world.record(history.Fetched(world.now_s, op, reads, fetched.next_offset, start, end))
            if fetched.next_offset == offset:
                return
            offset = fetched.next_offset

    def _costs(self, topic: str, number: int, offset: int, sealed_end: int) -> int | None:
        """The end of the damage at this offset; None if there is none."""
        for damage in self.damaged.values():
            if damage.what == "commit" and topic == TOPIC and offset < sealed_end:
                return sealed_end
            for lost_range in damage.ranges:
                if (
                    lost_range[:2] == (topic, number)
                    and lost_range.offset <= offset < lost_range.end_offset
                ):
                    return lost_range.end_offset
        return None

    async def _scrub(self) -> None:
        """A scrub names each damaged object that is left, and reports no other damage."""
        world = self.world
        cluster = await MaintenanceSession.open(world.way_of(), world.clock(), report_damage=False)
        report = await scrub(cluster, None, self.plan.grace)
        await cluster.close()
        named = {finding.where for finding in report.findings}
        for key, damage in self.damaged.items():
            is_named = key in named or (damage.what == "commit" and TOPIC in named)
            if not is_named and self._is_of_log(damage):
                world.bug(f"a scrub does not name {damage.what} {key}: {report.findings}")
        for finding in report.findings:
            of_topic = finding.where == TOPIC or finding.where.startswith(f"{TOPIC}-")
            is_ours = finding.where in self.ever or (of_topic and "commit" in self.objects.kinds())
            if finding.is_damage and not is_ours:
                world.bug(f"a scrub finds damage that was not done: {finding}")

    def _is_of_log(self, damage: Damaged) -> bool:
        """Whether anything of the log has the damaged object."""
        truth, bucket = self.world.truth, self.world.bucket
        if damage.what == "commit":
            prefix, version = version_of(damage.key)
            return version > self.world.tables.checkpoint_of(prefix)
        if damage.what == "upload":
            return damage.key in live_objects(truth)
        if damage.what == "segment":
            if "commit" in self.objects.kinds():
                return False  # the table cannot be read
            topic = truth.topic(TOPIC)
            commits = bucket.tables[topic.prefix]
            return any(
                damage.key == f"{topic.prefix}/{file.path}"
                for file in files_at(commits, len(commits) - 1)
            )
        return True

    # -- repair

    async def _give_up(self) -> None:
        """`tidelog repair --lost`, beside all others."""
        world = self.world
        try:
            cluster = await world.cluster()
            await lost_records(cluster, None, is_dry=False)
            await cluster.close()
        except LogError as error:
            world.note(f"repair --lost: {error}")

    async def _repair(self) -> None:
        """Restore objects of which there are copies, give up other records, delete strays."""
        world = self.world
        for damage in list(self.damaged.values()):
            if damage.what == "far stray":
                continue
            if not damage.ranges or damage.what == "segment" or self.draws.random() < 0.5:
                self._restore(damage)
        cluster = await world.cluster()
        given_up = await lost_records(cluster, None, is_dry=False)
        await delete_strays(cluster, await strays(cluster))
        await cluster.close()
        world.counts["given up"] = world.counts.get("given up", 0) + len(given_up)
        remaining_strays = [
            damage for damage in self.damaged.values() if damage.what == "far stray"
        ]
        if remaining_strays:
            world.bug(f"{remaining_strays} are strays, and stay")
        for damage in list(self.damaged.values()):  # in entries whose other chunks are whole
            self._restore(damage)


async def _seal(name: str, broker: Broker) -> None:
    await broker.log.records.seal(name)


async def _collect(cluster: MaintenanceSession, plan_: Plan) -> None:
    await collect(cluster, await plan(cluster, plan_.grace))


def _has(ranges: Iterable[Range], inner: Range) -> bool:
    return any(
        outer_range[:2] == inner[:2]
        and outer_range.offset <= inner.offset
        and inner.end_offset <= outer_range.end_offset
        for outer_range in ranges
    )


def plan_of_damage(seed: int) -> Plan:
    plan_ = plan_of(seed // 2 * 5 + KINDS[seed % 2])
    return plan_._replace(
        level=format_levels.NEWEST,
        trouble_s=min(plan_.trouble_s, 1.5),
        troubles=tuple(
            trouble for trouble in plan_.troubles if trouble not in {"upgrade", "bounds"}
        ),
        weather=plan_.weather._replace(raises=0.0, refused_part=b""),
    )


def simulate_damage(seed: int, lines: list[str] | None = None) -> Result:
    """A run with damaged objects."""
    with machine.quietly():
        return simulated(seed, plan_of_damage(seed), DamageRun, lines)
