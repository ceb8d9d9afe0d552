"""Kafka's idempotent producer: each batch once, in order, whatever is sent how often (I4)."""

import random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import IDS
from tests.support.properties import examples
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import Chunk, InitProducer, ProducerAppend
from tidelog.storage.core.errors import (
    InvalidRequest,
    LogError,
    OutOfOrderSequence,
    ProducerFenced,
    UnknownProducer,
)
from tidelog.storage.state import producers as machine
from tidelog.storage.state.producers import (
    BATCHES_KEPT,
    EPOCH_MAX,
    SEQUENCES,
    WINDOW_MS,
    ProducerEpoch,
    Producers,
    ProducersCheckpoint,
)

LAST = SEQUENCES - 1


def chunk(partition: int = 0, rows: int = 10, topic_id: str = IDS[0]) -> Chunk:
    return Chunk(topic_id, partition, 0, 90, 1, rows, 0, 5, False, "", 90)


def batch(
    base_sequence: int, count: int = 1, *, producer_id: int = 7, epoch: int = 0, number: int = 0
) -> ProducerAppend:
    return ProducerAppend(number, 0, count, producer_id, epoch, base_sequence)


class Partition:
    """One partition of one log, without what is not the producer's."""

    def __init__(self, number: int = 0, producers: Producers | None = None) -> None:
        self.chunk = chunk(number)
        self.producers = producers or Producers()
        self.end = 0

    def send(self, sent: ProducerAppend, now_ms: int = 0) -> int | LogError:
        """The batch's base offset, now or the first time; or the refusal."""
        recognition = self.producers.recognise([sent], [self.chunk], now_ms)
        if isinstance(recognition, LogError):
            return recognition
        if 0 in recognition.first_offsets:
            assert recognition.is_retry
            return recognition.first_offsets[0]
        self.producers.appended(sent, self.chunk, self.end, now_ms)
        self.end += sent.count
        return self.end - sent.count


def restarted(producers: Producers) -> Producers:
    """The same through the bytes of a checkpoint, which are the same again."""
    checkpoint = producers.kept()
    body = msgspec.msgpack.encode(checkpoint)
    again = Producers.restored(msgspec.msgpack.decode(body, type=ProducersCheckpoint | None))
    assert msgspec.msgpack.encode(again.kept()) == body
    return again


# -- against a model


class Sent(NamedTuple):
    base: int
    last: int
    epoch: int
    offset: int


class Model:
    """Kafka's rules as one would tell them, with the whole history at hand."""

    def __init__(self) -> None:
        self.history: list[Sent] = []
        self.given = -1
        self.end = 0

    def send(self, sent: ProducerAppend) -> int | type[LogError]:
        sequences = [(sent.base_sequence + n) % SEQUENCES for n in range(sent.count)]
        base, last = sequences[0], sequences[-1]
        epoch_here = max((stored_batch.epoch for stored_batch in self.history), default=None)
        of_epoch = [
            stored_batch for stored_batch in self.history if stored_batch.epoch == epoch_here
        ]
        if sent.epoch == epoch_here:
            for stored_batch in of_epoch[-5:]:
                if (stored_batch.base, stored_batch.last) == (base, last):
                    return stored_batch.offset
        if sent.epoch < self.given or (epoch_here is not None and sent.epoch < epoch_here):
            return ProducerFenced
        if epoch_here is not None:
            follows = of_epoch[-1].last + 1 if of_epoch[-1].last != LAST else 0
            if base != (follows if sent.epoch == epoch_here else 0):
                return OutOfOrderSequence
        elif self.given >= 0 and base != 0:
            return UnknownProducer
        self.history.append(Sent(base, last, sent.epoch, self.end))
        self.end += sent.count
        return self.history[-1].offset


