"""The rows of a task, in the columns that the query needs. Batch and stream use the same code."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tidelog.storage.codec.record_columns import RECORD_SCHEMA, joined
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.read.plan import Slice, Split
from tidelog.storage.read.split_reader import read_split
from tidelog.storage.spark.request import BATCH_ROWS_MIN, COLUMNS, ReadRequest


def read_rows(
    request: ReadRequest, rows: "RowShape", split: Split | None
) -> Iterator[pa.RecordBatch]:
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
