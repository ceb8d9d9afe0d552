"""Produce throughput: JSON, binary and Arrow at 1, 100 and 1,000 records a request, acks=all."""

import asyncio
import statistics
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench import bodies
from tests.tools.bench.broker import Broker, metric
from tests.tools.bench.load import Measured, request, run
from tests.tools.bench.report import Row

RUNS = 3
PARTITIONS = 6


class Case(NamedTuple):
    """One line of the table. Target: records/s, acks=all, from the project's measured ceilings."""

    kind: str
    records: int
    connections: int
    target: float | None
    is_keyed: bool = False


CASES = [
    Case("json", 1, 64, 15_000),
    Case("json", 1, 64, None, is_keyed=True),
    Case("json", 1, 8, 12_000),
    Case("json", 100, 16, None),
    Case("json", 1000, 8, 600_000),
    Case("binary", 1, 64, None),
    Case("binary", 100, 16, None),
    Case("binary", 1000, 8, 600_000),
    Case("arrow", 1, 64, None),
    Case("arrow", 100, 16, None),
    Case("arrow", 1000, 8, 3_000_000),
]
BODIES = {
    "json": (bodies.json_body, "application/vnd.kafka.json.v2+json"),
    "binary": (bodies.binary_body, "application/vnd.kafka.binary.v2+json"),
    "arrow": (bodies.arrow_body, "application/vnd.apache.arrow.stream"),
}


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    seconds = 1.0 if is_quick else 2.0
    rows = []
    for number, case in enumerate(CASES):
        with Broker(f"file://{folder}/{number}", is_keyed=case.is_keyed) as broker:
            broker.create_topic("bench", PARTITIONS)
            key = broker.key_of_producer() if case.is_keyed else {}
            runs = [_run(broker, case, seconds, key) for _ in range(RUNS)]
            flushes = metric(broker, "tidelog_requests_per_flush")
        rate = statistics.median(load_run.per_second * case.records for load_run in runs)
        size = bodies.VALUE_BYTES + 14
        rows.append(
            Row(
                "produce",
                f"{case.kind}, {case.records} a request, {case.connections} connections"
                + (", security=keys" if case.is_keyed else ""),
                rate,
                "records/s",
                case.target,
                statistics.median(load_run.p50_ms for load_run in runs),
                statistics.median(load_run.p99_ms for load_run in runs),
                f"{rate * size / 1e6:,.0f} MB/s, {flushes:.3f} PUTs a flush",
            )
        )
    return rows


def _run(broker: Broker, case: Case, seconds: float, key: dict[str, str]) -> Measured:
    make, media_type = BODIES[case.kind]
    headers = {"content-type": media_type} | key
    requests = [
        request(
            "POST", "/topics/bench", body=make(bodies.rows(case.records, seed)), headers=headers
        )
        for seed in range(16)
    ]
    return asyncio.run(
        run("127.0.0.1", broker.port, requests, connections=case.connections, seconds=seconds)
    )