@given(st.integers(0, 2**32))
@examples(300)
def test_batches_are_taken_as_kafka_takes_them(seed: int) -> None:
    draw = random.Random(seed)
    producers = Producers()
    partitions = [Partition(number, producers) for number in range(2)]
    models = [Model(), Model()]
    producer_id, start = 9, draw.choice([0, 5, LAST - 3])
    if draw.random() < 0.5:
        producer_id, start = producers.init(InitProducer(), 0).producer_id, 0
        for model in models:
            model.given = 0
    newest = 0
    for _ in range(60):
        number = draw.randrange(2)
        model = models[number]
        if producer_id == 0 and draw.random() < 0.05:
            newest = producers.init(InitProducer(producer_id, draw.choice([-1, newest])), 0).epoch
            for producer_model in models:
                producer_model.given = newest
        if draw.random() < 0.05:
            producers = restarted(producers)
            for partition in partitions:
                partition.producers = producers
        last = model.history[-1] if model.history else None
        next_sequence = start if last is None else (last.last + 1) % SEQUENCES
        epoch = newest if last is None else max(last.epoch, newest if draw.random() < 0.8 else 0)
        epoch += draw.choice([0] * 12 + [1, -1])
        base = 0 if last is not None and epoch != last.epoch else next_sequence
        sent = batch(base, draw.randint(1, 3), producer_id=producer_id, epoch=max(epoch, 0))
        if draw.random() < 0.3 and model.history:  # an old one again, or nearly
            old = draw.choice(model.history[-8:])
            count = (old.last - old.base) % SEQUENCES + 1
            sent = batch(
                old.base,
                count + draw.choice([0] * 5 + [1]),
                producer_id=producer_id,
                epoch=old.epoch,
            )
        elif draw.random() < 0.1:
            skewed = (sent.base_sequence + draw.choice([-2, -1, 1, 2])) % SEQUENCES
            sent = msgspec.structs.replace(sent, base_sequence=skewed)
        expected, result = model.send(sent), partitions[number].send(sent)
        if isinstance(expected, int):
            assert result == expected
        else:
            assert type(result) is expected
        assert partitions[number].end == model.end


@given(st.integers(0, 2**32))
@examples(200)
def test_a_retrying_producer_is_stored_once(seed: int) -> None:
    """Kafka's client: five batches under way, answers lost, requests lost, doubled and late.

    A refusal makes it send again what was not answered, in order.
    """
    draw = random.Random(seed)
    partition = Partition()
    producer_id = partition.producers.init(InitProducer(), 0).producer_id
    base, batches = 0, []
    for _ in range(30):
        # The first is as large as none is, so that the others go around.
        count = draw.randint(1, 3) if batches else draw.choice([1, SEQUENCES - 20])
        batches.append(batch(base, count, producer_id=producer_id))
        base = (base + count) % SEQUENCES
    offset_by_batch: dict[int, int] = {}
    late: list[int] = []
    log: list[int] = []
    for _ in range(3000):
        waiting = [number for number in range(len(batches)) if number not in offset_by_batch]
        if not waiting:
            break
        under_way = [number for number in waiting if number < waiting[0] + BATCHES_KEPT]
        sends = late[:] if draw.random() < 0.2 else under_way
        for number in sends:
            if draw.random() < 0.3:
                continue  # lost on its way
            old_end = partition.end
            result = partition.send(batches[number])
            if isinstance(result, int):
                if partition.end > old_end:
                    log.append(number)
                if draw.random() < 0.6:
                    assert offset_by_batch.setdefault(number, result) == result
            else:
                assert isinstance(result, OutOfOrderSequence)
        late = under_way
    assert log == list(range(len(batches)))
    offsets = [offset_by_batch[number] for number in range(len(batches))]
    assert offsets == [
        sum(sent_batch.count for sent_batch in batches[:n]) for n in range(len(batches))
    ]


# -- single rules


