"""The pace of commits: PUTs, their price a month, and the time of an ack, by brokers and settings.

The real code in virtual time, with the latencies of S3 Standard. One byte stands for SCALE bytes in
the sizes of requests and messages, so that a second of 10 MB/s takes little memory. The simulation
counts the PUTs of records (`wal/`, `data/`) only: those of an idle cluster come on top.
"""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call, FaultyStore
from tests.support.vloop import run
from tests.tools.bench.brokers import latency_of
from tests.tools.bench.report import Table, number
from tidelog.service.telemetry.store_costs import GET_USD, MONTH_S, PUT_USD
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.log_settings import LogSettings, PaceSettings
from tidelog.storage.core.model import Part
from tidelog.storage.store.object_store import Created

COLUMNS = ("cluster", "PUT/s", "GET/s", "a month", "ack p50 / p99 s", "most")
SCALE = 100
STREAM_BYTES_S = 80e6
"""Of one PUT."""
BUDGET = PaceSettings()
SPENT = BUDGET._replace(commits_burst=1)
"""The default budget, after a load has spent what it had saved."""
QUARTER = PaceSettings(flush_interval_ms=250)
PARTITIONS = 6
WARM_UP_S = 3.0
SECONDS, QUICK_S = 20.0, 6.0
MEMBERSHIP = SETTINGS.membership._replace(heartbeat_interval_s=5.0, member_timeout_s=15.0)


class Case(NamedTuple):
    """Brokers, each with its part of `requests_s` requests of `request_bytes`, and their pace.

    `dollars_max` and `acks_s_max` (p50, p99) are targets.
    """

    title: str
    brokers: int
    requests_s: float
    request_bytes: int
    pace: PaceSettings
    dollars_max: float | None = None
    acks_s_max: tuple[float, float] | None = None


CASES: Sequence[Case] = (
    Case("1 broker, 50 requests/s, the budget's saved commits", 1, 50, 100, BUDGET),
    Case("1 broker, 50 requests/s, the budget is spent", 1, 50, 100, SPENT, 30.0),
    Case("1 broker, a request a second", 1, 1, 100, SPENT._replace(commits_burst=40), 30.0),
    Case("3 brokers, 50 requests/s, the budget is spent", 3, 50, 100, SPENT, 30.0),
    Case("3 brokers, 10 MB/s, the budget is spent", 3, 100, 100_000, SPENT, 30.0),
    Case("3 brokers, 10 MB/s, 250 ms", 3, 100, 100_000, QUARTER, 56.0, (0.23, 0.41)),
    Case("10 brokers, 10 MB/s, 250 ms", 10, 100, 100_000, QUARTER, 60.0, (0.23, 0.41)),
    Case("10 brokers, 0.5 MB/s, 250 ms", 10, 50, 10_000, QUARTER, 60.0),
    Case("40 brokers, 400 requests/s, the budget is spent", 40, 400, 100, SPENT, 30.0),
)


class Outcome(NamedTuple):
    """Of a simulation: PUTs and GETs a second, and the sorted times of acks."""

    puts_s: float
    gets_s: float
    acks_s: list[float]
    alone: int
    """Drafts that a broker had to commit by itself."""

    @property
    def dollars(self) -> float:
        """A month."""
        return (self.puts_s * PUT_USD + self.gets_s * GET_USD) * MONTH_S

    @property
    def p50_p99_s(self) -> tuple[float, float]:
        ranks = statistics.quantiles(self.acks_s, n=100)
        return ranks[49], ranks[98]


