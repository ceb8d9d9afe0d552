"""Positions of a consumer instance: its next offsets, delivered offsets and committed offsets.

Pure, in memory only, owned by the instance's coordinator (groups.coordinator). Records of a read
count as delivered when the instance's next request arrives, if the response has arrived then; if
not, they are read again. Only delivered offsets are committed, so delivery is at least once.
**On a crash** of the coordinator: the next coordinator continues at the last commit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidelog.storage.core.model import TopicIdPartition


@dataclass(slots=True)
class Position:
    """Offsets of one partition.

    `next` is the next offset to read. `delivered` is the end of the records that the instance
    certainly received. `committed` is `delivered` at the last commit. If the instance itself
    commits another offset, that offset stays committed until more records are delivered.
    """

    next: int
    delivered: int
    committed: int


class Positions:
    """The positions of one instance, in assigned partitions whose start was found already."""

    def __init__(self) -> None:
        self.is_due = False
        """If False, `due` returns nothing. To read this flag is faster than to call `due`, and
        thousands of instances are checked each second."""
        self._held: dict[TopicIdPartition, Position] = {}

    def __contains__(self, partition: TopicIdPartition) -> bool:
        return partition in self._held

    def next_of(self, partition: TopicIdPartition) -> int | None:
        position = self._held.get(partition)
        return None if position is None else position.next

    def begin(self, partition: TopicIdPartition, offset: int) -> None:
        """Set the position to `offset`; nothing before it counts as delivered or due."""
        self._held[partition] = Position(offset, offset, offset)

    def retain(self, owned_partitions: Iterable[TopicIdPartition]) -> None:
        """Drop partitions that the member does not own: it must not commit their offsets."""
        kept_partitions = set(owned_partitions)
        for partition in [
            partition for partition in self._held if partition not in kept_partitions
        ]:
            del self._held[partition]

    def acknowledge(self) -> None:
        """Mark all records that were sent as delivered.

        Call this after the instance's next request.
        """
        for position in self._held.values():
            if position.delivered != position.next:
                position.delivered = position.next
                self.is_due = True

    def rewind(self) -> None:
        """Move to the end of the delivered records, because the last response was lost."""
        for position in self._held.values():
            position.next = position.delivered

    @property
    def has_undelivered(self) -> bool:
        return any(position.next != position.delivered for position in self._held.values())

    def deliver(self, partition: TopicIdPartition, offset: int) -> None:
        """Mark sent records before `offset` as delivered: the instance commits this offset."""
        position = self._held.get(partition)
        if position is not None and position.delivered < offset <= position.next:
            position.delivered = offset

    def advance(self, partition: TopicIdPartition, old_next: int, new_next: int) -> None:
        """Move `next` to `new_next` when records are sent, unless a seek moved it meanwhile."""
        position = self._held.get(partition)
        if position is not None and position.next == old_next:
            position.next = new_next

    def due(self) -> dict[TopicIdPartition, int]:
        """Return delivered offsets that are not committed."""
        offsets = {
            partition: position.delivered
            for partition, position in self._held.items()
            if position.delivered != position.committed
        }
        self.is_due = bool(offsets)
        return offsets

    def commit(self, partitions: Iterable[TopicIdPartition]) -> dict[TopicIdPartition, int]:
        """Mark delivered offsets as committed; return the previous values for `uncommit`."""
        old_positions = {}
        for partition in partitions:
            position = self._held.get(partition)
            if position is not None:
                old_positions[partition] = position.committed
                position.committed = position.delivered
        return old_positions

    def uncommit(self, old_positions: Mapping[TopicIdPartition, int]) -> None:
        """Restore the values from before a failed commit: the offsets are due again."""
        for partition, offset in old_positions.items():
            position = self._held.get(partition)
            if position is not None:
                position.committed = offset
                self.is_due = True
