"""Threads of a part that is closed while requests may still run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tidelog.storage.core.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """Threads that refuse work after their end with the error of a request that was not done."""

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **more: P.kwargs) -> Future[T]:
        """Run the call in a thread. Raises Unavailable after `shutdown`."""
        try:
            return super().submit(call, *arguments, **more)
        except RuntimeError as error:
            raise Unavailable("the broker stops: ask another one") from error
