"""`make bench`: every number of deploy/BENCHMARKS.md, in one run, with its target beside it.

    python -m tests.bench [--quick]
                          [--only produce,fetch,latency,brokers,groups,replay,failover,care]
                          [--json FILE]

Durable from end to end: brokers are real processes on a folder store that fsyncs, acks=all. Read
the ratios and the medians: absolute numbers are this machine's, whatever else it is doing.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import brokers, failover, fetch, groups, latency, maintenance, produce, replay
from tests.bench.report import Row

PARTS = {
    "produce": produce,
    "fetch": fetch,
    "latency": latency,
    "groups": groups,
    "brokers": brokers,
    "replay": replay,
    "failover": failover,
    "care": maintenance,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the time, for a first look"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    rows: list[Row] = []
    # One folder for all, removed at the end: for minutes after many files were deleted ext4 looks
    # past each of their inodes before it gives a new one, and a PUT costs twice as much.
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as folder:
        for name in arguments.only.split(","):
            rows += PARTS[name].measure(Path(folder) / name, is_quick=arguments.quick)
            _show(name, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


def _show(part: str, rows: list[Row]) -> None:
    table = Table("what", "seen", "target", "reached", "p50 ms", "p99 ms", "note", title=part)
    for row in rows:
        if row.part == part:
            table.add_row(*row.cells())
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    sys.exit(main())
