"""Counters of the listener for Kafka's protocol."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidelog.service.http.connection_admission import Admission, Limits
from tidelog.service.telemetry.log_metrics import counter, histogram
from tidelog.storage.core.histogram import SECONDS, Histogram


class KafkaCounters:
    """Counters of Kafka requests since the process started. Owned by one event loop."""

    def __init__(self, admission: "Admission[Any] | None" = None) -> None:
        self.admission: Admission[Any] = admission or Admission(Limits())
        """The Admission of the listener."""
        self.latencies: dict[str, Histogram] = {}
        """By API: the time from the whole request to its answer, with waits for records."""
        self.errors: Counter[tuple[str, str]] = Counter()
        """Errors in answers, by API and by Kafka's name of the error."""
        self.bytes_in: Counter[str] = Counter()
        """Bytes of requests, by API."""
        self.bytes_out: Counter[str] = Counter()
        """Bytes of answers, by API."""
        self.closed: Counter[str] = Counter()
        """Connections that the broker closed because of their requests, by reason."""

    def observe(self, api: str, seconds: float, size_in: int, size_out: int) -> None:
        """Count one request that is answered."""
        latency = self.latencies.get(api)
        if latency is None:
            latency = self.latencies[api] = Histogram(SECONDS)
        latency.counts[bisect_left(SECONDS, seconds)] += 1  # `latency.add`, without a call
        latency.total += seconds
        self.bytes_in[api] += size_in
        self.bytes_out[api] += size_out


class KafkaCollector(Collector):
    """The metrics of a KafkaCounters."""

    def __init__(self, counters: KafkaCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield histogram(
            "kafka_request_seconds",
            "time from a whole Kafka request to its answer, with waits for records and members",
            counters.latencies,
            "api",
        )
        yield counter(
            "kafka_errors",
            "errors in answers to Kafka requests",
            ["api", "error"],
            [([api, error], count) for (api, error), count in counters.errors.items()],
        )
        sizes = (("in", counters.bytes_in), ("out", counters.bytes_out))
        yield counter(
            "kafka_bytes",
            "bytes of Kafka requests (in) and their answers (out)",
            ["api", "direction"],
            [([api, way], size) for way, by_api in sizes for api, size in by_api.items()],
        )
        connections = GaugeMetricFamily(
            "tidelog_kafka_connections", "open connections of Kafka clients"
        )
        connections.add_metric([], counters.admission.connections)
        yield connections
        ended = counters.admission.ended + counters.closed
        yield counter(
            "kafka_connections_closed",
            "connections of Kafka clients that the broker closed, by reason",
            ["reason"],
            [([reason], count) for reason, count in ended.items()],
        )
