"""The unsealed records as a DataFrame.

The driver reads a small tail itself and gives it to Spark as an Arrow table. A Python worker for
each task would cost more than the records. Tasks on executors read a large tail, and each tail
before Spark 4.0, which takes no Arrow table.
"""

import contextlib
from collections.abc import Sequence

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidelog.storage.read.plan import SPLIT_BYTES, Split, TailRange, packed
from tidelog.storage.spark import versions
from tidelog.storage.spark.request import ReadRequest
from tidelog.storage.spark.rows import RowShape, read_rows
from tidelog.storage.spark.tasks import Batches, on_executors

DRIVER_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of decoded records that the driver keeps for one DataFrame."""


def tail_frame(spark: SparkSession, request: ReadRequest, slices: Sequence[TailRange]) -> DataFrame:
    """Return the records of the slices; without slices, an empty frame of the same columns."""
    rows = RowShape(request.columns)
    if not slices:
        return spark.createDataFrame([], request.schema)
    if versions.HAS_ARROW_FRAMES and (table := _small_table(request, rows, slices)) is not None:
        return spark.createDataFrame(table)

    def run(_: int, work: pa.Buffer) -> Batches:
        part = msgspec.msgpack.decode(work, type=list[TailRange])
        return read_rows(request, rows, Split(part))

    work = [msgspec.msgpack.encode(split.slices) for split in packed(slices, SPLIT_BYTES)]
    return on_executors(spark, work, run, request.schema)


def _small_table(
    request: ReadRequest, rows: RowShape, slices: Sequence[TailRange]
) -> pa.Table | None:
    """Read the records into this process. If they are too many for it, return None."""
    if sum(piece.chunk.raw_size for piece in slices) > DRIVER_BYTES_MAX:
        return None
    batches: list[pa.RecordBatch] = []
    size = 0
    with contextlib.closing(read_rows(request, rows, Split(slices))) as read:
        for batch in read:
            size += batch.nbytes
            if size > DRIVER_BYTES_MAX:
                return None
            batches.append(batch)
    return pa.Table.from_batches(batches, rows.schema)
