"""The Spark data source: `spark.read` and `spark.readStream` of `format("tidelog")`.

Rows and options (read/kafka_options.py) are as in Spark's Kafka source, so code written for
`format("kafka")` reads the log. No broker is involved. The driver takes a snapshot of the store
(read/offline_log.py); executors read segments and WAL objects. Call `register` in each session.

It needs Spark 4.0, the first version with Python data sources. Limits of their API, as of 4.3:
- Columns are pruned only by an explicit schema: `.schema("offset long")` reads only offsets.
- A loaded DataFrame is planned once and keeps its snapshot. To read newer records, load again. On
  4.0, each action takes a new snapshot.
- The source accepts no filters. Spark would keep a pushed filter in the single plan of a DataFrame.
  The next query on the same DataFrame, and even the other side of a union, would silently lose the
  records that the first query filtered out. The options for offsets, timestamps and `assign` prune
  without this problem. `read_topic` lets Spark push all filters into the sealed files.
- Discovery by name needs a top-level module called `pyspark_...`, which tidelog does not have.
"""

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql import datasource as api
from pyspark.sql.types import StructType

from tidelog.storage.read import spark_kafka_options
from tidelog.storage.read.offline_log import OfflineLog
from tidelog.storage.read.plan import plan
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.spark.request import ReadRequest, request_of, schema_of
from tidelog.storage.spark.rows import RowShape, read_rows

NAME = "tidelog"


class TidelogSource(api.DataSource):
    """The data source of one load. Spark creates it on the driver and pickles it for workers."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        has_headers = spark_kafka_options.flag(self._given(), "includeHeaders", default=False)
        return schema_of(has_headers=has_headers)

    def reader(self, schema: StructType) -> "TidelogReader":
        return TidelogReader(request_of(self._given(), is_streaming=False), schema)

    def streamReader(self, schema: StructType) -> api.DataSourceStreamReader:  # noqa: N802 - Spark's
        from tidelog.storage.spark.stream import TidelogStreamReader

        return TidelogStreamReader(request_of(self._given(), is_streaming=True), schema)

    def _given(self) -> Mapping[str, str]:
        return dict(self.options)


class TidelogReader(api.DataSourceReader):
    """The reader of one batch. The driver plans it and pickles it; each task uses a copy."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self.request = request
        self.rows = RowShape.of(schema)

    def partitions(self) -> list[api.InputPartition]:
        request = self.request
        with request.open() as opened_store:
            view = opened_store.run(OfflineLog.open(opened_store.store, SystemClock()))
            snapshot, ranges = opened_store.run(view.resolve(request.selection, request.span))
            opened_store.run(view.close())
        splits = plan(snapshot, ranges, splits_min=request.splits_min)
        return [api.InputPartition(split) for split in splits]

    def read(self, partition: api.InputPartition | None) -> Iterator[pa.RecordBatch]:
        # For an empty plan, Spark 4.0 gives None, and later versions a partition of None.
        split = None if partition is None else partition.value
        return read_rows(self.request, self.rows, split)
