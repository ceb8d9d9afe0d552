"""The held members of groups (storage.groups.join_backoff), as any broker can find them.

A group's coordinator has the list in memory; the other brokers ask the coordinator.
"""

import logging

import msgspec

from tidelog.service.peers.forwarding import Forwarder, Unreached
from tidelog.service.security.caller import CallerRights
from tidelog.storage.core.errors import LogError
from tidelog.storage.groups.join_backoff import HeldMember
from tidelog.storage.groups.rest_groups import RestGroups

log = logging.getLogger("tidelog.groups")


class HeldMembers:
    """Finds the held members of a group, here or at the broker that coordinates it.

    One per broker. Without a `forwarder`, the broker has no peers and coordinates all groups.
    """

    def __init__(self, groups: RestGroups, forwarder: Forwarder | None) -> None:
        self.groups = groups
        self.forwarder = forwarder

    def here(self, group_id: str) -> bytes:
        """Return the held members of a group that this broker coordinates, encoded for `of`."""
        return msgspec.json.encode(self.groups.members.held(group_id))

    async def of(self, group_id: str, rights: CallerRights) -> list[HeldMember] | None:
        """Return the held members of a group. If its coordinator does not answer, return None."""
        coordinator = self.groups.coordinator.other_broker_of(group_id)
        if self.forwarder is None or coordinator is None:
            return self.groups.members.held(group_id)
        try:
            path = f"/consumers/{group_id}/held-members"
            answer = await self.forwarder.get(rights, coordinator, path)
            return msgspec.json.decode(answer, type=list[HeldMember])
        except (Unreached, LogError, msgspec.MsgspecError) as error:
            log.info("held members of group %s are unknown: %s", group_id, error)
            return None
