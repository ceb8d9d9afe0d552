"""Beats: a question to each live peer every half second, and what the answers agree on.

Clients of Kafka's protocol connect to the brokers that Metadata names, so Metadata must not name a
killed broker for more than 2 s. A peer that is about to stop refuses the question.

Question and answer name the newest entry that the broker knows, so a lost announcement costs half a
second. While all live brokers answer each other and know the same brokers, all is quiet: no broker
can have a commit that the others do not hear of, except one whose existence no other knows, and a
program that is no broker. So the store is read and written rarely (`Log.poll`, `Membership.run`).

This is soft state: a wrong result costs a refresh of Metadata, or a rebalance, or the time until
the next poll. No read that must see each acknowledged record relies on it (I3).
"""

import asyncio
import logging
import math
from typing import NamedTuple, Protocol

from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.membership import ANSWER_S, Membership
from tidelog.storage.cluster.messages import (
    QUESTION,
    Beat,
    decode_beat,
    encode_beat,
    encode_question,
)
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import TASK_ENDS

log = logging.getLogger("tidelog.members")

BEAT_S = 0.5
"""Interval of the questions to a peer. After it and ANSWER_S together, a broker on a killed machine
counts as silent."""
AGREED_S = 2 * BEAT_S
"""The brokers agree if each has answered a question that is not older than this."""


class NewestEntry(Protocol):
    """The part of a WAL view that beats need."""

    @property
    def seq(self) -> int: ...

    def on_newer(self, seq: int) -> None: ...


class _Agreement(NamedTuple):
    asked_s: float
    beat: Beat


class PeerBeats:
    """The questions of one broker, owned by one event loop. At most one to a peer is in flight."""

    def __init__(
        self, membership: Membership, clock: Clock, transport: PeerTransport, wal: NewestEntry
    ) -> None:
        self._membership = membership
        self._clock = clock
        self._transport = transport
        self._wal = wal
        self._is_running = False
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, _Agreement] = {}
        """By live peer: its last answer, unless a later question had none."""

    async def run(self) -> None:
        """Ask the peers. Does not return. A cancellation ends the questions in flight."""
        self._is_running = True
        try:
            while True:
                self._forget_stopped()
                for peer in self._membership.others:
                    if (task := self._asking.get(peer.id)) is None or task.done():
                        self._asking[peer.id] = asyncio.create_task(self._ask(peer))
                await asyncio.sleep(BEAT_S)
        finally:
            self._is_running = False
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def agreed_s(self) -> float:
        """Return the boot time since which the live brokers agree with this one.

        Each has answered a question since then: it knew no entry that this broker does not know,
        and the same brokers, and did not doubt any. -inf: they do not agree.
        """
        if not self._is_running or self._membership.may_miss_brokers:
            return -math.inf
        oldest_s = self._clock.boot_s()
        for peer in self._membership.others:
            answer = self._answers.get(peer.id)
            if answer is None or not self._agrees(answer.beat):
                return -math.inf
            oldest_s = min(oldest_s, answer.asked_s)
        return oldest_s

    def _agrees(self, beat: Beat) -> bool:
        is_known = beat.members == self._membership.members_hash
        return is_known and beat.seq <= self._wal.seq and not beat.is_in_doubt

    def is_quiet(self) -> bool:
        """Return whether all live brokers agree now."""
        return self.agreed_s() >= self._clock.boot_s() - AGREED_S

    def on_untold(self) -> None:
        """Handle an entry that no live broker announced: a broker may be new."""
        self._membership.look_soon()

    def on_beat(self, message: Part) -> bytes:
        """Handle a peer's question, and return the answer. Raises Corrupt."""
        beat = decode_beat(message)
        self._membership.on_beat(beat.broker_id)
        self._learn(beat)
        return encode_beat(self._beat())

    def _beat(self) -> Beat:
        membership, since_s = self._membership, self._clock.boot_s() - AGREED_S
        is_in_doubt = membership.may_miss_brokers or not all(
            peer.id in self._answers and self._answers[peer.id].asked_s >= since_s
            for peer in membership.others
        )
        return Beat(membership.me.id, self._wal.seq, membership.members_hash, is_in_doubt)

    def _learn(self, beat: Beat) -> None:
        if beat.seq > self._wal.seq:
            self._wal.on_newer(beat.seq)

    def _forget_stopped(self) -> None:
        live = {peer.id for peer in self._membership.others}
        self._asking = {
            peer_id: task
            for peer_id, task in self._asking.items()
            if peer_id in live or not task.done()
        }
        self._answers = {
            peer_id: answer for peer_id, answer in self._answers.items() if peer_id in live
        }

    async def _ask(self, peer: Member) -> None:
        started_s = self._clock.boot_s()
        message = encode_question(self._beat()) if peer.writes_rarely else QUESTION
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._transport.announce(peer, message)
            if peer.writes_rarely:
                beat = decode_beat(answer)
                self._answers[peer.id] = _Agreement(started_s, beat)
                self._learn(beat)
        except TASK_ENDS:
            raise
        except BaseException as error:  # no caller handles it
            if not isinstance(error, (LogError, TimeoutError)):
                log.critical("bug in a question to a peer", exc_info=error)
            self._answers.pop(peer.id, None)
            # If this process was suspended, the answer may have arrived meanwhile.
            if self._clock.boot_s() - started_s < ANSWER_S + BEAT_S:
                why = str(error) or f"no answer within {ANSWER_S:g} s"
                self._membership.is_silent(peer, why)
        else:
            self._membership.answers(peer)
