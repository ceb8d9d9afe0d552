"""The tails that a broker seals now, because they are large, old, or about to leave its memory."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tidelog.storage.core import levels
from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.state.cluster_state import ClusterState, Topic
from tidelog.storage.state.partition import Partition

TAKEOVER_FACTOR = 2
"""Any broker seals a tail that exceeds its limit by this factor, because the broker that owns the
seals of the topic did not seal it. Below this factor only that broker seals it: others would encode
and upload segments that the manifest refuses."""
ALONG_PART = 4
"""If a tail of a topic is due, the topic's other tails that are older than this part of
`segment.ms` are sealed in the same commit. So a topic of many partitions has few commits."""
EVICTION_PART = 2
"""A tail is due if this part of the tail cache was added since its first record in the cache. A
seal that begins later may read the records from the store again."""
EVICTION_BYTES_MIN = 4 * 1024 * 1024
"""A tail of fewer stored bytes is not sealed before it leaves the tail cache. To read it again is
cheaper: at S3's prices, a PUT for each MiB costs more than the CPU time of the reads."""
FULLNESS, TAKEOVER_FULLNESS = 1 / 2, 3 / 4
"""If a principal's topics have more than this part of its share of all chunks, the largest of them
are sealed: by the broker that owns the seals, or by any broker. The same holds for all topics and
the bound. At the whole share brokers refuse records (storage.state.tail_chunks)."""


class DueTails(NamedTuple):
    """The rules of one broker. `owns` returns whether this broker seals the tails of a topic id as
    soon as they are due. `topic_chunks_max` bounds the chunks of all tails of a topic together."""

    now_ms: Callable[[], int]
    tail_chunks_max: int
    topic_chunks_max: int
    owns: Callable[[str], bool]
    cache: TailCache

    def of(self, state: ClusterState) -> Iterator[tuple[Topic, list[int]]]:
        """Yield each topic, and its partitions whose tails are due. The caller may await between
        two topics."""
        now_ms = self.now_ms()
        quota = state.access.quota
        own = state.tail_chunks.crowded(FULLNESS, quota)
        others = state.tail_chunks.crowded(TAKEOVER_FULLNESS, quota)
        for topic in list(state.topics.values()):
            if state.topic_of_id(topic.topic_id) is not None:  # else deleted during an await
                is_own = self.owns(topic.topic_id)
                chunks_max = self._chunks_max(state, topic, own if is_own else others, is_own)
                yield topic, self._of_topic(state, topic, now_ms, chunks_max, is_own)

    def _chunks_max(
        self, state: ClusterState, topic: Topic, crowded: Mapping[str, float], is_own: bool
    ) -> float:
        """Return the number of chunks at which a tail of the topic is due."""
        factor = 1 if is_own else TAKEOVER_FACTOR
        tail_max, topic_max = factor * self.tail_chunks_max, float(factor * self.topic_chunks_max)
        count = state.tail_chunks.of_topic(topic.topic_id)
        if crowded:
            owner = state.tail_chunks.owner(topic.topic_id)
            topic_max = min(topic_max, crowded.get(owner, math.inf))
        if not count or count < topic_max:
            return tail_max
        # Tails of half of the mean have together at least half of the chunks.
        tails = sum([1 for partition in topic.partitions if partition.tail])
        return min(tail_max, count / tails / 2)

    def _of_topic(
        self, state: ClusterState, topic: Topic, now_ms: int, chunks_max: float, is_own: bool
    ) -> list[int]:
        # One loop without calls: a topic may have 10,000 partitions.
        config = topic.config
        factor = 1 if is_own else TAKEOVER_FACTOR
        bytes_max = factor * config.segment_bytes
        before_ms = now_ms - factor * config.segment_ms
        along_ms = now_ms - config.segment_ms / ALONG_PART
        # A writer's clock was ahead of this one. At level 1 this is no reason: there all later
        # entries have at least the time of that writer.
        after_ms = now_ms + SKEW_MS_MAX if state.level > levels.FIRST else math.inf
        numbers: list[int] = []
        is_any_due = False
        for number, partition in enumerate(topic.partitions):
            if not (tail := partition.tail):
                continue
            time_ms, nbytes = tail[0].committed_ms, partition.tail_bytes
            is_due = (
                nbytes >= bytes_max
                or not before_ms < time_ms <= after_ms
                or len(tail) >= chunks_max
                or (
                    is_own
                    and nbytes >= EVICTION_BYTES_MIN
                    and self._leaves_memory(topic.topic_id, number, partition)
                )
            )
            if not is_due and time_ms > along_ms:
                continue
            if tail[0].is_lost and all(chunk.is_lost for chunk in tail):
                continue  # lost records are sealed with the next ones
            is_any_due = is_any_due or is_due
            numbers.append(number)
        return numbers if is_any_due else []

    def _leaves_memory(self, topic_id: str, number: int, partition: Partition) -> bool:
        passed = self.cache.passed((topic_id, number), partition.sealed_end)
        return passed > self.cache.bytes_max // EVICTION_PART
