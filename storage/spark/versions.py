"""The differences between Spark 3.5, 4.0, 4.1, 4.2 and 4.3, and those of Spark Connect.

No other module asks for a version. A part of the data source that a version lacks is refused with
one line that names the version that has it, and what to use instead.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from tidelog.storage.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:  # before 4.2, which does not call what uses them

        class SupportsTriggerAvailableNow:
            """A mark for readers that Spark before 4.2 does not look for."""

        class ReadLimit:
            """A bound of one micro-batch."""

        class ReadAllAvailable(ReadLimit):
            """No bound."""

        class ReadMaxRows(ReadLimit):
            """At most `max_rows` rows."""

            def __init__(self, max_rows: int) -> None:
                self.max_rows = max_rows


__all__ = ["ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"]

VERSION = tuple(int(number) for number in pyspark.__version__.split(".")[:2])
HAS_ARROW_FRAMES = VERSION >= (4, 0)
"""Whether `createDataFrame` takes an Arrow table."""
CONNECT_TASKS = 8
"""Tasks of a job by Spark Connect, which does not tell the number of cores."""


class SparkFeature(NamedTuple):
    """A part of the data source that some versions of Spark cannot have."""

    name: str
    since: tuple[int, int]
    instead: str

    @property
    def is_here(self) -> bool:
        """Return whether this version of Spark has the feature."""
        return self.since <= VERSION

    def require(self) -> None:
        """Raise InvalidRequest if this version of Spark lacks the feature."""
        if not self.is_here:
            major, minor = self.since
            raise InvalidRequest(
                f"{self.name} needs Spark {major}.{minor} or newer, and this is "
                f"{pyspark.__version__}: {self.instead}"
            )


PYTHON_SOURCES = SparkFeature(
    'format("tidelog")',
    (4, 0),
    "use tidelog.spark.read_topic, and tidelog.spark.batches in place of a stream",
)
READ_LIMITS = SparkFeature(
    "option maxOffsetsPerTrigger",
    (4, 2),
    "leave it out, or use tidelog.spark.batches, which has it on all versions",
)


def is_connect(spark: SparkSession) -> bool:
    """Return whether the session is a client of Spark Connect, without a JVM in this process."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def cores(spark: SparkSession) -> int:
    """Return how many tasks run at once."""
    return CONNECT_TASKS if is_connect(spark) else spark.sparkContext.defaultParallelism


def frame_of_work(spark: SparkSession, work: Sequence[bytes]) -> DataFrame:
    """Return rows (number, work), each of which becomes a task of its own."""
    if HAS_ARROW_FRAMES:
        arrays = [pa.array(range(len(work)), pa.int32()), _batch_per_item(work)]
        frame = spark.createDataFrame(pa.table(arrays, names=["number", "work"]))
    else:
        frame = spark.createDataFrame(list(enumerate(work)), "number int, work binary")
    if hasattr(frame, "repartitionById"):  # since 4.1
        return frame.repartitionById(len(work), "number")
    return frame.repartitionByRange(len(work), "number")


def _batch_per_item(work: Sequence[bytes]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array([item], pa.binary()) for item in work], pa.binary())


def collected(frame: DataFrame) -> pa.Table:
    """Return the rows of a frame as an Arrow table."""
    if hasattr(frame, "toArrow"):  # since 4.0
        return frame.toArrow()
    batches = frame._collect_as_arrow()  # type: ignore[operator]  # noqa: SLF001 - as toPandas
    return pa.Table.from_batches(batches, to_arrow_schema(frame.schema))
