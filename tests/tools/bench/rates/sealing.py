"""The cost of sealing alone: CPU time a record, by the number of records a request, in process.

    python -m tests.tools.bench.rates.sealing RECORDS_A_REQUEST RECORDS memory|store

Records are appended to a broker that does not seal by itself, on a store in memory files where that
is possible; then one call seals the topic. `store`: the tail cache was emptied before, so that the
sealer reads all chunks from the store. A process of its own for each measurement.
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.tools.bench import bodies
from tests.tools.bench.broker import store_folder
from tests.tools.bench.report import Table, number
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

TOPIC, WARM_UP = "bench", "warm-up"
PARTITIONS = 6
RECORDS = {1: 300_000, 10: 300_000, 100: 600_000, 1000: 1_000_000}
"""Appended, by the number of records a request."""
CONNECTIONS = {1: 64, 10: 32, 100: 16, 1000: 8}
"""As many clients append at once."""
TAIL_CACHE_BYTES = 2 << 30
WHERE = {"memory": "in memory", "store": "from the store"}
COLUMNS = ("what", "CPU a record, us", "of it event loop", "bytes a record in Parquet")


class Sealed(NamedTuple):
    """CPU us a record of one seal of the whole process, and of its event loop; bytes a record."""

    records: int
    cpu_us: float
    loop_us: float
    parquet_bytes: float


def measure(folder: Path, *, is_quick: bool) -> Table:
    return table(
        folder, {size: count // 10 if is_quick else count for size, count in RECORDS.items()}
    )


def table(folder: Path, counts: dict[int, int]) -> Table:
    rows, ratios = [], []
    with store_folder(folder) as (store, place):
        for tail_place, tail in WHERE.items():
            runs = {
                size: _alone(store / f"{tail_place}-{size}", size, count, tail_place)
                for size, count in counts.items()
            }
            for size, run in runs.items():
                numbers = [run.cpu_us, run.loop_us, run.parquet_bytes]
                title = f"sealing, {number(size)} a request, {tail}"
                rows.append([title, *(number(value) for value in numbers)])
            costs = [run.cpu_us for run in runs.values()]
            ratios.append(f"{max(costs) / min(costs):.1f} x {tail}")
    how = f"The worst size to the best one: {', '.join(ratios)}; store on {place}"
    return Table(COLUMNS, rows, how)


def _alone(store: Path, size: int, count: int, tail_place: str) -> Sealed:
    command = [
        sys.executable,
        "-m",
        "tests.tools.bench.rates.sealing",
        str(size),
        str(count),
        tail_place,
    ]
    process = subprocess.run([*command, str(store)], check=True, stdout=subprocess.PIPE, text=True)
    return Sealed(*json.loads(process.stdout))


async def sealed(store: Path, size: int, count: int, tail_place: str) -> Sealed:
    settings = LogSettings(is_sealing=False, tail_cache_bytes=TAIL_CACHE_BYTES)
    clock = SystemClock()
    log = await Broker.open(FolderStore(store), settings, clock=clock, name="bench")
    for topic in (WARM_UP, TOPIC):
        await log.topics.create(topic, PARTITIONS, {"segment.bytes": str(1 << 28)})
    # The first seal of a process starts deltalake's threads: 50 ms of CPU.
    await _appended(log, WARM_UP, size, PARTITIONS * size)
    await log.records.seal(WARM_UP)
    await _appended(log, TOPIC, size, count)
    if tail_place == "store":
        log._log.tail.clear()
    cpu_s, loop_s = time.process_time(), time.thread_time()
    records = await log.records.seal(TOPIC)
    cpu_s, loop_s = time.process_time() - cpu_s, time.thread_time() - loop_s
    assert records == count, (records, count)
    size_of_all = _parquet(store, log)
    await log.close()
    cpu_us, loop_us = (seconds / records * 1e6 for seconds in (cpu_s, loop_s))
    return Sealed(records, cpu_us, loop_us, size_of_all / records)


def _parquet(store: Path, log: Broker) -> int:
    folder = store / log.state.topic(TOPIC).prefix
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


async def _appended(log: Broker, name: str, size: int, count: int) -> None:
    topic = log.state.topic(name)
    numbers = iter(range(0, count, size))

    async def append() -> None:
        for first in numbers:
            pairs = bodies.events(first, size)
            keys, values = (list(column) for column in zip(*pairs, strict=True))
            now_ms = log.clock.now_ms()
            rows = Rows([now_ms] * size, keys, values)
            partitions = np.arange(first, first + size) % PARTITIONS
            place = int(first % PARTITIONS) if size == 1 else partitions
            weight = size * (bodies.VALUE_BYTES + 30)
            _ = await log.records.append(topic, [(place, rows)], size=weight, is_json=True)

    await asyncio.gather(*(append() for _ in range(CONNECTIONS.get(size, 16))))


def main() -> None:
    size, count, tail_place, store = sys.argv[1:]
    print(json.dumps(asyncio.run(sealed(Path(store), int(size), int(count), tail_place))))


if __name__ == "__main__":
    main()
