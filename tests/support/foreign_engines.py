"""A topic in a folder, other engines on its table, and Spark's source without Spark.

The planner and the readers of the data source are Python: they are driven here as Spark drives
them, in this process, and no JVM starts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import deltalake

from tests.support.broker_log import BrokerLog, Record
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

T = TypeVar("T")

SEGMENTS = 5
ROWS = 10
"""In each segment; half as many in the tail."""
END = SEGMENTS * ROWS + ROWS // 2


def filled(root: Path, segments: int = SEGMENTS, **configs: str) -> list[Record]:
    """Topic `t` of one partition: so many segments, then a tail. The broker has ended."""
    with BrokerLog(root) as broker:
        broker.create("t", 1, **configs)
        for first in range(0, segments * ROWS, ROWS):
            append(broker, first, ROWS)
            broker.seal("t")
        append(broker, segments * ROWS, ROWS // 2)
        return broker.records("t")


def append(broker: BrokerLog, first: int, count: int) -> None:
    """Each record has a key of its own."""
    numbers = range(first, first + count)
    keys: list[bytes | None] = [b"k%d" % number for number in numbers]
    broker.append("t", {0: [b"value-%d" % number for number in numbers]}, keys=keys)


def table_uri(root: Path) -> str:
    """Where other engines find the table of the one topic."""
    (table_folder,) = (root / "topics").iterdir()
    return str(table_folder)


def table(root: Path) -> deltalake.DeltaTable:
    """The table as another engine opens it."""
    return deltalake.DeltaTable(table_uri(root))


# -- commits of another engine


def optimize(delta: deltalake.DeltaTable) -> None:
    delta.optimize.compact()


def delete_one(delta: deltalake.DeltaTable) -> None:
    delta.delete('"offset" = 3')


def delete_segment(delta: deltalake.DeltaTable) -> None:
    """The third of five segments leaves the table."""
    delta.delete('"offset" >= 20 and "offset" < 30')


def restore(delta: deltalake.DeltaTable) -> None:
    """The newest three of five segments leave the table."""
    delta.restore(2)


def append_one(delta: deltalake.DeltaTable) -> None:
    row = delta.to_pyarrow_table().slice(0, 1)
    deltalake.write_deltalake(delta, row, mode="append")


# -- the log


def caring(root: Path, work: Callable[[MaintenanceSession], Awaitable[T]]) -> T:
    """Do to the store as a command of `tidelog` does."""

    async def run() -> T:
        store = FolderStore(root)
        cluster = await MaintenanceSession.open(store, SystemClock())
        try:
            return await work(cluster)
        finally:
            await cluster.close()
            await store.close()

    return asyncio.run(run())


def batch_offsets(root: Path, **options: str) -> list[int]:
    """The offsets that `spark.read.format("tidelog")` gives. Raises LogError."""
    from tidelog.storage.spark.request import request_of
    from tidelog.storage.spark.source import TidelogReader

    request = request_of({"store": root.as_uri(), "topic": "t", **options}, is_streaming=False)
    reader = TidelogReader(request, _schema())
    splits = reader.partitions()
    return sorted(offset for split in splits for offset in _offsets(reader.read(split)))


def stream_offsets(root: Path, rows_max: int, **options: str) -> Iterator[list[int]]:
    """The offsets of each micro-batch of `spark.readStream.format("tidelog")` over the log.

    Raises LogError.
    """
    from tidelog.storage.spark.request import request_of
    from tidelog.storage.spark.stream import TidelogStreamReader
    from tidelog.storage.spark.versions import ReadMaxRows

    reader_options = {
        "store": root.as_uri(),
        "topic": "t",
        "startingOffsets": "earliest",
        **options,
    }
    reader = TidelogStreamReader(request_of(reader_options, is_streaming=True), _schema())
    try:
        start = reader.initialOffset()
        while (end := reader.latestOffset(start, ReadMaxRows(rows_max))) != start:
            splits = reader.partitions(start, end)
            yield sorted(offset for split in splits for offset in _offsets(reader.read(split)))
            start = end
    finally:
        reader.stop()


def broker_records(root: Path) -> list[Record]:
    """All records, as a broker gives them that starts now. Raises LogError."""
    with BrokerLog(root) as broker:
        return broker.records("t")


def outcome(read: Callable[[], T]) -> T | LogError:
    """The result of a reader, or the error of the log that it raises."""
    try:
        return read()
    except LogError as error:
        return error


def _schema() -> "StructType":
    from pyspark.sql.types import LongType, StructType

    return StructType().add("offset", LongType())


def _offsets(batches) -> Iterator[int]:
    return (offset for batch in batches for offset in batch.column("offset").to_pylist())