def test_a_duplicate_is_answered_with_the_first_offset_for_five_batches() -> None:
    partition = Partition()
    assert [partition.send(batch(2 * n, 2)) for n in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    for n in range(3, 8):
        assert partition.send(batch(2 * n, 2)) == 2 * n
    for n in range(3):
        assert isinstance(partition.send(batch(2 * n, 2)), OutOfOrderSequence)
    assert isinstance(partition.send(batch(14, 1)), OutOfOrderSequence)  # a part of one is none
    assert partition.end == 16


def test_a_gap_is_refused_and_filled() -> None:
    partition = Partition()
    partition.send(batch(0, 3))
    refusal = partition.send(batch(4, 1))
    assert isinstance(refusal, OutOfOrderSequence)
    assert "sends sequence 4 to partition 0, expected 3" in str(refusal)
    assert [partition.send(batch(3, 1)), partition.send(batch(4, 1))] == [3, 4]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_after_the_last_sequence_comes_the_first(count: int) -> None:
    partition = Partition()
    assert partition.send(batch(LAST - 1, count)) == 0
    next_sequence = (LAST - 1 + count) % SEQUENCES
    assert partition.send(batch(next_sequence, 2)) == count
    assert partition.send(batch(LAST - 1, count)) == 0  # also the one that goes around
    assert partition.send(batch(next_sequence, 2)) == count


@pytest.mark.parametrize(("base", "epoch"), [(0, 0), (41, 0), (LAST, 9), (3, EPOCH_MAX)])
def test_an_unknown_producer_may_begin_anywhere(base: int, epoch: int) -> None:
    partition = Partition()
    assert partition.send(batch(base, epoch=epoch)) == 0
    assert isinstance(
        partition.send(batch(base + 2, epoch=epoch)), OutOfOrderSequence | InvalidRequest
    )


def test_one_that_cannot_have_been_forgotten_begins_at_zero() -> None:
    producers = Producers()
    producer_id, _ = producers.init(InitProducer(), 5)
    partition = Partition(0, producers)
    assert isinstance(
        partition.send(batch(1, producer_id=producer_id), now_ms=5 + WINDOW_MS), OutOfOrderSequence
    )
    producers.init(InitProducer(producer_id), 9)
    lost = batch(1, producer_id=producer_id, epoch=1)
    assert isinstance(partition.send(lost, now_ms=9 + WINDOW_MS), OutOfOrderSequence)
    assert partition.send(lost, now_ms=10 + WINDOW_MS) == 0
    fresh = Partition(1, producers)
    assert fresh.send(batch(0, producer_id=producer_id, epoch=1), now_ms=9) == 0


def test_a_newer_epoch_begins_at_zero_and_fences_the_older() -> None:
    partition = Partition()
    partition.send(batch(0))
    assert isinstance(partition.send(batch(1, epoch=1)), OutOfOrderSequence)
    assert partition.send(batch(0, epoch=1)) == 1
    fenced = partition.send(batch(1, epoch=0))
    assert isinstance(fenced, ProducerFenced)
    assert str(fenced) == "producer 7 epoch 0 is fenced: there is a newer instance, epoch 1"
    assert isinstance(partition.send(batch(0, epoch=0)), ProducerFenced)  # forgotten with its epoch


def test_an_epoch_that_a_producer_takes_by_itself_counts_in_its_partition() -> None:
    """KIP-360: what is under way to other partitions carries the old one, and is taken."""
    producers = Producers()
    producer_id = producers.init(InitProducer(), 0).producer_id
    first, second = Partition(0, producers), Partition(1, producers)
    assert second.send(batch(0, producer_id=producer_id)) == 0
    assert first.send(batch(0, producer_id=producer_id, epoch=1)) == 0
    assert second.send(batch(1, producer_id=producer_id)) == 1


def test_an_epoch_that_was_given_out_counts_everywhere() -> None:
    producers = Producers()
    producer_id = producers.init(InitProducer(), 0).producer_id
    partition, unseen = Partition(0, producers), Partition(1, producers)
    assert partition.send(batch(0, producer_id=producer_id)) == 0
    assert producers.init(InitProducer(producer_id, 0), 0) == ProducerEpoch(producer_id, 1)
    assert isinstance(partition.send(batch(1, producer_id=producer_id)), ProducerFenced)
    assert isinstance(unseen.send(batch(0, producer_id=producer_id)), ProducerFenced)
    assert partition.send(batch(0, producer_id=producer_id)) == 0, (
        "what lies there is said, also to the fenced"
    )
    assert partition.send(batch(0, producer_id=producer_id, epoch=1)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        batch(-1),
        batch(SEQUENCES),
        batch(0, producer_id=-1),
        batch(0, producer_id=2**63),
        batch(0, epoch=-1),
        batch(0, epoch=EPOCH_MAX + 1),
    ],
    ids=str,
)
def test_numbers_that_no_producer_has_are_refused(bad: ProducerAppend) -> None:
    assert isinstance(Partition().send(bad), InvalidRequest)


# -- epochs


def test_ids_are_given_out_once() -> None:
    producers = Producers()
    epochs = [producers.init(InitProducer(), 0) for _ in range(3)]
    assert epochs == [ProducerEpoch(0, 0), ProducerEpoch(1, 0), ProducerEpoch(2, 0)]
    producers = restarted(producers)
    producers.forget(WINDOW_MS + 1)
    assert restarted(producers).init(InitProducer(), 0) == ProducerEpoch(3, 0)


