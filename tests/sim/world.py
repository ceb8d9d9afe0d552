"""The world of a simulation: a bucket, brokers that live and die, a network between all of them.

Everything of tidelog is the real thing (storage.*, compaction.*): only the bucket, deltalake, the
network, clocks and threads are the world's own. The world also folds each entry as it is created:
what the chain is at this moment, even if no broker has read it (`truth`).
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import tidelog.compaction.commit_rewrites
import tidelog.compaction.garbage
import tidelog.storage.seal.uploads
import tidelog.storage.tables.delta
import tidelog.storage.write.hot_log
import tidelog.storage.write.hot_log_file
import tidelog.storage.write.set_aside_requests
from tests.sim import doubts, faults, machine
from tests.sim.history import Event, Recorder, to_line
from tests.sim.machine import Process
from tests.sim.merging import merge_for_ever
from tests.sim.network import Air, Fate, Refusal, Silence
from tests.sim.peers import Peers
from tests.sim.stores import Bucket, Tables, Way, Weather
from tests.support.clock import ManualClock
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.codec import entry as entries
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, Fenced, LogError, StoreUnfit, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.wal.wal_objects import ClusterIdentity
from tidelog.storage.write.hot_log import HotLog

DRAIN_S = 0.5
T = TypeVar("T")

CLUSTER_ID = "c0ffee"
INPUTS = "t"
"""Prefix of the names of topics that producers use."""


@dataclass(eq=False)
class Broker:
    """One life of one broker."""

    name: str
    process: Process
    clock: ManualClock
    way: Way
    address: str
    home: Path | None
    log: LogBroker = field(init=False)
    is_ready: bool = False
    is_ending: bool = False
    asked: dict["asyncio.Future[Any]", None] = field(default_factory=dict)
    files: list[tuple[int, Path]] = field(default_factory=list)
    """Descriptors and paths of hot logs that it has made, or recovers."""

    @property
    def consumers(self) -> RestGroups:
        return self.log.groups.rest

    def close_files(self) -> None:
        """Release what the operating system releases for a process that ends."""
        for fd, path in self.files:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)):  # still the same
                    os.close(fd)


class World:
    """One run. `bugs` are what no process may ever do, whatever the history says."""

    def __init__(self, seed: int, settings: LogSettings, scratch: Path | None, level: int) -> None:
        """`level`: of the format, at which the cluster begins."""
        self.draws = random.Random(seed)
        self.settings = settings
        self.scratch = scratch
        self.weather = Weather()
        self.air = Air()
        self.cut_ways: set[tuple[str, str]] = set()
        """Ways from one broker's address to another's on which no message arrives."""
        self.has_unknown_brokers = False
        """Whether brokers run that the others do not know: a copy has the id of another one. A read
        that waits may lack what it acknowledged (I3)."""
        self.merge_after_s: float | None = None
        """After this time without a look, brokers look for small segments; None: never."""
        self.loses_entries = False
        """Whether all announcements of entries are lost."""
        self.full = 0.0
        """How likely it is that a write to a local disk finds no space."""
        self.bucket = Bucket()
        self.bucket.on_created = self._created
        self.level = level
        self.truth = ClusterState(CLUSTER_ID, level, settings.wal.bounds)
        self._folded = {0: _digest(self.truth)}
        self.recorder = Recorder()
        self.brokers: dict[str, Broker] = {}
        self.on_exit: Callable[[Broker], None] = lambda broker: None
        """Called when one has ended by itself: its supervisor."""
        self.processes: list[Process] = []
        self.bugs: list[str] = []
        self.counts: dict[str, int] = {}
        self.has_damage = False
        """Whether a scrub may find damage now."""
        self.expects: Callable[[LogError], bool] = lambda error: False
        """Whether the damage that an error names is of this world."""
        self.tables = Tables(self.bucket, self.draws, lambda: self.weather, self.note)
        self.trace = hashlib.blake2b(digest_size=8)
        self.lines: list[str] | None = None
        self._context = copy_context()
        self._lives = 0

    # -- time, and what is noted

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Of the world: no process's death keeps it from happening."""
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, call, *args, context=self._context)

    def note(self, text: str) -> None:
        if self.scratch is not None:  # its name is random, and errors contain it
            text = text.replace(str(self.scratch), "scratch")
        line = f"{self.now_s:.6f} {text}"
        self.trace.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def record(self, event: Event) -> None:
        self.recorder.add(event)
        self.note(to_line(event).decode())

    def bug(self, text: str) -> None:
        self.note(f"BUG {text}")
        self.bugs.append(f"{self.now_s:.3f} s: {text}")

    def _created(self, key: str, body: bytes) -> None:
        """Extend the truth; or a suspended broker created a collected number again (DESIGN 5)."""
        seq = object_keys.seq_of(key) if key.startswith(object_keys.WAL) else None
        if seq is None:
            return
        if seq > self.truth.seq + 1:
            self.bug(f"I2: {key} is made, {self.truth.seq} was the newest")
        elif seq == self.truth.seq + 1:
            try:
                decoded = entries.decode(body, key, seq=seq, previous=self.truth.hash)
                if decoded.entry.level != self.truth.level:
                    self.count("raised")
                with machine.outside():  # the fold is not the sender's
                    self.truth.apply(decoded, key)
                self._folded[seq] = _digest(self.truth)
            except Corrupt as error:
                self.bug(f"I5: {error}")
        else:
            self.count("voids")

    def found(self) -> None:
        """Found the cluster, at the world's level; brokers found one at the newest."""
        identity = ClusterIdentity(self.level, CLUSTER_ID, 1, self.settings.wal.bounds)
        self.bucket.write(object_keys.CLUSTER, msgspec.json.encode(identity))

    def inputs(self) -> dict[str, int]:
        """The topics that there are for producers, and how many partitions each has."""
        return {
            name: len(topic.partitions)
            for name, topic in self.truth.topics.items()
            if name.startswith(INPUTS)
        }

    def check_states(self) -> None:
        """Each broker's state is what the chain was after the same entry (I4).

        How far it has come is another matter: no broker reads an entry at the moment of its
        creation.
        """
        for broker in self.ready():
            try:
                state = broker.log.state
            except Unavailable:
                continue  # half applied, and not served
            if self._folded.get(state.seq) != _digest(state):
                self.bug(f"I4: {broker.name} has another state than the chain at {state.seq}")

    # -- processes

    def process(self, name: str) -> Process:
        process = Process(name)
        self.processes.append(process)
        return process

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> Process:
        """A process that does this and ends; what it raises is a bug."""
        process = self.process(name)
        process.spawn(self.rooted(name, work))
        return process

    async def rooted(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.bug(f"{name} failed: {error!r}")
            logging.getLogger("tidelog.sim").exception("%s failed", name)

    def calm(self) -> None:
        """Let nothing fail any more, also no call that was to; suspended processes go on."""
        self.weather, self.air, self.full = Weather(), Air(), 0.0
        for broker in self.brokers.values():
            broker.way.on_put = broker.way.on_upload = None
        for process in self.processes:
            if process.is_stopped and not process.is_dead:
                process.go_on()

    def peers(self, broker: Broker) -> PeerTransport:
        """The broker's way to the others."""
        return Peers(self, broker.address)

    def way_of(self) -> Way:
        return Way(self.bucket, self.draws, lambda: self.weather, self.note, self)

    def clock(self) -> ManualClock:
        self._lives += 1
        return ManualClock(1000 + self._lives, loop_time=asyncio.get_running_loop().time)

    def start(self, slot: int, settings: LogSettings | None = None) -> Broker:
        """A broker on the machine `slot`; ready when it is."""
        clock = self.clock()
        name = f"b{slot}.{self._lives}"
        home = None if self.scratch is None else self.scratch / f"m{slot}"
        broker = Broker(name, self.process(name), clock, self.way_of(), f"http://{name}", home)
        self.brokers[broker.address] = broker
        self.note(f"start {name}")
        broker.process.spawn(self.serve(broker, self._open(broker, settings or self.settings)))
        return broker

    async def _open(self, broker: Broker, settings: LogSettings) -> LogBroker:
        return await LogBroker.open(
            broker.way,
            settings,
            clock=broker.clock,
            name=broker.name,
            cluster_id=CLUSTER_ID,
            hot_dir=broker.home,
            peers=self.peers(broker),
        )

    async def serve(self, broker: Broker, opening: Coroutine[Any, Any, LogBroker]) -> None:
        """The life of a broker, as `service.server.serve` has it."""
        try:
            broker.log = log = await opening
            await log.join(broker.address)
        except Unavailable as error:  # its supervisor starts it again
            self.note(f"{broker.name} does not start: {error}")
            self.kill(broker)
            self.on_exit(broker)
            return
        except (LogError, StoreUnfit) as error:
            self.note(f"{broker.name} does not start: {error}")
            self.kill(broker)
            if self.expects(error):
                self.on_exit(broker)
            else:
                self.bug(f"{broker.name} does not start: {error!r}")
            return
        except faults.KINDS as error:  # the process ends with it; its supervisor starts another
            if not str(error).startswith(faults.INJECTED):
                raise
            self.note(f"{broker.name} does not start: {error!r}")
            self.kill(broker)
            self.on_exit(broker)
            return
        broker.is_ready = True
        self.note(f"{broker.name} is ready")
        if self.merge_after_s is not None:
            merging = self._merge(broker, self.merge_after_s)
            broker.process.spawn(self.rooted(f"merges of {broker.name}", merging))
        try:
            await log.run_until_failed()
        except asyncio.CancelledError:
            pass  # its tasks: it closes
        except Fenced as error:
            self.note(f"{broker.name} is fenced: {error}")
            self.count("fenced")
            if not self.expects(error):
                self.bug(f"{broker.name} is fenced: {error}")
            self.end(broker)
        except Exception as error:
            self.bug(f"{broker.name} has crashed: {error!r}")
            logging.getLogger("tidelog.sim").exception("%s has crashed", broker.name)

    async def _merge(self, broker: Broker, after_s: float) -> None:
        def on_merges(merges: int) -> None:
            self.counts["merged"] = self.counts.get("merged", 0) + merges

        def on_error(error: LogError) -> None:
            if not (broker.is_ending or self.expects(error)):
                self.bug(f"merges of {broker.name} fail: {error!r}")

        await merge_for_ever(broker.log, broker.way, after_s, on_merges, on_error)

    def end(self, broker: Broker) -> None:
        """SIGTERM: it ends in its own way, if nothing kills it before it has."""
        if broker.is_ready and not broker.is_ending:
            broker.is_ending = True
            self.note(f"end {broker.name}")
            broker.process.spawn(self._close(broker))

    async def _close(self, broker: Broker) -> None:
        try:
            await broker.log.hand_over()
            await asyncio.sleep(DRAIN_S)
            broker.log.drain()
            await broker.log.close()
        except Exception as error:
            self.bug(f"{broker.name} does not close: {error!r}")
            logging.getLogger("tidelog.sim").exception("%s does not close", broker.name)
        self.kill(broker)
        self.on_exit(broker)

    def kill(self, broker: Broker) -> None:
        """SIGKILL: its connections break, its files have no owner."""
        self.note(f"kill {broker.name}")
        broker.process.kill()
        broker.close_files()
        self.brokers.pop(broker.address, None)
        for answer in broker.asked:
            self.later(self._way_s(), _give, answer, Silence(f"{broker.name} has crashed"))

    def ready(self) -> list[Broker]:
        """Those who serve, and do not end."""
        all_of_them = self.brokers.values()
        return [broker for broker in all_of_them if broker.is_ready and not broker.is_ending]

    def anyone(self) -> Broker | None:
        ready = self.ready()
        return self.draws.choice(ready) if ready else None

    async def cluster(self) -> MaintenanceSession:
        """Open a cluster for a command of compaction. Raises LogError."""
        return await MaintenanceSession.open(self.way_of(), self.clock())

    # -- the network

    def _way_s(self) -> float:
        return self.air.median_s * self.draws.lognormvariate(0.0, 0.5)

    def _fate(self) -> Fate:
        drawn, air = self.draws.random(), self.air
        if drawn < air.lost:
            return self.draws.choice([Fate.LOST, Fate.ANSWER_LOST])
        if drawn < air.lost + air.reset:
            return Fate.RESET
        return Fate.DOUBLED if drawn < air.lost + air.reset + air.doubled else Fate.GOOD

    async def ask(
        self,
        address: str,
        call: Callable[[Broker], Awaitable[T]],
        *,
        timeout_s: float = 1e6,
        is_repeatable: bool = False,
    ) -> T:
        """A request to a broker, and its answer: what `call` returns or raises there.

        Raises Refusal or Silence where the network does not bring both. `is_repeatable`: may be
        doubled.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        fate = self._fate()
        _ = self.later(self._way_s(), self._arrive, address, call, answer, fate)
        if fate is Fate.DOUBLED and is_repeatable:
            _ = self.later(self._way_s() * 20, self._arrive, address, call, answer, fate)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Silence(f"no answer from {address} after {timeout_s:g} s") from None

    def _arrive(
        self,
        address: str,
        call: Callable[[Broker], Awaitable[T]],
        answer: "asyncio.Future[T]",
        fate: Fate,
    ) -> None:
        broker = self.brokers.get(address)
        if fate is Fate.LOST:
            return
        if broker is None or not broker.is_ready:
            _ = self.later(self._way_s(), _give, answer, Refusal("connection refused"))
            return
        broker.asked[answer] = None
        if fate is Fate.RESET:
            _ = self.later(self._way_s(), _give, answer, Silence("connection reset"))
        broker.process.spawn(self._handle(broker, call, answer, fate))

    async def _handle(
        self,
        broker: Broker,
        call: Callable[[Broker], Awaitable[T]],
        answer: "asyncio.Future[T]",
        fate: Fate,
    ) -> None:
        result: T | Exception
        try:
            result = await call(broker)
        except Corrupt as error:
            if not self.expects(error):
                self.bug(f"{broker.name} finds damage: {error}")
            result = error
        except (LogError, Refusal, Silence) as error:
            result = error
        except Exception as error:
            self.bug(f"{broker.name} fails a request: {error!r}")
            logging.getLogger("tidelog.sim").exception("%s fails a request", broker.name)
            result = Silence("500")
        broker.asked.pop(answer, None)
        if fate is not Fate.ANSWER_LOST:
            _ = self.later(self._way_s(), _give, answer, result)

    # -- what is patched: all of it stands for a machine

    def _write_all(self, fd: int, body: bytes) -> None:
        """write(2) on a disk that is full now and then."""
        if self.draws.random() < self.full:
            os.write(fd, body[: self.draws.randrange(len(body))])
            raise OSError(errno.ENOSPC, "No space left on device")
        os.write(fd, body)

    @contextlib.contextmanager
    def standing_in(self, grace: Grace) -> Iterator[None]:
        """While the world runs, deltalake is ours, and hot logs that are recovered are noted.

        Times of an hour and more are in the proportion of this run's.
        """
        recover = tidelog.storage.write.hot_log_file.recover
        set_aside, make = HotLog.set_aside, HotLog._make

        def counted(hot_log: HotLog, file: Any) -> None:
            self.count("set aside")
            set_aside(hot_log, file)

        def of_broker(directory: Path, files: list[tuple[int, Path]]) -> None:
            for broker in self.brokers.values():
                if broker.home == directory:
                    broker.files += files

        def recovering(directory: Path, cluster_id: str) -> list[Any]:
            files = recover(directory, cluster_id)
            of_broker(directory, [(file.fd, file.path) for file in files])
            return files

        def making(hot_log: HotLog, path: Path, body: bytes) -> int:
            fd = make(hot_log, path, body)
            of_broker(path.parent, [(fd, path)])
            return fd

        level = logging.root.manager.disable
        told = logging.getLogger("tidelog")
        with contextlib.ExitStack() as stack:
            for module, name, value in (
                (tidelog.storage.tables.delta, "_Delta", self.tables.at),
                (tidelog.storage.write.hot_log_file, "recover", recovering),
                (tidelog.storage.write.hot_log, "write_all", self._write_all),
                (tidelog.storage.seal.uploads, "UPLOAD_AGE_MAX_S", grace.table_ms / 4000),
                (tidelog.compaction.commit_rewrites, "UPLOAD_AGE_MAX_S", grace.table_ms / 4000),
                (tidelog.compaction.garbage, "UNNAMED_MS_MIN", grace.table_ms),
                (tidelog.storage.write.set_aside_requests, "KEPT_RETRY_S", 1.0),
                (tidelog.storage.write.set_aside_requests, "ALONE_FAILURES_MAX", 2),
                (HotLog, "set_aside", counted),
                (HotLog, "_make", making),
                *doubts.noticed(self.expects, self.bug),
                *faults.fragile_calls(self.draws, lambda: self.weather, self.count),
            ):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            if self.lines is None:
                logging.disable(logging.CRITICAL)
                stack.callback(logging.disable, level)
            else:
                handler = _Lines(self.lines)
                told.addHandler(handler)
                stack.callback(told.removeHandler, handler)
                stack.callback(setattr, told, "propagate", told.propagate)
                told.propagate = False
            yield


class _Lines(logging.Handler):
    """Log lines of the processes, in the order of events."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._told = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(f"    {self.format(record)}")


def _digest(state: ClusterState) -> bytes:
    return hashlib.blake2b(state.encode(), digest_size=16).digest()


def _give(answer: "asyncio.Future[Any]", result: object) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
        answer.exception()  # its asker may be dead
    else:
        answer.set_result(result)
