"""The classic protocol of one group: answers as of a Kafka 4.3 to the same requests. Pure."""

import itertools

import pytest

from tests.storage.groups.kafka_group_driver import BOTH, Machine, request
from tidelog.storage.core.actions import ExpireMember, LeaveGroup, SettleGroup
from tidelog.storage.groups import classic_protocol
from tidelog.storage.groups.classic_protocol import ClassicGroup
from tidelog.storage.groups.kafka_requests import GroupCode, GroupPhase, Identity, SyncRequest


def machine(delay_s: float = 0.0) -> Machine:
    numbers = itertools.count(1)
    return Machine(ClassicGroup("g", "b1", 0, 0, lambda: str(next(numbers)), delay_s))


def stable(count: int = 2, **fields) -> tuple[Machine, list[str]]:
    """A group with so many members. The first is the leader."""
    state_machine = machine(0.1 if count > 1 else 0.0)
    for _ in range(count):
        state_machine.join(**fields)
    state_machine.wait(0.1)
    names = list(state_machine.joined)
    names = [name for name in names if state_machine.joined[name].code is GroupCode.NONE]
    generation = state_machine.group.generation
    for name in names[1:]:
        assert state_machine.sync(name, generation) is None
    assignments = {name: name.encode() for name in names}
    leader_request = SyncRequest(Identity(names[0]), generation, assignments)
    state_machine.group.sync(
        leader_request,
        lambda answer: state_machine.synced.update({names[0]: answer}),
        state_machine.now_s,
    )
    state_machine.settle()
    assert state_machine.group.phase is GroupPhase.STABLE
    assert {name: state_machine.synced[name].assignment for name in names} == assignments
    return state_machine, names


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"session_ms": 1_000}, GroupCode.INVALID_SESSION_TIMEOUT),
        ({"session_ms": 1_800_001}, GroupCode.INVALID_SESSION_TIMEOUT),
        ({"protocols": []}, GroupCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, GroupCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"member_id": "ghost"}, GroupCode.UNKNOWN_MEMBER_ID),
        ({"member_id": "ghost", "instance_id": "s"}, GroupCode.UNKNOWN_MEMBER_ID),
        ({"instance_id": "a\nb"}, GroupCode.INVALID_REQUEST),
        ({"rebalance_ms": -1}, GroupCode.INVALID_REQUEST),
    ],
)
def test_a_join_that_cannot_be(fields: dict, code: GroupCode) -> None:
    state_machine = machine()
    answer = state_machine.join(**fields)
    assert answer is not None
    assert (answer.code, answer.protocol_type, answer.protocol) == (code, None, None)
    assert state_machine.group.is_idle


def test_a_new_dynamic_member_gets_its_id_first() -> None:
    state_machine = machine()
    replies: list = []
    state_machine.group.join(request(client_id="my app"), replies.append, 0.0)
    assert (replies[0].code, replies[0].member_id) == (GroupCode.MEMBER_ID_REQUIRED, "my app-1")
    state_machine.group.join(request("my app-1", client_id="my app"), replies.append, 0.0)
    answer = replies[1]
    assert (answer.code, answer.generation, answer.leader) == (GroupCode.NONE, 1, "my app-1")
    assert [member.metadata for member in answer.members] == [b"r"]
    assert (answer.protocol_type, answer.protocol) == ("consumer", "range")
    old = machine()
    answer = old.join(version=3)
    assert answer is not None
    assert answer.code is GroupCode.NONE


def test_an_id_of_a_member_is_short_and_printable() -> None:
    state_machine = machine()
    answer = state_machine.join(client_id="\x00" + "\u00e9" * 300)
    assert answer is not None
    assert answer.member_id.startswith("_\u00e9")
    assert answer.member_id.isprintable()
    assert len(answer.member_id.encode()) <= 255


def test_another_protocol_type_or_no_common_assignor() -> None:
    state_machine, names = stable(2, protocols=BOTH)
    for fields in ({"protocol_type": "connect"}, {"protocols": [("mine", b"")]}):
        answer = state_machine.join(**fields)
        assert answer is not None
        assert answer.code is GroupCode.INCONSISTENT_GROUP_PROTOCOL
    assert state_machine.join() is None  # range: not the first choice, but all know it
    assert state_machine.heartbeat(names[0], 1) is GroupCode.REBALANCE_IN_PROGRESS
    for name in names:
        state_machine.join(name, protocols=BOTH)
    assert state_machine.group.protocol == "range"


