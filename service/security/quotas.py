"""Quotas: a bucket of bytes for each principal and direction. Pure: time is an argument.

As in Kafka, a quota applies to each broker, and bytes are charged after they were transferred. A
principal that exceeds its quota receives 429 with Retry-After until its bucket is refilled to zero.
"""

BURST_S = 1.0
"""So many seconds' worth may come at once."""


class Bucket:
    """`rate` a second. May owe: one request may be larger than any bucket."""

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._level = rate * BURST_S
        self._at_s = now_s

    def throttle_s(self, now_s: float) -> float:
        """How long until nothing is owed; 0: go on."""
        passed_s, self._at_s = max(now_s - self._at_s, 0.0), max(now_s, self._at_s)
        self._level = min(self._level + passed_s * self.rate, self.rate * BURST_S)
        return max(-self._level / self.rate, 0.0)

    def charge(self, amount: float) -> None:
        """For what was let through."""
        self._level -= amount
