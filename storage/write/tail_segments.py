"""The tail of a partition as Parquet segments, which a sealer uploads."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from tidelog.storage.core import object_keys, topic_configs
from tidelog.storage.core.errors import Corrupt, DamagedRecords
from tidelog.storage.core.model import ReadBounds, SegmentFile
from tidelog.storage.io.clock import Clock
from tidelog.storage.io.tasks import lower_priority
from tidelog.storage.read.reader import Reader
from tidelog.storage.read.segment_reader import between
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.tables import segment as segments


class EncodedSegment(NamedTuple):
    """A segment before its upload to the path of `file`."""

    file: SegmentFile
    body: memoryview


class TailSegments:
    """Encodes tails, in a thread of the lowest priority. Owned by one event loop. `level` returns
    the cluster's level of the format."""

    def __init__(self, reader: Reader, clock: Clock, level: Callable[[], int]) -> None:
        self._reader = reader
        self._clock = clock
        self._level = level
        self._threads = ThreadPoolExecutor(1, "tidelog-seal", initializer=lower_priority)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encoded(
        self, topic: Topic, number: int, base: int, end: int
    ) -> AsyncIterator[EncodedSegment]:
        """Yield the records of [base, end) as segments, which are not uploaded yet. They have no
        rows for lost records, nor for damaged records below the log start. Raises Corrupt,
        Unavailable."""
        # Do not read the configs from the state: it has none of a deleted topic.
        config = topic_configs.effective(topic.configs)
        partition = topic.partitions[number]
        at = base
        while at < end:
            try:
                taken = await self._reader.read(topic, number, at, ReadBounds(config.segment_bytes))
            except DamagedRecords as damage:
                beyond = min(damage.end_offset, partition.log_start_offset)
                if not at < beyond < end:
                    raise
                at = beyond  # these records are deleted
                continue
            batches = [piece.batch for piece in taken.pieces]
            upto = min(taken.next_offset, end)
            if upto < taken.next_offset:  # committed since the seal began
                batches = _without_from(batches, end)
            if not batches:
                return  # only lost records are left
            is_json = all(piece.is_json for piece in taken.pieces)
            level = self._level()
            encode = partial(
                segments.write, codec=config.compression_type, is_json=is_json, level=level
            )
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(self._threads, encode, batches)
            lost = sum(last - first for first, last in partition.lost(at, upto))
            is_within = at <= written.base_offset and written.end_offset <= upto
            if not is_within or written.rows != upto - at - lost:
                found = f"{written.rows} records of [{written.base_offset}, {written.end_offset})"
                raise Corrupt(f"{topic.prefix} partition {number}", f"[{at}, {upto}) has {found}")
            path = object_keys.segment(number, base, upto, self._clock.new_id().hex())
            stamps = written.timestamp_min, written.timestamp_max
            file = SegmentFile(path, number, base, upto, written.size, written.rows, *stamps)
            yield EncodedSegment(file, memoryview(written.body))
            base = at = upto


def _without_from(batches: list[pa.RecordBatch], end: int) -> list[pa.RecordBatch]:
    """Drop the records at offset `end` and later ones."""
    kept = (between(batch, 0, end) for batch in batches)
    return [batch for batch in kept if batch.num_rows]
