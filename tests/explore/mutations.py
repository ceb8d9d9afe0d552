"""The deliberate faults of commit, hand-over, seal and collection: a search must find each.

They are those of tests.sim.mutations; here each has a world, a bound and a number of schedules.
"""

import os
from multiprocessing import get_context
from typing import NamedTuple

from tests.explore.choices import Bound
from tests.explore.script import SCRIPTS
from tests.explore.search import Failure, search
from tests.sim.mutations import MUTATIONS

_BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


class Sought(NamedTuple):
    """A fault, and how soon a search must find it."""

    name: str
    world: str
    bound: Bound
    schedules_max: int


class Found(NamedTuple):
    """Schedules until the violation, and recoveries among them; None: there was none."""

    schedules: int
    failure: Failure | None


SOUGHT = tuple(
    Sought(name, world, Bound(2, 2, both), schedules_max)
    for name, world, both, schedules_max in (
        ("an unknown PUT counts as done", "small", 1, 60),
        ("412 is always another's", "small", 1, 60),
        ("an unknown PUT that is absent goes to the next number", "small", 1, 60),
        ("acked before the PUT", "small", 1, 60),
        ("announced to peers before the PUT", "small", 1, 60),
        ("a suspended writer does not look after its PUT", "small", 1, 400),
        ("reads do not ask the WAL", "small", 1, 400),
        ("a store that overwrites", "small", 1, 60),
        ("idempotency keys are forgotten", "small", 1, 60),
        ("a handed-over draft is put twice", "small", 1, 60),
        ("the Delta transaction is no lock", "large", 1, 200),
        ("sealed in the WAL before the table", "small", 1, 200),
        ("a segment that misses its last record", "small", 0, 10),
        ("collects entries of tails", "small", 0, 10),
        ("collects a segment too many", "small", 0, 10),
    )
)
"""Not here: a view that is never too old, and a shorter retention or grace of a collector. In these
worlds no file or checkpoint is young while a process is suspended."""


def seek(sought: Sought) -> Found:
    """Search with the guard taken out, until a violation."""
    with _BY_NAME[sought.name].applied():
        script = SCRIPTS[sought.world]
        result = search(script, sought.bound, schedules_max=sought.schedules_max)
    return Found(result.schedules, result.failures[0] if result.failures else None)


def main(jobs: int, at_most: int) -> int:
    """Seek all that a search finds within so many schedules; return 1 if one is missed."""
    mutations = [sought for sought in SOUGHT if sought.schedules_max <= at_most]
    print(f"{'mutation':<56} {'world':<6} {'bound':<5} {'schedules':>9}  what was seen", flush=True)
    missed = 0
    with get_context("spawn").Pool(min(jobs, os.cpu_count() or 1)) as pool:
        for sought, result in zip(mutations, pool.imap(seek, mutations), strict=True):
            missed += result.failure is None
            bound = str(sought.bound.both)
            number = "MISSED" if result.failure is None else str(result.schedules)
            kinds = sorted(
                {kind for kind, _ in result.failure.violations} if result.failure else ()
            )
            print(
                f"{sought.name:<56} {sought.world:<6} {bound:<5} {number:>9}  {', '.join(kinds)}",
                flush=True,
            )
    print(f"{len(mutations)} mutations, {missed} missed", flush=True)
    return 1 if missed else 0
