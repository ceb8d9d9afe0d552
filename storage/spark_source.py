"""The log as a Spark data source: `spark.read` and `spark.readStream` of `format("tidelog")`.

Rows are those of Spark's own Kafka source, and so are the options (storage.boundary), so that code
written for `format("kafka")` reads history. No broker takes part: the driver takes a snapshot of
the store (storage.snapshot), executors read segments and WAL objects. `register` it in a session.

What the API for Python sources gives and what it does not, as of pyspark 4.3:
- Columns are pruned only by a schema given: `.schema("offset long")` reads offsets.
- A loaded DataFrame is planned once and keeps that snapshot, whatever is appended: load again.
- Filters are pushed only with `spark.sql.python.filterPushdown.enabled`, and what was pushed stays
  in the DataFrame's one plan: the next query over the same DataFrame, and even the other side of
  a union, silently lacks the records that the first one's filter left out. So filters are taken
  only with the option `filterPushdown`, for a load that one query uses once. Offsets, timestamps
  and `assign` as options prune as well and have no such trap; `read_topic` pushes all filters.
- Discovery by name needs a top-level module called `pyspark_...`; tidelog has none: `register`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import datasource as api
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from storage import boundary
from storage.boundary import Selection, Span
from storage.chunk import RECORD_SCHEMA, US_PER_MS, concat
from storage.clock import SystemClock
from storage.errors import InvalidRequest
from storage.readonly import OpenedStore
from storage.s3_options import S3Options
from storage.scan import EVERYTHING, OFFSET_MAX, Slice, Split, Wanted, plan
from storage.slices import read_split
from storage.snapshot import LogView

NAME = "tidelog"
BATCH_ROWS_MIN = 8192
"""Smaller batches are joined: each costs the JVM as much as a thousand rows."""

_COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Name to type, in the order of Spark's Kafka source."""

_OPTIONS = (
    "store",
    "endpoint",
    "region",
    "pathStyle",
    "topic",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "includeHeaders",
    "minPartitions",
    "maxOffsetsPerTrigger",
    "filterPushdown",
)
_KAFKAS_OWN = ("kafka.", "fetchoffset.", "kafkaconsumer.", "groupidprefix")
"""Options that say how to talk to a Kafka broker: taken and not used, there is none."""

_registered: WeakSet[SparkSession] = WeakSet()


class ReadRequest(NamedTuple):
    """The options of one load, checked."""

    url: str
    s3: S3Options
    selection: Selection
    span: Span
    has_headers: bool
    splits_min: int
    rows_max: int | None
    is_pushing: bool

    def open(self) -> OpenedStore:
        return OpenedStore(self.url, self.s3)


def request_of(options: Mapping[str, str], *, is_streaming: bool) -> ReadRequest:
    """Raises InvalidRequest for what is wrong, missing or unknown among the options."""
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower() for name in _OPTIONS}
    unknown = [name for name in given if name not in known and not name.startswith(_KAFKAS_OWN)]
    if unknown:
        raise InvalidRequest(f"unknown option {unknown[0]!r}: known are {', '.join(_OPTIONS)}")
    if "store" not in given:
        raise InvalidRequest(
            "option store is missing: file:///folder, a path, or s3://bucket/prefix"
        )
    style = boundary.flag(given, "pathStyle", default=False) if "pathstyle" in given else None
    return ReadRequest(
        given["store"],
        S3Options(endpoint_url=given.get("endpoint"), region=given.get("region"), path_style=style),
        boundary.selection_of(given),
        boundary.span_of(given, is_streaming=is_streaming),
        boundary.flag(given, "includeHeaders", default=False),
        boundary.number(given, "minPartitions") or 1,
        boundary.number(given, "maxOffsetsPerTrigger"),
        boundary.flag(given, "filterPushdown", default=False),
    )


def register(spark: SparkSession) -> None:
    """Make `format("tidelog")` known to this Spark session; workers must have tidelog installed."""
    if spark not in _registered:  # a second time Spark warns that the first was replaced
        spark.dataSource.register(TidelogSource)
        _registered.add(spark)


