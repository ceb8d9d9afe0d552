"""How many followers a principal may have at a broker, and how many partitions they may follow.

A commit costs a broker ~0.1 ms for each follower and partition with new records, so followers of
wide topics cost more than others.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.storage.core.errors import Throttled

STREAMS_OF_PRINCIPAL_MAX = 1_000
FOLLOWED_PARTITIONS_MAX = 8_000
"""Bound of the partitions of all followers of a principal. A partition counts once for each of its
followers, so STREAMS_OF_PRINCIPAL_MAX followers may follow topics of 8 partitions."""
STREAMS_RETRY_MS = 10_000


class Followers:
    """The followers of each principal, and their partitions.

    One per broker. Without security, all clients are the principal `""`, and only the bound of the
    connections applies.
    """

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()
        """Number of followers by principal."""
        self.partitions: Counter[str] = Counter()
        """Number of followed partitions by principal."""

    @contextmanager
    def follower(self, principal: str, partitions: int) -> Iterator["Follower"]:
        """Count a follower of so many partitions. Raises Throttled."""
        if principal and self.streams[principal] >= STREAMS_OF_PRINCIPAL_MAX:
            raise Throttled(
                f"{principal} has {self.streams[principal]} followers at this broker, which is "
                "the maximum: end one, or use another broker",
                retry_after_ms=STREAMS_RETRY_MS,
            )
        follower = Follower(self, principal)
        follower.grow(partitions)
        self.streams[principal] += 1
        try:
            yield follower
        finally:
            self.streams[principal] -= 1
            self.partitions[principal] -= follower.partitions
            if not self.streams[principal]:
                del self.streams[principal], self.partitions[principal]


class Follower:
    """One stream, which follows `partitions` partitions of a topic."""

    def __init__(self, followers: Followers, principal: str) -> None:
        self._followers = followers
        self._principal = principal
        self.partitions = 0

    def grow(self, partitions: int) -> None:
        """Count the partitions of the topic, which are more than before. Raises Throttled."""
        counts, principal = self._followers.partitions, self._principal
        other_partitions = counts[principal] - self.partitions
        if principal and other_partitions + partitions > FOLLOWED_PARTITIONS_MAX:
            raise Throttled(
                f"{principal} has followers of {other_partitions} partitions at this broker, and "
                f"with {partitions} partitions more they exceed {FOLLOWED_PARTITIONS_MAX}: end a "
                "follower, use another broker, or use a consumer group",
                retry_after_ms=STREAMS_RETRY_MS,
            )
        counts[principal] = other_partitions + partitions
        self.partitions = partitions
