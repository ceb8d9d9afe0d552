"""Many brokers under everything at once, by seed: stores that lie, messages that are lost, brokers
that are killed, frozen and asleep for longer than their view may be old. And each crash by itself,
at every millisecond of a hand-over.

What clients were told is held against the log that is there in the end (I1, I2, I3, I5, I6).
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from storage import keys
from storage.errors import CommitUnknown, LogError
from storage.log import Log
from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.cluster import Seeded as SeededNet
from tests.support.faults import Seeded
from tests.support.records import fold, tail_values
from tests.support.vloop import run

BROKERS = 4
RUN_S = 40.0


@dataclass
class Told:
    """What clients were told of each value."""

    acked: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)

    async def append(self, log: Log, value: str) -> None:
        self.open.add(value)
        try:
            (placed,) = await logs.append(log, value) or ()
            self.acked[value] = placed.base_offset
        except CommitUnknown:
            self.unknown.add(value)
        except LogError:
            self.failed.add(value)
        self.open.discard(value)  # a kill leaves it: nobody was told anything

    def check(self, found: list[str]) -> None:
        assert len(found) == len(set(found)), "nothing is doubled"
        for value, offset in self.acked.items():
            assert found[offset] == value
        assert not self.failed & set(found), "a definite no stays one"
        known = self.acked.keys() | self.failed | self.unknown | self.open
        assert set(found) <= known


async def the_log(cluster: Cluster) -> list[str]:
    for log in cluster.logs:
        await log.wal.refresh()
    state, _ = await fold(cluster.store, "c0ffee")
    assert {log.state.encode() for log in cluster.logs} == {state.encode()}
    return [
        str(value, "ascii") for value in await tail_values(cluster.store, state, "t", 0) if value
    ]


async def _produce(log: Log, told: Told, draws: random.Random, acks_seen: dict[str, int]) -> None:
    for number in range(10_000):
        value = f"{log.wal.writer}/{number}"
        await told.append(log, value)
        if value in told.acked:
            # Of one producer's acked records the offsets ascend.
            assert told.acked[value] > acks_seen.get(log.wal.writer, -1)
            acks_seen[log.wal.writer] = told.acked[value]
        await asyncio.sleep(draws.random() * 0.05)


async def _read_your_ack(cluster: Cluster, told: Told, draws: random.Random) -> None:
    while True:
        await asyncio.sleep(draws.random() * 0.2)
        if not cluster.logs or not told.acked:
            continue
        value, offset = list(told.acked.items())[-1]
        log = draws.choice(cluster.logs)
        fetching = asyncio.create_task(log.fetch("t", 0, offset, bytes_max=1))
        await asyncio.wait([fetching], timeout=10.0)
        if not fetching.done() or fetching.cancelled():
            fetching.cancel()
            continue  # frozen, or killed
        try:
            fetched = fetching.result()
        except LogError:
            continue  # its store fails now and then
        assert [piece.batch.column("value")[0].as_py() for piece in fetched.pieces] == [
            value.encode()
        ]


@pytest.mark.parametrize("seed", range(12))
def test_what_clients_were_told_is_true(seed: int) -> None:
    async def main() -> None:
        draws = random.Random(seed)
        told, acks_seen = Told(), {}
        settings = SETTINGS._replace(
            writer=SETTINGS.writer._replace(answer_timeout_s=5.0),
            wal=SETTINGS.wal._replace(
                checkpoint_entries=20, checkpoint_interval_s=0.0, view_age_max_s=60.0
            ),
        )
        producing: dict[Log, asyncio.Task[None]] = {}

        def way() -> float:
            return draws.lognormvariate(-4.0, 0.7)

        async def start() -> None:
            log = await cluster.start()
            logs.store_of(log).plan = Seeded(draws.randrange(2**32), draws.choice([0, 0.02, 0.2]))
            producing[log] = asyncio.create_task(_produce(log, told, draws, acks_seen))

        async def kill(log: Log) -> None:
            producing.pop(log).cancel()
            await cluster.kill(log)

        async with Cluster(settings, latency=lambda _: way()) as cluster:
            cluster.net.latency_s = lambda: way() / 10
            first = await cluster.start()
            await first.create_topic("t", 1, {})
            for _ in range(BROKERS):
                await start()
            reading = asyncio.create_task(_read_your_ack(cluster, told, draws))
            await cluster.settled()
            cluster.net.plan = SeededNet(draws.randrange(2**32), draws.choice([0, 0.03, 0.3]))
            loop = asyncio.get_running_loop()
            while loop.time() < RUN_S:
                await asyncio.sleep(draws.random() * 4)
                log = draws.choice(list(producing))
                match draws.randrange(5):
                    case 0:
                        await kill(log)
                        await start()
                    case 1:
                        cluster.freeze(log)
                        await asyncio.sleep(draws.random() * 8)
                        cluster.thaw(log)
                    case 2:
                        cluster.freeze(log)
                        await asyncio.sleep(draws.random() * 3)
                        log.clock.advance(100.0)  # type: ignore[attr-defined]
                        cluster.thaw(log)
                    case 3:
                        log.clock.skew_ms = draws.randrange(-(10**8), 10**8)  # type: ignore[attr-defined]
                    case _:
                        cluster.net.plan = SeededNet(
                            draws.randrange(2**32), draws.choice([0, 0.03, 0.3])
                        )
            cluster.net.plan = lambda verb, address: None
            for log in cluster.logs:
                logs.store_of(log).plan = lambda _: None
            before = len(told.acked)
            await asyncio.sleep(8.0)
            assert len(told.acked) - before > 50, "it goes on as soon as nothing fails any more"
            assert not reading.done(), reading
            for task in (reading, *producing.values()):
                task.cancel()
            await asyncio.gather(reading, *producing.values(), return_exceptions=True)
            await asyncio.sleep(5.0)  # what nobody waits for any more
            found = await the_log(cluster)
            told.check(found)
            assert len(told.acked) > 300
            entries = [info async for info in cluster.store.list(keys.WAL)]
            assert len(entries) == cluster.logs[0].state.seq

    run(main)


@pytest.mark.parametrize("who", ["sequencer", "broker"])
@pytest.mark.parametrize("span", [range(40), range(40, 80)])
def test_a_crash_at_any_moment_of_a_hand_over(who: str, span: range) -> None:
    """A hand-over takes 2 ms and 20 for the PUT; each broker has one under way all the time."""

    async def main() -> None:
        for crash_ms in span:
            told = Told()
            async with Cluster(latency=lambda _: 0.02) as cluster:
                for _ in range(3):
                    await cluster.start()
                await cluster.settled()
                await cluster.sequencer().create_topic("t", 1, {})
                for log in cluster.logs:
                    await log.wal.refresh()
                dying = cluster.sequencer() if who == "sequencer" else cluster.others()[0]

                async def produce(log: Log, told: Told = told) -> None:
                    for number in range(8):
                        await told.append(log, f"{log.wal.writer}/{number}")

                tasks = {log: asyncio.create_task(produce(log)) for log in cluster.logs}
                await asyncio.sleep(crash_ms / 1000)
                tasks.pop(dying).cancel()
                await cluster.kill(dying)
                await asyncio.gather(*tasks.values())
                assert not told.failed
                assert not told.unknown
                told.check(await the_log(cluster))

    run(main)
