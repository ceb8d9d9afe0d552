"""The cluster, as one of its brokers sees it: the live brokers, their messages and their secret."""

from typing import NamedTuple

from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.secret import cluster_secret
from tidelog.storage.cluster.sequencer import Sequencer
from tidelog.storage.cluster.zone_objects import answer_object_range
from tidelog.storage.core.model import Part
from tidelog.storage.store.start_retry import StartRetry
from tidelog.storage.wal.tail_objects import TailObjects


class Members(NamedTuple):
    """The live brokers that are not leaving: `peers` answer this broker, `live` has all others."""

    me: Member
    peers: list[Member]
    sequencer: Member
    live: list[Member]

    @property
    def is_sequencer(self) -> bool:
        return self.sequencer.id == self.me.id


class Cluster:
    """The brokers of a cluster. Lives as long as the broker that owns it."""

    def __init__(
        self,
        membership: Membership,
        sequencer: Sequencer,
        tail_objects: TailObjects,
        retry: StartRetry,
    ) -> None:
        self.peer_api = sequencer
        """The handler of messages from peers, which prove that they can read the store."""
        self._membership = membership
        self._tail_objects = tail_objects
        self._retry = retry

    def members(self) -> Members:
        """Return the live brokers that this broker knows now."""
        membership, me = self._membership, self._membership.me
        return Members(me, membership.reached, self.peer_api.target or me, membership.others)

    async def read_object(self, message: Part) -> bytes:
        """Return the bytes of an object of the tails that a peer asks for.

        Raises Corrupt for another message; ObjectNotFound, Unavailable.
        """
        return await answer_object_range(self._tail_objects, message)

    def owns(self, task: str) -> bool:
        """Return whether this broker does the task, such as the upkeep of a topic's id.

        Brokers may disagree for a while, so a task must be right if several do it, or none.
        """
        return self._membership.is_first_for(task)

    async def secret(self) -> bytes:
        """Return the cluster's secret: 32 bytes, the same on every broker. Raises StoreUnfit."""
        membership = self._membership
        return await self._retry.until_done(
            lambda: cluster_secret(membership.store, membership.clock)
        )
