"""Who lives: liveness objects in, live brokers out; and who of them commits for all.

Pure. A broker overwrites its object every few seconds; that its line in the listing changes is its
beat. Silence is counted by the observer's own clock and only while it looks: the clocks of two
machines are never compared, and an observer that slept, or could not list, blames nobody for it.
What is decided here is for speed alone: two brokers may disagree on it for as long as they like.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from storage.objectstore import ObjectInfo

PROTOCOL = 1
"""Of what brokers say to each other; one that speaks another is left alone."""
GAP_FACTOR = 2.0
"""Between two looks no more than so many intervals count as silence."""


class Member(msgspec.Struct, frozen=True):
    """`brokers/<id>.json`. `id` is the process's own, drawn at its start; `name` what people call
    it. `token` is what a peer must show at `address`: who can read the bucket is a broker."""

    id: str
    name: str
    address: str
    token: str
    started_ms: int
    port: int = 0
    """Where clients find it, on the host of `address`; 0 is not known."""
    protocol: int = PROTOCOL
    beat: int = 0

    @property
    def number(self) -> int:
        """The broker id of Kafka's dialects, which is a number; 1 is whoever answers."""
        return 2 + int(self.id[:7], 16)


class MembershipSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    heartbeat_interval_s: float = 5.0
    member_timeout_s: float = 15.0
    """So long without a beat, and a broker counts as dead."""
    sweep_after_s: float = 3600.0
    """So long, and anybody removes its object."""


class _Seen(NamedTuple):
    line: tuple[int, int]
    silent_s: float


class MemberView:
    """What one observer makes of successive listings of `brokers/`."""

    def __init__(self, settings: MembershipSettings) -> None:
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float, listing: Iterable[ObjectInfo]) -> None:
        """A listing that was asked for at boot time `now_s`."""
        infos = list(listing)
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        gap_s = min(gap_s, GAP_FACTOR * self._settings.heartbeat_interval_s)
        newest_ms = max((info.modified_ms for info in infos), default=0)
        seen: dict[str, _Seen] = {}
        for info in infos:
            line = (info.modified_ms, info.size)
            known = self._seen.get(info.key)
            if known is None:
                # Both times are the store's: what was old when we first looked is not alive.
                seen[info.key] = _Seen(line, (newest_ms - info.modified_ms) / 1000)
            elif known.line != line:
                seen[info.key] = _Seen(line, 0.0)
            else:
                seen[info.key] = _Seen(line, known.silent_s + gap_s)
        self._seen = seen
        self._looked_s = now_s

    @property
    def live(self) -> list[str]:
        """Keys of those whose beat is young enough."""
        timeout_s = self._settings.member_timeout_s
        return [key for key, seen in self._seen.items() if seen.silent_s < timeout_s]

    @property
    def forgotten(self) -> list[str]:
        """Keys of those who have been silent for so long that they may be swept."""
        after_s = self._settings.sweep_after_s
        return [key for key, seen in self._seen.items() if seen.silent_s >= after_s]


def ranked(cluster_id: str, members: Iterable[Member]) -> list[Member]:
    """By rendezvous hash, the sequencer first: where brokers agree on who lives they agree on this,
    and when one comes or goes the others keep their order."""
    return sorted(members, key=lambda member: _weight(cluster_id, member.id), reverse=True)


def _weight(cluster_id: str, member_id: str) -> bytes:
    return hashlib.blake2b(f"{cluster_id}/{member_id}".encode(), digest_size=16).digest()


def first_trusted(members: Sequence[Member], suspects: Mapping[str, object]) -> Member | None:
    """The first in rank who is not suspected."""
    return next((member for member in members if member.id not in suspects), None)
