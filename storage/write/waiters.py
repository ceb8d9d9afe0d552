"""The callers that wait for the outcomes of a broker's requests, and their deadlines."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tidelog.storage.core.errors import CommitUnknown, LogError
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.runtime.tasks import retrieve_exception
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.write.requests import AppendRequest

log = logging.getLogger("tidelog.writer")

Waiter: TypeAlias = asyncio.Future[list[AppendedRange]]


class UnderWay(NamedTuple):
    """The first request with an idempotency key, until the request has an answer."""

    request: AppendRequest
    fingerprint: bytes
    waiter: Waiter


class Waiters:
    """Requests without an answer. Owned by one event loop."""

    def __init__(self, answer_timeout_s: float, state: Callable[[], ClusterState]) -> None:
        """`state` returns the cluster state, which has the owner of idempotency keys."""
        self._answer_timeout_s = answer_timeout_s
        self._state = state
        self._waiters: dict[AppendRequest, Waiter] = {}
        self._keyed: dict[tuple[str, str], UnderWay] = {}
        # Owner and idempotency key under which `_keyed` has each request. `state.owner` may return
        # another owner later, because the cluster's level may be raised meanwhile.
        self._identities: dict[AppendRequest, tuple[str, str]] = {}
        self._deadlines: deque[tuple[float, Waiter]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, request: AppendRequest) -> bool:
        return request in self._waiters

    def expect(self, request: AppendRequest) -> Waiter:
        """Return the request's waiter. From now on a retry finds the request under its key."""
        if (earlier_waiter := self._waiters.get(request)) is not None:
            return earlier_waiter
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiters[request] = waiter
        if request.key is not None:
            waiter.add_done_callback(retrieve_exception)  # all its callers may go away
            under_way = UnderWay(request, request.key.fingerprint, waiter)
            identity = self._state().owner(request.principal), request.key.key
            if self._keyed.setdefault(identity, under_way) is under_way:
                self._identities[request] = identity
        return waiter

    def first_with(self, key: str, principal: str) -> UnderWay | None:
        """Return the principal's first request that has this key and no answer yet."""
        return self._keyed.get((self._state().owner(principal), key))

    async def outcome_of(self, first: UnderWay) -> list[AppendedRange]:
        """Wait for the first request of a key, for the answer timeout at most.

        A request in the hot log has no time limit of its own.
        """
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                return await asyncio.shield(first.waiter)
        except TimeoutError:
            raise CommitUnknown(
                "the first request with this Idempotency-Key has no outcome yet: retry with the key"
            ) from None

    def limit(self, waiter: Waiter, deadline_s: float) -> None:
        # Keep the waiter, not the request: its records would stay in memory until the deadline.
        self._deadlines.append((deadline_s, waiter))

    def limit_all(self, last_s: float) -> None:
        """Move all deadlines after `last_s` to `last_s`."""
        self._deadlines = deque((min(at_s, last_s), it) for at_s, it in self._deadlines)

    def pop_late(self, now_s: float) -> dict[AppendRequest, None]:
        """Return the requests whose deadline is over, and forget the deadlines."""
        late: set[Waiter] = set()
        while self._deadlines:
            deadline_s, waiter = self._deadlines[0]
            if not waiter.done():
                if deadline_s > now_s:
                    break
                late.add(waiter)
            self._deadlines.popleft()
        # A dict, for its order: callers are answered in the order in which they came.
        return (
            {request: None for request, waiter in self._waiters.items() if waiter in late}
            if late
            else {}
        )

    def time_out(self, request: AppendRequest, error: CommitUnknown) -> None:
        """Answer the caller with the error.

        Keep the request, because its commit goes on, and a retry may wait for its outcome.
        """
        if not self._waiters[request].done():
            self._waiters[request].set_exception(error)

    def answer(
        self, request: AppendRequest, placements: list[AppendedRange], error: LogError | None
    ) -> None:
        waiter = self._waiters.pop(request)
        identity = self._identities.pop(request, None)
        if identity is not None:
            del self._keyed[identity]
        if waiter.done():
            return  # its caller has gone away, or `time_out` has answered it
        if error is None:
            waiter.set_result(placements)
        else:
            waiter.set_exception(error)


def log_refusal(waiter: Waiter) -> None:
    """Log a refusal of a request with acks=0 or 1: no caller waits for it."""
    if not waiter.cancelled() and (error := waiter.exception()) is not None:
        log.warning("a request without a waiting caller was not committed: %s", error)
