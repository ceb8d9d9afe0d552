"""Work that the driver hands to tasks on executors, as bytes, in every version of Spark."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog.storage.spark import versions

Batches: TypeAlias = Iterator[pa.RecordBatch]
Run: TypeAlias = Callable[[int, pa.Buffer], Batches]


def on_executors(spark: SparkSession, work: Sequence[bytes], run: Run, schema: str) -> DataFrame:
    """Return a DataFrame of the results of `run`, which gets the number and bytes of its task."""

    def run_all(batches: Batches) -> Batches:
        for batch in batches:
            for number, item in zip(batch.column("number"), batch.column("work"), strict=True):
                yield from run(number.as_py(), item.as_buffer())

    return versions.frame_of_work(spark, work).mapInArrow(run_all, schema)
