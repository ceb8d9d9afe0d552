"""Which partitions of a topic have changed lately, for readers of all its partitions.

All readers of a topic share one object, so a commit costs the same for any number of them, and a
reader looks only at the partitions that have changed since it looked before. Pure.
"""

from collections import OrderedDict

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
        """Return the partitions of the changes after the first `count`, those that changed first
        first. Return None if all partitions may have changed."""
        if count < self._last_of_all:
            return None
        partitions = []
        for partition, change in reversed(self._last.items()):
            if change <= count:
                break
            partitions.append(partition)
        partitions.reverse()
        return partitions
