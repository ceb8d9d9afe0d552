"""A topic in batches of DataFrames, with a checkpoint: a stream for each version of Spark.

Spark 3.5 has no data sources in Python, so it has no stream of this log. A checkpoint is a folder
with two kinds of small objects, as Spark's own: `offsets/N` has the offsets of batch N and is
written before the batch; `commits/N` is written after it. Batch 0 is empty, and keeps where the
first run began. **On a crash** between the two, the next run gives batch N again, with the same
records. Records never change, so a sink that is idempotent, or stores the number of the batch, has
each record once.

The folder is of one topic and one reader at a time. Of two readers that plan the same batch, one
fails, because the objects are created, never overwritten.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tidelog.storage.core.errors import InvalidRequest, OffsetOutOfRange
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot
from tidelog.storage.read.offline_log import OfflineLog
from tidelog.storage.read.plan import OffsetRange, limit_offsets
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.spark.request import ReadRequest
from tidelog.storage.spark.sealed_frame import store_root
from tidelog.storage.spark.topic_frame import TopicRanges, frame_of_ranges, topic_request
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.object_store import Created, ObjectStore
from tidelog.storage.store.open import open_store

_Offsets = dict[TopicPartition, int]


class TopicBatch(NamedTuple):
    """The records of one batch; its number counts from 1 over all runs with one checkpoint."""

    number: int
    frame: DataFrame


class _BatchOffsets(msgspec.Struct):
    """The offsets [start, end) of a batch by partition."""

    topic_id: str
    start: dict[int, int]
    end: dict[int, int]


def batches(
    spark: SparkSession, store: str, topic: str, *, checkpoint: str, **options: str | int | bool
) -> Iterator[TopicBatch]:
    """Yield the records since the checkpoint, up to those that were there at the call.

    `checkpoint` is a folder or an s3:// URL. `options` are those of a stream, such as
    `startingOffsets` (default: latest) and `maxOffsetsPerTrigger`. A batch counts as done when the
    caller asks for the next. Raises the errors of `read_topic`, and InvalidRequest if the
    checkpoint is of another topic, or another reader uses it.
    """
    request = topic_request(store, topic, options, is_streaming=True)
    with request.open() as opened_store:
        view = opened_store.run(OfflineLog.open(opened_store.store, SystemClock()))
        saved = opened_store.run(open_store(checkpoint, s3=request.s3))
        try:
            yield from _Batches(spark, request, opened_store, view, saved).until_now()
        finally:
            opened_store.run(saved.close())
            opened_store.run(view.close())


class _Batches:
    """One call of `batches`."""

    def __init__(
        self,
        spark: SparkSession,
        request: ReadRequest,
        opened_store: OpenedStore,
        view: OfflineLog,
        saved: ObjectStore,
    ) -> None:
        self._spark = spark
        self._request = request
        self._opened = opened_store
        self._view = view
        self._saved = saved
        (self._topic,) = request.selection.names

    def until_now(self) -> Iterator[TopicBatch]:
        heads = _heads(self._view.offsets([self._topic]))
        number, last = self._newest("offsets"), self._newest("commits")
        if number < 0:
            number, plan = 0, self._first()
            self._create("offsets/0", msgspec.json.encode(plan))
        else:
            plan = self._saved_plan(number)
        if number > last:
            yield from self._done(number, plan)
        while (next_plan := self._next(plan.end, heads)) is not None:
            number, plan = number + 1, next_plan
            self._create(f"offsets/{number}", msgspec.json.encode(plan))
            yield from self._done(number, plan)

    def _done(self, number: int, plan: _BatchOffsets) -> Iterator[TopicBatch]:
        if plan.start != plan.end:
            yield TopicBatch(number, self._frame(plan))
        self._create(f"commits/{number}", b"{}")

    def _first(self) -> _BatchOffsets:
        """Return the empty batch at the start of the first run."""
        span = self._request.span
        snapshot, ranges = self._opened.run(self._view.resolve(self._request.selection, span))
        start = {offset_range.partition: offset_range.start for offset_range in ranges}
        return _BatchOffsets(snapshot.topics[self._topic].topic_id, start, start)

    def _next(self, position: dict[int, int], heads: dict[int, int]) -> _BatchOffsets | None:
        """Return the plan of the next batch, or None if no record is left."""
        start = {TopicPartition(self._topic, n): position.get(n, 0) for n in heads}
        end = {TopicPartition(self._topic, n): max(heads[n], position.get(n, 0)) for n in heads}
        if self._request.rows_max is not None:
            end = limit_offsets(start, end, self._request.rows_max)
        if start == end:
            return None
        topic_id = self._view.offsets([self._topic]).topics[self._topic].topic_id
        return _BatchOffsets(topic_id, _by_number(start), _by_number(end))

    def _frame(self, plan: _BatchOffsets) -> DataFrame:
        snapshot = self._opened.run(
            self._view.snapshot(
                [self._topic],
                {TopicPartition(self._topic, n): start for n, start in plan.start.items()},
                fail_on_data_loss=self._request.span.fail_on_data_loss,
            )
        )
        self._check_topic(snapshot, plan)
        ranges = [
            OffsetRange(self._topic, n, self._from(snapshot, n, plan), end)
            for n, end in plan.end.items()
        ]
        root = store_root(self._opened.store)
        return frame_of_ranges(self._spark, self._request, TopicRanges(snapshot, ranges, root))

    def _check_topic(self, snapshot: LogSnapshot, plan: _BatchOffsets) -> None:
        if snapshot.topics[self._topic].topic_id != plan.topic_id:
            raise InvalidRequest(
                f"checkpoint {self._saved.url} is of another topic, or {self._topic} was deleted "
                "and created again: give a new checkpoint"
            )

    def _from(self, snapshot: LogSnapshot, number: int, plan: _BatchOffsets) -> int:
        part = snapshot.topics[self._topic].partitions[number]
        low, high, start = part.log_start_offset, part.high_watermark, plan.start.get(number, 0)
        if start < min(low, plan.end[number]) and self._request.span.fail_on_data_loss:
            raise OffsetOutOfRange(
                self._topic, number, start, log_start_offset=low, high_watermark=high
            )
        return min(max(start, low), plan.end[number])

    def _newest(self, folder: str) -> int:
        """Return the highest number in a folder of the checkpoint, or -1."""

        async def numbers() -> list[int]:
            prefix = f"{folder}/"
            return [
                int(info.key.removeprefix(prefix))
                async for info in self._saved.list(prefix)
                if info.key.removeprefix(prefix).isdigit()
            ]

        return max(self._opened.run(numbers()), default=-1)

    def _saved_plan(self, number: int) -> _BatchOffsets:
        key = f"offsets/{number}"
        try:
            plan = msgspec.json.decode(self._opened.run(self._saved.get(key)), type=_BatchOffsets)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"checkpoint {self._saved.url}: {key}: {error}") from error
        self._check_topic(self._view.offsets([self._topic]), plan)
        return plan

    def _create(self, key: str, body: bytes) -> None:
        if self._opened.run(self._saved.create(key, [body])) is not Created.DONE:
            raise InvalidRequest(
                f"checkpoint {self._saved.url}: {key} was not written by this reader, or may not "
                "be: end other readers with this checkpoint, and start again"
            )


def _heads(snapshot: LogSnapshot) -> dict[int, int]:
    (topic,) = snapshot.topics.values()
    return {part.number: part.high_watermark for part in topic.partitions}


def _by_number(offsets: _Offsets) -> dict[int, int]:
    return {of.partition: offset for of, offset in offsets.items()}
