"""Metrics: plain counters where the work is done, Prometheus text when somebody asks.

Nothing here is on a hot path but `HttpCounters`, which is dicts of ints. The log's own counters are
read by service.log_metrics. Names and meanings are in service/METRICS.md. Labels take their values
from bounded sets alone: routes, verbs, kinds of errors, and the first topics (I10).

Workers behind one port (`serve --workers`) are brokers of their own: whichever of them is scraped
asks the others, and each sample says by `worker` whose it is.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from service.log_metrics import LogCollector, histogram
from storage.errors import LogError
from storage.histogram import SECONDS, Histogram
from storage.log import Log

WORKER_WAIT_S = 1.0
"""For the metrics of another worker: one that hangs must not cost the scrape of all."""
TOPICS_MAX = 500
"""Topics with counters of their own, the first that had traffic; the rest is `other`."""
OTHER_TOPICS = "(other)"
"""No topic can be called so."""


class Traffic:
    """Records of one topic since the process started."""

    __slots__ = ("bytes_in", "bytes_out", "records_in", "records_out")

    def __init__(self) -> None:
        self.records_in = self.bytes_in = self.records_out = self.bytes_out = 0


class HttpCounters:
    """What HTTP did since the process started; `observe` takes ~0.4 us. Owned by one event loop."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """By route and hundreds of the status."""
        self.latencies: dict[str, Histogram] = {}
        """By route. Waiting for new records is not counted."""
        self.errors: dict[str, int] = {}
        """By the name of the error's class."""
        self.auth_failures: dict[str, int] = {}
        """By why: a word of service.security."""
        self.denied: dict[str, int] = {}
        """By type of resource."""
        self.throttled: dict[str, int] = {}
        """By quota."""
        self.topics: dict[str, Traffic] = {}
        self.records_in = 0
        self.bytes_in = 0
        self.records_out = 0
        self.bytes_out = 0

    def observe(self, route: str, status: int, seconds: float) -> None:
        """One request was answered. `route` is one of few words, never a path."""
        key = (route, status // 100)
        self.requests[key] = self.requests.get(key, 0) + 1
        latency = self.latencies.get(route)
        if latency is None:
            latency = self.latencies[route] = Histogram(SECONDS)
        latency.counts[bisect_left(SECONDS, seconds)] += 1  # as its `add`, without the call
        latency.total += seconds

    def refused(self, error: Exception) -> None:
        """A request was answered with this error. Kinds are classes of the code: a bounded set."""
        kind = type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def add_records_in(self, records: int, size: int, topic: str | None = None) -> None:
        """Records were produced by a request of `size` bytes; no topic: to several."""
        self.records_in += records
        self.bytes_in += size
        if topic is not None:
            traffic = self.topics.get(topic) or self._traffic(topic)
            traffic.records_in += records
            traffic.bytes_in += size

    def add_records_out(self, records: int, size: int, topic: str | None = None) -> None:
        """Records were fetched in an answer of `size` bytes; no topic: of several."""
        self.records_out += records
        self.bytes_out += size
        if topic is not None:
            traffic = self.topics.get(topic) or self._traffic(topic)
            traffic.records_out += records
            traffic.bytes_out += size

    def keep_topics(self, live: Container[str]) -> None:
        """Forget topics that are gone: they would keep new ones from series of their own."""
        for topic in [name for name in self.topics if name not in live and name != OTHER_TOPICS]:
            del self.topics[topic]

    def _traffic(self, topic: str) -> Traffic:
        if len(self.topics) >= TOPICS_MAX:
            topic = OTHER_TOPICS
        return self.topics.setdefault(topic, Traffic())


class CareCounters:
    """What this broker's care for the log did (service.care). Written by one thread."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failures = 0
        self.retentions = 0
        self.collected_objects = 0
        self.collected_bytes = 0
        self.due_bytes = 0
        self.waiting_bytes = 0
        self.oldest_s = 0.0


class Worker(NamedTuple):
    """One of several behind a port. `ask` gives the texts of those others that answer."""

    number: int
    workers: int
    ask: Callable[[], Awaitable[Sequence[bytes]]]


class Telemetry:
    """The text of /metrics, on a registry of its own: several brokers may live in one process."""

    def __init__(
        self,
        broker: Log,
        http: HttpCounters,
        version: str,
        care: CareCounters | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._log = broker
        self._http = http
        self._worker = worker
        self._registry = CollectorRegistry()
        collectors = [
            LogCollector(broker, version),
            _HttpCollector(http),
            _CareCollector(care or CareCounters()),
            ProcessCollector(registry=None),
        ]
        labels = {} if worker is None else {"worker": str(worker.number)}
        for collector in collectors:
            self._registry.register(_Labelled(collector, labels) if labels else collector)

    def text(self) -> bytes:
        """Prometheus text of this process; call it on the log's event loop."""
        self._http.keep_topics(self._log.state.topics)
        return generate_latest(self._registry)

    async def text_of_all(self) -> bytes:
        """Of every worker behind the port; of this process alone where there are no others."""
        if self._worker is None:
            return self.text()
        others = await self._worker.ask()
        answered = CollectorRegistry()
        answered.register(_Answered(self._worker.workers, 1 + len(others)))
        return merged([generate_latest(answered), self.text(), *others])


def merged(texts: Iterable[bytes]) -> bytes:
    """One text of several: each family once, with the samples of all."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        # Whatever a label holds, a line break in it is escaped.
        for block in (b"\n" + text).split(b"\n# HELP ")[1:]:
            help_line, type_line, *samples = block.removesuffix(b"\n").split(b"\n")
            name = help_line.split(b" ", 1)[0]
            head = b"# HELP " + help_line + b"\n" + type_line + b"\n"
            families.setdefault(name, [head]).extend(sample + b"\n" for sample in samples)
    return b"".join(part for parts in families.values() for part in parts)


async def gathered(asked: Iterable[Awaitable[bytes]]) -> list[bytes]:
    """The answers of those who give one soon."""
    answers = await asyncio.gather(*(_patient(one) for one in asked))
    return [answer for answer in answers if answer]


async def _patient(one: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(WORKER_WAIT_S):
            return await one
    except (LogError, TimeoutError):
        return b""


class _Labelled(Collector):
    """A collector whose samples all carry these labels."""

    def __init__(self, inner: Collector, labels: dict[str, str]) -> None:
        self._inner = inner
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [
                Sample(each.name, {**each.labels, **self._labels}, *each[2:])
                for each in metric.samples
            ]
            yield metric


class _Answered(Collector):
    def __init__(self, workers: int, answered: int) -> None:
        self._workers = workers
        self._answered = answered

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("tidelog_workers", "workers behind this port", self._workers)
        yield GaugeMetricFamily(
            "tidelog_workers_answered",
            "workers whose numbers are in this answer",
            self._answered,
        )


class _HttpCollector(Collector):
    def __init__(self, http: HttpCounters) -> None:
        self._http = http

    def collect(self) -> Iterator[Metric]:
        http = self._http
        requests = CounterMetricFamily(
            "tidelog_http_requests", "requests answered", labels=["route", "status"]
        )
        for (route, hundreds), count in http.requests.items():
            requests.add_metric([route, f"{hundreds}xx"], count)
        yield requests
        yield histogram(
            "http_request_seconds",
            "from the first byte in to the last out, without waiting for new records",
            http.latencies,
            "route",
        )
        errors = CounterMetricFamily(
            "tidelog_errors", "requests refused or failed, by kind", labels=["kind"]
        )
        for kind, count in http.errors.items():
            errors.add_metric([kind], count)
        yield errors
        for name, doc, label, counts in (
            ("auth_failures", "requests without a key that holds", "kind", http.auth_failures),
            ("denied", "requests refused by ACLs", "resource", http.denied),
            ("quota_throttled", "requests refused by a quota", "quota", http.throttled),
        ):
            family = CounterMetricFamily(f"tidelog_{name}", doc, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield _by_direction(
            "tidelog_http_records",
            "records produced (in) and fetched (out)",
            http.records_in,
            http.records_out,
        )
        yield _by_direction(
            "tidelog_http_bytes",
            "bytes of bodies that carried records",
            http.bytes_in,
            http.bytes_out,
        )
        yield from self._topics()

    def _topics(self) -> Iterator[Metric]:
        label = ["topic", "direction"]
        records = CounterMetricFamily(
            "tidelog_topic_records", "the same by topic, of this broker", labels=label
        )
        size = CounterMetricFamily(
            "tidelog_topic_bytes", "the same by topic, of this broker", labels=label
        )
        for topic, traffic in self._http.topics.items():
            records.add_metric([topic, "in"], traffic.records_in)
            records.add_metric([topic, "out"], traffic.records_out)
            size.add_metric([topic, "in"], traffic.bytes_in)
            size.add_metric([topic, "out"], traffic.bytes_out)
        yield from (records, size)


def _by_direction(name: str, doc: str, count_in: int, count_out: int) -> Metric:
    family = CounterMetricFamily(name, doc, labels=["direction"])
    family.add_metric(["in"], count_in)
    family.add_metric(["out"], count_out)
    return family


class _CareCollector(Collector):
    def __init__(self, care: CareCounters) -> None:
        self._care = care

    def collect(self) -> Iterator[Metric]:
        care = self._care
        for name, doc, value in (
            ("care_rounds", "rounds of retention, and every 12th of collection", care.rounds),
            ("care_failures", "of these, that failed and are made up for", care.failures),
            ("retentions", "log starts moved by this broker", care.retentions),
            ("garbage_objects", "objects deleted that nothing could name", care.collected_objects),
            ("garbage_bytes", "their bytes", care.collected_bytes),
        ):
            yield CounterMetricFamily(f"tidelog_{name}", doc, value=value)
        gauges: Sequence[tuple[str, str, float]] = (
            ("garbage_due_bytes", "due at the last look, still there", care.due_bytes),
            ("garbage_waiting_bytes", "garbage then, in its grace", care.waiting_bytes),
            ("garbage_oldest_seconds", "age of the oldest that is due", care.oldest_s),
        )
        for name, doc, number in gauges:
            yield GaugeMetricFamily(f"tidelog_{name}", doc, value=number)
