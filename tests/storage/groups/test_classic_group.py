"""The classic protocol of one group: Kafka's answers, as a Kafka 4.3 gave them to the same
requests. Pure."""

import itertools

import pytest

from tests.storage.groups.classic import BOTH, Machine, request
from tidelog.storage.core.actions import ExpireMember, LeaveGroup, SettleGroup
from tidelog.storage.groups import classic_group
from tidelog.storage.groups.classic_group import ClassicGroup
from tidelog.storage.groups.classic_requests import Code, Identity, Phase, SyncRequest


def machine(delay_s: float = 0.0) -> Machine:
    numbers = itertools.count(1)
    return Machine(ClassicGroup("g", "b1", 0, 0, lambda: str(next(numbers)), delay_s))


def stable(count: int = 2, **more) -> tuple[Machine, list[str]]:
    """A group with so many members. The first is the leader."""
    one = machine(0.1 if count > 1 else 0.0)
    for _ in range(count):
        one.join(**more)
    one.wait(0.1)
    names = list(one.joined)
    names = [name for name in names if one.joined[name].code is Code.NONE]
    generation = one.group.generation
    for name in names[1:]:
        assert one.sync(name, generation) is None
    assignments = {name: name.encode() for name in names}
    leader_request = SyncRequest(Identity(names[0]), generation, assignments)
    one.group.sync(leader_request, lambda answer: one.synced.update({names[0]: answer}), one.now_s)
    one.settle()
    assert one.group.phase is Phase.STABLE
    assert {name: one.synced[name].assignment for name in names} == assignments
    return one, names


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"session_ms": 1_000}, Code.INVALID_SESSION_TIMEOUT),
        ({"session_ms": 1_800_001}, Code.INVALID_SESSION_TIMEOUT),
        ({"protocols": []}, Code.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, Code.INCONSISTENT_GROUP_PROTOCOL),
        ({"member_id": "ghost"}, Code.UNKNOWN_MEMBER_ID),
        ({"member_id": "ghost", "instance_id": "s"}, Code.UNKNOWN_MEMBER_ID),
        ({"instance_id": "a\nb"}, Code.INVALID_REQUEST),
        ({"rebalance_ms": -1}, Code.INVALID_REQUEST),
    ],
)
def test_a_join_that_cannot_be(more: dict, code: Code) -> None:
    one = machine()
    answer = one.join(**more)
    assert answer is not None
    assert (answer.code, answer.protocol_type, answer.protocol) == (code, None, None)
    assert one.group.is_idle


def test_a_new_dynamic_member_gets_its_id_first() -> None:
    one = machine()
    replies: list = []
    one.group.join(request(client_id="my app"), replies.append, 0.0)
    assert (replies[0].code, replies[0].member_id) == (Code.MEMBER_ID_REQUIRED, "my app-1")
    one.group.join(request("my app-1", client_id="my app"), replies.append, 0.0)
    answer = replies[1]
    assert (answer.code, answer.generation, answer.leader) == (Code.NONE, 1, "my app-1")
    assert [member.metadata for member in answer.members] == [b"r"]
    assert (answer.protocol_type, answer.protocol) == ("consumer", "range")
    old = machine()
    answer = old.join(version=3)
    assert answer is not None
    assert answer.code is Code.NONE


def test_an_id_of_a_member_is_short_and_printable() -> None:
    one = machine()
    answer = one.join(client_id="\x00" + "\u00e9" * 300)
    assert answer is not None
    assert answer.member_id.startswith("_\u00e9")
    assert answer.member_id.isprintable()
    assert len(answer.member_id.encode()) <= 255


def test_another_protocol_type_or_no_common_assignor() -> None:
    one, names = stable(2, protocols=BOTH)
    for more in ({"protocol_type": "connect"}, {"protocols": [("mine", b"")]}):
        answer = one.join(**more)
        assert answer is not None
        assert answer.code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert one.join() is None  # range: not the first choice, but all know it
    assert one.heartbeat(names[0], 1) is Code.REBALANCE_IN_PROGRESS
    for name in names:
        one.join(name, protocols=BOTH)
    assert one.group.protocol == "range"


