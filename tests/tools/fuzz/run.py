"""Fuzzing: `python -m tests.tools.fuzz.run --minutes 10 [target ...]`, or `make fuzz`.

Every target gets its share of the time, in a process of its own under libFuzzer (atheris), which
keeps what reaches new lines in a corpus and bounds time and memory. Input that breaks a target is
kept in tests/tools/fuzz/crashes/<target>-<hash>, which pytest tries from then on; it replays with
`python -m tests.tools.fuzz.run --replay <file>`.

With `--inputs N` (`make fuzz INPUTS=N`), each target of the service gets its share of N mutations
of valid bytes, the same each time, in this process and without atheris. It reports answers by
status, findings and stalls, and ends with 1 if there is any. A step of the event loop of more than
100 ms of CPU is a finding, and so is memory that has grown by more than a tenth
(tests.tools.fuzz.judge).
"""

import argparse
import hashlib
import importlib
import importlib.util
import logging
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tools.fuzz.judge import WARM_UP_MIN, WARM_UP_PART, Judge, judging
from tests.tools.fuzz.mutations import mutated
from tests.tools.fuzz.target import INPUT_BYTES_MAX, Target

CRASHES = Path(__file__).parent / "crashes"
CORPUS = Path(__file__).parents[3] / ".fuzz"
INPUT_S_MAX = 10
MEMORY_MIB_MAX = 2048
"""Of the whole process; it begins at ~300."""
ALLOCATION_MIB_MAX = 1280
"""At once: a chunk may say that it unpacks to 1 GiB."""
SERVICE = (
    "tests.tools.fuzz.service_targets",
    "tests.tools.fuzz.http_target",
    "tests.tools.fuzz.head_target",
    "tests.tools.fuzz.kafka_frames_target",
)
"""Modules of the targets of `--inputs`."""
START_S_MAX = 120
STALL_S = 120.0
"""Real seconds of one input of `--inputs`, on a machine that has other work."""
SEED = 20_000
"""Of the mutations of `--inputs`: the same inputs each time."""
KEPT_MAX = 10
"""Findings of one target that `--inputs` keeps; it counts the others."""
STEERING = {
    "tests.tools.fuzz.storage_targets": ["tidelog.storage"],
    "tests.tools.fuzz.service_targets": [
        "tidelog.service.formats",
        "tidelog.service.routes.produce",
        "tidelog.service.peers.forwarding",
    ],
    "tests.tools.fuzz.http_target": ["tidelog.service"],
    "tests.tools.fuzz.head_target": ["tidelog.service.http"],
    "tests.tools.fuzz.kafka_target": ["tidelog.service.kafka.messages"],
    "tests.tools.fuzz.kafka_frames_target": ["tidelog.service.kafka"],
    "tests.tools.fuzz.kafka_batch_target": ["tidelog.storage.codec"],
    "tests.tools.fuzz.backup_targets": ["tidelog.compaction.backups"],
}
"""Instrumented modules steer the search and make the start slower: only modules that decode."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help="all, unless named")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--inputs", type=int, default=0, help="of the service's targets together")
    parser.add_argument("--replay", type=Path, help="a file of tests/tools/fuzz/crashes")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        return _replay(options.replay)
    if options.inputs:
        return _count(options.targets, options.inputs)
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: skipped, atheris is not installed: it has no build for this Python or system")
        return 0
    if options.target:
        return _fuzz(options.target, options.module, options.seconds)
    return _all(options.targets, options.minutes * 60)


def _all(names: list[str], seconds: float) -> int:
    from tests.tools.fuzz.targets import TARGETS

    if unknown := set(names) - TARGETS.keys():
        print(f"fuzz: no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
        return 2
    chosen = names or list(TARGETS)
    share = max(round(seconds / len(chosen)), 5)
    old_crashes, failed = _crashes(), list[str]()
    for name in chosen:
        print(f"fuzz: {name}, {share} s", flush=True)
        module = TARGETS[name].check.__module__
        argv = [sys.executable, "-m", "tests.tools.fuzz.run", "--target", name, "--module", module]
        argv += ["--seconds", str(share)]
        started = time.monotonic()
        try:
            process = subprocess.run(
                argv, capture_output=True, text=True, timeout=share + START_S_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"fuzz: {name} did not end")
            return 1
        lines = process.stderr.splitlines()
        stat_lines = [line for line in lines if line.startswith(("stat::number_of", "stat::peak"))]
        runs = ", ".join(line.removeprefix("stat::").replace(" ", "") for line in stat_lines)
        print(f"fuzz: {name}: {time.monotonic() - started:.0f} s, {runs}", flush=True)
        if process.returncode:
            print(process.stdout[-4000:], process.stderr[-4000:], sep="\n")
            failed.append(name)
    if crashes := sorted(_crashes() - old_crashes):
        print("fuzz: found:", *(str(path) for path in crashes), sep="\n  ")
        return 1
    if failed:
        print(f"fuzz: failed without an input: {', '.join(failed)}")
        return 1
    print("fuzz: nothing found")
    return 0


class Stalled(BaseException):
    """An input took longer than STALL_S. No handler of the product catches it."""


class SlowStep(Exception):
    """A step of the service held the event loop."""


def _count(names: list[str], inputs: int) -> int:
    from tests.tools.fuzz.targets import TARGETS

    if unknown := set(names) - TARGETS.keys():
        print(f"fuzz: no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
        return 2
    of_service = [name for name, target in TARGETS.items() if target.check.__module__ in SERVICE]
    chosen = names or of_service
    logging.disable()
    signal.signal(signal.SIGALRM, _stalled)
    total = 0
    for number, name in enumerate(chosen):
        share = inputs // len(chosen) + (number < inputs % len(chosen))
        started_s, cpu_s = time.monotonic(), time.process_time()
        findings, stalls = try_inputs(TARGETS[name], share)
        total += findings + stalls
        print(
            f"fuzz: {name}: {share} inputs, {findings} findings, {stalls} stalls, "
            f"{time.monotonic() - started_s:.0f} s, {time.process_time() - cpu_s:.0f} s of CPU",
            flush=True,
        )
    counts = ", ".join(f"{count} of {status}" for status, count in sorted(_statuses().items()))
    print(f"fuzz: {inputs} inputs, {total} findings and stalls; answers: {counts or 'none'}")
    return 1 if total else 0


def _statuses() -> dict[int, int]:
    from tests.tools.fuzz import http_target

    return dict(http_target.STATUSES)


def _close_brokers() -> None:
    from tests.tools.fuzz import http_target, kafka_frames_target

    http_target.close()
    kafka_frames_target.close()


def try_inputs(
    target: Target, inputs: int, settle: Callable[[], None] = _close_brokers
) -> tuple[int, int]:
    """Return the number of findings, and of stalls."""
    draw = random.Random(f"{SEED} {target.name}")
    seeds = target.seeds()
    findings = stalls = 0
    warm_up = min(max(inputs // WARM_UP_PART, WARM_UP_MIN), inputs)
    with judging(settle) as judge:
        for number in range(inputs):
            if number == warm_up:
                judge.begin()
            data = mutated(seeds, draw)
            problem = _problem_of(target, data, judge)
            if problem is None:
                continue
            stalls += isinstance(problem, Stalled)
            findings += not isinstance(problem, Stalled)
            if findings + stalls <= KEPT_MAX:
                _keep(target, data, problem)
            settle()  # what the input did to this broker is gone
        if grown := judge.growth():
            findings += 1
            print(f"fuzz: {target.name}: {grown}", flush=True)
    return findings, stalls


def _problem_of(target: Target, data: bytes, judge: Judge) -> BaseException | None:
    """Return what the target lets through, or a slow step."""
    signal.setitimer(signal.ITIMER_REAL, STALL_S)
    try:
        target.check(data)
    except (Stalled, Exception) as error:  # noqa: BLE001 all that a check lets through
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return SlowStep(*steps) if (steps := judge.slow_steps()) else None


def _keep(target: Target, data: bytes, problem: BaseException) -> None:
    """Keep the input for pytest, and print the problem."""
    path = CRASHES / f"{target.name}-{hashlib.sha1(data).hexdigest()[:16]}"
    path.write_bytes(data)
    print(f"fuzz: {path}", *traceback.format_exception(problem), flush=True)


def _stalled(*_: Any) -> None:
    raise Stalled


def _crashes() -> set[Path]:
    return {path for path in CRASHES.iterdir() if path.suffix != ".md"}


def _fuzz(name: str, module: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=STEERING[module]):
        targets: list[Target] = importlib.import_module(module).TARGETS
    logging.disable()
    (target,) = (target for target in targets if target.name == name)
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
        f"-malloc_limit_mb={ALLOCATION_MIB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={CRASHES}/{name}-",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup(arguments, target.check)
    atheris.Fuzz()
    return 0


def _replay(path: Path) -> int:
    target_of(path).check(path.read_bytes())
    print(f"{path.name} holds")
    return 0


def target_of(crash: Path) -> Target:
    """By the file's name: `<target>-<what libFuzzer calls it>-<hash>`."""
    from tests.tools.fuzz.targets import TARGETS

    named = [name for name in TARGETS if crash.name.startswith(f"{name}-")]
    return TARGETS[max(named, key=len)]


if __name__ == "__main__":
    sys.exit(main())
