"""The cluster's elapsed time: no clock moves it far, none moves it back, all agree on it (I4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import (
    FIRST,
    IDS,
    Spec,
    appending,
    applied,
    chunk,
    encoded,
    with_records,
)
from tests.storage.state.test_levels import raising
from tests.support.elapsed import elapse
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit, IdempotencyKey
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import Append
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.state import elapsed_time
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.elapsed_time import STEP_MS_MAX, ElapsedTime
from tidelog.storage.state.idempotency_records import KEY_WINDOW_MS

YEAR_MS = 365 * 86_400_000


def seen(*entries: tuple[str, int]) -> ElapsedTime:
    time = ElapsedTime()
    for writer, at_ms in entries:
        time.see(writer, at_ms)
    return time


@pytest.mark.parametrize(
    ("clock", "now_ms"),
    [
        ([5000], 0),  # a writer's first entry adds nothing
        ([5000, 5700], 700),
        ([5000, 5000], 0),
        ([5000, 100, 300], 200),  # back: it goes on from there
        ([5000, 5000 + YEAR_MS], STEP_MS_MAX),
        ([0, YEAR_MS, 0, YEAR_MS], 2 * STEP_MS_MAX),  # to and fro
        ([0, STEP_MS_MAX, 2 * STEP_MS_MAX + 1], 2 * STEP_MS_MAX),
        ([-YEAR_MS, 0], STEP_MS_MAX),
    ],
)
def test_clock_of_writer_adds_passed_time_within_step(clock: list[int], now_ms: int) -> None:
    assert seen(*(("a", at_ms) for at_ms in clock)).now_ms == now_ms


def test_the_time_of_two_writers_is_not_added_up() -> None:
    time = seen(("a", 0), ("b", YEAR_MS))
    for second in range(1, 100):
        time.see("a", second * 1000)
        time.see("b", YEAR_MS + second * 1000)
        assert time.now_ms == second * 1000


def test_a_writer_whose_clock_stands_still_or_that_is_new_holds_nobody_up() -> None:
    time = seen(("a", 0), ("still", 7))
    for second in range(1, 100):
        time.see("still", 7)
        time.see(f"new {second}", second * YEAR_MS)
        time.see("a", second * 1000)
        assert time.now_ms == second * 1000


def test_a_clock_that_was_corrected_counts_at_once() -> None:
    time = seen(("a", 0), ("a", YEAR_MS), ("a", 1000), ("a", 3000))
    assert time.now_ms == STEP_MS_MAX + 2000


def test_i10_the_longest_silent_writers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elapsed_time, "WRITERS_MAX", 3)
    time = seen(("a", 0), ("b", 0), ("c", 0), ("a", 10), ("d", 0))
    assert [clock.writer for clock in time.kept().writers] == ["c", "a", "d"]
    time.see("b", YEAR_MS)  # new again: it adds nothing
    assert time.now_ms == 10
    time.see("a", 30)
    assert time.now_ms == 30


clocks = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 999, STEP_MS_MAX, YEAR_MS])),
    max_size=40,
)


@given(clocks, st.integers(0, 40))
@examples(200)
def test_elapsed_time_moves_forward_in_steps(entries: list[tuple[str, int]], restart: int) -> None:
    first, second = ElapsedTime(), ElapsedTime()
    for number, (writer, at_ms) in enumerate(entries):
        if number == restart:
            checkpoint = msgspec.msgpack.encode(second.kept())
            second = ElapsedTime()
            second.load(msgspec.msgpack.decode(checkpoint, type=elapsed_time.ElapsedCheckpoint))
        before_ms = first.now_ms
        first.see(writer, at_ms)
        second.see(writer, at_ms)
        assert before_ms <= first.now_ms <= before_ms + STEP_MS_MAX
        assert first.kept() == second.kept()


# -- in the cluster state


def keyed(at_ms: int) -> Spec:
    return Spec(at_ms, [chunk(1)], [Commit(b"", [Append(0, 0, 1)], IdempotencyKey("k", b"f"))])


def is_known(state: ClusterState) -> bool:
    return state.idempotency_record("k") is not None


def test_what_is_remembered_is_forgotten_by_it_and_by_no_jump() -> None:
    state = ClusterState("c")
    applied(state, FIRST, keyed(1000))
    applied(state, Spec(YEAR_MS, [], []))
    assert is_known(state)
    assert state.elapsed_ms == 1000 + STEP_MS_MAX
    applied(state, Spec(1000, [], []))  # the clock is right again
    applied(state, Spec(2000, [], []))
    for at_ms in range(2000, KEY_WINDOW_MS - STEP_MS_MAX, STEP_MS_MAX):
        applied(state, Spec(at_ms, [], []))
        assert is_known(state)
    applied(state, Spec(KEY_WINDOW_MS, [], []), Spec(KEY_WINDOW_MS + 2000, [], []))
    assert not is_known(state)


def test_at_level_1_a_jump_forgets_as_version_0_1_does() -> None:
    state = ClusterState("c", format_levels.FIRST)
    applied(state, FIRST, keyed(1000), Spec(YEAR_MS, [], []))
    assert state.elapsed_ms == state.time_ms == YEAR_MS
    assert not is_known(state)


def test_a_cluster_that_is_raised_goes_on_from_its_time() -> None:
    state = ClusterState("c", format_levels.FIRST)
    applied(state, FIRST._replace(at_ms=YEAR_MS), keyed(YEAR_MS + 5))
    state.apply(raising(state, 2, at_ms=YEAR_MS + 9), object_keys.wal(3))
    assert (state.elapsed_ms, is_known(state)) == (YEAR_MS + 5, True)
    # "b" wrote the entry that raised the level; its clock counts from that entry on.
    writer_ms = YEAR_MS + 9
    for at_ms in range(writer_ms, writer_ms + KEY_WINDOW_MS, STEP_MS_MAX):
        applied(state, Spec(at_ms, [], []))
        assert is_known(state)
    applied(state, Spec(writer_ms + KEY_WINDOW_MS, [], []))
    assert is_known(state)
    applied(state, Spec(writer_ms + KEY_WINDOW_MS + 1, [], []))
    assert not is_known(state)


@pytest.mark.parametrize(("level", "stamps"), [(format_levels.FIRST, [9000] * 2), (2, [9000, 10])])
def test_elapsed_time_never_goes_back(level: int, stamps: list[int]) -> None:
    state = ClusterState("c", level)
    applied(state, FIRST)
    for at_ms in (9000, 10):
        applied(state, appending((0, 0, 1), at_ms=at_ms, chunks=[chunk(1)]))
        assert state.elapsed_ms == 9000
    assert [run.committed_ms for run in state.partition("alpha", 0).tail] == stamps


@pytest.mark.parametrize(
    ("at_ms", "store_ms", "stamp_ms"),
    [
        (10**12, 0, 10**12),  # no time of the store: the writer's counts
        (10**12 + 7, 10**12, 10**12 + 7),
        (10**15, 10**12, 10**12 + SKEW_MS_MAX),
        (0, 10**12, 10**12 - SKEW_MS_MAX),
    ],
)
def test_store_time_bounds_time_of_entry(at_ms: int, store_ms: int, stamp_ms: int) -> None:
    state = with_records()
    decoded = encoded(state, appending((0, 0, 1), at_ms=at_ms, chunks=[chunk(1)]))
    entry = msgspec.structs.replace(decoded.entry, store_ms=store_ms)
    state.apply(decoded._replace(entry=entry), object_keys.wal(entry.seq))
    assert state.time_ms == stamp_ms
    assert [run.committed_ms for run in state.partition("alpha", 0).tail] == [stamp_ms]


def test_tests_step_as_far_as_they_say() -> None:
    state = ClusterState("c")
    applied(state, FIRST)
    at_ms = elapse(state, 10 * STEP_MS_MAX + 5)
    assert state.elapsed_ms == 10 * STEP_MS_MAX
    applied(state, Spec(at_ms, [], []))
    assert state.elapsed_ms == at_ms == elapse(state, 0)
    assert IDS[0] in {topic.topic_id for topic in state.topics.values()}


@pytest.mark.parametrize("wrong", [None, [], [0], [0, [["a", 0]]], [0, [], 1], ["x", []]])
def test_a_checkpoint_of_level_2_without_it_is_corrupt(wrong: object) -> None:
    raw = msgspec.msgpack.decode(ClusterState("c").encode())
    raw[14] = wrong
    with pytest.raises(Corrupt):
        ClusterState.decode(msgspec.msgpack.encode(raw), "checkpoints/7")


def test_a_checkpoint_of_level_1_with_it_is_corrupt() -> None:
    raw = msgspec.msgpack.decode(ClusterState("c", format_levels.FIRST).encode())
    raw += [None, None, None, [], None, [0, []], None]
    with pytest.raises(Corrupt, match="or has one of them at level 1"):
        ClusterState.decode(msgspec.msgpack.encode(raw), "checkpoints/7")
