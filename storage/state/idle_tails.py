"""When a tail is old enough for a seal: at `segment.ms`, or later if it is nearly idle. Pure.

Each seal costs at least two PUTs, and makes a file. A topic of a record each few minutes would pay
for thousands of files of a few records. So a small tail waits for hours, unless an operator asked
for more: a `segment.ms` of the topic, or a default of the cluster, holds for tails of any size.

Readers of tidelog miss nothing, because they read the tail. Readers of the table alone, such as
DuckDB, see such records later. The tail keeps its objects in the WAL, and takes a chunk of memory
for each flush, so a tail of many chunks is not idle. Retention takes whole segments only, so a tail
never waits longer than a part of the time for which its records are kept.
"""

from tidelog.storage.core.topic_configs import MS_PER_HOUR
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.topic import Topic

SEGMENT_MS = "segment.ms"
IDLE_MS = 6 * MS_PER_HOUR
"""Age at which a nearly idle tail is sealed."""
IDLE_BYTES = 256 * 1024
"""A tail of at least as many stored bytes is not idle."""
IDLE_CHUNKS = 64
"""A tail of at least as many chunks is not idle: a record each 10 minutes makes 36 in IDLE_MS, and
1,000 such topics 24 MB of memory at every broker."""
RETENTION_PART = 4


def idle_ms(topic: Topic) -> int:
    """Return the age in ms at which nearly idle tails of the topic are sealed."""
    config = topic.config
    if SEGMENT_MS in topic.configs or SEGMENT_MS in topic.defaults.configs:
        return config.segment_ms
    kept_ms = IDLE_MS if config.retention_ms < 0 else config.retention_ms // RETENTION_PART
    return max(config.segment_ms, min(IDLE_MS, kept_ms))


def is_idle(partition: Partition) -> bool:
    """Return whether a partition's tail is small enough to wait for `idle_ms`."""
    return partition.tail_bytes < IDLE_BYTES and len(partition.tail) < IDLE_CHUNKS


def due_ms(topic: Topic, now_ms: int) -> int:
    """Return when the first tail of the topic is due by its age; `now_ms` if there is no tail."""
    segment_ms, late_ms = topic.config.segment_ms, idle_ms(topic)
    due = (
        partition.tail[0].committed_ms + (late_ms if is_idle(partition) else segment_ms)
        for partition in topic.partitions
        if partition.tail
    )
    return min(due, default=now_ms)
