"""A partition in the cluster state: its offsets, and the index of its tail.

Pure: changed by `apply` alone (storage.state). I2: the tail has no hole.
"""

from bisect import bisect_right

import msgspec
import pyarrow as pa

from storage import chunk as chunks
from storage.objectstore import Part


class Run(msgspec.Struct, array_like=True, gc=False):
    """Consecutive records of the tail that lie in one chunk: where each offset's bytes are.

    `position` is absolute in `object_key`'s bytes. `append_ms` >= 0 replaces the records'
    timestamps.
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

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def bytes(self) -> int:
        """The run's share of its chunk."""
        return self.size * self.count // self.rows

    def decode(self, body: Part) -> pa.RecordBatch:
        """All records of the chunk, given its bytes; raises Corrupt, naming the object."""
        return chunks.decode(
            body,
            crc=self.crc32c,
            rows=self.rows,
            codec=self.codec,
            raw_size=self.raw_size,
            key=self.object_key,
        )


class Partition(msgspec.Struct, array_like=True):
    """Offsets of one partition and the index of its tail.

    log_start_offset, which may lie in the tail, and sealed_end <= high_watermark; the tail covers
    at least [sealed_end, high_watermark), without a hole, in offset order (I2).
    """

    log_start_offset: int = 0
    sealed_end: int = 0
    high_watermark: int = 0
    tail_bytes: int = 0
    tail: list[Run] = msgspec.field(default_factory=list)

    def run_at(self, offset: int) -> int:
        """Index in `tail` of the run that holds `offset`, which must lie in the tail."""
        return bisect_right(self.tail, offset, key=lambda run: run.base_offset) - 1

    def append(self, run: Run) -> None:
        """What comes next; together with the run before where they are one piece of a chunk."""
        last = self.tail[-1] if self.tail else None
        if last is not None and _continues(last, run):
            last.count += run.count
        else:
            self.tail.append(run)
        self.high_watermark += run.count
        self.tail_bytes += run.bytes

    def move_log_start(self, offset: int) -> None:
        """What lies below is gone; it never moves back."""
        self.log_start_offset = max(self.log_start_offset, offset)

    def trim(self, end_offset: int) -> None:
        """The table holds everything below."""
        if end_offset <= self.sealed_end:
            return  # a seal repeated after a crash
        self.sealed_end = end_offset
        kept = self.run_at(end_offset)
        if kept >= 0 and self.tail[kept].end_offset <= end_offset:
            kept += 1
        del self.tail[: max(kept, 0)]
        self.tail_bytes = sum(run.bytes for run in self.tail)


def _continues(last: Run, run: Run) -> bool:
    return (
        last.object_key == run.object_key
        and last.position == run.position
        and last.first_row + last.count == run.first_row
    )
