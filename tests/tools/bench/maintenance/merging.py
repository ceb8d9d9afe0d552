"""Maintenance of logs beside other ways with the same files.

Merging, key compaction in process and on Spark, planning of retention. `folder` gets hard links for
each run, not copies.
"""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.tools.bench.maintenance import made_log
from tests.tools.bench.report import Row

RUNS = 2
MERGED = 2_000
MERGED_ROWS = 10_000
VALUES_APART = 20
RECORDS = 10_000_000
KEYS = 1_000_000
SEGMENT_ROWS = 500_000
SEGMENTS_RETAINED = 100_000
OTHERS = ("DuckDB", "Polars", "pyarrow")
GIB = 2**30


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    folder.mkdir()
    scale = 20 if is_quick else 1
    rows = _merge(folder / "merge", MERGED // scale)
    rows += _compact(folder / "compact", RECORDS // scale, KEYS // scale)
    rows += _retain(folder / "retain", SEGMENTS_RETAINED // scale)
    if shutil.which("java") is None:
        return [*rows, Row("care", "Spark: skipped", 0, "", note="Java 17 is needed for Spark")]
    from tests.tools.bench.maintenance.on_spark import measure as on_spark

    return rows + on_spark(folder, RECORDS // 2 // scale, KEYS // 2 // scale)


def updates(records: int, keys: int) -> Iterator[pa.RecordBatch]:
    """Segments of records of random keys."""
    draws = np.random.default_rng(7)
    for first in range(0, records, SEGMENT_ROWS):
        count = min(SEGMENT_ROWS, records - first)
        drawn = draws.integers(0, keys, count)
        yield made_log.records(first, count, drawn, made_log.values(count, first))


def compacting() -> dict[str, str]:
    return {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}


def linked(folder: Path, name: str) -> Path:
    """A log of its own, of the same bytes: objects are immutable."""
    copy = folder.with_name(f"{folder.name}-{name}")
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["cp", "-al", str(folder), str(copy)], check=True)
    return copy


def _merge(folder: Path, count: int) -> list[Row]:
    def segments() -> Iterator[pa.RecordBatch]:
        value_columns = [made_log.values(MERGED_ROWS, seed, 80) for seed in range(VALUES_APART)]
        for number in range(count):
            value = value_columns[number % VALUES_APART]
            yield made_log.records(number * MERGED_ROWS, MERGED_ROWS, None, value)

    made_log.make(folder, {}, segments())
    size = sum(path.stat().st_size for path in folder.glob("topics/*/partition=0/*"))
    runs_of_way = _ways(folder, ("bare pyarrow", "ours"), count * MERGED_ROWS)
    ratio = _ratio(runs_of_way, "bare pyarrow", "ours")
    seconds = statistics.median(run["seconds"] for run in runs_of_way["ours"])
    note = f"{size / 1e6 / seconds:,.0f} MB/s of Parquet, {size / count / 1e6:.2f} MB a segment"
    title = f"merge of {count:,} small segments"
    return [Row("care", title, ratio, "x bare pyarrow's speed", 0.7, note=note)]


def _compact(folder: Path, records: int, keys: int) -> list[Row]:
    made_log.make(folder, compacting(), updates(records, keys))
    runs_of_way = _ways(folder, ("ours", *OTHERS), None)
    shutil.rmtree(folder)
    fastest = min(OTHERS, key=lambda way: statistics.median(x["seconds"] for x in runs_of_way[way]))
    seconds_of_way = {
        way: statistics.median(x["seconds"] for x in runs) for way, runs in runs_of_way.items()
    }
    note = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in seconds_of_way.items())
    peak = max(run["peak_bytes"] for run in runs_of_way["ours"])
    made_log.make(folder, compacting(), updates(records * 2, keys))
    double_peak = _way(folder, "ours", None)["peak_bytes"]
    shutil.rmtree(folder)
    title = f"key compaction of {records:,} records, {keys:,} keys"
    ratio = _ratio(runs_of_way, "ours", fastest)
    return [
        Row("care", title, ratio, f"x {fastest}", 1.5, note=note, is_smaller_better=True),
        Row("care", "its peak memory", peak / GIB, "GiB", 1.5, is_smaller_better=True),
        Row(
            "care",
            "its peak memory, a log twice as long with the same keys",
            double_peak / peak,
            "x as much",
            1.1,
            is_smaller_better=True,
        ),
    ]


def _retain(folder: Path, count: int) -> list[Row]:
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.compaction.retention import retain
    from tidelog.storage.runtime.clock import SystemClock
    from tidelog.storage.store.folder import FolderStore

    made_log.make_named(folder, {"retention.ms": "1"}, count, 1_000)

    async def plan() -> float:
        store = FolderStore(folder)
        cluster = await MaintenanceSession.open(store, SystemClock())
        started = time.perf_counter()
        (told,) = await retain(cluster, None, is_dry=True)
        seconds = time.perf_counter() - started
        assert told.segments == count
        await cluster.close()
        await store.close()
        return seconds

    seconds = statistics.median(asyncio.run(plan()) for _ in range(RUNS))
    title = f"retention of {count:,} segments, planned with its table loaded again"
    return [Row("care", title, seconds, "s", 1.0, is_smaller_better=True)]


def _ways(folder: Path, ways: tuple[str, ...], rows: int | None) -> dict[str, list[Any]]:
    """RUNS of each, in turn; they agree on the number of rows."""
    runs_of_way: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(RUNS):
        for way in ways:
            runs_of_way[way].append(_way(folder, way, rows))
    assert len({run["rows"] for runs in runs_of_way.values() for run in runs}) == 1, runs_of_way
    return runs_of_way


def _way(folder: Path, way: str, rows: int | None) -> Any:
    own, out = linked(folder, "run"), folder.with_name("out.parquet")
    command = [sys.executable, "-m", "tests.tools.bench.maintenance.ways", way, str(own), str(out)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    result = json.loads(process.stdout)
    assert rows in {None, result["rows"]}, result
    out.unlink(missing_ok=True)
    return result


def _ratio(runs_of_way: dict[str, list[Any]], above: str, below: str) -> float:
    pairs = zip(runs_of_way[above], runs_of_way[below], strict=True)
    return statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
