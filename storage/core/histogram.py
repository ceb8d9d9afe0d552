"""Histogram of durations or sizes: counts by bucket. Pure. `add` takes ~0.3 us."""

from bisect import bisect_left

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds for durations: from the fsync of a local folder to a store that does not respond."""
COUNTS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)
BYTES = (1024.0, 16_384.0, 131_072.0, 1_048_576.0, 8_388_608.0, 67_108_864.0)


class Histogram:
    """Counts by bucket, and the sum. `bounds` are inclusive; the last bucket has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
