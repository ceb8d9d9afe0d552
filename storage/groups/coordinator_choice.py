"""The choice of the broker that coordinates a group.

Pure. Brokers may choose differently for a while; the term in the cluster state decides which broker
is the coordinator.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from tidelog.storage.cluster.liveness import weight


class Coordinators(Protocol):
    """Choice of the broker that coordinates a group."""

    @property
    def me(self) -> str:
        """The name of this process, which no other process had before."""

    def of(self, group_id: str, holder: str) -> str:
        """Return the group's coordinator.

        It is `holder`, which the cluster state names, while that is live and does not leave.
        """

    def has_released(self, holder: str) -> bool:
        """Return whether `holder` has announced that it no longer serves members of REST groups."""


class Rendezvous:
    """The choice among several brokers.

    The coordinator is the holder while it is live, else the live broker with the highest rendezvous
    hash. Brokers with the same view of live brokers agree. The groups of a failed or leaving broker
    spread over all other brokers.
    """

    def __init__(
        self,
        me: str,
        live: Callable[[], Iterable[str]],
        is_leaving: Callable[[], bool] = lambda: False,
        has_released: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`live` are the other brokers that are live and do not leave."""
        self.me = me
        self._live = live
        self._is_leaving = is_leaving
        self._has_released = has_released

    def of(self, group_id: str, holder: str) -> str:
        is_leaving = self._is_leaving()
        if holder == self.me and not is_leaving:
            return holder
        live = {*self._live()}
        if not (is_leaving and live):
            live.add(self.me)
        return holder if holder in live else max(live, key=lambda broker: weight(group_id, broker))

    def has_released(self, holder: str) -> bool:
        return self._has_released(holder)
