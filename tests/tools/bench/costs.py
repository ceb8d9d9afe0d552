"""Requests of a cluster to its store, and their price on S3 Standard: BENCHMARKS.

    python -m tests.tools.bench.costs [--seconds 60]

Brokers as real processes on a folder, whose requests they count themselves (those of the Delta
tables are counted by what is there afterwards); one producer sends a record every 20 ms where there
is load. Rates do not depend on how fast the store is, but for flushes without an interval.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from deploy.demo.broker_process import BrokerProcess
from deploy.local.cluster import Store, brokers
from tests.support.broker import until

SECONDS_A_MONTH = 2_628_000
PUT_DOLLARS = 5 / 1e6
GET_DOLLARS = 0.4 / 1e6
PUTS = ("create", "put", "list")
"""Verbs that S3 charges as a PUT."""
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}


class Case(NamedTuple):
    """A cluster, and whether a client produces."""

    title: str
    brokers: int
    is_busy: bool
    flush_interval_ms: int = 0


CASES: Sequence[Case] = (
    Case("one broker, idle", 1, is_busy=False),
    Case("three brokers, idle", 3, is_busy=False),
    Case("one broker, constant load, `flush_interval_ms=250`", 1, True, 250),
    Case("three brokers, the same", 3, True, 250),
    Case("three brokers, `flush_interval_ms=1000`", 3, True, 1000),
)


class Rates(NamedTuple):
    """Requests a second."""

    puts: float
    gets: float

    @property
    def dollars(self) -> float:
        """A month."""
        return SECONDS_A_MONTH * (self.puts * PUT_DOLLARS + self.gets * GET_DOLLARS)


def requests(broker_processes: Sequence[BrokerProcess]) -> dict[str, float]:
    """By verb, of all of them so far."""
    count_by_verb: dict[str, float] = {}
    for broker in broker_processes:
        text = httpx.get(f"{broker.base_url}/metrics").raise_for_status().text
        for line in text.splitlines():
            if line.startswith("tidelog_store_requests_total{"):
                verb = line.partition('"')[2].partition('"')[0]
                count_by_verb[verb] = count_by_verb.get(verb, 0.0) + float(line.split()[-1])
    return count_by_verb


def measured(case: Case, seconds: float) -> Rates:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store((folder / "store").as_uri())
        with brokers(
            case.brokers, store, folder, flush_interval_ms=case.flush_interval_ms
        ) as cluster:
            live_line = f"tidelog_live_brokers {case.brokers}.0"
            until(
                lambda: all(live_line in httpx.get(f"{b.base_url}/metrics").text for b in cluster)
            )
            topic = {"topic_name": "t", "partitions_count": 6}
            httpx.post(f"{cluster[0].base_url}/admin/topics", json=topic).raise_for_status()
            time.sleep(2)  # the start's own requests are none of a month's
            old_counts, began = requests(cluster), time.monotonic()
            with httpx.Client() as client:
                number = 0
                while time.monotonic() < began + seconds:
                    if case.is_busy:
                        url = f"{cluster[number % len(cluster)].base_url}/topics/t?acks=0"
                        body = {"records": [{"value": "x" * 100}]}
                        client.post(url, json=body, headers=JSON).raise_for_status()
                        number += 1
                    time.sleep(0.02)
            took, new_counts = time.monotonic() - began, requests(cluster)
    rates = {verb: (count - old_counts.get(verb, 0.0)) / took for verb, count in new_counts.items()}
    puts = sum(rates.get(verb, 0.0) for verb in PUTS)
    return Rates(round(puts, 2), round(rates.get("get", 0.0), 2))


def row(case: Case, rates: Rates) -> str:
    """Of the cost table in deploy/BENCHMARKS.md."""
    return f"| {case.title} | {rates.puts:.2f} | {rates.gets:.2f} | ${rates.dollars:,.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.costs")
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    for case in CASES:
        sys.stdout.write(row(case, measured(case, seconds)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
