"""Where a consumer instance stands: what it gets next, what it has, what of that is committed.

Soft, pure, owned by the instance's coordinator (storage.consumers). What a read returned counts as
delivered when the instance's next read comes: until then its answer may be lost, and a coordinator
that dies leaves the last commit to go on from. At least once, therefore: what is committed was
delivered, and what was not delivered is not committed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.assignors import Owned


@dataclass(slots=True)
class Position:
    """Offsets of one partition. `next` is what the instance reads next, `delivered` the end of what
    it certainly has, `committed` what that was at the last commit: what an instance commits itself,
    be it less or more, stands until it has got more."""

    next: int
    delivered: int
    committed: int


class Positions:
    """Of one instance; of partitions that it was assigned, and that were looked up so far."""

    def __init__(self) -> None:
        self.is_due = False
        """False: nothing is delivered and not committed. Thousands are asked each second."""
        self._held: dict[Owned, Position] = {}

    def __contains__(self, where: Owned) -> bool:
        return where in self._held

    def next_of(self, where: Owned) -> int | None:
        held = self._held.get(where)
        return None if held is None else held.next

    def begin(self, where: Owned, offset: int) -> None:
        """Start, or go on, from here; nothing before it counts as read."""
        self._held[where] = Position(offset, offset, offset)

    def retain(self, owned: Iterable[Owned]) -> None:
        """What is no longer assigned is another's: not even a commit of it is ours to make."""
        kept = set(owned)
        for where in [where for where in self._held if where not in kept]:
            del self._held[where]

    def forget(self, where: Owned) -> None:
        """Look it up again."""
        self._held.pop(where, None)

    def acknowledge(self) -> None:
        """The instance came again: it has what it was sent."""
        for held in self._held.values():
            if held.delivered != held.next:
                held.delivered = held.next
                self.is_due = True

    def advance(self, where: Owned, before: int, after: int) -> None:
        """Records from `before` up to `after` were sent, unless it was moved meanwhile."""
        held = self._held.get(where)
        if held is not None and held.next == before:
            held.next = after

    def due(self) -> dict[Owned, int]:
        """What is delivered and not committed."""
        found = {
            where: held.delivered
            for where, held in self._held.items()
            if held.delivered != held.committed
        }
        self.is_due = bool(found)
        return found

    def commit(self, partitions: Iterable[Owned]) -> dict[Owned, int]:
        """Offsets of these were handed to the log; what there was before, for `uncommit`."""
        before = {}
        for where in partitions:
            held = self._held.get(where)
            if held is not None:
                before[where] = held.committed
                held.committed = held.delivered
        return before

    def uncommit(self, before: Mapping[Owned, int]) -> None:
        """They did not get there: they are due again."""
        for where, offset in before.items():
            held = self._held.get(where)
            if held is not None:
                held.committed = offset
                self.is_due = True
