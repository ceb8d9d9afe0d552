"""`spark.readStream.format("tidelog")`: micro-batches of offsets, exactly once from a checkpoint.

Spark writes each batch's end offsets to its checkpoint before it reads the batch. Records never
change. **On a crash**: Spark repeats the batch with the same rows. A sink that stores the batch's
number, or is idempotent, gets each row once. Offsets are Kafka's JSON: {"topic":{"0":5}}.

The reader exists as long as the query, in one Python process of the driver, and follows the WAL
there. Spark pickles the reader for the tasks, before the reader has opened a store.

Spark before 4.2 asks only for the newest offsets, without its own position and a limit. There, a
micro-batch is all that is there, and `maxOffsetsPerTrigger` is refused.
"""

import logging
from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql import datasource as api
from pyspark.sql.types import StructType

from tidelog.storage.core.errors import OffsetOutOfRange
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot
from tidelog.storage.read.offline_log import OfflineLog
from tidelog.storage.read.plan import OffsetRange, limit_offsets, plan
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.spark.request import ReadRequest
from tidelog.storage.spark.rows import RowShape, read_rows
from tidelog.storage.spark.versions import (
    READ_LIMITS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from tidelog.storage.store.blocking_store import OpenedStore

log = logging.getLogger("tidelog.spark")

Offsets = dict[TopicPartition, int]
Json = dict[str, dict[str, int]]


class TidelogStreamReader(api.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one streaming query. Spark calls its methods one after the other."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        if request.rows_max is not None:
            READ_LIMITS.require()
        self.request = request
        self.rows = RowShape.of(schema)
        self._live: tuple[OpenedStore, OfflineLog] | None = None
        self._heads: Offsets = {}
        self._target: Offsets | None = None

    # -- on the driver

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's names from here on
        self._refreshed()
        opened_store, view = self._open()
        _, ranges = opened_store.run(view.resolve(self.request.selection, self.request.span))
        return to_json({TopicPartition(r.topic, r.partition): r.start for r in ranges})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows_max = self.request.rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._refreshed()

    def latestOffset(  # noqa: N802
        self, start: Json | None = None, limit: ReadLimit | None = None
    ) -> Json:
        heads = self._refreshed()
        if start is None:  # before Spark 4.2
            return to_json(heads)
        if self._target is not None:
            heads = {
                of: min(head, self._target[of]) for of, head in heads.items() if of in self._target
            }
        begin = from_json(start)
        for of, offset in begin.items():
            head = heads.get(of, 0)
            if head < offset:  # the topic was deleted, and perhaps created again
                self._lost(OffsetOutOfRange(*of, offset, log_start_offset=0, high_watermark=head))
                begin[of] = head
        if isinstance(limit, ReadMaxRows):
            heads = limit_offsets(begin, heads, limit.max_rows)
        return start if heads == from_json(start) else to_json(heads)

    def reportLatestOffset(self) -> Json | None:  # noqa: N802
        return to_json(self._heads) if self._heads else None

    def partitions(self, start: Json, end: Json) -> list[api.InputPartition]:
        opened_store, view = self._open()
        begin, upto = from_json(start), from_json(end)
        topics = sorted({of.topic for of in upto})
        is_strict = self.request.span.fail_on_data_loss
        snapshot = opened_store.run(view.snapshot(topics, begin, fail_on_data_loss=is_strict))
        ranges = [
            OffsetRange(*of, self._start_of(snapshot, of, begin.get(of, 0), end_offset), end_offset)
            for of, end_offset in upto.items()
        ]
        splits = plan(snapshot, ranges, splits_min=self.request.splits_min)
        return [api.InputPartition(split) for split in splits]

    def commit(self, end: Json) -> None:
        """Do nothing, because the reader keeps no state of read records."""

    def stop(self) -> None:
        if self._live is not None:
            opened_store, view = self._live
            self._live = None
            opened_store.run(view.close())
            opened_store.close()

    def _start_of(self, snapshot: LogSnapshot, of: TopicPartition, start: int, end: int) -> int:
        view = snapshot.partition(of)
        low, high = view.log_start_offset, view.high_watermark
        if end > high:
            # Acknowledged records do not disappear, so this is another cluster or another topic.
            raise OffsetOutOfRange(*of, end, log_start_offset=low, high_watermark=high)
        if start < min(low, end) or start > end:  # > if the topic was deleted, and created again
            self._lost(OffsetOutOfRange(*of, start, log_start_offset=low, high_watermark=high))
        return max(start, low)

    def _lost(self, error: OffsetOutOfRange) -> None:
        if self.request.span.fail_on_data_loss:
            error.add_note("set the option failOnDataLoss = false to continue after a gap")
            raise error
        log.warning("continuing after missing records: %s", error)

    def _refreshed(self) -> Offsets:
        """Return the selected partitions' end offsets, including all commits before this call."""
        opened_store, view = self._open()
        opened_store.run(view.refresh())
        selection = self.request.selection
        snapshot = view.offsets(selection.topics())
        self._heads = {
            of: snapshot.partition(of).high_watermark for of in selection.partitions(snapshot)
        }
        return self._heads

    def _open(self) -> tuple[OpenedStore, OfflineLog]:
        if self._live is None:
            opened_store = self.request.open()
            try:
                self._live = (
                    opened_store,
                    opened_store.run(OfflineLog.open(opened_store.store, SystemClock())),
                )
            except BaseException:
                opened_store.close()
                raise
        return self._live

    # -- in a task

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(self.request, self.rows, partition.value)


def to_json(offsets: Mapping[TopicPartition, int]) -> Json:
    """Convert in a fixed order, because Spark compares offsets as text."""
    offsets_by_topic: Json = {}
    for topic, partition in sorted(offsets):
        offsets_by_topic.setdefault(topic, {})[str(partition)] = offsets[
            TopicPartition(topic, partition)
        ]
    return offsets_by_topic


def from_json(offsets: Json) -> Offsets:
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in offsets.items()
        for partition, offset in partitions.items()
    }
