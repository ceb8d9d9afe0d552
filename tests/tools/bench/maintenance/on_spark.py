"""Key compaction on Spark beside the best Spark ways of DESIGN 12.5, on the same files.

In one session: offsets through the aggregation, never a value, never a window.
"""

import asyncio
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.tools.bench.maintenance import made_log
from tests.tools.bench.replay import session
from tests.tools.bench.report import Row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RUNS = 1
"""After one that warms the JVM."""
TARGET = 1.3


def measure(folder: Path, records: int, keys: int) -> list[Row]:
    from tests.tools.bench.maintenance.merging import compacting, updates

    log = folder / "spark"
    made_log.make(log, compacting(), updates(records, keys))
    with session() as spark:
        return _compare(spark, log, folder / "out", records)


def _compare(spark: "SparkSession", log: Path, out: Path, records: int) -> list[Row]:
    from tests.tools.bench.maintenance.merging import linked

    ways: dict[str, Callable[[Path], int]] = {
        "ours": lambda own: _ours(spark, own),
        "bitmap": lambda own: _written(_by_bitmap(spark, _files(own), records), out),
        "semi-join": lambda own: _written(_by_join(spark, _files(own)), out),
    }
    seconds_of_way: dict[str, list[float]] = {name: [] for name in ways}
    row_counts = set()
    for number in range(RUNS + 1):
        for name, run in ways.items():
            own = linked(log, "run")
            started = time.perf_counter()
            row_counts.add(run(own))
            if number:  # the first round warms the JVM
                seconds_of_way[name].append(time.perf_counter() - started)
    assert len(row_counts) == 1, row_counts
    other_names = [name for name in ways if name != "ours"]
    best = min(other_names, key=lambda name: statistics.median(seconds_of_way[name]))
    ratio = statistics.median(
        a / b for a, b in zip(seconds_of_way["ours"], seconds_of_way[best], strict=True)
    )
    note = ", ".join(f"{name} {statistics.median(seconds_of_way[name]):.1f} s" for name in ways)
    note += f"; JVM and workers {_peak_gib():.1f} GiB at the end"
    title = f"key compaction of {records:,} records on Spark, local[2]"
    return [
        Row("care", title, ratio, f"x the {best} way", TARGET, note=note, is_smaller_better=True)
    ]


def _files(log: Path) -> list[str]:
    return sorted(str(path) for path in log.glob("topics/*/partition=0/*.parquet"))


def _ours(spark: "SparkSession", log: Path) -> int:
    from tidelog.compaction.compact import compact
    from tidelog.compaction.maintenance_session import MaintenanceSession
    from tidelog.compaction.spark_engine import SparkEngine
    from tidelog.storage.runtime.clock import SystemClock
    from tidelog.storage.store.folder import FolderStore

    async def run() -> int:
        store = FolderStore(log)
        cluster = await MaintenanceSession.open(store, SystemClock())
        engine = SparkEngine(spark, log.as_uri())
        (result,) = await compact(cluster, None, is_dry=False, engine=engine)
        await cluster.close()
        await store.close()
        return result.rows_after

    return asyncio.run(run())


def _newest(spark: "SparkSession", files: list[str]) -> "DataFrame":
    from pyspark.sql import functions as fn

    return spark.read.parquet(*files).groupBy("key").agg(fn.max("offset").alias("offset"))


def _by_join(spark: "SparkSession", files: list[str]) -> "DataFrame":
    from pyspark.sql import functions as fn

    newest = fn.broadcast(_newest(spark, files).select("offset"))
    return spark.read.parquet(*files).join(newest, "offset", "left_semi")


def _by_bitmap(spark: "SparkSession", files: list[str], records: int) -> "DataFrame":
    """Chosen offsets as a bitmap that every task has, and a filter by it."""
    from pyspark.sql import functions as fn

    offsets = _newest(spark, files).select("offset").toArrow().column("offset").to_numpy()
    chosen = np.zeros(records, bool)
    chosen[offsets] = True
    bitmap = spark.sparkContext.broadcast(np.packbits(chosen))

    def is_chosen(column: pa.Array) -> pa.Array:
        positions = column.to_numpy()
        return pa.array((bitmap.value[positions >> 3] >> (7 - (positions & 7))) & 1 == 1)

    chooses = fn.arrow_udf(is_chosen, "boolean")
    return spark.read.parquet(*files).where(chooses("offset"))


def _written(frame: "DataFrame", out: Path) -> int:
    shutil.rmtree(out, ignore_errors=True)
    frame.write.option("compression", "zstd").parquet(str(out))
    return sum(_rows(out))


def _rows(out: Path) -> Iterator[int]:
    for path in out.glob("*.parquet"):
        yield pq.read_metadata(path).num_rows


def _peak_gib() -> float:
    """Resident now: the JVM's heap does not shrink, so about the most that it was."""
    processes = psutil.Process().children(recursive=True)
    return sum(process.memory_info().rss for process in processes) / 2**30