def test_most_first_preferences_elect_the_assignor() -> None:
    one = machine(0.1)
    one.join(protocols=[("range", b""), ("sticky", b"")])
    one.join(protocols=[("sticky", b""), ("range", b"")])
    one.join(protocols=[("other", b""), ("sticky", b""), ("range", b"")])
    one.wait(0.1)
    assert one.group.protocol == "sticky"


def test_heartbeats_and_commits_of_each_phase() -> None:
    one = machine()
    answer = one.join()
    assert answer is not None
    me = answer.member_id
    assert one.heartbeat(me, 1) is Code.NONE
    assert one.commit(me, 1) is Code.REBALANCE_IN_PROGRESS
    assert one.sync(me, 1, **{me: b"a"}) is None
    assert one.commit(me, 1) is Code.REBALANCE_IN_PROGRESS
    one.settle()
    assert one.synced[me].assignment == b"a"
    assert (one.heartbeat(me, 1), one.commit(me, 1)) == (Code.NONE, Code.NONE)
    assert (one.heartbeat(me, 0), one.commit(me, 0)) == (Code.ILLEGAL_GENERATION,) * 2
    assert (one.heartbeat("ghost", 1), one.commit("ghost", 1)) == (Code.UNKNOWN_MEMBER_ID,) * 2
    assert one.commit("", -1) is Code.UNKNOWN_MEMBER_ID
    again = one.sync(me, 1)
    assert again is not None
    assert (again.code, again.assignment) == (Code.NONE, b"a")
    wrong = one.sync(me, 0)
    assert wrong is not None
    assert wrong.code is Code.ILLEGAL_GENERATION
    replies: list = []
    one.group.sync(SyncRequest(Identity(me), 1, {}, "consumer", "other"), replies.append, 0.0)
    assert replies[0].code is Code.INCONSISTENT_GROUP_PROTOCOL
    assert one.join() is None
    assert one.heartbeat(me, 1) is Code.REBALANCE_IN_PROGRESS
    assert one.commit(me, 1) is Code.NONE
    wait = one.sync(me, 1)
    assert wait is not None
    assert wait.code is Code.REBALANCE_IN_PROGRESS


def test_commits_wait_if_the_last_generation_was_not_committed() -> None:
    one = machine()
    answer = one.join()
    assert answer is not None
    me = answer.member_id
    one.join()
    assert one.group.phase is Phase.PREPARING
    assert one.commit(me, 1) is Code.REBALANCE_IN_PROGRESS


def test_leaving() -> None:
    one, (first, second) = stable()
    assert one.leave("ghost") is Code.UNKNOWN_MEMBER_ID
    assert one.leave(second) is Code.NONE
    assert one.group.actions == [LeaveGroup("g", second)]
    one.settle()
    assert one.heartbeat(first, 1) is Code.REBALANCE_IN_PROGRESS
    assert one.heartbeat(second, 1) is Code.UNKNOWN_MEMBER_ID
    again = one.join(first)
    assert again is not None
    assert (again.generation, len(again.members)) == (2, 1)
    one.leave(first)
    assert one.group.phase is Phase.EMPTY
    assert one.commit("", -1) is Code.NONE
    # The state still has both: only generation 1 was committed.
    assert ExpireMember("g", first, 1) in one.group.actions
    one.settle()
    assert one.group.is_idle


def test_a_new_id_that_leaves_is_forgotten() -> None:
    one = machine()
    replies: list = []
    one.group.join(request(), replies.append, 0.0)
    assert one.leave(replies[0].member_id) is Code.NONE
    assert one.group.is_idle
    one.group.join(request(), replies.append, 0.0)
    one.wait(classic_group.MEMBER_ID_S)
    one.group.join(request(replies[1].member_id), replies.append, 0.0)
    assert replies[2].code is Code.UNKNOWN_MEMBER_ID


