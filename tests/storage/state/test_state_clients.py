"""Batches of producers, offsets of groups in the state: with their records or not at all (I4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import (
    FIRST,
    IDS,
    Dice,
    Spec,
    applied,
    check_partition,
    encoded,
)
from tests.storage.state.test_levels import BOUNDS, NO_KAFKA, NO_OWNERS
from tests.storage.state.test_producers import batch, chunk
from tests.support.elapsed import elapse
from tests.support.properties import examples
from tidelog.storage.codec.entry import (
    Commit,
    DecodedEntry,
    Entry,
    HotMark,
    IdempotencyKey,
    encode_header,
)
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    Chunk,
    CommitOffsets,
    CreateTopic,
    DeleteTopic,
    GroupOffset,
    InitProducer,
    ProducerAppend,
)
from tidelog.storage.core.errors import InvalidRequest, OutOfOrderSequence, ProducerFenced
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.state.producers import WINDOW_MS, ProducerEpoch

# -- any history


class ClientDice(Dice):
    """Draws what clients of Kafka's do, too."""

    def append(self, chunks: list[Chunk]) -> Append:
        append = super().append(chunks)
        if self.random() < 0.5:
            return append
        producer_id, epoch = (
            self.choices([0, 1], [5, 1])[0],
            self.choices([0, 1, -1], [30, 1, 1])[0],
        )
        return ProducerAppend(append.chunk, 0, 1, producer_id, epoch, self.choice([0, 0, 0, 1, 2]))

    def action(self, chunks: list[Chunk]) -> AnyAction:
        if self.random() < 0.02:
            return InitProducer(self.randrange(-1, 3), self.randrange(-1, 3))
        return self.offsets() if self.random() < 0.1 else super().action(chunks)

    def offsets(self) -> CommitOffsets:
        group_offsets = [
            GroupOffset(self.choice(IDS[:2]), 0, self.randrange(0, 20), -1, "m" * length)
            for length in range(self.randint(1, 3))
        ]
        if self.rarely():
            group_offsets.append(GroupOffset(IDS[1], self.randrange(-1, 2), self.randrange(-1, 1)))
        return CommitOffsets(self.choice(["g", "g", "h", ""]), -self.randrange(1, 3), group_offsets)


histories = st.integers(0, 2**32).map(lambda seed: ClientDice(seed).history())


@given(histories, st.data())
@examples(200)
def test_i4_every_fold_gives_the_same_bytes(history: list[Spec], data: st.DataObject) -> None:
    """Two brokers, one of which restarts from a checkpoint now and then."""
    first, second = ClusterState("c"), ClusterState("c")
    restarts = data.draw(st.sets(st.integers(0, len(history))))
    for number, spec in enumerate(history):
        outcomes, again = applied(first, spec), applied(second, spec)
        assert str(outcomes) == str(again)
        assert first.encode() == second.encode()
        if number in restarts:
            second = ClusterState.decode(second.encode(), "checkpoints/x")
        for _, _, partition in first.partitions():
            check_partition(partition)


@given(histories)
@examples(200)
def test_i4_a_refused_commit_changes_nothing(history: list[Spec]) -> None:
    """Nor does one that was here before: a fold without both is the same to the byte."""
    state, clean = ClusterState("c"), ClusterState("c")
    for spec in history:
        decoded = encoded(state, spec)
        key = object_keys.wal(decoded.entry.seq)
        commits = [
            commit
            if outcome.refusal is None and not outcome.is_duplicate
            else Commit(b"", [], hot=commit.hot)
            for commit, outcome in zip(
                spec.commits, state.apply(decoded, key).outcomes, strict=True
            )
        ]
        number = decoded.entry.seq
        entry_without = Entry(
            format_levels.NEWEST, number, clean.hash, b"", "b", spec.at_ms, spec.chunks, commits
        )
        clean.apply(DecodedEntry(entry_without, decoded.hash, decoded.body_start), key)
        assert clean.encode() == state.encode()


