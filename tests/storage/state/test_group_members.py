"""Members of groups: a partition has one owner in a generation (I4, I8).

Old generations commit nothing.
"""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import Spec, applied
from tests.support.elapsed import elapse
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit
from tidelog.storage.core.actions import (
    AddPartitions,
    AnyAction,
    AssignByHand,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    ExpireMember,
    GroupOffset,
    JoinGroup,
    LeaveGroup,
    MemberConfig,
    Seek,
    SeekPosition,
    Subscribe,
    TakeGroup,
)
from tidelog.storage.core.errors import (
    AssignedOtherwise,
    GroupNotEmpty,
    IllegalGeneration,
    InvalidRequest,
    LogError,
    MemberExists,
    NotAssigned,
    Throttled,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state import group_members as machine
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.committed_offsets import CHECK_INTERVAL_MS, RETENTION_MS

ALPHA, BETA = "a" * 32, "b" * 32


def join(member: str, group: str = "g", **fields) -> JoinGroup:
    return JoinGroup(group, member, fields.pop("coordinator", "b1"), MemberConfig(), **fields)


def subscribe(member: str, *topics: str, group: str = "g", pattern: str = "") -> Subscribe:
    return Subscribe(group, member, list(topics), pattern)


def commit(
    member: str, generation: int, *offsets: tuple[int, int], topic_id: str = ALPHA
) -> CommitOffsets:
    group_offsets = [GroupOffset(topic_id, partition, offset) for partition, offset in offsets]
    return CommitOffsets("g", generation, group_offsets, member)


def state_with(partitions: int = 4) -> ClusterState:
    state = ClusterState("c")
    assert do(state, CreateTopic("alpha", ALPHA, partitions, {})) is None
    return state


def do(state: ClusterState, *actions: AnyAction, at_ms: int = 0) -> LogError | None:
    """The first refusal of these commits of one action each, in one entry.

    A checkpoint has the whole state.
    """
    at_ms = elapse(state, at_ms)
    (outcomes,) = applied(state, Spec(at_ms, [], [Commit(b"", [action]) for action in actions]))
    body = state.encode()
    again = ClusterState.decode(body, "x")
    assert again.encode() == body
    assert again.members.count == state.members.count
    for group in state.members:
        restored = again.members.get(group.group_id)
        assert restored is not None
        assert restored.inputs == group.inputs
    return next((outcome.refusal for outcome in outcomes if outcome.refusal is not None), None)


def owned(state: ClusterState, member: str, group: str = "g") -> list[int]:
    group_member = state.members.member(group, member)
    assert group_member is not None
    return [number for _, number in group_member.owned]


def generation(state: ClusterState) -> int:
    group = state.members.get("g")
    assert group is not None
    return group.generation


def shared_by(*members: str, partitions: int = 4) -> ClusterState:
    """Subscribed to alpha, one after the other."""
    state = state_with(partitions)
    for member in members:
        assert do(state, join(member)) is None
        assert do(state, subscribe(member, "alpha")) is None
    return state


def test_members_share_and_the_generation_grows_with_every_change() -> None:
    state = state_with()
    assert do(state, join("x")) is None
    assert (generation(state), owned(state, "x")) == (0, [])
    assert do(state, subscribe("x", "alpha")) is None
    assert (generation(state), owned(state, "x")) == (1, [0, 1, 2, 3])
    assert do(state, join("y")) is None
    assert generation(state) == 1
    assert do(state, subscribe("y", "alpha")) is None
    assert generation(state) == 2
    assert sorted(owned(state, "x") + owned(state, "y")) == [0, 1, 2, 3]
    assert len(owned(state, "x")) == 2
    assert do(state, subscribe("y", "alpha")) is None
    assert generation(state) == 2  # nothing changed
    assert do(state, LeaveGroup("g", "x")) is None
    assert (generation(state), owned(state, "y")) == (3, [0, 1, 2, 3])
    assert do(state, LeaveGroup("g", "y")) is None
    assert generation(state) == 4


def test_many_that_come_in_one_entry_cost_one_assignment() -> None:
    state = state_with()
    assert do(state, *(join(f"m{n}") for n in range(9))) is None
    assert do(state, *(subscribe(f"m{n}", "alpha") for n in range(9))) is None
    assert generation(state) == 1
    assert sorted(len(owned(state, f"m{n}")) for n in range(9)) == [0] * 5 + [1] * 4


def test_topics_that_come_grow_and_go_make_a_generation() -> None:
    state = shared_by("x")
    do(state, subscribe("x", "alpha", "beta"))
    old_generation = generation(state)
    do(state, CreateTopic("other", "c" * 32, 1, {}))
    assert generation(state) == old_generation
    do(state, CreateTopic("beta", BETA, 2, {}))
    assert len(owned(state, "x")) == 6
    do(state, AddPartitions(ALPHA, 6))
    assert len(owned(state, "x")) == 8
    do(state, DeleteTopic(ALPHA))
    assert len(owned(state, "x")) == 2
    assert generation(state) == old_generation + 3
    do(state, CreateTopic("alpha", "d" * 32, 1, {}))
    assert TopicIdPartition("d" * 32, 0) in state.members.member("g", "x").owned  # type: ignore[union-attr]


def test_i8_only_the_owner_may_commit() -> None:
    state = shared_by("x", "y")
    now = generation(state)
    mine, other_partitions = owned(state, "x"), owned(state, "y")
    assert do(state, commit("x", now, (mine[0], 5))) is None
    for refused, why in [
        (commit("x", now - 1, (mine[0], 6)), IllegalGeneration),
        (commit("x", now + 1, (mine[0], 6)), IllegalGeneration),
        (commit("x", -1, (mine[0], 6)), IllegalGeneration),
        (commit("x", now, (other_partitions[0], 6)), IllegalGeneration),
        (commit("z", now, (mine[0], 6)), UnknownMember),
        (commit("", now, (mine[0], 6)), GroupNotEmpty),
        (commit("", -1, (mine[0], 6)), GroupNotEmpty),
    ]:
        assert type(do(state, refused)) is why, refused
    assert state.committed_offsets.of_group("g")[ALPHA][mine[0]].offset == 5
    do(state, LeaveGroup("g", "x"), LeaveGroup("g", "y"))
    assert isinstance(do(state, commit("x", now, (mine[0], 6))), UnknownMember)
    assert do(state, commit("", -1, (mine[0], 7))) is None


def test_a_static_member_takes_its_own_place_without_a_new_generation() -> None:
    state = state_with()
    do(state, join("x1", instance_id="pod-1"), join("y"))
    do(state, subscribe("x1", "alpha"), subscribe("y", "alpha"))
    old_generation, partitions = generation(state), owned(state, "x1")
    assert do(state, join("x2", instance_id="pod-1")) is None
    assert (generation(state), owned(state, "x2")) == (old_generation, partitions)
    assert do(state, subscribe("x2", "alpha")) is None
    assert (generation(state), state.members.count) == (old_generation, 2)
    assert isinstance(do(state, commit("x1", old_generation, (partitions[0], 1))), UnknownMember)
    assert isinstance(do(state, subscribe("x1", "alpha")), UnknownMember)
    assert do(state, commit("x2", old_generation, (partitions[0], 1))) is None


def test_a_replaced_coordinator_expires_no_member() -> None:
    state = shared_by("x", "y")
    term = state.members.get("g").term  # type: ignore[union-attr]
    assert do(state, TakeGroup("g", "b2")) is None
    assert isinstance(do(state, ExpireMember("g", "x", term)), IllegalGeneration)
    assert do(state, ExpireMember("g", "x", term + 1)) is None
    assert state.members.member("g", "x") is None
    assert owned(state, "y") == [0, 1, 2, 3]
    assert isinstance(do(state, ExpireMember("g", "x", term + 1)), UnknownMember)


def test_assigned_by_hand_shares_nothing_and_excludes_a_subscription() -> None:
    state = shared_by("x")
    do(state, join("h"))
    old_generation = generation(state)
    assert do(state, AssignByHand("g", "h", [TopicIdPartition(ALPHA, 1)])) is None
    assert (generation(state), owned(state, "h"), owned(state, "x")) == (
        old_generation,
        [1],
        [0, 1, 2, 3],
    )
    assert isinstance(do(state, subscribe("h", "alpha")), AssignedOtherwise)
    assert isinstance(
        do(state, AssignByHand("g", "x", [TopicIdPartition(ALPHA, 1)])), AssignedOtherwise
    )
    assert isinstance(do(state, AssignByHand("g", "h", [TopicIdPartition(BETA, 0)])), UnknownTopic)
    assert isinstance(
        do(state, AssignByHand("g", "h", [TopicIdPartition(ALPHA, 4)])), UnknownPartition
    )
    assert isinstance(do(state, commit("h", -1, (1, 5))), GroupNotEmpty)  # others share
    do(state, LeaveGroup("g", "x"))
    assert do(state, commit("h", -1, (1, 5))) is None
    assert isinstance(do(state, commit("h", old_generation, (1, 5))), IllegalGeneration)
    assert do(state, subscribe("h")) is None
    assert do(state, subscribe("h", "alpha")) is None
    assert owned(state, "h") == [0, 1, 2, 3]


def test_a_by_hand_assignment_goes_with_its_topic() -> None:
    state = state_with()
    do(state, join("h"))
    do(
        state,
        AssignByHand("g", "h", [TopicIdPartition(ALPHA, 1)]),
        Seek("g", "h", [SeekPosition(ALPHA, 1, 3)]),
    )
    do(state, DeleteTopic(ALPHA))
    member = state.members.member("g", "h")
    assert member is not None
    assert member.owned == member.sought == []


def test_a_sought_position_holds_until_its_commit_or_its_loss() -> None:
    state = shared_by("x")
    assert do(state, Seek("g", "x", [SeekPosition(ALPHA, 0, 7), SeekPosition(ALPHA, 1, 8)])) is None
    assert do(state, Seek("g", "x", [SeekPosition(ALPHA, 0, 9)])) is None
    member = state.members.member("g", "x")
    assert member is not None
    assert [member.position(TopicIdPartition(ALPHA, n)) for n in range(3)] == [9, 8, None]
    assert isinstance(do(state, Seek("g", "x", [SeekPosition(ALPHA, 9, 1)])), NotAssigned)
    assert isinstance(do(state, Seek("g", "x", [SeekPosition(ALPHA, 0, -1)])), InvalidRequest)
    do(state, commit("x", generation(state), (0, 10)))
    assert [member.position(TopicIdPartition(ALPHA, n)) for n in range(2)] == [None, 8]
    do(state, join("y"))
    do(state, subscribe("y", "alpha"))
    do(state, Seek("g", "x", [SeekPosition(ALPHA, owned(state, "x")[0], 1)]))
    do(state, subscribe("x"))
    assert member.sought == []


def test_what_is_refused() -> None:
    state = shared_by("x")
    assert isinstance(do(state, join("x")), MemberExists)
    assert isinstance(do(state, join("")), InvalidRequest)
    assert isinstance(do(state, join("a\nb")), InvalidRequest)
    assert isinstance(do(state, join("y", instance_id="z" * 256)), InvalidRequest)
    assert isinstance(do(state, join("y", assignor="fair")), InvalidRequest)
    assert isinstance(do(state, join("y", assignor="range")), InvalidRequest)
    assert isinstance(do(state, join("y", group="")), InvalidRequest)
    for action in (
        LeaveGroup("g", "nobody"),
        LeaveGroup("nobody", "x"),
        TakeGroup("nobody", "b"),
        subscribe("nobody", "alpha"),
        Seek("g", "nobody", []),
    ):
        assert isinstance(do(state, action), UnknownMember), action
    assert isinstance(do(state, subscribe("x", pattern="a" * 1001)), InvalidRequest)
    assert isinstance(do(state, DeleteGroup("g")), GroupNotEmpty)


@pytest.mark.parametrize(("bound", "value"), [("MEMBERS_MAX", 2), ("MEMBERS_OF_GROUP_MAX", 2)])
def test_i10_members_are_bounded(bound: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, bound, value)
    state = shared_by("x", "y")
    assert isinstance(do(state, join("z")), Throttled)
    do(state, LeaveGroup("g", "x"))
    assert do(state, join("z")) is None


def test_i10_partitions_that_a_group_shares_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GROUP_PARTITIONS_MAX", 4)
    state = shared_by("x")
    do(state, CreateTopic("beta", BETA, 1, {}), join("y"))
    assert isinstance(do(state, subscribe("y", "beta")), InvalidRequest)
    assert do(state, subscribe("y", "alpha")) is None
    too_many = [TopicIdPartition(ALPHA, n) for n in range(5)]
    do(state, join("h"))
    assert isinstance(do(state, AssignByHand("g", "h", too_many)), InvalidRequest)


def test_i8_generations_never_go_back_even_of_a_group_that_was_forgotten() -> None:
    state = shared_by("x", "y")
    last = generation(state)
    do(state, LeaveGroup("g", "x"), LeaveGroup("g", "y"))
    do(state, at_ms=CHECK_INTERVAL_MS)
    assert state.members.get("g") is None
    do(state, join("x"))
    do(state, subscribe("x", "alpha"))
    assert generation(state) > last
    do(state, LeaveGroup("g", "x"))
    last = generation(state)
    assert do(state, DeleteGroup("g")) is None
    do(state, join("x"))
    assert generation(state) == last


def test_members_keep_their_groups_offsets_alive_and_a_week_longer() -> None:
    state = shared_by("x")
    do(state, commit("x", generation(state), (0, 5)))
    late = 2 * RETENTION_MS
    do(state, at_ms=late)
    assert "g" in state.committed_offsets
    do(state, LeaveGroup("g", "x"), at_ms=late)
    do(state, at_ms=late + RETENTION_MS - CHECK_INTERVAL_MS)
    assert "g" in state.committed_offsets
    do(state, at_ms=late + RETENTION_MS + 2 * CHECK_INTERVAL_MS)
    assert "g" not in state.committed_offsets
    assert state.members.get("g") is None


def test_a_deleted_group_takes_its_offsets_with_it() -> None:
    state = state_with()
    do(state, commit("", -1, (0, 5)))
    assert do(state, DeleteGroup("g")) is None
    assert "g" not in state.committed_offsets
    assert state.committed_offsets.count == 0
    assert do(state, DeleteGroup("g")) is None


@given(st.integers(0, 2**32 - 1), st.sampled_from(["range", "roundrobin", "sticky"]))
@examples(150)
def test_partition_has_one_owner_and_generations_grow(seed: int, assignor: str) -> None:
    draw = random.Random(seed)
    state, names, newest_generation = state_with(3), [f"m{n}" for n in range(5)], -1
    counts = {ALPHA: 3}
    do(state, join("m0", assignor=assignor))
    for _ in range(40):
        name = draw.choice(names)
        term = getattr(state.members.get("g"), "term", 0)
        action = draw.choice(
            [
                join(name),
                join(name + "'", instance_id="pod"),
                subscribe(name, "alpha"),
                subscribe(name, "alpha", "beta"),
                subscribe(name),
                LeaveGroup("g", name),
                ExpireMember("g", name, term),
                TakeGroup("g", draw.choice("ab")),
                CreateTopic("beta", BETA, 2, {}),
                AddPartitions(ALPHA, counts[ALPHA] + 1),
                AssignByHand("g", name, [TopicIdPartition(ALPHA, 0)]),
                commit(name, draw.randrange(9), (draw.randrange(3), 1)),
            ]
        )
        group_member = state.members.member("g", name)
        group = state.members.get("g")
        may = (
            isinstance(action, CommitOffsets)
            and group_member is not None
            and group is not None
            and group_member.is_subscribed
            and action.generation == group.generation
            and TopicIdPartition(ALPHA, action.offsets[0].partition) in group_member.owned
        )
        refused = do(state, action)
        if isinstance(action, CommitOffsets):
            assert (refused is None) == may
        if isinstance(action, AddPartitions) and refused is None:
            counts[ALPHA] += 1
        group = state.members.get("g")
        assert group is not None
        assert group.generation >= newest_generation
        assert state.members.count == len(group.members)
        newest_generation = group.generation
        sharing = [member for member in group.members.values() if member.is_subscribed]
        owners = Counter(partition for member in sharing for partition in member.owned)
        assert all(count == 1 for count in owners.values())
        expected_partitions = {
            TopicIdPartition(topic.topic_id, number)
            for name, topic in state.topics.items()
            for number in range(len(topic.partitions))
            if any(name in member.topics for member in sharing)
        }
        assert owners.keys() == expected_partitions


def test_actions_and_checkpoint_are_what_format_md_says() -> None:
    config = ["binary", "latest", True, -1, 1000, 300_000, 300_000, "", "", ""]
    actions = [
        join("x", instance_id="pod", assignor="range"),
        subscribe("x", "alpha"),
        Seek("g", "x", [SeekPosition(ALPHA, 1, 7)]),
        AssignByHand("g", "h", [TopicIdPartition(ALPHA, 0)]),
        ExpireMember("g", "x", 1),
        TakeGroup("g", "b2"),
        LeaveGroup("g", "x"),
        DeleteGroup("g"),
        CommitOffsets("g", 1, [], "x"),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(actions)) == [
        ["join-group", "g", "x", "b1", config, "pod", "range"],
        ["subscribe", "g", "x", ["alpha"], ""],
        ["seek", "g", "x", [[ALPHA, 1, 7]]],
        ["assign-by-hand", "g", "h", [[ALPHA, 0]]],
        ["expire-member", "g", "x", 1],
        ["take-group", "g", "b2"],
        ["leave-group", "g", "x"],
        ["delete-group", "g"],
        ["commit-offsets", "g", 1, [], "x"],
    ]
    state = state_with(2)
    for action in (*actions[:3], join("h"), actions[3]):
        assert do(state, action, at_ms=9) is None
    (floor, ((group_id, *group, members),)) = msgspec.msgpack.decode(state.encode())[11]
    assert (floor, group_id, group) == (0, "g", [1, "range", "b1", 1, 0])
    assert members == [
        ["x", 9, config, "pod", ["alpha"], "", False, [[ALPHA, 0], [ALPHA, 1]], [[ALPHA, 1, 7]]],
        ["h", 9, config, "", [], "", True, [[ALPHA, 0]], []],
    ]
