"""The cluster state under any sequence of entries: offsets, atomicity, determinism (I2, I4, I7).

Entries are drawn at random, also such as no writer of ours would make: `apply` takes whatever
decodes, and what it takes is compared with the plainest model that there is.
"""

import contextlib
import copy
import random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Commit, DecodedEntry, Entry, HotMark, IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    AnyAction,
    Append,
    Chunk,
    CreateTopic,
    DeleteTopic,
    ForgetTopic,
    MoveLogStart,
    RetireHotLog,
    Sealed,
    SetTopicDefaults,
)
from tidelog.storage.core.errors import (
    Corrupt,
    IdempotencyMismatch,
    LogError,
    NewerLevel,
    UnknownTopic,
)
from tidelog.storage.state import idempotency_records
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.elapsed_time import STEP_MS_MAX
from tidelog.storage.state.idempotency_records import KEY_WINDOW_MS, recall
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.state.partition import Partition

IDS = [letter * 32 for letter in "abc"]
LOGS = ["hot-1", "hot-2"]
HOUR_MS = KEY_WINDOW_MS
"""Of the key window, and of the largest steps that time takes here."""


class Spec(NamedTuple):
    """An entry before it has a number."""

    at_ms: int
    chunks: list[Chunk]
    commits: list[Commit]


FIRST = Spec(
    0,
    [],
    [
        Commit(b"", [CreateTopic("alpha", IDS[0], 2, {})]),
        Commit(b"", [CreateTopic("beta", IDS[1], 1, configs={})]),
    ],
)
"""So that most of what follows has something to act on."""


