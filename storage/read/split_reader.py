"""The chosen columns of a split's records, read from segments and the tail without a broker.

Every decoded byte is verified: a segment by the checksums in its footer, a tail chunk by the
checksum in its WAL entry. If an object is gone, collection deleted it after the plan was made, and
the read raises Unavailable.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.segment import RowGroup
from tidelog.storage.core.errors import ObjectNotFound, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.read.plan import (
    NO_FILTER,
    Condition,
    Extent,
    SegmentRange,
    Slice,
    Split,
    TailRange,
)
from tidelog.storage.read.segment_reader import (
    FetchedGroups,
    SegmentReader,
    StoreRanges,
    first_at,
    source_of,
    started_ahead,
)
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.object_store import ObjectStore

AHEAD_BYTES = 64 * 1024 * 1024
AHEAD_SLICES = 32
"""Limits of the slices that a task has fetched ahead at a time (I10)."""


@contextlib.contextmanager
def gone_is_unavailable() -> Iterator[None]:
    """Raise Unavailable if an object that a plan names does not exist any more."""
    try:
        yield
    except ObjectNotFound as error:
        raise Unavailable(
            f"{error}: it was collected after this read was planned; read again"
        ) from error


class FetchedTail(NamedTuple):
    """The tail chunk of a range, not decoded yet."""

    of: TailRange
    body: Part

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Verify the chunk, then yield these columns of RECORD_SCHEMA."""
        tail_range, chunk = self.of, self.of.chunk
        rows = chunk.records_of(chunk.decode(self.body))
        rows = rows.slice(tail_range.start - chunk.base_offset, tail_range.end - tail_range.start)
        yield chunks.with_offsets(rows, tail_range.start).select(list(columns))


Fetched: TypeAlias = FetchedGroups | FetchedTail


class SliceReader:
    """A reader of slices, owned by one event loop.

    Raises Corrupt if bytes do not verify. Raises Unavailable if an object is gone or the store does
    not answer.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._segments = SegmentReader(source_of(store))
        self._chunks = StoreRanges(store)

    async def fetch(self, record_slice: Slice, condition: Condition = NO_FILTER) -> Fetched:
        """Fetch a slice. Skip row groups in which no record can match the condition."""

        def is_needed(group: RowGroup) -> bool:
            times_ms = group.timestamp_min, group.timestamp_max
            return condition.may_match(
                Extent(record_slice.partition, group.base_offset, group.end_offset, *times_ms)
            )

        with gone_is_unavailable():
            if isinstance(record_slice, SegmentRange):
                return await self._segments.fetch(record_slice, is_needed)
            key, position, size = (
                record_slice.chunk.object_key,
                record_slice.chunk.position,
                record_slice.chunk.size,
            )
            return FetchedTail(record_slice, await self._chunks.read(key, position, size))

    async def first_at(self, record_slice: Slice, timestamp_ms: int) -> int | None:
        if isinstance(record_slice, SegmentRange):
            with gone_is_unavailable():
                return await self._segments.first_at(
                    record_slice.key,
                    record_slice.size,
                    timestamp_ms,
                    record_slice.start,
                    record_slice.end,
                )
        (batch,) = (await self.fetch(record_slice)).batches(["offset", "timestamp"])
        return first_at(batch, timestamp_ms)


def read_split(
    opened_store: OpenedStore,
    split: Split,
    columns: Sequence[str],
    condition: Condition = NO_FILTER,
) -> Generator[tuple[Slice, pa.RecordBatch]]:
    """Yield the records of a split in order, in batches: (slice, batch).

    A batch has those columns of RECORD_SCHEMA that `columns` names. The store's thread fetches
    ahead; the caller's thread decodes. Raises the errors of SliceReader.
    """
    reader = SliceReader(opened_store.store)
    ahead = started_ahead(
        split.slices,
        lambda record_slice: opened_store.submit(reader.fetch(record_slice, condition)),
        attrgetter("cost"),
        items_max=AHEAD_SLICES,
        bytes_max=AHEAD_BYTES,
    )
    with contextlib.closing(ahead):
        for record_slice, fetched in ahead:
            for batch in fetched.result().batches(columns):
                yield record_slice, batch
