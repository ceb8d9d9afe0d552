"""Fetch throughput: hot as JSON and Arrow, cold in order and at random.

Cold is a fresh broker with sealed data.
"""

import asyncio
import random
import statistics
from pathlib import Path

import httpx

from tests.tools.bench import bodies
from tests.tools.bench.broker import Broker
from tests.tools.bench.load import Measured, request, run
from tests.tools.bench.report import Row

RUNS = 3
JSON = "application/vnd.kafka.json.v2+json"
ARROW = "application/vnd.apache.arrow.stream"
HOT_RECORDS = 200_000
COLD_RECORDS = 1_000_000
PAGE_BYTES = 114_000
"""About 1,000 records an answer."""


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    seconds = 1.0 if is_quick else 2.0
    cold_records = COLD_RECORDS // 5 if is_quick else COLD_RECORDS
    rows = []
    url = f"file://{folder}"
    with Broker(url) as broker:
        broker.create_topic("bench", 1)
        fill(broker, HOT_RECORDS)
        for name, accept, target in (("JSON", JSON, 3e6), ("Arrow", ARROW, 12e6)):
            paths = _pages(0, HOT_RECORDS)
            rows.append(_row(f"hot, {name}", broker, accept, paths, seconds, target))
        fill(broker, cold_records - HOT_RECORDS)
        seal(broker)
    for name, accept, target in (("JSON", JSON, 2.5e6), ("Arrow", ARROW, 4e6)):
        with Broker(url) as broker:  # empty caches; each page is asked for once
            paths = _pages(0, cold_records)
            rows.append(_row(f"cold, in order, {name}", broker, accept, paths, None, target))
    draw = random.Random(1)
    with Broker(url, read_cache_bytes=11 * 2**18) as broker:
        starts = [draw.randrange(cold_records - 1000) for _ in range(200)]
        paths = [_path(start) for start in starts]
        rows.append(_row("cold, at random, JSON", broker, JSON, paths, seconds, 0.5e6))
    return rows


def fill(broker: Broker, records: int) -> None:
    """Produce so many records with JSON requests, as those who read JSON do.

    Records in another form are checked at each read as JSON, which takes ~200 ns a record.
    """
    headers = {"content-type": JSON}
    body = bodies.json_body(bodies.rows(10_000, 0))
    with httpx.Client(timeout=60) as client:
        for _ in range(records // 10_000):
            client.post(
                f"{broker.base_url}/topics/bench", content=body, headers=headers
            ).raise_for_status()


def seal(broker: Broker) -> None:
    """Move all of it into the table."""
    httpx.post(f"{broker.base_url}/admin/topics/bench/seal", timeout=300).raise_for_status()


def _row(
    title: str,
    broker: Broker,
    accept: str,
    paths: list[str],
    seconds: float | None,
    target: float,
) -> Row:
    requests = [request("GET", path, headers={"accept": accept}) for path in paths]
    # Once through in order when each page may be read only once, else several timed runs.
    runs = [_run(broker, requests, seconds) for _ in range(1 if seconds is None else RUNS)]
    rate = statistics.median(load_run.per_second * 1000 for load_run in runs)
    size = statistics.median(load_run.bytes_in / load_run.seconds / 1e6 for load_run in runs)
    return Row(
        "fetch",
        f"{title}, 1,000 an answer",
        rate,
        "records/s",
        target,
        statistics.median(load_run.p50_ms for load_run in runs),
        statistics.median(load_run.p99_ms for load_run in runs),
        f"{size:,.0f} MB/s of answers",
    )


def _run(broker: Broker, requests: list[bytes], seconds: float | None) -> Measured:
    connections = 4
    if seconds is None:
        return asyncio.run(_once(broker, requests))
    return asyncio.run(
        run("127.0.0.1", broker.port, requests, connections=connections, seconds=seconds)
    )


async def _once(broker: Broker, requests: list[bytes]) -> Measured:
    return await run(
        "127.0.0.1",
        broker.port,
        requests,
        connections=1,
        seconds=0.0,
        requests_min=len(requests),
    )


def _pages(first: int, end: int) -> list[str]:
    return [_path(offset) for offset in range(first, end - 999, 1000)]


def _path(offset: int) -> str:
    return f"/topics/bench/partitions/0/records?offset={offset}&max_bytes={PAGE_BYTES}"
