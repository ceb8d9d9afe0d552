"""A request that changes the cluster, as operations see it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

from tidelog.service.security.caller import CallerRights
from tidelog.storage.core.acls import TOPIC
from tidelog.storage.core.errors import CommitUnknown

DECISION_S_MAX = 30.0
"""Maximum time that a request waits for a change of the cluster. After this time, the client gets
the error that the outcome is unknown."""

T = TypeVar("T")


class Change(Protocol):
    """A request that changes the cluster: its caller, and how its protocol charges and audits it.
    A request of Kafka has many changes, and each of them is charged and audited by itself."""

    @property
    def rights(self) -> CallerRights: ...

    def charge(self) -> None:
        """Charge one change to the caller's quota. Raises QuotaExceeded. Call it after the check of
        rights."""

    async def commit(self, name: str, change: Coroutine[Any, Any, T]) -> T:
        """Wait for the commit of a change of `name`, as `decided`, and write an audit line. **On a
        crash** before the line, the line is missing, but the change may be in the WAL."""


class HttpChange(NamedTuple):
    """The change of a REST request. The router has charged the request, and writes its audit line
    after the response."""

    rights: CallerRights

    def charge(self) -> None:
        return

    async def commit(self, name: str, change: Coroutine[Any, Any, T]) -> T:
        return await decided(change)


async def begin(change: Change, operation: str, topic: str) -> None:
    """Check that the caller may do an operation on a topic, and charge one change. Raises
    Forbidden, QuotaExceeded."""
    await change.rights.check(operation, TOPIC, topic)
    change.charge()


async def decided(change: Coroutine[Any, Any, T]) -> T:
    """Wait for a change of the cluster, and return its result.

    Raises CommitUnknown after DECISION_S_MAX. The commit continues, because Broker shields it from
    the timeout.
    """
    try:
        async with asyncio.timeout(DECISION_S_MAX):
            return await change
    except TimeoutError:
        raise CommitUnknown(
            f"commit outcome unknown after {DECISION_S_MAX:.0f} s: check before you repeat it"
        ) from None