class TidelogSource(api.DataSource):
    """Made by Spark for each load, on the driver; travels to its Python workers."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        has_headers = boundary.flag(self._given(), "includeHeaders", default=False)
        return ", ".join(
            f"{name} {kind}" for name, kind in _COLUMNS.items() if name != "headers" or has_headers
        )

    def reader(self, schema: StructType) -> "TidelogReader":
        request = request_of(self._given(), is_streaming=False)
        return (PushingReader if request.is_pushing else TidelogReader)(request, schema)

    def streamReader(self, schema: StructType) -> api.DataSourceStreamReader:  # noqa: N802 - Spark's
        from storage.spark_stream import TidelogStreamReader

        return TidelogStreamReader(request_of(self._given(), is_streaming=True), schema)

    def _given(self) -> Mapping[str, str]:
        return dict(self.options)


class TidelogReader(api.DataSourceReader):
    """One batch read: planned on the driver, pickled, and used by every task."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self.request = request
        self.rows = RowShape(schema)
        self.wanted = EVERYTHING

    def partitions(self) -> list[api.InputPartition]:
        request = self.request
        with request.open() as opened:
            view = opened.run(LogView.open(opened.store, SystemClock()))
            snapshot, ranges = opened.run(view.resolve(request.selection, request.span))
            opened.run(view.close())
        splits = plan(snapshot, ranges, self.wanted, splits_min=request.splits_min)
        return [api.InputPartition(split) for split in splits]

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(self.request, self.rows, partition.value, self.wanted)


class PushingReader(TidelogReader):
    """Takes filters, too. See the module: its plan must serve one query only."""

    def pushFilters(self, filters: list[api.Filter]) -> Iterable[api.Filter]:  # noqa: N802 - Spark's
        for one in filters:
            self.wanted, is_exact = narrow(self.wanted, one)
            if not is_exact:
                yield one


def read_rows(
    request: ReadRequest, rows: "RowShape", split: Split | None, wanted: Wanted = EVERYTHING
) -> Iterator[pa.RecordBatch]:
    """One task's rows. Spark makes one task of nothing where a plan is empty: None."""
    if split is None:
        return
    with request.open() as opened:
        small: list[pa.RecordBatch] = []
        count = 0
        for one, batch in read_split(opened, split, rows.columns, wanted):
            small.append(rows.shaped(one, batch))
            count += batch.num_rows
            if count >= BATCH_ROWS_MIN:
                yield concat(small)
                small, count = [], 0
        if small:
            yield concat(small)


class RowShape:
    """From records to the rows that a schema asks for; raises InvalidRequest for other columns."""

    def __init__(self, schema: StructType) -> None:
        known = {name.lower(): (name, kind) for name, kind in _COLUMNS.items()}
        self._sources: list[str] = []
        for field in schema.fields:
            name, kind = known.get(field.name.lower(), ("", ""))
            if field.dataType.simpleString() != kind:
                raise InvalidRequest(
                    f"column {field.name} {field.dataType.simpleString()} is none of "
                    + ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
                )
            self._sources.append(name)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        stored = [name for name in self._sources if name in RECORD_SCHEMA.names]
        self.columns: Sequence[str] = stored or ["offset"]
        """What to read: offsets count the rows where no stored column is asked for."""

    def shaped(self, one: Slice, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [
            self._column(one, batch, source, field.type)
            for source, field in zip(self._sources, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(
        self, one: Slice, batch: pa.RecordBatch, source: str, kind: pa.DataType
    ) -> pa.Array:
        match source:
            case "topic":
                return pa.repeat(one.topic, batch.num_rows)
            case "partition":
                return pa.array(np.full(batch.num_rows, one.partition, np.int32))
            case "timestampType":
                return pa.array(np.full(batch.num_rows, int(one.is_log_append_time), np.int32))
            case _:
                column = batch.column(source)
                return column if column.type == kind else column.cast(kind)


# -- filters


def narrow(wanted: Wanted, condition: api.Filter) -> tuple[Wanted, bool]:
    """`wanted` and the condition, as far as it can say it; True when it says all of it."""
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


def _within(wanted: Wanted, name: str, values: Iterable[Any]) -> tuple[Wanted, bool]:
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


def _from(wanted: Wanted, name: str, value: Any, *, is_open: bool) -> tuple[Wanted, bool]:
    if name == "offset" and isinstance(value, int):
        return wanted._replace(offset_min=max(wanted.offset_min, value + is_open)), True
    if name == "timestamp" and (ms := _ms(value)) is not None:
        return wanted._replace(timestamp_min=max(wanted.timestamp_min or ms, ms)), False
    return wanted, False


def _to(wanted: Wanted, name: str, value: Any, *, is_open: bool) -> tuple[Wanted, bool]:
    if name == "offset" and isinstance(value, int):
        return wanted._replace(offset_max=min(wanted.offset_max, value - is_open, OFFSET_MAX)), True
    if name == "timestamp" and (ms := _ms(value)) is not None:
        return wanted._replace(timestamp_max=min(wanted.timestamp_max or ms, ms)), False
    return wanted, False


def _ms(value: Any) -> int | None:
    """Milliseconds, rounded down: statistics are, so that equal ones overlap."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return (
        since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds
    ) // US_PER_MS
