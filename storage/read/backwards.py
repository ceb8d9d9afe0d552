"""The newest records before an offset, within bounds.

All tiers are read forwards. So a read backwards tries ranges of offsets, the newest range first. If
a range does not fit the bounds, the next try is its newer half. If it fits, the next range, before
it, is twice as long. A range can have fewer records than offsets, or none, because of key
compaction. The number of reads over a range without records grows with the logarithm of its length.
"""

from typing import NamedTuple, Protocol

from tidelog.storage.core.errors import Corrupt, OffsetOutOfRange
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.read.reader import FetchResult, ReadBatch

FIRST_LENGTH_MAX = 64
"""Maximum number of offsets in the first range."""


class ForwardFetch(Protocol):
    """`ClusterRecords.fetch` of one partition."""

    async def __call__(
        self, offset: int, *, bytes_max: int, records_max: int, offset_end: int
    ) -> FetchResult: ...


class FetchedBefore(NamedTuple):
    """The records of [first_offset, fetched.next_offset).

    If `first_offset` equals the log start offset, the partition has no older record.
    """

    fetched: FetchResult
    first_offset: int


async def fetch_before(
    fetch: ForwardFetch, start: int, end: int, high_watermark: int, bounds: ReadBounds
) -> FetchedBefore:
    """Return the newest records of [start, end) within the bounds, in offset order.

    Return at least one record if there is any. `start` is the log start offset, and `end` is at
    most the high watermark.

    Each read returns at most `bounds.bytes_max` bytes. If retention moves the log start meanwhile,
    the result begins at the new log start. If an older record is damaged, return the records after
    it. Raises the errors of `ClusterRecords.fetch`.
    """
    pieces: list[ReadBatch] = []
    budget, records = bounds.bytes_max, bounds.records_max
    first, length = end, min(records, FIRST_LENGTH_MAX)
    while first > start and budget > 0 and records > 0:
        low = max(first - length, start)
        is_one = first - low == 1
        try:
            result = await fetch(low, bytes_max=budget, records_max=2 * records, offset_end=first)
        except OffsetOutOfRange as error:
            if error.log_start_offset <= low:
                raise
            start = error.log_start_offset
            continue
        except Corrupt:
            if is_one and not pieces:
                raise
            if is_one:
                break
            length = (first - low) // 2
            continue
        high_watermark = max(high_watermark, result.high_watermark)
        is_first_record = not pieces and result.records == 1
        is_within = result.weight <= budget or is_first_record
        if result.next_offset < first or not is_within:
            if is_one:
                break
            length = (first - low) // 2
            continue
        length = 2 * (first - low)
        if result.records > (first - low) // 2:
            length = min(length, max(records - result.records, 1))
        newest_pieces, first = _newest(result.pieces, records, low)
        pieces[:0] = newest_pieces
        budget -= result.weight
        records -= sum(len(piece.batch) for piece in newest_pieces)
    weight = bounds.bytes_max - budget
    fetched = FetchResult(pieces, end, min(start, end), high_watermark, weight)
    return FetchedBefore(fetched, max(first, min(start, end)))


def _newest(pieces: list[ReadBatch], count: int, low: int) -> tuple[list[ReadBatch], int]:
    """Return the newest `count` records, and the offset from which on they are all records.

    This is `low` if the pieces have no more.
    """
    excess = sum(len(piece.batch) for piece in pieces) - count
    if excess <= 0:
        return pieces, low
    newest_pieces = []
    for piece in pieces:
        dropped = min(excess, len(piece.batch))
        excess -= dropped
        if dropped < len(piece.batch):
            newest_pieces.append(piece._replace(batch=piece.batch.slice(dropped)))
    return newest_pieces, int(newest_pieces[0].batch.column("offset")[0].as_py())
