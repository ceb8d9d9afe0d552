"""A request that changes the cluster, as operations see it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, TypeVar

from tidelog.service.security.caller import CallerRights
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import CLUSTER_NAME, Right
from tidelog.storage.core.errors import CommitUnknown

DECISION_S_MAX = 30.0
"""Maximum time that a request waits for a change of the cluster. After this time, the client gets
the error that the outcome is unknown."""

CHANGES_AT_ONCE = 100
"""Changes of one request that run at the same time, so that they share commits."""

T = TypeVar("T")
R = TypeVar("R")


class Change(Protocol):
    """A request that changes the cluster: its caller, and how its protocol charges and audits it.

    A request of Kafka has many changes, and each of them is charged and audited by itself.
    """

    @property
    def rights(self) -> CallerRights: ...

    def charge(self) -> None:
        """Charge one change to the caller's quota.

        Raises QuotaExceeded. Call it after the check of rights.
        """

    async def commit(self, name: str, change: Coroutine[Any, Any, T]) -> T:
        """Wait for the commit of a change of `name`, as `decided`, and write an audit line.

        **On a crash** before the line, the line is missing, but the change may be in the WAL.
        """


def no_line(_name: str, _status: int) -> None:
    """Write no audit line."""


class HttpChange(NamedTuple):
    """The change of a REST request, which the router has charged.

    The router also writes the audit line of a request that changes the cluster, after its response.
    A request for records may create a topic: then `audit` writes a line about the name of the topic
    and a status.
    """

    rights: CallerRights
    audit: Callable[[str, int], None] = no_line

    def charge(self) -> None:
        return

    async def commit(self, name: str, change: Coroutine[Any, Any, T]) -> T:
        return await audited(
            change,
            lambda is_done: self.audit(
                name, HTTPStatus.CREATED if is_done else HTTPStatus.GATEWAY_TIMEOUT
            ),
        )


async def begin(broker: Broker, change: Change, right: Right, name: str = CLUSTER_NAME) -> None:
    """Begin a change, as `begin_checked`, by a caller with the right to a resource."""
    await begin_checked(broker, change, lambda: change.rights.check(right, name))


async def begin_checked(
    broker: Broker, change: Change, check: Callable[[], Awaitable[None]]
) -> None:
    """Check the caller's right, charge one change, and read the newest state (I3).

    Then check the right again, because it may have been taken away. Raises Forbidden,
    QuotaExceeded, Unavailable.
    """
    await check()
    change.charge()
    await broker.refresh()
    await check()


async def audited(change: Coroutine[Any, Any, T], write_line: Callable[[bool], None]) -> T:
    """Wait for a change, as `decided`.

    Write an audit line, with True if the change is done, and with False if its outcome is unknown.
    """
    try:
        result = await decided(change)
    except CommitUnknown:
        write_line(False)
        raise
    write_line(True)
    return result


async def for_each(items: Sequence[T], serve: Callable[[T], Coroutine[Any, Any, R]]) -> list[R]:
    """Serve the items of a request, up to CHANGES_AT_ONCE at a time.

    Return the results in the order of the items.
    """
    results: list[R] = []
    for start in range(0, len(items), CHANGES_AT_ONCE):
        results += await asyncio.gather(*map(serve, items[start : start + CHANGES_AT_ONCE]))
    return results


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
