"""The Prometheus text of all metrics of a broker.

METRICS.md lists names and meanings. Labels have values from bounded sets only: routes, verbs, kinds
of errors, and the first topics with traffic (I10).

Workers behind one port (`serve --workers`) are separate brokers. The worker that is scraped
requests the metrics of the other workers, and the label `worker` of each sample names its worker.
"""

import asyncio
import contextlib
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tidelog.service.http.connection_admission import Admission
from tidelog.service.telemetry.group_lags import LagTotals
from tidelog.service.telemetry.group_metrics import GroupCollector
from tidelog.service.telemetry.http_counters import HTTP, Certificate, HttpCounters, Traffic
from tidelog.service.telemetry.kafka_counters import KafkaCollector
from tidelog.service.telemetry.log_metrics import Labelled, LogCollector, counter, histogram
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCollector, MaintenanceCounters
from tidelog.service.telemetry.partition_skew import PartitionShares, SharesCollector
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock

WORKER_WAIT_S = 1.0
"""Timeout for the metrics of another worker, because a worker that hangs must not delay the
scrape."""
LAGS_WAIT_S = 0.3
"""How long a scrape waits for a new reading of all lags. A reading of 100,000 partitions takes
about this time."""
SAMPLES_AT_ONCE = 500
"""Samples that one turn of the event loop renders. A sample takes ~5 us."""


class Worker(NamedTuple):
    """One of several workers behind a port.

    `ask` returns the metrics texts of the other workers that answer in time.
    """

    number: int
    workers: int
    ask: Callable[[], Awaitable[Sequence[bytes]]]


