"""Produce for minutes while the broker seals and collects.

The short runs of tests.tools.bench.rates.produce do not show this.

Each row: a broker on /dev/shm (or on a folder, if that has too little memory), six partitions, each
sealed every SEGMENT_MS and kept for RETENTION_MS. The cluster has short bounds, so that retention
rounds run all the time, and each 12th collects the WAL and the segments. The load is a closed loop
of wrk, if it is installed. CPU is that of the broker process, by thread. Next to it the same bodies
to a handler that does nothing, by the same tool. Then, on the same broker, an open loop at half of
the rate gives the times of acks.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench import bodies, load
from tests.tools.bench.bare import bare_server
from tests.tools.bench.broker import Broker, metric, store_folder
from tests.tools.bench.processes import Watch
from tests.tools.bench.report import Table, number

SUSTAINED_S = 120.0
PARTITIONS = 6
SEGMENT_MS = 10_000
RETENTION_MS = 30_000
BOUNDS = {
    "test_bounds": True,
    "wal_view_age_max_ms": 2_500,
    "wal_retention_ms": 10_000,
    "file_grace_ms": 5_000,
    "retention_check_interval_ms": 1_000,
}
PATH = "/topics/bench"
RESIDENT_FROM = 0.25
"""The memory at the end is compared with that after this share of the run: caches are full."""
MIB = 2**20
COLUMNS = (
    "load",
    "records/s",
    "CPU a request, us",
    "of a bare handler",
    "event loop",
    "sealing, collecting",
    "other threads",
    "sealed",
    "records sealed",
    "RSS at 25 %, at the end",
    "ack p50 / p99 ms at half",
)


class Case(NamedTuple):
    """One row: the format of bodies, records a request, connections of the closed loop."""

    kind: str
    records: int
    connections: int


CASES = (Case("json", 1, 64), Case("json", 100, 16), Case("json", 1000, 8), Case("arrow", 1000, 8))


class Times(NamedTuple):
    """Seconds of one row's loads."""

    sustained_s: float = SUSTAINED_S
    warm_up_s: float = 2.0
    bare_s: float = 4.0
    paced_s: float = 8.0
    distinct: int = bodies.EVENTS


def measure(folder: Path, *, is_quick: bool) -> Table:
    return table(folder, Times(60.0, paced_s=5.0) if is_quick else Times())


def table(folder: Path, times: Times, cases: tuple[Case, ...] = CASES) -> Table:
    rows: list[list[str]] = []
    store_place = ""
    for case in cases:
        with store_folder(folder) as (store, place):
            store_place = place
            rows.append(_row(store, case, times))
    tool = "wrk" if load.has_wrk() else "tests/tools/bench/load.py"
    how = f"{times.sustained_s:.0f} s a row, store on {store_place}, load by {tool}"
    if times.sustained_s < SUSTAINED_S:
        how = f"NOT SUSTAINED, {how}"
    return Table(COLUMNS, rows, how)


def _row(store: Path, case: Case, times: Times) -> list[str]:
    body_pool = bodies.pool(case.kind, case.records, times.distinct)
    with bare_server() as (port, pid), Watch(pid) as watch:
        bare = _closed(port, body_pool, case, times.bare_s)
    bare_us = watch.cpu.total_s / bare.requests * 1e6
    with Broker(f"file://{store}", **BOUNDS) as broker:
        broker.create_topic("bench", PARTITIONS, segment_ms=SEGMENT_MS, retention_ms=RETENTION_MS)
        _closed(broker.port, body_pool, case, times.warm_up_s)
        old_sealed = _sealed(broker)
        with Watch(broker.pid) as watch:
            top = _closed(broker.port, body_pool, case, times.sustained_s)
        segments, size, records = (
            now - then for now, then in zip(_sealed(broker), old_sealed, strict=True)
        )
        paced = asyncio.run(
            load.paced(
                "127.0.0.1",
                broker.port,
                bodies.Requests(load.head_of(PATH, body_pool), body_pool),
                connections=case.connections * 2,
                seconds=times.paced_s,
                per_second=top.per_second / 2,
            )
        )
    cpu_us = watch.cpu.total_s / top.requests * 1e6
    parts = [
        f"{number(part_s / top.requests * 1e6)} us, {100 * part_s / watch.cpu.total_s:.0f} %"
        for part_s in watch.cpu
    ]
    then, now = watch.resident_at(RESIDENT_FROM), watch.resident_at(1.0)
    return [
        f"{case.kind}, {number(case.records)} a request, {case.connections} connections",
        number(top.per_second * case.records),
        number(cpu_us),
        f"{cpu_us / bare_us:.1f} x {number(bare_us)}",
        *parts,
        f"{segments:.0f} segments, {size / MIB:,.0f} MiB",
        f"{100 * records / (top.requests * case.records):.0f} %",
        f"{then / MIB:.0f}, {now / MIB:.0f} MiB",
        f"{number(paced.p50_ms)} / {number(paced.p99_ms)}",
    ]


def _closed(port: int, body_pool: bodies.Pool, case: Case, seconds: float) -> load.Measured:
    return load.sustained(port, PATH, body_pool, connections=case.connections, seconds=seconds)


def _sealed(broker: Broker) -> list[float]:
    names = ("segments", "bytes", "records")
    return [metric(broker, f"tidelog_sealed_{name}_total") for name in names]
