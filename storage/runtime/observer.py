"""The interface of a tracer, which observes flushes, commits and requests to the store.

Also two context variables of the current request: TRACE, its trace context, and PRINCIPAL, its
client.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from tidelog.storage.codec.entry import Draft

TRACE: ContextVar[object] = ContextVar("tidelog-trace", default=None)
"""The current request's trace context; None without tracing."""
PRINCIPAL: ContextVar[str] = ContextVar("tidelog-principal", default="")
"""The authenticated client of the current request; empty without authentication, and in tasks of
the broker. A task that acts for several requests must set or clear this variable."""


class TracedRequest(Protocol):
    """A request that waits for a flush, with the trace context of its caller, if any."""

    @property
    def trace(self) -> object: ...


class ObservedRequest(Protocol):
    """A request to the store, in progress."""

    def outcome(self, outcome: str) -> None:
        """Report the outcome of a conditional PUT."""


class Observer(Protocol):
    """Observer of a broker.

    Each method returns a context manager, which the broker keeps open while the work runs.
    """

    def flush(self, requests: Sequence[TracedRequest]) -> AbstractContextManager[object]: ...

    def commit(self, draft: Draft) -> AbstractContextManager[object]: ...

    def request(
        self, verb: str, key: str, size: int | None
    ) -> AbstractContextManager[ObservedRequest | None]:
        """Observe a request to the object store. `size` is in bytes, None if it is not known."""


class _NoObserver:
    _nothing: AbstractContextManager[None] = nullcontext()

    def flush(self, requests: Sequence[TracedRequest]) -> AbstractContextManager[None]:
        return self._nothing

    def commit(self, draft: Draft) -> AbstractContextManager[None]:
        return self._nothing

    def request(self, verb: str, key: str, size: int | None) -> AbstractContextManager[None]:
        return self._nothing


NO_OBSERVER: Observer = _NoObserver()
