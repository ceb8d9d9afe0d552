"""The log for Kafka's protocol: record batches as producers send them and as they are stored.

From level 4 on, a chunk keeps the batches of producers as they are. Below level 4, and for records
of other clients, this module converts batches to columns and columns to batches. Offsets,
guarantees and the places of a read (tail and table) are those of `ClusterRecords`.
"""

import asyncio
from functools import partial
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from tidelog.storage.codec import record_batch as kafka
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.batches_as_sent import KeptBatches
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.codec.record_batch import Batch, KeptBatch, KeylessRecords
from tidelog.storage.codec.record_columns import RECORD_SCHEMA
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import ProducerBatch
from tidelog.storage.core.errors import RecordTooLarge
from tidelog.storage.core.model import AppendedRange, ReadBounds
from tidelog.storage.log_engine import Log
from tidelog.storage.records import ClusterRecords
from tidelog.storage.state.topic import Topic
from tidelog.storage.write.requests import AppendRequest, part_rows


def check_size(topic: Topic, size: int) -> None:
    """Raise RecordTooLarge if the topic does not accept a batch of so many bytes."""
    most = topic.config.max_message_bytes
    if size > most:
        raise RecordTooLarge(
            f"a batch has {size} bytes, the limit max.message.bytes of topic {topic.name!r} is "
            f"{most}: send smaller batches"
        )


class BatchesRead(NamedTuple):
    """The result of a read: whole batches in offset order, in `size` bytes.

    They have `records` records from the wanted offset on. The next read starts at `next_offset`.
    At the end of the partition there are no pieces.
    """

    pieces: list[bytes | memoryview]
    size: int
    records: int
    next_offset: int
    log_start_offset: int
    high_watermark: int


class KafkaLog:
    """Record batches of one broker's log. Owned by its event loop."""

    def __init__(self, log: Log, records: ClusterRecords) -> None:
        self._log = log
        self._records = records

    def append(
        self, topic: Topic, partition: int, batch: Batch
    ) -> "asyncio.Future[list[AppendedRange]]":
        """Append a checked batch; the future has its one range.

        If an idempotent producer sends a batch again that is in the log already, the range is that
        of the first append.

        Raises UnknownPartition, KeylessRecords, RecordTooLarge, InvalidTimestamp, Throttled and
        Unavailable. The future may raise the errors of a commit, ProducerFenced and
        OutOfOrderSequence.
        """
        log = self._log
        config = topic.config
        if batch.has_null_key and "compact" in config.cleanup_policy:
            raise KeylessRecords(())
        size = len(batch.data)
        check_size(topic, size)
        producer = None
        if batch.producer_id >= 0:
            producer = ProducerBatch(batch.producer_id, batch.producer_epoch, batch.base_sequence)
        records = batch if log.state.level >= format_levels.KAFKA else _columns(batch)
        part = part_rows(topic, partition, records, producer)
        topic_id = topic.topic_id if producer is None else None
        request = AppendRequest([part], max(size, batch.weight), topic_id=topic_id)
        return log.writer.submit(request)

    async def read(self, topic: Topic, partition: int, offset: int, bytes_max: int) -> BatchesRead:
        """Return the batches from the one that contains `offset` on.

        They are as many as fit into `bytes_max`, but at least one if there is a record. If
        `bytes_max` is 0, return none. Does not wait for new records. The result has the records
        that other brokers acknowledged before the last call of `refresh`.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, Corrupt, Unavailable.
        """
        log = self._log

        async def read() -> BatchesRead:
            await log.wal.ensure_view()
            return await self._read(topic.name, partition, offset, bytes_max)

        return await log.wal.retry_after_suspend(read)

    def is_in_store(self, topic: Topic, partition: int, offset: int) -> bool:
        """Return whether a read from `offset` on has to read the store."""
        return self._log.reader.is_in_store(topic, partition, offset)

    async def reserve_producer_id(self) -> int:
        """Return a producer id that no other producer has (I11), with epoch 0.

        Each id is a commit; concurrent calls share an entry.

        **On a crash** before the answer: the id is never used.
        """
        if self._log.state.level < format_levels.KAFKA:
            return (await self._records.init_producer()).producer_id
        return await self._records.reserve_producers(1)

    async def _read(self, name: str, number: int, offset: int, bytes_max: int) -> BatchesRead:
        log = self._log
        if offset > log.state.partition(name, number).high_watermark:
            await log.wal.refresh()  # records acknowledged by other brokers must be visible (I3)
        partition = log.state.partition(name, number)
        partition.check_range(name, number, offset)
        read = partial(self._collect, log.state.topic(name), number, offset, bytes_max)
        collected = await self._records.unless_removed(name, number, offset, read)
        partition = log.state.partition(name, number)
        return BatchesRead(*collected, partition.log_start_offset, partition.high_watermark)

    async def _collect(
        self, topic: Topic, number: int, offset: int, bytes_max: int
    ) -> tuple[list[bytes | memoryview], int, int, int]:
        """Return pieces, their bytes, their records from `offset` on, and the offset after them.

        The batches lie end to end; only the first may begin before `offset`.
        """
        reader = self._log.reader
        pieces: list[bytes | memoryview] = []
        size, records, end = 0, 0, topic.partitions[number].high_watermark
        while offset < end and size < bytes_max:
            kept_batches = await reader.kept_batches(topic, number, offset)
            placed = (batches.placed(base_offset, offset) for base_offset, batches in kept_batches)
            for batch_start, batch_end, parts in chain.from_iterable(placed):
                length = sum([len(part) for part in parts])
                # A consumer may deliver the records of each batch but the first, although they are
                # before its position. So a batch whose first records are in `pieces` is left to the
                # next read.
                if pieces and (size + length > bytes_max or batch_start < offset):
                    return pieces, size, records, offset
                pieces += parts
                size += length
                records += batch_end - offset
                offset = batch_end
            if not kept_batches:
                bytes_left = bytes_max - size
                rows_end = reader.rows_end(topic, number, offset, bytes_left)
                bounds = ReadBounds(bytes_left, RECORDS_MAX, rows_end)
                result = await reader.read(topic, number, offset, bounds)
                if result.next_offset == offset:
                    break
                rows = record_columns.concat(
                    [piece.batch for piece in result.pieces] or [_NO_RECORDS]
                )
                built = kafka.build(rows, offset, result.next_offset)
                pieces += built
                size += sum(map(len, built))
                records += rows.num_rows
                offset = result.next_offset
        return pieces, size, records, offset


def _columns(batch: Batch) -> pa.RecordBatch:
    return KeptBatches([KeptBatch(batch.data, batch.count)]).decoded()


_NO_RECORDS = pa.RecordBatch.from_pylist([], RECORD_SCHEMA)
