"""The caller of a request, as handlers see it: permissions and quotas.

service.server.router puts the caller into the request's scope before a handler runs. If security is
off, the caller is `ALL_RIGHTS`, which allows everything. If security is on,
service.security.authenticator finds the caller. A scope without a caller allows nothing.
"""

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple, Protocol

from tidelog.service.settings.security import SecuritySettings
from tidelog.storage.core.acls import (
    ADMIN,
    CLUSTER,
    CLUSTER_NAME,
    RIGHTS_TO,
    Right,
)
from tidelog.storage.core.errors import LogError, Throttled
from tidelog.storage.state.access import (
    BYTE_RATES,
    MUTATION_RATE,
    REQUEST_PERCENTAGE,
    REQUEST_RATE,
    Access,
    TopicFilter,
    all_topics,
)

UNITS = {
    REQUEST_PERCENTAGE: "% of the CPU time of a thread",
    **dict.fromkeys(BYTE_RATES, "bytes a second"),
    **dict.fromkeys((REQUEST_RATE, MUTATION_RATE), "requests a second"),
}
"""The unit of each quota that a broker enforces, for messages."""
BASIC = 'Basic realm="tidelog", charset="UTF-8"'
BEARER = 'Bearer realm="tidelog"'


class Credential(NamedTuple):
    """The key or token that proves a principal, or a session of the key.

    If `expires_ms` is 0, the credential never expires. For a token, `digest` is the thumbprint of
    the issuer's key. Only the broker that verified the token has the thumbprint; other brokers have
    NO_DIGEST.
    """

    key_id: str
    principal: str
    digest: bytes
    expires_ms: int
    session_id: str = ""
    """The id of the console's session; empty if the request has the key itself."""


class Unauthenticated(LogError):
    """The request has no valid credentials. A metric counts these errors by `kind`."""

    status = 401
    code = 40101

    def __init__(self, kind: str, why: str, challenge: str = BASIC) -> None:
        super().__init__(why)
        self.kind = kind
        self.headers = {"WWW-Authenticate": challenge}


class Forbidden(LogError):
    """The principal is not authorized."""

    status = 403
    code = 40301


def forbidden(principal: str, right: Right, name: str = CLUSTER_NAME) -> Forbidden:
    """Return the error of a caller without a right."""
    kind = right.resource_type
    resource = "the cluster" if kind == CLUSTER else f"{kind.lower()} {name!r}"
    return Forbidden(f"not authorized: {principal} may not {right.operation} {resource}")


class QuotaExceeded(Throttled):
    """The principal's quota on this broker is used up."""

    def __init__(self, principal: str, quota: str, rate: float, throttle_s: float) -> None:
        super().__init__(
            f"{principal} has used up its {quota} on this broker: {rate} {UNITS[quota]}",
            retry_after_ms=math.ceil(throttle_s * 1000),
        )


class CallerRights(Protocol):
    """The rights of a request's caller: a principal at an address."""

    @property
    def principal(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def proof(self) -> tuple[str, str, int]:
        """The ids of the key and of the console's session, and the time in ms when they end.

        The time is 0 if they never end. An id is empty if there is no key or no session.
        """

    def check_valid(self) -> None:
        """Raise Unauthenticated if the key or the session has ended since the request began."""

    def may(self, right: Right, name: str = CLUSTER_NAME) -> bool:
        """Whether the caller has the right to a resource, as the view of this broker says."""

    async def check(self, right: Right, name: str = CLUSTER_NAME) -> None:
        """Raise Forbidden unless the caller has the right, also after a refresh of the view.

        If the key was revoked after the request began, raise Unauthenticated.
        """

    def charge(self, quota: str, size: int = 0) -> None:
        """Charge bytes or requests. Raises QuotaExceeded while the principal is throttled."""

    def record(self, quota: str, size: float) -> None:
        """Charge bytes or time that are already used, even if the principal is throttled."""

    def has_quota(self, quota: str) -> bool:
        """Whether the principal, or `<default>`, has a quota of this name."""

    def throttle_s(self, quota: str) -> float:
        """Return the throttle time, or 0 if the principal is not throttled."""


class _AllRights:
    """The rights of every client where security is off."""

    principal = ""
    host = ""
    proof = ("", "", 0)

    def check_valid(self) -> None:
        return

    def may(self, right: Right, name: str = CLUSTER_NAME) -> bool:
        return True

    async def check(self, right: Right, name: str = CLUSTER_NAME) -> None:
        return

    def charge(self, quota: str, size: int = 0) -> None:
        return

    def record(self, quota: str, size: float) -> None:
        return

    def has_quota(self, quota: str) -> bool:
        return False

    def throttle_s(self, quota: str) -> float:
        return 0.0


class _NoRights(_AllRights):
    """The rights in a request whose caller was not admitted."""

    def check_valid(self) -> None:
        raise Forbidden("not authorized: the request has no caller")

    def may(self, right: Right, name: str = CLUSTER_NAME) -> bool:
        return False

    async def check(self, right: Right, name: str = CLUSTER_NAME) -> None:
        self.check_valid()

    def charge(self, quota: str, size: int = 0) -> None:
        self.check_valid()


ALL_RIGHTS: CallerRights = _AllRights()
NO_RIGHTS: CallerRights = _NoRights()


def rights_of(scope: MutableMapping[str, Any]) -> CallerRights:
    """Return the rights of an admitted request's caller."""
    rights: CallerRights = scope.get("rights", NO_RIGHTS)
    return rights


def address_of(scope: MutableMapping[str, Any]) -> str:
    """Return the address of a request's client, or "" if it is unknown."""
    client = scope.get("client")
    return rights_of(scope).host or (client[0] if client else "")


def super_users_of(settings: SecuritySettings) -> frozenset[str]:
    return frozenset({ADMIN, *settings.super_user_names})


def topic_filter(settings: SecuritySettings, right: Right) -> TopicFilter:
    """Return the function that decides if a principal has a right to a topic, from any host."""
    if settings.security == "off":
        return all_topics
    super_users = super_users_of(settings)

    def has_right(access: Access, principal: str, topic: str) -> bool:
        return principal in super_users or access.acls.allows(principal, "", right, topic)

    return has_right


def allowed_operations(rights: CallerRights, resource_type: str, name: str) -> list[str]:
    """Return the operations that the caller may do on a resource."""
    return [right.operation for right in RIGHTS_TO[resource_type] if rights.may(right, name)]


def charge_request(rights: CallerRights, *, is_mutation: bool) -> LogError | None:
    """Charge a request to the rates of its principal.

    Return the error if a rate is used up. A mutation changes topics, groups or access. Produce
    requests are not mutations, because the byte rate bounds them.
    """
    try:
        rights.charge(REQUEST_PERCENTAGE)  # the request's time is charged while it is served
        rights.charge(REQUEST_RATE, 1)
        if is_mutation:
            rights.charge(MUTATION_RATE, 1)
    except QuotaExceeded as error:
        return error
    return None
