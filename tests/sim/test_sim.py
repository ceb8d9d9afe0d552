"""A few seeds of the simulator at each test run, and that a seed is a run. `make sim` has more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS = 8
"""One seed of each other world, too."""
TRACES = """
import sys
from tests.sim.runs import simulate
from tidelog.service.server.serve import leave
results = [simulate(int(seed)) for seed in sys.argv[1:]]
print([(result.kind, result.trace) for result in results])
leave(0)
"""
"""The process ends as a broker does: once, a native thread aborted it at its exit, after its traces
were printed."""


def started(*arguments: str) -> "subprocess.Popen[str]":
    """A process of its own, in which strings hash alike each time."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: "subprocess.Popen[str]", timeout_s: float = 500) -> str:
    """The time is for a busy machine: alone, a run takes less than a minute."""
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_i1_to_i9_hold_in_simulated_clusters() -> None:
    """`make sim` begins with the seeds that failed once: with today's code, they are other runs."""
    output = ended(started("-m", "tests.sim", "--new", "--seeds", str(SEEDS), "--jobs", "1"))
    assert "0 failed" in output
    assert " acked" in output


def test_guards_that_are_taken_out_are_missed() -> None:
    """Those that a few seeds tell; `make sim ARGS=--mutations` has all of them."""
    output = ended(started("-m", "tests.sim", "--mutations", "--at-most", "5", "--jobs", "1"))
    assert " 0 missed" in output
    assert int(output.splitlines()[-1].split()[0]) > 6


def test_a_seed_is_a_run() -> None:
    """A seed of each kind has one trace: as the first of a process, and after another seed.

    These seeds take little time; in 4, errors name files of a disk.
    """
    seeds = ["50", "51", "52", "53", "4"]
    pairs = zip(seeds, [*seeds[1:], seeds[0]], strict=True)
    runs = [eval(ended(started("-c", TRACES, *pair))) for pair in pairs]
    firsts, seconds = ([run[place] for run in runs] for place in (0, 1))
    assert [*firsts[1:], firsts[0]] == seconds
    assert len({kind for kind, _ in firsts}) == len(seeds)