def test_most_first_preferences_elect_the_assignor() -> None:
    state_machine = machine(0.1)
    state_machine.join(protocols=[("range", b""), ("sticky", b"")])
    state_machine.join(protocols=[("sticky", b""), ("range", b"")])
    state_machine.join(protocols=[("other", b""), ("sticky", b""), ("range", b"")])
    state_machine.wait(0.1)
    assert state_machine.group.protocol == "sticky"


def test_heartbeats_and_commits_of_each_phase() -> None:
    state_machine = machine()
    answer = state_machine.join()
    assert answer is not None
    me = answer.member_id
    assert state_machine.heartbeat(me, 1) is GroupCode.NONE
    assert state_machine.commit(me, 1) is GroupCode.REBALANCE_IN_PROGRESS
    assert state_machine.sync(me, 1, **{me: b"a"}) is None
    assert state_machine.commit(me, 1) is GroupCode.REBALANCE_IN_PROGRESS
    state_machine.settle()
    assert state_machine.synced[me].assignment == b"a"
    assert (state_machine.heartbeat(me, 1), state_machine.commit(me, 1)) == (
        GroupCode.NONE,
        GroupCode.NONE,
    )
    assert (state_machine.heartbeat(me, 0), state_machine.commit(me, 0)) == (
        GroupCode.ILLEGAL_GENERATION,
    ) * 2
    assert (state_machine.heartbeat("ghost", 1), state_machine.commit("ghost", 1)) == (
        GroupCode.UNKNOWN_MEMBER_ID,
    ) * 2
    assert state_machine.commit("", -1) is GroupCode.UNKNOWN_MEMBER_ID
    again = state_machine.sync(me, 1)
    assert again is not None
    assert (again.code, again.assignment) == (GroupCode.NONE, b"a")
    wrong = state_machine.sync(me, 0)
    assert wrong is not None
    assert wrong.code is GroupCode.ILLEGAL_GENERATION
    replies: list = []
    state_machine.group.sync(
        SyncRequest(Identity(me), 1, {}, "consumer", "other"), replies.append, 0.0
    )
    assert replies[0].code is GroupCode.INCONSISTENT_GROUP_PROTOCOL
    assert state_machine.join() is None
    assert state_machine.heartbeat(me, 1) is GroupCode.REBALANCE_IN_PROGRESS
    assert state_machine.commit(me, 1) is GroupCode.NONE
    wait = state_machine.sync(me, 1)
    assert wait is not None
    assert wait.code is GroupCode.REBALANCE_IN_PROGRESS


def test_commits_wait_if_the_last_generation_was_not_committed() -> None:
    state_machine = machine()
    answer = state_machine.join()
    assert answer is not None
    me = answer.member_id
    state_machine.join()
    assert state_machine.group.phase is GroupPhase.PREPARING
    assert state_machine.commit(me, 1) is GroupCode.REBALANCE_IN_PROGRESS


def test_leaving() -> None:
    state_machine, (first, second) = stable()
    assert state_machine.leave("ghost") is GroupCode.UNKNOWN_MEMBER_ID
    assert state_machine.leave(second) is GroupCode.NONE
    assert state_machine.group.actions == [LeaveGroup("g", second)]
    state_machine.settle()
    assert state_machine.heartbeat(first, 1) is GroupCode.REBALANCE_IN_PROGRESS
    assert state_machine.heartbeat(second, 1) is GroupCode.UNKNOWN_MEMBER_ID
    again = state_machine.join(first)
    assert again is not None
    assert (again.generation, len(again.members)) == (2, 1)
    state_machine.leave(first)
    assert state_machine.group.phase is GroupPhase.EMPTY
    assert state_machine.commit("", -1) is GroupCode.NONE
    # The state still has both: only generation 1 was committed.
    assert ExpireMember("g", first, 1) in state_machine.group.actions
    state_machine.settle()
    assert state_machine.group.is_idle


def test_a_new_id_that_leaves_is_forgotten() -> None:
    state_machine = machine()
    replies: list = []
    state_machine.group.join(request(), replies.append, 0.0)
    assert state_machine.leave(replies[0].member_id) is GroupCode.NONE
    assert state_machine.group.is_idle
    state_machine.group.join(request(), replies.append, 0.0)
    state_machine.wait(classic_protocol.MEMBER_ID_S)
    state_machine.group.join(request(replies[1].member_id), replies.append, 0.0)
    assert replies[2].code is GroupCode.UNKNOWN_MEMBER_ID


