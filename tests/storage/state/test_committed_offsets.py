"""Committed offsets: the last one counts, commits are whole, what is old is forgotten (I4)."""

from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import FIRST, IDS, Spec, applied, chunk
from tests.support.elapsed import elapse
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    GroupOffset,
)
from tidelog.storage.core.errors import (
    IllegalGeneration,
    InvalidRequest,
    LogError,
    OffsetMetadataTooLarge,
    Throttled,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import OFFSET_MAX, TopicIdPartition
from tidelog.storage.state import committed_offsets as machine
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.committed_offsets import (
    CHECK_INTERVAL_MS,
    METADATA_BYTES_MAX,
    RETENTION_MS,
    CommittedOffset,
    CommittedOffsets,
)
from tidelog.storage.state.group_members import GroupMembers


def to(partition: int, offset: int, metadata: str = "", topic_id: str = IDS[0]) -> GroupOffset:
    return GroupOffset(topic_id, partition, offset, -1, metadata)


def commit_of(*offsets: GroupOffset, group: str = "g", generation: int = -1) -> CommitOffsets:
    return CommitOffsets(group, generation, list(offsets))


def state_with() -> ClusterState:
    state = ClusterState("c")
    applied(state, FIRST)
    return state


def refusal_of(state: ClusterState, *actions: AnyAction, at_ms: int = 0) -> LogError | None:
    """Of one commit in an entry of its own; the state's bytes survive a checkpoint."""
    at_ms = elapse(state, at_ms)
    ((outcome,),) = applied(state, Spec(at_ms, [chunk(1)], [Commit(b"", list(actions))]))
    body = state.encode()
    again = ClusterState.decode(body, "x")
    assert again.encode() == body
    assert again.committed_offsets.count == state.committed_offsets.count
    assert again.committed_offsets._metadata_bytes == state.committed_offsets._metadata_bytes
    return outcome.refusal


def offsets_of(state: ClusterState, group: str = "g") -> dict[tuple[str, int], int]:
    return {
        (topic_id, number): committed.offset
        for topic_id, partitions in state.committed_offsets.of_group(group).items()
        for number, committed in partitions.items()
    }


def test_the_last_commit_of_a_partition_counts() -> None:
    state = state_with()
    assert refusal_of(state, commit_of(to(0, 5), to(1, 6), to(0, 7)), at_ms=40) is None
    assert offsets_of(state) == {(IDS[0], 0): 7, (IDS[0], 1): 6}
    assert refusal_of(state, commit_of(to(0, 2, "back")), at_ms=50) is None  # backwards, too
    assert state.committed_offsets.of_group("g")[IDS[0]][0] == CommittedOffset(0, 2, -1, "back", 50)
    assert offsets_of(state, "another") == {}


@pytest.mark.parametrize(
    ("commit", "why"),
    [
        (commit_of(to(0, 1), to(2, 1)), UnknownPartition),
        (commit_of(to(0, 1), to(-1, 1)), UnknownPartition),
        (commit_of(to(0, 1), to(0, 1, topic_id=IDS[2])), UnknownTopic),
        (commit_of(to(0, 1), to(0, -1)), InvalidRequest),
        (commit_of(to(0, 1), to(0, OFFSET_MAX + 1)), InvalidRequest),
        (commit_of(to(0, 1), generation=0), IllegalGeneration),
        (commit_of(to(0, 1), generation=-2), IllegalGeneration),
        (commit_of(to(0, 1), group=""), InvalidRequest),
        (commit_of(to(0, 1), group="\n"), InvalidRequest),
        (commit_of(to(0, 1), group="ü" * 128), InvalidRequest),
        (commit_of(to(0, 1), to(1, 1, "x" * (METADATA_BYTES_MAX + 1))), OffsetMetadataTooLarge),
        (
            commit_of(to(0, 1), to(1, 1, "ü" * (METADATA_BYTES_MAX // 2 + 1))),
            OffsetMetadataTooLarge,
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_i4_a_commit_is_refused_whole(commit: CommitOffsets, why: type[LogError]) -> None:
    state = state_with()
    assert type(refusal_of(state, Append(0, 0, 1), commit)) is why
    assert commit.group_id not in state.committed_offsets
    assert state.partition("alpha", 0).high_watermark == 0


def test_i4_refused_records_take_their_offsets_with_them() -> None:
    state = state_with()
    assert refusal_of(state, commit_of(to(0, 1)), Append(0, 0, 99)) is not None
    assert "g" not in state.committed_offsets


def test_metadata_of_the_largest_size_and_of_none() -> None:
    state = state_with()
    assert (
        refusal_of(state, commit_of(to(0, 1, "x" * METADATA_BYTES_MAX), to(1, OFFSET_MAX))) is None
    )
    assert offsets_of(state)[IDS[0], 1] == OFFSET_MAX


def test_an_offset_is_forgotten_a_week_after_its_commit() -> None:
    state = state_with()
    refusal_of(state, commit_of(to(0, 1, "old")), at_ms=0)
    refusal_of(state, commit_of(to(1, 1, "newer")), at_ms=CHECK_INTERVAL_MS)
    refusal_of(state, commit_of(to(0, 1), group="h"), at_ms=CHECK_INTERVAL_MS)
    refusal_of(state, at_ms=RETENTION_MS)
    assert len(offsets_of(state)) == 2
    refusal_of(state, at_ms=RETENTION_MS + CHECK_INTERVAL_MS)
    assert offsets_of(state) == {(IDS[0], 1): 1}
    refusal_of(state, at_ms=RETENTION_MS + 2 * CHECK_INTERVAL_MS)
    assert "g" not in state.committed_offsets
    assert "h" not in state.committed_offsets
    assert (state.committed_offsets.count, state.committed_offsets._metadata_bytes) == (0, 0)


def test_a_topic_takes_its_offsets_with_it() -> None:
    state = state_with()
    refusal_of(state, commit_of(to(0, 1), to(0, 2, topic_id=IDS[1])))
    refusal_of(state, commit_of(to(0, 1), group="h"))
    refusal_of(state, DeleteTopic(IDS[0]))
    assert offsets_of(state) == {(IDS[1], 0): 2}
    assert "h" not in state.committed_offsets
    refusal_of(state, CreateTopic("alpha", "d" * 32, 1, {}))
    assert offsets_of(state) == {(IDS[1], 0): 2}


class _Unlisted(dict[str, Any]):
    """The groups, of which `apply` may look at some, but not at all."""

    def items(self) -> NoReturn:
        raise AssertionError("a deletion looks at all groups")

    keys = values = __iter__ = items


@pytest.mark.parametrize(
    ("deletion", "remaining_keys"),
    [
        (DeleteOffsets("g", [TopicIdPartition(IDS[0], 0)]), {(IDS[1], 0)}),
        (DeleteGroup("g"), set()),
        (DeleteTopic(IDS[0]), {(IDS[1], 0)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_deletion_looks_at_no_other_group(
    deletion: AnyAction, remaining_keys: set[tuple[str, int]]
) -> None:
    state = state_with()
    refusal_of(state, commit_of(to(0, 1), to(0, 2, topic_id=IDS[1])))
    refusal_of(state, commit_of(to(0, 1, topic_id=IDS[1]), group="h"))
    offsets = state.committed_offsets
    offsets._groups = _Unlisted(offsets._groups)
    at_ms = elapse(state, 0)
    ((outcome,),) = applied(state, Spec(at_ms, [chunk(1)], [Commit(b"", [deletion])]))
    assert outcome.refusal is None
    assert offsets_of(state).keys() == remaining_keys
    assert offsets_of(state, "h").keys() == {(IDS[1], 0)}


@pytest.mark.parametrize("bound", ["OFFSETS_MAX", "ALL_METADATA_BYTES_MAX"])
def test_i10_commits_at_bound_are_refused(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, bound, 10)
    state = state_with()
    for number in range(5):
        assert refusal_of(state, commit_of(to(0, 1, "x"), to(1, 1, "x"), group=str(number))) is None
    refused = refusal_of(state, commit_of(to(0, 1, "x"), group="one more"))
    assert isinstance(refused, Throttled)
    assert all(str(number) in state.committed_offsets for number in range(5))
    refusal_of(state, at_ms=RETENTION_MS + CHECK_INTERVAL_MS)
    assert refusal_of(state, commit_of(to(0, 1, "x"), group="one more"), at_ms=0) is None


commits = st.tuples(
    st.sampled_from(["g", "h"]),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.sampled_from(["", "m", "üü"]))),
    st.sampled_from([0, 0, 1, CHECK_INTERVAL_MS, RETENTION_MS // 2, RETENTION_MS]),
)


@given(st.lists(commits, max_size=30))
@examples(200)
def test_what_is_committed_is_what_a_plain_map_holds(history: list) -> None:
    state, now_ms = ClusterState("c", format_levels.FIRST), 0  # a step of its time may be a week
    applied(state, FIRST)
    model: dict[tuple[str, int], tuple[int, str, int]] = {}
    for group, offsets, later_ms in history:
        before_ms, now_ms = now_ms, now_ms + later_ms
        if before_ms // CHECK_INTERVAL_MS != now_ms // CHECK_INTERVAL_MS:
            model = {
                group_partition: row
                for group_partition, row in model.items()
                if row[2] >= now_ms - RETENTION_MS
            }
        group_offsets = [to(partition, offset, note) for partition, offset, note in offsets]
        assert refusal_of(state, commit_of(*group_offsets, group=group), at_ms=now_ms) is None
        model |= {(group, partition): (offset, note, now_ms) for partition, offset, note in offsets}
        offset_by_partition = {
            (name, number): (offset.offset, offset.metadata, offset.at_ms)
            for name in ("g", "h")
            for number, offset in state.committed_offsets.of_group(name).get(IDS[0], {}).items()
        }
        assert offset_by_partition == model
        assert state.committed_offsets.count == len(model)
        notes = sum(len(note.encode()) for _, note, _ in model.values())
        assert state.committed_offsets._metadata_bytes == notes


def test_a_group_that_was_never_seen_has_no_offsets() -> None:
    assert CommittedOffsets(GroupMembers({})).of_group("g") == {}
    assert CommittedOffsets(GroupMembers({})).encoded() is None


def test_checkpoint_encodes_changed_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_with()
    for number in range(20):
        assert refusal_of(state, commit_of(to(0, number), group=f"g{number}")) is None
    assert ClusterState.decode(state.encode(), "a checkpoint").equals(state)
    encode, changed = machine._encoded, []

    def encoding(topics: Any) -> Any:
        changed.append(topics)
        return encode(topics)

    monkeypatch.setattr(machine, "_encoded", encoding)
    changes = [commit_of(to(1, 7), group="g3"), DeleteOffsets("g5", [TopicIdPartition(IDS[0], 0)])]
    ((outcome,),) = applied(state, Spec(0, [chunk(1)], [Commit(b"", changes)]))
    assert outcome.refusal is None
    first, second = state.encode(), state.encode()
    assert (changed, first) == ([state.committed_offsets.of_group("g3")], second)
    assert ClusterState.decode(first, "a checkpoint").encode() == first
