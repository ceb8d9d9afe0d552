"""Groups that Kafka's clients assign: one result of a rebalance a generation (I4, I8).

Commits of older generations are refused, and the log never mixes such members with its own.
"""

import random

import msgspec
import pytest

from tests.storage.state.test_cluster_state import Spec, applied
from tests.storage.state.test_group_members import ALPHA, commit, do, join, state_with, subscribe
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Commit, Entry
from tidelog.storage.core.actions import (
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    ExpireMember,
    LeaveGroup,
    Seek,
    SettledMember,
    SettleGroup,
    Subscribe,
    TakeGroup,
)
from tidelog.storage.core.errors import (
    Corrupt,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequest,
    UnknownMember,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.committed_offsets import CHECK_INTERVAL_MS, RETENTION_MS
from tidelog.storage.state.group_state import GROUP_BYTES_MAX, ClientMember

ASSIGNMENT = b"\0\0\0\0\0\1\0\5alpha\0\0\0\2\0\0\0\3\0\0\0\0\xff\xff\xff\xff"
"""Partitions 3 and 0 of alpha, as Kafka's consumers write it."""


def member(name: str, **fields) -> SettledMember:
    values = {"assignment": ASSIGNMENT, "instance_id": "", **fields}
    return SettledMember(
        name, values["instance_id"], "app", "/10.0.0.1", 10_000, 60_000, b"m", values["assignment"]
    )


def settled(
    *members: str | SettledMember,
    generation: int = 1,
    term: int = 1,
    coordinator: str = "b1",
    group: str = "g",
) -> SettleGroup:
    all_of = [
        member(member_or_id) if isinstance(member_or_id, str) else member_or_id
        for member_or_id in members
    ]
    leader = all_of[0].member_id if all_of else ""
    return SettleGroup(group, coordinator, term, generation, "consumer", "range", leader, all_of)


def group_of(*members: str, generation: int = 1) -> ClusterState:
    state = state_with()
    assert do(state, settled(*members, term=0, generation=generation)) is None
    return state


def test_the_first_settlement_makes_the_group_and_its_term() -> None:
    state = group_of("x", "y")
    group = state.members.get("g")
    assert group is not None
    assert (group.coordinator, group.term, group.generation) == ("b1", 1, 1)
    assert (group.protocol_type, group.protocol, group.leader) == ("consumer", "range", "x")
    assert list(group.members) == ["x", "y"]
    group_member = group.members["x"]
    assert isinstance(group_member, ClientMember)
    assert group_member.settled == member("x")
    partitions = [TopicIdPartition(ALPHA, number) for number in (0, 3)]
    assert state.members.partitions_of(group_member) == partitions
    assert do(state, DeleteTopic(ALPHA)) is None
    assert state.members.partitions_of(group_member) == []


@pytest.mark.parametrize(
    "action",
    [
        settled("x", generation=2, term=0),
        settled("x", generation=2, term=2),
        settled("x", generation=2, coordinator="b2"),
        settled("x", generation=0),
    ],
)
def test_an_old_term_or_generation_settles_nothing(action: SettleGroup) -> None:
    state = group_of("x")
    old_state = state.encode()
    assert isinstance(do(state, action), IllegalGeneration)
    assert len(state.encode()) == len(old_state)
    assert do(state, TakeGroup("g", "b2")) is None
    assert isinstance(do(state, settled("x", generation=2)), IllegalGeneration)
    assert do(state, settled("x", generation=2, term=2, coordinator="b2")) is None


@pytest.mark.parametrize(
    "action",
    [
        settled(generation=2),
        settled("x", "x", generation=2),
        settled(member("x", instance_id="s"), member("y", instance_id="s"), generation=2),
        settled("", generation=2),
        settled("x\n", generation=2),
        settled(member("x", assignment=bytes(GROUP_BYTES_MAX)), generation=2),
        settled(*(f"m{number}" for number in range(1001)), generation=2),
        msgspec.structs.replace(settled("x", generation=2), leader="y"),
        msgspec.structs.replace(settled("x", generation=2), protocol_type=""),
    ],
)
def test_members_that_the_state_cannot_have_are_refused(action: SettleGroup) -> None:
    assert isinstance(do(group_of("x"), action), InvalidRequest)


def test_only_members_of_the_generation_commit() -> None:
    state = group_of("x")
    assert do(state, commit("x", 1, (0, 5))) is None
    assert isinstance(do(state, commit("x", 0, (0, 6))), IllegalGeneration)
    assert isinstance(do(state, commit("y", 1, (0, 6))), UnknownMember)
    assert isinstance(do(state, commit("", -1, (0, 6))), GroupNotEmpty)
    assert do(state, settled("x", "y", generation=2)) is None
    assert isinstance(do(state, commit("x", 1, (0, 6))), IllegalGeneration)
    assert do(state, commit("y", 2, (0, 6))) is None
    assert state.committed_offsets.of_group("g")[ALPHA][0].offset == 6


def test_a_member_that_leaves_or_expires_lets_the_group_prepare() -> None:
    state = group_of("x", "y", "z")
    group = state.members.get("g")
    assert group is not None
    assert do(state, LeaveGroup("g", "y")) is None
    assert (group.is_preparing, group.generation, list(group.members)) == (True, 1, ["x", "z"])
    assert do(state, commit("x", 1, (0, 5))) is None
    assert isinstance(do(state, ExpireMember("g", "z", 2)), IllegalGeneration)
    assert do(state, ExpireMember("g", "z", 1)) is None
    assert do(state, settled("x", generation=2)) is None
    assert not group.is_preparing
    assert do(state, LeaveGroup("g", "x")) is None
    assert do(state, commit("", -1, (0, 7))) is None  # empty: any client may
    assert do(state, DeleteGroup("g")) is None
    assert state.members.count == 0


def test_the_generation_continues_over_every_end_of_a_group() -> None:
    state = group_of("x", generation=7)
    assert isinstance(do(state, DeleteGroup("g")), GroupNotEmpty)
    assert do(state, LeaveGroup("g", "x")) is None
    assert isinstance(do(state, settled("x", generation=7)), IllegalGeneration)
    assert do(state, DeleteGroup("g")) is None
    assert isinstance(do(state, settled("x", generation=7, term=0)), IllegalGeneration)
    assert do(state, settled("x", generation=8, term=0)) is None


def test_a_static_member_may_get_another_id_within_the_generation() -> None:
    state = state_with()
    static_member = member("x-1", instance_id="s")
    assert do(state, settled(static_member, "y", term=0)) is None
    again = member("x-2", instance_id="s")
    assert do(state, settled(again, "y")) is None
    assert isinstance(do(state, commit("x-1", 1, (0, 1))), UnknownMember)
    assert do(state, commit("x-2", 1, (0, 1))) is None


def test_a_group_is_of_one_kind_until_it_is_empty() -> None:
    state = group_of("x")
    assert isinstance(do(state, join("r")), InconsistentGroupProtocol)
    for action in (Subscribe("g", "x", ["alpha"]), Seek("g", "x", [])):
        assert isinstance(do(state, action), UnknownMember)
    assert do(state, LeaveGroup("g", "x")) is None
    assert do(state, join("r")) is None
    group = state.members.get("g")
    assert group is not None
    assert not group.is_assigned_by_clients
    assert do(state, subscribe("r", "alpha")) is None
    generation = group.generation
    assert isinstance(
        do(state, settled("x", generation=9, term=group.term)), InconsistentGroupProtocol
    )
    # Both in one entry: the assignment at its end must not change the clients' generation.
    assert do(state, LeaveGroup("g", "r"), settled("x", generation=9, term=group.term)) is None
    assert (group.is_assigned_by_clients, group.generation) == (True, 9)
    assert generation < 9


def test_offsets_are_deleted_one_by_one() -> None:
    state = group_of("x")
    assert do(state, commit("x", 1, (0, 5), (1, 6))) is None
    partitions = [TopicIdPartition(ALPHA, 1), TopicIdPartition(ALPHA, 9), TopicIdPartition("z", 0)]
    assert do(state, DeleteOffsets("g", partitions), DeleteOffsets("other", partitions)) is None
    assert list(state.committed_offsets.of_group("g")[ALPHA]) == [0]
    assert state.committed_offsets.count == 1
    deletion = DeleteOffsets("g", [TopicIdPartition(ALPHA, 0)])
    # With the commit of a member, its generation decides for the deletion, too.
    both = Spec(0, [], [Commit(b"", [commit("x", 0), deletion])])
    ((outcome,),) = applied(state, both)
    assert isinstance(outcome.refusal, IllegalGeneration)
    assert list(state.committed_offsets.of_group("g")[ALPHA]) == [0]
    both = Spec(0, [], [Commit(b"", [commit("x", 1), deletion])])
    ((outcome,),) = applied(state, both)
    assert outcome.refusal is None
    assert "g" not in state.committed_offsets


def test_offsets_expire_when_the_group_was_empty_for_a_week() -> None:
    state = group_of("x")
    assert do(state, commit("x", 1, (0, 5))) is None
    expiry_ms = RETENTION_MS + 2 * CHECK_INTERVAL_MS
    assert do(state, at_ms=expiry_ms) is None
    assert "g" in state.committed_offsets
    assert do(state, LeaveGroup("g", "x"), at_ms=expiry_ms) is None
    assert do(state, at_ms=2 * expiry_ms) is None
    assert "g" not in state.committed_offsets
    assert state.members.get("g") is None


def test_a_level_without_the_action_neither_writes_nor_reads_it() -> None:
    entry = Entry(3, 1, bytes(32), b"id", "b", 5, [], [Commit(b"", [settled("x")])])
    with pytest.raises(InvalidRequest, match="from level 4 on"):
        entries.encode_header(entry)
    header, _ = entries.encode_header(msgspec.structs.replace(entry, level=4))
    assert msgspec.msgpack.decode(header[16:])[7][0][1] == [
        [
            "settle-group",
            "g",
            "b1",
            1,
            1,
            "consumer",
            "range",
            "x",
            [["x", "", "app", "/10.0.0.1", 10_000, 60_000, b"m", ASSIGNMENT, ""]],
        ]
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries.format_levels, "KAFKA", 3)
        forged, _ = entries.encode_header(entry)
    with pytest.raises(Corrupt, match="from level 4 on"):
        entries.decode(forged, "wal/1", seq=1, previous=None)


@pytest.mark.parametrize("seed", range(30))
def test_in_any_history_generations_grow_and_members_are_those_of_the_last_result(
    seed: int,
) -> None:
    """Two coordinators settle, take the group and expire members, in any order."""
    draw = random.Random(seed)
    state = state_with()
    last = 0
    for _ in range(60):
        group = state.members.get("g")
        generation = last + draw.randint(-1, 2)
        names = draw.sample("abc", draw.randint(1, 3))
        term = (group.term if group else 0) + draw.choice([0, 0, 0, -1])
        match draw.randrange(6):
            case 0:
                action = TakeGroup("g", draw.choice(["b1", "b2"]))
            case 1:
                action = ExpireMember("g", names[0], term)
            case 2:
                action = LeaveGroup("g", names[0])
            case _:
                coordinator = draw.choice(["b1", "b2"])
                action = settled(*names, generation=generation, term=term, coordinator=coordinator)
        refusal = do(state, action)
        group = state.members.get("g")
        if group is None:
            continue
        assert group.generation >= last
        last = group.generation
        if isinstance(action, SettleGroup) and refusal is None:
            assert (group.generation, list(group.members)) == (action.generation, names)
        assert state.members.count == len(group.members)
