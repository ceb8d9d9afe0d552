"""A topic as an Arrow dataset: table and tail, as of one entry of the WAL.

Polars, DuckDB and pyarrow push columns and filters into a dataset. Each scan plans by the manifest
and the WAL (read/pruning.py), reads only what is left, verified (read/split_reader.py), and lets
Arrow apply the filter. A scan that needs only offsets and partitions opens no file whose rows the
manifest counts. The snapshot never changes. If collection has deleted an object of it since, a scan
raises Unavailable.
"""

import contextlib
import datetime as dt
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tidelog.storage.codec.record_columns import joined
from tidelog.storage.core.errors import InvalidRequest, LogError
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.log_snapshot import LogSnapshot, PartitionSnapshot, TopicSnapshot
from tidelog.storage.read.offline_log import open_snapshot
from tidelog.storage.read.plan import (
    NO_FILTER,
    OffsetRange,
    SegmentRange,
    Slice,
    Split,
    TailRange,
    segment_slices,
    tail_slices,
)
from tidelog.storage.read.pruning import ArrowCondition, columns_of
from tidelog.storage.read.split_reader import read_split
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.tables.delta import TABLE_SCHEMA

BATCH_ROWS_MIN = 8192
"""Smaller batches are joined: a batch costs an engine as much as a thousand rows."""
POSITIONS_ROWS = 1 << 20
"""Rows of a batch that is made without a read."""
POSITION_COLUMNS = frozenset({"offset", "partition"})

Columns: TypeAlias = Sequence[str] | Mapping[str, pc.Expression]
Where: TypeAlias = pc.Expression | list[Any]
StoreOpener: TypeAlias = Callable[[], AbstractContextManager[OpenedStore]]


class Side(NamedTuple):
    """Which records of a topic a dataset has."""

    has_sealed: bool = True
    has_tail: bool = True

    def of(self, topic: TopicSnapshot) -> TopicSnapshot:
        return topic._replace(partitions=[self._of(part) for part in topic.partitions])

    def _of(self, part: PartitionSnapshot) -> PartitionSnapshot:
        if not self.has_tail:
            part = part._replace(high_watermark=part.sealed_end, tail=[])
        if not self.has_sealed:
            start = max(part.log_start_offset, part.sealed_end)
            part = part._replace(log_start_offset=start, segments=[])
        return part


ALL, SEALED, TAIL = Side(), Side(has_tail=False), Side(has_sealed=False)


def read(
    store: str,
    topic: str,
    columns: Sequence[str] | None = None,
    where: Where | None = None,
    as_of: dt.datetime | None = None,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    path_style: bool | None = None,
) -> "LogDataset":
    """Return a topic's records, sealed or not, as an Arrow dataset, as of this call.

    `where` is an expression of `pyarrow.compute`, or pyarrow's list of tuples:
    `[("partition", "=", 1), ("offset", ">=", 5)]`. It may name columns that `columns` leaves out.
    With `as_of`, the records are those of the log at that time; `OfflineLog.snapshot_at` says when
    this is known. A time without a zone is UTC.

    Raises UnknownTopic, InvalidRequest, TableInDoubt, Corrupt, StoreUnfit, Unavailable. A scan
    raises Corrupt and Unavailable.
    """
    s3 = S3Options(endpoint_url=endpoint, region=region, path_style=path_style)
    with OpenedStore(store, s3) as opened_store:
        at_ms = None if as_of is None else _ms(as_of)
        taking = open_snapshot(opened_store.store, SystemClock(), [topic], at_ms)
        snapshot = opened_store.run(taking)
    dataset = LogDataset(snapshot.topics[topic], lambda: OpenedStore(store, s3))
    return dataset.narrowed(columns, where)


def _ms(time: dt.datetime) -> int:
    aware = time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
    return int(aware.timestamp() * 1000)


