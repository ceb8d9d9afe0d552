"""A cluster under a load of many MB/s, simulated: the real code in virtual time.

    measured = simulate(Load(brokers=3, mb_s=450))

A byte here stands for SCALE bytes: of records, of each bound in bytes, of what a PUT takes. A call
of the store takes a lognormal time; a create also takes the time of its bytes on one connection.
The time of the CPU does not count.
"""

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call
from tests.support.vloop import run
from tidelog.service.telemetry.store_costs import GET_USD, MONTH_S, PUT_USD
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.log_settings import (
    LogSettings,
    PaceSettings,
    SequencerSettings,
    WriterSettings,
)

Settings = TypeVar("Settings", WriterSettings, SequencerSettings)

SCALE = 100
WARM_UP_S = 3.0
RECORD_OVERHEAD_BYTES = 24
MB = 1_000_000


class Latencies(NamedTuple):
    """The times of a store: p50 and p99 in ms, and the bytes/s of one connection's PUT."""

    write_ms: tuple[float, float]
    read_ms: tuple[float, float]
    bytes_s: float


FAST = Latencies((30, 150), (15, 80), 80e6)
"""S3 Standard as part `brokers` has it."""
SLOW = Latencies((100, 195), (63, 78), 80e6)
"""S3 Standard as turbopuffer publishes it."""


class Load(NamedTuple):
    """A cluster, and the records that its clients produce: `mb_s` in all, of 10^6 bytes."""

    brokers: int
    mb_s: float
    seconds: float = 10.0
    partitions: int = 6
    request_bytes: int = MB
    pace: PaceSettings = PaceSettings()
    latencies: Latencies = FAST

    @property
    def requests_s(self) -> float:
        return self.mb_s * MB / self.request_bytes


class Measured(NamedTuple):
    """The outcome of a load; requests to the store are those of all brokers in a second."""

    mb_s: float
    ack_p50_s: float
    ack_p99_s: float
    commits_s: float
    uploads_s: float
    reads_s: float
    entries_s: float
    chunks_s: float
    failed: int

    @property
    def puts_a_gb(self) -> float:
        return (self.commits_s + self.uploads_s) / self.mb_s * 1000

    @property
    def usd_a_gb(self) -> float:
        return self.puts_a_gb * PUT_USD + self.reads_s / self.mb_s * 1000 * GET_USD

    @property
    def usd_a_month(self) -> float:
        """The price of commits, uploads and reads; what an idle cluster costs comes on top."""
        puts_s = self.commits_s + self.uploads_s
        return (puts_s * PUT_USD + self.reads_s * GET_USD) * MONTH_S


def lognormal_s(draws: random.Random, p50_ms: float, p99_ms: float) -> float:
    """Draw seconds of a lognormal distribution with these percentiles."""
    sigma = math.log(p99_ms / p50_ms) / statistics.NormalDist().inv_cdf(0.99)
    return draws.lognormvariate(math.log(p50_ms / 1000), sigma)


def simulate(
    load: Load, change: Callable[[LogSettings], LogSettings] = lambda settings: settings
) -> Measured:
    """Run the load; `change` alters the settings of all brokers, whose bytes are scaled by then."""
    return run(lambda: _Simulation(load).measure(change(settings_of(load))))


def settings_of(load: Load) -> LogSettings:
    """The defaults of a broker, with each bound in bytes divided by SCALE."""
    writer, sequencer = WriterSettings(), SequencerSettings()
    return SETTINGS._replace(
        writer=_scaled(writer)._replace(codec=""),
        pace=load.pace,
        sequencer=_scaled(sequencer),
        membership=SETTINGS.membership._replace(heartbeat_interval_s=5.0, member_timeout_s=15.0),
        tail_cache_bytes=SETTINGS.tail_cache_bytes // SCALE,
    )


def _scaled(settings: Settings) -> Settings:
    bounds = {name: value // SCALE for name, value in settings._asdict().items() if "bytes" in name}
    return settings._replace(**bounds)


class _Simulation:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.draws = random.Random(1)
        self.requests: Counter[str] = Counter()
        self.acks_s: list[float] = []
        self.failed = 0
        self._drawn_s: dict[int, tuple[Call, float]] = {}

    async def measure(self, settings: LogSettings) -> Measured:
        load, loop = self.load, asyncio.get_running_loop()
        async with Cluster(settings, latency=self._latency_s) as cluster:
            starts = (cluster.start(poll_interval_s=1e6) for _ in range(load.brokers))
            await asyncio.gather(*starts)
            await cluster.settled()
            await cluster.sequencer().topics.create("t", load.partitions, {})
            for log in cluster.logs:
                await log.refresh()
            start_s = loop.time() + WARM_UP_S
            producing = [
                asyncio.create_task(self._produce(log, start_s, start_s + load.seconds))
                for log in cluster.logs
            ]
            await asyncio.sleep(WARM_UP_S)
            counts = self._counts(cluster)
            await asyncio.sleep(load.seconds)
            counts = self._counts(cluster) - counts
            for task in producing:
                task.cancel()
            await asyncio.gather(*producing, return_exceptions=True)
        percentiles = statistics.quantiles(self.acks_s, n=100)
        names = ("commits", "uploads", "reads", "entries", "chunks")
        return Measured(
            counts["acks"] * load.request_bytes / MB / load.seconds,
            percentiles[49],
            percentiles[98],
            *(counts[name] / load.seconds for name in names),
            self.failed,
        )

    def _counts(self, cluster: Cluster) -> Counter[str]:
        (first, *_) = cluster.logs
        return self.requests + Counter(
            acks=len(self.acks_s),
            entries=sum(log._log.wal.counters.entries_committed for log in cluster.logs),
            chunks=sum(len(partition.tail) for *_, partition in first.state.partitions()),
        )

    async def _produce(self, log: Broker, start_s: float, end_s: float) -> None:
        loop, load = asyncio.get_running_loop(), self.load
        requests_s = load.requests_s / load.brokers
        async with asyncio.TaskGroup() as group:
            while loop.time() < end_s:
                _ = group.create_task(self._append(log, start_s))
                await asyncio.sleep(self.draws.expovariate(requests_s))

    async def _append(self, log: Broker, start_s: float) -> None:
        loop, load = asyncio.get_running_loop(), self.load
        begin_s = loop.time()
        value = "x" * max(1, load.request_bytes // SCALE - RECORD_OVERHEAD_BYTES)
        try:
            await logs.append(log, value, partition=self.draws.randrange(load.partitions))
        except LogError:
            self.failed += 1
            return
        if loop.time() >= start_s:
            self.acks_s.append(loop.time() - begin_s)

    def _latency_s(self, call: Call) -> float:
        """Seconds of a call. The store asks twice: on the way to it, and on the way back."""
        if id(call) in self._drawn_s:
            return self._drawn_s.pop(id(call))[1]
        is_write = call.verb in ("create", "put")
        if is_write:
            kind = object_keys.kind(call.key)
            self.requests[{"wal": "commits", "data": "uploads"}.get(kind, "others")] += 1
        elif call.verb.startswith("get"):
            self.requests["reads"] += 1
        times = self.load.latencies
        p50_ms, p99_ms = times.write_ms if is_write else times.read_ms
        seconds = lognormal_s(self.draws, p50_ms, p99_ms) + call.size * SCALE / times.bytes_s
        self._drawn_s[id(call)] = (call, seconds)
        return seconds
