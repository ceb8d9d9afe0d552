"""The release of REST groups by a broker that stops: the requests under way end, and new ones wait.

Afterwards, no member has a request at this broker, so the next coordinator can serve the members at
once. The callers of `RestGroups` wrap each request of a member in `serving`.

**On a crash** during the release: as on every crash of a coordinator (groups.coordinator).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from tidelog.storage.core.errors import LogError

RELEASE_S = 2.0
"""Longest wait for the requests under way. A request needs this time only if its client does not
take the answer."""
COMMIT_S = 1.0
"""Longest wait for the commit of offsets. Without the commit, members read some records again."""


class GroupRequests:
    """The requests for groups that this broker serves now. Owned by one event loop."""

    def __init__(self) -> None:
        self.is_released = False
        """Whether this broker has given up its groups: other brokers coordinate them."""
        self._under_way = 0
        self._is_releasing = False
        self._is_idle = asyncio.Event()
        self._is_decided = asyncio.Event()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request as under way until the context ends."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def until_decided(self) -> None:
        """If the release has begun, wait until it has ended."""
        if self._is_releasing:
            await self._is_decided.wait()

    def begin_release(self) -> None:
        """Let new requests wait in `until_decided` from now on."""
        self._is_releasing = True
        self._is_idle.clear()

    async def finish(self, commit_delivered: Callable[[], Awaitable[None]]) -> bool:
        """Wait up to RELEASE_S for the requests under way, then commit the delivered offsets.

        Return whether all requests ended.
        """
        if self._under_way:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._is_idle.wait()
        is_idle = not self._under_way
        with contextlib.suppress(LogError, TimeoutError):
            async with asyncio.timeout(COMMIT_S):
                await commit_delivered()
        return is_idle

    def end_release(self) -> None:
        """Let the requests go on that wait in `until_decided`."""
        self.is_released = True
        self._is_decided.set()
