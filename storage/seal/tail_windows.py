"""Tails in bulk: the chunks of several partitions, read from the store in few large ranges.

A seal needs whole tails. Most of their records are in the tail cache. The other chunks are read in
windows of bounded size. The chunks of one entry are in one object, so a window has the chunks of
all partitions for some entries, and reads each object once. Nothing here runs on the event loop for
each chunk: `windows` and `FetchedWindow.batches` run in a thread. All codecs of chunks are decoded
in one place, `_decoded`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from tidelog.storage.core.errors import Corrupt, ObjectNotFound, cut_off, missing_object
from tidelog.storage.runtime.tasks import together
from tidelog.storage.state.partition import TailChunk
from tidelog.storage.store.object_store import ObjectStore

WINDOW_BYTES = 32 * 1024 * 1024
"""Stored bytes of the chunks of a window. In memory, the records take two to five times as many."""
RANGE_BYTES_MAX = 8 * 1024 * 1024
"""Bytes up to which neighbour chunks of an object are read by one request."""
GAP_BYTES_MAX = 256 * 1024
"""Other chunks of at most this size between two wanted chunks are read too, and dropped. On S3 this
takes less time than a second request."""
READS_MAX = 16
"""Requests to the store at the same time."""


class StoredChunk(NamedTuple):
    """A chunk of a partition's tail, and the number of the range that has its bytes."""

    chunk: TailChunk
    range: int


class ByteRange(NamedTuple):
    """Bytes [start, end) of an object."""

    key: str
    start: int
    end: int


class Window(NamedTuple):
    """Some chunks of each partition, in offset order, and the ranges of objects with the bytes."""

    chunks: Mapping[int, Sequence[StoredChunk]]
    ranges: Sequence[ByteRange]


class FetchedWindow(NamedTuple):
    """A window with the bytes of each range, or the error of an object that does not exist."""

    window: Window
    bodies: Sequence[bytes | Corrupt]

    def batches(self, number: int) -> Iterator[tuple[TailChunk, pa.RecordBatch | Corrupt]]:
        """Yield the partition's chunks in offset order, each with its records or an error.

        Records are of CHUNK_SCHEMA, with the timestamps that readers get; the error is that of a
        damaged chunk.
        """
        for stored in self.window.chunks.get(number, ()):
            try:
                yield stored.chunk, _decoded(stored.chunk, self._bytes_of(stored))
            except Corrupt as error:
                yield stored.chunk, error

    def _bytes_of(self, stored: StoredChunk) -> bytes:
        chunk, body = stored.chunk, self.bodies[stored.range]
        if isinstance(body, Corrupt):
            raise body
        start = chunk.position - self.window.ranges[stored.range].start
        # Copied: a record that waits for its row group must not keep the whole range in memory.
        chunk_body = body[start : start + chunk.size]
        if len(chunk_body) != chunk.size:
            raise cut_off(chunk.object_key, len(chunk_body), chunk.size, chunk.position)
        return chunk_body


def windows(tails: Mapping[int, Sequence[TailChunk]]) -> list[Window]:
    """Divide the chunks of these partitions into windows. Each tail is in offset order."""
    # Chunks that were committed at the same time are in the same object. The largest time so far
    # keeps the order of offsets, also if a clock was wrong.
    timed: list[tuple[int, int, TailChunk]] = []
    for number, tail in tails.items():
        time_ms = 0
        for chunk in tail:
            time_ms = max(time_ms, chunk.committed_ms)
            timed.append((time_ms, number, chunk))
    timed.sort(key=lambda timed_chunk: timed_chunk[0])  # stable: the order of a partition stays
    window_list: list[Window] = []
    numbered_chunks: list[tuple[int, TailChunk]] = []
    size = 0
    for _, number, chunk in timed:
        if numbered_chunks and size + chunk.size > WINDOW_BYTES:
            window_list.append(_window(numbered_chunks))
            numbered_chunks, size = [], 0
        numbered_chunks.append((number, chunk))
        size += chunk.size
    if numbered_chunks:
        window_list.append(_window(numbered_chunks))
    return window_list


def _window(numbered_chunks: Sequence[tuple[int, TailChunk]]) -> Window:
    ranges: list[ByteRange] = []
    range_of: dict[tuple[str, int], int] = {}
    in_objects = [chunk for _, chunk in numbered_chunks]
    in_objects.sort(key=lambda chunk: (chunk.object_key, chunk.position))
    for chunk in in_objects:
        last, end = ranges[-1] if ranges else None, chunk.position + chunk.size
        if (
            last is not None
            and last.key == chunk.object_key
            and chunk.position - last.end <= GAP_BYTES_MAX
            and end - last.start <= RANGE_BYTES_MAX
        ):
            ranges[-1] = last._replace(end=max(last.end, end))
        else:
            ranges.append(ByteRange(chunk.object_key, chunk.position, end))
        range_of[chunk.object_key, chunk.position] = len(ranges) - 1
    chunks: dict[int, list[StoredChunk]] = {}
    for number, chunk in numbered_chunks:
        place = range_of[chunk.object_key, chunk.position]
        chunks.setdefault(number, []).append(StoredChunk(chunk, place))
    return Window(chunks, ranges)


async def fetch(store: ObjectStore, window: Window) -> FetchedWindow:
    """Read the bytes of a window.

    A missing object is not raised: it costs only its own chunks. Raises Unavailable.
    """

    async def read(byte_range: ByteRange) -> bytes | Corrupt:
        try:
            return await store.get_range(
                byte_range.key, byte_range.start, byte_range.end - byte_range.start
            )
        except ObjectNotFound:
            return missing_object(byte_range.key)

    return FetchedWindow(window, await together(*map(read, window.ranges), at_once=READS_MAX))


def _decoded(chunk: TailChunk, body: bytes) -> pa.RecordBatch:
    batch = chunk.records_of(chunk.decode(body))
    if batch.num_rows != chunk.count:
        rows = f"{batch.num_rows} records from row {chunk.first_row} on"
        raise Corrupt(chunk.object_key, f"a chunk has {rows}, the log has {chunk.count}")
    return batch
