"""Access control lists with Kafka's meaning: operations that a principal may do on a resource.

Pure. The rules are those of Kafka's StandardAuthorizer. A binding applies if its resource,
principal and host match. A binding that denies takes precedence over bindings that allow. An
operation that no binding allows is denied. Callers check for super users before they call `allows`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from tidelog.storage.core.errors import InvalidRequest

TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = "TOPIC", "GROUP", "CLUSTER", "TRANSACTIONAL_ID"
RESOURCE_TYPES = (TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID)
LITERAL, PREFIXED = "LITERAL", "PREFIXED"
PATTERN_TYPES = (LITERAL, PREFIXED)
ANY, MATCH = "ANY", "MATCH"
"""Values in filters. ANY selects every value. MATCH, a pattern type, selects the bindings that
cover the filter's resource name."""

READ, WRITE, CREATE, DELETE, ALTER = "READ", "WRITE", "CREATE", "DELETE", "ALTER"
DESCRIBE, ALL = "DESCRIBE", "ALL"
DESCRIBE_CONFIGS, ALTER_CONFIGS = "DESCRIBE_CONFIGS", "ALTER_CONFIGS"
IDEMPOTENT_WRITE = "IDEMPOTENT_WRITE"
OPERATIONS = (
    ALL,
    READ,
    WRITE,
    CREATE,
    DELETE,
    ALTER,
    DESCRIBE,
    "CLUSTER_ACTION",
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    IDEMPOTENT_WRITE,
)


class Right(NamedTuple):
    """A right to do an operation on a resource of this type."""

    operation: str
    resource_type: str


_OPERATIONS_OF = {
    TOPIC: (READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS),
    GROUP: (READ, DELETE, DESCRIBE),
    CLUSTER: (CREATE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS),
}
RIGHTS_TO = {
    resource_type: tuple(Right(operation, resource_type) for operation in operations)
    for resource_type, operations in _OPERATIONS_OF.items()
}
"""The rights that brokers check, by resource type."""
ALLOW, DENY = "ALLOW", "DENY"
PERMISSIONS = (ALLOW, DENY)

WILDCARD = "*"
EVERYBODY = "User:*"
ADMIN = "User:admin"
"""The principal of `admin_key`, the key in a broker's settings. It is always a super user."""
DEFAULT = "<default>"
"""The name under which quotas for all principals are stored. If a principal has no quota of a kind,
DEFAULT's quota of this kind applies."""
CLUSTER_NAME = "kafka-cluster"
"""The only resource of type CLUSTER."""
TEXT_BYTES_MAX = 255
"""Largest size of a resource name, a principal or a host."""

_IMPLYING = {
    DESCRIBE: frozenset({DESCRIBE, READ, WRITE, DELETE, ALTER, ALL}),
    DESCRIBE_CONFIGS: frozenset({DESCRIBE_CONFIGS, ALTER_CONFIGS, ALL}),
}
"""By operation: the operations whose ALLOW allows this operation. So ALLOW of READ also allows
DESCRIBE. DENY of ALL denies all operations. Any other DENY denies only its own operation."""


