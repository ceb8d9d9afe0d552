"""Shares of the cluster state's bounds: no principal takes all of one (I4, I10)."""

import random
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.state.test_cluster_state import FIRST, HOUR_MS, IDS, Spec, applied, chunk
from tests.storage.state.test_levels import raising
from tests.support.properties import examples
from tidelog.storage.codec.entry import Commit, HotMark, IdempotencyKey
from tidelog.storage.core import object_keys
from tidelog.storage.core.acls import ADMIN, DEFAULT
from tidelog.storage.core.actions import (
    AddPartitions,
    AnyAction,
    Append,
    AssignByHand,
    CommitOffsets,
    CreateKey,
    CreateTopic,
    DeleteGroup,
    DeleteKey,
    DeleteTopic,
    GroupOffset,
    InitProducer,
    JoinGroup,
    LeaveGroup,
    MemberConfig,
    ProducerAppend,
    Seek,
    SeekPosition,
    SetQuotas,
    SettledMember,
    SettleGroup,
    Subscribe,
)
from tidelog.storage.core.errors import BoundReached, InvalidRequest, LogError, Throttled
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state import (
    access,
    committed_offsets,
    group_members,
    idempotency_records,
    producers,
)
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.cluster_state import ClusterState

ALICE, MALLORY = "User:alice", "User:mallory"
BOUND = 8
SHARE = BOUND // rules.PARTS
MAXIMA = {
    rules.TOPICS: (rules, "TOPICS_MAX"),
    rules.PARTITIONS: (rules, "PARTITIONS_MAX"),
    rules.PATTERNS: (rules, "PATTERNS_MAX"),
    rules.KEYS: (access, "KEYS_MAX"),
    rules.OFFSETS: (committed_offsets, "OFFSETS_MAX"),
    rules.OFFSET_METADATA_BYTES: (committed_offsets, "ALL_METADATA_BYTES_MAX"),
    rules.MEMBERS: (group_members, "MEMBERS_MAX"),
    rules.CLIENT_BYTES: (group_members, "CLIENT_BYTES_MAX"),
    rules.IDEMPOTENCY_KEYS: (idempotency_records, "KEYS_MAX"),
    rules.PRODUCERS: (producers, "PRODUCERS_MAX"),
    rules.PRODUCER_PARTITIONS: (producers, "SEQUENCES_MAX"),
}


@pytest.fixture(autouse=True)
def small_bounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in MAXIMA.values():
            patch.setattr(module, name, BOUND)
        yield


def state_of(level: int = 4) -> ClusterState:
    state = ClusterState("c", level)
    applied(state, FIRST)
    return state


def commit(
    state: ClusterState,
    *actions: AnyAction,
    principal: str = MALLORY,
    key: str | None = None,
    hot: HotMark | None = None,
    at_ms: int = 0,
) -> LogError | None:
    """Why an entry with one commit was refused, or None."""
    claim = None if key is None else IdempotencyKey(key, b"f", 2)
    spec = Spec(at_ms, [chunk(1)], [Commit(b"", list(actions), claim, hot, principal)])
    ((outcome,),) = applied(state, spec)
    return outcome.refusal


def usage(state: ClusterState) -> dict[str, dict[str, int]]:
    shares = state.shares
    counts_by_name = {
        name: {principal: n for principal, n in counts.items() if n}
        for name, counts in shares._used.items()
    }
    assert {name: sum(counts.values()) for name, counts in counts_by_name.items()} == {
        name: shares.total(name) for name in counts_by_name
    }
    return counts_by_name


def join(number: int, principal: str) -> JoinGroup:
    return JoinGroup("g", f"m{number}", "b", MemberConfig(principal=principal))


def offsets(group: str, *partitions: tuple[int, int]) -> CommitOffsets:
    return CommitOffsets(group, -1, [GroupOffset(IDS[t], p, 0) for t, p in partitions])


