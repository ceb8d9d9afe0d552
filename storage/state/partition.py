"""A partition in the cluster state: its offsets, and the index of its tail.

Pure. Only `apply` (storage.state.cluster_state) changes it. I2: the tail has no hole.
"""

from bisect import bisect_right

import msgspec
import pyarrow as pa

from tidelog.storage.codec import batches_as_sent
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.batches_as_sent import KeptBatches
from tidelog.storage.core.actions import KAFKA_CODEC, Append, Chunk
from tidelog.storage.core.errors import OffsetOutOfRange
from tidelog.storage.core.model import Part

LOST = "lost"
"""The codec of lost records."""


class TailChunk(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Consecutive records of the tail in one chunk, and the chunk's place in the store.

    `position` counts from the start of the object `object_key`. If `append_ms` >= 0, it replaces
    the records' timestamps. Lost records have the codec LOST and no object.
    """

    base_offset: int
    count: int
    first_row: int
    object_key: str
    position: int
    size: int
    crc32c: int
    rows: int
    timestamp_min: int
    timestamp_max: int
    committed_ms: int
    append_ms: int
    is_json: bool
    codec: str
    raw_size: int

    @classmethod
    def of_chunk(
        cls,
        chunk: Chunk,
        action: Append,
        *,
        base_offset: int,
        entry_key: str,
        body_start: int,
        committed_ms: int,
        append_ms: int,
    ) -> "TailChunk":
        """Return the tail chunk of the action's rows of `chunk`.

        If the chunk has no object of its own, it is in the entry `entry_key`, whose chunks begin at
        byte `body_start`.
        """
        is_inside = not chunk.data
        return cls(
            base_offset=base_offset,
            count=action.count,
            first_row=action.first_row,
            object_key=entry_key if is_inside else chunk.data,
            position=chunk.position + body_start if is_inside else chunk.position,
            size=chunk.size,
            crc32c=chunk.crc32c,
            rows=chunk.rows,
            timestamp_min=chunk.timestamp_min,
            timestamp_max=chunk.timestamp_max,
            committed_ms=committed_ms,
            append_ms=append_ms,
            is_json=chunk.is_json,
            codec=chunk.codec,
            raw_size=chunk.raw_size,
        )

    @property
    def is_lost(self) -> bool:
        """Return whether an operator gave up these records (`LoseRecords`). Readers skip them."""
        return self.codec == LOST

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def newest_ms(self) -> int:
        """Return the greatest timestamp that readers get; other records of the chunk count too."""
        return self.append_ms if self.append_ms >= 0 else self.timestamp_max

    @property
    def bytes(self) -> int:
        """Return these records' share of the chunk's bytes, in proportion to the number of rows."""
        return self.size * self.count // self.rows

    @property
    def raw_bytes(self) -> int:
        """Return their share of the bytes of the decompressed chunk: about their memory."""
        return self.raw_size * self.count // self.rows

    def part(self, base_offset: int, end_offset: int) -> "TailChunk":
        """Return a tail chunk with only the records [base_offset, end_offset) of this one."""
        skipped = base_offset - self.base_offset
        return msgspec.structs.replace(
            self,
            base_offset=base_offset,
            count=end_offset - base_offset,
            first_row=self.first_row + skipped,
        )

    def decode(self, body: Part) -> pa.RecordBatch:
        """Decode all records of the chunk from its bytes. Raises Corrupt with the object's key."""
        if self.codec == KAFKA_CODEC:
            return self.open(body).decoded()
        return chunks.decode(
            body,
            crc=self.crc32c,
            rows=self.rows,
            codec=self.codec,
            raw_size=self.raw_size,
            key=self.object_key,
        )

    def open(self, body: Part) -> KeptBatches:
        """Return all record batches of a chunk with the codec KAFKA_CODEC. Raises Corrupt."""
        return batches_as_sent.open_chunk(
            body, crc=self.crc32c, rows=self.rows, key=self.object_key
        )

    def batches_of(self, whole: KeptBatches) -> KeptBatches | None:
        """Return this tail chunk's batches, with the timestamps that readers get.

        Return None if it has only a part of a batch, because other records of the batch are lost.
        """
        batches = whole.slice(self.first_row, self.count)
        if batches is None or self.append_ms < 0:
            return batches
        return batches.with_timestamp(self.append_ms)

    def records_of(self, whole: pa.RecordBatch) -> pa.RecordBatch:
        """Return this tail chunk's records from the decoded chunk `whole`.

        They have the timestamps that readers get.
        """
        batch = whole.slice(self.first_row, self.count)
        return batch if self.append_ms < 0 else chunks.with_timestamp(batch, self.append_ms)


class Partition(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The offsets of one partition and the index of its tail.

    log_start_offset and sealed_end are at most high_watermark; log_start_offset may be in the tail.
    The tail covers at least [sealed_end, high_watermark), in offset order, without a hole (I2).
    """

    log_start_offset: int = 0
    sealed_end: int = 0
    high_watermark: int = 0
    tail_bytes: int = 0
    tail: list[TailChunk] = msgspec.field(default_factory=list)

    def check_range(self, topic: str, number: int, offset: int) -> None:
        """Raise OffsetOutOfRange unless the offset is one of the partition, or its end.

        The error names the topic and this partition's number.
        """
        if not self.log_start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRange(
                topic,
                number,
                offset,
                log_start_offset=self.log_start_offset,
                high_watermark=self.high_watermark,
            )

    def tail_index(self, offset: int) -> int:
        """Return the index in `tail` of the element with `offset`, which must be in the tail."""
        return bisect_right(self.tail, offset, key=lambda chunk: chunk.base_offset) - 1

    def append(self, chunk: TailChunk) -> int:
        """Append `chunk`.

        If it continues the rows of the last element, extend that element. Return how many elements
        the tail has more.
        """
        self.high_watermark += chunk.count
        self.tail_bytes += chunk.bytes
        last = self.tail[-1] if self.tail else None
        if last is not None and _continues(last, chunk):
            last.count += chunk.count
            return 0
        self.tail.append(chunk)
        return 1

    def move_log_start(self, offset: int) -> None:
        """Raise the log start offset to `offset`. It never moves back."""
        self.log_start_offset = max(self.log_start_offset, offset)

    def trim(self, end_offset: int) -> int:
        """Drop the records below `end_offset` from the tail, because the table has them now.

        Return how many elements the tail has less.
        """
        if end_offset <= self.sealed_end:
            return 0  # a seal that is repeated after a crash
        self.sealed_end = end_offset
        index = self.tail_index(end_offset)
        if index >= 0 and self.tail[index].end_offset <= end_offset:
            index += 1
        dropped = max(index, 0)
        del self.tail[:dropped]
        self.tail_bytes = sum(chunk.bytes for chunk in self.tail)
        return dropped

    def lose(self, base_offset: int, end_offset: int) -> int:
        """Give up the records of [base_offset, end_offset) that are in the tail.

        Then the tail does not name their objects any more. Return how many elements the tail has
        more.
        """
        tail: list[TailChunk] = []
        for chunk in self.tail:
            first, last = max(chunk.base_offset, base_offset), min(chunk.end_offset, end_offset)
            if first >= last:
                tail.append(chunk)
                continue
            if chunk.base_offset < first:
                tail.append(chunk.part(chunk.base_offset, first))
            lost = chunk.part(first, last)
            lost.codec, lost.object_key, lost.size = LOST, "", 0
            tail.append(lost)
            if last < chunk.end_offset:
                tail.append(chunk.part(last, chunk.end_offset))
        added_chunks = len(tail) - len(self.tail)
        self.tail = tail
        self.tail_bytes = sum(chunk.bytes for chunk in tail)
        return added_chunks

    def is_gone(self, base_offset: int, end_offset: int) -> bool:
        """Return whether readers get no record of [base_offset, end_offset).

        Each of them is below the log start or lost.
        """
        first = max(base_offset, self.log_start_offset)
        return sum(end - start for start, end in self.lost(first, end_offset)) >= end_offset - first

    def lost(self, base_offset: int, end_offset: int) -> list[tuple[int, int]]:
        """Return the ranges of lost records in [base_offset, end_offset) that the tail has."""
        clipped = (
            (max(chunk.base_offset, base_offset), min(chunk.end_offset, end_offset))
            for chunk in self.tail
            if chunk.is_lost
        )
        return [(first, last) for first, last in clipped if first < last]


def _continues(last: TailChunk, chunk: TailChunk) -> bool:
    return (
        not last.is_lost
        and last.object_key == chunk.object_key
        and last.position == chunk.position
        and last.first_row + last.count == chunk.first_row
    )
