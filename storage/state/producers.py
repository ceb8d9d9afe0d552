"""Ids, epochs and sequences of Kafka producers. They make a producer's retries idempotent.

Pure, changed by `apply` (I4). The rules are Kafka's (ProducerAppendInfo and ProducerStateEntry for
batches, prepareIncrementProducerEpoch for epochs):

- A batch is a duplicate if it has the epoch and sequences of one of the producer's last five
  batches in its partition. A duplicate changes nothing and returns the first append's offset.
- Any other batch is refused (fenced) if the producer has a newer epoch. The first batch of a newer
  epoch must have sequence 0. In the same epoch a batch must follow the last batch; sequence 0
  follows 2^31 - 1.
- A producer that never wrote to the partition, or was dropped, may send any epoch and sequence.
  Kafka returns no UNKNOWN_PRODUCER_ID since 2.5 (KIP-360), because after a long idle time a
  producer would only bump its epoch and send the batch again. There is one exception. An epoch that
  `init` gave within WINDOW_MS was not dropped, so its first sequence must be 0. Without this rule,
  `apply` would accept a second batch after the first batch was lost. Kafka has the rule for
  transactions only (KIP-890). The refusal is Kafka's UNKNOWN_PRODUCER_ID (UnknownProducer): clients
  then bump their epoch and send the batch again with sequence 0, for example after their topic was
  created again. OUT_OF_ORDER_SEQUENCE_NUMBER would be fatal for librdkafka.
- Two producers never have the same id (I11). An id is the number of one commit of a WAL, and only
  the broker that made this commit gives the id. A WAL that continues from an older state, after a
  restore or a repair, counts from a new base (`rebase`).
- A batch's epoch fences older epochs in its partition only. Since KIP-360 a producer bumps its
  epoch itself if a batch is lost, while its batches to other partitions may still have the old
  epoch. An epoch from `init` fences older epochs in all partitions, as in Kafka's transaction
  coordinator.

A producer is dropped after a day of elapsed time without a batch (Kafka's
`producer.id.expiration.ms`). Below level 3, `apply` also drops the longest unused producer above a
bound (I10). From level 3 on it refuses a commit above a bound or a share instead
(state.principal_shares). Kafka's protocol needs `append-of-producer` and `init-producer`; no HTTP
route uses them yet.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    Chunk,
    InitProducer,
    ProducerAppend,
    ReserveProducers,
)
from tidelog.storage.core.errors import (
    InvalidRequest,
    LogError,
    OutOfOrderSequence,
    ProducerFenced,
    UnknownProducer,
)
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.principal_shares import Need, Shares

BATCHES_KEPT = 5
"""Batches kept per producer and partition. A Kafka client has at most five in flight."""
SEQUENCES = 2**31
EPOCH_MAX = 2**15 - 1
PRODUCER_ID_MAX = 2**63 - 1
WINDOW_MS = 86_400_000
"""How long an unused producer is kept, in elapsed time."""
PRODUCERS_MAX = 100_000
"""Bound of the kept ids that `init` gave (I10); ~100 bytes each."""
SEQUENCES_MAX = 250_000
"""Bound of the kept pairs of producer and partition (I10); ~600 bytes each with five batches."""
BASE_IDS = 2**32
"""Ids of a base. No WAL gives so many: each is a commit."""
BASES = 2**31
"""Bases of `rebase`. A new WAL counts from base 0."""
RESERVED_MAX = 10_000
"""The most ids that one commit reserves."""
JOINED_MS = 60_000
"""Reservations within this time are remembered as one, so there are at most 1,440 (I10)."""

Where: TypeAlias = tuple[int, str, int]
"""Producer id, topic id, partition."""


class ProducerEpoch(NamedTuple):
    """The id and epoch that `init` returns to a producer."""

    producer_id: int
    epoch: int


class _Identity(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """An id from `init`.

    `given_ms` is the elapsed time when `init` gave this epoch. A request that names
    `previous_epoch` is a retry of the last bump. If `previous_epoch` is -1, no request is a retry.
    """

    producer_id: int
    epoch: int
    previous_epoch: int
    given_ms: int
    used_ms: int


class _ProducerBatch(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    base_sequence: int
    last_sequence: int
    base_offset: int
    at_ms: int


class ReservedIds(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The ids [first, end) that brokers reserved, the first at the elapsed time `given_ms`."""

    first: int
    end: int
    given_ms: int


