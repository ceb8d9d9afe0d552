"""Brokers are cloned while they work, with their memory and their hot log; both continue.

Others are restored from an earlier snapshot of the machine, after the process has ended.

The property: nothing acknowledged is lost, nothing is there twice; of two processes with one name
the WAL knows at most one in the end, because the other one finds an entry that it did not write
and stops; all other brokers go on (DESIGN 11). Requests with acks=1 are on both disks. No two
producers get one id (I11).
"""

import asyncio
import copy
import fcntl
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.sim import machine
from tests.sim.clients import TOPIC, Newcomers, Producer, Reader, Witness
from tests.sim.finish import finish
from tests.sim.history import Written
from tests.sim.peers import Peers
from tests.sim.plans import Plan, plan_of
from tests.sim.runs import Result, Run, simulated
from tests.sim.world import Broker, World
from tests.support.clock import ManualClock
from tidelog.storage.broker import NO_OBSERVER
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import Fenced, LogError
from tidelog.storage.state.access import all_topics
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.moments import Moment
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.wal.view import Subscriber, WalView
from tidelog.storage.wal.wal_objects import ClusterIdentity, WalObjects
from tidelog.storage.write.hot_log import HotLog, _LogFile
from tidelog.storage.write.requests import AppendRequest

KINDS = (0, 4)  # worlds of brokers, and of disks: seed % 5
NEWCOMERS = frozenset({0, 1, 3})
"""Worlds with idempotent producers that come and go: seed % 5. Failed seeds are of the others."""
CLONES_MAX = 3
FIRST_SLOT = 10
"""Machines of clones are numbered from here on."""
CALM_S = 90.0


class Disk(NamedTuple):
    """The hot log of a process, in its memory and on the machine's disk."""

    log_id: str
    next_number: int
    generation: int
    is_marked: bool
    files: dict[str, bytes]
    lasts: dict[str, int]
    """The highest number in each file of this process, by name."""
    pending: list[AppendRequest]
    """Acknowledged, and not committed yet."""


class Snapshot(NamedTuple):
    """A machine at one moment: the state of a broker, its names and numbers, and its disk.

    Requests of clients are not in it: their connections break.
    """

    of: Broker
    cluster: ClusterIdentity
    writer: str
    state: bytes
    moment: Moment
    puts: dict[bytes, tuple[int, int]]
    me: Member
    number: int
    ids: int
    kafka: dict[str, Any]
    """The memory of its Kafka log."""
    taken_s: float
    disk: Disk | None


def snapshot_of(broker: Broker, now_s: float) -> Snapshot:
    log = broker.log
    return Snapshot(
        broker,
        log._log.wal.cluster,
        log._log.wal.writer,
        log._log.wal._state.encode(),
        log._log.wal._freshness.moment,
        dict(log._log.wal.clone_fence._puts),
        log._membership.me,
        log._sequencer._number,
        broker.clock._ids,
        {
            name: copy.copy(value)
            for name, value in vars(log.kafka).items()
            if name not in {"_log", "_records"}
        },
        now_s,
        None if log._log.writer.hot_log is None else _disk_of(log, log._log.writer.hot_log),
    )


def _disk_of(log: LogBroker, hot_log: HotLog) -> Disk:
    files = {path.name: path.read_bytes() for path in hot_log.directory.glob("*.hot")}
    ours = [*hot_log._full, *([] if hot_log._file is None else [hot_log._file])]
    pending = [request for request in log._log.writer._waiters._waiters if request.hot is not None]
    return Disk(
        hot_log.log_id,
        hot_log._next,
        hot_log._generation,
        hot_log.is_marked,
        files,
        {file.path.name: file.last for file in ours},
        sorted(pending, key=lambda request: request.hot.seq if request.hot else 0),
    )