def test_the_retry_of_a_bump_gets_the_same_epoch_and_a_newer_instance_a_newer() -> None:
    producers = Producers()
    producer_id, _ = producers.init(InitProducer(), 0)
    for _ in range(3):  # one call, its answer lost twice
        assert producers.check_ids(InitProducer(producer_id, 0), format_levels.NEWEST) is None
        assert producers.init(InitProducer(producer_id, 0), 0).epoch == 1
    assert (
        producers.init(InitProducer(producer_id, -1), 0).epoch == 2
    )  # a new instance, asks for no one's
    for epoch in (0, 1, 3):
        assert isinstance(
            producers.check_ids(InitProducer(producer_id, epoch), format_levels.NEWEST),
            ProducerFenced,
        )
    assert producers.init(InitProducer(producer_id, 2), 0).epoch == 3


def test_one_that_was_forgotten_gets_a_new_id() -> None:
    producers = Producers()
    assert producers.check_ids(InitProducer(41, 3), format_levels.NEWEST) is None
    assert producers.init(InitProducer(41, 3), 0) == ProducerEpoch(0, 0)


def test_a_producer_that_has_used_up_its_epochs_gets_a_new_id() -> None:
    producers = Producers()
    producer_id, epoch = producers.init(InitProducer(), 0)
    while epoch < EPOCH_MAX - 1:
        assert producers.init(InitProducer(producer_id, epoch), 0) == ProducerEpoch(
            producer_id, epoch + 1
        )
        epoch += 1
    assert producers.init(InitProducer(producer_id, epoch), 0) == ProducerEpoch(producer_id + 1, 0)
    # Of a retry that lost its answer: the last bump, not another id.
    assert producers.init(InitProducer(producer_id, epoch - 1), 0) == ProducerEpoch(
        producer_id, epoch
    )


# -- forgetting


def test_a_producer_is_forgotten_a_day_after_its_last_batch_in_a_partition() -> None:
    producers = Producers()
    busy, idle = Partition(0, producers), Partition(1, producers)
    busy.send(batch(0), now_ms=0)
    idle.send(batch(0), now_ms=0)
    busy.send(batch(1), now_ms=1)
    producers.forget(WINDOW_MS)
    assert isinstance(idle.send(batch(5), now_ms=0), OutOfOrderSequence)
    producers.forget(WINDOW_MS + 1)
    assert isinstance(busy.send(batch(5)), OutOfOrderSequence)
    assert idle.send(batch(5), now_ms=WINDOW_MS) == 1
    producers.forget(WINDOW_MS + 2)
    assert busy.send(batch(7), now_ms=WINDOW_MS) == 2


def test_a_given_epoch_lives_while_it_is_used() -> None:
    producers = Producers()
    producer_id = producers.init(InitProducer(), 0).producer_id
    producers.init(InitProducer(producer_id, 0), 0)
    partition = Partition(0, producers)
    partition.send(batch(0, producer_id=producer_id, epoch=1), now_ms=WINDOW_MS)
    producers.forget(WINDOW_MS + 1)
    other = Partition(1, producers)
    assert isinstance(other.send(batch(0, producer_id=producer_id)), ProducerFenced)
    producers.forget(2 * WINDOW_MS + 1)
    assert other.send(batch(0, producer_id=producer_id)) == 0


def test_i10_the_longest_unused_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SEQUENCES_MAX", 5)
    monkeypatch.setattr(machine, "PRODUCERS_MAX", 3)
    producers = Producers()
    partition = Partition(0, producers)
    for producer_id in range(10):
        assert producers.init(InitProducer(), 0).producer_id == producer_id
        partition.send(batch(0, producer_id=producer_id))
        partition.send(batch(producer_id + 1, producer_id=0))  # is used all the time
        producers.forget(0)
        producers = partition.producers = restarted(producers)
    checkpoint = producers.kept()
    assert checkpoint is not None
    assert [identity.producer_id for identity in checkpoint.identities] == [8, 9, 0]
    assert [sequence.producer_id for sequence in checkpoint.sequences] == [6, 7, 8, 9, 0]
