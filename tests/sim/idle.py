"""Worlds of idle brokers, which write and poll rarely: what they miss, and how soon they see it.

One thing at a time goes wrong: announcements are lost, a program commits, ways are cut, a broker is
suspended, killed, or starts late. After each, the views and the live brokers must come right in
their time, by what brokers do of themselves: no client reads.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tests.sim import machine
from tests.sim.network import Air
from tests.sim.plans import KINDS, Plan, plan_of
from tests.sim.runs import Result, Run, simulated
from tests.sim.stores import Weather
from tests.sim.world import Broker, World
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.cluster.peer_beats import AGREED_S, BEAT_S
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import CreateTopic
from tidelog.storage.core.time_bounds import Bounds

MEMBERSHIP = MembershipSettings(
    heartbeat_interval_s=1.0,
    member_timeout_s=3.0,
    sweep_after_s=30.0,
    quiet_interval_s=20.0,
    quiet_look_s=10.0,
)
POLL_S, QUIET_POLL_S = 0.5, 8.0
SLACK_S = 0.5
SEEN_S = 2 * BEAT_S + SLACK_S
"""Of a broker's entry, if its announcement is lost and beats are not."""
DOUBT_S = AGREED_S + POLL_S + SLACK_S
"""Of any entry, if no messages pass between brokers."""
DEAD_S = MEMBERSHIP.member_timeout_s + 3 * MEMBERSHIP.heartbeat_interval_s + SLACK_S
KNOWN_S = 3.0
"""In which a broker that starts knows the live brokers, and they know it: less than `quiet_look_s`,
after which a listing would tell."""


class IdleRun(Run):
    """One thing after the other, each in a quiet cluster."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        super().__init__(seed, plan, world)
        self._topics = 0

    async def main(self) -> None:
        world = self.world
        await self._begin()
        deeds: list[Callable[[], Awaitable[None]]] = [
            self._lose_announcement,
            self._commit_by_program,
            self._cut_all,
            self._cut_one_way,
            self._kill,
            self._suspend,
            self._start_late,
        ]
        self.draws.shuffle(deeds)
        for deed in deeds[:4]:
            await self._until_quiet()
            world.count(deed.__name__.strip("_").replace("_", " "))
            await deed()
        self.is_over = True

    # -- what goes wrong

    async def _lose_announcement(self) -> None:
        self.world.loses_entries = True
        await self._commit(self._one())
        await asyncio.sleep(SEEN_S)
        self._check_views("a lost announcement")
        self.world.loses_entries = False

    async def _commit_by_program(self) -> None:
        cluster = await self.world.cluster()
        action = CreateTopic(self._name(), self.world.draws.randbytes(16).hex(), 1, {})
        await cluster.wal.commit(Draft([Commit(cluster.clock.new_id(), [action])], [], []))
        await cluster.close()
        await asyncio.sleep(QUIET_POLL_S + SEEN_S + POLL_S)
        self._check_views("a commit of a program")

    async def _cut_all(self) -> None:
        """No broker's messages reach another. Each lives, and says so in the store."""
        addresses = list(self.world.brokers)
        self.world.cut_ways = {(one, other) for one in addresses for other in addresses}
        await asyncio.sleep(self.draws.uniform(AGREED_S, 2 * DEAD_S))
        await self._commit(self._one())
        await asyncio.sleep(DOUBT_S)
        self._check_views("a commit beside a cut network")
        self._check_live("a cut network")
        self.world.cut_ways = set()

    async def _cut_one_way(self) -> None:
        """A broker does not reach another, which must write heartbeats for it."""
        one, other = self.draws.sample(list(self.world.brokers), 2)
        self.world.cut_ways = {(one, other)}
        await asyncio.sleep(self.draws.uniform(DEAD_S, 3 * DEAD_S))
        self._check_live("one way cut")
        for broker in self._brokers():
            reached = {member.address for member in broker.log.cluster.members().peers}
            if reached != {other for other in self.world.brokers if other != broker.address}:
                self.world.bug(f"idle: {broker.name} reaches {sorted(reached)} alone")
        self.world.cut_ways = set()

    async def _kill(self) -> None:
        broker = self._one()
        self.world.kill(broker)
        await asyncio.sleep(self.draws.uniform(DEAD_S, 2 * DEAD_S))
        self._check_live("a kill")
        self._start(int(broker.name[1:].partition(".")[0]))
        await asyncio.sleep(KNOWN_S)
        self._check_live("a start after a kill")

    async def _suspend(self) -> None:
        broker = self._one()
        broker.process.stop()
        await asyncio.sleep(self.draws.uniform(1.0, 3 * DEAD_S))
        broker.process.go_on()
        await asyncio.sleep(2 * KNOWN_S)
        self._check_live("a suspension")

    async def _start_late(self) -> None:
        """Objects of live brokers are old then, and so may be that of a dead one."""
        if self.draws.random() < 0.5:
            self.world.kill(self._one())
            await asyncio.sleep(self.draws.uniform(DEAD_S, 0.8 * MEMBERSHIP.sweep_after_s))
        self.world.start(self.plan.brokers, self._settings())
        await asyncio.sleep(KNOWN_S)
        self._check_live("a late start")

    # -- what must be

    async def _until_quiet(self) -> None:
        """All agree again, when the objects of killed brokers are swept."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 3 * MEMBERSHIP.sweep_after_s
        while not all(b.is_ready and b.log._sequencer.beats.is_quiet() for b in self._brokers()):
            if loop.time() > end_s:
                self.world.bug("idle: the cluster does not become quiet")
                return
            await asyncio.sleep(0.1)
        await asyncio.sleep(self.draws.uniform(1.0, MEMBERSHIP.quiet_interval_s))

    def _check_views(self, what: str) -> None:
        for broker in self._brokers():
            if broker.log.state.seq != self.world.truth.seq:
                self.world.bug(f"idle: {broker.name} has not seen {what}")

    def _check_live(self, what: str) -> None:
        brokers = self._brokers()
        for broker in brokers:
            known = {member.address for member in broker.log._membership.others}
            live = {other.address for other in brokers if other is not broker}
            if known != live:
                known_names, live_names = sorted(known), sorted(live)
                self.world.bug(f"idle: {broker.name} knows {known_names}, not {live_names}: {what}")

    def _brokers(self) -> list[Broker]:
        return list(self.world.brokers.values())

    def _one(self) -> Broker:
        return self.draws.choice(self._brokers())

    def _name(self) -> str:
        self._topics += 1
        return f"of-idle-{self._topics}"

    async def _commit(self, broker: Broker) -> None:
        name = self._name()
        await broker.log.topics.create(name, 1, {})


def _plan(seed: int) -> Plan:
    plan = plan_of(seed * len(KINDS) + KINDS.index("brokers"))
    settings = plan.settings._replace(
        wal=plan.settings.wal._replace(bounds=Bounds(60_000, 240_000, 300_000)),
        membership=MEMBERSHIP,
        poll_interval_s=POLL_S,
        quiet_poll_s=QUIET_POLL_S,
        is_sealing=False,
    )
    return plan._replace(
        brokers=3,
        run_s=600.0,
        settings=settings,
        weather=Weather(),
        air=Air(median_s=0.002),
        producers=0,
        readers=0,
        troubles=(),
        level=format_levels.NEWEST,
        command_grace=None,
    )


def simulate_idle(seed: int, *, lines: list[str] | None = None) -> Result:
    """The run of this seed, judged."""
    with machine.quietly():
        return simulated(seed, _plan(seed), IdleRun, lines)
