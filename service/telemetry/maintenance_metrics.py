"""Counters and metrics of maintenance: of this broker's rounds, and of commands' results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidelog.service.telemetry.health_rules import MaintenanceFacts
from tidelog.service.telemetry.log_metrics import gauge
from tidelog.service.telemetry.maintenance_results import (
    KINDS,
    Kind,
    MaintenanceResult,
    StoredResults,
)
from tidelog.storage.broker import Broker

OF_BROKERS: frozenset[Kind] = frozenset({"retain", "collect"})
"""The kinds of maintenance that brokers do themselves."""


class MaintenanceCounters:
    """Counters of this broker's maintenance (service.server.maintenance). Written by one thread."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failures = 0
        self.retentions = 0
        self.merges = 0
        self.merge_failures = 0
        self.merged_segments = 0
        self.merged_bytes = 0
        self.merge_cpu_s = 0.0
        self.collected_objects = 0
        self.collected_bytes = 0
        self.due_bytes = 0
        self.waiting_bytes = 0
        self.oldest_s = 0.0
        self.is_running = False
        """This broker runs rounds."""
        self.is_merging = False
        """This broker merges, and its last merges did not fail: only key compaction needs a
        command."""
        self.results: dict[str, MaintenanceResult] = {}
        """Of this broker's own rounds."""
        self._stored: StoredResults | None = None

    def note(self, now: MaintenanceResult) -> None:
        """Note the result of a round."""
        old_result = self.results.get(now.kind)
        self.results[now.kind] = now if old_result is None else old_result.followed_by(now)

    def stored(self, broker: Broker) -> StoredResults:
        """Return the results that commands have stored."""
        if self._stored is None:
            self._stored = StoredResults(broker)
        return self._stored

    def facts(
        self, broker: Broker, of_peers: Iterable[Mapping[str, MaintenanceResult]] = ()
    ) -> list[MaintenanceFacts]:
        """Return the last result of each kind, and the time (s) since the last complete run.

        Compaction is left out if no topic needs it, because this broker merges.
        If no complete run is known, the time is that since the creation of the cluster. For the
        kinds that this broker runs itself, it is that since the start of this broker, because their
        results are in memory.
        """
        own, now_ms = self.stored(broker).found, broker.clock.now_ms()
        facts = []
        for kind in KINDS:
            if kind == "compact" and self.is_merging and not _has_compacted_topic(broker):
                continue
            results = [results[kind] for results in (own, self.results) if kind in results]
            results += [results[kind] for results in of_peers if kind in results]
            last = max(results, key=lambda result: result.at_ms, default=None)
            base_ms = broker.identity.created_ms
            if self.is_running and kind in OF_BROKERS:
                base_ms = max(base_ms, broker.cluster.members().me.started_ms)
            since_ms = max([base_ms, *(result.success_ms for result in results)])
            facts.append(MaintenanceFacts(kind, max(now_ms - since_ms, 0) / 1000, last))
        return facts


def _has_compacted_topic(broker: Broker) -> bool:
    return any("compact" in topic.config.cleanup_policy for topic in broker.state.topics.values())


class MaintenanceCollector(Collector):
    def __init__(self, counters: MaintenanceCounters, broker: Broker) -> None:
        self._counters = counters
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        for name, doc, value in (
            (
                "care_rounds",
                "retention rounds, every 12th also with collection",
                counters.rounds,
            ),
            (
                "care_failures",
                "rounds that failed; the next round does their work",
                counters.failures,
            ),
            ("retentions", "log starts moved by this broker", counters.retentions),
            ("merges", "merges of small segments that this broker committed", counters.merges),
            (
                "merge_failures",
                "partitions whose merge failed; it is tried again after merge_after_ms",
                counters.merge_failures,
            ),
            ("merged_segments", "segments that merges replaced", counters.merged_segments),
            ("merged_bytes", "bytes of segments that merges replaced", counters.merged_bytes),
            (
                "merge_cpu_seconds",
                "CPU time of merges in s; requests to the store count with 4 ms for each segment",
                counters.merge_cpu_s,
            ),
            ("garbage_objects", "unreferenced objects deleted", counters.collected_objects),
            ("garbage_bytes", "bytes of unreferenced objects deleted", counters.collected_bytes),
        ):
            yield CounterMetricFamily(f"tidelog_{name}", doc, value=value)
        gauges: Sequence[tuple[str, str, float]] = (
            (
                "garbage_due_bytes",
                "garbage found by the last collection and not deleted yet",
                counters.due_bytes,
            ),
            (
                "garbage_waiting_bytes",
                "garbage found by the last collection, within its grace",
                counters.waiting_bytes,
            ),
            (
                "garbage_oldest_seconds",
                "age of the oldest garbage that is due",
                counters.oldest_s,
            ),
        )
        for name, doc, number in gauges:
            yield GaugeMetricFamily(f"tidelog_{name}", doc, value=number)
        facts = self._counters.facts(self._broker)
        yield gauge(
            "maintenance_age_seconds",
            "time since the last complete maintenance of this kind that this broker knows: its own "
            "or a command's; without one, since the cluster was created",
            ["task"],
            [([task_facts.kind], task_facts.since_s) for task_facts in facts],
        )
        yield gauge(
            "maintenance_failed",
            "1 if the last maintenance of this kind that this broker knows failed",
            ["task"],
            [
                ([task_facts.kind], float(not task_facts.last.is_ok))
                for task_facts in facts
                if task_facts.last is not None
            ],
        )
        scrubs = [
            task_facts.last
            for task_facts in facts
            if task_facts.kind == "scrub" and task_facts.last is not None
        ]
        yield gauge(
            "scrub_damage",
            "damage that the last scrub found; absent if there was no scrub",
            [],
            [([], scrub.damage) for scrub in scrubs],
        )
