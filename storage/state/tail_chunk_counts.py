"""The number of chunks in the tails of all topics, and their bound.

A flush adds a chunk to each partition of which it has records, however few. So many small requests
to many partitions add far more to the state than to the store. A broker checks the bound before it
accepts records; the sealer lowers the count (storage.seal.sealer). `apply` refuses nothing and
only counts, because older versions do not check the bound.

- The chunks of a topic count for the principal that created it, because a chunk does not name its
  writer.
- A topic has at most a quarter of the bound. So a principal that may write to one topic cannot take
  the bound from all others, also if the topic's owner has the whole bound.

Requests under way may exceed the bound by the number of partitions in the write buffers. Pure, a
part of the cluster state, the same on every broker (I4).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from tidelog.storage.core.errors import BoundReached
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.principal_shares import TAIL_CHUNKS, Need, Shares
from tidelog.storage.state.topic import Topic
from tidelog.storage.state.topic_owners import TopicOwners

CHUNKS_MAX = 2_000_000
"""Bound of the chunks in all tails (I10): ~370 bytes each in memory, 450 after a broker's start,
and 77 in each checkpoint. 200,000 partitions may have ten chunks each."""


class TailChunks:
    """The number of chunks in the tails of each topic.

    Owned by the cluster state, whose topics it reads. A `quota` is that of `Shares.refusal`.
    """

    def __init__(self, topics: Mapping[str, Topic], owners: TopicOwners, shares: Shares) -> None:
        self._topics = topics
        self._owners = owners
        self._shares = shares
        self._counts: dict[str, int] = {}
        self.growth: defaultdict[str, int] = defaultdict(int)
        """By topic id: the chunks that the entry under way adds. `apply` counts here, because to
        count for a principal takes longer; `settle` does that once for an entry."""

    def of_topic(self, topic_id: str) -> int:
        return self._counts.get(topic_id, 0)

    def owner(self, topic_id: str) -> str:
        """Return the principal for which the chunks of a topic count; empty if there is none."""
        return self._owners.owner(topic_id)

    # -- counting

    def settle(self) -> None:
        """Count the growth by an entry for the owners of its topics."""
        for topic_id, added_chunks in self.growth.items():
            self._add(topic_id, added_chunks)
        self.growth.clear()

    def removed(self, topic_id: str) -> None:
        """Stop counting a topic. Call this while its owner is known."""
        self.growth.pop(topic_id, None)
        self._add(topic_id, -self.of_topic(topic_id))

    def load(self) -> None:
        """Count the tails of a checkpoint. Call this after its topics and owners are loaded."""
        for topic_id, topic in self._topics.items():
            self._add(topic_id, sum([len(partition.tail) for partition in topic.partitions]))

    def _add(self, topic_id: str, added_chunks: int) -> None:
        if not added_chunks:
            return
        count = self.of_topic(topic_id) + added_chunks
        if count:
            self._counts[topic_id] = count
        else:
            del self._counts[topic_id]
        self._shares.add(TAIL_CHUNKS, self.owner(topic_id), added_chunks)

    # -- what brokers do

    def has_room(self, added_chunks: int) -> bool:
        """Return whether there is room for so many chunks in every share. Cheap."""
        return self._shares.total(TAIL_CHUNKS) + added_chunks <= rules.share_of(CHUNKS_MAX, None)

    def refusal(
        self, parts: Iterable[tuple[str, int]], quota: Callable[[str, str], int | None]
    ) -> BoundReached | None:
        """Return why a broker must not accept a request now, or None.

        `parts` has topic ids, and the number of partitions for which the request has records.
        """
        chunks_by_topic: dict[str, int] = {}
        for topic_id, added_chunks in parts:
            if topic_id in self._topics:  # else `apply` refuses the request
                chunks_by_topic[topic_id] = chunks_by_topic.get(topic_id, 0) + added_chunks
        topic_max = rules.share_of(CHUNKS_MAX, None)
        for topic_id, added_chunks in chunks_by_topic.items():
            count = self.of_topic(topic_id)
            if count + added_chunks > topic_max:
                name = f"the topic {self._topics[topic_id].name!r}"
                return rules.refused(TAIL_CHUNKS, name, count, topic_max, added_chunks)
        needs = [
            Need(TAIL_CHUNKS, self.owner(topic_id), added_chunks, CHUNKS_MAX)
            for topic_id, added_chunks in chunks_by_topic.items()
        ]
        return self._shares.refusal(needs, quota)

    def crowded(self, fullness: float, quota: Callable[[str, str], int | None]) -> dict[str, float]:
        """Return by owner from how many chunks on a topic must be sealed.

        An owner is in the result if it has more than this part of its share, or all owners together
        have more than this part of the bound. The number is half of the mean of the topics, so the
        topics with as many have at least half of the chunks.
        """
        shares = self._shares
        total = shares.total(TAIL_CHUNKS)
        if total <= fullness * rules.share_of(CHUNKS_MAX, None):
            return {}
        by_all = math.inf
        if total > fullness * CHUNKS_MAX:
            by_all = total / shares.total(rules.TOPICS) / 2
        limits: dict[str, float] = {}
        for owner, count in shares.by_principal(TAIL_CHUNKS).items():
            share = rules.principal_share(TAIL_CHUNKS, owner, CHUNKS_MAX, quota)
            by_owner = math.inf
            if count > fullness * share:
                by_owner = count / shares.used(rules.TOPICS, owner) / 2
            if (limit := min(by_owner, by_all)) < math.inf:
                limits[owner] = limit
        return limits