def test_the_histories_are_worth_their_while() -> None:
    retried = repeated = refused = batches = offsets = 0
    for seed in range(300):
        state = ClusterState("c")
        for spec in ClientDice(seed).history():
            (outcomes,) = applied(state, spec)
            for commit, outcome in zip(spec.commits, outcomes, strict=True):
                is_stale = isinstance(outcome.refusal, OutOfOrderSequence | ProducerFenced)
                refused += is_stale
                retried += outcome.is_duplicate and bool(outcome.repeated)
                repeated += not outcome.is_duplicate and bool(outcome.repeated)
                if outcome.refusal is None and not outcome.is_duplicate:
                    batches += sum(isinstance(action, ProducerAppend) for action in commit.actions)
                    offsets += sum(isinstance(action, CommitOffsets) for action in commit.actions)
    assert min(retried, refused, batches, offsets) > 50, (retried, refused, batches, offsets)
    assert repeated > 0


# -- single commits


def state_with(*specs: Spec) -> ClusterState:
    state = ClusterState("c")
    applied(state, FIRST, *specs)
    return state


def outcome_of(
    state: ClusterState,
    *actions: AnyAction,
    chunks: list[Chunk] | None = None,
    key: IdempotencyKey | None = None,
    hot: HotMark | None = None,
    at_ms: int = 0,
) -> Outcome:
    """Of one commit in an entry of its own; the state's bytes survive a checkpoint."""
    at_ms = elapse(state, at_ms)
    spec = Spec(at_ms, chunks or [chunk(0), chunk(1)], [Commit(b"", list(actions), key, hot)])
    ((outcome,),) = applied(state, spec)
    body = state.encode()
    assert ClusterState.decode(body, "x").encode() == body
    return outcome


def ends(state: ClusterState) -> list[int]:
    return [partition.high_watermark for partition in state.topic("alpha").partitions]


def test_i4_a_batch_that_is_refused_refuses_its_commit() -> None:
    state = state_with()
    outcome_of(state, batch(0, 2))
    offsets = CommitOffsets("g", -1, [GroupOffset(IDS[0], 0, 1)])
    old_state = state.encode()
    outcome = outcome_of(state, Append(1, 0, 3), batch(5, 1), offsets)
    assert isinstance(outcome.refusal, OutOfOrderSequence)
    assert (ends(state), "g" in state.committed_offsets) == ([2, 0], False)
    assert len(state.encode()) == len(old_state)


def test_the_batches_of_one_request_may_be_old_and_new() -> None:
    state = state_with()
    first = outcome_of(state, batch(0, 2), batch(0, 3, number=1))
    assert [placement.base_offset for placement in first.placements] == [0, 0]
    mixed = outcome_of(state, batch(2, 1), batch(0, 3, number=1))
    assert [placement.base_offset for placement in mixed.placements] == [2, 0]
    assert (mixed.repeated, mixed.is_duplicate, ends(state)) == ({1}, False, [3, 3])
    again = outcome_of(state, batch(2, 1), batch(0, 3, number=1))
    assert again == mixed._replace(repeated=frozenset({0, 1}), is_duplicate=True)
    assert ends(state) == [3, 3]


def test_a_retried_commit_does_nothing_again() -> None:
    """Offsets committed with the batch are not: the group may have gone on since."""
    state = state_with()

    def produce(offset: int, base: int) -> Outcome:
        offsets = CommitOffsets("g", -1, [GroupOffset(IDS[0], 0, offset)])
        return outcome_of(state, batch(base, 2), offsets, key=IdempotencyKey(f"k{base}", b"f"))

    first, _ = produce(10, 0), produce(20, 2)
    state._keys.forget(2**40)
    again = produce(10, 0)
    assert again.placements == first.placements
    assert again.is_duplicate
    assert state.committed_offsets.of_group("g")[IDS[0]][0].offset == 20
    assert state.idempotency_record("k0") is None


@pytest.mark.parametrize(
    "other",
    [Append(1, 0, 1), CommitOffsets("g", -1, [GroupOffset(IDS[0], 0, 1)])],
    ids=["append", "offsets"],
)
def test_what_is_old_in_part_is_refused(other: AnyAction) -> None:
    state = state_with()
    outcome_of(state, batch(0, 2))
    outcome = outcome_of(state, batch(0, 2), batch(0, 1, number=1), other)
    assert isinstance(outcome.refusal, InvalidRequest)
    assert ends(state) == [2, 0]


def test_two_batches_for_one_partition_are_refused() -> None:
    state = state_with()
    outcome = outcome_of(state, batch(0, 2), batch(2, 2))
    assert isinstance(outcome.refusal, InvalidRequest)
    assert ends(state) == [0, 0]
    assert outcome_of(state, batch(0, 2), batch(0, 2, producer_id=8)).refusal is None


