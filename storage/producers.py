"""Producer ids, epochs and sequences: what makes a Kafka producer's retries harmless.

Pure, folded by `apply` (I4). The rules are Kafka's (ProducerAppendInfo and ProducerStateEntry for
batches, prepareIncrementProducerEpoch for epochs):

- A batch with the epoch and the very sequences of one of the last five of its producer in its
  partition is a duplicate: it changes nothing, and its answer is the offset of the first.
- Else an older epoch is fenced. A newer epoch begins at sequence 0. In the same epoch a batch must
  follow the last one; after 2^31 - 1 comes 0.
- Of a producer that is not known in the partition (it never wrote there, or it was forgotten) any
  epoch and sequence is taken. Kafka answers UNKNOWN_PRODUCER_ID to nobody since 2.5 (KIP-360):
  a producer that had rested for long would only bump its epoch and send the same again. But one
  whose epoch was given out less than a window ago cannot have been forgotten, and must begin at 0,
  or its second batch would be taken where the first was lost. Kafka does so for transactions
  (KIP-890); its clients bump their epoch when they are told, so it harms nobody else.
- The epoch of a batch counts in its own partition only: since KIP-360 a producer bumps it by
  itself when a batch is lost, and what it still has under way elsewhere carries the old one. An
  epoch that was given out by `init` counts everywhere at once, as Kafka's transaction coordinator
  has it: whoever came before is gone.

Forgotten after a day of entry time without a batch (Kafka's `producer.id.expiration.ms`), and
the longest unused first when there are too many (I10).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from storage.entry import AnyAction, Append, Chunk, InitProducer, ProducerAppend
from storage.errors import InvalidRequest, LogError, OutOfOrderSequence, ProducerFenced

BATCHES_KEPT = 5
"""Of a producer in a partition: Kafka's clients have no more under way."""
SEQUENCES = 2**31
EPOCH_MAX = 2**15 - 1
PRODUCER_ID_MAX = 2**63 - 1
WINDOW_MS = 86_400_000
"""How long an unused producer is remembered, in entry time."""
PRODUCERS_MAX = 100_000
"""Ids that were given out and are remembered (I10); ~100 bytes each."""
SEQUENCES_MAX = 250_000
"""Pairs of producer and partition that are remembered (I10); ~600 bytes each with five batches."""

Where: TypeAlias = tuple[int, str, int]
"""Producer id, topic id, partition."""


class ProducerEpoch(NamedTuple):
    """What a producer is told to call itself."""

    producer_id: int
    epoch: int


