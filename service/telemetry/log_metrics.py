"""Metrics of the log, read from its counters at each scrape.

METRICS.md lists names and meanings. A test compares that page with this code.

Runs on the event loop that owns the log. The number of series is bounded (I10). Topics and
partitions beyond the bound have no series, and `series_omitted` counts these partitions.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tidelog.service.telemetry import group_lags
from tidelog.service.telemetry.group_lags import LagTotals
from tidelog.storage.broker import Broker, BrokerStats
from tidelog.storage.core.histogram import Histogram
from tidelog.storage.state.principal_shares import TAIL_CHUNKS
from tidelog.storage.state.tail_chunk_counts import CHUNKS_MAX
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.metered import CountedRequest

SERIES_MAX = 2000
"""Maximum partitions, and maximum topics, with series of their own. At this number, a scrape takes
~25 ms of the event loop's time. The scrape pauses several times, so that other callbacks run."""


Series: TypeAlias = tuple[str, str, float]
"""The name of a metric without the prefix `tidelog_`, its documentation, its value."""
Labelled: TypeAlias = tuple[Sequence[str], float]
"""The values of a metric's labels, and its value."""


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    doc: str,
    labels: Sequence[str],
    values: Iterable[Labelled],
) -> Metric:
    family = kind(f"tidelog_{name}", doc, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


counter = partial(_labelled, CounterMetricFamily)
gauge = partial(_labelled, GaugeMetricFamily)


def histogram(
    name: str, doc: str, histograms: dict[str, Histogram], label: str | None = None
) -> HistogramMetricFamily:
    """Build a family of histograms: one for each value of `label`, or one without labels."""
    family = HistogramMetricFamily(
        f"tidelog_{name}", doc, labels=None if label is None else [label]
    )
    for value, value_histogram in histograms.items():
        bounds = (*map(str, value_histogram.bounds), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(value_histogram.counts)), strict=True))
        family.add_metric([] if label is None else [value], buckets, value_histogram.total)
    return family


class LogCollector(Collector):
    """The collector of all metrics of one broker's log."""

    def __init__(self, broker: Broker, version: str, lags: LagTotals) -> None:
        self._broker = broker
        self._version = version
        self._lags = lags

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tidelog", "the broker", value=self._identity())
        stats = self._broker.stats()
        counters = (_writer, _wal, _sequencer, _sealer)
        for name, doc, value in chain.from_iterable(of(stats) for of in counters):
            yield CounterMetricFamily(f"tidelog_{name}", doc, value=value)
        for name, doc, value in _gauges(self._broker, stats, self._lags):
            yield GaugeMetricFamily(f"tidelog_{name}", doc, value=value)
        yield from _writing(stats)
        yield from _store(stats)
        yield _sequencing(self._broker)
        yield from _caches(stats)
        yield from _topics(self._broker)

    def _identity(self) -> dict[str, str]:
        return {
            "version": self._version,
            "broker_id": self._broker.name,
            "cluster_id": self._broker.identity.cluster_id,
        }


def _writer(stats: BrokerStats) -> tuple[Series, ...]:
    counters = stats.writer
    return (
        ("flushes", "flushes committed", counters.flushes),
        ("flushes_failed", "flushes that failed or have no known outcome", counters.flushes_failed),
        ("flush_bytes", "bytes of chunks committed", counters.flush_bytes),
        ("append_requests", "requests taken into a hot segment", counters.requests),
        ("append_throttled", "requests refused because the buffer is full", counters.throttled),
        ("appended_records", "records committed by this broker", counters.records),
    )


def _writing(stats: BrokerStats) -> Iterator[Metric]:
    counters = stats.writer
    doc = "time that a flush's oldest request waits for the flush to begin"
    yield histogram("queue_wait_seconds", doc, {"": counters.queue_wait})
    doc = "time from the encoded chunks of a flush to their commit in the WAL"
    yield histogram("commit_latency_seconds", doc, {"": counters.commit_latency})
    yield histogram("batch_requests", "requests in a flush", {"": counters.batch_requests})
    yield histogram("batch_records", "records in a flush", {"": counters.batch_records})
    yield histogram("batch_bytes", "bytes of a flush's chunks", {"": counters.batch_bytes})


