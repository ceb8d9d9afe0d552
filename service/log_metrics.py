"""What /metrics says of the log: its own counters, read when somebody asks. Names and meanings in
service/METRICS.md, which a test holds to this.

On the event loop that owns the log. The number of series is bounded (I10): topics and partitions
beyond the bound are counted and not shown.
"""

from collections.abc import Iterator
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from storage.cache import Cache
from storage.histogram import Histogram
from storage.log import Log
from storage.metered import MeteredStore
from storage.state import Topic

SERIES_MAX = 2000
"""Partitions, and topics, with a series of their own: a scrape of so many holds the loop ~25 ms."""


class Series(NamedTuple):
    """One number of the log: `name` without the prefix."""

    name: str
    doc: str
    value: float


def histogram(
    name: str, doc: str, found: dict[str, Histogram], label: str | None = None
) -> HistogramMetricFamily:
    """A family of histograms, by the value of `label`, or one without any."""
    family = HistogramMetricFamily(
        f"tidelog_{name}", doc, labels=None if label is None else [label]
    )
    for value, each in found.items():
        bounds = (*map(str, each.bounds), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(each.counts)), strict=True))
        family.add_metric([] if label is None else [value], buckets, each.total)
    return family


class LogCollector(Collector):
    """Everything that one broker's log counts."""

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
        yield from _writing(self._log)
        yield from _store(self._log)
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
        Series("append_requests", "requests taken into a hot segment", counters.requests),
        Series("append_throttled", "requests refused at the buffer's bound", counters.throttled),
        Series("appended_records", "records committed by this broker", counters.records),
    )


def _writing(broker: Log) -> Iterator[Metric]:
    counters = broker.writer.counters
    yield histogram(
        "queue_wait_seconds",
        "how long the oldest request of each flush waited for it to begin",
        {"": counters.queue_wait},
    )
    yield histogram(
        "commit_latency_seconds",
        "from a flush's encoded batch to its place in the WAL",
        {"": counters.commit_latency},
    )
    yield histogram("batch_requests", "requests that shared a flush", {"": counters.batch_requests})
    yield histogram("batch_records", "records of a flush", {"": counters.batch_records})
    yield histogram("batch_bytes", "bytes of a flush's chunks", {"": counters.batch_bytes})


def _store(broker: Log) -> Iterator[Metric]:
    """What the object store was asked, and how fast it answered; nothing of an unmetered one."""
    if not isinstance(broker.store, MeteredStore):
        return
    counters, label = broker.store.counters, ["verb"]
    requests = CounterMetricFamily(
        "tidelog_store_requests", "requests to the object store", labels=label
    )
    failures = CounterMetricFamily(
        "tidelog_store_request_failures", "of these, without an answer or refused", labels=label
    )
    for verb, count in counters.requests.items():
        requests.add_metric([verb], count)
        failures.add_metric([verb], counters.failures[verb])
    yield from (requests, failures)
    yield histogram(
        "store_request_seconds", "latency of the object store", counters.seconds, "verb"
    )
    size = CounterMetricFamily(
        "tidelog_store_bytes", "bytes of objects written (in) and read (out)", labels=["direction"]
    )
    size.add_metric(["in"], counters.bytes_written)
    size.add_metric(["out"], counters.bytes_read)
    yield size


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
        Series(
            "wal_view_age_seconds",
            "WAL lag behind the store: so long ago nothing was beyond this broker's view",
            broker.wal.view_age_s,
        ),
        Series("wal_seq", "number of the newest entry applied", state.seq),
        Series("topics", "topics", len(state.topics)),
        Series("partitions", "partitions of all topics", partitions),
        Series("group_offsets", "committed offsets of all consumer groups", state.groups.count),
        Series(
            "group_series_omitted",
            f"committed offsets without a lag of their own: only the first {SERIES_MAX} have one",
            max(state.groups.count - SERIES_MAX, 0),
        ),
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
    state, now_ms = broker.state, broker.clock.now_ms()
    unsealed = GaugeMetricFamily(
        "tidelog_unsealed_bytes", "bytes of the tail, not in the table yet", labels=["topic"]
    )
    ages = GaugeMetricFamily(
        "tidelog_unsealed_age_seconds", "age of the oldest unsealed record", labels=["topic"]
    )
    for topic in islice(state.topics.values(), SERIES_MAX):
        tail_bytes = sum(partition.tail_bytes for partition in topic.partitions)
        unsealed.add_metric([topic.name], tail_bytes)
        oldest_ms = unsealed_since_ms(topic, now_ms)
        ages.add_metric([topic.name], (now_ms - oldest_ms) / 1000)
    yield from (unsealed, ages)
    label = ["topic", "partition"]
    starts = GaugeMetricFamily(
        "tidelog_log_start_offset", "first offset that is kept", labels=label
    )
    ends = GaugeMetricFamily("tidelog_high_watermark", "end of what is committed", labels=label)
    for topic, number, partition in islice(state.partitions(), SERIES_MAX):
        starts.add_metric([topic.name, str(number)], partition.log_start_offset)
        ends.add_metric([topic.name, str(number)], partition.high_watermark)
    yield from (starts, ends)


def unsealed_since_ms(topic: Topic, now_ms: int) -> int:
    """When the oldest record that is in no table yet was committed; now, where there is none."""
    committed = (held.tail[0].committed_ms for held in topic.partitions if held.tail)
    return min(committed, default=now_ms)


def _group_lag(broker: Log) -> Metric:
    """Of the first partitions only, in the order of the groups' first commits (I10)."""
    lag = GaugeMetricFamily(
        "tidelog_group_lag",
        f"records after the committed offset, of the first {SERIES_MAX} that are committed",
        labels=["group", "topic", "partition"],
    )
    for group_id, topic, number, behind in islice(lags(broker), SERIES_MAX):
        lag.add_metric([group_id, topic, str(number)], behind)
    return lag


def lags(broker: Log) -> Iterator[tuple[str, str, int, int]]:
    """(group, topic, partition, records behind) of all that groups have committed."""
    state = broker.state
    for group_id in state.groups:
        for topic_id, partitions in state.groups.offsets(group_id).items():
            topic = state.topic_of_id(topic_id)
            if topic is None:
                continue
            for number, committed in partitions.items():
                end = topic.partitions[number].high_watermark
                yield group_id, topic.name, number, max(end - committed.offset, 0)
