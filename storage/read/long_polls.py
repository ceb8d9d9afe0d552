"""Reads that wait for new records of partitions, or of all partitions of a topic."""

import asyncio
from collections.abc import Sequence

from tidelog.storage.core.errors import Unavailable

WOKEN_AT_ONCE = 50
"""Maximum number of reads of one partition that one turn of the event loop wakes. A woken read
costs up to 100 us, and other callbacks can run before the next turn."""

ANY_PARTITION = -1
"""A read with this value as partition waits for records of any partition of the topic. The topic
has one key for these reads, whatever the number of its partitions."""


class LongPolls(dict[tuple[str, int], set["asyncio.Future[None]"]]):
    """The waiting reads by topic and partition. Owned by the log's event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.is_refusing = False
        self._ends = 0

    async def wait(
        self,
        partitions: Sequence[tuple[str, int]],
        waiter: "asyncio.Future[None]",
        deadline: float,
    ) -> bool:
        """Wait until `wake` is called for one of the partitions, or a caller sets `waiter`. Return
        False if the loop's time reaches `deadline` first, or at `end_all`."""
        if self.is_refusing:
            return False
        ends = self._ends
        for key in partitions:
            self.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            for key in partitions:
                waiting = self.get(key)
                if waiting is not None:
                    waiting.discard(waiter)
                    if not waiting:
                        del self[key]
        return ends == self._ends

    def wake(self, key: tuple[str, int]) -> None:
        """Wake the reads that wait for this partition at the time of the call, WOKEN_AT_ONCE in
        each turn of the event loop."""
        waiting = self.get(key)
        if waiting:
            _wake(list(waiting))

    def wake_reads(self, topic: str, partition: int) -> None:
        """Wake the reads that wait for records of the partition, or of any partition of its
        topic."""
        self.wake((topic, partition))
        self.wake((topic, ANY_PARTITION))

    def wake_all(self, topic: str | None = None) -> None:
        """Wake all reads, or all reads of the topic if one is given."""
        for key in [key for key in self if topic in (None, key[0])]:
            self.wake(key)

    def check_open(self) -> None:
        """Raise Unavailable after the last `end_all`."""
        if self.is_refusing:
            raise Unavailable("this broker is shutting down: continue at another broker")

    def end_all(self, *, is_last: bool) -> None:
        """End all waits under way. If `is_last`, no read waits from now on."""
        self.is_refusing = self.is_refusing or is_last
        self._ends += 1
        self.wake_all()


def _wake(waiting: "list[asyncio.Future[None]]") -> None:
    for waiter in waiting[:WOKEN_AT_ONCE]:
        if not waiter.done():
            waiter.set_result(None)
    if len(waiting) > WOKEN_AT_ONCE:
        del waiting[:WOKEN_AT_ONCE]
        asyncio.get_running_loop().call_soon(_wake, waiting)
