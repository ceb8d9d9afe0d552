"""`make attack`: run the attacks, each on a fresh broker with a folder store; print a table.

The exit status is 1 if a broker ended, its memory rose above 1 GiB, or the neighbour failed. With
`--tree PATH`, the brokers are those of another checkout, which has its own .venv: run the attacks
on both checkouts to compare two versions.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.attack.attacks import attacks
from tests.attack.measure import NEIGHBOUR, TYPE, VICTIM, Attack, Result, measured
from tests.support.broker import Broker
from tests.support.ports import free_port

REST_S = 5.0
BIG = "big"
ROW = "{:36} {:>18} {:>9} {:>16} {:>9}  {}"
HEAD = ROW.format(
    "attack", "MiB before/peak/after", "stall s", "neighbour ok/fail", "slowest s", "answers"
)


def prepare(broker: Broker) -> None:
    """Make the topics of the attacks and of the neighbour."""
    for topic in (VICTIM, BIG, NEIGHBOUR):
        broker.create_topic(topic)
    body = '{"records":[{"value":"%s"}]}' % ("x" * (1 << 19))
    for _ in range(4):
        path = f"{broker.base_url}/topics/{BIG}"
        httpx.post(path, content=body, headers=TYPE, timeout=60).raise_for_status()
    path = f"{broker.base_url}/topics/{NEIGHBOUR}"
    httpx.post(
        path, content=b'{"records":[{"value":1}]}', headers=TYPE, timeout=60
    ).raise_for_status()


class BrokerOf(Broker):
    """A broker of the checkout `tree`; None is this checkout."""

    def __init__(self, folder: Path, tree: Path | None) -> None:
        super().__init__(folder, is_fresh=True, kafka_port=free_port())
        self._tree = tree

    @property
    def program(self) -> Sequence[str]:
        if self._tree is None:
            return super().program
        return (str(self._tree / ".venv/bin/tidelog"),)


@contextmanager
def fresh_broker(folder: Path, tree: Path | None) -> Iterator[Broker]:
    broker = BrokerOf(folder, tree)
    broker.start()
    try:
        prepare(broker)
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


def row(result: Result) -> str:
    memory = f"{result.before_mib}/{result.peak_mib}/{result.after_mib}"
    neighbour = f"{result.done}/{result.failed}"
    said = result.why_failed and f"FAILED: {result.why_failed}; "
    return ROW.format(
        result.attack,
        memory,
        f"{result.stall_s:.2f}",
        neighbour,
        f"{result.slowest_s:.2f}",
        f"{said}{result.answers}",
    )


def run(found: dict[str, Attack], rest_s: float, folder: Path, tree: Path | None) -> list[Result]:
    print(HEAD, flush=True)
    results = []
    for number, (name, attack) in enumerate(found.items()):
        with fresh_broker(folder / str(number), tree) as broker:
            results.append(measured(broker, name, attack, rest_s))
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
    given = parser.parse_args(arguments)
    found = {name: run for name, run in attacks(given.scale).items() if given.only in name}
    with tempfile.TemporaryDirectory(prefix="tidelog-attack-") as folder:
        results = run(found, REST_S, Path(folder), given.tree)
    return int(any(result.why_failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
