"""A request that changes the cluster: rights, quota, outcomes by topic, audit lines.

Each change of a request has an outcome of its own, and each counts once in the quota of mutations,
as one request of REST does. **On a crash** during a request, some of its changes may be committed;
the client gets no answer and sends the request again.
"""

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind, message_of
from tidelog.service.operations.change_request import audited
from tidelog.service.security.caller import Forbidden, QuotaExceeded, Unauthenticated
from tidelog.service.slices import sliced
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.topic_configs import without_effect
from tidelog.storage.state.access import MUTATION_RATE

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)


class ChangeOutcome(NamedTuple):
    """The error of one change, or NONE without a message."""

    code: Code = Code.NONE
    message: str | None = None


class ChangeRefused(Exception):
    """A change that is refused with a code of Kafka's, where the log has no error of its own."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class AdminCall:
    """One request of an admin client; a `Change` of operations."""

    def __init__(self, context: Context, api: str, client: ApiClient) -> None:
        self.api = api
        self.client = client
        self.rights = client.rights
        self.throttle_ms = 0
        """For the answer: how long the client waits before its next request."""
        self._context = context

    async def outcome(
        self, change: Awaitable[None], forbidden: Code = Code.TOPIC_AUTHORIZATION_FAILED
    ) -> ChangeOutcome:
        """Wait for a change; return its error.

        The error has the code `forbidden` if the client may not do it. Raises Unauthenticated,
        which ends the connection.
        """
        try:
            await change
        except ChangeRefused as error:
            code, message = self._context.refusal(self.api, error.code), str(error)
        except Unauthenticated:
            raise
        except Forbidden as error:
            self._context.audit_refusal(self.api, self.client, error)
            code, message = self._context.refusal(self.api, forbidden), message_of(error)
        except LogError as error:
            code, message = self._code(error, RequestKind.ADMIN), message_of(error)
        else:
            return ChangeOutcome()
        return ChangeOutcome(code, message)

    def charge(self) -> None:
        """Charge one change to the quota of mutations.

        Raises QuotaExceeded, and ChangeRefused if the broker is stopping.
        """
        if self._context.is_draining:
            raise ChangeRefused(
                Code.REQUEST_TIMED_OUT, "the broker is stopping: ask another broker"
            )
        self.rights.charge(MUTATION_RATE, 1)

    def _code(self, error: LogError, kind: RequestKind) -> Code:
        """Return the code of an error. If a quota is used up, note how long the client waits."""
        if isinstance(error, QuotaExceeded):
            self.throttle_ms = max(self.throttle_ms, error.retry_after_ms)
        return self._context.code(self.api, error, kind)

    async def commit(self, name: str, change: Coroutine[Any, Any, R]) -> R:
        """Wait for the commit of a change of the topic or group `name`, and write an audit line.

        **On a crash** before the line, the line is missing, but the change may be in the WAL.
        """

        def write_line(is_done: bool) -> None:
            code = Code.NONE if is_done else Code.REQUEST_TIMED_OUT
            self._context.audit_change(self.api, self.client, name, code)

        return await audited(change, write_line)

    def warn_of_configs(self, topic: str, changes: Mapping[str, str | None]) -> None:
        """Log the configs that the client has set, but that have no effect.

        The answer cannot say so: an answer without an error has no text.
        """
        for text in without_effect(changes):
            self._context.warn(self.api, self.client, f"topic {topic!r}: {text}")


class GroupCall(AdminCall):
    """A request that changes groups.

    Their coordinator serves it also while the broker stops, until the broker releases its groups.
    """

    def charge(self) -> None:
        self.rights.charge(MUTATION_RATE, 1)

    async def code(self, change: Awaitable[object]) -> Code:
        """Wait for a change of a group. Return the code of its error, or NONE.

        Raises Unauthenticated, which ends the connection.
        """
        try:
            await change
        except ChangeRefused as error:
            return self._context.refusal(self.api, error.code)
        except Unauthenticated:
            raise
        except Forbidden as error:
            return self._context.denial(self.api, self.client, error, RequestKind.GROUP)
        except QuotaExceeded as error:
            return self._code(error, RequestKind.ADMIN)
        except LogError as error:
            return self._code(error, RequestKind.GROUP)
        return Code.NONE

    def quota_refusal(self) -> Code:
        """Charge one change. Return the code if the quota is used up."""
        try:
            self.charge()
        except QuotaExceeded as error:
            return self._code(error, RequestKind.GROUP)
        return Code.NONE


async def distinct(items: Iterable[T], key_of: Callable[[T], K]) -> tuple[list[T], set[K]]:
    """Return an item of each key, and the keys that a request has more than once.

    A request may have a million items, so this is done in slices.
    """
    by_key: dict[K, T] = {}
    repeated: set[K] = set()
    async for item in sliced(items):
        key = key_of(item)
        if key in by_key:
            repeated.add(key)
        by_key[key] = item
    return list(by_key.values()), repeated
