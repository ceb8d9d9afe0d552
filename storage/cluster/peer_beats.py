"""Beats: a question to each live peer every half second. Liveness objects change more rarely.

Clients of Kafka's protocol connect to the brokers that Metadata names, so Metadata must not name a
killed broker for more than 2 s. The question is a message without announcements. A peer that is
about to stop refuses it. This is soft state: a wrong result costs a refresh of Metadata, or a
rebalance.
"""

import asyncio
import logging

from tidelog.storage.cluster.entry_announcer import PeerTransport
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import encode_announcements
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import TASK_ENDS

log = logging.getLogger("tidelog.members")

BEAT_S = 0.5
"""Interval of the questions to a peer."""
ANSWER_S = 1.0
"""Longest wait for an answer, with the connection. After both times together, a broker on a killed
machine counts as silent."""


class PeerBeats:
    """The questions of one broker, owned by one event loop. At most one to a peer is in flight."""

    def __init__(self, membership: Membership, clock: Clock, transport: PeerTransport) -> None:
        self._membership = membership
        self._clock = clock
        self._transport = transport
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Ask the peers. Does not return. A cancellation ends the questions in flight."""
        message = encode_announcements([])
        try:
            while True:
                for peer in self._membership.others:
                    if (task := self._asking.get(peer.id)) is None or task.done():
                        self._asking[peer.id] = asyncio.create_task(self._ask(peer, message))
                live = {peer.id for peer in self._membership.others}
                self._asking = {
                    peer_id: task
                    for peer_id, task in self._asking.items()
                    if peer_id in live or not task.done()
                }
                await asyncio.sleep(BEAT_S)
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, peer: Member, message: bytes) -> None:
        started_s = self._clock.boot_s()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._transport.announce(peer, message)
        except TASK_ENDS:
            raise
        except BaseException as error:  # no caller handles it
            if not isinstance(error, (LogError, TimeoutError)):
                log.critical("bug in a question to a peer", exc_info=error)
            # If this process was suspended, the answer may have arrived meanwhile.
            if self._clock.boot_s() - started_s < ANSWER_S + BEAT_S:
                why = str(error) or f"no answer within {ANSWER_S:g} s"
                self._membership.is_silent(peer, why)
        else:
            self._membership.answers(peer)
