"""A process crashes at any await: the others and its replacement continue, and the log is right."""

import pytest

from tests.sim.crashes import SCENARIOS, Scenario, all_of

POINTS_MAX = 12
"""Of one scenario in each test run, spread over it; `make sim ARGS=--crashes` takes all."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_i1_i2_i4_i6_i7_i8_death_at_an_await_breaks_nothing(scenario: Scenario) -> None:
    points = 0
    for step, result in all_of(scenario, points_max=POINTS_MAX):
        points += 1
        assert not result.violations, f"dead at step {step}"
        assert result.counts["acked"]
    assert points > 6
