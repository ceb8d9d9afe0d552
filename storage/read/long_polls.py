"""Reads that wait for new records of partitions, or of all partitions of a topic.

All readers of a topic share one `TopicChanges`, so a commit costs the same for any number of them,
and a reader looks only at the partitions that have changed since it looked before.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

from tidelog.storage.core.errors import Unavailable

NO_CHANGE = -1
"""The count of a reader that has looked at no partition yet."""


class TopicChanges:
    """The partitions of one topic, in the order in which they last got records."""

    def __init__(self) -> None:
        self.count = 0
        """Number of changes so far."""
        self._last: OrderedDict[int, int] = OrderedDict()
        """By partition: the number of its last change."""
        self._last_of_all = 0
        """Number of the last change that could be one of any partition."""

    def add(self, partition: int) -> None:
        """Count a change of a partition: it has new records."""
        self.count += 1
        self._last[partition] = self.count
        self._last.move_to_end(partition)

    def add_all(self) -> None:
        """Count a change of all partitions, and perhaps of their number or of the topic."""
        self.count = self._last_of_all = self.count + 1

    def since(self, count: int) -> list[int] | None:
        """Return the partitions of the changes after the first `count`, earlier changes first.

        Return None if all partitions may have changed.
        """
        if count < self._last_of_all:
            return None
        partitions = []
        for partition, change in reversed(self._last.items()):
            if change <= count:
                break
            partitions.append(partition)
        partitions.reverse()
        return partitions


WOKEN_AT_ONCE = 16
"""Maximum number of reads that one turn of the event loop wakes. A woken read costs 0.1 to 0.5 ms,
and other callbacks can run before the next turn."""

ANY_PARTITION = -1
"""A read with this value as partition waits for records of any partition of the topic. The topic
has one key for these reads, whatever the number of its partitions."""


class LongPolls(dict[tuple[str, int], dict["asyncio.Future[None]", None]]):
    """The waiting reads by topic and partition, in the order in which they began to wait.

    Owned by the log's event loop.

    A read that is to be woken leaves its partition and joins one queue for all partitions. Each
    turn of the event loop wakes WOKEN_AT_ONCE reads of the queue, the first ones first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_refusing = False
        self._changes: WeakValueDictionary[str, TopicChanges] = WeakValueDictionary()
        """By topic, while a reader holds them."""
        self._ends = 0
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._woken = 0
        """Number of reads that this turn of the event loop has woken."""
        self._is_turn_planned = False

    @property
    def has_readers(self) -> bool:
        """Whether a read waits, or a reader holds the changes of a topic."""
        return bool(self) or bool(self._changes)

    def changes_of(self, topic: str) -> TopicChanges:
        """Return the topic's changes. They are counted while the caller holds the object."""
        changes = self._changes.get(topic)
        if changes is None:
            changes = self._changes[topic] = TopicChanges()
        return changes

    async def wait(
        self,
        partitions: Sequence[tuple[str, int]],
        waiter: "asyncio.Future[None]",
        deadline: float,
    ) -> bool:
        """Wait until `wake` is called for one of the partitions, or a caller sets `waiter`.

        Return False if the loop's time reaches `deadline` first, or at `end_all`.
        """
        if self.is_refusing:
            return False
        ends = self._ends
        for key in partitions:
            self.setdefault(key, {})[waiter] = None
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._queue.pop(waiter, None)
            for key in partitions:
                waiting = self.get(key)
                if waiting is not None:
                    waiting.pop(waiter, None)
                    if not waiting:
                        del self[key]
        return ends == self._ends

    async def turn(self) -> None:
        """Wait as a read that is woken now, unless this turn of the event loop has room.

        The read is behind the other ones.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._queue[waiter] = None
        self._wake_first()
        try:
            await waiter
        finally:
            self._queue.pop(waiter, None)

    def wake(self, key: tuple[str, int]) -> None:
        """Wake the reads that wait for this partition now, after the reads in the queue."""
        waiting = self.pop(key, None)
        if waiting:
            self._queue.update(waiting)
            self._wake_first()

    def wake_reads(self, topic: str, partition: int) -> None:
        """Wake the reads that wait for the partition, or for any partition of its topic."""
        changes = self._changes.get(topic)
        if changes is not None:
            changes.add(partition)
        self.wake((topic, partition))
        self.wake((topic, ANY_PARTITION))

    def wake_all(self, topic: str | None = None) -> None:
        """Wake all reads, or all reads of the topic if one is given."""
        for name, changes in list(self._changes.items()):
            if topic in (None, name):
                changes.add_all()
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

    def _wake_first(self) -> None:
        """Wake the first reads of the queue, as many as this turn of the event loop may wake."""
        if self._queue and not self._is_turn_planned:
            self._is_turn_planned = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        while self._queue and self._woken < WOKEN_AT_ONCE:
            waiter, _ = self._queue.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                self._woken += 1

    def _begin_turn(self) -> None:
        self._woken, self._is_turn_planned = 0, False
        self._wake_first()