class CloneRun(Run):
    """A world whose machines are cloned, and restored from snapshots."""

    def __init__(self, seed: int, plan: Plan, world: World) -> None:
        super().__init__(seed, plan, world)
        self._slots = FIRST_SLOT
        self._snapshot: Snapshot | None = None
        self.cloned: set[str] = set()
        """The names in the WAL of processes that have a copy."""
        world.expects = self._expects
        world.has_unknown_brokers = True

    def _expects(self, error: LogError) -> bool:
        return isinstance(error, Fenced) and any(name in str(error) for name in self.cloned)

    async def main(self) -> None:
        world, plan = self.world, self.plan
        await self._begin()
        for number in range(plan.readers):
            self._client(Reader(world, f"r{number}", plan.load))
        self._client(Witness(world, "w", plan.load))
        if self.seed % 5 in NEWCOMERS:
            self._client(Newcomers(world, "k", plan.load))
        while world.now_s < plan.run_s:
            await asyncio.sleep(self.draws.expovariate(1 / plan.trouble_s))
            match self.draws.random():
                case drawn if drawn < 0.25:
                    self._clone_one()
                case drawn if drawn < 0.45:
                    self._take_or_restore()
                case _:
                    self._trouble(self.draws.choice(plan.troubles))
            world.check_states()
        self.is_over = True
        await self._settle()
        await finish(self)

    # -- copies

    def _clone_one(self) -> None:
        ready = self.world.ready()
        if self._slots < FIRST_SLOT + CLONES_MAX and ready:
            broker = self.draws.choice(ready)
            if broker.process.is_stopped:
                return
            self.world.count("clones")
            self.start_copy(snapshot_of(broker, self.world.now_s), self._slots)
            self._slots += 1

    def _take_or_restore(self) -> None:
        """Restore the machine of a snapshot, or take one.

        Restore it if its process has ended and left nothing that only its disk has.
        """
        ready, snapshot = self.world.ready(), self._snapshot
        if snapshot is None:
            if ready and not (broker := self.draws.choice(ready)).process.is_stopped:
                self._snapshot = snapshot_of(broker, self.world.now_s)
            return
        if self._slots == FIRST_SLOT + CLONES_MAX:
            return
        disk = snapshot.of.home
        if snapshot.of.address not in self.world.brokers and not _files(disk):
            self.world.count("restored")
            self._snapshot = None
            self.start_copy(snapshot, self._slots)
            self._slots += 1

    def start_copy(self, snapshot: Snapshot, slot: int) -> Broker:
        """Let a machine continue from the snapshot."""
        world = self.world
        clock = ManualClock(snapshot.of.clock.name, loop_time=asyncio.get_running_loop().time)
        clock.skew_ms = snapshot.of.clock.skew_ms
        clock._ids = snapshot.ids
        clock.name += 1000 * slot  # the ids that copies draw differ: see DESIGN 11
        clock.miss(world.now_s - snapshot.taken_s)
        clock.skew_ms -= int((world.now_s - snapshot.taken_s) * 1000)
        world._lives += 1
        name = f"b{slot}.{world._lives}"
        home = None if world.scratch is None else world.scratch / f"m{slot}"
        copy_ = Broker(name, world.process(name), clock, world.way_of(), f"http://{name}", home)
        copy_.way.seen_ms = snapshot.of.way.seen_ms
        world.brokers[copy_.address] = copy_
        self.cloned.add(snapshot.writer)
        world.note(f"copy {name} of {snapshot.of.name} at {snapshot.taken_s:.3f}")
        copy_.process.spawn(world.serve(copy_, self._continued(copy_, snapshot)))
        return copy_

    async def _continued(self, broker: Broker, snapshot: Snapshot) -> LogBroker:
        settings = self._settings()
        objects = WalObjects(broker.way, broker.clock)
        wal = WalView(objects, snapshot.cluster, snapshot.writer, settings.wal)
        wal._state = ClusterState.decode(snapshot.state, "memory", snapshot.cluster.bounds)
        wal._freshness.moment = snapshot.moment
        wal.clone_fence._puts = dict(snapshot.puts)
        if broker.home is not None:
            broker.home.mkdir(exist_ok=True)
        peers = Peers(self.world, broker.address)
        name = snapshot.of.name
        log = LogBroker(wal, settings, name, broker.home, peers, NO_OBSERVER, all_topics)
        log._membership.me = snapshot.me
        log._sequencer._number = snapshot.number
        vars(log.kafka).update(copy.deepcopy(snapshot.kafka))
        pending: list[AppendRequest] = []
        if snapshot.disk is not None and broker.home is not None:
            pending = [copy.copy(request) for request in snapshot.disk.pending]
            assert log._log.writer.hot_log is not None
            broker.files += _fill(log._log.writer.hot_log, broker.home, snapshot.disk)

        async def loaded(
            subscribers: Iterable[Subscriber] = (), tail_objects: TailObjects | None = None
        ) -> None:
            """It continues with the state in its memory."""
            wal.subscribers = list(subscribers)
            wal._tail_objects = tail_objects

        wal.load = loaded  # type: ignore[method-assign]
        await log._start(None)
        for waiter in log._log.writer.recover(pending):
            waiter.add_done_callback(lambda future: future.cancelled() or future.exception())
        return log

    # -- the end

    async def _settle(self) -> None:
        """Nothing fails any more: of each name in the WAL, one process is left."""
        world = self.world
        world.calm()
        until_s = world.now_s + CALM_S
        round_ = 0
        while True:
            for slot in [*range(self.plan.brokers), *range(FIRST_SLOT, self._slots)]:
                self._start(slot)
            await asyncio.sleep(2.0)
            names = Counter(broker.log._log.wal.writer for broker in world.ready())
            is_alone = all(count == 1 for count in names.values())
            if is_alone and len(world.ready()) >= self.plan.brokers + self._slots - FIRST_SLOT:
                return
            if world.now_s > until_s:
                world.bug(f"of each process there should be one: {names}")
                return
            for broker in world.ready():
                round_ += 1
                producer = Producer(world, f"settle{round_}", self.plan.load)
                await producer.once([Written(TOPIC, f"settle/{round_}", 0)], broker=broker)


