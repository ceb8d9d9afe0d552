"""The brokers of one zone, which read each object of the tails once, for all of them.

The owner of an object is the first of the zone's reached brokers by rendezvous hash. It reads the
object from the store; the others ask it. Brokers may disagree about the owner: then both read the
object. An owner that does not answer, that refuses, or whose bytes are wrong is not asked for a
while, and the broker reads the store. A broker of an older version refuses.
"""

import asyncio
import logging

from tidelog.storage.cluster.liveness import Member, ranked
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import (
    ObjectRange,
    decode_object_range,
    encode_object_range,
)
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.wal.tail_objects import TailObjects

log = logging.getLogger("tidelog.members")

ANSWER_S = 1.0
"""Longest wait for an owner. A GET of a part takes 0.1 to 0.3 s."""
PAUSE_S = 10.0
"""Time for which an owner is not asked after it did not answer."""
REQUESTS_MAX = 16
"""Maximum number of requests to owners at the same time."""


class ZoneObjects:
    """The zone of one broker, as a source of objects (`ZoneReader`). Owned by one event loop."""

    def __init__(self, membership: Membership, clock: Clock, transport: PeerTransport) -> None:
        self._membership = membership
        self._clock = clock
        self._transport = transport
        self._paused: dict[str, float] = {}
        """By broker: the boot time until which it is not asked."""
        self._slots = asyncio.Semaphore(REQUESTS_MAX)

    async def read(self, key: str, start: int, length: int) -> Part | None:
        """Return bytes [start, start + length) of the object from its owner, or fewer at its end.

        Return None if this broker is the owner, or if the owner does not answer.
        """
        owner = self._owner(key)
        if owner is None:
            return None
        message = encode_object_range(ObjectRange(key, start, length))
        try:
            async with self._slots, asyncio.timeout(ANSWER_S):
                body = await self._transport.read_object(owner, message)
        except TASK_ENDS:
            raise
        except BaseException as error:  # the store has the object, too
            if not isinstance(error, (LogError, TimeoutError)):
                log.critical("bug in a request to a peer", exc_info=error)
            self._pause(owner, str(error) or f"no answer within {ANSWER_S:g} s")
            return None
        if len(body) > length:
            self._pause(owner, f"{len(body)} bytes of {key}, not {length}")
            return None
        return body

    def distrust(self, key: str) -> None:
        """Do not ask the object's owner for a while: its bytes were wrong."""
        if (owner := self._owner(key)) is not None:
            self._pause(owner, f"wrong bytes of {key}")

    def _owner(self, key: str) -> Member | None:
        """Return the owner of the object, or None if it is this broker."""
        me, now_s = self._membership.me, self._clock.boot_s()
        near = [
            peer
            for peer in self._membership.reached
            if peer.zone_name == me.zone_name and self._paused.get(peer.id, 0.0) <= now_s
        ]
        if not near:
            return None
        first = ranked(key, [me, *near])[0]
        return None if first.id == me.id else first

    def _pause(self, owner: Member, why: str) -> None:
        log.info("broker %s is not asked for objects for %g s: %s", owner.name, PAUSE_S, why)
        now_s = self._clock.boot_s()
        self._paused = {
            broker_id: until_s for broker_id, until_s in self._paused.items() if until_s > now_s
        }
        self._paused[owner.id] = now_s + PAUSE_S


async def answer_object_range(objects: TailObjects, message: Part) -> bytes:
    """Return the bytes that a broker of the zone asks for.

    Raises Corrupt for a message that is no such question; ObjectNotFound, Unavailable.
    """
    object_range = decode_object_range(message)
    return await objects.serve(object_range.key, object_range.start, object_range.length)