def test_a_follower_that_repeats_its_join_disturbs_nobody() -> None:
    state_machine, (leader, follower) = stable()
    again = state_machine.join(follower)
    assert again is not None
    assert (again.code, again.generation, again.members) == (GroupCode.NONE, 1, [])
    assert state_machine.group.phase is GroupPhase.STABLE
    assert state_machine.join(leader) is None
    assert state_machine.group.phase is GroupPhase.PREPARING
    assert state_machine.join(follower) is not None
    assert state_machine.group.generation == 2
    repeated = state_machine.join(follower)  # the phase is COMPLETING: its answer was lost
    assert repeated is not None
    assert (repeated.generation, state_machine.group.phase) == (2, GroupPhase.COMPLETING)
    assert state_machine.join(follower, protocols=[("range", b"changed")]) is None
    assert state_machine.group.phase is GroupPhase.PREPARING


def test_a_static_member_that_restarts_keeps_its_assignment_and_rebalances_nobody() -> None:
    state_machine = machine()
    answer = state_machine.join(instance_id="s1")
    assert answer is not None
    old = answer.member_id
    assert old == "s1-1"
    state_machine.sync(old, 1, "s1", s1_1=b"mine")
    state_machine.settle()
    assert state_machine.join(instance_id="s1") is None  # until its id is committed
    (action,) = state_machine.group.actions
    assert isinstance(action, SettleGroup)
    assert (action.generation, action.members[0].assignment) == (1, b"mine")
    state_machine.settle()
    new = state_machine.joined["s1-2"]
    assert (new.code, new.generation, new.leader) == (GroupCode.NONE, 1, "s1-2")
    assert new.skip_assignment
    assert [member.member_id for member in new.members] == ["s1-2"]
    again = state_machine.sync("s1-2", 1, "s1")
    assert again is not None
    assert again.assignment == b"mine"
    assert state_machine.heartbeat(old, 1, "s1") is GroupCode.FENCED_INSTANCE_ID
    fenced = state_machine.join(old, instance_id="s1")
    assert fenced is not None
    assert fenced.code is GroupCode.FENCED_INSTANCE_ID
    state_machine.join(instance_id="s1", version=8)
    state_machine.settle()
    old_client = state_machine.joined["s1-3"]
    assert not old_client.skip_assignment
    assert (old_client.leader, old_client.members) == ("s1-2", ())
    assert state_machine.leave("", "s1") is GroupCode.NONE
    assert state_machine.group.phase is GroupPhase.EMPTY


def test_a_static_member_that_restarts_with_other_metadata_rebalances() -> None:
    state_machine = machine()
    state_machine.join(instance_id="s1")
    state_machine.sync("s1-1", 1, "s1", s1_1=b"mine")
    state_machine.settle()
    again = state_machine.join(instance_id="s1", protocols=[("range", b"other")])
    assert again is not None
    assert (again.generation, again.skip_assignment) == (2, False)
    state_machine.join(instance_id="s2")
    state_machine.join("s1-2", instance_id="s1")
    assert state_machine.group.phase is GroupPhase.COMPLETING
    state_machine.join(instance_id="s2")  # restarted before it got its assignment
    assert state_machine.group.phase is GroupPhase.PREPARING


def test_a_static_member_may_be_away_for_its_session() -> None:
    state_machine = machine(0.1)
    state_machine.join(instance_id="s1", session_ms=100_000)
    state_machine.join()
    state_machine.wait(0.1)
    dynamic = next(name for name in state_machine.joined if name.startswith("app"))
    state_machine.sync("s1-1", 1, "s1")
    state_machine.sync(dynamic, 1)
    state_machine.settle()
    assert state_machine.join() is None
    assert state_machine.join(dynamic) is None
    state_machine.wait(60)
    assert state_machine.group.generation == 2
    assert "s1-1" in state_machine.group.members
    state_machine.wait(41)
    assert "s1-1" not in state_machine.group.members


def test_who_does_not_join_again_in_time_is_out() -> None:
    state_machine, (leader, follower) = stable()
    assert state_machine.join() is None
    state_machine.wait(9)
    assert state_machine.heartbeat(leader, 1) is GroupCode.REBALANCE_IN_PROGRESS
    assert state_machine.join(follower) is None
    state_machine.wait(5)
    state_machine.heartbeat(leader, 1)
    for _ in range(6):
        state_machine.wait(8)
        state_machine.heartbeat(leader, 1)
    assert state_machine.group.generation == 2
    assert leader not in state_machine.group.members
    assert state_machine.joined[follower].leader == follower


