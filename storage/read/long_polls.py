"""Reads that wait for new records of partitions."""

import asyncio
from collections.abc import Sequence

WOKEN_AT_ONCE = 50
"""A woken read costs up to 100 us. Other callbacks of the event loop run between two groups."""


class LongPolls(dict[tuple[str, int], set["asyncio.Future[None]"]]):
    """The waiting reads by topic and partition. Owned by the log's event loop."""

    async def wait(
        self,
        partitions: Sequence[tuple[str, int]],
        waiter: "asyncio.Future[None]",
        deadline: float,
    ) -> bool:
        """Wait until `wake` names one of the partitions, or a caller sets `waiter`. Return False if
        the loop's time reaches `deadline` first."""
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
        return True

    def wake(self, key: tuple[str, int]) -> None:
        """Wake the reads that wait for the partition now, WOKEN_AT_ONCE in each turn of the event
        loop."""
        waiting = self.get(key)
        if waiting:
            _wake(list(waiting))


def _wake(waiting: "list[asyncio.Future[None]]") -> None:
    for waiter in waiting[:WOKEN_AT_ONCE]:
        if not waiter.done():
            waiter.set_result(None)
    if len(waiting) > WOKEN_AT_ONCE:
        del waiting[:WOKEN_AT_ONCE]
        asyncio.get_running_loop().call_soon(_wake, waiting)
