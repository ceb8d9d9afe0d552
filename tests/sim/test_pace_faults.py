"""Ticks, tokens and alignment are advice: wrong ones cost time, and no record."""

import pytest

from tests.sim.mutations import Mutation, seeds_needed
from tests.sim.pace_mutations import HARMLESS, Made
from tests.sim.plans import KINDS, plan_of

SEEDS = 3


def paced_seeds() -> list[int]:
    """Worlds of several brokers, in which commits wait for their turn."""
    seeds = (seed for seed in range(1000) if KINDS[seed % len(KINDS)] == "brokers")
    plans = ((seed, plan_of(seed)) for seed in seeds)
    return [seed for seed, plan in plans if plan.is_paced and plan.brokers > 1][:SEEDS]


@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: fault.__name__)
def test_i1_a_fault_of_the_pace_costs_no_record(fault: Made) -> None:
    mutation = Mutation(fault.__name__, fault, ("brokers",), SEEDS)
    assert seeds_needed(mutation, paced_seeds()) == (None, "")
