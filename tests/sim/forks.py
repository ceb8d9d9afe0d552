"""A log continues from an older state, after a restore or a repair of its newest entries.

The repair gave these entries up. Producers that have their ids from later entries send on, beside
new producers.

The property (I11): no new producer gets the id of another one, of any continuation, and each batch
that is acknowledged is in the log once, at its offset. The history has the records that a
continuation got, under a topic name of its own.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tests.sim import history
from tests.sim.clients import TOPIC, Idempotent, Load, reads_of
from tests.sim.machine import Process
from tests.sim.stores import Bucket, Way
from tests.sim.world import Broker, World
from tidelog.compaction import repair_wal
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import StaleCommit
from tidelog.storage.core.log_settings import LogSettings

T = TypeVar("T")

BROKERS = 2
NEW_PRODUCERS = 2
OLD_PRODUCERS_MAX = 4
BATCHES = 2
"""Of each producer, in one continuation."""


class Returned(Idempotent):
    """A producer whose brokers are those of a continuation. `of` is its former self, if any."""

    def __init__(self, world: World, name: str, brokers: Sequence[Broker], of: Idempotent | None):
        super().__init__(world, name, Load() if of is None else of.load)
        self._brokers = brokers
        self._may_miss = of is not None
        """Whether this log may miss batches of it."""
        if of is not None:
            self.epoch, self.sequences = of.epoch, dict(of.sequences)

    def anyone(self) -> Broker | None:
        return self.world.draws.choice(self._brokers)

    async def reach(self, broker: Broker, call: Callable[[Broker], Awaitable[T]]) -> T:
        return await call(broker)

    def goes_on_after(self, error: StaleCommit) -> bool:
        """As clients do (KIP-360): with a new epoch, whose sequences begin at 0."""
        if not self._may_miss or self.epoch is None:
            return super().goes_on_after(error)
        self._may_miss = False
        self.world.count("new epochs")
        self.epoch, self.sequences = (self.epoch[0], self.epoch[1] + 1), {}
        return True


class Fork:
    """A log that continues from an older state, in a bucket of its own."""

    def __init__(self, world: World, name: str, bucket: Bucket, way: Callable[[], Way]) -> None:
        self._world = world
        self._name = name
        self._bucket = bucket
        self._way = way
        self._first = self._newest()
        """The entry from which it continues."""
        self._settings = LogSettings(is_sealing=False, is_coordinating=False)

    async def produce(self, old: Sequence[Idempotent]) -> list[Idempotent]:
        """Let producers with ids of before send on, beside new ones; return them all."""
        world, draws = self._world, self._world.draws
        brokers = [await self._broker(number) for number in range(BROKERS)]
        idle = [
            producer for producer in old if producer.epoch is not None and not producer.is_sending
        ]
        older: list[Idempotent] = [
            Returned(world, f"{self._name}.{producer.name}", brokers, producer)
            for producer in idle[-OLD_PRODUCERS_MAX:]
        ]
        new: list[Idempotent] = [
            Returned(world, f"{self._name}.n{number}", brokers, None)
            for number in range(NEW_PRODUCERS)
        ]
        partitions = brokers[0].log.state.topic(TOPIC).partitions
        ends = [partition.high_watermark for partition in partitions]
        for batch in range(BATCHES):
            for producer in draws.sample([*older, *new], len(older) + len(new)):
                number = draws.randrange(len(ends))
                values = [f"{producer.name}/{batch}.{i}" for i in range(draws.randint(1, 2))]
                if not await producer.introduce() or not await producer.send(
                    number, values, self._name
                ):
                    world.bug(f"{producer.name} gets no answer")
        world.counts["returned"] = world.counts.get("returned", 0) + len(older)
        await self._read_all(brokers[0], ends)
        for broker in brokers:
            await broker.log.close()
        return [*older, *new]

    async def lose_entries(self) -> None:
        """Lose an entry of this log, and give up all after it."""
        lost = self._world.draws.randrange(self._first + 1, self._newest())
        checkpoints = [info.key for info in self._bucket.infos(object_keys.CHECKPOINTS, "")]
        newer = [key for key in checkpoints if (object_keys.seq_of(key) or 0) > self._first]
        self._bucket.remove([object_keys.wal(lost), *newer])
        clock = self._world.clock()
        cluster = await MaintenanceSession.open(self._way(), clock, report_damage=False)
        await repair_wal.drop_after(cluster, lost - 1, self._settings.membership)
        await cluster.close()
        self._name += " repaired"
        self._first = self._newest()
        self._world.count("dropped")

    def _newest(self) -> int:
        keys = [info.key for info in self._bucket.infos(object_keys.WAL, "")]
        return max(object_keys.seq_of(key) or 0 for key in keys)

    async def _broker(self, number: int) -> Broker:
        world, name = self._world, f"{self._name}.b{number}"
        broker = Broker(name, Process(name), world.clock(), self._way(), "", None)
        broker.log = await LogBroker.open(broker.way, self._settings, clock=broker.clock, name=name)
        return broker

    async def _read_all(self, broker: Broker, starts: Sequence[int]) -> None:
        """Record in the history what the partitions have from `starts` on."""
        await broker.log.refresh()
        for number, start in enumerate(starts):
            offset, reads = start, []
            while (
                fetched := await broker.log.records.fetch(TOPIC, number, offset, bytes_max=1 << 20)
            ).pieces:
                reads += reads_of(fetched)
                offset = fetched.next_offset
            now_s = self._world.now_s
            self._world.record(history.Final(now_s, self._name, number, start, reads))
