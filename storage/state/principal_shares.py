"""Shares: how much of each bound of the cluster state one principal may use.

Without shares, one principal can fill a bound, and then `apply` refuses what others want to add.
So from LEVEL on, `apply` refuses a commit that would raise a principal above its share (I10). It
drops nothing: a principal above its share keeps what it has and gets no more.

- The share is the quota with the bound's name: the principal's quota, else DEFAULT's. Without a
  quota, the share is a quarter of the bound. Then it takes four principals to fill the bound.
- Clients without authentication may use the whole bound, because they have no principal by which
  `apply` could distinguish them. User:admin may use it too, because this principal sets the quotas.

Checkpoints do not contain the counts. A broker that loads a checkpoint counts again, by the owners
of topics, groups, keys and the other parts. Pure, a part of the cluster state, the same on every
broker (I4).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tidelog.storage.core.acls import ADMIN
from tidelog.storage.core.errors import BoundReached

LEVEL = 3
"""The level of the format from which `apply` enforces shares."""
WITHOUT_SHARE = ("", ADMIN)
"""Principals that may use the whole of each bound."""
PARTS = 4
"""A principal without a quota may use a bound divided by this number."""
TOPICS_MAX = 10_000
"""Bound of all topics (I10): each has a Delta table, which brokers and maintenance read."""
PARTITIONS_MAX = 200_000
"""Bound of all partitions (I10): ~200 bytes each, in memory and in each checkpoint. Kafka advises
the same number for a cluster."""
PATTERNS_MAX = 4_000
"""Bound of the members that subscribe by a pattern (I10): coordinators compare each new topic with
each pattern. The share without a quota is 1,000, the most members of one group."""

TOPICS, PARTITIONS, KEYS = "topics", "partitions", "keys"
OFFSETS, OFFSET_METADATA_BYTES = "offsets", "offset_metadata_bytes"
MEMBERS, PATTERNS, CLIENT_BYTES = "members", "patterns", "client_group_bytes"
IDEMPOTENCY_KEYS = "idempotency_keys"
IDEMPOTENCY_PLACEMENTS = "idempotency_placements"
MEMBER_BYTES = "member_bytes"
PRODUCERS, PRODUCER_PARTITIONS = "producers", "producer_partitions"
TAIL_CHUNKS = "tail_chunks"


class _Words(NamedTuple):
    """The words of a refusal: the things counted, how to lower the count, when to retry."""

    counted: str
    relief: str
    retry_after_ms: int = 60_000


_DELETE_TOPICS = "delete topics"
_EXPIRE = "delete groups; offsets of a group without members expire a week after their commit"
_LEAVE = "delete consumer instances"
_WORDS = {
    TOPICS: _Words("topics", _DELETE_TOPICS),
    PARTITIONS: _Words("partitions", _DELETE_TOPICS),
    KEYS: _Words("API keys", "delete keys"),
    OFFSETS: _Words("committed offsets", _EXPIRE, 600_000),
    OFFSET_METADATA_BYTES: _Words("bytes of offset metadata", _EXPIRE, 600_000),
    MEMBERS: _Words("members of groups", _LEAVE),
    PATTERNS: _Words("members that subscribe by pattern", _LEAVE),
    CLIENT_BYTES: _Words("bytes of groups that clients assign", "stop members of such groups"),
    IDEMPOTENCY_KEYS: _Words("idempotency keys", "they expire after an hour"),
    IDEMPOTENCY_PLACEMENTS: _Words(
        "partitions of requests with idempotency keys", "they expire after an hour"
    ),
    MEMBER_BYTES: _Words("bytes of subscriptions and assignments", _LEAVE),
    PRODUCERS: _Words("producer ids", "they expire after a day without use"),
    PRODUCER_PARTITIONS: _Words(
        "partitions of producers", "they expire after a day without a batch"
    ),
    TAIL_CHUNKS: _Words(
        "chunks of records that are not sealed",
        "brokers seal them now; retry, with more records for fewer partitions",
        5_000,
    ),
}
DERIVED = {
    IDEMPOTENCY_PLACEMENTS: (IDEMPOTENCY_KEYS, 4),
    MEMBER_BYTES: (MEMBERS, 5_000),
    TAIL_CHUNKS: (PARTITIONS, 10),
}
"""Bounds without a quota of their own: the bound whose quota raises a principal's share of them,
and how much of the share each unit of that quota is. Brokers check them before they accept a
request; `apply` does not, because older versions do not."""
NAMES = tuple(name for name in _WORDS if name not in DERIVED)
"""The bounds that have shares. A quota of one of these names sets a principal's share."""


