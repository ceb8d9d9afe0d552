"""Many brokers in one event loop: a store they share, and a network that loses, delays, freezes.

async with Cluster() as cluster:
    first, second = await cluster.start(), await cluster.start()
    await cluster.settled()             # all see each other
    cluster.net.plan = ...              # what goes wrong between them
"""

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import logs
from tests.support.clock import ManualClock
from tests.support.faults import Call, FaultyStore
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import Member, MembershipSettings
from tidelog.storage.cluster.messages import ForwardOutcomeUnknown, ForwardRefused
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.store.memory import MemoryStore

SETTINGS = LogSettings(
    is_sealing=False,
    is_coordinating=False,
    membership=MembershipSettings(heartbeat_interval_s=1.0, member_timeout_s=3.0),
    sequencer=SequencerSettings(handover_timeout_s=0.5),
)
FROZEN_S = 1e6


class TimedStore(MemoryStore):
    """Its clock is the loop's, and the time for which all machines were suspended."""

    suspended_ms = 0

    @property
    def now_ms(self) -> int:
        return TIME_MS + self.suspended_ms + int(asyncio.get_running_loop().time() * 1000)

    @now_ms.setter
    def now_ms(self, value: int) -> None:
        pass


class Broken(enum.Enum):
    """The fate of one message."""

    REFUSED = "refused"  # no process listens there
    LOST = "lost"  # it never arrives, and nothing comes back
    ANSWER_LOST = "answer lost"  # it arrives, and nothing comes back
    RESET = "reset"  # it arrives, and the connection breaks before the answer


class Net:
    """Between brokers, by address."""

    def __init__(self) -> None:
        self.brokers: dict[str, Broker] = {}
        self.frozen: set[str] = set()
        self.cut: set[str | tuple[str, str]] = set()
        """Addresses that nothing comes to or from, and ways from one address to another."""
        self.plan: Callable[[str, str], Broken | None] = lambda verb, address: None
        self.latency_s: Callable[[], float] = lambda: 0.001
        self.messages: list[tuple[str, str]] = []
        self.tasks: set[asyncio.Task] = set()

    async def call(self, verb: str, peer: Member, message: bytes) -> bytes:
        self.messages.append((verb, peer.address))
        broken = self.plan(verb, peer.address)
        await asyncio.sleep(self.latency_s())
        if broken is Broken.REFUSED or peer.address not in self.brokers:
            raise ForwardRefused("connection refused")
        if broken is Broken.LOST:
            await asyncio.sleep(FROZEN_S)
        await self.thawed(peer.address)
        # A task of its own: the other side does not end because we hang up.
        task = asyncio.create_task(self._handle(verb, self.brokers[peer.address], message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if broken is Broken.RESET:
            await asyncio.sleep(self.latency_s())
            raise ForwardOutcomeUnknown("connection reset")
        answer = await asyncio.shield(task)
        if broken is Broken.ANSWER_LOST:
            await asyncio.sleep(FROZEN_S)
        await asyncio.sleep(self.latency_s())
        await self.thawed(peer.address)
        if peer.address not in self.brokers:
            raise ForwardOutcomeUnknown("connection reset")
        return answer

    async def thawed(self, address: str) -> None:
        while address in self.frozen:  # noqa: ASYNC110 - virtual time: polling is free
            await asyncio.sleep(0.05)

    async def _handle(self, verb: str, broker: Broker, message: bytes) -> bytes:
        if verb == "hand_over":
            return await broker._sequencer.on_forward(message)
        if verb == "read":
            return await broker.cluster.read_object(message)
        return broker._sequencer.on_announcements(message)


class Peers:
    """One broker's way into the net."""

    def __init__(self, net: Net, address: str) -> None:
        self.net = net
        self.address = address

    async def forward(self, peer: Member, message: bytes) -> bytes:
        self._check(peer)
        return await self.net.call("hand_over", peer, message)

    async def announce(self, peer: Member, message: bytes) -> bytes:
        self._check(peer)
        try:
            return await self.net.call("tell", peer, message)
        except Corrupt as error:
            raise ForwardOutcomeUnknown(str(error)) from error

    async def read_object(self, peer: Member, message: bytes) -> bytes:
        self._check(peer)
        return await self.net.call("read", peer, message)

    def _check(self, peer: Member) -> None:
        cut = self.net.cut
        if {self.address, peer.address} & cut or (self.address, peer.address) in cut:
            raise ForwardRefused("no route")


class Cluster:
    """Brokers that share a store. Brokers that still run at the end are closed."""

    def __init__(
        self,
        settings: LogSettings = SETTINGS,
        *,
        latency: Callable[[Call], float] | None = None,
    ) -> None:
        self.settings = settings
        self.latency = latency
        self.store = TimedStore()
        self.net = Net()
        self.logs: list[Broker] = []
        self._started = 0

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.net.plan = lambda verb, address: None
        self.net.frozen.clear()
        for log in self.logs:
            logs.store_of(log).plan = lambda _: None
        for log in list(self.logs):
            await self.stop(log)
        for task in list(self.net.tasks):
            task.cancel()
        await asyncio.gather(*self.net.tasks, return_exceptions=True)

    async def start(
        self, *, hot_dir: Path | None = None, zone: str = "", **replaced: Any
    ) -> Broker:
        """One more broker, joined."""
        self._started += 1
        number = self._started
        clock = ManualClock(1000 + number, loop_time=asyncio.get_running_loop().time)
        store = FaultyStore(self.store, latency=self.latency)
        settings = self.settings._replace(**replaced)
        address = f"http://b{number}"
        log = await Broker.open(
            store,
            settings,
            clock=clock,
            name=f"b{number}",
            cluster_id="c0ffee",
            hot_dir=hot_dir,
            peers=Peers(self.net, address),
        )
        self.net.brokers[address] = log
        await log.join(address, zone=zone)
        self.logs.append(log)
        return log

    async def settled(self) -> None:
        """Every broker has looked at the others."""
        await asyncio.sleep(2 * self.settings.membership.heartbeat_interval_s)

    def sequencer(self) -> Broker:
        """The one that all of them take for it."""
        (first,) = {log._membership.ranking[0].id for log in self.logs}
        return next(log for log in self.logs if log._membership.me.id == first)

    def others(self) -> list[Broker]:
        return [log for log in self.logs if log is not self.sequencer()]

    async def kill(self, log: Broker) -> None:
        """SIGKILL: connections break, nothing of it has an effect any more."""
        self.logs.remove(log)
        del self.net.brokers[log._membership.me.address]
        drain = log._sequencer._drain
        if drain is not None:
            drain.cancel()
        await log._sequencer.announcer.close()
        await logs.kill(log)
        if drain is not None:
            await asyncio.gather(drain, return_exceptions=True)

    async def stop(self, log: Broker) -> None:
        """SIGTERM."""
        log.drain()
        await log.close()
        self.logs.remove(log)
        del self.net.brokers[log._membership.me.address]

    def freeze(self, log: Broker) -> None:
        """SIGSTOP, as far as others can tell: neither its messages nor its requests move."""
        self.net.frozen.add(log._membership.me.address)
        store = logs.store_of(log)
        store.freeze()

    def thaw(self, log: Broker) -> None:
        self.net.frozen.discard(log._membership.me.address)
        logs.store_of(log).thaw()
