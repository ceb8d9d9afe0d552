"""`make explore`: every choice of a small world within a bound, or one run again.

    make explore                                        the large world, over all cores
    make explore ARGS="--world small"                   the one of the tests
    make explore ARGS="--preemptions 1 --faults 2"      another bound
    make explore ARGS="--world small --replay 0,1,2"    the run with these choices
    make explore ARGS=--mutations                       each deliberate fault, and how many schedules find it
"""

import argparse
import os
from collections.abc import Sequence

from tests.explore import mutations
from tests.explore.choices import Bound
from tests.explore.run import play
from tests.explore.script import SCRIPTS, Script
from tests.explore.search import Failure, Searched, search
from tests.sim import machine

SHOWN = 6
"""Violations of one run."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    script, bound = SCRIPTS[options.world], Bound(options.preemptions, options.faults, options.both)
    if options.mutations:
        return mutations.main(options.jobs, options.at_most)
    if options.replay is not None:
        given = [int(number) for number in options.replay.split(",") if number]
        return _again(script, bound, given, options.acts or len(script.acts))
    _say(
        f"world {script.name}: {script.brokers} brokers, {script.partitions} partitions; at most "
        f"{bound.preemptions} preemptions and {bound.faults} faults a schedule, {bound.both} together"
    )
    found = search(script, bound, jobs=options.jobs, say=_say)
    _tell(script, bound, found)
    return 1 if found.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make explore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", choices=sorted(SCRIPTS), default="large")
    parser.add_argument("--preemptions", type=int, default=2, help="of one schedule, at most")
    parser.add_argument("--faults", type=int, default=2, help="of one schedule, at most")
    parser.add_argument("--both", type=int, default=3, help="of both together, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", help="play these choices again, and print what happens")
    parser.add_argument("--acts", type=int, default=0, help="of the replay; 0: all")
    parser.add_argument("--mutations", action="store_true", help="the deliberate faults instead")
    parser.add_argument("--at-most", type=int, default=10**9, help="those found so soon")
    return parser


def _again(script: Script, bound: Bound, given: list[int], acts: int) -> int:
    lines: list[str] = []
    with machine.quietly():
        run = play(script, given, acts, bound, recovers=True, lines=lines)
    with machine.quietly():
        again = play(script, given, acts, bound, recovers=True)
    _say("\n".join(lines))
    for at, (number, name) in enumerate(zip(run.taken, run.names, strict=True)):
        if number:
            _say(f"choice {at}: {number} of {run.counts[at]}, {name}")
    for kind, text in run.violations:
        _say(f"{kind}: {text}")
    is_same = (again.trace, again.taken) == (run.trace, run.taken)
    _say(f"trace {run.trace}{'' if is_same else f', {again.trace} the second time'}")
    return 1 if run.violations or not is_same else 0


def _tell(script: Script, bound: Bound, found: Searched) -> None:
    for failure in found.failures:
        _say(told(script, bound, failure))
    _say(
        f"{found.choices} choices, {found.schedules} schedules, {sum(found.states)} states "
        f"{list(found.states)}, {found.cut} cut, {found.recoveries} recoveries, "
        f"{len(found.failures)} violations, {found.seconds:.0f} s, "
        f"{found.cpu_s:.0f} s of one core"
    )


def told(script: Script, bound: Bound, failure: Failure) -> str:
    """What is wrong, and how to see it again."""
    given = ",".join(map(str, failure.given[: failure.last + 1])) or "0"
    lines = [f"{kind}: {text[:400]}" for kind, text in failure.violations[:SHOWN]]
    again = (
        f"--world {script.name} --preemptions {bound.preemptions} --faults {bound.faults} --both "
        f"{bound.both} "
        f"--acts {failure.acts} --replay {given}"
    )
    return "\n  ".join([f'VIOLATION, again with: make explore ARGS="{again}"', *lines])


def _say(line: str) -> None:
    print(line, flush=True)
