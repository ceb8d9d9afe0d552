"""The counters and gauges of a broker's parts, as `Broker.stats` returns them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.storage.cluster.announcer import AnnouncerCounters
from tidelog.storage.cluster.sequencer import SequencerCounters
from tidelog.storage.io.metered import StoreCounters
from tidelog.storage.read.cache import Cache
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


def cache_stats(cache: Cache[Any, Any]) -> CacheStats:
    return CacheStats(cache.bytes, cache.bytes_max, cache.hits, cache.misses)