class LogDataset(ds.InMemoryDataset):
    """One topic of a snapshot, in the columns of its table. Immutable; each scan opens the store.

    A scan has the records of a partition's table in order, and those of its tail in order; the tail
    comes first, because its objects are deleted first.
    """

    def __init__(
        self,
        topic: TopicSnapshot,
        open_store: StoreOpener,
        *,
        on_rows: Callable[[int], object] = lambda _: None,
        on_failure: Callable[[LogError], object] = lambda _: None,
    ) -> None:
        """Use `read`.

        `on_rows` gets the number of records of each batch that a scan has read. `on_failure` gets
        the error that a scan raises, because an engine may raise another one in its place.
        """
        super().__init__(TABLE_SCHEMA.empty_table())  # type: ignore[call-arg]
        self._topic = topic
        self._open_store = open_store
        self._on_rows = on_rows
        self._on_failure = on_failure
        self._columns = list(TABLE_SCHEMA.names)
        self._where: pc.Expression | None = None

    def narrowed(self, columns: Sequence[str] | None, where: Where | None) -> "LogDataset":
        """Return the dataset with only these columns, and only records that match.

        Raises InvalidRequest.
        """
        names = self._columns if columns is None else list(columns)
        for name in names:
            if name not in self._columns:
                raise InvalidRequest(
                    f"unknown column {name!r}: columns are {', '.join(self._columns)}"
                )
        narrow = LogDataset(
            self._topic, self._open_store, on_rows=self._on_rows, on_failure=self._on_failure
        )
        narrow._columns = names
        narrow._where = _both(self._where, None if where is None else _expression(where))
        return narrow

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([TABLE_SCHEMA.field(name) for name in self._columns])

    def filter(self, expression: pc.Expression) -> "LogDataset":
        """Return the dataset with only the records that match."""
        return self.narrowed(None, expression)

    def scanner(  # type: ignore[override]
        self, columns: Columns | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> "LogScanner":
        """Return a scanner for one scan.

        The other options of pyarrow's scanners have no effect: they are about files and threads.
        """
        columns_to_read = self._columns if columns is None else columns
        where = _both(self._where, filter)
        condition = None if where is None else ArrowCondition(where, TABLE_SCHEMA)
        names = _sources(columns_to_read) | (
            frozenset() if condition is None else condition.columns
        )
        schema = pa.schema([field for field in TABLE_SCHEMA if field.name in names])
        return LogScanner(schema, self._batches(schema, condition), columns_to_read, where)

    def count_rows(self, filter: pc.Expression | None = None, **_: Any) -> int:  # type: ignore[override]
        """Return the number of records that match, from the manifest where it knows them."""
        return self.scanner([], filter).count_rows()

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the records as a stream of batches."""
        return self.scanner().to_reader()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader: Any = self.to_reader()
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(
        self, schema: pa.Schema, condition: ArrowCondition | None
    ) -> Iterator[pa.RecordBatch]:
        topic = self._topic if condition is None else condition.pruned(self._topic)
        if POSITION_COLUMNS.issuperset(schema.names):
            for part in topic.partitions:
                yield from self._counted(positions(part, schema))
            topic = _uncounted(topic)
        tail, sealed = slices(topic)
        stored = [name for name in schema.names if name != "partition"] or ["offset"]
        if tail or sealed:
            with self._open_store() as opened_store:
                read_batches = read_split(
                    opened_store, Split([*tail, *sealed]), stored, condition or NO_FILTER
                )
                with contextlib.closing(read_batches):
                    yield from self._counted(
                        _with_partition(schema, record_slice, batch)
                        for record_slice, batch in read_batches
                    )

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for batch in batches:
                self._on_rows(batch.num_rows)
                yield batch
        except LogError as error:
            self._on_failure(error)
            raise

    # -- Arrow's own code would use the empty dataset below these, and silently find no record.

    def _not_served(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("tidelog's dataset does not do this: use to_table() or to_reader() first")

    get_fragments = join = join_asof = sort_by = replace_schema = _not_served


class LogScanner:
    """One scan, with the methods of pyarrow's scanner. Its records are read once.

    A pyarrow scanner would run our Python in a thread of Arrow, ahead of the engine. Then a process
    whose engine leaves a scan before its end, as LIMIT does, aborts when it ends. So each batch is
    read in the engine's thread, and Arrow filters and projects it there.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        columns: Columns,
        where: pc.Expression | None,
    ) -> None:
        """Read from `batches` with the `schema`, in these columns."""
        self.dataset_schema = TABLE_SCHEMA
        self._schema = schema
        self._source = batches
        self._columns = columns
        self._where = where
        self.projected_schema: pa.Schema = self._shaped(schema.empty_table()).schema

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        return joined(self._batches(), BATCH_ROWS_MIN)

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.to_batches())

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(list(self.to_batches()), self.projected_schema)

    def head(self, num_rows: int) -> pa.Table:
        with contextlib.closing(self._batches()) as batches:
            rows = 0
            first: list[pa.RecordBatch] = []
            for batch in batches:
                first.append(batch.slice(0, num_rows - rows))
                rows += batch.num_rows
                if rows >= num_rows:
                    break
        return pa.Table.from_batches(first, self.projected_schema)

    def count_rows(self) -> int:
        return sum(batch.num_rows for batch in self._batches())

    def _batches(self) -> Generator[pa.RecordBatch]:
        with contextlib.closing(joined(self._source, BATCH_ROWS_MIN)) as batches:
            for batch in batches:
                yield from self._shaped(pa.Table.from_batches([batch])).to_batches()

    def _shaped(self, table: pa.Table) -> pa.Table:
        """Return the rows that match, in the columns of this scan."""
        dataset: Any = ds.dataset(table)
        shaped: pa.Table = dataset.to_table(
            columns=self._columns, filter=self._where, use_threads=False
        )
        return shaped


