"""Holds in the cluster state: bounds, renewal, expiry by elapsed time, checkpoints, level 1."""

import msgspec
import pytest

from tests.storage.state.test_access import apply
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import GENESIS, Commit, Entry
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import AnyAction, ReleaseHold, RenewHold, RetireHotLog, TakeHold
from tidelog.storage.core.errors import Corrupt, InvalidRequest
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.collection_holds import HOLD_ID_CHARS_MAX, HOLD_MS_MAX, HOLDS_MAX

MINUTE_MS = 60_000


def refused(state: ClusterState, action: AnyAction, at_ms: int = 1000) -> bool:
    (outcome,) = apply(state, [action], at_ms=at_ms)
    assert outcome.refusal is None or isinstance(outcome.refusal, InvalidRequest)
    return outcome.refusal is not None


def held(state: ClusterState) -> list[str]:
    return [hold.hold_id for hold in state.holds]


def test_a_hold_ends_by_elapsed_time_and_not_before() -> None:
    state = ClusterState("c")
    assert not refused(state, TakeHold("a", MINUTE_MS), at_ms=1000)
    apply(state, [], at_ms=1000 + MINUTE_MS - 1)
    assert held(state) == ["a"]
    apply(state, [], at_ms=1000 + MINUTE_MS)
    assert held(state) == []
    assert refused(state, RenewHold("a", MINUTE_MS), at_ms=1000 + MINUTE_MS)


def test_a_renewal_begins_the_duration_again() -> None:
    state = ClusterState("c")
    assert not refused(state, TakeHold("a", MINUTE_MS), at_ms=0)
    for at_ms in range(MINUTE_MS // 2, 10 * MINUTE_MS, MINUTE_MS // 2):
        assert not refused(state, RenewHold("a", MINUTE_MS), at_ms=at_ms)
    (hold,) = state.holds
    assert hold.taken_ms == 0
    assert not refused(state, ReleaseHold("a"))
    assert not refused(state, ReleaseHold("a"))
    assert held(state) == []
    assert refused(state, RenewHold("a", MINUTE_MS))


@pytest.mark.parametrize(
    ("actions", "is_refused", "hold_ids"),
    [
        ([ReleaseHold("a"), RenewHold("a", MINUTE_MS)], True, ["a"]),
        ([ReleaseHold("a"), RetireHotLog("l"), RenewHold("a", MINUTE_MS)], True, ["a"]),
        ([RenewHold("a", MINUTE_MS), ReleaseHold("a")], False, []),
        ([ReleaseHold("b"), RenewHold("a", MINUTE_MS)], False, ["a"]),
        ([ReleaseHold("a"), TakeHold("b", MINUTE_MS)], False, ["b"]),
    ],
)
def test_renew_after_release(
    actions: list[AnyAction], is_refused: bool, hold_ids: list[str]
) -> None:
    state = ClusterState("c")
    assert not refused(state, TakeHold("a", MINUTE_MS))
    (outcome,) = apply(state, actions)
    assert isinstance(outcome.refusal, InvalidRequest) == is_refused
    assert held(state) == hold_ids


def test_a_hold_has_bounds() -> None:
    state = ClusterState("c")
    for wrong in (0, -1, HOLD_MS_MAX + 1):
        assert refused(state, TakeHold("a", wrong))
    assert refused(state, TakeHold("", 1))
    assert refused(state, TakeHold("x" * (HOLD_ID_CHARS_MAX + 1), 1))
    for number in range(HOLDS_MAX):
        assert not refused(state, TakeHold(f"h{number}", HOLD_MS_MAX))
    assert refused(state, TakeHold("h0", HOLD_MS_MAX))
    assert refused(state, TakeHold("one more", HOLD_MS_MAX))
    assert refused(state, RenewHold("h0", HOLD_MS_MAX + 1))
    assert not refused(state, ReleaseHold("h0"))
    assert not refused(state, TakeHold("one more", HOLD_MS_MAX))


def test_a_checkpoint_has_the_holds() -> None:
    state = ClusterState("c")
    assert not refused(state, TakeHold("b", 7))
    assert not refused(state, TakeHold("a", 9))
    body = state.encode()
    again = ClusterState.decode(body, "k")
    assert list(again.holds) == list(state.holds)
    assert again.encode() == body


def test_level_1_has_no_holds() -> None:
    commit = Commit(b"", [TakeHold("a", 1)])
    entry = Entry(format_levels.FIRST, 1, GENESIS, b"", "b", 0, [], [commit])
    with pytest.raises(InvalidRequest, match="tidelog upgrade"):
        entries.encode_header(entry)
    header = msgspec.msgpack.encode(
        [*entries._first_level(without(entry))[:7], [[b"", [["take-hold", "a", 1]]]]]
    )
    body = entries._PREFIX.pack(entries.MAGIC, len(header), entries.crc32c(header)) + header
    with pytest.raises(Corrupt, match="level 1"):
        entries.decode(body, "k", seq=1, previous=None)
    state = ClusterState("c", format_levels.FIRST)
    assert len(msgspec.msgpack.decode(state.encode())) == 9
    elements = [*msgspec.msgpack.decode(state.encode()), None, None, None, [], None, None, None]
    with pytest.raises(Corrupt, match="holds"):
        ClusterState.decode(msgspec.msgpack.encode([*elements, [["a", 1, 2]]]), "k")


def without(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, commits=[])