class Need(NamedTuple):
    """The number (`more`) that an action would add to a principal's use of a bound.

    `maximum` is the bound for all principals together.
    """

    bound: str
    principal: str
    more: int
    maximum: int


class Shares:
    """The use of each bound by each principal. Owned by the cluster state. Its parts call `add`."""

    def __init__(self) -> None:
        self._used: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
        self._totals = dict.fromkeys(_WORDS, 0)

    def add(self, bound: str, principal: str, count: int) -> None:
        """Add `count` to a principal's use of a bound. When the use ends, `count` is negative."""
        used = self._used[bound]
        new_count = used.get(principal, 0) + count
        if new_count:
            used[principal] = new_count
        else:
            used.pop(principal, None)
        self._totals[bound] += count

    def change(self, bound: str, old_counts: Counter[str], new_counts: Counter[str]) -> None:
        """Count a use by principal in place of another one."""
        for principal in old_counts.keys() | new_counts.keys():
            self.add(bound, principal, new_counts[principal] - old_counts[principal])

    def used(self, bound: str, principal: str) -> int:
        return self._used[bound].get(principal, 0)

    def total(self, bound: str) -> int:
        """Return the use of a bound by all principals together."""
        return self._totals[bound]

    def by_principal(self, bound: str) -> Mapping[str, int]:
        """Return the use of a bound by each principal that uses it."""
        return self._used[bound]

    def refusal(
        self, needs: Iterable[Need], quota: Callable[[str, str], int | None]
    ) -> BoundReached | None:
        """Return why to refuse a commit that has all `needs` together, or None.

        `quota` takes the name of a bound and a principal, and returns the principal's quota or
        None.
        """
        gained: dict[str | tuple[str, str], int] = {}
        for bound, principal, added_count, maximum in needs:
            if added_count <= 0:
                continue
            both = bound, principal
            by_one = gained[both] = gained.get(both, 0) + added_count
            by_all = gained[bound] = gained.get(bound, 0) + added_count
            if principal not in WITHOUT_SHARE:
                share = principal_share(bound, principal, maximum, quota)
                used = self._used[bound].get(principal, 0)
                if used + by_one > share:
                    return refused(bound, f"the principal {principal}", used, share, by_one)
            total = self._totals[bound]
            if total + by_all > maximum:
                return refused(bound, "the cluster", total, maximum, by_all)
        return None


def share_of(maximum: int, quota: int | None) -> int:
    """Return the most that a principal may have of a bound."""
    return max(maximum // PARTS, 1) if quota is None else min(quota, maximum)


def principal_share(
    bound: str, principal: str, maximum: int, quota: Callable[[str, str], int | None]
) -> int:
    """Return the most that a principal may have of a bound with this maximum."""
    if principal in WITHOUT_SHARE:
        return maximum
    if bound not in DERIVED:
        return share_of(maximum, quota(bound, principal))
    base, part = DERIVED[bound]
    raised = (quota(base, principal) or 0) * part
    return share_of(maximum, max(raised, share_of(maximum, None)))


def refused(bound: str, whose: str, used: int, most: int, added_count: int) -> BoundReached:
    """Return the refusal of `added_count` of a bound. `whose` names what uses the bound."""
    counted, relief, retry_after_ms = _WORDS[bound]
    return BoundReached(
        f"{whose} has {used} of its {most} {counted} and needs {added_count} more: {relief} "
        f"(bound {bound})",
        retry_after_ms=retry_after_ms,
    )