def _store(stats: BrokerStats) -> Iterator[Metric]:
    """Yield the requests to the object store and their latencies.

    If the store is not metered, yield nothing.
    """
    if stats.store is None:
        return
    counters, label = stats.store, ["verb"]
    requests = [(list(request), count) for request, count in counters.requests.copy().items()]
    doc = "requests to the object store, by what sent them, did, was asked for, and why"
    yield counter("store_requests", doc, list(CountedRequest._fields), requests)
    failures = [([verb], count) for verb, count in counters.failures.items()]
    doc = "requests to the object store that failed or had no answer"
    yield counter("store_request_failures", doc, label, failures)
    yield histogram(
        "store_request_seconds", "latency of the object store", counters.seconds, "verb"
    )
    sizes = [(["in"], counters.bytes_written), (["out"], counters.bytes_read)]
    doc = "bytes of objects written (in) and read (out)"
    yield counter("store_bytes", doc, ["direction"], sizes)


def _wal(stats: BrokerStats) -> tuple[Series, ...]:
    counters = stats.wal
    return (
        ("wal_puts", "conditional PUTs of entries, retries included", counters.puts),
        ("wal_gets", "reads of entries, polls included", counters.gets),
        ("wal_entries_committed", "entries committed by this broker", counters.entries_committed),
        ("wal_entries_applied", "entries applied, of all brokers", counters.entries_applied),
        ("wal_bytes_written", "bytes of entries written", counters.bytes_written),
        ("wal_lost", "sequence numbers that another broker took first", counters.lost),
        ("wal_unknown", "PUTs with unknown outcome", counters.unknown),
        ("wal_void", "expired views, reloaded from a checkpoint", counters.void),
        ("wal_checkpoints", "checkpoints written", counters.checkpoints),
    )


def _sequencer(stats: BrokerStats) -> tuple[Series, ...]:
    own, sent = stats.sequencer, stats.announcer
    return (
        ("commits", "entries committed by this broker for itself or for peers", own.commits),
        ("drafts", "closed hot segments of this broker, each is one draft", own.drafts),
        ("handovers", "drafts forwarded to the sequencer", own.handed_over),
        ("handovers_refused", "forwarded drafts that the sequencer refused", own.refused),
        ("handovers_unanswered", "forwarded drafts with unknown outcome", own.unanswered),
        (
            "own_commits",
            "own drafts committed by this broker, because the sequencer refused them or did not "
            "answer",
            own.own_commits,
        ),
        ("drafts_taken", "drafts accepted from peers", own.taken),
        ("drafts_not_taken", "drafts from peers refused", own.not_taken),
        ("drafts_uploaded", "large drafts and parts of flushes that were uploaded", own.uploads),
        ("wakeups_sent", "announcements sent to peers, each of one or more entries", sent.sent),
        ("wakeups_failed", "announcements that did not arrive", sent.failed),
        ("wakeups_received", "entries announced by peers", sent.received),
        ("wakeups_useful", "announced entries that could be applied at once", sent.useful),
        ("peers_suspected", "times that a peer was suspected and skipped", sent.suspected),
    )


def _sequencing(broker: Broker) -> Metric:
    sequencer = broker.cluster.members().sequencer
    doc = "the broker that commits for all"
    return gauge("sequencer", doc, ["broker_id"], [([sequencer.name], 1)])


def _sealer(stats: BrokerStats) -> tuple[Series, ...]:
    counters = stats.sealer
    return (
        ("sealed_segments", "segments sealed by this broker", counters.segments),
        ("sealed_records", "records sealed by this broker", counters.rows),
        ("sealed_bytes", "bytes of segments sealed by this broker", counters.bytes),
        ("seal_conflicts", "seals that another broker completed first", counters.conflicts),
        ("seal_failures", "seals that failed and will be retried", counters.failures),
        ("cold_reads", "row groups read from the store", stats.cold_reads),
    )