class _Identity(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An id that was given out, and when this epoch of it. `previous_epoch` recognises the retry
    of a bump; -1: none."""

    producer_id: int
    epoch: int
    previous_epoch: int
    given_ms: int
    used_ms: int


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    base_sequence: int
    last_sequence: int
    base_offset: int
    at_ms: int


class _Sequence(msgspec.Struct, array_like=True, gc=False):
    """The last batches of a producer in a partition, oldest first; never empty."""

    producer_id: int
    topic_id: str
    partition: int
    epoch: int
    batches: list[_Batch]

    @property
    def where(self) -> Where:
        return self.producer_id, self.topic_id, self.partition


class Recognised(NamedTuple):
    """What of a commit was here before: base offsets by the number of the append, and these numbers
    alone. `is_retry`: all of it was, and what else the commit says was done with it then."""

    first_offsets: dict[int, int]
    repeated: frozenset[int]
    is_retry: bool


NOTHING = Recognised({}, frozenset(), is_retry=False)


class KeptProducers(msgspec.Struct, array_like=True, frozen=True):
    """All of it as checkpoints carry it: both lists the longest unused first."""

    next_id: int
    identities: list[_Identity]
    sequences: list[_Sequence]


class Producers:
    """Part of the cluster state, owned by it. Both maps are in the order of last use."""

    def __init__(self) -> None:
        self._next_id = 0
        self._identities: OrderedDict[int, _Identity] = OrderedDict()
        self._sequences: OrderedDict[Where, _Sequence] = OrderedDict()

    @property
    def count(self) -> int:
        """Pairs of producer and partition that are remembered."""
        return len(self._sequences)

    # -- batches

    def recognise(
        self, actions: Sequence[AnyAction], chunks: Sequence[Chunk], now_ms: int
    ) -> Recognised | LogError:
        """Which appends of a commit are batches that lie here already; or why it is refused.

        Everything else about the appends was checked before. A commit that would do a part of what
        it says is refused, unless it holds nothing but batches: a producer may send those that it
        must send again together with others.
        """
        for action in actions:
            if isinstance(action, ProducerAppend):
                break
        else:
            return NOTHING  # as for nearly every commit there is
        appends = [action for action in actions if isinstance(action, Append)]
        batches = [
            (number, batch, chunks[batch.chunk])
            for number, batch in enumerate(appends)
            if isinstance(batch, ProducerAppend)
        ]
        if len({_where(batch, chunk) for _, batch, chunk in batches}) < len(batches):
            return InvalidRequest("a commit has one batch of a producer for a partition at most")
        first_offsets: dict[int, int] = {}
        for number, batch, chunk in batches:
            base_offset = self._first_offset(batch, chunk)
            if base_offset is not None:
                first_offsets[number] = base_offset
            elif (refusal := self._check(batch, chunk, now_ms)) is not None:
                return refusal
        is_retry = bool(first_offsets) and len(first_offsets) == len(appends)
        if first_offsets and not is_retry and len(batches) < len(actions):
            return InvalidRequest("a part of the commit was here before, and a part was not")
        return Recognised(first_offsets, frozenset(first_offsets), is_retry)

    def _first_offset(self, batch: ProducerAppend, chunk: Chunk) -> int | None:
        held = self._sequences.get(_where(batch, chunk))
        if held is None or held.epoch != batch.epoch:
            return None
        asked = batch.base_sequence, _last_of(batch)
        for kept in held.batches:
            if (kept.base_sequence, kept.last_sequence) == asked:
                return kept.base_offset
        return None

    def _check(self, batch: ProducerAppend, chunk: Chunk, now_ms: int) -> LogError | None:
        """Why a batch that is no duplicate cannot be appended."""
        who, epoch, base = batch.producer_id, batch.epoch, batch.base_sequence
        if not (0 <= who <= PRODUCER_ID_MAX and 0 <= epoch <= EPOCH_MAX and 0 <= base < SEQUENCES):
            return InvalidRequest(f"no producer has id {who}, epoch {epoch} and sequence {base}")
        identity = self._identities.get(who)
        held = self._sequences.get(_where(batch, chunk))
        newest = max(identity.epoch if identity else -1, held.epoch if held else -1)
        if epoch < newest:
            return _fenced(who, epoch, newest)
        if held is not None and epoch == held.epoch:
            expected = (held.batches[-1].last_sequence + 1) % SEQUENCES
        elif held is not None or (identity and identity.given_ms >= now_ms - WINDOW_MS):
            expected = 0
        else:
            expected = base
        if base != expected:
            return OutOfOrderSequence(
                f"producer {who} epoch {epoch} sends sequence {base} to partition "
                f"{chunk.partition}, expected {expected}: a batch before it is missing, or it is "
                f"older than the last {BATCHES_KEPT}"
            )
        return None

    def appended(self, batch: ProducerAppend, chunk: Chunk, base_offset: int, now_ms: int) -> None:
        """A batch that was not recognised lies at `base_offset` now."""
        where = _where(batch, chunk)
        held = self._sequences.get(where)
        if held is None or held.epoch != batch.epoch:
            held = _Sequence(*where, batch.epoch, [])
        held.batches.append(_Batch(batch.base_sequence, _last_of(batch), base_offset, now_ms))
        del held.batches[:-BATCHES_KEPT]
        self._sequences[where] = held
        self._sequences.move_to_end(where)
        identity = self._identities.get(batch.producer_id)
        if identity is not None:
            self._use(msgspec.structs.replace(identity, used_ms=now_ms))

    # -- epochs

    def check_init(self, asked: InitProducer) -> LogError | None:
        """Why the producer cannot have another epoch."""
        known = self._identities.get(asked.producer_id)
        if known is None or asked.epoch == -1:
            return None  # one that was forgotten begins anew
        if asked.epoch not in (known.epoch, known.previous_epoch):
            return _fenced(asked.producer_id, asked.epoch, known.epoch)
        return None

    def init(self, asked: InitProducer, now_ms: int) -> ProducerEpoch:
        """The id and epoch of a new instance; checked before.

        A retry that names the epoch before the newest gets the newest again: nobody else has
        come since, or the epoch before would not be remembered.
        """
        known = self._identities.get(asked.producer_id)
        if known is None:
            made = self._new(now_ms)
        elif asked.epoch not in (-1, known.epoch):
            made = msgspec.structs.replace(known, used_ms=now_ms)
        elif known.epoch >= EPOCH_MAX - 1:  # as in Kafka, where the last one ends transactions
            made = self._new(now_ms)
        else:
            made = _Identity(asked.producer_id, known.epoch + 1, asked.epoch, now_ms, now_ms)
        self._use(made)
        return ProducerEpoch(made.producer_id, made.epoch)

    def _new(self, now_ms: int) -> _Identity:
        self._next_id += 1
        return _Identity(self._next_id - 1, 0, -1, now_ms, now_ms)

    def _use(self, identity: _Identity) -> None:
        self._identities[identity.producer_id] = identity
        self._identities.move_to_end(identity.producer_id)

    # -- forgetting

    def forget(self, now_ms: int) -> None:
        """What was not used for the window, or is too many. Cheap when there is nothing."""
        horizon = now_ms - WINDOW_MS
        while self._identities:
            oldest = next(iter(self._identities.values()))
            if oldest.used_ms >= horizon and len(self._identities) <= PRODUCERS_MAX:
                break
            self._identities.popitem(last=False)
        while self._sequences:
            longest = next(iter(self._sequences.values()))
            if longest.batches[-1].at_ms >= horizon and len(self._sequences) <= SEQUENCES_MAX:
                break
            self._sequences.popitem(last=False)

    def forget_topic(self, topic_id: str) -> None:
        """The topic is gone, and what was written to it."""
        for where in [where for where in self._sequences if where[1] == topic_id]:
            del self._sequences[where]

    # -- checkpoints

    def kept(self) -> KeptProducers | None:
        """All of it; None when there never was a producer."""
        if not (self._next_id or self._sequences):
            return None
        return KeptProducers(
            self._next_id, list(self._identities.values()), list(self._sequences.values())
        )

    @classmethod
    def restored(cls, kept: KeptProducers | None) -> "Producers":
        producers = cls()
        if kept is not None:
            producers._next_id = kept.next_id
            producers._identities.update((each.producer_id, each) for each in kept.identities)
            producers._sequences.update((each.where, each) for each in kept.sequences)
        return producers


def _where(batch: ProducerAppend, chunk: Chunk) -> Where:
    return batch.producer_id, chunk.topic_id, chunk.partition


def _last_of(batch: ProducerAppend) -> int:
    return (batch.base_sequence + batch.count - 1) % SEQUENCES


def _fenced(producer_id: int, epoch: int, newest: int) -> ProducerFenced:
    return ProducerFenced(
        f"producer {producer_id} epoch {epoch} is fenced: there is a newer instance, epoch {newest}"
    )
