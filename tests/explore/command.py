"""`make explore`: every choice of a small world within a bound, or one run again.

make explore                                        the worlds of WORLDS, over all cores
make explore ARGS="--world small --both 1"          the search of the tests
make explore ARGS="--preemptions 1 --both 3"        other bounds
make explore ARGS="--world small --replay 0,1,2"    the run with these choices
make explore ARGS=--mutations                       the deliberate faults: schedules of each
"""

import argparse
import os
from collections.abc import Sequence

from tests.explore import mutations
from tests.explore.choices import Bound
from tests.explore.run import play
from tests.explore.script import SCRIPTS, Script
from tests.explore.search import Failure, search
from tests.sim import machine

WORLDS = {"commit": 3, "three": 2, "large": 2}
"""Worlds of `make explore`, and how many preemptions and faults a schedule has there together."""
SHOWN = 6
"""Violations of one run."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.mutations:
        return mutations.main(options.jobs, options.at_most)
    worlds = WORLDS if options.world is None else {options.world: WORLDS.get(options.world, 2)}
    if options.replay is not None:
        script = SCRIPTS[options.world or next(iter(WORLDS))]
        choices = [int(number) for number in options.replay.split(",") if number]
        bound = Bound(
            options.preemptions,
            options.faults,
            options.both or options.preemptions + options.faults,
        )
        return _again(script, bound, choices, options.acts or len(script.acts))
    failures = 0
    for name, both in worlds.items():
        bound = Bound(options.preemptions, options.faults, options.both or both)
        failures += _search(SCRIPTS[name], bound, options.jobs)
    return 1 if failures else 0


def _search(script: Script, bound: Bound, jobs: int) -> int:
    _say(
        f"world {script.name}: {script.brokers} brokers, {script.partitions} partitions; at most "
        f"{bound.preemptions} preemptions and {bound.faults} faults a schedule, "
        f"{bound.both} together"
    )
    result = search(script, bound, jobs=jobs, say=_say)
    for failure in result.failures:
        _say(report(script, bound, failure))
    _say(
        f"{result.choices} choices, {result.schedules} schedules, {sum(result.states)} states "
        f"{list(result.states)}, {result.cut} cut, {result.recoveries} recoveries, "
        f"{len(result.failures)} violations, {result.seconds:.0f} s, "
        f"{result.cpu_s:.0f} s of one core"
    )
    return len(result.failures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make explore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", choices=sorted(SCRIPTS), help="one alone")
    parser.add_argument("--preemptions", type=int, default=2, help="of one schedule, at most")
    parser.add_argument("--faults", type=int, default=2, help="of one schedule, at most")
    parser.add_argument("--both", type=int, default=0, help="of both together; 0: WORLDS")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", help="play these choices again, and print what happens")
    parser.add_argument("--acts", type=int, default=0, help="of the replay; 0: all")
    parser.add_argument("--mutations", action="store_true", help="the deliberate faults instead")
    parser.add_argument("--at-most", type=int, default=10**9, help="those found so soon")
    return parser


def _again(script: Script, bound: Bound, choices: list[int], acts: int) -> int:
    lines: list[str] = []
    with machine.quietly():
        run = play(script, choices, acts, bound, recovers=True, lines=lines)
    with machine.quietly():
        again = play(script, choices, acts, bound, recovers=True)
    _say("\n".join(lines))
    for index, (number, name) in enumerate(zip(run.taken, run.names, strict=True)):
        if number:
            _say(f"choice {index}: {number} of {run.counts[index]}, {name}")
    for kind, text in run.violations:
        _say(f"{kind}: {text}")
    is_same = (again.trace, again.taken) == (run.trace, run.taken)
    _say(f"trace {run.trace}{'' if is_same else f', {again.trace} the second time'}")
    return 1 if run.violations or not is_same else 0


def report(script: Script, bound: Bound, failure: Failure) -> str:
    """Return the violations, and the command that shows them again."""
    choices = ",".join(map(str, failure.given[: failure.last + 1])) or "0"
    lines = [f"{kind}: {text[:400]}" for kind, text in failure.violations[:SHOWN]]
    again = (
        f"--world {script.name} --preemptions {bound.preemptions} --faults {bound.faults} --both "
        f"{bound.both} "
        f"--acts {failure.acts} --replay {choices}"
    )
    return "\n  ".join([f'VIOLATION, again with: make explore ARGS="{again}"', *lines])


def _say(line: str) -> None:
    print(line, flush=True)
