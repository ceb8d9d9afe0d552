"""A cache of each partition's newest records, in few large pieces.

To read a thousand chunks of one record takes 24 times as long as to read one batch of a thousand
records (DESIGN 12). So adjacent pieces are merged on arrival; each record is copied O(log n) times.
Byte-bounded (I10): the oldest pieces are evicted first; reads of evicted records go to the store.
The sealer seals a tail before the cache evicts it (`passed`). Holds committed records only (I3).
"""

from bisect import bisect_right
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import pyarrow as pa

from tidelog.storage.codec import batches_as_sent, record_columns
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.batches_as_sent import KeptBatches, Records

MERGE_PIECES = 4
"""Pieces that become one piece. Each merge costs ~10 us, so two would cost twice as much a record;
more would leave a read of the newest records more pieces."""
MERGE_ROWS_MAX = 4096
MERGE_BYTES_MAX = 512 * 1024
MEASURE_ROWS_MIN = 64
"""Pieces of fewer rows are not measured: to measure a piece takes as long as to merge it."""
PIECE_OVERHEAD = 512
"""Memory of an Arrow batch in addition to its data. `bytes` includes it, which bounds the number of
tiny pieces."""
OLD_ELEMENTS_MAX = 64
"""If the heap of first pieces has more than this number and two elements for each partition, it is
built again, with one element for each partition."""


class CachedBatch(NamedTuple):
    """Consecutive records, with the timestamps that readers get.

    They are columns (CHUNK_SCHEMA) or kept batches. `born` is the number of bytes that were added
    to the cache before them.
    """

    base_offset: int
    records: Records
    is_json: bool
    nbytes: int
    born: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.records.num_rows

    def decoded(self) -> pa.RecordBatch:
        """Return the records as columns."""
        records = self.records
        return records.decoded() if isinstance(records, KeptBatches) else records