def wants(bound: str, number: int, principal: str, partitions: int) -> list[AnyAction]:
    """Actions that take one more of the bound; each number takes another.

    The topic `beta` has that many partitions.
    """
    match bound:
        case rules.TOPICS:
            return [CreateTopic(f"t{number}", f"{number:032}", 1, {})]
        case rules.PARTITIONS:
            return [AddPartitions(IDS[1], partitions + 1)]
        case rules.KEYS:
            return [CreateKey(f"k{number}", principal, bytes([number]) * 32)]
        case rules.OFFSETS:
            return [offsets(f"g{number}", (0, 0))]
        case rules.OFFSET_METADATA_BYTES:
            return [CommitOffsets(f"g{number}", -1, [GroupOffset(IDS[0], 0, 0, metadata="x")])]
        case rules.MEMBERS:
            return [join(number, principal)]
        case rules.PATTERNS:
            return [Subscribe("g", f"m{number}", [], "a.*")]
        case rules.CLIENT_BYTES:
            member = SettledMember(str(number), "", "", "", 1, 1, b"", b"", principal)
            return [SettleGroup(f"k{number}", "b", 0, 1, "consumer", "", str(number), [member])]
        case rules.PRODUCERS:
            return [InitProducer()]
        case rules.PRODUCER_PARTITIONS:
            return [ProducerAppend(0, 0, 1, number, 0, 0)]
    return [Append(0, 0, 1)]


