"""Shares: how much of each bound of the cluster state one principal may use.

A bound without shares belongs to the first principal that fills it, and then all others are
refused. So from LEVEL on, `apply` refuses a commit that would raise a principal above its share
(I10). Nothing that a principal has is dropped for it: whoever is above a share only gets no more.

- The share is the quota with the bound's name, of the principal or of DEFAULT; without a quota, a
  quarter of the bound. Four principals can fill a bound, and one principal cannot.
- Clients without authentication and User:admin have the whole bound. The first have no name by
  which `apply` could tell them apart; the second sets the quotas.

The counts are not in checkpoints. They follow from what is: who created a topic, who owns a group,
and so on. Pure, a part of the cluster state, the same on every broker (I4).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tidelog.storage.core.acls import ADMIN
from tidelog.storage.core.errors import Throttled

LEVEL = 3
"""The level of the format from which `apply` enforces shares."""
PARTS = 4
"""A principal without a quota may use one part in PARTS of a bound."""
TOPICS_MAX = 10_000
"""Bound of all topics (I10): each has a Delta table, which brokers and maintenance look at."""
PARTITIONS_MAX = 200_000
"""Bound of all partitions (I10): 200 bytes each, in memory and in each checkpoint. Kafka's advice
for a cluster is the same number."""
PATTERNS_MAX = 4_000
"""Bound of the members that subscribe by a pattern (I10): the names of new topics are matched
against each pattern. The share is 1,000, the most members of one group."""

TOPICS, PARTITIONS, KEYS = "topics", "partitions", "keys"
OFFSETS, OFFSET_METADATA_BYTES = "offsets", "offset_metadata_bytes"
MEMBERS, PATTERNS = "members", "patterns"
IDEMPOTENCY_KEYS = "idempotency_keys"
PRODUCERS, PRODUCER_PARTITIONS = "producers", "producer_partitions"


class _Words(NamedTuple):
    """The words of a refusal: what is counted, how its number falls, and when to retry."""

    counted: str
    relief: str
    retry_after_ms: int = 60_000


_DELETE_TOPICS = "delete topics"
_EXPIRE = "they expire a week after the last commit of a group without members: delete groups"
_LEAVE = "delete consumer instances"
_WORDS = {
    TOPICS: _Words("topics", _DELETE_TOPICS),
    PARTITIONS: _Words("partitions", _DELETE_TOPICS),
    KEYS: _Words("API keys", "delete keys"),
    OFFSETS: _Words("committed offsets", _EXPIRE, 600_000),
    OFFSET_METADATA_BYTES: _Words("bytes of offset metadata", _EXPIRE, 600_000),
    MEMBERS: _Words("members of groups", _LEAVE),
    PATTERNS: _Words("members that subscribe by pattern", _LEAVE),
    IDEMPOTENCY_KEYS: _Words("idempotency keys", "they are forgotten after an hour"),
    PRODUCERS: _Words("producer ids", "they are forgotten after a day without use"),
    PRODUCER_PARTITIONS: _Words("partitions of producers", "they are forgotten after a day"),
}
NAMES = tuple(_WORDS)
"""The bounds that have shares; quotas of these names set a principal's share."""


class Need(NamedTuple):
    """What an action would add to what a principal has of a bound. `maximum` is the bound."""

    bound: str
    principal: str
    more: int
    maximum: int


class Shares:
    """What each principal uses of each bound. Owned by the cluster state; its parts call `add`."""

    def __init__(self) -> None:
        self._used: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
        self._totals: Counter[str] = Counter()

    def add(self, bound: str, principal: str, count: int) -> None:
        """Count what a principal got, or with a negative number what it no longer has."""
        used = self._used[bound]
        left = used[principal] + count
        if left:
            used[principal] = left
        else:
            del used[principal]
        self._totals[bound] += count

    def used(self, bound: str, principal: str) -> int:
        return self._used[bound][principal]

    def total(self, bound: str) -> int:
        """Return what all principals use together."""
        return self._totals[bound]

    def refusal(
        self, needs: Iterable[Need], quota: Callable[[str, str], int | None]
    ) -> Throttled | None:
        """Return why a commit that needs all of these is refused, or None. `quota` returns a
        principal's quota of a name, or None."""
        gained: Counter[tuple[str, str]] = Counter()
        gained_by_all: Counter[str] = Counter()
        for bound, principal, more, maximum in needs:
            if more <= 0:
                continue
            gained[bound, principal] += more
            gained_by_all[bound] += more
            share = share_of(principal, maximum, quota(bound, principal))
            used = self._used[bound][principal]
            if share < maximum and used + gained[bound, principal] > share:
                return _refused(bound, f"the principal {principal}", used, share)
            if self._totals[bound] + gained_by_all[bound] > maximum:
                return _refused(bound, "the cluster", self._totals[bound], maximum)
        return None


def share_of(principal: str, maximum: int, quota: int | None) -> int:
    """Return the most that the principal may have of a bound."""
    if principal in ("", ADMIN):
        return maximum
    return max(maximum // PARTS, 1) if quota is None else min(quota, maximum)


def _refused(bound: str, whose: str, used: int, most: int) -> Throttled:
    counted, relief, retry_after_ms = _WORDS[bound]
    return Throttled(
        f"{whose} has {used} of its {most} {counted}; {relief} (bound {bound})",
        retry_after_ms=retry_after_ms,
    )
