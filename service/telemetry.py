"""Metrics: plain counters where the work is done, Prometheus text when somebody asks.

Nothing here is on a hot path but `HttpCounters`, which is dicts of ints. Everything else is read
from the log's own counters at scrape time, on the event loop that owns them. The number of series
is bounded (I10): partitions beyond the bound are counted and not shown.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from storage.cache import Cache
from storage.log import Log

SERIES_MAX = 2000
"""Partitions, and topics, with a series of their own: a scrape of so many holds the loop ~13 ms."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BUCKET_NAMES = (*map(str, BUCKETS_S), "+Inf")


class Series(NamedTuple):
    """One number of the log: `name` without the prefix."""

    name: str
    doc: str
    value: float


class HttpCounters:
    """What HTTP did since the process started; `observe` takes ~0.4 us. Owned by one event loop."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        """By route and hundreds of the status."""
        self.latencies: dict[str, list[int]] = {}
        """By route, one count for each bucket and one beyond the last."""
        self.seconds: dict[str, float] = {}
        self.records_in = 0
        self.bytes_in = 0
        self.records_out = 0
        self.bytes_out = 0

    def observe(self, route: str, status: int, seconds: float) -> None:
        """One request was answered. `route` is one of few words, never a path."""
        key = (route, status // 100)
        self.requests[key] = self.requests.get(key, 0) + 1
        counts = self.latencies.get(route)
        if counts is None:
            counts = self.latencies[route] = [0] * len(_BUCKET_NAMES)
            self.seconds[route] = 0.0
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds[route] += seconds

    def add_records_in(self, records: int, size: int) -> None:
        """Records were produced by a request of `size` bytes."""
        self.records_in += records
        self.bytes_in += size

    def add_records_out(self, records: int, size: int) -> None:
        """Records were fetched in an answer of `size` bytes."""
        self.records_out += records
        self.bytes_out += size


class Telemetry:
    """The text of /metrics, on a registry of its own: several brokers may live in one process."""

    def __init__(self, broker: Log, http: HttpCounters, version: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LogCollector(broker, version))
        self._registry.register(_HttpCollector(http))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Prometheus text; call it on the log's event loop."""
        return generate_latest(self._registry)


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
        seconds = HistogramMetricFamily(
            "tidelog_http_request_seconds",
            "from the first byte in to the last out",
            labels=["route"],
        )
        for route, counts in http.latencies.items():
            buckets = list(zip(_BUCKET_NAMES, map(float, accumulate(counts)), strict=True))
            seconds.add_metric([route], buckets, http.seconds[route])
        yield seconds
        records = CounterMetricFamily(
            "tidelog_http_records", "records produced (in) and fetched (out)", labels=["direction"]
        )
        records.add_metric(["in"], http.records_in)
        records.add_metric(["out"], http.records_out)
        yield records
        size = CounterMetricFamily(
            "tidelog_http_bytes", "bytes of bodies that carried records", labels=["direction"]
        )
        size.add_metric(["in"], http.bytes_in)
        size.add_metric(["out"], http.bytes_out)
        yield size


class _LogCollector(Collector):
    def __init__(self, broker: Log, version: str) -> None:
        self._log = broker
        self._version = version

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tidelog", "the broker", value=self._identity())
        counters = (_writer, _wal, _sequencer, _sealer)
        for name, doc, value in chain.from_iterable(of(self._log) for of in counters):
            yield CounterMetricFamily(f"tidelog_{name}", doc, value=value)
        for name, doc, value in _gauges(self._log):
            yield GaugeMetricFamily(f"tidelog_{name}", doc, value=value)
        yield _sequencing(self._log)
        yield from _caches(self._log)
        yield from _topics(self._log)
        yield _group_lag(self._log)

    def _identity(self) -> dict[str, str]:
        wal = self._log.wal
        return {
            "version": self._version,
            "broker_id": wal.writer,
            "cluster_id": wal.cluster.cluster_id,
        }