class TailCache:
    """A cache owned by one event loop. Keys are (topic id, partition)."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._pieces: dict[tuple[str, int], list[CachedBatch]] = {}
        self._added = 0
        # A heap: at least one element for each partition, with `born` of its first piece or a
        # smaller number. Such an element is corrected when it is the smallest.
        self._oldest: list[tuple[int, tuple[str, int]]] = []

    def add(
        self,
        key: tuple[str, int],
        base_offset: int,
        records: Records,
        *,
        is_json: bool,
        nbytes: int,
        append_ms: int = -1,
    ) -> None:
        """Add the partition's next records. If they leave a gap, drop the records before the gap.

        `nbytes` estimates their memory. If `append_ms` >= 0, it is the timestamp for readers.
        """
        if append_ms >= 0:
            if isinstance(records, KeptBatches):
                records = records.with_timestamp(append_ms)
            else:
                records = chunks.with_timestamp(records, append_ms)
        pieces = self._pieces.get(key)
        if pieces and pieces[-1].end_offset != base_offset:
            self._drop(key)
            pieces = None
        if pieces is None:
            pieces = self._pieces[key] = []
            self._note_first(key)
        pieces.append(
            CachedBatch(base_offset, records, is_json, nbytes + PIECE_OVERHEAD, self._added)
        )
        self._added += pieces[-1].nbytes
        self.bytes += pieces[-1].nbytes
        while len(pieces) >= MERGE_PIECES and _may_merge(pieces[-MERGE_PIECES:]):
            self._merge(pieces)
        while self.bytes > self.bytes_max:
            self._evict()

    def wants(self, key: tuple[str, int], base_offset: int, *, is_newest: bool) -> bool:
        """Return whether to add records that a reader fetched.

        Add them if they directly follow the cached records, or if they are the partition's newest
        and not cached. Old records must not evict new ones.
        """
        end = self.end(key)
        return is_newest if end is None else end == base_offset or (is_newest and end < base_offset)

    def start(self, key: tuple[str, int]) -> int | None:
        pieces = self._pieces.get(key)
        return pieces[0].base_offset if pieces else None

    def end(self, key: tuple[str, int]) -> int | None:
        pieces = self._pieces.get(key)
        return pieces[-1].end_offset if pieces else None

    def has(self, key: tuple[str, int], offset: int) -> bool:
        """Return whether the record at `offset` is cached."""
        pieces = self._pieces.get(key)
        return pieces is not None and pieces[0].base_offset <= offset < pieces[-1].end_offset

    def read(self, key: tuple[str, int], offset: int) -> list[CachedBatch]:
        """Return the pieces from the one that holds `offset`; none if `offset` is not cached."""
        pieces = self.read_from(key, offset)
        return pieces if pieces and pieces[0].base_offset <= offset else []

    def read_from(self, key: tuple[str, int], offset: int) -> list[CachedBatch]:
        """Return the pieces from the one that holds `offset`, or from the first one after it."""
        pieces = self._pieces.get(key) or []
        if not pieces or offset >= pieces[-1].end_offset:
            return []
        index = bisect_right(pieces, offset, key=lambda piece: piece.base_offset) - 1
        return pieces[max(index, 0) :]

    def passed(self, key: tuple[str, int], offset: int) -> int:
        """Return how many bytes were added to the cache since the record at `offset` was added.

        If this record is not cached, take the first cached record after it; if there is none,
        return
        0. When this number reaches about `bytes_max`, the cache evicts the record.
        """
        pieces = self.read_from(key, offset)
        return self._added - pieces[0].born if pieces else 0

    def clear(self) -> None:
        """Drop all records: the view that they came from has expired."""
        self._pieces.clear()
        self._oldest.clear()
        self.bytes = 0

    def forget(self, topic_id: str, partition: int) -> None:
        if (topic_id, partition) in self._pieces:
            self._drop((topic_id, partition))

    def forget_topic(self, topic_id: str) -> None:
        for key in [key for key in self._pieces if key[0] == topic_id]:
            self._drop(key)

    def _merge(self, pieces: list[CachedBatch]) -> None:
        merged, first = pieces[-MERGE_PIECES:], pieces[-MERGE_PIECES]
        records = _joined([piece.records for piece in merged])
        old_bytes = sum([piece.nbytes for piece in merged])
        nbytes = old_bytes - (MERGE_PIECES - 1) * PIECE_OVERHEAD
        if isinstance(records, KeptBatches) or records.num_rows >= MEASURE_ROWS_MIN:
            # The callers' estimates for small chunks count mostly padding.
            nbytes = records.nbytes + PIECE_OVERHEAD
        self.bytes += nbytes - old_bytes
        is_json = all(piece.is_json for piece in merged)
        whole = CachedBatch(first.base_offset, records, is_json, nbytes, first.born)
        pieces[-MERGE_PIECES:] = [whole]

    def _note_first(self, key: tuple[str, int]) -> None:
        if len(self._oldest) > 2 * len(self._pieces) + OLD_ELEMENTS_MAX:
            self._oldest = [
                (pieces[0].born, other) for other, pieces in self._pieces.items() if pieces
            ]
            heapify(self._oldest)
        heappush(self._oldest, (self._added, key))

    def _evict(self) -> None:
        """Drop the oldest piece."""
        while True:
            born, key = self._oldest[0]
            pieces = self._pieces.get(key)
            if pieces is None:
                heappop(self._oldest)  # dropped since
            elif pieces[0].born != born:
                heapreplace(self._oldest, (pieces[0].born, key))
            else:
                break
        self.bytes -= pieces.pop(0).nbytes
        if not pieces:
            del self._pieces[key]

    def _drop(self, key: tuple[str, int]) -> None:
        self.bytes -= sum(piece.nbytes for piece in self._pieces.pop(key, ()))


def _may_merge(pieces: list[CachedBatch]) -> bool:
    # A merge copies the records of the first piece into one of at least twice as many rows. So the
    # number of copies of a record grows only with the logarithm of MERGE_ROWS_MAX.
    first = pieces[0].records.num_rows
    rows = sum([piece.records.num_rows for piece in pieces])
    return (
        2 * first <= rows <= MERGE_ROWS_MAX
        and sum([piece.nbytes for piece in pieces]) <= MERGE_BYTES_MAX
    )


def _joined(parts: list[Records]) -> Records:
    kept_parts = [part for part in parts if isinstance(part, KeptBatches)]
    if len(kept_parts) == len(parts):
        return batches_as_sent.concat(kept_parts)
    # Record batches next to other rows: few large pieces serve most reads better than the form.
    return record_columns.concat(
        [part.decoded() if isinstance(part, KeptBatches) else part for part in parts]
    )