class Telemetry:
    """The metrics of one broker, as text for /metrics.

    It has its own registry, because a process may run several brokers.
    """

    def __init__(
        self,
        broker: Broker,
        http: HttpCounters,
        version: str,
        maintenance: MaintenanceCounters | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._broker = broker
        self._http = http
        self._worker = worker
        self.maintenance = maintenance or MaintenanceCounters()
        self.lags = LagTotals(broker)
        self.shares = PartitionShares(broker)
        self._registry = CollectorRegistry()
        collectors = [
            LogCollector(broker, version, self.lags),
            GroupCollector(broker, self.lags),
            SharesCollector(self.shares),
            _HttpCollector(http),
            KafkaCollector(http.kafka),
            MaintenanceCollector(self.maintenance, broker),
            _AdmissionCollector(http.admission),
            _CertificateCollector(http.certificates, broker.clock),
            ProcessCollector(registry=None),
        ]
        labels = {} if worker is None else {"worker": str(worker.number)}
        for collector in collectors:
            self._registry.register(_Labelled(collector, labels) if labels else collector)

    async def text(self) -> bytes:
        """Return the metrics of this process.

        Call it on the broker's event loop; other callbacks run after each SAMPLES_AT_ONCE samples.
        """
        self._http.keep_topics(self._broker.state.topics)
        with contextlib.suppress(TimeoutError):  # then the lags are of the last reading
            async with asyncio.timeout(LAGS_WAIT_S):
                await self.lags.refresh()
        parts = []
        for metric in self._registry.collect():
            samples = metric.samples
            for first in range(0, max(len(samples), 1), SAMPLES_AT_ONCE):
                metric.samples = samples[first : first + SAMPLES_AT_ONCE]
                text = generate_latest(_One(metric))
                parts.append(text.split(b"\n", 2)[2] if first else text)
                await asyncio.sleep(0)
        return b"".join(parts)

    def families(self) -> list[Metric]:
        """Return every metric, also the metrics that only workers have, for the documentation."""
        return [*self._registry.collect(), *_Answered(0, 0).collect()]

    async def text_of_all(self) -> bytes:
        """Return the metrics of every worker behind the port."""
        if self._worker is None:
            return await self.text()
        texts = await self._worker.ask()
        registry = CollectorRegistry()
        registry.register(_Answered(self._worker.workers, 1 + len(texts)))
        return merged([generate_latest(registry), await self.text(), *texts])


def merged(texts: Iterable[bytes]) -> bytes:
    """Merge Prometheus texts: each family once, with the samples of all texts."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        # Label values contain no line breaks (they are escaped), so a block is a family.
        for block in (b"\n" + text).split(b"\n# HELP ")[1:]:
            help_line, type_line, *samples = block.removesuffix(b"\n").split(b"\n")
            name = help_line.split(b" ", 1)[0]
            head = b"# HELP " + help_line + b"\n" + type_line + b"\n"
            families.setdefault(name, [head]).extend(sample + b"\n" for sample in samples)
    return b"".join(part for parts in families.values() for part in parts)


async def gathered(requests: Iterable[Awaitable[Part]]) -> list[bytes]:
    """Return the answers that arrive within WORKER_WAIT_S."""
    answers = await asyncio.gather(*(_in_time(request) for request in requests))
    return [bytes(answer) for answer in answers if answer]


async def _in_time(request: Awaitable[Part]) -> Part:
    """Return the answer, or b"" if none arrives within WORKER_WAIT_S."""
    try:
        async with asyncio.timeout(WORKER_WAIT_S):
            return await request
    except (LogError, TimeoutError):
        return b""


class _One(CollectorRegistry):
    """A registry with one metric, for `generate_latest`."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _Labelled(Collector):
    """A collector that adds labels to all samples of another collector."""

    def __init__(self, inner: Collector, labels: dict[str, str]) -> None:
        self._inner = inner
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [
                Sample(sample.name, {**sample.labels, **self._labels}, *sample[2:])
                for sample in metric.samples
            ]
            yield metric


class _Answered(Collector):
    def __init__(self, workers: int, answer_count: int) -> None:
        self._workers = workers
        self._answered = answer_count

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("tidelog_workers", "workers behind this port", self._workers)
        yield GaugeMetricFamily(
            "tidelog_workers_answered",
            "workers whose metrics are in this answer",
            self._answered,
        )


class _HttpCollector(Collector):
    def __init__(self, http: HttpCounters) -> None:
        self._http = http

    def collect(self) -> Iterator[Metric]:
        http = self._http
        requests = [
            ([route, f"{hundreds}xx"], count) for (route, hundreds), count in http.requests.items()
        ]
        yield counter("http_requests", "requests answered", ["route", "status"], requests)
        yield histogram(
            "http_request_seconds",
            "time from first byte received to last byte sent, without waits for new records",
            http.latencies,
            "route",
        )
        yield histogram(
            "loop_held_seconds",
            "CPU time for which callbacks held the event loop, measured 100 times a second; the "
            "target is at most 0.02 s",
            {"": http.loop_held},
        )
        for name, doc, label, counts in (
            ("errors", "requests refused or failed, by kind", "kind", http.errors),
            ("auth_failures", "requests without a valid key", "kind", http.auth_failures),
            ("denied", "requests refused by ACLs", "resource", http.denied),
            ("quota_throttled", "requests refused by a quota", "quota", http.throttled),
            (
                "audit_events",
                "refusals, logins and changes of the audit log",
                "event",
                http.audited,
            ),
            ("audit_lost", "events that the audit log does not have", "reason", http.audit_lost),
            (
                "undecodable_records",
                "records that did not decode in the reader's format and were skipped or returned "
                "raw, by the reader's `on_error`",
                "on_error",
                http.undecodable,
            ),
        ):
            yield counter(name, doc, [label], [([value], count) for value, count in counts.items()])
        web = http.protocols[HTTP]
        for name, doc, count_in, count_out in (
            (
                "http_records",
                "records produced (in) and fetched (out) over HTTP",
                web.records_in,
                web.records_out,
            ),
            (
                "http_bytes",
                "bytes of HTTP bodies that carried records",
                web.bytes_in,
                web.bytes_out,
            ),
        ):
            yield counter(name, doc, ["direction"], [(["in"], count_in), (["out"], count_out)])
        yield from self._traffic("", "protocol", http.protocols)
        yield from self._traffic("topic_", "topic", http.topics)

    def _traffic(
        self, prefix: str, label: str, traffic_by_name: Mapping[str, Traffic]
    ) -> Iterator[Metric]:
        records: list[Labelled] = []
        sizes: list[Labelled] = []
        for name, traffic in traffic_by_name.items():
            records += ([name, "in"], traffic.records_in), ([name, "out"], traffic.records_out)
            sizes += ([name, "in"], traffic.bytes_in), ([name, "out"], traffic.bytes_out)
        labels = [label, "direction"]
        scope = f"by {label}, of this broker"
        yield counter(f"{prefix}records", f"records {scope}", labels, records)
        yield counter(f"{prefix}bytes", f"bytes of bodies and batches {scope}", labels, sizes)


class _CertificateCollector(Collector):
    def __init__(self, certificates: Mapping[str, Certificate], clock: Clock) -> None:
        self._certificates = certificates
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tidelog_certificate_seconds",
            "seconds until the TLS certificate in use expires",
            labels=["port"],
        )
        now_s = self._clock.now_ms() / 1000
        for port, certificate in self._certificates.items():
            family.add_metric([port], certificate.ends_s - now_s)
        yield family
        yield counter(
            "certificate_failures",
            "changed TLS files that could not be used; the old certificate stays in use",
            ["port"],
            [([port], certificate.failures) for port, certificate in self._certificates.items()],
        )


class _AdmissionCollector(Collector):
    def __init__(self, admission: "Admission[Any]") -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        admission = self._admission
        yield GaugeMetricFamily(
            "tidelog_connections", "open connections of clients", value=admission.connections
        )
        yield counter(
            "connections_ended",
            "connections that the broker ended: idle; too slow with a head, a body, a stream, an "
            "answer or a TLS handshake; displaced by a new connection; refused for the head; a "
            "failed TLS handshake; plain text at a port with TLS; a damaged TLS record",
            ["reason"],
            [([reason], count) for reason, count in admission.ended.items()],
        )
        pools = {"bodies": admission.bodies, "answers": admission.answers}
        used_bytes = GaugeMetricFamily(
            "tidelog_budget_bytes", "bytes of requests and answers in memory", labels=["budget"]
        )
        for name, pool in pools.items():
            used_bytes.add_metric([name], pool.used)
        yield used_bytes
        yield counter(
            "budget_refused",
            "requests refused because there was no memory for them, or not for their principal",
            ["budget"],
            [([name], pool.refused) for name, pool in pools.items()],
        )
        most = GaugeMetricFamily(
            "tidelog_memory_max_bytes",
            "maximum bytes of each part of the process's memory; their sum, plus the memory that "
            "the process needs without any record, bounds its memory",
            labels=["part"],
        )
        for part, size in admission.bounds().items():
            most.add_metric([part], size)
        yield most
