"""Worlds of brokers whose messages come twice, while the store refuses one PUT in five.

A draft that was forwarded and refused comes again: its client has the answer "not written".
"""

from tests.sim import machine
from tests.sim.plans import KINDS, plan_of
from tests.sim.runs import Result, Run, simulated


def simulate_doubled(seed: int, *, lines: list[str] | None = None) -> Result:
    """The run of this seed, judged."""
    plan = plan_of(seed * len(KINDS) + KINDS.index("brokers"))
    plan = plan._replace(
        air=plan.air._replace(doubled=0.3, lost=0.02, reset=0.02),
        weather=plan.weather._replace(refused=0.2, lost=0.0, failed=0.0),
    )
    with machine.quietly():
        return simulated(seed, plan, Run, lines)
