"""Many brokers: forty simulated, and three processes on a folder, one of which is killed.

The simulated ones run the real code on virtual time, with the latencies of S3 Standard.

The simulation counts nothing but the store's and the network's time: what Python takes is in the
other parts.
"""

import asyncio
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call
from tests.support.vloop import run
from tests.tools.bench.report import Row
from tests.tools.bench.simulated_load import lognormal_s
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys

BROKERS = 40
APPENDS_PER_S = 10.0
"""Of each broker, at random moments."""
WARM_UP_S = 3.0
ACK_P50_S, ACK_P99_S, PUTS_PER_S = 0.30, 0.65, 30.0

LATENCIES_MS = {
    ("create", object_keys.DATA): (80, 350),
    ("create", object_keys.WAL): (30, 150),
    ("get_range", ""): (15, 80),
    ("get", ""): (15, 80),
    ("", ""): (30, 150),
}
"""p50 and p99 by verb and prefix, the first that fits."""


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    seconds = 6.0 if is_quick else 20.0
    rows = simulated(seconds, handover_bytes_max=0, what="every flush uploaded first")
    rows += simulated(seconds, handover_bytes_max=1 << 20, what="flushes handed over")
    return rows


def simulated(seconds: float, *, handover_bytes_max: int, what: str) -> list[Row]:
    durations_s, puts, commits = run(lambda: _simulate(seconds, handover_bytes_max))
    name = f"{BROKERS} brokers, {what}"
    p50, p99 = (statistics.quantiles(durations_s, n=100)[rank - 1] for rank in (50, 99))
    note = f"simulated S3 Standard, {len(durations_s) / seconds:.0f} appends/s"
    return [
        Row("brokers", f"{name}: ack p50", p50, "s", ACK_P50_S, note=note, is_smaller_better=True),
        Row("brokers", f"{name}: ack p99", p99, "s", ACK_P99_S, is_smaller_better=True),
        Row(
            "brokers",
            f"{name}: commit PUTs of the cluster",
            puts / seconds,
            "PUT/s",
            PUTS_PER_S,
            note=f"{puts / commits:.2f} a commit",
            is_smaller_better=True,
        ),
    ]


def latency_of(draws: random.Random) -> Callable[[Call], float]:
    """Seconds of each call, log-normal."""

    def draw(call: Call) -> float:
        p50, p99 = next(
            ms
            for (verb, prefix), ms in LATENCIES_MS.items()
            if call.verb.startswith(verb) and call.key.startswith(prefix)
        )
        return lognormal_s(draws, p50, p99)

    return draw


async def _simulate(seconds: float, handover_bytes_max: int) -> tuple[list[float], int, int]:
    draws = random.Random(1)
    durations_s: list[float] = []
    settings = SETTINGS._replace(
        membership=SETTINGS.membership._replace(heartbeat_interval_s=5.0, member_timeout_s=15.0),
        sequencer=SETTINGS.sequencer._replace(
            handover_timeout_s=1.0, handover_bytes_max=handover_bytes_max
        ),
    )
    loop = asyncio.get_running_loop()
    async with Cluster(settings, latency=latency_of(draws)) as cluster:
        await asyncio.gather(*(cluster.start() for _ in range(BROKERS)))
        await cluster.settled()
        first = cluster.sequencer()
        await first.topics.create("t", 6, {})
        for log in cluster.logs:
            await log._log.wal.refresh()
        start_s = loop.time() + WARM_UP_S

        async def one(log: Broker) -> None:
            asked_s = loop.time()
            await logs.append(log, "x" * 100, partition=draws.randrange(6))
            if asked_s >= start_s:
                durations_s.append(loop.time() - asked_s)

        async def produce(log: Broker) -> None:
            async with asyncio.TaskGroup() as group:
                while loop.time() < start_s + seconds:
                    _ = group.create_task(one(log))
                    await asyncio.sleep(draws.expovariate(APPENDS_PER_S))

        producing = [asyncio.create_task(produce(log)) for log in cluster.logs]
        await asyncio.sleep(WARM_UP_S)
        old_counts = [_counted(log) for log in cluster.logs]
        await asyncio.sleep(seconds)
        new_counts = [_counted(log) for log in cluster.logs]
        await asyncio.gather(*producing)
        puts, commits = (
            sum(b[i] - a[i] for a, b in zip(old_counts, new_counts, strict=True)) for i in (0, 1)
        )
        for log in cluster.logs:
            await log._log.wal.refresh()
        assert len({log.state.hash for log in cluster.logs}) == 1
    return durations_s, puts, commits


def _counted(log: Broker) -> tuple[int, int]:
    return log._log.wal.counters.puts, log._log.wal.counters.entries_committed
