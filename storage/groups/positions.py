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
    """Offsets of one partition. `next` is the next offset to read. `delivered` is the end of the
    records that the instance certainly received. `committed` is `delivered` at the last commit. If
    the instance itself commits another offset, that offset stays committed until more records are
    delivered."""

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

    def __contains__(self, where: TopicIdPartition) -> bool:
        return where in self._held

    def next_of(self, where: TopicIdPartition) -> int | None:
        held = self._held.get(where)
        return None if held is None else held.next

    def begin(self, where: TopicIdPartition, offset: int) -> None:
        """Set the position to `offset`; nothing before it counts as delivered or due."""
        self._held[where] = Position(offset, offset, offset)

    def retain(self, owned: Iterable[TopicIdPartition]) -> None:
        """Drop partitions that are not in `owned`, because the instance must not commit their
        offsets."""
        kept = set(owned)
        for where in [where for where in self._held if where not in kept]:
            del self._held[where]

    def acknowledge(self) -> None:
        """Mark all records that were sent as delivered. Call this after the instance's next
        request."""
        for held in self._held.values():
            if held.delivered != held.next:
                held.delivered = held.next
                self.is_due = True

    def rewind(self) -> None:
        """Move to the end of the delivered records, because the last response was lost."""
        for held in self._held.values():
            held.next = held.delivered

    @property
    def has_undelivered(self) -> bool:
        return any(held.next != held.delivered for held in self._held.values())

    def deliver(self, where: TopicIdPartition, offset: int) -> None:
        """Mark sent records before `offset` as delivered, because the instance commits this
        offset."""
        held = self._held.get(where)
        if held is not None and held.delivered < offset <= held.next:
            held.delivered = offset

    def advance(self, where: TopicIdPartition, before: int, after: int) -> None:
        """Move `next` from `before` to `after` when records are sent, unless a seek moved it."""
        held = self._held.get(where)
        if held is not None and held.next == before:
            held.next = after

    def due(self) -> dict[TopicIdPartition, int]:
        """Return delivered offsets that are not committed."""
        found = {
            where: held.delivered
            for where, held in self._held.items()
            if held.delivered != held.committed
        }
        self.is_due = bool(found)
        return found

    def commit(self, partitions: Iterable[TopicIdPartition]) -> dict[TopicIdPartition, int]:
        """Mark delivered offsets as committed; return the previous values for `uncommit`."""
        before = {}
        for where in partitions:
            held = self._held.get(where)
            if held is not None:
                before[where] = held.committed
                held.committed = held.delivered
        return before

    def uncommit(self, before: Mapping[TopicIdPartition, int]) -> None:
        """Restore the values from before a failed commit: the offsets are due again."""
        for where, offset in before.items():
            held = self._held.get(where)
            if held is not None:
                held.committed = offset
                self.is_due = True
