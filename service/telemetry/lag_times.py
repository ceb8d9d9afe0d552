"""Lag in seconds: the age of the oldest record that a group has not read.

The time of a record is its timestamp. For a record of the tail, it is the least timestamp of the
record's chunk, which is in memory: this costs ~1 us and no request. A sealed record is read, so its
lag is unknown (None) until a reading. A reading costs up to two GETs, if the row group is not
cached. `look` bounds the readings, and remembers their results: a group that does not move costs
one reading. Owned by one event loop.
"""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import US_PER_MS
from tidelog.storage.core.errors import LogError
from tidelog.storage.state.topic import Topic

KNOWN_MAX = 20_000
"""Remembered times of sealed records (~200 bytes each)."""
READ_S = 2.0
"""Timeout of the readings of one `look`."""


class Unread(NamedTuple):
    """The place of the oldest record that a group has not read."""

    topic: str
    partition: int
    offset: int


class LagTimes:
    """The times of the oldest unread records."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[tuple[str, int, int], int] = {}

    def seconds(self, topic: Topic, number: int, offset: int) -> float | None:
        """Return the age (s) of the first record from `offset` on, or 0 if there is none.

        Return None if its time is not known.
        """
        partition = topic.partitions[number]
        offset = max(offset, partition.log_start_offset)
        if offset >= partition.high_watermark:
            return 0.0
        if partition.tail and offset >= max(partition.sealed_end, partition.tail[0].base_offset):
            chunk = partition.tail[partition.tail_index(offset)]
            time_ms = chunk.append_ms if chunk.append_ms >= 0 else chunk.timestamp_min
        else:
            known_ms = self._known.get((topic.topic_id, number, offset))
            if known_ms is None:
                return None
            time_ms = known_ms
        return max(self._broker.clock.now_ms() - time_ms, 0) / 1000

    async def look(self, places: Iterable[Unread], reads_max: int) -> None:
        """Read the times of sealed records that are not known yet, at most `reads_max`.

        A record that cannot be read stays unknown.
        """
        try:
            async with asyncio.timeout(READ_S):
                for place in places:
                    if reads_max <= 0:
                        return
                    topic = self._broker.state.topics.get(place.topic)
                    if topic is None or place.partition >= len(topic.partitions):
                        continue
                    if self.seconds(topic, place.partition, place.offset) is None:
                        reads_max -= 1
                        await self._read(topic, place)
        except TimeoutError:
            return

    async def _read(self, topic: Topic, place: Unread) -> None:
        start = topic.partitions[place.partition].log_start_offset
        offset = max(place.offset, start)
        try:
            fetch_result = await self._broker.records.fetch(
                topic.name, place.partition, offset, bytes_max=1, records_max=1
            )
        except LogError:
            return
        if not fetch_result.pieces:
            return
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        times = fetch_result.pieces[0].batch.column("timestamp").cast(pa.int64())
        time_ms = int(times[0].as_py()) // US_PER_MS
        self._known[topic.topic_id, place.partition, offset] = time_ms
