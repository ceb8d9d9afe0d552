"""The tails that a broker seals now, because they are large, old, or about to leave its memory."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidelog.storage.core import levels
from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.core.topic_configs import TopicConfig
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
EVICTION_BYTES_MIN = 1024 * 1024
"""A tail of fewer stored bytes is not sealed before it leaves the tail cache. To read it again is
cheaper than many small segments."""


class DueTails(NamedTuple):
    """The rules of one broker. `owns` returns whether this broker seals the tails of a topic id as
    soon as they are due."""

    now_ms: Callable[[], int]
    tail_chunks_max: int
    owns: Callable[[str], bool]
    cache: TailCache

    def of(self, state: ClusterState) -> Iterator[tuple[Topic, list[int]]]:
        """Yield each topic, and its partitions whose tails are due. The caller may await between
        two topics."""
        now_ms = self.now_ms()
        for topic in list(state.topics.values()):
            if state.topic_of_id(topic.topic_id) is not None:  # else deleted during an await
                yield topic, self._of_topic(state, topic, now_ms)

    def _of_topic(self, state: ClusterState, topic: Topic, now_ms: int) -> list[int]:
        tails = [each for each in enumerate(topic.partitions) if each[1].tail]
        if not tails:
            return []
        config = state.config(topic)
        is_own = self.owns(topic.topic_id)
        factor = 1 if is_own else TAKEOVER_FACTOR
        is_first_level = state.level == levels.FIRST
        due = {
            number
            for number, partition in tails
            if (
                self._is_due(config, partition, now_ms, factor, is_first_level=is_first_level)
                or (is_own and self._leaves_memory(topic.topic_id, number, partition))
            )
            # Lost records alone are sealed with the next ones.
            and not all(chunk.is_lost for chunk in partition.tail)
        }
        if not due:
            return []
        old_ms = now_ms - config.segment_ms / ALONG_PART
        return [
            number
            for number, partition in tails
            if number in due
            or (partition.tail[0].committed_ms <= old_ms and not partition.tail[0].is_lost)
        ]

    def _is_due(
        self,
        config: TopicConfig,
        partition: Partition,
        now_ms: int,
        factor: int,
        *,
        is_first_level: bool,
    ) -> bool:
        age_ms = now_ms - partition.tail[0].committed_ms
        return (
            partition.tail_bytes >= factor * config.segment_bytes
            or age_ms >= factor * config.segment_ms
            # The writer's clock was ahead of this one. Not at level 1: there all later entries
            # have at least the time of that writer.
            or (age_ms < -SKEW_MS_MAX and not is_first_level)
            or len(partition.tail) >= factor * self.tail_chunks_max
        )

    def _leaves_memory(self, topic_id: str, number: int, partition: Partition) -> bool:
        return (
            partition.tail_bytes >= EVICTION_BYTES_MIN
            and self.cache.passed((topic_id, number), partition.sealed_end)
            > self.cache.bytes_max // EVICTION_PART
        )
