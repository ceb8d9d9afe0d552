"""Ack latency of one record, acks=all, beside one bare PUT of the same size to the same store."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.local.cluster import REGION, Store, s3_store
from tests.tools.bench import bodies
from tests.tools.bench.broker import Broker, environment
from tests.tools.bench.load import request, run
from tests.tools.bench.report import Row
from tidelog.storage.store.open import open_store
from tidelog.storage.store.s3_options import S3Options

RUNS = 3
SLACK_MS = 2.0
FACTOR = 1.5


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    rows = []
    for name, stores in (("file", _folder), ("SeaweedFS", _seaweed)):
        with stores(folder) as store:
            puts: list[float] = []
            acks: list[float] = []
            with Broker(store.url, **store.settings) as broker:
                broker.create_topic("bench", 1)
                for _ in range(RUNS):  # in turn, so that the machine's moods hit both
                    puts.append(asyncio.run(bare_put(store, 100 if is_quick else 300)))
                    acks.append(_ack(broker, 0.5 if is_quick else 2.0))
        put, ack = statistics.median(puts), statistics.median(acks)
        rows.append(
            Row(
                "latency",
                f"{name}: ack of one record",
                ack,
                "ms",
                FACTOR * put + SLACK_MS,
                note=f"p50; one bare PUT {put:.2f} ms; the target is 1.5 PUTs + 2 ms",
                is_smaller_better=True,
            )
        )
    return rows


async def bare_put(target: Store, count: int) -> float:
    """The p50 of a create of a new 400-byte key, ms."""
    endpoint = target.settings.get("s3_endpoint")
    s3 = S3Options(endpoint_url=str(endpoint), region=REGION) if endpoint else None
    store = await open_store(target.url, s3=s3)
    durations_s = []
    stamp = time.time_ns()
    try:
        for number in range(count):
            started = time.perf_counter()
            await store.create(f"bench/{stamp}-{number}", [b"x" * 400])
            durations_s.append(time.perf_counter() - started)
    finally:
        await store.close()
    return 1000 * statistics.median(durations_s)


def _ack(broker: Broker, seconds: float) -> float:
    headers = {"content-type": "application/vnd.kafka.json.v2+json"}
    requests = [
        request(
            "POST", "/topics/bench", body=bodies.json_body(bodies.rows(1, seed)), headers=headers
        )
        for seed in range(16)
    ]
    measured = asyncio.run(run("127.0.0.1", broker.port, requests, connections=1, seconds=seconds))
    return measured.p50_ms


@contextmanager
def _folder(folder: Path) -> Iterator[Store]:
    yield Store(f"file://{folder}")


@contextmanager
def _seaweed(_: Path) -> Iterator[Store]:
    with s3_store() as store, environment(store):
        yield store