def _writer(broker: Log) -> tuple[Series, ...]:
    counters = broker.writer.counters
    return (
        Series("flushes", "flushes committed", counters.flushes),
        Series("flushes_failed", "flushes that are not in the log", counters.flushes_failed),
        Series("flush_bytes", "bytes of chunks committed", counters.flush_bytes),
        Series("commit_seconds", "time flushes waited for the store", counters.commit_seconds),
        Series("append_requests", "requests taken into a hot segment", counters.requests),
        Series("append_throttled", "requests refused at the buffer's bound", counters.throttled),
        Series("appended_records", "records committed by this broker", counters.records),
    )


def _wal(broker: Log) -> tuple[Series, ...]:
    counters = broker.wal.counters
    return (
        Series("wal_puts", "conditional PUTs of entries, repeats included", counters.puts),
        Series("wal_gets", "reads of entries, polls included", counters.gets),
        Series("wal_entries_committed", "entries of this broker", counters.entries_committed),
        Series("wal_entries_applied", "entries of all brokers", counters.entries_applied),
        Series("wal_bytes_written", "bytes of entries written", counters.bytes_written),
        Series("wal_lost", "numbers that another broker took first", counters.lost),
        Series("wal_unknown", "PUTs with unknown outcome", counters.unknown),
        Series("wal_void", "views that were too old and loaded anew", counters.void),
        Series("wal_checkpoints", "checkpoints written", counters.checkpoints),
    )


def _sequencer(broker: Log) -> tuple[Series, ...]:
    own, wakeups = broker.sequencer.counters, broker.sequencer.wakeups.counters
    return (
        Series("commits", "entries committed: own drafts and those of peers", own.commits),
        Series("drafts", "closed hot segments of this broker", own.drafts),
        Series("handovers", "drafts handed to the sequencer", own.handed_over),
        Series("handovers_refused", "hand-overs that it did not take", own.refused),
        Series("handovers_unanswered", "hand-overs whose outcome it left open", own.unanswered),
        Series("own_commits", "drafts committed here because of either", own.own_commits),
        Series("drafts_taken", "drafts taken from peers", own.taken),
        Series("drafts_not_taken", "drafts of peers that were refused", own.not_taken),
        Series("drafts_uploaded", "large drafts uploaded before their hand-over", own.uploads),
        Series("wakeups_sent", "messages to peers, of one entry or more", wakeups.sent),
        Series("wakeups_failed", "messages that did not arrive", wakeups.failed),
        Series("wakeups_received", "entries that peers told of", wakeups.received),
        Series("wakeups_useful", "of these, news that could be applied at once", wakeups.useful),
        Series("peers_suspected", "times that a peer was left out", wakeups.suspected),
    )


def _sequencing(broker: Log) -> Metric:
    """Who commits for all, as this broker sees it."""
    family = GaugeMetricFamily("tidelog_sequencer", "who commits for all", labels=["broker_id"])
    target = broker.sequencer.target or broker.membership.me
    family.add_metric([target.name], 1)
    return family


def _sealer(broker: Log) -> tuple[Series, ...]:
    counters = broker.sealer.counters
    return (
        Series("sealed_segments", "segments sealed by this broker", counters.segments),
        Series("sealed_records", "records sealed by this broker", counters.rows),
        Series("sealed_bytes", "bytes of segments sealed by this broker", counters.bytes),
        Series("seal_conflicts", "seals that another broker did first", counters.conflicts),
        Series("seal_failures", "seals that failed and are tried again", counters.failures),
        Series("cold_reads", "row groups read from the store", broker.reader.cold_reads),
    )


