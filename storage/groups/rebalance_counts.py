"""The rebalances of one group, as its coordinator saw them.

It counts them for each reason, and how long it took until all members read again. Pure: callers
give the times.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from tidelog.storage.core.actions import AnyAction, ExpireMember, LeaveGroup, Subscribe
from tidelog.storage.state.group_state import Inputs

JOIN, LEAVE, EXPIRY = "join", "leave", "expiry"
SUBSCRIPTION, PARTITIONS = "subscription", "partitions"
REASONS = (EXPIRY, LEAVE, JOIN, SUBSCRIPTION, PARTITIONS)
"""If a rebalance has several reasons, `reason_of` returns one."""


class Rebalances:
    """Counts of rebalances by reason, and the members that have not read since the last one."""

    def __init__(self, inputs: Inputs, generation: int) -> None:
        self.counts: Counter[str] = Counter()
        self.waiting: set[str] = set()
        """Subscribed members that have not read in the current generation."""
        self._inputs = inputs
        self._generation = generation
        self._since_s = 0.0
        self._last_s = 0.0

    def see(
        self,
        inputs: Inputs,
        generation: int,
        subscribed: Iterable[str],
        actions: Collection[AnyAction],
        now_s: float,
    ) -> None:
        """Compare the group with its last known state.

        `actions` are the actions on the group in the entry that changed the group. If all members
        had read since the last rebalance, begin to measure the time until all members read again.
        """
        if generation != self._generation:
            self.counts[reason_of(self._inputs, inputs, actions)] += 1
            self._inputs, self._generation = inputs, generation
            if not self.waiting:
                self._since_s = now_s
            self.waiting = set(subscribed)
        elif self.waiting:
            self.waiting.intersection_update(subscribed)  # another member may have replaced one
        else:
            return
        if not self.waiting:
            self._last_s = now_s - self._since_s

    def has_read(self, member_id: str, now_s: float) -> None:
        """Note a read of the member in the current generation."""
        if member_id in self.waiting:
            self.waiting.discard(member_id)
            if not self.waiting:
                self._last_s = now_s - self._since_s

    def seconds(self, now_s: float) -> float:
        """Return how long it took after a rebalance until all members read again.

        If some have not read yet, return the time until now.
        """
        return now_s - self._since_s if self.waiting else self._last_s


def reason_of(old_inputs: Inputs, new_inputs: Inputs, actions: Iterable[AnyAction]) -> str:
    """Return why a group was rebalanced, from its inputs before and after.

    `actions` are the entry's actions on the group. They show whether a member whose subscription
    ended has left or expired.
    """
    had, has = old_inputs.subscriptions.keys(), new_inputs.subscriptions.keys()
    kinds = {type(action) for action in actions}
    if had - has:
        if ExpireMember in kinds:
            return EXPIRY
        return LEAVE if LeaveGroup in kinds else SUBSCRIPTION
    if has - had:
        return JOIN
    return SUBSCRIPTION if Subscribe in kinds else PARTITIONS
