"""The interface of a tracer, which observes flushes, commits and requests to the store."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tidelog.storage.codec.entry import Draft


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
