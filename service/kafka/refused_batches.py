"""Idempotent batches that were refused for a while, and the batches that were sent behind them.

A producer has up to five batches under way in a partition. If one is refused because of the store,
those behind it do not follow the last batch of the log. An answer "out of order" would be true. But
librdkafka would then bump its epoch for all its partitions, and a record whose answer was lost
would be appended twice. So a batch behind a refused one gets the error of the refused one, and the
producer sends both again, in their order. Pure: the caller passes the time.
"""

from collections import OrderedDict
from typing import NamedTuple

from tidelog.storage.codec.batch_header import HEADER, HEADER_SIZE, BatchHeader
from tidelog.storage.core.errors import (
    CommitUnknown,
    LogError,
    OutOfOrderSequence,
    Throttled,
    Unavailable,
    bare,
)
from tidelog.storage.state.producers import SEQUENCES

FOR_A_WHILE = (CommitUnknown, Throttled, Unavailable)
"""Errors after which a producer sends its batch again."""
KEPT_S = 60.0
"""How long a refusal counts: producers repeat a batch after at most a second. A producer that gave
the batch up must learn at some time that a batch is missing."""
REFUSALS_MAX = 10_000
"""Bound of the remembered refusals, of ~300 bytes each."""


class _ProducerPartition(NamedTuple):
    """The sequences of a producer in a partition of a topic."""

    producer_id: int
    topic_id: str
    partition: int


class _Refusal(NamedTuple):
    epoch: int
    sequence: int
    error: LogError
    until_s: float


class RefusedBatches:
    """The first refused batch of each producer and partition. Owned by a listener."""

    def __init__(self) -> None:
        self._refusals: OrderedDict[_ProducerPartition, _Refusal] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._refusals)

    def error_of(
        self, records: memoryview, topic_id: str, partition: int, error: LogError, now_s: float
    ) -> LogError:
        """Return the error for the producer of a batch that was refused with `error`."""
        batch = _idempotent(records)
        if batch is None:
            return error
        place = _ProducerPartition(batch.producer_id, topic_id, partition)
        refusal = self._refusals.get(place)
        if refusal is not None and (
            refusal.epoch != batch.producer_epoch or refusal.until_s <= now_s
        ):
            refusal = None
        is_behind = refusal is not None and _follows(batch.base_sequence, refusal.sequence)
        if isinstance(error, FOR_A_WHILE):
            if not is_behind:
                until_s = now_s + KEPT_S
                refusal = _Refusal(batch.producer_epoch, batch.base_sequence, bare(error), until_s)
                self._add(place, refusal, now_s)
        elif isinstance(error, OutOfOrderSequence) and is_behind:
            assert refusal is not None
            return refusal.error
        return error

    def appended(self, records: memoryview, topic_id: str, partition: int) -> None:
        """Forget the refusal of a batch that is in the log now."""
        batch = _idempotent(records)
        if batch is None:
            return
        place = _ProducerPartition(batch.producer_id, topic_id, partition)
        refusal = self._refusals.get(place)
        if refusal is not None and not _follows(refusal.sequence, batch.base_sequence):
            del self._refusals[place]

    def _add(self, place: _ProducerPartition, refusal: _Refusal, now_s: float) -> None:
        while self._refusals and next(iter(self._refusals.values())).until_s <= now_s:
            self._refusals.popitem(last=False)
        self._refusals[place] = refusal
        self._refusals.move_to_end(place)
        if len(self._refusals) > REFUSALS_MAX:
            self._refusals.popitem(last=False)


def _idempotent(records: memoryview) -> BatchHeader | None:
    """Return the header of a batch with a producer id; None for another batch."""
    if records.nbytes < HEADER_SIZE:
        return None
    header = BatchHeader._make(HEADER.unpack_from(records))
    return header if header.producer_id >= 0 else None


def _follows(sequence: int, other: int) -> bool:
    """Whether a sequence is after another one; sequences begin again at 0 after 2^31 - 1."""
    return 0 < (sequence - other) % SEQUENCES < SEQUENCES // 2
