"""`make sim`: many seeds over all cores, or one again; `--mutations` for the guards.

    make sim                       some hundred seeds
    make sim SEEDS=2000            seeds 0 to 1999
    make sim SEEDS=2000 FROM=5000  seeds 5000 to 6999
    make sim SEED=1234             that one; its events and every store call go to files
    make sim SEED=12 ARGS="--world damage"   that seed of another world
    make sim ARGS=--mutations      each deliberate fault, and how many seeds it takes to find it
    make sim ARGS=--crashes        death at every await of each path

A run depends on nothing but its seed: the process starts itself again with PYTHONHASHSEED=0.
"""

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.sim import history
from tests.sim.backups import simulate_backups
from tests.sim.clones import simulate_clones
from tests.sim.crashes import SCENARIOS, all_of
from tests.sim.damage import simulate_damage
from tests.sim.doubled import simulate_doubled
from tests.sim.idle import simulate_idle
from tests.sim.mutations import MUTATIONS, Mutation, seeds_needed
from tests.sim.runs import Result, simulate

WORLDS: dict[str, Callable[..., Result]] = {
    "brokers": simulate,
    "damage": simulate_damage,
    "clones": simulate_clones,
    "backups": simulate_backups,
    "doubled": simulate_doubled,
    "idle": simulate_idle,
}
OTHERS_SHARE = 8
"""Of the first world there are so many seeds for each of one of the others."""
Job = tuple[str, int]
"""A world and a seed."""
FAILED = Path(__file__).with_name("failed_seeds.txt")
"""Worlds and seeds that ever failed, one a line, then `#` and the cause. A line without a world is
of the world `brokers`."""
SHOWN = 6
"""Violations of one seed."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.mutations:
        return _mutations(options.jobs, options.at_most)
    if options.crashes:
        return _crashes()
    if options.seed is not None:
        return _one(options.world, options.seed)
    first, last = options.start, options.start + options.seeds
    jobs = [] if options.is_new else _failed_before()
    jobs += [("brokers", seed) for seed in range(first, last)]
    other_seeds = range(first // OTHERS_SHARE, -(-last // OTHERS_SHARE))
    jobs += [(world, seed) for world in WORLDS if world != "brokers" for seed in other_seeds]
    return _many(jobs, options.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=400, help="how many")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first")
    parser.add_argument(
        "--new", dest="is_new", action="store_true", help="without the seeds that failed once"
    )
    parser.add_argument("--seed", type=int, help="this one alone, with every event printed")
    parser.add_argument("--world", choices=[*WORLDS], default="brokers", help="of the one seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--mutations", action="store_true", help="the guards instead")
    parser.add_argument("--at-most", type=int, default=1000, help="those found by so few seeds")
    parser.add_argument("--crashes", action="store_true", help="death at every await instead")
    return parser


def _failed_before() -> list[Job]:
    lines = FAILED.read_text(encoding="utf-8").splitlines()
    word_lists = [words for line in lines if (words := line.partition("#")[0].split())]
    return [(words[0] if words[1:] else "brokers", int(words[-1])) for words in word_lists]


def _many(seeds: Sequence[Job], jobs: int) -> int:
    failed: list[Job] = []
    counts: Counter[str] = Counter()
    for result_count, (world, result) in enumerate(_results(seeds, jobs), 1):
        counts.update(result.counts)
        counts["events"] += len(result.events)
        if result.violations:
            failed.append((world, result.seed))
            _tell(world, result)
        if result_count % 100 == 0 or result_count == len(seeds):
            _say(f"{result_count} of {len(seeds)} seeds, {len(failed)} failed")
    _say(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 1 if failed else 0


def _results(seeds: Sequence[Job], jobs: int) -> Iterable[tuple[str, Result]]:
    if jobs == 1:
        yield from map(_simulated, seeds)
        return
    with get_context("spawn").Pool(jobs, maxtasksperchild=500) as pool:
        yield from pool.imap_unordered(_simulated, seeds, chunksize=5)


def _simulated(job: Job) -> tuple[str, Result]:
    world, seed = job
    return world, WORLDS[world](seed)._replace(seed=seed)


def _tell(world: str, result: Result) -> None:
    again = f"make sim SEED={result.seed}"
    again += "" if world == "brokers" else f' ARGS="--world {world}"'
    _say(f"seed {result.seed} ({world}, {result.kind}) FAILED, again with: {again}")
    for kind, text in result.violations[:SHOWN]:
        _say(f"  {kind}: {text[:400]}")
    if len(result.violations) > SHOWN:
        _say(f"  and {len(result.violations) - SHOWN} more")


def _one(world: str, seed: int) -> int:
    lines: list[str] = []
    result = WORLDS[world](seed, lines=lines)._replace(seed=seed)
    told, lived = Path(f"sim-{seed}.jsonl"), Path(f"sim-{seed}.log")
    history.write(told, result.events)
    lived.write_text("\n".join(lines), encoding="utf-8")
    _say(f"seed {seed} ({result.kind}): {len(result.events)} events in {told}, all in {lived}")
    _say(f"trace {result.trace}, {dict(sorted(result.counts.items()))}")
    if result.violations:
        _tell(world, result)
    return 1 if result.violations else 0


def _mutations(jobs: int, at_most: int) -> int:
    numbers = [number for number, mutation in enumerate(MUTATIONS) if mutation.seeds_max <= at_most]
    _say(f"{'mutation':<60} {'seeds needed':>12}  what was seen")
    missed = 0
    with get_context("spawn").Pool(jobs) as pool:
        for number, result in zip(numbers, pool.imap(_needed, numbers), strict=True):
            seeds, kinds = result
            is_late = seeds is None or seeds > MUTATIONS[number].seeds_max
            missed += is_late
            verdict = "MISSED" if seeds is None else f"{seeds}{' LATE' if is_late else ''}"
            _say(f"{MUTATIONS[number].name:<60} {verdict:>12}  {kinds}")
    _say(f"{len(numbers)} mutations, {missed} missed")
    return 1 if missed else 0


def _needed(number: int) -> tuple[int | None, str]:
    mutation: Mutation = MUTATIONS[number]
    return seeds_needed(mutation, itertools.islice(mutation.seeds(), 2 * mutation.seeds_max))


def _crashes() -> int:
    failed = 0
    for scenario in SCENARIOS:
        points = 0
        for step, result in all_of(scenario):
            points += 1
            if result.violations:
                failed += 1
                _say(f"{scenario.name}, dead at step {step}: {result.violations[:SHOWN]}")
        _say(f"{scenario.name}: {points} points of death")
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, flush=True)
