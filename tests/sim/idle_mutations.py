"""Deliberate faults of idle clusters (DESIGN 6), for tests/sim/mutations.py."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from tidelog.storage.cluster.liveness import LivenessTracker
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import Beat
from tidelog.storage.cluster.peer_beats import PeerBeats
from tidelog.storage.wal.poll_pace import PollPace

IDLE = ("idle",)
Patch = tuple[Any, str, Any]


def _beats_without_numbers() -> list[Patch]:
    real = PeerBeats._beat

    def beat(self: PeerBeats) -> Beat:
        return msgspec.structs.replace(real(self), seq=0)

    return [(PeerBeats, "_beat", beat)]


def _quiet_never_polls() -> list[Patch]:
    return [(PollPace, "needed_s", lambda self: -math.inf)]


def _silence_is_agreement() -> list[Patch]:
    """A peer that does not answer keeps its last answer, however old."""

    def agreed_s(self: PeerBeats) -> float:
        return self._clock.boot_s()

    return [(PeerBeats, "agreed_s", agreed_s)]


def _objects_are_believed() -> list[Patch]:
    """An object counts for its broker's life, whatever its age, and no broker asks."""
    real = LivenessTracker.look

    def look(self: LivenessTracker, now_s: float, *arguments: Any, **named: Any) -> None:
        real(self, now_s, *arguments, **named)
        for key in self.listed:
            self.hear(key)

    return [(LivenessTracker, "look", look)]


def _old_objects_are_dead() -> list[Patch]:
    async def ask(*_: Any) -> None: ...

    return [(Membership, "_ask", ask), (Membership, "on_beat", lambda *_: None)]


def _doubt_is_not_told() -> list[Patch]:
    real = PeerBeats._beat

    def beat(self: PeerBeats) -> Beat:
        return msgspec.structs.replace(real(self), is_in_doubt=False)

    return [(PeerBeats, "_beat", beat)]


def _the_silent_are_forgotten() -> list[Patch]:
    """A broker that misses others is quiet as soon as they count as dead."""
    return [(Membership, "may_miss_brokers", property(lambda _: False))]


MUTATIONS: tuple[tuple[str, Callable[[], list[Patch]], tuple[str, ...], int], ...] = (
    ("a beat names no number", _beats_without_numbers, IDLE, 20),
    ("a poll that never comes while all is quiet", _quiet_never_polls, IDLE, 20),
    ("brokers that do not answer agree", _silence_is_agreement, IDLE, 20),
    ("an object counts as a live broker", _objects_are_believed, IDLE, 20),
    ("a broker that starts asks no other", _old_objects_are_dead, IDLE, 40),
    ("a broker does not tell that it doubts", _doubt_is_not_told, IDLE, 20),
)
