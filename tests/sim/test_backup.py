"""Backups of simulated clusters: under load, at any moment, slow ones, and killed at each await."""

import math

from tests.sim.backups import crashed_backup, simulate_backups

SEEDS = 3
CRASH_POINTS = 24
"""Of a backup, spread over all of its awaits."""


def test_i1_i7_i9_i11_a_backup_of_a_running_cluster_has_all_that_was_acknowledged() -> None:
    counts: dict[str, int] = {}
    for seed in range(SEEDS):
        result = simulate_backups(seed)
        assert not result.violations, (seed, result.violations[:5])
        for name, count in result.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert counts["restored"] >= 12
    assert counts["restored at a time"] >= 12
    assert counts["slow backups"] >= 2, "those that last three graces"
    assert counts["collected"] > 50
    assert counts["held"] > 75
    assert counts["returned"] > 25, "producers that live on at restored clusters"
    assert counts["new epochs"] > 0, "of those whose newest batches are not there"
    assert counts["dropped"] > 2


def test_i9_a_backup_that_is_killed_leaves_no_backup_and_its_hold_expires() -> None:
    _, steps = crashed_backup(-1)
    assert steps > CRASH_POINTS
    for step in range(1, steps + 1, math.ceil(steps / CRASH_POINTS)):
        result, _ = crashed_backup(step)
        assert not result.violations, (step, result.violations[:5])
