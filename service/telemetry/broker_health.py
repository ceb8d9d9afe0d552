"""Signs of a broker's health: its report to the broker that answers `tidelog status`.

Rates and latencies are of the last WINDOW_STEPS samples, one for each step of the module `rates`.
No sign needs a request to the store.
"""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import islice

import msgspec

from tidelog.service.telemetry.maintenance_results import MaintenanceResult
from tidelog.service.telemetry.store_costs import RequestCount, counts_between
from tidelog.storage.broker import Broker
from tidelog.storage.core.histogram import SECONDS
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.store.metered import VERBS, CountedRequest

WINDOW_STEPS = 12
"""Samples in the window: a minute of steps of 5 s."""
COSTS_EVERY, COSTS_SAMPLES = WINDOW_STEPS, 30
"""Requests are counted by what they are for over half an hour, from a sample each minute: retention
and other duties are rare."""
NAMES_MAX = 5
"""Names of topics and partitions in a report; the counts have all of them."""


class StoreSigns(msgspec.Struct):
    """Requests to the store in the window, by verb, and their latencies by bucket of SECONDS."""

    requests: dict[str, int]
    failures: int
    latencies: list[int]
    counts: list[RequestCount] = []
    """The requests of the last half hour, by what they are for."""
    counts_s: float = 1.0
    """The seconds in which `counts` were counted."""


class BrokerSigns(msgspec.Struct):
    """The signs of one broker.

    `why_not_writing` is "" if it can write. `seals_failing` and `damaged_tails` count partitions,
    `doubts` counts topics; each list has the first names.
    """

    seconds: float
    commits: float
    store: StoreSigns
    clock_ms: int = 0
    connections: int = 0
    view_age_s: float = 0.0
    why_not_writing: str = ""
    flush_failures: int = 0
    seals_failing: int = 0
    seals_failing_names: list[str] = []
    doubts: int = 0
    doubts_names: list[str] = []
    damaged_tails: int = 0
    damaged_tails_names: list[str] = []
    set_aside: int = 0
    maintenance: dict[str, MaintenanceResult] = {}
    maintains: bool = False
    """The broker runs retention and collection by itself."""


class _HealthSample:
    """The counters of a broker at one moment."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        stats = broker.stats()
        self.at_s = clock.boot_s()
        self.commits = stats.wal.entries_committed
        self.flush_failures = stats.writer.flushes_failed
        self.requests = dict.fromkeys(VERBS, 0)
        self.failures = 0
        self.latencies = [0] * (len(SECONDS) + 1)
        if stats.store is not None:
            self.requests = stats.store.by_verb()
            self.failures = sum(stats.store.failures.values())
            counts = zip(
                *(histogram.counts for histogram in stats.store.seconds.values()), strict=True
            )
            self.latencies = [sum(bucket_counts) for bucket_counts in counts]


class SignSampler:
    """The sampler of one broker's signs. Owned by one event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._samples = deque([self._sample()], maxlen=WINDOW_STEPS + 1)
        self._steps = 0
        self._counts = deque([self._counts_now()], maxlen=COSTS_SAMPLES + 1)

    def step(self) -> None:
        self._samples.append(self._sample())
        self._steps += 1
        if self._steps % COSTS_EVERY == 0:
            self._counts.append(self._counts_now())

    def _counts_now(self) -> tuple[float, Counter[CountedRequest]]:
        store = self._broker.stats().store
        counts = Counter[CountedRequest]() if store is None else store.requests.copy()
        return self._broker.clock.boot_s(), counts

    def own(
        self,
        connections: int,
        maintenance: Mapping[str, MaintenanceResult],
        *,
        maintains: bool,
    ) -> BrokerSigns:
        broker, now, first = self._broker, self._sample(), self._samples[0]
        stats, doubts, damaged = (
            broker.stats(),
            broker.stored.doubts(),
            broker.stored.damaged_tails(),
        )
        failing = stats.failing_seals
        (counts_s, counts), (old_counts_s, old_counts) = self._counts_now(), self._counts[0]
        failing_partitions = (
            (broker.state.topic_of_id(topic_id), number) for topic_id, number in failing
        )
        return BrokerSigns(
            seconds=max(now.at_s - first.at_s, 0.001),
            commits=now.commits - first.commits,
            store=StoreSigns(
                {verb: now.requests[verb] - first.requests[verb] for verb in VERBS},
                now.failures - first.failures,
                [late - early for late, early in zip(now.latencies, first.latencies, strict=True)],
                counts_between(old_counts, counts),
                max(counts_s - old_counts_s, 0.001),
            ),
            clock_ms=broker.store_time.skew_ms(),
            connections=connections,
            view_age_s=min(stats.view_age_s, 1e9),
            why_not_writing=broker.why_not_writing(),
            flush_failures=now.flush_failures - first.flush_failures,
            seals_failing=len(failing),
            seals_failing_names=[
                f"{topic.name}-{number}"
                for topic, number in islice(failing_partitions, NAMES_MAX)
                if topic is not None
            ],
            doubts=len(doubts),
            doubts_names=[*islice(doubts, NAMES_MAX)],
            damaged_tails=len(damaged),
            damaged_tails_names=[
                f"{partition.topic}-{partition.partition}"
                for partition in islice(damaged, NAMES_MAX)
            ],
            set_aside=broker.set_aside,
            maintenance=dict(maintenance),
            maintains=maintains,
        )

    def _sample(self) -> _HealthSample:
        return _HealthSample(self._broker, self._broker.clock)