@pytest.mark.parametrize("bound", rules.NAMES)
def test_principal_above_share_is_refused(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of()
    used_total = state.shares.total(bound)
    for other in set(MAXIMA) - {bound}:
        monkeypatch.setattr(*MAXIMA[other], 100)

    def take(number: int, principal: str) -> LogError | None:
        if bound == rules.PATTERNS:
            assert commit(state, join(number, principal)) is None
        key = str(number) if bound == rules.IDEMPOTENCY_KEYS else None
        actions = wants(bound, number, principal, len(state.topic("beta").partitions))
        return commit(state, *actions, principal=principal, key=key)

    assert [take(number, MALLORY) for number in range(SHARE)] == [None] * SHARE
    refusal = take(SHARE, MALLORY)
    assert isinstance(refusal, Throttled)
    assert f"the principal {MALLORY} has {SHARE} of its {SHARE} " in str(refusal)
    assert f"(bound {bound})" in str(refusal)
    assert state.shares.used(bound, MALLORY) == SHARE
    assert take(SHARE + 1, ALICE) is None
    free = BOUND - used_total - SHARE - 1
    assert [take(SHARE + 2 + number, ADMIN) for number in range(free)] == [None] * free
    assert take(BOUND + 1, ADMIN) is not None
    assert state.shares.total(bound) == BOUND
    again = ClusterState.decode(state.encode(), "checkpoints/7")
    assert (usage(again), again.encode()) == (usage(state), state.encode())


@pytest.mark.parametrize("level", [1, 2])
def test_below_level_3_nobody_has_a_share_and_the_bytes_are_as_before(level: int) -> None:
    state, nameless = state_of(level), state_of(level)
    for number in range(SHARE + 1):
        actions = [offsets("g", (0, 0)), Append(0, 0, 1)]
        assert commit(state, *actions, key=str(number)) is None
        assert commit(nameless, *actions, key=str(number), principal="") is None
        assert commit(state, join(number, MALLORY)) is None
        assert commit(nameless, join(number, MALLORY), principal="") is None
    fields, expected = (
        msgspec.msgpack.decode(cluster_state.encode())[6:] for cluster_state in (state, nameless)
    )
    assert fields == expected
    assert commit(state, Append(0, 0, 1), key="0", principal=ALICE) is None  # Mallory's
    assert state.partition("alpha", 0).high_watermark == SHARE + 1
    refusal = commit(state, SetQuotas(MALLORY, {"members": 1}))
    assert isinstance(refusal, InvalidRequest)
    assert "needs level 3" in str(refusal)


def test_a_key_is_of_its_principal_and_lasts_its_hour_whatever_others_do() -> None:
    state = state_of()
    for principal in (ALICE, MALLORY, ADMIN, ALICE):
        assert commit(state, Append(0, 0, 1), principal=principal, key="order-18") is None
    for number in range(BOUND):
        commit(state, Append(0, 0, 1), principal=ADMIN, key=str(number), at_ms=HOUR_MS // 10)
    assert state.idempotency_record("order-18", ALICE).placements[0].base_offset == 0
    assert state.idempotency_record("order-18", MALLORY).placements[0].base_offset == 1
    assert state.idempotency_record("order-18", "User:bob") is None
    assert isinstance(commit(state, Append(0, 0, 1), principal="", key="new"), Throttled)
    for hours in range(1, 20):
        applied(state, Spec(hours * HOUR_MS // 7, [], []))
    assert state.idempotency_record("order-18", ALICE) is None
    assert usage(state)[rules.IDEMPOTENCY_KEYS] == {}


def test_a_key_from_before_level_3_is_found_by_every_principal() -> None:
    state = state_of(2)
    assert commit(state, Append(0, 0, 1), principal=ALICE, key="order-18") is None
    state.apply(raising(state, 3), object_keys.wal(state.seq + 1))
    assert commit(state, Append(0, 0, 1), principal=ALICE, key="order-18") is None
    assert state.partition("alpha", 0).high_watermark == 1


@pytest.mark.parametrize("level", [2, 3])
def test_a_static_member_that_takes_over_a_pattern_needs_a_share_of_patterns(level: int) -> None:
    state = state_of(level)

    def static(name: str, place: str, principal: str) -> JoinGroup:
        return JoinGroup("g", name, "b", MemberConfig(principal=principal), place)

    for number in range(SHARE + 1):
        name = f"a{number}"
        assert commit(state, static(name, f"place{number}", ""), principal="") is None
        assert commit(state, Subscribe("g", name, [], "a.*"), principal="") is None
    for number in range(SHARE - 1):
        assert commit(state, join(number, MALLORY)) is None
        assert commit(state, Subscribe("g", f"m{number}", [], "a.*")) is None
    assert commit(state, static("b0", "place0", MALLORY)) is None
    assert state.shares.used(rules.PATTERNS, MALLORY) == SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_members, "MEMBERS_MAX", 100)
        refusal = commit(state, static("b1", "place1", MALLORY))
    if level == 2:
        assert refusal is None
        return
    assert isinstance(refusal, BoundReached)
    assert f"{MALLORY} has {SHARE} of its {SHARE} members that subscribe by pattern" in str(refusal)
    assert set(usage(state)[rules.PATTERNS]) == {"", MALLORY}
    assert state.members.member("g", "a1") is not None
    assert commit(state, Subscribe("g", "b0", ["alpha"])) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_members, "MEMBERS_MAX", 100)
        assert commit(state, static("b1", "place1", MALLORY)) is None
    assert state.shares.used(rules.PATTERNS, MALLORY) == SHARE


def test_a_quota_of_the_bounds_name_is_the_share_of_the_principal_or_of_all() -> None:
    state = state_of()
    assert commit(state, SetQuotas(MALLORY, {"members": 3}), principal=ADMIN) is None
    assert commit(state, SetQuotas(DEFAULT, {"members": 1}), principal=ADMIN) is None
    assert [commit(state, join(n, MALLORY)) is None for n in range(4)] == [True] * 3 + [False]
    assert [commit(state, join(n, ALICE)) is None for n in (7, 8)] == [True, False]


def test_what_one_commit_adds_is_counted_together() -> None:
    state = state_of()
    refusal = commit(state, *(offsets(f"g{number}", (0, 0)) for number in range(SHARE + 1)))
    assert "has 0 of its 2 committed offsets" in str(refusal)
    assert commit(state, *(offsets(f"g{number}", (0, 0)) for number in range(SHARE))) is None
    assert commit(state, *(offsets(f"g{number}", (0, 0)) for number in range(SHARE))) is None


def test_a_group_belongs_to_the_principal_of_its_first_offset() -> None:
    state = state_of()
    assert commit(state, offsets("g", (0, 0)), principal=ALICE) is None
    assert commit(state, offsets("g", (0, 1)), principal=MALLORY) is None
    assert usage(state)[rules.OFFSETS] == {ALICE: 2}
    assert commit(state, DeleteGroup("g"), principal=MALLORY) is None
    assert commit(state, offsets("g", (0, 0)), principal=MALLORY) is None
    assert usage(state)[rules.OFFSETS] == {MALLORY: 1}


def test_a_commit_of_a_hot_log_is_counted_and_not_refused() -> None:
    """Its client has the answer already; the broker refuses the next request."""
    state = state_of()
    for number in range(SHARE + 1):
        assert commit(state, Append(0, 0, 1), key=str(number), hot=HotMark("h", number)) is None
    assert usage(state)[rules.IDEMPOTENCY_KEYS] == {MALLORY: SHARE + 1}
    assert isinstance(state.check_new_key(MALLORY, 1), Throttled)
    assert state.check_new_key(ALICE, 1) is None


def test_the_placements_of_keys_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of a request with records in a thousand partitions takes 100 KB for an hour."""
    monkeypatch.setattr(idempotency_records, "PLACEMENTS_MAX", 4 * BOUND)
    state = state_of()
    assert state.check_new_key(MALLORY, BOUND) is None
    refusal = state.check_new_key(MALLORY, BOUND + 1)
    assert isinstance(refusal, BoundReached)
    assert f"needs {BOUND + 1} more: they expire after an hour" in str(refusal)
    many = [Append(0, 0, 1)] * BOUND
    assert commit(state, *many, key="a") is None
    assert isinstance(state.check_new_key(MALLORY, 1), BoundReached)
    assert state.check_new_key(ALICE, BOUND) is None
    assert commit(state, *many, key="b", principal=ALICE) is None
    assert state.check_new_key(ADMIN, 2 * BOUND) is None
    assert isinstance(state.check_new_key(ADMIN, 2 * BOUND + 1), BoundReached)
    for hours in range(1, 20):
        applied(state, Spec(hours * HOUR_MS // 7, [], []))
    assert state.check_new_key(MALLORY, BOUND) is None
    assert usage(state)[rules.IDEMPOTENCY_PLACEMENTS] == {}


@pytest.mark.parametrize(("keys", "share"), [(1, BOUND), (4, 2 * BOUND), (8, 4 * BOUND)])
def test_key_quota_raises_share(monkeypatch: pytest.MonkeyPatch, keys: int, share: int) -> None:
    monkeypatch.setattr(idempotency_records, "PLACEMENTS_MAX", 4 * BOUND)
    state = state_of()
    quotas = SetQuotas(MALLORY, {rules.IDEMPOTENCY_KEYS: keys})
    assert commit(state, quotas, principal=ADMIN) is None
    assert state.check_new_key(MALLORY, share) is None
    assert state.check_new_key(MALLORY, share + 1) is not None


def test_a_static_member_that_joins_again_needs_no_share() -> None:
    state = state_of()
    config = MemberConfig(principal=MALLORY)
    for number in range(BOUND):
        assert commit(state, JoinGroup("g", f"m{number}", "b", config, "static")) is None
    assert usage(state)[rules.MEMBERS] == {MALLORY: 1}


class Dice(random.Random):
    """Draws commits of several principals."""

    def action(self, principal: str) -> AnyAction:
        number, topic = self.randrange(4), self.randrange(3)
        group = self.choice(["g", "h"])
        match self.randrange(16):
            case 0:
                return CreateTopic(self.choice("abc"), IDS[topic], self.randint(1, 3), {})
            case 1:
                return AddPartitions(IDS[topic], self.randint(1, 5))
            case 2:
                return DeleteTopic(IDS[topic])
            case 3 | 4:
                return JoinGroup(group, f"m{number}", "b", MemberConfig(principal=principal), "s")
            case 5 | 6:
                return join(number, principal)
            case 7:
                return LeaveGroup(group, f"m{number}")
            case 8:
                pattern = self.choice(["", "a.*"])
                return Subscribe(group, f"m{number}", ["alpha"], pattern)
            case 9:
                return DeleteGroup(group)
            case 10 | 11:
                metadata = self.choice(["", "m"])
                group_offset = GroupOffset(IDS[topic], number, 0, metadata=metadata)
                return CommitOffsets(group, -1, [group_offset] * self.randint(1, 2))
            case 12:
                return InitProducer(self.randrange(-1, 4), self.randrange(-1, 2))
            case 13:
                return ProducerAppend(0, 0, 1, number, 0, 0)
            case 14:
                secret = bytes([number, self.randrange(3)]) * 16
                return CreateKey(f"k{self.randrange(9)}", principal or ALICE, secret)
        return DeleteKey(f"k{number}")

    def commit(self) -> Commit:
        principal = self.choice([ALICE, MALLORY, ""])
        key = IdempotencyKey(self.choice("uvwxyz"), b"f", 2) if self.random() < 0.4 else None
        actions = [self.action(principal) for _ in range(self.choice([1, 1, 1, 2, 3]))]
        hot = HotMark("h", self.randrange(99)) if self.random() < 0.1 else None
        return Commit(b"", actions, key, hot, principal)

    def history(self) -> list[Spec]:
        steps = [0, 1000, HOUR_MS // 7]
        at_ms, specs = 0, [FIRST]
        for _ in range(self.randint(1, 40)):
            at_ms += self.choice(steps)
            commits = [self.commit() for _ in range(self.randint(1, 3))]
            specs.append(Spec(at_ms, [chunk(1)], commits))
        return specs


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]), st.integers(0, 30))
@examples(200)
def test_i4_checkpoint_keeps_counts_of_shares(seed: int, level: int, raised_at: int) -> None:
    history = Dice(seed).history()
    state = ClusterState("c", level)
    for number, spec in enumerate(history):
        while number == raised_at and state.level < 3:
            state.apply(raising(state, state.level + 1), object_keys.wal(state.seq + 1))
        again = ClusterState.decode(state.encode(), "checkpoints/7")
        assert usage(again) == usage(state)
        outcomes = [str(applied(cluster_state, spec)) for cluster_state in (state, again)]
        assert outcomes[0] == outcomes[1]
        assert again.encode() == state.encode()


MEMBER = MemberConfig(principal=MALLORY)


def reader(state: ClusterState, group: str, config: MemberConfig = MEMBER) -> None:
    assert commit(state, JoinGroup(group, "m", "b", config)) is None


def refused(state: ClusterState, *actions: AnyAction) -> bool:
    """Whether a broker refuses to commit the actions."""
    with suppress(BoundReached), state.admitted(actions):
        return False
    return True


@pytest.fixture
def member_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a principal: 2,000 partitions. The other bounds are large."""
    share = 200_000
    monkeypatch.setattr(group_members, "MEMBER_BYTES_MAX", share * rules.PARTS)
    monkeypatch.setattr(group_members, "MEMBERS_MAX", 1000)
    monkeypatch.setattr(rules, "PARTITIONS_MAX", 10_000)


@pytest.mark.usefixtures("member_bytes")
def test_the_subscriptions_of_a_principal_have_a_share() -> None:
    state = state_of()
    names = [f"{number:040}" for number in range(500)]  # 100 bytes, and 100 for a partition
    for group in "gh":
        reader(state, group)
        subscribe = Subscribe(group, "m", names)
        assert not refused(state, subscribe)
        assert commit(state, subscribe) is None
    reader(state, "i")
    assert usage(state)[rules.MEMBER_BYTES] == {MALLORY: 2 * 500 * 100}
    subscription = Subscribe("i", "m", [*names, "more"])
    with (
        pytest.raises(BoundReached, match="bytes of subscriptions"),
        state.admitted([subscription]),
    ):
        pass
    assert not refused(state, Subscribe("g", "m", names[:10])), "a subscription that becomes less"
    reader(state, "j", MemberConfig(principal=ALICE))
    assert not refused(state, Subscribe("j", "m", names))
    assert commit(state, DeleteGroup("h")) is not None
    assert commit(state, LeaveGroup("h", "m")) is None
    assert usage(state)[rules.MEMBER_BYTES] == {MALLORY: 500 * 100}


@pytest.mark.usefixtures("member_bytes")
def test_the_assignments_of_a_principal_have_a_share() -> None:
    state = state_of()
    assert commit(state, CreateTopic("wide", IDS[2], 900, {})) is None
    for group in "ghi":
        reader(state, group)
    wide = 900 * 100 + len("wide") + 60
    assert commit(state, Subscribe("g", "m", ["wide"])) is None
    assert usage(state)[rules.MEMBER_BYTES] == {MALLORY: wide}
    by_hand = AssignByHand("h", "m", [TopicIdPartition(IDS[2], n) for n in range(900)])
    assert not refused(state, by_hand)
    assert refused(state, by_hand, Subscribe("i", "m", ["wide"])), "of one commit together"
    with state.admitted([by_hand]):
        assert refused(state, Subscribe("i", "m", ["wide"])), "a commit that is under way counts"
    assert not refused(state, Subscribe("i", "m", ["wide"]))
    assert commit(state, by_hand) is None
    seeks = [SeekPosition(IDS[2], number, 1) for number in range(900)]
    assert refused(state, Seek("h", "m", seeks))
    assert not refused(state, Seek("h", "m", seeks[:100]))
    assert commit(state, Seek("h", "m", seeks[:100])) is None
    assert usage(state)[rules.MEMBER_BYTES] == {MALLORY: wide + 1000 * 100}
    assert commit(state, DeleteTopic(IDS[2])) is None
    assert usage(state)[rules.MEMBER_BYTES] == {MALLORY: len("wide") + 60}


@pytest.mark.usefixtures("member_bytes")
def test_a_quota_of_members_raises_the_share_of_their_bytes() -> None:
    state = state_of()
    reader(state, "g")
    subscribe = Subscribe("g", "m", [f"{number:0440}" for number in range(400)])
    assert refused(state, subscribe)
    assert commit(state, SetQuotas(MALLORY, {rules.MEMBERS: 60}), principal=ADMIN) is None
    assert not refused(state, subscribe)