def positions(part: PartitionSnapshot, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield offset and partition of the records that the manifest and the WAL count."""
    for start, end in _dense_ranges(part):
        for first in range(start, end, POSITIONS_ROWS):
            last = min(first + POSITIONS_ROWS, end)
            column_by_name = {
                "offset": pa.array(np.arange(first, last, dtype=np.int64)),
                "partition": pa.array(np.full(last - first, part.number, np.int32)),
            }
            yield pa.RecordBatch.from_arrays(
                [column_by_name[name] for name in schema.names], schema=schema
            )


def slices(topic: TopicSnapshot) -> tuple[list[TailRange], list[SegmentRange]]:
    """Return the slices of a topic's tails, and those of its table."""
    snapshot = LogSnapshot("", 0, {topic.name: topic})
    ranges = [
        OffsetRange(topic.name, part.number, part.log_start_offset, part.high_watermark)
        for part in topic.partitions
    ]
    tail = [piece for whole in ranges for piece in tail_slices(snapshot, whole)]
    sealed = [piece for whole in ranges for piece in segment_slices(snapshot, whole)]
    return tail, sealed


def _dense_ranges(part: PartitionSnapshot) -> Iterator[tuple[int, int]]:
    """Yield the offset ranges of segments and tail chunks that have a record for each offset."""
    for file in filter(_is_dense, part.segments):
        yield (
            max(file.base_offset, part.log_start_offset),
            min(file.end_offset, part.sealed_end),
        )
    start = max(part.log_start_offset, part.sealed_end)
    for chunk in part.tail:
        if not chunk.is_lost:
            yield max(chunk.base_offset, start), min(chunk.end_offset, part.high_watermark)


def _is_dense(file: SegmentFile) -> bool:
    return file.rows == file.end_offset - file.base_offset


def _uncounted(topic: TopicSnapshot) -> TopicSnapshot:
    """Return the topic with only the segments that lack records, or whose rows are not known."""
    return topic._replace(
        partitions=[
            part._replace(segments=[file for file in part.segments if not _is_dense(file)], tail=[])
            for part in topic.partitions
        ]
    )


def _with_partition(schema: pa.Schema, piece: Slice, batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [
        pa.array(np.full(batch.num_rows, piece.partition, np.int32))
        if name == "partition"
        else batch.column(name)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _sources(columns: Columns) -> frozenset[str]:
    """Return the table's columns that a scan's columns read.

    A scan without columns counts records: it reads offsets.
    """
    if isinstance(columns, Mapping):
        names = [columns_of(TABLE_SCHEMA, expression) for expression in columns.values()]
        return frozenset({"offset"}).union(*names)
    return frozenset(columns) or frozenset({"offset"})


def _both(first: pc.Expression | None, second: pc.Expression | None) -> pc.Expression | None:
    if first is None or second is None:
        return first if second is None else second
    return first & second


def _expression(where: Where) -> pc.Expression:
    """Return the condition as an expression. Raises InvalidRequest if it fits no table."""
    try:
        expression = where if isinstance(where, pc.Expression) else pq.filters_to_expression(where)
        _ = columns_of(TABLE_SCHEMA, expression)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidRequest(f"where: {str(error).splitlines()[0]}") from error
    return expression
