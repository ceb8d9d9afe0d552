"""Waits for new records: long polls and followers, by partition and by topic.

A commit sets the waiters of its partitions once each, whatever the number of records. A waiter of a
topic is one entry here, whatever the number of its partitions. Owned by one event loop.
"""

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

from tidelog.storage.core.errors import Unavailable

Waiter: TypeAlias = "asyncio.Future[None]"

ANY_PARTITION = -1
"""In place of a partition's number: the waiter is for all partitions of the topic."""


class RecordWaits(dict[tuple[str, int], set[Waiter]]):
    """The waiters of one broker, by topic and partition."""

    def __init__(self) -> None:
        super().__init__()
        self.is_draining = False

    def end(self) -> None:
        """Wake all. From now on, a wait raises Unavailable."""
        self.is_draining = True
        self.wake_all()

    async def wait(
        self, partitions: Iterable[tuple[str, int]], waiter: Waiter, deadline: float
    ) -> bool:
        """Wait until one of the partitions gets records, or a caller sets `waiter`. Return False if
        the loop's time reaches `deadline` first."""
        if self.is_draining:
            raise Unavailable("this broker is shutting down: continue at another broker")
        keys = list(partitions)
        for key in keys:
            self.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            for key in keys:
                waiting = self.get(key)
                if waiting is not None:
                    waiting.discard(waiter)
                    if not waiting:
                        del self[key]
        return True

    def wake(self, topic: str, partition: int) -> None:
        """Wake who waits for records of the partition, or of the topic."""
        self._set((topic, partition))
        self._set((topic, ANY_PARTITION))

    def wake_topic(self, topic: str) -> None:
        """Wake who waits for anything of the topic: it has changed, or is deleted."""
        for key in [key for key in self if key[0] == topic]:
            self._set(key)

    def wake_all(self) -> None:
        for key in list(self):
            self._set(key)

    def _set(self, key: tuple[str, int]) -> None:
        for waiter in self.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)
