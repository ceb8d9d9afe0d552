"""The counters and gauges of a broker's parts, as `Broker.stats` returns them, and the files of a
partition."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.storage.cluster.announcer import AnnouncerCounters
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.sequencer import SequencerCounters
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.io.metered import StoreCounters
from tidelog.storage.read.cache import Cache
from tidelog.storage.tables.manifest import SegmentColumns
from tidelog.storage.wal.wal_objects import WalCounters
from tidelog.storage.write.counters import WriterCounters
from tidelog.storage.write.sealer import SealerCounters


class CacheStats(NamedTuple):
    """The state of one cache. `hits` and `misses` count since the process started."""

    bytes: int
    bytes_max: int
    hits: int = 0
    misses: int = 0


class BrokerStats(NamedTuple):
    """All counters of a broker's parts since the process started, and their current gauges. The
    counters still change: read them before the next await. `store` is None if the store is not
    metered."""

    writer: WriterCounters
    wal: WalCounters
    sequencer: SequencerCounters
    announcer: AnnouncerCounters
    sealer: SealerCounters
    store: StoreCounters | None
    caches: Mapping[str, CacheStats]
    cold_reads: int
    buffered_bytes: int
    buffered_bytes_max: int
    view_age_s: float
    set_aside: int
    """Number of requests of the hot log that the store refuses."""
    failing_seals: list[tuple[str, int]]
    """The due partitions whose last seal failed, by topic id and number."""
    gone: list[Member]
    """The brokers whose heartbeats ended without a clean stop."""


class PartitionFiles(NamedTuple):
    """A partition's sealed segments. `live` are the segments with offsets in [log start, sealed
    end). `hot_start` is the first offset in this broker's memory. If no record of the partition is
    in memory, `hot_start` is the high watermark. Key compaction has run up to `clean_end`. If the
    table is damaged, there are no segments, and `damage` is the error."""

    segments: SegmentColumns
    live: SegmentColumns
    clean_end: int
    hot_start: int
    damage: Corrupt | None = None


def cache_stats(cache: Cache[Any, Any]) -> CacheStats:
    return CacheStats(cache.bytes, cache.bytes_max, cache.hits, cache.misses)
