"""`make bench`: the rates of deploy/BENCHMARKS.md, in one run, with targets where there are some.

    python -m tests.tools.bench [--quick] [--json FILE]
                          [--only sustained,sealing,partitions,produce,fetch,latency,...]

Brokers are real processes, acks=all; unless a part says otherwise, on a folder store that fsyncs.
Read the ratios and the medians: absolute numbers are this machine's, whatever else it is doing.
`python -m tests.tools.bench.publish FILE` writes the tables of the JSON file into the page.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.bench import (
    brokers,
    costs,
    failover,
    groups,
    pace,
    publish,
    queries,
    replay,
    throughput,
)
from tests.tools.bench.maintenance import merging
from tests.tools.bench.rates import fetch, latency, partitions, produce, sealing, sustained
from tests.tools.bench.report import Table, table

PARTS = {
    "sustained": sustained,
    "sealing": sealing,
    "partitions": partitions,
    "produce": produce,
    "fetch": fetch,
    "latency": latency,
    "groups": groups,
    "brokers": brokers,
    "pace": pace,
    "throughput": throughput,
    "replay": replay,
    "queries": queries,
    "failover": failover,
    "care": merging,
    "costs": costs,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="less time for each part, for a first look"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    began_s = time.monotonic()
    # One folder for all, removed at the end: for minutes after many files were deleted ext4 looks
    # past each of their inodes before it gives a new one, and a PUT costs twice as much.
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as folder:
        for name in names:
            part_s = time.monotonic()
            measurement = PARTS[name].measure(Path(folder) / name, is_quick=arguments.quick)
            part_table = measurement if isinstance(measurement, Table) else table(measurement)
            if arguments.quick and "NOT" not in part_table.how:
                part_table = part_table._replace(
                    how=f"A FIRST LOOK (--quick) {part_table.how}".rstrip()
                )
            part_table.show(f"{name}, {time.monotonic() - part_s:.0f} s")
            if arguments.json:
                publish.add(arguments.json, name, part_table)
    print(f"{', '.join(names)}: {(time.monotonic() - began_s) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
