"""The parsed options of a load, and the rows of a task. Batch and stream use the same code."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tidelog.storage.codec.chunk import RECORD_SCHEMA, concat
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read import kafka_options
from tidelog.storage.read.kafka_options import OffsetSpan, TopicSelection
from tidelog.storage.read.plan import Slice, Split
from tidelog.storage.read.split_reader import read_split
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.s3_options import S3Options

BATCH_ROWS_MIN = 8192
"""Smaller batches are joined, because a batch costs the JVM as much as a thousand rows."""

COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Types by column name, in the order of Spark's Kafka source."""

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
)
_PUSHDOWN = "filterpushdown"
_KAFKAS_OWN = ("kafka.", "fetchoffset.", "kafkaconsumer.", "groupidprefix")
"""Options for connections to a Kafka broker. They are accepted and ignored, because no broker is
involved."""


class ReadRequest(NamedTuple):
    """The parsed options of one load."""

    url: str
    s3: S3Options
    selection: TopicSelection
    span: OffsetSpan
    has_headers: bool
    splits_min: int
    rows_max: int | None

    def open(self) -> OpenedStore:
        return OpenedStore(self.url, self.s3)


def request_of(options: Mapping[str, str], *, is_streaming: bool) -> ReadRequest:
    """Parse the options. Raises InvalidRequest for an invalid, missing or unknown option."""
    values = {name.lower(): value for name, value in options.items()}
    if _PUSHDOWN in values:
        raise InvalidRequest(
            "option filterPushdown is not served, because a DataFrame lost the records that its "
            "first query filtered out: remove it, and prune by startingOffsets, endingOffsets, "
            "startingTimestamp or assign"
        )
    names = {name.lower() for name in _OPTIONS}
    unknown = [name for name in values if name not in names and not name.startswith(_KAFKAS_OWN)]
    if unknown:
        raise InvalidRequest(f"unknown option {unknown[0]!r}: options are {', '.join(_OPTIONS)}")
    if "store" not in values:
        raise InvalidRequest(
            "option store is missing: give file:///folder, a path, or s3://bucket/prefix"
        )
    style = (
        kafka_options.flag(values, "pathStyle", default=False) if "pathstyle" in values else None
    )
    return ReadRequest(
        values["store"],
        S3Options(
            endpoint_url=values.get("endpoint"), region=values.get("region"), path_style=style
        ),
        kafka_options.selection_of(values),
        kafka_options.span_of(values, is_streaming=is_streaming),
        kafka_options.flag(values, "includeHeaders", default=False),
        kafka_options.number(values, "minPartitions") or 1,
        kafka_options.number(values, "maxOffsetsPerTrigger"),
    )


def read_rows(
    request: ReadRequest, rows: "RowShape", split: Split | None
) -> Iterator[pa.RecordBatch]:
    """Yield one task's rows. If the plan is empty, Spark makes one task, with `split` None."""
    if split is None:
        return
    with request.open() as opened_store:
        small: list[pa.RecordBatch] = []
        count = 0
        for record_slice, batch in read_split(opened_store, split, rows.columns):
            small.append(rows.shaped(record_slice, batch))
            count += batch.num_rows
            if count >= BATCH_ROWS_MIN:
                yield concat(small)
                small, count = [], 0
        if small:
            yield concat(small)


class RowShape:
    """A converter from records to rows of a schema.

    If the schema has a column or type that the source does not have, the constructor raises
    InvalidRequest.
    """

    def __init__(self, schema: StructType) -> None:
        column_by_name = {name.lower(): (name, kind) for name, kind in COLUMNS.items()}
        self._sources: list[str] = []
        for field in schema.fields:
            name, kind = column_by_name.get(field.name.lower(), ("", ""))
            if field.dataType.simpleString() != kind:
                raise InvalidRequest(
                    f"column {field.name} {field.dataType.simpleString()} is none of "
                    + ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
                )
            self._sources.append(name)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        stored = [name for name in self._sources if name in RECORD_SCHEMA.names]
        self.columns: Sequence[str] = stored or ["offset"]
        """Columns to read. If the schema has no stored column, this is `offset`, to count rows."""

    def shaped(self, record_slice: Slice, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [
            self._column(record_slice, batch, source, field.type)
            for source, field in zip(self._sources, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(
        self, record_slice: Slice, batch: pa.RecordBatch, source: str, kind: pa.DataType
    ) -> pa.Array:
        match source:
            case "topic":
                return pa.repeat(record_slice.topic, batch.num_rows)
            case "partition":
                return pa.array(np.full(batch.num_rows, record_slice.partition, np.int32))
            case "timestampType":
                return pa.array(
                    np.full(batch.num_rows, int(record_slice.is_log_append_time), np.int32)
                )
            case _:
                column = batch.column(source)
                return column if column.type == kind else column.cast(kind)
