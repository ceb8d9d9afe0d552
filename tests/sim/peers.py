"""A simulated broker's way to the others: messages that the network of the world delivers."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tests.sim.network import Refusal, Silence
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import (
    ForwardOutcomeUnknown,
    ForwardRefused,
    decode_announcements,
)
from tidelog.storage.core.errors import Corrupt

if TYPE_CHECKING:
    from tests.sim.world import Broker, World

T = TypeVar("T")


class Peers:
    """One broker's way to the others."""

    def __init__(self, world: "World", address: str) -> None:
        self._world = world
        self._address = address

    async def forward(self, peer: Member, message: bytes) -> bytes:
        async def take(broker: "Broker") -> bytes:
            return await broker.log.cluster.peer_api.on_forward(message)

        return await self._ask(peer, take)

    async def announce(self, peer: Member, message: bytes) -> bytes:
        if self._world.loses_entries and any(entry.seq for entry in decode_announcements(message)):
            raise ForwardOutcomeUnknown("an announcement is lost")

        async def take_announcement(broker: "Broker") -> bytes:
            return broker.log.cluster.peer_api.on_announcements(message)

        return await self._ask(peer, take_announcement)

    async def read_object(self, peer: Member, message: bytes) -> bytes:
        async def read(broker: "Broker") -> bytes:
            return await broker.log.cluster.read_object(message)

        body = await self._ask(peer, read)
        draws = self._world.draws
        if not body or draws.random() >= self._world.air.wrong:
            return body
        return draws.choice([b"", body[: len(body) // 2], bytes(byte ^ 1 for byte in body)])

    async def _ask(self, peer: Member, call: "Callable[[Broker], Awaitable[T]]") -> T:
        try:
            if (self._address, peer.address) in self._world.cut_ways:
                raise Refusal("no route")
            return await self._world.ask(peer.address, call, is_repeatable=True)
        except Refusal as error:
            raise ForwardRefused(str(error)) from error
        except (Silence, Corrupt) as error:
            raise ForwardOutcomeUnknown(str(error)) from error