def test_who_does_not_sync_in_time_is_out_and_so_is_a_silent_leader() -> None:
    state_machine = machine(0.1)
    state_machine.join()
    state_machine.join()
    state_machine.wait(0.1)
    leader, follower = [
        name for name in state_machine.joined if state_machine.joined[name].code is GroupCode.NONE
    ]
    assert state_machine.joined[follower].leader == leader
    assert state_machine.sync(follower, 1) is None
    for _ in range(8):
        state_machine.wait(8)
        state_machine.heartbeat(leader, 1)
    assert state_machine.synced[follower].code is GroupCode.REBALANCE_IN_PROGRESS
    assert leader not in state_machine.group.members
    answer = state_machine.join(follower)
    assert answer is not None
    assert (answer.generation, answer.leader) == (2, follower)


def test_a_session_ends_without_requests_and_any_request_prolongs_it() -> None:
    state_machine, (first, second) = stable()
    for _ in range(4):
        state_machine.wait(4)
        state_machine.commit(first, 1)
        state_machine.heartbeat(second, 1)
    assert len(state_machine.group.members) == 2
    for _ in range(3):
        state_machine.wait(4)
        state_machine.commit(first, 1)
    assert ExpireMember("g", second, 1) in state_machine.group.actions
    assert state_machine.heartbeat(second, 1) is GroupCode.UNKNOWN_MEMBER_ID
    assert state_machine.heartbeat(first, 1) is GroupCode.REBALANCE_IN_PROGRESS


def test_a_lost_connection_ends_the_wait_and_the_session_runs() -> None:
    state_machine, (first, _) = stable()
    replies: list = []
    reply = replies.append
    state_machine.group.join(request(first), reply, state_machine.now_s)
    state_machine.wait(9)
    assert first in state_machine.group.members
    state_machine.group.lose(reply, state_machine.now_s)
    state_machine.wait(11)
    assert first not in state_machine.group.members


def test_assignments_that_cannot_be_committed_let_the_members_join_again() -> None:
    state_machine, (leader, follower) = stable()
    state_machine.join(leader)
    state_machine.join(follower)
    state_machine.sync(follower, 2)
    state_machine.sync(leader, 2, x=b"")
    state_machine.settle(GroupCode.COORDINATOR_NOT_AVAILABLE)
    assert state_machine.synced[follower].code is GroupCode.COORDINATOR_NOT_AVAILABLE
    assert state_machine.group.phase is GroupPhase.PREPARING
    state_machine.join(leader)
    state_machine.join(follower)
    assert state_machine.joined[leader].generation == 3


def test_members_that_leave_during_the_commit_are_removed_after_it() -> None:
    state_machine = machine()
    answer = state_machine.join()
    assert answer is not None
    state_machine.sync(answer.member_id, 1)
    assert state_machine.leave(answer.member_id) is GroupCode.NONE
    assert state_machine.synced[answer.member_id].code is GroupCode.UNKNOWN_MEMBER_ID
    settle, leave = state_machine.group.actions
    assert isinstance(settle, SettleGroup)
    assert isinstance(leave, LeaveGroup)
    del state_machine.group.actions[0]
    state_machine.group.settled(settle, GroupCode.NONE, 0.0)
    assert state_machine.group.actions[-1] == ExpireMember("g", answer.member_id, 1)


def test_the_first_rebalance_waits_for_more_members() -> None:
    state_machine = machine(0.5)
    assert state_machine.join() is None
    state_machine.wait(0.4)
    assert state_machine.join() is None
    state_machine.wait(0.4)
    assert state_machine.group.phase is GroupPhase.PREPARING
    state_machine.wait(0.1)
    assert (state_machine.group.generation, len(state_machine.group.members)) == (1, 2)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_protocol, "MEMBERS_OF_GROUP_MAX", 2)
    monkeypatch.setattr(classic_protocol, "PROTOCOL_BYTES_MAX", 100)
    state_machine = machine(0.1)
    state_machine.join()
    state_machine.join()
    answer = state_machine.join()
    assert answer is not None
    assert answer.code is GroupCode.GROUP_MAX_SIZE_REACHED
    other = machine()
    answer = other.join(protocols=[("range", bytes(96))])
    assert answer is not None
    assert answer.code is GroupCode.GROUP_MAX_SIZE_REACHED


def test_all_who_wait_are_answered_when_the_group_moves() -> None:
    state_machine, (first, second) = stable()
    state_machine.join()
    state_machine.join(first)
    state_machine.group.close(GroupCode.NOT_COORDINATOR)
    assert state_machine.joined[first].code is GroupCode.NOT_COORDINATOR
    assert second in state_machine.group.members
