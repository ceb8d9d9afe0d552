"""The counters of a writer, for metrics."""

from dataclasses import dataclass, field

from tidelog.storage.core.histogram import BYTES, COUNTS, Histogram
from tidelog.storage.write.hot_segment import EncodedDraft


@dataclass
class WriterCounters:
    """Counters since the process started."""

    flushes: int = 0
    flushes_failed: int = 0
    requests: int = 0
    throttled: int = 0
    records: int = 0
    flush_bytes: int = 0
    commit_latency: Histogram = field(default_factory=Histogram)
    queue_wait: Histogram = field(default_factory=Histogram)
    """Wait of the oldest request in each flush."""
    batch_requests: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_records: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))

    def flushed(self, requests: int, encoded: EncodedDraft, seconds: float) -> None:
        """Count a flush of `requests` requests, whose commit took `seconds`."""
        size = sum(map(len, encoded.draft.bodies))
        records = sum([chunk.rows for chunk in encoded.draft.chunks])
        self.flushes += 1
        self.flush_bytes += size
        self.records += records
        self.commit_latency.add(seconds)
        self.batch_requests.add(requests)
        self.batch_records.add(records)
        self.batch_bytes.add(size)