def test_a_follower_that_repeats_its_join_disturbs_nobody() -> None:
    one, (leader, follower) = stable()
    again = one.join(follower)
    assert again is not None
    assert (again.code, again.generation, again.members) == (Code.NONE, 1, [])
    assert one.group.phase is Phase.STABLE
    assert one.join(leader) is None
    assert one.group.phase is Phase.PREPARING
    assert one.join(follower) is not None
    assert one.group.generation == 2
    repeated = one.join(follower)  # the phase is COMPLETING: its answer was lost
    assert repeated is not None
    assert (repeated.generation, one.group.phase) == (2, Phase.COMPLETING)
    assert one.join(follower, protocols=[("range", b"changed")]) is None
    assert one.group.phase is Phase.PREPARING


def test_a_static_member_that_restarts_keeps_its_assignment_and_rebalances_nobody() -> None:
    one = machine()
    answer = one.join(instance_id="s1")
    assert answer is not None
    old = answer.member_id
    assert old == "s1-1"
    one.sync(old, 1, "s1", s1_1=b"mine")
    one.settle()
    assert one.join(instance_id="s1") is None  # until its id is committed
    (action,) = one.group.actions
    assert isinstance(action, SettleGroup)
    assert (action.generation, action.members[0].assignment) == (1, b"mine")
    one.settle()
    new = one.joined["s1-2"]
    assert (new.code, new.generation, new.leader) == (Code.NONE, 1, "s1-2")
    assert new.skip_assignment
    assert [each.member_id for each in new.members] == ["s1-2"]
    again = one.sync("s1-2", 1, "s1")
    assert again is not None
    assert again.assignment == b"mine"
    assert one.heartbeat(old, 1, "s1") is Code.FENCED_INSTANCE_ID
    fenced = one.join(old, instance_id="s1")
    assert fenced is not None
    assert fenced.code is Code.FENCED_INSTANCE_ID
    one.join(instance_id="s1", version=8)
    one.settle()
    old_client = one.joined["s1-3"]
    assert not old_client.skip_assignment
    assert (old_client.leader, old_client.members) == ("s1-2", ())
    assert one.leave("", "s1") is Code.NONE
    assert one.group.phase is Phase.EMPTY


def test_a_static_member_that_restarts_with_other_metadata_rebalances() -> None:
    one = machine()
    one.join(instance_id="s1")
    one.sync("s1-1", 1, "s1", s1_1=b"mine")
    one.settle()
    again = one.join(instance_id="s1", protocols=[("range", b"other")])
    assert again is not None
    assert (again.generation, again.skip_assignment) == (2, False)
    one.join(instance_id="s2")
    one.join("s1-2", instance_id="s1")
    assert one.group.phase is Phase.COMPLETING
    one.join(instance_id="s2")  # restarted before it got its assignment
    assert one.group.phase is Phase.PREPARING


def test_a_static_member_may_be_away_for_its_session() -> None:
    one = machine(0.1)
    one.join(instance_id="s1", session_ms=100_000)
    one.join()
    one.wait(0.1)
    dynamic = next(name for name in one.joined if name.startswith("app"))
    one.sync("s1-1", 1, "s1")
    one.sync(dynamic, 1)
    one.settle()
    assert one.join() is None
    assert one.join(dynamic) is None
    one.wait(60)
    assert one.group.generation == 2
    assert "s1-1" in one.group.members
    one.wait(41)
    assert "s1-1" not in one.group.members


def test_who_does_not_join_again_in_time_is_out() -> None:
    one, (leader, follower) = stable()
    assert one.join() is None
    one.wait(9)
    assert one.heartbeat(leader, 1) is Code.REBALANCE_IN_PROGRESS
    assert one.join(follower) is None
    one.wait(5)
    one.heartbeat(leader, 1)
    for _ in range(6):
        one.wait(8)
        one.heartbeat(leader, 1)
    assert one.group.generation == 2
    assert leader not in one.group.members
    assert one.joined[follower].leader == follower


