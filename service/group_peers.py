"""The way of consumer instances' requests between brokers: on the port that brokers have for each
other (service.peers), to whom the cluster state names as a group's coordinator.

A coordinator that cannot be reached has not got the request. One that was reached and does not
answer is waited for until it counts as dead, or answers: nobody else knows what it did.
"""

import asyncio

from service.group_forwarding import CONFIRM_S, Unreached
from service.peer_client import GROUP_CONFIRM, GROUP_REQUEST, HttpPeers
from storage.errors import Unavailable
from storage.handover import NoAnswer, NotTaken
from storage.members import Member
from storage.membership import Membership

LOOK_S = 0.5
"""How often a request that waits for its answer looks whether the coordinator still lives."""


class GroupPeers:
    """Owned by one event loop; lives as long as the broker."""

    def __init__(self, membership: Membership, peers: HttpPeers) -> None:
        self._membership = membership
        self._peers = peers

    async def request(self, coordinator: str, message: bytes) -> bytes:
        peer = self._peer(coordinator)
        asking = asyncio.create_task(self._peers.post(peer, GROUP_REQUEST, message))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=LOOK_S)
                if not asking.done() and not self._lives(coordinator):
                    raise Unavailable(f"broker {peer.name}, the group's coordinator, is silent")
            return asking.result()
        except NotTaken as error:
            raise Unreached(str(error)) from error
        except NoAnswer as error:
            raise Unavailable(f"the group's coordinator gave no answer: {error}") from error
        finally:
            asking.cancel()

    async def confirm(self, coordinator: str, ticket: bytes) -> None:
        peer = self._peer(coordinator)
        try:
            async with asyncio.timeout(CONFIRM_S):
                _ = await self._peers.post(peer, GROUP_CONFIRM, ticket)
        except (NotTaken, NoAnswer, TimeoutError) as error:
            raise Unreached(str(error)) from error

    def _peer(self, coordinator: str) -> Member:
        for peer in self._membership.others:
            if peer.id == coordinator:
                return peer
        raise Unreached(f"no broker {coordinator} lives")

    def _lives(self, coordinator: str) -> bool:
        return any(peer.id == coordinator for peer in self._membership.others)
