"""The newest records of each partition in memory, in few large pieces however small they came.

A thousand one-record chunks would serve 24 times slower than one batch of a thousand (NUMBERS 2),
so neighbours are merged as they arrive, smaller into larger, each record copied O(log n) times.
Byte-bounded (I10): the oldest pieces go first, and what is gone is read from the store. Holds
committed records only (I3).
"""

from bisect import bisect_right
from typing import NamedTuple

import pyarrow as pa

from storage import chunk as chunks

MERGE_ROWS_MAX = 1024
MERGE_BYTES_MAX = 128 * 1024
MEASURE_ROWS_MIN = 64
"""Measuring a piece takes as long as merging it: only where it is worth it."""
PIECE_OVERHEAD = 512
"""What an Arrow batch costs beside its bytes; keeps the bound honest for tiny pieces."""


class Piece(NamedTuple):
    """Consecutive records of CHUNK_SCHEMA (timestamps as readers see them)."""

    base_offset: int
    batch: pa.RecordBatch
    is_json: bool
    nbytes: int
    born: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.batch.num_rows


class TailCache:
    """Owned by one event loop. Keys are (topic id, partition)."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._pieces: dict[tuple[str, int], list[Piece]] = {}
        self._clock = 0

    def add(
        self,
        key: tuple[str, int],
        base_offset: int,
        batch: pa.RecordBatch,
        *,
        is_json: bool,
        nbytes: int,
        append_ms: int = -1,
    ) -> None:
        """The partition's next records. A gap to what is held drops what is held.

        `nbytes` is about their memory; `append_ms` >= 0 is what readers see as their timestamp.
        """
        if append_ms >= 0:
            batch = chunks.with_timestamp(batch, append_ms)
        pieces = self._pieces.setdefault(key, [])
        if pieces and pieces[-1].end_offset != base_offset:
            self._drop(key)
            pieces = self._pieces.setdefault(key, [])
        self._clock += 1
        pieces.append(Piece(base_offset, batch, is_json, nbytes + PIECE_OVERHEAD, self._clock))
        self.bytes += pieces[-1].nbytes
        while len(pieces) > 1 and _may_merge(pieces[-2], pieces[-1]):
            self._merge(pieces)
        while self.bytes > self.bytes_max:
            self._evict()

    def add_read(
        self,
        key: tuple[str, int],
        base_offset: int,
        batch: pa.RecordBatch,
        *,
        is_json: bool,
        nbytes: int,
        is_newest: bool,
    ) -> None:
        """Records that a reader brought, as readers see them: kept where they go on from what is
        held, or begin it as the partition's newest. History must not drive out what is new."""
        pieces = self._pieces.get(key)
        goes_on = pieces[-1].end_offset == base_offset if pieces else is_newest
        if goes_on or (pieces and is_newest and pieces[-1].end_offset < base_offset):
            self.add(key, base_offset, batch, is_json=is_json, nbytes=nbytes)

    def start(self, key: tuple[str, int]) -> int | None:
        """From where on the partition's records are held."""
        pieces = self._pieces.get(key)
        return pieces[0].base_offset if pieces else None

    def end(self, key: tuple[str, int]) -> int | None:
        """Up to where the partition's records are held."""
        pieces = self._pieces.get(key)
        return pieces[-1].end_offset if pieces else None

    def read(self, key: tuple[str, int], offset: int) -> list[Piece]:
        """The pieces from the one that holds `offset` on; empty when it is not held."""
        pieces = self._pieces.get(key)
        if not pieces or not pieces[0].base_offset <= offset < pieces[-1].end_offset:
            return []
        return pieces[bisect_right(pieces, offset, key=lambda piece: piece.base_offset) - 1 :]

    def clear(self) -> None:
        """Forget everything: the view that it came from is void."""
        self._pieces.clear()
        self.bytes = 0

    def forget_topic(self, topic_id: str) -> None:
        for key in [key for key in self._pieces if key[0] == topic_id]:
            self._drop(key)

    def _merge(self, pieces: list[Piece]) -> None:
        right, left = pieces.pop(), pieces.pop()
        batch = chunks.concat([left.batch, right.batch])
        nbytes = left.nbytes + right.nbytes - PIECE_OVERHEAD
        if batch.num_rows >= MEASURE_ROWS_MIN:
            nbytes = batch.nbytes + PIECE_OVERHEAD  # what small chunks said was mostly padding
        self.bytes += nbytes - left.nbytes - right.nbytes
        is_json = left.is_json and right.is_json
        merged = Piece(left.base_offset, batch, is_json, nbytes, left.born)
        pieces.append(merged)

    def _evict(self) -> None:
        # A scan over partitions for each ~1 MiB that goes: cheaper than keeping an order.
        key = min(self._pieces, key=lambda held: self._pieces[held][0].born)
        pieces = self._pieces[key]
        self.bytes -= pieces.pop(0).nbytes
        if not pieces:
            del self._pieces[key]

    def _drop(self, key: tuple[str, int]) -> None:
        self.bytes -= sum(piece.nbytes for piece in self._pieces.pop(key, ()))


def _may_merge(left: Piece, right: Piece) -> bool:
    # Sizes like a binary counter's: a record is copied again only when its piece has doubled.
    return (
        left.batch.num_rows <= 2 * right.batch.num_rows
        and left.batch.num_rows + right.batch.num_rows <= MERGE_ROWS_MAX
        and left.nbytes + right.nbytes <= MERGE_BYTES_MAX
    )
