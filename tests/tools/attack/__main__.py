"""`make attack`: run the attacks, each on a fresh broker with a folder store; print a table.

The exit status is 1 if a broker ended, its memory rose above 1 GiB or by more than 300 MiB, a
request for /healthy waited for more than 250 ms of the event loop's CPU time, or the neighbour or
another tenant failed. With
`--tree PATH`, the brokers are those of another checkout, which has its own .venv: run the attacks
on both checkouts to compare two versions.
"""

import argparse
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tools.attack.attacks import Attacks, attacks, secured_attacks
from tests.tools.attack.brokers import AttackedBroker, SecuredBroker, TlsBroker, fresh_broker
from tests.tools.attack.measure import Result, measured
from tests.tools.attack.probes import prober
from tests.tools.attack.tls_attacks import tls_attacks

REST_S = 5.0
ROW = "{:44} {:>18} {:>9} {:>9} {:>16} {:>9}  {}"
HEAD = ROW.format(
    "attack",
    "MiB before/peak/after",
    "stall s",
    "its CPU s",
    "neighbour ok/fail",
    "slowest s",
    "answers",
)


def row(result: Result) -> str:
    memory = f"{result.before_mib}/{result.peak_mib}/{result.after_mib}"
    neighbour = f"{result.done}/{result.failed}"
    failure = result.why_failed and f"FAILED: {result.why_failed}; "
    return ROW.format(
        result.attack,
        memory,
        f"{result.stall_s:.2f}",
        f"{result.stall_cpu_s:.2f}",
        neighbour,
        f"{result.slowest_s:.2f}",
        f"{failure}{result.answers}",
    )


def run(
    chosen: Attacks, kind: type[AttackedBroker], folder: Path, tree: Path | None
) -> list[Result]:
    """Run each attack on a fresh broker of this kind."""
    results = []
    with prober() as probes:
        for number, (name, attack) in enumerate(chosen.items()):
            with fresh_broker(folder / str(number), tree, kind) as broker:
                results.append(measured(broker, probes, name, attack, REST_S))
            print(row(results[-1]), flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of the attacks; 1 is the full size"
    )
    parser.add_argument("--only", default="", help="run the attacks whose name has this text")
    parser.add_argument(
        "--tree",
        type=lambda path: Path(path).resolve(),
        help="another checkout, whose brokers are attacked",
    )
    options = parser.parse_args(arguments)
    tables = {
        AttackedBroker: attacks(options.scale),
        SecuredBroker: secured_attacks(options.scale),
        TlsBroker: tls_attacks(options.scale),
    }
    results = []
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="tidelog-attack-") as folder:
        for kind, table in tables.items():
            chosen = {name: attack for name, attack in table.items() if options.only in name}
            results += run(chosen, kind, Path(folder) / kind.__name__, options.tree)
    return int(any(result.why_failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