class _Sequence(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The last batches of a producer in a partition, oldest first. There is at least one."""

    producer_id: int
    topic_id: str
    partition: int
    epoch: int
    batches: list[_ProducerBatch]

    @property
    def where(self) -> Where:
        return self.producer_id, self.topic_id, self.partition


class Recognised(NamedTuple):
    """The duplicates in a commit.

    `first_offsets` maps the index of a duplicate among the commit's appends to the base offset at
    which its batch was first appended. `repeated` has these indexes. If `is_retry`, all appends are
    duplicates, so the commit's other actions were done before too.
    """

    first_offsets: dict[int, int]
    repeated: frozenset[int]
    is_retry: bool


NOTHING = Recognised({}, frozenset(), is_retry=False)


class ProducersCheckpoint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Producers in a checkpoint. In both lists the longest unused comes first."""

    next_id: int
    identities: list[_Identity]
    sequences: list[_Sequence]


class ProducerOwners(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """By principal: ids that its `init` made, and the producers' partitions that it began.

    A pair of producer and partition belongs to the principal that wrote to it first. Ids and pairs
    of no principal are left out.
    """

    identities: dict[str, list[int]] = {}
    sequences: dict[str, list[Where]] = {}


class Producers:
    """The known producers. Owned by the cluster state. Both maps are in the order of last use."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = shares or Shares()
        self._identity_owners: dict[int, str] = {}
        self._sequence_owners: dict[Where, str] = {}
        self._next_id = 0
        self._identities: OrderedDict[int, _Identity] = OrderedDict()
        self._sequences: OrderedDict[Where, _Sequence] = OrderedDict()
        self.reserved: list[ReservedIds] = []
        """The ids that were reserved within WINDOW_MS, ascending."""

    @property
    def count(self) -> int:
        """Return the number of kept pairs of producer and partition."""
        return len(self._sequences)

    # -- batches

    def recognise(
        self, actions: Sequence[AnyAction], chunks: Sequence[Chunk], now_ms: int
    ) -> Recognised | LogError:
        """Find the duplicates among a commit's appends, or return the reason to refuse the commit.

        The caller must have done all other checks of the appends. If only some appends are
        duplicates, refuse the commit, unless all its actions are producer batches, because a
        producer may send old batches again together with new batches.
        """
        for action in actions:
            if isinstance(action, ProducerAppend):
                break
        else:
            return NOTHING  # the result for nearly every commit
        appends = [action for action in actions if isinstance(action, Append)]
        batches = [
            (number, batch, chunks[batch.chunk])
            for number, batch in enumerate(appends)
            if isinstance(batch, ProducerAppend)
        ]
        if len({_where(batch, chunk) for _, batch, chunk in batches}) < len(batches):
            return InvalidRequest("a commit has at most one batch of a producer per partition")
        first_offsets: dict[int, int] = {}
        for number, batch, chunk in batches:
            base_offset = self._first_offset(batch, chunk)
            if base_offset is not None:
                first_offsets[number] = base_offset
            elif (refusal := self._check(batch, chunk, now_ms)) is not None:
                return refusal
        is_retry = bool(first_offsets) and len(first_offsets) == len(appends)
        if first_offsets and not is_retry and len(batches) < len(actions):
            return InvalidRequest("some batches of the commit are duplicates, others are new")
        return Recognised(first_offsets, frozenset(first_offsets), is_retry)

    def _first_offset(self, batch: ProducerAppend, chunk: Chunk) -> int | None:
        sequence = self._sequences.get(_where(batch, chunk))
        if sequence is None or sequence.epoch != batch.epoch:
            return None
        sequences = batch.base_sequence, _last_of(batch)
        for kept_batch in sequence.batches:
            if (kept_batch.base_sequence, kept_batch.last_sequence) == sequences:
                return kept_batch.base_offset
        return None

    def _check(self, batch: ProducerAppend, chunk: Chunk, now_ms: int) -> LogError | None:
        """Return why a batch that is no duplicate cannot be appended, or None if it can."""
        producer_id, epoch, base = batch.producer_id, batch.epoch, batch.base_sequence
        if not (
            0 <= producer_id <= PRODUCER_ID_MAX
            and 0 <= epoch <= EPOCH_MAX
            and 0 <= base < SEQUENCES
        ):
            return InvalidRequest(
                f"invalid producer id {producer_id}, epoch {epoch} or sequence {base}"
            )
        identity = self._identities.get(producer_id)
        sequence = self._sequences.get(_where(batch, chunk))
        newest = max(identity.epoch if identity else -1, sequence.epoch if sequence else -1)
        if epoch < newest:
            return _fenced(producer_id, epoch, newest)
        if sequence is not None and epoch == sequence.epoch:
            expected = (sequence.batches[-1].last_sequence + 1) % SEQUENCES
        elif sequence is not None or self._given_ms(producer_id) >= now_ms - WINDOW_MS:
            expected = 0
        else:
            expected = base
        if base == expected:
            return None
        message = (
            f"producer {producer_id} epoch {epoch} sends sequence {base} "
            f"to partition {chunk.partition}"
        )
        if sequence is None:
            return UnknownProducer(
                f"{message}, expected 0: the partition has no batch of this producer, because an "
                "earlier one is missing, or the topic was created again"
            )
        return OutOfOrderSequence(
            f"{message}, expected {expected}: an earlier batch is missing, or this batch is older "
            f"than the last {BATCHES_KEPT}"
        )

    def _given_ms(self, producer_id: int) -> int:
        """Return the elapsed time when the log gave the id or its epoch.

        If this is not known any more, return -WINDOW_MS - 1.
        """
        if (identity := self._identities.get(producer_id)) is not None:
            return identity.given_ms
        index = bisect_right(self.reserved, producer_id, key=lambda ids: ids.first) - 1
        is_reserved = index >= 0 and producer_id < self.reserved[index].end
        return self.reserved[index].given_ms if is_reserved else -WINDOW_MS - 1

    def appended(
        self,
        batch: ProducerAppend,
        chunk: Chunk,
        base_offset: int,
        now_ms: int,
        principal: str = "",
    ) -> None:
        producer_partition = _where(batch, chunk)
        sequence = self._sequences.get(producer_partition)
        if sequence is None:
            self._shares.add(rules.PRODUCER_PARTITIONS, principal, 1)
            if principal:
                self._sequence_owners[producer_partition] = principal
        if sequence is None or sequence.epoch != batch.epoch:
            sequence = _Sequence(*producer_partition, batch.epoch, [])
        sequence.batches.append(
            _ProducerBatch(batch.base_sequence, _last_of(batch), base_offset, now_ms)
        )
        del sequence.batches[:-BATCHES_KEPT]
        self._sequences[producer_partition] = sequence
        self._sequences.move_to_end(producer_partition)
        identity = self._identities.get(batch.producer_id)
        if identity is not None:
            self._use(msgspec.structs.replace(identity, used_ms=now_ms))

    # -- epochs

    def check_ids(self, action: InitProducer | ReserveProducers, level: int) -> LogError | None:
        """Return why the producer cannot have another epoch or ids cannot be reserved, or None."""
        if isinstance(action, ReserveProducers):
            if level < format_levels.KAFKA:
                return InvalidRequest("ids are reserved from level 4 of the format on")
            if not 1 <= action.count <= RESERVED_MAX:
                return InvalidRequest(f"cannot reserve {action.count} ids: 1 to {RESERVED_MAX} can")
            return None
        identity = self._identities.get(action.producer_id)
        if identity is None or action.epoch == -1:
            return None  # `init` returns a new id for an unknown id, else the next epoch
        if action.epoch not in (identity.epoch, identity.previous_epoch):
            return _fenced(action.producer_id, action.epoch, identity.epoch)
        return None

    def needs(self, action: AnyAction, principal: str, chunks: Sequence[Chunk]) -> list[Need]:
        """Return what the action adds to the principal's use of a bound."""
        if isinstance(action, InitProducer):
            identity = self._identities.get(action.producer_id)
            if identity is not None and identity.epoch < EPOCH_MAX - 1:
                return []
            return [Need(rules.PRODUCERS, principal, 1, PRODUCERS_MAX)]
        if not isinstance(action, ProducerAppend):
            return []
        if _where(action, chunks[action.chunk]) in self._sequences:
            return []
        return [Need(rules.PRODUCER_PARTITIONS, principal, 1, SEQUENCES_MAX)]

    def init(self, action: InitProducer, now_ms: int, principal: str = "") -> ProducerEpoch:
        """Return the id and epoch of a new producer instance. Call `check_ids` before.

        A request that names `previous_epoch` is a retry and gets the newest epoch again. An older
        instance cannot name it, because the `init` of a newer instance would have replaced
        `previous_epoch`.
        """
        identity = self._identities.get(action.producer_id)
        if identity is None:
            new_identity = self._new(now_ms, principal)
        elif action.epoch not in (-1, identity.epoch):
            new_identity = msgspec.structs.replace(identity, used_ms=now_ms)
        elif identity.epoch >= EPOCH_MAX - 1:  # Kafka reserves the last epoch to end transactions
            new_identity = self._new(now_ms, principal)
        else:
            new_identity = _Identity(
                action.producer_id, identity.epoch + 1, action.epoch, now_ms, now_ms
            )
        self._use(new_identity)
        return ProducerEpoch(new_identity.producer_id, new_identity.epoch)

    def _new(self, now_ms: int, principal: str) -> _Identity:
        self._next_id += 1
        self._shares.add(rules.PRODUCERS, principal, 1)
        if principal:
            self._identity_owners[self._next_id - 1] = principal
        return _Identity(self._next_id - 1, 0, -1, now_ms, now_ms)

    def _use(self, identity: _Identity) -> None:
        self._identities[identity.producer_id] = identity
        self._identities.move_to_end(identity.producer_id)

    def reserve(self, action: ReserveProducers, now_ms: int) -> ProducerEpoch:
        """Return the first of the reserved ids. Call `check_ids` before."""
        first = self._next_id
        self._next_id += action.count
        last = self.reserved[-1] if self.reserved else None
        if last is not None and last.end == first and last.given_ms >= now_ms - JOINED_MS:
            last.end = self._next_id
        else:
            self.reserved.append(ReservedIds(first, self._next_id, now_ms))
        return ProducerEpoch(first, 0)

    def rebase(self, draw: bytes) -> None:
        """Count from a base that `draw` chooses, 16 random bytes.

        The WAL continues from an older state, so the numbers from `next_id` on may be ids of live
        producers.

        An id that was given before is then an id of unknown age: its producer may continue with any
        sequence in the partitions that do not know it.
        """
        self.reserved.clear()
        self._next_id = (int.from_bytes(draw) % (BASES - 1) + 1) * BASE_IDS

    # -- expiry

    def forget(self, now_ms: int, *, is_bounded: bool = True) -> None:
        """Drop ids and sequences that were not used for WINDOW_MS.

        If `is_bounded`, also drop the longest unused ones above a bound. Cheap if there are none to
        drop.
        """
        horizon = now_ms - WINDOW_MS
        while self.reserved and self.reserved[0].given_ms < horizon:
            del self.reserved[0]
        while self._identities:
            oldest = next(iter(self._identities.values()))
            is_over = is_bounded and len(self._identities) > PRODUCERS_MAX
            if oldest.used_ms >= horizon and not is_over:
                break
            producer_id, _ = self._identities.popitem(last=False)
            self._shares.add(rules.PRODUCERS, self._identity_owners.pop(producer_id, ""), -1)
        while self._sequences:
            longest = next(iter(self._sequences.values()))
            is_over = is_bounded and len(self._sequences) > SEQUENCES_MAX
            if longest.batches[-1].at_ms >= horizon and not is_over:
                break
            self._drop(longest.where)

    def forget_topic(self, topic_id: str) -> None:
        for producer_partition in [
            producer_partition
            for producer_partition in self._sequences
            if producer_partition[1] == topic_id
        ]:
            self._drop(producer_partition)

    def _drop(self, producer_partition: Where) -> None:
        del self._sequences[producer_partition]
        owner = self._sequence_owners.pop(producer_partition, "")
        self._shares.add(rules.PRODUCER_PARTITIONS, owner, -1)

    # -- checkpoints

    def kept(self) -> ProducersCheckpoint | None:
        """Return the producers as part of a checkpoint, or None if there is nothing to store."""
        if not (self._next_id or self._sequences):
            return None
        return ProducersCheckpoint(
            self._next_id, list(self._identities.values()), list(self._sequences.values())
        )

    def owners(self) -> ProducerOwners:
        """Return the owners as part of a checkpoint."""
        owners = ProducerOwners({}, {})
        for producer_id in self._identities:
            if (owner := self._identity_owners.get(producer_id)) is not None:
                owners.identities.setdefault(owner, []).append(producer_id)
        for producer_partition in self._sequences:
            if (owner := self._sequence_owners.get(producer_partition)) is not None:
                owners.sequences.setdefault(owner, []).append(producer_partition)
        return owners

    @classmethod
    def restored(
        cls,
        checkpoint: ProducersCheckpoint | None,
        shares: Shares | None = None,
        owners: ProducerOwners | None = None,
    ) -> "Producers":
        producers = cls(shares)
        if owners is not None:
            producers._identity_owners = {
                producer_id: owner
                for owner, ids in owners.identities.items()
                for producer_id in ids
            }
            producers._sequence_owners = {
                producer_partition: owner
                for owner, producer_partitions in owners.sequences.items()
                for producer_partition in producer_partitions
            }
        if checkpoint is not None:
            producers._next_id = checkpoint.next_id
            producers._identities.update(
                (identity.producer_id, identity) for identity in checkpoint.identities
            )
            producers._sequences.update(
                (sequence.where, sequence) for sequence in checkpoint.sequences
            )
            for identity in checkpoint.identities:
                owner = producers._identity_owners.get(identity.producer_id, "")
                producers._shares.add(rules.PRODUCERS, owner, 1)
            for producer_partition in producers._sequences:
                owner = producers._sequence_owners.get(producer_partition, "")
                producers._shares.add(rules.PRODUCER_PARTITIONS, owner, 1)
        return producers


def _where(batch: ProducerAppend, chunk: Chunk) -> Where:
    return batch.producer_id, chunk.topic_id, chunk.partition


def _last_of(batch: ProducerAppend) -> int:
    return (batch.base_sequence + batch.count - 1) % SEQUENCES


def _fenced(producer_id: int, epoch: int, newest: int) -> ProducerFenced:
    return ProducerFenced(
        f"producer {producer_id} epoch {epoch} is fenced: there is a newer instance, epoch {newest}"
    )