class Dice(random.Random):
    """Draws histories: mostly such as brokers make, now and then what none would."""

    def rarely(self) -> bool:
        return self.random() < 0.08

    def chunk(self, number: int) -> Chunk:
        topic_id = self.choices(IDS, [6, 3, 1])[0]
        partition = 0 if topic_id != IDS[0] else self.choices(range(3), [8, 8, 1])[0]
        position, rows = number * 100, self.randrange(7)
        data = ""
        if self.random() < 0.3:  # what lies apart is the same whenever it is named
            data, position = "data/aa/aa01-9999999999999", self.randrange(3) * 100
            rows = 3 + position // 100
        return Chunk(topic_id, partition, position, 90, 1, rows, 0, 5, self.rarely(), "", 90, data)

    def append(self, chunks: list[Chunk]) -> Append:
        number = self.randrange(len(chunks))
        first = self.randrange(chunks[number].rows + 1)
        count = self.randint(1, max(chunks[number].rows - first, 1))
        if self.rarely():
            number, first, count = (self.randrange(-1, 7) for _ in range(3))
        return Append(number, first, count)

    def action(self, chunks: list[Chunk]) -> AnyAction:
        topic_id = self.choice([IDS[0], IDS[0], IDS[1], IDS[2]])
        partition = self.choice([0, 0, 1, 1, 2, -1])
        changes = {"segment.ms": self.choice([None, "1000", "soon"])}
        stamps = {"message.timestamp.type": "LogAppendTime"}
        match self.choices(range(11), [30, 12, 2, 0.4, 1, 1, 0.5, 0.5, 0.3, 1, 0.1])[0]:
            case 0:
                return self.append(chunks)
            case 1:
                return Sealed(topic_id, partition, self.choice([0, 1, 2, 3, 5, 9, 20]))
            case 2:
                name = self.choice(["alpha", "gamma", "bad name"])
                return CreateTopic(name, topic_id, self.randrange(4), self.choice([{}, stamps]))
            case 3:
                return DeleteTopic(topic_id)
            case 4:
                return AlterTopic(topic_id, self.choice([changes, stamps]))
            case 5:
                return AddPartitions(topic_id, self.randrange(5))
            case 6:
                return AlterTopic(topic_id, {"?": "1"})
            case 7:
                return RetireHotLog(self.choice(LOGS))
            case 8:
                return MoveLogStart(topic_id, partition, self.choice([0, 1, 2, 5, 9]))
            case 9:
                return SetTopicDefaults(
                    {
                        "log.roll.ms": self.choice([None, "2000", "soon"]),
                        "log.message.timestamp.type": self.choice(["LogAppendTime", None]),
                        self.choice(["num.partitions", "?"]): self.choice(["2", None]),
                    }
                )
            case _:
                return ForgetTopic(topic_id)

    def commit(self, chunks: list[Chunk]) -> Commit:
        key = hot = None
        if self.random() < 0.3:
            key = IdempotencyKey(self.choice("xyz"), self.choice([b"1", b"1", b"1", b"2"]), 2)
        if self.random() < 0.3:
            hot = HotMark(self.choice(LOGS), self.randrange(40))
        actions = [self.action(chunks) for _ in range(self.choice([0, 1, 1, 1, 1, 2, 3]))]
        return Commit(b"", actions, key, hot)

    def spec(self) -> Spec:
        at_ms = self.choice([0, 1, 1000, HOUR_MS // 2, HOUR_MS, 3 * HOUR_MS])
        chunks = [self.chunk(number) for number in range(self.randint(1, 3))]
        return Spec(at_ms, chunks, [self.commit(chunks) for _ in range(self.randrange(5))])

    def history(self) -> list[Spec]:
        return [FIRST, *(self.spec() for _ in range(self.randint(1, 25)))]


histories = st.integers(0, 2**32).map(lambda seed: Dice(seed).history())
random_histories = examples(200)


def encoded(state: ClusterState, spec: Spec) -> DecodedEntry:
    """The spec as the entry that comes next, through its bytes."""
    number = state.seq + 1
    entry = Entry(
        state.level, number, state.hash, b"id", "b", spec.at_ms, spec.chunks, spec.commits
    )
    header, _ = entries.encode_header(entry)
    return entries.decode(header, object_keys.wal(number), seq=number, previous=state.hash)


def applied(state: ClusterState, *specs: Spec) -> list[list[Outcome]]:
    outcomes = []
    for spec in specs:
        decoded = encoded(state, spec)
        outcomes.append(state.apply(decoded, object_keys.wal(decoded.entry.seq)).outcomes)
    return outcomes


def check_partition(partition: Partition) -> None:
    """I2: dense, in order, nothing of [sealed_end, high_watermark) missing, nothing else kept."""
    assert 0 <= max(partition.log_start_offset, partition.sealed_end) <= partition.high_watermark
    offset = partition.tail[0].base_offset if partition.tail else partition.sealed_end
    assert offset <= partition.sealed_end
    for run in partition.tail:
        assert run.base_offset == offset
        assert run.count > 0
        assert run.end_offset > partition.sealed_end
        assert 0 <= run.first_row <= run.first_row + run.count <= run.rows
        offset = run.end_offset
    assert offset == partition.high_watermark
    # Shares of a chunk are rounded down one by one, so a joined run may weigh a little more.
    assert 0 <= partition.tail_bytes <= sum(run.bytes for run in partition.tail)


def row_of(partition: Partition, offset: int) -> tuple[str, int, int]:
    """Where the record lies: object, position of its chunk, row."""
    run = partition.tail[partition.tail_index(offset)]
    assert run.base_offset <= offset < run.end_offset
    return run.object_key, run.position, run.first_row + offset - run.base_offset


@given(histories)
@random_histories
def test_i2_offsets_are_dense_and_the_tail_is_whole(history: list[Spec]) -> None:
    state = ClusterState("c")
    records: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
    for spec in history:
        decoded = encoded(state, spec)
        key = object_keys.wal(decoded.entry.seq)
        for commit, outcome in zip(spec.commits, state.apply(decoded, key).outcomes, strict=True):
            append_actions = [action for action in commit.actions if isinstance(action, Append)]
            if outcome.refusal is not None or outcome.is_duplicate:
                continue
            for append, placement in zip(append_actions, outcome.placements, strict=True):
                chunk = spec.chunks[append.chunk]
                places = records.setdefault((chunk.topic_id, chunk.partition), [])
                assert placement.base_offset == len(places)
                assert placement.count == append.count
                position = chunk.position + (0 if chunk.data else decoded.body_start)
                first = append.first_row
                places += [
                    (chunk.data or key, position, row) for row in range(first, first + append.count)
                ]
            # A topic that is created again under an old id would start at offset zero.
            for action in commit.actions:
                if isinstance(action, DeleteTopic):
                    records = {
                        topic_partition: rows
                        for topic_partition, rows in records.items()
                        if topic_partition[0] != action.topic_id
                    }
        for topic, number, partition in state.partitions():
            check_partition(partition)
            places = records.get((topic.topic_id, number), [])
            assert partition.high_watermark == len(places)
            for offset in range(partition.sealed_end, partition.high_watermark):
                assert row_of(partition, offset) == places[offset]


def test_the_histories_are_worth_their_while() -> None:
    appends = apart = seals = refusals = inside_a_run = 0
    for seed in range(200):
        state = ClusterState("c")
        for spec in Dice(seed).history():
            (outcomes,) = applied(state, spec)
            for commit, outcome in zip(spec.commits, outcomes, strict=True):
                refusals += outcome.refusal is not None
                if outcome.refusal is None and not outcome.is_duplicate:
                    chunk_numbers = [
                        action.chunk for action in commit.actions if isinstance(action, Append)
                    ]
                    appends += len(chunk_numbers)
                    apart += sum(spec.chunks[number].data != "" for number in chunk_numbers)
                    seals += any(isinstance(action, Sealed) for action in commit.actions)
            for _, _, partition in state.partitions():
                inside_a_run += (
                    bool(partition.tail) and partition.tail[0].base_offset < partition.sealed_end
                )
    assert min(appends, refusals) > 1000
    assert min(apart, seals, inside_a_run) > 50


@given(histories, st.data())
@random_histories
def test_i4_every_fold_gives_the_same_bytes(history: list[Spec], data: st.DataObject) -> None:
    """Two brokers, one of which restarts from a checkpoint now and then."""
    first, second = ClusterState("c"), ClusterState("c")
    restarts = data.draw(st.sets(st.integers(0, len(history))))
    for number, spec in enumerate(history):
        decoded = encoded(first, spec)
        key = object_keys.wal(decoded.entry.seq)
        outcomes = first.apply(decoded, key).outcomes
        again = second.apply(encoded(second, spec), key).outcomes
        assert [str(outcome) for outcome in outcomes] == [str(outcome) for outcome in again]
        assert first.encode() == second.encode()
        if number in restarts:
            body = second.encode()
            second = ClusterState.decode(body, "checkpoints/x")
            assert second.encode() == body
            for topic in second.topics.values():
                assert topic.config == first.topic(topic.name).config
                assert second.topic_of_id(topic.topic_id) is topic


@given(histories)
@random_histories
def test_i4_a_refused_commit_changes_nothing(history: list[Spec]) -> None:
    """A fold without the commits that were refused, or had been before, is the same to the byte."""
    state, clean = ClusterState("c"), ClusterState("c")
    for spec in history:
        decoded = encoded(state, spec)
        key = object_keys.wal(decoded.entry.seq)
        outcomes = state.apply(decoded, key).outcomes
        commits = []
        for commit, outcome in zip(spec.commits, outcomes, strict=True):
            assert outcome.refusal is None or isinstance(outcome.refusal, LogError)
            if outcome.refusal is None and not outcome.is_duplicate:
                commits.append(commit)
            else:
                assert outcome.is_duplicate or not outcome.placements
                # Its mark is spent all the same: a recovery must not bring it up again.
                commits.append(Commit(b"", [], hot=commit.hot))
        entry = decoded.entry
        entry = Entry(
            entry.level, entry.seq, clean.hash, b"id", "b", spec.at_ms, spec.chunks, commits
        )
        clean.apply(DecodedEntry(entry, decoded.hash, decoded.body_start), key)
        assert clean.encode() == state.encode()


@given(histories)
@random_histories
def test_i4_a_hot_mark_is_applied_once(history: list[Spec]) -> None:
    state = ClusterState("c")
    newest: dict[str, int] = {}
    for spec in history:
        for commit, outcome in zip(spec.commits, applied(state, spec)[0], strict=True):
            mark = commit.hot
            if mark is not None:
                if mark.seq <= newest.get(mark.log_id, -1):
                    assert outcome == Outcome([], is_duplicate=True)
                    continue
                newest[mark.log_id] = mark.seq
            if outcome.refusal is None and not outcome.is_duplicate:
                for action in commit.actions:
                    if isinstance(action, RetireHotLog):
                        newest.pop(action.log_id, None)
        assert state.hot_logs == newest


@given(histories)
@random_histories
def test_key_is_answered_alike_for_an_elapsed_hour(history: list[Spec]) -> None:
    state = ClusterState("c")
    answer_by_key: dict[str, tuple[int, bytes, Outcome]] = {}
    clock_ms = now_ms = 0
    for drawn in history:
        spec = drawn._replace(
            commits=[msgspec.structs.replace(commit, hot=None) for commit in drawn.commits]
        )
        now_ms += min(max(spec.at_ms - clock_ms, 0), STEP_MS_MAX)
        clock_ms = spec.at_ms
        answer_by_key = {k: v for k, v in answer_by_key.items() if v[0] >= now_ms - KEY_WINDOW_MS}
        for commit, outcome in zip(spec.commits, applied(state, spec)[0], strict=True):
            if commit.key is None:
                continue
            first = answer_by_key.get(commit.key.key)
            if first is None:
                assert not outcome.is_duplicate
                if outcome.refusal is None:
                    answer_by_key[commit.key.key] = (now_ms, commit.key.fingerprint, outcome)
            elif first[1] == commit.key.fingerprint:
                assert outcome == Outcome(first[2].placements, is_duplicate=True)
            else:
                assert isinstance(outcome.refusal, IdempotencyMismatch)
        for key in "xyz":
            remembered = state.idempotency_record(key)
            assert (remembered is not None) == (key in answer_by_key)
            if remembered is not None:
                assert (
                    recall(remembered, answer_by_key[key][1]).placements
                    == answer_by_key[key][2].placements
                )


# -- single cases


def chunk(rows: int = 10, *, partition: int = 0, position: int = 0, topic_id: str = IDS[0]):
    return Chunk(topic_id, partition, position, rows * 10, 1, rows, 0, 9, False, "", rows * 10)


def appending(*ranges: tuple[int, int, int], at_ms: int = 0, chunks: list[Chunk]) -> Spec:
    """One commit of several appends."""
    return Spec(at_ms, chunks, [Commit(b"", [Append(*append_range) for append_range in ranges])])


def with_records(*counts: int) -> ClusterState:
    """`alpha`-0 with a run of each count."""
    state = ClusterState("c")
    applied(state, FIRST, *(appending((0, 0, n), chunks=[chunk(n)]) for n in counts))
    return state


@pytest.mark.parametrize("end_offset", range(13))
def test_i7_sealing_trims_whole_runs_and_keeps_the_one_it_ends_in(end_offset: int) -> None:
    state = with_records(4, 1, 7)
    partition = state.partition("alpha", 0)
    applied(state, Spec(0, [], [Commit(b"", [Sealed(IDS[0], 0, end_offset)])]))
    check_partition(partition)
    assert partition.sealed_end == end_offset
    assert partition.high_watermark == 12
    assert len(partition.tail) == sum(end > end_offset for end in (4, 5, 12))
    # A seal that is repeated, or an older one that comes late, changes nothing.
    old_partition = ClusterState.decode(state.encode(), "x").partition("alpha", 0)
    applied(state, Spec(0, [], [Commit(b"", [Sealed(IDS[0], 0, end_offset)])]))
    applied(state, Spec(0, [], [Commit(b"", [Sealed(IDS[0], 0, end_offset // 2)])]))
    assert partition == old_partition
    applied(state, appending((0, 0, 3), chunks=[chunk(3)]))
    check_partition(partition)
    assert partition.high_watermark == 15


def test_i2_a_seal_beyond_the_high_watermark_is_refused() -> None:
    state = with_records(4)
    ((outcome,),) = applied(state, Spec(0, [], [Commit(b"", [Sealed(IDS[0], 0, 5)])]))
    assert outcome.refusal is not None
    assert state.partition("alpha", 0).sealed_end == 0


def test_neighbours_of_one_chunk_are_one_run() -> None:
    state = ClusterState("c")
    commits = [Commit(b"", [Append(0, first, 2)]) for first in (0, 2, 4)]
    commits.append(Commit(b"", [Append(0, 8, 2)]))
    applied(state, FIRST, Spec(0, [chunk(10)], commits))
    partition = state.partition("alpha", 0)
    assert [(run.base_offset, run.first_row, run.count) for run in partition.tail] == [
        (0, 0, 6),
        (6, 8, 2),
    ]


def test_i4_one_bad_action_undoes_its_commit_and_no_other() -> None:
    state = with_records(4)
    old_end = state.partition("alpha", 0).high_watermark
    good = Commit(b"", [Append(0, 0, 2)])
    bad = Commit(
        b"",
        [Append(0, 2, 2), AlterTopic(IDS[1], {"segment.ms": "500"}), Append(1, 0, 1)],
        IdempotencyKey("k", b"f"),
        HotMark("hot-1", 3),
    )
    spec = Spec(0, [chunk(4), chunk(1, topic_id=IDS[2])], [good, bad, good])
    ((first, refused, second),) = applied(state, spec)
    assert [outcome.placements[0].base_offset for outcome in (first, second)] == [
        old_end,
        old_end + 2,
    ]
    assert isinstance(refused.refusal, UnknownTopic)
    assert state.topic("beta").configs == {}
    assert state.idempotency_record("k") is None
    assert state.hot_logs == {"hot-1": 3}  # spent, though: a recovery does not bring it up again


@pytest.mark.parametrize(
    "poison",
    [
        [DeleteTopic(IDS[0]), Append(0, 0, 1)],
        [DeleteTopic(IDS[0]), DeleteTopic(IDS[0])],
        [DeleteTopic(IDS[0]), AlterTopic(IDS[0], {})],
        [DeleteTopic(IDS[0]), AddPartitions(IDS[0], 9)],
        [DeleteTopic(IDS[0]), Sealed(IDS[0], 0, 1)],
        [CreateTopic("new", "d" * 32, 1, {}), CreateTopic("new", "e" * 32, 1, {})],
        [CreateTopic("new", "d" * 32, 1, {}), CreateTopic("newer", "d" * 32, 1, {})],
    ],
    ids=repr,
)
def test_i4_a_commit_whose_actions_hinder_each_other_is_refused_whole(poison) -> None:
    """Were it to fail in the middle, no broker could ever get past its entry."""
    state = with_records(4)
    seq, old_topics = state.seq, [copy.deepcopy(topic) for topic in state.topics.values()]
    ((outcome,),) = applied(state, Spec(0, [chunk(1)], [Commit(b"", poison)]))
    assert outcome.refusal is not None
    assert state.seq == seq + 1
    assert list(state.topics.values()) == old_topics


def test_log_append_time_is_the_entrys() -> None:
    state = with_records(1)
    log_append = {"message.timestamp.type": "LogAppendTime"}
    applied(
        state,
        Spec(50, [], [Commit(b"", [AlterTopic(IDS[0], log_append)])]),
        appending((0, 0, 1), at_ms=60, chunks=[chunk(1)]),
        Spec(70, [], [Commit(b"", [AlterTopic(IDS[0], {"message.timestamp.type": None})])]),
        appending((0, 0, 1), at_ms=80, chunks=[chunk(1)]),
    )
    assert [run.append_ms for run in state.partition("alpha", 0).tail] == [-1, 60, -1]


def test_i10_below_level_3_too_many_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_records, "KEYS_MAX", 5)
    state = ClusterState("c", 2)
    applied(state, FIRST)
    for i in range(20):
        commit = Commit(b"", [Append(0, 0, 1)], IdempotencyKey(str(i), b"f"))
        applied(state, Spec(i, [chunk(1)], [commit]))
    applied(state, Spec(20, [], []))
    assert [i for i in range(20) if state.idempotency_record(str(i))] == list(range(15, 20))


@given(st.binary(max_size=300))
@examples(200)
def test_noise_is_no_checkpoint(noise: bytes) -> None:
    with pytest.raises((Corrupt, NewerLevel), match="checkpoints/7"):
        ClusterState.decode(noise, "checkpoints/7")


def test_a_damaged_checkpoint_is_corrupt_or_still_a_checkpoint() -> None:
    """Its checksum is the WAL's business: here, any damage gives Corrupt, or another level."""
    state = with_records(3, 4)
    applied(
        state,
        Spec(
            0,
            [chunk(1)],
            [Commit(b"", [Append(0, 0, 1)], IdempotencyKey("k", b"f"), HotMark("h", 2))],
        ),
    )
    body = state.encode()
    for length in range(len(body)):
        with pytest.raises(Corrupt):
            ClusterState.decode(body[:length], "checkpoints/7")
    for position in range(len(body)):
        damaged = bytearray(body)
        damaged[position] ^= 0x41
        with contextlib.suppress(Corrupt, NewerLevel):
            ClusterState.decode(bytes(damaged), "checkpoints/7")


def test_a_log_start_moves_up_to_the_high_watermark_and_never_back() -> None:
    state = ClusterState("c")
    six = Chunk(IDS[0], 0, 0, 90, 1, 6, 0, 5, False, "", 90)
    applied(state, FIRST, Spec(0, [six], [Commit(b"", [Append(0, 0, 6)])]))
    partition_state = state.partition("alpha", 0)
    for offset, expected in ((2, 2), (6, 6), (1, 6), (7, 6)):
        action = MoveLogStart(IDS[0], 0, offset)
        ((outcome,),) = applied(state, Spec(0, [], [Commit(b"", [action])]))
        assert (outcome.refusal is None) is (offset <= 6)
        assert partition_state.log_start_offset == expected
    assert (
        partition_state.sealed_end,
        partition_state.high_watermark,
        len(partition_state.tail),
    ) == (0, 6, 1)
    for topic_id, partition in ((IDS[0], 2), (IDS[2], 0)):
        action = MoveLogStart(topic_id, partition, 0)
        ((outcome,),) = applied(state, Spec(0, [], [Commit(b"", [action])]))
        assert outcome.refusal is not None
    assert ClusterState.decode(state.encode(), "x").partition("alpha", 0) == partition_state


def test_a_tombstone_is_dropped_by_its_action() -> None:
    state = ClusterState("c")
    applied(state, FIRST, Spec(5, [], [Commit(b"", [DeleteTopic(IDS[0])])]))
    for topic_id, tombstone_count in ((IDS[1], 1), (IDS[0], 0), (IDS[0], 0)):
        ((outcome,),) = applied(state, Spec(5, [], [Commit(b"", [ForgetTopic(topic_id)])]))
        assert outcome.refusal is None
        assert len(state.deleted) == tombstone_count
    assert list(state.topics) == ["beta"]


def test_a_topic_created_again_is_another_topic() -> None:
    state = with_records(4)
    applied(
        state,
        Spec(5, [], [Commit(b"", [DeleteTopic(IDS[0])])]),
        Spec(6, [], [Commit(b"", [CreateTopic("alpha", IDS[2], 1, {})])]),
    )
    assert state.partition("alpha", 0).high_watermark == 0
    ((outcome,),) = applied(state, appending((0, 0, 1), chunks=[chunk(1)]))
    assert isinstance(outcome.refusal, UnknownTopic)
    assert [
        (deleted_topic.topic_id, deleted_topic.deleted_ms) for deleted_topic in state.deleted
    ] == [(IDS[0], 5)]
    assert ClusterState.decode(state.encode(), "x").encode() == state.encode()
