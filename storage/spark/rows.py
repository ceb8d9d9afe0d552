"""The rows of a task, in the columns that the query needs. All ways to read use this code."""

from collections.abc import Generator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from tidelog.storage.codec.record_columns import HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE, joined
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read.plan import Slice, Split
from tidelog.storage.read.split_reader import read_split
from tidelog.storage.spark.request import BATCH_ROWS_MIN, COLUMNS, ReadRequest

_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": TIMESTAMP_TYPE,
    "timestampType": pa.int32(),
    "headers": HEADERS_TYPE,
}


def read_rows(
    request: ReadRequest, rows: "RowShape", split: Split | None
) -> Generator[pa.RecordBatch]:
    """Yield one task's rows. If the plan is empty, Spark makes one task, with `split` None."""
    if split is None:
        return
    with request.open() as opened_store:
        shaped = (
            rows.shaped(record_slice, batch)
            for record_slice, batch in read_split(opened_store, split, rows.columns)
        )
        yield from joined(shaped, BATCH_ROWS_MIN)


class RowShape:
    """A converter from records to rows with columns of the source.

    `schema` may have other names than the source's, `sources`.
    """

    def __init__(self, sources: Sequence[str], schema: pa.Schema | None = None) -> None:
        self._sources = list(sources)
        self.schema = pa.schema([(name, _TYPES[name]) for name in sources])
        if schema is not None:
            self.schema = schema
        stored = [name for name in self._sources if name in RECORD_SCHEMA.names]
        self.columns: Sequence[str] = stored or ["offset"]
        """Columns to read. If the rows have no stored column, this is `offset`, to count rows."""

    @classmethod
    def of(cls, schema: StructType) -> "RowShape":
        """Return the shape of a schema.

        If the schema has a column or type that the source does not have, raise InvalidRequest.
        """
        column_by_name = {name.lower(): (name, kind) for name, kind in COLUMNS.items()}
        sources, fields = [], []
        for field in schema.fields:
            name, kind = column_by_name.get(field.name.lower(), ("", ""))
            if field.dataType.simpleString() != kind:
                raise InvalidRequest(
                    f"column {field.name} {field.dataType.simpleString()} is none of "
                    + ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
                )
            sources.append(name)
            fields.append(pa.field(field.name, _TYPES[name], field.nullable))
        return cls(sources, pa.schema(fields))

    def shaped(self, record_slice: Slice, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [self._column(record_slice, batch, source) for source in self._sources]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, record_slice: Slice, batch: pa.RecordBatch, source: str) -> pa.Array:
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
                return batch.column(source)