def _gauges(broker: Broker, stats: BrokerStats, lags: LagTotals) -> tuple[Series, ...]:
    wal, state, members = stats.wal, broker.state, broker.cluster.members()
    partitions = sum(len(topic.partitions) for topic in state.topics.values())
    return (
        (
            "requests_per_flush",
            "average number of conditional PUTs for one committed entry: 1 is ideal; lost races "
            "and unknown outcomes add more (wal_puts / wal_entries_committed)",
            wal.puts / max(wal.entries_committed, 1),
        ),
        ("buffered_bytes", "produced bytes that are not committed yet", stats.buffered_bytes),
        (
            "buffered_bytes_max",
            "bound of the buffer: further requests get 429",
            stats.buffered_bytes_max,
        ),
        (
            "set_aside",
            "requests acknowledged with acks=1 that the store refuses: only this broker's disk has "
            "them",
            stats.set_aside,
        ),
        ("live_brokers", "live brokers, including this one", 1 + len(members.peers)),
        ("is_sequencer", "1 if this broker is the sequencer", members.is_sequencer),
        (
            "wal_view_age_seconds",
            "time since this broker last verified that its view has all entries of the WAL",
            stats.view_age_s,
        ),
        ("wal_seq", "sequence number of the newest applied entry", state.seq),
        ("topics", "topics", len(state.topics)),
        (
            "tables_in_doubt",
            "topics whose table is damaged, was changed by another program or is ahead of the WAL, "
            "as this broker found: nothing is sealed into such a table (tidelog repair)",
            len(broker.stored.doubts()),
        ),
        (
            "damaged_tails",
            "partitions whose tail has a damaged object, as this broker found: they are sealed up "
            "to the damage (tidelog repair --lost)",
            len(broker.stored.damaged_tails()),
        ),
        (
            "holds",
            "backups that run, or crashed less than a quarter of an hour ago: while there is such "
            "a backup, nothing is collected",
            len(state.holds),
        ),
        ("partitions", "partitions of all topics", partitions),
        (
            "group_offsets",
            "committed offsets of all consumer groups",
            state.committed_offsets.count,
        ),
        (
            "group_series_omitted",
            "partitions of groups without a lag series of their own: only the first "
            f"{group_lags.SERIES_MAX} have one; `group_lag_records` counts all",
            lags.partitions - len(lags.series),
        ),
        (
            "tail_chunks",
            "chunks of records that are not sealed: if there are too many, brokers seal early, and "
            f"at last refuse records (bound {CHUNKS_MAX:,})",
            state.shares.total(TAIL_CHUNKS),
        ),
        ("group_members", "members of all consumer groups", state.members.count),
        ("producer_partitions", "(producer, partition) pairs in the state", state.producers.count),
        (
            "series_omitted",
            f"partitions without series: only the first {SERIES_MAX} have them",
            max(partitions - SERIES_MAX, 0),
        ),
    )


def _caches(stats: BrokerStats) -> Iterator[Metric]:
    label, caches = ["cache"], stats.caches
    sizes = [([name], cache.bytes) for name, cache in caches.items()]
    bounds = [([name], cache.bytes_max) for name, cache in caches.items()]
    yield gauge("cache_bytes", "bytes in the cache", label, sizes)
    yield gauge("cache_bytes_max", "bound of the cached bytes", label, bounds)
    # Leave out the tail cache: a read that misses it is a lookup in another cache.
    read = {name: cache for name, cache in caches.items() if name != "tail"}
    hits = [([name], cache.hits) for name, cache in read.items()]
    misses = [([name], cache.misses) for name, cache in read.items()]
    yield counter("cache_hits", "lookups found in the cache or in flight", label, hits)
    yield counter("cache_misses", "lookups that read the store", label, misses)


def _topics(broker: Broker) -> Iterator[Metric]:
    state, now_ms = broker.state, broker.clock.now_ms()
    topics = list(islice(state.topics.values(), SERIES_MAX))
    sizes = [([topic.name], tail_bytes(topic)) for topic in topics]
    ages = [([topic.name], (now_ms - unsealed_since_ms(topic, now_ms)) / 1000) for topic in topics]
    doc = "bytes of the tail that are not in the table yet"
    yield gauge("unsealed_bytes", doc, ["topic"], sizes)
    yield gauge("unsealed_age_seconds", "age of the oldest unsealed record", ["topic"], ages)
    starts, ends = [], []
    for topic, number, partition in islice(state.partitions(), SERIES_MAX):
        starts.append(([topic.name, str(number)], partition.log_start_offset))
        ends.append(([topic.name, str(number)], partition.high_watermark))
    label = ["topic", "partition"]
    yield gauge("log_start_offset", "first offset retained", label, starts)
    yield gauge("high_watermark", "offset after the last committed record", label, ends)


def tail_bytes(topic: Topic) -> int:
    return sum(partition.tail_bytes for partition in topic.partitions)


def unsealed_since_ms(topic: Topic, now_ms: int) -> int:
    """Return the commit time of the topic's oldest unsealed record, else `now_ms`."""
    committed = (partition.tail[0].committed_ms for partition in topic.partitions if partition.tail)
    return min(committed, default=now_ms)
