"""Coverage-guided fuzzing: `python -m tests.fuzz.run --minutes 10 [target ...]`, or `make fuzz`.

Every target gets its share of the time, in a process of its own under libFuzzer (atheris), which
keeps what reaches new lines in a corpus and bounds time and memory. Input that breaks a target is
kept in tests/fuzz/crashes/<target>-<hash>, which pytest tries from then on; it replays with
`python -m tests.fuzz.run --replay <file>`.
"""

import argparse
import importlib
import importlib.util
import logging
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.target import INPUT_BYTES_MAX, Target

CRASHES = Path(__file__).parent / "crashes"
CORPUS = Path(__file__).parents[2] / ".fuzz"
INPUT_S_MAX = 10
MEMORY_MIB_MAX = 2048
"""Of the whole process; it begins at ~300."""
ALLOCATION_MIB_MAX = 1280
"""At once: a chunk may say that it unpacks to 1 GiB."""
START_S_MAX = 120
STEERING = {
    "tests.fuzz.storage_targets": ["tidelog.storage"],
    "tests.fuzz.service_targets": [
        "tidelog.service.formats",
        "tidelog.service.routes.produce",
        "tidelog.service.peers.forwarding",
    ],
    "tests.fuzz.http_target": ["tidelog.service"],
}
"""Instrumented modules steer the search and make the start slower: only modules that decode."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help="all, unless named")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--replay", type=Path, help="a file of tests/fuzz/crashes")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        return _replay(options.replay)
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: skipped, atheris is not installed: it has no build for this Python or system")
        return 0
    if options.target:
        return _fuzz(options.target, options.module, options.seconds)
    return _all(options.targets, options.minutes * 60)


def _all(names: list[str], seconds: float) -> int:
    from tests.fuzz.targets import TARGETS

    if unknown := set(names) - TARGETS.keys():
        print(f"fuzz: no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
        return 2
    chosen = names or list(TARGETS)
    share = max(round(seconds / len(chosen)), 5)
    before = _crashes()
    for name in chosen:
        print(f"fuzz: {name}, {share} s", flush=True)
        module = TARGETS[name].check.__module__
        argv = [sys.executable, "-m", "tests.fuzz.run", "--target", name, "--module", module]
        argv += ["--seconds", str(share)]
        started = time.monotonic()
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=share + START_S_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"fuzz: {name} did not end")
            return 1
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith(("stat::number_of", "stat::peak"))]
        runs = ", ".join(line.removeprefix("stat::").replace(" ", "") for line in said)
        print(f"fuzz: {name}: {time.monotonic() - started:.0f} s, {runs}", flush=True)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    if found := sorted(_crashes() - before):
        print("fuzz: found:", *(str(path) for path in found), sep="\n  ")
        return 1
    print("fuzz: nothing found")
    return 0


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
    from tests.fuzz.targets import TARGETS

    named = [name for name in TARGETS if crash.name.startswith(f"{name}-")]
    return TARGETS[max(named, key=len)]


if __name__ == "__main__":
    sys.exit(main())
