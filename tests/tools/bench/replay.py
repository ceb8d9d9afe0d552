"""Spark replay beside `spark.read.parquet` on the very same files: full scans, in one session."""

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tools.bench.broker import Broker
from tests.tools.bench.rates.fetch import fill, seal
from tests.tools.bench.report import Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNS = 3
RECORDS = 3_000_000
TARGET = 1.15


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    if shutil.which("java") is None:
        return [Row("replay", "skipped", 0, "", note="Java 17 is needed for Spark")]
    records = RECORDS // 10 if is_quick else RECORDS
    url = f"file://{folder}"
    with Broker(url) as broker:
        broker.create_topic("bench", 6)
        fill(broker, records)
        seal(broker)
    return _compare(url, str(folder), records)


@contextmanager
def session() -> Iterator["SparkSession"]:
    """local[2], quiet; ends with the block."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


def _compare(url: str, root: str, records: int) -> list[Row]:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as fn

    from tidelog.storage.spark.session import register
    from tidelog.storage.spark.topic_frame import read_topic

    with session() as spark:
        register(spark)
        ways: dict[str, Callable[[], DataFrame]] = {
            "spark.read.parquet": lambda: spark.read.parquet(f"{root}/topics"),
            "read_topic": lambda: read_topic(spark, url, "bench"),
            'format("tidelog")': lambda: (
                spark.read.format("tidelog").option("store", url).option("topic", "bench").load()
            ),
        }
        seconds_of_way: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(RUNS + 1):
            for name, read in ways.items():
                started = time.perf_counter()
                sums = fn.sum(fn.length("key")), fn.sum(fn.length("value")), fn.count("*")
                (row,) = read().agg(*sums, fn.max("offset"), fn.max("timestamp")).collect()
                assert row[2] == records, f"{name} saw {row[2]} of {records} records"
                if number:  # the first round warms the JVM
                    seconds_of_way[name].append(time.perf_counter() - started)
    plain = seconds_of_way["spark.read.parquet"]
    rows = []
    for name, target in (("read_topic", TARGET), ('format("tidelog")', None)):
        ratio = statistics.median(a / b for a, b in zip(seconds_of_way[name], plain, strict=True))
        seconds = statistics.median(seconds_of_way[name])
        note = f"{records / seconds / 1e6:.1f} M records/s, {seconds:.2f} s"
        rows.append(
            Row(
                "replay",
                f"Spark full scan, {name}",
                ratio,
                "x plain Parquet",
                target,
                note=note,
                is_smaller_better=True,
            )
        )
    return rows