def measure(folder: Path, *, is_quick: bool) -> Table:
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        outcome = simulated(case, QUICK_S if is_quick else SECONDS)
        p50_s, p99_s = outcome.p50_p99_s
        most = "" if case.dollars_max is None else f"${case.dollars_max:g}"
        if case.acks_s_max is not None:
            most += f", {case.acks_s_max[0]:g} / {case.acks_s_max[1]:g} s"
        dollars = f"${outcome.dollars:,.2f}"
        acks = f"{p50_s:.2f} / {p99_s:.2f}"
        rates = number(outcome.puts_s), number(outcome.gets_s)
        rows.append((case.title, *rates, dollars, acks, most))
    how = "simulated; PUT p50 / p99 30 / 150 ms, uploads 80 / 350 ms, 80 MB/s a PUT"
    return Table(COLUMNS, rows, how)


def simulated(case: Case, seconds: float) -> Outcome:
    return run(lambda: _simulate(case, seconds))


class _SizedStore(FaultyStore):
    """A PUT takes time for its bytes, too, and is counted by the prefix of its key."""

    counts: Counter[str]

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        self.counts["put"] += key.startswith((object_keys.WAL, object_keys.DATA))
        await asyncio.sleep(SCALE * sum(map(len, parts)) / STREAM_BYTES_S)
        return await super().create(key, parts)


def _settings(case: Case) -> LogSettings:
    sizes, forwarded = SETTINGS.writer, SETTINGS.sequencer
    return SETTINGS._replace(
        membership=MEMBERSHIP,
        pace=case.pace,
        writer=sizes._replace(flush_bytes=sizes.flush_bytes // SCALE, codec=""),
        sequencer=forwarded._replace(
            handover_timeout_s=1.0,
            handover_bytes_max=forwarded.handover_bytes_max // SCALE,
            entry_bytes_max=forwarded.entry_bytes_max // SCALE,
            queue_bytes_max=forwarded.queue_bytes_max // SCALE,
        ),
    )


async def _simulate(case: Case, seconds: float) -> Outcome:
    draws = random.Random(1)
    counts: Counter[str] = Counter()
    latency = latency_of(draws)

    def counted(call: Call) -> float:
        counts["get"] += call.verb.startswith("get")
        return latency(call)

    store_type = type("CountedStore", (_SizedStore,), {"counts": counts})
    async with Cluster(_settings(case), latency=counted, store_type=store_type) as cluster:
        await asyncio.gather(*(cluster.start(poll_interval_s=1e6) for _ in range(case.brokers)))
        await cluster.settled()
        await cluster.logs[0].topics.create("t", PARTITIONS, {})
        for log in cluster.logs:
            await log._log.wal.refresh()
        producing = _Producing(case, draws, seconds)
        tasks = [asyncio.create_task(producing.run(log)) for log in cluster.logs]
        await asyncio.sleep(WARM_UP_S)
        old_counts = Counter(counts)
        await asyncio.sleep(seconds)
        new_counts = counts - old_counts
        await asyncio.gather(*tasks)
        alone = sum(log._sequencer.counters.own_commits for log in cluster.logs)
    puts_s, gets_s = (new_counts[kind] / seconds for kind in ("put", "get"))
    return Outcome(puts_s, gets_s, sorted(producing.acks_s), alone)


class _Producing:
    """The requests of all brokers, at random moments."""

    def __init__(self, case: Case, draws: random.Random, seconds: float) -> None:
        self.acks_s: list[float] = []
        self._draws = draws
        self._rate = case.requests_s / case.brokers
        self._value = "x" * max(case.request_bytes // SCALE - 24, 1)
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        self._start_s = self._now_s() + WARM_UP_S
        self._end_s = self._start_s + seconds

    async def run(self, log: Broker) -> None:
        async with asyncio.TaskGroup() as group:
            while self._now_s() < self._end_s:
                _ = group.create_task(self._append(log))
                await asyncio.sleep(self._draws.expovariate(self._rate))

    async def _append(self, log: Broker) -> None:
        asked_s = self._now_s()
        await logs.append(log, self._value, partition=self._draws.randrange(PARTITIONS))
        if self._start_s <= asked_s:
            self.acks_s.append(self._now_s() - asked_s)
