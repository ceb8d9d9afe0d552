"""The rules of DESIGN 4 and 5 hold in every state of a small world, and none can be left out."""

import pytest

from tests.sim.model import Rules, explore


def test_i1_i2_i5_i6_i9_hold_in_every_state() -> None:
    explored = explore(Rules())
    assert not explored.violation, (explored.violation, explored.steps)
    assert explored.states > 10_000, "the search has looked at next to nothing"


@pytest.mark.parametrize("rule", Rules._fields)
def test_without_any_one_rule_something_breaks(rule: str) -> None:
    explored = explore(Rules()._replace(**{rule: False}))
    assert explored.violation, f"{rule} is not needed, in {explored.states} states"
    assert len(explored.steps) > 1