def _gauges(broker: Log) -> tuple[Series, ...]:
    wal, writer, state = broker.wal.counters, broker.writer, broker.state
    partitions = sum(len(topic.partitions) for topic in state.topics.values())
    return (
        Series(
            "requests_per_flush",
            "conditional PUTs that one committed entry took on average: 1 is ideal, more are lost "
            "races and unknown outcomes (wal_puts / wal_entries_committed)",
            wal.puts / max(wal.entries_committed, 1),
        ),
        Series(
            "buffered_bytes", "produced bytes that wait for their commit", writer.buffered_bytes
        ),
        Series(
            "buffered_bytes_max", "beyond it requests get 429", writer.settings.buffer_bytes_max
        ),
        Series("live_brokers", "brokers that live, this one too", len(broker.membership.ranking)),
        Series("is_sequencer", "1 where this broker commits for all", broker.sequencer.is_first),
        Series("wal_seq", "number of the newest entry applied", state.seq),
        Series("topics", "topics", len(state.topics)),
        Series("partitions", "partitions of all topics", partitions),
        Series("group_offsets", "committed offsets of all consumer groups", state.groups.count),
        Series("group_members", "members of all consumer groups", state.members.count),
        Series("producer_partitions", "producers known, by partition", state.producers.count),
        Series(
            "series_omitted",
            f"partitions without a series of their own: only the first {SERIES_MAX} have one",
            max(partitions - SERIES_MAX, 0),
        ),
    )


def _caches(broker: Log) -> Iterator[Metric]:
    reader, tail = broker.reader, broker.tail
    caches: dict[str, Cache[Any, Any]] = {
        "chunk": reader.chunk_cache,
        "segment": reader.group_cache,
        "footer": reader.footer_cache,
    }
    label = ["cache"]
    size = GaugeMetricFamily("tidelog_cache_bytes", "bytes held", labels=label)
    bound = GaugeMetricFamily("tidelog_cache_bytes_max", "bound of the bytes held", labels=label)
    hits = CounterMetricFamily("tidelog_cache_hits", "found, or on its way", labels=label)
    misses = CounterMetricFamily("tidelog_cache_misses", "read from the store", labels=label)
    size.add_metric(["tail"], tail.bytes)
    bound.add_metric(["tail"], tail.bytes_max)
    for name, cache in caches.items():
        size.add_metric([name], cache.bytes)
        bound.add_metric([name], cache.bytes_max)
        hits.add_metric([name], cache.hits)
        misses.add_metric([name], cache.misses)
    yield from (size, bound, hits, misses)


def _topics(broker: Log) -> Iterator[Metric]:
    state = broker.state
    unsealed = GaugeMetricFamily(
        "tidelog_unsealed_bytes", "bytes of the tail, not in the table yet", labels=["topic"]
    )
    for topic in islice(state.topics.values(), SERIES_MAX):
        tail_bytes = sum(partition.tail_bytes for partition in topic.partitions)
        unsealed.add_metric([topic.name], tail_bytes)
    yield unsealed
    ends = GaugeMetricFamily(
        "tidelog_high_watermark", "end of what is committed", labels=["topic", "partition"]
    )
    for topic, number, partition in islice(state.partitions(), SERIES_MAX):
        ends.add_metric([topic.name, str(number)], partition.high_watermark)
    yield ends


def _group_lag(broker: Log) -> Metric:
    """Of the first partitions only, in the order of the groups' first commits (I10)."""
    state = broker.state
    lag = GaugeMetricFamily(
        "tidelog_group_lag",
        f"records after the committed offset, of the first {SERIES_MAX} that are committed",
        labels=["group", "topic", "partition"],
    )
    behind = (
        (group_id, topic, number, committed.offset)
        for group_id in state.groups
        for topic_id, partitions in state.groups.offsets(group_id).items()
        if (topic := state.topic_of_id(topic_id)) is not None
        for number, committed in partitions.items()
    )
    for group_id, topic, number, offset in islice(behind, SERIES_MAX):
        end = topic.partitions[number].high_watermark
        lag.add_metric([group_id, topic.name, str(number)], max(end - offset, 0))
    return lag
