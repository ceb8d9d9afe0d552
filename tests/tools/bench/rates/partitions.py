"""The cost of partitions: the same load on topics of 1 to 10,000 partitions, with and without keys.

Requests of 100 JSON records. The broker seals by its defaults, so it seals little in these seconds
(tests.tools.bench.rates.sealing has that). The header of an entry of the WAL describes a chunk for
each partition that its flush has records of: the mean of the newest entries. The start of a process
on that log lasts until /ready.
"""

import asyncio
import re
import statistics
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench import bodies, load
from tests.tools.bench.broker import Broker, metric, store_folder
from tests.tools.bench.processes import Watch
from tests.tools.bench.report import Table, number

COUNTS = (1, 6, 100, 1_000, 10_000)
RECORDS = 100
CONNECTIONS = 16
PATH = "/topics/bench"
HEADERS_READ = 200
COLUMNS = (
    "partitions",
    "keys",
    "records/s",
    "CPU a record, us",
    "ack p50 / p99 ms at half",
    "records an entry",
    "header bytes an entry",
    "start, s",
)
_KEY = re.compile(rb'"key":"key-\d{8}"')
_NO_KEY = b'"key":null' + b" " * 10


class Times(NamedTuple):
    """Seconds of one row's loads."""

    closed_s: float = 3.0
    paced_s: float = 2.0
    distinct: int = 200_000


def measure(folder: Path, *, is_quick: bool) -> Table:
    return table(folder, Times(1.0, 1.0) if is_quick else Times())


def table(folder: Path, times: Times, counts: Iterable[int] = COUNTS) -> Table:
    body_pool = bodies.pool("json", RECORDS, times.distinct)
    keyless = body_pool._replace(units=_KEY.sub(_NO_KEY, body_pool.units))
    rows: list[list[str]] = []
    store_place = ""
    for count in counts:
        for keys, pool in (("yes", body_pool), ("no", keyless)):
            with store_folder(folder) as (store, place):
                store_place = place
                rows.append([number(count), keys, *_row(store, count, pool, times)])
    return Table(COLUMNS, rows, f"{times.closed_s:.0f} s a row, store on {store_place}")


def _row(store: Path, count: int, pool: bodies.Pool, times: Times) -> list[str]:
    with Broker(f"file://{store}") as broker:
        broker.create_topic("bench", count)
        load.sustained(broker.port, PATH, pool, connections=CONNECTIONS, seconds=times.closed_s / 5)
        entries = metric(broker, "tidelog_wal_entries_committed_total")
        with Watch(broker.pid) as watch:
            top = load.sustained(
                broker.port, PATH, pool, connections=CONNECTIONS, seconds=times.closed_s
            )
        entries = metric(broker, "tidelog_wal_entries_committed_total") - entries
        header = statistics.fmean(_headers(store))
        requests = bodies.Requests(load.head_of(PATH, pool), pool)
        paced = asyncio.run(
            load.paced(
                "127.0.0.1",
                broker.port,
                requests,
                connections=2 * CONNECTIONS,
                seconds=times.paced_s,
                per_second=top.per_second / 2,
            )
        )
        broker.kill()
        began_s = time.monotonic()
        broker.start()
        start_s = time.monotonic() - began_s
    records = top.requests * RECORDS
    return [
        number(top.per_second * RECORDS),
        number(watch.cpu.total_s / records * 1e6),
        f"{number(paced.p50_ms)} / {number(paced.p99_ms)}",
        number(records / entries),
        number(header),
        f"{start_s:.1f}",
    ]


def _headers(store: Path) -> list[int]:
    """The sizes of the headers of the newest entries (FORMAT.md section 3)."""
    paths = sorted((store / "wal").rglob("*"), key=lambda path: path.name)
    sizes = []
    for path in [path for path in paths if path.is_file()][-HEADERS_READ:]:
        with path.open("rb") as file:
            magic, size, _ = struct.unpack("<8sII", file.read(16))
            assert magic == b"TIDEWAL1", path
            sizes.append(size)
    return sizes
