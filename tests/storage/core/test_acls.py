"""ACLs: Kafka's rules, against the plainest reading of them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.core import acls
from tidelog.storage.core.acls import (
    OPERATIONS,
    RESOURCE_TYPES,
    TEXT_BYTES_MAX,
    Acl,
    AclFilter,
    Acls,
    Right,
)

NAMES = ["*", "a", "ab", "abc", "b", "kafka-cluster"]
PRINCIPALS = ["User:*", "User:alice", "User:bob"]
HOSTS = ["*", "10.0.0.1", "10.0.0.2"]

a_name = st.sampled_from(NAMES)
an_acl = st.builds(
    Acl,
    st.sampled_from(RESOURCE_TYPES),
    a_name,
    st.sampled_from(acls.PATTERN_TYPES),
    st.sampled_from(PRINCIPALS),
    st.sampled_from(HOSTS),
    st.sampled_from(OPERATIONS),
    st.sampled_from(acls.PERMISSIONS),
)


READ_TOPIC = Right("READ", "TOPIC")


def oracle(
    bindings: Sequence[Acl], principal: str, host: str, operation: str, kind: str, name: str
) -> bool:
    """Every binding looked at, each rule a line of its own."""
    allowed = denied = False
    for acl in bindings:
        is_about_it = acl.resource_type == kind and (
            (acl.pattern_type == "LITERAL" and acl.resource_name == name)
            or (acl.pattern_type == "LITERAL" and acl.resource_name == "*")
            or (
                acl.pattern_type == "PREFIXED"
                and name[: len(acl.resource_name)] == acl.resource_name
            )
        )
        is_about_them = acl.principal in (principal, "User:*") and acl.host in (host, "*")
        if not (is_about_it and is_about_them):
            continue
        is_it = acl.operation in ("ALL", operation)
        if acl.permission == "DENY":
            denied = denied or is_it
        elif operation == "DESCRIBE":
            implying = ("READ", "WRITE", "DELETE", "ALTER")
            allowed = allowed or is_it or acl.operation in implying
        elif operation == "DESCRIBE_CONFIGS":
            allowed = allowed or is_it or acl.operation == "ALTER_CONFIGS"
        else:
            allowed = allowed or is_it
    return allowed and not denied


@given(
    st.lists(an_acl, max_size=25),
    st.lists(st.integers(0, 24), max_size=10),
    st.sampled_from(PRINCIPALS[1:]),
    st.sampled_from(HOSTS[1:]),
    st.sampled_from(OPERATIONS[1:]),
    st.sampled_from(RESOURCE_TYPES),
    st.sampled_from([*NAMES, "abcd", "ba"]),
)
def test_a_decision_is_that_of_the_plain_rules(
    bindings: list[Acl],
    removed: list[int],
    principal: str,
    host: str,
    operation: str,
    kind: str,
    name: str,
) -> None:
    acl_set = Acls()
    for acl in bindings:
        acl_set.add(acl)
    removed_acls = {bindings[index] for index in removed if index < len(bindings)}
    for acl in [*removed_acls, *removed_acls]:
        acl_set.remove(acl)
    remaining_acls = [acl for acl in bindings if acl not in removed_acls]
    assert set(acl_set) == set(remaining_acls)
    assert len(acl_set) == len(set(remaining_acls))
    expected = oracle(remaining_acls, principal, host, operation, kind, name)
    assert acl_set.allows(principal, host, Right(operation, kind), name) is expected


def allow(operation: str, permission: str = "ALLOW", **changed: str) -> Acl:
    told = {
        "resource_type": "TOPIC",
        "resource_name": "t",
        "pattern_type": "LITERAL",
        "principal": "User:alice",
        "host": "*",
        "operation": operation,
        "permission": permission,
    }
    return Acl(**(told | changed))


def may(operation: str, *bindings: Acl, name: str = "t") -> bool:
    acl_set = Acls()
    for acl in bindings:
        acl_set.add(acl)
    return acl_set.allows("User:alice", "10.0.0.1", Right(operation, "TOPIC"), name)


@pytest.mark.parametrize("operation", ["READ", "WRITE", "DELETE", "ALTER"])
def test_what_implies_describe_does_so_only_where_it_allows(operation: str) -> None:
    assert may("DESCRIBE", allow(operation))
    assert may("DESCRIBE", allow("DESCRIBE"), allow(operation, "DENY"))
    assert not may("DESCRIBE_CONFIGS", allow(operation))


def test_a_deny_wins_whatever_else_allows() -> None:
    denied = allow("ALL", "DENY", principal="User:*", resource_name="*")
    assert not may("READ", allow("READ"), denied)
    assert not may("READ", denied, allow("ALL"))
    assert may("READ", allow("READ"), allow("WRITE", "DENY"))


def test_nothing_is_allowed_without_an_acl() -> None:
    assert not may("READ")
    assert not may("READ", allow("READ", resource_name="T"))
    assert not may("READ", allow("READ", host="10.0.0.2"))
    assert not may("CREATE", allow("READ"), allow("DESCRIBE"))


def test_a_star_is_a_wildcard_only_as_a_literal() -> None:
    assert may("READ", allow("READ", resource_name="*"))
    assert not may("READ", allow("READ", resource_name="*", pattern_type="PREFIXED"))
    assert may("READ", allow("READ", resource_name="*", pattern_type="PREFIXED"), name="*x")


TOPICS = [
    allow("READ"),
    allow("READ", resource_name="*"),
    allow("READ", resource_name="te", pattern_type="PREFIXED"),
    allow("WRITE", resource_name="te"),
]


@pytest.mark.parametrize(
    ("acl_filter", "indexes"),
    [
        (AclFilter(), [0, 1, 2, 3]),
        (AclFilter(resource_name="te"), [2, 3]),
        (AclFilter(resource_name="te", pattern_type="LITERAL"), [3]),
        (AclFilter(resource_name="test", pattern_type="MATCH"), [1, 2]),
        (AclFilter(resource_name="te", pattern_type="MATCH"), [1, 2, 3]),
        (AclFilter(resource_name="*", pattern_type="MATCH"), [1]),
        (AclFilter(pattern_type="MATCH"), [0, 1, 2, 3]),
        (AclFilter(pattern_type="PREFIXED"), [2]),
        (AclFilter(operation="WRITE"), [3]),
        (AclFilter(resource_type="GROUP"), []),
        (AclFilter(principal="User:*"), []),
        (AclFilter(host="*", permission="ALLOW", principal="User:alice"), [0, 1, 2, 3]),
        (AclFilter(permission="DENY"), []),
    ],
)
def test_a_filter_finds_what_kafkas_would(acl_filter: AclFilter, indexes: list[int]) -> None:
    assert [index for index, acl in enumerate(TOPICS) if acl_filter.matches(acl)] == indexes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"resource_type": "ANY"}, "resource_type 'ANY' is none of TOPIC"),
        ({"pattern_type": "MATCH"}, "pattern_type 'MATCH' is none of"),
        ({"operation": "ANY"}, "operation 'ANY' is none of"),
        ({"permission": "MAYBE"}, "permission 'MAYBE' is none of"),
        ({"resource_name": ""}, "resource_name must be"),
        ({"resource_name": "a\n"}, "resource_name must be"),
        ({"host": "x" * 256}, "host must be"),
        ({"principal": "alice"}, "a principal is User:"),
        ({"principal": "Group:a"}, "a principal is User:"),
        ({"principal": "User:"}, "a principal is User:"),
        ({"resource_type": "CLUSTER"}, "the only valid name for the CLUSTER resource"),
    ],
)
def test_a_binding_that_cannot_be(changed: dict[str, str], words: str) -> None:
    refusal = acls.check(msgspec.structs.replace(allow("READ"), **changed))
    assert refusal is not None
    assert words in str(refusal)


def test_a_binding_that_can() -> None:
    assert acls.check(allow("READ")) is None
    cluster = allow("CREATE", resource_type="CLUSTER", resource_name="kafka-cluster")
    assert acls.check(cluster) is None


class _Counting(dict[Any, Any]):
    """Counts its lookups."""

    lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(key, default)


def test_a_decision_looks_up_prefixes_of_the_lengths_that_bindings_have() -> None:
    rules = Acls()
    bindings = [
        Acl("TOPIC", prefix, "PREFIXED", "User:a", "*", "READ", "ALLOW")
        for prefix in ("ab", "xy", "abcd")
    ]
    for binding in bindings:
        rules.add(binding)
    rules.add(Acl("GROUP", "abc", "PREFIXED", "User:a", "*", "READ", "ALLOW"))

    def lookups() -> int:
        rules._named = counting = _Counting(rules._named)
        assert not rules.allows("User:b", "h", READ_TOPIC, "ab" * 100)
        return counting.lookups

    literals = 2
    assert lookups() == literals + 2
    rules.remove(bindings[0])
    assert lookups() == literals + 2  # the other prefix of this length is left
    rules.remove(bindings[1])
    assert lookups() == literals + 1


def test_a_decision_about_a_name_of_any_length_takes_few_lookups() -> None:
    rules = Acls()
    prefix = "x" * TEXT_BYTES_MAX
    rules.add(Acl("TOPIC", prefix, "PREFIXED", "User:a", "*", "READ", "ALLOW"))
    rules._named = counting = _Counting(rules._named)
    assert rules.allows("User:a", "h", READ_TOPIC, "x" * 60_000)
    assert not rules.allows("User:a", "h", READ_TOPIC, prefix[1:] + "y" * 60_000)
    assert counting.lookups <= 2 * 3
