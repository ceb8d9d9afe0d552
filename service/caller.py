"""The caller of one request, as handlers know it: may they, and have they paid for it.

Off by default: then it is `EVERYTHING`, which allows all. Where security is on, service.security
puts the caller into the request's scope before any handler sees it.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from storage.acls import CLUSTER, CLUSTER_NAME, CREATE, DESCRIBE, GROUP, READ, TOPIC
from storage.errors import LogError, Throttled

BASIC = 'Basic realm="tidelog", charset="UTF-8"'
BEARER = 'Bearer realm="tidelog"'


class Unauthenticated(LogError):
    """Nobody who is known here; `kind` is counted."""

    status = 401
    code = 40101

    def __init__(self, kind: str, why: str, challenge: str = BASIC) -> None:
        super().__init__(why)
        self.kind = kind
        self.headers = {"WWW-Authenticate": challenge}


class Forbidden(LogError):
    """Known, and may not."""

    status = 403
    code = 40301


class QuotaExceeded(Throttled):
    """The principal's quota on this broker is used up."""


class Rights(Protocol):
    """What the caller of one request may do: they, and from where they ask."""

    @property
    def principal(self) -> str: ...

    @property
    def host(self) -> str: ...

    def may(self, operation: str, resource_type: str, name: str) -> bool: ...

    async def check(self, operation: str, resource_type: str, name: str) -> None:
        """Raises Forbidden; Unauthenticated where the key has gone since the request began."""
        ...

    def pay(self, quota: str, size: int = 0) -> None:
        """For so many bytes. Raises QuotaExceeded while others are not paid for yet."""
        ...

    def owe(self, quota: str, size: int) -> None:
        """For bytes that are sent already."""
        ...

    def owes_s(self, quota: str) -> float:
        """How long until all is paid for; 0 is at once."""
        ...


class _Everything:
    """The rights of everybody where security is off."""

    principal = ""
    host = ""

    def may(self, operation: str, resource_type: str, name: str) -> bool:
        return True

    async def check(self, operation: str, resource_type: str, name: str) -> None:
        return

    def pay(self, quota: str, size: int = 0) -> None:
        return

    def owe(self, quota: str, size: int) -> None:
        return

    def owes_s(self, quota: str) -> float:
        return 0.0


EVERYTHING: Rights = _Everything()


def rights_of(scope: MutableMapping[str, Any]) -> Rights:
    """Of a request that was let in."""
    rights: Rights = scope.get("rights", EVERYTHING)
    return rights


def may_describe_group(rights: Rights, group: str) -> bool:
    """Who may describe the cluster may list all groups, as Kafka has it."""
    return rights.may(DESCRIBE, CLUSTER, CLUSTER_NAME) or rights.may(DESCRIBE, GROUP, group)


async def check_creation(rights: Rights, topic: str) -> None:
    """Raises Forbidden unless any topic, or this one, may be created."""
    if not rights.may(CREATE, CLUSTER, CLUSTER_NAME):
        await rights.check(CREATE, TOPIC, topic)


async def check_topics(rights: Rights, operation: str, topics: Iterable[str]) -> None:
    """Raises Forbidden."""
    for topic in dict.fromkeys(topics):
        await rights.check(operation, TOPIC, topic)


async def check_found(rights: Rights, topic: str) -> None:
    """That a topic may be read which a pattern may have found: its name is told only to whom it may
    be shown. Raises Forbidden."""
    if rights.may(DESCRIBE, TOPIC, topic):
        await rights.check(READ, TOPIC, topic)
    elif not rights.may(READ, TOPIC, topic):
        raise Forbidden("not authorized: a topic that the pattern finds may not be read")
