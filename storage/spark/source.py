"""The Spark data source: `spark.read` and `spark.readStream` of `format("tidelog")`.

Rows and options (read/kafka_options.py) are as in Spark's Kafka source, so code written for
`format("kafka")` reads the log. No broker is involved. The driver takes a snapshot of the store
(read/offline_log.py); executors read segments and WAL objects. Call `register` in each session.

Limits of the API for Python data sources, as of pyspark 4.3:
- Columns are pruned only by an explicit schema: `.schema("offset long")` reads only offsets.
- A loaded DataFrame is planned once and keeps its snapshot. To read newer records, load again.
- Filters are pushed only with `spark.sql.python.filterPushdown.enabled`, and a pushed filter stays
  in the DataFrame's single plan. The next query on the same DataFrame, and even the other side of a
  union, silently loses the records that the first query filtered out. So filters are accepted only
  with the option `filterPushdown`. Use this option only for a load that one query uses once. The
  options for offsets, timestamps and `assign` also prune, without this problem. `read_topic` pushes
  all filters.
- Discovery by name needs a top-level module called `pyspark_...`, which tidelog does not have.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from weakref import WeakSet

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import datasource as api
from pyspark.sql.types import StructType

from tidelog.storage.core.chunk import US_PER_MS
from tidelog.storage.core.model import OFFSET_MAX
from tidelog.storage.io.clock import SystemClock
from tidelog.storage.read import kafka_options
from tidelog.storage.read.offline_log import OfflineLog
from tidelog.storage.read.plan import NO_FILTER, ReadFilter, plan
from tidelog.storage.spark.request import COLUMNS, ReadRequest, RowShape, read_rows, request_of
from tidelog.storage.spark.stream import TidelogStreamReader

NAME = "tidelog"
SPARKS_PYTHON = "python3"
"""The Python of pyspark's workers, if neither the environment nor an option names another."""

_registered: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Register `format("tidelog")` in the Spark session; workers must have tidelog installed.

    Without PYSPARK_PYTHON, Spark's workers run the first `python3` of the PATH, which may belong to
    another environment. In local mode, `register` makes them run the current interpreter instead.
    """
    context = spark.sparkContext
    if (context.master or "").startswith("local") and context.pythonExec == SPARKS_PYTHON:
        context.pythonExec = sys.executable
    if spark not in _registered:  # Spark warns if a source is registered again
        spark.dataSource.register(TidelogSource)
        _registered.add(spark)


class TidelogSource(api.DataSource):
    """The data source of one load. Spark creates it on the driver and pickles it for workers."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        has_headers = kafka_options.flag(self._given(), "includeHeaders", default=False)
        return ", ".join(
            f"{name} {kind}" for name, kind in COLUMNS.items() if name != "headers" or has_headers
        )

    def reader(self, schema: StructType) -> "TidelogReader":
        request = request_of(self._given(), is_streaming=False)
        return (PushingReader if request.is_pushing else TidelogReader)(request, schema)

    def streamReader(self, schema: StructType) -> api.DataSourceStreamReader:  # noqa: N802 - Spark's
        return TidelogStreamReader(request_of(self._given(), is_streaming=True), schema)

    def _given(self) -> Mapping[str, str]:
        return dict(self.options)


class TidelogReader(api.DataSourceReader):
    """The reader of one batch. The driver plans it and pickles it; each task uses a copy."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self.request = request
        self.rows = RowShape(schema)
        self.wanted = NO_FILTER

    def partitions(self) -> list[api.InputPartition]:
        request = self.request
        with request.open() as opened:
            view = opened.run(OfflineLog.open(opened.store, SystemClock()))
            snapshot, ranges = opened.run(view.resolve(request.selection, request.span))
            opened.run(view.close())
        splits = plan(snapshot, ranges, self.wanted, splits_min=request.splits_min)
        return [api.InputPartition(split) for split in splits]

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(self.request, self.rows, partition.value, self.wanted)


class PushingReader(TidelogReader):
    """A TidelogReader that accepts filters. Only one query may use its plan (see the module)."""

    def pushFilters(self, filters: list[api.Filter]) -> Iterable[api.Filter]:  # noqa: N802 - Spark's
        for one in filters:
            self.wanted, is_exact = narrow(self.wanted, one)
            if not is_exact:
                yield one


# -- filters


def narrow(wanted: ReadFilter, condition: api.Filter) -> tuple[ReadFilter, bool]:
    """Return `wanted` with the condition added, and whether the result expresses the whole
    condition."""
    match condition:
        case api.IsNotNull(("topic" | "partition" | "offset" | "timestamp" | "timestampType",)):
            return wanted, True
        case api.EqualTo((name,), value) | api.EqualNullSafe((name,), value):
            return _within(wanted, name, [value])
        case api.In((name,), values):
            return _within(wanted, name, values)
        case api.GreaterThanOrEqual((name,), value):
            return _from(wanted, name, value, is_open=False)
        case api.GreaterThan((name,), value):
            return _from(wanted, name, value, is_open=True)
        case api.LessThanOrEqual((name,), value):
            return _to(wanted, name, value, is_open=False)
        case api.LessThan((name,), value):
            return _to(wanted, name, value, is_open=True)
        case _:
            return wanted, False


def _within(wanted: ReadFilter, name: str, values: Iterable[Any]) -> tuple[ReadFilter, bool]:
    found = {value for value in values if value is not None}
    match name:
        case "topic":
            topics = found if wanted.topics is None else found & wanted.topics
            return wanted._replace(topics=frozenset(topics)), True
        case "partition":
            partitions = found if wanted.partitions is None else found & wanted.partitions
            return wanted._replace(partitions=frozenset(partitions)), True
        case "offset" | "timestamp" if found:
            wanted, _ = _from(wanted, name, min(found), is_open=False)
            wanted, _ = _to(wanted, name, max(found), is_open=False)
            return wanted, name == "offset" and len(found) == 1
        case _:
            return wanted, False


def _from(wanted: ReadFilter, name: str, value: Any, *, is_open: bool) -> tuple[ReadFilter, bool]:
    if name == "offset" and isinstance(value, int):
        return wanted._replace(offset_min=max(wanted.offset_min, value + is_open)), True
    if name == "timestamp" and (ms := _ms(value)) is not None:
        return wanted._replace(timestamp_min=max(wanted.timestamp_min or ms, ms)), False
    return wanted, False


def _to(wanted: ReadFilter, name: str, value: Any, *, is_open: bool) -> tuple[ReadFilter, bool]:
    if name == "offset" and isinstance(value, int):
        return wanted._replace(offset_max=min(wanted.offset_max, value - is_open, OFFSET_MAX)), True
    if name == "timestamp" and (ms := _ms(value)) is not None:
        return wanted._replace(timestamp_max=min(wanted.timestamp_max or ms, ms)), False
    return wanted, False


def _ms(value: Any) -> int | None:
    """Return the time in ms, rounded down as in the statistics, so that equal times overlap."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return (
        since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds
    ) // US_PER_MS
