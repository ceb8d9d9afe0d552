"""Record batches that are kept as their producers sent them: in a request, a chunk, the tail cache.

They become columns only when something other than a Kafka consumer needs the records: a seal, or a
read by another protocol. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import record_batch as kafka
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.chunk import EncodedChunk
from tidelog.storage.codec.record_batch import Batch, KeptBatch
from tidelog.storage.core.actions import KAFKA_CODEC
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import Part

BATCH_OVERHEAD = 200
"""Memory of a kept batch in addition to its bytes."""


class KeptBatches:
    """The records of consecutive batches of a partition. Immutable."""

    __slots__ = ("_ends", "batches", "nbytes", "num_rows")

    def __init__(self, batches: Sequence[KeptBatch]) -> None:
        self.batches = batches
        self._ends = list(accumulate(batch.count for batch in batches))
        self.num_rows = self._ends[-1] if self._ends else 0
        self.nbytes = sum([len(batch.data) for batch in batches]) + BATCH_OVERHEAD * len(batches)

    def slice(self, first: int, count: int) -> "KeptBatches | None":
        """Return the batches with the records [first, first + count).

        Return None if a batch is only partly in this range.
        """
        low, high = bisect_left(self._ends, first), bisect_left(self._ends, first + count)
        begins = 0 if not first else low + 1
        is_whole = not first or (low < len(self._ends) and self._ends[low] == first)
        if not is_whole or high >= len(self._ends) or self._ends[high] != first + count:
            return None
        return KeptBatches(self.batches[begins : high + 1])

    def with_timestamp(self, append_ms: int) -> "KeptBatches":
        """Return the batches with one timestamp, for `message.timestamp.type=LogAppendTime`."""
        return KeptBatches([batch._replace(append_ms=append_ms) for batch in self.batches])

    def decoded(self) -> pa.RecordBatch:
        """Return the records in CHUNK_SCHEMA, with the timestamps that readers get."""
        rows = kafka.decode(self.batches, "kept batches").rows
        if all(batch.append_ms < 0 for batch in self.batches):
            return rows
        parts, row = [], 0
        for batch in self.batches:
            part = rows.slice(row, batch.count)
            if batch.append_ms >= 0:
                part = chunks.with_timestamp(part, batch.append_ms)
            parts.append(part)
            row += batch.count
        return record_columns.concat(parts)

    def placed(
        self, base_offset: int, offset: int
    ) -> Iterator[tuple[int, int, list[bytes | memoryview]]]:
        """Yield the batches from the one that contains `offset` on.

        Each is its base offset, its end offset and the parts of its bytes for a consumer. The first
        record of these KeptBatches has the offset `base_offset`.
        """
        first = bisect_right(self._ends, offset - base_offset)
        if first:
            base_offset += self._ends[first - 1]
        for batch in self.batches[first:]:
            end_offset = base_offset + batch.count
            yield base_offset, end_offset, kafka.placed(batch.data, base_offset, batch.append_ms)
            base_offset = end_offset


def undecodable(rows: pa.RecordBatch) -> int:
    """Return how many records are of batches that did not decode (`record_batch.decode`)."""
    headers: Any = rows.column("headers")
    if headers.null_count == len(headers):
        return 0
    names: Any = headers.flatten().field("key")
    is_marked: Any = pc.equal(names, pa.scalar(kafka.UNDECODABLE))
    return int(pc.sum(is_marked).as_py() or 0)


Records: TypeAlias = pa.RecordBatch | KeptBatches
"""The records of a chunk, in one of the two forms."""


def concat(parts: Sequence[KeptBatches]) -> KeptBatches:
    return KeptBatches([batch for part in parts for batch in part.batches])


def encode(batches: Sequence[Batch]) -> tuple[EncodedChunk, KeptBatches]:
    """Return a chunk of one or more batches, and its records as views of the chunk's bytes."""
    body = memoryview(b"".join([batch.data for batch in batches]))
    kept_batches, start = [], 0
    for batch in batches:
        end = start + len(batch.data)
        kept_batches.append(KeptBatch(body[start:end], batch.count))
        start = end
    rows = sum([batch.count for batch in batches])
    chunk = EncodedChunk(
        body,
        crc32c(body),
        rows,
        min([batch.timestamp_min for batch in batches]),
        max([batch.timestamp_max for batch in batches]),
        KAFKA_CODEC,
        sum([batch.raw_size for batch in batches]),
    )
    return chunk, KeptBatches(kept_batches)


def open_chunk(body: Part, *, crc: int, rows: int, key: str) -> KeptBatches:
    """Return the batches of a chunk.

    Raises Corrupt, with the object's key, if the checksum, a batch or the number of rows is wrong.
    """
    if crc32c(body) != crc:
        raise Corrupt(key, "checksum of a chunk differs")
    batches = KeptBatches(kafka.split(memoryview(body), key))
    if batches.num_rows != rows:
        raise Corrupt(key, f"a chunk has {batches.num_rows} rows, its entry says {rows}")
    return batches
