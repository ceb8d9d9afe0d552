"""A few worlds in which other engines commit to a table."""

import pytest

from tests.sim import machine
from tests.sim.foreign import simulate_foreign

SEEDS = 6


@pytest.mark.slow
def test_i1_i7_foreign_commits_lose_nothing_and_stop_no_other_topic() -> None:
    counts: dict[str, int] = {}
    with machine.quietly():
        for seed in range(SEEDS):
            result = simulate_foreign(seed)
            assert not result.violations, (seed, result.violations[:5])
            for name, count in result.counts.items():
                counts[name] = counts.get(name, 0) + count
    assert all(
        counts.get(f"foreign {hand}") for hand in ("rewrite", "optimize", "remove", "append")
    )
