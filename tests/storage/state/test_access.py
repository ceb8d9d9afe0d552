"""Keys, ACLs and quotas in the cluster state: what entries do, and that checkpoints keep it."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from tidelog.storage.codec.entry import Commit as Committed
from tidelog.storage.codec.entry import Entry, decode, encode_header
from tidelog.storage.core import format_levels
from tidelog.storage.core.acls import DEFAULT, Acl
from tidelog.storage.core.actions import (
    AccessAction,
    AnyAction,
    CreateAcls,
    CreateKey,
    CreateTopic,
    DeleteAcls,
    DeleteKey,
    SetQuotas,
)
from tidelog.storage.state import access
from tidelog.storage.state.access import Access, digest
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome

READ = Acl("TOPIC", "t", "LITERAL", "User:alice", "*", "READ", "ALLOW")
WRITE = Acl("TOPIC", "t", "PREFIXED", "User:bob", "*", "WRITE", "DENY")


def apply(state: ClusterState, *commits: Sequence[AnyAction], at_ms: int = 1000) -> list[Outcome]:
    """One entry, through its bytes."""
    committed = [
        Committed(b"c%d" % number, list(actions)) for number, actions in enumerate(commits)
    ]
    entry = Entry(state.level, state.seq + 1, state.hash, b"e", "w", at_ms, [], committed)
    header, _ = encode_header(entry)
    return state.apply(
        decode(header, "wal/1", seq=entry.seq, previous=state.hash), "wal/1"
    ).outcomes


def reloaded(state: ClusterState) -> ClusterState:
    again = ClusterState.decode(state.encode(), "checkpoint")
    assert again.encode() == state.encode()
    return again


def key(name: str = "k1", secret: bytes = b"s", **changed: object) -> CreateKey:
    told = {"principal": "User:alice", "digest": digest(secret), "expires_ms": 0, "note": ""}
    return CreateKey(name, **(told | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(("level", "elements"), [(format_levels.FIRST, 9), (2, 17), (3, 18)])
def test_cluster_without_access_has_bytes_of_its_level(level: int, elements: int) -> None:
    used, unused = ClusterState("c", level), ClusterState("c", level)
    apply(unused, [])
    apply(used, [])
    old_bytes = unused.encode()
    assert len(msgspec.msgpack.decode(old_bytes)) == elements
    apply(used, [key()], [CreateAcls([READ])], [SetQuotas(DEFAULT, {"producer_byte_rate": 5})])
    apply(used, [DeleteKey("k1")], [DeleteAcls([READ])])
    apply(used, [SetQuotas(DEFAULT, {"producer_byte_rate": None})])
    used.seq, used.hash = unused.seq, unused.hash
    assert used.encode() == old_bytes


def test_a_key_is_found_by_the_digest_of_its_secret_until_it_is_deleted() -> None:
    state = ClusterState("c")
    apply(state, [key(expires_ms=77, note="of the laptop")], at_ms=500)
    for either_state in (state, reloaded(state)):
        access_key = either_state.access.key_of_digest(digest(b"s"))
        assert access_key is not None
        assert (access_key.key_id, access_key.principal, access_key.created_ms) == (
            "k1",
            "User:alice",
            500,
        )
        assert (access_key.expires_ms, access_key.note) == (77, "of the laptop")
        assert either_state.access.key_of_digest(digest(b"another")) is None
    apply(state, [DeleteKey("k1")], [DeleteKey("k1")])
    assert state.access.key_of_digest(digest(b"s")) is None
    assert not state.access.keys


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (key("k1", b"other"), "key 'k1' exists"),
        (key("k2", b"s"), "key 'k2' exists"),
        (key("k2", b"x", digest=b"short"), "32 bytes"),
        (key("k2", b"x", principal="alice"), "a principal is User:"),
        (key("k2", b"x", principal="User:*"), "User:* stands for all principals"),
        (key("k2", b"x", note="n" * 256), "note"),
        (key("", b"x"), "id is empty or too long"),
        (key("k2", b"x", expires_ms=-1), "cannot expire"),
        (CreateAcls([READ, Acl("TOPIC", "t", "ANY", "User:a", "*", "READ", "ALLOW")]), "pattern"),
        (SetQuotas("User:alice", {"connection_rate": 1}), "quota 'connection_rate'"),
        (SetQuotas("User:alice", {"producer_byte_rate": 0}), "1 to"),
        (SetQuotas("alice", {"producer_byte_rate": 1}), "a principal is User:"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(action: AccessAction, words: str) -> None:
    state = ClusterState("c")
    apply(state, [key()])
    version, old_access = state.access.version, state.access.kept()
    (outcome,) = apply(state, [action])
    assert words in str(outcome.refusal)
    assert (state.access.version, state.access.kept()) == (version, old_access)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS_MAX", "ACLS_MAX", "QUOTAS_MAX"):
        monkeypatch.setattr(access, name, 1)
    access_state = Access()
    actions: list[list[AccessAction]] = [
        [key("k1", b"1"), key("k2", b"2")],
        [CreateAcls([READ]), CreateAcls([WRITE])],
        [SetQuotas("User:a", {"producer_byte_rate": 1}), SetQuotas("User:b", {})],
    ]
    for fits, is_over in actions:
        assert access_state.check(fits) is None
        access_state.do(fits, 0)
        assert "at most" in str(access_state.check(is_over)) or "no more" in str(
            access_state.check(is_over)
        )
    assert access_state.check(CreateAcls([READ])) is None  # it is there already
    assert access_state.check(SetQuotas("User:a", {"producer_byte_rate": 2})) is None


def test_quotas_are_set_one_by_one_and_default_applies_otherwise() -> None:
    state = ClusterState("c")
    apply(
        state,
        [SetQuotas("User:alice", {"producer_byte_rate": 10})],
        [SetQuotas("User:alice", {"consumer_byte_rate": 20})],
        [SetQuotas(DEFAULT, {"producer_byte_rate": 5})],
    )
    for access_state in (state.access, reloaded(state).access):
        assert access_state.quota("producer_byte_rate", "User:alice") == 10
        assert access_state.quota("producer_byte_rate", "User:bob") == 5
        assert access_state.quota("consumer_byte_rate", "User:bob") is None
    apply(state, [SetQuotas("User:alice", {"producer_byte_rate": None})])
    assert state.access.quota("producer_byte_rate", "User:alice") == 5
    assert state.access.quota("consumer_byte_rate", "User:alice") == 20


def test_several_of_them_and_other_actions_are_one_commit_or_none() -> None:
    state = ClusterState("c")
    apply(state, [CreateAcls([READ]), SetQuotas("User:a", {"producer_byte_rate": 1})])
    assert READ in state.access.acls
    (outcome,) = apply(state, [CreateAcls([WRITE]), SetQuotas("User:a", {"?": 1})])
    assert outcome.refusal is not None
    assert WRITE not in state.access.acls
    (outcome,) = apply(state, [CreateAcls([WRITE]), CreateTopic("t", "a" * 32, 1, {})])
    assert outcome.refusal is not None


def test_i4_two_brokers_hold_the_same_to_the_byte() -> None:
    dice = random.Random(7)
    state_a, state_b = ClusterState("c"), ClusterState("c")
    for number in range(200):
        acl = Acl(
            "TOPIC", dice.choice("abc"), "LITERAL", f"User:{dice.choice('xy')}", "*", "READ", "DENY"
        )
        action: AnyAction = dice.choice(
            [
                key(f"k{dice.randrange(9)}", bytes([dice.randrange(9)])),
                DeleteKey(f"k{dice.randrange(9)}"),
                CreateAcls([acl]),
                DeleteAcls([acl]),
                SetQuotas(
                    f"User:{dice.choice('xy')}", {"producer_byte_rate": dice.choice([None, 3])}
                ),
            ]
        )
        apply(state_a, [action])
        apply(state_b, [action])
        if number % 20 == 0:
            state_b = reloaded(state_b)
        assert state_a.encode() == state_b.encode()


def test_actions_and_checkpoint_are_what_format_md_says() -> None:
    state = ClusterState("c")
    created_key = key(expires_ms=9, note="n")
    actions: list[AccessAction] = [
        created_key,
        DeleteKey("k0"),
        CreateAcls([READ]),
        DeleteAcls([WRITE]),
        SetQuotas("User:alice", {"producer_byte_rate": 7, "consumer_byte_rate": None}),
    ]
    acl = ["TOPIC", "t", "LITERAL", "User:alice", "*", "READ", "ALLOW"]
    decoded_actions = msgspec.msgpack.decode(msgspec.msgpack.encode(actions))
    assert decoded_actions == [
        ["create-key", "k1", "User:alice", digest(b"s"), 9, "n"],
        ["delete-key", "k0"],
        ["create-acls", [acl]],
        ["delete-acls", [["TOPIC", "t", "PREFIXED", "User:bob", "*", "WRITE", "DENY"]]],
        ["set-quotas", "User:alice", {"producer_byte_rate": 7, "consumer_byte_rate": None}],
    ]
    apply(state, *([action] for action in actions), at_ms=500)
    assert msgspec.msgpack.decode(state.encode())[13] == [
        [["k1", "User:alice", digest(b"s"), 500, 9, "n"]],
        [acl],
        {"User:alice": {"producer_byte_rate": 7}},
    ]