def test_who_does_not_sync_in_time_is_out_and_so_is_a_silent_leader() -> None:
    one = machine(0.1)
    one.join()
    one.join()
    one.wait(0.1)
    leader, follower = [name for name in one.joined if one.joined[name].code is Code.NONE]
    assert one.joined[follower].leader == leader
    assert one.sync(follower, 1) is None
    for _ in range(8):
        one.wait(8)
        one.heartbeat(leader, 1)
    assert one.synced[follower].code is Code.REBALANCE_IN_PROGRESS
    assert leader not in one.group.members
    answer = one.join(follower)
    assert answer is not None
    assert (answer.generation, answer.leader) == (2, follower)


def test_a_session_ends_without_requests_and_any_request_prolongs_it() -> None:
    one, (first, second) = stable()
    for _ in range(4):
        one.wait(4)
        one.commit(first, 1)
        one.heartbeat(second, 1)
    assert len(one.group.members) == 2
    for _ in range(3):
        one.wait(4)
        one.commit(first, 1)
    assert ExpireMember("g", second, 1) in one.group.actions
    assert one.heartbeat(second, 1) is Code.UNKNOWN_MEMBER_ID
    assert one.heartbeat(first, 1) is Code.REBALANCE_IN_PROGRESS


def test_a_lost_connection_ends_the_wait_and_the_session_runs() -> None:
    one, (first, _) = stable()
    replies: list = []
    reply = replies.append
    one.group.join(request(first), reply, one.now_s)
    one.wait(9)
    assert first in one.group.members
    one.group.lose(reply, one.now_s)
    one.wait(11)
    assert first not in one.group.members


def test_assignments_that_cannot_be_committed_let_the_members_join_again() -> None:
    one, (leader, follower) = stable()
    one.join(leader)
    one.join(follower)
    one.sync(follower, 2)
    one.sync(leader, 2, x=b"")
    one.settle(Code.COORDINATOR_NOT_AVAILABLE)
    assert one.synced[follower].code is Code.COORDINATOR_NOT_AVAILABLE
    assert one.group.phase is Phase.PREPARING
    one.join(leader)
    one.join(follower)
    assert one.joined[leader].generation == 3


def test_members_that_leave_during_the_commit_are_removed_after_it() -> None:
    one = machine()
    answer = one.join()
    assert answer is not None
    one.sync(answer.member_id, 1)
    assert one.leave(answer.member_id) is Code.NONE
    assert one.synced[answer.member_id].code is Code.UNKNOWN_MEMBER_ID
    settle, leave = one.group.actions
    assert isinstance(settle, SettleGroup)
    assert isinstance(leave, LeaveGroup)
    del one.group.actions[0]
    one.group.settled(settle, Code.NONE, 0.0)
    assert one.group.actions[-1] == ExpireMember("g", answer.member_id, 1)


def test_the_first_rebalance_waits_for_more_members() -> None:
    one = machine(0.5)
    assert one.join() is None
    one.wait(0.4)
    assert one.join() is None
    one.wait(0.4)
    assert one.group.phase is Phase.PREPARING
    one.wait(0.1)
    assert (one.group.generation, len(one.group.members)) == (1, 2)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_group, "MEMBERS_OF_GROUP_MAX", 2)
    monkeypatch.setattr(classic_group, "PROTOCOL_BYTES_MAX", 100)
    one = machine(0.1)
    one.join()
    one.join()
    answer = one.join()
    assert answer is not None
    assert answer.code is Code.GROUP_MAX_SIZE_REACHED
    other = machine()
    answer = other.join(protocols=[("range", bytes(96))])
    assert answer is not None
    assert answer.code is Code.GROUP_MAX_SIZE_REACHED


def test_all_who_wait_are_answered_when_the_group_moves() -> None:
    one, (first, second) = stable()
    one.join()
    one.join(first)
    one.group.close(Code.NOT_COORDINATOR)
    assert one.joined[first].code is Code.NOT_COORDINATOR
    assert second in one.group.members
