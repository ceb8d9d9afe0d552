"""Changes of the cluster's bounds: raised at once, lowered when no process relies on them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import FIRST, IDS, Spec, applied
from tests.support.elapsed import elapse
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.actions import AnyAction, DeleteTopic, SetBounds
from tidelog.storage.core.errors import Corrupt, InvalidRequest
from tidelog.storage.core.time_bounds import LEAST, MOST, RETENTION_FACTOR_MIN, Bounds
from tidelog.storage.state.cluster_state import ClusterState, Outcome
from tidelog.storage.state.elapsed_time import STEP_MS_MAX
from tidelog.storage.state.time_bounds_in_effect import WAITING, ClusterBounds

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SHORT = Bounds(1000, 4000, 0)


def state_of(first: Bounds = Bounds()) -> ClusterState:  # noqa: B008 - immutable
    state = ClusterState("c", bounds=first)
    applied(state, FIRST)
    return state


def done(state: ClusterState, *actions: AnyAction, at_ms: int = 0) -> Outcome:
    at_ms = elapse(state, at_ms)
    ((outcome,),) = applied(state, Spec(at_ms, [], [Commit(b"", list(actions))]))
    body = state.encode()
    again = ClusterState.decode(body, "x")
    assert (again.encode(), again.bounds.now) == (body, state.bounds.now)
    return outcome


def test_a_raised_bound_is_in_effect_at_once() -> None:
    state = state_of()
    assert done(state, SetBounds(20 * 60_000, 2 * HOUR_MS, 2 * DAY_MS)).refusal is None
    assert state.bounds.now == Bounds(20 * 60_000, 2 * HOUR_MS, 2 * DAY_MS)
    assert state.bounds.due_ms == {}


def test_what_is_not_named_stays() -> None:
    state = state_of()
    done(state, SetBounds(file_grace_ms=2 * DAY_MS))
    done(state, SetBounds(view_age_ms=70_000))
    assert state.bounds.now == Bounds(70_000, HOUR_MS, 2 * DAY_MS)


def test_a_lowered_bound_waits_until_the_old_one_and_a_step_have_passed() -> None:
    state = state_of(Bounds(60_000, 4 * HOUR_MS, DAY_MS))
    done(state, SetBounds(wal_retention_ms=2 * HOUR_MS, file_grace_ms=HOUR_MS), at_ms=1000)
    for name, old_ms, new_ms in (
        ("wal_retention_ms", 4 * HOUR_MS, 2 * HOUR_MS),
        ("file_grace_ms", DAY_MS, HOUR_MS),
    ):
        due_ms = 1000 + old_ms + STEP_MS_MAX
        assert state.bounds.due_ms[name] == due_ms
        done(state, at_ms=due_ms - 1)
        assert getattr(state.bounds.now, name) == old_ms
        done(state, at_ms=due_ms)
        assert getattr(state.bounds.now, name) == new_ms
    assert state.bounds.now == state.bounds.set_to == Bounds(60_000, 2 * HOUR_MS, HOUR_MS)


def test_a_clock_that_jumps_lowers_nothing() -> None:
    state = state_of(Bounds(60_000, 4 * HOUR_MS, DAY_MS))
    done(state, SetBounds(wal_retention_ms=HOUR_MS))
    applied(state, Spec(1000 * DAY_MS, [], []), Spec(0, [], []), Spec(1000 * DAY_MS, [], []))
    assert state.bounds.now.wal_retention_ms == 4 * HOUR_MS


def test_a_second_change_begins_the_wait_again_or_ends_it() -> None:
    state = state_of(Bounds(60_000, 4 * HOUR_MS, DAY_MS))
    done(state, SetBounds(wal_retention_ms=HOUR_MS))
    done(state, SetBounds(wal_retention_ms=2 * HOUR_MS), at_ms=3 * HOUR_MS)
    done(state, at_ms=5 * HOUR_MS)
    assert state.bounds.now.wal_retention_ms == 4 * HOUR_MS
    done(state, SetBounds(wal_retention_ms=4 * HOUR_MS))
    assert state.bounds.due_ms == {}
    done(state, at_ms=20 * HOUR_MS)
    assert state.bounds.now.wal_retention_ms == 4 * HOUR_MS


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (SetBounds(view_age_ms=59_999), "view_age_ms must be 60000 to 648000000, not 59999"),
        (SetBounds(wal_retention_ms=3_599_999), "wal_retention_ms must be 3600000 to"),
        (SetBounds(file_grace_ms=3_599_999), "file_grace_ms must be 3600000 to 518400000"),
        (SetBounds(view_age_ms=HOUR_MS), "at least 4 times the age"),
        (SetBounds(file_grace_ms=MOST.file_grace_ms + 1), "file_grace_ms must be"),
        (SetBounds(wal_retention_ms=2**63), "wal_retention_ms must be"),
        (SetBounds(view_age_ms=-(2**62)), "view_age_ms must be"),
    ],
)
def test_unsafe_bounds_are_refused(change: SetBounds, why: str) -> None:
    state = state_of()
    old_bounds = state.bounds.kept()
    outcome = done(state, change)
    assert isinstance(outcome.refusal, InvalidRequest)
    assert why in str(outcome.refusal)
    assert state.bounds.kept() == old_bounds


def test_only_a_cluster_that_began_with_short_ones_may_have_short_ones() -> None:
    state = state_of(SHORT)
    assert done(state, SetBounds(2000, 8000, 5)).refusal is None
    assert done(state, SetBounds(*msgspec.structs.astuple(LEAST))).refusal is None
    assert done(state, SetBounds(1, 4, 0)).refusal is None
    assert "at least 4 times" in str(done(state, SetBounds(1, 3, 0)).refusal)
    assert "at least 4 times" in str(done(state, SetBounds(0, 0, 0)).refusal)


def test_it_is_alone_in_its_commit() -> None:
    """Each action is checked against the state before the commit: two may be unsafe together."""
    state = state_of()
    for other in (DeleteTopic(IDS[0]), SetBounds(wal_retention_ms=HOUR_MS)):
        outcome = done(state, SetBounds(HOUR_MS, 4 * HOUR_MS), other)
        assert "set-bounds has no other action" in str(outcome.refusal)
    assert state.bounds.now == Bounds()


@pytest.mark.parametrize("wrong", [None, [], [False, [1, 2], [1, 2, 3], [0, 0]], [0, 0, 0, 0]])
def test_a_checkpoint_of_level_2_without_them_is_corrupt(wrong: object) -> None:
    raw = msgspec.msgpack.decode(ClusterState("c").encode())
    raw[15] = wrong
    with pytest.raises(Corrupt):
        ClusterState.decode(msgspec.msgpack.encode(raw), "checkpoints/7")


changes = st.lists(
    st.tuples(
        st.integers(0, 100_000),
        st.builds(
            SetBounds,
            st.none() | st.integers(1, 5000),
            st.none() | st.integers(4, 20_000),
            st.none() | st.integers(0, 20_000),
        ),
    ),
    max_size=12,
)


@given(changes)
@examples(300)
def test_no_history_of_changes_is_unsafe(history: list[tuple[int, SetBounds]]) -> None:
    """At each time the retention is four view ages.

    Objects are kept for as long as at any time within the old bound before.
    """
    bounds, elapsed_ms = ClusterBounds(SHORT), 0
    past: list[tuple[int, Bounds]] = [(0, SHORT)]
    for passed_ms, change in history:
        elapsed_ms += passed_ms
        bounds.settle(elapsed_ms)
        past.append((elapsed_ms, bounds.now))
        if bounds.check(change) is None:
            bounds.set(change, elapsed_ms)
            past.append((elapsed_ms, bounds.now))
        assert bounds.now.wal_retention_ms >= RETENTION_FACTOR_MIN * bounds.now.view_age_ms
        for name in WAITING:
            now = getattr(bounds.now, name)
            assert now >= getattr(bounds.set_to, name)
            assert all(
                now >= getattr(past_bounds, name)
                for at_ms, past_bounds in past
                if at_ms + getattr(past_bounds, name) > elapsed_ms
            )
    bounds.settle(elapsed_ms + 10 * STEP_MS_MAX)
    assert bounds.now == bounds.set_to
