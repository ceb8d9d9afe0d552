"""The acts of clients, sealer and collection, from rest to rest.

An act begins when all are at rest. First, without choices, crashed brokers are replaced and all
brokers list each other. Then its requests run at once, in any order.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple

from tests.explore.stage import Stage
from tests.explore.world import COLLECTOR, NEVER_S, WAL_S, ExploredWorld
from tests.sim import history
from tests.sim.clients import TOPIC, Client, Load, Producer, reads_of
from tests.sim.finish import read_back, scan, scrub_all
from tests.sim.history import Written
from tests.sim.machine import Process
from tests.sim.network import Refusal, Silence
from tests.sim.world import Broker
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, OffsetOutOfRange, Unavailable
from tidelog.storage.records import FetchResult

ACT_S = 6.0
"""Acts begin at multiples of this time, so that ages do not depend on choices."""
PATIENCE_S = 1.2
GRACE = Grace(table_ms=60_000)
"""Of files, as the cluster's. For the WAL a collector has none of its own: the cluster's counts."""
CONFIGS = {"target.segment.bytes": "100000"}


class Cast:
    """The processes of one run: brokers by slot, and what each act begins."""

    def __init__(self, world: ExploredWorld, brokers: int, partitions: int) -> None:
        self.world = world
        self.partitions = partitions
        self.load = Load(partitions=partitions, patience_s=PATIENCE_S)
        self.slots = dict[int, Broker]()
        self.brokers = brokers
        self.ends = 0
        """Of produce requests: each goes to another partition than the one before."""
        self._playing: list[tuple[Process, list[bool], int]] = []

    @property
    def stage(self) -> Stage:
        return self.world.stage

    def is_over(self) -> bool:
        return all(
            ends or process.is_dead or process.is_stopped or self._is_suspended(slot)
            for process, ends, slot in self._playing
        )

    def _is_suspended(self, slot: int) -> bool:
        return slot >= 0 and self.slots[slot].process.is_stopped

    def begin(self, name: str, work: Coroutine[object, object, None], slot: int = -1) -> None:
        """`slot` is of the broker for whose answer it waits, however long that is suspended."""
        ends: list[bool] = []

        async def whole() -> None:
            await work
            ends.append(True)

        self._playing.append((self.world.spawn(name, whole()), ends, slot))

    async def found(self) -> None:
        """The brokers and the topic."""
        await self.replace()
        maker = self.slots[0]
        await self.world.ask(
            maker.address, lambda broker: broker.log.topics.create(TOPIC, self.partitions, CONFIGS)
        )
        self.world.record(history.Topic(0.0, TOPIC, self.partitions))
        for broker in self.slots.values():
            await self.world.ask(broker.address, lambda broker: broker.log._log.wal.refresh())

    async def replace(self) -> None:
        """Start a broker for each crashed one, and let all list each other.

        The last one is the sequencer of the first ones only if its rank says so.
        """
        world = self.world
        for slot in range(self.brokers):
            broker = self.slots.get(slot)
            if broker is None or broker.process.is_dead:
                if broker is not None and hasattr(broker, "log"):
                    world.bucket.remove([object_keys.broker(broker.log._membership.me.id)])
                self.slots[slot] = world.start(slot)
                while not self.slots[slot].is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        for broker in self.slots.values():
            if not broker.process.is_stopped:
                looking = broker.process.spawn(broker.log._membership.look())
                await looking

    async def rest(self) -> None:
        """Wait until the next act begins."""
        now_s = self.world.now_s
        await asyncio.sleep((now_s // ACT_S + 1) * ACT_S - now_s)

    # -- what an act begins

    def produce(self, slot: int, *, is_keyed: bool) -> None:
        """One request.

        With a key it is retried at the next broker, and once more; without one, the client waits
        for its answer.
        """
        number, self.ends = self.ends, self.ends + 1
        patience_s = PATIENCE_S if is_keyed else NEVER_S
        producer = Producer(self.world, f"p{number}", self.load._replace(patience_s=patience_s))
        records = [
            Written(TOPIC, f"{number}.{i}", (number + i) % self.partitions) for i in range(2)
        ]

        async def retried() -> None:
            for attempt in range(3):
                broker = self.slots[(slot + attempt) % self.brokers]
                if await producer.once(records, key=f"k{number}", broker=broker):
                    break

        async def once() -> None:
            await producer.once(records, broker=self.slots[slot])

        if is_keyed:
            self.begin(producer.name, retried())
        else:
            self.begin(producer.name, once(), slot)

    def ask(self, name: str, slot: int, call: Callable[[Broker], Awaitable[object]]) -> None:
        async def work() -> None:
            try:
                await self.world.ask(self.slots[slot].address, call, timeout_s=PATIENCE_S)
            except (LogError, Refusal, Silence) as error:
                self.world.note(f"{name}: {error!r}")

        self.begin(name, work())

    def seal(self, slot: int) -> None:
        self.ask(f"seal{slot}", slot, lambda broker: broker.log.records.seal(TOPIC))

    def fetch(self, slot: int, number: int) -> None:
        """Read the partition from the first offset to its end."""
        client = Client(self.world, f"f{slot}", self.load)

        async def work() -> None:
            offset, broker = 0, self.slots[slot]
            while True:
                op = client.begin(
                    history.Fetch, client.name, TOPIC, number, offset, broker=broker.name
                )
                fetch_offset = offset

                async def fetch(broker: Broker, fetch_offset: int = fetch_offset) -> FetchResult:
                    return await broker.log.records.fetch(
                        TOPIC, number, fetch_offset, bytes_max=1 << 20
                    )

                try:
                    result = await client.ask(op, broker, fetch)
                except OffsetOutOfRange as error:
                    client.end(history.OutOfRange, op, error.log_start_offset, error.high_watermark)
                    return
                if result is None:
                    return
                reads, start, end = reads_of(result), result.log_start_offset, result.high_watermark
                client.end(history.Fetched, op, reads, result.next_offset, start, end, broker.name)
                if result.next_offset == offset:
                    return
                offset = result.next_offset

        self.begin(f"f{slot}", work())

    def collect(self) -> None:
        async def work() -> None:
            try:
                cluster = await self.world.cluster()
                await collect(cluster, await plan(cluster, GRACE))
                await cluster.close()
            except LogError as error:
                self.world.note(f"collector: {error!r}")

        self.begin(COLLECTOR, work())

    async def grow_old(self) -> None:
        """Write a checkpoint, let the WAL's retention pass, write another entry and checkpoint.

        Objects that the first one covers and no tail needs are garbage now. Brokers poll, as idle
        ones do: only suspended ones have expired views.
        """
        await self._commit_and_checkpoint()
        await asyncio.sleep(WAL_S + 1.0)
        await self._commit_and_checkpoint()
        await self.rest()

    async def _commit_and_checkpoint(self) -> None:
        async def commit(broker: Broker) -> None:
            await broker.log.topics.alter(TOPIC, {"segment.ms": str(10**9 + broker.log.state.seq)})
            await broker.log._log.wal.checkpoint()

        awake = [broker for broker in self.slots.values() if not broker.process.is_stopped]
        for broker in awake:
            await self.world.ask(broker.address, lambda broker: broker.log._log.wal.refresh())
        if awake:
            await self.world.ask(awake[-1].address, commit)

    async def recover(self) -> None:
        """Nothing fails any more: suspended processes go on, crashed ones are replaced.

        Each broker takes a record and seals, and all read the same log.
        """
        world = self.world
        self.stage.wake()
        await asyncio.sleep(2.0)
        await self.replace()
        for slot, broker in self.slots.items():
            producer = Producer(world, f"last{slot}", self.load)
            record = Written(TOPIC, f"last.{slot}", 0)
            if not await producer.once([record], key=f"last{slot}", broker=broker):
                again = await producer.once([record], key=f"last{slot}", broker=broker)
                if not again:
                    world.bug(f"{broker.name} takes no record any more")
        # Before the seal: that may write what only the caches of a broker still have.
        fresh = await read_back(world, world.settings)
        for broker in self.slots.values():
            await self._seal_at_last(broker)
        scan(world)
        if fresh is not None:
            await scrub_all(world, GRACE)

    async def _seal_at_last(self, broker: Broker) -> None:
        """A conflict with another sealer, or files that it replaces, may take one more."""
        for remaining_tries in (2, 1, 0):
            try:
                await self.world.ask(broker.address, lambda broker: broker.log.records.seal(TOPIC))
                break
            except Unavailable as error:
                if not remaining_tries:
                    self.world.bug(f"{broker.name} seals no more: {error}")


class Act(NamedTuple):
    """Requests that begin at once."""

    name: str
    begin: Callable[[Cast], None]
    has_deletes: bool = False
    may_suspend: bool = False
    grows_old: bool = False
    wakes: bool = False


class Script(NamedTuple):
    """A world and its acts."""

    name: str
    brokers: int
    partitions: int
    acts: tuple[Act, ...]


def _commit(cast: Cast) -> None:
    cast.produce(0, is_keyed=False)
    cast.produce(1, is_keyed=False)


def _seal(cast: Cast) -> None:
    cast.seal(0)
    cast.produce(1, is_keyed=True)


def _seal_twice(cast: Cast) -> None:
    cast.seal(0)
    cast.seal(1)
    cast.produce(1, is_keyed=True)


def _collect(cast: Cast) -> None:
    cast.collect()
    cast.produce(0, is_keyed=False)
    cast.fetch(1, 0)


def _collect_alone(cast: Cast) -> None:
    cast.collect()
    cast.produce(0, is_keyed=False)


def _after(cast: Cast) -> None:
    cast.produce(1, is_keyed=True)
    cast.fetch(1, 0)


def _commit_of_three(cast: Cast) -> None:
    _commit(cast)
    cast.produce(2, is_keyed=True)


_ACTS = (
    Act("commit", _commit, may_suspend=True),
    Act("seal", _seal, may_suspend=True),
    Act("collect", _collect_alone, has_deletes=True, may_suspend=True, grows_old=True),
    Act("after", _after, wakes=True),
)
SCRIPTS = {
    script.name: script
    for script in (
        Script("commit", 2, 1, (_ACTS[0], _ACTS[3])),
        Script("three", 3, 1, (Act("commit", _commit_of_three, may_suspend=True),)),
        Script("small", 2, 1, _ACTS),
        Script(
            "large",
            2,
            2,
            (
                _ACTS[0],
                _ACTS[1]._replace(begin=_seal_twice),
                _ACTS[2]._replace(begin=_collect),
                _ACTS[3],
            ),
        ),
    )
}