class Acl(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One binding: it allows or denies an operation on resources to a principal from a host."""

    resource_type: str
    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str


class AclFilter(NamedTuple):
    """A filter of bindings. None and ANY match every value."""

    resource_type: str = ANY
    resource_name: str | None = None
    pattern_type: str = ANY
    principal: str | None = None
    host: str | None = None
    operation: str = ANY
    permission: str = ANY

    def matches(self, acl: Acl) -> bool:
        """Return whether the filter selects the binding, as Kafka's AclBindingFilter does."""
        return (
            self.resource_type in (ANY, acl.resource_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (ANY, acl.operation)
            and self.permission in (ANY, acl.permission)
            and self._matches_name(acl)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern_type not in (ANY, MATCH, acl.pattern_type):
            return False
        if self.resource_name is None:
            return True
        if self.pattern_type == MATCH:
            return covers(acl, self.resource_name)
        return self.resource_name == acl.resource_name


def covers(acl: Acl, name: str) -> bool:
    """Return whether the binding, for its type of resource, applies to the resource `name`."""
    if acl.pattern_type == PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in (WILDCARD, name)


def check(acl: Acl) -> InvalidRequest | None:
    """Return why the binding is not valid. If it is valid, return None."""
    for field, value, words in (
        ("resource_type", acl.resource_type, RESOURCE_TYPES),
        ("pattern_type", acl.pattern_type, PATTERN_TYPES),
        ("operation", acl.operation, OPERATIONS),
        ("permission", acl.permission, PERMISSIONS),
    ):
        if value not in words:
            return InvalidRequest(f"{field} {value[:99]!r} is none of {', '.join(words)}")
    for field, text in (("resource_name", acl.resource_name), ("host", acl.host)):
        if not _is_text(text):
            return InvalidRequest(f"{field} must be 1 to {TEXT_BYTES_MAX} printable bytes")
    if acl.resource_type == CLUSTER and acl.resource_name != CLUSTER_NAME:
        return InvalidRequest(
            f"the only valid name for the CLUSTER resource is {CLUSTER_NAME}, "
            f"not {acl.resource_name!r}"
        )
    return check_principal(acl.principal)


def check_principal(principal: str) -> InvalidRequest | None:
    """Return why the name is no valid principal. If it is valid, return None."""
    kind, _, name = principal.partition(":")
    if kind == "User" and name and _is_text(principal) and principal.isprintable():
        return None
    return InvalidRequest(
        f"a principal is User: followed by a name, {TEXT_BYTES_MAX} bytes at most, "
        f"not {principal[:99]!r}"
    )


def _is_text(text: str) -> bool:
    return 1 <= len(text.encode("utf-8", "replace")) <= TEXT_BYTES_MAX and text.isprintable()


class Acls:
    """All bindings, in the order of their commits.

    The cost of a decision is one lookup for each length of the prefixes that bindings have. It does
    not depend on the number of bindings, and a client may ask for a name of any length.
    """

    def __init__(self) -> None:
        self._all: dict[Acl, None] = {}
        self._named: dict[tuple[str, str, str], dict[Acl, None]] = {}
        self._prefixes: dict[str, dict[int, int]] = {}
        """By type of resource: the number of prefixes of each length."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._all)

    def __contains__(self, acl: Acl) -> bool:
        return acl in self._all

    def add(self, acl: Acl) -> None:
        self._all[acl] = None
        place = _place(acl)
        if place not in self._named:
            self._named[place] = {}
            self._count_prefix(acl, 1)
        self._named[place][acl] = None

    def remove(self, acl: Acl) -> None:
        if self._all.pop(acl, acl) is None:
            acls = self._named[_place(acl)]
            del acls[acl]
            if not acls:
                del self._named[_place(acl)]
                self._count_prefix(acl, -1)

    def _count_prefix(self, acl: Acl, change: int) -> None:
        if acl.pattern_type != PREFIXED:
            return
        # A thread may iterate over the lengths, so a change makes a new dict.
        counts, length = dict(self._prefixes.get(acl.resource_type, {})), len(acl.resource_name)
        counts[length] = counts.get(length, 0) + change
        if not counts[length]:
            del counts[length]
        self._prefixes[acl.resource_type] = counts

    def allows(self, principal: str, host: str, right: Right, name: str = CLUSTER_NAME) -> bool:
        """Return whether the principal has the right to the resource, from this host."""
        operation = right.operation
        is_allowed = False
        for acl in self._of(right.resource_type, name):
            if acl.principal not in (principal, EVERYBODY) or acl.host not in (host, WILDCARD):
                continue
            if acl.permission == DENY:
                if acl.operation in (operation, ALL):
                    return False
            elif acl.operation in _IMPLYING.get(operation, (operation, ALL)):
                is_allowed = True
        return is_allowed

    def _of(self, resource_type: str, name: str) -> Iterable[Acl]:
        named = self._named
        for literal in (name, WILDCARD):
            yield from named.get((resource_type, LITERAL, literal), ())
        for length in self._prefixes.get(resource_type, ()):
            if length <= len(name):
                yield from named.get((resource_type, PREFIXED, name[:length]), ())


def _place(acl: Acl) -> tuple[str, str, str]:
    return acl.resource_type, acl.pattern_type, acl.resource_name