def test_a_producer_is_begun_by_a_commit_of_its_own() -> None:
    state = state_with()
    assert isinstance(outcome_of(state, InitProducer(), InitProducer()).refusal, InvalidRequest)
    assert outcome_of(state, InitProducer()).producer == ProducerEpoch(0, 0)
    assert outcome_of(state, InitProducer(0, 0)).producer == ProducerEpoch(0, 1)
    assert isinstance(outcome_of(state, InitProducer(0, 4)).refusal, ProducerFenced)
    assert outcome_of(state, Append(0, 0, 1)).producer is None


def test_a_hot_mark_is_spent_on_a_duplicate_too() -> None:
    state = state_with()
    outcome_of(state, batch(0, 2))
    assert outcome_of(state, batch(0, 2), hot=HotMark("h", 4)).is_duplicate
    assert state.hot_logs == {"h": 4}


def test_a_topic_takes_its_sequences_with_it() -> None:
    state = state_with()
    outcome_of(state, batch(0, 2))
    outcome_of(state, DeleteTopic(IDS[0]))
    checkpoint = state.producers.kept()
    assert checkpoint is None or checkpoint.sequences == []
    outcome_of(state, CreateTopic("alpha", "d" * 32, 1, {}))
    anew = outcome_of(state, batch(9, 2), chunks=[chunk(topic_id="d" * 32)])
    assert anew.placements[0].base_offset == 0


def test_a_day_is_of_elapsed_time() -> None:
    state = state_with()
    outcome_of(state, batch(0, 2), at_ms=1000)
    assert outcome_of(state, batch(7), at_ms=1000 + WINDOW_MS).refusal is not None
    assert outcome_of(state, batch(7), at_ms=1001 + WINDOW_MS).refusal is None


def test_a_checkpoint_of_level_1_without_producers_is_as_it_always_was() -> None:
    first = ClusterState("c", format_levels.FIRST)
    applied(first, FIRST)
    assert len(msgspec.msgpack.decode(first.encode())) == 9
    assert msgspec.msgpack.decode(state_with().encode())[9:] == [
        None,
        None,
        None,
        [],
        None,
        [0, [["b", 0, 0]]],
        BOUNDS,
        [],
        NO_OWNERS,
        NO_KAFKA,
        {},
    ]


# -- bytes


@pytest.mark.parametrize("level", [format_levels.FIRST, 2, 3, format_levels.NEWEST])
def test_actions_and_checkpoint_are_what_format_md_says(level: int) -> None:
    state = ClusterState("c", level)
    applied(state, FIRST)
    offsets = CommitOffsets("g", -1, [GroupOffset(IDS[0], 1, 7, metadata="m")])
    commits = [
        Commit(b"", [InitProducer()]),
        Commit(b"", [batch(0, 2, producer_id=0), offsets], IdempotencyKey("k", b"f", [2, 1])),
    ]
    decoded = encoded(state, Spec(40, [chunk(0)], commits))
    header, _ = encode_header(decoded.entry)
    principals = [""] if level > format_levels.FIRST else []
    assert msgspec.msgpack.decode(header[16:])[7] == [
        [b"", [["init-producer", -1, -1]], None, None, *principals],
        [
            b"",
            [
                ["append-of-producer", 0, 0, 2, 0, 0, 0],
                ["commit-offsets", "g", -1, [[IDS[0], 1, 7, -1, "m"]], ""],
            ],
            ["k", b"f", [2, 1]],
            None,
            *principals,
        ],
    ]
    state.apply(decoded, object_keys.wal(decoded.entry.seq))
    body = msgspec.msgpack.decode(state.encode())
    assert body[9:] == [
        [1, [[0, 0, -1, 40, 40]], [[0, IDS[0], 0, 0, [[0, 1, 0, 40]]]]],
        {"g": {IDS[0]: [[1, 7, -1, "m", 40]]}},
        *(
            [None, [], None, [40, [["b", 40, 40]]], BOUNDS, []]
            if level > format_levels.FIRST
            else []
        ),
        *([NO_OWNERS] if level > 2 else []),
        *([NO_KAFKA, {}] if level > 3 else []),
    ]
