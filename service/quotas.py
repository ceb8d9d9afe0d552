"""Quotas: a bucket of bytes for each principal and direction. Pure: time is an argument.

As Kafka's, a quota is of each broker, and what was taken is paid for afterwards: whoever owes waits
until it is paid, and is told how long (429, Retry-After) before anything of the next is accepted.
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

    def owes_s(self, now_s: float) -> float:
        """How long until nothing is owed; 0: go on."""
        passed_s, self._at_s = max(now_s - self._at_s, 0.0), max(now_s, self._at_s)
        self._level = min(self._level + passed_s * self.rate, self.rate * BURST_S)
        return max(-self._level / self.rate, 0.0)

    def pay(self, amount: float) -> None:
        """For what was let through."""
        self._level -= amount