def _files(home: Path | None) -> list[Path]:
    return [] if home is None else list(home.glob("*.hot"))


def _fill(hot_log: HotLog, home: Path, disk: Disk) -> list[tuple[int, Path]]:
    """Copy the disk, and continue the log there with the next file.

    Return the locked files: a kill of the process has to close them, or no later process can
    recover them.
    """
    locked: list[tuple[int, Path]] = []
    hot_log.log_id, hot_log._next = disk.log_id, disk.next_number
    hot_log._generation, hot_log.is_marked = disk.generation, disk.is_marked
    for name, body in disk.files.items():
        path = home / name
        path.write_bytes(body)
        if name in disk.lasts:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
            hot_log._full.append(_LogFile(path, fd, len(body), disk.lasts[name]))
            locked.append((fd, path))
    hot_log._full.sort(key=lambda file: file.last)
    return locked


def plan_of_clones(seed: int) -> Plan:
    plan = plan_of(seed // 2 * 5 + KINDS[seed % 2])
    troubles = [trouble for trouble in plan.troubles if trouble not in {"upgrade", "days", "full"}]
    return plan._replace(
        level=format_levels.NEWEST,
        brokers=max(plan.brokers, 1 + seed // 2 % 2),
        troubles=tuple(troubles),
        weather=plan.weather._replace(raises=0.0, refused_part=b""),
        trouble_s=min(plan.trouble_s, 2.0),
    )


def simulate_clones(seed: int, lines: list[str] | None = None) -> Result:
    """A run with cloned machines."""
    with machine.quietly():
        return simulated(seed, plan_of_clones(seed), CloneRun, lines)
