"""The token bucket of a rate: bytes, requests or CPU time of one principal.

Pure: time is an argument.

As in Kafka, a rate applies to each broker, and bytes are charged after they were transferred. A
principal that exceeds its quota receives 429 with Retry-After until its bucket is refilled to zero.
"""

BURST_S = 1.0
"""The capacity of a bucket is the amount that its rate gives in this time."""


class Bucket:
    """A bucket that refills at `rate` a second.

    Its level may be negative, because one request may be larger than the bucket.
    """

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._level = rate * BURST_S
        self._at_s = now_s

    def throttle_s(self, now_s: float) -> float:
        """Refill the bucket and return the time until its level is 0.

        If the level is not negative, return 0, because there is nothing to wait for.
        """
        passed_s, self._at_s = max(now_s - self._at_s, 0.0), max(now_s, self._at_s)
        self._level = min(self._level + passed_s * self.rate, self.rate * BURST_S)
        return max(-self._level / self.rate, 0.0)

    def charge(self, amount: float) -> None:
        """Subtract an amount that was let through. The level may become negative."""
        self._level -= amount
