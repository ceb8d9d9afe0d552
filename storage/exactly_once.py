"""Appends beyond the plain: over several topics with offsets of groups, and of Kafka producers.

What makes them exactly once is decided in `apply` (storage.producers, storage.groups,
storage.requests); here they become requests of the write path. And if we die here: as with any
request (storage.writer), there is the whole commit or nothing of it.
"""

from collections.abc import Sequence

import pyarrow as pa

from storage.chunk import Rows
from storage.clock import Clock
from storage.entry import CommitOffsets, IdempotencyKey, InitProducer, ProducerBatch
from storage.errors import CommitUnknown
from storage.hot import Request, part_rows
from storage.model import Placement
from storage.partitioner import Places
from storage.producers import ProducerEpoch
from storage.state import Topic
from storage.writer import Acks, Writer


class ExactlyOnce:
    """A part of the deep interface: `Log.exactly_once`. All of it is acks=all."""

    def __init__(self, writer: Writer, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock

    async def transact(
        self,
        parts: Sequence[tuple[Topic, Places, Rows | pa.RecordBatch]],
        offsets: Sequence[CommitOffsets],
        *,
        size: int,
        is_json: bool,
        key: IdempotencyKey | None = None,
    ) -> list[Placement]:
        """Append records to several topics and commit offsets of groups: all of it or nothing (I4).

        Each topic is there once; `size` is the request's bytes. Placements in order of `parts`,
        and within one by partition. Raises what `Log.append` does, and IllegalGeneration.
        """
        request = Request(
            self._clock.new_id(),
            [part_rows(topic, places, rows) for topic, places, rows in parts],
            size,
            is_json=is_json,
            actions=offsets,
            key=key,
        )
        return await self._done(request)

    async def append_batch(
        self,
        topic: Topic,
        partition: int,
        rows: Rows | pa.RecordBatch,
        batch: ProducerBatch,
        *,
        size: int,
        is_json: bool = False,
    ) -> Placement:
        """Append a Kafka producer's batch; where it lies, or where it did already.

        Raises what `Log.append` does, ProducerFenced and OutOfOrderSequence.
        """
        part = part_rows(topic, partition, rows, batch)
        request = Request(self._clock.new_id(), [part], size, is_json=is_json)
        (placement,) = await self._done(request)
        return placement

    async def init_producer(self, producer_id: int = -1, epoch: int = -1) -> ProducerEpoch:
        """A new producer id, or the next epoch of a known one, which fences all before it; `epoch`,
        unless -1, is the one that the producer believes to have. Raises ProducerFenced.

        Dying before the answer spends an id, or an epoch that the same call then gets.
        """
        action = InitProducer(producer_id, epoch)
        request = Request(self._clock.new_id(), (), 0, actions=[action])
        await self._done(request)
        if request.producer is None:
            raise CommitUnknown("nobody knows which producer id this one was: ask again")
        return request.producer

    async def _done(self, request: Request) -> list[Placement]:
        placements = await self._writer.append(request, Acks.ALL)
        assert placements is not None, "acks=all gives placements"
        return placements
